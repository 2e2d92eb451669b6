"""What the emulator's cases of the ops on images share: params structs, guarded outputs, calls of the launchers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import emulator
import torch
from image_op import number_of

from camox_ops import reference

BORDERS = ("zeros", "replicate", "reflect")
DTYPE_CODES = {torch.float32: "CAMOX_F32", torch.bfloat16: "CAMOX_BF16", torch.float16: "CAMOX_F16"}
# Below, at and above a 16-byte and a 4-byte access, a warp of edge_maps' backward (30 vectors), a row band, and in
# channels_last a block's columns and channel vectors.
SHAPES = [
    (1, 2, 1, 1),
    (1, 1, 1, 9),
    (1, 1, 9, 1),
    (2, 2, 2, 2),
    (1, 3, 4, 15),
    (1, 3, 4, 16),
    (1, 3, 3, 17),
    (2, 3, 9, 34),
    (1, 16, 5, 24),
    (2, 24, 3, 130),
    (1, 272, 2, 5),
]


def is_channels_last(x) -> bool:
    return x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()


def _view(structs, tensor):
    view = structs["camox_view4"](data=tensor.data_ptr())
    view.stride[:] = tensor.stride()
    return view


def _dense(memory, x, last, channels, name):
    b, _, h, w = x.shape
    strides = (channels * h * w, 1, w * channels, channels) if last else (channels * h * w, h * w, w, 1)
    return memory.empty_strided((b, channels, h, w), strides, x.dtype, name)


@dataclass(frozen=True)
class ImageOp:
    """An op family of (B, C, H, W) tensors whose launchers take a struct with views x, `maps` and grad_x.

    maps: the field of outputs and their gradients: an array, or a view where there is one output. options: keyword
    arguments of the references; backward_options: others for the backward; fields: what they are in the struct. header,
    struct: of the params, under csrc, and define: of a build that is wrong by 1e-3; "": the family's own."""

    name: str
    maps: str
    outputs: tuple[str, ...]
    grads: int
    options: list[dict]
    reference: Callable
    reference_backward: Callable  # (x, grads, **options)
    fields: Callable[..., dict] = lambda **options: options
    backward_options: dict = field(default_factory=dict)
    backward_reads_x: bool = False
    shapes: list[tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    header: str = ""
    struct: str = ""
    define: str = ""

    @property
    def source(self):
        return emulator.CSRC / self.name / f"{self.name}_cuda.cu"

    def __str__(self) -> str:
        return self.name

    def cases(self, backward=False):
        """(shape, options, order of blocks and threads), every order used in turn."""
        more = self.backward_options if backward else {}
        cases = [
            (shape, {**options, **more})
            for shape in self.shapes
            for options in self.options
            if not (options.get("border") == "reflect" and 1 in shape[2:])
        ]
        return [(*case, list(emulator.ORDERS)[i % len(emulator.ORDERS)]) for i, case in enumerate(cases)]

    def forward(self, x, options=None, stacked=False, flush="end", **how):
        """The outputs, or the stacked tensor, written by the kernels."""
        last, channels = is_channels_last(x), x.shape[1]
        with emulator.guarded(flush) as memory:
            p, structs = self._params(x, last, options)
            p.x = _view(structs, memory.copy(x, "x"))
            if stacked:
                outs = [_dense(memory, x, last, self.grads * channels, "stacked")]
                maps = outs[0].chunk(self.grads, dim=1)
            else:
                outs = maps = [_dense(memory, x, last, channels, name) for name in self.outputs]
            for i, out in enumerate(maps):
                self._set_map(p, i, _view(structs, out))
            self._call(f"camox_{self.name}_cuda", p, x, last, "forward", **how)
            return outs[0].clone() if stacked else [out.clone() for out in outs]

    def backward(self, x, grads, options=None, flush="end", **how):
        """grad_x, in x's layout, of the gradients of the outputs (and of a stacked x), None where there is none."""
        last = is_channels_last(x)
        with emulator.guarded(flush) as memory:
            p, structs = self._params(x, last, options)
            if self.backward_reads_x:
                p.x = _view(structs, memory.copy(x, "x"))
            for i, grad in enumerate(grads):
                if grad is not None:
                    self._set_map(p, i, _view(structs, memory.copy(grad, f"grad {i}")))
            out = _dense(memory, x, last, x.shape[1], "grad_x")
            p.grad_x = _view(structs, out)
            self._call(f"camox_{self.name}_backward_cuda", p, x, last, "backward", **how)
            return out.clone()

    def every_kernel(self, arch) -> None:
        """Runs each kernel at its smallest: every dtype, access width, layout and direction."""
        for dtype in emulator.DTYPES.values():
            for inner in (3, 2, 16):
                last = torch.ones(1, inner, 3, 2).to(memory_format=torch.channels_last)
                for x in (torch.ones(1, 1, 3, inner).to(dtype), last.to(dtype)):
                    self.forward(x, arch=arch)
                    self.backward(x, [x] * self.grads, arch=arch)

    def _set_map(self, p, i, view) -> None:
        if isinstance(getattr(p, self.maps), ctypes.Array):
            getattr(p, self.maps)[i] = view
        else:
            setattr(p, self.maps, view)

    def _params(self, like, last, options):
        structs, constants = emulator.header("common/types.h", self.header or f"{self.name}/{self.name}.h")
        p = structs[self.struct or f"camox_{self.name}_params"]()
        p.dtype, p.channels_last = constants[DTYPE_CODES[like.dtype]], last
        p.batch, p.channels, p.height, p.width = like.shape
        for name, value in self.fields(**(options or self.options[0])).items():
            setattr(p, name, constants[f"CAMOX_BORDER_{value.upper()}"] if name == "border" else value)
        return p, structs

    def _call(self, name, p, x, last, direction, arch=900, source=None, define="", **how):
        layout = "channels_last" if last else "contiguous" if x.is_contiguous() else "strided"
        dtype = str(x.dtype).removeprefix("torch.")
        function = getattr(emulator.load(source or self.source, arch, define), name)
        emulator.call(function, ctypes.byref(p), None, dtype=dtype, layout=layout, direction=direction, **how)


@dataclass(frozen=True)
class ImageCases:
    """The cases of an op in camox_ops._ops.IMAGE_OPS, as another op's module <family>_cases has them."""

    OP: ImageOp

    def every_kernel(self, arch) -> None:
        self.OP.every_kernel(arch)


def image_cases(name: str) -> ImageCases:
    number = number_of(name)
    formula = partial(getattr(reference, name), **number)

    def pullback(x, grads, **options):
        _, vjp = torch.func.vjp(lambda x: formula(x, **options), x)
        return vjp(grads[0])[0]

    return ImageCases(
        ImageOp(
            name=name,
            maps="y",
            outputs=("y",),
            grads=1,
            options=[{"border": border} for border in BORDERS],
            reference=lambda x, **options: (formula(x, **options),),
            reference_backward=pullback,
            fields=lambda **options: {**options, "number": sum(number.values())},
            backward_reads_x=True,
            header="common/image_op.h",
            struct="camox_image_params",
            define="CAMOX_BREAK",
        )
    )
