"""scripts/cuda_model.py on listings that are written here: neither nvcc nor the CUDA tools are asked for."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from scripts import cuda_model  # noqa: E402
from scripts.cuda_model import Case, Kernel, Launch, Step, hot_loop  # noqa: E402


def listing(text: str) -> list[tuple[int, str]]:
    """One instruction a line, 16 bytes each; NAME: marks the next, and a jump to >NAME is given its address."""
    places, lines = {}, []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            places[line[:-1]] = 16 * len(lines)
        else:
            lines.append(line)
    for name, place in places.items():
        lines = [line.replace(f">{name}", hex(place)) for line in lines]
    return [(16 * i, line) for i, line in enumerate(lines)]


# A step is ten instructions: four more of a branch for borders are jumped over, and the call serves rare numbers.
STEP = """
    LDG.E.128.CONSTANT R4, [R2.64]
    @P1 BRA >inside{n}
    IADD3 R6, R6, 0x1, RZ
    IADD3 R6, R6, 0x1, RZ
    IADD3 R6, R6, 0x1, RZ
    IADD3 R6, R6, 0x1, RZ
inside{n}:
    FFMA R4, R4, R4, R4
    FFMA R5, R5, R5, R5
    MUFU.EX2 R6, R6
    @!P2 BRA >usual{n}
    CALL.REL.NOINC >slow
usual{n}:
    FADD R7, R7, R7
    STG.E.128 [R8.64], R4
    IADD3 R0, R0, 0x1, RZ
"""
KERNEL = (
    """
    S2R R0, SR_TID.X
    @P0 EXIT
    LDG.E.128.CONSTANT R20, [R18.64]
again:
    ISETP.GE.AND P3, PT, R0, R9, PT
    @P3 BRA >rest
"""
    + "loop:"
    + STEP.format(n=1)
    + STEP.format(n=2)
    + """
    @P4 BRA >loop
rest:
"""
    + STEP.format(n=3)
    + """
    IADD3 R1, R1, 0x100, RZ
    @!P5 BRA >again
    EXIT
slow:
    MUFU.RCP R1, R1
    RET.REL.NODEC R2 0x0
"""
)


def test_the_cheapest_step_of_the_unrolled_loop_is_counted():
    loop = hot_loop(listing(KERNEL), Step(loads=1, stores=1))
    assert loop.unrolled == 2
    assert loop.turn.instructions == 2 * 9 + 1
    assert loop.turn.count("CALL") == 0
    # S2R, EXIT, LDG, ISETP and BRA before it; the 9 of a remaining step, IADD3, BRA and EXIT after it
    assert loop.around.instructions == 5 + 9 + 3


def test_the_way_that_is_meant_may_be_a_dearer_one():
    loop = hot_loop(listing(KERNEL), Step(loads=1, stores=1, most="IADD3"))
    assert loop.turn.instructions == 2 * 13 + 1


def test_of_a_kernel_without_such_steps_nothing_is_said():
    assert hot_loop(listing(KERNEL), Step(loads=3, stores=1)) is None
    assert hot_loop(listing("LDG.E.128 R0, [R2.64]\nSTG.E.128 [R2.64], R0\nEXIT"), Step(loads=1, stores=1)) is None


def test_a_jump_back_into_a_branch_is_no_loop():
    code = listing("@P0 BRA >late\nnear:\nFADD R0, R0, R0\nEXIT\nlate:\nFMUL R0, R0, R0\nBRA >near")
    assert cuda_model.natural_loops(cuda_model.basic_blocks(code)) == []


def test_a_row_is_the_loop_around_the_loops_over_its_elements():
    code = listing(
        """
        row:
            IADD3 R0, R0, 0x1, RZ
        first:
            LDG.E.128 R4, [R2.64]
            @P0 BRA >first
            SHFL.BFLY PT, R1, R1, 0x1, 0x1f
        second:
            STG.E.128 [R8.64], R4
            @P1 BRA >second
            @P2 BRA >row
            EXIT
        """
    )
    loop = hot_loop(code, Step(loads=1, stores=1, row=True))
    assert (loop.unrolled, loop.turn.instructions) == (1, 7)
    assert loop.turn.cycles_alone() == 7 * cuda_model.ALONE + cuda_model.SHUFFLE


def test_an_inner_loop_is_passed_as_often_as_is_said():
    code = listing(
        """
        row:
            LDG.E.128 R4, [R2.64]
        copies:
            LDG.E.128 R8, [R6.64]
            FFMA R4, R4, R4, R4
            @P0 BRA >copies
            STG.E.128 [R8.64], R4
            @P1 BRA >row
            EXIT
        """
    )
    inner = Step(loads=1, stores=0)
    loop = hot_loop(code, Step(loads=2, stores=1, row=True, inner=((inner, 3),)))
    assert loop.turn.instructions == 3 + 3 * 3
    assert loop.turn.count("LDG") == 4
    assert hot_loop(code, Step(loads=2, stores=1, row=True)).turn.instructions == 6
    assert hot_loop(code, Step(loads=2, stores=1, row=True, inner=((Step(loads=4, stores=0), 3),))) is None


GPU = cuda_model.Gpu("a", "sm_90", 10, 1.0, 100.0, 50.0, 1 << 20, 200.0, 10.0, 128, 256)


def prediction(launch: Launch, registers=32, gpu=GPU):
    case = Case("edge", "op", "forward", "float32", 1000, 4000.0, (launch,))
    return cuda_model.predict(case, gpu, {"kernel": Kernel(listing(KERNEL), registers, 0)})


def test_loops_beside_the_hot_one_count_the_times_that_are_said():
    code = listing(
        """
        first:
            LDG.E R0, [R2.64]
            @P0 BRA >first
        second:
            LDG.E.128 R4, [R2.64]
            STG.E.128 [R8.64], R4
            @P1 BRA >second
            EXIT
        """
    )
    before = Step(loads=1, stores=0, load=r"\bLDG\.E ", waits=2)
    loop = hot_loop(code, Step(loads=1, stores=1), beside=((before, 5),))
    assert (loop.turn.instructions, loop.around.instructions) == (3, 3)
    ((turn, times, waits),) = loop.beside
    assert (turn.instructions, times, waits) == (2, 5, 2)
    assert hot_loop(code, Step(loads=1, stores=1), beside=((Step(loads=2, stores=0), 5),)) is None


def test_each_limit_by_hand():
    launch = Launch("kernel", blocks=160, threads=128, step=Step(1, 1), steps=2, traffic=1e6)
    found = prediction(launch)  # 16 blocks on each of 10 multiprocessors: one wave of 1e6 bytes at 100 a ns
    assert (found.limit, found.waves, found.warps) == ("memory", 1.0, 64)
    assert found.share == pytest.approx(4000 / 1e6)
    assert found.instructions == 19 * 160 * 128 / 1000

    few = prediction(replace(launch, blocks=161))  # one block more takes a wave of its own, as long as one warp's steps
    alone = 50 + (19 + 17) * 2.5
    assert few.share == pytest.approx(4000 / 100 / (160 / 161 * 1e4 + alone), rel=1e-6)

    # a turn is 2 loads and 2 stores of 512 bytes, 16 cycles of L1; 4 warps a block, 16 blocks or 1 a multiprocessor
    busy = prediction(replace(launch, traffic=1.0, steps=2000))
    assert busy.limit == "lsu"
    assert busy.share == pytest.approx(4000 / 100 / (16 * 4 * 1000 * 16))
    waiting = prediction(replace(launch, blocks=10, traffic=1.0, steps=2000))
    assert waiting.limit == "latency"
    assert waiting.share == pytest.approx(4000 / 100 / (1000 * (50 + 19 * 2.5) + 17 * 2.5))
    ahead = prediction(replace(launch, blocks=10, traffic=1.0, steps=2000, prefetched=1))
    assert (ahead.limit, ahead.share) == ("lsu", pytest.approx(4000 / 100 / (4 * 1000 * 16)))

    # loads that wait for one another, within a step and before the loop
    chained = prediction(replace(launch, blocks=10, traffic=1.0, steps=2000, step=Step(1, 1, waits=3), waits=2))
    assert chained.share == pytest.approx(4000 / 100 / (1000 * (150 + 19 * 2.5) + 17 * 2.5 + 100))

    # the speed of L2, unless the part of the bytes that memory has takes longer
    fast = replace(GPU, cache_speed=400.0)
    assert prediction(replace(launch, cached=True), gpu=fast).share == pytest.approx(4000 / 100 / (1e6 / 400))
    assert prediction(replace(launch, cached=True, cold=2e5), gpu=fast).share == pytest.approx(4000 / 100 / (1e6 / 400))
    assert prediction(replace(launch, cached=True, cold=5e5), gpu=fast).share == pytest.approx(4000 / 100 / (5e5 / 100))

    tail = prediction(replace(launch, blocks=168, traffic=1.0), gpu=replace(GPU, memory_ns=1000.0))
    assert tail.limit == "waves"
    assert tail.share == pytest.approx(4000 / 100 / (2 * (1000 + (19 + 17) * 2.5)))
    assert "not compiled" in prediction(replace(launch, kernel="other"))
    assert "no loop" in prediction(replace(launch, step=Step(5, 1)))
    assert "does not fit" in prediction(replace(launch, shared=1 << 20))


TABLE_OF_JUMPS = """
loop:
    LDG.E.128.CONSTANT R4, [R2.64]
    BRX R28 -0x20
    FFMA R4, R4, R4, R4
    BRA >stored
    FADD R4, R4, R4
    FADD R4, R4, R4
    FADD R4, R4, R4
stored:
    STG.E.128 [R8.64], R4
    @P0 BRA >loop
    EXIT
"""


def test_a_table_of_jumps_leads_to_what_nothing_else_leads_to():
    assert hot_loop(listing(TABLE_OF_JUMPS), Step(1, 1)).turn.instructions == 6
    assert hot_loop(listing(TABLE_OF_JUMPS), Step(1, 1, most=r"\bFADD")).turn.instructions == 7


PRODUCT = """
loop:
    LDGSTS.E.BYPASS.128.ZFILL [R1], [R2.64], P0
    @P1 BRA >unusual
    F2FP.BF16.F32.PACK_AB R4, R5, R6
unusual:
    LDSM.16.M88.4 R8, [R7]
    HMMA.16816.F32.BF16 R4, R8, R12, R4
    HMMA.16816.F32.BF16 R4, R8, R12, R4
    @P0 BRA >loop
    EXIT
"""


def test_a_step_of_a_product_by_hand():
    step = Step(1, 2, load=r"\bLDGSTS\b", store=r"\bHMMA\b", rounds=1, rounding=r"\bF2FP\b")
    loop = hot_loop(listing(PRODUCT), step)
    assert (loop.unrolled, loop.turn.instructions) == (1, 7)
    plain = hot_loop(listing(PRODUCT), replace(step, rounds=0))
    assert plain.turn.instructions == 6  # the way without the conversion
    cycles = loop.turn.cycles(GPU)
    assert cycles["tensor"] == 2 * 16 * 8 * 16 / 256
    assert cycles["lsu"] == 2 * 32 * 16 / 128  # 16 bytes a thread copied, and by ldmatrix
    launch = Launch("kernel", 10, 128, step, 1000, 1.0, prefetched=2)
    case = Case("bdh", "op", "forward", "bfloat16", 1000, 4000.0, (launch,), flop=1e9)
    found = cuda_model.predict(case, GPU, {"kernel": Kernel(listing(PRODUCT), 32, 0)})
    assert found.limit == "tensor"  # 4 warps: 64 cycles a step, where one alone takes 25
    assert found.tflops == pytest.approx(1e9 / (4 * 1000 * 16) / 1000)


def test_more_than_a_tenth_less_is_a_fall():
    def table(percent):
        return {"op": {"H200": {"percent_of_copy": percent, "limit": "memory"}}}

    assert cuda_model.falls(table(50.0), table(45.0)) == []
    assert "44.9% of copy, was 50.0%" in cuda_model.falls(table(50.0), table(44.9))[0]
    assert "not modelled any more" in cuda_model.falls(table(50.0), {})[0]


def test_the_table_has_every_case_on_every_gpu():
    text = cuda_model.TABLE.read_text()
    table = json.loads(text)
    assert text == cuda_model.written(table)
    assert table.keys() == {case.key for case in cuda_model.CASES}
    products = {case.key for case in cuda_model.CASES if case.flop}
    of_tensor_cores = products | {case.key for case in cuda_model.CASES if case.on_tensor_cores}
    for case, gpus in table.items():
        assert gpus.keys() == {gpu.name for gpu in cuda_model.GPUS if gpu.tensor or case not in of_tensor_cores}, case
        assert all("tflops" in of for of in gpus.values()) == (case in products)
        assert all(0 < of["percent_of_copy"] <= 100 for of in gpus.values()), case


def test_the_assumptions_are_on_the_page():
    page = (ROOT / "docs" / "gpu.md").read_text()
    for row in (
        [f"{g.arch}, {g.processors}, {g.gigahertz:.2f}" for g in cuda_model.GPUS],
        [f"{g.copy:.0f}" for g in cuda_model.GPUS],
        [f"{g.memory_ns:.0f}" for g in cuda_model.GPUS],
        [f"{g.cache >> 20}, {g.cache_speed:.0f}, {g.cache_ns:.0f}" for g in cuda_model.GPUS],
        [f"{g.fma_lanes}" for g in cuda_model.GPUS],
        [f"{g.tensor}" if g.tensor else "none" for g in cuda_model.GPUS],
    ):
        assert f"| {' | '.join(row)} |" in page


def test_a_record_stands_beside_the_predictions():
    def entry(group, layout, share, size="large"):
        direction = {"floor_bytes": 8, "share_of_copy": {"median": share}}
        return {
            "group": group,
            "layout": layout,
            "dtype": "float32",
            "size": size,
            "directions": {"forward": direction},
        }

    entries = [
        entry("box_mean_3", "channels_last", 0.75),
        entry("edge_maps", "contiguous", 0.9),
        entry("edge_maps", "contiguous", 0.1, size="small"),
    ]
    record = {"environment": {"gpu": "NVIDIA H200"}, "bench": {"entries": entries}}
    table = {
        "box_mean channels_last by 3 forward float32": {"H200": {"percent_of_copy": 80.0, "limit": "memory"}},
        "edge_maps forward float32": {"H200": {"percent_of_copy": 95.0, "limit": "issue"}},
        "rope forward float32": {"H200": {"percent_of_copy": 99.0, "limit": "memory"}},
    }
    lines = [" ".join(line.split()) for line in cuda_model.compared_with(record, table).splitlines()[1:]]
    assert lines == [
        "box_mean channels_last by 3 forward float32 80.0 75.0 memory",
        "edge_maps forward float32 95.0 90.0 issue",
    ]
    record["environment"]["gpu"] = "NVIDIA A100"
    with pytest.raises(SystemExit, match="NVIDIA A100 is none of H100, H200, RTX 3090, T4"):
        cuda_model.compared_with(record, table)
