"""The example's CamoXpert: names, shapes, routing, and both op sets."""

import copy

import example_path
import pytest
import torch
from torch.nn import functional as F

one_thread = example_path.one_thread

backbone, experts, model_file, moe, ops = (
    example_path.load(name) for name in ("backbone", "experts", "model", "moe", "ops")
)

CONV = ("weight", "bias")
BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
EDGE_BUFFERS = ["sobel_x_base", "sobel_y_base", "laplacian_base"]


def names(prefix, suffixes=CONV):
    return [f"{prefix}.{suffix}" for suffix in suffixes]


def sequence(prefix, indices):
    """Weight and bias of the numbered entries of a Sequential."""
    return [name for index in indices for name in names(f"{prefix}.{index}")]


def branches(prefix, labels, indices=(0, 1)):
    return [name for label in labels for name in sequence(f"{prefix}.{label}", indices)]


def expert_names(prefix):
    """The seven experts in order, from the public architecture."""
    texture = branches(f"{prefix}.0", [f"branch{i}" for i in (1, 2, 3, 4)], (0, 1, 2))
    attention = [f"{prefix}.1.attention.qkv.weight", *names(f"{prefix}.1.attention.proj")]
    hybrid = sequence(f"{prefix}.2.local_branch", (0, 1, 2)) + sequence(f"{prefix}.2.global_branch", (1, 3))
    bands = ("low_freq_conv", "mid_freq_conv", "high_freq_conv", "spatial_conv", "fusion")
    edges = ("sobel_branch", "laplacian_branch", "gradient_branch", "spatial_branch", "fusion")
    pyramid = ("conv_1", "conv_2", "conv_3", "conv_4", "context_fusion")
    return [
        *texture,
        *sequence(f"{prefix}.0.fusion", (0, 1)),
        *attention,
        *hybrid,
        *names(f"{prefix}.2.fusion"),
        *branches(f"{prefix}.3", bands),
        *names(f"{prefix}.4", EDGE_BUFFERS),
        *branches(f"{prefix}.4", edges),
        *branches(f"{prefix}.5", pyramid),
        *sequence(f"{prefix}.6.local_contrast", (0, 1, 3, 4)),
        *sequence(f"{prefix}.6.fusion", (0, 1)),
    ]


def expected_names(depths):
    """Every name in the state of a CamoXpert of seven experts whose backbone has these depths."""
    found = sequence("backbone.stem", (0, 1))
    for stage, depth in enumerate(depths):
        if stage:
            found += sequence(f"backbone.stages.{2 * stage - 1}", (0, 1))
        for block in range(depth):
            for part in ("dwconv", "norm", "pwconv1", "pwconv2"):
                found += names(f"backbone.stages.{2 * stage}.{block}.{part}")
    for level in range(4):
        found += sequence(f"sdta_blocks.{level}.channel_attention", (1, 3))
        found += sequence(f"sdta_blocks.{level}.spatial_attention", (0,))
    for level in range(4):
        found += expert_names(f"moe_layers.{level}.experts") + sequence(f"moe_layers.{level}.gate", (1,))
    for level in range(4):
        for convolution in (0, 3):
            found += names(f"decoder_blocks.{level}.conv.{convolution}")
            found += names(f"decoder_blocks.{level}.conv.{convolution + 1}", BATCH_NORM)
    found += [name for level in range(3) for name in names(f"deep_heads.{level}")]
    found += names("final_conv.0") + names("final_conv.1", BATCH_NORM) + names("final_conv.3")
    return found


def build(op_set="torch", **options):
    torch.manual_seed(0)
    return model_file.CamoXpert(backbone="tiny", num_experts=7, ops=op_set, **options)


def expert_list(dim):
    return [make(dim) for make in experts.CLASSES]


@pytest.mark.parametrize("op_set", ops.OPS)
def test_names_are_the_public_ones(op_set):
    assert sorted(build(op_set).state_dict()) == sorted(expected_names(depths=(1, 1, 2, 1)))


def test_states_load_both_ways():
    stock, camox = build("torch"), build("camox")
    camox.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(camox.state_dict(), strict=True)
    loaded = camox.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in stock.state_dict().items())


def test_both_op_sets_compute_the_same():
    stock, camox = build("torch").eval(), build("camox").eval()
    camox.load_state_dict(stock.state_dict())
    for model in (stock, camox):
        for layer in model.moe_layers:
            layer.gate[1].bias.data[4] += 10
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        first, second = stock(images)[0], camox(images)[0]
    assert first.std() > 0
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 64), (70, 90), (33, 65)])
def test_shapes(size):
    model = build().eval()
    with torch.no_grad():
        logits, aux_loss, deep = model(torch.randn(2, 3, *size), return_deep_supervision=True)
        assert model(torch.randn(1, 3, *size))[2] is None
    assert logits.shape == (2, 1, *size)
    assert aux_loss.shape == ()
    assert [level.shape[:2] for level in deep] == [(2, 1)] * 3
    assert [level.shape[2] for level in deep] == [size[0] // 16, size[0] // 8, size[0] // 4]


def test_logits_are_clamped():
    model = build().eval()
    model.final_conv[3].bias.data.fill_(100.0)
    model.deep_heads[0].bias.data.fill_(-100.0)
    with torch.no_grad():
        logits, _, deep = model(torch.randn(1, 3, 64, 64), return_deep_supervision=True)
    assert logits.max() == 15
    assert deep[0].min() == -15


def test_half_of_the_experts_and_at_least_two_are_chosen():
    for count, chosen in ((3, 2), (5, 2), (7, 3), (8, 4)):
        model = model_file.CamoXpert(backbone="tiny", num_experts=count, ops="torch")
        assert {layer.top_k for layer in model.moe_layers} == {chosen}


def test_moe_layer_equals_the_weighted_sum_of_all_experts():
    torch.manual_seed(0)
    layer = moe.MoELayer(16, 7, 3).eval()
    layer.gate[1].weight.data *= 30
    x = torch.randn(5, 16, 12, 10)
    with torch.no_grad():
        output, aux_loss, info = layer(x)
        logits = layer.gate(x).flatten(1)
        kept = torch.full_like(logits, -torch.inf).scatter(1, logits.topk(3).indices, logits.topk(3).values)
        every = torch.stack([expert(x) for expert in layer.experts], 1)
        expected = (kept.softmax(1)[..., None, None, None] * every).sum(1)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert set(info) == {"top_k_indices", "top_k_weights", "expert_usage"}
    assert info["top_k_indices"].shape == info["top_k_weights"].shape == (5, 3)
    usage = torch.bincount(info["top_k_indices"].flatten(), minlength=7)
    assert torch.equal(info["expert_usage"], usage.float())
    torch.testing.assert_close(aux_loss, 0.01 * ((usage / 15 - 1 / 7) ** 2).mean())


def test_experts_not_chosen_keep_no_gradient():
    torch.manual_seed(0)
    layer = moe.MoELayer(16, 7, 2)
    layer.gate[1].bias.data = torch.tensor([9.0, -9, -9, -9, 9, -9, -9])
    output, aux_loss, _ = layer(torch.randn(2, 16, 8, 8))
    output.sum().backward()
    assert not aux_loss.requires_grad
    for number, expert in enumerate(layer.experts):
        gradients = [parameter.grad for parameter in expert.parameters()]
        assert all(g is not None for g in gradients) if number in (0, 4) else all(g is None for g in gradients)
    assert layer.gate[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("index", range(7))
def test_experts_keep_the_shape_and_reach_every_parameter(index):
    torch.manual_seed(0)
    expert = expert_list(16)[index]
    x = torch.randn(2, 16, 9, 11, requires_grad=True)
    output = expert(x)
    output.square().sum().backward()
    assert output.shape == x.shape
    assert x.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in expert.parameters())


def test_layer_norm_matches_torch():
    norm = backbone.LayerNorm2d(12)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 12, 5, 7) * 3 + 100
    expected = F.layer_norm(x.permute(0, 2, 3, 1), (12,), norm.weight, norm.bias, 1e-6).permute(0, 3, 1, 2)
    torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-4)


def test_attention_matches_its_formula():
    torch.manual_seed(0)
    for linear in (True, False):
        encoder = backbone.SDTAEncoder(16, num_heads=2, use_linear_attention=linear).double().eval()
        x = torch.randn(1, 16, 3, 4, dtype=torch.float64)
        q, k, v = (t.reshape(1, 2, 8, 12).transpose(2, 3) for t in encoder.qkv(x).chunk(3, 1))
        if linear:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            q, k = q / q.sum(-1, keepdim=True), k / k.sum(-1, keepdim=True)
            mixed = torch.einsum("bhid,bhjd,bhje->bhie", q, k, v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        expected = encoder.proj(mixed.transpose(2, 3).reshape(1, 16, 3, 4)) + x
        torch.testing.assert_close(encoder(x), expected)


def test_edge_maps_of_a_step():
    x = torch.zeros(1, 4, 5, 6)
    x[..., 3:] = 1.0
    sobel, laplacian, gradient = experts.EdgeExpert(4).compute_edges(x)
    assert sobel[0, 0, 2].tolist() == pytest.approx([1e-4, 1e-4, 4, 4, 1e-4, 4], rel=1e-5)
    assert laplacian[0, 0, 2].tolist() == [0, 0, 1, 1, 0, 1]
    torch.testing.assert_close(gradient, (sobel**2 + laplacian**2 + 1e-8).sqrt())


def test_gradient_checkpointing_changes_no_number():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 64, 64)
    found = []
    for checkpointing in (False, True):
        model = build(gradient_checkpointing=checkpointing)
        torch.manual_seed(1)
        logits, _, _ = model(images)
        logits.square().mean().backward()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, state))
    (logits, gradients, state), (logits2, gradients2, state2) = found
    assert torch.equal(logits, logits2)
    assert gradients.keys() == gradients2.keys()
    assert all(torch.equal(gradients[name], gradients2[name]) for name in gradients)
    assert all(torch.equal(state[name], state2[name]) for name in state)


def test_model_can_be_copied_and_moved_to_float64():
    model = copy.deepcopy(build("camox")).double().eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 64, 64, dtype=torch.float64))[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "resnet"}, "backbone must be one of .* got 'resnet'"),
        ({"backbone": "tiny", "pretrained": True}, "pretrained weights exist only for 'timm:NAME'"),
        ({"backbone": "tiny", "ops": "cuda"}, "ops must be one of .* got 'cuda'"),
        ({"backbone": "tiny", "num_experts": 0}, "num_experts must be >= 1, got 0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        model_file.CamoXpert(**options)


def test_stage_widths_must_be_multiples_of_eight(monkeypatch):
    monkeypatch.setitem(backbone.CONFIGS, "odd", ((24, 48, 80, 100), (1, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"multiple of 8, got \[24, 48, 80, 100\]"):
        backbone.build_backbone("odd")


def test_missing_timm_is_explained(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ImportError, match="'timm:resnet18' needs the timm package"):
        backbone.build_backbone("timm:resnet18")
