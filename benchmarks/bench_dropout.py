"""dropout, sparse_gate (Vision-BDH) and dropout_add_layer_norm (EmberFormer, K-1), against what PyTorch code writes.

Masks are random, so candidates are compared with what any right one has: the share of dropped elements, the values of
kept ones, gradients that are 0 where the output was dropped, rows of mean 0 and variance 1.

Ideal bytes in elements of x: dropout reads 1, writes 1, in each direction; sparse_gate forward reads 2, writes 1,
backward reads the gradient, x and y, writes 2; dropout_add_layer_norm the same with residual as y.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS

P = 0.1
SHAPES = {
    "dropout": ((32, 6, 64, 1024), (64, 64, 128)),
    "sparse_gate": ((32, 6, 64, 1024), (2, 6, 1024, 1024)),
    "dropout_add_layer_norm": ((1600, 6, 96), (4096, 128)),
}


def eager_gate(x, y):
    return F.dropout(F.relu(x) * F.relu(y), P)


def eager_norm(x, residual, weight, bias):
    return F.layer_norm(residual + F.dropout(x, P), weight.shape, weight, bias)


def wrong_share(dropped, of) -> str | None:
    """Dropped elements among those that would not be 0 anyway: their share within six standard deviations."""
    n = int(of.sum())
    share = float((dropped & of).sum()) / n
    return (
        None if abs(share - P) < 6 * math.sqrt(P * (1 - P) / n) + 1e-5 else f"{share:.4f} of the elements are dropped"
    )


def wrong_dropout(numbers, inputs) -> str | None:
    """One operand, or two that are rectified and multiplied."""
    before = inputs[0] if len(inputs) == 1 else F.relu(inputs[0]) * F.relu(inputs[1])
    before = before.detach().float()
    after = numbers["output0"].float()
    tolerance = 1e-4 if numbers["output0"].dtype == torch.float32 else 2e-2
    if not torch.allclose(after, torch.where(after == 0, 0.0, before / (1 - P)), rtol=tolerance):
        return "a kept element is not x / (1 - p)"
    for name, grad in numbers.items():
        if name.startswith("grad") and bool((grad[(after == 0) & (before != 0)] != 0).any()):
            return f"{name} is not 0 where the output was dropped"
    return wrong_share(after == 0, before != 0)


def wrong_norm(numbers, inputs) -> str | None:
    weight, bias = (tensor.detach().float() for tensor in inputs[2:])
    z = (numbers["output0"].float() - bias) / weight
    tolerance = 1e-3 if numbers["output0"].dtype == torch.float32 else 5e-2
    if z.mean(-1).abs().max() > tolerance or (z.square().mean(-1) - 1).abs().max() > tolerance:
        return "rows do not have mean 0 and variance 1"
    if "grad input0" in numbers:
        grad = numbers["grad input0"]
        return wrong_share(grad == 0, numbers["grad input1"] != 0)
    return None


GROUPS = {
    "dropout": (lambda x: F.dropout(x, P), wrong_dropout, 4, 2),
    "sparse_gate": (eager_gate, wrong_dropout, 8, 3),
    "dropout_add_layer_norm": (eager_norm, wrong_norm, 8, 3),
}


def ours(group):
    op = camox_attr(group)
    if group == "dropout":
        return lambda x: op(x, P)
    return lambda *tensors: op(*tensors, p=P, training=True)


def inputs_of(group, shape, dtype, layout) -> tuple:
    operands = 1 if group == "dropout" else 2
    inputs = [random_tensor(shape, dtype=dtype, layout=layout, seed=1 + i) for i in range(operands)]
    if group == "dropout_add_layer_norm":
        affine = (random_tensor(shape[-1:], dtype=dtype, seed=8 + i, scale=0.1) for i in range(2))
        inputs += [1 + next(affine), next(affine)]
    return tuple(inputs)


def case_of(group, shape, direction, dtype, layout="contiguous") -> Case:
    eager, verify, both, forward = GROUPS[group]
    elements = both if direction == "forward_backward" else forward
    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: inputs_of(group, shape, dtype, layout),
        candidates=lambda: {"camox": ours(group), "eager": eager},
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        verify=verify,
    )


# One of each group for any shape: what run.py --device cuda measures.
make_case_dropout = partial(case_of, "dropout")
make_case_sparse_gate = partial(case_of, "sparse_gate")
make_case_dropout_add_layer_norm = partial(case_of, "dropout_add_layer_norm")


def cases() -> list[Case]:
    found = []
    for group, shapes in SHAPES.items():
        for direction in DIRECTIONS:
            for shape in shapes:
                plain = case_of(group, shape, direction, torch.float32)
                half = case_of(group, shape, direction, torch.bfloat16)
                found += [
                    replace(plain, quick=shape == shapes[-1]),
                    replace(half, compare_with={"float32": plain}, default_allocator=False),
                ]
    return found
