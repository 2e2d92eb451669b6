"""csrc/common/simd_math.h, compiled for every instruction set of this machine and called through ctypes."""

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import camox_ops as cx

CSRC = Path(__file__).resolve().parent.parent / "csrc"
COMPILER = shutil.which("gcc") or shutil.which("cc")
FUNCTIONS = ("exp", "erf", "tanh", "sin", "cos")
ACTIVATIONS = ("gelu", "gelu_grad", "sigmoid", "silu", "silu_grad", "gelu_tanh", "gelu_tanh_grad", "rsqrt")
FLAGS = ["-O3", "-std=gnu17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
ISA_FLAGS = {
    "portable": [],
    "avx2": ["-DCAMOX_SIMD_AVX2", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-DCAMOX_SIMD_AVX512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
SOURCE = """
#include "{csrc}/common/simd.h"
#include "{csrc}/common/simd_math.h"
#define DEFINE(name)                                                                              \\
  void test_##name(const float *x, float *y, long n) {{                                           \\
    for (long i = 0; i < n; i += VF32_LANES)                                                      \\
      vf32_store_n(y + i, vf32_##name(vf32_load_n(x + i, n - i)), n - i);                         \\
  }}
{functions}
void test_fma(const float *x, float *y, long n) {{ /* x: n/3 triples a, b, c */
  for (long i = 0; i < n / 3; i += VF32_LANES)
    vf32_store_n(y + i, vf32_fma(vf32_load_n(x + i, n / 3 - i), vf32_load_n(x + n / 3 + i, n / 3 - i),
                                 vf32_load_n(x + n / 3 * 2 + i, n / 3 - i)), n / 3 - i);
}}
void test_load_f16(const uint16_t *x, float *y, long n) {{
  for (long i = 0; i < n; i += VF32_LANES) vf32_store_n(y + i, vload_n_f16(x + i, n - i), n - i);
}}
void test_store_f16(const float *x, uint16_t *y, long n) {{
  for (long i = 0; i < n; i += VF32_LANES) vstore_n_f16(y + i, vf32_load_n(x + i, n - i), n - i);
}}
"""
pytestmark = pytest.mark.skipif(
    not CSRC.is_dir() or COMPILER is None,
    reason="needs the sources and a C compiler: they are tested where they are built",
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """{instruction set: its functions}"""
    folder = tmp_path_factory.mktemp("simd_math")
    source = folder / "simd_math.c"
    defined = "".join(f"DEFINE({name})\n" for name in FUNCTIONS + ACTIVATIONS)
    source.write_text(SOURCE.format(csrc=CSRC, functions=defined))
    found = {}
    for isa in cx.supported_isas():
        target = folder / f"{isa}.so"
        flags = [*FLAGS, *ISA_FLAGS[isa], f"-DCAMOX_ISA={isa}", "-DCAMOX_DTYPE=f32"]
        subprocess.run([COMPILER, *flags, str(source), "-o", str(target), "-lm"], check=True)
        found[isa] = ctypes.CDLL(str(target))
    return found


def call(library, name, x, dtype=np.float32):
    y = np.empty(x.shape, dtype)
    function = getattr(library, f"test_{name}")
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(x.size))
    return y


def numbers():
    """Both signs, every exponent with random mantissas, subnormals, zeros, infinities and NaN; denser where functions
    change."""
    generator = np.random.default_rng(0)
    mantissas = generator.integers(0, 1 << 23, (256, 700), dtype=np.uint32)
    mantissas[:, :2] = 0, (1 << 23) - 1
    bits = ((np.arange(256, dtype=np.uint32)[:, None] << 23) | mantissas).ravel()
    every = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    dense = [generator.uniform(-reach, reach, 100_000) for reach in (2, 6.5, 110, 1e4, 3e6)]
    return np.concatenate([every, *(values.astype(np.float32) for values in dense)])


X = numbers()
DOUBLE = torch.from_numpy(X).double()


def truth(name):
    """In float64, from formulas that cancel nowhere."""
    x = DOUBLE
    clamped = x.clamp(-60, 60)
    tail = torch.special.erfc(clamped.abs() / math.sqrt(2)) / 2
    bell = torch.exp(-clamped * clamped / 2) / math.sqrt(2 * math.pi)
    cubic = math.sqrt(8 / math.pi) * (clamped + 0.044715 * clamped**3)
    slope = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * clamped**2)
    sigmoid, falling = torch.sigmoid, lambda u: torch.sigmoid(u) * torch.sigmoid(-u)
    formulas = {
        "gelu": lambda: x.clamp_min(0) - clamped.abs() * tail,
        "gelu_grad": lambda: torch.where(x > 0, 1 - tail + clamped * bell, tail + clamped * bell) + 0 * clamped,
        "sigmoid": lambda: sigmoid(x),
        "silu": lambda: x * sigmoid(x),
        "silu_grad": lambda: sigmoid(x) + x.clamp(-700, 700) * falling(x),
        "gelu_tanh": lambda: x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
        "gelu_tanh_grad": lambda: sigmoid(cubic) + clamped * falling(cubic) * slope,
        "rsqrt": lambda: x.rsqrt(),
    }
    return formulas[name]() if name in formulas else getattr(torch, name)(x)


def ulps(ours, true):
    """Errors in units of the last place of the float32 nearest to the truth, where both are finite."""
    nearest = true.float()
    finite = nearest.isfinite()
    unit = torch.from_numpy(np.spacing(nearest[finite].abs().numpy())).double()
    return (ours.double()[finite] - true[finite]).abs() / unit


def same_elsewhere(ours, true):
    """Infinities and NaN where float32 has them."""
    nearest = true.float()
    elsewhere = ~nearest.isfinite()
    return torch.equal(ours[elsewhere].nan_to_num(nan=0.5), nearest[elsewhere].nan_to_num(nan=0.5))


@pytest.mark.parametrize(("name", "limit"), [("exp", 1.0), ("erf", 1.82), ("tanh", 1.4), ("sin", 1.6), ("cos", 1.6)])
def test_largest_error(libraries, name, limit):
    """Over every exponent, subnormal numbers and results among them. Of all float32 numbers erf is off by 1.811 at
    most."""
    ours, true = torch.from_numpy(call(libraries["portable"], name, X)), truth(name)
    assert ulps(ours, true).max() <= limit
    assert same_elsewhere(ours, true)


def test_reciprocal_root(libraries):
    ours, true = torch.from_numpy(call(libraries["portable"], "rsqrt", X)), truth("rsqrt")
    normal = DOUBLE.ge(torch.finfo(torch.float32).smallest_normal) & DOUBLE.isfinite()
    assert ulps(ours[normal], true[normal]).max() <= 0.51


@pytest.mark.parametrize("name", ["gelu", "gelu_grad"])
def test_gelu(libraries, name):
    """Against x or 1: the largest value is what errors are measured by; and gelu is exact at 0 and from -6.25 down."""
    ours, true = torch.from_numpy(call(libraries["portable"], name, X)), truth(name)
    finite = DOUBLE.isfinite()
    size = DOUBLE.abs().clamp_max(6.2) if name == "gelu" else torch.ones_like(DOUBLE)
    fit = 3e-8 if name == "gelu" else 6e-8
    allowed = 2**-23 * true.abs() + fit * size + torch.finfo(torch.float32).smallest_normal * 2**-23
    assert ((ours.double() - true).abs() <= allowed)[finite].all()
    assert same_elsewhere(ours, true)
    assert (ours[DOUBLE < -6.25] == 0).all()
    assert (ours[DOUBLE == 0] == (0 if name == "gelu" else 0.5)).all()


@pytest.mark.parametrize("name", ["sigmoid", "silu", "silu_grad", "gelu_tanh", "gelu_tanh_grad"])
def test_sigmoids(libraries, name):
    ours, true = torch.from_numpy(call(libraries["portable"], name, X)), truth(name)
    finite = true.float().isfinite() & (DOUBLE.abs() < 1e10)
    size = true.abs().clamp_min(1) if "grad" in name or name == "sigmoid" else DOUBLE.abs()
    assert ((ours.double() - true).abs() <= 4e-7 * size + 1e-45)[finite].all()
    assert torch.equal(ours.isnan()[DOUBLE.isnan()], DOUBLE.isnan()[DOUBLE.isnan()])


@pytest.mark.parametrize("name", FUNCTIONS + ACTIVATIONS)
def test_isa_agree(libraries, name):
    results = {isa: call(library, name, X) for isa, library in libraries.items()}
    nan = np.isnan(results["portable"])
    for isa, result in results.items():
        assert np.array_equal(np.isnan(result), nan), isa
        assert np.array_equal(result[~nan].view(np.uint32), results["portable"][~nan].view(np.uint32)), isa


def test_fma_rounds_once(libraries):
    """a * b + c rounded as the exact sum is, where float64 would round twice: c far below a * b, or close to -a * b."""
    generator = np.random.default_rng(1)
    n = 50_000
    a, b = (generator.uniform(1, 2, n).astype(np.float32) for _ in range(2))
    c = (a * b * -np.float32(1) + generator.choice([0, 1e-8, 1e-3, 3], n) * generator.normal(size=n)).astype(np.float32)
    c[::5] = 2.0 ** generator.integers(-60, -20, n // 5)
    a[:40], b[:40], c[:40] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-70 * (-1.0) ** np.arange(40)
    product = a.astype(np.float64) * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    toward = np.where(error > 0, np.inf, -np.inf)
    # the float64 sum with its error as a sticky bit rounds to float32 as the exact sum does
    odd = total.view(np.int64) & 1 == 1
    sticky = np.where((error == 0) | odd, total, np.nextafter(total, toward))
    expected = sticky.astype(np.float32)
    for isa, library in libraries.items():
        assert np.array_equal(call(library, "fma", np.concatenate([a, b, c]))[:n], expected), isa


def test_binary_needs_no_newer_glibc():
    """torch's own wheels run on GLIBC_2.28; a vector function of libm or a newer exp would raise that."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    for binary in sorted(Path(cx.__file__).parent.glob("*.so")):
        table = subprocess.run(["objdump", "-T", str(binary)], capture_output=True, text=True, check=True).stdout
        versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+(?:\.\d+)+)", table)}
        assert versions, binary
        assert max(versions) <= (2, 28), f"{binary.name} needs GLIBC_{max(versions)}"
        assert "_ZGV" not in table


def test_every_float16(libraries):
    """Read to the bits of numpy's conversion, those of NaN too; written from there and from between two of them to the
    nearest, of two to the even one."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    true = halves.view(np.float16).astype(np.float32)
    quiet = np.where(np.isnan(true), (true.view(np.uint32) | 0x400000).view(np.float32), true)
    finite = np.sort(true[np.isfinite(true)])
    between = (finite[1:] + finite[:-1]) / 2
    beyond = np.array([65519.996, 65520, 1e30], np.float32)
    beside = [np.nextafter(between, np.float32(sign * np.inf)) for sign in (-1, 1)]
    written = np.concatenate([true, between, *beside, beyond, -beyond, X])
    with np.errstate(over="ignore"):
        rounded = written.astype(np.float16)
    nan = np.isnan(written)
    for isa, library in libraries.items():
        assert np.array_equal(call(library, "load_f16", halves).view(np.uint32), quiet.view(np.uint32)), isa
        ours = call(library, "store_f16", written, np.uint16)
        assert np.array_equal(ours[~nan], rounded[~nan].view(np.uint16)), isa
        assert np.isnan(ours[nan].view(np.float16)).all(), isa
