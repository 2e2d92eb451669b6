"""Time and memory of a training step of the public project's small, medium and large models, measured here:

    python -m examples.emberformer.sizes small medium [--pixels] [--checkpointing 4] [--steps 3]

400 patches of 10 terrain channels, six steps of history, dropout as configured, batch sizes as configured.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from ..common import memory
from .config import model_arguments, read
from .data import Batch
from .losses import Criterion
from .model import EmberFormer
from .training import parameter_groups, pixel_loss

GRID, STEPS_OF_HISTORY, CHANNELS = (20, 20), 6, 10
NAMES = ("small", "medium", "large")


def configuration(name):
    return read(Path(__file__).with_name("configs") / f"{name}.yaml")


def random_batch(size, patch, grid=GRID, history=STEPS_OF_HISTORY, seed=0):
    """A batch of the shapes that the public project trains on, one history shorter than the others."""
    generator = torch.Generator().manual_seed(seed)
    patches = grid[0] * grid[1]
    valid_t = torch.ones(size, history, dtype=torch.bool)
    valid_t[-1, : history // 3] = False
    return Batch(
        torch.rand(size, patches, history, generator=generator),
        torch.rand(size, history, 2, generator=generator),
        torch.rand(size, patches, CHANNELS, generator=generator),
        valid_t,
        torch.ones(size, patches, dtype=torch.bool),
        (torch.rand(size, 1, patch * grid[0], patch * grid[1], generator=generator) < 0.1).float(),
    )


def coarse_loss(model, batch, criterion, grid):
    """The loss at the resolution of patches."""
    target = torch.nn.functional.avg_pool2d(batch.target, model.patch_size)
    return criterion(model(*batch.inputs(), grid), target, batch.valid.view(-1, 1, *grid).float())[0]


def make_step(model, config, loss_of):
    """A whole step with the public script's optimizer; loss_of() -> loss."""
    settings = config.train
    optimizer = torch.optim.Adam(parameter_groups(model, settings), weight_decay=settings.weight_decay, fused=True)

    def step():
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(name, ops, pixels=False, checkpointing=0, steps=3):
    """{"step_ms", "peak_mb", "saved_mb"} of the configuration `name`."""
    config = configuration(name)
    torch.manual_seed(0)
    model = EmberFormer(**model_arguments(config, CHANNELS), ops=ops).train()
    model.gradient_checkpointing_enable(checkpointing)
    batch, criterion = random_batch(config.data.batch_size, model.patch_size), Criterion(config.model.loss)

    def loss_of():
        if pixels:
            return pixel_loss(model, batch, criterion, GRID)[0]
        return coarse_loss(model, batch, criterion, GRID)

    step = make_step(model, config, loss_of)
    step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {"step_ms": 1000 * statistics.median(times), **memory.measure(model, loss_of, step)}


def table(names, pixels=False, checkpointing=0, steps=3):
    """{name: {"torch": row, "camox": row, perhaps "camox + checkpointing": row}}."""
    kinds = {"torch": ("torch", 0), "camox": ("camox", 0)}
    if checkpointing:
        kinds["camox + checkpointing"] = ("camox", checkpointing)
    return {
        name: {kind: measure(name, ops, pixels, parts, steps) for kind, (ops, parts) in kinds.items()} for name in names
    }


def lines(found):
    """What table returned, as lines of text."""
    rows = [f"{'a whole step':34}{'ms':>9}{'times as fast':>15}{'peak, MB':>11}{'kept for backward, MB':>23}"]
    for name, kinds in found.items():
        base = kinds["torch"]["step_ms"]
        for kind, row in kinds.items():
            speed = base / row["step_ms"]
            memories = f"{row['peak_mb']:>11.0f}{row['saved_mb']:>23.0f}"
            rows.append(f"{f'{name}, {kind}':34}{row['step_ms']:>9.0f}{speed:>15.2f}{memories}")
    return rows


def main():
    parser = argparse.ArgumentParser(prog="sizes.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--pixels", action="store_true", help="with the refinement decoder, 320x320 pixels")
    parser.add_argument("--checkpointing", type=int, default=0, help="a row with so many checkpointed parts")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    options = parser.parse_args()
    from camox_ops.train import tune_cpu_allocator

    tune_cpu_allocator()
    print("\n".join(lines(table(options.names, options.pixels, options.checkpointing, options.steps))))


if __name__ == "__main__":
    main()
