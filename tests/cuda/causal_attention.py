"""Causal linear_attention and its step in the emulator: launchers of csrc/linear_attention/causal_cuda.cuh."""

from __future__ import annotations

import emulator
import torch
from attention_heads import NORMALIZATIONS, Call, heads

# (B, H, T, N, D): one position; tails of chunks; the models' heads; heads of several blocks of columns and of terms.
SHAPES = [
    (1, 2, 1, 2, 1),
    (2, 1, 64, 16, 16),
    (1, 2, 70, 10, 6),
    (1, 1, 130, 32, 32),
    (1, 2, 66, 64, 64),
    (1, 1, 65, 40, 72),
    (1, 1, 70, 72, 40),
]
MODES = [(normalize, strict) for normalize in NORMALIZATIONS for strict in (False, True)]


def _call(memory, struct, q, options):
    names = ("feature_map", "normalize", "eps")
    call = Call(memory, struct, q, **{name: options[name] for name in names if name in options})
    call.p.strict = options.get("causal", True) == "strict"
    return call


def _sequences_call(memory, q, k, v, options):
    call, cu_seqlens = _call(memory, "camox_causal_params", q, options), options.get("cu_seqlens")
    call.heads(q, k, v, options.get("key_mask"))
    p, chunks = call.p, -(-q.shape[2] // 64)
    p.sequences = p.batch if cu_seqlens is None else len(cu_seqlens) - 1
    records = chunks * p.sequences
    if cu_seqlens is not None:
        records = chunks + p.sequences
        call.given("cu_seqlens", cu_seqlens)
        call.empty("bounds", (2, len(cu_seqlens)), torch.int32)
    call.empty("records", (records, p.heads, p.key_dim * (p.value_dim + 1)))
    call.error = torch.zeros(1, dtype=torch.int32)
    p.error_word = call.error.data_ptr()
    call.state = (p.sequences, p.heads, p.key_dim, p.value_dim)
    return call


def forward(q, k, v, *initial, flush="end", how=None, **options):
    """(out, S), with "sum" z, and the error word."""
    with emulator.guarded(flush) as memory:
        call = _sequences_call(memory, q, k, v, options)
        for name, tensor in zip(("initial_s", "initial_z"), initial, strict=False):
            call.given(name, tensor)
        results = [call.written("out", q, v.shape)]
        results.append(call.empty("s", call.state))
        if call.sum:
            results.append(call.empty("z", call.state[:3]))
        call.run("camox_linear_attention_causal_cuda", q, "forward", **(how or {}))
        return [tensor.clone() for tensor in results], call.error.item()


def backward(grads, q, k, v, *initial, flush="end", how=None, **options):
    """Gradients of q, k, v, S_0 and with "sum" z_0, of those of the forward's results."""
    with emulator.guarded(flush) as memory:
        call = _sequences_call(memory, q, k, v, options)
        for name, tensor in zip(("initial_s", "initial_z"), initial, strict=False):
            call.given(name, tensor)
        call.view("grad", memory.copy(grads[0], "grad"))
        for name, tensor in zip(("grad_s", "grad_z"), grads[1:], strict=False):
            call.given(name, tensor)
        results = [call.written(f"grad_{name}", x, x.shape) for name, x in (("q", q), ("k", k), ("v", v))]
        results.append(call.empty("sum_s", call.state))
        if call.sum:
            results.append(call.empty("sum_z", call.state[:3]))
        call.empty("rows", (2, *q.shape[:3]))
        call.run("camox_linear_attention_causal_backward_cuda", q, "backward", **(how or {}))
        return [tensor.clone() for tensor in results]


def step(q, k, v, s, z, how=None, **options):
    """out and the new state, of q, k and v (B, H, N or D)."""
    with emulator.guarded("end") as memory:
        call = _call(memory, "camox_causal_step_params", q, options)
        (call.p.batch, call.p.heads, call.p.key_dim), call.p.value_dim = q.shape, v.shape[2]
        state = [memory.copy(x, name) for name, x in (("s", s), ("z", z)) if x is not None]
        for name, tensor in zip(("s", "z"), state, strict=False):
            setattr(call.p, name, tensor.data_ptr())
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            call.given(name, tensor)
        out = call.empty("out", v.shape, q.dtype)
        call.run("camox_linear_attention_step_cuda", q, "step", **(how or {}))
        return [tensor.clone() for tensor in (out, *state)]


def inputs(shape, dtype, memory="dense", *, normalize="sum", causal=True, masked=False, cu_seqlens=None, seed=0):
    """(q, k, v), the states before, the gradients of all results, options of both directions."""
    batch, count, length, n, d = shape
    *qkv, grad = heads(shape, dtype, memory, seed)
    generator = torch.Generator().manual_seed(seed + 5)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    sizes = [(sequences, count, n, d), (sequences, count, n)][: 2 if normalize == "sum" else 1]
    initial = [torch.rand(size, generator=generator) for size in sizes]
    grads = [grad, *(torch.randn(size, generator=generator) for size in sizes)]
    options = {"normalize": normalize, "causal": causal, "eps": 1e-2}
    if masked:
        options["key_mask"] = torch.rand(batch, length, generator=generator) < 0.3
    if cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32)
    return qkv, initial, grads, options


def both(given, **way):
    """The results of both directions."""
    qkv, initial, grads, options = given
    results, _ = forward(*qkv, *initial, **options, **way)
    return [*results, *backward(grads, *qkv, *initial, **options, **way)]


def every_kernel(arch) -> None:
    both(inputs((1, 1, 3, 3, 5), torch.float32), how={"arch": arch})
    for dtype in emulator.DTYPES.values():
        for memory in ("dense", "strided"):
            both(inputs((1, 1, 8, 16, 16), dtype, memory, cu_seqlens=[0, 3, 8]), how={"arch": arch})
        row = torch.ones(1, 1, 4, dtype=dtype)
        step(row, row, row, torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4), how={"arch": arch})


def with_barriers(**how):
    for dtype in (torch.float32, torch.bfloat16):
        for normalize in ("sum", "feature"):
            given = inputs((1, 1, 140, 72, 80), dtype, normalize=normalize, cu_seqlens=[0, 70, 70, 140])
            yield both(given, how=how)
        yield both(inputs((1, 1, 140, 64, 40), dtype), how={**how, "grid_cap": 1})
        yield both(inputs((1, 1, 70, 72, 16), dtype, "image"), how=how)  # threads go down columns, and read rows
        rows = [torch.rand(1, 2, 40, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
        for normalize in NORMALIZATIONS:
            z = torch.ones(1, 2, 40) if normalize == "sum" else None
            yield step(*rows, torch.ones(1, 2, 40, 40), z, normalize=normalize, how=how)
