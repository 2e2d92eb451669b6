"""Images and masks: the COD10K folders and the built-in set, the check before training, and the epoch's order.

Folder layouts follow mahi-chan/camoXpert, data/dataset.py, commit 47e858c.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler

from .synthetic import compose_set

BUILTIN = "builtin"
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp"}
# (train images, train masks, test images, test masks)
SPLIT_LAYOUTS = (
    ("Train/Image", "Train/GT_Object", "Test/Image", "Test/GT_Object"),
    ("Train/Imgs", "Train/GT", "Test/Imgs", "Test/GT"),
    ("TrainDataset/Imgs", "TrainDataset/GT", "TestDataset/Imgs", "TestDataset/GT"),
    ("Images/Train", "GT/Train", "Images/Test", "GT/Test"),
    ("Train", "TrainGT", "Test", "TestGT"),
)
# (images, masks) of one undivided set, every fifth image held out
FLAT_LAYOUTS = (("images", "masks"), ("image", "mask"), ("Imgs", "GT"))
HELD_OUT_EVERY = 5
SHOWN_PROBLEMS = 20
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class DatasetError(ValueError):
    """A data folder that cannot be trained on; the message names every offending path (up to a limit)."""


def images_in(folder):
    """The image files directly inside a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def find_folders(root):
    """Locate the data under root: {"train": (images, masks), "val": (images, masks)} and whether it is undivided.

    Raises DatasetError when no known layout is there or a layout's mask folder is missing.
    """
    root = Path(root)
    if not root.is_dir():
        raise DatasetError(f"dataset path {root} is not a folder")
    incomplete = []
    for layout in SPLIT_LAYOUTS + FLAT_LAYOUTS:
        folders = [root / part for part in layout]
        missing = [folder for folder in folders if not folder.is_dir()]
        if not missing:
            train = tuple(folders[:2])
            return {"train": train, "val": tuple(folders[2:]) or train}, len(layout) == 2
        if folders[0].is_dir() and images_in(folders[0]):
            incomplete.append(f"{folders[0]} is there, but not {', '.join(map(str, missing))}")
    if incomplete:
        raise DatasetError(f"dataset path {root} is incomplete: {'; '.join(incomplete)}")
    known = ", ".join(f"{layout[0]} + {layout[1]}" for layout in SPLIT_LAYOUTS + FLAT_LAYOUTS)
    raise DatasetError(f"dataset path {root} has none of the known layouts ({known})")


def list_pairs(root, split):
    """(image, mask) paths of "train" or "val"; the mask is None where it is missing.

    Validation takes the first fifth of a Test folder, as the users' runs do, or every fifth of an undivided set.
    """
    folders, undivided = find_folders(root)
    image_folder, mask_folder = folders[split]
    masks = {path.stem: path for path in images_in(mask_folder)}
    pairs = [(path, masks.get(path.stem)) for path in images_in(image_folder)]
    if undivided:
        held_out = split == "val"
        return [pair for index, pair in enumerate(pairs) if (index % HELD_OUT_EVERY == 0) == held_out]
    return pairs[: max(1, len(pairs) // 5)] if split == "val" else pairs


def read_size(path):
    """(width, height) of an image after decoding all of it; OSError when it is damaged or not an image."""
    with Image.open(path) as image:
        image.load()
        return image.size


def find_problem(pair):
    """What is wrong with an (image, mask) pair, as one line naming the path, or None."""
    image, mask = pair
    if mask is None:
        return f"missing mask for {image}"
    sizes = []
    for path in pair:
        try:
            sizes.append(read_size(path))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow raises each of these for damaged files
            return f"unreadable image {path}: {error}"
    if sizes[0] != sizes[1]:
        return f"mask {mask} is {sizes[1][0]}x{sizes[1][1]}, its image {image} is {sizes[0][0]}x{sizes[0][1]}"
    return None


def check_folder(root, threads=8):
    """Decode every image and mask of both splits once; DatasetError lists all that is wrong, with paths."""
    pairs = {split: list_pairs(root, split) for split in ("train", "val")}
    for split, found in pairs.items():
        if not found:
            raise DatasetError(f"dataset path {root} has no {split} images")
    unique = dict.fromkeys(pairs["train"] + pairs["val"])
    with ThreadPoolExecutor(threads) as pool:
        problems = [problem for problem in pool.map(find_problem, unique) if problem]
    if problems:
        listed = "\n  ".join(problems[:SHOWN_PROBLEMS])
        more = f"\n  and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise DatasetError(f"dataset path {root} has {len(problems)} problem(s):\n  {listed}{more}")


def augment(image, mask, rng):
    """Random flips, quarter turns and a little colour change of image (H,W,3) and mask (H,W), both uint8."""
    if rng.random() < 0.5:
        image, mask = image[:, ::-1], mask[:, ::-1]
    if rng.random() < 0.2:
        image, mask = image[::-1], mask[::-1]
    if rng.random() < 0.2:
        turns = int(rng.integers(1, 4))
        image, mask = np.rot90(image, turns), np.rot90(mask, turns)
    if rng.random() < 0.2:
        gain, shift = rng.uniform(0.9, 1.1), rng.uniform(-25, 25)
        image = np.clip(image * gain + shift, 0, 255).astype(np.uint8)
    return image, mask


class ImageSet(Dataset):
    """Base of the data sets: item (epoch, index) is (image (3,S,S), normalised, mask (1,S,S) of 0 and 1), float32.

    Augmentation draws from (seed, epoch, index) alone, so it does not depend on workers, ranks or where a run resumed.
    """

    def __init__(self, seed=0, augmented=False):
        self.seed = seed
        self.augmented = augmented

    def load(self, index):
        """Image (S,S,3) and mask (S,S), both uint8."""
        raise NotImplementedError

    def __getitem__(self, key):
        epoch, index = key
        image, mask = self.load(index)
        if self.augmented:
            image, mask = augment(image, mask, np.random.default_rng([self.seed, epoch, index]))
        image = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float() / 255
        mask = torch.from_numpy(np.ascontiguousarray(mask)).unsqueeze(0) > 127
        return (image - MEAN) / STD, mask.float()


class FolderSet(ImageSet):
    """A split of a COD10K-like folder, every image resized to (img_size, img_size)."""

    def __init__(self, root, split, img_size, seed=0, augmented=False):
        super().__init__(seed, augmented)
        self.img_size = img_size
        self.pairs = list_pairs(root, split)

    def __len__(self):
        return len(self.pairs)

    def load(self, index):
        path, mask = self.pairs[index]
        size = (self.img_size, self.img_size)
        with Image.open(path) as image, Image.open(mask) as outline:
            image = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
            return np.array(image), np.array(outline.convert("L").resize(size, Image.Resampling.NEAREST))


class BuiltinSet(ImageSet):
    """A split of the built-in set, composed in memory; always the same images, whatever the seed of the run."""

    def __init__(self, split, img_size, seed=0, augmented=False, count=None):
        super().__init__(seed, augmented)
        self.images, self.masks, self.sources = compose_set(split, img_size, count=count)

    def __len__(self):
        return len(self.images)

    def load(self, index):
        return self.images[index], self.masks[index]


def open_split(path, split, img_size, seed=0):
    """The "train" (augmented) or "val" split of a folder, or of the built-in set for path "builtin"."""
    augmented = split == "train"
    if str(path) == BUILTIN:
        return BuiltinSet(split, img_size, seed, augmented)
    return FolderSet(path, split, img_size, seed, augmented)


class EpochSampler(Sampler):
    """Yields (epoch, index) keys: a permutation drawn from (seed, epoch), of which each rank takes every world-th.

    The last indices are repeated so that all ranks see equally many. Carrying the epoch in the key lets persistent
    workers follow it.
    """

    def __init__(self, length, seed=0, rank=0, world=1, shuffle=True):
        self.length, self.seed, self.rank, self.world, self.shuffle = length, seed, rank, world, shuffle
        self.epoch = 0

    def __len__(self):
        return math.ceil(self.length / self.world)

    def __iter__(self):
        order = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        padded = np.resize(order, len(self) * self.world)
        return iter([(self.epoch, int(index)) for index in padded[self.rank :: self.world]])
