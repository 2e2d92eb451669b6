"""Training of a small BDH on bytes, and a sample of what it writes."""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from camox_ops.train import ProgressBar

from ..common import checkpoint
from ..common.bdh import OPS
from ..common.options import add_options, check_numbers, open_device
from .data import library_sources, windows
from .model import BDH, BDHConfig

LN2 = math.log(2)


@dataclass
class Config:
    """Everything that decides a run's numbers."""

    text: str | None = None
    ops: str = "camox"
    n_layer: int = 3
    n_embd: int = 64
    n_head: int = 4
    mlp_multiplier: int = 16
    dropout: float = 0.1
    steps: int = 400
    batch_size: int = 16
    length: int = 128
    lr: float = 0.002
    weight_decay: float = 0.1
    seed: int = 0
    device: str = "cpu"
    log_interval: int = 50
    save: str | None = None
    load: str | None = None
    prompt: str = "def "
    sample: int = 200
    temperature: float = 0.8
    top_k: int = 20

    def __post_init__(self):
        check_numbers(self)
        for name in ("n_layer", "n_embd", "n_head", "mlp_multiplier", "batch_size", "length", "log_interval", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("lr", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if not self.prompt:
            raise ValueError("prompt must have at least one character, got ''")


HELP = {
    "text": "folder of .py files; Python's own library if not given",
    "ops": "build the model from camox_ops or from stock PyTorch",
    "n_layer": "passes through the one layer",
    "n_embd": "width of a token",
    "n_head": "heads",
    "mlp_multiplier": "all heads together are mlp_multiplier * n_embd wide",
    "dropout": "probability of dropout behind the gate",
    "steps": "optimizer steps; 0 with --load only writes",
    "batch_size": "windows per step",
    "length": "bytes per window",
    "lr": "highest learning rate",
    "weight_decay": "AdamW's weight decay",
    "seed": "seed of weights, windows, dropout and the sample",
    "device": "cpu, cuda or cuda:N",
    "log_interval": "steps between readings of the loss",
    "save": "where the weights go at the end",
    "load": "weights to begin with",
    "prompt": "how the sample begins",
    "sample": "bytes to write at the end",
    "temperature": "of the sample",
    "top_k": "only the k likeliest bytes are drawn",
}


@torch.no_grad()
def bits_per_byte(model, text, length, count=64):
    """Mean over fixed windows of a text."""
    inputs, targets = windows(text, length, count, torch.Generator().manual_seed(0))
    device, was_training = model.lm_head.device, model.training
    loss = model.eval()(inputs.to(device), targets.to(device))[1]
    model.train(was_training)
    return loss.item() / LN2


def train(config):
    """Train, print and sample; returns {"model", "bits_per_byte", "sample"}."""
    open_device(config.device)
    if config.save:
        checkpoint.check_file(config.save)
    torch.manual_seed(config.seed)
    training, held_out = library_sources(config.text)
    sizes = BDHConfig(config.n_layer, config.n_embd, config.dropout, config.n_head, config.mlp_multiplier)
    model = BDH(sizes, config.ops).to(config.device).train()
    if config.load:
        weights = checkpoint.load(config.load, map_location=config.device)
        with checkpoint.fitting(config.load, "model"):
            model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    generator = torch.Generator().manual_seed(config.seed)
    line, total, read = ProgressBar(config.steps, "step", unit="windows"), 0.0, 0
    for step in range(config.steps):
        inputs, targets = windows(training, config.length, config.batch_size, generator)
        loss = model(inputs.to(config.device), targets.to(config.device))[1]
        loss.backward()
        warm = min(1.0, (step + 1) / 20)
        optimizer.param_groups[0]["lr"] = config.lr * warm * (1 - 0.9 * step / config.steps)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = total + loss.detach()
        if (step + 1) % config.log_interval == 0 or step + 1 == config.steps:
            mean = float(total) / (step + 1 - read) / LN2  # the one place where the host waits for the device
            total, read = 0.0, step + 1
            line.update(step + 1, (step + 1) * config.batch_size, bits_per_byte=mean)
    line.close()
    if config.save:
        checkpoint.save(config.save, model.state_dict())
    found = bits_per_byte(model, held_out, config.length)
    print(f"held-out text: {found:.3f} bits per byte", flush=True)
    prompt = torch.tensor([list(config.prompt.encode())], device=config.device)
    start = time.perf_counter()
    written = model.generate(prompt, config.sample, config.temperature, config.top_k)[0]
    seconds = time.perf_counter() - start
    sample = bytes(written.tolist()).decode(errors="replace")
    print(f"{config.sample} bytes in {seconds:.1f} s:\n{sample}", flush=True)
    return {"model": model, "bits_per_byte": found, "sample": sample}


def main(arguments=None):
    """Parse, train, and return the exit status; user errors are one message on stderr and status 2."""
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name,
        description="Train a small BDH on Python's own library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, Config, HELP, {"ops": {"choices": OPS}})
    options = vars(parser.parse_args(arguments))
    if options["device"] == "cpu" and options["ops"] == "camox":
        from camox_ops.train import tune_cpu_allocator

        print(tune_cpu_allocator())
    try:
        train(Config(**options))
    except (checkpoint.CheckpointError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
