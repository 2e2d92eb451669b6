"""What camox_ops takes of torch that is not public: one file, and public means where a torch has none of it."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import run_python_with_torch

import camox_ops as cx
from camox_ops import _torch_private

ROOT = Path(__file__).parents[1]
SHORT_CALL = set(_torch_private.NAMES[:7])
# Of classes that cannot be changed, of objects made later, or found again by torch: hidden from camox_ops alone.
CANNOT_BE_DELETED = {
    "torch._C._FunctionBase.apply",
    "torch._ops.OpOverload._op",
    "torch.autograd.Function._backward_cls",
    "torch.Tensor._base",
    "torch.Tensor._is_view",
}

AUTOGRAD = re.compile(r"^def test_\w*(func_transforms|tangent)", re.MULTILINE)
CHOSEN = "test_grad or func_transforms or second_derivative or saved_for or tangent or vmap or without_gradients"

# A process for each name, forked from one that has imported torch. Each name is deleted before camox_ops is imported
# and put back for torch itself, which uses it too; then come outputs, gradients, second derivatives, what torch.func
# makes of them, and what is refused.
WITHOUT_EACH_NAME = """
import json, os, sys, torch

def numbers():
    import camox_ops as cx
    def norm(*tensors):
        return cx.layer_norm2d(*tensors, activation="gelu")
    def edge(x):
        return sum(y.square().sum() for y in cx.edge_maps(x))
    def refusal(make):
        try:
            make()
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(4), torch.randn(4)
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    tables = cx.rope_tables(6, 6)
    found = [*cx.edge_maps(x), norm(x, weight, bias)]
    grads = torch.autograd.grad(norm(*leaves).square().sum(), leaves, create_graph=True)
    found += [*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)]
    found += torch.autograd.grad(cx.rope(2 * leaves[0], *tables, inplace=True).square().sum(), leaves[:1])
    found += [torch.vmap(torch.func.grad(edge))(x[:, None]), torch.func.grad(edge)(x)]
    found.append(torch.func.jacrev(torch.func.jacrev(edge))(x[:1]))
    with torch.no_grad():
        found.append(norm(*leaves))
    found.append(cx.nn.RotaryEmbedding(6)(x))
    found.append(cx.nn.LayerNorm2d(4)(x))
    found.append(cx.grad_group_norms(leaves, [0] * len(leaves), 1))
    (made,) = (2 * leaves[0]).unbind(0)[:1]
    refused = [
        refusal(lambda: cx.rope(leaves[0], *tables, inplace=True)),
        refusal(lambda: cx.rope(leaves[0][:, 1:], *tables, inplace=True)),
        refusal(lambda: cx.rope(made[None], *tables, inplace=True)),
        refusal(lambda: cx.rope((x, x[:1]), *tables, inplace=True)),
        refusal(lambda: cx.rope(x[:1].expand(2, 4, 6, 6), *tables, inplace=True)),
        refusal(lambda: torch.func.jvp(edge, (x,), (x,))),
    ]
    return [float(value.detach().double().square().sum()) for value in found], refused

def work(name, deleted):
    if deleted:
        path, _, last = name.rpartition(".")
        owner = torch
        for part in path.split(".")[1:]:
            owner = getattr(owner, part)
        value = getattr(owner, last)
        delattr(owner, last)
        import camox_ops
        setattr(owner, last, value)
    else:
        os.environ["CAMOX_HIDE_TORCH"] = name
    found = numbers()
    from camox_ops import _torch_private
    return *found, _torch_private.missing, _torch_private.CALLS_ARE_FAST, _torch_private.state()

torch.set_num_threads(1)
for name, deleted in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print(json.dumps([name, *work(name, deleted)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@functools.cache
def without(*names: str) -> dict[str, list]:
    """By the name that is missing: numbers, refusals, names found missing, whether calls are fast, the line of info."""
    asked = [(name, name in _torch_private.NAMES and name not in CANNOT_BE_DELETED) for name in names]
    code = f"import sys\nsys.argv.append({json.dumps(asked)!r})\n{WITHOUT_EACH_NAME}"
    lines = run_python_with_torch(code, CAMOX_HIDE_TORCH="").splitlines()
    return {name: found for name, *found in map(json.loads, lines)}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in _torch_private.NAMES), "all"]
)
def test_without_a_name(name):
    """The package is imported, computes and refuses the same, and says what is missing."""
    found = without("", name)
    assert name in found, "this process failed"
    numbers, refusals, missing, fast, state = found[name]
    complete = found[""]
    assert complete[2:] == [[], True, "short, past the Python of torch's operators"]
    assert len(complete[0]) == 18
    assert None not in complete[1]
    assert numbers == complete[0]
    assert refusals == complete[1]
    assert sorted(missing) == sorted(_torch_private.NAMES if name == "all" else [name])
    assert fast == (name not in {*SHORT_CALL, "all"})
    assert state.startswith("short" if fast else "long, through public torch alone")
    assert all(absent in state for absent in missing)


def test_info_names_what_is_missing():
    info = "from camox_ops.__main__ import main; main(['info'])"
    rows = dict(line.split("  ", 1) for line in run_python_with_torch(info, CAMOX_HIDE_TORCH="").splitlines())
    assert rows["torch calls"] == "short, past the Python of torch's operators"
    rows = dict(
        line.split("  ", 1)
        for line in run_python_with_torch(info, CAMOX_HIDE_TORCH="torch._ops.OpOverload._op").splitlines()
    )
    assert rows["torch calls"].endswith("; CAMOX_HIDE_TORCH hides torch._ops.OpOverload._op")


def test_errors_of_an_unknown_name():
    with pytest.raises(
        RuntimeError, match=r"ImportError: CAMOX_HIDE_TORCH must be 'all' or some of .*, got 'torch\.x'"
    ):
        run_python_with_torch("import camox_ops", CAMOX_HIDE_TORCH="torch.x")


@pytest.mark.slow
def test_the_autograd_tests_without_any_name():
    """Those of every op: gradients, torch.func, saved memory, what is refused. In a process of its own."""
    files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if AUTOGRAD.search(path.read_text())]
    chosen = f"({CHOSEN}) and not matches_reference and not (test_edge and test_grad)"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "CAMOX_HIDE_TORCH": "all"},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 100


def test_arguments_that_c_refuses_are_value_errors():
    """Also where torch, from 2.15 on, makes a RuntimeError of C++'s invalid_argument."""
    with pytest.raises(ValueError, match="logits hold NaN in 1 of 1 rows") as refused:
        cx.moe_route(torch.full((1, 2), float("nan")), 1)
    with pytest.raises(ValueError, match="logits hold NaN in 1 of 1 rows"):
        _torch_private.raise_as_torch_does(RuntimeError(str(refused.value)))
    _torch_private.raise_as_torch_does(RuntimeError("another"))


def test_other_files_use_public_names_alone():
    private = re.compile(
        r"torch(\.\w+)*\._(?!_)|\bforward_ad\._|import is_in_\w+|\b_backward_cls\b|\b_is_view\b|\._base\b|\._op\b"
    )
    sources = [path for path in (ROOT / "camox_ops").rglob("*.py") if path.name != "_torch_private.py"]
    lines = [f"{path.name}: {line.strip()}" for path in sources for line in path.read_text().splitlines()]
    assert len(sources) > 30
    assert [line for line in lines if private.search(line)] == []
    for line in ("torch._C._functorch.unwrap_if_dead", "from torch._subclasses import fake_tensor", "x._base.is_leaf"):
        assert private.search(line)
