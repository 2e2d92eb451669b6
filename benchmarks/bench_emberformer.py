"""One training step of EmberFormer, optimizer included: on camox_ops, and as the public model computes.

The coarse model's step gives the logits of patches; the pixels' has the refinement decoder too, whose convolutions both
sides leave to PyTorch. Widths and dropout of the public configs/emberformer.yaml, its UNet decoder, ten terrain
channels, the loss focal-Tversky, fused Adam on both sides. The learning rate is 0, so that every step is the same step
but for its dropout; outputs and gradients are compared without dropout first. camox_graph, on a GPU, replays camox's
step as a CUDA graph.
"""

import copy
import math

import torch
from torch import nn

from benchmarks.common import Captured, Case, Skipped, camox_attr, on_gpu, random_tensor

TOKENS = (4, 400, 6, 96)  # B, N, T, d_model
BATCH_OF_16 = (16, 400, 6, 96)
LARGE = (32, 400, 6, 128)
PATCH, CHANNELS = 16, 10
PUBLISHED = {"nhead": 8, "num_layers": 4, "dim_feedforward": 384, "dropout": 0.1, "spatial_base_channels": 48}
LARGE_SIZES = PUBLISHED | {"num_layers": 6, "dim_feedforward": 512}
REHEARSED = {"nhead": 4, "num_layers": 1, "dim_feedforward": 64, "dropout": 0.1, "spatial_base_channels": 8}
FEW_ROUNDS = 5


def grid_of(fire):
    return (math.isqrt(fire.shape[1]),) * 2


def random_inputs(shape):
    """fire, wind, terrain, validity with a history that is shorter than the others, and the target's noise."""
    batch, patches, steps, _ = shape
    valid_t = torch.ones(batch, steps, dtype=torch.bool)
    valid_t[1, :2] = False
    fire = random_tensor((batch, patches, steps), seed=1).sigmoid()
    return fire, random_tensor((batch, steps, 2), seed=2), random_tensor((batch, patches, CHANNELS), seed=3), valid_t


class TrainStep(nn.Module):
    """Forward, backward and Adam of one model: inputs -> loss."""

    def __init__(self, model, pixels, autocast=False, graph=False):
        super().__init__()
        from examples.common.graph import GraphedStep
        from examples.common.optimizer import capturable
        from examples.emberformer.config import Loss
        from examples.emberformer.losses import Criterion

        self.model, self.autocast = model.train(), autocast
        self.run = model.forward_pixels if pixels else model
        self.criterion = Criterion(Loss(type="focal_tversky"))
        trained = [p for name, p in model.named_parameters() if pixels or not name.startswith("refinement_decoder")]
        self.optimizer = capturable(torch.optim.Adam(trained, lr=0.0, weight_decay=1e-4, fused=True))
        self.step = GraphedStep(self.compute) if graph else self.compute

    def forward(self, *inputs):
        return self.step(*inputs)[0]

    def compute(self, fire, wind, static, valid_t):
        with torch.autocast(fire.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.run(fire, wind, static, valid_t, grid_of(fire))
        target = (torch.arange(logits.numel(), device=logits.device) % 7 == 0).float().view_as(logits)
        loss = self.criterion(logits, target, torch.ones_like(target))[0]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)


def require_equal(models, inputs, pixels, autocast):
    """Skipped unless logits and gradients of {"camox", "eager"} agree without dropout."""
    found = {}
    for name, model in models.items():
        model = copy.deepcopy(model).eval()
        with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = (model.forward_pixels if pixels else model)(*(tensor[:2] for tensor in inputs), grid_of(inputs[0]))
        logits.float().square().sum().backward()
        found[name] = [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for ours, theirs in zip(found["camox"], found["eager"], strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        if not error <= (5e-2 if autocast else 1e-3):
            raise Skipped(f"wrong result: logits or gradients without dropout differ by {error:.2g} of their norm")


def step_case(group, shape, pixels=False, sizes=PUBLISHED, dtype=torch.float32, rounds=FEW_ROUNDS) -> Case:
    expected = {}
    autocast = dtype == torch.bfloat16

    def candidates():
        camox_attr("nn.TemporalEncoder")
        from examples.emberformer.model import EmberFormer

        def build(ops):
            torch.manual_seed(0)
            return EmberFormer(shape[3], CHANNELS, spatial_decoder="unet", patch_size=PATCH, **sizes, ops=ops).to(
                torch.get_default_device()
            )

        with torch.enable_grad():
            models = {"camox": build("camox"), "eager": build("torch")}
            models["camox"].load_state_dict(models["eager"].state_dict())
            inputs = tuple(tensor.to(torch.get_default_device()) for tensor in random_inputs(shape))
            require_equal(models, inputs, pixels, autocast)
            steps = {name: TrainStep(built, pixels, autocast) for name, built in models.items()}
            if inputs[0].is_cuda:
                steps["camox_graph"] = Captured(TrainStep(build("camox"), pixels, autocast, graph=True))
            expected["loss"] = steps["eager"](*inputs).item()
        return {**steps, "compile": None}

    def verify(numbers, _):
        loss = numbers["output0"].item()
        if not abs(loss - expected["loss"]) <= 0.1 * abs(expected["loss"]):  # another dropout
            return f"loss {loss:.6g}, stock PyTorch's {expected['loss']:.6g}"
        return None

    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: random_inputs(shape),
        candidates=candidates,
        direction="step",
        dtype=dtype,
        grad_inputs=(),
        verify=verify,
        default_allocator=False,
        rounds=rounds,
        quick=shape == TOKENS and not pixels,
    )


@on_gpu(
    shapes=(LARGE,),
    rehearsal=(2, 16, 6, 32),
    size="step",
    directions=("step",),
    dtypes=(torch.bfloat16,),
    full=True,
)
def make_case(shape, direction, dtype, layout) -> Case:
    return step_case("emberformer_step", shape, sizes=LARGE_SIZES if shape == LARGE else REHEARSED, dtype=dtype)


def cases() -> list[Case]:
    return [
        step_case("emberformer_step", TOKENS),
        step_case("emberformer_step", BATCH_OF_16),
        step_case("emberformer_pixel_step", TOKENS, pixels=True),
    ]
