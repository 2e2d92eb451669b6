"""grad_group_norms and scale_grads_: norms of many gradients by group in one call, and gradients times factors."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch

from .. import _C
from .._torch_private import READS_BY_DLPACK, forward_levels, in_transform, is_followed, raise_as_torch_does
from . import _check
from ._codes import GROUP_REDUCTIONS, code_of

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_INT = frozenset((int,))


def grad_group_norms(
    grads: Sequence[torch.Tensor | None],
    groups: Sequence[int],
    num_groups: int,
    *,
    reduce: str = "sum_of_norms",
) -> torch.Tensor:
    """The norms of many gradients by group, in one pass over all of them, without waiting for a GPU.

    For the gradients i of a group k, with norm_i = sqrt(sum(grads[i]^2)):

        "sum_of_norms"   norms[k] = sum(norm_i)
        "l2"             norms[k] = sqrt(sum(norm_i^2)), the norm of all elements of the group

    Args:
        grads: gradients of any shapes, on one device, each in float32, bfloat16, float16 or float64; any strides. None,
            the gradient of a parameter that had no part, counts as zeros: [p.grad for p in model.parameters()]
            may be given as it is. Of a DTensor (FSDP2) the part of this process counts. A tensor that is listed
            several times counts each time.
        groups: as many numbers in [0, num_groups), the group of each gradient.
        num_groups: how many groups there are; one without a gradient has norm 0.
        reduce: "sum_of_norms" or "l2".

    Returns:
        (num_groups,) in float32, float64 where a gradient is float64, on the device of the gradients, without a
        gradient of its own. Of gradients that are all None: zeros on the CPU.

    Squares are added in blocks, of eight on the CPU, and blocks in float64: norms are right to the last digits of
    float32 for any number of elements. Squares of float32 do not overflow or vanish, where torch.linalg.vector_norm
    gives inf from 1.8e19 on. A NaN or inf makes the norm of its group NaN or inf, and no other. The same bits on every
    run and for any number of threads. The norms of bfloat16 and float16 gradients are those of their values in float32;
    after GradScaler.unscale_ they are those of the unscaled gradients.

    grad_group_norms(grads, groups, n, reduce="l2").square().sum().sqrt() is the total norm that
    torch.nn.utils.clip_grad_norm_ computes. On a GPU nothing waits for the result: work with it there, as scale_grads_
    does, and look at it (.tolist()) as seldom as it is logged.

    Raises:
        TypeError: grads or groups is not a sequence, holds something else than these tensors or ints; num_groups is not
            an int.
        ValueError: grads and groups of different lengths, a group out of range, gradients on different devices, an
            unknown reduce, num_groups < 0."""
    code = code_of("grad_group_norms", "reduce", reduce, GROUP_REDUCTIONS)
    if isinstance(num_groups, bool) or not isinstance(num_groups, numbers.Integral):
        raise TypeError(f"grad_group_norms: num_groups must be an int, got {num_groups!r}")
    if num_groups < 0:
        raise ValueError(f"grad_group_norms: num_groups must be >= 0, got {num_groups!r}")
    if READS_BY_DLPACK and not is_followed() and isinstance(grads, (list, tuple)) and isinstance(groups, (list, tuple)):
        # The dispatcher makes several objects of each tensor, which takes longer than the sums of a small one.
        norms = torch.empty(num_groups, dtype=torch.float32, device="cpu")
        if _C.grad_norms_of_list(grads, groups, code, norms):
            return norms
    tensors, indices = _given("grad_group_norms", grads, groups)
    return _call("grad_group_norms", grads, groups, num_groups, tensors, indices, num_groups, code)


def scale_grads_(grads: Sequence[torch.Tensor | None], groups: Sequence[int], scales: torch.Tensor) -> None:
    """Multiplies many gradients in place, each by the factor of its group, in one pass over all of them.

    grads[i] *= scales[groups[i]], for a tensor that is listed several times once, by the product of its factors. The
    factors lie on the device of the gradients, as grad_group_norms' result does: they are computed there, and nothing
    waits for them.

    Args:
        grads: gradients as for grad_group_norms; None is skipped, of a DTensor the part of this process is multiplied.
            Of an expanded gradient each address is multiplied once.
        groups: as many numbers in [0, len(scales)).
        scales: (num_groups,), float32 or float64, on the device of the gradients; any stride, so that one factor for
            all groups is factor.expand(num_groups).

    As under torch.no_grad(): autograd records nothing, and refuses a later backward that needs what was overwritten.
    The product of a float16 or bfloat16 gradient is computed in float32 and rounded once. A factor of exactly 1 leaves
    its gradients untouched and costs nothing. A gradient that holds inf or NaN holds NaN there after a factor of 0, as
    in torch: give up the step where a norm is not finite, or fill such gradients with zeros. Everything is checked
    before the first gradient is written.

    Raises:
        TypeError: grads or groups is not a sequence, holds something else than these tensors or ints; scales is not a
            tensor of float32 or float64.
        ValueError: grads and groups of different lengths, a group out of range, gradients or scales on different
            devices, scales of another number of dimensions than 1, a gradient some of whose elements share memory."""
    tensors, indices = _given("scale_grads_", grads, groups)
    _check.tensor("scale_grads_", "scales", scales, dtypes=(torch.float32, torch.float64))
    if scales.dim() != 1:
        raise ValueError(f"scale_grads_: scales must have 1 dimension, got shape {tuple(scales.shape)}")
    _call("scale_grads_", grads, groups, len(scales), tensors, indices, scales)
    if in_transform(*tensors) or not tensors:
        return
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _given(op: str, grads, groups) -> tuple[Sequence, Sequence]:
    """The gradients that are there, of DTensors the local part, and their groups; what they are is not checked yet."""
    for name, value in (("grads", grads), ("groups", groups)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{op}: {name} must be a list or a tuple, got {type(value).__name__}")
    if len(grads) != len(groups):
        raise ValueError(f"{op}: grads and groups must have the same length, got {len(grads)} and {len(groups)}")
    if not torch.compiler.is_compiling() and _PLAIN.issuperset(map(type, grads)):
        # At once, as hundreds of small gradients take long to look at one by one. A copy of the list, which nobody
        # changes: it holds the tensors while the operator runs.
        return tuple(grads), groups
    there = [(_local(grad), group) for grad, group in zip(grads, groups, strict=True) if grad is not None]
    return [grad for grad, _ in there], [group for _, group in there]


def _local(grad):
    """What this process has of a DTensor."""
    if isinstance(grad, torch.Tensor) and hasattr(grad, "to_local"):
        with torch.no_grad():  # else a view that autograd follows
            return grad.to_local()
    return grad


def _call(op: str, grads, groups, num_groups: int, tensors: Sequence, indices: Sequence, *arguments):
    """The operator, of what `_given` found in grads and groups.

    It refuses by itself whatever is wrong with plain tensors, before it writes anything. Only then, and where it cannot
    see everything, each gradient is looked at in Python, for a message that names it. It sees no group's type: torch
    makes ints of True, tensor(1.7) and NumPy's float32(1.7)."""
    seen_by_operator = (
        len(tensors) == len(grads)
        and forward_levels._current_level < 0
        and not torch.compiler.is_compiling()
        and _INT.issuperset(map(type, groups))
    )
    scales = arguments[0] if op == "scale_grads_" else None
    if not seen_by_operator:
        _check_lists(op, grads, groups, num_groups, scales)
    if not tensors:
        if op != "grad_group_norms":
            return None
        return torch.zeros(num_groups, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    try:
        with torch.no_grad():
            return getattr(torch.ops.camox_ops, op)(tensors, indices, *arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        _check_lists(op, grads, groups, num_groups, scales)
        raise_as_torch_does(error)
        raise


def _check_lists(op: str, grads, groups, num_groups: int, scales: torch.Tensor | None) -> None:
    for i, (given, group) in enumerate(zip(grads, groups, strict=True)):
        if isinstance(group, bool) or not isinstance(group, numbers.Integral):
            raise TypeError(f"{op}: groups[{i}] must be an int, got {group!r}")
        if not 0 <= group < num_groups:
            raise ValueError(f"{op}: groups[{i}] must be in [0, {num_groups}), got {group!r}")
        if given is None:
            continue
        _check.tensor(op, f"grads[{i}]", _local(given))
    _check_devices(op, [grad for grad in map(_local, grads) if grad is not None], scales)


def _check_devices(op: str, tensors, scales: torch.Tensor | None) -> None:
    for tensor in tensors:
        _check.same_device(op, "each of grads", tensor, tensors[0], "the first of them")
    if tensors and scales is not None:
        _check.same_device(op, "scales", scales, tensors[0], "the gradients")


def _fake(grads, groups, num_groups, reduce):
    _check_devices("grad_group_norms", grads, None)
    double = any(grad.dtype == torch.float64 for grad in grads)
    return grads[0].new_empty((num_groups,), dtype=torch.float64 if double else torch.float32)


def _sample(grads, dims, i: int) -> list[torch.Tensor]:
    return [grad if dim is None else grad.select(dim, i) for grad, dim in zip(grads, dims, strict=True)]


def _vmap(info, in_dims, grads, groups, num_groups, reduce):
    op = torch.ops.camox_ops.grad_group_norms
    if info.batch_size == 0:
        return _fake(grads, groups, num_groups, reduce).new_empty((0, num_groups)), 0
    norms = [op(_sample(grads, in_dims[0], i), groups, num_groups, reduce) for i in range(info.batch_size)]
    return torch.stack(norms), 0


def _vmap_scale(info, in_dims, grads, groups, scales):
    op = torch.ops.camox_ops.scale_grads_
    for grad, group, dim in zip(grads, groups, in_dims[0], strict=True):
        if dim is not None:
            grad = grad.movedim(dim, 0)
            for i in range(info.batch_size):
                op([grad[i]], [group], scales if in_dims[2] is None else scales.select(in_dims[2], i))
        elif in_dims[2] is None:
            op([grad], [group], scales)
        else:
            raise ValueError(
                "scale_grads_: under vmap a gradient without samples cannot be scaled by factors of samples"
            )
    return None, None


def _norms_of_lazy(grads, groups, num_groups, reduce):
    """Where a gradient is negated lazily, as those of torch.complex's imaginary part are, or lazily zero. The operator
    lets go of its list at once, as the caller has the tensors too; nobody has those that torch would make here."""
    held = [torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad) for grad in grads]
    return torch.ops.camox_ops.grad_group_norms(held, groups, num_groups, reduce)


def _scale_negated(grads, groups, scales):
    """What is in memory is the gradient or its negative, and is scaled by the same factor."""
    grads = [
        torch.empty(0, dtype=grad.dtype, device=grad.device).set_(
            grad.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride()
        )
        for grad in grads
    ]
    return torch.ops.camox_ops.scale_grads_(grads, groups, scales.resolve_neg())


_lazy = torch.library.Library("camox_ops", "IMPL")
_lazy.impl("grad_group_norms", _norms_of_lazy, "Negative")
_lazy.impl("grad_group_norms", _norms_of_lazy, "ZeroTensor")
_lazy.impl("scale_grads_", _scale_negated, "Negative")
torch.library.register_fake("camox_ops::grad_group_norms", _fake)
torch.library.register_vmap("camox_ops::grad_group_norms", _vmap)
torch.library.register_fake(
    "camox_ops::scale_grads_", lambda grads, groups, scales: _check_devices("scale_grads_", grads, scales)
)
torch.library.register_vmap("camox_ops::scale_grads_", _vmap_scale)
