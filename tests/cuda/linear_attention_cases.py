"""linear_attention in the emulator: calls the launchers of linear_attention_cuda.cu on guarded tensors."""

from __future__ import annotations

import itertools

import causal_attention
import emulator
import torch
from attention_heads import Call, heads

CHUNK = 64
# (B, H, T, N, D): one position; the models' heads; tails of tiles and of chunks; heads of whole steps of tensor
# cores and padded ones; heads whose state does not fit in shared memory.
SHAPES = [
    (1, 2, 1, 2, 1),
    (2, 2, 20, 10, 6),
    (1, 2, 152, 8, 16),
    (1, 3, 72, 16, 16),
    (2, 1, 104, 32, 32),
    (1, 2, 88, 12, 20),
    (1, 1, 90, 36, 38),
    (1, 1, 40, 64, 64),
    (1, 1, 70, 73, 40),
    (1, 1, 17, 20, 130),
]


class Sums(Call):
    """Of one direction, with the sums of its chunks."""

    def __init__(self, memory, q, k, v, key_mask, feature_map, normalize, eps, chunk):
        super().__init__(memory, "camox_linear_attention_params", q, feature_map, normalize, eps)
        self.heads(q, k, v, key_mask)
        p = self.p
        p.chunk, p.chunks = chunk, max(-(-p.length // chunk), 1)
        self.state = (p.batch, p.heads, p.key_dim, p.value_dim)
        self.empty("partial", (p.batch * p.heads, p.chunks, p.key_dim * (p.value_dim + 1)))


def forward(
    q,
    k,
    v,
    initial_s=None,
    initial_z=None,
    *,
    key_mask=None,
    feature_map="elu1",
    normalize="sum",
    eps=1e-6,
    chunk=CHUNK,
    flush="end",
    how=None,
):
    """(out, S) and with "sum" z. how: keyword arguments of the emulator."""
    with emulator.guarded(flush) as memory:
        call = Sums(memory, q, k, v, key_mask, feature_map, normalize, eps, chunk)
        call.given("initial_s", initial_s)
        call.given("initial_z", initial_z)
        results = [call.written("out", q, (*q.shape[:3], v.shape[3])), call.empty("s", call.state)]
        if call.sum:
            results.append(call.empty("z", call.state[:3]))
        call.run("camox_linear_attention_cuda", q, "forward", **(how or {}))
        return [tensor.clone() for tensor in results]


def backward(
    grads,
    q,
    k,
    v,
    state,
    *,
    key_mask=None,
    feature_map="elu1",
    normalize="sum",
    eps=1e-6,
    chunk=CHUNK,
    flush="end",
    how=None,
):
    """Gradients of q, k, v, S_0 and with "sum" z_0, of those of the forward's results."""
    with emulator.guarded(flush) as memory:
        call = Sums(memory, q, k, v, key_mask, feature_map, normalize, eps, chunk)
        call.view("grad", memory.copy(grads[0], "grad"))
        for name, tensor in zip(
            ("grad_s", "grad_z", "s", "z"), [*grads[1:], *[None] * (3 - len(grads)), *state], strict=False
        ):
            call.given(name, tensor)
        results = [call.written(f"grad_{name}", x, x.shape) for name, x in (("q", q), ("k", k), ("v", v))]
        results.append(call.empty("sum_s", call.state))
        if call.sum:
            results.append(call.empty("sum_z", call.state[:3]))
        call.run("camox_linear_attention_backward_cuda", q, "backward", **(how or {}))
        return [tensor.clone() for tensor in results]


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, kind of memory and direction."""
    for dtype in emulator.DTYPES.values():
        for memory in ("image", "dense", "strided"):
            for dim in (16, 24, 32, 48, 64, 65):
                q, k, v, grad = heads((1, 1, 8, dim, dim), dtype, memory)
                state = forward(q, k, v, how={"arch": arch})[1:]
                backward([grad], q, k, v, state, how={"arch": arch})
    causal_attention.every_kernel(arch)


def attention_inputs(shape, dtype, memory="dense", normalize="sum", masked=False, state=False):
    """(q, k, v), options of both directions, (S_0, z_0) or (), gradients of the forward's results."""
    batch, count, length, n, d = shape
    *qkv, grad = heads(shape, dtype, memory)
    generator = torch.Generator().manual_seed(5)
    sizes = [(batch, count, n, d), (batch, count, n)][: 2 if normalize == "sum" else 1]
    initial = [torch.rand(size, generator=generator) for size in sizes]
    grads = [grad, *(torch.randn(size, generator=generator) for size in sizes)]
    mask = torch.rand(batch, length, generator=generator) < 0.3 if masked else None
    options = {"normalize": normalize, "key_mask": mask}
    return qkv, options, initial if state else [], grads if state else grads[:1]


def attention_runs(inputs, *ways):
    """The results of both directions for each of these keyword arguments; the state is the first one's."""
    qkv, options, initial, grads = inputs
    found = []
    for way in ways:
        results = forward(*qkv, *initial, **options, **way)
        state = found[0][1:3] if found else results[1:]
        found.append([*results, *backward(grads, *qkv, state, **options, **way)])
    return found


def with_barriers(**how):
    # Tiles of other sizes in and out: where they are the same a thread overwrites no more than what it has read itself.
    for (dim, out_dim), dtype in itertools.product(
        ((16, 16), (12, 16), (40, 44), (70, 76)), (torch.float32, torch.bfloat16)
    ):
        for normalize in ("sum", "feature"):
            shape = (1, 2, 136, dim, out_dim)
            inputs = attention_inputs(shape, dtype, "image", normalize, state=normalize == "sum")
            yield attention_runs(inputs, {"how": how})[0]
    yield from causal_attention.with_barriers(**how)
