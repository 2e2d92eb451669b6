"""The training loss: cross-entropy, soft IoU, edges, the experts' balance and deep supervision.

Terms and weights follow mahi-chan/camoXpert, losses/advanced_loss.py and train_ultimate.py, commit 47e858c.
"""

import torch
from torch import nn
from torch.nn import functional as F

import camox_ops as cx

DEEP_WEIGHT = 0.4
IOU_SMOOTH = 1e-5
EDGE_EPS = 1e-5
# Of the SSIM of images in [0, 1]; Wang et al., "Image quality assessment: from error visibility to structural
# similarity", IEEE TIP 13, 2004.
SSIM_WINDOW, SSIM_MEAN, SSIM_VARIANCE = 11, 0.01**2, 0.03**2


def soft_iou_loss(probability, target):
    """1 - mean over images of the soft intersection over union; both (B,1,H,W)."""
    intersection = (probability * target).sum((2, 3))
    union = probability.sum((2, 3)) + target.sum((2, 3)) - intersection
    return 1 - ((intersection + IOU_SMOOTH) / (union + IOU_SMOOTH)).mean()


def ssim_loss(probability, target):
    """1 - the mean structural similarity over box windows; both (B,1,H,W) in [0, 1].

    Five means per window, and their gradients, which avg_pool2d would add up pixel by pixel."""
    products = [probability * probability, target * target, probability * target]
    means = cx.box_mean(torch.cat([probability, target, *products], 1), SSIM_WINDOW)
    x, y, xx, yy, xy = means.split(1, 1)
    similar = (2 * x * y + SSIM_MEAN) * (2 * (xy - x * y) + SSIM_VARIANCE)
    different = (x * x + y * y + SSIM_MEAN) * ((xx - x * x) + (yy - y * y) + SSIM_VARIANCE)
    return 1 - (similar / different).mean()


class AdvancedCODLoss(nn.Module):
    """Weighted sum of the terms, in float32 whatever the model's dtype below it.

    forward(logits (B,1,H,W), target like it, aux_loss scalar or None, deep list of logits or None) -> (total, parts);
    parts are detached tensors on the device, so reading them is the caller's choice. ssim_weight 0: no such term.
    """

    def __init__(self, bce_weight=2.0, iou_weight=1.5, edge_weight=1.0, aux_weight=0.1, ssim_weight=0.0):
        super().__init__()
        self.weights = {
            "bce": bce_weight,
            "iou": iou_weight,
            "edge": edge_weight,
            "aux": aux_weight,
            "ssim": ssim_weight,
        }
        sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
        self.register_buffer("sobel", torch.stack([sobel, sobel.t()]).unsqueeze(1))

    def edges(self, image):
        gx, gy = F.conv2d(image, self.sobel.to(image.dtype), padding=1).unbind(1)
        return (gx.square() + gy.square() + EDGE_EPS).sqrt()

    def forward(self, logits, target, aux_loss=None, deep=None):
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.to(target.dtype)
            probability = logits.sigmoid()
            parts = {
                "bce": F.binary_cross_entropy_with_logits(logits, target),
                "iou": soft_iou_loss(probability, target),
                "edge": F.mse_loss(self.edges(probability), self.edges(target)),
            }
            if self.weights["ssim"] > 0:
                parts["ssim"] = ssim_loss(probability, target)
            if aux_loss is not None:
                parts["aux"] = aux_loss
            total = sum(self.weights[name] * part for name, part in parts.items())
            if deep:
                parts["deep"] = sum(self.deep_term(level, target) for level in deep) / len(deep)
                total = total + DEEP_WEIGHT * parts["deep"]
        return total, {name: part.detach() for name, part in parts.items()}

    @staticmethod
    def deep_term(logits, target):
        small = F.interpolate(target, size=logits.shape[2:], mode="bilinear", align_corners=False)
        return F.binary_cross_entropy_with_logits(logits.to(target.dtype), small)
