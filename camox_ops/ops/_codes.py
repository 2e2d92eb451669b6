"""Options that are names in Python and numbers in the operators' schemas: each dict has the enumerators of an enum in
csrc, which says what they mean."""

from __future__ import annotations

from . import _check

BORDERS = {"zeros": 0, "replicate": 1, "reflect": 2}
"""camox_border of csrc/common/types.h"""
ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}
"""camox_activation of csrc/norm2d/norm2d.h"""
LAYOUTS = {"bhtd": 0, "bthd": 1}
"""camox_rope_layout of csrc/rope/rope.h"""
FEATURE_MAPS = {"elu1": 0, "relu": 1, "identity": 2}
"""camox_feature_map of csrc/linear_attention/linear_attention.h"""
NORMALIZATIONS = {"sum": 0, "feature": 1, "none": 2}
"""camox_normalize of csrc/linear_attention/linear_attention.h"""
SCORES = {"topk_softmax": 0, "softmax_topk": 1, "softmax_topk_renorm": 0, "sigmoid_topk": 2}
"""camox_moe_score of csrc/moe/moe.h. A softmax over all experts whose chosen values are divided by their sum is the
softmax over the chosen."""
AUX_LOSSES = {"switch": 0, "importance_cv2": 1, "z": 2, "usage_mse": 3}
"""camox_moe_aux of csrc/moe/moe.h"""
EXPERT_ACTIVATIONS = {"swiglu": 0, "gelu": 1}
"""camox_expert_activation of csrc/moe/moe.h"""
BCES = {"weighted": 0, "mean": 1}
"""camox_bce of csrc/structure_loss/structure_loss.h"""
REDUCTIONS = {"mean": 0, "sum": 1, "none": 2}
"""camox_reduction of csrc/structure_loss/structure_loss.h"""
LOSS_REDUCTIONS = {"mean": 0, "sum": 1, "none": 2}
"""camox_loss_reduction of csrc/linear_cross_entropy/linear_cross_entropy.h"""
GROUP_REDUCTIONS = {"sum_of_norms": 0, "l2": 1}
"""camox_group_reduce of csrc/grad_norms/grad_norms.h"""


def code_of(op: str, name: str, value: str, codes: dict[str, int]) -> int:
    """The number of an option; what is none of the names is refused."""
    if type(value) is not str or value not in codes:
        _check.choice(op, name, value, codes)
    return codes[value]


def name_of(codes: dict[str, int], code: int) -> str:
    return next(name for name, known in codes.items() if known == code)


def border_of(op: str, value: str, x) -> int:
    """x extended by one pixel: "reflect" needs a neighbour to mirror."""
    code = code_of(op, "border", value, BORDERS)
    if value == "reflect" and (x.shape[2] == 1 or x.shape[3] == 1):
        raise ValueError(f"{op}: border 'reflect' needs sides of at least 2, got x of shape {tuple(x.shape)}")
    return code
