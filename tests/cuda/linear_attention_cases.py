"""linear_attention in the emulator: calls the launchers of linear_attention_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes
import itertools

import emulator
import torch

SOURCE = emulator.CSRC / "linear_attention" / "linear_attention_cuda.cu"
CHUNK = 64
# Heads of an image (B, C, H, W), contiguous, a part of the positions of a larger one, and channels_last; (B, H, T, N);
# every other element; one batch element for all.
MEMORY = ("image", "cropped", "channels_last", "dense", "strided", "expanded")
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
FEATURE_MAPS = ("elu1", "relu", "identity")
NORMALIZATIONS = ("sum", "feature", "none")


def _strides(shape, like):
    """Dense strides of a shape in the order of like's."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


class Call:
    """The params of one direction, with every tensor in guarded memory."""

    def __init__(self, memory, q, k, v, key_mask, feature_map, normalize, eps, chunk):
        structs, constants = emulator.header("common/types.h", "linear_attention/linear_attention.h")
        self.memory, self.view4 = memory, structs["camox_view4"]
        self.p = p = structs["camox_linear_attention_params"]()
        dtypes = {torch.float32: "CAMOX_F32", torch.bfloat16: "CAMOX_BF16", torch.float16: "CAMOX_F16"}
        p.dtype = constants[dtypes[q.dtype]]
        p.feature_map, p.normalize = FEATURE_MAPS.index(feature_map), NORMALIZATIONS.index(normalize)
        p.eps, self.sum = eps, normalize == "sum"
        (p.batch, p.heads, p.length, p.key_dim), p.value_dim = q.shape, v.shape[3]
        p.chunk, p.chunks = chunk, max(-(-p.length // chunk), 1)
        self.state = (p.batch, p.heads, p.key_dim, p.value_dim)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            self.view(name, memory.copy(tensor, name))
        if key_mask is not None:
            p.key_mask = memory.copy(key_mask, "key_mask").data_ptr()
            p.mask_stride[:] = key_mask.stride()
        self.real("partial", (p.batch * p.heads, p.chunks, p.key_dim * (p.value_dim + 1)))

    def view(self, name, tensor):
        view = self.view4(data=tensor.data_ptr())
        view.stride[:] = tensor.stride()
        setattr(self.p, name, view)
        return tensor

    def written(self, name, like, shape):
        return self.view(name, self.memory.empty_strided(shape, _strides(shape, like.stride()), like.dtype, name))

    def real(self, name, shape):
        tensor = self.memory.empty_strided(shape, torch.empty(shape).stride(), torch.float32, name)
        setattr(self.p, name, tensor.data_ptr())
        return tensor

    def given(self, name, tensor):
        if tensor is not None:
            setattr(self.p, name, self.memory.copy(tensor, name).data_ptr())

    def run(self, name, q, direction, arch=900, define="", **how):
        function = getattr(emulator.load(SOURCE, arch, define), name)
        layout = "contiguous" if q.stride(-1) == 1 else "image" if q.stride(-2) == 1 else "strided"
        dtype = str(q.dtype).removeprefix("torch.")
        emulator.call(function, ctypes.byref(self.p), None, dtype=dtype, layout=layout, direction=direction, **how)


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
        call = Call(memory, q, k, v, key_mask, feature_map, normalize, eps, chunk)
        call.given("initial_s", initial_s)
        call.given("initial_z", initial_z)
        results = [call.written("out", q, (*q.shape[:3], v.shape[3])), call.real("s", call.state)]
        if call.sum:
            results.append(call.real("z", call.state[:3]))
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
        call = Call(memory, q, k, v, key_mask, feature_map, normalize, eps, chunk)
        call.view("grad", memory.copy(grads[0], "grad"))
        for name, tensor in zip(
            ("grad_s", "grad_z", "s", "z"), [*grads[1:], *[None] * (3 - len(grads)), *state], strict=False
        ):
            call.given(name, tensor)
        results = [call.written(f"grad_{name}", x, x.shape) for name, x in (("q", q), ("k", k), ("v", v))]
        results.append(call.real("sum_s", call.state))
        if call.sum:
            results.append(call.real("sum_z", call.state[:3]))
        call.run("camox_linear_attention_backward_cuda", q, "backward", **(how or {}))
        return [tensor.clone() for tensor in results]


def heads(shape, dtype, memory="dense", seed=0):
    """q, k, v and a gradient of out of (B, H, T, N, D), as they lie in memory."""
    batch, count, length, n, d = shape
    if memory == "cropped":
        whole = heads((batch, count, -(-length // 8) * 8 + 8, n, d), dtype, "image", seed)
        return [x[:, :, :length] for x in whole]
    generator = torch.Generator().manual_seed(seed)
    found = []
    for dim in (n, n, d, d):
        x = torch.randn(batch, count, length, dim, generator=generator, dtype=torch.float64).to(dtype)
        if memory in ("image", "channels_last"):
            found.append(x.transpose(2, 3).contiguous().view(batch, count * dim, length, 1))
        elif memory == "strided":
            larger = torch.full((batch, count, 2 * length + 1, 2 * dim + 1), float("nan"), dtype=dtype)
            view = larger[:, :, 1::2, 1::2]
            view.copy_(x)
            found.append(view)
        else:
            found.append(x[:1].expand(x.shape) if memory == "expanded" else x)
    if memory not in ("image", "channels_last"):
        return found
    qkv = torch.cat(found[:3], 1)
    if memory == "channels_last":
        qkv, found[3] = (x.to(memory_format=torch.channels_last) for x in (qkv, found[3]))
    return [
        x.unflatten(1, (count, -1)).flatten(3).transpose(2, 3)
        for x in (*qkv.split([count * dim for dim in (n, n, d)], 1), found[3])
    ]


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, kind of memory and direction."""
    for dtype in emulator.DTYPES.values():
        for memory in ("image", "dense", "strided"):
            for dim in (16, 24, 32, 48, 64, 65):
                q, k, v, grad = heads((1, 1, 8, dim, dim), dtype, memory)
                state = forward(q, k, v, how={"arch": arch})[1:]
                backward([grad], q, k, v, state, how={"arch": arch})


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
    for dim, dtype in itertools.product((16, 12, 70), (torch.float32, torch.bfloat16)):
        for normalize in ("sum", "feature"):
            shape = (1, 2, 136, dim, dim + 4 * (dim == 12))
            inputs = attention_inputs(shape, dtype, "image", normalize, state=normalize == "sum")
            yield attention_runs(inputs, {"how": how})[0]
