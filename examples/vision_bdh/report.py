"""Images of what a model attends to."""

import numpy as np
from matplotlib import pyplot as plt

from ..common import report as _  # noqa: F401  chooses matplotlib's backend
from .data import normalise
from .model import attention_maps

SHOWN = 5


def choose(dataset, count=SHOWN):
    """The first image of each of the first `count` classes."""
    found = [(dataset.labels == label).nonzero()[0, 0] for label in dataset.labels.unique()[:count]]
    return dataset.part(np.array(found))


def maps_of_centre(model, images, passes=None):
    """What the patch in the middle attends to: {number of the pass: (B, side, side)}; None: first, middle, last.

    The mean over the heads; a token before the patches is left out.
    """
    every = attention_maps(model, images)
    side = round(model.num_patches**0.5)
    centre = side // 2 * side + side // 2
    passes = (0, len(every) // 2, len(every) - 1) if passes is None else passes
    chosen = sorted({number % len(every) for number in passes})
    first = model.extra_tokens
    rows = {number: every[number].mean(1)[:, first + centre, first:] for number in chosen}
    return {number: row.reshape(-1, side, side).float().cpu().numpy() for number, row in rows.items()}


def draw_attention(figure, models, dataset, passes=None):
    """Into a (sub)figure, a column per image: the image, then one row per model and pass, with their names.

    models: {name: model}; passes as for maps_of_centre.
    """
    images = normalise(dataset.images)
    device = next(next(iter(models.values())).parameters()).device
    found = {name: maps_of_centre(model, images.to(device), passes) for name, model in models.items()}
    rows = [(name, number) for number in next(iter(found.values())) for name in found]
    axes = figure.subplots(1 + len(rows), len(dataset), squeeze=False)
    for column, image in enumerate(dataset.images):
        image = image.permute(1, 2, 0).numpy()
        axes[0, column].imshow(image if image.shape[2] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=255)
        axes[0, column].set_title(dataset.names[dataset.labels[column]], fontsize=10)
    for row, (name, number) in enumerate(rows, 1):
        values = found[name][number]
        for column in range(len(dataset)):
            axes[row, column].imshow(values[column], vmin=values.min(), vmax=values.max())
        axes[row, 0].set_ylabel(f"{name}\npass {number + 1}".strip(), fontsize=9)
    for one in axes.flat:
        one.set_xticks([])
        one.set_yticks([])


def write_attention(path, model, dataset):
    """The attention maps of a model as a PNG file."""
    figure = plt.figure(figsize=(1.6 * len(dataset), 7), constrained_layout=True)
    figure.suptitle("what the patch in the middle attends to, mean over the heads", fontsize=10)
    draw_attention(figure, {"": model}, dataset)
    figure.savefig(path, dpi=80)
    plt.close(figure)
