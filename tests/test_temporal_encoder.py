"""cx.nn.TemporalEncoder against a plain form of EmberFormer's module, made of nn.TransformerEncoder."""

import copy

import pytest
import torch
from helpers import DEVICE, FLOATS, assert_close_to_reference, each_capture, module_numbers
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import camox_ops as cx

ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 runs on the CPU only")


class Plain(nn.Module):
    """TemporalTransformerEncoder of tampueroc/emberformer (models/emberformer.py at 80135a5), in our words."""

    def __init__(self, d_model, nhead=4, num_layers=3, dim_feedforward=512, dropout=0.1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward, dropout, "gelu", batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, tokens, valid_t):
        batch, patches, _, width = tokens.shape
        valid = valid_t.repeat_interleave(patches, 0)
        encoded = self.transformer(tokens.flatten(0, 1), src_key_padding_mask=~valid)
        last = (valid.sum(1) - 1).clamp(min=0)
        return encoded[torch.arange(batch * patches, device=last.device), last].view(batch, patches, width)


def both(*arguments, dtype=torch.float32):
    """Plain and ours with equal parameters, none of which is what it was made as."""
    torch.manual_seed(0)
    plain, ours = Plain(*arguments).to(DEVICE), cx.nn.TemporalEncoder(*arguments).to(DEVICE)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours.load_state_dict(plain.state_dict())
    return plain.to(dtype), ours.to(dtype)


def inputs_of(side, dtype=torch.float32, shape=(4, 5, 6, 24)):
    """Tokens; and validity, steps missing on this side: of sequence b the first or last b."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    steps, missing = torch.arange(shape[2]), torch.arange(shape[0])[:, None]
    valid = {"none": steps >= 0 * missing, "left": steps >= missing, "right": steps < shape[2] - missing}[side]
    return tokens, valid.to(DEVICE)


def test_smoke():
    tokens, valid = inputs_of("left")
    encoder = cx.nn.TemporalEncoder(24, 4, 2, 48).to(DEVICE)
    y = encoder(tokens, valid)
    assert y.shape == (4, 5, 24)
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_state_dict_goes_both_ways():
    torch.manual_seed(0)
    plain = Plain(24, 4, 2, 48)
    torch.manual_seed(0)
    ours = cx.nn.TemporalEncoder(24, 4, 2, 48)
    assert list(plain.state_dict()) == list(ours.state_dict())
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ours.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference(dtype, side):
    plain, ours = both(24, 4, 2, 48, 0.0, dtype=dtype)
    tokens, valid = inputs_of(side, dtype)
    grad = torch.ones(4, 5, 24, dtype=dtype, device=DEVICE).cumsum(2) / 24
    numbers = [module_numbers(m, lambda x, m=m: m(x, valid), tokens, grad) for m in (ours, plain)]
    truth = module_numbers(plain.double(), lambda x: plain(x, valid), tokens.double(), grad.double())
    assert_close_to_reference(*numbers, truth, scale64=60.0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_matches_reference_in_evaluation(side):
    plain, ours = (module.eval() for module in both(24, 4, 2, 48, 0.5))
    tokens, valid = inputs_of(side)
    torch.testing.assert_close(ours(tokens, valid), plain(tokens, valid), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, valid), plain(tokens, valid), rtol=1e-4, atol=1e-4)


def test_takes_the_step_that_the_users_code_takes():
    """Padded on the left, sequence b takes slot 5 - b, which for b = 3 is padding itself."""
    _, ours = both(24, 4, 1, 48, 0.0)
    tokens, valid = inputs_of("left")
    expected = ours(tokens, valid)
    for b, padded in ((1, 0), (2, 0), (3, 1)):
        changed = tokens.clone()
        changed[b, :, 5 - b] += 1
        assert not torch.allclose(ours(changed, valid)[b], expected[b])
        changed = tokens.clone()
        changed[b, :, padded if padded != 5 - b else 0] += 1  # a padded step that is not taken
        torch.testing.assert_close(ours(changed, valid)[b], expected[b])


def test_no_valid_step_is_finite():
    _, ours = both(24, 4, 2, 48, 0.0)
    tokens, valid = inputs_of("none")
    valid[1] = False
    tokens.requires_grad_()
    y = ours(tokens, valid)
    assert y.isfinite().all()
    assert torch.autograd.grad(y.sum(), tokens)[0].isfinite().all()


def test_dropout_repeats_with_the_seed():
    _, ours = both(24, 4, 2, 48, 0.3)
    tokens, valid = inputs_of("left")
    torch.manual_seed(3)
    first, second = ours(tokens, valid), ours(tokens, valid)
    torch.manual_seed(3)
    assert torch.equal(ours(tokens, valid), first)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(checkpoint(ours, tokens, valid, use_reentrant=False), first)
    mean = torch.stack([ours(tokens, valid) for _ in range(300)]).mean(0)
    assert (mean - ours.eval()(tokens, valid)).abs().mean() < 0.3


def one_of(name):
    def change(module):
        getattr(module.transformer.layers[0], name).train()

    return change


def all_but_the_layer(module):
    for layer in module.train().transformer.layers:
        for name in ("dropout", "dropout1", "dropout2", "self_attn"):
            getattr(layer, name).eval()


@pytest.mark.parametrize("change", [*map(one_of, ("dropout", "dropout1", "self_attn")), all_but_the_layer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_follows_each_inner_module(change, dtype):
    """As in nn.TransformerEncoderLayer: Monte Carlo dropout turns on the inner modules of a model in evaluation."""
    plain, ours = both(24, 4, 2, 48, 0.5, dtype=dtype)
    tokens, valid = inputs_of("left", dtype)
    for module in (plain.eval(), ours.eval()):
        change(module)
        assert torch.equal(module(tokens, valid), module(tokens, valid)) is (change is all_but_the_layer)
    assert ours.why_not_fused() == []


@ON_CPU
def test_own_products_with_dropout_have_the_gradients_of_their_masks():
    """float32 products of this library, whose backward pass draws the masks again: against differences of float64,
    which PyTorch multiplies, with the same seeds."""
    _, ours = both(32, 4, 2, 64, 0.4)
    tokens, valid = inputs_of("left", shape=(4, 9, 6, 32))
    grads = []
    for module, x in ((ours, tokens), (copy.deepcopy(ours).double(), tokens.double())):
        module.transformer.layers[1].linear2.weight.requires_grad_(False)
        torch.manual_seed(3)
        module(x.requires_grad_(), valid).square().mean().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters() if p.requires_grad)])
        assert module.transformer.layers[1].linear2.weight.grad is None
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=1e-6)


@ON_CPU
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_dtype_of_the_stock_module(given):
    plain, ours = both(24, 4, 2, 48, 0.0)
    tokens, valid = inputs_of("left", given)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = ours(tokens, valid), plain(tokens, valid)
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.1, atol=0.1)


@pytest.mark.slow
def test_compile():
    _, ours = both(24, 4, 1, 48, 0.0)
    tokens, valid = inputs_of("left")
    tokens.requires_grad_()
    expected, got = ours(tokens, valid), torch.compile(ours, fullgraph=True)(tokens, valid)
    torch.testing.assert_close(got, expected)
    ours_grad, theirs = (torch.autograd.grad(y.square().sum(), tokens)[0] for y in (got, expected))
    torch.testing.assert_close(ours_grad, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "valid", "error", "message"),
    [
        ((4, 6, 24), (4, 6), ValueError, r"tokens must have shape \(B, N, T, 24\), got \(4, 6, 24\)"),
        ((4, 5, 6, 12), (4, 6), ValueError, r"tokens must have shape \(B, N, T, 24\), got \(4, 5, 6, 12\)"),
        ((4, 5, 6, 24), (4, 5), ValueError, r"valid_t must have shape \(4, 6\), got \(4, 5\)"),
        ((1, 5, 65, 24), (1, 65), ValueError, "at most 64 tokens"),
    ],
)
def test_errors(tokens, valid, error, message):
    encoder = cx.nn.TemporalEncoder(24)
    with pytest.raises(error, match=message):
        encoder(torch.ones(tokens), torch.ones(valid, dtype=torch.bool))
    with pytest.raises(TypeError, match="valid_t must have dtype bool"):
        encoder(torch.ones(4, 5, 6, 24), torch.ones(4, 6))


# ---- inner modules that are not plain ----


class Adapter(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x.mean(-1, keepdim=True)


class Attention(nn.MultiheadAttention):
    def forward(self, *arguments, **options):
        mixed, weights = super().forward(*arguments, **options)
        return 2 * mixed, weights


def replaced(layer, name, kind):
    old = getattr(layer, name)
    if kind is Attention:
        new = Attention(old.embed_dim, old.num_heads, batch_first=True)
    else:
        new = kind(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    setattr(layer, name, new.to(next(old.parameters())))


def with_norm_first(layer):
    layer.norm_first = True


def with_activation(activation):
    def change(layer):
        layer.activation, layer.activation_relu_or_gelu = activation, 0

    return change


def with_hook(name):
    def change(layer):
        module = getattr(layer, name) if name else layer
        module.register_forward_hook(lambda module, inputs, output: output + 0.5)

    return change


LAYER_CHANGES = {
    "adapter in linear1": lambda layer: replaced(layer, "linear1", Adapter),
    "adapter in linear2": lambda layer: replaced(layer, "linear2", Adapter),
    "attention": lambda layer: replaced(layer, "self_attn", Attention),
    "pruned": lambda layer: prune.l1_unstructured(layer.linear1, "weight", 0.5),
    "pruned attention": lambda layer: prune.l1_unstructured(layer.self_attn, "in_proj_weight", 0.5),
    "weight_norm": lambda layer: nn.utils.weight_norm(layer.linear1),
    "parametrized": lambda layer: nn.utils.parametrizations.weight_norm(layer.linear1),
    "hook of linear1": with_hook("linear1"),
    "hook of norm1": with_hook("norm1"),
    "hook of dropout": with_hook("dropout"),
    "hook of the layer": with_hook(""),
    "relu": with_activation(torch.relu),
    "tanh GELU": with_activation(nn.GELU("tanh")),
    "norm_first": with_norm_first,
}


def assert_train_alike(ours, plain, steps=3):
    """The same outputs and parameters over some steps of SGD, in float64."""
    tokens, valid = inputs_of("right", torch.float64)
    optimizers = [torch.optim.SGD(module.parameters(), 1e-2) for module in (ours, plain)]
    for _ in range(steps):
        outputs = []
        for module, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(module(tokens, valid))
            outputs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, rtol=1e-8, atol=1e-9)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@ON_CPU
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", LAYER_CHANGES.values(), ids=LAYER_CHANGES)
def test_changed_layers_work_as_in_the_plain_module(change, place):
    plain, ours = both(24, 4, 2, 48, 0.0, dtype=torch.float64)
    for module in (ours, plain):
        change(module.transformer.layers[place])
    (reason,) = ours.why_not_fused()
    assert reason.startswith(f"transformer.layers.{place} ")
    assert_train_alike(ours, plain)


def with_final_norm(module):
    module.transformer.norm = nn.LayerNorm(24).double().to(DEVICE)


def with_hook_of_the_stack(module):
    module.transformer.register_forward_hook(lambda module, inputs, output: output.tanh())


@ON_CPU
@pytest.mark.parametrize("change", [with_final_norm, with_hook_of_the_stack], ids=lambda c: c.__name__)
def test_changed_stacks_work_as_in_the_plain_module(change):
    plain, ours = both(24, 4, 2, 48, 0.0, dtype=torch.float64)
    for module in (ours, plain):
        change(module)
    assert len(ours.why_not_fused()) == 1
    assert_train_alike(ours, plain)


@ON_CPU
def test_plain_layers_are_fused():
    plain, ours = both(24, 4, 2, 48, 0.0, dtype=torch.float64)
    for module in (ours, plain):
        module.transformer.layers[0].norm1.eps = 0.1  # read where it is used
        module.transformer.layers[1].activation = nn.GELU()
    assert ours.why_not_fused() == []
    assert_train_alike(ours, plain)


@each_capture
def test_compile_of_a_changed_layer(backend):
    _, ours = both(24, 4, 2, 48, 0.0)
    with_hook("linear1")(ours.transformer.layers[0])
    tokens, valid = inputs_of("left")
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(tokens, valid), ours(tokens, valid), rtol=1e-4, atol=1e-4)


def test_errors_of_settings_and_of_no_step():
    with pytest.raises(ValueError, match=r"TemporalEncoder: dropout must be in \[0, 1\), got 1.0"):
        cx.nn.TemporalEncoder(24, dropout=1.0)
    with pytest.raises(ValueError, match=r"tokens must have at least one step, got \(1, 2, 0, 24\)"):
        cx.nn.TemporalEncoder(24)(torch.ones(1, 2, 0, 24), torch.ones(1, 0, dtype=torch.bool))
