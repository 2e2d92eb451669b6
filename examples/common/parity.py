"""Compares a network on camox_ops with float64, beside how far stock PyTorch itself is.

Rule, per tensor: max|camox - ref64| <= NETWORK_FACTOR * max|torch - ref64| + 4 * eps * max|ref64|, where ref64 is the
stock model in float64. One float32 run is one sample of its rounding, so both take SAMPLES runs, on the batch in
another order and on images moved by one rounding: PyTorch's own error is its largest of them, camox's the median of its
own. Of single runs, camox's or stock PyTorch's, 4% are past the limit in the worst of some 570 tensors (small
gradients, such as a norm's of six channels, by up to 1.3 times), whereas what a kernel gets wrong is in every run
and so in their median. A run that is not finite is never outvoted.
"""

import math
import statistics

import torch

NETWORK_FACTOR = 3
SAMPLES = 6
KINDS = ("output", "loss", "gradient")
COLUMNS = ("camox_vs_torch", "torch_vs_float64", "camox_vs_float64", "scale")
HEADINGS = ("camox-torch", "torch-f64", "camox-f64", "largest value")


@torch.no_grad()
def moved_by_one_rounding(tensor, generator):
    """The tensor, its elements multiplied by 1 - eps, 1 or 1 + eps at random."""
    signs = torch.randint(-1, 2, tensor.shape, generator=generator)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)


def shifted_samples(run, images):
    """[run(images, 0), ...]: SAMPLES runs, all but the first of moved images and of the batch rotated by shift."""
    generator = torch.Generator().manual_seed(0)
    moved = (run(moved_by_one_rounding(images, generator), shift) for shift in range(1, SAMPLES))
    return [run(images, 0), *moved]


def compare_with_float64(exact, runs, samples):
    """Compare camox's runs, each {"kind name": tensor}, with exact, the float64 run's, beside samples, stock PyTorch's.

    Returns {"missing", "kinds", "worst"}: names that only one of the two has; per kind (output, loss, gradient) the
    largest absolute differences of the first runs; the tensor that comes nearest to, or furthest past, its limit.
    """
    kinds = {kind: dict.fromkeys(COLUMNS, 0.0) for kind in KINDS}
    worst = {"tensor": None, "share_of_limit": 0.0}
    found = runs[0]
    for name in sorted(exact.keys() & found.keys()):
        reference, stock_value = exact[name], samples[0].get(name)
        scale = reference.abs().max().item()
        own = max(difference(sample.get(name), reference) for sample in samples)
        errors = [difference(run.get(name), reference) for run in runs]
        ours = statistics.median(errors) if math.isfinite(max(errors)) else math.inf
        limit = NETWORK_FACTOR * own + 4 * torch.finfo(found[name].dtype).eps * scale
        share = ours / limit if limit and math.isfinite(ours) else ours
        if share > worst["share_of_limit"]:
            worst = {"tensor": name, "share_of_limit": share}
        row = kinds[name.split()[0]]
        seen = (difference(found[name], stock_value), difference(stock_value, reference), errors[0], scale)
        for column, value in zip(COLUMNS, seen, strict=True):
            row[column] = max(row[column], value)
    return {"missing": sorted(exact.keys() ^ found.keys()), "kinds": kinds, "worst": worst}


def difference(first, second):
    """max|first - second| in float64; infinite where one of them is missing or they are not finite."""
    if first is None or second is None:
        return math.inf
    largest = (first.double() - second.double()).abs().max().item()
    return largest if math.isfinite(largest) else math.inf


def lines(result):
    """What compare_with_float64 returned, as lines of a table."""
    found = [f"{'largest difference of':26}" + "".join(f"{name:>15}" for name in HEADINGS)]
    for kind, row in result["kinds"].items():
        found.append(f"{kind:26}" + "".join(f"{row[column]:>15.2e}" for column in COLUMNS))
    worst = result["worst"]
    found.append(f"nearest to its limit: {worst['tensor']} at {100 * worst['share_of_limit']:.0f}%")
    return found
