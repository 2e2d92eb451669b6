"""What linear_attention and its causal form share in the emulator: names, and heads as they lie in memory."""

import emulator
import torch

SOURCE = emulator.CSRC / "linear_attention" / "linear_attention_cuda.cu"
# Heads of an image (B, C, H, W), contiguous, a part of the positions of a larger one, and channels_last; (B, H, T, N);
# every other element; one batch element for all.
MEMORY = ("image", "cropped", "channels_last", "dense", "strided", "expanded")
FEATURE_MAPS = ("elu1", "relu", "identity")
NORMALIZATIONS = ("sum", "feature", "none")


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
