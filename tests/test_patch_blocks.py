"""patch on feed-forward blocks, residual norms and post-norm layers, in classes of any name."""

import copy
import re

import patch_models as models
import pytest
import torch
from torch import nn

import camox_ops as cx
from camox_ops._patch import _proof

X = (128, 16, 32)
CASES = {
    "Mlp": (models.Mlp, (X,), "feed_forward"),
    "Mlp without dropout": (lambda: models.Mlp(p=0.0), (X,), "feed_forward"),
    "Mlp of another width": (lambda: models.Mlp(out=24), (X,), "feed_forward"),
    "Mlp for images": (models.Mlp, ((8, 12, 16, 32),), "feed_forward"),
    "one dropout": (models.OneDropout, (X,), "feed_forward"),
    "last dropout": (models.LastDropout, (X,), "feed_forward"),
    "as wide as its input": (lambda: models.OneDropout(32, 32), (X,), "feed_forward"),
    "intermediate": (models.Intermediate, (X,), "feed_forward"),
    "with norm": (models.ErfFeedForward, (X,), "feed_forward"),
    "self output": (models.SelfOutput, ((128, 16, 64), X), "add_norm"),
    "add norm": (models.AddNorm, (X, X), "add_norm"),
    "encoder layer": (models.EncoderLayer, (X,), "post_norm_layer"),
    "encoder layer, relu": (lambda: models.EncoderLayer(activation="relu"), (X,), "post_norm_layer"),
    "full attention": (models.FullAttention, ((64, 11, 4, 8),) * 3 + (None,), "softmax_attention"),
    "linear attention": (models.LinearAttention, ((4, 100, 4, 8),) * 3, "linear_attention"),
    "linear attention, another eps": (lambda: models.LinearAttention(1e-4), ((4, 100, 4, 8),) * 3, "linear_attention"),
    "causal": (lambda: models.FullAttention(True, 0.3), ((64, 11, 4, 8),) * 3 + (None,), "softmax_attention"),
}


def made(name):
    torch.manual_seed(0)
    kind, shapes, recogniser = CASES[name]
    generator = torch.Generator().manual_seed(1)
    args = [None if s is None else torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    return kind(), args, recogniser


def numbers(module, args):
    y = module(*args)
    y, *others = y if isinstance(y, tuple) else (y,)
    assert others in ([], [None])
    leaves = [x for x in args if x is not None] + list(module.parameters())
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=torch.Generator().manual_seed(7)))]


def close(ours, theirs):
    for mine, original in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, original, rtol=1e-4, atol=1e-4)
        assert mine.dtype == original.dtype
    assert ours[0].stride() == theirs[0].stride()


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_matches(name, training):
    """Dropout too, under equal seeds; first in one mode, then in the other."""
    module, args, recogniser = made(name)
    plain = copy.deepcopy(module)
    report = cx.patch(module.train(training))
    (entry,) = [entry for entry in report.patched if entry.name == ""]
    assert entry.recogniser == recogniser and entry.error < 1e-9
    for mode in (training, training, not training):
        torch.manual_seed(5)
        ours = numbers(module.train(mode), args)
        torch.manual_seed(5)
        with _proof.RoutedDropout(64 if recogniser == "post_norm_layer" else None):
            theirs = numbers(plain.train(mode), args)
        close(ours, theirs)
    assert entry.patched and entry.first_error is not None, report


@pytest.mark.parametrize("name", CASES)
def test_autocast(name):
    module, args, _ = made(name)
    module.eval()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = module(*args)
        report = cx.patch(module)
        found = [module(*args) for _ in range(2)]
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    for ours in found:
        ours = ours[0] if isinstance(ours, tuple) else ours
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).abs().max() <= 0.06 * theirs.double().abs().max()
    assert all(entry.patched for entry in report.entries), report


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("linear attention")])
def test_hooks_on_inner_modules(name):
    """Before: left alone; after: called."""
    module, args, recogniser = made(name)
    seen = []
    inner = [(key, part) for key, part in module.named_children() if key != "attention"]
    handle = inner[0][1].register_forward_hook(lambda *_: seen.append(1))
    report = cx.patch(module, only=recogniser)
    assert [entry.reason for entry in report.skipped] == [f"{inner[0][0]} has hooks"]
    handle.remove()
    cx.patch(module, only=recogniser)
    module(*args)
    for _, part in inner:
        part.register_forward_hook(lambda *_: seen.append(1))
    module(*args)
    assert len(seen) >= len(inner)


@pytest.mark.parametrize(
    "kind",
    [
        models.DropsTwice,
        models.DropsBefore,
        models.TanhMlp,
        lambda: models.Mlp(act=nn.ReLU),
        models.DropsResidual,
        models.NormsFirst,
        lambda: models.FullAttention(output_attention=True),
        models.WidedeepAttention,
        models.Crossed,
        models.LeavesLoss,
        models.QueryLast,
    ],
)
def test_not_taken(kind):
    module = kind()
    report = cx.patch(module)
    assert "" not in [entry.name for entry in report.patched], report


def test_an_adapter_that_comes_later_is_called():
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    module = models.Mlp(p=0.0)
    cx.patch(module)
    x = torch.randn(X)
    before = module(x)
    module.fc2.__class__ = Adapter
    torch.testing.assert_close(module(x), before + 1)


@pytest.mark.parametrize(
    ("name", "part", "other"),
    [
        ("Mlp", "act", lambda old: nn.GELU(approximate="tanh")),
        ("Mlp", "fc1", lambda old: nn.Linear(old.in_features, old.out_features, bias=False)),
        ("with norm", "LayerNorm", lambda old: nn.LayerNorm(32, bias=False)),
        ("self output", "LayerNorm", lambda old: nn.LayerNorm(32, elementwise_affine=False)),
        ("encoder layer", "conv1", lambda old: nn.Conv1d(old.in_channels, old.out_channels, 3, padding=1)),
        ("full attention", "dropout", lambda old: nn.Identity()),
    ],
)
def test_an_inner_module_exchanged(name, part, other):
    """What the fast forward takes for granted of it, such as the kind of GELU, no longer holds."""
    module, args, _ = made(name)
    module.eval()
    plain = copy.deepcopy(module)
    cx.patch(module)
    module(*args)
    setattr(module, part, other(getattr(module, part)))
    setattr(plain, part, getattr(module, part))
    close(numbers(module, args), numbers(plain, args))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stride", (2,)),
        ("padding", (1,)),
        ("groups", 2),
        ("kernel_size", (3,)),
        ("dilation", (2,)),
        ("padding_mode", "circular"),
        ("bias", None),
        ("weight", nn.Parameter(torch.randn(64, 32, 3))),
    ],
)
def test_a_convolution_changed_in_place(name, value):
    """The original says what becomes of it, also where that is an error."""
    module, args, _ = made("encoder layer")
    module.eval()
    plain = copy.deepcopy(module)
    cx.patch(module)
    module(*args)
    for model in (module, plain):
        setattr(model.conv1, name, value)
    try:
        expected = numbers(plain, args)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error).split("(")[0])):
            module(*args)
    else:
        close(numbers(module, args), expected)


def test_other_calls_go_to_the_original():
    module, (x,), _ = made("encoder layer")
    module.eval()
    plain = copy.deepcopy(module)
    cx.patch(module, only="post_norm_layer")
    module(x)
    for given in ({"tau": None}, {"attn_mask": None, "delta": None}):
        close([module(x, **given)[0]], [plain(x, **given)[0]])
    assert torch.equal(module(x=x)[0], plain(x=x)[0])
    attention, (q, k, v, _), _ = made("full attention")
    attention.eval()
    plain = copy.deepcopy(attention)
    cx.patch(attention)
    attention(q, k, v, None)
    for args in ((q, k[:, :5], v[:, :5], None), (q[:1, :1], k[:1, :1], v[:1, :1], None)):
        assert torch.equal(attention(*args)[0], plain(*args)[0])


def test_encoder_as_in_time_series_library():
    torch.manual_seed(0)
    layers = nn.ModuleList([models.EncoderLayer(dropout=0.0) for _ in range(2)])
    plain = copy.deepcopy(layers)
    report = cx.patch(layers)
    assert [e.name for e in report.patched] == ["0", "0.attention.inner_attention", "1", "1.attention.inner_attention"]
    x = torch.randn(64, 11, 32)
    for _ in range(2):
        results = []
        for model in (layers, plain):
            y = x
            for layer in model:
                y, _ = layer(y)
            results.append([y, *torch.autograd.grad(y.square().mean(), list(model.parameters()))])
        close(*results)


def test_compile():
    for name in ("Mlp", "self output", "encoder layer"):
        module, args, _ = made(name)
        module.eval()
        expected = module(*args)
        cx.patch(module)
        ours = torch.compile(module, fullgraph=True, backend="eager")(*args)
        pairs = zip(ours, expected, strict=True) if isinstance(ours, tuple) else [(ours, expected)]
        for mine, theirs in pairs:
            assert (mine is None and theirs is None) or torch.allclose(mine, theirs, atol=1e-5)
