"""The public training script's losses (scripts/train_emberformer.py of tampueroc/emberformer at d511660): over the
pixels of a mask, logits, target and mask (B, 1, H, W)."""

import torch
from torch.nn import functional as F

LOSSES = ("bce_dice", "focal_tversky")


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp_min(1.0)


def auto_pos_weight(target, mask):
    """Weight of burning pixels that makes both classes weigh the same."""
    positive = (target * mask).sum().clamp_min(1.0)
    return (mask.sum() - positive).clamp_min(1.0) / positive


def bce_loss(logits, target, mask, pos_weight=None):
    return masked_mean(
        F.binary_cross_entropy_with_logits(logits, target, reduction="none", pos_weight=pos_weight), mask
    )


def dice_loss(logits, target, mask, smooth=1.0):
    """The square root of the mean of 1 - Dice over the images that burn; 0 where none does."""
    p, target = torch.sigmoid(logits) * mask, target * mask
    burning = target.sum((1, 2, 3))
    dice = (2 * (p * target).sum((1, 2, 3)) + smooth) / (p.sum((1, 2, 3)) + burning + smooth)
    counted = (burning > 0).to(dice.dtype)
    mean = ((1 - dice) * counted).sum() / counted.sum().clamp_min(1.0)
    # The public code returns before the square root, a zero without gradient.
    return torch.where(counted.any(), torch.sqrt(mean + 1e-7), 0.0)


def focal_loss(logits, target, mask, alpha=0.25, gamma=2.0):
    """Cross entropy, less where the model is right already: (1 - p of the true class) ** gamma."""
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = torch.sigmoid(logits)
    wrong = p * (1 - target) + (1 - p) * target
    return masked_mean((alpha * target + (1 - alpha) * (1 - target)) * wrong**gamma * bce, mask)


def tversky_loss(logits, target, mask, alpha=0.7, beta=0.3, smooth=1.0):
    """1 - the Tversky index: false alarms weigh alpha, missed pixels beta."""
    p, target = torch.sigmoid(logits) * mask, target * mask
    hit, false_alarm, missed = (part.sum((1, 2, 3)) for part in (p * target, p * (1 - target), (1 - p) * target))
    return (1 - (hit + smooth) / (hit + alpha * false_alarm + beta * missed + smooth)).mean()


def pixel_mask(valid, grid, patch_size):
    """valid bool (B, N) -> (B, 1, Gy * P, Gx * P) float32, 1 at the pixels of valid patches."""
    mask = valid.view(-1, 1, *grid).float()
    return mask.repeat_interleave(patch_size, 2).repeat_interleave(patch_size, 3)


class Criterion:
    """The loss that a configuration asks for: (total, {name: part}) of logits, target and mask, in float32 or float64.

    settings: config.Loss. pos_weight: "auto", a number or None; in validation the public script uses none.
    """

    def __init__(self, settings, pos_weight="auto"):
        self.settings, self.pos_weight = settings, pos_weight

    def __call__(self, logits, target, mask, training=True):
        chosen, real = self.settings, torch.promote_types(logits.dtype, torch.float32)
        logits, target = logits.to(real), target.to(real)
        if chosen.type == "focal_tversky":
            focal = focal_loss(logits, target, mask, chosen.focal_alpha, chosen.focal_gamma)
            tversky = tversky_loss(logits, target, mask, chosen.tversky_alpha, chosen.tversky_beta)
            return chosen.focal_weight * focal + chosen.tversky_weight * tversky, {"focal": focal, "tversky": tversky}
        bce = bce_loss(logits, target, mask, self.weight(target, mask) if training else None)
        if not chosen.use_dice:
            return bce, {"bce": bce}
        dice = dice_loss(logits, target, mask)
        return chosen.bce_weight * bce + chosen.dice_weight * dice, {"bce": bce, "dice": dice}

    def weight(self, target, mask):
        if self.pos_weight == "auto":
            return auto_pos_weight(target, mask)
        return None if self.pos_weight is None else target.new_full((), self.pos_weight)
