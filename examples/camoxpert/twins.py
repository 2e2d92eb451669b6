"""The same CamoXpert built from stock PyTorch and from camox_ops, with the same weights."""

import torch
from torch import nn

from .model import CamoXpert


@torch.no_grad()
def spread_gates(model, images):
    """Rescale every gate so that over these images each expert's logit has mean 0 and deviation 1.

    Freshly drawn gates send all images to the same experts, and the balance loss has no gradient to change that; a
    comparison should run all of them.
    """
    logits = {}
    hooks = [
        layer.gate.register_forward_hook(lambda gate, _, output: logits.update({gate: output.flatten(1)}))
        for layer in model.moe_layers
    ]
    was_training = model.training
    model.eval()(images)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    for gate, values in logits.items():
        convolution = gate[1]
        mean, deviation = values.mean(0), values.std(0).clamp_min(1e-6)
        convolution.weight.div_(deviation.view(-1, 1, 1, 1))
        convolution.bias.sub_(mean).div_(deviation)


def build_twins(images, backbone="tiny", num_experts=7, seed=0):
    """{"torch": model, "camox": model}: equal weights drawn from seed, gates spread over images (B,3,H,W).

    The experts' dropout is off: one draws image by image, the other for all images of an expert.
    """
    torch.manual_seed(seed)
    models = {name: CamoXpert(backbone=backbone, num_experts=num_experts, ops=name) for name in ("torch", "camox")}
    for model in models.values():
        for module in model.moe_layers.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    spread_gates(models["torch"], images)
    models["camox"].load_state_dict(models["torch"].state_dict())
    return models


class RoutingRecorder:
    """Collects the expert numbers (B,K) that each MoE layer of a model chose, and their usage (E,), pass by pass."""

    def __init__(self, model):
        self.chosen, self.usage = [], []
        self.hooks = [layer.register_forward_hook(self.record) for layer in model.moe_layers]

    def record(self, layer, inputs, output):
        self.chosen.append(output[2]["top_k_indices"])
        self.usage.append(output[2]["expert_usage"])

    def remove(self):
        """Stop collecting."""
        for hook in self.hooks:
            hook.remove()

    def take(self):
        """(chosen, usage) lists of the passes since the last call, one entry per layer and pass."""
        taken = self.chosen, self.usage
        self.chosen, self.usage = [], []
        return taken


def same_routing(first, second):
    """Whether two lists of chosen experts agree for every layer and image, in whatever order an image has them."""
    return all(torch.equal(a.sort(-1).values, b.sort(-1).values) for a, b in zip(first, second, strict=True))
