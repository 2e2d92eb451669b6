"""Unchanged PyTorch code on PyTorch's own kernels and on cx.train.tune_cpu's: products, dropout, pools, convolutions,
softmax, upsampling, batch normalisation, training steps.

Both candidates are the same function; camox's replacements are put in place before each of its calls and taken out
after it. A step has its backward inside, so that the replacements serve there too.
Masks of dropout are random: losses of steps with dropout are compared loosely, all others under the tolerance rule.
Products of bfloat16 are left alone: there camox is this project's own core (csrc/gemm), which would replace them.
"""

import math
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import bench_k1
from benchmarks.common import Case, Skipped, camox_attr, random_tensor

# rows, inputs, outputs of F.linear: classifiers, feed-forward layers, projections of tokens, a head over a vocabulary
LINEAR = (
    (64, 4096, 1000),
    (256, 2048, 512),
    (1024, 512, 2048),
    (4096, 128, 512),
    (6272, 192, 768),
    (9600, 96, 96),
    (38400, 96, 384),
    (4096, 256, 10000),
)
BATCHES = ((48, 256, 64),)
DROPOUT = ((32, 6, 64, 1024),)
POOLS = ((3, (4, 80, 72, 72)), (31, (8, 1, 352, 352)))
# Shape, window, stride, padding: after ResNet's first convolution, between VGG's stages, YOLO's pyramid pooling.
MAX_POOLS = (((8, 64, 112, 112), 3, 2, 1), ((8, 128, 56, 56), 2, 2, 0), ((4, 256, 20, 20), 5, 1, 2))
# Images, channels, side, window: EdgeNeXt small's at 224, and ConvNeXt tiny's.
DEPTHWISE = ((4, 48, 56, 3), (4, 96, 28, 5), (4, 160, 14, 7), (4, 304, 7, 9), (8, 96, 56, 7))
# Images, channels of x and y, side: NAFNet's of width 32 at 256 and 64, an EdgeNeXt stage, a decoder.
_NAFNET = ((1, 32, 64, 256), (1, 256, 512, 32), (4, 256, 512, 8), (4, 256, 256, 1))
POINTWISE = (*_NAFNET, (8, 160, 640, 14), (8, 64, 64, 88))
# Attention over 6 frames, a few classes, maps of classes, and logits of classifiers and vocabularies.
SOFTENED = (
    *(("tune_softmax", torch.softmax, shape) for shape in ((76800, 6), (65536, 10))),
    ("tune_log_softmax_channels", torch.log_softmax, (8, 20, 256, 256)),
    *(("tune_log_softmax", torch.log_softmax, shape) for shape in ((2048, 1000), (1024, 32000))),
)
UPSAMPLED = ((4, 80, 72, 72), (8, 1, 88, 88))
# A ResNet's stages at 224, an encoder of images.
NORMALIZED = ((8, 64, 56, 56), (8, 256, 14, 14), (16, 512, 7, 7), (8, 64, 64, 64))
SLOW_ROUNDS = 7


class Replaced(nn.Module):
    """A function or a module with PyTorch's kernels replaced during each call.

    Putting them in place takes 80 to 240 us, which a script pays once: it is done before a call that is timed."""

    def __init__(self, function, *kernels):
        super().__init__()
        self.function, self.kernels, self.is_held = function, kernels, False
        self.replaced = camox_attr("train.tune.replaced")
        try:
            with self.replaced(*kernels):
                pass
        except RuntimeError as error:
            raise Skipped(str(error)) from None

    @contextmanager
    def held(self):
        with self.replaced(*self.kernels):
            self.is_held = True
            try:
                yield
            finally:
                self.is_held = False

    def forward(self, *inputs):
        with nullcontext() if self.is_held else self.replaced(*self.kernels):
            return self.function(*inputs)


def forward_case(group, shape, function, inputs, **options) -> Case:
    return Case(
        group=group,
        shape=shape,
        make_inputs=inputs,
        candidates=lambda: {"camox": Replaced(function, *options["kernels"]), "eager": function, "compile": None},
        floor_bytes=options.get("bytes", 0),
        default_allocator=False,
        rounds=options.get("rounds"),
        quick=options.get("quick", False),
    )


def linear_inputs(shape):
    rows, inputs, outputs = shape
    return random_tensor((rows, inputs), seed=1), random_tensor((outputs, inputs), seed=2)


def linear_case(shape) -> Case:
    return forward_case(
        "tune_linear", shape, F.linear, lambda: linear_inputs(shape), kernels=("mm",), quick=shape == LINEAR[2]
    )


def gradients_of(function, wanted):
    """function and its backward as a step: inputs, the gradient that flows in -> gradients of the first `wanted`."""

    def step(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs[:-1]]
        return torch.autograd.grad(function(*leaves), leaves[:wanted], inputs[-1])

    return step


def same_numbers(expected):
    """A check of a step against float64 numbers and PyTorch's own, as in share_of_tolerance."""

    def verify(numbers, inputs) -> str | None:
        stock, truth = expected(*inputs), expected(*(x.detach().double() for x in inputs))
        for ours, theirs, exact in zip(numbers.values(), stock, truth, strict=True):
            allowed = 2 * (theirs.double() - exact).abs().max() + 4 * torch.finfo(ours.dtype).eps * exact.abs().max()
            if not (ours.double() - exact).abs().max() <= allowed:
                return "a gradient is further from float64 than the tolerance rule allows"
        return None

    return verify


def step_case(group, shape, step, inputs, kernels, verify, quick=False, rounds=None) -> Case:
    return Case(
        group=group,
        shape=shape,
        make_inputs=inputs,
        candidates=lambda: {"camox": Replaced(step, *kernels), "eager": step, "compile": None},
        direction="step",
        grad_inputs=(),
        verify=verify,
        default_allocator=False,
        rounds=rounds,
        quick=quick,
    )


def linear_backward_case(shape) -> Case:
    step = gradients_of(F.linear, 2)
    inputs = lambda: (*linear_inputs(shape), random_tensor((shape[0], shape[2]), seed=3))  # noqa: E731
    return step_case("tune_linear_backward", shape, step, inputs, ("mm",), same_numbers(step), shape == LINEAR[2])


def batch_case(shape) -> Case:
    batch, rows, depth = shape
    inputs = lambda: (random_tensor(shape, seed=1), random_tensor((batch, depth, rows), seed=2))  # noqa: E731
    return forward_case("tune_bmm", shape, torch.bmm, inputs, kernels=("bmm",), quick=True)


def bfloat16_case(shape) -> Case:
    """x and weight as F.linear has them; PyTorch's product stays where it is."""
    core = lambda x, weight: camox_attr("nn.projections.project")(x, weight.t())  # noqa: E731
    return Case(
        group="tune_linear_bfloat16",
        shape=shape,
        make_inputs=lambda: tuple(x.bfloat16() for x in linear_inputs(shape)),
        candidates=lambda: {"camox": core, "eager": F.linear, "compile": None},
        dtype=torch.bfloat16,
        default_allocator=False,
    )


def pool_cases(size, shape) -> list[Case]:
    """Forward, and forward with backward."""
    pool = lambda x: F.avg_pool2d(x, size, 1, size // 2)  # noqa: E731
    step = gradients_of(pool, 1)
    inputs = lambda: (random_tensor(shape, seed=1),)  # noqa: E731
    with_grad = lambda: (*inputs(), random_tensor(shape, seed=2))  # noqa: E731
    floor, rounds = 2 * 4 * math.prod(shape), SLOW_ROUNDS if size == 31 else None
    kernels, name = ("avg_pool2d",), f"tune_avg_pool_{size}"
    return [
        forward_case(name, shape, pool, inputs, kernels=kernels, bytes=floor, rounds=rounds, quick=size == 3),
        step_case(f"{name}_backward", shape, step, with_grad, kernels, same_numbers(step), rounds=rounds),
    ]


def max_pool_cases(shape, window, stride, padding) -> list[Case]:
    """Forward, and forward with backward."""
    pool = lambda x: F.max_pool2d(x, window, stride, padding)  # noqa: E731
    step = gradients_of(pool, 1)
    sides = ((side + 2 * padding - window) // stride + 1 for side in shape[2:])
    smaller = (*shape[:2], *sides)
    inputs = lambda: (random_tensor(shape, seed=1),)  # noqa: E731
    with_grad = lambda: (*inputs(), random_tensor(smaller, seed=2))  # noqa: E731
    floor, kernels = 4 * math.prod(shape) + (4 + 8) * math.prod(smaller), ("max_pool2d",)
    return [
        forward_case("tune_max_pool", shape, pool, inputs, kernels=kernels, bytes=floor, quick=stride == 1),
        step_case("tune_max_pool_backward", shape, step, with_grad, kernels, same_numbers(step)),
    ]


def depthwise_cases(shape) -> list[Case]:
    """(images, channels, side, window): forward, and forward with backward."""
    images, channels, side, window = shape
    convolve = lambda x, weight, bias: F.conv2d(x, weight, bias, padding=window // 2, groups=channels)  # noqa: E731
    step = gradients_of(convolve, 3)
    of_image = (images, channels, side, side)

    def inputs():
        return (
            random_tensor(of_image, seed=1),
            random_tensor((channels, 1, window, window), seed=2),
            random_tensor((channels,), seed=3),
        )

    with_grad = lambda: (*inputs(), random_tensor(of_image, seed=4))  # noqa: E731
    floor, kernels = 2 * 4 * math.prod(of_image), ("convolution",)
    return [
        forward_case("tune_depthwise", shape, convolve, inputs, kernels=kernels, bytes=floor, quick=window == 9),
        step_case("tune_depthwise_backward", shape, step, with_grad, kernels, same_numbers(step)),
    ]


def pointwise_cases(shape) -> list[Case]:
    """(images, channels of x, channels of y, side): forward, and forward with backward."""
    images, channels, outputs, side = shape
    step = gradients_of(F.conv2d, 3)

    def inputs():
        return (
            random_tensor((images, channels, side, side), seed=1),
            random_tensor((outputs, channels, 1, 1), seed=2),
            random_tensor((outputs,), seed=3),
        )

    with_grad = lambda: (*inputs(), random_tensor((images, outputs, side, side), seed=4))  # noqa: E731
    floor, kernels = 4 * images * (channels + outputs) * side**2, ("pointwise",)
    return [
        forward_case("tune_pointwise", shape, F.conv2d, inputs, kernels=kernels, bytes=floor, quick=side == 14),
        step_case("tune_pointwise_backward", shape, step, with_grad, kernels, same_numbers(step)),
    ]


def softmax_cases(name, function, shape) -> list[Case]:
    """Of rows: forward, and forward with backward; of maps: over the channels, whose gradient is PyTorch's."""
    inputs = lambda: (random_tensor(shape, seed=1),)  # noqa: E731
    rest = {"inputs": inputs, "kernels": ("softmax",), "bytes": 2 * 4 * math.prod(shape)}
    soften = lambda x: function(x, 1)  # noqa: E731
    forward = forward_case(name, shape, soften, **rest, quick=shape[1] == 6)
    if len(shape) > 2:
        return [forward]
    step = gradients_of(soften, 1)
    with_grad = lambda: (*inputs(), random_tensor(shape, seed=2))  # noqa: E731
    return [forward, step_case(f"{name}_backward", shape, step, with_grad, rest["kernels"], same_numbers(step))]


def upsample_cases(name, mode, shape) -> list[Case]:
    """By 2, or a map of logits by 4: forward, and forward with backward."""
    factor = 2 if shape[1] > 1 else 4
    larger = (*shape[:2], factor * shape[2], factor * shape[3])
    upsample = lambda x: F.interpolate(x, scale_factor=factor, mode=mode)  # noqa: E731
    step = gradients_of(upsample, 1)
    inputs = lambda: (random_tensor(shape, seed=1),)  # noqa: E731
    with_grad = lambda: (*inputs(), random_tensor(larger, seed=2))  # noqa: E731
    floor, kernels = 4 * (math.prod(shape) + math.prod(larger)), (f"upsample_{mode}2d",)
    return [
        forward_case(name, shape, upsample, inputs, kernels=kernels, bytes=floor, quick=factor == 2),
        step_case(f"{name}_backward", shape, step, with_grad, kernels, same_numbers(step)),
    ]


def batch_norm_cases(shape) -> list[Case]:
    """In training: forward, and forward with PyTorch's backward."""
    normalize = lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, True)  # noqa: E731
    step = gradients_of(normalize, 3)
    inputs = lambda: (random_tensor(shape, seed=1), *(random_tensor(shape[1:2], seed=seed) for seed in (2, 3)))  # noqa: E731
    with_grad = lambda: (*inputs(), random_tensor(shape, seed=4))  # noqa: E731
    floor, kernels = 2 * 4 * math.prod(shape), ("batch_norm",)
    return [
        forward_case("tune_batch_norm", shape, normalize, inputs, kernels=kernels, bytes=floor, quick=shape[2] == 14),
        step_case("tune_batch_norm_backward", shape, step, with_grad, kernels, same_numbers(step)),
    ]


def wrong_dropout(numbers, inputs) -> str | None:
    grad = numbers["output0"]
    share = (grad == 0).float().mean().item()
    if abs(share - 0.1) > 6 * math.sqrt(0.09 / grad.numel()):
        return f"{share:.4f} of the elements are dropped"
    return None if torch.allclose(grad[grad != 0], inputs[-1][grad != 0] / 0.9) else "a kept gradient is not grad / 0.9"


def dropout_case(shape) -> Case:
    step = gradients_of(lambda x: F.dropout(x, 0.1), 1)
    inputs = lambda: (random_tensor(shape, seed=1), random_tensor(shape, seed=2))  # noqa: E731
    return step_case("tune_dropout", shape, step, inputs, ("bernoulli_",), wrong_dropout, quick=True)


class TrainStep(nn.Module):
    """Forward, backward and AdamW at a learning rate of 0: every step is the same step but for its dropout."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def forward(self, x, *targets):
        loss = self.loss(self.model(x), *targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def encoder(width, heads, layers, dropout):
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def square(y):
    return y.square().mean()


def one_tensor(shape):
    return (random_tensor(shape, seed=1),)


def published_tree():
    """K-1's quick tree, node by node in stock PyTorch: 13 nodes, dropout 0.1."""
    from examples.k1.training import Config, build_model

    return bench_k1.TrainStep(build_model(Config(ops="torch", max_seq_len=64, branching="3,3", num_layers=3)), False)


def rows_and_classes(shape, classes):
    return random_tensor(shape, seed=1), torch.arange(shape[0]) * 7919 % classes


# group: shape of the input, step, its inputs of that shape, how far the losses of two steps may be apart
STEPS = {
    "tune_vit_step": ((32, 196, 192), lambda: TrainStep(encoder(192, 3, 4, 0.0), square), one_tensor, 1e-5),
    "tune_mlp_step": (
        (1024, 512),
        lambda: TrainStep(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)), square),
        one_tensor,
        1e-5,
    ),
    "tune_lm_head_step": (
        (1024, 256),
        lambda: TrainStep(nn.Linear(256, 32000), F.cross_entropy),
        lambda shape: rows_and_classes(shape, 32000),
        1e-5,
    ),
    "tune_transformer_step": ((1600, 6, 96), lambda: TrainStep(encoder(96, 8, 4, 0.1), square), one_tensor, 1e-2),
    "tune_k1_step": ((64, 64), published_tree, lambda shape: (bench_k1.random_words(shape, 10000),), 1e-2),
}


def train_case(group) -> Case:
    shape, build, inputs, tolerance = STEPS[group]
    expected = {}

    def candidates():
        with torch.enable_grad():
            torch.manual_seed(0)
            step = build()
            expected["loss"] = step(*inputs(shape)).item()
        return {"camox": Replaced(step), "eager": step, "compile": None}

    def verify(numbers, _):
        found = numbers["output0"].item()
        if not abs(found - expected["loss"]) <= tolerance * abs(expected["loss"]):
            return f"loss {found:.7g}, PyTorch's {expected['loss']:.7g}"
        return None

    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: inputs(shape),
        candidates=candidates,
        direction="step",
        grad_inputs=(),
        verify=verify,
        default_allocator=False,
        quick=group == "tune_mlp_step",
    )


def cases() -> list[Case]:
    return [
        *map(linear_case, LINEAR),
        *map(linear_backward_case, LINEAR),
        *map(batch_case, BATCHES),
        *map(dropout_case, DROPOUT),
        *map(bfloat16_case, LINEAR),
        *(case for size, shape in POOLS for case in pool_cases(size, shape)),
        *(case for arguments in MAX_POOLS for case in max_pool_cases(*arguments)),
        *(case for shape in DEPTHWISE for case in depthwise_cases(shape)),
        *(case for shape in POINTWISE for case in pointwise_cases(shape)),
        *(case for arguments in SOFTENED for case in softmax_cases(*arguments)),
        *(case for shape in NORMALIZED for case in batch_norm_cases(shape)),
        *(case for shape in UPSAMPLED for case in upsample_cases("tune_upsample", "bilinear", shape)),
        *(case for shape in UPSAMPLED for case in upsample_cases("tune_upsample_nearest", "nearest", shape)),
        *map(train_case, STEPS),
    ]
