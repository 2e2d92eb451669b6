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

from . import _call, _proof
from ._find import (
    NO_SIZES,
    differing_numbers,
    fingerprint,
    has_no_sizes,
    modules_of,
    uses_of,
    why_left_alone,
    without_numbers,
)
from ._report import PATCHED_ALREADY, PatchEntry, PatchReport
from ._swap import Patch, apply, patch_of, swap_back, why_no_subclass
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
    may be patched before or after an optimizer or DistributedDataParallel got it, and before fully_shard and
    torch.compile: modules whose parameters fully_shard has made DTensors are left alone. Random generators stay where
    they were. Dropout draws other masks than PyTorch's (camox_ops.dropout).

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
        ValueError: `only` is empty, or something in it names neither a recogniser nor a module of the model.

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

    Args: as for patch. Yields its report. Each with statement takes a patched(model) of its own; as a decorator it
    serves every call."""
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
    report = PatchReport(dry_run, verify, least_bytes=_least_bytes(model))
    with _proof.own_ground():
        plan = _plan(model, recognisers, patterns, report)
    done: list[nn.Module] = []
    try:
        for module, patch, entry in () if dry_run else plan:
            apply(module, patch._replace(checking=verify and patch.recogniser.checks_first_input), entry)
            done.append(module)
    except BaseException:
        for module in done:
            swap_back(module)
        raise
    return report, done


def _least_bytes(model: nn.Module) -> int | None:
    """Of the GPU that has the model's first parameters, if one has: fake tensors may be on one that is not there."""
    gpu = next((parameter.device.index for parameter in model.parameters() if parameter.is_cuda), None)
    return None if gpu is None or not torch.cuda.is_available() else _call.least_bytes(gpu)


def _plan(model, recognisers, patterns, report: PatchReport) -> list[tuple]:
    """(module, Patch, entry) of what to swap; entries of the report, for these and for what is left alone."""
    plan, planned, uses, known = [], {}, uses_of(model), {}
    # what is inside comes first: some recognisers depend on it
    for name, module, closed in reversed(list(modules_of(model))):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        patch, reason = patch_of(type(module)), closed
        if patch is not None:
            reason = PATCHED_ALREADY
        elif reason is None and has_no_sizes(module):
            reason = NO_SIZES
        if reason is not None:
            report.entries.append(_entry(name, module, "" if patch is None else patch.recogniser.name, reason))
            continue
        refused = []
        for recogniser in () if type(module).__module__.startswith("camox_ops.") else recognisers:
            try:
                if not recogniser.is_candidate(module, planned):
                    continue
                reason = why_left_alone(module, recogniser.inner(module), uses)
                if reason is None:
                    settings, error, reason = _recognised(recogniser, module, report.verified, planned, known)
                if reason is None:
                    reason = why_no_subclass(type(module))
            except Exception as failure:  # whatever a module does when it is looked at, patch goes on with the others
                inside = has_no_sizes(*module.modules())
                reason = NO_SIZES if inside else f"the recogniser raised {_proof.brief(failure)}"
            if reason and any(entry.reason == reason for entry in refused):
                continue
            if reason:
                refused.append(_entry(name, module, recogniser.name, reason))
            elif reason is None:
                entry = _entry(name, module, recogniser.name, "", error if report.verified else None)
                entry.few_operators = recogniser.few_operators(module, settings)
                entry.slower_in_few_rows = recogniser.slower_in_few_rows if entry.few_operators else ""
                report.entries.append(entry)
                planned[id(module)] = Patch(type(module), recogniser, settings, False)
                plan.append((module, planned[id(module)], entry))
                break
        else:
            report.entries += refused
    report.entries.reverse()
    return plan


def _recognised(recogniser, module: nn.Module, thorough: bool, planned, known: dict) -> tuple:
    """(settings, error, reason): reason is None where it is recognised, empty where it is something else altogether.

    known: results of this patch; modules of which everything but the values of parameters is equal are proved once.
    So are those that differ in whole numbers besides, as in the place that transformers tells each layer, where the
    proof holds without these numbers."""
    key = recogniser.name, fingerprint(module)
    if key in known:
        return known[key]
    first = known.setdefault((recogniser.name, type(module)), module)
    numbers = differing_numbers(module, first)
    if numbers:
        unnumbered = without_numbers(module, numbers)
        general = recogniser.name, fingerprint(unnumbered)
        if general not in known:
            try:
                known[general] = _proved(recogniser, unnumbered, thorough, planned)
            except Exception:  # the numbers are used
                known[general] = (None, None, "")
        if known[general][2] is None:
            return known[general]
    known[key] = _proved(recogniser, module, thorough, planned)
    return known[key]


def _proved(recogniser, module: nn.Module, thorough: bool, planned) -> tuple:
    try:
        return (*recogniser.recognise(module, thorough, planned), None)
    except _proof.OtherKind:
        return None, None, ""
    except _proof.NotAlike as difference:
        return None, None, str(difference)


def _entry(name: str, module: nn.Module, recogniser: str, reason: str, error: float | None = None) -> PatchEntry:
    kind = type(module)
    return PatchEntry(name, f"{kind.__module__}.{kind.__qualname__}", recogniser, not reason, reason, error)


def _selection(model: nn.Module, only) -> tuple[list, list[str]]:
    """Recognisers, and patterns of names."""
    if only is None:
        return list(RECOGNISERS), ["*"]
    is_one = isinstance(only, (str, bytes)) or not isinstance(only, Iterable)
    texts = [only] if is_one else list(only)
    if not texts:
        raise ValueError(f"patch: only must name modules or recognisers, got {only!r}, which names none")
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
