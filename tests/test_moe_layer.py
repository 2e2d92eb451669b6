"""cx.nn.MoELayer and the experts it is made of."""

import copy
import hashlib
import itertools
import pickle
import warnings
from collections import Counter

import example_path
import pytest
import torch
from helpers import DEVICE, assert_close_to_reference, random_image
from torch import nn
from torch.nn import functional as F

import camox_ops as cx
from camox_ops.nn import _pyramid
from camox_ops.nn import moe as moe_file

stock_moe, stock_experts = (example_path.load(name) for name in ("moe", "experts"))

SHAPE = (6, 16, 12, 9)
EXPERTS = [made.__name__ for made in moe_file.EXPERTS]


@pytest.fixture(autouse=True)
def default_warned(monkeypatch):
    monkeypatch.setattr(moe_file, "_warned", True)


@torch.no_grad()
def spread(layer, x, bias=None):
    """Gates that send the images of x to different experts, clearly."""
    convolution = layer.gate[1]
    nn.init.normal_(convolution.weight, std=20)
    convolution.bias.zero_()
    convolution.bias.sub_(layer.gate(x).flatten(1).mean(0))
    if bias is not None:
        convolution.bias.add_(torch.tensor(bias, dtype=x.dtype, device=x.device))
    return layer


def build(x, num_experts=7, top_k=3, bias=None, **options):
    torch.manual_seed(0)
    layer = cx.nn.MoELayer(x.shape[1], num_experts, top_k, **options).to(x.device, x.dtype)
    return spread(layer, x, bias)


def one_at_a_time(layer, x):
    """The same mixture, image by image and choice by choice."""
    logits = layer.gate(x).flatten(1)
    chosen_logits, chosen = logits.topk(layer.top_k)
    weights = chosen_logits.softmax(1)
    rows = []
    for row, numbers in enumerate(chosen.tolist()):
        alone = x[row : row + 1]
        rows.append(sum(weights[row, slot] * layer.experts[n](alone) for slot, n in enumerate(numbers)))
    return torch.cat(rows)


def every_expert(layer, x):
    """The same mixture from every expert on all images."""
    logits = layer.gate(x).flatten(1)
    values, chosen = logits.topk(layer.top_k)
    weights = torch.zeros_like(logits).scatter(1, chosen, values.softmax(1))
    results = torch.stack([expert(x) for expert in layer.experts], 1)
    return (results * weights[..., None, None, None]).sum(1)


def grown(forward, layer, x, grad):
    """Output and the gradients of x and of every parameter that has one, by name."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    output = forward(x)
    output.backward(grad)
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "x": x.grad} | gradients


def assert_as_near_as_stock(ours, stock, exact, x, grad):
    """Functions of x with their modules, several for stock. For every output and gradient: our distance from float64 is
    at most three times stock PyTorch's, the largest of its runs on the batch in four orders, plus 4 eps max|float64|.

    One float32 run of such a chain is one sample of its rounding: hence the runs and the 3 instead of 2."""
    truth = grown(*exact, x.double(), grad.double())
    mine = grown(*ours, x, grad)
    runs = []
    for each, shift in itertools.product(stock, range(4)):
        run = grown(*each, x.roll(shift, 0), grad.roll(shift, 0))
        runs.append(run | {key: run[key].roll(-shift, 0) for key in ("output", "x")})
    assert mine.keys() == truth.keys()
    for key, expected in truth.items():
        error = (mine[key].double() - expected).abs().max()
        own = max((run[key].double() - expected).abs().max() for run in runs)
        assert error <= 3 * own + 4 * torch.finfo(mine[key].dtype).eps * expected.abs().max(), (key, error, own)


class Scale(nn.Module):
    """x times a parameter; counts its calls and remembers the images of each."""

    def __init__(self, value=1.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(value))
        self.taken = []

    def forward(self, x):
        self.taken.append(len(x))
        return x * self.factor


def scales(count):
    return [Scale(float(number + 1)) for number in range(count)]


def test_smoke_moe_layer():
    x = random_image(SHAPE)
    output, aux_loss, info = build(x).eval()(x)
    assert output.shape == x.shape and output.dtype == x.dtype
    assert aux_loss.shape == () and not aux_loss.requires_grad
    assert list(info) == ["top_k_indices", "top_k_weights", "expert_usage"]
    assert info["top_k_indices"].shape == info["top_k_weights"].shape == (6, 3)
    assert info["expert_usage"].sum() == 18
    assert not any(value.requires_grad for value in info.values())


def test_names_are_the_public_ones():
    torch.manual_seed(0)
    ours = cx.nn.MoELayer(16, 9, 2)
    torch.manual_seed(0)
    stock = stock_moe.MoELayer(16, 9, 2)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in ours.state_dict().items())
    assert ours.expert_names == [EXPERTS[i % 7] for i in range(9)]
    assert (ours.num_experts, ours.top_k) == (9, 2)
    assert cx.nn.MoELayer(16).num_experts == 5 and cx.nn.MoELayer(16).top_k == 2


def test_errors_of_the_constructor():
    wrong = [
        (ValueError, "top_k must be >= 1, got 0", {"top_k": 0}),
        (ValueError, "top_k must be at most num_experts=5, got 6", {"top_k": 6}),
        (TypeError, "top_k must be an int, got 2.0", {"top_k": 2.0}),
        (ValueError, "num_experts must be >= 1, got 0", {"num_experts": 0}),
        (TypeError, "num_experts must be an int, got True", {"num_experts": True}),
        (ValueError, "in_channels must be >= 1, got 0", {"in_channels": 0}),
        (ValueError, "aux_loss must be one of .* got 'none'", {"aux_loss": "none"}),
        (ValueError, "score must be one of .* got 'best'", {"score": "best"}),
        (ValueError, "capacity_factor must be > 0 and finite, got 0", {"capacity_factor": 0}),
        (ValueError, "capacity_factor must be at most 2147483648, got 1e", {"capacity_factor": 1e30}),
        (ValueError, "sync must be one of 'counts', 'none', got 'all'", {"sync": "all"}),
        (TypeError, "streams must be a bool, got 1", {"streams": 1}),
        (ValueError, "experts must be num_experts=5 modules, got 3", {"experts": scales(3)}),
    ]
    for error, message, options in wrong:
        with pytest.raises(error, match=f"MoELayer: {message}"):
            cx.nn.MoELayer(**{"in_channels": 16, **options})
    with pytest.raises(ValueError, match="TextureExpert: dim must be a positive multiple of 4, got 6"):
        cx.nn.MoELayer(6)


def test_errors_of_forward():
    layer = cx.nn.MoELayer(16, 2, 1, experts=scales(2))
    with pytest.raises(ValueError, match=r"MoELayer: x must have 4 dimensions"):
        layer(torch.zeros(16, 3, 3))
    with pytest.raises(ValueError, match=r"MoELayer: x must have in_channels=16 channels, got \(1, 8, 3, 3\)"):
        layer(torch.zeros(1, 8, 3, 3))
    layer.gate[1].bias.data[1] = torch.nan
    with pytest.raises(ValueError, match="moe_route: logits hold NaN in 1 of 1 rows"):
        layer(torch.zeros(1, 16, 3, 3))


@pytest.mark.parametrize("sync", moe_file.SYNCS)
@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (
            ValueError,
            r"keep the shape of its input, \(\d, 16, 12, 9\), got \(\d, 16, 6, 4\)",
            nn.AvgPool2d(2),
        ),
        (TypeError, "return dtype float32, got float64", lambda x: x.double()),
        (TypeError, "return dtype float32, got bfloat16", lambda x: x.bfloat16()),
        (TypeError, "return a torch.Tensor, got tuple", lambda x: (x, x)),
    ],
)
def test_errors_of_experts(sync, error, message, wrong):
    class Wrong(nn.Module):
        def forward(self, x):
            return wrong(x)

    layer = cx.nn.MoELayer(16, 2, 2, experts=[Scale(), Wrong()], sync=sync).to(DEVICE)
    with pytest.raises(error, match=rf"MoELayer: expert 1 \(Wrong\) must {message}"):
        layer(random_image(SHAPE))


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("shape", [(4, 32, 12, 9), (2, 48, 7, 7), (1, 32, 1, 3), (2, 40, 20, 17)])
def test_matches_reference_of_each_expert(name, shape):
    torch.manual_seed(0)
    stock = getattr(stock_experts, name)(shape[1]).to(DEVICE).eval()
    ours = getattr(cx.nn, name)(shape[1]).to(DEVICE).eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    exact = copy.deepcopy(stock).double()
    x, grad = random_image(shape), random_image(shape, seed=1)
    assert_as_near_as_stock((ours, ours), [(stock, stock)], (exact, exact), x, grad)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 12, 16, 33])
def test_matches_reference_of_the_pyramid(size):
    torch.manual_seed(0)
    x = torch.randn(2, 3, size, size + 4, dtype=torch.float64)
    for level, pooled in zip(_pyramid.LEVELS, _pyramid.to_levels(x), strict=True):
        torch.testing.assert_close(pooled.mT, F.adaptive_avg_pool2d(x, level))
    levels = [torch.randn(2, 3, n, n, dtype=torch.float64) for n in _pyramid.LEVELS]
    options = {"size": (size, size + 4), "mode": "bilinear", "align_corners": False}
    expected = sum(F.interpolate(level.mT, **options) for level in levels)
    torch.testing.assert_close(_pyramid.from_levels(levels, (size, size + 4)), expected)


def test_a_context_expert_of_no_images():
    x = random_image((0, 8, 6, 5)).requires_grad_()
    y = cx.nn.SemanticContextExpert(8).to(DEVICE)(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("top_k", [1, pytest.param(3, marks=pytest.mark.slow), 7])
def test_matches_reference_of_every_image_alone(top_k):
    x, grad = random_image((4, 32, 7, 6)), random_image((4, 32, 7, 6), seed=1)
    layer = build(x, top_k=top_k).eval()
    exact = copy.deepcopy(layer).double()
    ours = (lambda t: layer(t)[0], layer)
    stock = [(lambda t: one_at_a_time(layer, t), layer), (lambda t: every_expert(layer, t), layer)]
    assert_as_near_as_stock(ours, stock, (lambda t: one_at_a_time(exact, t), exact), x, grad)


def test_matches_reference_of_the_users_layer():
    x = random_image(SHAPE)
    stock = stock_moe.MoELayer(16, 7, 3).to(DEVICE).eval()
    ours = build(x).eval()
    stock.load_state_dict(ours.state_dict(), strict=True)
    exact, _, _ = copy.deepcopy(stock).double()(x.double())
    (output, aux_loss, info), (expected, expected_aux, expected_info) = ours(x), stock(x)
    assert_close_to_reference(output, expected, exact)
    torch.testing.assert_close(aux_loss, expected_aux)
    assert torch.equal(info["top_k_indices"], expected_info["top_k_indices"])
    torch.testing.assert_close(info["top_k_weights"], expected_info["top_k_weights"])
    assert torch.equal(info["expert_usage"], expected_info["expert_usage"])


def test_known_values_of_scaled_images():
    """Experts that multiply by 1, 2, 3, 4: the output is x times the weighted mean of the chosen factors."""
    x = random_image((5, 3, 4, 4))
    layer = build(x, 4, 2, experts=scales(4))
    output, _, info = layer(x)
    factor = ((info["top_k_indices"] + 1) * info["top_k_weights"]).sum(1)
    torch.testing.assert_close(output, x * factor.view(-1, 1, 1, 1))
    taken = [sum(expert.taken) for expert in layer.experts]
    assert taken == info["expert_usage"].tolist()


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_one_call_per_active_expert_and_one_reading(monkeypatch, batch):
    x = random_image((batch, 16, 6, 6))
    layer = build(x, 7, 3, experts=scales(7), aux_loss="switch")
    readings = Counter()
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        method = getattr(torch.Tensor, name)

        def counted(*arguments, _name=name, _method=method, **options):
            readings[_name] += 1
            return _method(*arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, counted)
    _, _, info = layer(x)
    monkeypatch.undo()
    assert sum(readings.values()) <= 1, readings
    usage = info["expert_usage"].tolist()
    assert [expert.taken for expert in layer.experts] == [[int(n)] if n else [] for n in usage]
    assert sum(len(expert.taken) for expert in layer.experts) <= min(7, 3 * batch)


def test_experts_not_chosen_keep_no_gradient():
    x = random_image(SHAPE)
    layer = build(x, top_k=2, bias=[0, -900, -900, -900, 0, -900, -900])
    layer(x)[0].sum().backward()
    for number, expert in enumerate(layer.experts):
        gradients = [p.grad for p in expert.parameters()]
        assert all(g is not None for g in gradients) if number in (0, 4) else all(g is None for g in gradients)
    assert layer.gate[1].weight.grad.abs().sum() > 0


def test_shapes_of_no_image_and_of_one_expert_taking_all():
    empty = torch.zeros(0, 16, 5, 5, device=DEVICE, requires_grad=True)
    layer = cx.nn.MoELayer(16, 3, 2, experts=scales(3)).to(DEVICE)
    output, aux_loss, info = layer(empty)
    assert output.shape == empty.shape and info["expert_usage"].tolist() == [0, 0, 0]
    assert aux_loss.isfinite()
    x = random_image(SHAPE)
    layer = build(x, 3, 1, bias=[-900, 900, -900], experts=scales(3))
    output, _, info = layer(x)
    assert info["expert_usage"].tolist() == [0, 6, 0]
    torch.testing.assert_close(output, 2 * x)


@pytest.mark.parametrize("aux_loss", ["usage_mse", "switch"])
def test_shapes_of_no_image_in_padded_groups(aux_loss):
    empty = torch.zeros(0, 16, 5, 5, device=DEVICE, requires_grad=True)
    layer = cx.nn.MoELayer(16, 3, 2, experts=scales(3), sync="none", aux_loss=aux_loss).to(DEVICE)
    output, loss, info = layer(empty)
    assert output.shape == empty.shape and info["expert_usage"].tolist() == [0, 0, 0]
    (output.sum() + loss).backward()
    assert empty.grad.shape == empty.shape


def test_vmap_of_padded_groups():
    xs = torch.stack([random_image(SHAPE, seed=seed) for seed in range(3)])
    layer = build(
        xs[0], 3, 2, experts=[nn.Sequential(nn.ReLU(inplace=True), Scale(2.0)) for _ in range(3)], sync="none"
    )
    expected = torch.stack([layer(x)[0] for x in xs])
    torch.testing.assert_close(torch.vmap(lambda x: layer(x)[0])(xs), expected)

    def loss(x):
        return layer(x)[0].square().sum()

    expected = torch.stack([torch.func.grad(loss)(x) for x in xs])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(xs), expected)


def test_counts_that_cannot_be_read():
    layer = cx.nn.MoELayer(16, 3, 2, experts=scales(3), aux_loss="switch")
    with pytest.raises(ValueError, match="MoELayer: sync must be 'none' under vmap, got 'counts'"):
        torch.vmap(layer.to(DEVICE))(torch.zeros(2, 2, 16, 5, 5, device=DEVICE))
    with pytest.raises(ValueError, match="MoELayer: sync must be 'none' on the meta device, got 'counts'"):
        layer.to("meta")(torch.zeros(2, 16, 5, 5, device="meta"))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_of_padded_groups_with_any_batch(strict):
    x = random_image((3, 16, 5, 5))
    layer = build(x, 3, 2, experts=[nn.Conv2d(16, 16, 1) for _ in range(3)], sync="none")
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict).module()
    for batch in (2, 3, 8):
        x = random_image((batch, 16, 5, 5), seed=1)
        torch.testing.assert_close(exported(x)[0], layer(x)[0])


def test_another_default_device():
    x = random_image(SHAPE)
    for sync, top_k in (("counts", 1), ("counts", 2), ("none", 1)):
        layer = build(x, 2, top_k, experts=scales(2), sync=sync)
        expected = layer(x)[0]
        with torch.device("meta" if DEVICE.type == "cpu" else DEVICE):
            assert torch.equal(layer(x)[0], expected)


@pytest.mark.parametrize("layout", ["channels_last", "strided", "expanded"])
def test_noncontiguous(layout):
    x = random_image(SHAPE, layout=layout)
    layer = build(random_image(SHAPE)).eval()
    torch.testing.assert_close(layer(x)[0], layer(x.contiguous())[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capacity_factor", [None, 1.0, 3.0])
def test_padded_groups_give_the_same(monkeypatch, capacity_factor):
    x, grad = random_image((8, 16, 6, 6)), random_image((8, 16, 6, 6), seed=1)
    layer = build(x, capacity_factor=capacity_factor).eval()
    counted = grown(lambda t: layer(t)[0], layer, x, grad)
    layer.sync = "none"
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor's value was read"))
    output, _, _ = layer(x)
    monkeypatch.undo()
    padded = grown(lambda t: layer(t)[0], layer, x, grad)
    torch.testing.assert_close(output, counted["output"], rtol=1e-4, atol=1e-5)
    assert counted.keys() <= padded.keys() and len(padded) == 2 + len(list(layer.parameters()))
    for key, value in padded.items():
        torch.testing.assert_close(value, counted.get(key, torch.zeros_like(value)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("sync", moe_file.SYNCS)
def test_experts_may_work_in_place(sync, top_k):
    x = random_image(SHAPE)
    made = [[nn.Sequential(nn.ReLU(inplace=inplace), Scale(2.0)) for _ in range(3)] for inplace in (True, False)]
    layers = [build(x, 3, top_k, experts=experts, sync=sync) for experts in made]
    first, second = (grown(lambda t, layer=layer: layer(t)[0], layer, x, x) for layer in layers)
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("sync", moe_file.SYNCS)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_experts_that_work_in_place_leave_x(sync, grad_mode):
    """Also where the images are sorted by expert as they come."""
    x = random_image(SHAPE)
    before = x.clone()
    for top_k, bias in ((1, [900, -900]), (1, None), (2, None)):
        layer = build(x, 2, top_k, bias=bias, experts=[nn.ReLU(inplace=True) for _ in range(2)], sync=sync)
        with torch.set_grad_enabled(grad_mode):
            output = layer(x)[0]
        assert torch.equal(x, before)
        torch.testing.assert_close(output, x.relu())


def test_a_full_expert_takes_the_first_images():
    x = random_image((4, 3, 2, 2))
    layer = build(x, 2, 1, bias=[900, -900], experts=scales(2), capacity_factor=1.0)
    output, _, info = layer(x)
    assert info["expert_usage"].tolist() == [2, 0]
    assert torch.equal(output[:2], x[:2]) and not output[2:].any()
    assert info["top_k_weights"].flatten().tolist() == [1, 1, 0, 0]


def test_grad_through_route_dispatch_and_combine():
    x = random_image((3, 4, 2, 2), torch.float64).cpu().requires_grad_()
    for options in ({"aux_loss": "switch"}, {"aux_loss": "importance_cv2", "sync": "none"}, {"aux_loss": "z"}):
        layer = build(x.detach(), 3, 2, experts=scales(3), **options)
        weight = layer.gate[1].weight

        def both(t, w, layer=layer):
            output, aux_loss, _ = torch.func.functional_call(layer, {"gate.1.weight": w}, t)
            return output, aux_loss

        assert torch.autograd.gradcheck(both, (x, weight))


@pytest.mark.parametrize("kind", ["switch", "importance_cv2", "z"])
def test_grad_of_the_balance_losses_reaches_the_gate(kind):
    x = random_image(SHAPE)
    layer = build(x, aux_loss=kind)
    layer(x)[1].backward()
    assert layer.gate[1].weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in layer.experts.parameters())


def test_the_default_balance_loss_warns_once(monkeypatch):
    monkeypatch.setattr(moe_file, "_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cx.nn.MoELayer(16, aux_loss="usage_mse")
        assert not caught
        cx.nn.MoELayer(16)
        cx.nn.MoELayer(16)
    assert [str(w.message).split(" and")[0] for w in caught] == [
        "MoELayer's default aux_loss='usage_mse' is made of counts"
    ]
    assert caught[0].filename == __file__ and "switch" in str(caught[0].message)


@pytest.mark.parametrize("sync", moe_file.SYNCS)
def test_the_same_bits_forty_times(sync):
    x, grad = random_image(SHAPE), random_image(SHAPE, seed=1)
    layer = build(x, experts=scales(7), sync=sync)
    hashes = set()
    for _ in range(40):
        found = grown(lambda t: layer(t)[0], layer, x, grad)
        digest = hashlib.sha256()
        for value in found.values():
            digest.update(value.cpu().numpy().tobytes())
        hashes.add(digest.hexdigest())
    assert len(hashes) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_the_users(dtype, autocast):
    if dtype == torch.bfloat16 and not autocast:
        make, context = (lambda layer: layer.bfloat16()), torch.autocast(DEVICE.type, enabled=False)
    else:
        make, context = (lambda layer: layer), torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast)
    x = random_image(SHAPE)
    layer = build(x)
    stock = stock_moe.MoELayer(16, 7, 3).to(DEVICE)
    stock.load_state_dict(layer.state_dict())
    x = x.to(dtype)
    with context:
        results = [make(each.eval())(x) for each in (layer, stock)]
    (output, aux_loss, info), (expected, expected_aux, expected_info) = results
    assert (output.dtype, aux_loss.dtype) == (expected.dtype, expected_aux.dtype)
    assert {name: value.dtype for name, value in info.items()} == {n: v.dtype for n, v in expected_info.items()}
    if torch.equal(info["top_k_indices"], expected_info["top_k_indices"]):
        torch.testing.assert_close(output.float(), expected.float(), rtol=0.1, atol=0.1)
    output.float().sum().backward()


def test_copies_pickles_and_checkpoints():
    x = random_image(SHAPE)
    layer = build(x).eval()
    expected = layer(x)[0]
    assert torch.equal(copy.deepcopy(layer)(x)[0], expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], expected)
    plain = grown(lambda t: layer(t)[0], layer, x, x)
    again = torch.utils.checkpoint.checkpoint
    recomputed = grown(lambda t: again(lambda u: layer(u)[0], t, use_reentrant=False), layer, x, x)
    assert plain.keys() == recomputed.keys() and all(torch.equal(plain[key], recomputed[key]) for key in plain)


@pytest.mark.slow
def test_compile_of_padded_groups():
    x = random_image((4, 16, 6, 6))
    layer = build(x, experts=scales(7), sync="none", capacity_factor=2.0)
    compiled = torch.compile(lambda t: layer(t)[:2], fullgraph=True, dynamic=False)
    for mine, expected in zip(compiled(x), layer(x)[:2], strict=True):
        torch.testing.assert_close(mine, expected)
