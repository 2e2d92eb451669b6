"""The built-in set: camouflaged objects composed from the photographs inside the scikit-image and scikit-learn wheels.

An image is a window of a photograph; its object is a smooth random outline filled with texture from elsewhere in the
same photograph, turned, magnified and slightly brighter and flatter than what it covers. Nothing is downloaded or
stored.
"""

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image
from skimage.transform import AffineTransform, warp

# a photograph is on one side only; scenes that exist twice (the stereo pair) are used once
TRAIN_PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "coins.png",
    "grass.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "retina.jpg",
    "rocket.jpg",
    "flower.jpg",
)
HELD_OUT_PHOTOGRAPHS = ("chelsea.png", "coffee.png", "gravel.png", "motorcycle_left.png", "china.jpg")
SKLEARN_PHOTOGRAPHS = ("china.jpg", "flower.jpg")

SPLITS = {"train": TRAIN_PHOTOGRAPHS, "val": HELD_OUT_PHOTOGRAPHS}
COUNTS = {"train": 176, "val": 40}
SPLIT_KEYS = {"train": 0, "val": 1}
WORKING_SIDE = 400


def photograph_path(name):
    """Where the wheel of scikit-image or scikit-learn keeps the photograph; RuntimeError when it is not there."""
    package, folder = ("sklearn", "datasets/images") if name in SKLEARN_PHOTOGRAPHS else ("skimage", "data")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise RuntimeError(f"the built-in set needs the package that imports as {package!r} for its photograph {name}")
    path = Path(spec.origin).parent / folder / name
    if not path.is_file():
        raise RuntimeError(f"the installed {package} does not ship {path}, which the built-in set needs")
    return path


def load_photograph(name):
    """(H,W,3) float32 in [0,1], the shorter side WORKING_SIDE pixels."""
    with Image.open(photograph_path(name)) as image:
        image = image.convert("RGB")
        scale = WORKING_SIDE / min(image.size)
        size = tuple(round(side * scale) for side in image.size)
        return np.asarray(image.resize(size, Image.Resampling.BOX), dtype=np.float32) / 255


def random_outline(rng, size):
    """Signed distance (size,size) in pixels, positive inside, of a smooth star-shaped outline within the image."""
    radius = size * rng.uniform(0.16, 0.3)
    harmonics = np.arange(2, 7)
    amplitudes = rng.uniform(-1, 1, harmonics.size) * 0.35 / harmonics
    phases = rng.uniform(0, 2 * np.pi, harmonics.size)
    margin = min(radius * 1.3, size / 2)
    centre_y, centre_x = rng.uniform(margin, size - margin, 2)
    y, x = np.mgrid[:size, :size] + 0.5
    angle = np.arctan2(y - centre_y, x - centre_x)
    waves = np.cos(harmonics * angle[..., None] + phases) @ amplitudes
    return radius * (1 + waves) - np.hypot(y - centre_y, x - centre_x)


def cut(photograph, centre, side, size, degrees=0.0, flip=False):
    """A window of `side` photograph pixels around `centre` (y,x), turned and resampled to (size,size,3)."""
    scale = side / size
    to_centre = AffineTransform(translation=(-size / 2, -size / 2))
    turn = AffineTransform(scale=(-scale if flip else scale, scale), rotation=np.deg2rad(degrees))
    to_photograph = AffineTransform(translation=(centre[1], centre[0]))
    return warp(photograph, to_centre + turn + to_photograph, output_shape=(size, size), order=1, mode="reflect")


def compose(photograph, rng, size):
    """One image of the set: (image (size,size,3) uint8, mask (size,size) uint8 of 0 and 255)."""
    height, width = photograph.shape[:2]
    side = rng.uniform(0.55, 0.9) * min(height, width)
    lowest, highest = np.full(2, side / 2), np.array([height, width]) - side / 2
    centre = rng.uniform(lowest, highest)
    scene = cut(photograph, centre, side, size)
    distance = random_outline(rng, size)
    inside = distance > 0

    # texture from elsewhere: the farthest of several windows, so that it does not continue what it covers
    candidates = rng.uniform(lowest, highest, (8, 2))
    elsewhere = candidates[np.argmax(np.hypot(*(candidates - centre).T))]
    texture = cut(photograph, elsewhere, side * rng.uniform(0.6, 0.8), size, rng.uniform(-25, 25), rng.random() < 0.5)

    # camouflage: the colours under the outline, kept but for a small shift, and less contrast
    covered, filling = scene[inside], texture[inside]
    texture = (texture - filling.mean(0)) * rng.uniform(0.6, 0.8) + covered.mean(0) + rng.uniform(0.08, 0.14)
    alpha = np.clip(distance / 1.5 + 0.5, 0, 1)[..., None]
    image = np.clip(scene + alpha * (texture - scene), 0, 1)
    return np.round(image * 255).astype(np.uint8), inside.astype(np.uint8) * 255


def compose_set(split, size, seed=0, count=None):
    """All images of a split, the photographs taken in turn.

    split "train" or "val", size in pixels, count defaults to COUNTS[split]. Returns (images, masks, photograph names).
    The same arguments give the same pixels.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {sorted(SPLITS)}, got {split!r}")
    if size < 32:
        raise ValueError(f"size must be at least 32 pixels, got {size}")
    names = SPLITS[split]
    photographs = {name: load_photograph(name) for name in names}
    images, masks, sources = [], [], []
    for index in range(COUNTS[split] if count is None else count):
        name = names[index % len(names)]
        rng = np.random.default_rng([seed, SPLIT_KEYS[split], index])
        image, mask = compose(photographs[name], rng, size)
        images.append(image)
        masks.append(mask)
        sources.append(name)
    return images, masks, sources
