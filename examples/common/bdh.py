"""The recurrent layer of Baby Dragon Hatchling, from stock PyTorch and from camox_ops.

Written from the architecture; names of parameters as in pathwaycom/bdh (bdh.py at 714bc80) and takzen/vision-bdh
(models/vision_bdh_v2.py at 71cb8ab), whose checkpoints load.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

THETA = 2.0**16
OPS = ("camox", "torch")


@dataclass
class BDHConfig:
    """Sizes of a model; a head is mlp_internal_dim_multiplier * n_embd // n_head wide."""

    n_layer: int = 6
    n_embd: int = 256
    dropout: float = 0.1
    n_head: int = 4
    mlp_internal_dim_multiplier: int = 128
    vocab_size: int = 256

    @property
    def head_size(self):
        return self.mlp_internal_dim_multiplier * self.n_embd // self.n_head


def check_ops(ops):
    """ValueError unless ops is one of OPS."""
    if ops not in OPS:
        raise ValueError(f"ops must be one of {OPS}, got {ops!r}")


def frequencies(size):
    """Turns per position of each element, (1, 1, 1, size) float32; both elements of a pair are rotated alike."""
    pair_starts = torch.arange(0, size, 2, dtype=torch.float32)
    return (1.0 / THETA ** (pair_starts / size) / (2 * math.pi)).repeat_interleave(2).view(1, 1, 1, size)


class PlainAttention(nn.Module):
    """BDH's attention as the public models compute it: keys are the queries, rotated; all tokens, or strictly earlier.

    use_softmax divides by sqrt(N) and normalises. cached keeps the angles' cosines and sines and, with the softmax,
    calls PyTorch's fused attention. freqs is a frozen parameter, or a buffer with causal=True, as in the public code.
    """

    def __init__(self, config, use_softmax=False, causal=False, cached=False):
        super().__init__()
        self.use_softmax, self.causal, self.cached = use_softmax, causal, cached
        freqs = frequencies(config.head_size)
        if causal:
            self.register_buffer("freqs", freqs)
        else:
            self.freqs = nn.Parameter(freqs, requires_grad=False)
        self.kept = None

    def tables(self, length):
        if self.kept is not None and self.kept[0].shape[-2] == length and self.kept[0].dtype == self.freqs.dtype:
            return self.kept
        positions = torch.arange(length, device=self.freqs.device, dtype=self.freqs.dtype).view(1, 1, -1, 1)
        phases = (positions * self.freqs) % 1 * (2 * math.pi)
        tables = phases.cos(), phases.sin()
        if self.cached:
            self.kept = tables
        return tables

    def forward(self, Q, K, V):
        assert K is Q, "the keys are the queries"
        cos, sin = self.tables(Q.shape[-2])
        quarter_turn = torch.stack((-Q[..., 1::2], Q[..., ::2]), dim=-1).flatten(-2)
        along, across = Q * cos, quarter_turn * sin
        if self.causal:  # under autocast the language model rounds here, the vision models do not
            along, across = along.to(Q.dtype), across.to(Q.dtype)
        rotated = along + across
        if self.use_softmax and self.cached:
            return F.scaled_dot_product_attention(rotated, rotated, V.expand(-1, Q.shape[1], -1, -1))
        scores = rotated @ rotated.mT
        if self.causal:
            scores = scores.tril(diagonal=-1)
        if self.use_softmax:
            scores = (scores / Q.shape[-1] ** 0.5).softmax(-1)
        return scores @ V


class BDHLayers(nn.Module):
    """The parameters that all n_layer passes share, and one pass. A model derives from this.

    ops "torch" computes as the public models do; "camox" computes all heads' projections as one product each, whose
    results are read through strides, and the attention and the gate with camox_ops.
    """

    def __init__(self, config, attention, ops):
        super().__init__()
        check_ops(ops)
        self.config, self.ops = config, ops
        heads, width, size = config.n_head, config.n_embd, config.head_size
        if size < 2 or size % 2:  # the rotation turns pairs
            raise ValueError(f"heads must have an even width >= 2, got multiplier * n_embd // n_head = {size}")
        self.decoder = nn.Parameter(torch.empty(heads * size, width))
        self.encoder = nn.Parameter(torch.empty(heads, width, size))
        self.encoder_v = nn.Parameter(torch.empty(heads, width, size))
        self.attn = attention
        self.ln = nn.LayerNorm(width, elementwise_affine=False, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def passes(self, x, normalise_first=False):
        """x (B, T, D) through all layers; normalise_first applies the LayerNorm to the input of each, too."""
        if self.ops == "camox":
            return self.camox_passes(x, normalise_first)
        for _ in range(self.config.n_layer):
            x = self.plain_pass(self.ln(x) if normalise_first else x)
        return x

    def camox_passes(self, x, normalise_first):
        """Under autocast each weight is cast once for all passes and each tensor once for all its uses. What a product
        takes is normalised in its dtype: the same numbers as a float32 copy of it, rounded for the product."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64  # which it does not cast
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        weights = [w.to(dtype) for w in (self.encoder_of_all_heads(), self.encoder_v, self.decoder)]
        # an adapter around the attention need not have tables
        tables = self.attn.tables(x.shape[1]) if hasattr(self.attn, "tables") else None
        with torch.autocast(device, enabled=False):
            for _ in range(self.config.n_layer):
                x = self.camox_pass(self.ln(x) if normalise_first else x, dtype, tables, *weights)
        return x

    def encoder_of_all_heads(self):
        """(H, D, N) -> (D, H*N): one product projects to all heads."""
        return self.encoder.transpose(0, 1).flatten(1)

    def plain_pass(self, x):
        x = x[:, None]
        x_sparse = F.relu(x @ self.encoder)
        y = self.ln(self.attn(Q=x_sparse, K=x_sparse, V=x))
        y_sparse = F.relu(y @ self.encoder_v)
        gated = self.drop(x_sparse * y_sparse)
        y = self.ln(gated.transpose(1, 2).flatten(2) @ self.decoder)
        return self.ln(x[:, 0] + y)

    def camox_pass(self, x, dtype, tables, encoder, encoder_v, decoder):
        # imported here so that --ops torch runs where camox_ops is not built
        from camox_ops import sparse_gate
        from camox_ops.nn.projections import project, project_heads

        tokens = x.to(dtype)
        latent = project(tokens, encoder).unflatten(-1, (self.config.n_head, -1))  # (B, T, H, N)
        y = self.ln(self.attend(latent.transpose(1, 2), tokens, tables).transpose(1, 2))  # (B, T, H, D)
        y = project_heads(y.flatten(0, 1), encoder_v).view_as(latent)
        gated = sparse_gate(latent, y, p=self.drop.p, training=self.training)
        return self.ln(x + self.ln(project(gated.flatten(2), decoder).to(x.dtype)))

    def attend(self, latent, x, tables):
        """Attention of camox_pass: latent (B, H, T, N) before its ReLU, x (B, T, D) -> (B, H, T, D)."""
        named = {} if tables is None else {"tables": tables}
        return self.attn(latent, latent, x[:, None], relu=True, **named)
