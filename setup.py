"""Builds camox_ops._C: C kernels once per instruction set, the CPython module in C, torch bindings in C++.

setuptools compiles an extension with one set of flags; here every source gets the flags of its kind, and is compiled again
only when it or a header is newer than its object. CAMOX_BREAK=<op> builds kernels that are wrong by 1e-3 (see CONTRIBUTING.md).
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths
except ImportError:
    sys.exit("camox_ops is built beside your torch: install torch>=2.10, then `pip install --no-build-isolation .`")

ROOT = Path(__file__).parent.resolve()
CSRC = Path("csrc")
BREAK = os.environ.get("CAMOX_BREAK", "")
OPS = sorted(path.parent.name for path in CSRC.glob("*/*_bind.cpp"))
X86 = platform.machine().lower() in ("x86_64", "amd64")
ISA_FLAGS = {"portable": []}
if X86:
    ISA_FLAGS["avx2"] = ["-DCAMOX_SIMD_AVX2", "-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = [
        "-DCAMOX_SIMD_AVX512",
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]
if BREAK and BREAK not in OPS:
    sys.exit(f"CAMOX_BREAK must be one of {', '.join(OPS)}, got {BREAK!r}")


def version():
    text = (ROOT / "pyproject.toml").read_text()
    return text.split('\nversion = "', 1)[1].split('"', 1)[0]


COMMON_FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror=format", "-g0"]
if X86:
    COMMON_FLAGS.append("-DCAMOX_HAVE_X86")
if BREAK:
    COMMON_FLAGS.append(f"-DCAMOX_BREAK_{BREAK.upper()}")
# No contraction to FMA: every instruction set gives the same bits where no sum is reordered.
C_FLAGS = [*COMMON_FLAGS, "-std=gnu17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS = [*COMMON_FLAGS, "-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Wno-unused-parameter"]


class BuildExt(build_ext):
    def build_extension(self, ext):
        objects = []
        jobs = []
        headers = max(p.stat().st_mtime for p in CSRC.rglob("*") if p.suffix in (".h", ".inc"))
        headers = max(headers, Path("setup.py").stat().st_mtime)
        temp = Path(self.build_temp) / (f"break-{BREAK}" if BREAK else "plain")
        for source, flavour, flags in compilations():
            target = temp / flavour / Path(source).with_suffix(".o")
            objects.append(str(target))
            if self.force or not target.exists() or target.stat().st_mtime < max(headers, Path(source).stat().st_mtime):
                target.parent.mkdir(parents=True, exist_ok=True)
                jobs.append((source, target, flags))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for _ in pool.map(self.compile_one, jobs):
                pass
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["torch_cpu"],
            library_dirs=library_paths(),
            extra_postargs=["-Wl,--as-needed", "-lm"],
            target_lang="c++",
        )

    def compile_one(self, job):
        source, target, flags = job
        compiler = self.compiler.compiler_so_cxx if source.endswith(".cpp") else self.compiler.compiler_so
        includes = [f"-I{path}" for path in self.include_dirs]
        if source.endswith(".cpp"):
            includes += [f"-isystem{path}" for path in include_paths()]
        command = [compiler[0], *flags, *includes, "-c", source, "-o", str(target)]
        self.spawn(command)


def compilations():
    """(source, folder of its object, flags) of everything in the extension."""
    module_flags = [
        "-DPy_LIMITED_API=0x030A0000",
        f'-DCAMOX_VERSION="{version()}"',
        f'-DCAMOX_BUILD_TORCH="{torch.__version__}"',
        f'-DCAMOX_BREAK_NAME="{BREAK}"',
    ]
    yield str(CSRC / "module.c"), "c", [*C_FLAGS, *module_flags]
    for source in sorted([*CSRC.glob("common/*.c"), *(CSRC / op / f"{op}.c" for op in OPS)]):
        yield str(source), "c", C_FLAGS
    for source in sorted(CSRC.glob("*/*_cpu.c")):
        for isa, flags in ISA_FLAGS.items():
            yield str(source), isa, [*C_FLAGS, *flags, f"-DCAMOX_ISA={isa}"]
    for source in sorted([CSRC / "library.cpp", *CSRC.glob("*/*_bind.cpp")]):
        yield str(source), "cxx", CXX_FLAGS


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
