"""Intersection over union, and the measures of camouflaged object detection as pysodmetrics computes them."""

import numpy as np
import torch
from py_sod_metrics import MAE, Emeasure, Smeasure, WeightedFmeasure


def iou(prediction, mask):
    """Intersection over union of two boolean arrays of one shape; 1.0 where both are empty."""
    union = np.logical_or(prediction, mask).sum()
    return float(np.logical_and(prediction, mask).sum() / union) if union else 1.0


class SegmentationMetrics:
    """Means over images of IoU (threshold 0.5), S-measure, adaptive E-measure, weighted F-measure and MAE."""

    def __init__(self):
        self.ious = []
        self.smeasure, self.emeasure, self.fmeasure, self.mae = Smeasure(), Emeasure(), WeightedFmeasure(), MAE()

    def add(self, probability, mask):
        """One image: probability (H,W) in [0,1], mask (H,W) of 0 and 1."""
        mask = mask > 0.5
        self.ious.append(iou(probability > 0.5, mask))
        for measure in (self.smeasure, self.emeasure, self.fmeasure, self.mae):
            measure.step(pred=probability.astype(np.float64), gt=mask, normalize=False)

    def results(self):
        """{"iou", "s_measure", "e_measure", "weighted_f", "mae"} as floats."""
        return {
            "iou": float(np.mean(self.ious)),
            "s_measure": float(self.smeasure.get_results()["sm"]),
            "e_measure": float(self.emeasure.get_results()["em"]["adp"]),
            "weighted_f": float(self.fmeasure.get_results()["wfm"]),
            "mae": float(self.mae.get_results()["mae"]),
        }


@torch.no_grad()
def predict(model, images):
    """Foreground probabilities (B,H,W), float32, of a batch of images (B,3,H,W); the model stays in its mode."""
    return model(images)[0].float().sigmoid().squeeze(1)


def evaluate(model, loader, device="cpu"):
    """The results of SegmentationMetrics over a loader of (images, masks), in evaluation mode."""
    metrics = SegmentationMetrics()
    was_training = model.training
    model.eval()
    for images, masks in loader:
        probabilities = predict(model, images.to(device, non_blocking=True)).cpu().numpy()
        for probability, mask in zip(probabilities, masks[:, 0].numpy(), strict=True):
            metrics.add(probability, mask)
    model.train(was_training)
    return metrics.results()


def constant_mask_iou(masks):
    """Mean IoU of calling every pixel foreground, over masks (H,W) of 0 and 1: what no model should fall below."""
    return float(np.mean([iou(np.ones(mask.shape, bool), mask > 0.5) for mask in masks]))
