"""Builds camox_ops._C: C kernels once per instruction set, the CPython module in C, torch bindings in C++; beside it
libcamox_ops_tune.so with the replacements of PyTorch's own kernels, and, where nvcc is found, libcamox_ops_cuda.so with
the CUDA kernels.

setuptools compiles an extension with one set of flags; here every source gets the flags of its kind, and is compiled
again only when it or a header that it includes is newer than its object. From the environment:
  CAMOX_BREAK=<op>      kernels that are wrong by 1e-3 (see CONTRIBUTING.md)
  CAMOX_NVCC=<path>     the CUDA compiler; "none" for no CUDA part; default: nvcc on PATH or in CUDA_HOME
  CAMOX_CUDA_ARCHS      "all" (default: those of ALL_CUDA_ARCHS that nvcc knows), or a list such as sm_80,sm_90
  CAMOX_QUICK_BUILD=1   for work on the sources, `make build`: kernels that this machine cannot run, those of an
                        instruction set that its CPU lacks and CUDA's without a GPU, are compiled without optimisation
"""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools

ROOT = Path(__file__).parent.resolve()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
OLDEST_SETUPTOOLS = PYPROJECT.split('"setuptools>=', 1)[1].split('"', 1)[0]
if int(setuptools.__version__.split(".", 1)[0]) < int(OLDEST_SETUPTOOLS):
    sys.exit(
        f"camox_ops is built with setuptools {OLDEST_SETUPTOOLS} or newer, this Python has {setuptools.__version__}: "
        f"pip install 'setuptools>={OLDEST_SETUPTOOLS}'"
    )

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

try:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths
except ImportError:
    sys.exit("camox_ops is built beside your torch: install torch>=2.10, then `pip install --no-build-isolation .`")

CSRC = Path("csrc")
# A shared object of its own, which only camox_ops.train.tune_cpu opens.
TUNE, TUNE_LIBRARY = CSRC / "tune", "libcamox_ops_tune.so"
SGEMM = (CSRC / "gemm" / "sgemm.c", CSRC / "gemm" / "sgemm_cpu.c")
# What that library calls in the module: these export their functions, all others of the module are hidden.
SHARED = (SGEMM[0], CSRC / "box" / "box.c", CSRC / "common" / "isa.c", CSRC / "common" / "status.c")
BREAK = os.environ.get("CAMOX_BREAK", "")
QUICK = os.environ.get("CAMOX_QUICK_BUILD", "0")
OPS = sorted({path.parent.name for path in CSRC.glob("*/*_bind.cpp")})
X86 = platform.machine().lower() in ("x86_64", "amd64")
# On x86-64 they serve CPUs without AVX2, and float64: -O3 takes a quarter longer to compile for the same speed.
ISA_FLAGS = {"portable": ["-O2", "-fpeel-loops"] if X86 else []}
if X86:
    ISA_FLAGS["avx2"] = ["-DCAMOX_SIMD_AVX2", "-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = [
        "-DCAMOX_SIMD_AVX512",
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]
CUDA_OPS = [op for op in OPS if (CSRC / op / f"{op}_cuda.cu").exists()]
# sm_89 runs the machine code of sm_86, as all minor versions do that of earlier ones: a seventh part of the wheel.
ALL_CUDA_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# What moved into libc.so.6 with glibc 2.34, of that which CUDA's static runtime and the headers of torch 2.14 (dlsym)
# call: library, version, functions of x86-64.
OLD_GLIBC = {
    "libdl.so.2": {"GLIBC_2.2.5": "dlclose dlerror dlopen dlsym dlvsym", "GLIBC_2.3.4": "dlmopen"},
    "libpthread.so.0": {
        "GLIBC_2.2.5": "pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join "
        "pthread_key_create pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy "
        "pthread_mutexattr_init pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once "
        "pthread_rwlock_destroy pthread_rwlock_init pthread_rwlock_rdlock pthread_rwlock_timedrdlock "
        "pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock pthread_rwlock_trywrlock pthread_rwlock_unlock "
        "pthread_rwlock_wrlock pthread_rwlockattr_destroy pthread_rwlockattr_init pthread_rwlockattr_setpshared "
        "pthread_setspecific pthread_spin_destroy pthread_spin_init pthread_spin_lock pthread_spin_trylock "
        "pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait sem_trywait sem_wait",
    },
    "librt.so.1": {"GLIBC_2.2.5": "shm_open shm_unlink"},
}
# /proc/cpuinfo's word for a CPU that has an instruction set; what NVIDIA's driver brings (in WSL the second).
CPU_WORDS = {"avx2": "avx2", "avx512": "avx512f"}
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
if QUICK not in ("0", "1"):
    sys.exit(f"CAMOX_QUICK_BUILD must be 0 or 1, got {QUICK!r}")
if BREAK and BREAK not in (*OPS, TUNE.name):
    sys.exit(f"CAMOX_BREAK must be one of {', '.join((*OPS, TUNE.name))}, got {BREAK!r}")


def version():
    return PYPROJECT.split('\nversion = "', 1)[1].split('"', 1)[0]


def find_nvcc():
    chosen = os.environ.get("CAMOX_NVCC")
    if chosen == "none":
        return None
    if chosen:
        if shutil.which(chosen) is None:
            sys.exit(f"CAMOX_NVCC is {chosen!r}, which is not a program")
        return chosen
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))


def lacks(isa):
    """Whether this machine's CPU has no such instruction set."""
    return isa in CPU_WORDS and CPU_WORDS[isa] not in Path("/proc/cpuinfo").read_text().split()


def where_nvcc_can(flag):
    """[flag], or [] with an nvcc that came before it."""
    known = NVCC and flag.split("=")[0] in subprocess.run([NVCC, "--help"], capture_output=True, text=True).stdout
    return [flag] if known else []


def compression():
    """For size: by nvcc's default a wheel of all architectures would grow past its limit. A build for the GPU at hand
    is done sooner without."""
    return [] if len(CUDA_ARCHS) == 1 else where_nvcc_can("--compress-mode=size")


def cuda_optimisation():
    """Flags of a quick build where no GPU will run what it makes; it says so itself (camox_ops/_cuda.py)."""
    if QUICK == "0" or any(Path(driver).exists() for driver in GPU_DRIVERS):
        return []
    unoptimised = where_nvcc_can("--Ofast-compile=max")
    return [*unoptimised, "-DCAMOX_CUDA_UNOPTIMISED"] if unoptimised else []


def known_archs():
    """Those that nvcc can compile for: before CUDA 12.8 it knows no sm_100."""
    if NVCC is None:
        return ALL_CUDA_ARCHS
    known = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    return tuple(arch for arch in ALL_CUDA_ARCHS if arch in known)


def ptx_archs():
    """The architecture whose PTX later GPUs compile the kernels from: the newest up to sm_90, because sm_110 cannot use
    that of sm_120. None of sm_75: the GPU decides which kernels are launched, and newer ones want tensor cores."""
    numbers = sorted(int(arch[3:]) for arch in CUDA_ARCHS if arch != "sm_75")
    common = [number for number in numbers if number <= 90] or numbers[:1]
    return [f"compute_{number}" for number in common[-1:]]


def cuda_archs():
    chosen = os.environ.get("CAMOX_CUDA_ARCHS", "all")
    archs = known_archs() if chosen == "all" else tuple(chosen.split(","))
    unknown = [arch for arch in archs if arch not in ALL_CUDA_ARCHS]
    if unknown:
        sys.exit(f"CAMOX_CUDA_ARCHS must be 'all' or some of {', '.join(ALL_CUDA_ARCHS)}, got {chosen!r}")
    return archs


COMMON_FLAGS = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror=format", "-g0"]
if X86:
    COMMON_FLAGS.append("-DCAMOX_HAVE_X86")
# No contraction to FMA: every instruction set gives the same bits where no sum is reordered.
C_FLAGS = [
    "-O3",
    *COMMON_FLAGS,
    "-Werror=implicit-function-declaration",
    "-std=gnu17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
TORCH_INCLUDES = [f"-isystem{path}" for path in include_paths()]
TORCH_HEADERS = ("accelerator", "library", "ops", "tensor")
# Bindings check and hand over: -O2 takes half as long again to compile for the same time of a call.
CXX_FLAGS = ["-O1", *COMMON_FLAGS, "-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Wno-unused-parameter"]


NVCC = find_nvcc()
CUDA_ARCHS = cuda_archs()
CUDA_PTX = ptx_archs()
CUDA_CODE = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in CUDA_ARCHS]
CUDA_CODE += [f"-gencode=arch={ptx},code={ptx}" for ptx in CUDA_PTX]
CUDA_OPTIMISATION = cuda_optimisation()
NVCC_FLAGS = [
    # -O is of the host's code alone, which launches.
    *("-O1", "-std=c++17", "-Werror=all-warnings", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", *CUDA_CODE),
    *compression(),
    *CUDA_OPTIMISATION,
    f'-DCAMOX_CUDA_ARCHS="{",".join([*CUDA_ARCHS, *CUDA_PTX])}"',
]


class BuildExt(build_ext):
    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        parts = [list(compilations()), list(tune_compilations()), list(cuda_compilations()) if NVCC else []]
        module, tune, cuda = self.compile_all(parts)
        old_glibc = self.old_glibc()
        # The module, which is loaded before.
        beside = [f"-L{library.parent}", f"-l:{library.name}", "-Wl,-rpath,$ORIGIN"]
        for path, objects, others in ((library, module, []), (library.with_name(TUNE_LIBRARY), tune, beside)):
            self.compiler.link_shared_object(
                objects,
                str(path),
                libraries=["torch_cpu"],
                library_dirs=library_paths(),
                extra_postargs=["-Wl,--as-needed", *others, *old_glibc, "-lm"],
                target_lang="c++",
            )
        if NVCC is None:
            print("camox_ops: no nvcc found, building without the CUDA part")
            return
        link = [NVCC, "-shared", "-cudart=static", *CUDA_CODE, *cuda, *(f"-L{path}" for path in library_paths())]
        path = library.with_name("libcamox_ops_cuda.so")
        self.spawn([*link, "-ltorch_cpu", "-Xlinker=--no-as-needed", *old_glibc, "-o", str(path)])

    def old_glibc(self):
        """Libraries to link with in place of a glibc from 2.34 on: functions where, and of the version that, older ones
        have them, which newer ones have too. Without, the binaries would ask for the glibc of this machine."""
        if not X86:
            return []
        stubs = []
        for soname, versions in OLD_GLIBC.items():
            stub = Path(self.build_temp) / "old_glibc" / f"{soname.split('.')[0]}.so"
            stub.parent.mkdir(parents=True, exist_ok=True)
            names = " ".join(versions.values()).split()
            stub.with_suffix(".c").write_text("".join(f"void {name}(void) {{}}\n" for name in names))
            nodes = (f"{version} {{ {'; '.join(listed.split())}; }};\n" for version, listed in versions.items())
            stub.with_suffix(".map").write_text("".join(nodes))
            flags = ["-shared", "-nostdlib", "-fPIC", "-w", f"-Wl,-soname,{soname}"]
            flags += [f"-Wl,--version-script={stub.with_suffix('.map')}", "-o", str(stub)]
            self.spawn([self.compiler.compiler_so[0], *flags, str(stub.with_suffix(".c"))])
            stubs.append(str(stub))
        return stubs

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "camox_ops"
        shutil.copy2(built / TUNE_LIBRARY, ROOT / "camox_ops" / TUNE_LIBRARY)
        library = built / "libcamox_ops_cuda.so"
        in_place = ROOT / "camox_ops" / library.name
        if library.exists() and NVCC is not None:
            shutil.copy2(library, in_place)
        else:
            in_place.unlink(missing_ok=True)

    def compile_all(self, parts):
        """Objects of each part's (source, folder, flags), compiled where missing or older than a file they were made
        from; all parts at once, the longest first, or the last file of each would leave the other cores idle."""
        parts = [[self.object_of(*compilation) for compilation in part] for part in parts]
        # An object may be in several parts.
        jobs = {job[1]: job for part in parts for job in part if self.force or stale(job[1])}
        bindings = any(Path(source).suffix == ".cpp" for source, _, _ in jobs.values())
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            # The first thing that a thread takes: bindings wait for it.
            self.torch_headers_parsed = pool.submit(self.parse_torch_headers) if bindings else None
            for _ in pool.map(self.compile_one, sorted(jobs.values(), key=cost, reverse=True)):
                pass
        return [[str(target) for _, target, _ in part] for part in parts]

    def object_of(self, source, folder, flags):
        kind = "plain"
        if broken(source):
            kind, flags = f"break-{BREAK}", [*flags, "-DCAMOX_BREAK", f"-DCAMOX_BREAK_{BREAK.upper()}"]
        return source, Path(self.build_temp) / kind / folder / Path(source).with_suffix(".o"), flags

    def torch_headers(self):
        return Path(self.build_temp) / f"torch-{torch.__version__}" / "stable.h"

    def parse_torch_headers(self):
        """Once for all bindings: GCC reads the parsed form of a header in its place."""
        header = self.torch_headers()
        parsed = header.with_name("stable.h.gch")
        if parsed.exists() and parsed.stat().st_mtime > Path("setup.py").stat().st_mtime and not self.force:
            return
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text("".join(f"#include <torch/csrc/stable/{name}.h>\n" for name in TORCH_HEADERS))
        program = self.compiler.compiler_so_cxx[0]
        self.spawn([program, *CXX_FLAGS, *TORCH_INCLUDES, "-x", "c++-header", str(header), "-o", str(parsed)])

    def compile_one(self, job):
        source, target, flags = job
        target.parent.mkdir(parents=True, exist_ok=True)
        suffix = Path(source).suffix
        includes = [f"-I{path}" for path in self.include_dirs]
        if suffix == ".cpp":
            self.torch_headers_parsed.result()
            includes += [*TORCH_INCLUDES, f"-include{self.torch_headers()}"]
        program = {".c": self.compiler.compiler_so[0], ".cpp": self.compiler.compiler_so_cxx[0], ".cu": NVCC}[suffix]
        made_from = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        self.spawn([program, *flags, *includes, *made_from, "-c", source, "-o", str(target)])


def cost(job):
    """What takes longest: kernels of CUDA, by their size, then those of CPUs, then torch's headers."""
    source = Path(job[0])
    kind = "_cpu.c" if source.name.endswith("_cpu.c") else source.suffix
    return (".c", ".cpp", "_cpu.c", ".cu").index(kind), source.stat().st_size


def broken(source):
    """Whether the build's CAMOX_BREAK changes this file's object: one of the op's own, or the module, which says so."""
    called = TUNE.name == BREAK and Path(source) in SGEMM
    return BREAK != "" and (called or Path(source).parent.name in (BREAK, CSRC.name))


def stale(target):
    """Whether an object is missing or older than this file or one that the compiler named as its source or a header."""
    rule = target.with_suffix(".d")
    if not target.exists() or not rule.exists():
        return True
    files = [Path("setup.py"), *map(Path, rule.read_text().split(":", 1)[1].replace("\\\n", " ").split())]
    return not all(f.exists() and f.stat().st_mtime <= target.stat().st_mtime for f in files)


def compilations():
    """(source, folder of its object, flags) of everything in the extension."""
    module_flags = [
        "-DPy_LIMITED_API=0x030A0000",
        f'-DCAMOX_VERSION="{version()}"',
        f'-DCAMOX_BUILD_TORCH="{torch.__version__}"',
        f'-DCAMOX_BREAK_NAME="{BREAK}"',
    ]
    yield str(CSRC / "module.c"), "c", [*C_FLAGS, *module_flags]
    for source in sorted([*CSRC.glob("common/*.c"), *(CSRC / op / f"{op}.c" for op in OPS), SGEMM[0]]):
        yield str(source), "c", [*C_FLAGS, "-fvisibility=default"] if source in SHARED else C_FLAGS
    yield from per_isa(path for path in CSRC.glob("*/*_cpu.c") if path.parent != TUNE)
    for source in sorted([CSRC / "library.cpp", *CSRC.glob("common/*.cpp"), *CSRC.glob("*/*_bind.cpp")]):
        yield str(source), "cxx", CXX_FLAGS


def per_isa(sources):
    for source in sorted(sources):
        for isa, flags in ISA_FLAGS.items():
            flags = [*C_FLAGS, *flags, f"-DCAMOX_ISA={isa}"]
            if QUICK == "1" and lacks(isa):
                yield str(source), f"{isa}-unoptimised", [*flags, "-Og", "-fira-region=one"]
            else:
                yield str(source), isa, flags


def tune_compilations():
    """The same of the replacements of PyTorch's kernels."""
    kernels = {*TUNE.glob("*_cpu.c")}
    for source in (*sorted({*TUNE.glob("*.c")} - kernels), CSRC / "common" / "old_glibc.c"):
        yield str(source), "c", C_FLAGS
    for source, isa, flags in per_isa(kernels):
        # Vectors are written out in these, and -O3 makes a third more code for the same speed.
        yield source, isa, [*flags, "-O2", "-fpeel-loops"]
    for source in (*sorted(TUNE.glob("*.cpp")), CSRC / "common" / "old_libstdcxx.cpp"):
        yield str(source), "cxx", CXX_FLAGS


def cuda_compilations():
    """The same of the CUDA part: each op's kernels, and its checks and bindings again for the CUDA backend."""
    for source in ("check.c", "image_op.c", "status.c", "old_glibc.c"):
        yield str(CSRC / "common" / source), "cuda", C_FLAGS
    yield str(CSRC / "common" / "old_libstdcxx.cpp"), "cuda", CXX_FLAGS
    # Other architectures and flags, other objects: a build for one must not find those of another.
    code = "-".join(("cuda", *CUDA_ARCHS, *(["unoptimised"] if CUDA_OPTIMISATION else [])))
    yield str(CSRC / "common" / "cuda_part.cu"), code, NVCC_FLAGS
    for op in CUDA_OPS:
        yield str(CSRC / op / f"{op}.c"), "cuda", [*C_FLAGS, "-DCAMOX_CUDA_PART"]
        for source in sorted((CSRC / op).glob("*_bind.cpp")):
            if "CAMOX_BACKEND" in source.read_text():  # else its operators run on the CPU alone
                yield str(source), "cuda", [*CXX_FLAGS, "-DCAMOX_CUDA_PART"]
        yield str(CSRC / op / f"{op}_cuda.cu"), code, NVCC_FLAGS


class BdistWheel(bdist_wheel):
    def get_tag(self):
        python, abi, plat = super().get_tag()
        return ("cp310", "abi3", plat) if python.startswith("cp") else (python, abi, plat)


setup(
    ext_modules=[
        Extension("camox_ops._C", sources=[str(source) for source, _, _ in compilations()], py_limited_api=True)
    ],
    cmdclass={"build_ext": BuildExt, "bdist_wheel": BdistWheel},
)
