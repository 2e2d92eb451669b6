"""Every op's error in each neighbourhood: what is large elsewhere must not cost accuracy here."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, FLOATS, assert_close_around, outputs_and_gradients, reference

import camox_ops as cx

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import bands_cases
import emulator

IMAGES = ("object", "huge", "infinite")
# Rows traversed across their ends, small planes, rows on their own; a quarter of the way in lies inside the object.
SHAPES = ((2, 3, 40, 44), (1, 9, 9, 9), (1, 2, 24, 140))


def image(shape, dtype, layout="contiguous", kind="object", seed=0):
    """A dim background with a bright object or, in every other channel, four huge pixels or an infinite one."""
    generator = torch.Generator().manual_seed(seed)
    h, w = shape[2:]
    x = 1e-3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    rows, columns = (h // 4, h - 1 - h // 4), (w // 4, w - 1 - w // 4)
    if kind == "object":
        bright = 200 + 20 * torch.rand(shape, generator=generator, dtype=torch.float64)
        inside = (..., slice(rows[0] - 1, rows[1] + 2), slice(columns[0] - 1, columns[1] + 2))
        x[inside] = bright[inside]
    elif kind == "huge":
        for row in rows:
            for column in columns:
                x[:, ::2, row, column] = 6e4 if dtype == torch.float16 else 1e8
    else:
        x[:, ::2, rows[0], columns[0]] = float("inf")
    x = x.to(DEVICE, dtype)
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x


def windows(size):
    """The largest of size x size values around each."""
    return lambda values: F.max_pool2d(values, size, stride=1, padding=size // 2)


def over(*dims):
    """The largest of a row, a head, ..."""
    return lambda values: values.amax(dims, keepdim=True).expand_as(values)


def scales(*shape, seed=9):
    """Powers of ten from 1e-4 to 1e4."""
    return 10.0 ** torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(op, formula, inputs, grads, around, factor=8.0):
    """Outputs and gradients of `inputs`, whose neighbourhoods are alike."""
    ours = outputs_and_gradients(op, inputs, grads)
    same = outputs_and_gradients(formula, inputs, grads)
    truth = outputs_and_gradients(formula, [x.double() for x in inputs], [g.double() for g in grads])
    for mine, theirs, right in zip(ours, same, truth, strict=True):
        assert_close_around(mine, theirs, right, around, factor=factor)


layouts = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@layouts
@dtypes
@pytest.mark.parametrize("kind", IMAGES)
def test_frequency_bands(kind, dtype, layout):
    for shape in SHAPES:
        x = image(shape, dtype, layout, kind)
        truth = reference.frequency_bands(x.double())
        assert_close_around(
            cx.frequency_bands(x), reference.frequency_bands(x), truth, windows(5), [x.double()] * 3, factor=4
        )


@layouts
@dtypes
@pytest.mark.parametrize("kind", IMAGES)
def test_grad_of_frequency_bands(kind, dtype, layout):
    for shape in SHAPES:
        grads = [image(shape, dtype, layout, kind if i == 1 else "object", seed=i) for i in range(4)]
        ours = torch.ops.camox_ops.frequency_bands_backward(*grads, layout == "channels_last")
        truth = reference.frequency_bands_backward(*(grad.double() for grad in grads))
        terms = sum(grad.double().abs() for grad in grads)
        assert_close_around(ours, reference.frequency_bands_backward(*grads), truth, windows(5), terms)


@layouts
@pytest.mark.parametrize("kind", IMAGES)
def test_frequency_bands_are_not_finite_where_avg_pool2d_is_not(kind, layout):
    for shape in SHAPES:
        x = image(shape, torch.float32, layout, kind)
        for ours, theirs in zip(cx.frequency_bands(x), reference.frequency_bands(x), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.isinf(), theirs.isinf())


@pytest.mark.skipif(
    DEVICE.type != "cpu" or emulator.why_unavailable() is not None, reason="runs CUDA kernels on the CPU"
)
@layouts
@pytest.mark.parametrize("dtype", emulator.DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", IMAGES)
def test_cuda_kernels_of_frequency_bands(kind, dtype, layout):
    for shape in ((1, 8, 37, 24), (1, 2, 20, 35)):
        x = image(shape, dtype, layout, kind)
        ours, same, truth = (
            bands_cases.OP.forward(x),
            reference.frequency_bands(x),
            reference.frequency_bands(x.double()),
        )
        assert_close_around(ours, same, truth, windows(5), [x.double()] * 3, factor=4)
        if dtype == torch.float32:
            for mine, theirs in zip(ours, same, strict=True):
                assert torch.equal(mine.isnan(), theirs.isnan())
                assert torch.equal(mine.isinf(), theirs.isinf())


@layouts
@dtypes
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("size", [3, 11])
def test_box_mean(size, kind, dtype, layout):
    for shape in SHAPES:
        x = image(shape, dtype, layout, kind)
        for counted in (True, False):
            truth = reference.box_mean(x.double(), size, counted)
            ours, same = cx.box_mean(x, size, count_include_pad=counted), reference.box_mean(x, size, counted)
            assert_close_around(ours, same, truth, windows(size), x.double())
            grad = torch.ops.camox_ops.box_mean_backward(x, size, size, counted, layout == "channels_last")
            same, truth = (reference.box_mean_backward(g, size, counted) for g in (x, x.double()))
            assert_close_around(grad, same, truth, windows(size), x.double())


@layouts
@pytest.mark.parametrize("kind", IMAGES)
def test_box_mean_is_not_finite_where_avg_pool2d_is_not(kind, layout):
    for shape in SHAPES:
        x = image(shape, torch.float32, layout, kind)
        for size in (3, 11, 31):
            ours, theirs = cx.box_mean(x, size), reference.box_mean(x, size)
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.isinf(), theirs.isinf())


@layouts
@dtypes
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("border", ["zeros", "replicate", "reflect"])
def test_edge_maps_and_spatial_gradient(border, kind, dtype, layout):
    for op, formula in ((cx.edge_maps, reference.edge_maps), (cx.spatial_gradient, reference.spatial_gradient)):
        for shape in SHAPES:
            x = image(shape, dtype, layout, kind)
            truth = formula(x.double(), border=border)
            terms = [8 * x.double()] * len(truth)  # both filters' weights add up to 8
            assert_close_around(op(x, border=border), formula(x, border=border), truth, windows(3), terms)


@layouts
@dtypes
@pytest.mark.parametrize("border", ["zeros", "replicate", "reflect"])
def test_grad_of_edge_maps_and_spatial_gradient(border, dtype, layout):
    for op, formula in ((cx.edge_maps, reference.edge_maps), (cx.spatial_gradient, reference.spatial_gradient)):
        for shape in SHAPES:
            x = image(shape, dtype, layout)
            grads = [image(shape, dtype, layout, seed=i + 1) for i in range(len(formula(x)))]
            (ours,), (same,), (truth,) = (
                outputs_and_gradients(lambda x, f=f: f(x, border=border), [like], given)[1]
                for f, like, given in (
                    (op, x, grads),
                    (formula, x, grads),
                    (formula, x.double(), [grad.double() for grad in grads]),
                )
            )
            parts, factor = [grad.double().abs() for grad in grads], 8
            if op is cx.edge_maps and dtype == torch.float64:
                # The gradient holds gx / sobel and its like, whose error is that of gx over sobel: many times the
                # rounding where gx is a small difference of large numbers, as inside the object. In float32
                # the same formula in float32 has that error too and allows for it; in float64 it is the truth itself.
                sobel, _, gradient = formula(x, border=border)
                sums = 8 * windows(3)(x.abs())
                parts[0], parts[2], factor = parts[0] * (1 + sums / sobel), parts[2] * (1 + sums / gradient), 2
            assert_close_around(ours, same, truth, windows(3), 8 * sum(parts), factor=factor)


@layouts
@dtypes
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("groups", [1, 4])
def test_layer_norm2d(groups, activation, dtype, layout):
    b, c, h, w = 2, 24, 5, 7
    size = scales(b, groups, 1, h, w)
    x, grad = (
        (normal(b, groups, c // groups, h, w, seed=seed) * scale).view(b, c, h, w).to(DEVICE, dtype)
        for seed, scale in ((1, size), (2, size.flip(0)))
    )
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (normal(c, seed=seed).to(DEVICE) for seed in (3, 4))

    def of(function):
        def op(x):
            parameters = (
                p.to(torch.float32 if function is cx.layer_norm2d and x.dtype != torch.float64 else x.dtype)
                for p in (weight, bias)
            )
            return function(x, *parameters, activation=activation, groups=groups)

        return op

    def around(values):
        return over(2)(values.view(b, groups, c // groups, h, w)).reshape(b, c, h, w)

    compare(of(cx.layer_norm2d), of(reference.layer_norm2d), [x], [grad], around, factor=32)


@dtypes
def test_rows_of_dropout_add_layer_norm(dtype):
    size = scales(40, 1)
    x, residual, grad = (
        (normal(40, 33, seed=seed) * scale).to(DEVICE, dtype)
        for seed, scale in ((1, size), (2, size), (3, size.flip(0)))
    )
    parameters = [
        normal(33, seed=seed).to(DEVICE, dtype if dtype == torch.float64 else torch.float32) for seed in (4, 5)
    ]

    def formula(x, residual):
        return reference.dropout_add_layer_norm(x, residual, *(p.to(x.dtype) for p in parameters))

    def op(x, residual):
        return cx.dropout_add_layer_norm(x, residual, *parameters)

    compare(op, formula, [x, residual], [grad], over(1), factor=32)


@dtypes
def test_rows_of_bias_gelu(dtype):
    size = scales(40, 1)
    x, grad = ((normal(40, 33, seed=seed) * scale).to(DEVICE, dtype) for seed, scale in ((1, size), (2, size.flip(0))))
    bias = torch.zeros(33, dtype=dtype, device=DEVICE)
    compare(lambda x: cx.bias_gelu(x, bias), lambda x: reference.bias_gelu(x, bias.to(x.dtype)), [x], [grad], over(1))


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_rope(interleaved, dtype):
    x, grad = ((normal(2, 3, 9, 32, seed=seed) * scales(2, 3, 9, 1, seed=seed)).to(DEVICE, dtype) for seed in (1, 2))
    tables = [table.to(DEVICE) for table in cx.rope_tables(32, 9)]

    def op(x):
        return cx.rope(x, *tables, interleaved=interleaved)

    def formula(x):
        return reference.rope(x, *(table.to(x.dtype) for table in tables), interleaved=interleaved)

    compare(op, formula, [x], [grad], over(3))


@dtypes
@pytest.mark.parametrize("normalize", ["sum", "none"])
def test_heads_of_linear_attention(normalize, dtype):
    size = scales(2, 4, 1, 1)
    q, k = (normal(2, 4, 40, 16, seed=seed).to(DEVICE, dtype) for seed in (1, 2))
    v, grad = ((normal(2, 4, 40, 24, seed=seed) * size).to(DEVICE, dtype) for seed in (3, 4))
    compare(
        lambda q, k, v: cx.linear_attention(q, k, v, normalize=normalize),
        lambda q, k, v: reference.linear_attention(q, k, v, normalize=normalize)[0],
        [q, k, v],
        [grad],
        over(2, 3),
        factor=32,
    )


@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_short_attention(causal, dtype):
    size = scales(6, 1, 4, 1)
    q, k = (normal(6, 12, 4, 16, seed=seed).to(DEVICE, dtype) for seed in (1, 2))
    v, grad = ((normal(6, 12, 4, 16, seed=seed) * size).to(DEVICE, dtype) for seed in (3, 4))
    compare(
        lambda q, k, v: cx.short_attention(q, k, v, causal=causal),
        lambda q, k, v: reference.short_attention(q, k, v, causal=causal),
        [q, k, v],
        [grad],
        over(1, 3),
        factor=32,
    )


@dtypes
@pytest.mark.parametrize("softmax", [False, True])
def test_heads_of_bdh_attention(softmax, dtype):
    size = scales(2, 4, 1, 1)
    q = normal(2, 4, 20, 32, seed=1).to(DEVICE, dtype)
    v, grad = ((normal(2, 4, 20, 24, seed=seed) * size).to(DEVICE, dtype) for seed in (2, 3))
    tables = [table.to(DEVICE) for table in cx.rope_tables(32, 20)]

    def op(q, v):
        return cx.bdh_attention(q, v, *tables, softmax=softmax)

    def formula(q, v):
        return reference.bdh_attention(q, v, *(table.to(q.dtype) for table in tables), softmax=softmax)

    compare(op, formula, [q, v], [grad], over(2, 3), factor=32)


@dtypes
def test_rows_of_moe_combine(dtype):
    routing = cx.moe_route(normal(40, 8, seed=1).float().to(DEVICE), 2)
    x = (normal(40, 24, seed=2) * scales(40, 1)).to(DEVICE, dtype)
    grad = (normal(40, 24, seed=3) * scales(40, 1, seed=4)).to(DEVICE, dtype)
    y = cx.moe_dispatch(x, routing)

    def op(y):
        return cx.moe_combine(y, routing)

    def formula(y):
        weights = routing.weights.to(y.dtype)
        return reference.moe_combine(y, weights, routing.experts, routing.offsets, routing.position)

    compare(op, formula, [y], [grad], over(1))


@dtypes
def test_rows_of_linear_cross_entropy(dtype):
    """Each row's loss and gradient, whatever the upstream gradients of others are."""
    x, weight = ((normal(n, 24, seed=n) / 2).to(DEVICE, dtype) for n in (40, 530))
    target = torch.arange(40, device=DEVICE) * 13
    scaled = DEVICE.type == "cpu" or dtype != torch.float16  # there dz is scaled by the largest of all rows
    grad = (scales(40) if scaled else torch.ones(40)).to(DEVICE, torch.promote_types(dtype, torch.float32))

    def op(x):
        return cx.linear_cross_entropy(x, weight, target, reduction="none")

    def formula(x):
        return reference.linear_cross_entropy(x, weight.to(x.dtype), target, reduction="none")

    compare(op, formula, [x], [grad], lambda values: values if values.dim() == 1 else over(1)(values), factor=32)
