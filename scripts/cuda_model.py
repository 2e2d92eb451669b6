"""Predicts from machine code how near to a copy's speed the CUDA kernels run: estimates, until a GPU has been measured.

    python scripts/cuda_model.py                         # compiles the ops below for four GPUs and prints the table
    python scripts/cuda_model.py --binary dist/X.whl     # of a wheel, or of libcamox_ops_cuda.so
    python scripts/cuda_model.py --check                 # exit status 1 where a prediction fell by more than 10%
    python scripts/cuda_model.py --update --ops edge     # writes csrc/cuda_model.json, here the lines of one op family
    python scripts/cuda_model.py --measured FILE         # beside csrc/cuda_model.json, what a record of a GPU has

A kernel's hot loop is found in its control flow (natural loops of the SASS), and in it the cheapest path that makes
the memory accesses that CASES names: what a thread does per step, whatever is unrolled. From this path come
instructions per element and the time that each pipe of a multiprocessor needs; from registers, shared memory and the
launch come waves. A kernel in which no path makes these accesses is listed as not modelled, never guessed.

    time of one wave = the longest of   memory    bytes / copy bandwidth
                                        L2        bytes through L2, those that bands read again too / its bandwidth
                                        issue     instructions, or those of the busiest pipe (fma, alu, mufu, lsu,
                                                  tensor)
                                        latency   one warp's steps, one after another: too few loads in flight
    time of a launch = whole waves + the last, where a multiprocessor may have few blocks or none ("waves")

What the GPUs are taken for (GPUS, below) stands in docs/gpu.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import cuda_budget  # noqa: E402

TABLE = ROOT / "csrc" / "cuda_model.json"
WARP = 32
LARGEST_FALL = 0.1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str
    processors: int
    gigahertz: float
    copy: float  # bytes per ns that a copy reads and writes together
    memory_ns: float  # from a load to its data, from memory under load
    cache: int  # bytes of L2 that data of neighbouring blocks survives in
    cache_speed: float  # bytes per ns out of L2
    cache_ns: float
    fma_lanes: int  # of a multiprocessor, per cycle
    tensor: int  # multiply-adds of bfloat16 by mma.sync, of a multiprocessor, per cycle; 0: it has none of bfloat16


GPUS = (
    Gpu("H100", "sm_90", 132, 1.75, 2964.0, 650.0, 50 << 20, 5500.0, 160.0, 128, 1024),
    Gpu("H200", "sm_90", 132, 1.75, 4300.0, 650.0, 50 << 20, 5500.0, 160.0, 128, 1024),
    Gpu("RTX 3090", "sm_86", 82, 1.70, 820.0, 500.0, 6 << 20, 1900.0, 140.0, 128, 256),
    Gpu("T4", "sm_75", 40, 1.35, 260.0, 500.0, 4 << 20, 900.0, 170.0, 64, 0),
)
COUNT = r"\bATOMG?\b"  # how a block counts itself, csrc/common/last_block.cuh
MMA = 16 * 8 * 16  # multiply-adds of one HMMA of a warp
ALU_LANES, MUFU_LANES, CACHE_LINE_BYTES = 64, 16, 128  # of a multiprocessor, per cycle, on all of them
ISSUE = 0.85  # of the cycles in which four schedulers could issue, they do
ALONE = 2.5  # cycles per instruction of a warp that has a scheduler for itself
SHUFFLE, BARRIER = 24, 40  # cycles more, of each that a warp waits for
NEXT_KERNEL_NS = 1000.0  # between two kernels of one call


# ---- control flow ----

Code = list[tuple[int, str]]  # (address, instruction)


@dataclass
class Blocks:
    """Basic blocks of a kernel: instructions, and the blocks that may follow."""

    texts: list[list[str]]
    following: list[list[int]]


def basic_blocks(code: Code) -> Blocks:
    addresses = {address: i for i, (address, _) in enumerate(code)}
    starts, jumps = {0}, {}
    for i, (_, text) in enumerate(code):
        branch = re.match(r"(@!?U?P\w+ )?(BRA|EXIT|RET|BRX|JMP|JMX|KILL|CALL)\b(\S*)(.*)", text.strip())
        # a call without a predicate comes back; one with a predicate may be how a loop is left
        if not branch or (branch[2] == "CALL" and not branch[1]):
            continue
        target = re.search(r"0x([0-9a-f]+)\)?\s*$", branch[4]) if branch[2] in ("BRA", "CALL") else None
        # a predicate may stand before the branch or be its operand; .DIV is taken where threads have parted
        conditional = bool(branch[1]) or bool(re.search(r"\bU?P\d", branch[4])) or ".DIV" in branch[3]
        jumps[i] = (addresses.get(int(target[1], 16)) if target else None, conditional)
        starts.add(i + 1)
        if jumps[i][0] is not None:
            starts.add(jumps[i][0])
    bounds = sorted(start for start in starts if start < len(code))
    at = {start: k for k, start in enumerate(bounds)}
    texts, following = [], []
    for k, start in enumerate(bounds):
        end = bounds[k + 1] if k + 1 < len(bounds) else len(code)
        texts.append([text.strip() for _, text in code[start:end]])
        target, conditional = jumps.get(end - 1, (None, True))
        after = [at[target]] if target is not None else []
        if conditional and end in at:
            after.append(at[end])
        following.append(after)
    # a table of jumps leads to what nothing else leads to, behind it
    led_to, table = {0}.union(*following), None
    for k, text in enumerate(texts):
        if k not in led_to and table is not None:
            following[table].append(k)
        if re.match(r"BRX\b", text[-1]):
            table = k
    return Blocks(texts, following)


@dataclass(frozen=True)
class Loop:
    header: int
    body: frozenset[int]


def natural_loops(blocks: Blocks) -> list[Loop]:
    """A jump to a block that every way to the jump passes closes a loop; those of one header are one loop."""
    count, before = len(blocks.texts), [[] for _ in blocks.texts]
    for block, after in enumerate(blocks.following):
        for other in after:
            before[other].append(block)
    reached, queue = {0}, [0]
    while queue:
        for other in blocks.following[queue.pop()]:
            if other not in reached:
                reached.add(other)
                queue.append(other)
    dominators = [set(range(count)) for _ in range(count)]
    dominators[0], changed = {0}, True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            new = set.intersection(*(dominators[other] for other in before[block] if other in reached)) | {block}
            changed, dominators[block] = changed or new != dominators[block], new
    loops: dict[int, set[int]] = {}
    for block in sorted(reached):
        for header in blocks.following[block]:
            if header in dominators[block]:
                body, queue = loops.setdefault(header, {header}), [block]
                while queue:
                    inside = queue.pop()
                    if inside not in body:
                        body.add(inside)
                        queue += before[inside]
    return [Loop(header, frozenset(body)) for header, body in loops.items()]


def pipe_of(text: str) -> str:
    operation = re.sub(r"^@!?U?P\w+ ", "", text).split(".")[0].split(" ")[0]
    if re.fullmatch(r"FFMA|FMUL|FADD|FFMA32I|FMUL32I|FADD32I|H(FMA|MUL|ADD)2\w*", operation):
        return "fma"
    if operation.startswith("IMAD"):
        return "imad"
    if re.fullmatch(r"MUFU|F2F|F2I|I2F|FLO|POPC|FRND", operation):
        return "mufu"
    if re.fullmatch(r"LDG|STG|LDS|STS|SHFL|LDL|STL|LDGSTS|LDSM|ATOM\w*|RED", operation):
        return "lsu"
    if operation == "HMMA":
        return "tensor"
    # branches, uniform instructions and the like take their turn to issue, and no lanes
    return "alu" if re.fullmatch(r"I\w+|V\w+|L\w+|F\w+|S\w+|PRMT|MOV|P2R|R2P|CS2R", operation) else "other"


def access_bytes(text: str) -> int:
    """Of one thread."""
    if re.search(r"\bLDSM\b", text):
        return 16 if ".4" in text else 8
    access = re.search(r"\b(?:LDG|STG|LDS|STS|LDGSTS)\.?([\w.]*)", text)
    if not access:
        return 4
    width = re.search(r"\b(?:U|S)?(8|16|64|128)\b", access[1].replace(".", " "))
    return int(width[1]) // 8 if width else 4


@dataclass(frozen=True)
class Route:
    """What one thread executes on a path through the blocks."""

    texts: tuple[str, ...]

    @property
    def instructions(self) -> int:
        return len(self.texts)

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, text)) for text in self.texts)

    def cycles(self, gpu: Gpu) -> dict[str, float]:
        """Of a multiprocessor for one warp, of each pipe."""
        pipes = dict.fromkeys(("issue", "fma", "alu", "mufu", "lsu", "tensor"), 0.0)
        for text in self.texts:
            pipe = pipe_of(text)
            pipes["issue"] += 0.25 / ISSUE
            if pipe == "fma":
                pipes["fma"] += WARP / gpu.fma_lanes
            elif pipe == "imad":
                pipes["fma"] += WARP / 64
            elif pipe == "alu":
                pipes["alu"] += WARP / ALU_LANES
            elif pipe == "mufu":
                pipes["mufu"] += WARP / MUFU_LANES
            elif pipe == "tensor":
                pipes["tensor"] += MMA / gpu.tensor
            elif pipe == "lsu":
                pipes["lsu"] += max(1.0, WARP * access_bytes(text) / CACHE_LINE_BYTES)
        return pipes

    def stalls(self) -> float:
        """Cycles of a warp for shuffles and barriers; shuffles right after another overlap with it."""
        shuffles = (bool(re.search(r"\bSHFL", text)) for text in self.texts)
        chains = sum(now and not before for before, now in itertools.pairwise((False, *shuffles)))
        return SHUFFLE * chains + BARRIER * self.count(r"\bBAR\b")

    def cycles_alone(self) -> float:
        return ALONE * self.instructions + SHUFFLE * self.count(r"\bSHFL") + BARRIER * self.count(r"\bBAR\b")


WIDE_LOAD, WIDE_STORE = cuda_budget.WIDE["loads"], cuda_budget.WIDE["stores"]


def cheapest(
    blocks: Blocks, start: int, ends, allowed, counted, most: str = "", free=(), limits=()
) -> dict[tuple[int, ...], Route]:
    """(accesses of each pattern in `counted`) -> the cheapest of those ways from `start` to a block of `ends` that have
    most instructions like `most`. No block is passed twice; calls, which serve rare numbers, are avoided; blocks of
    `free` count nothing, and ways with more accesses than `limits` are none."""
    order, seen = [], set()

    def visit(first: int) -> None:
        stack = [(first, iter(blocks.following[first]))]
        seen.add(first)
        while stack:
            block, after = stack[-1]
            for other in after:
                if other in allowed and other not in seen:
                    seen.add(other)
                    stack.append((other, iter(blocks.following[other])))
                    break
            else:
                order.append(block)
                stack.pop()

    visit(start)
    order.reverse()
    place = {block: k for k, block in enumerate(order)}

    def of(block: int):
        texts = blocks.texts[block] if block not in free else []
        calls = sum(text.startswith("CALL") for text in texts)
        marks = sum(bool(re.search(most, text)) for text in texts) if most else 0
        return tuple(sum(bool(re.search(p, t)) for t in texts) for p in counted), marks, len(texts) + 100000 * calls

    weight = {block: of(block) for block in order}
    counts, marks, cost = weight[start]
    best = {start: {(counts, marks): (cost, None)}}
    for block in order:
        for other in blocks.following[block]:
            # a jump back is an inner loop's: that loop is passed once
            if other not in place or place[other] <= place[block]:
                continue
            counts, marks, cost = weight[other]
            states = best.setdefault(other, {})
            for key, (spent, _) in best.get(block, {}).items():
                new = (tuple(a + b for a, b in zip(key[0], counts, strict=True)), key[1] + marks)
                if any(count > limit for count, limit in zip(new[0], limits, strict=False)):
                    continue
                if new not in states or spent + cost < states[new][0]:
                    states[new] = (spent + cost, (block, key))
    found: dict[tuple[int, ...], tuple] = {}
    for end in ends:
        for (counts, marks), (cost, _) in best.get(end, {}).items():
            if counts not in found or (-marks, cost) < found[counts][0]:
                found[counts] = ((-marks, cost), end, (counts, marks))
    paths = {}
    for counts, (_, end, key) in found.items():
        way = []
        block = end
        while True:
            way.append(block)
            before = best[block][key][1]
            if before is None:
                break
            block, key = before
        texts = tuple(text for block in reversed(way) if block not in free for text in blocks.texts[block])
        if not any(text.startswith("CALL") for text in texts):
            paths[counts] = Route(texts)
    return paths


@dataclass(frozen=True)
class Step:
    """What a thread does per step of a kernel's hot loop: 16-byte loads and stores. `row`: the loop around inner loops,
    each passed once per step, or as often as `inner` says of the loop with these accesses. `most`: of the ways that
    make these accesses the one with most such instructions is meant, as loads beside a thread's own, or the generator
    of random numbers."""

    loads: int
    stores: int
    row: bool = False
    most: str = ""
    load: str = WIDE_LOAD
    store: str = WIDE_STORE
    rounds: int = 0  # exactly so many conversions to a half type, where `rounding`
    rounding: str = ""
    waits: int = 1  # loads of a step whose addresses, or whose turn, come from the load before
    inner: tuple[tuple[Step, int], ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.load, self.store, self.rounding) if self.rounding else (self.load, self.store)

    def counts(self, unrolled: int) -> tuple[int, ...]:
        found = (self.loads * unrolled, self.stores * unrolled, self.rounds * unrolled)
        return found if self.rounding else found[:2]


@dataclass(frozen=True)
class HotLoop:
    unrolled: int  # steps of a turn
    turn: Route
    around: Route  # of a thread before, between and after its loops
    beside: tuple[tuple[Route, float, int], ...] = ()  # of its other loops: a turn, how many, loads that one waits for


def turn_of(blocks: Blocks, loops: list[Loop], step: Step) -> tuple[int, Loop, Route] | None:
    """The loop that makes these accesses, most often per turn, the smallest, or with `row` the largest of them; how
    many steps a turn is, and its path."""
    found = []
    for loop in loops:
        inside = [other for other in loops if other.body < loop.body]
        if step.row and not inside:
            continue
        ends = [block for block in loop.body if loop.header in blocks.following[block]]
        turns_of = (1,) if step.row else (8, 4, 3, 2, 1)
        limits = step.counts(turns_of[0])
        paths = cheapest(blocks, loop.header, ends, loop.body, step.patterns, step.most, limits=limits)
        for unrolled in turns_of:
            path = paths.get(step.counts(unrolled))
            turns = [(turn_of(blocks, inside, inner), times) for inner, times in step.inner]
            if path and all(turn for turn, _ in turns):
                again = (of.texts * (ceil_div(times, steps) - 1) for (steps, _, of), times in turns)
                found.append((unrolled, -len(loop.body), loop, Route(sum(again, path.texts))))
                break
    # the most unrolled of the innermost loops: one inside another counts the same accesses with less around them
    innermost = [f for f in found if not any(other[2].body < f[2].body for other in found)]
    if not innermost:
        return None
    unrolled, _, loop, path = max(innermost, key=lambda f: f[:2])
    return unrolled, loop, path


def hot_loop(code: Code, step: Step, start: str = "", beside: tuple[tuple[Step, float], ...] = ()) -> HotLoop | None:
    """`start`: the instruction behind which a thread begins, where that is not the kernel's first. beside: other loops
    and how many steps of each a thread makes."""
    blocks = basic_blocks(code)
    loops = natural_loops(blocks)
    turn, others = turn_of(blocks, loops, step), [turn_of(blocks, loops, other) for other, _ in beside]
    if turn is None or None in others:
        return None
    unrolled, loop, path = turn
    everywhere = frozenset(range(len(blocks.texts)))
    leave = [block for block, texts in enumerate(blocks.texts) if re.search(r"\bEXIT\b", texts[-1])]
    first = next((block for block, texts in enumerate(blocks.texts) if re.search(start, " ".join(texts))), 0)
    before = cheapest(blocks, first, [loop.header], everywhere, (), free=loop.body).get(())
    after = cheapest(blocks, loop.header, leave, everywhere, (), free=loop.body).get(())
    if before is None or after is None:
        return None
    turns = ((of, times / steps, other.waits) for (steps, _, of), (other, times) in zip(others, beside, strict=True))
    return HotLoop(unrolled, path, Route(before.texts + after.texts), tuple(turns))


# ---- launches ----


@dataclass(frozen=True)
class Launch:
    """One kernel of a call. `steps`: of one thread; `traffic`: bytes to and from memory. `halo`: bytes that adjacent
    blocks read again where L2 forgets them, and those that must survive in it per thread."""

    kernel: str
    blocks: int
    threads: int
    step: Step
    steps: float
    traffic: float
    shared: int = 0
    prefetched: int = 0  # a step's loads are made so many steps earlier
    cached: bool = False  # reads what the kernel before wrote, or what other blocks read too: at the speed of L2
    cold: float = 0.0  # bytes of a cached launch that come from memory, or go there, all the same
    written: float = 0.0  # bytes of a cached launch that go to memory, for which nothing waits
    waits: int = 0  # loads before its loop that a warp waits for
    of_last_block: bool = False  # no kernel: what the last block of the launch before does once it has counted itself
    halo: tuple[float, float] = (0.0, 0.0)
    read_beside: float = 0.0  # bytes that adjacent blocks read at the same time too: through L2 alone
    beside: tuple[tuple[Step, float], ...] = ()  # loops beside the hot one, and a thread's steps of each


@dataclass(frozen=True)
class Divided:
    """A launch whose blocks depend on where they run: `of` makes it for so many multiprocessors, each of which holds so
    many blocks at once."""

    kernel: str
    threads: int
    of: Callable[[int, int], Launch]
    shared: int = 0


@dataclass(frozen=True)
class Case:
    op: str  # folder
    name: str
    direction: str
    dtype: str
    elements: int
    ideal: float  # bytes that the target's copy moves
    launches: tuple[Launch | Divided, ...]
    flop: float = 0.0  # where products are most of it
    on_tensor_cores: bool = False  # by kernels that a GPU without those of bfloat16 has others for

    @property
    def key(self) -> str:
        return f"{self.name} {self.direction} {self.dtype}"


@dataclass(frozen=True)
class Kernel:
    code: Code
    registers: int
    shared: int


@dataclass(frozen=True)
class Prediction:
    share: float
    limit: str
    instructions: float  # per element of the output, of all threads, in hot loops
    waves: float
    registers: int
    warps: int
    tflops: float  # 0 where the case has no FLOP


@dataclass(frozen=True)
class Timed:
    """One launch on one GPU."""

    time: float  # ns
    limit: str
    instructions: float  # of all threads in the hot loop
    waves: float
    warps: int  # that a multiprocessor holds


def wave_times(
    blocks: int, gpu: Gpu, memory: float, through_cache: float, cycles: dict, alone: float
) -> dict[str, float]:
    """What limits -> ns of so many blocks at once. memory: ns of one block's bytes; through_cache and cycles: of one
    block; alone: ns of one warp."""
    most = math.ceil(blocks / gpu.processors)
    busiest = max(cycles, key=cycles.__getitem__)
    return {
        "memory": blocks * memory,
        "L2": blocks * through_cache / gpu.cache_speed,
        busiest: most * cycles[busiest] / gpu.gigahertz,
        "latency": alone if blocks else 0.0,
    }


def timed(launch: Launch, kernel: Kernel, loop: HotLoop, gpu: Gpu) -> Timed | None:
    """None where a block does not fit."""
    resident = cuda_budget.occupancy(gpu.arch, kernel.registers, kernel.shared + launch.shared, launch.threads)
    warps = -(-launch.threads // WARP)
    places = resident // warps * gpu.processors
    if places == 0:
        return None
    turns = launch.steps / loop.unrolled
    cycles = {pipe: warps * turns * each for pipe, each in loop.turn.cycles(gpu).items()}
    cycles["issue"] += warps * loop.around.instructions * 0.25 / ISSUE
    for turn_beside, times, _ in loop.beside:
        for pipe, each in turn_beside.cycles(gpu).items():
            cycles[pipe] += warps * times * each
    speed = gpu.cache_speed if launch.cached else gpu.copy
    latency = gpu.cache_ns if launch.cached and not launch.cold else gpu.memory_ns
    compute = loop.turn.cycles_alone() / gpu.gigahertz
    waits = latency * launch.step.waits
    turn = max(latency / launch.prefetched, compute) if launch.prefetched else waits + compute
    alone = turns * turn + ALONE * loop.around.instructions / gpu.gigahertz
    for turn_beside, times, waits in loop.beside:
        alone += times * (latency * waits + turn_beside.cycles_alone() / gpu.gigahertz)
    if launch.of_last_block:  # of other launches, other blocks use the time
        alone += loop.around.stalls() / gpu.gigahertz
    alone += latency * (launch.waits + (1 if launch.prefetched else 0))
    again, survives = launch.halo
    lost = again if min(places, launch.blocks) * launch.threads * survives > gpu.cache else 0.0
    memory = max((launch.traffic + lost) / speed, (launch.cold + launch.written) / gpu.copy) / launch.blocks
    through_cache = (launch.traffic + again + launch.read_beside) / launch.blocks
    of_block = (memory, through_cache, cycles, alone)

    whole, rest = divmod(launch.blocks, places)
    full, last = wave_times(places, gpu, *of_block), wave_times(rest, gpu, *of_block)
    time = whole * max(full.values()) + max(last.values())
    slowest = full if whole else last
    limit = max(slowest, key=slowest.__getitem__)
    waves = launch.blocks / places
    if whole and time > 1.1 * waves * max(full.values()):
        limit = "waves"
    executed = loop.turn.instructions * turns + sum(of.instructions * times for of, times, _ in loop.beside)
    return Timed(time, limit, executed * launch.blocks * launch.threads, waves, resident)


def predict(case: Case, gpu: Gpu, kernels: dict[str, Kernel]) -> Prediction | str:
    """Or the kernel that could not be modelled, and why."""
    parts, launches = [], []
    for launch in case.launches:
        kernel = kernels.get(launch.kernel)
        if kernel is not None and isinstance(launch, Divided):
            shared = kernel.shared + launch.shared
            warps = cuda_budget.occupancy(gpu.arch, kernel.registers, shared, launch.threads)
            launch = launch.of(gpu.processors, max(warps // ceil_div(launch.threads, WARP), 1))
            kernel = kernels.get(launch.kernel)
        if kernel is None:
            return f"{launch.kernel}: not compiled for {gpu.arch}"
        launches.append(launch)
        loop = hot_loop(kernel.code, launch.step, COUNT if launch.of_last_block else "", launch.beside)
        if loop is None:
            wanted = f"{launch.step.loads} loads, {launch.step.stores} stores"
            return f"{launch.kernel}: no loop with {wanted} per step"
        part = timed(launch, kernel, loop, gpu)
        if part is None:
            return f"{launch.kernel}: a block does not fit a multiprocessor of {gpu.name}"
        parts.append(part)
    kernels_after = sum(not launch.of_last_block for launch in launches[1:])
    total = sum(part.time for part in parts) + NEXT_KERNEL_NS * kernels_after
    main, limit = parts[0], parts[0].limit
    for launch, part in zip(launches[1:], parts[1:], strict=True):
        name = "last block" if launch.of_last_block else re.sub("<.*", "", launch.kernel)
        limit += f" + {name} {part.time / 1000:.1f} us"
    registers = kernels[case.launches[0].kernel].registers
    share = case.ideal / gpu.copy / total
    tflops = case.flop / total / 1000
    return Prediction(share, limit, main.instructions / case.elements, main.waves, registers, main.warps, tflops)


# ---- the cases: what the launchers in csrc/<op>/<op>_cuda.cu do at (32, 80, 88, 88) ----

BATCH, CHANNELS, HEIGHT, WIDTH = 32, 80, 88, 88
ELEMENTS = BATCH * CHANNELS * HEIGHT * WIDTH
DTYPES = {"float32": ("float", 4), "bfloat16": ("__nv_bfloat16", 2)}
FORWARD_BAND, BANDS_FORWARD_BAND = 6, 8  # CAMOX_FORWARD_BAND; of frequency_bands
PHILOX = r"IMAD\.(WIDE|HI)\.U32"


def busiest(processors: int, places: int, threads: int, blocks: int) -> int:
    """camox_busiest in common/cuda_util.cuh: of so many blocks, those of the multiprocessor with most."""
    busy = max(ceil_div(places, 2), min(places, ceil_div(8 * WARP, threads)))
    waves, remaining = divmod(blocks, processors * places)
    return waves * places + (max(ceil_div(remaining, processors), busy) if remaining else 0)


def row_bands(processors, blocks, threads, across: int, per_block: int, beside: int, most: int = HEIGHT) -> int:
    """Rows of a band, at most so many, as camox_partition_of in common/stencil.cuh divides images with `across` threads
    of each row."""
    first = ceil_div(processors * blocks * per_block * 15, across * 16)
    first = max(min(first, ceil_div(HEIGHT, 2)), ceil_div(HEIGHT, most))
    fewest, rows = math.inf, HEIGHT
    for bands in range(first, min(4 * first, ceil_div(HEIGHT, 2)) + 1):
        band = ceil_div(HEIGHT, bands)
        steps = busiest(processors, blocks, threads, ceil_div(across * bands, per_block)) * (band + beside)
        if steps < fewest:
            fewest, rows = steps, band
    return rows


def stencil(kernel, lanes, size, beside, reads, stores, columns=(), per_block=128, staged=False) -> Divided:
    """A thread takes V columns of a row band and reads `beside` rows above and below it too: in as many more steps, or
    before its loop. `columns`: in channels_last, how many columns on each side of its own it reads of each tensor; they
    are loads as wide as its own, and L1 has those that its block reads. staged: rows go to shared memory, where the
    first and the last lane of a warp copy the columns beside it too, in predicated loads and in a sector each."""
    backward = "backward" in kernel or "bands" in kernel
    if columns:
        step = Step(reads + 2 * sum(columns), stores)
    else:
        own = f"^{WIDE_LOAD}" if staged else WIDE_LOAD
        step = Step(reads, stores, most=r"\bLDG\.E(\.U16|\.64|)\.CONSTANT", load=own)
    tensors, together = reads + stores, per_block * lanes / CHANNELS  # columns of a block

    def launch(processors: int, blocks: int) -> Launch:
        across = BATCH * CHANNELS * WIDTH // lanes
        forward = BANDS_FORWARD_BAND if "bands" in kernel else FORWARD_BAND
        most = HEIGHT if "backward" in kernel else forward
        band = row_bands(processors, blocks, 128, across, per_block, 2 * beside, most)
        return Launch(
            kernel,
            ceil_div(across * ceil_div(HEIGHT, band), per_block),
            128,
            step,
            band + 2 * beside if backward else band,
            ELEMENTS * size * tensors,
            prefetched=1 if "backward" in kernel else 2,
            halo=(ELEMENTS * size * reads * 2 * beside / band, 16 * tensors * (band + 2 * beside)),
            read_beside=ELEMENTS * size * 2 * sum(columns) / together
            + staged * ELEMENTS * reads * 2 * 32 / (WARP * lanes),
        )

    return Divided(kernel, 128, launch)


def tiles(lanes: int, reach: int, most: int) -> tuple[int, int, int, int, int]:
    """camox_tiles_of in common/stencil.cuh: vectors of channels and columns of a block, threads of it, blocks along the
    channels and along the width."""
    vectors = CHANNELS // lanes
    fewest, best = math.inf, (0, 0, 0, 0, 0)
    first = ceil_div(vectors, 16)
    for chunks in range(first, min(ceil_div(vectors, 4), first + 15) + 1):
        chunk = ceil_div(vectors, chunks)
        across = ceil_div(WIDTH, most // chunk - 2 * reach)
        columns = ceil_div(WIDTH, across) + 2 * reach
        threads = WARP * ceil_div(columns * chunk, WARP)
        if chunks * across * threads < fewest:
            fewest, best = chunks * across * threads, (chunk, columns, threads, chunks, across)
    return best


def tiled(kernel, lanes, size, reach, reads, beside, most, step) -> Divided:
    """The backward of channels_last: a block of at most `most` threads, whose first and last `reach` columns only serve
    their neighbours, by shared memory; rows as in `stencil`. beside: columns of all tensors that a block reads and does
    not write. Sectors of 32 bytes that two blocks share are read by both."""
    chunk, columns, threads, chunks, across = tiles(lanes, reach, most)
    written = columns - 2 * reach
    shared_sectors = reads * (-chunk * lanes * size % 32) / (chunk * lanes * size)

    def launch(processors: int, blocks: int) -> Launch:
        of_band = BATCH * across * chunks
        band = row_bands(processors, blocks, threads, of_band, 1, 2 * reach)
        return Launch(
            kernel,
            of_band * ceil_div(HEIGHT, band),
            threads,
            step,
            band + 2 * reach,
            ELEMENTS * size * (reads + 1),
            prefetched=1,
            halo=(ELEMENTS * size * reads * 2 * reach / band, lanes * size * (reads + 1) * (band + 2 * reach)),
            read_beside=ELEMENTS * size * (beside / written + shared_sectors),
        )

    return Divided(kernel, threads, launch)


def image_cases(dtype: str) -> list[Case]:
    element, size = DTYPES[dtype]
    lanes = 16 // size
    cases = []
    for op, name, kernel, beside, maps, columns in (
        ("edge", "edge_maps", "edge", 1, 3, (1,)),
        ("spatial_gradient", "spatial_gradient", "spatial_gradient", 1, 2, (1,)),
        ("bands", "frequency_bands", "bands", 2, 3, (2,)),
    ):
        for layout in ("", " channels_last"):
            of = f"<{element}, {lanes}, {'true' if layout else 'false'}>"
            in_stage = not layout and (op == "bands" or size == 2)
            gradients_in_stage = not layout and size == 2
            forward = stencil(
                f"{kernel}_kernel{of}", lanes, size, beside, 1, maps, columns if layout else (), staged=in_stage
            )
            at_once = 4 if op == "edge" else lanes  # channels of a thread
            tile = f"{kernel}_backward_channels_last_kernel<{element}, {at_once}>"
            if op == "spatial_gradient":
                columns_of_maps = (1, 1) if layout else ()
                backward = stencil(
                    f"{kernel}_backward_kernel{of}",
                    lanes,
                    size,
                    beside,
                    maps,
                    1,
                    columns_of_maps,
                    staged=gradients_in_stage,
                )
            elif op == "bands" and layout:
                backward = tiled(tile, lanes, size, 2, 3, 3 * 4, 256, Step(3, 1))
            elif op == "bands":
                backward = stencil(
                    f"bands_backward_kernel<{element}, {lanes}>", lanes, size, 2, 3, 1, staged=gradients_in_stage
                )
            elif layout:
                narrow = {"load": r"\bLDG\.E(\.\w+)*\.64\b", "store": r"\bSTG\.E(\.\w+)*\.64\b"} if size == 2 else {}
                # x of three columns, three gradients
                backward = tiled(tile, 4, size, 1, 4, 4 + 3 * 2, 160, Step(6, 1, **narrow))
            else:
                backward = stencil(f"edge_backward_kernel<{element}, {lanes}>", lanes, size, 1, 4, 1, per_block=4 * 30)
            read = maps + (op == "edge")  # x and the gradients, or these alone
            for direction, tensors, launch in (("forward", 1 + maps, forward), ("backward", read + 1, backward)):
                moved = ELEMENTS * size * tensors
                cases.append(Case(op, name + layout, direction, dtype, ELEMENTS, moved, (launch,)))
    return cases


def dropout_cases(dtype: str) -> list[Case]:
    element, size = DTYPES[dtype]
    lanes, cases = 16 // size, []
    for which, name, direction, loads, stores, items in (
        (0, "dropout", "forward", 1, 1, 2),
        (1, "sparse_gate", "forward", 2, 1, 2),
        (2, "sparse_gate", "backward", 3, 2, 1),
    ):
        traffic = ELEMENTS * size * (loads + stores)
        step = Step(loads * items, stores * items, most=PHILOX)
        blocks = ceil_div(ELEMENTS, 256 * lanes * items)
        kernel = f"dropout_kernel<{element}, {lanes}, true, {which}>"
        cases.append(
            Case("dropout", name, direction, dtype, ELEMENTS, traffic, (Launch(kernel, blocks, 256, step, 1, traffic),))
        )
    return cases


ROWS = BATCH * CHANNELS * HEIGHT  # of WIDTH elements, as a linear layer's output


MOST_SHARES = 2048  # NORM2D_MOST_SHARES


def item_rows(columns: int) -> int:
    """camox_bias_gelu_item_rows and camox_dropout_norm_item_rows"""
    return min(max(16384 // columns, 16), 32)


def row_sums(op: str, rows: int, columns: int) -> Launch:
    """common/row_sums.cuh: 8 columns a block, every 128th row a thread."""
    step = Step(1, 0, load=r"\bLDG\b", store=r"\bSTG\b")
    kernel = f"camox_row_sums_kernel<8, {op}>"
    threads = 32
    while threads < min(1024, 8 * rows):
        threads *= 2
    return Launch(kernel, ceil_div(columns, 8), threads, step, 8 * rows / threads, 4 * rows * columns, cached=True)


def row_cases(dtype: str) -> list[Case]:
    """bias_gelu without dropout, dropout_add_layer_norm with it."""
    element, size = DTYPES[dtype]
    lanes, cases = 16 // size, []
    vectors, floats = WIDTH // lanes, lanes // 4
    # nvcc predicates the loads of either kind of weights beside halves, so that both are issued
    weights = floats + (size == 2)
    bytes_each = ELEMENTS * size

    forward = Launch(
        f"bias_gelu_kernel<{element}, {lanes}>",
        ceil_div(ROWS * vectors, 256),
        256,
        Step(1 + weights, 1),
        1,
        2 * bytes_each,
    )
    cases.append(Case("bias_gelu", "bias_gelu", "forward", dtype, ELEMENTS, 2 * bytes_each, (forward,)))
    # a band of rows for each block that runs at once; `across` threads of a block side by side, fewer of few bands
    kernel = f"bias_gelu_backward_kernel<{element}, {lanes}>"

    def bands_of(at_once: int, multiple: int) -> tuple[int, int]:
        """(rows of a band, bands)"""
        rows = ceil_div(max(item_rows(WIDTH), ceil_div(ROWS, at_once)), multiple) * multiple
        return rows, ceil_div(ROWS, rows)

    def gelu_backward(processors: int, blocks: int) -> Launch:
        rows, bands = bands_of(processors * blocks, 1)
        across = vectors
        while across >= 64 and ceil_div(vectors, across) * bands < processors * blocks // 2:
            across = (across + 1) // 2
        steps, traffic = ceil_div(rows, min(256 // across, rows)), 3 * bytes_each + 4 * bands * WIDTH
        return Launch(kernel, ceil_div(vectors, across) * bands, 256, Step(2, 1), steps, traffic)

    def gelu_sums(processors: int, blocks: int) -> Launch:
        return row_sums("bias_gelu", bands_of(processors * blocks, 1)[1], WIDTH)

    backward = Divided(kernel, 256, gelu_backward), Divided(kernel, 256, gelu_sums)
    cases.append(Case("bias_gelu", "bias_gelu", "backward", dtype, ELEMENTS, 3 * bytes_each, backward))

    # A row in the registers of a team of lanes. All loads of x and residual are issued, and all calls of Philox made,
    # those behind the row's end too. What a vector that does not exist skips in the forward has a branch in bfloat16;
    # nvcc predicates it in float32, so that it is issued there.
    def in_team(most: int) -> tuple[int, int]:
        """(rows of a block at once, vectors of a lane)"""
        team = 4
        while team * most < vectors:
            team *= 2
        return 256 // team, ceil_div(vectors, team)

    teams, each = in_team(4)
    stored = each if size == 2 else 4
    forward = Launch(
        f"dropout_norm_short_kernel<{element}, {lanes}>",
        ceil_div(ROWS, teams),
        256,
        Step(2 * 4 + 2 * floats * stored, stored, row=True, most=PHILOX),
        1,
        3 * bytes_each,
    )
    name = "dropout_add_layer_norm"
    cases.append(Case("dropout", name, "forward", dtype, ELEMENTS, 3 * bytes_each, (forward,)))
    teams, each = in_team(2)
    short, shared = f"dropout_norm_short_backward_kernel<{element}, {lanes}>", teams * 2 * WIDTH * 4
    step = Step((3 + weights) * each, 2 * each, row=True, most=PHILOX)

    def norm_rows_backward(processors: int, blocks: int) -> Launch:
        rows, bands = bands_of(processors * blocks, teams)
        traffic = 5 * bytes_each + 4 * bands * 2 * WIDTH
        return Launch(short, bands, 256, step, rows / teams, traffic, shared=shared)

    def norm_rows_sums(processors: int, blocks: int) -> Launch:
        return row_sums("dropout", bands_of(processors * blocks, teams)[1], 2 * WIDTH)

    backward = Divided(short, 256, norm_rows_backward, shared), Divided(short, 256, norm_rows_sums, shared)
    cases.append(Case("dropout", name, "backward", dtype, ELEMENTS, 5 * bytes_each, backward))
    return cases


def norm_backward(
    dtype: str, lines: str, tiles: int, threads: int, step: Step, shared: int, sums: tuple[Step, float]
) -> tuple[Divided, Divided]:
    """Of `tiles`, shared out to blocks as norm2d_share_tiles does, and the launch that adds up what these write. sums:
    the loop in which a block adds up its own grad_weight and grad_bias."""
    element, size = DTYPES[dtype]
    pixels = BATCH * HEIGHT * WIDTH
    most = min(max(pixels // 64, 256), MOST_SHARES, pixels)  # camox_norm2d_cuda_items
    kernel = f"norm2d_backward_kernel<{element}, {16 // size}, {lines}, true>"

    def each(processors: int, blocks: int) -> int:
        def steps(tiles_each: int) -> int:
            return busiest(processors, blocks, threads, ceil_div(tiles, tiles_each)) * (2 * tiles_each + 1)

        least = ceil_div(tiles, most)
        return min((max(ceil_div(tiles, waves * processors * blocks), least) for waves in range(1, 9)), key=steps)

    def launch(processors: int, blocks: int) -> Launch:
        tiles_each = each(processors, blocks)
        blocks = ceil_div(tiles, tiles_each)
        traffic = 3 * ELEMENTS * size + 2 * 4 * pixels + 4 * blocks * 2 * CHANNELS
        return Launch(kernel, blocks, threads, step, tiles_each, traffic, shared=shared, beside=(sums,))

    def added(processors: int, blocks: int) -> Launch:
        return row_sums("norm2d", ceil_div(tiles, each(processors, blocks)), 2 * CHANNELS)

    return Divided(kernel, threads, launch, shared), Divided(kernel, threads, added, shared)


def norm_pair(name: str, dtype: str, forward: Launch, backward: tuple[Divided, Divided]) -> list[Case]:
    bytes_each = ELEMENTS * DTYPES[dtype][1]
    return [
        Case("norm2d", name, "forward", dtype, ELEMENTS, 2 * bytes_each, (forward,)),
        Case("norm2d", name, "backward", dtype, ELEMENTS, 3 * bytes_each, backward),
    ]


def norm_cases(dtype: str) -> list[Case]:
    """layer_norm2d with GELU, contiguous: a block has a tile of pixels with all channels, 4 of which are a thread's, of
    halves 8 in the forward."""
    element, size = DTYPES[dtype]
    lanes, pixels = 16 // size, HEIGHT * WIDTH

    def cut(rows: int) -> tuple[int, int]:
        """norm2d_cut: (threads side by side, threads of a block)"""
        slices, vectors = ceil_div(CHANNELS, rows), pixels // lanes
        inner = WARP
        while inner > 8 and (inner * slices > 192 or BATCH * ceil_div(vectors, inner) < 512):
            inner //= 2
        whole = WARP // inner
        return inner, ceil_div(slices, whole) * whole * inner

    rows = 8 if size == 2 else 4
    inner, threads = cut(rows)
    tile = inner * lanes
    tiles = BATCH * ceil_div(pixels, tile)
    bytes_each = ELEMENTS * size
    stats = 2 * 4 * BATCH * pixels
    # the group's first channel is loaded too; all rows exist. Of the activations GELU has most of these, and as many in
    # each of bfloat16's polynomials, whose last step is -1: the cheaper one, of a result, is meant
    step = Step(rows + 1, rows, row=True, most=r"\b(MUFU\.EX2|FMNMX|FADD)|\bFFMA .*, -1$")
    scratch = 4 * (tile + threads // inner * tile)
    forward = Launch(
        f"norm2d_kernel<{element}, {lanes}, false, true>",
        tiles,
        threads,
        step,
        1,
        2 * bytes_each + stats,
        shared=scratch,
    )
    rows = 4  # of a thread of the backward
    inner, threads = cut(rows)
    tile = inner * lanes
    tiles = BATCH * ceil_div(pixels, tile)
    scratch = 4 * (tile + threads // inner * tile)
    # beside x and the gradient the first channel, means and scales; of the activations GELU has most arithmetic
    step = Step(2 * rows + 1 + 2 * lanes // 4, rows, row=True, most=r"\bFFMA")
    shuffled = Step(2, 0, load=r"\bSHFL\b", store=r"\bST[SG]\b", waits=0), rows * int(math.log2(inner))
    backward = norm_backward(dtype, "false", tiles, threads, step, 2 * scratch, shuffled)
    return norm_pair("layer_norm2d", dtype, forward, backward)


def norm_lines_cases(dtype: str) -> list[Case]:
    """layer_norm2d with GELU, channels_last, whose images are one. A pixel's channels are a team's of lanes in the
    forward; in the backward a block has a tile of pixels with all channels, a thread V channels of 4 of them."""
    element, size = DTYPES[dtype]
    lanes, pixels, most = 16 // size, BATCH * HEIGHT * WIDTH, 5 if size == 2 else 8
    vectors, floats, bytes_each = CHANNELS // lanes, lanes // 4, ELEMENTS * size

    team = 2  # norm2d_launch_teams
    while team * most < vectors or (team < WARP and team < vectors and pixels * team < 1 << 15):
        team *= 2
    each = ceil_div(vectors, team)  # of a lane's `most` vectors: under a predicate x is loaded of the others too
    forward = Launch(
        f"norm2d_team_kernel<{element}, {lanes}>",
        ceil_div(pixels, 128 // team),
        128,
        Step(most + 2 * floats * each, each, row=True, most=r"\b(MUFU\.EX2|FSEL|FADD|FFMA)"),
        1,
        2 * bytes_each + 2 * 4 * pixels,
    )

    rows, sums = 4, 2  # norm2d_cut and norm2d_launch

    def idle(outer: int) -> float:
        """The share of the lanes of its warps in which a block of so many rows of threads has no elements."""
        return -vectors * outer % WARP / (vectors * outer)

    outer = max(min(192 // vectors, ceil_div(pixels, rows)), 1)
    outer = min(range(outer, (outer - 1) // 2, -1), key=idle)
    while outer > 1 and outer * vectors > 2 * WARP and ceil_div(pixels, outer * rows) < 512:
        outer = (outer + 1) // 2
    tile, threads = outer * rows, ceil_div(vectors * outer, WARP) * WARP
    adders = 1  # of the partial sums of a pixel
    while adders < WARP and 2 * adders <= vectors and 2 * sums * tile * adders <= threads:
        adders *= 2
    terms = ceil_div(vectors, adders) * ceil_div(sums * tile * adders, threads)
    scratch = max(sums * ceil_div(tile * (vectors | 1), 4) * 4, 2 * CHANNELS * outer)
    added = Step(1, 0, load=r"\bLDS\b", store=r"\bSTS\b")
    step = Step(2 * rows + 2 * floats, rows, row=True, most=r"\bFFMA", inner=((added, terms),))
    of_weights = Step(2, 0, load=r"\bLDS\b", store=r"\bST[SG]\b", waits=0), outer * ceil_div(CHANNELS, threads)
    shared = 4 * (ceil_div(sums * tile, 4) * 4 + scratch)
    backward = norm_backward(dtype, "true", ceil_div(pixels, tile), threads, step, shared, of_weights)
    return norm_pair("layer_norm2d channels_last", dtype, forward, backward)


HEADS, TOKENS, HEAD_DIM = 8, 1024, 64  # of each batch element, for rope


def rope_cases(dtype: str) -> list[Case]:
    """Halves of contiguous heads, every token its own row of the tables. "tables" has their gradients too."""
    element, size = DTYPES[dtype]
    lanes, tokens = 16 // size, BATCH * TOKENS
    vectors, elements = HEAD_DIM // 2 // lanes, tokens * HEADS * HEAD_DIM
    angles = 2 * lanes // 4  # loads of cosines and sines
    heads = 4 if tokens * vectors * ceil_div(HEADS, 4) >= 1 << 17 else 1
    kernel = f"rope_kernel<{element}, {lanes}, false, "
    forward = Launch(
        f"{kernel}false>",
        ceil_div(tokens * vectors * ceil_div(HEADS, heads), 256),
        256,
        Step(2 * heads + angles, 2 * heads, row=True),
        1,
        2 * elements * size,
    )
    sums = 4 * tokens * HEAD_DIM
    backward = Launch(
        f"{kernel}true>", ceil_div(tokens * vectors, 128), 128, Step(4, 2), HEADS, 3 * elements * size + sums
    )
    step = Step(2, 0, load=r"\bLDG\b", store=r"\bSTG\b")
    reduce = Launch("rope_sum_kernel", TOKENS * ceil_div(HEAD_DIM // 2, 128), 128, step, BATCH, sums, cached=True)
    return [
        Case("rope", "rope", "forward", dtype, elements, 2 * elements * size, (forward,)),
        Case("rope", "rope tables", "backward", dtype, elements, 3 * elements * size, (backward, reduce)),
    ]


# Of bdh_attention: of Vision-BDH, whose layers have 64 tokens, and of pictures of 1,024.
PRODUCTS = (("", 32, 6, 64, 1024, 192), (" of 1024 tokens", 2, 6, 1024, 1024, 192))


def product_cases(dtype: str) -> list[Case]:
    """The forward on tensor cores, whose steps are copied to shared memory two or three ahead. Up to 64 tokens a block
    of eight warps has the scores and out of two heads; a step is 64 terms, q and what both share, the cosines and sines
    in float32. Of longer sequences the first product makes r of two heads that share v, and stores it for the second;
    tiles of 128 x 128 or 128 x 192, 32 terms in a step. All bytes count at the speed of L2, and those of q, of what is
    stored and of given tensors, once each, at that of memory: the longer of the two."""
    if dtype != "bfloat16":
        return []
    element, tile, cases = DTYPES[dtype][0], 64, []

    def product(kernel, blocks, terms, depth, copied, products, rounded, ahead, more, once):
        """`copied`, `rounded`: pieces of 16 bytes that a thread copies, and elements that it makes, per step of so many
        terms. more: bytes beside the steps'; once: those from and to memory."""
        step = Step(copied, products, False, "", r"\bLDGSTS\b", r"\bHMMA\b", rounded // 2, r"\bF2FP\b")
        steps, stage = ceil_div(terms, depth), 256 * 16 * copied
        traffic, ring = blocks * steps * stage + more, (ahead + 1) * stage
        return Launch(kernel, blocks, 256, step, steps, traffic, ring, ahead, cached=True, cold=once)

    for name, batch, heads, tokens, columns, values in PRODUCTS:
        sequences = batch * heads
        q, v, out = sequences * tokens * columns * 2, batch * tokens * values * 2, sequences * tokens * values * 2
        elements = sequences * tokens * values
        if tokens == tile:  # the scores are saved in float32
            scores, blocks = sequences * tile * tile * 4, ceil_div(sequences, 2)
            given = blocks * (1 if heads % 2 == 0 else 2) * tile * values * 2
            moved, flop = q + v + out + scores, 2 * sequences * tokens**2 * (columns + values)
            kernel = f"bdh_short_kernel<{element}>"
            launches = (product(kernel, blocks, columns, 64, 8, 20, 32, 2, given + scores + out, moved),)
        else:
            # bdh_run_rotated: columns of q in whole steps, in bands of at most 64 MiB, which these sequences are within
            padded = ceil_div(columns, 32) * 32
            across = 192 if ceil_div(values, 192) * 192 <= ceil_div(values, 128) * 128 else 128
            beside, products, paired = ceil_div(values, across), across // 4, 2 if heads % 2 == 0 else 1
            r, z, angles = sequences * tokens * padded * 2, sequences * padded * values * 2, tokens * columns * 4
            tiles = sequences // paired * ceil_div(padded, 128 // paired) * beside
            kernel, copied = f"bdh_large_state_kernel<{element}, {across}, false>", 4 + across // 64
            state = product(kernel, tiles, tokens, 32, copied, products, 16, 2, r + z, q + r + angles)
            tiles = sequences * ceil_div(tokens, 128) * beside
            kernel, copied = f"bdh_large_out_kernel<{element}, {across}, false>", 2 + across // 64
            launches = (state, product(kernel, tiles, padded, 32, copied, products, 0, 3, out, 0))
            moved, flop = 2 * q + v + out + 2 * z, 4 * sequences * tokens * columns * values
        cases.append(Case("bdh", f"bdh_attention{name}", "forward", dtype, elements, moved, launches, flop))
    return cases


MOE_ROWS, MOE_ROW_SIZE, MOE_TOP_K = 32, 48 * 56 * 56, 3
MOE_CHUNK, MOE_COPIES = 4096, 4  # CAMOX_MOE_CHUNK; loads of a place that is not there are issued under a predicate


def moe_cases(dtype: str) -> list[Case]:
    """A thread has a vector of a row, or in the backward several, and its copies, up to 4 at a time; places are looked
    up first. The gradient of what was dispatched is combined without weights."""
    element, size = DTYPES[dtype]
    lanes, elements, top_k = 16 // size, MOE_ROWS * MOE_ROW_SIZE, MOE_TOP_K
    blocks = ceil_div(MOE_ROWS * MOE_ROW_SIZE // lanes, 256)
    once = (1 + top_k) * elements * size
    copied = "float" if size == 4 else "__half"  # dispatch copies bits
    step = Step(1, 1, row=True, inner=((Step(0, 1), top_k),))
    dispatch = Launch(f"moe_dispatch_kernel<{copied}, {lanes}>", blocks, 256, step, 1, once)
    combine = Launch(
        f"moe_combine_kernel<{element}, {lanes}>", blocks, 256, Step(MOE_COPIES, 1, row=True, waits=2), 1, once
    )
    chunks, steps = ceil_div(MOE_ROW_SIZE, MOE_CHUNK), MOE_CHUNK // 256 // lanes
    traffic = (1 + 2 * top_k) * elements * size
    step = Step((1 + MOE_COPIES) * steps, top_k * steps, row=True, waits=1 + steps)
    backward = Launch(f"moe_combine_backward_kernel<{element}, {lanes}, 256>", MOE_ROWS * chunks, 256, step, 1, traffic)
    step = Step(1, 0, load=r"\bLDG\b", store=r"\bSTG\b")
    sums = Launch(
        "moe_sum_chunks_kernel",
        ceil_div(MOE_ROWS * top_k, 256 // WARP),
        256,
        step,
        ceil_div(chunks, WARP),
        4.0 * MOE_ROWS * top_k * chunks,
        cached=True,
    )
    return [
        Case("moe", "moe_dispatch", "forward", dtype, elements, once, (dispatch,)),
        Case("moe", "moe_dispatch", "backward", dtype, elements, once, (combine,)),
        Case("moe", "moe_combine", "forward", dtype, elements, once, (combine,)),
        Case("moe", "moe_combine", "backward", dtype, elements, traffic, (backward, sums)),
    ]


# (name, rows, experts, how many a row goes to): a benchmark's, and tokens of images
MOE_ROUTES = (("moe_route", 16384, 64, 8), ("moe_route of 8", 32 * HEIGHT * WIDTH, 8, 2))
MOE_BLOCKS, MOE_BLOCK_ROWS = 264, 128  # CAMOX_MOE_CUDA_MOST_BLOCKS, CAMOX_MOE_BLOCK_ROWS


def moe_route_cases(dtype: str) -> list[Case]:
    """A step of choosing is a pass of a block over rows; of placing, one over slots, which were counted in a pass
    before. Of the backward all loads are under way at once."""
    element, size = DTYPES[dtype]
    threads, logits, cases = 1024, 8, []  # of a block that chooses or places, and of a thread
    for name, rows, experts, top_k in MOE_ROUTES:
        lanes = 1 if experts <= 8 else 8  # threads of a row
        block_rows = max(MOE_BLOCK_ROWS, ceil_div(rows, MOE_BLOCKS))
        blocks, slots, elements = ceil_div(rows, block_rows), rows * top_k, rows * experts
        counts = 4 * blocks * experts
        # the loop of rounds: a maximum over lanes and its expert by shuffles; or one thread, which stores each choice
        among_lanes = Step(4, 0, load=r"\bSHFL\b", store=r"\bSTG\b")
        best = among_lanes if lanes > 1 else Step(1, 1, load=r"\bATOMS\b", store=r"\bSTG\b")
        assert top_k <= lanes or lanes == 1, "one pass over lanes"
        vectors = logits * size // 16
        row = Step(
            vectors,
            1 + ceil_div(top_k, lanes),
            row=True,
            most=r"\bMUFU\.EX2\b",
            load=r"\bLDG\.E\.128\b",
            store=r"\bSTG\b",
            inner=((best, top_k),),
        )
        choose = Launch(
            f"moe_choose_kernel<{lanes}, {logits}>",
            blocks,
            threads,
            row,
            ceil_div(block_rows, threads // lanes),
            elements * size + 12 * slots + counts,
            4 * experts,
        )
        warps = threads // WARP
        steps = ceil_div(ceil_div(block_rows * top_k, warps), WARP)
        vote = Step(1, 0, load=r"\bVOTE\b", store=r"\bSTG\b")
        inner = ((vote, 1 + (2 * experts - 1).bit_length()),)
        rank = Step(1, 2, row=True, load=r"\bLDG\.E\.64(\.SYS)? ", store=r"\bSTG\b", inner=inner)
        count = Step(1, 1, load=r"\bLDG\.E\.64(\.SYS)? ", store=r"\bATOMS\b")
        total = Step(8, 0, load=r"\bLDG\.E(\.SYS)? ", store=r"\bSTG\b")
        parts = min(threads // experts, 32)  # MOE_MOST_PARTS
        totals = ceil_div(blocks, 8 * parts) * experts * parts / threads  # MOE_LOADS; the other threads add none
        place = Launch(
            "moe_place_kernel",
            blocks,
            threads,
            rank,
            steps,
            32 * slots + blocks * counts,
            experts * (8 + 4 + max(4 * warps, 16 * parts)),
            cached=True,
            written=16 * slots,
            beside=((count, steps), (total, totals)),
        )
        once = elements * size + 28 * slots
        cases.append(Case("moe", name, "forward", dtype, elements, once, (choose, place)))
        # beside the logits gradient and place of the best, and expert, place and gradient of a thread's choices
        choices = 1 if lanes > 1 else 2
        loads = vectors + 2 + 3 * choices
        step = Step(loads, vectors, row=True, most=r"\bMUFU\.EX2\b", load=r"\bLDG\b", store=r"\bSTG\b")
        assert top_k <= choices * lanes, "one step over choices"
        traffic = 2 * elements * size + 20 * slots
        kernel = f"moe_route_backward_kernel<{lanes}, {logits}, {element}>"
        backward = Launch(kernel, ceil_div(rows, 256 // lanes), 256, step, 1, traffic)
        cases.append(Case("moe", name, "backward", dtype, elements, traffic, (backward,)))
    return cases


GRAD_SIZES, GRAD_GROUPS = (31744, 256) * 250, 41
GRAD_PIECE, GRAD_FEW, GRAD_LOADS = 8192, 7, 4  # CAMOX_GRAD_PIECE, CAMOX_GRAD_FEW, and of grad_norms_cuda.cu
GRAD_BATCH, GRAD_BLOCKS = 720, 1024  # CAMOX_GRAD_BATCH, CAMOX_GRAD_BLOCKS
LAST_BLOCK_WAITS = 2  # for its results to reach L2, and for its count


def grad_cases(dtype: str) -> list[Case]:
    """A block for each run of pieces of a gradient, which it finds in the parameters, as far away as memory when they
    are first read; scale loads a factor too. A small gradient is a run that takes as long as its threads wait for
    memory once. The last block of a group adds up its gradients: a thread loads the sums of one gradient's blocks at
    once."""
    size = DTYPES[dtype][1]
    count, elements, run = len(GRAD_SIZES), sum(GRAD_SIZES), GRAD_PIECE
    while sum(ceil_div(n, run) for n in GRAD_SIZES) > GRAD_BLOCKS:
        run *= 2
    blocks = sum(ceil_div(n, run) for n in GRAD_SIZES)
    vectors = elements / blocks / 256 * size / 16  # of a thread in the mean
    assert count <= GRAD_BATCH, "more than one launch"
    assert ceil_div(max(GRAD_SIZES), run) <= GRAD_FEW and count <= 256 * GRAD_GROUPS, "one step of the last block"

    def main(kernel, stores, waits):
        """Of halves the conversion of bfloat16 is meant, which is cheaper than float16's."""
        most = r"\bFMUL\b" if size == 4 else r"\b(PRMT|IMAD\.U32|SHL)\b"
        step = Step(GRAD_LOADS, stores, most=most)
        traffic = (1 + bool(stores)) * elements * size
        return Launch(kernel, blocks, 256, step, vectors / GRAD_LOADS, traffic, waits=waits)

    last = Launch(
        "grad_norms_kernel",
        1,
        256,
        # 64 bytes; the loop is known by its additions
        Step(4, GRAD_FEW + 1, load=r"\bLDG\.E\.128\.STRONG", store=r"\bDADD"),
        1,
        64.0 * count / GRAD_GROUPS,
        cached=True,
        waits=LAST_BLOCK_WAITS,
        of_last_block=True,
    )
    once = elements * size
    norms, scaled = (main("grad_norms_kernel", 0, 1), last), (main("scale_grads_kernel", GRAD_LOADS, 2),)
    return [
        Case("grad_norms", "grad_group_norms", "forward", dtype, elements, once, norms),
        Case("grad_norms", "scale_grads_", "forward", dtype, elements, 2 * once, scaled),
    ]


# images: a training batch of masks, and one that takes long enough for launches not to count
STRUCTURE_BATCHES = (("structure_loss", 8), ("structure_loss of 32", 32))
STRUCTURE_PIXELS, STRUCTURE_ITEM = 352 * 352, 2048  # CAMOX_STRUCTURE_PIXELS; too few for STRUCTURE_LONG_ITEM
STRUCTURE_LANES, STRUCTURE_VECTORS = 4, 2  # of a thread's step, which has two vectors at once


def structure_cases(dtype: str) -> list[Case]:
    """Logits with masks and weights in their dtype; a block has a work item. The last block of the forward adds the
    work items of each image by `adding` threads."""
    element, size = DTYPES[dtype]
    items, types = ceil_div(STRUCTURE_PIXELS, STRUCTURE_ITEM), f"<{STRUCTURE_LANES}, {element}>"
    logistic = r"\bMUFU\.EX2\b"
    narrow = {
        "load": r"\bLDG\.E(\.\w+)*\.(64|128)\.CONSTANT\b",
        "store": r"\bSTG\.E(\.\w+)*\.(64|128)\b",
    }
    cases = []
    for name, images in STRUCTURE_BATCHES:
        elements, blocks, adding = images * STRUCTURE_PIXELS, images * items, max(8, min(32, 256 // images))

        def main(kernel, stores, loads=3, blocks=blocks, elements=elements, **how):
            step = Step(loads * STRUCTURE_VECTORS, stores * STRUCTURE_VECTORS, most=logistic, **narrow)
            steps = STRUCTURE_PIXELS / items / 256 / STRUCTURE_LANES / STRUCTURE_VECTORS
            return Launch(kernel + types, blocks, 256, step, steps, elements * (3 + stores) * size, **how)

        # of half types the loads of masks in either type are issued, and predicates leave one of them out
        forward = main("structure_loss_kernel", 0, loads=3 if dtype == "float32" else 5)
        backward = main("structure_loss_backward_kernel", 1, waits=1)  # for the sums of the image
        last = Launch(
            forward.kernel,
            1,
            256,
            Step(4, 0, load=r"\bLDG\.E\.128\.STRONG\.GPU\b", store=r"\bSTG\b"),
            ceil_div(items, 4 * adding),
            16.0 * blocks,
            cached=True,
            waits=LAST_BLOCK_WAITS,
            of_last_block=True,
        )
        cases.append(Case("structure_loss", name, "forward", dtype, elements, forward.traffic, (forward, last)))
        cases.append(Case("structure_loss", name, "backward", dtype, elements, backward.traffic, (backward,)))
    return cases


LA_BATCH, LA_HEADS, LA_LENGTH, LA_DIM = 16, 8, 7744, 32  # of heads that are channels of images


def attention_chunks(processors: int, backward: bool) -> tuple[int, float]:
    """camox_linear_attention_plan of bfloat16: (chunks of a head, positions of each in the mean)"""
    items, sequences = processors * (3 if backward else 4), LA_BATCH * LA_HEADS
    chunk = max(ceil_div(LA_LENGTH, max(items // sequences, 1)), 128)
    if chunk > 4096:
        chunk = ceil_div(LA_LENGTH, ceil_div(LA_LENGTH, 4096))
    chunks = ceil_div(LA_LENGTH, ceil_div(chunk, 64) * 64)
    return chunks, LA_LENGTH / chunks


def linear_attention_cases(dtype: str) -> list[Case]:
    """Halves on tensor cores, features elu1, normalized by the sum: of a tensor a lane has 16 bytes of each of a
    quarter of the columns, or 8 of each of half of them where it is a factor, both by cp.async."""
    if dtype != "bfloat16":
        return []
    element, size = DTYPES[dtype]
    sequences, dim = LA_BATCH * LA_HEADS, LA_DIM
    tensor = sequences * LA_LENGTH * dim * size
    wide, state = ceil_div(dim, 16), 4 * sequences * dim * (dim + 1)
    columns = 2 * wide  # of a lane: a quarter of them
    slot = 4 * 1024 * wide  # of one tensor's tiles in the rings of a block
    sums, fragments = 4 * 4 * 16 * wide * (16 * wide + 1), 16 * 2 * wide * wide * WARP
    line, added = 4 * 16 * wide, 4 * 16 * wide * (16 * wide + 1)

    def of_chunks(
        kernel: str, step: Step, tensors: int, writes: int, reads: int, shared: int, prefetched: int, backward=False
    ):
        """`tensors`: read and written. `writes`, `reads`: states, for each chunk, and of all chunks again for each."""

        def launch(processors: int, _: int) -> Launch:
            chunks, length = attention_chunks(processors, backward)
            traffic = tensors * tensor + writes * chunks * state
            return Launch(
                kernel.format(f"{element}, {wide}, true"),
                sequences * chunks,
                128,
                step,
                length / 128,
                traffic,
                shared,
                prefetched,
                waits=1,
                read_beside=reads * chunks * chunks * state,
            )

        return Divided(kernel.format(f"{element}, {wide}, true"), 128, launch)

    # the way that features take, and that of features and a division
    features, divided = {"most": r"\bMUFU\.EX2\b"}, {"most": r"\bMUFU\.(EX2|RCP)\b"}
    copies = {"load": r"\bLDGSTS\.E(\.\w+)*\.(64|128)\b"}
    # the loop that only fills the ring makes no products
    products = {"rounds": 8 * wide * wide, "rounding": r"\bHMMA\b"}
    forward = (
        of_chunks(
            "la_mma_sum_kernel<{}>",
            Step(2 * columns, 0, **features, **copies, **products),
            2,
            1,
            0,
            max(sums, 4 * slot),
            2,
        ),
        of_chunks(
            "la_mma_apply_kernel<{}>",
            Step(2 * columns, columns, **divided, **copies),
            2,
            0,
            1,
            fragments + line + 2 * slot + added,
            2,
        ),
    )
    backward = (
        of_chunks(
            "la_mma_gradient_kernel<{}, 1>",
            Step(4 * columns, columns, **divided, **copies),
            3,
            1,
            0,
            max(sums, fragments + line + 3 * slot),
            1,
            True,
        ),
        of_chunks(
            "la_mma_gradient_kernel<{}, 2>",
            Step(5 * columns, 2 * columns, **features, **copies),
            4,
            0,
            1,
            2 * fragments + line + 3 * slot + added,
            1,
            True,
        ),
    )
    name = "linear_attention"
    return [
        Case(name, name, "forward", dtype, tensor // size, 4 * tensor, forward, on_tensor_cores=True),
        Case(name, name, "backward", dtype, tensor // size, 7 * tensor, backward, on_tensor_cores=True),
    ]


# csrc/box/box_cuda.cu: threads of a block, those that keep a multiprocessor busy, elements of a thread, rows of a step,
# columns of a segment of channels_last, the driver's bytes of each block, bytes of a sector
BOX_THREADS, BOX_BUSY, BOX_LANES, BOX_STEP, BOX_SEGMENT, BOX_RESERVED, BOX_SECTOR = 256, 256, 4, 4, 8, 1024, 32
# Multiprocessors of a GPU -> bytes of shared memory that one of its blocks may have
BLOCK_SHARED = {
    gpu.processors: cuda_budget.LIMITS[gpu.arch][2] * 1024 - (gpu.arch != "sm_75") * BOX_RESERVED for gpu in GPUS
}
BOX_SHAPE, BOX_WINDOWS = (BATCH, CHANNELS, HEIGHT, WIDTH), (3, 7, 31)
STRUCTURE_SHAPE, STRUCTURE_WINDOW = (8, 1, 352, 352), 31


def box_divide(processors: int, shape, radius: int, size: int, last: bool) -> tuple[int, int, int, int, float]:
    """(blocks, threads, rows of a band, bytes of shared memory) as box_divide in csrc/box/box_cuda.cu divides them, and
    how often an element is read besides: columns of two tiles, sectors that two blocks share."""
    batch, channels, height, width = shape
    lanes = BOX_LANES
    segment, step = (BOX_SEGMENT, BOX_SEGMENT) if last else (1, BOX_STEP)  # threads, rows
    of_segment = BOX_SEGMENT if last else lanes  # columns
    together = ceil_div(channels, lanes) if last else channels
    vectors, most = ceil_div(width, of_segment) * segment, ceil_div(height, step)
    all_planes = batch * together
    lines = 2 * radius + 1 if radius <= 3 and not last else of_segment + 1
    side = ceil_div(radius, of_segment)
    ring, totals = (2 * radius, (2 * radius - BOX_STEP) // BOX_STEP) if radius > 1 else (0, 0)
    registers = 384 if last else 512
    best = (math.inf, 0, 0, 0, 0, 0.0)
    for least_planes in (min(BOX_SECTOR // (lanes * size), together) if last else 1, 1):
        for threads in range(WARP, (registers if last else BOX_THREADS) + 1, WARP):
            widest = threads // least_planes // segment * segment
            tiles = vectors > widest
            halo = side * segment if tiles else 0
            across = widest if tiles else vectors
            if (tiles and widest < 4 * halo) or across == 0:
                continue
            planes = min(threads // across, all_planes)
            columns = ceil_div(all_planes, planes) * ceil_div(vectors, across - 2 * halo)
            rows = step * planes if last else ceil_div(threads, across)
            positions = side + rows * (across // segment + side)
            shared = 16 * lines * positions + threads * (ring * lanes * size + totals * lanes * 4)
            if shared > BLOCK_SHARED[processors]:
                break
            beside = across / (across - 2 * halo) - 1
            if last:
                beside += -(planes * lanes * size) % BOX_SECTOR / (planes * lanes * size)
            by_shared = (BLOCK_SHARED[processors] + BOX_RESERVED) // (shared + BOX_RESERVED)
            at_once = processors * min(by_shared, registers // threads)

            def time_of(blocks, threads=threads):
                busy = ceil_div(blocks, processors) * threads
                return busy + 7 * max(busy, BOX_BUSY) if blocks else 0

            for bands in range(1, most + 1):
                steps = ceil_div(most, bands)
                blocks = columns * ceil_div(most, steps)
                whole, remaining = divmod(blocks, at_once)
                time = (whole * time_of(at_once) + time_of(remaining)) * (step * steps + 4 + radius)
                if time < best[0]:
                    of_block = planes * across if last else threads
                    best = (time, blocks, of_block, step * steps, shared, beside)
        if best[1]:
            break
    return best[1:]


def box_cases(dtype: str) -> list[Case]:
    """A step has four rows, or eight of channels_last; its accesses to shared memory and its multiply-adds tell its
    way. To begin a band, copying four rows into the ring and adding them up costs a fifth of what four rows cost. A
    backward is a forward of the gradient."""
    element, size = DTYPES[dtype]
    cases = []

    def spans(radius: int, lanes: int) -> tuple[int, int, int]:
        """box_spans_of: (single columns on the left, whole segments, single columns on the right) of the core"""
        single, core = (radius + 1) % lanes, 2 * radius + 2 - lanes
        return (single, (core - 2 * single) // lanes, single) if core >= 2 * single else (core, 0, 0)

    def down(radius: int, lanes: int) -> int:
        """The accesses to shared memory of four rows' sums down the columns, and the multiply-adds of trailing rows."""
        if radius == 1:
            return 0
        # the oldest total is replaced; one of a block that is complete becomes a sum to its end
        totals = 2 * 2 * (lanes // 4) if radius > 3 else 0
        return 4 + 4 + lanes * (4 + 2 * (radius % 2)) + totals

    def case(name, shape, window, weights=0, last=False):
        radius, elements, lanes = window // 2, math.prod(shape), BOX_LANES
        reach, tall = radius if radius <= 3 and not last else 0, "true" if radius > 1 else "false"
        kernel = f"box_bands_kernel<{element}, {lanes}, {tall}, {'true' if last else 'false'}>"
        segment, rows_of_step = (BOX_SEGMENT, BOX_SEGMENT) if last else (lanes, BOX_STEP)
        marks, core = rows_of_step // BOX_STEP * down(radius, lanes), (0, 0, 0)
        own = 2 * BOX_SEGMENT if last else lanes  # lines of its columns
        if last and radius <= 2:
            marks += own + 4
        elif reach:
            marks += 4 * reach
        else:
            core = spans(radius, segment)
            # box_add_lines three times: four lines, in a loop; two, by a branch; one, under a predicate
            marks += own + 1 + 2 * (segment - 1) + 3 + sum(4 * (n >= 4) + 2 * (n % 4 >= 2) for n in core)
        inner = sum(n // 4 for n in core) - sum(n >= 4 for n in core) + 1  # passes of the loops
        sums = Step(4, 0, load=r"\bLDS\b", store=r"\bSTS\b")
        narrow = {"load": r"\bLDG\.E(\.\w+)*\.64\b", "store": r"\bSTG\.E(\.\w+)*\.64\b"}
        step = Step(
            rows_of_step * (2 if weights else 1),
            rows_of_step,
            row=radius > (2 if last else 1),
            rounds=marks + weights,
            rounding=r"\b(LDS|STS|FFMA)\b",
            inner=((sums, inner),) if inner > 1 else (),
            **(narrow if lanes * size == 8 else {}),
        )

        def launch(processors: int, _: int) -> Launch:
            blocks, threads, rows, shared, beside = box_divide(processors, shape, radius, size, last)
            steps = (rows + 2 * radius / 5) / rows_of_step
            lost = elements * size * 2 * radius / rows if rows < shape[2] else 0.0
            return Launch(
                kernel,
                blocks,
                threads,
                step,
                steps,
                2.0 * elements * size,
                shared,
                prefetched=1,
                halo=(lost, lanes * size * 2.0 * radius),
                read_beside=elements * size * beside,
            )

        once = 2 * elements * size
        cases.append(Case("box", name, "forward", dtype, elements, once, (Divided(kernel, 128, launch),)))

    for layout in ("", " channels_last"):
        for window in BOX_WINDOWS:
            case(f"box_mean{layout} by {window}", BOX_SHAPE, window, last=bool(layout))
    # the mask's own pixels are read again, and multiplied
    case("structure_weight", STRUCTURE_SHAPE, STRUCTURE_WINDOW, BOX_STEP * BOX_LANES)
    return cases


CASES: tuple[Case, ...] = tuple(
    case
    for dtype in DTYPES
    for of in (
        image_cases,
        dropout_cases,
        row_cases,
        norm_cases,
        norm_lines_cases,
        rope_cases,
        product_cases,
        moe_cases,
        moe_route_cases,
        linear_attention_cases,
        grad_cases,
        structure_cases,
        box_cases,
    )
    for case in of(dtype)
)
# What does not fit the model, and why; nothing is predicted of it.
NOT_MODELLED = {
    "linear_attention in float32, or causal": "sums of three bfloat16; tiles passed through shared memory",
    "linear_cross_entropy": "most of its time is that of cuBLAS' products",
    "short_attention": "loops over tokens and elements whose numbers are arguments, none of them hot",
    "box_mean of windows beyond one launch": "two launches whose loops over a window load one element at a time",
}
OPS = sorted({case.op for case in CASES})


# ---- output ----


def table_of(gpus, kernels: dict[str, dict[str, Kernel]], ops) -> tuple[dict, list[str]]:
    """case -> GPU -> prediction; the cases that are not modelled."""
    table: dict = {}
    missing = []
    for case in CASES:
        if case.op not in ops:
            continue
        for gpu in gpus:
            if (case.flop or case.on_tensor_cores) and not gpu.tensor:
                continue
            found = predict(case, gpu, kernels[gpu.arch])
            if isinstance(found, str):
                missing.append(f"{case.key} on {gpu.name}: {found}")
                continue
            table.setdefault(case.key, {})[gpu.name] = {
                "percent_of_copy": round(100 * found.share, 1),
                "limit": found.limit,
                "instructions_per_element": round(found.instructions, 1),
                "waves": round(found.waves, 2),
                "registers": found.registers,
                "warps": found.warps,
                **({"tflops": round(found.tflops, 1)} if case.flop else {}),
            }
    return table, missing


def falls(old: dict, new: dict) -> list[str]:
    """What became slower, or is not predicted any more, one line each. `old`: the lines of the same ops."""
    lines = []
    for case, gpus in old.items():
        for gpu, before in gpus.items():
            now = new.get(case, {}).get(gpu)
            was = before["percent_of_copy"]
            if now is None:
                lines.append(f"{case} on {gpu}: was {was}% of copy, is not modelled any more")
            elif now["percent_of_copy"] < (1 - LARGEST_FALL) * was:
                lines.append(
                    f"{case} on {gpu}: {now['percent_of_copy']}% of copy, was {was}% ({now['limit']}); where that is "
                    "wanted, --update, and the reason in the commit"
                )
    return lines


def printed(table: dict) -> str:
    head = f"{'estimated, % of copy':46} {'GPU':9} {'%':>5}  {'instr/elem':>10} {'regs':>4} {'warps':>5} {'waves':>6}"
    lines = [f"{head}  limit"]
    for case, gpus in table.items():
        for gpu, of in gpus.items():
            lines.append(
                f"{case:46} {gpu:9} {of['percent_of_copy']:5.1f}  {of['instructions_per_element']:10.1f} "
                f"{of['registers']:4} {of['warps']:5} {of['waves']:6.2f}  {of['limit']}"
                + (f", {of['tflops']:.0f} TFLOP/s" if "tflops" in of else "")
            )
    return "\n".join(lines)


# Groups of benchmarks that are not named like the model's cases.
GROUPS = {
    "layer_norm2d_gelu": "layer_norm2d{}",
    "box_mean_3": "box_mean{} by 3",
    "box_mean_31": "box_mean{} by 31",
    "linear_attention_sum": "linear_attention{}",
}


def measured(record: dict) -> dict[str, float]:
    """case -> percent of a copy's speed, of a record of scripts/gpu_check.py, at the sizes that the model has."""
    found = {}
    for entry in record["bench"]["entries"]:
        layout = " channels_last" if entry["layout"] == "channels_last" else ""
        name = GROUPS.get(entry["group"], entry["group"] + "{}").format(layout)
        for direction, of in entry["directions"].items():
            if entry["size"] in ("large", "route") and of["floor_bytes"]:
                share = 100 * of["share_of_copy"]["median"]
                found.setdefault(f"{name} {direction} {entry['dtype']}", round(share, 1))
    return found


def compared_with(record: dict, table: dict) -> str:
    """A line for each case that a GPU of the model was measured at: predicted, measured, the predicted limit."""
    name = record["environment"]["gpu"]
    gpu = next((gpu.name for gpu in GPUS if gpu.name in name), None)
    if gpu is None:
        sys.exit(f"cuda_model: {name} is none of {', '.join(gpu.name for gpu in GPUS)}")
    shares = measured(record)
    lines = [f"{'% of a copy on ' + gpu:46} {'predicted':>9} {'measured':>9}  predicted limit"]
    for case, of in table.items():
        if case in shares and gpu in of:
            lines.append(f"{case:46} {of[gpu]['percent_of_copy']:9.1f} {shares[case]:9.1f}  {of[gpu]['limit']}")
    return "\n".join(lines)


def read(cubin: Path) -> dict[str, Kernel]:
    cuobjdump = cuda_budget.tool("cuobjdump")
    usage = cuda_budget.resource_usage(cuobjdump, cubin)
    code = cuda_budget.listing(cuda_budget.run(cuobjdump, "-sass", str(cubin)))
    names = cuda_budget.plain(list(usage))
    return {names[name]: Kernel(code[name], of["REG"], of["SHARED"]) for name, of in usage.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=Path, help="a wheel or libcamox_ops_cuda.so; default: compile the sources")
    parser.add_argument("--ops", default=",".join(OPS), help="folders of the ops to predict (default: all modelled)")
    parser.add_argument("--check", action="store_true", help=f"compare with {TABLE.name}")
    parser.add_argument("--update", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument(
        "--measured", type=Path, help="a record of scripts/gpu_check.py, to be printed beside the table"
    )
    arguments = parser.parse_args()
    if arguments.measured:
        print(compared_with(json.loads(arguments.measured.read_text()), json.loads(TABLE.read_text())))
        return
    ops = arguments.ops.split(",")
    if set(ops) - set(OPS):
        parser.error(f"--ops: some of {', '.join(OPS)}")
    archs = [gpu.arch for gpu in GPUS]
    kernels: dict[str, dict[str, Kernel]] = {arch: {} for arch in archs}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.binary:
            if not cuda_budget.holds_kernels(arguments.binary):
                print(f"cuda_model: {arguments.binary.name} was built without nvcc: it has no kernels to model")
                return
            cubins = [job for job in cuda_budget.extracted(arguments.binary, Path(folder)) if job[0] in archs]
        else:
            cubins = cuda_budget.compiled(Path(folder), archs, ops)
        with ThreadPoolExecutor(2) as pool:
            for (arch, _), found in zip(cubins, pool.map(lambda job: read(job[1]), cubins), strict=True):
                kernels[arch].update(found)
    gpus = [gpu for gpu in GPUS if kernels[gpu.arch]]
    if not gpus:
        sys.exit(f"cuda_model: no kernels for {', '.join(archs)} in {arguments.binary}")
    new, missing = table_of(gpus, kernels, ops)
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    mine = {case.key for case in CASES if case.op in ops}
    names = {gpu.name for gpu in gpus}
    compared = {case: {g: of for g, of in lines.items() if g in names} for case, lines in old.items() if case in mine}
    print(printed(new))
    for line in [*missing, *(f"{op}: not modelled: {why}" for op, why in NOT_MODELLED.items())]:
        print(line)
    if arguments.update:
        if names != {gpu.name for gpu in GPUS}:
            sys.exit(f"cuda_model: --update needs kernels for {', '.join(archs)}")
        everything = {**{case: lines for case, lines in old.items() if case not in mine}, **new}
        known = {case.key for case in CASES}
        TABLE.write_text(written({case: everything[case] for case in sorted(everything) if case in known}))
    elif arguments.check:
        wrong = falls(compared, new) + [
            f"{case}: not in {TABLE.name}; run with --update" for case in new if case not in old
        ]
        if wrong:
            sys.exit("\n".join(wrong))
        print(f"cuda_model: {len(new)} cases, none more than {100 * LARGEST_FALL:.0f}% below {TABLE.name}")


def written(table: dict) -> str:
    """JSON with one line for each case and GPU."""
    text = json.dumps(table, indent=2)
    flat = re.sub(r"\{\n\s+(\"percent_of_copy\"[^}]*?)\n\s+\}", lambda m: "{" + re.sub(r"\n\s+", " ", m[1]) + "}", text)
    return flat + "\n"


if __name__ == "__main__":
    main()
