"""linear_attention on heads that are views of the output of a qkv convolution, (B, 3C, H, W), to a (B, C, H, W).

The eager side of "feature" is SDTAEncoder.linear_attention of mahi-chan/camoXpert, models/backbone.py at 47e858c, with
the rearrangement to (B, C, H, W) that follows it; that of "sum" is the same with the denominator of the formula. In
``standard_attention`` the baseline is F.scaled_dot_product_attention on the same heads: other numbers, the same task.

The eager side of the causal cases is the formula in chunks, whose states lie in memory; that of ``cumsum`` has a state
for each position, a gigabyte of them at 4,096, so it is timed at a quarter of that. A step is one position. On a GPU
``fla`` is chunk_linear_attn of flash-linear-attention, where that is installed: with its own normalisation and behind
PyTorch's elu(x) + 1, as its layer calls it; in ``causal_sums`` without either.

Ideal bytes in elements of q: forward reads q, k, v, writes out; backward reads q, k, v and the gradient, writes three.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, if_installed, on_gpu, random_tensor
from benchmarks.shapes import DIRECTIONS

CAUSAL = (2, 8, 4096, 64)
CUMSUM = (2, 8, 1024, 64)
SHAPES = ((2, 8, 2304, 32), (4, 8, 5184, 10), (4, 8, 1296, 20))
STANDARD = (1, 8, 2304, 32)


def heads_of(shape, dtype, layout):
    """q, k, v as (B, H, T, D) views of a convolution's output."""
    batch, heads, length, dim = shape
    side = math.isqrt(length)
    qkv = random_tensor((batch, 3 * heads * dim, side, side), dtype=dtype, layout=layout, seed=1)
    return tuple(part.unflatten(1, (heads, dim)).flatten(3).transpose(2, 3) for part in qkv.chunk(3, dim=1))


def as_image(out):
    batch, heads, length, dim = out.shape
    side = math.isqrt(length)
    return out.transpose(2, 3).reshape(batch, heads * dim, side, side)


def eager_feature(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    q, k = q / q.sum(dim=-1, keepdim=True), k / k.sum(dim=-1, keepdim=True)
    return as_image(q @ (k.transpose(-2, -1) @ v))


def eager_sum(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return as_image(q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(dim=-2).unsqueeze(-1) + 1e-6))


def standard(q, k, v):
    return as_image(F.scaled_dot_product_attention(q, k, v))


def eager_causal(q, k, v, chunk=64):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    states, sums = k.mT @ v, k.sum(3)
    states, sums = states.cumsum(2) - states, (sums.cumsum(2) - sums).unsqueeze(-1)
    scores = (q @ k.mT).tril()
    return ((scores @ v + q @ states) / (scores.sum(-1, keepdim=True) + q @ sums + 1e-6)).flatten(2, 3)


def eager_causal_sums(q, k, v, chunk=64):
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    states = k.mT @ v
    return ((q @ k.mT).tril() @ v + q @ (states.cumsum(2) - states)).flatten(2, 3)


def eager_cumsum(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
    return (q.unsqueeze(-2) @ states).squeeze(-2) / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6)


def eager_step(q, k, v, s, z):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    s += k.unsqueeze(-1) * v.unsqueeze(-2)
    z += k
    return (q.unsqueeze(-2) @ s).squeeze(-2) / ((q * z).sum(-1, keepdim=True) + 1e-6)


def causal_case(shape, direction, eager=eager_causal, group="linear_attention_causal") -> Case:
    def candidates():
        attention = camox_attr("linear_attention")
        return {"camox": lambda q, k, v: attention(q, k, v, causal=True), "eager": eager, "compile": None}

    elements = 11 if direction == "forward_backward" else 4
    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: tuple(random_tensor(shape, dtype=torch.float32, seed=seed) for seed in range(3)),
        candidates=candidates,
        direction=direction,
        floor_bytes=elements * math.prod(shape) * 4,
    )


def tokens_first(function):
    """A function of (B, H, T, D) for (B, T, H, D)."""
    return lambda *inputs: function(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)


def fla_causal(q, k, v):
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]


def fla_causal_sums(q, k, v):
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]


def causal_case_on_gpu(group, options, eager, peer, shape, direction, dtype, layout) -> Case:
    """Of (B, T, H, D), the layout of flash-linear-attention."""

    def candidates():
        attention = camox_attr("linear_attention")
        return {
            "camox": lambda q, k, v: attention(q, k, v, causal=True, layout="bthd", **options),
            "eager": tokens_first(eager),
            "fla": if_installed("fla", lambda: peer),
            "compile": None,
        }

    elements = 11 if direction == "forward_backward" else 4
    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: tuple(random_tensor(shape, dtype=dtype, seed=seed) for seed in range(3)),
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
    )


def same_step(_, inputs):
    """Of a state that is written in place, both from zeros: the state that is timed goes on from call to call."""
    step, (q, k, v, s, z) = camox_attr("linear_attention_step"), inputs
    ours = [torch.zeros_like(x) for x in (s, z)]
    true = [x.double() for x in ours]
    out, _ = step(q, k, v, ours)
    pairs = zip((out, *ours), (eager_step(q.double(), k.double(), v.double(), *true), *true), strict=True)
    miss = max((mine - other).abs().max().item() for mine, other in pairs)
    return None if miss < 1e-4 else f"off by {miss}"


def step_case(batch, heads, dim) -> Case:
    def inputs():
        rows = tuple(random_tensor((batch, heads, dim), dtype=torch.float32, seed=seed) for seed in range(3))
        return *rows, torch.zeros(batch, heads, dim, dim), torch.zeros(batch, heads, dim)

    def candidates():
        step = camox_attr("linear_attention_step")
        return {"camox": lambda q, k, v, s, z: step(q, k, v, (s, z))[0], "eager": eager_step, "compile": None}

    return Case(
        group="linear_attention_step",
        shape=(batch, heads, dim),
        make_inputs=inputs,
        candidates=candidates,
        floor_bytes=(2 * batch * heads * dim * (dim + 1) + 4 * batch * heads * dim) * 4,
        verify=same_step,
    )


def attention_case(normalize, eager, shape, direction, dtype=torch.float32, layout="contiguous") -> Case:
    def candidates():
        attention = camox_attr("linear_attention")
        return {"camox": lambda q, k, v: as_image(attention(q, k, v, normalize=normalize)), "eager": eager}

    elements = 11 if direction == "forward_backward" else 4
    return Case(
        group=f"linear_attention_{normalize}",
        shape=shape,
        make_inputs=lambda: heads_of(shape, dtype, layout),
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
    )


GPU = on_gpu(shapes=((16, 8, 7744, 32),), rehearsal=(1, 2, 9, 4))
make_case_feature = GPU(partial(attention_case, "feature", eager_feature))
make_case_sum = GPU(partial(attention_case, "sum", eager_sum))
CAUSAL_GPU = on_gpu(
    shapes=tuple((8, length, 16, 64) for length in (1024, 2048, 4096, 8192)),
    rehearsal=(1, 128, 2, 16),
    dtypes=(torch.bfloat16,),
    full=True,
)
make_case_causal = CAUSAL_GPU(partial(causal_case_on_gpu, "linear_attention_causal", {}, eager_causal, fla_causal))
SUMS = {"feature_map": "identity", "normalize": "none"}
make_case_causal_sums = CAUSAL_GPU(
    partial(causal_case_on_gpu, "linear_attention_causal_sums", SUMS, eager_causal_sums, fla_causal_sums)
)


def numbers_of_either(numbers, inputs):
    """The output is that of one of the two formulas."""
    q, k, v = (x.detach() for x in inputs)
    misses = [(numbers["output0"] - formula(q, k, v)).abs().max().item() for formula in (eager_feature, standard)]
    return None if min(misses) < 1e-4 else f"neither linear nor standard attention, off by {misses}"


def standard_case(direction) -> Case:
    case = attention_case("feature", standard, STANDARD, direction)

    def candidates():
        return {**case.candidates(), "compile": None}

    return replace(case, group="standard_attention", candidates=candidates, verify=numbers_of_either)


def cases() -> list[Case]:
    found = []
    for direction in DIRECTIONS:
        for normalize, eager in (("feature", eager_feature), ("sum", eager_sum)):
            for shape in SHAPES:
                plain = attention_case(normalize, eager, shape, direction)
                found.append(replace(plain, quick=normalize == "feature"))
        plain = attention_case("feature", eager_feature, SHAPES[0], direction)
        for dtype, layout, name in (
            (torch.float32, "channels_last", "contiguous"),
            (torch.bfloat16, "contiguous", "float32"),
        ):
            beside = attention_case("feature", eager_feature, SHAPES[0], direction, dtype, layout)
            found.append(replace(beside, compare_with={name: plain}, default_allocator=False))
        found.append(standard_case(direction))
        found.append(causal_case(CAUSAL, direction))
    found.append(causal_case(CUMSUM, "forward_backward", eager_cumsum, "linear_attention_cumsum"))
    found.append(step_case(8, 8, 64))
    return found
