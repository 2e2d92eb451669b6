"""The command line of train.py."""

import argparse
import sys

from ..common.bdh import OPS
from ..common.checkpoint import CheckpointError
from ..common.options import add_options
from .data import DIGITS, DatasetError
from .model import MODELS
from .training import Config, Trainer, TrainingError

HELP = {
    "data": f"folder with CIFAR-10's python files, or {DIGITS!r} for scikit-learn's scans of handwritten digits",
    "checkpoint_dir": "where last.pth, previous.pth, best_model.pth, final_model.pth, metrics.csv, attention.png go",
    "model": "mean over the patches (v2) or a token of its own (cls) for the classifier",
    "ops": "build the model from camox_ops or from stock PyTorch",
    "n_layer": "passes through the one layer",
    "n_embd": "width of a token",
    "n_head": "heads",
    "mlp_multiplier": "all heads together are mlp_multiplier * n_embd wide",
    "dropout": "probability of dropout behind the gate",
    "patch_size": "side of a patch, in pixels",
    "softmax": "softmax in the attention",
    "cached": "with --ops torch: keep the angles' tables, use PyTorch's fused attention",
    "compile": "train through torch.compile",
    "graph": "replay each optimizer step as a CUDA graph; for --ops camox on a GPU",
    "epochs": "passes over the training images",
    "batch_size": "images per micro-batch",
    "accumulation_steps": "micro-batches per optimizer step",
    "lr": "highest learning rate",
    "warmup_steps": "optimizer steps in which the rate rises to --lr, before the cosine",
    "weight_decay": "AdamW's weight decay",
    "grad_clip": "largest norm of the gradient",
    "validation_split": "share of the training images that chooses the best epoch",
    "bf16": "autocast to bfloat16",
    "seed": "seed of weights, order, augmentation and dropout",
    "deterministic": "algorithms that repeat their bits; slower on a GPU",
    "resume": "go on from last.pth in --checkpoint-dir, to the same numbers as an unbroken run",
    "device": "cpu, cuda or cuda:N",
    "log_interval": "micro-batches between readings of the loss, the only moments that wait for the GPU",
}


def build_parser():
    """One option per field of Config."""
    parser = argparse.ArgumentParser(
        prog="train.py", description="Train Vision-BDH.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_options(parser, Config, HELP, {"ops": {"choices": OPS}, "model": {"choices": tuple(MODELS)}})
    return parser


def main(arguments=None):
    """Parse, train, and return the exit status; user errors are one message on stderr and status 2."""
    options = vars(build_parser().parse_args(arguments))
    if options["device"] == "cpu" and options["ops"] == "camox":
        from camox_ops.train import tune_cpu_allocator

        print(tune_cpu_allocator())
    try:
        Trainer(Config(**options)).run()
    except (CheckpointError, DatasetError, TrainingError, ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
