"""Which modules a model is built from: 'torch' is stock PyTorch, 'camox' puts those of camox_ops in their places.

Both give the same state_dict keys, so a checkpoint of one loads into the other.
"""

from functools import partial

from . import backbone, experts, moe

OPS = ("camox", "torch")


def check_ops(ops):
    """ValueError unless ops is one of OPS."""
    if ops not in OPS:
        raise ValueError(f"ops must be one of {OPS}, got {ops!r}")


def modules(ops):
    """Where LayerNorm2d, EdgeExpert and FrequencyExpert come from."""
    check_ops(ops)
    if ops == "torch":
        stock = (partial(made, norm=backbone.LayerNorm2d) for made in (experts.EdgeExpert, experts.FrequencyExpert))
        return backbone.LayerNorm2d, *stock
    # imported here so that --ops torch runs where camox_ops is not built
    from camox_ops import nn

    return nn.LayerNorm2d, nn.EdgeExpert, nn.FrequencyExpert


def layer_norm_class(ops):
    """The channel LayerNorm of the backbone and the experts."""
    return modules(ops)[0]


def expert_classes(ops):
    """The seven experts in the order in which a MoE layer takes them; each is called with the channel count."""
    norm, edge_expert, frequency_expert = modules(ops)
    return [
        partial(experts.TextureExpert, norm=norm),
        experts.AttentionExpert,
        partial(experts.HybridExpert, norm=norm),
        frequency_expert,
        edge_expert,
        partial(experts.SemanticContextExpert, norm=norm),
        partial(experts.ContrastExpert, norm=norm),
    ]


def moe_class(ops):
    """The mixture layer, called with (in_channels, num_experts, top_k)."""
    return partial(moe.MoELayer, experts=expert_classes(ops))
