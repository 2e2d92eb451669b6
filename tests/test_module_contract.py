"""What modules promise beside their numbers: inner modules are called where they are not plain, tables and matrices
that are kept are never stale, and modules work where tensors have no values."""

import copy
import itertools
import types

import example_path
import pytest
import torch
from helpers import DEVICE, each_capture, random_image
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune

import camox_ops as cx
from camox_ops.nn import _pyramid
from camox_ops.nn.projections import project, project_heads

stock_experts = example_path.load("experts")
backbone = example_path.load("backbone")

ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 runs on the CPU only")
# expert -> one of its branches, and its fusion
PARTS = {
    "EdgeExpert": ("laplacian_branch", "fusion"),
    "FrequencyExpert": ("mid_freq_conv", "fusion"),
    "TextureExpert": ("branch3", "fusion"),
    "SemanticContextExpert": ("conv_2", "context_fusion"),
    "ContrastExpert": ("local_contrast", "fusion"),
}
BRANCHED = [name for name in PARTS if name != "ContrastExpert"]


class Adapter(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + 0.5 * x.mean(1, keepdim=True)


def norm_of(layers):
    return next(layer for layer in layers if isinstance(layer, (cx.nn.LayerNorm2d, backbone.LayerNorm2d)))


def adapter(layers):
    old = layers[0]
    options = {"padding": old.padding, "dilation": old.dilation, "groups": old.groups}
    layers[0] = Adapter(old.in_channels, old.out_channels, old.kernel_size, **options).to(old.weight)
    layers[0].load_state_dict(old.state_dict())


def pruned(layers):
    prune.l1_unstructured(layers[0], "weight", 0.5)


def weight_norm(layers):
    nn.utils.weight_norm(layers[0])


def spectral_norm(layers):
    torch.manual_seed(5)
    nn.utils.spectral_norm(layers[0])


def parametrized(layers):
    parametrizations.weight_norm(layers[0])


def hook(layers):
    layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)


def pre_hook(layers):
    layers[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] - 1,))


def backward_hook(layers):
    layers[0].register_full_backward_hook(lambda module, grads, _: (3 * grads[0],))


def hook_of_norm(layers):
    norm_of(layers).register_forward_hook(lambda module, inputs, output: output.tanh())


def hook_of_branch(layers):
    layers.register_forward_hook(lambda module, inputs, output: output.square())


def forward_replaced(layers):
    layers[0].forward = types.MethodType(lambda self, x: nn.Conv2d.forward(self, x).abs(), layers[0])


def eps(layers):
    norm_of(layers).eps = 10.0


def activation(layers):
    norm = norm_of(layers)
    if isinstance(norm, cx.nn.LayerNorm2d):
        norm.activation = "none"
    else:
        norm.activate = nn.Identity()


def wider_kernel(layers):
    old = layers[0]
    layers[0] = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, groups=old.groups).to(old.weight)
    nn.init.ones_(layers[0].weight)
    nn.init.ones_(layers[0].bias)


def no_bias(layers):
    layers[0].bias = None


CHANGES = (
    adapter,
    pruned,
    weight_norm,
    spectral_norm,
    parametrized,
    hook,
    pre_hook,
    backward_hook,
    hook_of_norm,
    hook_of_branch,
    forward_replaced,
    eps,
    activation,
    wider_kernel,
    no_bias,
)
# of ContrastExpert's first part and of a fusion all is called but norm and, in a fusion, its Identity
FUSED_ALL_THE_SAME = {adapter, pruned, weight_norm, spectral_norm, parametrized, hook, pre_hook, backward_hook}
FUSED_ALL_THE_SAME |= {forward_replaced, eps, activation, wider_kernel, no_bias}


class PlusResidual(nn.Module):
    """A fusion and then the sum, which the plain expert's norm computes: what CamoXpert's own expert does."""

    def __init__(self, fusion):
        super().__init__()
        self.fusion = fusion

    def forward(self, x, residual):
        return self.fusion(x) + residual


def part_of(expert, place):
    part = getattr(expert, PARTS[type(expert).__name__][place])
    return part.fusion if isinstance(part, PlusResidual) else part


def twins(name, dim=8):
    """Our expert and the plain one with equal parameters, in float64."""
    torch.manual_seed(0)
    plain = getattr(stock_experts, name)(dim).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = getattr(cx.nn, name)(dim).double()
    ours.load_state_dict(plain.state_dict(), strict=True)
    fusion = PARTS[name][1]
    setattr(plain, fusion, PlusResidual(getattr(plain, fusion)))
    return ours, plain


def assert_train_alike(ours, plain, steps=2, shape=(2, 8, 9, 7)):
    """The same outputs and parameters over some steps of SGD."""
    optimizers = [torch.optim.SGD(module.parameters(), 1e-2) for module in (ours, plain)]
    for step in range(steps):
        x = random_image(shape, torch.float64, seed=step).requires_grad_()
        outputs = []
        for module, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(module(x))
            outputs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, rtol=1e-8, atol=1e-9)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


# ---- inner modules that are not plain ----


@ON_CPU
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("name", "place"), [(name, place) for name in PARTS for place in (0, 1)])
def test_changed_inner_modules_work_as_in_the_plain_module(name, place, change):
    ours, plain = twins(name)
    for module in (ours, plain):
        change(part_of(module, place))
    assert_train_alike(ours, plain)
    part_is_called = name == "ContrastExpert" or (place == 1 and name != "SemanticContextExpert")
    fused = part_is_called and change in FUSED_ALL_THE_SAME
    fused = fused or (name == "SemanticContextExpert" and change in (eps, activation))
    fused = fused or (name == "ContrastExpert" and place == 0)
    assert bool(ours.why_not_fused()) is not fused, ours.why_not_fused()


@ON_CPU
@pytest.mark.parametrize("name", PARTS)
def test_plain_inner_modules_are_fused(name):
    ours, plain = twins(name)
    assert ours.why_not_fused() == [] and cx.nn.why_not_fused(ours) == {}
    assert_train_alike(ours, plain)
    prune.l1_unstructured(getattr(ours, PARTS[name][0])[0], "weight", 0.5)
    prune.remove(getattr(ours, PARTS[name][0])[0], "weight")
    for copied in (ours, copy.deepcopy(ours)):
        assert copied.why_not_fused() == []


@ON_CPU
@pytest.mark.parametrize("name", BRANCHED)
def test_branches_of_unequal_width(name):
    """The widths of two branches exchanged for others of the same sum."""
    ours, plain = twins(name)
    for module in (ours, plain):
        children = list(module.children())
        branches = [child for child in children if isinstance(child, nn.Sequential)][:2]
        for layers, width in zip(branches, (3, 1), strict=True):
            kind = type(norm_of(layers))
            place = list(layers).index(norm_of(layers))
            torch.manual_seed(width)
            for number in range(place):
                size = layers[number].kernel_size
                options = {"padding": layers[number].padding, "dilation": layers[number].dilation}
                layers[number] = nn.Conv2d(8 if number == 0 else width, width, size, **options).double()
            layers[place] = kind(width, activation="gelu").double()
    assert_train_alike(ours, plain)
    assert "shape" in ours.why_not_fused()[0]


@ON_CPU
@pytest.mark.parametrize("name", BRANCHED)
def test_a_module_in_place_of_the_identity_is_called(name):
    ours, plain = twins(name)
    getattr(ours, PARTS[name][0])[-1] = nn.Tanh()
    getattr(plain, PARTS[name][0]).register_forward_hook(lambda module, inputs, output: output.tanh())
    assert_train_alike(ours, plain)


@pytest.mark.parametrize("name", PARTS)
def test_hooks_on_all_modules_see_each_inner_module(name):
    expert, x = getattr(cx.nn, name)(8).to(DEVICE), random_image((1, 8, 9, 9))
    expected, seen = expert(x), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        output = expert(x)
        assert expert.why_not_fused() == ["hooks on all modules are registered"] * len(expert.why_not_fused()) != []
    finally:
        handle.remove()
    assert set(seen) == set(expert.modules())
    # batch norm over one small image divides by small deviations, which amplifies what the two ways round differently
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert expert.why_not_fused() == []


@pytest.mark.parametrize("value", [None, nn.Linear, [nn.ReLU()]])
def test_why_not_fused_of_no_module(value):
    with pytest.raises(TypeError, match=r"why_not_fused: model must be an nn\.Module, got "):
        cx.nn.why_not_fused(value)


def test_why_not_fused_names_modules_and_reasons():
    model = nn.ModuleDict(
        {"moe": cx.nn.MoELayer(8, 7, 2, aux_loss="switch"), "time": cx.nn.TemporalEncoder(8, 2, 2, 16)}
    )
    assert cx.nn.why_not_fused(model) == {}
    experts = model["moe"].experts
    experts[0].branch2[0].register_forward_hook(lambda *_: None)
    experts[3].low_freq_conv[0] = Adapter(8, 2, 1)
    experts[4].gradient_branch[1].eps = 1e-3
    experts[4].sobel_x_base.mul_(2)
    experts[5].pool_2 = nn.AdaptiveMaxPool2d(4)
    model["time"].transformer.layers[1].linear1.forward = torch.relu
    assert cx.nn.why_not_fused(model) == {
        "moe.experts.0": ["branch2.0 has hooks"],
        "moe.experts.3": [f"low_freq_conv.0 is a {__name__}.Adapter, not a Conv2d"],
        "moe.experts.4": [
            "the buffers do not hold the kernels of edge_maps",
            "gradient_branch.1 does not have the eps and activation of sobel_branch.1",
        ],
        "moe.experts.5": ["pool_2 is a torch.nn.modules.pooling.AdaptiveMaxPool2d, not a AdaptiveAvgPool2d"],
        "time": ["transformer.layers.1 linear1 has a forward of its own"],
    }


CHANGES = [None, *(pytest.param(change, marks=pytest.mark.slow) for change in (adapter, hook, parametrized, eps))]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: getattr(c, "__name__", "no"))
@each_capture
def test_compile_of_experts(name, change, backend):
    expert, x = getattr(cx.nn, name)(8).to(DEVICE), random_image((2, 8, 9, 9))
    if change is not None:
        change(getattr(expert, PARTS[name][0]))
    grad = random_image((2, 8, 9, 9), seed=1)

    def numbers(forward):
        y = forward(x)
        return [y, *torch.autograd.grad(y, list(expert.parameters()), grad)]

    for mine, theirs in zip(
        numbers(torch.compile(expert, fullgraph=True, backend=backend)), numbers(expert), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("changed", [False, True])
def test_functional_call_and_ensembles(name, changed):
    experts = [getattr(cx.nn, name)(8).to(DEVICE) for _ in range(2)]
    if changed:
        for expert in experts:
            adapter(getattr(expert, PARTS[name][0]))
    x = random_image((2, 8, 9, 9))
    state = {**dict(experts[1].named_parameters()), **dict(experts[1].named_buffers())}
    torch.testing.assert_close(torch.func.functional_call(experts[0], state, (x,)), experts[1](x))
    stacked = torch.func.stack_module_state(experts)
    outputs = torch.vmap(lambda *state: torch.func.functional_call(experts[0], state, (x,)))(*stacked)
    torch.testing.assert_close(outputs, torch.stack([expert(x) for expert in experts]), rtol=1e-4, atol=1e-5)


def test_hybrid_expert_under_vmap():
    """Whose channels_last layout vmap does not have."""
    expert = cx.nn.HybridExpert(8).to(DEVICE)
    xs = torch.stack([random_image((2, 8, 9, 9), seed=seed) for seed in range(2)])
    torch.testing.assert_close(torch.vmap(expert)(xs), torch.stack([expert(x) for x in xs]))

    def loss(x):
        return expert(x).square().sum()

    expected = torch.stack([torch.func.grad(loss)(x) for x in xs])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(xs), expected)


# ---- EdgeExpert's buffers ----


def in_place(expert):
    expert.sobel_x_base.mul_(2)


def through_data(expert):
    expert.laplacian_base.data[..., 0, 0] = 1


def of_a_checkpoint(expert):
    state = expert.state_dict()
    expert.load_state_dict({**state, "sobel_y_base": state["sobel_y_base"] * 3})


def assigned(expert):
    expert.laplacian_base = expert.laplacian_base.flip(-1) - 1


@ON_CPU
@pytest.mark.parametrize("change", [in_place, through_data, of_a_checkpoint, assigned], ids=lambda c: c.__name__)
def test_buffers_of_an_edge_expert_count(change):
    ours, plain = twins("EdgeExpert")
    ours(random_image((1, 8, 5, 5), torch.float64))
    saved = copy.deepcopy(ours.state_dict())
    for module in (ours, plain):
        change(module)
    assert ours.why_not_fused() == ["the buffers do not hold the kernels of edge_maps"]
    assert_train_alike(ours, plain)
    hook(ours.sobel_branch), hook(plain.sobel_branch)
    assert_train_alike(ours, plain)
    ours.sobel_branch[0]._forward_hooks.clear()
    ours.load_state_dict(saved)
    assert ours.why_not_fused() == []


@ON_CPU
def test_buffers_of_an_edge_expert_that_functional_call_gives():
    ours, plain = twins("EdgeExpert")
    x, state = random_image((1, 8, 5, 5), torch.float64), {"sobel_x_base": plain.sobel_x_base * 2}
    expected = torch.func.functional_call(plain, state, (x,))
    torch.testing.assert_close(torch.func.functional_call(ours, state, (x,)), expected)
    torch.testing.assert_close(ours(x), plain(x))


@ON_CPU
def test_kernels_of_an_edge_expert_that_are_learned():
    ours, plain = twins("EdgeExpert")
    for module in (ours, plain):
        for name in ("sobel_x_base", "sobel_y_base", "laplacian_base"):
            values = getattr(module, name)
            delattr(module, name)
            setattr(module, name, nn.Parameter(values))
    assert ours.why_not_fused() == ["the buffers do not hold the kernels of edge_maps"]
    assert_train_alike(ours, plain)


@ON_CPU
def test_compile_follows_the_buffers_of_a_checkpoint():
    ours, plain = twins("EdgeExpert")
    x, compiled = random_image((1, 8, 5, 5), torch.float64), torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), plain(x))
    for module in (ours, plain):
        of_a_checkpoint(module)
    torch.testing.assert_close(compiled(x), plain(x))


# ---- the pyramid of SemanticContextExpert ----


def pooling_by_lists(size):
    rows = []
    for level in _pyramid.LEVELS:
        for i in range(level):
            begin, end = i * size // level, -(-(i + 1) * size // level)
            rows.append([1 / (end - begin) if begin <= j < end else 0.0 for j in range(size)])
    return torch.tensor(rows, dtype=torch.float64)


def interpolation_by_lists(size):
    rows = []
    for level in _pyramid.LEVELS:
        shares = [[0.0] * size for _ in range(level)]
        for j in range(size):
            place = max(0.0, (j + 0.5) * level / size - 0.5)
            first = min(int(place), level - 1)
            shares[first][j] += 1 - (place - first)
            shares[min(first + 1, level - 1)][j] += place - first
        rows += shares
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 16, 31, 64, 100, 2047])
def test_known_values_of_the_pyramids_matrices(size):
    device = torch.device("cpu")
    for made, expected in (
        (_pyramid._pooling, pooling_by_lists(size)),
        (_pyramid._interpolation, interpolation_by_lists(size)),
    ):
        torch.testing.assert_close(made(size, torch.float64, device), expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(made(size, torch.float32, device), expected.float(), rtol=0, atol=1e-7)


def all_levels(x):
    return _pyramid.from_levels(_pyramid.to_levels(x), x.shape[2:])


@pytest.mark.parametrize("of_expert", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compile_of_the_pyramid_makes_one_graph_for_any_size(of_expert):
    expert, graphs = cx.nn.SemanticContextExpert(8).to(DEVICE) if of_expert else all_levels, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(expert, dynamic=True, fullgraph=True, backend=backend)
    for size in (*range(10, 22), 3):  # of 8 channels and 8 rows torch.compile would make one symbol
        x = random_image((2, 8, size, size + 1))
        torch.testing.assert_close(compiled(x), expert(x), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


# ---- tensors without values ----


def rotary():
    return cx.nn.RotaryEmbedding(8), (1, 2, 4, 8)


def context():
    return cx.nn.SemanticContextExpert(8), (1, 8, 9, 9)


@pytest.mark.parametrize("make", [rotary, context])
def test_fake_tensors_after_a_real_call(make):
    module, shape = make()
    expected = module(torch.ones(shape))
    with FakeTensorMode():
        twin, _ = make()
        fake = torch.empty(shape)
        assert twin(fake).shape == shape
        if not list(module.parameters()):
            assert module(fake).shape == shape
    assert twin(fake).shape == shape  # outside of its mode
    assert torch.equal(module(torch.ones(shape)), expected)


@pytest.mark.parametrize(
    ("make", "tracing_mode"),
    [
        *itertools.product((rotary, context), ("real", "fake")),
        (rotary, "symbolic"),
        pytest.param(context, "symbolic", marks=pytest.mark.slow),  # of any size torch.compile traces it above
    ],
)
def test_make_fx(make, tracing_mode):
    module, shape = make()
    x = torch.randn(shape)
    expected = module(x)
    traced = make_fx(module, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(traced(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [rotary, context])
def test_meta(make):
    with torch.device("meta"):
        module, shape = make()
        assert module(torch.empty(shape)).device.type == "meta"


@pytest.mark.parametrize("autocast", [False, True])
def test_mixture_without_host_counts_on_meta(autocast):
    with torch.device("meta"), torch.autocast("cpu", enabled=autocast):
        layer = cx.nn.MoELayer(8, 7, 2, aux_loss="switch", sync="none")
        y, loss, info = layer(torch.empty(2, 8, 9, 9))
    assert y.device.type == loss.device.type == info["expert_usage"].device.type == "meta"
    assert y.shape == (2, 8, 9, 9) and info["top_k_indices"].shape == (2, 2)


# ---- RotaryEmbedding, LayerNorm2d, project ----


@each_capture
def test_rotary_embedding_follows_its_settings(backend):
    x = torch.randn(1, 2, 5, 8)
    module = cx.nn.RotaryEmbedding(8, scaling={"rope_type": "linear", "factor": 2.0})
    module(x)
    for name, value in (("theta", 100.0), ("units", "turns"), ("dim", 6)):
        setattr(module, name, value)
        expected = copy.deepcopy(module)(x)
        assert torch.equal(module(x), expected)
        assert torch.equal(torch.compile(module, fullgraph=True, backend=backend)(x), expected)
    module.scaling["factor"] = 4.0
    assert torch.equal(module(x), copy.deepcopy(module)(x))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cx.nn.RotaryEmbedding(8, max_length=-3), ValueError, "max_length must be >= 0, got -3"),
        (lambda: cx.nn.RotaryEmbedding(8, max_length=2.0), TypeError, "max_length must be an int, got 2.0"),
        (lambda: cx.nn.RotaryEmbedding(8)(torch.ones(4, 8)), ValueError, r"4 dimensions .*, got shape \(4, 8\)"),
        (
            lambda: cx.nn.RotaryEmbedding(8)(()),
            ValueError,
            r"x must be a tensor or a tuple .* got \(\)",
        ),
        (lambda: cx.nn.RotaryEmbedding(8)([1, 2]), TypeError, r"RotaryEmbedding: x must be a torch\.Tensor, got int"),
        (
            lambda: cx.nn.LayerNorm2d(4, activation="swish"),
            ValueError,
            "LayerNorm2d: activation must .* got 'swish'",
        ),
        (lambda: cx.nn.LayerNorm2d(4, eps=-1.0), ValueError, "LayerNorm2d: eps must be > 0 and finite, got -1.0"),
        (lambda: project(torch.ones(3, 4), torch.ones(5, 2)), ValueError, r"share K, got shapes \(3, 4\) and \(5, 2\)"),
        (lambda: project(torch.ones(()), torch.ones(5, 2)), ValueError, r"share K, got shapes \(\) and \(5, 2\)"),
        (lambda: project([1.0], torch.ones(1, 2)), TypeError, r"project: x must be a torch\.Tensor, got list"),
        (
            lambda: project(torch.ones(3, 4), torch.ones(4, 2, dtype=torch.float16)),
            TypeError,
            "project: weight must have the dtype of x, float32, got float16",
        ),
        (
            lambda: project_heads(torch.ones(3, 2, 4), torch.ones(3, 4, 5)),
            ValueError,
            r"share H and K, got shapes \(3, 2, 4\) and \(3, 4, 5\)",
        ),
    ],
)
def test_errors_of_modules(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_project_of_one_dimension():
    x, weight = torch.randn(5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    y = project(x, weight)
    torch.testing.assert_close(y, x @ weight)
    grads = torch.autograd.grad(y.square().sum(), (x, weight))
    for mine, theirs in zip(grads, torch.autograd.grad((x @ weight).square().sum(), (x, weight)), strict=True):
        torch.testing.assert_close(mine, theirs)
