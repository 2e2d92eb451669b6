"""Every op in plain PyTorch, at any precision: the truth that the kernels are tested against, and what second
derivatives differentiate. Slow and memory-hungry on purpose."""

from importlib import import_module as _import_module

from .._ops import IMAGE_OPS as _IMAGE_OPS
from .bands import frequency_bands, frequency_bands_backward
from .bdh import bdh_attention, bdh_attention_backward, bdh_attention_step
from .bias_gelu import bias_gelu, bias_gelu_backward
from .box import box_mean, box_mean_backward, structure_weight
from .dropout import (
    dropout,
    dropout_add_layer_norm,
    dropout_add_layer_norm_backward,
    dropout_mask,
    philox4x32,
    sparse_gate,
    sparse_gate_backward,
)
from .edge import edge_maps, edge_maps_backward
from .grad_norms import grad_group_norms, scale_grads_
from .linear_attention import linear_attention, linear_attention_recurrence, linear_attention_step
from .linear_cross_entropy import linear_cross_entropy
from .moe import moe_aux_loss, moe_combine, moe_dispatch, moe_route, moe_routing
from .norm2d import layer_norm2d, layer_norm2d_backward
from .rope import rope, rope_backward
from .short_attention import short_attention, short_attention_backward
from .spatial_gradient import spatial_gradient, spatial_gradient_backward
from .structure_loss import structure_loss

__all__ = [
    "bdh_attention",
    "bdh_attention_backward",
    "bdh_attention_step",
    "bias_gelu",
    "bias_gelu_backward",
    "box_mean",
    "box_mean_backward",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_backward",
    "dropout_mask",
    "edge_maps",
    "edge_maps_backward",
    "frequency_bands",
    "frequency_bands_backward",
    "grad_group_norms",
    "layer_norm2d",
    "layer_norm2d_backward",
    "linear_attention",
    "linear_attention_recurrence",
    "linear_attention_step",
    "linear_cross_entropy",
    "moe_aux_loss",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "moe_routing",
    "philox4x32",
    "rope",
    "rope_backward",
    "scale_grads_",
    "short_attention",
    "short_attention_backward",
    "sparse_gate",
    "sparse_gate_backward",
    "spatial_gradient",
    "spatial_gradient_backward",
    "structure_loss",
    "structure_weight",
]

for _name in _IMAGE_OPS:
    globals()[_name] = getattr(_import_module(f".{_name}", __name__), _name)
__all__ += [*_IMAGE_OPS]
