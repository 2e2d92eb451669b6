"""Images of fires: previews of a training, and the rows of the demo's report."""

import math

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from torch.nn import functional as F

from ..common import report as _  # noqa: F401  chooses matplotlib's backend
from .data import Sample, collate
from .simulator import CHANNELS

COVER = {"grass": "#c8b560", "shrub": "#8f9a4e", "forest": "#3f6b3a", "water": "#3d6f9e"}
BURNT, HIT, FALSE_ALARM, MISSED = "#3a3230", "#ffb000", "#39d0e0", "#e0218a"
OUTCOMES = {"burnt before": BURNT, "new, predicted": HIT, "false alarm": FALSE_ALARM, "new, missed": MISSED}


def terrain_image(landscape):
    """(10, H, W) of the simulator as an image (H, W, 3): vegetation and water, shaded by a sun in the north-west."""
    channel = {name: landscape[index].numpy() for index, name in enumerate(CHANNELS)}
    image = sum(channel[name][..., None] * np.array(to_rgb(colour)) for name, colour in COVER.items())
    light = (channel["slope_x"] + channel["slope_y"]) / np.sqrt(2 + channel["steepness"] ** 2)
    shade = np.where(channel["water"] > 0, 0.95, 0.85 + 0.55 * light)
    return np.clip(image * shade[..., None], 0, 1)


def painted(image, mask, colour, opacity=1.0):
    """image with a colour where mask (H, W), from 0 to 1, says so."""
    weight = opacity * np.asarray(mask, dtype=float)[..., None]
    return image * (1 - weight) + np.array(to_rgb(colour)) * weight


def outcome_image(image, before, target, predicted):
    """Boolean masks (H, W) of the fire so far, of the next frame and of the prediction, in the colours OUTCOMES."""
    for mask, colour in (
        (before, BURNT),
        (target & predicted & ~before, HIT),
        (predicted & ~target & ~before, FALSE_ALARM),
        (target & ~predicted & ~before, MISSED),
    ):
        image = painted(image, mask, colour, 0.95)
    return image


def history_image(image, masks):
    """The fire so far (T, H, W): the older a part, the darker."""
    colours = plt.get_cmap("afmhot")(np.linspace(0.15, 0.75, len(masks)))[:, :3]
    reached = np.zeros(masks[0].shape, dtype=bool)
    for mask, colour in zip(masks, colours, strict=True):
        image = painted(image, mask & ~reached, tuple(colour), 0.9)
        reached |= mask
    return image


def probability_image(image, p):
    """p (H, W): the more certain, the brighter; nothing below 0.2."""
    colours = plt.get_cmap("inferno")(0.25 + 0.75 * p)[..., :3]
    weight = np.clip(1.7 * (p - 0.2), 0, 1)[..., None]
    return image * (1 - weight) + colours * weight


def bare(axes):
    axes.set_xticks([])
    axes.set_yticks([])


def draw_wind(axes, wind, side):
    """An arrow in the upper left corner, wind the speed and direction from 0 to 1."""
    speed, turn = float(wind[0]), 2 * math.pi * float(wind[1])
    length = side * (0.05 + 0.13 * speed)
    centre = 0.14 * side
    dx, dy = length * math.cos(turn), length * math.sin(turn)
    axes.add_patch(plt.Circle((centre, centre), 0.12 * side, color="white", alpha=0.75))
    axes.annotate(
        "",
        (centre + dx / 2, centre + dy / 2),
        (centre - dx / 2, centre - dy / 2),
        arrowprops={"arrowstyle": "-|>", "color": "#1f3b73", "lw": 2},
    )


def draw_fires(figure, shown):
    """A row for each of `shown`, {"image", "history", "wind", "target", "models": {name: p}}, as predicted makes it."""
    names = list(shown[0]["models"])
    titles = [
        "terrain, wind, fire so far",
        "next frame",
        *(f"--ops {name}: p" for name in names),
        f"{names[-1]}: outcome",
    ]
    axes = figure.subplots(len(shown), len(titles), squeeze=False)
    for row, fire in zip(axes, shown, strict=True):
        image, before = fire["image"], fire["history"][-1]
        grey = 0.35 * image + 0.65 * image.mean(2, keepdims=True)
        target, last = fire["target"], fire["models"][names[-1]] > 0.5
        images = [history_image(image, fire["history"])]
        images.append(painted(painted(grey, before, BURNT, 0.95), target & ~before, HIT, 0.95))
        images += [probability_image(grey, fire["models"][name]) for name in names]
        images.append(outcome_image(grey, before, target, last))
        for place, pixels in zip(row, images, strict=True):
            place.imshow(pixels)
            bare(place)
        draw_wind(row[0], fire["wind"], len(image))
    for place, title in zip(axes[0], titles, strict=True):
        place.set_title(title, fontsize=11)
    handles = [Patch(color=colour, label=name) for name, colour in OUTCOMES.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=9, frameon=False)


def write_preview(path, batch, probability, grid, count, size):
    """The first `count` samples of a batch as a PNG file, `size` pixels for each image: the last frame's patches, the
    next frame, its probability (B, 1, H, W), and what was right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count, titles = min(count, len(batch.target)), ("patches of the last frame", "next frame", "probability", "outcome")
    figure = plt.figure(figsize=(len(titles), count), dpi=size)
    axes = figure.subplots(count, len(titles), squeeze=False)
    figure.subplots_adjust(0, 0, 1, 0.93, 0.02, 0.02)
    for number, row in enumerate(axes):
        target, p = batch.target[number, 0], probability[number, 0].numpy()
        last = batch.fire[number, :, -1].view(1, 1, *grid)
        last = F.interpolate(last, size=target.shape, mode="nearest")[0, 0].numpy()
        dark = np.full((*target.shape, 3), 0.12)
        outcome = outcome_image(dark, last > 0.5, target.numpy() > 0.5, p > 0.5)
        images = painted(dark, last, HIT), painted(dark, target, HIT), probability_image(dark, p), outcome
        for place, image, title in zip(row, images, titles, strict=True):
            place.imshow(image)
            bare(place)
            if number == 0:
                place.set_title(title, fontsize=4.5, pad=2)
    figure.savefig(path)
    plt.close(figure)


def choose(sequences, count):
    """(sequence, frames seen) of `count` fires, those that grow most in one frame."""
    found = []
    for sequence in sequences:
        grown = sequence.masks.flatten(1).sum(1).diff()
        frames = int(grown[1:].argmax()) + 2
        found.append((float(grown[frames - 1]), sequence, frames))
    found.sort(key=lambda entry: -entry[0])
    return [(sequence, frames) for _grown, sequence, frames in found[:count]]


@torch.no_grad()
def predicted(models, sequence, frames):
    """What draw_fires shows of a simulated sequence after so many frames."""
    batch = collate([Sample(*sequence.tokens(frames), sequence.target(frames))])
    shown = {}
    for name, model in models.items():
        was_training = model.training
        logits = model.eval().forward_pixels(*batch.inputs(), sequence.grid)
        model.train(was_training)
        shown[name] = torch.sigmoid(logits)[0, 0].numpy()
    masks = sequence.masks.numpy() > 0
    return {
        "image": terrain_image(sequence.landscape),
        "history": masks[:frames],
        "wind": sequence.wind[frames - 1],
        "target": masks[frames],
        "models": shown,
    }
