"""Every kernel of the library runs in the rig: `every_kernel` of each op's cases."""

import json

import pytest
import rig

RESERVED_SHARED = 1024  # of every block, the driver's; cuobjdump counts it from sm_90 on


@pytest.mark.parametrize("source", rig.sources(), ids=lambda source: source.stem)
def test_every_kernel_was_run(source, capsys):
    """Each __global__ function in the objects. The rig counts for each at least the static shared memory that nvcc
    gave it."""
    budget = json.loads((rig.CSRC / "cuda_budget.json").read_text())
    for arch in rig.ARCHS:
        path = rig.object_path(source, arch)
        rig.all_cases()[source.parent.name].every_kernel(arch)
        compiled = {rig.short_name(name) for name in rig.kernels(path)}
        update = f"python scripts/cuda_budget.py --update --ops {source.parent.name}"
        assert compiled and compiled <= budget.keys(), f"kernels that csrc/cuda_budget.json lacks: run `{update}`"
        names, known = rig.kernel_addresses(path), f"sm_{arch // 10}"
        for address, size in rig.static_shared(path).items():
            name = rig.short_name(names[address])
            assert size >= budget[name]["archs"][known]["shared"] - (RESERVED_SHARED if arch >= 900 else 0), name
        assert not rig.never_run(path), f"compiled but never run in the rig: {sorted(rig.never_run(path))}"
    with capsys.disabled():
        print(f"\n{rig.report(source.stem)}")
