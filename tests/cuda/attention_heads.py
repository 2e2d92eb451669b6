"""What linear_attention and its causal form share in the emulator: names, calls, and heads as they lie in memory."""

from __future__ import annotations

import ctypes

import emulator
import torch

SOURCE = emulator.CSRC / "linear_attention" / "linear_attention_cuda.cu"
# Heads of an image (B, C, H, W), contiguous, a part of the positions of a larger one, and channels_last; (B, H, T, N);
# every other element; one batch element for all.
MEMORY = ("image", "cropped", "channels_last", "dense", "strided", "expanded")
FEATURE_MAPS = ("elu1", "relu", "identity")
NORMALIZATIONS = ("sum", "feature", "none")
DTYPES = {torch.float32: "CAMOX_F32", torch.bfloat16: "CAMOX_BF16", torch.float16: "CAMOX_F16"}
HEADERS = ("common/types.h", "linear_attention/linear_attention.h", "linear_attention/causal.h")


class Call:
    """The params of one launcher, with every tensor in guarded memory."""

    def __init__(self, memory, struct, q, feature_map="elu1", normalize="sum", eps=1e-6):
        structs, constants = emulator.header(*HEADERS)
        self.memory, self.view4, self.p = memory, structs["camox_view4"], structs[struct]()
        self.p.dtype, self.p.eps, self.sum = constants[DTYPES[q.dtype]], eps, normalize == "sum"
        self.p.feature_map, self.p.normalize = FEATURE_MAPS.index(feature_map), NORMALIZATIONS.index(normalize)

    def view(self, name, tensor):
        view = self.view4(data=tensor.data_ptr())
        view.stride[:] = tensor.stride()
        setattr(self.p, name, view)
        return tensor

    def heads(self, q, k, v, key_mask=None):
        (self.p.batch, self.p.heads, self.p.length, self.p.key_dim), self.p.value_dim = q.shape, v.shape[3]
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            self.view(name, self.memory.copy(tensor, name))
        if key_mask is not None:
            self.given("key_mask", key_mask)
            self.p.mask_stride[:] = key_mask.stride()

    def given(self, name, tensor):
        if tensor is not None:
            setattr(self.p, name, self.memory.copy(tensor, name).data_ptr())

    def written(self, name, like, shape):
        """In the order of the strides of like."""
        strides = strides_in_order(shape, like.stride())
        return self.view(name, self.memory.empty_strided(shape, strides, like.dtype, name))

    def empty(self, name, shape, dtype=torch.float32):
        tensor = self.memory.empty_strided(shape, torch.empty(shape).stride(), dtype, name)
        setattr(self.p, name, tensor.data_ptr())
        return tensor

    def run(self, name, q, direction, arch=900, define="", **how):
        function = getattr(emulator.load(SOURCE, arch, define), name)
        layout = "contiguous" if q.stride(-1) == 1 else "image" if q.stride(-2) == 1 else "strided"
        dtype = str(q.dtype).removeprefix("torch.")
        emulator.call(function, ctypes.byref(self.p), None, dtype=dtype, layout=layout, direction=direction, **how)


def strides_in_order(shape, like):
    """Dense strides of a shape in the order of like's."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


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
