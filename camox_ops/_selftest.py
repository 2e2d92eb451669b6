"""What `python -m camox_ops check` and `bench` run: every op on small images against camox_ops.reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import _cuda, reference
from ._ops import IMAGE_OPS
from .ops.bands import frequency_bands
from .ops.bdh import bdh_attention, bdh_attention_step
from .ops.box import box_mean, structure_weight
from .ops.edge import edge_maps
from .ops.grad_norms import grad_group_norms, scale_grads_
from .ops.linear_attention import MOST_DIM, linear_attention, linear_attention_packed, linear_attention_step
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.moe import moe_aux_loss, moe_combine, moe_dispatch, moe_route, moe_routing
from .ops.norm2d import layer_norm2d
from .ops.rope import rope
from .ops.short_attention import short_attention_packed
from .ops.spatial_gradient import spatial_gradient
from .ops.structure_loss import structure_loss

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "channels_last", "strided")
CHECK_SHAPE = (2, 5, 33, 37)
BENCH_SHAPE = (4, 80, 72, 72)
MOST_TOKENS = 1024
FLOAT32_SLACK = 2**-21  # of sums in another order: 4 eps


class Op(NamedTuple):
    """name, the op and its reference as functions of the same tensors, and inputs(shape, dtype) -> those tensors, of
    which (B, C, H, W) ones are tried in every layout; plain: what `bench` times beside it where that is not the
    reference.

    heads: the inputs are (B, H, T, D), which models also store with the positions adjacent.
    offset: also tried with inputs of mean 1e4, which for an attention leave nothing but rounding.
    least_side: height and width below which the op has no answer, such as a border without a pixel to reflect.
    terms: how large the terms are that the gradients add up, where nothing but rounding may be left of them: one
    channel under a norm, a single key of an attention.
    half_slack: how far, as a share of the largest element, half precision may be from one rounding of our own float32
    result on CUDA: more where exp is ex2.approx there (linear_attention); None where tensor cores round the factors of
    products to half precision, which leaves nothing to compare (bdh_attention, longer short_attention)."""

    name: str
    ours: Callable
    reference: Callable
    inputs: Callable
    plain: Callable | None = None
    heads: bool = False
    offset: bool = True
    least_side: int = 1
    terms: float = 0.0
    half_slack: float | None = FLOAT32_SLACK


class Result(NamedTuple):
    """The worst of an op's outputs, or of its gradients: error against float64 and what the tolerance rule allows."""

    op: str
    what: str
    device: str
    dtype: str
    layout: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def image(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor]:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype),)


def image_and_affine(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, weight and bias."""
    return (*image(shape, dtype), *torch.linspace(-1, 1, 2 * shape[1]).to(dtype).chunk(2))


def images(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x and y."""
    return tuple(torch.randn((2, *shape), generator=torch.Generator().manual_seed(0)).to(dtype))


def rows_and_affine(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, residual, and weight and bias of the last dimension."""
    return (*images(shape, dtype), *torch.linspace(-1, 1, 2 * shape[-1]).to(dtype).chunk(2))


def seed_on(device: torch.device) -> torch.Tensor:
    """Of the same mask every time; a fill, which a CUDA graph can capture."""
    return torch.full((), 0x0123456789ABCDEF, dtype=torch.int64, device=device)


def norm_with_seed(x, residual, weight, bias) -> torch.Tensor:
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    op = torch.ops.camox_ops.dropout_add_layer_norm
    return op(x, residual, weight.to(real), bias.to(real), seed_on(x.device), 0.25, 1e-3)[0]


def heads_and_tables(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x as (B, H, T, D), and the tables of the even part of D."""
    return image(shape, dtype)[0], tables(shape[2], shape[3] // 2, dtype)


def tables(length: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """cos and sin. One tensor: their gradients are sums of terms of one size, of which either may cancel by chance."""
    angles = torch.linspace(-3, 3, length * columns).view(length, columns)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def heads(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v as (B, H, T, D), D as large as linear_attention takes it at most."""
    shape = (*shape[:3], min(shape[3], MOST_DIM))
    return tuple(torch.randn((3, *shape), generator=torch.Generator().manual_seed(0)).to(dtype))


def prefix_and_step(q, k, v, attention, step):
    """Causal attention, and one position after all of them."""
    out, state = attention(q, k, v, causal=True, eps=1e-2, return_state=True)
    with torch.no_grad():
        last, _ = step(q[:, :, -1], k[:, :, -1], v[:, :, -1], state, eps=1e-2)
    return out, last + 0 * out[:, :, -1]


def plain_linear_attention(q, k, v, *, return_state, **options):
    out, *state = reference.linear_attention(q, k, v, **options)
    return out, state


def plain_linear_attention_step(q, k, v, state, **options):
    out, *after = reference.linear_attention_step(q, k, v, *state, **options)
    return out, after


def causal_heads(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """As heads. T is limited: the reference holds T x T scores of every head."""
    return heads((*shape[:2], min(shape[2], MOST_TOKENS), shape[3]), dtype)


def norms_and_copy(norms, scale_, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x times its norm and that of a part of it, and times factors that do not fit any other group."""
    found = norms([x.detach(), x[:1].detach()], [0, 1], 2)
    scaled = x.detach().clone()
    # 0.75 and 3, made on x's device: a CUDA graph cannot capture a copy from the host.
    scale_([scaled, scaled], [0, 1], torch.linspace(0.75, 3.0, 2, device=x.device))
    return x * found.sum().to(x.dtype), scaled * x


def packed_heads(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor]:
    """q, k and v in one tensor (B, 3, H, T, D)."""
    return (torch.stack(heads(shape, dtype), 1),)


def attention_with_padding(q, k, v, function, causal=False) -> torch.Tensor:
    """(S, T, H, D) with dropout; every third key of every second sequence is padding."""
    # Made on q's device: a CUDA graph cannot capture a copy from the host.
    sequences, tokens = (torch.arange(size, device=q.device) for size in q.shape[:2])
    padding = sequences[:, None] % 2 * (tokens % 3) == 1
    return function(q, k, v, padding, seed_on(q.device), causal, 0.5, 0.25)


def attention_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v of sequences of six tokens and heads of twelve."""
    return projection(shape, dtype, 6, 4, 12)


def packed_projection(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor]:
    """The same in one tensor (S, T, 3, H, D)."""
    return (torch.stack(attention_inputs(shape, dtype), 2),)


def long_attention_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The same of 41 tokens and heads of 32: on CUDA half types are multiplied by tensor cores."""
    return projection(shape, dtype, 41, 2, 32)


def projection(shape, dtype, tokens: int, heads: int, columns: int) -> tuple[torch.Tensor, ...]:
    """q, k and v of as many sequences as have about the elements of this shape each, two at least."""
    sequences = max(2, torch.Size(shape).numel() // (tokens * heads * columns))
    return tuple(image((sequences, tokens, 3, heads, columns), dtype)[0].unbind(2))


def rows_and_classes(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows of x, the weight of 37 classes, and a bias of theirs."""
    x = image(shape, dtype)[0].flatten(0, -2)
    return x, image((37, shape[-1]), dtype)[0], torch.linspace(-1, 1, 37).to(dtype)


def classes_of(x: torch.Tensor) -> torch.Tensor:
    """A class of 37 for each row; every third is ignored."""
    rows = torch.arange(x.shape[0], device=x.device)
    return (rows * 7 % 37).masked_fill(rows % 3 == 2, -100)


def rows_and_bias(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, and a bias of the last dimension."""
    return *image(shape, dtype), torch.linspace(-1, 1, shape[-1]).to(dtype)


def bias_gelu_with_seed(x, bias) -> torch.Tensor:
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.ops.camox_ops.bias_gelu(x, bias.to(real), seed_on(x.device), 0.25)


def stock_attention(q, k, v) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2)


def image_and_logits(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, and logits over 5 experts for its images."""
    return (*image(shape, dtype), torch.linspace(-2, 3, 5 * shape[0]).view(5, shape[0]).t().contiguous().to(dtype))


def stripes(x: torch.Tensor) -> torch.Tensor:
    """A mask of x's shape, on its device; exact in every dtype."""
    columns = torch.arange(x.shape[-1], device=x.device) // 3 % 3
    return (columns / 2).to(x.dtype).expand(x.shape)


def scales(copies: torch.Tensor) -> torch.Tensor:
    """One for each copy, other than its neighbours'; a power of two, so that no dtype rounds or overflows by it."""
    return torch.exp2(torch.arange(copies.shape[0], device=copies.device) % 5).view(-1, 1, 1, 1).to(copies.dtype)


def mixture(x, logits) -> tuple[torch.Tensor, ...]:
    """Two experts per image, each copy multiplied by another number; sorted again from the experts alone."""
    routing = moe_route(logits, 2)
    copies = moe_dispatch(x, moe_routing(routing.weights, routing.experts, logits.shape[1]))
    y = moe_combine(copies * scales(copies), routing)
    return y, routing.weights.to(x.dtype), moe_aux_loss(routing, logits).to(x.dtype)


def plain_mixture(x, logits) -> tuple[torch.Tensor, ...]:
    real = torch.promote_types(x.dtype, torch.float32)
    weights, experts, counts, offsets, _, position = reference.moe_route(logits.to(real), 2)
    copies = reference.moe_dispatch(x, experts, offsets, position)
    y = reference.moe_combine(copies * scales(copies), weights, experts, offsets, position).to(x.dtype)
    return y, weights.to(x.dtype), reference.moe_aux_loss(logits.to(real), counts, 2).to(x.dtype)


def queries_and_tables(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q as (B, H, T, N) with N even and scores of the size of 1, v of its width shared by the heads, and the tables.

    T is limited: the reference holds T x T scores of every head."""
    shape = (*shape[:2], min(shape[2], MOST_TOKENS), max(2, shape[3] // 2 * 2))
    q, v = images(shape, dtype)
    q = (q * shape[3] ** -0.25).to(dtype)
    return q, v[:, :1].contiguous(), tables(shape[2], shape[3] // 2, dtype)


def causal_and_step(q, v, tables, attention, step) -> tuple[torch.Tensor, ...]:
    """The causal attention, and a second token step by step, which no gradient follows."""
    cos, sin = tables
    y = attention(q, v, cos, sin, causal=True)
    state = None
    with torch.no_grad():
        for t in (0, -1):
            row, state = step(q[:, :, t], v[:, :, t], cos[t], sin[t], state)
    return y, row + 0 * y[:, :, 0]


OPS = (
    Op("edge_maps", edge_maps, reference.edge_maps, image),
    Op(
        "edge_maps reflect",
        lambda x: edge_maps(x, border="reflect"),
        lambda x: reference.edge_maps(x, border="reflect"),
        image,
        least_side=2,
    ),
    Op(
        "bdh_attention",
        lambda q, v, tables: bdh_attention(q, v, *tables),
        lambda q, v, tables: reference.bdh_attention(q, v, *tables),
        queries_and_tables,
        heads=True,
        offset=False,
        half_slack=None,
    ),
    Op(
        "bdh_attention causal",
        lambda *tensors: causal_and_step(*tensors, bdh_attention, bdh_attention_step),
        lambda *tensors: causal_and_step(*tensors, reference.bdh_attention, reference.bdh_attention_step),
        queries_and_tables,
        heads=True,
        offset=False,
        half_slack=None,
    ),
    Op(
        "bdh_attention causal softmax",
        lambda q, v, tables: bdh_attention(q, v, *tables, causal=True, softmax=True),
        lambda q, v, tables: reference.bdh_attention(q, v, *tables, causal=True, softmax=True),
        queries_and_tables,
        heads=True,
        offset=False,
        half_slack=None,
    ),
    Op(
        "bias_gelu",
        bias_gelu_with_seed,
        lambda x, bias: reference.bias_gelu(x, bias, seed_on(x.device), 0.25),
        rows_and_bias,
        lambda x, bias: F.dropout(F.gelu(x + bias), 0.25),
    ),
    Op("box_mean", lambda x: box_mean(x, 31), lambda x: reference.box_mean(x, 31), image),
    Op(
        "box_mean counted",
        lambda x: box_mean(x, (3, 7), count_include_pad=False),
        lambda x: reference.box_mean(x, (3, 7), False),
        image,
    ),
    Op(
        "box_mean structure_weight",
        lambda x: structure_weight(x.detach(), size=15) * x,
        lambda x: reference.structure_weight(x.detach(), 15, 5.0) * x,
        image,
    ),
    Op(
        "dropout",
        lambda x: torch.ops.camox_ops.dropout(x, seed_on(x.device), 0.25),
        lambda x: reference.dropout(x, seed_on(x.device), 0.25),
        image,
        lambda x: F.dropout(x, 0.25),
    ),
    Op(
        "dropout_add_layer_norm",
        norm_with_seed,
        lambda *tensors: reference.dropout_add_layer_norm(*tensors, seed_on(tensors[0].device), 0.25, 1e-3),
        rows_and_affine,
        lambda x, residual, weight, bias: F.layer_norm(residual + F.dropout(x, 0.25), weight.shape, weight, bias, 1e-3),
    ),
    Op("frequency_bands", frequency_bands, reference.frequency_bands, image),
    Op(
        "layer_norm2d gelu",
        lambda x, weight, bias: layer_norm2d(x, weight, bias, 1e-3, activation="gelu"),
        lambda x, weight, bias: reference.layer_norm2d(x, weight, bias, 1e-3, activation="gelu"),
        image_and_affine,
        terms=36.0,  # 1 / sqrt(eps), times the largest derivative of gelu
    ),
    Op(
        "linear_cross_entropy",
        lambda x, weight, bias: linear_cross_entropy(
            x, weight, classes_of(x), bias=bias, label_smoothing=0.1, reduction="none"
        ),
        lambda x, weight, bias: reference.linear_cross_entropy(
            x, weight, classes_of(x), bias, label_smoothing=0.1, reduction="none"
        ),
        rows_and_classes,
        lambda x, weight, bias: F.cross_entropy(
            F.linear(x, weight, bias), classes_of(x), label_smoothing=0.1, reduction="none"
        ),
        offset=False,
        half_slack=None,
    ),
    Op("moe_combine", mixture, plain_mixture, image_and_logits),
    Op(
        "linear_attention",
        lambda q, k, v: linear_attention(q, k, v, eps=1e-2),
        lambda q, k, v: reference.linear_attention(q, k, v, eps=1e-2)[0],
        heads,
        heads=True,
        offset=False,
        terms=1.0,
        half_slack=2**-19,
    ),
    Op(
        "linear_attention causal",
        lambda *tensors: prefix_and_step(*tensors, linear_attention, linear_attention_step),
        lambda *tensors: prefix_and_step(*tensors, plain_linear_attention, plain_linear_attention_step),
        causal_heads,
        heads=True,
        offset=False,
        terms=1.0,
        half_slack=2**-19,
    ),
    Op(
        "linear_attention packed",
        lambda qkv: linear_attention_packed(qkv, eps=1e-2),
        lambda qkv: reference.linear_attention(*qkv.unbind(1), eps=1e-2)[0],
        packed_heads,
        heads=True,
        offset=False,
        terms=1.0,
        half_slack=2**-19,
    ),
    Op(  # without a gradient: beside x
        "grad_group_norms scale_grads_",
        lambda x: norms_and_copy(grad_group_norms, scale_grads_, x),
        lambda x: norms_and_copy(reference.grad_group_norms, reference.scale_grads_, x),
        image,
    ),
    Op(
        "rope",
        lambda x, tables: rope(x, *tables, rotary_dim=2 * tables.shape[2]),
        lambda x, tables: reference.rope(x, *tables, rotary_dim=2 * tables.shape[2]),
        heads_and_tables,
        heads=True,
    ),
    Op(
        "short_attention",
        lambda q, k, v: attention_with_padding(q, k, v, torch.ops.camox_ops.short_attention),
        lambda q, k, v: attention_with_padding(q, k, v, reference.short_attention),
        attention_inputs,
        stock_attention,
        offset=False,
    ),
    Op(
        "short_attention packed",
        lambda qkv: short_attention_packed(qkv, causal=True),
        lambda qkv: reference.short_attention(*qkv.unbind(2), causal=True),
        packed_projection,
        offset=False,
    ),
    Op(
        "short_attention causal",
        lambda q, k, v: attention_with_padding(q, k, v, torch.ops.camox_ops.short_attention, causal=True),
        lambda q, k, v: attention_with_padding(q, k, v, reference.short_attention, causal=True),
        long_attention_inputs,
        offset=False,
        half_slack=None,
    ),
    Op(
        "sparse_gate",
        lambda x, y: torch.ops.camox_ops.sparse_gate(x, y, seed_on(x.device), 0.25),
        lambda x, y: reference.sparse_gate(x, y, seed_on(x.device), 0.25),
        images,
        lambda x, y: F.dropout(F.relu(x) * F.relu(y), 0.25),
    ),
    Op("spatial_gradient", spatial_gradient, reference.spatial_gradient, image),
    Op(
        "structure_loss",
        lambda x: structure_loss(x, stripes(x), size=15, reduction="none"),
        lambda x: reference.structure_loss(x, stripes(x), size=15, reduction="none"),
        image,
    ),
    *(
        Op(name, getattr(import_module(f".ops.{name}", __package__), name), getattr(reference, name), image)
        for name in IMAGE_OPS
    ),
)


def devices() -> list[str]:
    """The CPU, and the GPU where the CUDA part runs on it."""
    return ["cpu", "cuda"] if torch.cuda.is_available() and not _cuda.unusable(0) else ["cpu"]


def arranged(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout; "strided" is every second column of a larger tensor, "positions" has the
    last but one dimension adjacent, as heads of an image have it."""
    if layout == "positions" and tensor.dim() >= 4:
        return tensor.detach().mT.clone(memory_format=torch.contiguous_format).mT
    if tensor.dim() != 4 or layout == "contiguous":
        return tensor.detach().clone()
    if layout == "channels_last":
        return tensor.detach().clone(memory_format=torch.channels_last)
    return tensor.detach().repeat_interleave(2, dim=3)[..., ::2]


def run(function: Callable, inputs: tuple, upstream: tuple | None) -> list[list[torch.Tensor]]:
    """[outputs, gradients of the inputs]; upstream: the gradients that flow in, None for fixed ones."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    upstream = upstream or [weights(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, leaves, [u.to(y.dtype) for u, y in zip(upstream, outputs, strict=True)])
    return [[output.detach() for output in outputs], list(gradients)]


def weights(output: torch.Tensor) -> torch.Tensor:
    """Incoming gradients that are exact in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-8, 9, output.shape, generator=generator).to(output) / 8


def remainder_of(dtype: torch.dtype, truth: torch.Tensor, terms: float) -> float:
    """What rounding leaves of terms that cancel, where the truth is less than a thousandth of them: 4 eps of the terms
    in what is computed in, float32 or float64.

    Such a truth says nothing of the size of what was added up. A product and a sum of float32 may be one fused
    operation, which rounds what it subtracts once and what it subtracts from never."""
    cancels = truth.numel() > 0 and truth.abs().max().item() < terms / 1000
    real = torch.promote_types(dtype, torch.float32)
    return 4 * torch.finfo(real).eps * terms if cancels else 0.0


def allowance(theirs: torch.Tensor, truth: torch.Tensor, terms: float = 0.0) -> float:
    """The tolerance rule: 2 max|torch in the same dtype - float64| + 4 eps(dtype) max|float64|, and what is left of
    terms that cancel.

    In float64 the truth is rounded like what is compared with it: 16 eps. Where plain PyTorch overflows or divides by a
    rounded zero its error says nothing and is left out."""
    times = 16 if theirs.dtype == torch.float64 else 4
    rounding = times * torch.finfo(theirs.dtype).eps * truth.abs().max().item()
    rounding += remainder_of(theirs.dtype, truth, terms)
    finite = (theirs.double() - truth)[theirs.isfinite()]
    return 2 * (finite.abs().max().item() if finite.numel() else 0.0) + rounding


def check() -> Iterator[Result]:
    """Outputs and gradients of every op on every device, in every dtype and layout; the CPU says what is allowed."""
    for op in OPS:
        for dtype in DTYPES:
            inputs = op.inputs(CHECK_SHAPE, dtype)
            same_dtype = run(op.reference, inputs, None)
            truth = run(op.reference, tuple(tensor.double() for tensor in inputs), None)
            for device in devices():
                if device == "cuda" and dtype == torch.float64:
                    continue
                for layout in LAYOUTS:
                    ours = run(op.ours, tuple(arranged(tensor.to(device), layout) for tensor in inputs), None)
                    for what, *tensors in zip(("forward", "backward"), ours, same_dtype, truth, strict=True):
                        name = str(dtype).removeprefix("torch.")
                        yield Result(op.name, what, device, name, layout, *worst(*tensors, op.terms))


def worst(ours: list, theirs: list, truth: list, terms: float = 0.0) -> tuple[float, float]:
    """(error, allowed) of the tensor that is nearest to its limit or farthest beyond it."""
    found = []
    for mine, same, true in zip(ours, theirs, truth, strict=True):
        if not true.numel():
            continue
        error = (mine.cpu().double() - true).abs().max().item()
        # A NaN is an infinite error, so that it never compares as small.
        found.append((error if error == error else float("inf"), allowance(same, true, terms)))
    return max(found, key=lambda pair: pair[0] - pair[1])


def bench(rounds: int = 15) -> Iterator[tuple[str, str, float, float]]:
    """(op, pass, median ms of ours, median ms of plain PyTorch) in float32, taken in turns."""
    for op in OPS:
        inputs = op.inputs(BENCH_SHAPE, torch.float32)
        sides = (op.ours, op.plain or op.reference)
        upstream = run(op.reference, inputs, None)[0]
        for what, step in (
            ("forward", lambda function, inputs=inputs: function(*inputs)),
            ("forward+backward", lambda function, inputs=inputs, upstream=upstream: run(function, inputs, upstream)),
        ):
            times = ([], [])
            for _ in range(rounds):
                for side, function in enumerate(sides):
                    begin = time.perf_counter()
                    step(function)
                    times[side].append(1e3 * (time.perf_counter() - begin))
            yield op.name, what, statistics.median(times[0]), statistics.median(times[1])
