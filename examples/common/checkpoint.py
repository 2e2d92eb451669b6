"""Checkpoints that are whole or absent: written beside, synced, then renamed over; checked before they are read."""

import os
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch

LAST, PREVIOUS, BEST = "last.pth", "previous.pth", "best_model.pth"


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, truncated or damaged; the message names its path."""


def check_folder(path):
    """CheckpointError where no file can be written into the folder path, found before a run and not at its end."""
    path = Path(path)
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise CheckpointError(f"cannot write to {path}: {nearest} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointError(f"cannot write to {path}: no permission in {nearest}")


def check_file(path):
    """The same for the file path."""
    if Path(path).is_dir():
        raise CheckpointError(f"cannot write {path}: it is a folder")
    check_folder(Path(path).parent)


def save(path, state):
    """Write state to path so that a crash at any moment leaves either the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in path.parent.glob(f".{path.name}.*.tmp"):  # of runs that were killed while they wrote
        unfinished.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder):
    """Make the renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_last(folder, state):
    """Write folder/last.pth, the one before it kept as folder/previous.pth."""
    last, previous = Path(folder, LAST), Path(folder, PREVIOUS)
    if last.exists():
        # a link, not a rename: last.pth is there at every moment
        spare = previous.with_suffix(".link")
        spare.unlink(missing_ok=True)
        os.link(last, spare)
        os.replace(spare, previous)
        spare.unlink(missing_ok=True)  # still there where the two were one file, as a killed run leaves them
    save(last, state)


def load(path, map_location="cpu"):
    """Read a checkpoint after checking every checksum in it; CheckpointError names the path when it is not whole."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"checkpoint {path} is damaged: wrong checksum in {damaged}{older(path)}")
        state = torch.load(path, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file may raise any
        raise CheckpointError(f"checkpoint {path} is truncated or damaged: {error}{older(path)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {path} has no values by name: it holds a {type(state).__name__}")
    return state


@contextmanager
def fitting(path, what="run"):
    """CheckpointError that names path, in the place of whatever is raised where the block takes a checkpoint apart that
    another program or model has written."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} does not fit this {what}: {error}") from error


def entry(state, name, kind):
    """state[name]; TypeError or ValueError where it is missing, of another type or a count below 0, on which a run
    would stop only later."""
    if name not in state:
        raise ValueError(f"no {name}")
    value = state[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")
    if kind is int and value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}")
    return value


def older(path):
    """A hint at the previous checkpoint, where there is one."""
    previous = path.with_name(PREVIOUS)
    return f"; the one before it is {previous}" if previous.is_file() and previous != path else ""


def rng_state(device):
    """The random state of this process, as tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state, device):
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
