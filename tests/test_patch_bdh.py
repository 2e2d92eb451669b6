"""patch on BDH's attention: strictly causal as pathwaycom/bdh has it, over all tokens as Vision-BDH has it."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import camox_ops as cx

SIZE, WIDTH, HEADS = 64, 32, 2


class Attention(nn.Module):
    """Keys are the queries; frequencies a buffer, or a frozen parameter."""

    def __init__(self, causal=True, softmax=False, parameter=False, shift=0):
        super().__init__()
        pairs = 1.0 / 2.0**16 ** (torch.arange(0, SIZE, 2) / SIZE) / (2 * math.pi)
        freqs = pairs.repeat_interleave(2).view(1, 1, 1, SIZE)
        if parameter:
            self.freqs = nn.Parameter(freqs, requires_grad=False)
        else:
            self.register_buffer("freqs", freqs)
        self.causal, self.softmax, self.shift = causal, softmax, shift

    def rotated(self, x):
        phases = torch.arange(x.shape[2], dtype=self.freqs.dtype).view(1, 1, -1, 1) * self.freqs
        phases = (phases % 1) * (2 * math.pi)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).view(*x.size())
        return (x * phases.cos()).to(x.dtype) + (turned * phases.sin()).to(x.dtype)

    def forward(self, Q, K, V):
        assert self.freqs.dtype == torch.float32
        assert K is Q
        rotated = self.rotated(Q)
        scores = rotated @ rotated.mT
        if self.causal:
            scores = scores.tril(diagonal=-1 + self.shift)
        if self.softmax:
            scores = (scores / math.sqrt(SIZE)).softmax(-1)
        return scores @ V


class HalfSplit(Attention):
    """krychu's: pairs (i, i + N/2)."""

    def rotated(self, x):
        phases = torch.arange(x.shape[2], dtype=self.freqs.dtype).view(1, 1, -1, 1) * self.freqs * 2 * math.pi
        first, second = x.chunk(2, -1)
        return x * phases.cos() + torch.cat((-second, first), -1) * phases.sin()


KINDS = {
    "strictly causal": {},
    "all tokens": {"causal": False, "parameter": True},
    "softmax": {"causal": False, "softmax": True, "parameter": True},
}


def inputs(heads=2, length=20):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, heads, length, SIZE, generator=generator).relu().requires_grad_()
    return q, torch.randn(3, 1, length, WIDTH, generator=generator).requires_grad_()


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_matches(name, by_name):
    module = Attention(**KINDS[name])
    plain = copy.deepcopy(module)
    report = cx.patch(module)
    assert [entry.recogniser for entry in report.patched] == ["bdh_attention"]
    q, v = inputs()
    for _ in range(2):
        results = []
        for m in (module, plain):
            y = m(Q=q, K=q, V=v) if by_name else m(q, q, v)
            results.append([y, *torch.autograd.grad(y.square().mean(), [q, v])])
        for mine, original in zip(*results, strict=True):
            assert (mine - original).abs().max() <= 1e-5 * original.abs().max()
    assert report.patched and report.patched[0].first_error is not None, report
    assert list(module.state_dict()) == list(plain.state_dict()) and set(vars(module)) == set(vars(plain))


def test_other_calls_go_to_the_original():
    module = Attention()
    cx.patch(module)
    q, v = inputs()
    module(q, q, v)
    with pytest.raises(AssertionError):
        module(q, q.clone(), v)
    with pytest.raises(TypeError):
        module(q, q)
    other = torch.randn_like(module.freqs)
    module.freqs.copy_(other)  # used as they are
    torch.testing.assert_close(module(q, q, v), Attention.forward(module, q, q, v), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("made", [lambda: Attention(shift=1), lambda: Attention(softmax=True), HalfSplit])
def test_not_taken(made):
    assert not cx.patch(made()).patched


def test_bfloat16_and_compile():
    module = Attention().eval()
    plain = copy.deepcopy(module)
    cx.patch(module)
    q, v = (x.detach().bfloat16() for x in inputs())
    for _ in range(2):
        ours, theirs = module(q, q, v), plain(q, q, v)
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).abs().max() < 0.05 * theirs.double().abs().max()
    q, v = inputs()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, q, v), plain(q, q, v), rtol=1e-3, atol=1e-3)


class Model(nn.Module):
    """The layers in the forward of the model itself, as in all public code: patches of images or tokens, the norm
    before, after or in both places, a head for one class or for each token with a loss."""

    def __init__(self, tokens=False, first=False, after=True, p=0.1, **kind):
        super().__init__()
        self.tokens, self.first, self.after, self.passes = tokens, first, after, 2
        self.embed = nn.Embedding(50, WIDTH) if tokens else nn.Conv2d(3, WIDTH, 4, 4)
        if not tokens:
            self.places = nn.Parameter(0.1 * torch.randn(1, 16, WIDTH))
        self.attn = Attention(**kind)
        self.decoder = nn.Parameter(torch.randn(HEADS * SIZE, WIDTH) / 16)
        self.encoder = nn.Parameter(torch.randn(HEADS, WIDTH, SIZE) / 6)
        self.encoder_v = nn.Parameter(torch.randn(HEADS, WIDTH, SIZE) / 6)
        self.ln = nn.LayerNorm(WIDTH, elementwise_affine=False, bias=False)
        self.drop = nn.Dropout(p)
        self.head = nn.Parameter(torch.randn(WIDTH, 50) / 6)

    def forward(self, x, targets=None):
        batch = x.shape[0]
        x = self.embed(x) if self.tokens else self.embed(x).flatten(2).transpose(1, 2) + self.places
        x = self.ln(x.unsqueeze(1))
        for _ in range(self.passes):
            x = self.ln(x) if self.first else x
            sparse = F.relu(x @ self.encoder)
            mixed = self.attn(Q=sparse, K=sparse, V=x)
            mixed = self.ln(mixed) if self.after else mixed
            gated = self.drop(self.gated(sparse, F.relu(mixed @ self.encoder_v)))
            y = gated.transpose(1, 2).reshape(batch, 1, -1, HEADS * SIZE) @ self.decoder
            x = self.ln(x + self.ln(y))
        if not self.tokens:
            return x.squeeze(1).mean(1) @ self.head
        logits = x.squeeze(1) @ self.head
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def gated(self, sparse, values):
        return sparse * values


class Adds(Model):
    def gated(self, sparse, values):
        return sparse + values


class DropsLayers(Model):
    """A branch by chance: no graph has both."""

    def gated(self, sparse, values):
        return sparse * values if random.random() < 0.5 else sparse


MODELS = {
    "images": {"causal": False, "parameter": True},
    "images, norm first, softmax": {"causal": False, "parameter": True, "softmax": True, "first": True},
    "no norm after the attention": {"causal": False, "after": False, "first": True},
    "tokens": {"tokens": True},
}


def batch_of(model, count=3):
    generator = torch.Generator().manual_seed(2)
    if model.tokens:
        return torch.randint(50, (count, 12), generator=generator), torch.randint(50, (count, 12), generator=generator)
    return (torch.randn(count, 3, 16, 16, generator=generator),)


def results(model, batch):
    """Loss and gradients."""
    y = model(*batch)
    loss = y[1] if model.tokens else y.square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def test_a_patched_model_on_meta():
    model = Model(p=0.0, **MODELS["images"])
    (x,) = batch_of(model)
    cx.patch(model)
    expected = model(x).shape
    with torch.device("meta"):
        assert model.to("meta")(x.to("meta")).shape == expected


@pytest.mark.parametrize("name", MODELS)
def test_whole_layers(name):
    torch.manual_seed(0)
    model = Model(p=0.0, **MODELS[name])
    plain = copy.deepcopy(model)
    report = cx.patch(model)
    assert ("", "bdh_layers") in [(entry.name, entry.recogniser) for entry in report.patched], report
    batch = batch_of(model)
    for _ in range(2):
        for mine, original in zip(results(model, batch), results(plain, batch), strict=True):
            assert (mine - original).abs().max() <= 1e-4 * original.abs().max()
    (entry,) = [entry for entry in report.patched if entry.name == ""]
    assert entry.first_error < 1e-4
    with torch.profiler.profile() as profile:
        results(model, batch)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["camox_ops::bdh_attention"] == 2 and "aten::relu" not in calls
    if model.tokens:  # without targets it is another graph
        ours, theirs = model(batch[0]), plain(batch[0])
        assert ours[1] is theirs[1] is None
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):  # the original's
        assert torch.equal(model.eval()(batch[0])[0], plain.eval()(batch[0])[0])
    cx.unpatch(model)
    assert type(model) is Model and type(model.attn) is Attention


def test_hooks_and_changes_inside_whole_layers():
    model = Model(p=0.0, **MODELS["images"])
    plain, seen = copy.deepcopy(model), []
    cx.patch(model)
    batch = batch_of(model)
    model(*batch)
    for part in (model.attn, model.drop, model.ln):
        part.register_forward_hook(lambda module, args, y: seen.append((type(module).__name__, y.shape)))
    for mine, original in zip(results(model, batch), results(plain, batch), strict=True):
        assert (mine - original).abs().max() <= 1e-4 * original.abs().max()
    shapes = {name: shape for name, shape in seen if name != "LayerNorm"}
    assert shapes == {"Attention": (3, HEADS, 16, WIDTH), "Dropout": (3, HEADS, 16, SIZE)}
    assert seen.count(("LayerNorm", torch.Size([3, HEADS, 16, WIDTH]))) == 2
    model.drop.p = 1.0
    assert model(*batch).isfinite().all()


@pytest.mark.parametrize("kind", [Adds, DropsLayers])
def test_other_layers_are_not_taken(kind):
    report = cx.patch(kind(**MODELS["images"]))
    assert [entry.recogniser for entry in report.patched] == ["bdh_attention", "dropout"]


def test_gradients_per_sample():
    """torch.func takes the original's operations."""
    model = Model(p=0.0, **MODELS["images"])
    plain = copy.deepcopy(model)
    cx.patch(model)
    (images,) = batch_of(model)
    model(images)

    def loss(encoder, image, of):
        return torch.func.functional_call(of, {"encoder": encoder}, (image[None],)).square().mean()

    found = [
        torch.func.vmap(torch.func.grad(lambda e, x, of=of: loss(e, x, of)), (None, 0))(of.encoder.detach(), images)
        for of in (model, plain)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
