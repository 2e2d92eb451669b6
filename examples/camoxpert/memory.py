"""Memory of one training step of CamoXpert; what is counted stands in common/memory.py."""

import copy

import torch

from ..common import memory
from .losses import AdvancedCODLoss
from .steps import build_optimizer


def forward(model, criterion, images, masks):
    """The loss of a batch, from the same dropout each time."""
    torch.manual_seed(0)
    logits, aux_loss, deep = model(images, return_deep_supervision=True)
    return criterion(logits, masks, aux_loss, deep)[0]


def step(model, criterion, optimizer, images, masks):
    """One whole training step."""
    forward(model, criterion, images, masks).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(model, images, masks):
    """{"peak_mb", "saved_mb"} of a training step on a batch; the model is left as it is."""
    model = copy.deepcopy(model).train()
    criterion, optimizer = AdvancedCODLoss(), build_optimizer(model, 1e-4)
    return memory.measure(
        model,
        lambda: forward(model, criterion, images, masks),
        lambda: step(model, criterion, optimizer, images, masks),
    )
