"""How far the camox model is from float64, beside how far stock PyTorch itself is, by the rule of common/parity.py.

What would make two correct float32 runs differ by chance is kept out: dropout is off, and ReLU is GELU in all copies.
An activation at zero to rounding switches a whole gradient path on in one run and off in the other, which says nothing
about either.
"""

import copy

import torch
from torch import nn

from ..common.parity import compare_with_float64, shifted_samples
from .losses import AdvancedCODLoss
from .twins import RoutingRecorder, same_routing

EDGE_EXPERT = 4


@torch.no_grad()
def comparable(model):
    """A copy without dropout and kinks, its gates leaning to the edge expert so that every layer runs it."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.GELU())
    for layer in model.moe_layers:
        layer.gate[1].bias[EDGE_EXPERT] += 1
    return model.train()


def run_once(model, images, masks, shift=0):
    """One forward and backward with the batch rotated by shift.

    Returns {name: tensor} of outputs, loss and gradients, in the batch's own order; the chosen experts (B,K) per layer,
    in that order; and their usage (E,) per layer.
    """
    model.zero_grad(set_to_none=True)
    recorder = RoutingRecorder(model)
    criterion = AdvancedCODLoss().to(images.dtype)
    logits, aux_loss, deep = model(images.roll(shift, 0), return_deep_supervision=True)
    loss, _ = criterion(logits, masks.roll(shift, 0), aux_loss, deep)
    loss.backward()
    recorder.remove()
    found = {"output logits": logits.detach().roll(-shift, 0), "loss total": loss.detach()}
    found |= {f"output deep {level}": value.detach().roll(-shift, 0) for level, value in enumerate(deep)}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    chosen, usage = recorder.take()
    return found, [numbers.roll(-shift, 0) for numbers in chosen], usage


def compare(models, images, masks):
    """Compare models {"torch", "camox"} on one batch of images (B,3,H,W) and masks (B,1,H,W).

    Returns {"passed", "routing_same", "missing", "edge_images", "kinds", "worst"}: per kind (output, loss, gradient)
    the largest absolute differences, and the tensor that comes nearest to, or furthest past, its limit.
    """
    stock, camox = comparable(models["torch"]), comparable(models["camox"])
    exact, exact_chosen, usage = run_once(copy.deepcopy(stock).double(), images.double(), masks.double())
    runs, samples = (
        shifted_samples(lambda moved, shift, model=model: run_once(model, moved, masks, shift), images)
        for model in (camox, stock)
    )
    routing_same = all(same_routing(chosen, exact_chosen) for _, chosen, _ in runs + samples)
    errors = compare_with_float64(exact, [run[0] for run in runs], [sample[0] for sample in samples])
    edge_images = [int(layer[EDGE_EXPERT]) for layer in usage]
    right = not errors["missing"] and errors["worst"]["share_of_limit"] <= 1
    return {
        "passed": routing_same and right and min(edge_images) > 0,
        "routing_same": routing_same,
        "edge_images": edge_images,
        **errors,
    }
