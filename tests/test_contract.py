"""What every public op promises, checked over every entry of contract_cases.CASES.

Formula, known values, tolerances and errors of an op are in its own file. Here is what surrounds any op: PyTorch's
transforms and compiler, memory formats, threads, instruction sets, empty tensors and offsets past 32 bits, leaks."""

import ctypes
import functools
import gc
import inspect
import itertools
import os
import subprocess
import sys
from pathlib import Path

import contract_cases
import pytest
import torch
from contract_cases import CASES, DEVICE, VARIANTS, normal
from helpers import FLOATS, assert_close_to_reference, run_python_with_torch, seed
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

import camox_ops as cx

LAYOUTS = ("channels_last", "permuted", "swapped", "positions", "reversed", "packed", "cropped", "strided", "expanded")
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="threads, instruction sets and the heap of the CPU")
SEED = 3

every_case = pytest.mark.parametrize("case", CASES, ids=str)
with_kernel_gradient = pytest.mark.parametrize(
    "case", [case for case in CASES if not case.gradient_of_reference], ids=str
)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def case_and_dtypes():
    """Every case with two dtypes: an op's cases, two or more, take the outer and the inner two in turn. The other
    pairs are slow tests."""
    for family in FAMILIES:
        cases = [case for case in CASES if case.family == family]
        assert len(cases) > 1, f"{family} would not meet every dtype"
        for (i, case), (number, dtype) in itertools.product(enumerate(cases), enumerate(FLOATS)):
            marks = () if (number in (0, 3)) == (i % 2 == 0) else pytest.mark.slow
            yield pytest.param(case, dtype, marks=marks, id=f"{case}-{str(dtype).removeprefix('torch.')}")


# ---- how a case is run ----


def tensors_of(outputs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]


def leaves_of(case, inputs):
    """The inputs, of which all but the fixed ones require a gradient; strides are as they were."""
    count = len(inputs) - case.fixed
    return [value.detach().requires_grad_(i < count) for i, value in enumerate(inputs)]


def upstream_of(outputs, layout="contiguous"):
    """Gradients that flow into the outputs that have one."""
    return [arranged(normal(y.shape, y.dtype, seed=20 + i), layout) for i, y in enumerate(outputs) if y.requires_grad]


def results(case, function, inputs, upstream=None, layout="contiguous"):
    """Outputs and gradients of a function of a case's inputs; the seeds are the same each time. layout: of the
    gradients that flow in, where they are not given."""
    leaves = leaves_of(case, inputs)
    seed(SEED)
    outputs = tensors_of(function(*leaves))
    flowing = [y for y in outputs if y.requires_grad]
    grads = upstream_of(outputs, layout) if upstream is None else upstream
    gradients = torch.autograd.grad(flowing, [leaf for leaf in leaves if leaf.requires_grad], grads)
    if case.gradient_of_reference:
        with torch.no_grad():  # only then its kernel runs
            outputs = tensors_of(function(*leaves))
    return [*(y.detach() for y in outputs), *gradients]


def doubled(inputs):
    return tuple(value.double() if value.is_floating_point() else value for value in inputs)


def same_bits(ours, others) -> bool:
    """NaN by NaN too, and 0 apart from -0."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))
        for a, b in zip(ours, others, strict=True)
    )


def bytes_of(x) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def arranged(x, layout):
    """The same values in another layout, where x has enough dimensions for it; "expanded": those of the first index.

    "permuted": the first dimension innermost; "swapped": the second and third changed; "positions": the last two;
    "reversed": all; "packed": one of three side by side, as q, k and v of a projection; "cropped": rows of a larger
    image in channels_last; "strided": gaps in every dimension, that hold NaN."""
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "permuted" and x.dim() > 1:
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "swapped" and x.dim() > 2:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "positions" and x.dim() > 2:
        return x.mT.contiguous().mT
    if layout == "reversed" and x.dim() > 1:
        return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])
    if layout == "packed" and x.dim() > 2:
        return torch.stack([x, x, x], dim=2).select(2, 1)
    if layout == "cropped" and x.dim() == 4:
        larger = torch.cat([x, x, x], dim=2).to(memory_format=torch.channels_last)
        return larger.narrow(2, x.shape[2], x.shape[2])
    if layout == "strided" and x.dim() > 0:
        larger = torch.full([2 * n + 1 for n in x.shape], float("nan") if x.is_floating_point() else 1, device=x.device)
        return larger.to(x.dtype)[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)
    if layout == "expanded" and x.dim() > 0 and x.dtype not in (torch.int32, torch.int64):
        return x[:1].expand(x.shape)
    return x


def assert_near(ours, truth):
    """Of float64, but on CUDA, whose kernels have none."""
    if DEVICE.type == "cpu":
        return torch.testing.assert_close(ours, truth)
    for mine, true in zip(tensors_of(ours), tensors_of(truth), strict=True):
        assert (mine - true).abs().max() <= 1e-3 * true.abs().max() + 1e-4


# ---- which ops there are ----


def test_every_public_op_has_a_case():
    public = {name for name in cx.__all__ if inspect.isfunction(getattr(cx, name))}
    ops = {name for name in public if getattr(cx, name).__module__.startswith("camox_ops.ops.")}
    assert {case.name for case in CASES} == ops - contract_cases.WITHOUT_OPERATOR.keys()
    assert contract_cases.WITHOUT_OPERATOR.keys() <= ops
    assert len(CASES) == len({str(case) for case in CASES})


class Calls(TorchDispatchMode):
    """The operators of camox_ops that run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        if function.namespace == "camox_ops":
            self.found.append((function, arguments))
        return result


def calls_of(case, shape, dtype, layout="contiguous"):
    """Of the forward without a gradient, with one, and of the backward from all outputs, and from the first alone."""
    inputs = tuple(arranged(value, layout) for value in case.inputs(shape, dtype))
    with Calls() as calls:
        with torch.no_grad():
            case.ours(*inputs)
        results(case, case.ours, inputs)
        leaves = leaves_of(case, inputs)
        first = next(y for y in tensors_of(case.ours(*leaves)) if y.requires_grad)
        torch.autograd.grad(first.sum(), [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
    return calls.found


def test_every_operator_is_called_by_a_case():
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("camox_ops:")
    }
    called = {op._opname for case in CASES for op, _ in calls_of(case, case.shapes[0], torch.float32)}
    assert called == registered - contract_cases.WITHOUT_CASE.keys()


# ---- shapes, dtypes, layouts ----


@every_dtype
@every_case
def test_smoke(case, dtype):
    """Outputs have the reference's shapes and dtypes, gradients those of the inputs; without a gradient, the same."""
    inputs = case.inputs(case.shapes[0], dtype)
    ours = results(case, case.ours, inputs)
    seed(SEED)
    plain = tensors_of(case.plain(*inputs))
    expected = [*plain, *inputs[: len(inputs) - case.fixed]]
    assert [(y.shape, y.dtype) for y in ours] == [(y.shape, y.dtype) for y in expected]
    assert all(y.device.type == DEVICE.type for y in ours)
    assert all(y.isfinite().all() for y in ours)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            seed(SEED)
            assert same_bits(tensors_of(case.ours(*inputs)), ours[: len(plain)])
    if case.gradient_of_reference:
        close = {"rtol": 0.02, "atol": 0.02} if dtype.itemsize == 2 else {}
        plain = [y.detach() for y in tensors_of(case.ours(*leaves_of(case, inputs)))]
        torch.testing.assert_close(plain, ours[: len(plain)], **close)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@every_case
def test_the_same_where_a_mode_sees_operators(case, layout):
    """Plain calls on the CPU may go past the dispatcher: the same bits in the same order in memory."""
    for dtype in FLOATS:
        for shape in (case.shapes[0], *case.empty):
            inputs = tuple(arranged(value, layout) for value in case.inputs(shape, dtype))
            plain = results(case, case.ours, inputs)
            with Calls() as calls:
                seen = results(case, case.ours, inputs)
            assert calls.found
            assert same_bits(plain, seen)
            assert [y.stride() for y in plain] == [y.stride() for y in seen]


@functools.lru_cache(maxsize=64)  # a case's layouts are tested one after the other
def results_dense(case, shape, dtype, layout):
    """Of contiguous inputs and gradients that have the values of a layout."""
    inputs = [arranged(value, layout).contiguous() for value in case.inputs(shape, dtype)]
    seed(SEED)
    upstream = upstream_of(tensors_of(case.ours(*leaves_of(case, inputs))), layout)
    return results(case, case.ours, inputs, [grad.contiguous() for grad in upstream])


def assert_as_dense(case, ours, dense, dtype):
    """Results of inputs in some layout have the bits of dense ones, or are near them where the case says so."""
    close = 1e-2 if dtype.itemsize == 2 else 1e-5
    all_near = case.near_in_layouts_on_cuda and DEVICE.type == "cuda"
    for i, (mine, other) in enumerate(zip(ours, dense, strict=True)):
        if all_near or i in case.near_in_layouts:
            atol = close * other.abs().max().item() if other.numel() else 0
            torch.testing.assert_close(mine, other, atol=atol, rtol=close)
        else:
            assert same_bits([mine], [other]), (dtype, tuple(other.shape), i)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_case
def test_layouts(case, layout):
    """The bits of dense inputs and gradients, and outputs in the memory order that was promised."""
    turn = LAYOUTS.index(layout)
    halves, one = FLOATS[turn % 2 :: 2], FLOATS[turn % len(FLOATS) :][:1]
    for shape, dtype in (*itertools.product(case.shapes, halves), *itertools.product(case.wide, one)):
        inputs = tuple(arranged(value, layout) for value in case.inputs(shape, dtype))
        ours = results(case, case.ours, inputs, layout=layout)
        dense = results_dense(case, shape, dtype, "expanded" if layout == "expanded" else "contiguous")
        assert_as_dense(case, ours, dense, dtype)
        outputs = ours[: len(ours) - len(inputs) + case.fixed - case.states]
        if case.gradient_of_reference:
            outputs += tensors_of(case.ours(*leaves_of(case, inputs)))[: len(outputs)]
        for y in outputs:
            if y.dim() == inputs[0].dim() and all(n > 1 for n in inputs[0].shape):
                assert order_of(y) == order_of(y, promised_order(case, inputs[0], layout))


def promised_order(case, x, layout):
    """The dimensions of an output as its memory has them, outermost first."""
    as_x = list(range(x.dim()))
    if layout != "expanded":
        as_x.sort(key=lambda dim: -x.stride(dim))
    return {
        "nothing": list(range(x.dim())),
        "channels_last": as_x if layout in ("channels_last", "cropped") or as_x == [0, 2, 1] else list(range(x.dim())),
        "dense": list(range(x.dim())) if layout == "cropped" else as_x,
        "everything": as_x,
        "last innermost": [*(dim for dim in as_x if dim != x.dim() - 1), x.dim() - 1],
        "first outermost": [0, *(dim for dim in as_x if dim != 0)],
    }[case.keeps]


def order_of(y, promised=None):
    """The strides of y, or those that it would have densely in this order, of the dimensions that have a stride."""
    strides, inside = list(y.stride()), 1
    for dim in reversed(promised or []):
        strides[dim] = inside
        inside *= y.shape[dim]
    return [stride for stride, size in zip(strides, y.shape, strict=True) if size > 1]


@every_case
def test_a_gradient_whose_strides_are_all_0(case):
    inputs = case.inputs(case.shapes[0], torch.float32)
    upstream = [
        torch.ones((), dtype=y.dtype, device=DEVICE).expand(y.shape) for y in outputs_with_gradient(case, inputs)
    ]
    ours = results(case, case.ours, inputs, upstream)
    assert same_bits(ours, results(case, case.ours, inputs, [grad.contiguous() for grad in upstream]))


def outputs_with_gradient(case, inputs):
    seed(SEED)
    return [y for y in tensors_of(case.ours(*leaves_of(case, inputs))) if y.requires_grad]


@every_case
def test_shapes_empty(case):
    """Shapes and values of the reference, zeros as gradients of what takes no part."""
    for shape, dtype in itertools.product(case.empty, FLOATS):
        inputs = case.inputs(shape, dtype)
        ours, plain = (results(case, function, inputs) for function in (case.ours, case.plain))
        for mine, expected in zip(ours, plain, strict=True):
            assert (mine.shape, mine.dtype) == (expected.shape, expected.dtype)
            if dtype.itemsize > 2:
                torch.testing.assert_close(mine, expected)


@every_case
def test_vmap_over_no_samples(case):
    one = case.inputs(case.shapes[0], torch.float32)
    expected = [(y.shape, y.dtype) for y in tensors_of(case.ours(*one))]
    none = [value.new_empty((0, *value.shape)) for value in one]

    def outputs(*values):
        return tuple(tensors_of(case.ours(*values)))

    count = len(one) - case.fixed
    for in_dims in {(0,) * len(one), (0, *(None,) * (len(one) - 1))}:
        given = [a if dim is None else b for a, b, dim in zip(one, none, in_dims, strict=True)]
        mapped = torch.vmap(outputs, in_dims, randomness="different")
        assert [(y.shape, y.dtype) for y in mapped(*given)] == [((0, *shape), dtype) for shape, dtype in expected]

        def loss(*values, mapped=mapped):
            return sum(y.sum() for y in mapped(*values) if y.is_floating_point())

        grads = torch.func.grad(loss, tuple(range(count)))(*given)
        assert all(torch.equal(grad, torch.zeros_like(value)) for grad, value in zip(grads, given, strict=False))


@pytest.mark.big
@pytest.mark.slow
@every_case
def test_offsets_past_32_bits(case):
    """Elements further apart than 2^31, in memory that is mapped and never touched elsewhere."""
    torch.use_deterministic_algorithms(False)  # or all of it would be filled with NaN
    shape, dim = case.beyond
    x, *others = case.inputs(shape, torch.bfloat16)
    strides = list(x.stride())
    strides[dim] = 2**31 + 6
    storage = torch.empty((x.shape[dim] - 1) * strides[dim] + x.numel(), dtype=x.dtype, device=DEVICE)
    distant = storage.as_strided(x.shape, strides).copy_(x)
    assert_as_dense(case, *(results(case, case.ours, (first, *others)) for first in (distant, x)), torch.bfloat16)


# ---- around the dispatcher ----


def operators_of(case, dtype, layouts):
    """(operator, arguments) of every operator that the case calls, once for each set of strides."""
    seen = set()
    for layout in layouts:
        for op, arguments in calls_of(case, case.shapes[0], dtype, layout):
            flat, structure = tree_flatten(arguments)
            key = (op, *((a.stride(), a.requires_grad) if isinstance(a, torch.Tensor) else a for a in flat))
            if key in seen:
                continue
            seen.add(key)
            is_backward = op._opname.endswith("_backward")
            given = [
                a.detach().requires_grad_(case.twice and a.is_floating_point() if is_backward else a.requires_grad)
                if isinstance(a, torch.Tensor)
                else a
                for a in flat
            ]
            yield op, tree_unflatten(given, structure)


@pytest.mark.parametrize(("case", "dtype"), case_and_dtypes())
def test_opcheck(case, dtype):
    """Of every operator that the case calls: schema, autograd, fake kernel. A fake kernel chooses strides and dtypes
    apart: every dtype is met in one of the other layouts, each of them by two dtypes of an op."""
    other = ("channels_last", "permuted")[FLOATS.index(dtype) % 2]
    for op, arguments in operators_of(case, dtype, ("contiguous", other)):
        opcheck(op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.slow
@every_case
def test_opcheck_traced(case):
    """Of the last call of each operator with the same tensors left out: its inputs require a gradient if any call's.
    test_compile traces every case too, and does not wait for a slow run."""
    calls = {}
    for op, arguments in operators_of(case, torch.float32, ("contiguous",)):
        calls[op, tuple(a is None for a in tree_flatten(arguments)[0])] = arguments
    for (op, _), arguments in calls.items():
        if DEVICE.type == "cuda" and op is torch.ops.camox_ops.edge_maps_backward.default:
            continue  # PyTorch's second derivative of a convolution on CUDA asks symbolic tensors for their numel()
        opcheck(op, arguments, test_utils="test_aot_dispatch_dynamic")


@every_case
def test_autocast(case):
    """Nothing is cast, or the first inputs are: then results are those of bfloat16 inputs."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = case.inputs(case.shapes[0], dtype)
        cast = [x.bfloat16() if i < (case.cast or 0) else x for i, x in enumerate(inputs)]
        mixed = [cast[i] if i == 1 else x for i, x in enumerate(inputs)] if case.cast else inputs

        def under_autocast(*given):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return case.ours(*given)

        outputs, expected = results(case, under_autocast, mixed), results(case, case.ours, cast)
        count = len(outputs) - len(mixed) + case.fixed
        assert same_bits(outputs[:count], expected[:count])
        assert [g.dtype for g in outputs[count:]] == [x.dtype for x in mixed[: len(mixed) - case.fixed]]
    if DEVICE.type == "cpu":
        inputs = case.inputs(case.shapes[0], torch.float64)
        assert same_bits(results(case, under_autocast, inputs), results(case, case.ours, inputs))


@every_case
def test_checkpointing(case):
    inputs = case.inputs(case.shapes[0], torch.float32)

    def again(*leaves):
        return checkpoint(case.ours, *leaves, use_reentrant=False)

    assert same_bits(results(case, again, inputs), results(case, case.ours, inputs))


@with_kernel_gradient
def test_saved_for_backward(case):
    inputs, saved = case.inputs(case.shapes[0], torch.float32), []
    leaves = leaves_of(case, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = tensors_of(case.ours(*leaves))
    assert [what_is(tensor, leaves, outputs) for tensor in saved] == list(case.saves)


def what_is(tensor, inputs, outputs):
    """An input's number, "out" and an output's, or (dtype, elements) of a tensor of its own."""
    for names, known in ((range(len(inputs)), inputs), ((f"out {i}" for i in range(len(outputs))), outputs)):
        for name, one in zip(names, known, strict=True):
            if tensor.numel() and tensor.data_ptr() == one.data_ptr():
                return name
    return tensor.dtype, tensor.numel()


class AsPromised(torch.fx.Interpreter):
    """Runs a graph with inputs of the sizes of its tracing: every tensor must have the strides that it had there."""

    def call_function(self, target, args, kwargs):
        results = super().call_function(target, args, kwargs)
        for found, promised in zip(tree_leaves(results), tree_leaves(self.node.meta["val"]), strict=True):
            if isinstance(found, torch.Tensor) and found.numel():
                strides = tuple(map(int, promised.stride()))
                assert found.stride() == strides, f"{target}: strides {found.stride()}, promised {strides}"
        return results

    def run_node(self, node):
        self.node = node
        return super().run_node(node)


def as_promised(graph, inputs):
    """A compiler that only checks, after AOTAutograd has traced and parted forward and backward as for inductor."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def checked(graph, _):
        return make_boxed_func(AsPromised(graph).run)

    return aot_autograd(fw_compiler=checked, partition_fn=min_cut_rematerialization_partition)(graph, inputs)


@pytest.mark.parametrize("sizes", ["dynamic", pytest.param("static, then dynamic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_compile(family, sizes):
    """One graph of all ops of a family: of any sizes, or static and then made dynamic by others in another order. Of
    any sizes, where tracing takes half a second for a case, the first and the last case of each op.

    What an operator returns is held against the strides that its fake kernel promises. In the slow tests inductor's
    graph does that, and a kernel that it writes reads them too: seconds of its work and of g++."""
    turns = list(enumerate(("contiguous", "channels_last")))
    cases = [case for case in CASES if case.family == family]
    if sizes == "dynamic":
        turns = [turns[FAMILIES.index(family) % 2]]
        of_each_op = {name: [case for case in cases if case.name == name] for name in (case.name for case in cases)}
        cases = [case for of_one in of_each_op.values() for case in dict.fromkeys((of_one[0], of_one[-1]))]

    def step(inputs):
        outputs = [case.ours(*given) for case, given in zip(cases, inputs, strict=True)]
        read = [y * y for y in tensors_of(outputs[0]) if y.is_floating_point()] if sizes != "dynamic" else []
        return read, outputs

    def run(function, inputs):
        seed(SEED)
        outputs = function(inputs)
        flowing = [y for y in tensors_of(outputs) if y.requires_grad]
        wanted = [leaf for leaf in itertools.chain(*inputs) if leaf.requires_grad]
        return outputs, torch.autograd.grad(flowing, wanted, upstream_of(tensors_of(outputs)))

    chosen = {"dynamic": True, "backend": as_promised} if sizes == "dynamic" else {}
    compiled = torch.compile(step, fullgraph=True, **chosen)
    with torch._inductor.config.patch(fallback_random=True):  # seeds as in eager mode
        for turn, layout in turns:
            inputs = []
            for case in cases:
                given = [arranged(x, layout) for x in case.inputs(case.shapes[turn], torch.float32)]
                inputs.append(given if case.gradient_of_reference else leaves_of(case, given))
            found, expected = run(compiled, inputs), run(step, inputs)
            (found, structure), (expected, wanted) = tree_flatten(found), tree_flatten(expected)
            assert structure == wanted  # a Routing stays one
            torch.testing.assert_close(found, expected)


# ---- torch.func ----


def samples_of(case, dtype):
    """Three of each input along a first dimension; of indices three times the same."""
    return [
        torch.stack([x, x / 2, 2 * x] if x.is_floating_point() else [x, ~x, x] if x.dtype == torch.bool else [x] * 3)
        for x in case.inputs(case.shapes[0], dtype)
    ]


def losses(case):
    """Of the op and of the reference: a number that no gradient is linear in."""
    return [
        lambda *values, function=function: sum(
            (y**3).sum() for y in tensors_of(function(*values)) if y.is_floating_point()
        )
        for function in (case.ours, case.plain)
    ]


@every_case
def test_func_transforms(case):
    """grad, vmap over one input, the differentiable ones, all, and a later dimension; vjp."""
    samples = samples_of(case, torch.float64 if DEVICE.type == "cpu" else torch.float32)
    one, count = [x[0] for x in samples], len(samples) - case.fixed
    every = tuple(range(count))

    def run(function, *given):
        seed(SEED)
        return function(*given)

    gradients = [torch.func.grad(loss, every) for loss in losses(case)]
    ours, plain = gradients
    assert_near(run(ours, *one), run(plain, *one))
    none = (None,) * len(samples)
    for in_dims in {(0, *none[1:]), (0,) * count + none[count:], (0,) * len(samples)}:
        given = [x if dim == 0 else x[0] for x, dim in zip(samples, in_dims, strict=True)]
        truth = [
            run(plain, *(x if dim is None else x[i] for x, dim in zip(given, in_dims, strict=True))) for i in range(3)
        ]
        found = run(torch.vmap(ours, in_dims, randomness="same"), *given)
        assert_near(found, tuple(map(torch.stack, zip(*truth, strict=True))))
    late = min(2, one[0].dim())

    def outputs(x, *others):
        return tuple(tensors_of(case.ours(x, *others)))

    by_dim = run(torch.vmap(outputs, (late, *none[1:]), randomness="same"), samples[0].movedim(0, late), *one[1:])
    for i, x in enumerate(samples[0]):
        assert_near([y[i] for y in by_dim], run(outputs, x, *one[1:]))

    def floats(*values):
        return tuple(y for y in outputs(*values, *one[count:]) if y.is_floating_point())

    found, pullback = run(torch.func.vjp, floats, *one[:count])
    flowing = tuple(normal(y.shape, y.dtype, seed=9) for y in found)
    leaves = [x.clone().requires_grad_() for x in one[:count]]
    pairs = [(y, grad) for y, grad in zip(run(floats, *leaves), flowing, strict=True) if y.requires_grad]
    wanted, through = zip(*pairs, strict=True)
    assert_near(pullback(flowing), torch.autograd.grad(wanted, leaves, through))


@every_case
def test_second_derivatives(case):
    """Those of the reference, or a refusal by the op's name."""
    one = [x[0] for x in samples_of(case, torch.float64 if DEVICE.type == "cpu" else torch.float32)]

    def norm_of_grad(loss, argnums):
        def norm(*values):
            return sum((g**2).sum() for g in torch.func.grad(loss, argnums)(*values))

        seed(SEED)
        return torch.func.grad(norm)(*one)

    ours, plain = losses(case)
    if case.twice:
        every = tuple(range(len(one) - case.fixed))
        assert_near(norm_of_grad(ours, every), norm_of_grad(plain, every))
        return
    message = rf"{case.name}\w*: second derivatives are not implemented"
    with pytest.raises(NotImplementedError, match=message):
        norm_of_grad(ours, (0,))
    leaves = leaves_of(case, case.inputs(case.shapes[0], torch.float32))
    (grad,) = torch.autograd.grad(ours(*leaves), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        grad.sum().backward()


@every_case
def test_forward_mode_is_refused(case):
    """For every input by name; the kernels would drop a tangent."""
    inputs = case.inputs(case.shapes[0], torch.float32)
    for i in range(len(inputs) - case.fixed):
        name = case.name if i == 0 else r"\w+"

        def of_input(x, i=i):
            return tensors_of(case.ours(*inputs[:i], x, *inputs[i + 1 :]))[0]

        with pytest.raises(NotImplementedError, match=f"{name}: forward-mode AD is not implemented"):
            torch.func.jvp(of_input, (inputs[i],), (inputs[i],))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"\w+(\[\d+\])? carries a tangent"):
            of_input(forward_ad.make_dual(inputs[i], inputs[i]))


@pytest.mark.parametrize("create_graph", [False, True])
@with_kernel_gradient
def test_a_tangent_of_the_upstream_gradient_is_refused(case, create_graph):
    """It would be dropped: the kernels have no rule of forward mode."""
    leaves = leaves_of(case, case.inputs(case.shapes[0], torch.float32))
    y = next(y for y in tensors_of(case.ours(*leaves)) if y.requires_grad)
    inputs = [x for x in leaves if x.requires_grad]
    options = {"allow_unused": True, "retain_graph": True, "create_graph": create_graph}
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match=r"\w+: forward-mode AD is not implemented, and .* carries"):
            torch.autograd.grad(y, inputs, dual, **options)
        torch.autograd.grad(y, inputs, torch.ones_like(y), **options)  # a level without a tangent changes nothing


# ---- threads, instruction sets, memory ----


@ON_CPU
@every_case
def test_threads_do_not_change_bits(case):
    for shape, layout in itertools.product(case.large, ("contiguous", "channels_last", "swapped")):
        inputs = [arranged(x, layout) for x in case.inputs(shape, torch.float32)]
        expected = results(case, case.ours, inputs)
        for threads in (1, 3, 8) if layout == "contiguous" else (3,):
            torch.set_num_threads(threads)
            found = results(case, case.ours, inputs)
            torch.set_num_threads(2)
            assert same_bits(found, expected), (shape, layout, threads)


def odd(x, kind):
    """Some of x is not finite, or smaller than the dtype's smallest normal number."""
    if kind == "offset":
        return x + 1e3
    if kind != "normal" and x.numel() > 7:
        x = x.clone()
        x.view(-1)[5::7] *= {"tiny": 1e-39, "nan": float("nan"), "inf": float("inf")}[kind]
    return x


def runs_of(case, dtypes=FLOATS):
    """(dtype, layout, kind, inputs) of what is compared between instruction sets: every shape contiguous and in one
    other layout, or, of all dtypes, in each."""
    others, shapes = ("channels_last", "swapped", "strided"), (*case.shapes, *case.wide)
    for dtype, turn in itertools.product(dtypes, range(len(shapes))):
        inputs = case.inputs(shapes[turn], dtype)
        chosen = others if len(dtypes) == len(FLOATS) else others[(turn + dtypes.index(dtype)) % 3 :][:1]
        for layout in ("contiguous", *(chosen if inputs[0].dim() > 2 else ())):
            kinds = ("normal", "offset", "tiny", "nan", "inf") if case.takes_nan and not case.sums else ("normal",)
            for kind in kinds if layout == "contiguous" else kinds[:1]:
                yield dtype, layout, kind, [odd(arranged(inputs[0], layout), kind), *inputs[1:]]


def results_of_every_case(dtypes) -> dict:
    """Of this process's instruction set, or what was raised."""
    found = {}
    for case in (*CASES, *VARIANTS):
        try:
            found[str(case)] = [results(case, case.ours, run[-1], layout=run[1]) for run in runs_of(case, dtypes)]
        except Exception as error:  # of this case alone: the others are compared
            found[str(case)] = repr(error)
    return found


OF_AN_ISA = """
import sys, torch
sys.path.insert(0, {tests!r})
import test_contract, camox_ops
torch.save(test_contract.results_of_every_case({dtypes}), {path!r})
print(camox_ops.isa())
"""


@pytest.fixture(scope="module")
def on_isa(pytestconfig, tmp_path_factory):
    """A function: instruction set, dtypes -> results_of_every_case(), once for each; of a set that this process does
    not run on, in a process of its own."""

    @functools.cache
    def results_on(isa, dtypes):
        if isa == cx.isa():
            return results_of_every_case(dtypes)
        path = str(tmp_path_factory.mktemp("isa") / isa)
        code = OF_AN_ISA.format(tests=str(pytestconfig.rootpath / "tests"), path=path, dtypes=dtypes)
        assert run_python_with_torch(code, CAMOX_FORCE_ISA=isa).split() == [isa]
        return torch.load(path, weights_only=False)  # thousands of tensors, of our own: half the time

    return results_on


ISAS = cx.supported_isas()


@ON_CPU
@pytest.mark.parametrize(
    ("isas", "dtypes"),
    [
        pytest.param((ISAS[0], ISAS[-1]), (torch.float32, torch.bfloat16), id="plainest-best"),
        pytest.param(ISAS, FLOATS, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", (*CASES, *VARIANTS), ids=str)
def test_isa_agree(case, isas, dtypes, on_isa):
    """In every bit; what is summed in another order is near the truth on each."""
    found = {isa: on_isa(isa, dtypes)[str(case)] for isa in isas}
    assert not any(isinstance(of_isa, str) for of_isa in found.values()), found
    for i, (dtype, layout, kind, inputs) in enumerate(runs_of(case, dtypes)):
        sums = case.sums if layout == "contiguous" or case.sums_in_layouts is None else case.sums_in_layouts
        first = next(iter(found.values()))[i]
        exact = [k for k in range(len(first)) if k not in sums]
        for isa, of_isa in found.items():
            pair = [of_isa[i][k] for k in exact], [first[k] for k in exact]
            if not case.same_nan:
                pair = [[y.nan_to_num(nan=7.0) if y.is_floating_point() else y for y in side] for side in pair]
            assert same_bits(*pair), (isa, dtype, layout, kind)
        if not sums or dtype == torch.float64:
            continue
        same, truth = (results(case, case.plain, values) for values in (inputs, doubled(inputs)))
        for of_isa in found.values():
            for k in sums:
                ours, true = of_isa[i][k], truth[k].double()
                off = (ours.double() - true).abs().max()
                if off > 1e-5 * true.abs().max():
                    assert_close_to_reference(ours, same[k].to(ours.dtype), true)


FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


LIBC = ctypes.CDLL(None)


def bytes_in_use() -> int:
    gc.collect()
    LIBC.mallinfo2.restype = MallocInfo
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


@pytest.fixture(scope="module")
def only_new_objects_are_collected():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@ON_CPU
@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="malloc is asked by a function of glibc from 2.33 on")
@every_case
def test_calls_leave_no_memory_behind(case, only_new_objects_are_collected):
    leaves = leaves_of(case, case.inputs(case.shapes[0], torch.float32))
    wanted, upstream = [leaf for leaf in leaves if leaf.requires_grad], upstream_of(tensors_of(case.ours(*leaves)))

    def calls(count):
        for _ in range(count):
            flowing = [y for y in tensors_of(case.ours(*leaves)) if y.requires_grad]
            torch.autograd.grad(flowing, wanted, upstream)

    def bytes_of_a_call():
        before = bytes_in_use()
        calls(100)
        return (bytes_in_use() - before) / 100

    calls(20)
    # A string that is forgotten takes 48 bytes of the heap in every round; what a process makes once does not.
    assert any(bytes_of_a_call() < 16 for _ in range(3))


def on_small_stacks():
    """Runs every case on a thread of 256 KiB, and says which before it does."""
    for case in CASES:
        print(case, file=sys.stderr, flush=True)
        for _, layout, kind, inputs in itertools.chain(*(runs_of(case, (dtype,)) for dtype in FLOATS)):
            if kind == "normal":
                results(case, case.ours, inputs, layout=layout)


SMALL_STACK = """
import sys, threading, torch
sys.path.insert(0, {tests!r})
import test_contract
torch.set_num_threads(1)  # or torch's own threads do the work
threading.stack_size(256 << 10)
thread = threading.Thread(target=test_contract.on_small_stacks)
thread.start(), thread.join()
print("done")
"""


@pytest.mark.slow
def test_every_case_follows_the_tested_device():
    """CAMOX_TEST_DEVICE=cuda runs this file on a GPU: every case makes its inputs on that device, and its results lie
    there. Shown by the device without memory, for which every op has a fake kernel."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from contract_cases import CASES
from torch.utils._pytree import tree_flatten

def elsewhere(values):
    return {{x.device.type for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)}} - {{"meta"}}

for case in CASES:
    for shape in (*case.shapes, *case.wide, *case.large, *case.empty):
        assert not elsewhere(case.inputs(shape, torch.float32)), case
    with torch.no_grad():
        assert not elsewhere(case.ours(*case.inputs(case.shapes[0], torch.float32))), case
print(len(CASES))
"""
    assert run_python_with_torch(code, CAMOX_TEST_DEVICE="meta").split() == [str(len(CASES))]


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_skips_the_tests_of_a_gpu():
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-rs", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-k", "edge_maps"],
        env={**os.environ, "CAMOX_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert " passed" not in result.stdout and " skipped" in result.stdout
    assert "CAMOX_TEST_DEVICE=cuda: torch" in result.stdout and "is built without CUDA" in result.stdout


@ON_CPU
def test_small_stacks(pytestconfig):
    """Of the ops' scratch only little may lie on the stack; the last name on standard error is what overflowed."""
    assert run_python_with_torch(SMALL_STACK.format(tests=str(pytestconfig.rootpath / "tests"))) == "done\n"
