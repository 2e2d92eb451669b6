"""Command lines whose options are the fields of a dataclass."""

import argparse
import math
from dataclasses import MISSING, fields, is_dataclass

import torch


def open_device(name):
    """torch.device(name); ValueError where it is none of those that the options offer, or not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device {name!r} is not there: torch finds {count} CUDA devices")
    return device


def check_numbers(config, where=""):
    """ValueError where a number of the dataclass config, or of one inside it, is of no use in any run.

    A seed goes to PyTorch and to NumPy, of which one takes 64 bits and the other nothing below 0. An infinite rate or
    weight makes NaN of every parameter; only grad_clip may be infinite, which is no clipping.
    """
    for field in fields(config):
        name, value = where + field.name, getattr(config, field.name)
        if is_dataclass(value):
            check_numbers(value, f"{name}.")
        elif field.name == "seed" and not 0 <= value < 2**63:
            raise ValueError(f"{name} must be from 0 to 2**63 - 1, got {value}")
        elif isinstance(value, float) and not math.isfinite(value) and (field.name != "grad_clip" or math.isnan(value)):
            raise ValueError(f"{name} must be a finite number, got {value}")


def add_options(parser, config, texts, more=None):
    """One option per field of the dataclass config: switches for bools, required where there is no default.

    texts and more, further arguments of add_argument, are by field name. The default of a field `device` is CUDA where
    there is one.
    """
    for field in fields(config):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true", help=texts[field.name])
            continue
        default = ("cuda" if torch.cuda.is_available() else "cpu") if field.name == "device" else field.default
        parser.add_argument(
            option,
            type={int: int, float: float, int | None: int}.get(field.type, str),
            required=default is MISSING,
            default=argparse.SUPPRESS if default is MISSING else default,
            help=texts[field.name],
            **(more or {}).get(field.name, {}),
        )
