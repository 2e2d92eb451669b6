"""patch on nn.TransformerEncoderLayer, nn.TransformerEncoder and nn.MultiheadAttention."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import default_device
from torch import nn

import camox_ops as cx
from camox_ops._patch import _proof, transformer

WIDTH, HEADS = 32, 4
LAYERS = {
    "post-norm relu": {},
    "post-norm gelu": {"activation": "gelu", "batch_first": True},
    "pre-norm gelu": {"activation": nn.GELU(), "norm_first": True, "batch_first": True},
    "pre-norm relu": {"activation": F.relu, "norm_first": True},
    "silu": {"activation": F.silu, "batch_first": True, "layer_norm_eps": 1e-6},
    "gelu tanh": {"activation": nn.GELU(approximate="tanh")},
}


def layer(name="post-norm gelu", p=0.0, **others):
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, p, **{**LAYERS[name], **others})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def tokens(module, length=12, batch=20):
    attention = module if isinstance(module, nn.MultiheadAttention) else module.self_attn
    shape = (batch, length, WIDTH) if attention.batch_first else (length, batch, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)


def padding(length=12, batch=20):
    return torch.arange(length) >= torch.arange(batch)[:, None] % (length + 1)


def masks_of(kind):
    causal = nn.Transformer.generate_square_subsequent_mask(12)
    numbers = torch.zeros(20, 12).masked_fill(padding(), -math.inf)
    return {
        "none": {},
        "padding": {"src_key_padding_mask": padding()},
        "padding as numbers": {"src_key_padding_mask": numbers},
        "causal": {"src_mask": causal, "is_causal": True},
        "causal as bools": {"src_mask": causal == -math.inf},
        "both": {"src_mask": causal, "src_key_padding_mask": numbers},
    }[kind]


def numbers(module, *args, **kwargs):
    y = module(*args, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    grads = torch.autograd.grad(y, [args[0], *module.parameters()], torch.linspace(-1, 1, y.numel()).view(y.shape))
    return [y.detach(), *grads]


def close(ours, theirs):
    for mine, original in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, original, rtol=1e-4, atol=5e-5)
        assert mine.dtype == original.dtype


@pytest.fixture
def calls(monkeypatch):
    """Counts what runs on short_attention after patch."""
    found, real = [], transformer.short_attention_packed

    def counting(*args, **kwargs):
        found.append(args[0].shape)
        return real(*args, **kwargs)

    monkeypatch.setattr(transformer, "short_attention_packed", counting)
    return found


def patched(module, calls):
    """Patched, and its first input behind it."""
    report = cx.patch(module)
    length_first = {} if not isinstance(module, nn.MultiheadAttention) else {"need_weights": False}
    x = tokens(module)
    module(*((x, x, x) if length_first else (x,)), **length_first)
    assert report.entries[0].patched, report
    assert report.entries[0].first_error is not None
    calls.clear()
    return module


@functools.cache
def patched_layer(name):
    return patched(layer(name), [])


@pytest.mark.parametrize("kind", ["none", "padding", "padding as numbers", "causal", "causal as bools", "both"])
@pytest.mark.parametrize("name", LAYERS)
def test_matches(name, kind, calls):
    plain, module = layer(name), patched_layer(name)
    calls.clear()
    x, masks = tokens(plain), masks_of(kind)
    ours, theirs = numbers(module, x, **masks), numbers(plain, x, **masks)
    close(ours, theirs)
    assert ours[0].stride() == theirs[0].stride()
    assert len(calls) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_is_where_it_was(name, calls):
    plain = layer(name, p=0.4)
    module = patched(copy.deepcopy(plain), calls)
    x = tokens(plain)
    torch.manual_seed(3)
    with _proof.RoutedDropout():
        expected = plain(x)
    torch.manual_seed(3)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=5e-5)
    assert calls


def test_encoder_stack_with_padding(calls):
    encoder = nn.TransformerEncoder(layer(p=0.0), 3, enable_nested_tensor=False)
    plain = copy.deepcopy(encoder)
    report = cx.patch(encoder, only="transformer_encoder_layer")
    assert [entry.name for entry in report.patched] == ["layers.0", "layers.1", "layers.2"]
    x = tokens(plain.layers[0])
    for _ in range(2):
        calls.clear()
        close(numbers(encoder, x, src_key_padding_mask=padding()), numbers(plain, x, src_key_padding_mask=padding()))
    assert len(calls) == 3
    for module in (encoder, plain):
        module.eval()
    with torch.no_grad():  # PyTorch's op for whole layers
        calls.clear()
        assert torch.equal(encoder(x), plain(x))
        assert not calls


def test_attention(calls):
    for batch_first in (True, False):
        torch.manual_seed(0)
        plain = nn.MultiheadAttention(WIDTH, HEADS, 0.0, batch_first=batch_first)
        module = patched(copy.deepcopy(plain), calls)
        x = tokens(plain)
        for masks in ({}, {"key_padding_mask": padding()}, {"attn_mask": masks_of("causal")["src_mask"]}):
            calls.clear()
            results = [m(x, x, x, need_weights=False, **masks) for m in (module, plain)]
            assert results[0][1] is None and len(calls) == 1
            assert results[0][0].stride() == results[1][0].stride()
            grads = [
                torch.autograd.grad(y.square().sum(), [x, *m.parameters()])
                for (y, _), m in zip(results, (module, plain), strict=True)
            ]
            close([results[0][0].detach(), *grads[0]], [results[1][0].detach(), *grads[1]])


def test_attention_that_is_called_as_before(calls):
    plain = nn.MultiheadAttention(WIDTH, HEADS, 0.0, batch_first=True)
    module = patched(copy.deepcopy(plain), calls)
    x = tokens(plain)
    for arguments in (
        ((x, x, x), {}),  # weights are asked for
        ((x, x.clone(), x), {"need_weights": False}),
        ((x[0], x[0], x[0]), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "attn_mask": torch.rand(12, 12)}),
    ):
        ours, theirs = (m(*arguments[0], **arguments[1]) for m in (module, plain))
        assert torch.equal(ours[0], theirs[0])
        assert (ours[1] is None) == (theirs[1] is None)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(x, x, x, need_weights=False, is_causal=True)
    assert not calls


def test_layers_that_are_called_as_before(calls):
    plain = layer()
    module = patched(copy.deepcopy(plain), calls)
    x = tokens(plain)
    learned = torch.zeros(12, 12, requires_grad=True)
    for args, kwargs in (
        ((tokens(plain, 65),), {}),
        ((x[0],), {}),
        ((x,), {"src_mask": torch.rand(12, 12)}),
        ((x,), {"src_mask": learned}),
        ((x,), {"src_key_padding_mask": torch.rand(20, 12)}),
    ):
        assert torch.equal(module(*args, **kwargs), plain(*args, **kwargs))
    assert not calls
    with pytest.raises((RuntimeError, AssertionError)):
        module(x, src_key_padding_mask=padding(11))
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(x, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64])
def test_masks_of_other_dtypes(dtype, calls):
    """PyTorch's own error, whatever it is."""
    mask = torch.ones(12, 12, dtype=dtype).triu(1)
    for plain, name, options in (
        (nn.MultiheadAttention(WIDTH, HEADS, 0.0, batch_first=True), "attn_mask", {"need_weights": False}),
        (layer(), "src_mask", {}),
    ):
        module = patched(copy.deepcopy(plain), calls)
        x, raised = tokens(plain), []
        for each in (plain, module):
            with pytest.raises((AssertionError, RuntimeError)) as error:
                each(*((x, x, x) if options else (x,)), **options, **{name: mask})
            raised.append((error.type, str(error.value)))
        assert raised[0] == raised[1]
    assert not calls


def test_a_weight_that_is_computed_is_asked_for_as_often(calls):
    """In training each time is a step of spectral_norm's iteration, so that one more gives another weight."""
    plain = layer().train()
    module = patched(copy.deepcopy(plain), calls)
    for each in (plain, module):
        torch.manual_seed(2)
        nn.utils.parametrizations.spectral_norm(each.self_attn, "in_proj_weight")
    x = tokens(plain)
    for _ in range(2):
        assert torch.equal(module(x), plain(x))
        ours, theirs = (m.self_attn(x, x, x, need_weights=False)[0] for m in (module, plain))
        assert torch.equal(ours, theirs)
    assert not calls


def test_inner_modules_with_hooks_or_exchanged(calls):
    module = patched(layer(), calls)
    x, seen = tokens(module), []
    for name in ("self_attn", "linear1", "dropout", "linear2", "norm1", "norm2", "dropout1", "dropout2"):
        handle = getattr(module, name).register_forward_hook(lambda *_: seen.append(1))
        module(x)
        handle.remove()
    assert len(seen) == 8
    calls.clear()
    module.linear1 = nn.Sequential(module.linear1)
    expected = nn.TransformerEncoderLayer.forward(module, x)
    calls.clear()
    torch.testing.assert_close(module(x), expected)
    assert len(calls) == 1  # that of the attention, which is patched as well
    for name in ("norm1", "norm2"):
        module = patched(layer(), calls)
        setattr(module, name, nn.LayerNorm(x.shape[1:]))
        torch.testing.assert_close(module(x), nn.TransformerEncoderLayer.forward(module, x))


def test_hooks_on_the_activation(calls):
    module = patched(layer(activation=nn.GELU()), calls)
    x, seen = tokens(module), []
    for register in ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"):
        handle = getattr(module.activation, register)(lambda *_: seen.append(1))
        module(x).sum().backward()
        handle.remove()
    assert len(seen) == 3


def test_left_alone():
    def reason(module):
        return next(e.reason for e in cx.patch(module).skipped if e.name == "")

    assert reason(layer(bias=False)) == "it has no biases"
    assert reason(nn.MultiheadAttention(WIDTH, HEADS, kdim=8)) == "it has separate projections"
    assert reason(nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)) == "it has keys of its own"
    adapted = layer()
    adapted.linear1 = nn.Sequential(adapted.linear1)
    assert reason(adapted) == "its linear1 is of another class"
    hooked = layer()
    hooked.norm1.register_forward_hook(lambda *_: None)
    assert reason(hooked) == "norm1 has hooks"


@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name, calls):
    plain = layer(name)
    module = patched(copy.deepcopy(plain), calls)
    x = tokens(plain)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = module(x), plain(x)
    assert ours.dtype == theirs.dtype and len(calls) == 1
    assert (ours - theirs).abs().max() < 0.06 * theirs.abs().max()


def test_compile(calls):
    plain = layer()
    module = copy.deepcopy(plain)
    cx.patch(module)
    x = tokens(plain)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    close(numbers(compiled, x, src_key_padding_mask=padding()), numbers(plain, x, src_key_padding_mask=padding()))


class LastValidStep(nn.Module):
    """EmberFormer's: per patch over time, then the step that the number of valid ones points to."""

    def __init__(self, p=0.0, **others):
        super().__init__()
        options = {"dim_feedforward": 64, "dropout": p, "activation": "gelu", "batch_first": True, **others}
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, **options), 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    def forward(self, tokens, valid):
        batch, patches, length, width = tokens.shape
        each = valid.unsqueeze(1).expand(-1, patches, -1).reshape(batch * patches, length)
        encoded = self.stack(tokens.reshape(-1, length, width), src_key_padding_mask=~each)
        return encoded[torch.arange(batch * patches), self.index(each)].view(batch, patches, width)

    def index(self, valid):
        return (valid.sum(1) - 1).clamp(min=0)


class FirstStep(LastValidStep):
    def index(self, valid):
        return valid.long().argmax(1)


def steps_of(kind):
    tokens = torch.randn(4, 20, 6, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return tokens, torch.arange(6) < torch.tensor([[6], [3], [1], [0 if kind == "none" else 2]])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("make", [layer, LastValidStep])
def test_the_default_device_is_not_the_proofs(make):
    module = make()
    expected = cx.patch(copy.deepcopy(module))
    with default_device("meta"):
        report = cx.patch(module)
        assert torch.empty(0).is_meta
    assert report.patched and report.to_dict() == expected.to_dict()


def test_a_causal_mask_under_another_default_device(calls):
    plain = layer()
    module, x, masks = patched(copy.deepcopy(plain), calls), tokens(plain), masks_of("causal")
    expected = plain(x, **masks)
    transformer._causal.cache_clear()
    with default_device("meta"):
        ours = module(x, **masks)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=5e-5)
    assert calls


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_temporal_encoder():
    torch.manual_seed(0)
    module = LastValidStep()
    plain = copy.deepcopy(module)
    report = cx.patch(module)
    assert ("", "temporal_encoder") in [(entry.name, entry.recogniser) for entry in report.patched]
    for kind in ("some", "none"):
        for flip in (False, True):
            tokens, valid = steps_of(kind)
            valid = valid.flip(1) if flip else valid
            close(numbers(module, tokens, valid), numbers(plain, tokens, valid))
    assert all(entry.patched for entry in report.entries), report
    module.eval(), plain.eval()
    with torch.no_grad():  # PyTorch's own op
        assert torch.equal(module(*steps_of("some")), plain(*steps_of("some")))
    seen = []
    module.train().stack.layers[1].register_forward_hook(lambda *_: seen.append(1))
    module.stack.layers[0].dropout1.p = 0.5
    module(*steps_of("some"))
    assert seen == [1]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("made", [FirstStep, lambda: LastValidStep(activation="relu")])
def test_other_temporal_encoders(made):
    assert "temporal_encoder" not in [entry.recogniser for entry in cx.patch(made()).patched]
