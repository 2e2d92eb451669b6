"""The training run: epochs, validation, metrics as CSV, checkpoints, resuming, the test at the end."""

import csv
import math
import os
import time
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import torch
from torch.nn import functional as F

from camox_ops.train import ProgressBar

from ..common import checkpoint
from ..common.graph import GraphedSteps, check_graph
from ..common.optimizer import capturable, set_rate
from ..common.options import check_numbers, open_device
from .data import DIGITS, SIZE, batches, normalise, open_data, split
from .model import MODELS, BDHConfig
from .report import choose, write_attention

METRICS, FINAL, MAPS = "metrics.csv", "final_model.pth", "attention.png"
COLUMNS = ("epoch", "train_loss", "val_accuracy", "epoch_time_sec", "learning_rate")


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stopped and what to change."""


@dataclass
class Config:
    """Everything that decides a run's numbers. Counts are images, rates are per optimizer step."""

    data: str = DIGITS
    checkpoint_dir: str = "./checkpoints_vision_bdh"
    model: str = "v2"
    ops: str = "camox"
    n_layer: int = 3
    n_embd: int = 48
    n_head: int = 3
    mlp_multiplier: int = 8
    dropout: float = 0.1
    patch_size: int = 4
    softmax: bool = False
    cached: bool = False
    compile: bool = False
    graph: bool = False
    epochs: int = 15
    batch_size: int = 32
    accumulation_steps: int = 1
    lr: float = 0.002
    warmup_steps: int = 50
    weight_decay: float = 0.05
    grad_clip: float = 1.0
    validation_split: float = 0.1
    bf16: bool = False
    seed: int = 42
    deterministic: bool = False
    resume: bool = False
    device: str = "cpu"
    log_interval: int = 20

    def __post_init__(self):
        check_numbers(self)
        smallest = dict.fromkeys(("n_layer", "n_embd", "n_head", "mlp_multiplier", "patch_size", "epochs"), 1)
        smallest |= {"batch_size": 1, "accumulation_steps": 1, "warmup_steps": 0, "log_interval": 1}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.patch_size > SIZE:
            raise ValueError(f"patch_size must be at most {SIZE}, the side of an image, got {self.patch_size}")
        for name in ("lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("dropout", "validation_split"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {tuple(MODELS)}, got {self.model!r}")
        if self.cached and self.ops != "torch":
            raise ValueError("cached is an option of --ops torch")
        if self.graph:
            check_graph(self.ops, self.device)
        if self.graph and self.compile:
            raise ValueError("graph and compile exclude each other")

    def sizes(self):
        return BDHConfig(self.n_layer, self.n_embd, self.dropout, self.n_head, self.mlp_multiplier)


def lr_factor(step, warmup, steps):
    """Share of the learning rate at optimizer step `step` of `steps`: linear warm-up, then a cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def seed_everything(seed, deterministic):
    """Seeds torch; deterministic also asks for algorithms that repeat their bits."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


@torch.no_grad()
def accuracy(model, dataset, device="cpu", size=256):
    """Share of images that the model puts into their class."""
    was_training = model.training
    model.eval()
    right = 0
    for begin in range(0, len(dataset), size):
        part = dataset.part(slice(begin, begin + size))
        right += (model(normalise(part.images.to(device))).argmax(1) == part.labels.to(device)).sum()
    model.train(was_training)
    return int(right) / len(dataset)


class Trainer:
    """Builds all parts of a run from a Config; run() trains and returns {"history", "test_accuracy"}.

    Raises DatasetError, CheckpointError or TrainingError.
    """

    def __init__(self, config):
        self.config, self.device = config, open_device(config.device)
        checkpoint.check_folder(config.checkpoint_dir)
        seed_everything(config.seed, config.deterministic)
        training, self.test = open_data(config.data)
        self.training, self.validation = split(training, config.validation_split, config.seed)
        if not len(self.validation):
            self.validation = self.training
        self.batches = len(self.training) // config.batch_size
        if not self.batches:
            count = len(self.training)
            raise TrainingError(f"batch_size={config.batch_size} is more than the {count} training images")
        self.steps_per_epoch = math.ceil(self.batches / config.accumulation_steps)
        self.model = MODELS[config.model](
            config.sizes(),
            patch_size=config.patch_size,
            num_classes=len(training.names),
            in_channels=training.images.shape[1],
            use_softmax_attn=config.softmax,
            ops=config.ops,
            cached=config.cached,
        ).to(self.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = capturable(
            torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, fused=True)
        )
        self.history, self.best, self.start_epoch = [], -1.0, 0
        if config.resume:
            self.resume(Path(config.checkpoint_dir, checkpoint.LAST))
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.step = GraphedSteps(self.train_step) if config.graph else self.train_step

    def resume(self, path):
        """Go on after the epoch of a checkpoint, to the same numbers as an unbroken run."""
        state = checkpoint.load(path, map_location=self.device)
        with checkpoint.fitting(path):
            self.model.load_state_dict(state["model_state_dict"])
            self.optimizer.load_state_dict(state["optimizer_state_dict"])
            self.history, self.best = checkpoint.entry(state, "history", list), checkpoint.entry(state, "best", float)
            self.start_epoch = checkpoint.entry(state, "epoch", int) + 1
            checkpoint.set_rng_state(state["rng"], self.device)

    def run(self):
        """Train to the last epoch, then test the weights of the best validation."""
        config, folder = self.config, Path(self.config.checkpoint_dir)
        for epoch in range(self.start_epoch, config.epochs):
            start = time.perf_counter()
            loss = self.train_epoch(epoch)
            correct = accuracy(self.model, self.validation, self.device)
            seconds = time.perf_counter() - start
            self.record(epoch, loss, correct, seconds)
        best = checkpoint.load(folder / checkpoint.BEST, map_location=self.device)
        with checkpoint.fitting(folder / checkpoint.BEST):
            self.model.load_state_dict(best["model_state_dict"])
            epoch = checkpoint.entry(best, "epoch", int)
        tested = accuracy(self.model, self.test, self.device)
        checkpoint.save(folder / FINAL, self.model.state_dict())
        write_attention(folder / MAPS, self.model, choose(self.test))
        print(f"test accuracy {100 * tested:.2f}% (epoch {epoch + 1}); wrote {folder / MAPS}", flush=True)
        return {"history": self.history, "test_accuracy": tested}

    def autocast(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.bf16)

    def train_epoch(self, epoch):
        """One pass over the training images; returns the mean loss."""
        config, done, read = self.config, 0, 0
        self.model.train()
        line = ProgressBar(self.batches, f"epoch {epoch + 1}/{config.epochs}")
        total, unread = 0.0, 0.0
        epoch_batches = batches(self.training, config.batch_size, config.seed, epoch, self.device)
        for number in range(self.steps_per_epoch):
            micro_batches = list(islice(epoch_batches, config.accumulation_steps))
            set_rate(self.optimizer, self.rate(epoch * self.steps_per_epoch + number))
            for loss in self.step(*chain.from_iterable(micro_batches)):
                unread = unread + loss
            done += len(micro_batches)
            if done == self.batches or done - read >= config.log_interval:
                mean = float(unread) / (done - read)  # the one place where the host waits for the device
                if not math.isfinite(mean):
                    raise TrainingError(f"loss became {mean} in epoch {epoch + 1} by step {done}; lower --lr")
                total, unread, read = total + float(unread), 0.0, done
                line.update(done, done * config.batch_size, loss=mean)
        line.close()
        return total / self.batches

    def rate(self, number):
        """The learning rate of optimizer step `number`."""
        config = self.config
        return config.lr * lr_factor(number, config.warmup_steps, config.epochs * self.steps_per_epoch)

    def train_step(self, *tensors):
        """The update by micro-batches, given as images, labels, images, labels, ...: the loss of each."""
        losses = []
        for images, labels in zip(tensors[::2], tensors[1::2], strict=True):
            with self.autocast():
                logits = self.forward(images)
            loss = F.cross_entropy(logits.float(), labels)
            (2 * loss / len(tensors)).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return tuple(losses)

    def record(self, epoch, loss, correct, seconds):
        """Print, write the checkpoints and the metrics of all epochs so far."""
        rate = self.rate((epoch + 1) * self.steps_per_epoch - 1)
        self.history.append(dict(zip(COLUMNS, (epoch + 1, loss, 100 * correct, seconds, rate), strict=True)))
        shown = f"loss={loss:.4f}  val_accuracy={100 * correct:.2f}%  {seconds:.1f} s"
        print(f"epoch {epoch + 1}/{self.config.epochs}  {shown}", flush=True)
        improved = correct > self.best
        self.best = max(self.best, correct)
        state = {
            "epoch": epoch,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "val_accuracy": 100 * correct,
            "best": self.best,
            "history": self.history,
            "rng": checkpoint.rng_state(self.device),
            "args": asdict(self.config),
        }
        folder = Path(self.config.checkpoint_dir)
        if improved:  # before the last: a run that is killed between the two repeats the epoch
            checkpoint.save(folder / checkpoint.BEST, state)
        checkpoint.save_last(folder, state)
        with open(folder / METRICS, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.history)
