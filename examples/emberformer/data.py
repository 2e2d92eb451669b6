"""Sequences of a fire's frames as patch tokens: the public project's cache on disk, or the simulator's fires.

The cache (scripts/build_patch_cache.py of tampueroc/emberformer at d511660) has a folder sequence_XXX for each fire:
meta.json, static_tokens.npy (N, Cs), valid_tokens.npy (N,), fire_tokens.npy (T, N) or a file for each frame, and
wind.npy (T, 2); the targets are PNG files in data_dir/isochrones/sequence_XXX. Everything is checked before training.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from .simulator import simulate

PNG_END = b"IEND\xaeB`\x82"


class CacheError(ValueError):
    """A cache that cannot be trained on; the message names the file."""


class Sample(NamedTuple):
    fire: torch.Tensor  # (T, N), shares of the patches that burn
    wind: torch.Tensor  # (T, 2)
    static: torch.Tensor  # (N, Cs)
    valid: torch.Tensor  # (N,) bool
    target: torch.Tensor  # (1, H, W), the next frame


class Batch(NamedTuple):
    fire: torch.Tensor  # (B, N, T), padded on the left
    wind: torch.Tensor  # (B, T, 2), padded on the left
    static: torch.Tensor  # (B, N, Cs)
    valid_t: torch.Tensor  # (B, T) bool, False at padding
    valid: torch.Tensor  # (B, N) bool
    target: torch.Tensor  # (B, 1, H, W)

    def to(self, device):
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def inputs(self):
        """The model's tensors, without the grid's shape."""
        return self[:4]


class SimulatedSequence:
    """A fire of the simulator: `fires` is what simulate returned, `number` says which."""

    def __init__(self, fires, number, patch):
        self.name, self.masks = f"simulated {number}", fires.masks[number].float()
        self.frames = len(self.masks)
        self.landscape = fires.landscape.static[number]
        self.fire = F.avg_pool2d(self.masks, patch).flatten(1)
        self.wind = fires.wind[number]
        pooled = F.avg_pool2d(self.landscape, patch)
        self.grid, self.static = tuple(pooled.shape[1:]), pooled.flatten(1).T.contiguous()
        self.valid = torch.ones(len(self.static), dtype=torch.bool)

    def tokens(self, frames):
        return self.fire[:frames], self.wind[:frames], self.static, self.valid

    def target(self, frame):
        return self.masks[frame][None]


def simulated(settings, patch):
    """The fires that the section `simulator` asks for."""
    fires = simulate(settings.sequences, settings.size, settings.frames, settings.seed)
    return [SimulatedSequence(fires, number, patch) for number in range(settings.sequences)]


class CachedSequence:
    """A sequence_XXX folder of the cache, checked; arrays are read when they are asked for."""

    def __init__(self, folder, data_dir, patch, fire_value):
        self.folder, self.name, self.fire_value = folder, folder.name, fire_value
        meta = self.read_meta()
        try:
            self.frames, self.number = int(meta["num_frames"]), int(meta["sequence_id"])
            own_patch = int(meta["patch_size"])
            self.grid = tuple(int(meta.get(new) or meta[old]) for new, old in (("Gy", "grid_h"), ("Gx", "grid_w")))
            names = {key: meta[key] for key in ("static_tokens", "valid_tokens", "wind")}
            if "fire_tokens" in meta:
                self.fire_files = [meta["fire_tokens"]]
            else:
                self.fire_files = [meta["fires"][str(frame)] for frame in range(self.frames)]
            for name in (*names.values(), *self.fire_files):
                if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError(f"name of a file in the folder: {name!r}")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise CacheError(f"{folder / 'meta.json'}: no usable {error}") from None
        if own_patch != patch:
            raise CacheError(f"{folder / 'meta.json'}: patch_size is {own_patch}, the configuration's {patch}")
        self.patch, count = patch, self.grid[0] * self.grid[1]
        self.static_file, self.valid_file, self.wind_file = (
            names[key] for key in ("static_tokens", "valid_tokens", "wind")
        )
        self.channels = self.finite(self.static_file, (count, None)).shape[1]
        self.array(self.valid_file, (count,))
        self.finite(self.wind_file, (self.frames, 2))
        self.one_file = "fire_tokens" in meta
        for name in self.fire_files:
            self.finite(name, (self.frames, count) if self.one_file else (count,))
        self.images = self.find_images(data_dir)

    def read_meta(self):
        path = self.folder / "meta.json"
        try:
            meta = json.loads(path.read_text())
        except (OSError, RecursionError, ValueError) as error:
            raise CacheError(f"cannot read {path}: {error}") from error
        if not isinstance(meta, dict):
            raise CacheError(f"{path} is not a mapping")
        return meta

    def array(self, name, shape):
        """A mapped .npy file of this shape, where None is any number."""
        path = self.folder / name
        try:
            found = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise CacheError(f"{path} is missing, truncated or no .npy file: {error}") from error
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
            raise CacheError(f"{path} must be a .npy file of real numbers")
        if len(found.shape) != len(shape) or any(b not in (None, a) for a, b in zip(found.shape, shape, strict=True)):
            raise CacheError(f"{path} must have shape {shape}, has {found.shape}")
        return found

    def finite(self, name, shape):
        """The same; CacheError where a number is none in float32, in which it is read: it would make the loss NaN."""
        found = self.array(name, shape)
        with np.errstate(over="ignore"):
            wrong = np.argwhere(~np.isfinite(np.asarray(found, np.float32)))
        if len(wrong):
            place = tuple(wrong[0].tolist())
            raise CacheError(f"{self.folder / name} must have finite numbers, has {found[place]} at {place}")
        return found

    def find_images(self, data_dir):
        folder = Path(data_dir, "isochrones", f"sequence_{self.number:03d}")
        images = sorted(folder.glob("*.png"))
        if len(images) < self.frames:
            raise CacheError(f"{folder} must have {self.frames} PNG files, has {len(images)}")
        size = tuple(self.patch * side for side in self.grid[::-1])
        for path in images[: self.frames]:
            with open(path, "rb") as file:
                file.seek(0, 2)
                file.seek(-min(file.tell(), len(PNG_END)), 2)
                if file.read() != PNG_END:
                    raise CacheError(f"{path} is truncated")
            try:
                with Image.open(path) as image:
                    if image.size != size:
                        raise CacheError(
                            f"{path} must be {size[0]}x{size[1]} pixels, is {image.size[0]}x{image.size[1]}"
                        )
            except OSError as error:
                raise CacheError(f"{path} is no PNG file: {error}") from error
        return images

    def tokens(self, frames):
        def read(array, dtype=np.float32):
            return torch.from_numpy(np.array(array, dtype=dtype))

        grid = self.grid[0] * self.grid[1]
        if self.one_file:
            fire = read(self.array(self.fire_files[0], (self.frames, grid))[:frames])
        else:
            fire = torch.stack([read(self.array(name, (grid,))) for name in self.fire_files[:frames]])
        wind = read(self.array(self.wind_file, (self.frames, 2))[:frames])
        return (
            fire,
            wind,
            read(self.array(self.static_file, (grid, None))),
            read(self.array(self.valid_file, (grid,)), bool),
        )

    def target(self, frame):
        try:
            with Image.open(self.images[frame]) as image:
                green = np.array(image.convert("RGB"))[..., 1]
        except (OSError, SyntaxError, ValueError) as error:  # Pillow raises each of these for damaged files
            raise CacheError(f"{self.images[frame]} is damaged: {error}") from error
        return torch.from_numpy(green == self.fire_value).float()[None]


def cached(config):
    """All sequences of a cache, which must have one grid and one number of terrain channels."""
    settings = config.patchify_on_disk
    cache, data_dir = Path(settings.cache_dir).expanduser(), Path(config.data.data_dir).expanduser()
    if not cache.is_dir():
        raise CacheError(f"patchify_on_disk.cache_dir {cache} is no folder; simulator.enabled: true needs none")
    folders = sorted(folder for folder in cache.iterdir() if folder.name.startswith("sequence_"))
    if not folders:
        raise CacheError(f"{cache} has no folder sequence_...")
    found = [
        CachedSequence(folder, data_dir, settings.patch_size, config.encoding.isochrone_value) for folder in folders
    ]
    for sequence in found[1:]:
        if (sequence.grid, sequence.channels) != (found[0].grid, found[0].channels):
            raise CacheError(
                f"{sequence.folder}: grid {sequence.grid} with {sequence.channels} terrain channels, but "
                f"{found[0].name} has {found[0].grid} with {found[0].channels}"
            )
    return found


def open_sequences(config):
    if config.simulator.enabled:
        return simulated(config.simulator, config.patchify_on_disk.patch_size)
    return cached(config)


def split(sequences, settings, cache_dir=""):
    """{"train", "val", "test"}: lists of sequences, by the public script's shuffle of their names, or by the file that
    it has left in the cache."""
    by_name = {sequence.name: sequence for sequence in sequences}
    stored = Path(cache_dir, "_splits", f"emberformer-seq-split-seed{settings.seed}.json")
    if cache_dir and stored.is_file():
        try:
            names = json.loads(stored.read_text())
            parts = {part: [by_name[name] for name in names[part]] for part in ("train", "val", "test")}
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise CacheError(f"{stored} does not fit the cache: {error}") from None
    else:
        names = sorted(by_name)
        random.Random(settings.seed).shuffle(names)
        first = int(len(names) * settings.train)
        second = first + int(len(names) * settings.val)
        cut = {"train": names[:first], "val": names[first:second], "test": names[second:]}
        parts = {part: [by_name[name] for name in chosen] for part, chosen in cut.items()}
    for part in ("train", "val"):
        if not any(sequence.frames > 1 for sequence in parts[part]):
            raise CacheError(f"the split of {len(by_name)} sequences leaves none of two frames to {part}")
    return parts


class NextFrames(Dataset):
    """A sample for every frame but the last of each sequence: all frames up to it, and the next one as target."""

    def __init__(self, sequences):
        self.places = [(sequence, frames) for sequence in sequences for frames in range(1, sequence.frames)]

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        sequence, frames = self.places[index]
        return Sample(*sequence.tokens(frames), sequence.target(frames))


def collate(samples):
    """A Batch of samples, histories padded on the left to the longest."""
    longest = max(len(sample.fire) for sample in samples)

    def padded(tensor):
        return F.pad(tensor, (0, 0, longest - len(tensor), 0))

    steps = torch.tensor([len(sample.fire) for sample in samples])
    return Batch(
        torch.stack([padded(sample.fire).T for sample in samples]),
        torch.stack([padded(sample.wind) for sample in samples]),
        torch.stack([sample.static for sample in samples]),
        torch.arange(longest) >= (longest - steps)[:, None],
        torch.stack([sample.valid for sample in samples]),
        torch.stack([sample.target for sample in samples]),
    )


def loader(dataset, settings, device, shuffled=False):
    """A DataLoader as the section `data` asks for; its order is drawn from loader.generator, which each epoch seeds."""
    return DataLoader(
        dataset,
        settings.batch_size,
        shuffle=shuffled and settings.shuffle,
        drop_last=shuffled and settings.drop_last,
        num_workers=settings.num_workers if isinstance(dataset.places[0][0], CachedSequence) else 0,
        pin_memory=settings.pin_memory and device.type == "cuda",
        collate_fn=collate,
        generator=torch.Generator(),
    )


def write_cache(fires, cache_dir, data_dir, patch, fire_value=231):
    """The simulator's fires in the public project's layout, for its own scripts as well."""
    for number in range(len(fires.masks)):
        sequence = SimulatedSequence(fires, number, patch)
        folder = Path(cache_dir, f"sequence_{number + 1:03d}")
        images = Path(data_dir, "isochrones", folder.name)
        for made in (folder, images):
            made.mkdir(parents=True, exist_ok=True)
        fire, wind, static, valid = sequence.tokens(sequence.frames)
        arrays = {"fire_tokens": fire, "wind": wind, "static_tokens": static, "valid_tokens": valid}
        for name, tensor in arrays.items():
            np.save(folder / f"{name}.npy", tensor.numpy())
        grid_h, grid_w = sequence.grid
        meta = {"sequence_id": str(number + 1), "patch_size": patch, "num_frames": sequence.frames}
        meta |= {"grid_h": grid_h, "grid_w": grid_w, "Gy": grid_h, "Gx": grid_w, "num_patches": grid_h * grid_w}
        meta |= {name: f"{name}.npy" for name in arrays}
        (folder / "meta.json").write_text(json.dumps(meta, indent=2))
        for frame, mask in enumerate(sequence.masks):
            pixels = np.zeros((*mask.shape, 3), dtype=np.uint8)
            pixels[..., 1] = fire_value * mask.numpy().astype(np.uint8)
            Image.fromarray(pixels).save(images / f"frame_{frame:03d}.png")
