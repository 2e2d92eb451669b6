"""The command line of train.py: a YAML file, and the public script's options that change it."""

import argparse
import sys
from pathlib import Path

import torch

from ..common.bdh import OPS
from ..common.checkpoint import CheckpointError
from .config import ConfigError, read
from .data import CacheError
from .training import Trainer, TrainingError

DEMO = Path(__file__).with_name("configs") / "demo.yaml"


def build_parser():
    parser = argparse.ArgumentParser(prog="train.py", description="Train EmberFormer.")
    parser.add_argument("--config", default=str(DEMO), help="YAML file with the public project's keys [%(default)s]")
    parser.add_argument("--epochs", type=int, help="instead of train.epochs")
    parser.add_argument("--batch_size", type=int, help="instead of data.batch_size")
    parser.add_argument("--lr_temporal", type=float, help="instead of train.lr_temporal")
    parser.add_argument("--lr_spatial", type=float, help="instead of train.lr_spatial")
    parser.add_argument("--cache_dir", help="instead of patchify_on_disk.cache_dir")
    parser.add_argument("--checkpoint_dir", help="instead of train.checkpoint_dir")
    parser.add_argument("--gpu", type=int, help="number of the GPU")
    parser.add_argument("--device", help="cpu, cuda or cuda:N [CUDA where there is one]")
    parser.add_argument("--ops", choices=OPS, default="camox", help="build the model from camox_ops or stock PyTorch")
    parser.add_argument("--resume", action="store_true", help="go on from last.pth in train.checkpoint_dir")
    parser.add_argument(
        "--graph", action="store_true", help="replay each step as a CUDA graph; for --ops camox on a GPU"
    )
    return parser


def configured(options):
    """The file's Config with what the command line changes, checked."""
    config = read(options.config)
    for section, names in (
        (config.train, ("epochs", "lr_temporal", "lr_spatial", "checkpoint_dir")),
        (config.data, ("batch_size",)),
        (config.patchify_on_disk, ("cache_dir",)),
    ):
        for name in names:
            value = getattr(options, name)
            if value is not None:
                setattr(section, name, value)
    return config.check()


def chosen_device(options):
    if options.gpu is not None and options.device is None:
        return f"cuda:{options.gpu}"
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments=None):
    """Parse, train, and return the exit status; user errors are one message on stderr and status 2."""
    options = build_parser().parse_args(arguments)
    device = chosen_device(options)
    try:
        config = configured(options)
        if device == "cpu" and options.ops == "camox":
            from camox_ops.train import tune_cpu_allocator

            print(tune_cpu_allocator())
        Trainer(config, options.ops, device, options.resume, options.graph).run()
    except (CacheError, CheckpointError, ConfigError, TrainingError, ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
