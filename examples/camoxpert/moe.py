"""Sparse mixture of experts over whole images; routing of mahi-chan/camoXpert, models/experts.py, commit 47e858c."""

import torch
from torch import nn
from torch.nn import functional as F

from .experts import CLASSES

AUX_LOSSES = ("usage_mse", "switch")


class MoELayer(nn.Module):
    """Each image of x (B,C,H,W) goes through the top_k experts that its gate chooses, weighted by their softmax.

    Returns (output like x, aux_loss, routing_info). aux_loss "usage_mse" is 0.01 times the mean squared distance of the
    experts' shares from uniform; being a count, it has no gradient. "switch" is E times the sum over the experts of
    their share times their mean probability (Switch Transformer, arXiv 2101.03961, equation 4). routing_info holds
    `top_k_indices` (B,K), `top_k_weights` (B,K) and `expert_usage` (E,). Experts that no image chose are not run, so
    their parameters keep grad=None.

    The experts run image by image, as in the users' code, but the chosen numbers are read once per layer rather
    than once per image and choice.

    experts: the classes to take turns with, each called with in_channels.
    """

    def __init__(self, in_channels, num_experts=5, top_k=2, *, aux_loss="usage_mse", experts=CLASSES):
        super().__init__()
        if num_experts < 1:
            raise ValueError(f"num_experts must be >= 1, got {num_experts}")
        if top_k < 1:
            raise ValueError(f"top_k must be >= 1, got {top_k}")
        if aux_loss not in AUX_LOSSES:
            raise ValueError(f"aux_loss must be one of {AUX_LOSSES}, got {aux_loss!r}")
        self.aux_loss = aux_loss
        self.num_experts = num_experts
        self.top_k = min(top_k, num_experts)
        self.experts = nn.ModuleList(experts[i % len(experts)](in_channels) for i in range(num_experts))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_channels, num_experts, 1))

    def forward(self, x):
        logits = self.gate(x).flatten(1)
        chosen_logits, chosen = logits.topk(self.top_k, dim=-1)
        weights = F.softmax(chosen_logits, dim=-1)

        output = torch.zeros_like(x)
        for row, numbers in enumerate(chosen.tolist()):
            image = x[row : row + 1]
            mixed = torch.zeros_like(image)
            for slot, number in enumerate(numbers):
                mixed = mixed + weights[row, slot] * self.experts[number](image)
            output[row : row + 1] = mixed

        usage = torch.bincount(chosen.flatten(), minlength=self.num_experts).float()
        share = usage / (chosen.numel() + 1e-8)
        if self.aux_loss == "usage_mse":
            aux_loss = 0.01 * (share - 1 / self.num_experts).square().mean()
        else:
            aux_loss = self.num_experts * (share * logits.softmax(1, dtype=torch.float32).mean(0)).sum()
        info = {"top_k_indices": chosen, "top_k_weights": weights.detach(), "expert_usage": usage}
        return output, aux_loss, info
