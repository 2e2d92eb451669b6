"""The CUDA kernels of bdh_attention and its step on the CPU."""

import itertools

import bdh_cases
import emulator
import pytest
import torch
from bdh_cases import bdh_inputs
from emulator import doubled
from helpers import assert_close_to_reference
from rope_cases import rope_input
from torch.overrides import TorchFunctionMode

from camox_ops import reference

BDH_OPTIONS = [
    {"causal": causal, "softmax": softmax, "relu": relu}
    for causal, softmax, relu in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 0))
]

# Of each layout of tests that take long: one for an even and one for an odd turn.
SLOW = pytest.mark.slow
IN_TURN = [pytest.param(memory, marks=() if memory in ("swapped", "strided") else SLOW) for memory in bdh_cases.MEMORY]


def bdh_reference(grad, q, v, cos, sin, **options):
    options = {name: bool(value) if name != "scale" else value for name, value in options.items()}
    grads = reference.bdh_attention_backward(grad, q, v, cos, sin, **options)
    return reference.bdh_attention(q, v, cos, sin, **options).to(q.dtype), *grads[:2]


@pytest.mark.parametrize("memory", bdh_cases.MEMORY)
def test_bdh_attention(dtype, memory, arch):
    turn = bdh_cases.MEMORY.index(memory)
    for shape, value_dim in bdh_cases.SHAPES:
        for options in BDH_OPTIONS[turn % 3 :: 3]:
            inputs = bdh_inputs(shape, value_dim, dtype, memory, shared=turn % 2 == 0, each=turn % 3 == 0)
            save = ("logsumexp", None, "scores")[turn % 3]
            order = list(emulator.ORDERS)[turn % 4]
            ours = bdh_cases.both(*inputs, save=save, how={"arch": arch, "order": order}, **options)
            truth = bdh_reference(*doubled(*inputs), **options)
            assert_close_to_reference(ours, bdh_reference(*inputs, **options), truth)
            turn += 1


@pytest.mark.parametrize(
    "options", [*BDH_OPTIONS[1:3], *(pytest.param(BDH_OPTIONS[i], marks=pytest.mark.slow) for i in (0, 3))], ids=str
)
def test_bdh_row_bands_and_small_grids(options, dtype, share):
    """The scores of one head at a time, or of a band of its rows."""
    turn = share + list(emulator.DTYPES.values()).index(dtype)
    inputs = bdh_inputs((1, 2, 130, 4), 3, dtype)
    truth, same = bdh_reference(*doubled(*inputs), **options), bdh_reference(*inputs, **options)
    for save in ("logsumexp", "scores"):
        whole = bdh_cases.both(*inputs, save=save, **options)
        assert_close_to_reference(whole, same, truth)
        cap = (2, 7)[turn % 2] if save == "scores" else 7
        capped = bdh_cases.both(*inputs, save=save, how={"grid_cap": cap, "order": "random"}, **options)
        assert_close_to_reference(capped, same, truth)
        assert torch.equal(capped[0], whole[0])


@pytest.mark.parametrize("memory", IN_TURN)
def test_bdh_state_form(dtype, memory, arch):
    """r^T v and r^T g instead of scores, of all heads at once and of one at a time."""
    turn = bdh_cases.MEMORY.index(memory)
    for (shape, value_dim), relu in zip(bdh_cases.SHAPES, (True, True, False, True, False), strict=True):
        inputs = bdh_inputs(shape, value_dim, dtype, memory, shared=turn % 2 == 0, each=turn % 3 == 0)
        options = {"relu": relu, "scale": 0.5}
        how = {"arch": arch, "order": list(emulator.ORDERS)[turn % 4]}
        ours = bdh_cases.both(*inputs, save="nothing", form=2, how=how, **options)
        truth = bdh_reference(*doubled(*inputs), **options)
        assert_close_to_reference(ours, bdh_reference(*inputs, **options), truth)
        capped = bdh_cases.both(*inputs, save="nothing", form=2, how={**how, "grid_cap": 1}, **options)
        assert all(map(torch.equal, capped, ours))
        turn += 1


# (B, H, T, N), D: tiles of 128 and of 192 columns, the last of them not full, sums that end inside a step; one head,
# two that share a tile of r or, where each has its own v, do not; several tiles of rows and columns, seven steps. Rows
# of q or v that no access of 16 bytes takes: tiles of 64 x 64 instead.
BDH_ROTATED_ONCE = [
    ((1, 2, 5, 40), 72),
    ((1, 2, 5, 34), 72),
    ((1, 4, 70, 72), 136),
    ((2, 3, 33, 136), 136),
    ((1, 1, 140, 200), 264),
]


@pytest.mark.parametrize("memory", [m if m == "strided" else pytest.param(m, marks=SLOW) for m in bdh_cases.MEMORY])
@pytest.mark.parametrize("half", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)])
def test_bdh_rotated_once(half, memory, arch, share):
    """Half types in the state form with many columns of v: all heads at once, and one at a time or in another order.
    Over the layouts each shape and dtype meets every order."""
    turn = bdh_cases.MEMORY.index(memory) + (half is torch.float16)
    for shape, value_dim in BDH_ROTATED_ONCE:
        inputs = bdh_inputs(shape, value_dim, half, memory, shared=turn % 3 != 1, each=turn % 5 == 4)
        options, order = {"relu": turn % 2 == 0, "scale": 0.5}, list(emulator.ORDERS)[turn % 4]
        given = {**options, "save": "nothing", "form": 2}
        ours = bdh_cases.both(*inputs, **given, how={"arch": arch, "order": order})
        truth = bdh_reference(*doubled(*inputs), **options)
        assert_close_to_reference(ours, bdh_reference(*inputs, **options), truth)
        if value_dim < 264 or share == 1:  # the last one twice takes as long as the others
            how = {"grid_cap": 1} if turn % 2 else {"order": "random"}
            again = bdh_cases.both(*inputs, flush="start", **given, how={"arch": arch, **how})
            assert all(map(torch.equal, again, ours))
        turn += 2


# (B, H, T, N), D: heads of one tile: an odd one, all of its rows and columns, five steps, four tiles of v, none.
BDH_SHORT = [
    ((1, 1, 5, 8), 8),
    ((1, 3, 64, 64), 72),
    ((2, 2, 33, 264), 256),
    ((3, 1, 64, 136), 64),
    ((1, 2, 9, 40), 0),
]


@pytest.mark.parametrize("memory", bdh_cases.MEMORY)
def test_bdh_short_heads(memory, arch, share):
    """Half types of at most 64 tokens, two heads a block: the scores that are saved, or none, and out. Over the layouts
    each shape and dtype meets every order."""
    turn = bdh_cases.MEMORY.index(memory)
    for (shape, value_dim), dtype in itertools.product(BDH_SHORT, (torch.bfloat16, torch.float16)):
        inputs = bdh_inputs(shape, value_dim, dtype, memory, shared=turn % 3 != 1)[1:]
        options = {"relu": turn % 2 == 0, "causal": turn % 4 > 1, "scale": 0.25}
        given, order = {**options, "save": ("scores", "nothing")[turn % 2]}, list(emulator.ORDERS)[turn % 4]
        ours = bdh_cases.forward(*inputs, **given, how={"arch": arch, "order": order})[:2]
        truth = reference.bdh_attention(*doubled(*inputs), **options)
        if value_dim:
            assert_close_to_reference(ours[:1], [reference.bdh_attention(*inputs, **options)], [truth])
        if ours[1] is not None:
            r, r64 = (
                reference.rope(q.relu() if options["relu"] else q, *tables, interleaved=True)
                for q, *tables in ((inputs[0], *inputs[2:]), doubled(inputs[0], *inputs[2:]))
            )
            s, s64 = (0.25 * x @ x.mT for x in (r.to(dtype).float(), r64))  # saved in float32
            if options["causal"]:
                s, s64 = s.tril(-1), s64.tril(-1)
            else:
                assert torch.equal(ours[1], ours[1].mT)
            assert_close_to_reference(ours[1:], [s], [s64])
        how = ({"grid_cap": 1}, {"order": "random"})[(turn // 2 + share) % 2]
        again = bdh_cases.forward(*inputs, flush="start", **given, how={"arch": arch, **how})[:2]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(again, ours, strict=True))
        turn += 1


# (B, H, T, N), D: one chunk of 64 tokens that is not full, two and three, the last of them short; states of several
# tiles, rows that no access of 16 bytes takes; chunks of two tiles.
BDH_CHUNKS = [
    ((1, 2, 5, 32), 8),
    ((2, 2, 70, 4), 4),
    ((1, 1, 192, 6), 70),
    ((1, 2, 139, 66), 7),
    ((1, 1, 150, 134), 124),
]


@pytest.mark.parametrize("memory", IN_TURN)
def test_bdh_causal_state_form(dtype, memory, arch, share):
    """States of the chunks before and behind; of all heads at once, and of one or of a chunk at a time."""
    turn, parity = bdh_cases.MEMORY.index(memory), share + list(emulator.DTYPES.values()).index(dtype)
    for shape, value_dim in BDH_CHUNKS[turn % 2 :: 2]:
        inputs = bdh_inputs(shape, value_dim, dtype, memory, shared=turn % 3 != 1, each=turn % 3 == 0)
        options = {"causal": True, "relu": turn % 2 == 0, "scale": 0.5}
        given = {**options, "save": "nothing", "form": 2}
        how = {"arch": arch, "order": list(emulator.ORDERS)[turn % 4]}
        same, truth = bdh_reference(*inputs, **options), bdh_reference(*doubled(*inputs), **options)
        ours = bdh_cases.both(*inputs, **given, how=how)
        assert_close_to_reference(ours, same, truth)
        if shape[2] < 150 and (turn // 2 + parity) % 2:
            assert all(map(torch.equal, bdh_cases.both(*inputs, **given, how={**how, "grid_cap": 1}), ours))
        elif shape[2] < 150:
            assert_close_to_reference(bdh_cases.both(*inputs, **given, how={**how, "grid_cap": 2}), same, truth)
        turn += 1


@pytest.mark.parametrize("causal", [0, 1])
def test_bdh_scratch_does_not_grow_with_the_sequence(causal):
    """Of the state form, but for one state a segment of chunks: less and less beside r of a head, which is nowhere."""
    for length, share in ((100_000, 3), (1_000_000, 15)):
        for heads in ((1, 1), (2, 6)):
            size = bdh_cases.scratch((*heads, length, 1024), 192, "backward", causal=causal)
            assert 0 < size < 4 * length * 1024 / share
    assert bdh_cases.scratch((2, 6, 500, 1024), 192, "forward", causal=causal) == 12 * 500 * 500 * 4


def as_tf32(x):
    """Rounded to ten bits of mantissa, ties away from 0."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class InTF32(TorchFunctionMode):
    """Products of float32 matrices as a GPU's tensor cores make them."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function in (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul, torch.einsum):
            arguments = [as_tf32(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("options", [*BDH_OPTIONS[:4], {"form": 2}, {"form": 2, "causal": 1}], ids=str)
def test_bdh_tf32(options, arch):
    """Where it is allowed as plain PyTorch multiplies in TF32; in float32 elsewhere, and on sm_75, which has none."""
    inputs = bdh_inputs((1, 2, 72, 36), 24, torch.float32)
    plain = {name: value for name, value in options.items() if name != "form"}
    truth = bdh_reference(*doubled(*inputs), **plain)
    with InTF32():
        same = bdh_reference(*inputs, **plain)
    exact = bdh_reference(*inputs, **plain)
    given = {"save": "logsumexp", **options}
    full, ours = (bdh_cases.both(*inputs, **given, tf32=tf32, how={"arch": arch}) for tf32 in (False, True))
    assert_close_to_reference(full, exact, truth)
    if arch < 800:
        assert all(map(torch.equal, ours, full))
        return
    assert_close_to_reference(ours, same, truth)
    with pytest.raises(AssertionError):
        assert_close_to_reference(ours, exact, truth)
    again = bdh_cases.both(*inputs, **given, tf32=True, how={"arch": arch, "order": "random"})
    assert all(map(torch.equal, again, ours))


def test_tf32_rounding():
    """Operands have ten bits of mantissa, ties away from 0: q, and the one score."""
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12])
    assert as_tf32(values).tolist() == [1.0, 1 + 2**-10, 1 + 2**-10, 1.0]
    q = values.view(1, 1, 1, 4)
    v, table = torch.ones(1, 1, 1, 1), [torch.ones(1, 2), torch.zeros(1, 2)]
    out = bdh_cases.forward(q, v, *table, tf32=True)[0]
    assert out.item() == as_tf32(as_tf32(q).double().square().sum().float().view(1)).item()


@pytest.mark.parametrize("softmax_at", ["one score", "some scores"])
def test_bdh_softmax_of_wide_queries(softmax_at, monkeypatch):
    """Scores of about 16, of which one is nearly all of a softmax: gradients that are 0 but for tiny terms."""
    for value_dim, save in ((64, None), (8, "logsumexp")):
        inputs = bdh_inputs((1, 1, 64, 1024), value_dim, torch.float32, each=True)
        options = {"softmax": True, "relu": softmax_at == "some scores"}
        truth = bdh_reference(*doubled(*inputs), **options)
        if (
            save == "logsumexp"
        ):  # a sum of 16 in float32 has lost 16 eps of each weight: torch is compared by this formula
            monkeypatch.setattr(torch.Tensor, "softmax", lambda s, dim: (s - s.logsumexp(dim, keepdim=True)).exp())
        assert_close_to_reference(
            bdh_cases.both(*inputs, save=save, **options), bdh_reference(*inputs, **options), truth
        )


@pytest.mark.parametrize(("form", "order"), [(0, "random"), (2, "reverse")])
def test_bdh_form_by_cost(form, order):
    """By cost the form with fewer products; scores that were saved are used in any form."""
    inputs = bdh_inputs((1, 2, 80, 8), 4, torch.float32)
    for causal in (False, True):
        options = {"save": "nothing", "causal": causal}
        state = bdh_cases.both(*inputs, form=form, how={"order": order}, **options)
        assert all(map(torch.equal, state, bdh_cases.both(*inputs, form=2, **options)))
        assert not torch.equal(state[0], bdh_cases.both(*inputs, form=1, **options)[0])
        ours = bdh_cases.both(*inputs, form=form, save="scores", causal=causal)
        assert all(map(torch.equal, ours, bdh_cases.both(*inputs, form=1, save="scores", causal=causal)))


@pytest.mark.parametrize("memory", ("contiguous", "strided"))
def test_bdh_stays_inside_at_both_ends(dtype, memory):
    orders = itertools.cycle(emulator.ORDERS)
    for (shape, value_dim), options in zip((((1, 2, 7, 34), 5), ((1, 1, 8, 16), 8)), BDH_OPTIONS[1:3], strict=True):
        inputs = bdh_inputs(shape, value_dim, dtype, memory, each=True)
        for more in (options, {"save": "nothing", "form": 2}, {"save": "nothing", "form": 2, "causal": True}):
            starts = bdh_cases.both(*inputs, flush="start", how={"order": next(orders)}, **more)
            assert all(map(torch.equal, starts, bdh_cases.both(*inputs, **more)))


def test_bdh_scores_that_are_saved(dtype, arch):
    """w as the header has it: what does not count is 0, rows of a softmax add up to 1, but for a causal one's first."""
    _, q, v, cos, sin = bdh_inputs((2, 2, 70, 8), 3, dtype)
    for causal in (False, True):
        scores = bdh_cases.forward(q, v, cos, sin, save="scores", causal=causal, how={"arch": arch})[1]
        masked = torch.ones(70, 70).triu().bool() if causal else torch.zeros(70, 70).bool()
        assert torch.equal(scores[..., masked], torch.zeros_like(scores[..., masked]))
        if not causal:
            assert torch.equal(scores, scores.mT)
        options = {"causal": causal, "softmax": True, "how": {"arch": arch}}
        w = bdh_cases.forward(q, v, cos, sin, save="scores", **options)[1]
        logsumexp = bdh_cases.forward(q, v, cos, sin, save="logsumexp", **options)[2]
        assert torch.equal(w[..., masked], torch.zeros_like(w[..., masked]))
        sums = torch.ones(2, 2, 70)
        sums[..., 0] -= float(causal)
        torch.testing.assert_close(w.sum(-1), sums)
        expected = (scores * 8**-0.5).masked_fill(masked, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(logsumexp, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softmax", [False, True])
def test_bdh_unturned_gradient(softmax, dtype, arch):
    grad, q, v, cos, sin = bdh_inputs((1, 2, 9, 36), 5, dtype, each=True)
    options = {"softmax": softmax, "scale": 0.25}
    ours = bdh_cases.backward(grad, q, v, cos, sin, unturned=True, how={"arch": arch}, **options)[0]

    def of_turned(grad, q, v, cos, sin):
        rotated = reference.rope(q.relu(), cos, sin, interleaved=True)
        straight, crooked = torch.ones_like(cos), torch.zeros_like(sin)
        return reference.bdh_attention_backward(grad, rotated, v, straight, crooked, relu=False, **options)[0]

    inputs = (grad, q, v, cos, sin)
    assert_close_to_reference(ours, of_turned(*inputs), of_turned(*doubled(*inputs)))


def test_bdh_step(dtype, arch, order):
    """Shares of rows and columns; a state with strides, or none yet."""
    for shape, value_dim, shared in (((1, 1, 2), 1, True), ((2, 3, 34), 33, True), ((1, 2, 518), 5, False)):
        _, q, v, cos, sin = bdh_inputs((*shape[:2], 1, shape[2]), value_dim, dtype, "strided", shared, each=shared)
        inputs = (q[:, :, 0], v[:, :, 0], cos[0], sin[0])
        for state in (None, rope_input((*shape, value_dim), torch.float32, "strided", seed=4)):
            options = {"relu": shared, "scale": None if shared else 0.5}
            ours = bdh_cases.step(*inputs, state, **options, how={"arch": arch, "order": order})
            truth = reference.bdh_attention_step(
                *doubled(*inputs), None if state is None else state.double(), **options
            )
            assert_close_to_reference(ours, reference.bdh_attention_step(*inputs, state, **options), truth)
            for how in ({"grid_cap": 1}, {"order": "reverse"}):
                again = bdh_cases.step(*inputs, state, **options, flush="start", how={"arch": arch, **how})
                assert all(map(torch.equal, again, ours))


def test_bdh_steps_are_the_causal_attention(arch):
    _, q, v, cos, sin = bdh_inputs((1, 2, 6, 8), 3, torch.float32)
    state, rows = None, []
    for t in range(6):
        row, state = bdh_cases.step(q[:, :, t], v[:, :, t], cos[t], sin[t], state, how={"arch": arch})
        rows.append(row)
    ours = bdh_cases.forward(q, v, cos, sin, causal=True, how={"arch": arch})[0]
    torch.testing.assert_close(torch.stack(rows, 2), ours)


def test_bdh_empty():
    for shape, value_dim in (((0, 2, 3, 4), 5), ((1, 0, 3, 4), 5), ((1, 2, 0, 4), 5), ((1, 2, 3, 4), 0)):
        inputs = bdh_inputs(shape, value_dim, torch.float32, shared=False)
        for softmax in (False, True):
            out, grad_q, grad_v = bdh_cases.both(*inputs, softmax=softmax)
            assert out.shape == grad_v.shape == (*shape[:3], value_dim)
            assert torch.equal(grad_q, torch.zeros(shape))
        out, state = bdh_cases.step(inputs[1].sum(2), inputs[2].sum(2), *(table[0] for table in inputs[3:]), None)
        assert out.numel() == state.numel() == 0 or value_dim
    inputs = bdh_inputs((2, 0, 3, 4), 5, torch.float32)
    assert torch.equal(bdh_cases.both(*inputs)[2], torch.zeros(2, 1, 3, 5))


@pytest.mark.slow
def test_bdh_broken_build_is_noticed():
    inputs = bdh_inputs((1, 2, 5, 8), 3, torch.float32)
    right, wrong = (bdh_cases.both(*inputs, how={"define": define}) for define in ("", "CAMOX_BREAK_BDH"))
    assert not any(torch.allclose(*pair, atol=1e-4, rtol=0) for pair in zip(right[:2], wrong[:2], strict=True))
    _, *inputs = bdh_inputs((1, 2, 5, 8), 72, torch.float16)
    for form in (1, 2):  # short heads; rotated once
        right, wrong = (
            bdh_cases.forward(*inputs, save="nothing", form=form, how={"define": define})[0]
            for define in ("", "CAMOX_BREAK_BDH")
        )
        assert not torch.allclose(right, wrong, atol=5e-4, rtol=0)
