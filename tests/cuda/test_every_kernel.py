"""Every kernel of the library runs in the emulator: `every_kernel` of each op's cases."""

import json

import emulator
import pytest

RESERVED_SHARED = 1024  # of every block, the driver's; cuobjdump counts it from sm_90 on


@pytest.mark.parametrize("source", emulator.sources(), ids=lambda source: source.stem)
def test_every_kernel_was_run(source, arch, capsys):
    """Each __global__ function in the objects. The emulator counts for each at least the static shared memory that nvcc
    gave it."""
    budget = json.loads((emulator.CSRC / "cuda_budget.json").read_text())
    path = emulator.object_path(source, arch)
    emulator.all_cases()[source.parent.name].every_kernel(arch)
    compiled = {emulator.short_name(name) for name in emulator.kernels(path)}
    update = f"python scripts/cuda_budget.py --update --ops {source.parent.name}"
    assert compiled and compiled <= budget.keys(), f"kernels that csrc/cuda_budget.json lacks: run `{update}`"
    names, known = emulator.kernel_addresses(path), f"sm_{arch // 10}"
    for address, size in emulator.static_shared(path).items():
        name = emulator.short_name(names[address])
        assert size >= budget[name]["archs"][known]["shared"] - (RESERVED_SHARED if arch >= 900 else 0), name
    assert not emulator.never_run(path), f"compiled but never run in the emulator: {sorted(emulator.never_run(path))}"
    with capsys.disabled():
        print(f"\n{emulator.report(source.stem)}")
