"""One training step of the demo's CamoXpert, optimizer included, on camox_ops and on stock PyTorch.

The learning rate is 0, so that every step is the same step; dropout draws the same numbers every time.
"""

import torch
from torch import nn

from benchmarks.common import Case, camox_attr, random_tensor


class TrainStep(nn.Module):
    """Forward, backward, clipping and AdamW of one model: (images, masks) -> loss."""

    def __init__(self, model):
        super().__init__()
        from examples.camoxpert import losses, steps

        self.model = model.train()
        self.stepper = steps.Stepper(
            model,
            losses.AdvancedCODLoss(),
            steps.build_optimizer(model, 1e-3),
            steps.Precision("cpu", enabled=False),
            deep_supervision=True,
        )

    def forward(self, images, masks):
        torch.manual_seed(0)
        self.stepper.accumulate(images, masks)
        self.stepper.step(0.0)
        return torch.tensor(self.stepper.take_loss())


def cases() -> list[Case]:
    batch, size = 8, 96  # the demo's

    def inputs():
        masks = (random_tensor((batch, 1, size // 8, size // 8), seed=2) > 0).float()
        return random_tensor((batch, 3, size, size), seed=1), nn.functional.interpolate(masks, scale_factor=8)

    expected = {}

    def candidates():
        camox_attr("nn.EdgeExpert")
        from examples.camoxpert.twins import build_twins

        with torch.enable_grad():
            models = {name: TrainStep(model) for name, model in build_twins(inputs()[0]).items()}
            expected["loss"] = models["torch"](*inputs()).item()
        return {"camox": models["camox"], "eager": models["torch"], "compile": None}

    def verify(numbers, _):
        loss = numbers["output0"].item()
        if not abs(loss - expected["loss"]) <= 1e-3 * abs(expected["loss"]):
            return f"loss {loss:.6g}, stock PyTorch's {expected['loss']:.6g}"
        return None

    return [
        Case(
            group="demo_step",
            shape=(batch, 3, size, size),
            make_inputs=inputs,
            candidates=candidates,
            direction="step",
            verify=verify,
            quick=True,
        )
    ]
