"""Draws the figures of docs/: python scripts/docs_figures.py

docs/report.png is what `make demo` wrote, where it has been run, in a palette of 128 colours.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from skimage import data

import camox_ops as cx

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "img"
SIDE, GAP = 200, 6


def grey(values: torch.Tensor) -> np.ndarray:
    """[H,W] -> bytes from 0 to the 99th percentile, so that single bright pixels do not darken the rest."""
    top = torch.quantile(values.flatten(), 0.99)
    return (255 * (values / top).clamp(0, 1)).to(torch.uint8).numpy()


def edge_maps() -> None:
    """A photograph, then sobel, laplacian and gradient of it, side by side."""
    photograph = Image.fromarray(data.chelsea()).convert("L").crop((75, 0, 375, 300)).resize((SIDE, SIDE))
    x = torch.from_numpy(np.array(photograph)).float()[None, None] / 255
    panels = [grey(values[0, 0]) for values in (x, *cx.edge_maps(x, border="reflect"))]
    gap = np.full((SIDE, GAP), 255, np.uint8)
    row = [part for panel in panels for part in (gap, panel)][1:]
    Image.fromarray(np.hstack(row)).save(FOLDER / "edge_maps.png", optimize=True)


def report() -> None:
    """The demo's report, small enough for a repository."""
    source = ROOT / "demo" / "report.png"
    if source.exists():
        picture = Image.open(source).convert("RGB").quantize(128, dither=Image.Dither.FLOYDSTEINBERG)
        picture.save(ROOT / "docs" / "report.png", optimize=True)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    edge_maps()
    report()
