"""Command lines whose options are the fields of a dataclass."""

import argparse
from dataclasses import MISSING, fields

import torch


def add_options(parser, config, texts, choices=None):
    """One option per field of the dataclass config: switches for bools, required where there is no default.

    texts and choices are by field name. The default of a field `device` is CUDA where there is one.
    """
    for field in fields(config):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true", help=texts[field.name])
            continue
        default = ("cuda" if torch.cuda.is_available() else "cpu") if field.name == "device" else field.default
        parser.add_argument(
            option,
            type=field.type if field.type in (int, float) else str,
            required=default is MISSING,
            default=argparse.SUPPRESS if default is MISSING else default,
            choices=(choices or {}).get(field.name),
            help=texts[field.name],
        )
