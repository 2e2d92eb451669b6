"""Options are names in Python and numbers in the operators' schemas: the enumerators of csrc."""

import re
from pathlib import Path

import pytest
import torch

from camox_ops import _selftest
from camox_ops.ops import _codes

CSRC = Path(__file__).parents[1] / "csrc"


def enumerators(header: str, enum: str) -> dict[str, int]:
    body = re.search(rf"typedef enum \{{([^}}]*)\}} {enum};", (CSRC / header).read_text())[1]
    found = re.findall(r"CAMOX_(\w+) = (\d+)", body)
    return {name.lower(): int(value) for name, value in found if not name.endswith("_COUNT")}


@pytest.mark.parametrize(
    ("codes", "header", "enum", "prefix"),
    [
        (_codes.BORDERS, "common/types.h", "camox_border", "border_"),
        (_codes.ACTIVATIONS, "norm2d/norm2d.h", "camox_activation", "act_"),
        (_codes.LAYOUTS, "rope/rope.h", "camox_rope_layout", "rope_"),
        (_codes.FEATURE_MAPS, "linear_attention/linear_attention.h", "camox_feature_map", "feature_"),
        (_codes.NORMALIZATIONS, "linear_attention/linear_attention.h", "camox_normalize", "normalize_"),
        (_codes.SCORES, "moe/moe.h", "camox_moe_score", "moe_"),
        (_codes.AUX_LOSSES, "moe/moe.h", "camox_moe_aux", "moe_"),
        (_codes.EXPERT_ACTIVATIONS, "moe/moe.h", "camox_expert_activation", "expert_"),
        (_codes.BCES, "structure_loss/structure_loss.h", "camox_bce", "bce_"),
        (_codes.REDUCTIONS, "structure_loss/structure_loss.h", "camox_reduction", "reduce_"),
        (
            _codes.LOSS_REDUCTIONS,
            "linear_cross_entropy/linear_cross_entropy.h",
            "camox_loss_reduction",
            "loss_",
        ),
        (_codes.GROUP_REDUCTIONS, "grad_norms/grad_norms.h", "camox_group_reduce", "group_"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("camox") else "",
)
def test_names_have_the_numbers_of_csrc(codes, header, enum, prefix):
    expected = {name.removeprefix(prefix): value for name, value in enumerators(header, enum).items()}
    if codes is _codes.SCORES:  # two names of one formula
        expected["softmax_topk_renorm"] = expected["topk_softmax"]
    assert codes == expected
    for name, code in codes.items():
        assert codes[_codes.name_of(codes, code)] == code
        assert _codes.code_of("op", "option", name, codes) == code


def test_every_dict_is_compared():
    dicts = [value for value in vars(_codes).values() if isinstance(value, dict) and "__name__" not in value]
    assert len(dicts) == 12


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("wrap", ValueError, "op: border must be one of 'zeros', 'replicate', 'reflect', got 'wrap'"),
        (0, ValueError, "got 0"),
        ([], ValueError, r"got \[\]"),
        (None, ValueError, "got None"),
        (torch.zeros(()), TypeError, "got a torch.Tensor"),
    ],
)
def test_errors_of_what_is_no_name(value, error, message):
    with pytest.raises(error, match=message):
        _codes.code_of("op", "border", value, _codes.BORDERS)


# Operators without a gradient, of as many tensors as there are.
OF_LISTS = {"camox_ops::grad_group_norms", "camox_ops::scale_grads_"}


def test_no_schema_has_a_string_or_a_list():
    """torch leaks each string that its stable ABI hands over, and Functions take no lists of tensors."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("camox_ops::")]
    assert len(schemas) >= len({op.name.split()[0] for op in _selftest.OPS})
    assert {schema.name for schema in schemas} >= OF_LISTS
    schemas = [schema for schema in schemas if schema.name not in OF_LISTS]
    kinds = {str(argument.type) for schema in schemas for argument in (*schema.arguments, *schema.returns)}
    assert kinds <= {
        "Tensor",
        "Optional[Tensor]",
        "int",
        "Optional[int]",
        "SymInt",
        "Optional[SymInt]",
        "float",
        "bool",
    }
    assert {"Tensor", "int"} <= kinds
