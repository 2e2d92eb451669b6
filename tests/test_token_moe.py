"""cx.nn.TokenMoE against a loop over experts in float64: values, gradients, losses, and how it behaves in PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import REFUSAL, assert_close_to_reference
from torch import nn
from torch.nn.utils import prune

import camox_ops as cx
from camox_ops import reference
from camox_ops.nn.token_moe import run_experts

D, H, E, K = 24, 40, 6, 2


def layer_of(dtype=torch.float64, seed=0, **options) -> cx.nn.TokenMoE:
    torch.manual_seed(seed)
    return cx.nn.TokenMoE(D, H, E, K, dtype=dtype, **options)


def rows_of(*shape, dtype=torch.float64, seed=1) -> torch.Tensor:
    x = torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def activated(h, activation):
    if activation == "gelu":
        return F.gelu(h)
    gate, value = h.chunk(2, -1)
    return F.silu(gate) * value


def loop_over_experts(layer, x, valid=None, logits=None):
    """(output, aux_loss), from the formulas of the docstring alone."""
    rows = x.reshape(-1, layer.dim)
    logits = rows @ layer.router.weight.t() if logits is None else logits
    kept = None if valid is None else valid.flatten()
    capacity = None
    if layer.capacity_factor is not None:
        capacity = -int(-layer.capacity_factor * rows.shape[0] * layer.top_k // layer.num_experts)
    if layer.router_bias is None:
        routed = reference.moe_route(logits, layer.top_k, score=layer.score, capacity=capacity, valid=kept)
    else:
        scores = logits.sigmoid() if layer.score == "sigmoid_topk" else logits.softmax(1)
        experts = (scores + layer.router_bias).topk(layer.top_k).indices
        weights = scores.gather(1, experts)
        if layer.score == "topk_softmax":
            weights = weights / weights.sum(1, keepdim=True)
        routed = reference.moe_routing(weights, experts, layer.num_experts, capacity=capacity, valid=kept)
    weights, experts, counts = routed[:3]
    output = torch.zeros_like(rows)
    if layer.shared_in is not None:
        output = output + activated(rows @ layer.shared_in, layer.activation) @ layer.shared_out
    for e in range(layer.num_experts):
        y = activated(rows @ layer.w_in[e], layer.activation) @ layer.w_out[e]
        output = output + y * (weights * (experts == e)).sum(1, keepdim=True)
    aux = sum(
        factor * reference.moe_aux_loss(logits, counts, layer.top_k, kind=kind, valid=kept)
        for kind, factor in layer.aux_losses.items()
    )
    return output.view(x.shape), aux


def with_gradients(run, layer, x):
    output, aux = run()[:2]
    upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)
    loss = (output * upstream).sum() + 3 * aux
    named = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(loss, list(named.values()))
    return {"output": output, "aux": torch.as_tensor(aux), **dict(zip(named, grads, strict=True))}


OPTIONS = {
    "swiglu": {},
    "gelu": {"activation": "gelu", "aux_loss": "importance_cv2"},
    "shared and two losses": {"shared_hidden": 12, "aux_loss": {"switch": 0.5, "z": 0.1}},
    "capacity": {"capacity_factor": 0.7, "score": "softmax_topk"},
    "sigmoid, biased": {"router_bias": True, "score": "sigmoid_topk", "capacity_factor": 1.0},
    "softmax, biased": {"router_bias": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_matches_reference_and_grad(options):
    layer = layer_of(**options)
    if layer.router_bias is not None:
        layer.router_bias += torch.linspace(-0.3, 0.3, E)
    x, valid = rows_of(5, 13), torch.arange(65).view(5, 13) % 7 != 3
    for mask in (None, valid):
        expected = with_gradients(lambda mask=mask: loop_over_experts(layer, x, mask), layer, x)
        found = with_gradients(lambda mask=mask: layer(x, valid=mask), layer, x)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_matches_reference_in_other_dtypes(dtype, activation):
    truth = layer_of(activation=activation, shared_hidden=8)
    for parameter in truth.parameters():
        parameter.data = parameter.data.to(dtype).double()
    layer, x = copy.deepcopy(truth).to(dtype), rows_of(70, dtype=dtype)
    wide = x.detach().double().requires_grad_()
    expected = with_gradients(lambda: loop_over_experts(truth, wide), truth, wide)
    # The loop in the same dtype takes float32 logits, or it would choose other experts.
    logits = F.linear(x.detach().float(), layer.router.weight.float())
    same = copy.deepcopy(layer)
    leaf = x.detach().clone().requires_grad_()
    plain = with_gradients(lambda: loop_over_experts(same, leaf, logits=same_logits(same, leaf)), same, leaf)
    assert torch.equal(logits.topk(K).indices, (wide @ truth.router.weight.t()).topk(K).indices)
    found = with_gradients(lambda: layer(x), layer, x)
    for name, value in found.items():
        assert_close_to_reference(value, plain[name].to(value.dtype), expected[name])


def same_logits(layer, x):
    return F.linear(x.float(), layer.router.weight.float())


def test_experts_without_rows_and_no_rows():
    layer = layer_of()
    with torch.no_grad():
        layer.router.weight[2:] = 0
        layer.router.weight[:2, 0] = 50
    x = rows_of(9)
    with torch.no_grad():
        x[:, 0] = 1
    expected = with_gradients(lambda: loop_over_experts(layer, x), layer, x)
    found = with_gradients(lambda: layer(x), layer, x)
    assert layer(x)[2]["expert_usage"].tolist() == [9, 9, 0, 0, 0, 0]
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-12), name
    assert not found["w_in"][2:].any()
    nothing = rows_of(0)
    output, aux, info = layer(nothing)
    (output.sum() + aux).backward()
    assert output.shape == (0, D)
    assert aux == 0
    assert info["expert_usage"].sum() == 0
    assert not layer.w_in.grad.any()


def test_capacity_drops_later_rows():
    layer = layer_of(capacity_factor=0.5)
    x = rows_of(24).detach()
    usage = layer(x)[2]["expert_usage"]
    assert usage.max() <= 4
    routed = layer(x)[2]
    full = layer_of()(x)[2]
    lost = (routed["top_k_weights"] == 0) & (full["top_k_weights"] > 0)
    assert lost.sum() == 48 - usage.sum()
    for expert in range(E):
        chosen = (full["top_k_indices"] == expert).any(1).nonzero().flatten()
        dropped = (lost & (full["top_k_indices"] == expert)).any(1)
        assert not dropped[chosen[:4]].any()
        assert dropped[chosen[4:]].all()


def test_router_is_float32_under_autocast():
    layer, x = layer_of(torch.float32, shared_hidden=8), rows_of(40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, aux, info = layer(x)
    logits = F.linear(x, layer.router.weight)
    routing = cx.moe_route(logits, K)
    assert output.dtype == torch.bfloat16
    assert aux.dtype == torch.float32
    assert torch.equal(info["top_k_weights"], routing.weights)
    assert torch.equal(info["top_k_indices"], routing.experts)
    half = copy.deepcopy(layer).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert half(x.bfloat16())[0].dtype == torch.bfloat16
    (output.float().square().sum() + aux).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    plain = layer(x)[0]
    assert (output - plain).abs().max() <= 0.03 * plain.abs().max()


def test_checkpointing_and_compile_give_the_same():
    layer, x = layer_of(torch.float32, jitter=0.1, shared_hidden=8), rows_of(30, dtype=torch.float32)

    def run(function):
        torch.manual_seed(3)
        output, aux, _ = function(x)
        return [output, *torch.autograd.grad(output.square().sum() + aux, [x, *layer.parameters()])]

    expected = run(layer)
    again = run(lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    for a, b in zip(expected, again, strict=True):
        assert torch.equal(a, b)
    layer.jitter = 0.0
    expected = run(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(expected, run(compiled), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_jitter_is_for_training_alone():
    layer, x = layer_of(jitter=0.3), rows_of(50)
    torch.manual_seed(0)
    first = layer(x)[0]
    assert not torch.equal(layer(x)[0], first)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_router_bias_balances():
    layer = layer_of(router_bias=True, aux_loss=None, score="sigmoid_topk")
    with torch.no_grad():
        layer.router.weight[0] += 1.0
    x = rows_of(300).detach().abs()
    before = layer(x)[2]["expert_usage"]
    assert before[0] == 300
    for _ in range(150):
        layer(x)
        layer.update_router_bias(0.01)
    usage = layer(x)[2]["expert_usage"]
    assert usage.max() < 1.5 * usage.mean()
    assert set(layer.state_dict()) == {"router.weight", "w_in", "w_out", "router_bias"}
    layer.eval()
    layer.expert_load.zero_()
    layer(x)
    assert not layer.expert_load.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_bias_stays_float32_in_half_types(dtype):
    """300 + 1 and 0.5 + 0.001 are no numbers of bfloat16."""
    layer = layer_of(torch.float32, router_bias=True, aux_loss=None).to(dtype)
    layer(rows_of(1000, dtype=dtype))
    layer(rows_of(1, dtype=dtype))
    assert layer.expert_load.dtype == torch.float32
    assert layer.expert_load.sum() == 1001 * K
    with torch.no_grad():
        layer.router_bias.fill_(0.5)
    layer.update_router_bias()
    assert layer.router_bias.dtype == torch.float32
    assert (layer.router_bias != 0.5).any()
    assert copy.deepcopy(layer).to("meta").router_bias.is_meta


@pytest.mark.parametrize("options", [{}, {"router_bias": True}, {"score": "sigmoid_topk", "router_bias": True}])
def test_padding_may_hold_nan(options):
    """In the gradients too, also of the router."""
    layer, x = layer_of(**options), rows_of(6)
    valid = torch.tensor([True, False, True, True, False, True])
    found = []
    for filler in (0.0, torch.nan, torch.inf):
        given = x.detach().masked_fill(~valid.unsqueeze(1), filler).requires_grad_()
        output, aux_loss, _ = layer(given, valid=valid)
        gradients = torch.autograd.grad(output.square().sum() + aux_loss, [given, *layer.parameters()])
        assert not gradients[0][~valid].any()
        found.append((output, aux_loss, *gradients))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_router_with_an_adapter_pruning_or_hooks_is_called():
    layer, x = layer_of(), rows_of(20)
    assert layer.why_not_fused() == []
    before = layer(x)[2]["top_k_weights"]
    layer.router.register_forward_hook(lambda module, inputs, output: 3 * output)
    assert cx.nn.why_not_fused(layer) == {"": ["router has hooks"]}
    assert not torch.equal(layer(x)[2]["top_k_weights"], before)

    layer = layer_of()
    prune.l1_unstructured(layer.router, "weight", 0.5)
    for _ in range(2):  # the mask is applied before each call
        (gradient,) = torch.autograd.grad(layer(x)[0].square().sum(), layer.router.weight_orig)
    assert gradient.any() and not gradient[layer.router.weight_mask == 0].any()

    layer = layer_of(torch.bfloat16)
    layer.router = nn.Sequential(layer.router, nn.Linear(E, E, dtype=torch.bfloat16))
    assert "router is a " in layer.why_not_fused()[0]
    layer(rows_of(5, dtype=torch.bfloat16))[0].sum().backward()
    assert layer.router[1].weight.grad.any()


def test_second_derivatives_are_refused():
    """Of a sum too, whose gradient requires none: once_differentiable would leave the experts' part out."""
    layer, x = layer_of(router_bias=True, shared_hidden=8), rows_of(20)
    (gradient,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="TokenMoE: second derivatives are not implemented"):
        gradient.square().sum().backward()


def test_func_transforms():
    """grad, vmap over rows, gradients of each sample and an ensemble, as loops give them."""
    layers = [layer_of(seed=seed, shared_hidden=8) for seed in range(2)]
    samples = torch.stack([rows_of(5, seed=seed).detach() for seed in range(3)])
    state = {name: value.detach() for name, value in layers[0].named_parameters()}

    def loss(state, x):
        output, aux_loss, _ = torch.func.functional_call(layers[0], state, (x,))
        return output.square().sum() + aux_loss

    def stock(x):
        return torch.autograd.grad(loss(dict(layers[0].named_parameters()), x), list(layers[0].parameters()))

    gradients = zip(*map(stock, samples), strict=True)
    expected = {name: torch.stack(each) for name, each in zip(state, gradients, strict=True)}
    found = torch.func.grad(loss)(state, samples[0])
    torch.testing.assert_close(found, {name: each[0] for name, each in expected.items()})
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss), (None, 0))(state, samples), expected)
    stacked, _ = torch.func.stack_module_state(layers)
    found = torch.vmap(lambda state: torch.func.functional_call(layers[0], state, (samples[0],))[0])(stacked)
    torch.testing.assert_close(found, torch.stack([layer(samples[0])[0] for layer in layers]))


def test_func_transforms_need_the_buffers_that_training_writes():
    layers = [layer_of(seed=seed, router_bias=True) for seed in range(2)]
    x, state = rows_of(5).detach(), dict(layers[0].named_parameters())
    for transform in (torch.func.grad, torch.vmap):
        with pytest.raises(ValueError, match="TokenMoE: in training router_bias=True adds to the buffer expert_load"):
            transform(lambda x: layers[0](x)[0].sum())(x if transform is torch.func.grad else x[None])
    assert not layers[0].expert_load.any()

    def loss(state, buffers):
        return torch.func.functional_call(layers[0], (state, buffers), (x,))[0].square().sum()

    stacked = torch.func.stack_module_state(layers)
    expected = [layer(x)[0].square().sum() for layer in layers]
    torch.testing.assert_close(torch.vmap(loss)(*stacked), torch.stack(expected))
    for load, layer in zip(stacked[1]["expert_load"], layers, strict=True):
        assert torch.equal(load, layer.expert_load) and load.sum() == 5 * K
    buffers = {name: torch.zeros_like(value) for name, value in layers[0].named_buffers()}
    torch.func.grad(loss)(state, buffers)
    assert torch.equal(buffers["expert_load"], layers[0].expert_load)


def test_saves_no_copies_of_rows():
    layer, x = layer_of(torch.float32), rows_of(64, dtype=torch.float32)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    kept = {t.data_ptr(): t.numel() for t in saved if t.is_floating_point()}
    for tensor in (x, *layer.parameters()):
        kept.pop(tensor.data_ptr(), None)
    assert max(kept.values()) == 64 * K * 2 * H  # before the activation; nothing else of the experts
    assert sum(kept.values()) <= 64 * (K * 2 * H + 4 * E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_lie_in_memory_as_the_parameters_do(dtype):
    """Those of transposed views too, or autograd would copy them."""
    layer = layer_of(dtype)
    x = rows_of(40, dtype=dtype)
    routing, _ = layer.route(x, None)
    found = []
    for transposed in (False, True):
        stored = [w.detach().mT.contiguous() if transposed else w.detach() for w in (layer.w_in, layer.w_out)]
        stored = [w.requires_grad_() for w in stored]
        w_in, w_out = (w.mT if transposed else w for w in stored)
        y = run_experts(x, routing, w_in, w_out, "swiglu")
        gradients = torch.autograd.grad(y.square().sum(), stored, retain_graph=True)
        assert all(gradient.is_contiguous() for gradient in gradients)
        found.append([gradient.mT if transposed else gradient for gradient in gradients])
    for plain, view in zip(*found, strict=True):
        torch.testing.assert_close(view, plain)


def test_state_dict_names_are_stable():
    layer = layer_of(shared_hidden=8, router_bias=True)
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "router.weight": (E, D),
        "w_in": (E, D, 2 * H),
        "w_out": (E, H, D),
        "shared_in": (D, 16),
        "shared_out": (8, D),
        "router_bias": (E,),
    }


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dim": 0}, ValueError, "dim must be >= 1, got 0"),
        ({"hidden": 2.0}, TypeError, "hidden must be an int"),
        ({"num_experts": 1025}, ValueError, "num_experts must be at most 1024"),
        ({"top_k": 5}, ValueError, "top_k must be at most num_experts=4, got 5"),
        ({"activation": "relu"}, ValueError, "activation must be one of"),
        ({"score": "top"}, ValueError, "score must be one of"),
        ({"capacity_factor": 0}, ValueError, "capacity_factor must be > 0"),
        ({"shared_hidden": 0}, ValueError, "shared_hidden must be >= 1"),
        ({"aux_loss": "cv"}, ValueError, "aux_loss must be one of"),
        ({"aux_loss": {"z": "1"}}, TypeError, "aux_loss must have numbers"),
        ({"router_bias": 1}, TypeError, "router_bias must be a bool"),
        ({"jitter": 1.0}, ValueError, "jitter must be at least 0 and below 1"),
        ({"jitter": None}, TypeError, "jitter must be a number"),
        ({"aux_loss": ["z"]}, TypeError, "aux_loss must be a str"),
    ],
)
def test_errors_of_the_constructor(arguments, error, words):
    with pytest.raises(error, match=f"TokenMoE: {words}"):
        cx.nn.TokenMoE(**{"dim": 8, "hidden": 8, "num_experts": 4, **arguments})


def test_errors_of_forward():
    layer, x = layer_of(), rows_of(3).detach()
    with pytest.raises(ValueError, match=r"TokenMoE: x must have shape \(\.\.\., 24\), got \(3, 23\)"):
        layer(x[:, 1:])
    with pytest.raises(TypeError, match="TokenMoE: x must have the parameters' dtype, float64, got float32"):
        layer(x.float())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match="the parameters' dtype, float64, got float3"),
    ):
        layer(x.float())
    with pytest.raises(ValueError, match=r"TokenMoE: valid must have shape \(3,\), got \(2,\)"):
        layer(x, valid=torch.ones(2, dtype=torch.bool))
    with pytest.raises(TypeError, match="TokenMoE: valid"):
        layer(x, valid=torch.ones(3))
    with pytest.raises(ValueError, match="update_router_bias needs a module with router_bias=True"):
        layer.update_router_bias()
    x[1, 2] = torch.nan
    for options in ({}, {"router_bias": True}):
        with pytest.raises(ValueError, match="moe_route: logits hold NaN in 1 of 3 rows"):
            layer_of(**options)(x)
    output, _, _ = layer(x, valid=torch.tensor([True, False, True]))
    assert not output.isnan().any()


def test_grouped_product_of_torch_gives_the_same(monkeypatch):
    """What CUDA takes, on torch's own CPU kernels of it."""
    from camox_ops.nn import token_moe

    if token_moe._cuda_product is None:
        pytest.skip("this torch has no grouped_mm")
    a, b = torch.randn(20, 16), torch.randn(3, 16, 8)
    offsets = torch.tensor([0, 7, 7, 20])
    assert token_moe._is_grouped(a.bfloat16(), b.bfloat16())
    assert not token_moe._is_grouped(a[:, :9].bfloat16(), b.bfloat16())
    ours = token_moe._products(a, b, offsets)
    assert torch.allclose(token_moe._cuda_product(a, b, offs=offsets[1:].int()), ours, atol=1e-5)
    ours = token_moe._transposed_products(a, ours, offsets)
    theirs = token_moe._cuda_product(a.t(), token_moe._products(a, b, offsets), offs=offsets[1:].int())
    assert torch.allclose(theirs, ours, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_activations_match_torch(dtype, activation):
    """The kernels against torch's operators, which CUDA takes; sizes around a vector, and past the caches."""
    from camox_ops.nn import token_moe

    for rows, hidden in ((0, 5), (3, 1), (5, 37), (2, 64), *[(33, 2**16 + 2048)] * (dtype == torch.float32)):
        generator = torch.Generator().manual_seed(rows)
        wide = hidden * (2 if activation == "swiglu" else 1)
        h, grad = (3 * torch.randn(rows, n, generator=generator) for n in (wide, hidden))
        h, grad, scale = h.to(dtype), grad.to(dtype), torch.rand(rows, generator=generator)
        scale = scale.to(torch.float64 if dtype == torch.float64 else torch.float32)
        found = token_moe._activated(h, activation), *token_moe._activation_backward(h, grad, scale, activation)
        exact = h.double(), grad.double(), scale.double()
        truth = (
            token_moe._activate(exact[0], activation),
            *token_moe._plain_activation_backward(*exact, activation),
        )
        plain = token_moe._activate(h, activation), *token_moe._plain_activation_backward(h, grad, scale, activation)
        for i, (ours, same, wanted) in enumerate(zip(found, plain, truth, strict=True)):
            assert_close_to_reference(ours, same, wanted, scale64=h.shape[1] if i == 3 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    h, grad, scale, offsets = torch.ones(4, 6), torch.ones(4, 3), torch.ones(4), torch.tensor([0, 1, 4])
    matrices, check = torch.ones(2, 3, 5, dtype=dtype), torch.library.opcheck
    ops = torch.ops.camox_ops
    for code, gradient in enumerate((grad, h)):
        check(ops.moe_activation.default, (h.to(dtype), code))
        check(ops.moe_activation_backward.default, (h.to(dtype), gradient.to(dtype), scale, code))
    check(ops.moe_experts_mm.default, (grad.to(dtype), matrices, offsets))
    check(ops.moe_experts_mm_tn.default, (grad.to(dtype), h.to(dtype), offsets))


def test_errors_of_activations():
    forward, backward = torch.ops.camox_ops.moe_activation, torch.ops.camox_ops.moe_activation_backward
    h, grad, scale = torch.ones(2, 6), torch.ones(2, 3), torch.ones(2)
    with pytest.raises(REFUSAL, match="moe_activation: unknown activation code 2"):
        forward(h, 2)
    with pytest.raises(REFUSAL, match="moe_activation: h must have 2 dimensions, got 1"):
        forward(scale, 0)
    with pytest.raises(REFUSAL, match="moe_activation: h must have an even number of columns, got 3"):
        forward(grad, 0)
    with pytest.raises(REFUSAL, match="h must have rows of at least 1 element"):
        forward(torch.ones(2, 0), 1)
    with pytest.raises(REFUSAL, match=r"grad must have shape \(2, 3\) and scale \(2,\)"):
        backward(h, h, scale, 0)
    with pytest.raises(REFUSAL, match="scale must have dtype float32"):
        backward(h, grad, scale.double(), 0)


def test_errors_of_products():
    mm, tn = torch.ops.camox_ops.moe_experts_mm, torch.ops.camox_ops.moe_experts_mm_tn
    a, b, offsets = torch.ones(4, 3), torch.ones(2, 3, 5), torch.tensor([0, 1, 4])
    for bad in ([0, 5, 4], [1, 2, 4], [0, 3, 2], [0, 2, 5]):
        for product, other in ((mm, b), (tn, a)):
            with pytest.raises(REFUSAL, match="offsets must rise from 0 to at most the 4 rows"):
                product(a, other, torch.tensor(bad))
    with pytest.raises(REFUSAL, match="b must have shape"):
        mm(a, b, offsets[:2])
    with pytest.raises(REFUSAL, match="offsets must have shape"):
        mm(a, b, offsets.int())
    with pytest.raises(REFUSAL, match="a must have 2 dimensions and b 3"):
        mm(a, a, offsets)
    with pytest.raises(REFUSAL, match="b must have the dtype of x"):
        mm(a, b.double(), offsets)
    with pytest.raises(REFUSAL, match="as many rows"):
        tn(a, a[1:], offsets)
