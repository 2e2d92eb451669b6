"""What this build is and what it runs on."""

from __future__ import annotations

from . import _C


def isa() -> str:
    """The instruction set of the CPU kernels in use: "portable", "avx2" or "avx512".

    The best one that the CPU has, or the one that the environment variable CAMOX_FORCE_ISA names; an unknown or
    unavailable name is an ImportError when camox_ops is imported."""
    return _C.isa()


def supported_isas() -> list[str]:
    """Every instruction set that this build and this CPU have."""
    return _C.supported_isas()


def build_info() -> dict[str, str]:
    """Version, compiler, the torch it was built with, the oldest torch it runs on, and `broken_op` (empty unless it is
    a build for testing the tests, see CONTRIBUTING.md)."""
    return _C.build_info()
