"""The training run: epochs, validation, early stopping, checkpoints, resuming, metrics as CSV, previews as images."""

import csv
import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from camox_ops.train import LossMeter, ProgressBar

from ..common import checkpoint
from ..common.graph import GraphedSteps, check_graph
from ..common.optimizer import capturable
from ..common.options import open_device
from .config import model_arguments
from .data import Batch, NextFrames, loader, open_sequences, split
from .losses import Criterion, pixel_mask
from .model import EmberFormer
from .report import write_preview

METRICS_FILE = "metrics.csv"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stopped and what to change."""


@torch.no_grad()
def outcomes(logits, target, mask, settings):
    """Numbers of hits, false alarms, misses and right rejections among the pixels of the mask, (4,) int64."""
    predicted = torch.sigmoid(logits.float()) > settings.pred_thresh
    burning, counted = target > settings.target_thresh, mask > 0
    hit, either = predicted & burning & counted, (predicted | burning) & counted
    return torch.stack((hit.sum(), (either & ~burning).sum(), (either & ~predicted).sum(), (counted & ~either).sum()))


class Counts:
    """Outcomes of many batches, added up on the device; read once, by scores()."""

    def __init__(self, device):
        self.total = torch.zeros(4, dtype=torch.float64, device=device)

    def update(self, found):
        """found: what outcomes() returned."""
        self.total += found

    def scores(self):
        """acc, prec, rec, f1 and iou; 0 where a denominator is."""
        hit, false_alarm, missed, right = self.total.tolist()

        def share(part, whole):
            return part / whole if whole else 0.0

        return {
            "acc": share(hit + right, hit + false_alarm + missed + right),
            "prec": share(hit, hit + false_alarm),
            "rec": share(hit, hit + missed),
            "f1": share(2 * hit, 2 * hit + false_alarm + missed),
            "iou": share(hit, hit + false_alarm + missed),
        }


class EarlyStopping:
    """Stops after `patience` epochs none of which improved on the best by more than min_delta (config.Stopping)."""

    def __init__(self, settings):
        self.settings = settings
        self.best, self.best_epoch, self.waited = None, 0, 0

    def update(self, epoch, value):
        """Whether to stop after this epoch."""
        sign = 1 if self.settings.mode == "max" else -1
        if self.best is None or sign * (value - self.best) > self.settings.min_delta:
            self.best, self.best_epoch, self.waited = value, epoch, 0
        else:
            self.waited += 1
        return self.settings.enabled and self.waited >= self.settings.patience

    def state_dict(self):
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.best_epoch, self.waited = (state[name] for name in ("best", "best_epoch", "waited"))


def parameter_groups(model, settings):
    """Adam's groups: embedder and transformer at lr_temporal, the decoder at lr_spatial. The public script leaves the
    refinement decoder out, so that it stays as it was made; train_refinement trains it, too."""
    temporal = [*model.token_embedder.parameters(), *model.temporal_transformer.parameters()]
    spatial = list(model.spatial_decoder.parameters())
    if settings.train_refinement:
        spatial += model.refinement_decoder.parameters()
    else:
        model.refinement_decoder.requires_grad_(False)
    return [{"params": temporal, "lr": settings.lr_temporal}, {"params": spatial, "lr": settings.lr_spatial}]


def pixel_loss(model, batch, criterion, grid, training=True, autocast=None):
    """(loss, logits, mask) of a batch at the resolution of pixels."""
    with autocast or nullcontext():
        logits = model.forward_pixels(*batch.inputs(), grid)
    mask = pixel_mask(batch.valid, grid, model.patch_size)
    return criterion(logits, batch.target, mask, training)[0], logits, mask


class Trainer:
    """Builds all parts of a run from a Config; run() trains and returns {"history", "best_epoch", "stopped"}.

    ops: "camox" or "torch". graph: steps are replayed as CUDA graphs, one for each shape of a batch.
    Raises CacheError, ConfigError, CheckpointError or TrainingError, and ValueError where no graph can be captured.
    """

    def __init__(self, config, ops="camox", device="cpu", resume=False, graph=False):
        if graph:
            check_graph(ops, device)
        if graph and config.train.gradient_checkpointing:
            # its backward pass sets the random state again, which a capture may not
            raise ValueError(f"graph needs train.gradient_checkpointing: 0, got {config.train.gradient_checkpointing}")
        self.config, self.device, self.folder = config.check(), open_device(device), Path(config.train.checkpoint_dir)
        checkpoint.check_folder(self.folder)
        torch.manual_seed(config.run.seed)
        torch.backends.cudnn.benchmark = config.run.cudnn_benchmark
        sequences = open_sequences(config)
        cache = "" if config.simulator.enabled else Path(config.patchify_on_disk.cache_dir).expanduser()
        parts = split(sequences, config.split, cache)
        self.grid = sequences[0].grid
        self.training, self.validation = (NextFrames(parts[part]) for part in ("train", "val"))
        self.batches = loader(self.training, config.data, self.device, shuffled=True)
        if not len(self.batches):
            raise TrainingError(f"data.batch_size={config.data.batch_size} is more than {len(self.training)} samples")
        self.validation_batches = loader(self.validation, config.data, self.device)
        channels = sequences[0].tokens(1)[2].shape[1]
        self.model = EmberFormer(**model_arguments(config, channels), ops=ops).to(self.device)
        self.model.gradient_checkpointing_enable(config.train.gradient_checkpointing)
        groups = parameter_groups(self.model, config.train)
        self.optimizer = capturable(torch.optim.Adam(groups, weight_decay=config.train.weight_decay, fused=True))
        self.criterion = Criterion(config.model.loss, config.model.metrics.pos_weight)
        self.amp = self.amp_dtype()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp is torch.float16)
        self.stopping, self.history, self.start_epoch = EarlyStopping(config.train.early_stopping), [], 0
        self.step = GraphedSteps(self.train_step) if graph else self.train_step
        if resume:
            self.resume(self.folder / checkpoint.LAST)

    def amp_dtype(self):
        """What autocast computes in, or None. As the public script, "auto" is float16 on a GPU alone."""
        chosen = self.config.train.amp
        if chosen == "auto":
            return torch.float16 if self.device.type == "cuda" else None
        return DTYPES.get(chosen)

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.amp or torch.bfloat16, enabled=self.amp is not None)

    def resume(self, path):
        """Go on after the epoch of a checkpoint, to the same numbers as an unbroken run."""
        state = checkpoint.load(path, map_location=self.device)
        with checkpoint.fitting(path):
            self.model.load_state_dict(state["model_state_dict"])
            self.optimizer.load_state_dict(state["optimizer_state_dict"])
            self.scaler.load_state_dict(state["scaler"])
            self.stopping.load_state_dict(state["stopping"])
            self.history = checkpoint.entry(state, "history", list)
            self.start_epoch = checkpoint.entry(state, "epoch", int) + 1
            checkpoint.set_rng_state(state["rng"], self.device)

    def run(self):
        """Train to the last epoch or until nothing improves."""
        epochs, stopped = self.config.train.epochs, False
        for epoch in range(self.start_epoch, epochs):
            if epoch and epoch == self.config.model.spatial.freeze_epochs:
                self.model.unfreeze_decoder()
            row = {"epoch": epoch + 1, **self.train_epoch(epoch), **self.validate(epoch)}
            self.history.append(row)
            shown = "  ".join(f"{name} {row[name]:.4f}" for name in ("train/loss", "val/loss", "val/f1", "val/iou"))
            print(f"epoch {epoch + 1}/{epochs}  {shown}", flush=True)
            stopped = self.record(epoch, row)
            if stopped:
                best, monitor = self.stopping, self.config.train.early_stopping.monitor
                print(f"stopped: {monitor} is best, {best.best:.4f}, since epoch {best.best_epoch + 1}", flush=True)
                break
        return {"history": self.history, "best_epoch": self.stopping.best_epoch + 1, "stopped": stopped}

    def train_epoch(self, epoch):
        """One pass over the training samples: {"train/loss", "train/f1", ...}."""
        self.model.train()
        seeds = np.random.SeedSequence([self.config.run.seed, epoch])
        self.batches.generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
        counts, losses = Counts(self.device), LossMeter()
        line = ProgressBar(len(self.batches), f"epoch {epoch + 1}/{self.config.train.epochs}")
        for index, batch in enumerate(self.batches, 1):
            batch = batch.to(self.device)
            loss, found = self.step(*batch)
            losses.update(loss, len(batch.target))
            counts.update(found)
            if index == len(self.batches) or index % self.config.train.log_metrics_every == 0:
                mean = losses.mean()  # the one place where the host waits for the device
                if not math.isfinite(mean):
                    raise TrainingError(f"loss became {mean} in epoch {epoch + 1} by step {index}; lower lr_temporal")
                line.update(index, index * self.config.data.batch_size, loss=mean)
        line.close()
        return {"train/loss": losses.mean(), **{f"train/{name}": v for name, v in counts.scores().items()}}

    def train_step(self, *tensors):
        """Forward, backward and update with the tensors of a Batch: its loss and outcomes."""
        batch = Batch(*tensors)
        loss, logits, mask = pixel_loss(self.model, batch, self.criterion, self.grid, autocast=self.autocast())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), outcomes(logits, batch.target, mask, self.config.model.metrics)

    @torch.no_grad()
    def validate(self, epoch):
        """{"val/loss", "val/f1", ...}; writes the preview of the first batch where this epoch has one."""
        self.model.eval()
        counts, losses = Counts(self.device), LossMeter()
        every = self.config.train.log_images_every
        for index, batch in enumerate(self.validation_batches):
            batch = batch.to(self.device)
            loss, logits, mask = pixel_loss(self.model, batch, self.criterion, self.grid, False, self.autocast())
            losses.update(loss, len(batch.target))
            counts.update(outcomes(logits, batch.target, mask, self.config.model.metrics))
            if index == 0 and every and epoch % every == 0:
                settings = self.config.wandb
                path = self.folder / f"preview_{epoch + 1:03d}.png"
                shown = batch.to("cpu"), torch.sigmoid(logits.float()).cpu()
                write_preview(path, *shown, self.grid, settings.max_preview_images, settings.preview_size)
        return {"val/loss": losses.mean(), **{f"val/{name}": value for name, value in counts.scores().items()}}

    def record(self, epoch, row):
        """Write the checkpoints and the metrics of all epochs so far; whether to stop."""
        monitored = row[self.config.train.early_stopping.monitor]
        sign = 1 if self.config.train.early_stopping.mode == "max" else -1
        # Any improvement makes the best checkpoint; min_delta is for stopping.
        best = all(
            sign * (monitored - past[self.config.train.early_stopping.monitor]) > 0 for past in self.history[:-1]
        )
        stop = self.stopping.update(epoch, monitored)
        state = {
            "epoch": epoch,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "stopping": self.stopping.state_dict(),
            "history": self.history,
            "rng": checkpoint.rng_state(self.device),
            "config": asdict(self.config),
            **{name.replace("/", "_"): value for name, value in row.items() if name.startswith("val/")},
        }
        if self.config.train.save_checkpoints:
            if best:  # before the last: a run that is killed between the two repeats the epoch
                checkpoint.save(self.folder / checkpoint.BEST, state)
            checkpoint.save_last(self.folder, state)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / METRICS_FILE, "w", newline="") as file:
            writer = csv.DictWriter(file, self.history[0])
            writer.writeheader()
            writer.writerows(self.history)
        return stop
