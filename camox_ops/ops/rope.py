"""rope: rotary position embedding, one read and one write per element; rope_tables: its angles."""

from __future__ import annotations

import math

import torch

from .. import reference
from .._torch_private import call_operator, in_transform, why_not_overwritten
from . import _check
from ._check import dtype_names
from ._codes import LAYOUTS, code_of, name_of
from ._layout import as_read, dense_strides, has_internal_overlap, share_memory
from ._register import fold_batch_at, one_by_one, register

UNITS = ("radians", "turns")


def rope_tables(
    dim: int,
    length: int,
    *,
    theta: float = 10000.0,
    units: str = "radians",
    scaling: dict | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles that rope rotates by: angle[t, j] = t * theta**(-2j/dim).

    Args:
        dim: how many elements are rotated, even; pair j of dim/2 has the frequency theta**(-2j/dim).
        length: number of positions, from 0 on.
        theta: base of the frequencies, > 0.
        units: "radians": angles in float64, so that they are exact at any position, then rounded once. "turns": the
            same angle as 2*pi*frac(t * theta**(-2j/dim) / (2*pi)) with every step in float32, as BDH computes it: the
            same bits as BDH's own tables, whose phase loses digits as t grows.
        scaling: None, or {"rope_type": "linear", "factor": f}: positions are divided by f > 0.
        device: of the tables.

    Returns:
        (cos, sin), float32, each (length, dim/2).

    Raises:
        TypeError: dim or length is not an int, theta or the factor is not a number, scaling is not a dict.
        ValueError: dim is odd or negative, length < 0, theta or the factor is not > 0 and finite, unknown units or
            scaling.

    Source of "turns": get_freqs and Attention of takzen/vision-bdh, models/bdh.py at 71cb8ab, with theta = 2**16."""
    dim = _size("rope_tables", "dim", dim)
    length = _size("rope_tables", "length", length)
    if dim % 2:
        raise ValueError(f"rope_tables: dim must be even, got {dim}")
    theta = _check.positive("rope_tables", "theta", theta)
    _check.choice("rope_tables", "units", units, UNITS)
    factor = _scaling_factor(scaling)
    real = torch.float64 if units == "radians" else torch.float32
    exponents = torch.arange(0, dim, 2, dtype=real, device=device) / dim
    positions = torch.arange(length, dtype=real, device=device)[:, None]
    if factor != 1:
        positions = positions / factor
    frequencies = 1.0 / theta**exponents
    if units == "radians":
        angles = positions * frequencies
    else:
        angles = (positions * (frequencies / (2 * math.pi)) % 1) * (2 * math.pi)
    return angles.cos().float(), angles.sin().float()


def _size(op: str, name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{op}: {name} must be >= 0, got {value}")
    return value


def _scaling_factor(scaling: dict | None) -> float:
    if scaling is None:
        return 1.0
    if not isinstance(scaling, dict):
        raise TypeError(f"rope_tables: scaling must be None or a dict, got {scaling!r}")
    if scaling.get("rope_type") != "linear" or scaling.keys() != {"rope_type", "factor"}:
        raise ValueError(
            f"rope_tables: scaling must be None or {{'rope_type': 'linear', 'factor': f}}, got {scaling!r}"
        )
    return _check.positive("rope_tables", "scaling['factor']", scaling["factor"])


def rope(
    x: torch.Tensor | tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    layout: str = "bhtd",
    rotary_dim: int | None = None,
    positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Turns the pairs of elements of every token by the angles of its position.

    With r = rotary_dim, pair i is elements (a, b) = (2i, 2i+1) if interleaved, else (i, i + r/2), and with the row of
    the tables that belongs to the token's position:

        y[a] = x[a] c[a] - x[b] s[a]    y[b] = x[b] c[b] + x[a] s[b]

    The first r elements are rotated, the others pass.

    Args:
        x: (B, H, T, D) for layout "bhtd", (B, T, H, D) for "bthd"; float32, bfloat16, float16 or float64; any strides,
            any size from 0 on. Or a tuple of such tensors, each of its own number of heads (q, k, ...).
        cos, sin: (length, r/2), one angle a pair, as rope_tables gives; or (length, r) where the two elements of a pair
            are rotated by different angles, columns in the order of x's elements. float32 or x's dtype; a float32 table
            beside half-precision or float64 x is read as it is.
        interleaved: which elements are pairs (GPT-J, BDH: True; GPT-NeoX, Llama: False).
        layout: "bhtd" or "bthd".
        rotary_dim: r, even, at most D; None: D.
        positions: None (token t has position t), or int64 (T,) or (B, T).
        cu_seqlens: int32 (S+1,), rising from 0 to total: x is (total, H, D), S contiguous sequences whose
            positions begin again at 0; layout says nothing then.
        inplace: write into x and return it. Counts as an in-place operation for autograd: the version counter moves,
            and a backward that needs the old values raises. Under torch.compile and torch.func the result is copied.
            What is refused is refused before any tensor of a tuple is written. q and k of one projection that carries a
            gradient: index it (`qkv[:, :, 0]`), for autograd forbids writing into what unbind, split or chunk return.

    Returns:
        A tensor like x, in its dtype and with its dimensions in memory in the order of x's strides (x itself in place);
        or a tuple of them. Computed in float32 (float64 for float64) and rounded once. Autocast leaves x's dtype alone.

    Saved for backward: cos, sin, positions, cu_seqlens; x only where cos or sin requires a gradient. Such a gradient is
    summed over B and H in a fixed order. Derivatives of any order. The same bits on every run, for any number of
    threads and on every instruction set. Forward-mode AD raises NotImplementedError.

    On the CPU the values of positions and cu_seqlens are checked before anything is written. On CUDA a token whose
    position is negative or past the tables becomes NaN, and camox_ops.check_errors() raises.

    Raises:
        TypeError: a tensor is not dense or of another dtype, the dtypes do not go together, rotary_dim is not an int, a
            flag is not a bool.
        ValueError: another number of dimensions, an odd rotary_dim or one beyond D, cos and sin of different shapes,
            of another width or shorter than T, positions or cu_seqlens of another shape or with values beyond the
            tables, both of them, tensors of different numbers of tokens with cu_seqlens, tensors on different devices,
            an unknown layout, an empty tuple. With inplace=True: elements of x or of two tensors of a tuple share
            memory; x is an inference tensor outside inference mode; while grad mode is on, cos or sin requires a
            gradient, or x does and is a leaf, a view of a leaf or one of the views that unbind, split or chunk made.

    Source: RoFormer (arXiv 2104.09864, equation 34); Attention.rope of takzen/vision-bdh, models/bdh.py at 71cb8ab."""
    tensors = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    if not tensors:
        raise ValueError("rope: x must be a tensor or a tuple of at least one, got ()")
    _check.flag("rope", "interleaved", interleaved)
    layout_code = code_of("rope", "layout", layout, LAYOUTS)
    _check.flag("rope", "inplace", inplace)
    if positions is not None and cu_seqlens is not None:
        raise ValueError("rope: give positions or cu_seqlens, not both")
    names = ["x"] if len(tensors) == 1 else [f"x[{i}]" for i in range(len(tensors))]
    for name, value in zip(names, tensors, strict=True):
        _check_x(name, value, tensors[0], cu_seqlens)
        columns = _check_rotary_dim(rotary_dim, name, value)
        _check_tables(cos, sin, columns, value)
        _check_positions(name, value, cos, layout, positions, cu_seqlens)
    if inplace:
        _check_inplace(names, tensors, cos, sin)
    cos, sin = (as_read(table, _check.computed_in(tensors[0])) for table in (cos, sin))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    arguments = (cos, sin, positions, cu_seqlens, interleaved, layout_code, rotary_dim, False)
    rotate = _rotate_in_place if inplace else _rope
    rotated = tuple(rotate(value, *arguments) for value in tensors)
    return rotated if isinstance(x, (tuple, list)) else rotated[0]


def _check_x(name: str, value, first, cu_seqlens) -> None:
    _check.tensor("rope", name, value)
    dimensions = "4 dimensions" if cu_seqlens is None else "3 dimensions (total, H, D) with cu_seqlens"
    if value.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(f"rope: {name} must have {dimensions}, got shape {tuple(value.shape)}")
    if value.dtype != first.dtype:
        raise TypeError(
            f"rope: {name} must have the dtype of x[0], {dtype_names(first.dtype)}, got {dtype_names(value.dtype)}"
        )
    # Then the values of cu_seqlens, which the kernel checks, are right for all tensors or for none.
    if cu_seqlens is not None and value.shape[0] != first.shape[0]:
        raise ValueError(
            f"rope: {name} must have as many tokens as x[0], {first.shape[0]}, with cu_seqlens, "
            f"got shape {tuple(value.shape)}"
        )


def _check_rotary_dim(rotary_dim, name: str, value: torch.Tensor) -> int:
    dim = value.shape[-1]
    if rotary_dim is None:
        if dim % 2:
            raise ValueError(f"rope: {name} has an odd last dimension, {dim}: rotary_dim must say how many are rotated")
        return dim
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, (int, torch.SymInt)):
        raise TypeError(f"rope: rotary_dim must be an int or None, got {rotary_dim!r}")
    if rotary_dim < 0 or rotary_dim > dim or rotary_dim % 2:
        raise ValueError(
            f"rope: rotary_dim must be even, from 0 to the last dimension of {name}, {dim}, got {rotary_dim}"
        )
    return rotary_dim


def _check_tables(cos, sin, rotary_dim: int, x: torch.Tensor) -> None:
    allowed = (x.dtype,) if x.dtype == torch.float32 else (x.dtype, torch.float32)
    for name, table in (("cos", cos), ("sin", sin)):
        _check.tensor("rope", name, table)
        if table.dim() != 2 or (table.shape[1] != rotary_dim // 2 and table.shape[1] != rotary_dim):
            raise ValueError(
                f"rope: {name} must have shape (length, {rotary_dim // 2}) or (length, {rotary_dim}), a column a pair "
                f"or an element of rotary_dim {rotary_dim}, got {tuple(table.shape)}"
            )
        if table.dtype not in allowed:
            listed = dtype_names(*allowed)
            raise TypeError(f"rope: {name} must have dtype {listed} beside this x, got {dtype_names(table.dtype)}")
        _check.same_device("rope", name, table, x)
    if cos.shape != sin.shape:
        raise ValueError(f"rope: cos and sin must have the same shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    if cos.dtype != sin.dtype:
        raise TypeError(
            f"rope: cos and sin must have the same dtype, got {dtype_names(cos.dtype)} and {dtype_names(sin.dtype)}"
        )


def _check_positions(name: str, x: torch.Tensor, cos: torch.Tensor, layout: str, positions, cu_seqlens) -> None:
    if cu_seqlens is not None:
        _check.tensor("rope", "cu_seqlens", cu_seqlens, dtypes=(torch.int32,))
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"rope: cu_seqlens must have shape (S+1,), got {tuple(cu_seqlens.shape)}")
        _check.same_device("rope", "cu_seqlens", cu_seqlens, x)
        return
    batch, length = x.shape[0], x.shape[2 if layout == "bhtd" else 1]
    if positions is None:
        if cos.shape[0] < length:
            raise ValueError(
                f"rope: cos and sin have {cos.shape[0]} rows, fewer than the {length} positions of {name}, "
                f"shape {tuple(x.shape)}"
            )
        return
    _check.tensor("rope", "positions", positions, dtypes=(torch.int64,))
    if tuple(positions.shape) not in ((length,), (batch, length)):
        raise ValueError(
            f"rope: positions must have shape ({length},) or ({batch}, {length}) for {name} of shape {tuple(x.shape)} "
            f"in layout {layout!r}, got {tuple(positions.shape)}"
        )
    _check.same_device("rope", "positions", positions, x)


def _check_inplace(names: list[str], tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Everything that torch or the kernel would refuse of any tensor, before the first is written."""
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("rope: inplace=True overwrites the x that the gradient of cos and sin needs")
    # Of traced and of transformed tensors torch itself checks the copy that is made there.
    plain = not (torch.compiler.is_compiling() or in_transform(*tensors, cos, sin))
    for i, (name, value) in enumerate(zip(names, tensors, strict=True)):
        for other in range(i):
            if value is tensors[other] or (plain and share_memory(tensors[other], value)):
                raise ValueError(
                    f"rope: inplace=True needs tensors that do not share memory; {names[other]} and {name} do, which "
                    "would be rotated twice"
                )
        _check_overwritten(name, value, plain)


def _check_overwritten(name: str, x: torch.Tensor, plain: bool) -> None:
    if plain:
        overlaps = has_internal_overlap(x)
    else:
        overlaps = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    if overlaps:
        raise ValueError(
            f"rope: inplace=True needs elements of {name} that do not share memory, got shape {tuple(x.shape)} and "
            f"strides {x.stride()}"
        )
    if plain and x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"rope: inplace=True on {name}, an inference tensor, outside inference mode")
    if not (torch.is_grad_enabled() and x.requires_grad):
        return
    reason = why_not_overwritten(x) if plain else "leaf" if x.is_leaf else ""
    if reason == "leaf":
        raise ValueError(
            f"rope: inplace=True on {name}, a leaf that requires a gradient or a view of one; rotate it out of place"
        )
    if reason == "view":
        raise ValueError(
            f"rope: inplace=True on {name}, a view that autograd does not let be written: one of several that unbind, "
            "split or chunk made; index the tensor instead, or rotate out of place"
        )


class _RopeInPlace(torch.autograd.Function):
    """The in-place rotation of a tensor that carries a gradient. mark_dirty moves the version counter."""

    @staticmethod
    def forward(ctx, x, *arguments):
        call_operator(torch.ops.camox_ops.rope_, x, *arguments)
        ctx.mark_dirty(x)
        ctx.save_for_backward(*arguments[:4])
        ctx.arguments = arguments[4:]
        return x

    @staticmethod
    def backward(ctx, grad):
        *arguments, transposed = ctx.arguments
        return _rope(grad, *ctx.saved_tensors, *arguments, not transposed), *(None,) * 8


def _rotate_in_place(x: torch.Tensor, *arguments) -> torch.Tensor:
    tensors = (argument for argument in (x, *arguments) if isinstance(argument, torch.Tensor))
    if torch.compiler.is_compiling() or in_transform(*tensors) or x.is_neg():
        return x.copy_(_rope(x, *arguments))  # a lazily negated view has no memory of its own values
    if torch.is_grad_enabled() and x.requires_grad:
        return _RopeInPlace.apply(x, *arguments)
    call_operator(torch.ops.camox_ops.rope_, x, *arguments)
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return x


def _save(ctx, inputs, output):
    x, cos, sin, positions, cu_seqlens, *ctx.arguments = inputs
    learned = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]  # under vmap the tables themselves do not say
    ctx.save_for_backward(x if learned else None, cos, sin, positions, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 9
    x, *tables = ctx.saved_tensors
    *arguments, transposed = ctx.arguments
    if x is None:
        return _rope(grad, *tables, *arguments, not transposed), *(None,) * 8
    return *_rope_backward(grad, x, *tables, *arguments, transposed), *(None,) * 6


def _save_backward(ctx, inputs, output):
    *tensors, ctx.interleaved, ctx.layout, ctx.rotary_dim, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward_backward(ctx, *grads):
    """Differentiates the formula in the dtype computed in."""
    *tensors, positions, cu_seqlens = ctx.saved_tensors
    real = tensors[2].dtype

    def backward(grad, x, cos, sin):
        outputs = reference.rope_backward(
            grad,
            x,
            cos,
            sin,
            interleaved=ctx.interleaved,
            layout=name_of(LAYOUTS, ctx.layout),
            rotary_dim=ctx.rotary_dim,
            positions=positions,
            cu_seqlens=cu_seqlens,
            transposed=ctx.transposed,
        )
        return tuple(output for output, g in zip(outputs, grads, strict=True) if g is not None)

    given = tuple(g.to(real) for g in grads if g is not None)
    if not given:
        return (None,) * 10
    _, pullback = torch.func.vjp(backward, *(tensor.to(real) for tensor in tensors))
    found = (value.to(tensor.dtype) for value, tensor in zip(pullback(given), tensors, strict=True))
    return *found, *(None,) * 6


def _fake(x, *_):
    return x.new_empty_strided(x.shape, dense_strides(x))


def _fake_backward(grad, x, cos, sin, *_):
    return _fake(x), torch.empty_like(cos), torch.empty_like(sin)


def _vmap(info, in_dims, x, *arguments):
    op = torch.ops.camox_ops.rope
    if any(dim is not None for dim in in_dims[1:]):
        return one_by_one(op, info, in_dims, (x, *arguments))
    # More heads: they share the positions and the tables.
    cu_seqlens, layout = arguments[3], arguments[5]
    heads = 2 if cu_seqlens is None and layout == LAYOUTS["bthd"] else 1
    y = op(fold_batch_at(info, in_dims[0], x, heads), *arguments)
    return y.unflatten(heads, (info.batch_size, -1)), heads


_rope = register("rope", fake=_fake, setup_context=_save, backward=_backward, vmap=_vmap)
_rope_backward = register(
    "rope_backward",
    fake=_fake_backward,
    setup_context=_save_backward,
    backward=_backward_backward,
)
torch.library.register_fake("camox_ops::rope_", lambda *_: None)
