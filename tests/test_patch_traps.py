"""Modules that read like one that patch knows and compute something else: whatever patch does, the numbers stay."""

import copy

import patch_models as models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import camox_ops as cx


class KeepsWeights(models.FullAttention):
    """pytorch_tabular's: the weights stay on the module for whoever asks later."""

    def forward(self, queries, keys, values, attn_mask):
        scores = torch.einsum("blhe,bshe->bhls", queries, keys) / queries.shape[3] ** 0.5
        self.weights = self.dropout(scores.softmax(-1))
        return torch.einsum("bhls,bshd->blhd", self.weights, values), None


class ScalesByWidth(models.FullAttention):
    """makeMoE's: divides by the root of all heads' width, not of one head's."""

    def forward(self, queries, keys, values, attn_mask):
        scores = torch.einsum("blhe,bshe->bhls", queries, keys) / (queries.shape[2] * queries.shape[3]) ** 0.5
        return torch.einsum("bhls,bshd->blhd", self.dropout(scores.softmax(-1)), values), None


class OverQueries(models.FullAttention):
    """The softmax over the queries."""

    def forward(self, queries, keys, values, attn_mask):
        scores = torch.einsum("blhe,bshe->bhls", queries, keys) / queries.shape[3] ** 0.5
        return torch.einsum("bhls,bshd->blhd", self.dropout(scores.softmax(-2)), values), None


class ConvBetween(models.Mlp):
    """PVTv2's: neighbours are mixed between the first product and the GELU."""

    def forward(self, x):
        hidden = self.fc1(x)
        return self.fc2(F.gelu(hidden + hidden.roll(1, -2)))


class AlwaysDrops(nn.Dropout):
    """Drops in evaluation mode as well."""

    def forward(self, x):
        return F.dropout(x, self.p, training=True)


class HalvesInEval(models.SelfOutput):
    """Another formula in evaluation mode."""

    def forward(self, hidden, residual):
        y = super().forward(hidden, residual)
        return y if self.training else y / 2


class StructureLoss(nn.Module):
    """camoXpert's, which has the name of F3Net's weighted loss and is a squared distance of smoothed maps."""

    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool2d(5, stride=1, padding=2)

    def forward(self, logits, mask):
        return (self.pool(logits.sigmoid()) - self.pool(mask)).square().mean()


class SharesDropout(models.OneDropout):
    """One dropout module here, in the block and in the attention: patched is who calls it, never the dropout."""

    def __init__(self):
        super().__init__()
        self.attention = models.FullAttention()
        self.attention.dropout = self.drop

    def forward(self, x):
        q = self.drop(x).unflatten(-1, (4, 8))
        return super().forward(self.attention(q, q, q, None)[0].flatten(2))


X, HEADS, IMAGE = (128, 16, 32), (64, 11, 4, 8), (4, models.CHANNELS, 12, 12)
TRAPS = {
    "keeps weights": (KeepsWeights, (HEADS,) * 3 + (None,)),
    "scales by width": (ScalesByWidth, (HEADS,) * 3 + (None,)),
    "over queries": (OverQueries, (HEADS,) * 3 + (None,)),
    "conv between": (ConvBetween, (X,)),
    "always drops": (AlwaysDrops, (X,)),
    "halves in eval": (HalvesInEval, ((128, 16, 64), X)),
    "another loss": (StructureLoss, (IMAGE, IMAGE)),
    "linear attention of widedeep": (models.WidedeepAttention, (HEADS,) * 3),
    "dropout in three places": (SharesDropout, (X,)),
    "a norm without mean": (models.RootMeanSquare, (IMAGE,)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRAPS)
def test_numbers_stay(name, training):
    kind, shapes = TRAPS[name]
    torch.manual_seed(0)
    original = kind().train(training)
    args = [None if shape is None else torch.randn(shape) for shape in shapes]
    patched = copy.deepcopy(original)
    report = cx.patch(patched)
    if name != "scales by width":  # attention of any scale may be taken, with its own
        assert "" not in [entry.name for entry in report.patched], report
    if name == "always drops":
        assert (patched(args[0]) == 0).float().mean() > 0.3
        return
    for model in (original, patched):
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    for _ in range(2):  # the first input is compared, the second is not
        ours, theirs = patched(*args), original(*args)
        ours, theirs = (y[0] if isinstance(y, tuple) else y for y in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if name == "keeps weights":
        torch.testing.assert_close(patched.weights, original.weights, rtol=1e-5, atol=1e-6)
