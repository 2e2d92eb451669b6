"""Which modules a model is built from: 'torch' is stock PyTorch, 'camox' puts those of camox_ops in their places.

Both give the same state_dict keys, so a checkpoint of one loads into the other.
"""

from camox_ops import nn

from . import backbone, moe

OPS = ("camox", "torch")


def check_ops(ops):
    """ValueError unless ops is one of OPS."""
    if ops not in OPS:
        raise ValueError(f"ops must be one of {OPS}, got {ops!r}")


def layer_norm_class(ops):
    """The channel LayerNorm of the backbone."""
    check_ops(ops)
    return backbone.LayerNorm2d if ops == "torch" else nn.LayerNorm2d


def moe_class(ops):
    """The mixture layer, called with (in_channels, num_experts, top_k, aux_loss=...)."""
    check_ops(ops)
    return moe.MoELayer if ops == "torch" else nn.MoELayer
