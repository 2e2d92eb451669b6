"""bdh_attention and its step in the emulator: calls the launchers of csrc/bdh/bdh_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes
import itertools

import emulator
import torch
from rope_cases import rope_input

SOURCE = emulator.CSRC / "bdh" / "bdh_cuda.cu"
MEMORY = ("contiguous", "swapped", "strided", "expanded")
# (B, H, T, N), D: one row; around a tile of 64 and an iteration over N; scores saved where 4 T <= N; accesses of
# 16 bytes and of one element.
SHAPES = [
    ((1, 1, 1, 2), 1),
    ((1, 2, 5, 32), 8),
    ((2, 2, 9, 34), 3),
    ((1, 1, 65, 6), 70),
    ((1, 2, 16, 68), 16),
]


def _view(structs, tensor):
    view = structs["camox_view4"](data=tensor.data_ptr())
    view.stride[:] = tensor.stride()
    return view


def _values(structs, v, heads):
    view = _view(structs, v)
    if v.shape[1] == 1:
        view.stride[1] = 0
    return view


def _params(memory, name, q, v, cos, sin, relu, scale):
    structs, constants = emulator.header("common/types.h", "bdh/bdh.h")
    p = structs[name]()
    p.dtype = {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        q.dtype, constants["CAMOX_F16"]
    )
    p.relu, p.scale, p.table_columns = relu, scale, cos.shape[-1]
    p.batch, p.heads, p.dim, p.value_heads, p.value_dim = q.shape[0], q.shape[1], q.shape[-1], v.shape[1], v.shape[-1]
    p.cos, p.sin = memory.copy(cos, "cos").data_ptr(), memory.copy(sin, "sin").data_ptr()
    p.q, p.v = _view(structs, memory.copy(q, "q")), _values(structs, memory.copy(v, "v"), q.shape[1])
    return p, structs


def _dense(memory, name, *shape, dtype=torch.float32):
    return memory.empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype, name)


def _scale(q, options):
    scale = options.get("scale")
    return scale if scale is not None else q.shape[-1] ** -0.5 if options.get("softmax") else 1.0


def _attention(memory, q, v, cos, sin, options):
    p, structs = _params(memory, "camox_bdh_params", q, v, cos, sin, options.get("relu", True), _scale(q, options))
    p.causal, p.softmax = options.get("causal", False), options.get("softmax", False)
    p.length, p.table_length, p.form = q.shape[2], cos.shape[0], options.get("form", 1)
    p.tf32 = options.get("tf32", False)
    return p, structs


def _saved(memory, q, options, save):
    """(scores, logsumexp) as the binding allocates them: 4 T <= N decides, but for "scores" and "logsumexp"."""
    b, h, length, n = q.shape
    if save == "nothing":
        return None, None
    if save == "scores" or (save is None and 4 * length <= n):
        return _dense(memory, "scores", b, h, length, length), None
    return None, _dense(memory, "logsumexp", b, h, length) if options.get("softmax") else None


def forward(q, v, cos, sin, *, save=None, flush="end", how=None, **options):
    """(out, scores or None, logsumexp or None). how: keyword arguments of the emulator."""
    with emulator.guarded(flush) as memory:
        p, structs = _attention(memory, q, v, cos, sin, options)
        out = _dense(memory, "out", *q.shape[:3], v.shape[-1], dtype=q.dtype)
        p.out = _view(structs, out)
        scores, logsumexp = _saved(memory, q, options, save)
        p.scores = scores.data_ptr() if scores is not None else None
        p.logsumexp = logsumexp.data_ptr() if logsumexp is not None else None
        _call("camox_bdh_cuda", p, q, "forward", memory, 0, **(how or {}))
        return out.clone(), *(None if t is None else t.clone() for t in (scores, logsumexp))


def backward(grad, q, v, cos, sin, *, save=None, unturned=False, flush="end", how=None, **options):
    """(grad_q, grad_v) of a forward with these options, whose saved tensors come from the kernels too."""
    return both(grad, q, v, cos, sin, save=save, unturned=unturned, flush=flush, how=how, **options)[1:]


def both(grad, q, v, cos, sin, *, save=None, unturned=False, flush="end", how=None, **options):
    """(out, grad_q, grad_v)."""
    out, *saved = forward(q, v, cos, sin, save=save, flush=flush, how=how, **options)
    with emulator.guarded(flush) as memory:
        p, structs = _attention(memory, q, v, cos, sin, options)
        scores, logsumexp = (None if t is None else memory.copy(t, "saved") for t in saved)
        p.scores = scores.data_ptr() if scores is not None else None
        p.logsumexp = logsumexp.data_ptr() if logsumexp is not None else None
        p.out, p.grad = _view(structs, memory.copy(out, "out")), _view(structs, memory.copy(grad, "grad"))
        grad_q = _dense(memory, "grad_q", *q.shape, dtype=q.dtype)
        grad_v = _dense(memory, "grad_v", *v.shape, dtype=v.dtype)
        p.grad_q, p.grad_v = _view(structs, grad_q), _view(structs, grad_v)
        if p.value_heads != p.heads:
            p.partial = _dense(memory, "partial", *q.shape[:3], v.shape[-1]).data_ptr()
        p.grad_of_rotated = unturned
        _call("camox_bdh_backward_cuda", p, q, "backward", memory, 1, **(how or {}))
        return out, grad_q.clone(), grad_v.clone()


def scratch(shape, value_dim, direction, **options) -> int:
    """Bytes that a launcher asks for; no tensor is made."""
    structs, constants = emulator.header("common/types.h", "bdh/bdh.h")
    p = structs["camox_bdh_params"](dtype=constants["CAMOX_F32"], scale=1.0, value_dim=value_dim, value_heads=1)
    p.batch, p.heads, p.length, p.dim = shape
    for name, value in options.items():
        setattr(p, name, value)
    size = emulator.load(SOURCE, 900).camox_bdh_cuda_scratch
    size.restype = ctypes.c_int64
    found = []
    emulator.call(lambda: found.append(size(ctypes.byref(p), direction == "backward")))
    return found[0]


def step(q, v, cos, sin, state, *, relu=True, scale=None, flush="end", how=None):
    """(out, the next state) of one token, q (B, H, N), v (B, 1 or H, D)."""
    with emulator.guarded(flush) as memory:
        p, structs = _params(
            memory,
            "camox_bdh_step_params",
            q.unsqueeze(2),
            v.unsqueeze(2),
            cos,
            sin,
            relu,
            1.0 if scale is None else scale,
        )
        shape = (*q.shape, v.shape[-1])
        if state is not None:
            p.state = _view(structs, memory.copy(state, "state"))
        out, following = (
            _dense(memory, "out", *q.shape[:2], 1, v.shape[-1], dtype=q.dtype),
            _dense(memory, "next", *shape),
        )
        p.out, p.next = _view(structs, out), following.data_ptr()
        _call("camox_bdh_step_cuda", p, q, "forward", memory, None, **(how or {}))
        return out.squeeze(2).clone(), following.clone()


def _call(name, p, q, direction, memory, backward, arch=900, define="", **how):
    library = emulator.load(SOURCE, arch, define)

    def launch():
        if backward is not None:
            size = library.camox_bdh_cuda_scratch
            size.restype = ctypes.c_int64
            p.scratch = _dense(memory, "scratch", size(ctypes.byref(p), backward), dtype=torch.uint8).data_ptr()
        return getattr(library, name)(ctypes.byref(p), None)

    layout = "contiguous" if q.is_contiguous() else "strided"
    emulator.call(launch, dtype=str(q.dtype).removeprefix("torch."), layout=layout, direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest."""
    how = {"arch": arch}
    for name, tf32 in (*((name, False) for name in emulator.DTYPES), ("float32", True)):
        q, v, table = (torch.ones(shape) for shape in ((1, 2, 1, 4), (1, 1, 1, 2), (1, 2)))
        q, v = q.to(emulator.DTYPES[name]), v.to(emulator.DTYPES[name])
        inputs = (v.expand(1, 2, 1, 2), q, v, table, table)
        more = {"tf32": tf32, "how": how}
        for save in ("scores", "logsumexp"):
            for softmax in (False, True):
                backward(*inputs, softmax=softmax, save=save, **more)
        for causal in (False, True):
            backward(*inputs, save="nothing", form=2, causal=causal, **more)
        long = [t.repeat(1, 1, 65, 1) for t in (v.expand(1, 2, 1, 2), q, v)]  # in row bands
        tables = (table.repeat(65, 1),) * 2
        backward(*long, *tables, softmax=True, save="logsumexp", tf32=tf32, how={**how, "grid_cap": 1})
        v = v.repeat(1, 1, 1, 2)
        backward(v.expand(1, 2, 1, 4), q, v, table, table, save="nothing", form=2, causal=True, **more)
        step(q[:, :, 0], v[:, :, 0], table[0], table[0], None, how=how)
        if not tf32:  # short heads, and rotated once: tiles of 128 and of 192 columns
            q, table = q.repeat(1, 1, 1, 2), table.repeat(1, 2)
            for form, columns in ((1, 8), (2, 128), (2, 192)):
                v = v[..., :1].repeat(1, 1, 1, columns)
                grad = v.repeat(1, 2, 1, 1)
                backward(grad, q, v, table, table, save="nothing", form=form, how=how)
        q, table = q[..., :1].repeat(1, 1, 1, 520), table[:, :1].repeat(1, 260)  # several parts of the columns of q
        forward(q, v, table, table, save="scores", softmax=True, tf32=tf32, how=how)


def bdh_inputs(shape, value_dim, dtype, memory="contiguous", shared=True, each=False):
    """(grad, q, v, cos, sin); v shared by the heads or not, tables of an angle a pair or one an element."""
    batch, heads, length, n = shape
    grad = rope_input((batch, heads, length, value_dim), dtype, memory, seed=1)
    v = rope_input((batch, 1 if shared else heads, length, value_dim), dtype, memory, seed=2)
    angles = torch.randn(length + 1, n if each else n // 2, generator=torch.Generator().manual_seed(3)) * 3
    return grad, rope_input(shape, dtype, memory), v, angles.cos(), angles.sin()


def with_barriers(**how):
    for dtype, (causal, softmax) in itertools.product((torch.bfloat16, torch.float32), ((1, 0), (0, 1), (1, 1))):
        inputs = bdh_inputs((1, 2, 70, 70), 66, dtype)
        yield both(*inputs, causal=causal, softmax=softmax, save="logsumexp" if softmax else "nothing", how=how)
    inputs = bdh_inputs((1, 2, 40, 400), 24, torch.float32)  # one tile of scores in two parts, four steps in each half
    yield both(*inputs, causal=1, save="scores", how=how)
    # rotated once: two tiles each way, five steps, so that the last is in the first of the stages
    inputs = bdh_inputs((1, 2, 136, 136), 200, torch.bfloat16)
    yield both(*inputs, save="nothing", form=2, how=how)
    # short heads, two at a time: five steps, tiles of v of each, and of both
    for heads, shared in ((3, False), (4, True)):
        _, *inputs = bdh_inputs((1, heads, 64, 264), 136, torch.bfloat16, shared=shared)
        yield forward(*inputs, save="scores", how=how)[:2]
    _, q, v, cos, sin = bdh_inputs((1, 2, 1, 518), 40, torch.float32)
    yield step(q[:, :, 0], v[:, :, 0], cos[0], sin[0], None, how=how)
