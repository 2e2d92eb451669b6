"""What the balance loss does: python examples/camoxpert/balance.py [--steps 150] [--out demo].

Trains the small model twice from the same fresh weights, once with each aux_loss, and writes balance.png and
balance.json: each expert's share of the choices over the training. Fresh gates send nearly all images to the same
experts; "usage_mse" has no gradient to change that.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib import pyplot as plt

from camox_ops.train import tune_cpu_allocator
from examples.camoxpert import duel
from examples.camoxpert.losses import AdvancedCODLoss
from examples.camoxpert.model import CamoXpert
from examples.camoxpert.moe import AUX_LOSSES
from examples.camoxpert.report import draw_usage
from examples.camoxpert.steps import lr_factor
from examples.camoxpert.twins import RoutingRecorder
from examples.common.report import machine, write_json

LEARNING_RATE = 2e-3
NUM_EXPERTS = 7


def effective_experts(shares):
    """exp(entropy) of shares (..., experts): as many evenly used experts would be as even; at most their number."""
    return torch.special.entr(shares).sum(-1).exp()


def train(aux_loss, dataset, steps, batch_size=8, seed=0):
    """Train a fresh model; returns {"history", "first", "last", "losses"}.

    history: shares (parts, layers, experts); first and last: effective experts of each layer in the first step and over
    the last quarter of the training; losses: the segmentation loss per step, the balance loss left out.
    """
    torch.manual_seed(seed)
    model = CamoXpert(backbone="tiny", num_experts=NUM_EXPERTS, aux_loss=aux_loss)
    stepper, recorder = duel.make_stepper(model, LEARNING_RATE), RoutingRecorder(model)
    criterion, usage, losses = AdvancedCODLoss(), [], []

    def recording(logits, masks, aux, deep):
        total, parts = criterion(logits, masks, aux, deep)
        losses.append((total - criterion.weights["aux"] * aux).detach())
        return total, parts

    stepper.criterion = recording
    for index, batch in enumerate(duel.batches(dataset, batch_size, steps, seed)):
        stepper.accumulate(*batch)
        stepper.step(lr_factor(index, steps))
        usage.append(torch.stack(recorder.take()[1]))
    parts = torch.stack(usage).chunk(duel.HISTORY_PARTS)
    return {
        "history": [duel.shares(part).tolist() for part in parts],
        "first": effective_experts(duel.shares(usage[:1])).tolist(),
        "last": effective_experts(duel.shares(usage[-max(1, steps // 4) :])).tolist(),
        "losses": torch.stack(losses).tolist(),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="balance.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--size", type=int, default=96, help="side of the images, in pixels")
    parser.add_argument("--out", default="demo", help="folder for balance.png and balance.json")
    options = parser.parse_args(arguments)
    tune_cpu_allocator()
    dataset = duel.training_set(options.size)
    results = {}
    for aux_loss in AUX_LOSSES:
        results[aux_loss] = row = train(aux_loss, dataset, options.steps)
        first, last = ("  ".join(f"{value:.2f}" for value in row[name]) for name in ("first", "last"))
        tail = row["losses"][-max(1, options.steps // 4) :]
        print(f"--aux-loss {aux_loss}: effective experts of {NUM_EXPERTS} in each layer")
        print(f"    first step {first}   last quarter {last}   its loss {sum(tail) / len(tail):.4f}", flush=True)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    figure = plt.figure(figsize=(12, 6), constrained_layout=True)
    rows = figure.subfigures(len(AUX_LOSSES), 1)
    for place, (aux_loss, row) in zip(rows, results.items(), strict=True):
        place.suptitle(f"--aux-loss {aux_loss}")
        draw_usage(place, place.add_gridspec(1, 1)[0], torch.tensor(row["history"]).numpy(), options.steps)
    figure.savefig(folder / "balance.png", dpi=80)
    plt.close(figure)
    write_json(folder / "balance.json", {"machine": machine(), "steps": options.steps, "runs": results})
    print(f"wrote {folder / 'balance.png'} and {folder / 'balance.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
