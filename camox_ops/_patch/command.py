"""python -m camox_ops patch-report MODULE:FACTORY."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import sys

from torch import nn

from . import _selection, patch


def patch_report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m camox_ops patch-report",
        description="What camox_ops.patch would do to a model: nothing is changed, and no script has to be written.",
    )
    parser.add_argument("model", metavar="MODULE:FACTORY", help="importable from here; FACTORY() makes the model")
    parser.add_argument("--only", action="append", metavar="NAME", help="a recogniser, or a pattern of module names")
    parser.add_argument("--json", action="store_true", help="PatchReport.to_dict() instead of a table")
    asked = parser.parse_args(arguments)
    try:
        # What modules print while they are imported would stand in front of the JSON.
        with contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext():
            model = _model(asked.model)
    except _Unusable as error:
        parser.error(str(error))
    try:
        _selection(model, asked.only)
    except ValueError as error:
        parser.error(str(error).removeprefix("patch: "))
    report = patch(model, dry_run=True, only=asked.only)
    print(json.dumps(report.to_dict(), indent=2) if asked.json else report)
    return 0


class _Unusable(ValueError):
    """MODULE:FACTORY gives no model."""


def _model(target: str) -> nn.Module:
    where, colon, name = target.partition(":")
    if not (where and colon and name):
        raise _Unusable(f"expected MODULE:FACTORY, such as models.unet:UNet, got {target!r}")
    if where.startswith("."):
        raise _Unusable(f"expected the whole name of a module, such as models.unet, got {where!r}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
            raise  # something that the module itself imports
        raise _Unusable(f"there is no module {error.name!r} here or on PYTHONPATH") from None
    for part in name.split("."):
        if not hasattr(value, part):
            raise _Unusable(f"{where} has no {name!r}")
        value = getattr(value, part)
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise _Unusable(f"{target} is a {type(value).__name__}, not a model and nothing that makes one")
        needed = _needed_arguments(value)
        if needed:
            raise _Unusable(f"{target} needs arguments ({needed}): give a function without any that makes the model")
        value = value()
    if not isinstance(value, nn.Module):
        raise _Unusable(f"{target}() gave a {type(value).__name__}, not an nn.Module")
    return value


def _needed_arguments(factory) -> str:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # made in C: the call will tell
        return ""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(p.name for p in parameters if p.default is p.empty and p.kind not in optional)
