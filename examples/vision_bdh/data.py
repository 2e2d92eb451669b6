"""Labelled 32x32 images: CIFAR-10's published python files, or scikit-learn's scans of handwritten digits."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

DIGITS = "digits"
SIZE = 32
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE, NAMES_FILE = "test_batch", "batches.meta"
# What pickled numpy arrays call; the files hold nothing else.
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class DatasetError(ValueError):
    """Data that cannot be trained on; the message names the path."""


@dataclass
class LabelledImages:
    """images (P,C,32,32) uint8, labels (P,) int64, names of the classes; flipped: mirror images are as good."""

    images: torch.Tensor
    labels: torch.Tensor
    names: list
    flipped: bool

    def __len__(self):
        return len(self.labels)

    def part(self, indices):
        return LabelledImages(self.images[indices], self.labels[indices], self.names, self.flipped)


class ArraysOnly(pickle.Unpickler):
    """Reads arrays, lists, dicts and strings; runs nothing that a file names."""

    def find_class(self, module, name):
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_pickle(path):
    """The dict of one of CIFAR-10's files."""
    try:
        with open(path, "rb") as file:
            return ArraysOnly(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise any
        raise DatasetError(f"cannot read {path}: {error}") from error


def read_batch(path):
    """(images (P,3,32,32) uint8, labels (P,) int64) of one of CIFAR-10's files."""
    content = read_pickle(path)
    try:
        images, labels = content[b"data"], content[b"labels"]
    except (KeyError, TypeError):
        raise DatasetError(f"{path} has no b'data' and b'labels'") from None
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DatasetError(f"{path}: b'labels' must be a list of ints")
    if getattr(images, "shape", None) != (len(labels), 3 * SIZE * SIZE) or images.dtype != np.uint8:
        raise DatasetError(f"{path}: b'data' must be uint8 ({len(labels)}, {3 * SIZE * SIZE})")
    return torch.from_numpy(images).view(-1, 3, SIZE, SIZE), torch.tensor(labels, dtype=torch.int64)


def open_cifar10(folder):
    """(training images, test images) of a folder with CIFAR-10's python files, or of the folder that holds it."""
    folder = Path(folder)
    if not (folder / TEST_FILE).is_file() and (folder / "cifar-10-batches-py").is_dir():
        folder = folder / "cifar-10-batches-py"
    missing = [name for name in (*TRAIN_FILES, TEST_FILE, NAMES_FILE) if not (folder / name).is_file()]
    if missing:
        raise DatasetError(f"{folder} has no CIFAR-10 in python files: {', '.join(missing)} missing")
    try:
        names = [name.decode() for name in read_pickle(folder / NAMES_FILE)[b"label_names"]]
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError):
        raise DatasetError(f"{folder / NAMES_FILE} has no list of names b'label_names'") from None
    *batches, test = [read_batch(folder / name) for name in (*TRAIN_FILES, TEST_FILE)]
    for name, (_, labels) in zip((*TRAIN_FILES, TEST_FILE), (*batches, test), strict=True):
        wrong = labels[(labels < 0) | (labels >= len(names))]
        if len(wrong):
            raise DatasetError(f"{folder / name}: label {int(wrong[0])} is none of the {len(names)} classes")
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return LabelledImages(images, labels, names, True), LabelledImages(*test, names, True)


def open_digits(seed=0):
    """(training images, test images): the 8x8 scans scaled to 32x32, every fifth of a shuffle for the test."""
    from sklearn.datasets import load_digits  # its import takes seconds

    digits = load_digits()
    scans = torch.from_numpy(digits.images).float()[:, None] / 16
    images = F.interpolate(scans, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    images = (255 * images).round().to(torch.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    dataset = LabelledImages(images, torch.from_numpy(digits.target).long(), [str(name) for name in range(10)], False)
    held_out = torch.arange(len(order)) % 5 == 0
    return dataset.part(order[~held_out]), dataset.part(order[held_out])


def open_data(path):
    """(training images, test images) of CIFAR-10's folder, or of "digits"."""
    return open_digits() if str(path) == DIGITS else open_cifar10(path)


def split(dataset, share, seed):
    """(the rest, a validation part of this share), chosen by the seed."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    count = round(share * len(dataset))
    return dataset.part(order[count:]), dataset.part(order[:count])


def normalise(images):
    """uint8 -> float32 from -1 to 1."""
    return images.float() / 127.5 - 1


def augment(images, generator, flipped):
    """Random windows of 80 to 100% of the area scaled back to full size and, if flipped, mirror images.

    images float32 (B,C,S,S); generator is of the CPU, so that a seed gives the same images on every device.
    """
    count = len(images)
    side = (0.8 + 0.2 * torch.rand(count, generator=generator)).sqrt()
    shift = (2 * torch.rand(2, count, generator=generator) - 1) * (1 - side)
    mirror = torch.ones(count)
    if flipped:
        mirror = 1.0 - 2.0 * torch.randint(2, (count,), generator=generator)
    rows = torch.zeros(count, 2, 3)
    rows[:, 0, 0], rows[:, 1, 1] = side * mirror, side
    rows[:, :, 2] = shift.T
    grid = F.affine_grid(rows.to(images.device), images.shape, align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def batches(dataset, size, seed, epoch, device="cpu", augmented=True):
    """One epoch of (images, labels), whole batches of a permutation drawn, as the augmentation, from (seed, epoch)."""
    drawn = int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator().manual_seed(drawn)
    order = torch.randperm(len(dataset), generator=generator)
    for begin in range(0, len(order) - size + 1, size):
        chosen = dataset.part(order[begin : begin + size])
        images = normalise(chosen.images.to(device, non_blocking=True))
        if augmented:
            images = augment(images, generator, dataset.flipped)
        yield images, chosen.labels.to(device, non_blocking=True)
