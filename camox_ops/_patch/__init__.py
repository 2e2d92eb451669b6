"""patch, unpatch and patched: the modules of a model that was written for PyTorch alone get the forward of camox_ops.

modules_of ---> is_candidate ---> why_left_alone ---> recognise ---> swap            first input
(_find.py)      (a recogniser)    (_find.py)          (on copies,    (_swap.py)  --> (_swap.py,
                                                       _proof.py)                     _proof.py)
"""

from __future__ import annotations

import fnmatch
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from . import _proof
from ._find import modules_of, uses_of, why_left_alone
from ._report import PatchEntry, PatchReport
from ._swap import patch_of, swap, swap_back
from ._table import RECOGNISERS

__all__ = ["PatchEntry", "PatchReport", "patch", "patched", "unpatch"]


def patch(
    model: nn.Module,
    *,
    dry_run: bool = False,
    verify: bool = True,
    only: str | Iterable[str] | None = None,
) -> PatchReport:
    """Gives modules of `model` that camox_ops computes faster its forward, where that is proved to do the same.

    A module is recognised by what it computes, never by the name of its class. Its original forward and the fast one
    run on copies of it, in float64, with its own and with random parameters, on several inputs, in training and in
    evaluation mode; values, gradients, strides, dtypes and what the forward leaves on the module have to agree, dropout
    under equal seeds. Both run once more on the first input that each module gets; one that differs there is given
    back. From then on a call costs nothing extra. Calls that the fast forward does not serve (small inputs, other
    ranks, tracing, export, forward-mode differentiation) run the original one.

    Only the class of a module is exchanged, for a subclass of it made for that: module objects, parameters, hooks,
    names and state_dict stay the same, pickles and checkpoints name the original class, copies stay patched. A model
    may be patched before or after an optimizer, DistributedDataParallel or fully_shard got it, and before
    torch.compile. Random generators stay where they were. Dropout draws other masks than PyTorch's (camox_ops.dropout).

    Args:
        model: any module. Parameters and modules are read, not written.
        dry_run: only says what would be done.
        verify: False leaves out the proofs, except what is needed to recognise a module, and the first comparison.
        only: names of recognisers ("dropout", "layer_norm2d", ...; docs/patch.md lists them), names of modules as in
            model.named_modules(), or patterns of such names ("decoder.*"); one or several. A module is looked at where
            its name matches, and by the recognisers that are named, or by all where none is.

    Returns:
        A PatchReport: `patched`, `skipped` with reasons, `max_error`, `to_dict()`; print it for a table. What the first
        inputs show is added to it.

    Raises:
        TypeError: model is not an nn.Module, dry_run or verify not a bool, only not made of texts.
        ValueError: something in `only` names neither a recogniser nor a module of the model.

    An exception on the way leaves the model as it was."""
    return _patch(model, dry_run, verify, only)[0]


def unpatch(model: nn.Module) -> list[str]:
    """Gives every patched module of `model` its own forward back -> their names. The module objects stay the same.

    A model in which nothing is patched stays as it is, with a warning."""
    _check_module("unpatch", model)
    names = [name for name, module in model.named_modules() if swap_back(module)]
    if not names:
        warnings.warn(f"unpatch: no module of this {type(model).__name__} is patched", stacklevel=2)
    return names


@contextmanager
def patched(
    model: nn.Module,
    *,
    verify: bool = True,
    only: str | Iterable[str] | None = None,
) -> Iterator[PatchReport]:
    """patch inside a with block, and back at its end; modules that were patched before stay so.

    Args: as for patch. Yields its report."""
    report, modules = _patch(model, False, verify, only)
    modules = [weakref.ref(module) for module in modules]
    try:
        yield report
    finally:
        for reference in modules:
            module = reference()
            if module is not None:
                swap_back(module)


def _patch(model, dry_run, verify, only) -> tuple[PatchReport, list[nn.Module]]:
    _check_module("patch", model)
    for name, value in (("dry_run", dry_run), ("verify", verify)):
        if not isinstance(value, bool):
            raise TypeError(f"patch: {name} must be a bool, got {value!r}")
    recognisers, patterns = _selection(model, only)
    report = PatchReport(dry_run, verify)
    with _proof.same_random_state(), torch.inference_mode(False), torch.enable_grad():
        plan = _plan(model, recognisers, patterns, report)
    done: list[nn.Module] = []
    try:
        for module, recogniser, settings, entry in () if dry_run else plan:
            swap(module, recogniser, settings, entry, verify)
            done.append(module)
    except BaseException:
        for module in done:
            swap_back(module)
        raise
    return report, done


def _plan(model, recognisers, patterns, report: PatchReport) -> list[tuple]:
    """What to swap; entries of the report, for these and for what is left alone."""
    plan, uses = [], uses_of(model)
    for name, module, closed in modules_of(model):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if closed is not None:
            report.entries.append(_entry(name, module, "", reason=closed))
            continue
        if patch_of(type(module)) is not None:
            report.entries.append(_entry(name, module, _name_of(module), reason="it is patched already"))
            continue
        for recogniser in recognisers:
            if type(module).__module__.startswith("camox_ops.") or not recogniser.is_candidate(module):
                continue
            reason = why_left_alone(module, recogniser.inner(module), uses)
            if reason is None:
                try:
                    settings, error = recogniser.recognise(module, report.verified)
                except _proof.OtherKind:
                    continue
                except _proof.NotAlike as found:
                    reason = str(found)
            if reason is not None:
                report.entries.append(_entry(name, module, recogniser.name, reason=reason))
                continue
            entry = _entry(name, module, recogniser.name, error=error if report.verified else None)
            report.entries.append(entry)
            plan.append((module, recogniser, settings, entry))
            break
    return plan


def _entry(name: str, module: nn.Module, recogniser: str, *, reason: str = "", error: float | None = None):
    kind = type(module)
    return PatchEntry(name, f"{kind.__module__}.{kind.__qualname__}", recogniser, not reason, reason, error)


def _name_of(module: nn.Module) -> str:
    return patch_of(type(module)).recogniser.name


def _selection(model: nn.Module, only) -> tuple[list, list[str]]:
    """Recognisers, and patterns of names."""
    if only is None:
        return list(RECOGNISERS), ["*"]
    texts = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else [only]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"patch: only must be a text or several, got {text!r}")
    known = {recogniser.name: recogniser for recogniser in RECOGNISERS}
    names = [name for name, _ in model.named_modules()]
    patterns = [text for text in texts if text not in known]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            listed = ", ".join(known)
            raise ValueError(f"patch: only must name modules of the model or recognisers ({listed}), got {pattern!r}")
    recognisers = [recogniser for name, recogniser in known.items() if name in texts]
    return recognisers or list(RECOGNISERS), patterns or ["*"]


def _check_module(function: str, model) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{function}: model must be an nn.Module, got {kind}")
