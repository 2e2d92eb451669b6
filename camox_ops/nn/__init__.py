"""Modules with the constructors, parameters and buffers of the modules they replace."""

from . import projections
from ._plain import why_not_fused
from .attention import LinearAttention, SDTAEncoder
from .bands import FrequencyExpert
from .bdh import BidirectionalBDHAttention
from .edge import EdgeExpert
from .expert_parallel import expert_parallel
from .experts import AttentionExpert, ContrastExpert, HybridExpert, SemanticContextExpert, TextureExpert
from .moe import MoELayer
from .norm2d import LayerNorm2d
from .rope import RotaryEmbedding
from .temporal import TemporalEncoder
from .token_moe import TokenMoE

__all__ = [
    "AttentionExpert",
    "BidirectionalBDHAttention",
    "ContrastExpert",
    "EdgeExpert",
    "FrequencyExpert",
    "HybridExpert",
    "LayerNorm2d",
    "LinearAttention",
    "MoELayer",
    "RotaryEmbedding",
    "SDTAEncoder",
    "SemanticContextExpert",
    "TemporalEncoder",
    "TextureExpert",
    "TokenMoE",
    "expert_parallel",
    "projections",
    "why_not_fused",
]
