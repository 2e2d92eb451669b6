"""scripts/new_op.py writes an op that is complete, builds and passes its tests; `make lint` names what one lacks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import check_layout  # noqa: E402
import new_op  # noqa: E402

NAME, WHAT = "axis_maps", "absolute differences along x and y, added"
MOST_LINES = 200
TOOLS = Path(sys.executable).parent


def run(folder, *command, **environment) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this tree with a new op in it."""
    folder = tmp_path_factory.mktemp("tree")
    for path in check_layout.tracked():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    assert new_op.main([NAME, WHAT, "--into", str(folder)]) == 0
    return folder


@pytest.fixture
def layout(tree, monkeypatch):
    """() -> what check_layout finds in the copy."""
    monkeypatch.setattr(check_layout, "ROOT", tree)
    return lambda: check_layout.missing_files() + check_layout.missing_entries()


def written_files(tree) -> list[Path]:
    return [tree / path.replace("NAME", NAME) for path in new_op.FILES]


def test_what_is_written_is_small_and_formatted(tree):
    files = written_files(tree)
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES
    assert not any(word in path.read_text() for path in files for word in ("NAME", "WHAT", "CAMEL", "UPPER"))
    if not (TOOLS / "ruff").exists() or not (TOOLS / "clang-format").exists():
        pytest.skip("ruff and clang-format are not installed beside this Python")
    python = [path for path in files if path.suffix == ".py"]
    run(tree, TOOLS / "ruff", "check", *python, "camox_ops/_ops.py")
    run(tree, TOOLS / "ruff", "format", "--check", *python, "camox_ops/_ops.py")
    sources = [path for path in files if path.suffix in (".h", ".c", ".inc", ".cpp", ".cu")]
    run(tree, TOOLS / "clang-format", "--dry-run", "-Werror", *sources)


def test_only_the_compilers_table_is_left_to_write(tree, layout):
    (fault,) = layout()
    assert fault.startswith("csrc/cuda_budget.json: no kernels of axis_maps; ")


@pytest.mark.parametrize(
    "lost",
    [*(path.replace("NAME", NAME) for path in new_op.FILES if not path.endswith((".h", "_bind.cpp"))), *new_op.ENTRIES],
)
def test_layout_names_what_is_missing(tree, layout, lost):
    path = tree / lost
    text = path.read_text()
    if lost in new_op.ENTRIES:
        path.write_text("".join(line for line in text.splitlines(keepends=True) if NAME not in line))
    else:
        path.unlink()
    try:
        assert any(lost in fault and NAME in fault for fault in layout())
    finally:
        path.write_text(text)


def test_layout_names_an_op_that_is_not_in_the_list(tree, layout):
    path = tree / "camox_ops" / "_ops.py"
    text = path.read_text()
    path.write_text(text.replace(f'"{NAME}"', '"other"'))
    try:
        found = layout()
    finally:
        path.write_text(text)
    assert f"{check_layout.ONE_LIST}: IMAGE_OPS has other, but there is no csrc/other" in found
    assert f"{check_layout.ONE_LIST}: IMAGE_OPS has no entry {NAME}, csrc/{NAME} says otherwise" in found


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("Roberts", "differences", "the name must be lower case words"),
        ("class", "differences", "the name must be lower case words"),
        ("edge", "differences", "csrc/edge exists already"),
        ("roberts", "a | b", "what it computes must be one line"),
        ("roberts", "a */ b", "what it computes must be one line"),
        ("roberts", 71 * "a", "what it computes must be one line"),
    ],
)
def test_errors(capsys, name, what, message):
    with pytest.raises(SystemExit):
        new_op.main([name, what])
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def built(tree):
    """The same, built without the CUDA part from the objects of this tree, so that only the new op is compiled."""
    temp = sorted((ROOT / "build").glob("temp.*"))
    if not temp:
        pytest.skip("build/temp* has no objects: this tree was not built in place")
    for folder in temp:
        shutil.copytree(folder, tree / "build" / folder.name)
    before = {path: path.stat().st_mtime for path in (tree / "build").rglob("*.o")}
    quick = any((ROOT / "build").glob("temp.*/plain/*-unoptimised"))  # as `make build` makes them
    options = {"CAMOX_NVCC": "none", "CAMOX_QUICK_BUILD": str(int(quick))}
    run(tree, sys.executable, "setup.py", "-q", "build_ext", "--inplace", **options)
    after = {path: path.stat().st_mtime for path in (tree / "build").rglob("*.o")}
    made = {path.relative_to(tree / "build") for path in after if after[path] != before.get(path)}
    return tree, made


@pytest.mark.slow
def test_the_new_op_alone_is_compiled(built):
    _, made = built
    assert made and {path.parent.name for path in made} == {NAME}


@pytest.mark.slow
def test_the_new_op_passes_its_tests_on_the_cpu(built):
    tree, _ = built
    run(tree, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_{NAME}.py")
    chosen = f"{NAME} and not compile or has_a_case or called_by_a_case"
    run(tree, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_contract.py", "-k", chosen)
    said = run(tree, sys.executable, "-c", f"import camox_ops as cx; print(cx.{NAME}.__name__, '{NAME}' in cx.__all__)")
    assert said.split() == [NAME, "True"]


@pytest.mark.slow
def test_the_new_ops_kernels_pass_the_c_test(built):
    tree, _ = built
    objects = [path for path in (tree / "build").rglob("*.o") if path.parent.name == NAME and "cuda" not in path.parts]
    objects += [path for path in (tree / "build").rglob("plain/c/csrc/common/*.o") if path.stem != "old_glibc"]
    program = tree / "build" / "c_test"
    kernels = [path for path in objects if "cxx" not in path.parts]
    run(tree, os.environ.get("CC", "gcc"), "-O1", f"tests/c/test_{NAME}.c", *kernels, "-lm", "-o", program)
    assert f"{NAME}: " in run(tree, program) and ", 0 failures" in run(tree, program)


@pytest.mark.slow
def test_the_new_ops_cuda_kernels_pass_on_the_cpu(tree):
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/test_images_cuda.py", "-k", NAME]
    assert " passed" in run(tree, sys.executable, *command)


def test_one_architecture_of_an_op_is_merged_into_the_table():
    import cuda_budget

    table = json.loads(cuda_budget.TABLE.read_text())
    name, line = next(iter(table.items()))
    changed = {"archs": {"sm_80": {**line["archs"]["sm_80"], "registers": 1}}, "claims": [], "threads": line["threads"]}
    lines = cuda_budget.merged({name: line}, {name: changed}, ["sm_80"])
    assert lines[name]["archs"]["sm_80"]["registers"] == 1
    assert {arch: of for arch, of in lines[name]["archs"].items() if arch != "sm_80"} == {
        arch: of for arch, of in line["archs"].items() if arch != "sm_80"
    }
    assert list(lines[name]["archs"]) == list(line["archs"])
    gone = cuda_budget.merged({name: line}, {}, ["sm_80"])
    assert "sm_80" not in gone[name]["archs"]
    assert cuda_budget.merged({name: line}, {}, cuda_budget.ARCHS) == {}
