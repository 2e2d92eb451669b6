"""patch on experts whose matrices are two tensors, in the forms that transformers 5 has and others; and on what only
looks like them."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import camox_ops as cx
from camox_ops._patch import _swap, expert_tensors

COUNT, WIDTH, HIDDEN, ROWS = 5, 32, 16, 160


class Experts(nn.Module):
    """A loop over those that have rows; index COUNT is that of no expert here."""

    def __init__(self, implementation=None):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(COUNT, 2 * HIDDEN, WIDTH) / 6)
        self.w_out = nn.Parameter(torch.randn(COUNT, WIDTH, HIDDEN) / 4)
        self.act = nn.SiLU()
        self.config = SimpleNamespace(_experts_implementation=implementation)

    def gated(self, h):
        gate, up = h.chunk(2, -1)
        return self.act(gate) * up

    def expert(self, e, x):
        return F.linear(self.gated(F.linear(x, self.w_in[e])), self.w_out[e])

    def forward(self, x, index, weights):
        if self.config._experts_implementation == "grouped":
            return self.grouped(x, index, weights)
        y = torch.zeros_like(x)
        for e in range(COUNT):
            rows, slots = torch.where(index == e)
            if len(rows):
                y.index_add_(0, rows, (self.expert(e, x[rows]) * weights[rows, slots, None]).to(y.dtype))
        return y

    def grouped(self, x, index, weights):
        slots = index.flatten().argsort(stable=True)
        ends = torch.bincount(index.flatten(), minlength=COUNT).cumsum(0).int()
        h = F.grouped_mm(x.to(self.w_in.dtype)[slots // index.shape[1]], self.w_in.mT, offs=ends)
        y = F.grouped_mm(self.gated(h), self.w_out.mT, offs=ends) * weights.flatten()[slots, None]
        return y[slots.argsort()].view(*index.shape, -1).sum(1).to(x.dtype)


class InputsFirst(Experts):
    def __init__(self):
        super().__init__()
        self.w_in = nn.Parameter(self.w_in.detach().mT.contiguous())
        self.w_out = nn.Parameter(self.w_out.detach().mT.contiguous())

    def expert(self, e, x):
        return self.gated(x @ self.w_in[e]) @ self.w_out[e]


class Gelu(Experts):
    def gated(self, h):
        gate, up = h.chunk(2, -1)
        return F.gelu(gate) * up


class ValuesFirst(Experts):
    def gated(self, h):
        up, gate = h.chunk(2, -1)
        return F.silu(gate) * up


class Interleaved(Experts):
    def gated(self, h):
        return F.silu(h[..., ::2]) * h[..., 1::2]


class Clamped(Experts):
    def gated(self, h):
        gate, up = h.clamp(-100, 100).chunk(2, -1)
        return F.silu(gate) * up


class LimitsWeights(Experts):
    def forward(self, x, index, weights):
        return super().forward(x, index, weights.clamp(min=0))


class AnotherPerRow(Experts):
    """Of an expert that a row names twice it takes one."""

    def forward(self, x, index, weights):
        twice = (index[:, :, None] == index[:, None]).tril(-1).any(-1)
        return super().forward(x, index, weights.masked_fill(twice, 0))


class Biased(Experts):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(COUNT, WIDTH))


class KeepsRows(Experts):
    """Index COUNT leaves a row as it is."""

    def forward(self, x, index, weights):
        return super().forward(x, index, weights) + x * (weights * (index == COUNT)).sum(1, keepdim=True)


class GivesHalves(Experts):
    """Its output has the dtype of autocast."""

    def forward(self, x, index, weights):
        y = super().forward(x, index, weights)
        return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


def given(dtype=torch.float32, rows=ROWS, top_k=2, weights=None):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    index = torch.randint(COUNT, (rows, top_k), generator=generator)
    found = torch.rand(rows, top_k, generator=generator).to(weights or dtype).requires_grad_()
    return x, index, found


def numbers(module, args):
    """The output and gradients of x, weights and parameters."""
    leaves = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    y = module(*leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [leaves[0], leaves[2], *module.parameters()], cotangent)]


def assert_alike(module, plain, args, tolerance=1e-5):
    for mine, original in zip(numbers(module, args), numbers(plain, args), strict=True):
        assert mine.dtype == original.dtype and mine.shape == original.shape and mine.stride() == original.stride()
        size = original.detach().abs().max().double().item()
        difference = (mine.detach().double() - original.detach().double()).abs().max().item()
        assert difference <= tolerance * size, (difference, size)


def patched(kind=Experts, *options):
    if "grouped" in options and not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    torch.manual_seed(0)
    module = kind(*options)
    plain = copy.deepcopy(module)
    report = cx.patch(module, only="expert_tensors")
    assert len(report.patched) == 1, report
    return module, plain, report.entries[0]


def calls_of(module, args, **keywords):
    with cx.explain() as calls:
        module(*args, **keywords)
    return {call.op for call in calls.calls}


def is_served(module, args, **keywords):
    return "moe_place" in calls_of(module, args, **keywords)


TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [Experts, InputsFirst, "grouped"])
def test_matches(kind, dtype):
    """In the mode of the proof and later in the other one; weights in the rows' dtype and in float32."""
    module, plain, entry = patched(Experts, "grouped") if kind == "grouped" else patched(kind)
    assert entry.error < 1e-9
    if kind == "grouped" and dtype == torch.float64:
        pytest.skip("torch's grouped product has no float64")
    module, plain = module.to(dtype), plain.to(dtype)
    for training, weights in ((True, dtype), (False, torch.float32)):
        args = given(dtype, weights=weights)
        assert_alike(module.train(training), plain.train(training), args, TOLERANCES[dtype])
        assert entry.first_error is not None and is_served(module, args)
    assert entry.patched


def test_idle_experts_and_rows_that_name_one_twice():
    module, plain, _ = patched()
    x, index, weights = given()
    for others in (torch.full_like(index, 2), index.clamp(max=1), index[:, :1].expand_as(index)):
        assert_alike(module, plain, (x, others, weights))
        assert is_served(module, (x, others, weights))
    assert_alike(module, plain, given(top_k=1))
    assert_alike(module, plain, given(top_k=COUNT))


def test_frozen_tensors():
    module, plain, _ = patched()
    for side in (module, plain):
        side.w_in.requires_grad_(False)
    x, index, weights = given()
    for side in (module, plain):
        side(x, index, weights).sum().backward()
    assert module.w_in.grad is None and torch.allclose(module.w_out.grad, plain.w_out.grad, atol=1e-4)


@pytest.mark.parametrize("kind", [Experts, InputsFirst])
def test_slots_of_other_processes(kind):
    """Index COUNT adds nothing and has no gradient, and what it would have multiplied may be NaN."""
    module, plain, _ = patched(kind)
    x, index, weights = given()
    index[::3, 0] = COUNT
    index[1::5] = COUNT
    assert_alike(module, plain, (x, index, weights))
    assert is_served(module, (x, index, weights))
    with torch.no_grad():
        x[1::5] = float("nan")
    assert_alike(module, plain, (x, index, weights))


def test_indices_that_mean_something_else():
    module, plain, _ = patched(KeepsRows)
    x, index, weights = given()
    assert is_served(module, (x, index, weights))
    index[::3, 0] = COUNT
    assert_alike(module, plain, (x, index, weights))
    assert not is_served(module, (x, index, weights))
    index[0, 0] = COUNT + 1  # the original's matter
    assert_alike(module, plain, (x, index, weights))


@pytest.mark.parametrize("kind", [Experts, "grouped"])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
def test_autocast_multiplies_in_the_dtype_of_the_original(kind, rows):
    """torch's grouped product does not follow autocast."""
    module, plain, entry = patched(Experts, "grouped") if kind == "grouped" else patched(kind)
    args = given(rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(module, plain, args, 0.03)
        assert is_served(module, args) and entry.patched
        error = (module(*args).float() - plain.float()(*args)).abs().max()
    assert _swap.patch_of(type(module)).settings.casts == (kind is Experts)
    if rows == torch.float32 and kind == "grouped":
        assert error < 1e-5


def test_autocast_with_another_output_is_the_originals():
    module, plain, _ = patched(GivesHalves)
    args = given()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_served(module, args) and torch.equal(module(*args), plain(*args))
    assert is_served(module, args)


@pytest.mark.parametrize("kind", [Gelu, ValuesFirst, Interleaved, Clamped, LimitsWeights, AnotherPerRow])
def test_other_formulas_are_left_alone(kind):
    report = cx.patch(kind())
    assert [entry.recogniser for entry in report.skipped] == ["expert_tensors"] and not report.patched
    assert "differs" in report.skipped[0].reason


def test_other_tensors_are_no_candidates():
    assert not [entry for entry in cx.patch(Biased()).entries if entry.recogniser == "expert_tensors"]
    mixed = Experts()
    mixed.w_out = nn.Parameter(torch.randn(COUNT, WIDTH, HIDDEN + 1))
    assert not cx.patch(mixed).entries
    mixed.w_out = nn.Parameter(torch.randn(COUNT, WIDTH))
    assert not cx.patch(mixed).entries


def test_another_implementation_runs_as_it_was_chosen():
    module, plain, _ = patched(Experts, "grouped")
    args = given()
    module.config._experts_implementation = plain.config._experts_implementation = None
    assert not is_served(module, args) and torch.equal(module(*args), plain(*args))
    module.config._experts_implementation = "grouped"
    assert is_served(module, args)


def test_hooks_exchanged_activations_and_parametrizations():
    module, plain, _ = patched()
    args, seen = given(), []
    handle = module.act.register_forward_hook(lambda *_: seen.append(1))
    assert not is_served(module, args) and seen
    handle.remove()
    handle = module.register_forward_hook(lambda *_: seen.clear())
    assert is_served(module, args) and not seen
    handle.remove()
    module.act = plain.act = nn.GELU()
    assert_alike(module, plain, args)
    module.act = plain.act = nn.SiLU()

    class Doubled(nn.Module):
        def forward(self, w):
            return 2 * w

    for side in (module, plain):
        parametrize.register_parametrization(side, "w_out", Doubled())
    torch.testing.assert_close(module(*args), plain(*args))
    assert not cx.patch(plain).patched
    hooked = Experts()
    hooked.act.register_forward_hook(lambda *_: None)
    assert [entry.reason for entry in cx.patch(hooked).skipped] == ["act has hooks"]


def test_calls_that_are_the_originals():
    module, plain, _ = patched()
    x, index, weights = given()
    others = {
        "few rows": given(rows=3),
        "no rows": given(rows=0),
        "indices of another dtype": (x, index.int(), weights),
        "rows of another dtype": (x.double(), index, weights.double()),
    }
    for args in others.values():
        try:
            expected = plain(*args)
        except RuntimeError:  # products of two dtypes
            with pytest.raises(RuntimeError):
                module(*args)
            continue
        assert not is_served(module, args)
        torch.testing.assert_close(module(*args), expected)
    assert not is_served(module, (x,), index=index, weights=weights)
    with pytest.raises(IndexError):
        module(x, index[:, :1], weights.flatten())


def test_few_rows_for_many_experts_are_the_originals(monkeypatch):
    module, plain, _ = patched()
    args = given()
    assert is_served(module, args)
    monkeypatch.setattr(expert_tensors, "ROWS_OF_EXPERT", 2 * ROWS // COUNT + 1)
    assert not is_served(module, args) and torch.equal(module(*args), plain(*args))


def test_compiled_code_holds_the_original():
    module, plain, _ = patched()
    args = given()
    module(*args)
    with cx.explain() as calls:
        ours = torch.compile(module, backend="eager")(*args)
    torch.testing.assert_close(ours, plain(*args))
    assert "moe_place" not in {call.op for call in calls.calls}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    module, plain, entry = patched()

    args = given()
    for side in (module, plain):
        y = checkpoint(side, *args, use_reentrant=reentrant)
        y.square().sum().backward()
    for mine, original in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, original.grad, rtol=1e-4, atol=1e-4)
    assert entry.patched and entry.first_error is not None


def test_gpus_are_served_by_grouped_products_alone():
    """What does not wait for the host: bfloat16 in sizes of multiples of 8."""

    def of(dtype, width=WIDTH, hidden=HIDDEN):
        shapes = {"w_in": (2, 2 * hidden, width), "w_out": (2, width, hidden)}
        tensors = {name: SimpleNamespace(is_cuda=True, dtype=dtype, shape=torch.Size(s)) for name, s in shapes.items()}
        return SimpleNamespace(_parameters=tensors)

    settings = expert_tensors.Form("w_in", "w_out", True, False, False, None, None)
    waits = {
        "float32": not expert_tensors._multiplies_without_waiting(of(torch.float32), settings),
        "odd width": not expert_tensors._multiplies_without_waiting(of(torch.bfloat16, 36), settings),
        "odd hidden": not expert_tensors._multiplies_without_waiting(of(torch.bfloat16, 32, 12), settings),
    }
    assert all(waits.values()), waits
    assert expert_tensors._multiplies_without_waiting(of(torch.bfloat16), settings)


def test_the_tensors_of_a_proof_are_small():
    """Those of one layer can be gigabytes."""
    module = Experts()
    module.w_in = nn.Parameter(torch.empty(1).expand(COUNT, 2 << 20, 1 << 20))
    module.w_out = nn.Parameter(torch.empty(1).expand(COUNT, 1 << 20, 1 << 20))
    assert cx.patch(module, dry_run=True).patched
