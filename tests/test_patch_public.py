"""patch on the structures of public repositories: BERT's and RecBole's attention, norms of rows by hand, attention over
scales, mixtures of experts; and on what only looks like them."""

import copy
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import camox_ops as cx
from camox_ops._patch import _call, _proof, _swap

WIDTH = 32


class RowNorm(nn.Module):
    """pytorch_pretrained_bert's."""

    def __init__(self, width=WIDTH, eps=1e-12):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.variance_epsilon = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) / torch.sqrt(variance + self.variance_epsilon)) + self.bias


class Output(nn.Module):
    """Its residual around one."""

    def __init__(self, inside=48, p=0.3):
        super().__init__()
        self.dense = nn.Linear(inside, WIDTH)
        self.LayerNorm = RowNorm()
        self.dropout = nn.Dropout(p)

    def forward(self, hidden, residual):
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)


class MaskedAttention(nn.Module):
    """Its attention: the mask is added to the scores."""

    def __init__(self, heads=4, p=0.2):
        super().__init__()
        self.heads, self.size = heads, WIDTH // heads
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(p)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.size).transpose(1, 2)

    def scale(self):
        return math.sqrt(self.size)

    def mixed(self, x, mask):
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(2, 3) / self.scale() + mask, -1)
        return (self.dropout(weights) @ v).transpose(1, 2).reshape(x.shape)

    def forward(self, hidden_states, attention_mask):
        return self.mixed(hidden_states, attention_mask)


class WithOutput(MaskedAttention):
    """RecBole's: the layer behind it, its dropout and its norm inside."""

    def __init__(self, heads=4):
        super().__init__(heads)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.out_dropout = nn.Dropout(0.4)

    def forward(self, x, mask):
        return self.norm(self.out_dropout(self.dense(self.mixed(x, mask))) + x)


class ByFunction(MaskedAttention):
    """Hugging Face's: torch's function with the p of an attribute, arguments that it does not need, and a tuple."""

    def __init__(self):
        super().__init__()
        self.p = 0.25

    def forward(self, x, mask=None, cache=None, positions=None):
        if cache is not None:
            raise NotImplementedError
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return y.transpose(1, 2).reshape(x.shape), None


class Scales(nn.Module):
    """EfficientViT's."""

    def __init__(self, channels=16, size=8, eps=1e-15):
        super().__init__()
        self.size, self.eps = size, eps
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        grouped = nn.Conv2d(3 * channels, 3 * channels, 3, padding=1, groups=3 * channels, bias=False)
        self.more = nn.ModuleList([grouped])
        self.relu = nn.ReLU()
        self.proj = nn.Sequential(nn.Conv2d(2 * channels, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def attention(self, q, k, v):
        k = k.transpose(-1, -2)
        return (q @ (k @ v)) / (q @ k.sum(-1, keepdim=True) + self.eps)

    def forward(self, x):
        first = self.qkv(x)
        heads = torch.cat([first, *(part(first) for part in self.more)], 1)
        heads = heads.flatten(2).unflatten(1, (-1, 3 * self.size)).transpose(-1, -2)
        q, k, v = heads.chunk(3, -1)
        y = self.attention(self.relu(q).float(), self.relu(k).float(), v.float())
        return self.proj(y.transpose(-1, -2).reshape(x.shape[0], -1, *x.shape[2:]))


class CastingNorm(nn.LayerNorm):
    """timm's LayerNorm2dFp32."""

    def __init__(self, channels=16):
        super().__init__(channels, eps=1e-6)

    def forward(self, x):
        y = x.permute(0, 2, 3, 1)
        y = F.layer_norm(y.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return y.to(x.dtype).permute(0, 3, 1, 2)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """minimind's: idle experts get zeros, a loss is left on the module."""

    def __init__(self, top_k=2, renormalised=True, coefficient=0.01, count=4):
        super().__init__()
        self.settings = types.SimpleNamespace(top_k=top_k, renormalised=renormalised, coefficient=coefficient)
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x):
        rows, settings = x.reshape(-1, WIDTH), self.settings
        scores = self.gate(rows).softmax(-1)
        weights, chosen = scores.topk(settings.top_k, sorted=False)
        if settings.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                own = mask.any(-1).nonzero().flatten()
                y.index_add_(0, own, expert(rows[own]) * weights[mask][:, None])
            elif self.training:
                y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        if self.training:
            load = F.one_hot(chosen, len(self.experts)).float().mean(0)
            self.loss = (load * scores.mean(0)).sum() * len(self.experts) * settings.coefficient
        else:
            self.loss = scores.new_zeros(())
        return y.view_as(x)


class ReturnsLogits(Mixture):
    """Mixtral's: the gate's numbers come back; idle experts get no gradient."""

    def forward(self, x):
        rows = x.view(-1, WIDTH)
        logits = self.gate(rows)
        weights, chosen = logits.softmax(-1).topk(self.settings.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own, place = (chosen == number).nonzero(as_tuple=True)
            if len(own):
                y = y.index_add(0, own, expert(rows[own]) * weights[own, place, None])
        return y.view_as(x), logits


class CallsAll(nn.Module):
    """Switch's without a capacity, and Mixtral's of transformers 4.36: idle experts are called on no rows. The softmax
    is a module."""

    def __init__(self, top_k=1, count=8):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(WIDTH, count)
        self.softmax = nn.Softmax(dim=-1)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x):
        rows = x.view(-1, WIDTH)
        weights, chosen = self.softmax(self.gate(rows)).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True) if self.top_k > 1 else weights
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own, place = torch.where(chosen == number)
            y.index_add_(0, own, expert(rows[own]) * weights[own, place, None])
        return y.view_as(x)


def padding(batch, tokens, low=-10000.0):
    hidden = torch.arange(tokens) >= torch.arange(batch)[:, None] % 4 + tokens - 3
    return torch.zeros(batch, 1, 1, tokens).masked_fill(hidden[:, None, None], low)


def causal(tokens, low=-10000.0):
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.zeros(1, 1, tokens, tokens).masked_fill(later, low)


def rows(batch=40, tokens=17, width=WIDTH, scale=1.0):
    return scale * torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(3))


IMAGE = torch.randn(2, 16, 12, 13, generator=torch.Generator().manual_seed(4))
CASES = {
    "row norm": (RowNorm, (rows(),), "row_norm"),
    "residual with a row norm": (Output, (rows(width=48), rows()), "add_row_norm"),
    "padding": (MaskedAttention, (rows(), padding(40, 17)), "masked_attention"),
    "causal": (WithOutput, (rows(), causal(17)), "masked_attention"),
    "both": (WithOutput, (rows(), torch.minimum(causal(17), padding(40, 17))), "masked_attention"),
    "of -inf": (WithOutput, (rows(), causal(17, -math.inf)), "masked_attention"),
    "more tokens": (WithOutput, (rows(4, 70), causal(70)), "masked_attention"),
    "biases in the mask": (WithOutput, (rows(), rows(1, 17, 17)[None]), "masked_attention"),
    "torch's function": (ByFunction, (rows(),), "masked_attention"),
    "torch's function, mask": (ByFunction, (rows(), padding(40, 17)), "masked_attention"),
    "torch's function, bools": (ByFunction, (rows(), padding(40, 17) == 0), "masked_attention"),
    "torch's function, causal bools": (ByFunction, (rows(), (causal(17) + padding(40, 17)) == 0), "masked_attention"),
    "torch's function, other bools": (ByFunction, (rows(), causal(17).flip(-1) == 0), "masked_attention"),
    "more tokens, bools": (ByFunction, (rows(4, 70), causal(70) == 0), "masked_attention"),
    "norm in float32": (CastingNorm, (IMAGE,), "layer_norm2d_float32"),
    "attention over scales": (Scales, (IMAGE,), "multiscale_attention"),
    "another eps": (lambda: Scales(eps=1e-5), (IMAGE,), "multiscale_attention"),
    "mixture": (Mixture, (rows(),), "token_mixture"),
    "mixture of one": (lambda: Mixture(1, False, 0.0), (rows(),), "token_mixture"),
    "mixture with idle experts": (lambda: Mixture(1, count=32), (rows(8),), "token_mixture"),
    "mixture that calls all": (CallsAll, (rows(8),), "token_mixture"),
    "mixture that calls all, two": (lambda: CallsAll(2), (rows(8),), "token_mixture"),
    "mixture with logits": (ReturnsLogits, (rows(),), "token_mixture"),
}


def numbers(module, args):
    """Outputs, what is left on the module, and gradients."""
    leaves = [args[0].detach().clone().requires_grad_(), *args[1:]]
    y = module(*leaves)
    y = [part for part in (y if isinstance(y, tuple) else (y,)) if part is not None]
    y += [module.loss] if hasattr(module, "loss") else []
    total = sum((part * torch.randn(part.shape, generator=torch.Generator().manual_seed(7))).sum() for part in y)
    return y, torch.autograd.grad(total, [leaves[0], *module.parameters()], allow_unused=True)


def assert_alike(ours, theirs):
    for mine, original in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert (mine is None) == (original is None)
        if original is not None:
            assert mine.dtype == original.dtype
            torch.testing.assert_close(mine, original, rtol=1e-4, atol=1e-4)
    assert [part.stride() for part in ours[0]] == [part.stride() for part in theirs[0]]


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_matches(name, training, monkeypatch):
    """Dropout too, under equal seeds; with the mask of a first input and with another one later; in the other mode."""
    monkeypatch.setattr(_call, "LEAST_IN_ROWS", 0)
    kind, args, recogniser = CASES[name]
    torch.manual_seed(0)
    module = kind().train(training)
    plain = copy.deepcopy(module)
    report = cx.patch(module)
    (entry,) = [entry for entry in report.entries if entry.name == ""]
    assert entry.patched and entry.recogniser == recogniser and entry.error < 1e-9, report
    served = False
    for mode in (training, training, not training):
        torch.manual_seed(5)
        ours = numbers(module.train(mode), args)
        torch.manual_seed(5)
        with _proof.RoutedDropout():
            theirs = numbers(plain.train(mode), args)
        assert_alike(ours, theirs)
        served = served or recogniser != "masked_attention" or mode or args[0].shape[1] <= 64
        assert (entry.first_error is not None) == served
    assert entry.patched, report


def test_a_row_norm_is_fused_however_small_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_call, "outlasts_host", lambda *_: False)
    kind, args, name = CASES["residual with a row norm"]
    module = kind()
    (entry,) = [entry for entry in cx.patch(module).patched if entry.recogniser == name]
    with cx.explain() as calls:
        module(*args)
    assert not entry.few_operators and "dropout_add_layer_norm" in {call.op for call in calls.calls}


def test_masks_on_other_devices_are_not_read():
    """As on a GPU, whose values would have to be waited for; the meta device has none."""
    x, mask = rows(), padding(40, 17)
    module = MaskedAttention()
    cx.patch(module, only="masked_attention")
    patch = _swap.patch_of(type(module))
    assert patch.recogniser.serves(module, patch.settings, (x, mask), {})
    assert not patch.recogniser.serves(module, patch.settings, (x, mask.to("meta")), {})


def test_masks_of_bools_are_served_where_the_original_takes_them():
    mask = padding(40, 17) == 0
    closed = mask.clone()
    closed[1] = False  # tokens without any key
    for kind, found, served in ((ByFunction, mask, True), (ByFunction, closed, False), (MaskedAttention, mask, False)):
        module = kind()
        cx.patch(module, only="masked_attention")
        patch = _swap.patch_of(type(module))
        assert patch.recogniser.serves(module, patch.settings, (rows(), found), {}) == served


class CausalWithoutMask(ByFunction):
    """LayoutLM's in transformers 5."""

    def forward(self, x, mask=None):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return super().forward(x, later if mask is None else mask)


def test_an_attention_without_a_mask_may_be_another():
    module = CausalWithoutMask().eval()
    plain = copy.deepcopy(module)
    (entry,) = [entry for entry in cx.patch(module).patched if entry.recogniser == "masked_attention"]
    torch.testing.assert_close(module(rows())[0], plain(rows())[0])
    assert entry.first_error is None
    mask = padding(40, 17) == 0
    torch.testing.assert_close(module(rows(), mask)[0], plain(rows(), mask)[0])
    assert entry.first_error is not None


def test_an_attention_whose_input_is_a_keyword():
    module = ByFunction().eval()
    plain = copy.deepcopy(module)
    (entry,) = [entry for entry in cx.patch(module).patched if entry.recogniser == "masked_attention"]
    given = {"mask": padding(40, 17), "cache": None}
    for _ in range(2):
        torch.testing.assert_close(module(x=rows(), **given)[0], plain(rows(), **given)[0])
    torch.testing.assert_close(module(**given, x=rows())[0], plain(rows(), **given)[0])
    assert entry.first_error is not None and entry.patched


class ByConfig(ByFunction):
    """transformers': the config says which function runs, one of them gives the weights too."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, x, mask=None):
        if self.config._attn_implementation == "sdpa":
            return super().forward(x, mask)
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = (q @ k.transpose(2, 3) / self.scale()).softmax(-1)
        return (self.dropout(weights) @ v).transpose(1, 2).reshape(x.shape), weights


def test_another_attention_that_a_config_names_later_runs_as_chosen():
    module = ByConfig().eval()
    (entry,) = [entry for entry in cx.patch(module).patched if entry.recogniser == "masked_attention"]
    assert module(rows())[1] is None and entry.first_error is not None
    module.config._attn_implementation = "eager"
    y, weights = module(rows())
    assert weights.shape == (40, 4, 17, 17)
    module.config._attn_implementation = "sdpa"
    torch.testing.assert_close(module(rows())[0], y)


class Unbiased(RowNorm):
    """The Annotated Transformer's: the unbiased deviation, eps outside."""

    def forward(self, x):
        deviation = x.std(-1, keepdim=True)
        return self.weight * (x - x.mean(-1, keepdim=True)) / (deviation + self.variance_epsilon) + self.bias


class ScalesByWidth(MaskedAttention):
    """makeMoE's."""

    def scale(self):
        return math.sqrt(WIDTH)


class MaskAfterSoftmax(MaskedAttention):
    """Weights are not normalised again."""

    def mixed(self, x, mask):
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(2, 3) / self.scale(), -1) * (mask == 0)
        return (self.dropout(weights) @ v).transpose(1, 2).reshape(x.shape)


class KeepsWeights(MaskedAttention):
    def forward(self, x, mask):
        self.seen = self.query(x).detach()
        return self.mixed(x, mask)


class OtherWhenSmall(Scales):
    """A softmax instead where pixels are few."""

    def attention(self, q, k, v):
        if q.shape[2] < 8:
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return super().attention(q, k, v)


class MeanOfValues(Scales):
    """Divided by the number of pixels."""

    def attention(self, q, k, v):
        return q @ (k.transpose(-1, -2) @ v) / k.shape[2]


class Capacity(Mixture):
    """Later tokens of a crowded expert are lost."""

    def forward(self, x):
        y = super().forward(x)
        return y * (torch.arange(y.shape[1]) < 12)[:, None]


class AnotherLoss(Mixture):
    """The loss of squares."""

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.loss = self.gate(x).softmax(-1).flatten(0, 1).mean(0).square().sum()
        return y


class DropsLater(Mixture):
    """A dropout of its own, with p=0 while it is proved."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(super().forward(x))


class OnAllTokens(CallsAll):
    """Every expert on every token: one with a BatchNorm sees others than those that chose it."""

    def forward(self, x):
        weights, chosen = self.softmax(self.gate(x)).topk(self.top_k)
        weights = x.new_zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, weights)
        return (torch.stack([expert(x) for expert in self.experts], -1) * weights.unsqueeze(-2)).sum(-1)


class Noisy(Mixture):
    """Noise on the gate, in training."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)


@pytest.mark.parametrize(
    "kind",
    [
        Unbiased,
        ScalesByWidth,
        MaskAfterSoftmax,
        KeepsWeights,
        OtherWhenSmall,
        MeanOfValues,
        Capacity,
        AnotherLoss,
        DropsLater,
        OnAllTokens,
        lambda: OnAllTokens(8),
        Noisy,
    ],
)
def test_not_taken(kind):
    torch.manual_seed(0)
    report = cx.patch(kind())
    assert "" not in [entry.name for entry in report.patched], report


def both(kind=MaskedAttention):
    torch.manual_seed(0)
    plain = kind().eval()
    module = copy.deepcopy(plain)
    assert cx.patch(module).patched
    module(rows(), padding(40, 17))
    return module, plain


def test_tokens_without_any_key():
    """softmax over what a sum with -10000 leaves, not zeros."""
    module, plain = both()
    mask = padding(40, 17)
    mask[3] = -10000.0
    torch.testing.assert_close(module(rows(), mask), plain(rows(), mask), rtol=1e-5, atol=1e-5)
    last = causal(17).flip(-1).contiguous()  # the first tokens see others than the last
    torch.testing.assert_close(module(rows(), last), plain(rows(), last), rtol=1e-5, atol=1e-5)


def test_scores_that_outweigh_the_mask():
    module, plain = both()
    x = rows(scale=300.0)
    expected = plain(x, padding(40, 17))
    assert not torch.allclose(expected, plain(x, padding(40, 17, -math.inf)), rtol=1e-3)
    torch.testing.assert_close(module(x, padding(40, 17)), expected, rtol=1e-4, atol=1e-3)


def test_other_arguments_go_to_the_original():
    module, plain = both(ByFunction)
    for given in ({"positions": torch.arange(17)}, {"mask": padding(40, 17)}, {"cache": None}):
        torch.testing.assert_close(module(rows(), **given)[0], plain(rows(), **given)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError):
        module(rows(), cache=torch.ones(1))
    module, plain = both()
    with pytest.raises(TypeError):
        module(rows(), None)


def test_nan_reaches_the_mixture():
    module = Mixture()
    plain = copy.deepcopy(module)
    cx.patch(module)
    module(rows())
    x = rows()
    x[0, 0] = math.nan
    assert torch.equal(module(x).isnan(), plain(x).isnan())
    # A class derived from the patched one, as fully_shard derives one, once called its own forward without end.
    module.scale = nn.Parameter(torch.ones(3))
    parametrize.register_parametrization(module, "scale", nn.Identity())
    assert torch.equal(module(x).isnan(), plain(x).isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_norm_in_float32_of_other_dtypes(dtype):
    module = CastingNorm().to(dtype)
    plain = copy.deepcopy(module)
    assert cx.patch(module).patched
    x = IMAGE.to(dtype)
    for _ in range(2):
        torch.testing.assert_close(module(x), plain(x), rtol=1e-2, atol=1e-2)
    assert dtype is torch.bfloat16 or torch.equal(module(x), plain(x))


@pytest.mark.parametrize(
    "name", ["padding", "residual with a row norm", "attention over scales", "mixture that calls all"]
)
def test_hooks_on_inner_modules(name):
    """Before patch: left alone; later: called."""
    kind, args, recogniser = CASES[name]
    module, seen = kind(), []
    hooked = module.get_submodule(
        {"multiscale_attention": "relu", "token_mixture": "softmax"}.get(recogniser, "dropout")
    )
    handle = hooked.register_forward_hook(lambda *_: seen.append(1))
    assert [entry.reason[-9:] for entry in cx.patch(module, only=[recogniser, "row_norm"]).skipped] == ["has hooks"]
    handle.remove()
    if recogniser == "add_row_norm":
        cx.unpatch(module)  # its norm, without which it is not recognised
    assert "" in [entry.name for entry in cx.patch(module).patched]
    module(*args)
    hooked.register_forward_hook(lambda *_: seen.append(1))
    module(*args)
    assert seen


@pytest.mark.parametrize("name", ["row norm", "residual with a row norm", "causal", "attention over scales", "mixture"])
def test_autocast(name):
    kind, args, recogniser = CASES[name]
    module = kind().eval()
    plain = copy.deepcopy(module)
    report = cx.patch(module, only=[recogniser, "row_norm"])
    with torch.autocast("cpu", torch.bfloat16):
        try:
            theirs = plain(*args)
        except RuntimeError:  # index_add_ of two dtypes
            with pytest.raises(RuntimeError):
                module(*args)
            return
        ours = module(*args)
    assert ours.dtype == theirs.dtype and report.patched
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)
