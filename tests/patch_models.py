"""Small models with the structures that camox_ops.patch recognises, and with those that only look alike."""

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS = 16


class Manual(nn.Module):
    """Segment-anything's and ConvNeXt's: mean and variance by hand, parameters (C,)."""

    def __init__(self, channels=CHANNELS, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Gains(nn.Module):
    """Parameters `g`, `b` of shape (1, C, 1, 1), torch.var."""

    def __init__(self, channels=CHANNELS):
        super().__init__()
        self.eps = 1e-5
        self.g = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.b = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x):
        variance = torch.var(x, dim=1, unbiased=False, keepdim=True)
        mean = torch.mean(x, dim=1, keepdim=True)
        return (x - mean) / (variance + self.eps).sqrt() * self.g + self.b


class Columns(nn.Module):
    """Parameters of shape (C, 1, 1), the bias first, and an eps that only the code has."""

    def __init__(self, channels=CHANNELS):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x):
        centred = x - x.mean(1, True)
        return centred * (centred.square().mean(1, True) + 1e-3).rsqrt() * self.scale + self.shift


class Permuting(nn.LayerNorm):
    """timm's: the output lies in memory as channels_last."""

    def __init__(self, channels=CHANNELS, eps=1e-6, affine=True):
        super().__init__(channels, eps=eps, elementwise_affine=affine)

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class NormFunction(torch.autograd.Function):
    """A norm with a backward written by hand."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.eps = eps
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (variance + eps).sqrt()
        ctx.save_for_backward(y, variance, weight)
        return weight.view(1, -1, 1, 1) * y + bias.view(1, -1, 1, 1)

    @staticmethod
    def backward(ctx, grad):
        y, variance, weight = ctx.saved_tensors
        g = grad * weight.view(1, -1, 1, 1)
        grad_x = (g - y * (g * y).mean(1, keepdim=True) - g.mean(1, keepdim=True)) / torch.sqrt(variance + ctx.eps)
        return grad_x, (grad * y).sum((0, 2, 3)), grad.sum((0, 2, 3)), None


class ByFunction(nn.Module):
    """NAFNet's: an autograd.Function of its own."""

    def __init__(self, channels=CHANNELS, eps=1e-6):
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(channels)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)))
        self.eps = eps

    def forward(self, x):
        return NormFunction.apply(x, self.weight, self.bias, self.eps)


class RowsWithBias(nn.Module):
    """What Wrapped holds: over the last dimension, eps in the code."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class RowsWithoutMean(nn.Module):
    """What is left of it without bias: the mean is not subtracted from x."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * self.weight


class Wrapped(nn.Module):
    """Restormer's: (B, C, H, W) as (B, HW, C) through an inner module and back."""

    def __init__(self, channels=CHANNELS, body=RowsWithBias):
        super().__init__()
        self.body = body(channels)

    def forward(self, x):
        rows = x.flatten(2).transpose(1, 2)
        return self.body(rows).transpose(1, 2).unflatten(2, x.shape[2:])


class NoAffine(nn.Module):
    """Without parameters, for any number of channels."""

    def forward(self, x):
        x = x - x.mean(dim=1, keepdim=True)
        return x / torch.sqrt(x.square().mean(dim=1, keepdim=True) + 1e-6)


class OneOfTwo(Manual):
    """ConvNeXt's switch: over channels, or over the last dimension."""

    def __init__(self, channels=CHANNELS, first=True):
        super().__init__(channels)
        self.first = first

    def forward(self, x):
        if self.first:
            return super().forward(x)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class WithoutBias(nn.Module):
    """LayerNorm2dNoBias."""

    def __init__(self, channels=CHANNELS):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.register_parameter("bias", None)
        self.eps = 1e-6

    def forward(self, x):
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, None, self.eps)
        return y.permute(0, 3, 1, 2)


NORMS = {
    "manual": Manual,
    "gains": Gains,
    "columns": Columns,
    "permuting": Permuting,
    "permuting without affine": lambda: Permuting(affine=False),
    "autograd function": ByFunction,
    "wrapped": Wrapped,
    "no affine": NoAffine,
    "one of two": OneOfTwo,
    "without bias": WithoutBias,
    "a Sequential": lambda: nn.Sequential(Moved(0, 2, 3, 1), nn.LayerNorm(CHANNELS), Moved(0, 3, 1, 2)),
}


class Moved(nn.Module):
    """permute as a module."""

    def __init__(self, *order):
        super().__init__()
        self.order = order

    def forward(self, x):
        return x.permute(self.order)


class UnbiasedVariance(Manual):
    """Divides by C - 1."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(x.var(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class EpsOutside(Manual):
    """eps is added to the deviation, not to the variance."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / (x.var(1, keepdim=True, unbiased=False).sqrt() + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GainPlusOne(Manual):
    """Multiplies by weight + 1."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        return (self.weight + 1)[:, None, None] * (x - mean) / torch.sqrt(variance + self.eps) + self.bias[
            :, None, None
        ]


class RootMeanSquare(Manual):
    """No mean is subtracted."""

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class OneGroup(Manual):
    """GroupNorm of one group: over channels and pixels."""

    def forward(self, x):
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


class LeavesMean(Manual):
    """Keeps something for later on the module."""

    def forward(self, x):
        self.last_mean = x.detach().mean()
        return super().forward(x)


class DetachedMean(Manual):
    """The same values, another gradient."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True).detach()
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * (x - mean) / torch.sqrt(variance + self.eps) + self.bias[:, None, None]


class FrozenBias(Manual):
    """The same values; its bias gets no gradient."""

    def forward(self, x):
        y = super().forward(x) - self.bias[:, None, None]
        return y + self.bias.detach()[:, None, None]


class OnlyInTraining(Manual):
    """Another formula in eval mode."""

    def forward(self, x):
        return super().forward(x) if self.training else super().forward(x) * 0.999


class LargeImages(Manual):
    """Another formula above 40 pixels."""

    def forward(self, x):
        y = super().forward(x)
        return y + 1e-3 * x if x.shape[2] * x.shape[3] > 40 else y


class Transposed(Manual):
    """The right values in another arrangement in memory."""

    def forward(self, x):
        return super().forward(x).transpose(2, 3).contiguous().transpose(2, 3)


# Modules that a recogniser must not take, whatever they are called.
NOT_NORMS = {
    "without mean (Restormer's BiasFree)": lambda: Wrapped(body=RowsWithoutMean),
    "one of two, the other": lambda: OneOfTwo(first=False),
    **{
        kind.__name__: kind
        for kind in (
            UnbiasedVariance,
            EpsOutside,
            GainPlusOne,
            RootMeanSquare,
            OneGroup,
            LeavesMean,
            DetachedMean,
            FrozenBias,
            OnlyInTraining,
            LargeImages,
            Transposed,
        )
    },
    "BatchNorm2d": lambda: nn.BatchNorm2d(CHANNELS),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "GroupNorm": lambda: nn.GroupNorm(1, CHANNELS),
    "LayerNorm": lambda: nn.LayerNorm(CHANNELS),
    "Linear": lambda: nn.Linear(CHANNELS, 1),
    "PReLU": lambda: nn.PReLU(CHANNELS),
    "ReLU": nn.ReLU,
}


def network(norm=Manual, p=0.2):
    """A small trainable network for (B, 3, H, W) with two such norms and a dropout."""
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        norm(),
        nn.Tanh(),
        nn.Dropout(p),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        norm(),
        nn.Conv2d(CHANNELS, 2, 1),
    )


# ---- transformers ----


class Mlp(nn.Module):
    """timm's, Swin's, TransUNet's: the activation a module."""

    def __init__(self, width=32, hidden=64, p=0.1, act=nn.GELU, out=None):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = act()
        self.drop1 = nn.Dropout(p)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, out or width)
        self.drop2 = nn.Dropout(p)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class OneDropout(nn.Module):
    """One dropout module in both places, gelu a function."""

    def __init__(self, width=32, hidden=64, p=0.1):
        super().__init__()
        self.second = nn.Linear(hidden, width)
        self.drop = nn.Dropout(p)
        self.first = nn.Linear(width, hidden)

    def forward(self, x):
        return self.drop(self.second(self.drop(F.gelu(self.first(x)))))


class LastDropout(OneDropout):
    """nanoGPT's."""

    def forward(self, x):
        return self.drop(self.second(F.gelu(self.first(x))))


class Intermediate(nn.Module):
    """BERT's: the activation looked up and kept as an attribute."""

    def __init__(self, width=32, hidden=64):
        super().__init__()
        self.dense = nn.Linear(width, hidden)
        self.intermediate_act_fn = F.gelu

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states))


class ErfFeedForward(nn.Module):
    """RecBole's: GELU in tensor operations, residual and norm inside."""

    def __init__(self, width=32, hidden=64, p=0.3):
        super().__init__()
        self.dense_1 = nn.Linear(width, hidden)
        self.dense_2 = nn.Linear(hidden, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        hidden = self.dense_1(x)
        hidden = hidden * 0.5 * (1.0 + torch.erf(hidden / 2**0.5))
        return self.LayerNorm(self.dropout(self.dense_2(hidden)) + x)


class SelfOutput(nn.Module):
    """BERT's BertSelfOutput and BertOutput."""

    def __init__(self, inside=64, width=32, p=0.1):
        super().__init__()
        self.dense = nn.Linear(inside, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class AddNorm(nn.Module):
    """pytorch_tabular's: residual first."""

    def __init__(self, width=32, p=0.2):
        super().__init__()
        self.dropout = nn.Dropout(p)
        self.ln = nn.LayerNorm(width)

    def forward(self, X, Y):
        return self.ln(self.dropout(Y) + X)


class DropsTwice(Mlp):
    """PatchTST's two dropouts in a row."""

    def forward(self, x):
        return self.fc2(self.drop2(self.drop1(self.act(self.fc1(x)))))


class DropsBefore(Mlp):
    """Dropout in front of the GELU, with which it does not commute."""

    def forward(self, x):
        return self.drop2(self.fc2(self.act(self.drop1(self.fc1(x)))))


class TanhMlp(Mlp):
    """Another GELU."""

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class DropsResidual(SelfOutput):
    """The dropout on the sum."""

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states) + input_tensor))


class NormsFirst(SelfOutput):
    """The norm in front."""

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dense(hidden_states)) + self.dropout(input_tensor)


class FullAttention(nn.Module):
    """Time-Series-Library's."""

    def __init__(self, mask_flag=False, scale=None, attention_dropout=0.1, output_attention=False):
        super().__init__()
        self.scale = scale
        self.mask_flag = mask_flag
        self.output_attention = output_attention
        self.dropout = nn.Dropout(attention_dropout)

    def forward(self, queries, keys, values, attn_mask, tau=None, delta=None):
        _, length, _, width = queries.shape
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        if self.mask_flag:
            later = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
            scores = scores.masked_fill(later if attn_mask is None else attn_mask, -torch.inf)
        weights = self.dropout(torch.softmax((self.scale or width**-0.5) * scores, dim=-1))
        mixed = torch.einsum("bhls,bshd->blhd", weights, values).contiguous()
        return mixed, weights if self.output_attention else None


class AttentionLayer(nn.Module):
    """Projections around it."""

    def __init__(self, attention, width=32, heads=4):
        super().__init__()
        self.inner_attention = attention
        self.query_projection = nn.Linear(width, width)
        self.key_projection = nn.Linear(width, width)
        self.value_projection = nn.Linear(width, width)
        self.out_projection = nn.Linear(width, width)
        self.heads = heads

    def forward(self, queries, keys, values, attn_mask, tau=None, delta=None):
        parts = zip(
            (self.query_projection, self.key_projection, self.value_projection), (queries, keys, values), strict=True
        )
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)) for layer, x in parts)
        mixed, weights = self.inner_attention(q, k, v, attn_mask, tau=tau, delta=delta)
        return self.out_projection(mixed.flatten(2)), weights


class EncoderLayer(nn.Module):
    """Time-Series-Library's: one dropout in three places, products as convolutions."""

    def __init__(self, attention=None, width=32, hidden=64, dropout=0.1, activation="gelu"):
        super().__init__()
        self.attention = attention or AttentionLayer(FullAttention(attention_dropout=dropout), width)
        self.conv1 = nn.Conv1d(width, hidden, 1)
        self.conv2 = nn.Conv1d(hidden, width, 1)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.activation = F.relu if activation == "relu" else F.gelu

    def forward(self, x, attn_mask=None, tau=None, delta=None):
        new, weights = self.attention(x, x, x, attn_mask=attn_mask, tau=tau, delta=delta)
        x = x + self.dropout(new)
        y = x = self.norm1(x)
        y = self.dropout(self.activation(self.conv1(y.transpose(-1, 1))))
        y = self.dropout(self.conv2(y).transpose(-1, 1))
        return self.norm2(x + y), weights


class WidedeepAttention(nn.Module):
    """Reads like linear attention and is none: sums k and v over different positions."""

    def __init__(self, p=0.1):
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, q, k, v):
        scores = q.softmax(-1) * k.softmax(1)
        return self.dropout(scores.sum(1, keepdim=True) * v), None


class LinearAttention(nn.Module):
    """LoFTR's."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, queries, keys, values, q_mask=None, kv_mask=None):
        q, k = F.elu(queries) + 1, F.elu(keys) + 1
        if kv_mask is not None:
            k = k * kv_mask[:, :, None, None]
        length = values.size(1)
        values = values / length
        state = torch.einsum("nshd,nshv->nhdv", k, values)
        scale = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + self.eps)
        return (torch.einsum("nlhd,nhdv,nlh->nlhv", q, state, scale) * length).contiguous()


class Crossed(LinearAttention):
    """Reads like it, and multiplies q along another index."""

    def forward(self, queries, keys, values):
        q, k = F.elu(queries) + 1, F.elu(keys) + 1
        state = torch.einsum("nshd,nshv->nhdv", k, values)
        scale = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + self.eps)
        return torch.einsum("nlhv,nhdv,nlh->nlhv", q, state, scale)


class LeavesLoss(nn.Module):
    """minimind's: softmax, top k, renormalised; an auxiliary loss is left on the module."""

    def __init__(self, width=16, count=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.experts = nn.ModuleList(Mlp(width, 32, 0.0) for _ in range(count))
        self.gate = nn.Linear(width, count, bias=False)
        self.aux_loss = 0.0

    def forward(self, x):
        rows = x.flatten(0, -2)
        scores = self.gate(rows).softmax(-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                y.index_add_(0, row, expert(rows[row]) * weights[row, slot, None])
            elif self.training:
                y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        self.aux_loss = scores.mean(0).square().sum()
        return y.view(x.shape)


class QueryLast(nn.Module):
    """A head of ng-video-lecture and makeMoE: causal, scaled by the width of the model, not by that of a head."""

    def __init__(self, width=32, head=8, p=0.1):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, head, bias=False) for _ in range(3))
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * x.shape[-1] ** -0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.dropout(scores.masked_fill(later, -torch.inf).softmax(-1)) @ self.value(x)
