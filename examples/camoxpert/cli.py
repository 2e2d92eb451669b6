"""The command line of train_ultimate.py."""

import argparse
import sys

from camox_ops.train import tune_cpu_allocator

from ..common import distributed
from ..common.checkpoint import CheckpointError
from ..common.options import add_options
from .data import BUILTIN, DatasetError
from .engine import CHECKPOINTING, Config, Trainer, TrainingError
from .moe import AUX_LOSSES
from .ops import OPS

HELP = {
    "dataset_path": f"COD10K-like folder, or {BUILTIN!r} for images composed in memory",
    "checkpoint_dir": "where last.pth, previous.pth, best_model.pth and history.json go",
    "backbone": "tiny, edgenext_small, edgenext_base, or timm:NAME",
    "pretrained": "load timm's pretrained weights (timm backbones only)",
    "num_experts": "experts per layer, of which max(2, half) run for each image",
    "batch_size": "images per micro-batch and process",
    "accumulation_steps": "micro-batches per optimizer step",
    "img_size": "side to which images are resized, in pixels",
    "epochs": "epochs of both stages together",
    "stage1_epochs": "epochs with the backbone frozen",
    "lr": "highest learning rate",
    "weight_decay": "AdamW's weight decay",
    "backbone_lr_scale": "the backbone's learning rate relative to --lr (0.1 suits pretrained weights)",
    "num_workers": "loader processes; by the machine when left out",
    "deep_supervision": "add the losses of three coarser predictions",
    "gradient_checkpointing": "recompute the encoder in the backward pass: on, off, or by batch and free memory",
    "use_ema": "validate with averaged weights",
    "ema_decay": "decay of the average per optimizer step",
    "resume_from": "checkpoint to go on from, to the same numbers as an unbroken run",
    "no_amp": "float32 instead of float16 (CUDA) or bfloat16 (CPU)",
    "aux_loss": "usage_mse as the users have it, which has no gradient, or switch, which balances the experts",
    "ssim_weight": "weight of a term of structural similarity in the loss",
    "ops": "build the model from camox_ops or from stock PyTorch",
    "seed": "seed of weights, order, augmentation and dropout",
    "device": "cpu, cuda or cuda:N",
    "log_interval": "micro-batches between readings of the loss, the only moments that wait for the GPU",
}


def build_parser():
    """One option per field of Config."""
    parser = argparse.ArgumentParser(prog="train_ultimate.py", description="Train CamoXpert.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    chosen = {"ops": OPS, "aux_loss": AUX_LOSSES, "gradient_checkpointing": CHECKPOINTING}
    more = {name: {"choices": choices} for name, choices in chosen.items()}
    more["gradient_checkpointing"] |= {"nargs": "?", "const": "on"}  # a mere flag turns it on, as in the users' program
    add_options(train, Config, HELP, more)
    return parser


def main(arguments=None):
    """Parse, train, and return the exit status; user errors are one message on stderr and status 2."""
    options = vars(build_parser().parse_args(arguments))
    del options["command"]
    if options["device"] == "cpu":
        allocator = tune_cpu_allocator()
        if distributed.is_first():
            print(allocator)
    try:
        Trainer(Config(**options)).run()
    except (CheckpointError, DatasetError, TrainingError, ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        distributed.stop()
    return 0
