"""scripts/cuda_budget.py on code that is written here: neither nvcc nor the CUDA tools are asked for."""

import copy
import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from scripts import cuda_budget  # noqa: E402

KERNEL = "edge_kernel<float, 4, false>"
FOUND = {
    "registers": 80,
    "shared": 0,
    "local": 0,
    "claims": ["LDG.E.128", "STG.E.128"],
    "narrow": [],
    "threads": 128,
    "warps": 24,
    "bytes_in_flight": 30720,
}
TABLE = cuda_budget.new_table({"sm_80": {KERNEL: FOUND}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"registers": 79}, None),
        ({"registers": 81}, "81 registers, budget 80"),
        ({"shared": 16}, "16 shared, budget 0"),
        ({"local": 8}, "spills or uses local memory"),
        ({"claims": ["LDG.E.128"]}, "no STG.E.128 any more"),
        ({"narrow": ["stores"]}, "no 128-bit stores"),
    ],
)
def test_a_kernel_past_its_line_is_named(changes, message):
    lines = cuda_budget.faults(TABLE, {"sm_80": {KERNEL: FOUND | changes}}, update=False)
    assert lines == ([f"{KERNEL} on sm_80: {message}"] if message else [])


def test_only_untuned_architectures_may_spill_and_no_more_than_their_line():
    spilling = {"sm_80": {KERNEL: FOUND | {"local": 10}}, "sm_100": {KERNEL: FOUND | {"local": 10}}}
    assert cuda_budget.faults({}, spilling, update=True) == [f"{KERNEL} on sm_80: spills or uses local memory"]
    table = cuda_budget.new_table({"sm_100": spilling["sm_100"]})
    assert table[KERNEL]["archs"]["sm_100"]["local"] == 10
    assert cuda_budget.faults(table, {"sm_100": spilling["sm_100"]}, update=False) == []
    more = {"sm_100": {KERNEL: FOUND | {"local": 11}}}
    assert cuda_budget.faults(table, more, update=False) == [f"{KERNEL} on sm_100: 11 local, budget 10"]
    clean = cuda_budget.new_table({"sm_100": {KERNEL: FOUND}})
    assert cuda_budget.faults(clean, spilling, update=False)[-1] == f"{KERNEL} on sm_100: 10 local, budget 0"


def test_the_table_says_of_each_line_whose_it_is():
    table = json.loads(cuda_budget.TABLE.read_text())
    of = {op: cuda_budget.of_ops(table, [op]).keys() for op in cuda_budget.OPS}
    assert all(of.values())
    assert sorted(name for names in of.values() for name in names) == sorted(table)


def test_missing_and_unknown_kernels_are_named():
    (line,) = cuda_budget.faults(TABLE, {"sm_80": {}}, update=False)
    assert "in cuda_budget.json but not compiled" in line
    (line,) = cuda_budget.faults(TABLE, {"sm_90": {KERNEL: FOUND}}, update=False)
    assert "not in cuda_budget.json; run with --update" in line


def test_update_takes_growth_but_no_spill_and_no_lost_access():
    def refused(**changes):
        return cuda_budget.faults(TABLE, {"sm_80": {KERNEL: FOUND | changes}}, update=True)

    assert refused(registers=200, shared=4096) == []
    assert refused(local=8) and refused(claims=[]) and refused(narrow=["loads"])


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        (KERNEL, "LDG.E.128.CONSTANT R0, [R2.64] ; STG.E.128 [R2.64], R4", []),
        (KERNEL, "LDGSTS.E.BYPASS.128 [R0], [R2.64] ; STG.E.128 [R2.64], R4", []),
        (KERNEL, "LDG.E.64.CONSTANT R0, [R2.64] ; STG.E [R2.64], R4", ["loads", "stores"]),
        ("bands_kernel<__half, 8, true>", "LDG.E.128 R0, [R2.64] ; STG.E.64 [R2.64], R4", ["stores"]),
        ("bands_kernel<__half, 2, true>", "LDG.E R0, [R2.64] ; STG.E [R2.64], R4", []),
        ("camox_row_sums_kernel<8, norm2d>", "LDG.E R0, [R2.64] ; STG.E [R2.64], R4", []),
    ],
)
def test_vectors_must_move_in_one_access(name, code, expected):
    assert cuda_budget.narrow(name, code) == expected


def test_bytes_of_the_main_loop():
    code = [
        (0x00, "LDG.E.U16 R0, [R2.64]"),
        (0x10, "LDG.E.128.CONSTANT R4, [R2.64]"),
        (0x20, "LDG.E.CONSTANT R3, [R6.64]"),
        (0x30, "STG.E.128 [R8.64], R4"),
        (0x40, "@P0 BRA 0x10"),
        (0x50, "EXIT"),
    ]
    loop = cuda_budget.main_loop(code)
    assert loop == [text for _, text in code[1:5]]
    assert cuda_budget.loaded_bytes(loop) == 20
    assert cuda_budget.loaded_bytes(cuda_budget.main_loop(code[:4])) == 22


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "threads", "warps"),
    [
        ("sm_90", 128, 0, 128, 16),
        ("sm_90", 32, 0, 128, 64),
        ("sm_75", 32, 0, 128, 32),
        ("sm_80", 32, 100 * 1024, 128, 4),
        ("sm_86", 255, 0, 256, 8),
    ],
)
def test_occupancy(arch, registers, shared, threads, warps):
    assert cuda_budget.occupancy(arch, registers, shared, threads) == warps


def test_the_table_has_every_architecture_and_no_kernel_of_vectors_without_wide_accesses():
    table = json.loads(cuda_budget.TABLE.read_text())
    assert cuda_budget.TABLE.read_text() == cuda_budget.written(table)
    for name, line in table.items():
        assert set(line["archs"]) == set(cuda_budget.ARCHS), name
        loads = " ".join(line["claims"])
        assert cuda_budget.narrow(name, f"{loads} LDGSTS.E.128") == [], name


def test_the_table_is_a_fixed_point():
    found = {"sm_80": {KERNEL: copy.deepcopy(FOUND)}}
    assert cuda_budget.new_table(found) == json.loads(cuda_budget.written(TABLE))


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(cuda_budget.shutil, "which", lambda *arguments, **named: None)
    with pytest.raises(SystemExit, match="cuobjdump not found; pip install nvidia-cuda-cuobjdump"):
        cuda_budget.tool("cuobjdump")


def test_a_wheel_without_kernels_says_so(tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "camox_ops-1-cp310-abi3-linux_x86_64.whl"
    zipfile.ZipFile(wheel, "w").close()
    monkeypatch.setattr(sys, "argv", ["cuda_budget.py", "--binary", str(wheel)])
    cuda_budget.main()
    assert "was built without nvcc: it has no kernels to check" in capsys.readouterr().out
