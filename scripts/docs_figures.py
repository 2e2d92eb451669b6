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


def signed(values: torch.Tensor) -> np.ndarray:
    """[H,W] -> bytes, 0 in the middle, the 99th percentile of the magnitude at the ends."""
    top = torch.quantile(values.abs().flatten(), 0.99)
    return (255 * (values / top / 2 + 0.5).clamp(0, 1)).to(torch.uint8).numpy()


def photograph() -> torch.Tensor:
    """[1,1,SIDE,SIDE] from 0 to 1."""
    photo = Image.fromarray(data.chelsea()).convert("L").crop((75, 0, 375, 300)).resize((SIDE, SIDE))
    return torch.from_numpy(np.array(photo)).float()[None, None] / 255


def save_row(name: str, panels: list[np.ndarray]) -> None:
    """The panels side by side."""
    gap = np.full((SIDE, GAP), 255, np.uint8)
    row = [part for panel in panels for part in (gap, panel)][1:]
    Image.fromarray(np.hstack(row)).save(FOLDER / f"{name}.png", optimize=True)


def edge_maps() -> None:
    x = photograph()
    save_row("edge_maps", [grey(values[0, 0]) for values in (x, *cx.edge_maps(x, border="reflect"))])


def frequency_bands() -> None:
    x = photograph()
    low, mid, high = (band[0, 0] for band in cx.frequency_bands(x))
    save_row("frequency_bands", [grey(x[0, 0]), grey(low), signed(mid), signed(high)])


def layer_norm2d() -> None:
    """Channels that are one photograph shifted by 0 to 3 pixels, under a shadow that all of them share."""
    x = photograph() * torch.linspace(1, 0.1, SIDE)[:, None]
    x = torch.cat([x.roll((i, j), (2, 3)) for i in range(4) for j in range(4)], dim=1)
    weight, bias = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    panels = [cx.layer_norm2d(x, weight, bias, 1e-4, activation=name)[0, 0] for name in ("none", "gelu")]
    save_row("layer_norm2d", [grey(x[0, 0]), signed(panels[0]), grey(panels[1].clamp_min(0))])


def spatial_gradient() -> None:
    x = photograph()
    gradients = cx.spatial_gradient(x, border="reflect")
    save_row("spatial_gradient", [grey(x[0, 0]), *(signed(values[0, 0]) for values in gradients)])


def report() -> None:
    """The demo's report, small enough for a repository."""
    source = ROOT / "demo" / "report.png"
    if source.exists():
        photo = Image.open(source).convert("RGB").quantize(128, dither=Image.Dither.FLOYDSTEINBERG)
        photo.save(ROOT / "docs" / "report.png", optimize=True)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    edge_maps()
    frequency_bands()
    layer_norm2d()
    spatial_gradient()
    report()
