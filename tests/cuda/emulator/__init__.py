"""Builds the .cu sources with g++ (cuda_emulator.h) and runs their kernels on the CPU, in guarded memory.

Everything is built into build/cuda_emulator and rebuilt when a source, a header it includes or a flag changes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch

from camox_ops._ops import IMAGE_OPS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "cuda_emulator"
ARCHS = (750, 900)  # one for each branch of __CUDA_ARCH__ that the sources know
ORDERS = {"forward": (0, 1), "reverse": (1, 1), "random": (2, 1), "random2": (2, 7)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALVES = (torch.bfloat16, torch.float16)

CXX = os.environ.get("CXX", "g++")


def _has_fma() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "fma" in cpuinfo.read_text().split()


# Without -fno-gnu-unique the shared memory of one kernel would be one variable for the builds of all architectures.
# -Og compiles the unrolled kernels in half the time of -O2; when they run, switching fibers costs more than their code.
# Line numbers and the paths of exceptions, which no kernel throws, are a sixth of the compiler's work: reports have the
# lines of their macros and sanitizers.
FLAGS = [
    *("-std=c++17", "-Og", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-gnu-unique", "-fno-strict-aliasing"),
    *("-ffp-contract=off", "-ftrivial-auto-var-init=pattern"),
    *(["-mfma"] if _has_fma() else []),  # fmaf as an instruction: libm's takes a third of a kernel's time
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi", "-Werror"),
]
CHECKS = "-fsanitize=bounds,alignment,signed-integer-overflow,shift,integer-divide-by-zero"


class KernelError(AssertionError):
    """What the emulator found wrong with a kernel: its message names kernel, block and thread."""


@cache
def cuda_include() -> Path | None:
    """CUDA's headers: beside nvcc, under CUDA_HOME, or in a PyPI package of this interpreter."""
    places = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvcc = shutil.which("nvcc")
    if nvcc:
        places.append(Path(nvcc).resolve().parent.parent / "include")
    places.append(Path("/usr/local/cuda/include"))
    for site in map(Path, sys.path):
        places += [*sorted(site.glob("nvidia/cu1*/include"), reverse=True), site / "nvidia/cuda_runtime/include"]
    for place in places:
        if all((place / name).is_file() for name in ("cuda_runtime.h", "cuda_fp16.h", "crt/host_defines.h")):
            return place
    return None


def why_unavailable() -> str | None:
    """Why the emulator cannot run on this machine, None when it can."""
    if not sys.platform.startswith("linux"):
        return "the CUDA emulator needs Linux"
    if not CSRC.is_dir():
        return "the CUDA emulator needs the sources under csrc"
    if not shutil.which(CXX):
        return f"the CUDA emulator needs a C++ compiler, {CXX} is not on PATH"
    if cuda_include() is None:
        return "no CUDA headers: nvcc is not on PATH, CUDA_HOME is not set and nvidia-cuda-runtime is not installed"
    return None


def _digest(command: list[str], files: list[str]) -> str:
    state = hashlib.sha256(json.dumps([*command, _compiler_version()]).encode())
    for name in files:
        state.update(Path(name).read_bytes())
    return state.hexdigest()


@cache
def _compiler_version() -> str:
    return subprocess.run([CXX, "--version"], check=True, capture_output=True, text=True).stdout


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")


def _compile(command: list[str], output: Path) -> list[str]:
    """Runs a compile command with this output; the files that it read, but for CUDA's and the compiler's own."""
    _run([*command, "-MMD", "-MF", f"{output}.d", "-o", str(output)])
    files = Path(f"{output}.d").read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return [name for name in files if not name.endswith(".gch")]


@contextmanager
def _unless_built(target: Path, command: list[str]):
    """Alone among all processes: None when `target` was made by this command of the same files, else the list that
    takes the files of which it is made."""
    BUILD.mkdir(parents=True, exist_ok=True)
    stamp = BUILD / f"{target.name}.json"
    with open(BUILD / f"{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(stamp.read_text()) if target.exists() and stamp.exists() else None
        if known and all(map(os.path.exists, known["files"])) and known["digest"] == _digest(command, known["files"]):
            yield None
        else:
            files = []
            yield files
            stamp.write_text(json.dumps({"files": files, "digest": _digest(command, files)}))


def _compiler(flags: list[str]) -> list[str]:
    include = ["-isystem", str(cuda_include()), "-I", str(HERE), "-I", str(CSRC / "common"), "-I", str(CSRC)]
    return [CXX, *FLAGS, *flags, *include]


def build(name: str, sources: list[Path], link: list[str], flags: list[str] = ()) -> Path:
    """One shared object of C++ sources; -fsanitize is left out of the link, the runtime holds its handlers."""
    target, compiler = BUILD / name, _compiler(flags)
    with _unless_built(target, [*compiler, *link]) as files:
        if files is None:
            return target
        objects = []
        for source in sources:
            objects.append(BUILD / f"{name}.{source.stem}.o")
            files += _compile([*compiler, "-x", "c++", "-c", str(source)], objects[-1])
        _run([CXX, "-shared", "-Wl,-z,defs,-Bsymbolic", *map(str, objects), *link, "-o", str(target)])
    return target


def _kernel_flags(arch: int) -> list[str]:
    without = ["-fno-exceptions", "-fno-asynchronous-unwind-tables"]  # nothing throws or unwinds through a kernel
    return [CHECKS, *without, "-DCAMOX_CUDA_EMULATOR=1", f"-DCAMOX_EMULATED_ARCH={arch}"]


@cache
def precompiled_header(arch: int) -> Path:
    """cuda_emulator.h with CUDA's headers for the kernels' flags: each source would parse them for half a second."""
    header, compiler = BUILD / f"cuda_emulator_sm{arch // 10}.h", _compiler(_kernel_flags(arch))
    target = header.with_name(f"{header.name}.gch")
    with _unless_built(target, compiler) as files:
        if files is not None:
            files += _compile([*compiler, "-x", "c++-header", str(HERE / "cuda_emulator.h")], target)
    return header


@cache
def runtime_path() -> Path:
    # Its loops run at every rendezvous of every kernel; the pattern in variables that are not set is for kernels alone.
    flags = ["-O2", "-ftrivial-auto-var-init=uninitialized"]
    return build("libcamox_cuda_emulator.so", [HERE / "cuda_emulator.cpp"], ["-lpthread", "-ldl"], flags)


def sources() -> list[Path]:
    """The CUDA sources of all ops."""
    return sorted(CSRC.glob("*/*_cuda.cu"))


@cache
def all_cases() -> dict:
    """Op family -> the module tests/cuda/<family>_cases.py, which calls its launchers. IMAGE_OPS need none."""
    found = sorted(HERE.parent.glob("*_cases.py"))
    of_one_image = importlib.import_module("images").image_cases
    modules = {path.stem.removesuffix("_cases"): importlib.import_module(path.stem) for path in found}
    return {**modules, **{name: of_one_image(name) for name in IMAGE_OPS}}


def doubled(*tensors):
    return (tensor.double() for tensor in tensors)


refused: set[Path] = set()  # sources that the compiler refused in this process


@cache
def object_path(source: Path, arch: int, define: str = "") -> Path:
    """The shared object of one .cu: its __shared__ variables are the only thread_local ones in it.

    What the compiler says of a source is raised once: the tests that need the source after that are skipped."""
    if source in refused:
        pytest.skip(f"{source.name} does not compile: the first test of it that failed has the compiler's message")
    name = "_".join(filter(None, (source.stem, define.lower(), f"sm{arch // 10}")))
    runtime = runtime_path()
    try:
        # g++ passes over a precompiled header of other flags: then this one is an error, no plain header has its name.
        header = ["-include", str(precompiled_header(arch)), "-Winvalid-pch", "-fpch-deps"]
        flags = [*_kernel_flags(arch), *header, *([f"-D{define}"] if define else [])]
        return build(f"{name}.so", [source], [str(runtime), f"-Wl,-rpath,{runtime.parent}"], flags)
    except RuntimeError:
        refused.add(source)
        raise


@cache
def _runtime() -> ctypes.CDLL:
    # For itself alone, not RTLD_GLOBAL: whoever else in this process asks for cudaGetDevice must not find the one here.
    library = ctypes.CDLL(str(runtime_path()))
    for name, result, arguments in (
        ("configure", None, [ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_double, ctypes.c_int64]),
        ("capture", None, [ctypes.c_int]),
        ("without_barrier", None, [ctypes.c_char_p, ctypes.c_int]),
        ("take_error", ctypes.c_char_p, []),
        ("take_runs", ctypes.c_char_p, []),
        (
            "static_shared",
            None,
            [ctypes.c_char_p, *[ctypes.c_size_t] * 2, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t],
        ),
        ("alloc", ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]),
        ("check_slack", ctypes.c_char_p, []),
        ("free", None, [ctypes.c_void_p]),
    ):
        function = getattr(library, f"camox_emulator_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@cache
def load(source: Path, arch: int, define: str = "") -> ctypes.CDLL:
    runtime, path = _runtime(), object_path(source, arch, define)
    for address, variables in shared_variables(path).items():
        flat = [number for variable in variables for number in variable]
        places = (ctypes.c_size_t * len(flat))(*flat)
        size = static_shared(path)[address]
        runtime.camox_emulator_static_shared(str(path).encode(), address, size, places, len(variables))
    # Its own runtime first: a torch with CUDA has loaded the real one, for all, under the same names.
    return ctypes.CDLL(str(path), mode=os.RTLD_DEEPBIND)


# ---- kernels: which exist, which were run ----
runs: Counter = Counter()  # (object, kernel, dtype, layout, direction, order) -> launches


@lru_cache
def _symbols(path: Path) -> dict[int, str]:
    """Address -> plain name of every function in the object, template instantiations and local ones too."""
    text = subprocess.run(["nm", "-C", "--defined-only", str(path)], check=True, capture_output=True, text=True).stdout
    found = {}
    for line in text.splitlines():
        address, kind, name = line.split(" ", 2)
        if kind in "tTwW":
            found[int(address, 16)] = name
    return found


@lru_cache
def kernel_names(path: Path) -> frozenset[str]:
    """Names that the object's sources declare __global__."""
    files = json.loads((BUILD / f"{path.name}.json").read_text())["files"]
    names = set()
    for name in files:
        if not Path(name).resolve().is_relative_to(ROOT):
            continue
        text = re.sub(r"__launch_bounds__\([^)]*\)", "", Path(name).read_text())
        names |= set(re.findall(r"__global__\s+[\w\s]*?\b(\w+)\s*\(", text))
    return frozenset(names)


def kernels(path: Path) -> set[str]:
    """Every __global__ function compiled into the object, as nm prints it."""
    wanted = kernel_names(path)
    found = set()
    for name in _symbols(path).values():
        match = re.search(r"(\w+)(?:<.*>)?\(", name)
        if match and match.group(1) in wanted and ")::" not in name:  # not what is local to a kernel
            found.add(name)
    return found


def kernel_addresses(path: Path) -> dict[int, str]:
    wanted = kernels(path)
    return {address: name for address, name in _symbols(path).items() if name in wanted}


@lru_cache
def shared_variables(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Address of each kernel in the object -> (offset in the object's TLS block, bytes) of its __shared__ variables.

    What a function has that kernels call counts for all of them: the symbols do not say which do."""
    command = ["readelf", "--symbols", "--wide", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    mangled, variables = {}, {}
    for fields in map(str.split, text.splitlines()):
        if len(fields) == 8 and fields[3] in ("FUNC", "TLS") and fields[6] != "UND":
            if fields[3] == "FUNC":
                mangled[int(fields[1], 16)] = fields[7]
            else:
                variables[fields[7]] = int(fields[1], 16), int(fields[2], 0)
    inside = {address: f"_ZZ{mangled[address][2:]}E" for address in kernel_addresses(path)}
    of_all = [place for name, place in variables.items() if not name.startswith(tuple(inside.values()))]
    return {
        at: of_all + [place for name, place in variables.items() if name.startswith(start)]
        for at, start in inside.items()
    }


def static_shared(path: Path) -> dict[int, int]:
    """Address of each kernel -> bytes of its __shared__ variables, in whole 16 as dynamic memory behind them needs."""
    sizes = {at: sum(size for _, size in variables) for at, variables in shared_variables(path).items()}
    return {at: (size + 15) // 16 * 16 for at, size in sizes.items()}


def short_name(kernel: str) -> str:
    """A kernel's name with its template arguments, as csrc/cuda_budget.json has it."""
    return re.sub(r"^void |\(.*", "", kernel)


@cache
def most_threads() -> dict[str, int]:
    """The threads that each kernel's block may have, as nvcc compiled its __launch_bounds__: here the qualifier says
    nothing, on a GPU a launch of more fails."""
    table = json.loads((CSRC / "cuda_budget.json").read_text())
    return {name: line["threads"] for name, line in table.items()}


def never_run(path: Path) -> set[str]:
    return kernels(path) - {key[1] for key in runs if key[0] == path.name}


def report(stem: str) -> str:
    """One line per object of a source: kernels, launches and combinations that were run."""
    lines = []
    for name in sorted({key[0] for key in runs if key[0].startswith(f"{stem}_sm")}):
        mine = {key: count for key, count in runs.items() if key[0] == name}
        dtypes, layouts, directions, orders = (sorted({key[i] for key in mine}) for i in (2, 3, 4, 5))
        lines.append(
            f"CUDA emulator, {name}: {sum(mine.values())} launches of {len({key[1] for key in mine})} kernels, "
            f"{len(mine)} combinations of kernel x {len(dtypes)} dtypes ({', '.join(dtypes)}) x {len(layouts)} layouts "
            f"({', '.join(layouts)}) x {len(directions)} directions x {len(orders)} orders ({', '.join(orders)})"
        )
    return "\n".join(lines)


def call(
    function,
    *arguments,
    dtype="",
    layout="",
    direction="",
    order="forward",
    threads=0,
    timeout=60.0,
    grid_cap=2**31 - 1,
):
    """Calls a launcher with blocks and threads in the given order; raises KernelError on anything wrong."""
    runtime = _runtime()
    runtime.camox_emulator_configure(*ORDERS[order], threads, timeout, grid_cap)
    runtime.camox_emulator_take_error()
    status = function(*arguments)
    for line in runtime.camox_emulator_take_runs().decode().splitlines():
        path, offset, _, threads, name = line.split("\t")
        path = Path(path)
        kernel = _symbols(BUILD / path.name).get(int(offset), name)
        runs[path.name, kernel, dtype, layout, direction, order] += 1
        if int(threads) > most_threads().get(short_name(kernel), 1024):
            raise KernelError(f"kernel {kernel}: a block of {threads} threads is more than its launch bounds allow")
    message = runtime.camox_emulator_take_error().decode() or runtime.camox_emulator_check_slack().decode()
    if message or status:
        raise KernelError(message or f"the launcher returned {status}")


def barriers(*sources: Path, call: str = "__syncthreads();") -> list[tuple[Path, int]]:
    """(file, line) of every such call in these files, but for those of a broken build."""
    found = []
    for path in sources:
        text = re.sub(r"#ifdef CAMOX_BREAK.*?#endif", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.S)
        found += [(path, i) for i, line in enumerate(text.splitlines(), 1) if call in line]
    return found


@contextmanager
def captured():
    """Streams say that they are being captured into a graph."""
    _runtime().camox_emulator_capture(True)
    try:
        yield
    finally:
        _runtime().camox_emulator_capture(False)


@contextmanager
def without_barrier(path: Path, line: int):
    """The barrier of this line, a header's in all kernels that include it, holds nobody up."""
    _runtime().camox_emulator_without_barrier(path.name.encode(), line)
    try:
        yield
    finally:
        _runtime().camox_emulator_without_barrier(b"", 0)


# ---- guarded tensors ----
class Guarded:
    """Tensors between guard pages: flush at "end" an access past the end faults, flush at "start" one before the start.

    Every byte that a tensor does not cover is poisoned with NaN and must stay so.
    """

    def __init__(self, flush: str = "end"):
        self.flush = flush
        self._buffers: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def empty_strided(self, size, stride, dtype, name="out") -> torch.Tensor:
        """A tensor of NaN with these sizes and strides."""
        span = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        nbytes = span * dtype.itemsize
        address = _runtime().camox_emulator_alloc(nbytes, self.flush == "start", name.encode())
        if span == 0:
            flat = torch.empty(0, dtype=dtype)
        else:
            flat = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)
        tensor = flat.as_strided(size, stride)
        self._buffers.append((address, flat, tensor))
        return tensor

    def empty_like(self, tensor, dtype=None, name="out") -> torch.Tensor:
        return self.empty_strided(tensor.shape, tensor.stride(), dtype or tensor.dtype, name)

    def copy(self, tensor, name="in") -> torch.Tensor:
        """The same values with the same strides; where strides of 0 make elements one, it is one here too."""
        target = self.empty_like(tensor, name=name)
        index = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
        target[index].copy_(tensor[index])
        return target

    def check_gaps(self) -> None:
        """Elements of a buffer that its tensor's strides skip must still be poison."""
        for _, flat, tensor in self._buffers:
            if flat.numel() == tensor.numel():
                continue
            skipped = torch.ones(flat.numel(), dtype=torch.bool)
            skipped.as_strided(tensor.size(), tensor.stride()).fill_(False)
            if not (flat.view(torch.uint8).view(flat.numel(), -1)[skipped] == 0xFF).all():
                raise KernelError("written between the strides of a tensor")

    def close(self) -> None:
        for address, _, _ in self._buffers:
            _runtime().camox_emulator_free(address)
        self._buffers.clear()


@contextmanager
def guarded(flush: str = "end"):
    memory = Guarded(flush)
    try:
        yield memory
        memory.check_gaps()
    finally:
        memory.close()


# ---- params structs, read from the op's own header ----
_BASIC = {
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
}


@cache
def header(*names: str) -> tuple[dict[str, type], dict[str, int]]:
    """The structs and enum constants of C headers of csrc (types.h first); the compiler confirms every offset."""
    paths = [CSRC / name for name in names]
    text = "\n".join(re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S) for path in paths)
    constants: dict[str, int] = {}
    types: dict[str, type] = dict(_BASIC)
    for body, alias in re.findall(r"enum\s*\w*\s*\{([^}]*)\}\s*(\w*)\s*;", text):
        value = -1
        for item in filter(str.strip, body.split(",")):
            name, _, given = item.partition("=")
            value = int(given, 0) if given.strip() else value + 1
            constants[name.strip()] = value
        if alias:
            types[alias] = ctypes.c_int
    structs = {}
    for body, alias in re.findall(r"typedef\s+struct\s*\w*\s*\{([^}]*)\}\s*(\w+)\s*;", text):
        fields = []
        for statement in filter(str.strip, body.split(";")):
            kind, declarators = re.fullmatch(
                r"\s*(?:const\s+)?(?:struct\s+|enum\s+)?(\w+)\b(.*)", statement, flags=re.S
            ).groups()
            for declarator in declarators.split(","):
                star, name, length = re.fullmatch(r"\s*(\*?)\s*(\w+)\s*(?:\[(\w+)\])?\s*", declarator).groups()
                field = ctypes.c_void_p if star else types[kind]
                if length:
                    field = field * (int(length) if length.isdigit() else constants[length])
                fields.append((name, field))
        types[alias] = structs[alias] = type(alias, (ctypes.Structure,), {"_fields_": fields})
    _confirm(paths, structs)
    return structs, constants


def _confirm(paths, structs) -> None:
    lines = ["#include <stddef.h>", *(f'#include "{path}"' for path in paths)]
    for alias, struct in structs.items():
        lines.append(f"static_assert(sizeof({alias}) == {ctypes.sizeof(struct)});")
        for name, _ in struct._fields_:
            lines.append(f"static_assert(offsetof({alias}, {name}) == {getattr(struct, name).offset});")
    command = [CXX, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the layout read from {paths} is not the compiler's:\n{result.stderr}")
