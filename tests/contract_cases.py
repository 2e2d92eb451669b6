"""One entry for every public op: how its inputs are made, and what is particular about it.

tests/test_contract.py runs all its checks over CASES: a new op gets them by its entry here, and fails without one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from dropout_inputs import affine, normal
from helpers import DEVICE, reference
from image_op import number_of

import camox_ops as cx
from camox_ops._ops import IMAGE_OPS
from camox_ops.ops.linear_attention import linear_attention_packed
from camox_ops.ops.short_attention import short_attention_packed

# Public functions that run no operator, and why.
WITHOUT_OPERATOR = {
    "rope_tables": "makes cosines and sines with torch's own functions",
}
# Operators that no public function of tensors calls, and where they are tested.
WITHOUT_CASE = {
    "gemm": "camox_ops.nn's projections (test_gemm.py)",
    "gemm_sums": "the same",
    "linear_cross_entropy_rows_": "cx.linear_cross_entropy's own on CUDA (test_linear_cross_entropy.py)",
    "moe_activation": "cx.nn.TokenMoE (test_token_moe.py)",
    "moe_activation_backward": "cx.nn.TokenMoE (test_token_moe.py)",
    "moe_experts_mm": "cx.nn.TokenMoE (test_token_moe.py)",
    "moe_experts_mm_tn": "cx.nn.TokenMoE (test_token_moe.py)",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A public op with some of its options.

    ours, plain: the op and the same from camox_ops.reference, as functions of the tensors that inputs(shape, dtype)
    makes, densely; of these the last `fixed` are not differentiated. A shape is whatever `inputs` takes.
    shapes: two for everything; a graph that was compiled for the first is made dynamic by the second.
    wide: around vectors and tiles, for instruction sets and layouts. large: several threads share them.
    beyond: a shape, and the dimension of the first input whose elements lie more than 2^31 apart."""

    name: str
    variant: str = ""
    ours: Callable
    plain: Callable
    inputs: Callable
    fixed: int = 0
    shapes: tuple
    wide: tuple
    large: tuple
    empty: tuple
    beyond: tuple
    # Outputs are dense. What of the first input's order of dimensions they keep: "nothing", "channels_last" alone, that
    # of a "dense" input, "everything", or all but the "last innermost" or the "first outermost".
    keeps: str = "nothing"
    states: int = 0  # so many of the last outputs are no result in the order of the input
    # Results whose sums are in another order for another layout of the inputs, so that bits differ.
    near_in_layouts: tuple[int, ...] = ()
    # The same for all results on CUDA, where other layouts have kernels of their own, ours or cuBLAS': their sums are
    # divided elsewhere, or other products of theirs are fused with an addition.
    near_in_layouts_on_cuda: bool = False
    # Results (outputs, then gradients) that are sums, in another order on each instruction set: the tolerance rule
    # holds there, equal bits elsewhere.
    sums: tuple[int, ...] = ()
    takes_nan: bool = True  # and infinities
    same_nan: bool = True  # NaN has the same bits on each instruction set too
    sums_in_layouts: tuple[int, ...] | None = None  # of inputs that are not contiguous, where that differs
    # Under autocast: so many inputs are cast to its dtype; None: none, everything stays as it is.
    cast: int | None = None
    twice: bool = True  # has second derivatives, or says that it has none
    # The kernel runs where nothing is differentiated, and else the reference, by which torch derives all.
    gradient_of_reference: bool = False
    # Which inputs and outputs are saved for backward, and (dtype, elements) of what else is.
    saves: tuple = ()

    def __str__(self) -> str:
        return f"{self.name} {self.variant}".strip()

    @property
    def family(self) -> str:
        return getattr(cx, self.name).__module__.rpartition(".")[2]


def real_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def some_of(*shape, share=0.3, seed=5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) < share


def drawn_seed() -> torch.Tensor:
    """What the ops draw where they drop."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=DEVICE)


# ---- ops of images (B, C, H, W) ----
of_images = partial(
    Case,
    inputs=lambda shape, dtype: (normal(shape, dtype),),
    shapes=((2, 3, 5, 7), (1, 4, 7, 6)),
    wide=((2, 3, 13, 35), (1, 66, 4, 19), (1, 1, 3, 600), (1, 1, 5, 2100), (1, 200, 9, 20)),
    large=((3, 17, 170, 33),),
    empty=((0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)),
    beyond=((1, 1, 3, 8), 2),
    keeps="channels_last",
)


def stacked(maps, x):
    return torch.cat([*maps, x], dim=1)


# A larger eps keeps gradients off the kink of the root at 0.
edge_maps = partial(of_images, name="edge_maps", saves=(0,), near_in_layouts_on_cuda=True)
EDGE = (
    edge_maps(ours=partial(cx.edge_maps, eps=1e-3), plain=partial(reference.edge_maps, eps=1e-3)),
    edge_maps(
        variant="replicate",
        ours=partial(cx.edge_maps, eps=1e-3, border="replicate"),
        plain=partial(reference.edge_maps, eps=1e-3, border="replicate"),
    ),
    edge_maps(
        variant="reflect stacked",
        ours=partial(cx.edge_maps, eps=1e-3, border="reflect", stacked=True),
        plain=lambda x: stacked(reference.edge_maps(x, 1e-3, "reflect"), x),
    ),
)
spatial_gradient = partial(of_images, name="spatial_gradient")
SPATIAL_GRADIENT = (
    spatial_gradient(ours=cx.spatial_gradient, plain=reference.spatial_gradient),
    *(
        spatial_gradient(
            variant=border,
            ours=partial(cx.spatial_gradient, operator="scharr", border=border, normalized=True),
            plain=partial(reference.spatial_gradient, operator="scharr", border=border, normalized=True),
        )
        for border in ("replicate", "reflect")
    ),
)
frequency_bands = partial(of_images, name="frequency_bands")
BANDS = (
    frequency_bands(ours=cx.frequency_bands, plain=reference.frequency_bands),
    frequency_bands(
        variant="stacked",
        ours=partial(cx.frequency_bands, stacked=True),
        plain=lambda x: stacked(reference.frequency_bands(x), x),
    ),
)
box_mean = partial(of_images, name="box_mean", near_in_layouts_on_cuda=True)
BOX = (
    box_mean(ours=partial(cx.box_mean, size=5), plain=partial(reference.box_mean, size=5)),
    box_mean(
        variant="counted",
        ours=partial(cx.box_mean, size=(3, 15), count_include_pad=False),
        plain=partial(reference.box_mean, size=(3, 15), count_include_pad=False),
    ),
    box_mean(
        variant="1-d",
        ours=partial(cx.box_mean, size=25),
        plain=partial(reference.box_mean, size=25),
        shapes=((2, 3, 35), (1, 4, 42)),
        wide=((2, 3, 455), (1, 66, 76), (1, 1, 1800), (1, 200, 31)),
        large=((3, 17, 5610),),
        empty=((0, 3, 4), (2, 0, 4), (2, 3, 0)),
        beyond=((1, 3, 8), 1),
        keeps="channels_last",
    ),
    box_mean(  # the weight has no gradient
        name="structure_weight",
        variant="beside box_mean",
        ours=lambda x: (cx.structure_weight(x, size=7, gain=3.0), cx.box_mean(x, 7)),
        plain=lambda x: (reference.structure_weight(x, 7, 3.0), reference.box_mean(x, 7)),
    ),
)


def mask_inputs(shape, dtype):
    """logits and a mask, twice which is still one."""
    return normal(shape, dtype), (normal(shape, torch.float32, seed=1).sigmoid() / 2).to(dtype)


def weighted_inputs(shape, dtype):
    """p, a mask and its weight."""
    logits, mask = mask_inputs(shape, dtype)
    p = (0.1 + 0.3 * logits.double().sigmoid()).to(dtype)  # twice which is one of them
    return p, mask, (1 + 5 * normal(shape, torch.float32, seed=2).sigmoid()).to(dtype)


structure_loss = partial(
    of_images,
    name="structure_loss",
    inputs=mask_inputs,
    fixed=1,
    sums=(0, 1),
    keeps="nothing",
    empty=((0, 3, 4, 4), (2, 0, 4, 4)),
    twice=False,
    saves=(0, 1, (torch.float32, 210), (torch.float32, 24)),
)
STRUCTURE_LOSS = (
    structure_loss(
        ours=partial(cx.structure_loss, size=5, reduction="none"),
        plain=partial(reference.structure_loss, size=5, reduction="none"),
    ),
    structure_loss(
        variant="mean sum",
        ours=partial(cx.structure_loss, size=5, bce="mean", reduction="sum"),
        plain=partial(reference.structure_loss, size=5, bce="mean", reduction="sum"),
        empty=(),
    ),
    structure_loss(
        variant="probabilities",
        ours=lambda p, mask, weight: cx.structure_loss(p, mask, weight=weight, smooth=0.5, probabilities=True),
        plain=lambda p, mask, weight: reference.structure_loss(p, mask, weight, smooth=0.5, probabilities=True),
        inputs=weighted_inputs,
        fixed=2,
        empty=(),
        saves=(0, 1, 2, (torch.float32, 24)),
    ),
)


def norms_by_group(function, x):
    return function([x, x[:1], None, x], [0, 2, 1, 0], 4, reduce="l2")


def scaled_copy(function, x):
    with torch.no_grad():
        y = x.clone()
        function([y, None, y], [0, 1, 2], torch.tensor([0.5, 3.0, 0.7], device=x.device))
    return y


GRAD_NORMS = (  # neither has a gradient
    of_images(
        name="grad_group_norms",
        variant="beside box_mean",
        ours=lambda x: (norms_by_group(cx.grad_group_norms, x), cx.box_mean(x, 3)),
        plain=lambda x: (norms_by_group(reference.grad_group_norms, x.detach()), reference.box_mean(x, 3)),
        near_in_layouts=(0,),
    ),
    of_images(
        name="scale_grads_",
        variant="beside box_mean",
        ours=lambda x: (scaled_copy(cx.scale_grads_, x), cx.box_mean(x, 3))[::-1],
        plain=lambda x: (scaled_copy(reference.scale_grads_, x), reference.box_mean(x, 3))[::-1],
        states=1,
    ),
)

ONE_IMAGE = tuple(
    of_images(
        name=name,
        variant="" if border == "zeros" else border,
        ours=partial(getattr(cx, name), border=border, **number_of(name)),
        plain=partial(getattr(reference, name), border=border, **number_of(name)),
        saves=(0,),
    )
    for name in IMAGE_OPS
    for border in ("zeros", "replicate", "reflect")
)


def norm2d_inputs(shape, dtype):
    """x, weight, bias."""
    return normal(shape, dtype), *affine(shape[1], dtype)


layer_norm2d = partial(
    of_images,
    name="layer_norm2d",
    near_in_layouts=tuple(range(5)),
    beyond=((1, 3, 2, 8), 1),
    shapes=((2, 6, 5, 7), (1, 12, 7, 6)),
    wide=((2, 6, 13, 35), (1, 66, 4, 19)),
    large=((3, 18, 40, 33), (1, 600, 9, 13)),
)
NORM2D = (
    layer_norm2d(
        ours=cx.layer_norm2d,
        plain=reference.layer_norm2d,
        inputs=norm2d_inputs,
        sums=(2, 3),
        sums_in_layouts=(0, 1, 2, 3),
        saves=(0, 1, 2, (torch.float32, 140 if DEVICE.type == "cuda" else 70)),  # there variances too
    ),
    layer_norm2d(
        variant="gelu residual groups",
        ours=lambda x, w, b, r: cx.layer_norm2d(x, w, b, 1e-3, activation="gelu", residual=r, groups=3),
        plain=lambda x, w, b, r: reference.layer_norm2d(x, w, b, 1e-3, activation="gelu", residual=r, groups=3),
        inputs=lambda shape, dtype: (*norm2d_inputs(shape, dtype), normal(shape, dtype, seed=3)),
        sums=(2, 3),
        sums_in_layouts=(0, 1, 2, 3),
        empty=((0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)),
        saves=(0, 1, 2, (torch.float32, 420)),
    ),
)


def with_activation(function, activation, x, weight, bias):
    return function(x, weight, bias, activation=activation)


NORM2D_ACTIVATIONS = tuple(
    replace(
        NORM2D[0],
        variant=activation,
        ours=partial(with_activation, cx.layer_norm2d, activation),
        plain=partial(with_activation, reference.layer_norm2d, activation),
        saves=(0, 1, 2, (torch.float32, 140)),
    )
    for activation in ("gelu_tanh", "relu", "silu")
)

# ---- ops of rows, of any number of dimensions ----
SEED = (torch.int64, 1)
of_rows = partial(
    Case,
    shapes=((2, 3, 5), (4, 3, 7)),
    wide=((999,), (17, 5, 300), (2, 2, 2, 2, 2, 2, 3)),
    large=((40, 300, 7),),
    empty=((0,), (0, 3), (3, 0), (2, 0, 4), (2, 3, 0)),
    beyond=((3, 8), 0),
)
dropout = of_rows(
    name="dropout",
    ours=lambda x: cx.dropout(x, 0.3),
    plain=lambda x: reference.dropout(x, drawn_seed(), 0.3),
    inputs=lambda shape, dtype: (normal(shape, dtype),),
    keeps="dense",
    saves=(SEED,),
)
sparse_gate = of_rows(
    name="sparse_gate",
    ours=cx.sparse_gate,
    plain=reference.sparse_gate,
    inputs=lambda shape, dtype: (normal(shape, dtype), normal(shape, dtype, seed=1)),
    keeps="dense",
    saves=(0, 1),
)
dropout_add_layer_norm = of_rows(
    name="dropout_add_layer_norm",
    ours=cx.dropout_add_layer_norm,
    plain=reference.dropout_add_layer_norm,
    inputs=lambda shape, dtype: (normal(shape, dtype), normal(shape, dtype, seed=1), *affine(shape[-1], dtype)),
    sums=(0, 1, 2, 3, 4),
    twice=False,
    saves=(0, 1, 2, (torch.float32, 12)),
)
bias_gelu = of_rows(
    name="bias_gelu",
    ours=cx.bias_gelu,
    plain=reference.bias_gelu,
    inputs=lambda shape, dtype: (normal(shape, dtype), affine(shape[-1], dtype)[1]),
    same_nan=False,
    saves=(0, 1),
)
ROWS = (
    dropout,
    sparse_gate,
    replace(
        sparse_gate,
        variant="p",
        ours=partial(cx.sparse_gate, p=0.3, training=True),
        plain=lambda x, y: reference.sparse_gate(x, y, drawn_seed(), 0.3),
        saves=(0, 1, SEED),
    ),
    dropout_add_layer_norm,
    replace(
        dropout_add_layer_norm,
        variant="p",
        ours=partial(cx.dropout_add_layer_norm, p=0.3, training=True, eps=1e-3),
        plain=lambda *t: reference.dropout_add_layer_norm(*t, drawn_seed(), 0.3, 1e-3),
        saves=(0, 1, 2, (torch.float32, 12), SEED),
    ),
    bias_gelu,
    replace(
        bias_gelu,
        variant="p",
        ours=partial(cx.bias_gelu, p=0.3, training=True),
        plain=lambda x, bias: reference.bias_gelu(x, bias, drawn_seed(), 0.3),
        saves=(0, 1, SEED),
    ),
)


def classes_of(rows, classes):
    """A class of each row; every third row is ignored, all are where there is no class."""
    targets = torch.arange(rows, device=DEVICE) * 7 % max(classes, 1)
    return targets.masked_fill(
        torch.arange(rows, device=DEVICE) % 3 == 2 if classes else torch.ones_like(targets) > 0, -100
    )


def cross_entropy_inputs(shape, dtype):
    """x, weight and target of (rows, D, classes)."""
    rows, depth, classes = shape
    return normal((rows, depth), dtype), normal((classes, depth), dtype, seed=1), classes_of(rows, classes)


def cross_entropy_with_bias(shape, dtype):
    x, weight, target = cross_entropy_inputs(shape, dtype)
    return x, weight, normal((shape[2],), real_of(dtype), seed=2), target


linear_cross_entropy = partial(
    Case,
    name="linear_cross_entropy",
    inputs=cross_entropy_inputs,
    fixed=1,
    shapes=((6, 5, 9), (4, 7, 11)),
    wide=((9, 34, 530), (270, 20, 40)),
    large=((600, 40, 1100),),
    empty=((0, 3, 5), (4, 0, 5), (4, 3, 0)),
    beyond=((3, 8, 5), 0),
    near_in_layouts_on_cuda=True,
    sums=(0, 1, 2),
    cast=2,
    twice=False,
    saves=(0, 1, 2, (torch.float32, 6), (torch.float32, 6)),
)
LINEAR_CROSS_ENTROPY = (
    linear_cross_entropy(
        ours=partial(cx.linear_cross_entropy, reduction="none"),
        plain=partial(reference.linear_cross_entropy, reduction="none"),
    ),
    linear_cross_entropy(
        variant="smoothed with bias",
        ours=lambda x, weight, bias, target: cx.linear_cross_entropy(
            x, weight, target, bias=bias, label_smoothing=0.2, reduction="sum"
        ),
        plain=lambda x, weight, bias, target: reference.linear_cross_entropy(
            x, weight, target, bias, label_smoothing=0.2, reduction="sum"
        ),
        inputs=cross_entropy_with_bias,
        sums=(0, 1, 2, 3),
        cast=3,
        # The gradients are made in the forward.
        saves=(0, 1, 3, 2, *((torch.float32, elements) for elements in (6, 6, 30, 45, 9))),
    ),
)

# ---- attention ----
of_heads = partial(Case, beyond=((1, 2, 4, 8), 1), empty=((0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)))


def tables(rows, columns, dtype):
    angles = 3 * normal((rows, columns), torch.float64, seed=9)
    return angles.cos().to(real_of(dtype)), angles.sin().to(real_of(dtype))


rope = partial(
    of_heads,
    name="rope",
    inputs=lambda shape, dtype: (normal(shape, dtype), *tables(shape[2] + 1, shape[3] // 2, dtype)),
    shapes=((2, 3, 5, 8), (3, 2, 4, 8)),
    wide=((2, 3, 9, 34), (1, 2, 7, 96), (2, 3, 9, 6)),
    large=((3, 4, 130, 48),),
    keeps="last innermost",
    saves=(0, 1, 2),
)


def rope_positions(shape, dtype):
    """x as (B, T, H, D), tables of one angle an element, positions."""
    batch, length, _, dim = shape
    rows = torch.arange(batch * length, device=DEVICE).view(batch, length) % 3
    return normal(shape, dtype), *tables(3, dim // 2 * 2, dtype), rows


def rope_packed(shape, dtype):
    """x as (total, H, D), tables, cu_seqlens."""
    cu_seqlens = torch.tensor([0, min(1, shape[0]), shape[0]], dtype=torch.int32, device=DEVICE)
    return normal(shape, dtype), *tables(shape[0] + 1, shape[2] // 2, dtype), cu_seqlens


def rope_of_positions(function, x, cos, sin, rows):
    return function(x, cos, sin, interleaved=True, layout="bthd", positions=rows)


ROPE = (
    rope(ours=cx.rope, plain=reference.rope),
    rope(
        variant="interleaved positions",
        ours=partial(rope_of_positions, cx.rope),
        plain=partial(rope_of_positions, reference.rope),
        inputs=rope_positions,
        fixed=1,
        saves=(0, 1, 2, 3),
    ),
    rope(
        variant="packed",
        ours=lambda x, cos, sin, lengths: cx.rope(x, cos, sin, cu_seqlens=lengths),
        plain=lambda x, cos, sin, lengths: reference.rope(x, cos, sin, cu_seqlens=lengths),
        inputs=rope_packed,
        fixed=1,
        shapes=((6, 3, 8), (5, 2, 8)),
        wide=((9, 3, 34), (7, 2, 96)),
        large=((130, 4, 48),),
        empty=((0, 3, 4), (4, 0, 4), (4, 3, 0)),
        beyond=((3, 2, 8), 0),
        saves=(0, 1, 2, 3),
    ),
    rope(
        variant="in place",
        ours=lambda x, cos, sin: cx.rope(x * 1, cos, sin, inplace=True),
        plain=reference.rope,
        fixed=2,
        keeps="everything",
        saves=(1, 2),
    ),
)

ROPE_PAIRS = tuple(
    replace(
        ROPE[0],
        variant=" ".join(filter(None, ("interleaved" * interleaved, "each" * each))),
        ours=partial(cx.rope, interleaved=interleaved),
        plain=partial(reference.rope, interleaved=interleaved),
        inputs=lambda shape, dtype, each=each: (
            normal(shape, dtype),
            *tables(shape[2] + 1, shape[3] // (1 if each else 2), dtype),
        ),
    )
    for interleaved, each in ((True, False), (False, True), (True, True))
)


def short_attention_inputs(shape, dtype):
    """q, k, v as (S, T, H, D) and padding; all keys of the first sequence are padding."""
    mask = some_of(*shape[:2])
    mask[:1] = True
    return *(normal(shape, dtype, seed=seed) for seed in range(3)), mask


short_attention = Case(
    name="short_attention",
    ours=lambda q, k, v, mask: cx.short_attention(q, k, v, key_padding_mask=mask, causal=True),
    plain=lambda q, k, v, mask: reference.short_attention(q, k, v, mask, causal=True),
    inputs=short_attention_inputs,
    fixed=1,
    shapes=((9, 6, 2, 12), (4, 5, 3, 8)),
    wide=((9, 6, 8, 12), (3, 16, 3, 5), (3, 33, 2, 40)),
    large=((300, 6, 8, 12), (40, 20, 3, 20)),
    empty=((0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)),
    beyond=((3, 4, 2, 8), 0),
    near_in_layouts_on_cuda=True,
    sums=(0, 1, 2, 3),
    cast=3,
    keeps="last innermost",
    twice=False,
    saves=(0, 1, 2, 3),
)
SHORT_ATTENTION = (
    short_attention,
    replace(
        short_attention,
        variant="p",
        ours=lambda q, k, v: cx.short_attention(q, k, v, p=0.3, training=True),
        plain=lambda q, k, v: reference.short_attention(q, k, v, None, drawn_seed(), p=0.3),
        inputs=lambda shape, dtype: short_attention_inputs(shape, dtype)[:3],
        fixed=0,
        saves=(0, 1, 2, SEED),
    ),
    replace(
        short_attention,
        variant="packed",
        ours=lambda qkv, mask: short_attention_packed(qkv, key_padding_mask=mask, causal=True),
        plain=lambda qkv, mask: reference.short_attention(*qkv.unbind(2), mask, causal=True),
        inputs=lambda shape, dtype: (normal(shape, dtype), some_of(*shape[:2])),
        shapes=((9, 6, 3, 2, 12), (4, 5, 3, 3, 8)),
        wide=((9, 6, 3, 8, 12), (3, 16, 3, 3, 5), (3, 33, 3, 2, 40)),
        large=((300, 6, 3, 8, 12), (40, 20, 3, 3, 20)),
        empty=((0, 3, 3, 4, 4), (2, 0, 3, 4, 4), (2, 3, 3, 0, 4), (2, 3, 3, 4, 0)),
        beyond=((3, 4, 3, 2, 8), 0),
        near_in_layouts_on_cuda=False,
        sums=(0, 1),
        cast=1,
        saves=(0, 1),
    ),
)

SHORT_ATTENTION_MASKED = (
    replace(
        short_attention,
        variant="plain",
        ours=lambda q, k, v, mask: cx.short_attention(q, k, v),
        plain=lambda q, k, v, mask: reference.short_attention(q, k, v),
    ),
    replace(
        short_attention,
        variant="causal p",
        ours=lambda q, k, v, mask: cx.short_attention(
            q, k, v, key_padding_mask=mask, causal=True, p=0.3, training=True
        ),
        plain=lambda q, k, v, mask: reference.short_attention(q, k, v, mask, drawn_seed(), True, p=0.3),
    ),
)


def linear_attention_inputs(shape, dtype):
    """q, k and v."""
    batch, heads, length, n, d = shape
    return tuple(normal((batch, heads, length, m), dtype, seed=seed) for seed, m in enumerate((n, n, d)))


def linear_attention_state(shape, dtype):
    """q, k, v, the initial state and a mask."""
    batch, heads, length, n, d = shape
    s, z = normal((batch, heads, n, d), real_of(dtype), seed=5), normal((batch, heads, n), real_of(dtype), seed=6).abs()
    return *linear_attention_inputs(shape, dtype), s, z, some_of(batch, length)


def linear_attention_sums(q, k, v, s, z, mask, feature_map="elu1"):
    options = {"feature_map": feature_map, "initial_state": (s, z), "key_mask": mask, "return_state": True}
    return cx.linear_attention(q, k, v, eps=1e-2, **options)


def plain_linear_attention_sums(q, k, v, s, z, mask, feature_map="elu1"):
    out, *state = reference.linear_attention(q, k, v, s, z, feature_map=feature_map, key_mask=mask, eps=1e-2)
    return out, *(sums.to(s.dtype) for sums in state)


def linear_attention_mode(feature_map, normalize, q, k, v, s):
    options = {"feature_map": feature_map, "normalize": normalize, "eps": 1e-2}
    return cx.linear_attention(q, k, v, initial_state=(s, None), return_state=True, **options)


def plain_linear_attention_mode(feature_map, normalize, q, k, v, s):
    options = {"feature_map": feature_map, "normalize": normalize, "eps": 1e-2}
    out, state = reference.linear_attention(q, k, v, s, **options)
    return out, state.to(s.dtype)


linear_attention = partial(
    Case,
    name="linear_attention",
    inputs=linear_attention_inputs,
    shapes=((2, 2, 7, 4, 5), (2, 3, 20, 4, 5)),
    wide=((2, 2, 150, 21, 35), (1, 3, 40, 10, 10)),
    large=((2, 3, 600, 20, 12), (1, 1, 5000, 8, 8)),
    empty=((0, 2, 3, 4, 4), (2, 0, 3, 4, 4), (2, 2, 0, 4, 4)),
    beyond=((1, 2, 3, 4, 4), 1),
    keeps="everything",
    near_in_layouts_on_cuda=True,
    sums=(0, 1, 2, 3),
    cast=3,
    twice=False,
)


def causal_sums(causal, q, k, v, s, z, mask):
    options = {"causal": causal, "initial_state": (s, z), "key_mask": mask, "return_state": True}
    return cx.linear_attention(q, k, v, eps=1e-2, **options)


def plain_causal_sums(causal, q, k, v, s, z, mask):
    out, *state = reference.linear_attention(q, k, v, s, z, causal=causal, key_mask=mask, eps=1e-2)
    return out, *(sums.to(s.dtype) for sums in state)


def linear_attention_token(shape, dtype):
    """One position: q, k (B, H, N), v (B, H, D), the state."""
    batch, heads, n, d = shape
    q, k, v, s, z, _ = linear_attention_state((batch, heads, 1, n, d), dtype)
    return q[:, :, 0].contiguous(), k[:, :, 0].contiguous(), v[:, :, 0].contiguous(), s, z


def linear_attention_step(q, k, v, s, z):
    """Of a copy of the state, which the op writes to."""
    out, state = cx.linear_attention_step(q, k, v, (s.clone(), z.clone()), eps=1e-2)
    return out, *state


def linear_attention_of(feature_map, normalize):
    return linear_attention(
        variant=f"{feature_map} {normalize}",
        ours=partial(linear_attention_mode, feature_map, normalize),
        plain=partial(plain_linear_attention_mode, feature_map, normalize),
        inputs=lambda shape, dtype: linear_attention_state(shape, dtype)[:4],
        sums=tuple(range(6)),
        states=1,
        saves=(0, 1, 2, "out 1", (torch.float32, 0)),
    )


LINEAR_ATTENTION_MODES = tuple(
    linear_attention_of(*mode) for mode in (("elu1", "feature"), ("elu1", "none"), ("identity", "none"))
)
LINEAR_ATTENTION = (
    linear_attention(
        ours=linear_attention_sums,
        plain=plain_linear_attention_sums,
        inputs=linear_attention_state,
        fixed=1,
        sums=tuple(range(8)),
        states=2,
        saves=(0, 1, 2, 5, "out 1", "out 2"),
    ),
    *(
        linear_attention_of(feature_map, normalize)
        for feature_map, normalize in (("relu", "feature"), ("relu", "none"))
    ),
    linear_attention(
        variant="strict",
        ours=partial(causal_sums, "strict"),
        plain=partial(plain_causal_sums, "strict"),
        inputs=linear_attention_state,
        fixed=1,
        sums=tuple(range(8)),
        states=2,
        saves=(0, 1, 2, 5, 3, 4),
    ),
    linear_attention(
        name="linear_attention_step",
        ours=linear_attention_step,
        plain=partial(reference.linear_attention_step, eps=1e-2),
        inputs=linear_attention_token,
        shapes=((2, 3, 16, 5), (1, 2, 16, 5)),
        wide=((2, 3, 34, 7), (1, 2, 40, 20)),
        large=((4, 6, 96, 240),),
        empty=((0, 3, 8, 5), (2, 0, 8, 5)),
        beyond=((1, 2, 8, 3), 1),
        keeps="nothing",
        near_in_layouts=tuple(range(8)),
        sums=tuple(range(8)),
        states=2,
        twice=True,
        gradient_of_reference=True,
    ),
    linear_attention(
        variant="packed",
        ours=lambda qkv, mask: linear_attention_packed(qkv, key_mask=mask, eps=1e-2),
        plain=lambda qkv, mask: reference.linear_attention(*qkv.unbind(1), key_mask=mask, eps=1e-2)[0],
        inputs=lambda shape, dtype: (normal(shape, dtype), some_of(shape[0], shape[3])),
        fixed=1,
        shapes=((2, 3, 2, 7, 4), (2, 3, 3, 20, 4)),
        wide=((2, 3, 2, 150, 21), (1, 3, 3, 40, 10)),
        large=((2, 3, 3, 600, 20),),
        empty=((0, 3, 2, 3, 4), (2, 3, 0, 3, 4), (2, 3, 2, 0, 4)),
        beyond=((1, 3, 2, 3, 4), 1),
        sums=(0, 1),
        cast=1,
        saves=(0, 1, (torch.float32, 64), (torch.float32, 16)),
    ),
)


def bdh_inputs(shape, dtype):
    """q whose scores are of the size of 1, v shared by the heads, tables."""
    batch, heads, length, n, d = shape
    q = (normal((batch, heads, length, n), torch.float64) * n**-0.25).to(dtype)
    return q, normal((batch, 1, length, d), dtype, seed=1), *tables(length + 2, n // 2, dtype)


def bdh_token(shape, dtype):
    """One token: q (B, H, N), v (B, 1, D), a row of each table, the state."""
    batch, heads, n, d = shape
    q, v, cos, sin = bdh_inputs((batch, heads, 1, n, d), dtype)
    return q[:, :, 0], v[:, :, 0], cos[0], sin[0], normal((batch, heads, n, d), real_of(dtype), seed=4)


NOTHING = (torch.float32, 0)
bdh = partial(
    Case,
    name="bdh_attention",
    inputs=bdh_inputs,
    shapes=((2, 3, 6, 16, 5), (1, 2, 9, 16, 5)),
    wide=((1, 3, 5, 34, 7), (1, 3, 130, 40, 20)),
    large=((2, 3, 40, 96, 24), (2, 3, 140, 96, 24)),
    empty=((0, 3, 4, 8, 5), (2, 0, 4, 8, 5), (2, 3, 0, 8, 5), (2, 3, 4, 8, 0)),
    beyond=((1, 2, 4, 8, 3), 1),
    keeps="last innermost",
    sums=tuple(range(5)),
    cast=2,
    twice=False,
)
bdh_step = partial(
    bdh,
    name="bdh_attention_step",
    shapes=((2, 3, 16, 5), (1, 2, 16, 5)),
    wide=((2, 3, 34, 7), (1, 2, 40, 20)),
    large=((4, 6, 96, 240),),
    empty=((0, 3, 8, 5), (2, 0, 8, 5), (2, 3, 8, 0)),
    beyond=((1, 2, 8, 3), 1),
    keeps="nothing",
    sums=(0, 1),
    twice=True,
    gradient_of_reference=True,
)
BDH = (
    *(
        bdh(
            variant=" ".join(options),
            ours=partial(cx.bdh_attention, **options),
            plain=partial(reference.bdh_attention, **options),
            # the scores are kept where that form is taken, logsumexp for softmax; what is not kept has no elements
            saves=(0, 1, 2, 3, *(("out 0", NOTHING, (torch.float32, 36)) if "softmax" in options else (NOTHING,) * 2)),
        )
        for options in ({}, {"causal": True}, {"softmax": True}, {"causal": True, "softmax": True})
    ),
    bdh_step(
        ours=cx.bdh_attention_step,
        plain=reference.bdh_attention_step,
        inputs=bdh_token,
        near_in_layouts=tuple(range(2, 7)),
    ),
    bdh_step(
        variant="first",
        ours=lambda *token: cx.bdh_attention_step(*token, None),
        plain=lambda *token: reference.bdh_attention_step(*token, None),
        inputs=lambda shape, dtype: bdh_token(shape, dtype)[:4],
        near_in_layouts=tuple(range(2, 6)),
    ),
)

# ---- mixtures of experts ----
EXPERTS, TOP_K = 4, 2


def logits_of(rows, dtype, experts=EXPERTS):
    return (3 * normal((rows, experts), torch.float64, seed=7)).to(dtype)


def capacity_of(rows, factor=0.8, experts=EXPERTS):
    return math.ceil(factor * rows * TOP_K / experts)


def plain_route(logits, **options):
    return reference.moe_route(logits.to(real_of(logits.dtype)), TOP_K, **options)


def chosen_experts(rows):
    return (some_of(rows, TOP_K).cumsum(0) + torch.arange(TOP_K, device=DEVICE)) % EXPERTS


def plain_routing(weights, experts):
    return reference.moe_routing(
        weights.to(real_of(weights.dtype)), experts, EXPERTS, capacity=capacity_of(weights.shape[0])
    )


def route_some(logits, valid):
    return cx.moe_route(logits, TOP_K, score="sigmoid_topk", capacity_factor=0.8, valid=valid)


def plain_route_some(logits, valid):
    capacity = capacity_of(*logits.shape[:1], experts=logits.shape[1])
    return plain_route(logits, score="sigmoid_topk", capacity=capacity, valid=valid)


def dispatch(x, logits, padded=False):
    return cx.moe_dispatch(x, cx.moe_route(logits, TOP_K, capacity_factor=0.8), padded=padded)


def plain_dispatch(x, logits, padded=False):
    capacity = capacity_of(x.shape[0])
    _, experts, _, offsets, _, position = plain_route(logits, capacity=capacity)
    return reference.moe_dispatch(x, experts, offsets, position, capacity=capacity if padded else None)


def combine(y, logits, padded=False):
    return cx.moe_combine(y, cx.moe_route(logits, TOP_K, capacity_factor=0.8), padded=padded)


def plain_combine(y, logits, padded=False):
    capacity = capacity_of(logits.shape[0])
    weights, experts, _, offsets, _, position = plain_route(logits, capacity=capacity)
    capacity = capacity if padded else None
    return reference.moe_combine(y, weights, experts, offsets, position, capacity=capacity).to(y.dtype)


def aux_losses(logits):
    routing = cx.moe_route(logits.detach(), TOP_K)
    return tuple(cx.moe_aux_loss(routing, logits, kind) for kind in ("switch", "importance_cv2", "z", "usage_mse"))


def plain_aux_losses(logits):
    logits = logits.to(real_of(logits.dtype))
    counts = plain_route(logits)[2]
    kinds = ("switch", "importance_cv2", "z", "usage_mse")
    return tuple(reference.moe_aux_loss(logits, counts, TOP_K, kind=kind) for kind in kinds)


# Experts, where each one's copies begin, and the places of six rows' copies.
INDICES = ((torch.int64, 12), (torch.int64, 5), (torch.int64, 12))
OF_ROUTE = ("out 1", "out 5")
route = partial(
    Case,
    name="moe_route",
    inputs=lambda shape, dtype: (logits_of(shape[0], dtype, shape[1]),),
    shapes=((6, 4), (9, 4)),
    wide=((40, 9), (17, 64)),
    large=((300, 9),),
    empty=((0, 4),),
    beyond=((3, 4), 0),
    twice=False,
    takes_nan=False,
    saves=(0, *OF_ROUTE),
)
rows = partial(
    Case,
    fixed=1,
    shapes=((6, 3, 2, 5), (9, 3, 2, 5)),
    wide=((6, 3, 7, 5), (9, 2, 66, 67), (5, 33)),
    large=((200, 3, 5, 5),),
    empty=((0,), (0, 0), (0, 2, 3, 3), (3, 0), (3, 2, 0, 3)),
    beyond=((3, 8), 0),
    keeps="first outermost",
    twice=False,
    saves=INDICES,
)
of_copies = partial(
    rows,
    name="moe_combine",
    fixed=0,
    beyond=((1, 8), 0),
    sums=(2,),
    near_in_layouts=(2,),
    saves=(1, INDICES[0], INDICES[2], 0, (torch.float32, 12), *INDICES),
)
MOE = (
    route(ours=lambda logits: cx.moe_route(logits, TOP_K), plain=plain_route),
    route(
        variant="capacity valid",
        ours=route_some,
        plain=plain_route_some,
        inputs=lambda shape, dtype: (logits_of(shape[0], dtype, shape[1]), some_of(shape[0], share=0.7)),
        fixed=1,
    ),
    route(
        name="moe_routing",
        ours=lambda weights, experts: cx.moe_routing(weights, experts, EXPERTS, capacity_factor=0.8),
        plain=plain_routing,
        inputs=lambda shape, dtype: (normal((shape[0], TOP_K), dtype), chosen_experts(shape[0])),
        fixed=1,
        saves=((torch.bool, 12),),
        takes_nan=True,
        twice=True,
        gradient_of_reference=True,
    ),
    route(
        name="moe_aux_loss",
        ours=aux_losses,
        plain=plain_aux_losses,
        saves=(0, (torch.float32, EXPERTS)) * 3,
        sums=(0, 1, 2, 3, 4),
    ),
    *(
        rows(
            name="moe_dispatch",
            variant="padded" * padded,
            ours=partial(dispatch, padded=padded),
            plain=partial(plain_dispatch, padded=padded),
            inputs=lambda shape, dtype: (normal(shape, dtype), logits_of(shape[0], dtype)),
        )
        for padded in (False, True)
    ),
    of_copies(
        ours=combine,
        plain=plain_combine,
        inputs=lambda shape, dtype: (
            normal((TOP_K * shape[0], *shape[1:]), dtype),
            logits_of(shape[0], dtype),
        ),
    ),
    of_copies(
        variant="padded",
        ours=partial(combine, padded=True),
        plain=partial(plain_combine, padded=True),
        inputs=lambda shape, dtype: (
            normal((EXPERTS, capacity_of(shape[0]), *shape[1:]), dtype),
            logits_of(shape[0], dtype),
        ),
        keeps="nothing",
    ),
)

ROUTE_SCORES = tuple(
    replace(
        MOE[0],
        variant=score,
        ours=partial(cx.moe_route, top_k=3, score=score, capacity_factor=0.9),
        plain=lambda logits, score=score: reference.moe_route(
            logits.to(real_of(logits.dtype)),
            3,
            score=score,
            capacity=math.ceil(0.9 * logits.shape[0] * 3 / logits.shape[1]),
        ),
    )
    for score in ("softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
)

# Further options, whose kernels are run on every instruction set.
VARIANTS = (
    *NORM2D_ACTIVATIONS,
    *ROPE_PAIRS,
    *SHORT_ATTENTION_MASKED,
    *LINEAR_ATTENTION_MODES,
    replace(
        LINEAR_ATTENTION[0],
        variant="relu",
        ours=partial(linear_attention_sums, feature_map="relu"),
        plain=partial(plain_linear_attention_sums, feature_map="relu"),
    ),
    *ROUTE_SCORES,
)
CASES = (
    *EDGE,
    *SPATIAL_GRADIENT,
    *BANDS,
    *BOX,
    *STRUCTURE_LOSS,
    *LINEAR_CROSS_ENTROPY,
    *GRAD_NORMS,
    *ONE_IMAGE,
    *NORM2D,
    *ROWS,
    *ROPE,
    *SHORT_ATTENTION,
    *LINEAR_ATTENTION,
    *BDH,
    *MOE,
)
