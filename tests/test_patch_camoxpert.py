"""patch on CamoXpert's experts and mixture: the stock classes of examples/camoxpert, and other spellings."""

import copy

import example_path
import pytest
import torch
import torch.nn.functional as F
from patch_models import Manual
from torch import nn

import camox_ops as cx

backbone, experts, moe = (example_path.load(name) for name in ("backbone", "experts", "moe"))
WIDTH = 16


def branch(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 1), Manual(outside), nn.GELU())


class Channelwise(nn.Module):
    """Edges channel by channel, under other names, x added at the end."""

    def __init__(self, dim=WIDTH, eps=1e-8):
        super().__init__()
        x = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
        laplacian = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
        for name, kernel in (("a", x), ("b", x.t()), ("c", laplacian)):
            self.register_buffer(name, kernel.reshape(1, 1, 3, 3))
        self.eps = eps
        self.one, self.two, self.three, self.four = (branch(dim, dim // 4) for _ in range(4))
        self.all = branch(dim, dim)

    def forward(self, x):
        sobel, laplacian = [], []
        for c in range(x.shape[1]):
            gx, gy, lap = (F.conv2d(x[:, c : c + 1], kernel, padding=1) for kernel in (self.a, self.b, self.c))
            sobel.append(torch.sqrt(gx**2 + gy**2 + self.eps))
            laplacian.append(lap.abs())
        sobel, laplacian = torch.cat(sobel, 1), torch.cat(laplacian, 1)
        gradient = torch.sqrt(sobel**2 + laplacian**2 + self.eps)
        parts = self.one(sobel), self.two(laplacian), self.three(gradient), self.four(x)
        return self.all(torch.cat(parts, 1)) + x


class EndsInIdentity(backbone.SDTAEncoder):
    """A module without parameters beside the convolutions."""

    def __init__(self):
        super().__init__(WIDTH, 4, 0.0)
        self.last = nn.Identity()

    def forward(self, x):
        return self.last(super().forward(x))


class OtherMixture(nn.Module):
    """Every expert on the whole batch: those that nobody chose get zeros as gradients, not None."""

    def __init__(self, dim=WIDTH, count=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.experts = nn.ModuleList(nn.Conv2d(dim, dim, 1) for _ in range(count))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(dim, count, 1))

    def forward(self, x):
        logits = self.gate(x).flatten(1)
        best, chosen = logits.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(logits).scatter(1, chosen, best.softmax(-1))
        results = torch.stack([expert(x) for expert in self.experts], 1)
        output = (results * weights[:, :, None, None, None]).sum(1)
        usage = torch.bincount(chosen.flatten(), minlength=len(self.experts)).float()
        loss = 0.01 * (usage / (chosen.numel() + 1e-8) - 1 / len(self.experts)).square().mean()
        return (
            output,
            loss,
            {"top_k_indices": chosen, "top_k_weights": best.softmax(-1).detach(), "expert_usage": usage},
        )


def mixture():
    layer = moe.MoELayer(WIDTH, 5, 2, experts=(experts.TextureExpert, experts.AttentionExpert, experts.EdgeExpert))
    with torch.no_grad():
        layer.gate[1].weight.mul_(20)  # images differ in their choice
    return layer


CASES = {
    "edges": (lambda: experts.EdgeExpert(WIDTH), "edge_expert"),
    "edges by channel": (Channelwise, "edge_expert"),
    "bands": (lambda: experts.FrequencyExpert(WIDTH), "frequency_expert"),
    "attention": (lambda: backbone.SDTAEncoder(WIDTH, 4, drop_path=0.0), "pixel_attention"),
    "mixture": (mixture, "expert_mixture"),
}


def numbers(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y, *others = y if isinstance(y, tuple) else (y,)
    y.square().mean().backward()
    return y.detach(), x.grad, [p.grad for p in module.parameters()], others


@pytest.mark.parametrize("name", CASES)
def test_matches(name):
    torch.manual_seed(0)
    kind, recogniser = CASES[name]
    module = kind()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    plain = copy.deepcopy(module)
    report = cx.patch(module)
    (entry,) = [entry for entry in report.patched if entry.name == ""]
    assert entry.recogniser == recogniser
    for _ in range(3):  # alone, then with the norms inside patched as well
        x = torch.randn(3, WIDTH, 24, 20)
        ours, theirs = numbers(module, x), numbers(plain, x)
        for mine, original in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(mine, original, rtol=1e-4, atol=1e-5)
        assert ours[0].stride() == theirs[0].stride()
        for mine, original in zip(ours[2], theirs[2], strict=True):
            assert (mine is None) == (original is None)
            if mine is not None:
                assert (mine - original).abs().max() <= 1e-4 * original.abs().max() + 1e-7
        if ours[3]:
            torch.testing.assert_close(ours[3], theirs[3])
    assert all(e.patched for e in report.entries if e.recogniser == recogniser), report


@pytest.mark.parametrize("name", CASES)
def test_autocast(name):
    torch.manual_seed(0)
    module = CASES[name][0]().eval()
    plain = copy.deepcopy(module)
    cx.patch(module)
    x = torch.randn(3, WIDTH, 24, 20)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = module(x), plain(x)
    ours, theirs = (y[0] if isinstance(y, tuple) else y for y in (ours, theirs))
    assert ours.dtype == theirs.dtype
    assert (ours.double() - theirs.double()).abs().max() < 0.05 * theirs.double().abs().max()


@pytest.mark.parametrize(
    "kind",
    [
        lambda: Channelwise(eps=1e-4),
        lambda: experts.TextureExpert(WIDTH),
        lambda: backbone.SDTAEncoder(WIDTH, 4, use_linear_attention=False),
        lambda: moe.MoELayer(WIDTH, 4, 2, aux_loss="switch", experts=(experts.HybridExpert,)),
        OtherMixture,
    ],
)
def test_not_taken(kind):
    report = cx.patch(kind())
    assert "" not in [entry.name for entry in report.patched], report


def test_filters_that_are_changed_are_used():
    module = Channelwise()
    cx.patch(module)
    x = torch.randn(2, WIDTH, 24, 20)
    for _ in range(2):
        torch.testing.assert_close(module(x), Channelwise.forward(module, x), rtol=1e-4, atol=1e-5)
    module.a.mul_(2)
    torch.testing.assert_close(module(x), Channelwise.forward(module, x))


def test_hooks_inside_are_called():
    module = Channelwise()
    cx.patch(module)
    seen = []
    for part in (module.one, module.all[1]):
        part.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(2, WIDTH, 24, 20)
    for _ in range(2):
        module(x)
    assert len(seen) == 4  # the copies that are compared have no hooks


@pytest.mark.parametrize("kind", [experts.EdgeExpert, experts.FrequencyExpert, Channelwise])
def test_hooks_see_what_they_saw(kind):
    seen = []

    def outputs(module, x):
        handles = [part.register_forward_hook(lambda *now: seen.append(now[2])) for part in module.children()]
        module(x)
        for handle in handles:
            handle.remove()
        return [seen.pop() for _ in range(len(seen))]

    torch.manual_seed(0)
    module, x = kind(WIDTH), torch.randn(2, WIDTH, 24, 20)
    expected = outputs(module, x)
    assert cx.patch(module).patched
    module(x)
    for mine, original in zip(outputs(module, x), expected, strict=True):
        torch.testing.assert_close(mine, original, rtol=1e-4, atol=1e-5)


def test_hooks_beside_the_convolutions_are_called():
    module = EndsInIdentity()
    assert "pixel_attention" in [entry.recogniser for entry in cx.patch(module).patched]
    x = torch.randn(2, WIDTH, 24, 20)
    module(x)
    module.last.register_forward_hook(lambda _, args, y: 2 * y)
    torch.testing.assert_close(module(x), EndsInIdentity.forward(module, x))


def test_a_gate_without_numbers():
    module = mixture()
    cx.patch(module)
    x = torch.randn(3, WIDTH, 24, 20)
    module(x)
    with torch.no_grad():
        module.gate[1].bias.fill_(float("nan"))
    output, _, info = module(x)
    assert output.isnan().all() and info["top_k_indices"].shape == (3, 2)


class Pyramid(nn.Module):
    """DeepLab's ASPP: a list of layers and one more, but no mixture."""

    def __init__(self):
        super().__init__()
        sizes = (1, 3)
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, k, padding=k // 2), nn.BatchNorm2d(WIDTH)) for k in sizes
        )
        self.project = nn.Conv2d(WIDTH * len(sizes), WIDTH, 1)

    def forward(self, x):
        return self.project(torch.cat([conv(x) for conv in self.convs], 1))


def test_lists_of_layers_are_not_called_experts():
    assert not cx.patch(Pyramid()).entries


def test_experts_with_batch_norm_are_left_alone():
    layer = mixture()
    layer.experts[0] = nn.Sequential(layer.experts[0], nn.BatchNorm2d(WIDTH))
    reasons = [entry.reason for entry in cx.patch(layer).skipped if entry.recogniser == "expert_mixture"]
    assert reasons == ["its experts mix the images of a batch (BatchNorm)"]
