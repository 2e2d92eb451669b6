"""Every recogniser, in the order in which they look at a module: the first that takes it has it."""

from __future__ import annotations

from ._recogniser import Recogniser
from .bdh import BDHAttention
from .bdh_layers import BDHLayers
from .blocks import AddNorm, FeedForward
from .camoxpert import BANDS, EDGES, ExpertMixture, PixelAttention
from .dropout import Dropout
from .expert_tensors import ExpertTensors
from .linear import LinearAttention
from .masked import MaskedAttention
from .mixture import TokenMixture
from .multiscale import MultiscaleAttention
from .norm2d import Norm2d
from .norm2d_float32 import Norm2dInFloat32
from .pool import AveragePool
from .post_norm import PostNormLayer, SoftmaxAttention
from .rewritten import AttentionBlock
from .rows import AddRowNorm, RowNorm
from .sequential import Sequential
from .temporal_encoder import TemporalEncoder
from .transformer import Attention, EncoderLayer

RECOGNISERS: tuple[Recogniser, ...] = (
    Dropout(),
    Norm2dInFloat32(),
    Norm2d(),
    Sequential(),
    EncoderLayer(),
    Attention(),
    FeedForward(),
    AddNorm(),
    RowNorm(),
    AddRowNorm(),
    MaskedAttention(),
    PostNormLayer(),
    SoftmaxAttention(),
    EDGES,
    BANDS,
    PixelAttention(),
    ExpertMixture(),
    TokenMixture(),
    ExpertTensors(),
    BDHAttention(),
    AveragePool(),
    LinearAttention(),
    MultiscaleAttention(),
    BDHLayers(),
    TemporalEncoder(),
    AttentionBlock(),
)
