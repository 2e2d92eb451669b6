"""Fused CPU and CUDA ops for PyTorch training code: `import camox_ops as cx`."""

from importlib import import_module as _import_module

import torch  # noqa: F401  torch's libraries must be loaded before _C

from . import _C, nn, reference, train
from ._cuda import check_errors
from ._explain import explain
from ._info import build_info, isa, supported_isas
from ._ops import IMAGE_OPS as _IMAGE_OPS
from ._patch import PatchReport, patch, patched, unpatch
from .ops.bands import FrequencyBands, frequency_bands
from .ops.bdh import bdh_attention, bdh_attention_step
from .ops.bias_gelu import bias_gelu
from .ops.box import box_mean, structure_weight
from .ops.dropout import dropout, dropout_add_layer_norm, sparse_gate
from .ops.edge import EdgeMaps, edge_maps
from .ops.grad_norms import grad_group_norms, scale_grads_
from .ops.linear_attention import linear_attention, linear_attention_step
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.moe import Routing, moe_aux_loss, moe_combine, moe_dispatch, moe_route, moe_routing
from .ops.norm2d import layer_norm2d
from .ops.rope import rope, rope_tables
from .ops.short_attention import short_attention
from .ops.spatial_gradient import spatial_gradient
from .ops.structure_loss import structure_loss

__version__ = _C.build_info()["version"]

__all__ = [
    "EdgeMaps",
    "FrequencyBands",
    "PatchReport",
    "Routing",
    "bdh_attention",
    "bdh_attention_step",
    "bias_gelu",
    "box_mean",
    "build_info",
    "check_errors",
    "dropout",
    "dropout_add_layer_norm",
    "edge_maps",
    "explain",
    "frequency_bands",
    "grad_group_norms",
    "isa",
    "layer_norm2d",
    "linear_attention",
    "linear_attention_step",
    "linear_cross_entropy",
    "moe_aux_loss",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "moe_routing",
    "nn",
    "patch",
    "patched",
    "reference",
    "rope",
    "rope_tables",
    "scale_grads_",
    "short_attention",
    "sparse_gate",
    "spatial_gradient",
    "structure_loss",
    "structure_weight",
    "supported_isas",
    "train",
    "unpatch",
]

for _name in _IMAGE_OPS:
    globals()[_name] = getattr(_import_module(f".ops.{_name}", __name__), _name)
__all__ += [*_IMAGE_OPS]
