"""bdh_attention: BDH's attention of 6 heads of 1024 columns whose values, 192 columns, the heads share.

The eager side is the formula of takzen/vision-bdh, models/bdh.py (Attention, causal) and models/vision_bdh_v2.py
(BidirectionalAttentionV2) at 71cb8ab, but with its tables ready, which it computes again on every call. The peers
``quadratic`` and ``state`` are our two forms, one of which camox picks by its count of products: where the other is
faster, the rule is wrong; they are timed on both sides of where it changes.

Ideal FLOP: of the cheaper form, the symmetric product counted once; the backward has the scores of the forward.
"""

import math
from dataclasses import replace

import torch

from benchmarks.common import Case, camox_attr, on_gpu, random_tensor
from benchmarks.shapes import DIRECTIONS

HEADS, COLUMNS, VALUES = 6, 1024, 192
QUADRATIC, STATE = 1, 2  # what csrc/bdh/bdh.h calls them
ROUNDS = 9  # of the steps of 1,024 tokens, which take up to a second


def eager(q, v, cos, sin, wide_cos, wide_sin, causal):
    q = torch.relu(q)
    partners = torch.stack((-q[..., 1::2], q[..., ::2]), dim=-1).view(q.shape)
    rotated = (q * wide_cos).to(q.dtype) + (partners * wide_sin).to(q.dtype)
    scores = rotated @ rotated.mT
    return (scores.tril(diagonal=-1) if causal else scores) @ v


def of_form(form, causal):
    """Our op in one of its forms, whatever is cheaper; the scores saved as in training."""
    camox_attr("bdh_attention")

    def attention(q, v, cos, sin, *_):
        save = torch.is_grad_enabled() and q.requires_grad
        return torch.ops.camox_ops.bdh_attention(q, v, cos, sin, True, causal, False, 1.0, save, form)[0]

    return attention


def products(length, causal, backward):
    """Multiply-adds of the cheaper form, a head."""
    triangle = 0.5 if causal else 1
    quadratic = length * length * (COLUMNS / 2 + triangle * VALUES)
    state = 2 * length * COLUMNS * VALUES
    if backward:
        quadratic += length * length * (COLUMNS + 2 * triangle * VALUES)
        state += 4 * length * COLUMNS * VALUES
    return min(quadratic, state)


def case_of(batch, length, direction, dtype, causal=False, forms=False, **options) -> Case:
    def inputs():
        frequencies = (2.0**16) ** -torch.linspace(0, 1, COLUMNS // 2)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        narrow = (angles.cos(), angles.sin())
        q = random_tensor((batch, HEADS, length, COLUMNS), dtype=dtype, seed=1, scale=COLUMNS**-0.5)
        v = random_tensor((batch, 1, length, VALUES), dtype=dtype, seed=2)
        return q, v, *narrow, *(table.repeat_interleave(2, -1) for table in narrow)

    def candidates():
        attention = camox_attr("bdh_attention")
        found = {
            "camox": lambda q, v, cos, sin, *_: attention(q, v, cos, sin, causal=causal),
            "eager": lambda *tensors: eager(*tensors, causal),
        }
        if not forms:
            return found
        return {**found, "quadratic": of_form(QUADRATIC, causal), "state": of_form(STATE, causal), "compile": None}

    both = direction == "forward_backward"
    group = "bdh_attention_forms" if forms else "bdh_attention"
    return Case(
        group=group + ("_causal" if causal else ""),
        shape=(batch, HEADS, length, COLUMNS),
        make_inputs=inputs,
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        floor_flops=int(2 * batch * HEADS * products(length, causal, both)),
        grad_inputs=(0, 1),
        **options,
    )


@on_gpu(shapes=((8, HEADS, 64, COLUMNS), (2, HEADS, 1024, COLUMNS)), rehearsal=(1, HEADS, 5, COLUMNS), size="products")
def make_case(shape, direction, dtype, layout) -> Case:
    """With the bytes of memory for a floor, as all ops on GPUs: far below what the products cost."""
    values = math.prod(shape[::2]) * VALUES
    elements = math.prod(shape) + (1 + HEADS) * values
    if direction == "forward_backward":
        elements += 2 * math.prod(shape) + (2 + 2 * HEADS) * values
    case = case_of(shape[0], shape[2], direction, dtype)
    return replace(case, floor_flops=0, floor_bytes=elements * dtype.itemsize)


def cases() -> list[Case]:
    both, single, half = "forward_backward", torch.float32, torch.bfloat16
    found = []
    for direction in DIRECTIONS:
        plain = case_of(8, 64, direction, single, quick=True)
        halved = case_of(8, 64, direction, half, default_allocator=False, compare_with={"float32": plain})
        found += [plain, halved]
    found.append(case_of(2, 1024, both, single, rounds=ROUNDS))
    for dtype, causal in ((half, False), (single, True)):
        found.append(case_of(2, 1024, both, dtype, causal, rounds=ROUNDS, default_allocator=False))
    for length in (512, 768):
        for causal in (False, True):
            found.append(case_of(1, length, both, single, causal, forms=True, default_allocator=False))
    return found
