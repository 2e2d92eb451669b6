"""The CUDA part of the package: loaded only where torch has CUDA, and asked before a tensor is handed to it."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("libcamox_ops_cuda.so")


class _Part:
    """What was found at import: the loaded library, or why there is none."""

    def __init__(self):
        self.library = None
        self.missing = ""
        if torch.version.cuda is None:
            self.missing = f"this torch ({torch.__version__}) has no CUDA"
        elif not LIBRARY.exists():
            self.missing = "this build of camox_ops has no CUDA part (it was built where no nvcc was found)"
        else:
            try:
                torch.ops.load_library(str(LIBRARY))
                self.library = ctypes.CDLL(str(LIBRARY))
            except OSError as error:
                self.missing = f"the CUDA part could not be loaded: {error}"

    def archs(self) -> list[str]:
        self.library.camox_cuda_archs.restype = ctypes.c_char_p
        return self.library.camox_cuda_archs().decode().split(",")

    def versions(self) -> tuple[int, int]:
        built, driver = ctypes.c_int(), ctypes.c_int()
        self.library.camox_cuda_versions(ctypes.byref(built), ctypes.byref(driver))
        return built.value, driver.value

    def unoptimised(self) -> bool:
        return bool(self.library.camox_cuda_unoptimised())

    def last_refusal(self) -> str:
        """As _C.last_refusal, of what this part checked."""
        if self.library is None:
            return ""
        self.library.camox_cuda_last_refusal.restype = ctypes.c_char_p
        return self.library.camox_cuda_last_refusal().decode()


part = _Part()


UNOPTIMISED = (
    "camox_ops: the CUDA part was compiled without optimisation, on a machine that had no GPU; its kernels are slow: "
    "compile it again with CAMOX_QUICK_BUILD=0"
)


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver(version: int) -> str:
    return f"the driver supports CUDA {_dotted(version)}" if version else "no driver was found"


def why_not(built: int, driver: int, archs: list[str], capability: tuple[int, int]) -> str:
    """Why a part built with CUDA `built` for `archs` cannot run on this driver and GPU, or an empty string.

    archs: "sm_XY" for machine code, "compute_XY" for PTX."""
    if driver // 1000 < built // 1000:
        needs = " (driver 580 or newer)" if built // 1000 == 13 else ""
        return (
            f"the CUDA part was built with CUDA {_dotted(built)}, which needs a driver for it{needs}, "
            f"but {_driver(driver)}"
        )
    numbers = [(kind, (int(number[:-1]), int(number[-1]))) for kind, number in (arch.split("_") for arch in archs)]
    gpu = f"the GPU is sm_{capability[0]}{capability[1]}"
    # Machine code runs on later minor versions of its major.
    if any(kind == "sm" and n[0] == capability[0] and n <= capability for kind, n in numbers):
        return ""
    # PTX on anything newer, where the driver knows this version of PTX: it comes with the toolkit's minor version.
    if any(kind == "compute" and n <= capability for kind, n in numbers):
        if driver // 10 >= built // 10:
            return ""
        return (
            f"{gpu}, for which the CUDA part has no machine code, and its PTX needs a driver for CUDA {_dotted(built)} "
            f"or newer, but {_driver(driver)}"
        )
    return f"{gpu}, and the CUDA part has code for {', '.join(archs)}"


@functools.cache
def unusable(device_index: int) -> str:
    """Why tensors on this CUDA device cannot be used, or an empty string."""
    if part.library is None:
        return part.missing
    reason = why_not(*part.versions(), part.archs(), torch.cuda.get_device_capability(device_index))
    if not reason and part.unoptimised():
        warnings.warn(UNOPTIMISED, stacklevel=2)
    return reason


# By bit of csrc/common/device_errors.h.
DEVICE_ERRORS = {
    1: "rope: positions or cu_seqlens gave a token a position that is negative or past cos and sin; its rows are NaN",
    2: "moe_route: logits held NaN; the weights of their rows are NaN",
    4: "moe: a routing's experts, offsets or position lay out of bounds; what was made with them is NaN",
    8: "linear_cross_entropy: target had rows with no class of the weight, nor ignore_index; their losses are NaN",
    16: "linear_attention: cu_seqlens did not rise from 0 to T; positions were given to other sequences",
}


def error_texts(bits: int) -> list[str]:
    return [text for bit, text in DEVICE_ERRORS.items() if bits & bit]


def check_errors(device: torch.device | int | str | None = None) -> None:
    """Raises where kernels on a CUDA device found values that they had to refuse since the last check.

    The CPU kernels check values, such as positions, before they write. A CUDA kernel whose answer would need the host
    to wait writes NaN instead and leaves a note on the device; here is where it is read, and cleared. Waits once for
    each device on which this process ran such kernels, and touches no other.

    Args:
        device: a CUDA device; None: all of them.

    Raises:
        ValueError: naming the devices, the ops and the arguments; or for a device that is not a CUDA device, or of
            which there is none by that number."""
    if device is not None and not isinstance(device, int) and torch.device(device).type != "cuda":
        raise ValueError(f"check_errors: device must be a CUDA device, got {device}")
    if part.library is None or not torch.cuda.is_initialized():
        return
    count = torch.cuda.device_count()
    if device is None:
        indices = range(count)
    else:
        index = device if isinstance(device, int) else torch.device(device).index
        indices = [torch.cuda.current_device() if index is None else index]
        if not 0 <= indices[0] < count:
            raise ValueError(f"check_errors: device must be one of {count} CUDA devices, got {device}")
    found = []
    for index in indices:
        bits = ctypes.c_uint32()
        error = part.library.camox_cuda_take_errors(index, ctypes.byref(bits))
        if error:
            part.library.camox_cuda_error_text.restype = ctypes.c_char_p
            raise RuntimeError(f"check_errors: cuda:{index}: {part.library.camox_cuda_error_text(error).decode()}")
        found += [f"{text} (cuda:{index})" for text in error_texts(bits.value)]
    if found:
        raise ValueError("; ".join(found))


def status() -> str:
    """One line on the CUDA part for people."""
    if part.library is None:
        return part.missing
    built, driver = part.versions()
    how = ", without optimisation (CAMOX_QUICK_BUILD)" if part.unoptimised() else ""
    return f"built with CUDA {_dotted(built)} for {', '.join(part.archs())}{how}; {_driver(driver)}"
