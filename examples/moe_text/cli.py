"""The command line of train.py."""

import argparse
import sys

from ..common import distributed
from ..common.bdh import OPS
from ..common.checkpoint import CheckpointError
from ..common.options import add_options
from .data import DataError
from .model import BALANCES, FEED_FORWARDS
from .training import Config, Trainer, TrainingError

HELP = {
    "data": "folder with a folder or a file of text per domain; else Python's sources, its documentation, and licences",
    "feed_forward": "a mixture of experts, or one network that multiplies as often per token",
    "ops": "build the model from camox_ops or from stock PyTorch",
    "balance": "switch: an auxiliary loss; bias: a bias of the router, without a loss; none",
    "expert_ranks": "ranks that share the experts, a divisor of all ranks; 0: all ranks",
    "dim": "width of a token",
    "num_heads": "attention heads",
    "num_layers": "layers",
    "num_experts": "experts of a layer",
    "top_k": "experts of a token",
    "hidden": "width of an expert",
    "shared_hidden": "width of the expert that all tokens go through; 0: none",
    "length": "bytes per window",
    "batch_size": "windows per step of all ranks together, a multiple of their number",
    "steps": "optimizer steps",
    "lr": "highest learning rate",
    "weight_decay": "AdamW's weight decay",
    "grad_clip": "largest norm of the gradient",
    "aux_weight": "factor of the auxiliary loss",
    "bias_rate": "change of the router's bias per step",
    "bf16": "autocast to bfloat16",
    "double": "float64 throughout, to compare runs of different numbers of ranks",
    "seed": "seed of weights and windows",
    "device": "cpu, cuda or cuda:N",
    "log_interval": "steps between readings of the loss",
    "save": "folder for the weights at the end, as torch.distributed.checkpoint writes them",
    "load": "such a folder, of a run with any number of ranks",
    "metrics": "file for losses, balance and speed as JSON",
}


def build_parser():
    """One option per field of Config."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a mixture of experts on bytes of text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    choices = {"ops": OPS, "feed_forward": FEED_FORWARDS, "balance": BALANCES}
    add_options(parser, Config, HELP, {name: {"choices": known} for name, known in choices.items()})
    return parser


def main(arguments=None):
    """Parse, train, and return the exit status; user errors are one message on stderr and status 2."""
    options = vars(build_parser().parse_args(arguments))
    if options["device"] == "cpu" and options["ops"] == "camox":
        from camox_ops.train import tune_cpu_allocator

        line = tune_cpu_allocator()
        if distributed.is_first():
            print(line)
    try:
        Trainer(Config(**options)).run()
    except (CheckpointError, DataError, OSError, TrainingError, ValueError) as error:
        if distributed.is_first():
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        distributed.stop()
    return 0
