"""The CUDA part of the package: loaded only where torch has CUDA, and asked before a tensor is handed to it."""

from __future__ import annotations

import ctypes
import functools
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


part = _Part()


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def why_not(built: int, driver: int, archs: list[str], capability: tuple[int, int]) -> str:
    """Why a part built with CUDA `built` for `archs` cannot run on this driver and GPU, or an empty string."""
    if driver // 1000 < built // 1000:
        has = f"the driver supports CUDA {_dotted(driver)}" if driver else "no driver was found"
        needs = " (driver 580 or newer)" if built // 1000 == 13 else ""
        return f"the CUDA part was built with CUDA {_dotted(built)}, which needs a driver for it{needs}, but {has}"
    major, minor = capability
    numbers = [(int(arch[3:-1]), int(arch[-1])) for arch in archs]
    # Machine code runs on later minor versions of its major; PTX of the last architecture on anything newer.
    if any(major == m and minor >= n for m, n in numbers) or capability >= numbers[-1]:
        return ""
    return f"the GPU is sm_{major}{minor}, and the CUDA part has code for {', '.join(archs)}"


@functools.cache
def unusable(device_index: int) -> str:
    """Why tensors on this CUDA device cannot be used, or an empty string."""
    if part.library is None:
        return part.missing
    return why_not(*part.versions(), part.archs(), torch.cuda.get_device_capability(device_index))


# By bit of csrc/common/device_errors.h.
DEVICE_ERRORS = {
    1: "rope: positions or cu_seqlens gave a token a position that is negative or past cos and sin; its rows are NaN",
    2: "moe_route: logits held NaN; the weights of their rows are NaN",
    4: "moe: a routing's experts, offsets or position lay out of bounds; what was made with them is NaN",
}


def error_texts(bits: int) -> list[str]:
    return [text for bit, text in DEVICE_ERRORS.items() if bits & bit]


def check_errors(device: torch.device | int | str | None = None) -> None:
    """Raises where kernels on a CUDA device found values that they had to refuse since the last check.

    The CPU kernels check values, such as positions, before they write. A CUDA kernel whose answer would need the host
    to wait writes NaN instead and leaves a note on the device; here is where it is read, and cleared. Waits for the
    device once; does nothing where CUDA was never used.

    Args:
        device: a CUDA device; None: all of them.

    Raises:
        ValueError: naming the devices, the ops and the arguments; or for a device that is not a CUDA device."""
    if device is not None and not isinstance(device, int) and torch.device(device).type != "cuda":
        raise ValueError(f"check_errors: device must be a CUDA device, got {device}")
    if part.library is None or not torch.cuda.is_initialized():
        return
    if device is None:
        indices = range(torch.cuda.device_count())
    else:
        index = device if isinstance(device, int) else torch.device(device).index
        indices = [torch.cuda.current_device() if index is None else index]
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
    return f"built with CUDA {_dotted(built)} for {', '.join(part.archs())}; driver supports CUDA {_dotted(driver)}"
