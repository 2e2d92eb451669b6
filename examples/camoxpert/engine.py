"""The training run: two stages, validation, checkpoints, resuming, one process or many."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from camox_ops.train import ProgressBar, gradient_checkpointing_policy, loader_options

from ..common import checkpoint, distributed
from ..common.checkpoint import rng_state, set_rng_state
from ..common.options import check_numbers, open_device
from .data import BUILTIN, EpochSampler, check_folder, open_split
from .ema import EMA
from .losses import AdvancedCODLoss
from .metrics import evaluate
from .model import CamoXpert
from .steps import Precision, Stepper, build_optimizer, lr_factor

# The coarsest features have 1/32 of the side. At 2x2 or less PyTorch 2.13's AVX-512 bfloat16 convolution leaves weight
# gradients uninitialised, those of the 7x7 taps that only ever see padding, where they should be 0.
SMALLEST_BFLOAT16 = 96
CHECKPOINTING = ("auto", "on", "off")


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stopped and what to change."""


@dataclass
class Config:
    """Everything that decides a run's numbers. Sizes are pixels, counts are images, rates are per optimizer step."""

    dataset_path: str
    checkpoint_dir: str = "./checkpoints"
    backbone: str = "edgenext_base"
    pretrained: bool = False
    num_experts: int = 7
    batch_size: int = 2
    accumulation_steps: int = 4
    img_size: int = 384
    epochs: int = 120
    stage1_epochs: int = 30
    lr: float = 0.00025
    weight_decay: float = 0.0001
    backbone_lr_scale: float = 1.0
    num_workers: int | None = None
    deep_supervision: bool = False
    gradient_checkpointing: str = "auto"
    use_ema: bool = False
    ema_decay: float = 0.999
    resume_from: str | None = None
    no_amp: bool = False
    ops: str = "camox"
    aux_loss: str = "usage_mse"
    ssim_weight: float = 0.0
    seed: int = 42
    device: str = "cpu"
    log_interval: int = 20

    def __post_init__(self):
        check_numbers(self)
        smallest = {
            "num_experts": 1,
            "batch_size": 1,
            "accumulation_steps": 1,
            "img_size": 32,
            "epochs": 1,
            "stage1_epochs": 0,
            "num_workers": 0,
            "log_interval": 1,
        }
        for name, least in smallest.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.device == "cpu" and not self.no_amp and self.img_size < SMALLEST_BFLOAT16:
            raise ValueError(
                f"img_size must be >= {SMALLEST_BFLOAT16} in bfloat16 on the CPU, got {self.img_size}; or use --no-amp"
            )
        if self.gradient_checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"gradient_checkpointing must be one of {CHECKPOINTING}, got {self.gradient_checkpointing!r}"
            )
        if not self.lr > 0:
            raise ValueError(f"lr must be > 0, got {self.lr}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), got {self.ema_decay}")
        for name in ("weight_decay", "backbone_lr_scale", "ssim_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    def stage(self, epoch):
        """1 while the backbone is frozen, then 2."""
        return 1 if epoch < self.stage1_epochs else 2


class Trainer:
    """Builds all parts of a run from a Config; run() trains and returns the history, one dict per epoch.

    Raises DatasetError, CheckpointError or TrainingError before or instead of writing anything unusable.
    """

    def __init__(self, config):
        self.config = config
        self.rank, self.world, self.device = distributed.start(open_device(config.device))
        checkpoint.check_folder(config.checkpoint_dir)
        if str(config.dataset_path) != BUILTIN:
            distributed.on_first_rank(lambda: check_folder(config.dataset_path))
        torch.manual_seed(config.seed)
        self.train_loader = self.loader("train")
        self.val_loader = self.loader("val")
        if not len(self.train_loader):
            raise TrainingError(
                f"batch_size={config.batch_size} on {self.world} process(es) is more than the "
                f"{len(self.train_loader.dataset)} training images"
            )
        self.model = CamoXpert(
            pretrained=config.pretrained,
            backbone=config.backbone,
            num_experts=config.num_experts,
            ops=config.ops,
            aux_loss=config.aux_loss,
        ).to(self.device)
        self.criterion = AdvancedCODLoss(ssim_weight=config.ssim_weight).to(self.device)
        self.precision = Precision(self.device, enabled=not config.no_amp)
        self.model.gradient_checkpointing = self.checkpointing()
        self.ema = EMA(self.model, config.ema_decay) if config.use_ema else None
        self.history, self.best_iou, self.start_epoch = [], -1.0, 0
        self.resumed = self.resume(config.resume_from) if config.resume_from else None
        if self.resumed is None:
            # dropout differs between ranks, the weights above do not
            torch.manual_seed(config.seed + self.rank)

    def checkpointing(self):
        """Whether to recompute activations, as the configuration says or as a small batch's memory suggests."""
        config = self.config
        if config.gradient_checkpointing != "auto":
            return config.gradient_checkpointing == "on"
        sample = torch.randn(2, 3, config.img_size, config.img_size, generator=torch.Generator().manual_seed(0))
        with self.precision.autocast():
            policy = gradient_checkpointing_policy(config.batch_size, self.model, sample.to(self.device))
        if self.rank == 0:
            print(policy, flush=True)
        return bool(distributed.on_first_rank(lambda: policy.enabled))

    def loader(self, split):
        """Batches of a split; training is shuffled and shared among the ranks, validation is whole."""
        config, training = self.config, split == "train"
        dataset = open_split(config.dataset_path, split, config.img_size, config.seed)
        sampler = EpochSampler(
            len(dataset),
            config.seed,
            rank=self.rank if training else 0,
            world=self.world if training else 1,
            shuffle=training,
        )
        options = loader_options(config.num_workers, device=self.device)
        if training and self.rank == 0:
            print(options, flush=True)
        return DataLoader(
            dataset,
            config.batch_size,
            sampler=sampler,
            drop_last=training,
            **options,
            # its own generator: workers that persist would otherwise draw from the global one in the first epoch only
            generator=torch.Generator().manual_seed(config.seed),
        )

    def resume(self, path):
        """Take model, averages and counters from a checkpoint; returns it, for the parts that the stage builds."""
        state = checkpoint.load(path, map_location=self.device)
        with checkpoint.fitting(path):
            self.model.load_state_dict(state["model_state_dict"])
            if self.ema is not None:
                self.ema = EMA(self.model, self.config.ema_decay)  # of these weights, where that run averaged none
                if state["ema_state_dict"] is not None:
                    self.ema.load(state["ema_state_dict"])
            self.precision.scaler.load_state_dict(state["scaler_state_dict"])
            self.history = checkpoint.entry(state, "history", list)
            self.best_iou = checkpoint.entry(state, "best_iou", float)
            self.start_epoch = checkpoint.entry(state, "epoch", int) + 1
            checkpoint.entry(state, "stage", int)
            states = checkpoint.entry(state, "rng", list)
            if self.rank < len(states):
                set_rng_state(states[self.rank], self.device)
            else:
                torch.manual_seed(self.config.seed + self.rank + self.world * self.start_epoch)
        return state

    def begin_stage(self, stage):
        """Freeze or free the backbone and build the optimizer and, under torchrun, the wrapper for what remains."""
        config = self.config
        self.model.backbone.requires_grad_(stage == 2)
        optimizer = build_optimizer(self.model, config.lr, config.weight_decay, config.backbone_lr_scale)
        if self.resumed is not None and self.resumed["stage"] == stage:
            with checkpoint.fitting(config.resume_from):
                optimizer.load_state_dict(self.resumed["optimizer_state_dict"])
        self.resumed = None
        model = self.model
        if self.world > 1:
            # experts that no image of this rank chose take no part in the graph
            model = DistributedDataParallel(
                model,
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                find_unused_parameters=True,
            )
        return Stepper(model, self.criterion, optimizer, self.precision, self.ema, config.deep_supervision)

    def run(self):
        """Train from the start or the resumed epoch to the end."""
        stepper, stage = None, None
        for epoch in range(self.start_epoch, self.config.epochs):
            if self.config.stage(epoch) != stage:
                stage = self.config.stage(epoch)
                stepper = self.begin_stage(stage)
            loss = self.train_epoch(stepper, epoch)
            self.finish_epoch(stepper, epoch, stage, loss)
        return self.history

    def train_epoch(self, stepper, epoch):
        """One pass over the training images; returns the mean loss of this rank."""
        config, batches = self.config, len(self.train_loader)
        first = 0 if config.stage(epoch) == 1 else config.stage1_epochs
        last = config.stage1_epochs if config.stage(epoch) == 1 else config.epochs
        per_epoch = math.ceil(batches / config.accumulation_steps)
        done, planned = (epoch - first) * per_epoch, (min(last, config.epochs) - first) * per_epoch

        self.model.train()
        self.train_loader.sampler.epoch = epoch
        bar = ProgressBar(batches, f"epoch {epoch + 1}/{config.epochs}") if self.rank == 0 else None
        total, seen, read = 0.0, 0, 0
        for index, (images, masks) in enumerate(self.train_loader):
            images = images.to(self.device, non_blocking=True)
            masks = masks.to(self.device, non_blocking=True)
            group = index // config.accumulation_steps
            group_size = min(config.accumulation_steps, batches - group * config.accumulation_steps)
            closes = index + 1 == batches or (index + 1) % config.accumulation_steps == 0
            stepper.accumulate(images, masks, group_size, synchronise=closes)
            if closes:
                stepper.step(lr_factor(done + group, planned))
            seen += len(images)
            if (index + 1) % config.log_interval == 0 or index + 1 == batches:
                loss = stepper.take_loss()
                if not math.isfinite(loss):
                    raise TrainingError(
                        f"loss became {loss} in epoch {epoch + 1} by step {index + 1}; lower --lr or use --no-amp, "
                        f"and resume from the last checkpoint in {config.checkpoint_dir}"
                    )
                total, read = total + loss * (index + 1 - read), index + 1
                if bar:
                    bar.update(index + 1, seen * self.world, loss=loss)
        if bar:
            bar.close()
        return total / batches

    def finish_epoch(self, stepper, epoch, stage, loss):
        """Validate, record, and write the checkpoints."""
        measures = distributed.on_first_rank(self.validate)
        self.history.append({"epoch": epoch, "stage": stage, "train_loss": loss, **measures})
        improved = measures["iou"] > self.best_iou
        self.best_iou = max(self.best_iou, measures["iou"])
        states = distributed.gather(rng_state(self.device))
        if self.rank:
            return
        shown = "  ".join(f"{name}={value:.4f}" for name, value in measures.items())
        print(f"epoch {epoch + 1}/{self.config.epochs} stage {stage}  loss={loss:.4f}  {shown}", flush=True)
        state = {
            "epoch": epoch,
            "stage": stage,
            "model_state_dict": self.model.state_dict(),
            "ema_state_dict": self.ema.shadow if self.ema is not None else None,
            "optimizer_state_dict": stepper.optimizer.state_dict(),
            "scaler_state_dict": self.precision.scaler.state_dict(),
            "rng": states,
            "best_iou": self.best_iou,
            "history": self.history,
            "args": asdict(self.config),
        }
        folder = Path(self.config.checkpoint_dir)
        if improved:  # before the last: a run that is killed between the two repeats the epoch
            checkpoint.save(folder / checkpoint.BEST, state)
        checkpoint.save_last(folder, state)
        (folder / "history.json").write_text(json.dumps(self.history, indent=2) + "\n")

    def validate(self):
        """Measures over the validation images, with the averaged weights where there are any."""
        with self.precision.autocast():
            if self.ema is None:
                return evaluate(self.model, self.val_loader, self.device)
            with self.ema.applied():
                return evaluate(self.model, self.val_loader, self.device)
