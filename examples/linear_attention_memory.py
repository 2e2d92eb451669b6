"""What attention over an image's positions costs: python examples/linear_attention_memory.py [--out demo].

One training step, forward and backward, of CamoXpert's SDTAEncoder on the features of its first stage, a quarter of the
image's side: softmax attention through the matrix of all pairs of positions, the same through PyTorch's fused kernel,
linear attention as the users' code writes it, and camox_ops. Prints a table of peak memory and time and writes
linear_attention_memory.png and .json.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import torch

from camox_ops import nn
from camox_ops.train import tune_cpu_allocator
from camox_ops.train.machine import free_memory
from examples.camoxpert.backbone import SDTAEncoder
from examples.common.memory import MB, peak_bytes
from examples.common.report import machine, write_json

SIZES = (192, 224, 288, 352, 416)
STRIDE, HEADS = 4, 8
STEPS = {
    "softmax, matrix": partial(SDTAEncoder, use_linear_attention=False),
    "softmax, fused": partial(nn.SDTAEncoder, use_linear_attention=False),
    "linear, PyTorch": SDTAEncoder,
    "linear, camox": nn.SDTAEncoder,
}
MATRICES = 4  # scores, weights and their gradients are alive together


def needed(name, batch, positions):
    """Bytes of the matrices of all pairs, the only reason for which a step may not fit."""
    return MATRICES * batch * HEADS * positions**2 * 4 if name == "softmax, matrix" else 0


def measured(name, batch, dim, side, repeats):
    """What measure says, or None where a step's matrices do not fit into memory."""
    matrices = needed(name, batch, side * side)
    if not matrices:
        return measure(name, batch, dim, side, repeats)
    if matrices > 0.8 * (free_memory(torch.device("cpu")) or float("inf")):
        return None
    # In a process of its own: memory that is kept after one size has no place for the matrices of the next.
    with ProcessPoolExecutor(1, get_context("spawn"), tune_cpu_allocator) as pool:
        try:
            return pool.submit(measure, name, batch, dim, side, repeats).result()
        except BrokenProcessPool:  # the system ends a process for which there is no memory
            return None


def measure(name, batch, dim, side, repeats):
    """{"peak_mb", "ms"} of one kind of step."""
    torch.manual_seed(0)
    module = STEPS[name](dim, HEADS, drop_path=0.0)
    x, grad = torch.randn(2, batch, dim, side, side).unbind()
    x.requires_grad_()

    def step():
        module(x).backward(grad)
        x.grad = None
        module.zero_grad(set_to_none=True)

    step()
    peak, times = peak_bytes(step), []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {"peak_mb": peak / MB, "ms": 1000 * sorted(times)[len(times) // 2]}


def table(rows):
    """Lines of text: peak memory in MB and time in ms of every kind, one line for each size."""
    lines = [f"{'image':>8}{'positions':>11}" + "".join(f"{name:>24}" for name in STEPS)]
    for row in rows:
        cells = (row["steps"][name] for name in STEPS)
        shown = (f"{cell['peak_mb']:.0f} MB {cell['ms']:8.1f} ms" if cell else "does not fit" for cell in cells)
        lines.append(f"{row['size']:>8}{row['positions']:>11}" + "".join(f"{text:>24}" for text in shown))
    return "\n".join(lines)


def draw(path, rows):
    """Peak memory and time over the size of the image."""
    from matplotlib import pyplot as plt

    figure, places = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for axes, key, label in zip(
        places, ("peak_mb", "ms"), ("peak memory of a step, MB", "time of a step, ms"), strict=True
    ):
        for name in STEPS:
            seen = [(row["size"], row["steps"][name][key]) for row in rows if row["steps"][name]]
            axes.plot(*zip(*seen, strict=True), marker="o", label=name)
        axes.set(xlabel="side of the image, pixels", ylabel=label, yscale="log", xticks=[row["size"] for row in rows])
        axes.grid(alpha=0.3)
    places[0].legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="sides of the images, in pixels")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dim", type=int, default=48, help=f"channels, a multiple of {HEADS}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="demo", help="folder for the plot and the numbers")
    options = parser.parse_args(arguments)
    allocator = tune_cpu_allocator()
    rows = []
    for size in options.sizes:
        side = size // STRIDE
        steps = {name: measured(name, options.batch, options.dim, side, options.repeats) for name in STEPS}
        rows.append({"size": size, "positions": side * side, "steps": steps})
    print(f"SDTAEncoder({options.dim}, {HEADS}), batch {options.batch}, float32, forward and backward")
    print(table(rows))
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    draw(folder / "linear_attention_memory.png", rows)
    found = {
        "machine": machine(),
        "allocator": str(allocator),
        "batch": options.batch,
        "dim": options.dim,
        "rows": rows,
    }
    write_json(folder / "linear_attention_memory.json", found)
    print(f"wrote {folder / 'linear_attention_memory.png'} and {folder / 'linear_attention_memory.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
