"""The command line of train.py."""

import argparse
import sys

from ..common.bdh import OPS
from ..common.checkpoint import CheckpointError
from ..common.options import add_options
from .attribution import UPDATES
from .data import DataError
from .training import MODELS, ORDERS, Config, Trainer, TrainingError

HELP = {
    "data": "folder with a folder or a file of text per domain; else Python's sources, its documentation, and licences",
    "checkpoint_dir": "where last.pth, previous.pth, final_model.pth, metrics.csv, nodes.csv, tree.png go",
    "model": "the tree, or the baseline: a stack of layers all of whose weights are trained at every step",
    "ops": "run all nodes of a level as one batch of camox_ops, or node after node in stock PyTorch",
    "updates": "path: nodes off the error path are not updated; original: as the public code trains them",
    "order": "domains drawn at random for each batch, or one after the other",
    "embed_dim": "width of a word",
    "ff_dim": "width between the two products of a feed-forward block",
    "num_heads": "attention heads of a node, a divisor of --embed-dim",
    "branching": "children of a node, level by level: 4,3,2 is a tree of 41 nodes",
    "num_layers": "layers of the baseline",
    "max_seq_len": "words per text",
    "dropout": "of the attention weights, after GELU and after the feed-forward block",
    "vocab_size": "words the head tells apart, 4 special ones included",
    "steps": "optimizer steps",
    "batch_size": "texts per step, all of one domain",
    "lr": "learning rate",
    "weight_decay": "AdamW's weight decay",
    "grad_clip": "largest norm of the gradient",
    "bf16": "autocast to bfloat16",
    "seed": "seed of weights, batches and dropout",
    "resume": "go on from last.pth in --checkpoint-dir, to the same numbers as an unbroken run",
    "init": "weights to begin with: of this program or of the public code",
    "device": "cpu, cuda or cuda:N",
    "graph": "replay each step as a CUDA graph: the host launches its kernels once; for --ops camox on a GPU",
    "log_interval": "steps between readings of loss and path, the only moments that wait for the GPU",
    "save_interval": "steps between checkpoints",
}


def build_parser():
    """One option per field of Config."""
    parser = argparse.ArgumentParser(
        prog="train.py", description="Train K-1's tree.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    choices = {"ops": OPS, "model": MODELS, "updates": UPDATES, "order": ORDERS}
    add_options(parser, Config, HELP, {name: {"choices": known} for name, known in choices.items()})
    return parser


def main(arguments=None):
    """Parse, train, and return the exit status; user errors are one message on stderr and status 2."""
    options = vars(build_parser().parse_args(arguments))
    if options["device"] == "cpu" and options["ops"] == "camox":
        from camox_ops.train import tune_cpu_allocator

        print(tune_cpu_allocator())
    try:
        Trainer(Config(**options)).run()
    except (CheckpointError, DataError, TrainingError, ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
