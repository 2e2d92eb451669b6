"""Vision-BDH's attention on bdh_attention."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..ops import _check
from ..ops.bdh import bdh_attention
from ._kept import has_values

THETA = 2.0**16


class BidirectionalBDHAttention(nn.Module):
    """Attention among all tokens whose keys are its queries, for Baby Dragon Hatchling's wide heads.

        R = rotated Q    out = [softmax](R R^T [/ sqrt(N)]) V

    Drop-in replacement for BidirectionalAttentionV2 of takzen/vision-bdh (models/vision_bdh_v2.py and vision_bdh_v3.py
    at 71cb8ab) and of jinotter3/vision-bdh (models/vision_bdh_v2_cls.py at 8ea7ddf): same constructor, arguments and
    state_dict.

    Args:
        config: an object with n_head H, n_embd D and mlp_internal_dim_multiplier m; heads are N = m * D // H wide.
        use_softmax: the softmax over scores / sqrt(N), or the scores themselves.

    `freqs`, (1, 1, 1, N), is a frozen parameter: turns per position of each element. The angles' cosines and sines are
    made from its present values in its own precision (float32 at least). On the CPU they are kept beside a copy of
    freqs, which each call compares; on CUDA, where comparing would wait for the device, under torch.compile and under
    torch.func they are made on each call. They are not part of the state_dict, of copies and of pickles. A freqs that
    requires a gradient gets one. A model cast to bfloat16 as a whole rounds freqs too, as the class it replaces does;
    autocast leaves them float32."""

    def __init__(self, config, use_softmax: bool = True):
        super().__init__()
        _check.flag("BidirectionalBDHAttention", "use_softmax", use_softmax)
        size = config.mlp_internal_dim_multiplier * config.n_embd // config.n_head
        if size % 2:
            raise ValueError(
                "BidirectionalBDHAttention: config must give heads of even width, got "
                f"mlp_internal_dim_multiplier * n_embd // n_head = {size}"
            )
        self.config = config
        self.use_softmax = use_softmax
        pairs = 1.0 / THETA ** (torch.arange(0, size, 2, dtype=torch.float32) / size) / (2 * math.pi)
        self.freqs = nn.Parameter(pairs.repeat_interleave(2).view(1, 1, 1, size), requires_grad=False)
        self._cached: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def extra_repr(self) -> str:
        return f"{self.freqs.shape[-1]}, use_softmax={self.use_softmax}"

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_cached": None}

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of `length` positions: (length, N/2), or (length, N) of freqs that differ within a pair."""
        freqs = self.freqs
        if not freqs.is_cpu or (torch.is_grad_enabled() and freqs.requires_grad) or not has_values(freqs):
            return _tables(freqs.flatten(), length)
        cached = self._cached
        # Values, not a version: what is written through .data, or in inference mode, moves no version.
        if cached is not None and cached[1].shape[0] == length and _same(cached[0], freqs):
            return cached[1:]
        # Tables made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            first, second = freqs.view(-1, 2).unbind(1)
            made = _tables(first if torch.equal(first, second) else freqs.flatten(), length)
            self._cached = (freqs.clone(), *made)
        return made

    def forward(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        *,
        relu: bool = False,
        tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Q, K: one and the same tensor (B, H, T, N), not yet rotated; V (B, 1 or H, T, D) -> (B, H, T, D).

        relu=True takes the positive part of Q first, without storing it. tables: what tables(T) gave, for the calls of
        one step: on CUDA making them is six launches."""
        if K is not Q:
            raise ValueError("BidirectionalBDHAttention: K must be Q itself, got another tensor")
        _check.tensor("BidirectionalBDHAttention", "Q", Q)
        cos, sin = self.tables(Q.shape[-2]) if tables is None else tables
        if Q.dtype != torch.float64:
            cos, sin = cos.float(), sin.float()
        return bdh_attention(Q, V, cos, sin, relu=relu, softmax=self.use_softmax)


def _same(kept: torch.Tensor, freqs: torch.Tensor) -> bool:
    return kept.dtype == freqs.dtype and torch.equal(kept, freqs)


def _tables(turns_per_position: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rate = turns_per_position if turns_per_position.dtype == torch.float64 else turns_per_position.float()
    turns = torch.arange(length, dtype=rate.dtype, device=rate.device)[:, None] * rate
    angles = (turns % 1) * (2 * math.pi)
    return angles.cos(), angles.sin()
