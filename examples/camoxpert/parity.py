"""How far the camox model is from float64, beside how far stock PyTorch itself is.

Rule, per tensor: max|camox - ref64| <= 2 * max|torch - ref64| + 4 * eps * max|ref64|, where ref64 is the stock model in
float64. One float32 run is one sample of its rounding, lucky where a gradient happens to cancel, so PyTorch's own error
is the largest over several orders of the same batch - which change nothing but the order of sums.
"""

import copy

import torch

from .losses import AdvancedCODLoss
from .twins import RoutingRecorder, same_routing, without_dropout

BATCH_ORDERS = 4
EDGE_EXPERT = 4
KINDS = ("output", "loss", "gradient")
COLUMNS = ("camox_vs_torch", "torch_vs_float64", "camox_vs_float64", "scale")


def run_once(model, images, masks, shift=0):
    """One training forward and backward with the batch rotated by shift.

    Returns ({name: tensor} of outputs, loss and gradients in the original order, chosen experts).
    """
    model = without_dropout(copy.deepcopy(model)).train()
    recorder = RoutingRecorder(model)
    criterion = AdvancedCODLoss().to(images.dtype)
    logits, aux_loss, deep = model(images.roll(shift, 0), return_deep_supervision=True)
    loss, _ = criterion(logits, masks.roll(shift, 0), aux_loss, deep)
    loss.backward()
    found = {"output logits": logits.detach().roll(-shift, 0), "loss total": loss.detach()}
    found |= {f"output deep {level}": value.detach().roll(-shift, 0) for level, value in enumerate(deep)}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    chosen, usage = recorder.take()
    return found, [numbers.roll(-shift, 0) for numbers in chosen], usage


def compare(models, images, masks):
    """Compare models {"torch", "camox"} on one batch of images (B,3,H,W) and masks (B,1,H,W).

    Returns {"passed", "routing_same", "missing", "edge_pictures", "kinds", "worst"}: per kind (output, loss, gradient)
    the largest absolute differences, and the tensor that comes nearest to, or furthest past, its limit.
    """
    stock, camox = models["torch"], models["camox"]
    exact, exact_chosen, usage = run_once(copy.deepcopy(stock).double(), images.double(), masks.double())
    found, chosen, _ = run_once(camox, images, masks)
    stock_runs = [run_once(stock, images, masks, shift) for shift in range(BATCH_ORDERS)]
    routing_same = same_routing(chosen, exact_chosen) and all(same_routing(run[1], exact_chosen) for run in stock_runs)
    missing = sorted(exact.keys() ^ found.keys())

    kinds = {kind: dict.fromkeys(COLUMNS, 0.0) for kind in KINDS}
    worst = {"tensor": None, "share_of_limit": 0.0}
    for name in exact.keys() & found.keys():
        reference = exact[name]
        eps = torch.finfo(found[name].dtype).eps
        scale = reference.abs().max().item()
        own = max(difference(run[0].get(name), reference) for run in stock_runs)
        ours = difference(found[name], reference)
        limit = 2 * own + 4 * eps * scale
        share = ours / limit if limit else float(ours > 0)
        if not share <= worst["share_of_limit"]:  # also true for NaN
            worst = {"tensor": name, "share_of_limit": share}
        row = kinds[name.split()[0]]
        stock_value = stock_runs[0][0].get(name)
        seen = (difference(found[name], stock_value), difference(stock_value, reference), ours, scale)
        for column, value in zip(COLUMNS, seen, strict=True):
            row[column] = max(row[column], value)
    edge_pictures = [int(layer[EDGE_EXPERT]) for layer in usage]
    passed = routing_same and not missing and min(edge_pictures) > 0 and worst["share_of_limit"] <= 1
    return {
        "passed": passed,
        "routing_same": routing_same,
        "missing": missing,
        "edge_pictures": edge_pictures,
        "kinds": kinds,
        "worst": worst,
    }


def difference(first, second):
    """max|first - second| in float64; infinite where one of them is missing."""
    if first is None or second is None:
        return float("inf")
    return (first.double() - second.double()).abs().max().item()
