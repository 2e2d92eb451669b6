"""One optimizer step: mixed precision, accumulation, clipping, averaging. Nothing here waits for the device."""

import math
from contextlib import nullcontext

import torch

from camox_ops.train import LossMeter

WARMUP_SHARE = 0.1
FINAL_LR_SHARE = 0.01
SCALER_START = 512.0


class Precision:
    """Autocast and loss scaling of a device: float16 with a GradScaler on CUDA, bfloat16 on CPU, or neither."""

    def __init__(self, device, enabled=True):
        self.device_type = torch.device(device).type
        self.enabled = enabled
        self.dtype = torch.float16 if self.device_type == "cuda" else torch.bfloat16
        scaling = enabled and self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device_type, init_scale=SCALER_START, enabled=scaling)

    def autocast(self):
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)


def lr_factor(step, steps):
    """Share of the base learning rate at optimizer step `step` of `steps`: linear warm-up, then a cosine to 0.01."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model, lr, weight_decay=1e-4, backbone_lr_scale=1.0):
    """Fused AdamW over the parameters that require gradients, the backbone's at their own learning rate.

    A frozen backbone leaves one group. Each group keeps its base rate as `base_lr` for set_lr.
    """
    groups = {"backbone": [], "rest": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups["backbone" if name.startswith("backbone.") else "rest"].append(parameter)
    rates = {"backbone": lr * backbone_lr_scale, "rest": lr}
    described = [
        {"params": parameters, "lr": rates[name], "base_lr": rates[name]}
        for name, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(described, weight_decay=weight_decay, fused=True)


def set_lr(optimizer, factor):
    """Scale every group's base learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


class Stepper:
    """Feeds micro-batches to a model and steps its optimizer once per group of them.

    model: CamoXpert or its DistributedDataParallel wrapper. criterion: as losses.AdvancedCODLoss. Gradients are clipped
    to the norm max_norm. `losses` collects those of the micro-batches on the device until take_loss() reads them.
    """

    def __init__(self, model, criterion, optimizer, precision, ema=None, deep_supervision=False, max_norm=0.5):
        self.model, self.criterion, self.optimizer, self.precision = model, criterion, optimizer, precision
        self.ema, self.deep_supervision, self.max_norm = ema, deep_supervision, max_norm
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.losses = LossMeter()

    def accumulate(self, images, masks, group_size=1, synchronise=True):
        """Add the gradients of loss / group_size; synchronise=False leaves DDP's exchange to a later micro-batch."""
        no_sync = getattr(self.model, "no_sync", nullcontext)
        with nullcontext() if synchronise else no_sync():
            with self.precision.autocast():
                logits, aux_loss, deep = self.model(images, return_deep_supervision=self.deep_supervision)
            loss, _ = self.criterion(logits, masks, aux_loss, deep)
            self.precision.scaler.scale(loss / group_size).backward()
        self.losses.update(loss)

    def step(self, factor=1.0):
        """Clip, update the parameters at `factor` of their base learning rate, average, and clear the gradients."""
        scaler = self.precision.scaler
        set_lr(self.optimizer, factor)
        scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()

    def take_loss(self):
        """Mean loss since the last call; this is the one place where the host waits for the device."""
        return self.losses.take()
