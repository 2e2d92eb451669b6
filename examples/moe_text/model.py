"""A decoder of a few layers whose feed-forward part is a mixture of experts, or one dense network of equal FLOP.

    bytes (B, T) -> embedding -> layers x [ x + attention(norm(x)),  x + feed_forward(norm(x)) ] -> norm -> logits

With ops "camox" the mixture is cx.nn.TokenMoE and q and k are rotated by cx.rope; with "torch" both are written in
stock PyTorch. The names of the parameters are the same, so that a checkpoint of one op set loads into the other.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ..common.bdh import check_ops

VOCABULARY = 256
THETA = 10000.0
FEED_FORWARDS = ("moe", "dense")
BALANCES = ("switch", "bias", "none")


@dataclass
class Sizes:
    """What the model is made of. balance: how experts are kept equally busy, see README.md."""

    feed_forward: str = "moe"
    ops: str = "camox"
    balance: str = "switch"
    dim: int = 128
    num_heads: int = 4
    num_layers: int = 3
    num_experts: int = 16
    top_k: int = 2
    hidden: int = 128
    shared_hidden: int = 128

    @property
    def dense_hidden(self):
        """Width of the dense network that multiplies as often for a token as the experts, the shared one, the router.

        A SwiGLU network of width H takes 3 * dim * H multiplications, the router dim * num_experts.
        """
        return self.top_k * self.hidden + self.shared_hidden + round(self.num_experts / 3)


class Dense(nn.Module):
    """SwiGLU network of all tokens."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.first = nn.Linear(dim, 2 * hidden, bias=False)
        self.second = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.second(swiglu(self.first(x))), x.new_zeros(()), None


def swiglu(h):
    gate, value = h.chunk(2, -1)
    return F.silu(gate) * value


class PlainTokenMoE(nn.Module):
    """cx.nn.TokenMoE in stock PyTorch: rows sorted by expert, a product per expert, results added where they belong."""

    def __init__(self, dim, hidden, num_experts, top_k, *, shared_hidden=None, aux_loss=None, router_bias=False):
        super().__init__()
        self.num_experts, self.top_k, self.aux_loss = num_experts, top_k, aux_loss
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w_in = uniform(num_experts, dim, 2 * hidden)
        self.w_out = uniform(num_experts, hidden, dim)
        self.shared_in = uniform(dim, 2 * shared_hidden) if shared_hidden else None
        self.shared_out = uniform(shared_hidden, dim) if shared_hidden else None
        self.register_buffer("router_bias", torch.zeros(num_experts) if router_bias else None)
        self.register_buffer("expert_load", torch.zeros(num_experts) if router_bias else None, persistent=False)

    def forward(self, x):
        rows = x.flatten(0, -2)
        logits = self.router(rows)
        probabilities = logits.softmax(1)
        if self.router_bias is None:
            weights, experts = logits.topk(self.top_k)
        else:
            experts = (probabilities.detach() + self.router_bias).topk(self.top_k).indices
            weights = logits.gather(1, experts)
        order = experts.flatten().argsort(stable=True)
        source = order // self.top_k
        counts = experts.flatten().bincount(minlength=self.num_experts)
        parts = rows[source].split(counts.tolist())
        mixed = torch.cat([swiglu(part @ self.w_in[e]) @ self.w_out[e] for e, part in enumerate(parts)])
        weighted = mixed * weights.softmax(1).flatten()[order, None]
        output = torch.zeros_like(rows).index_add(0, source, weighted)
        if self.shared_in is not None:
            output = output + swiglu(rows @ self.shared_in) @ self.shared_out
        if self.router_bias is not None and self.training:
            self.expert_load += counts
        aux_loss = logits.new_zeros(())
        if self.aux_loss == "switch":
            aux_loss = self.num_experts * (counts / counts.sum() * probabilities.mean(0)).sum()
        return output.view(x.shape), aux_loss, {"top_k_indices": experts, "expert_usage": counts.float()}

    @torch.no_grad()
    def update_router_bias(self, rate):
        self.router_bias += rate * torch.sign(self.expert_load.mean() - self.expert_load)
        self.expert_load.zero_()


def uniform(*shape):
    """A parameter drawn as nn.Linear's weights, from 1/sqrt(inputs)."""
    bound = shape[-2] ** -0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def feed_forward(sizes):
    if sizes.feed_forward == "dense":
        return Dense(sizes.dim, sizes.dense_hidden)
    make = PlainTokenMoE
    if sizes.ops == "camox":
        from camox_ops.nn import TokenMoE

        make = TokenMoE
    options = {"shared_hidden": sizes.shared_hidden or None, "router_bias": sizes.balance == "bias"}
    options["aux_loss"] = "switch" if sizes.balance == "switch" else None
    return make(sizes.dim, sizes.hidden, sizes.num_experts, sizes.top_k, **options)


class PlainRotary(nn.Module):
    """(q, k), each (B, T, heads, size), rotated by their places, in stock PyTorch."""

    def __init__(self, size):
        super().__init__()
        self.size, self.kept = size, None

    def tables(self, x):
        length = x.shape[1]
        if self.kept is None or self.kept[0].shape[0] < length or self.kept[0].dtype != x.dtype:
            places = torch.arange(length, dtype=torch.float32, device=x.device)[:, None]
            pairs = torch.arange(0, self.size, 2, dtype=torch.float32, device=x.device)
            angles = places / THETA ** (pairs / self.size)
            self.kept = tuple(t.to(x.dtype)[:, None] for t in (angles.cos(), angles.sin()))
        return (table[:length] for table in self.kept)

    def forward(self, tensors):
        cos, sin = self.tables(tensors[0])
        halves = [x.chunk(2, -1) for x in tensors]
        return [torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves]


class Layer(nn.Module):
    """Causal attention, then the feed-forward part, each on normalised x and added to it."""

    def __init__(self, sizes):
        super().__init__()
        head = sizes.dim // sizes.num_heads
        self.num_heads = sizes.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(sizes.dim), nn.LayerNorm(sizes.dim)
        self.qkv = nn.Linear(sizes.dim, 3 * sizes.dim, bias=False)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=False)
        if sizes.ops == "camox":
            from camox_ops.nn import RotaryEmbedding

            self.rotary = RotaryEmbedding(head, theta=THETA, layout="bthd")
        else:
            self.rotary = PlainRotary(head)
        self.feed_forward = feed_forward(sizes)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k = self.rotary((q, k))
        attended = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added, aux_loss, info = self.feed_forward(self.norm2(x))
        return x + added, aux_loss, info


class LanguageModel(nn.Module):
    """Bytes (B, T) -> (logits (B, T, 256), mean auxiliary loss of the layers, what each layer's router chose)."""

    def __init__(self, sizes):
        super().__init__()
        check_ops(sizes.ops)
        self.sizes = sizes
        self.embedding = nn.Embedding(VOCABULARY, sizes.dim)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, x):
        x, aux_losses, infos = self.embedding(x), [], []
        for layer in self.layers:
            x, aux_loss, info = layer(x)
            aux_losses.append(aux_loss)
            infos.append(info)
        return self.head(self.norm(x)), torch.stack(aux_losses).mean(), infos

    def mixtures(self):
        """The mixtures of experts, a layer's each."""
        return [layer.feed_forward for layer in self.layers if self.sizes.feed_forward == "moe"]

    def parameters_used(self):
        """(all parameters, those that one token is multiplied with)"""
        total = sum(p.numel() for p in self.parameters())
        idle = sum((p.numel() // len(p)) * (len(p) - m.top_k) for m in self.mixtures() for p in (m.w_in, m.w_out))
        return total, total - idle - self.embedding.weight.numel()
