"""cx.nn.SDTAEncoder and cx.nn.LinearAttention, and the example that measures their memory."""

import json

import example_path
import pytest
import torch
from helpers import DEVICE, assert_close_to_reference, module_numbers, random_image

import camox_ops as cx

stock = example_path.load("backbone")
IMAGES = [(2, 16, 5, 7), (1, 48, 12, 12), (2, 304, 3, 3), (2, 16, 1, 1)]


def encoders(dim, dtype=torch.float32, **options):
    """Ours and the stock module with the same weights; stock's weights are loaded, and must fit exactly."""
    torch.manual_seed(0)
    plain = stock.SDTAEncoder(dim, 8, drop_path=0.0, **options).to(DEVICE, dtype)
    ours = cx.nn.SDTAEncoder(dim, 8, drop_path=0.0, **options).to(DEVICE, dtype)
    ours.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(ours.state_dict(), strict=True)
    return ours, plain


@pytest.mark.parametrize("use_linear_attention", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_sdta_encoder_matches_stock(shape, layout, use_linear_attention):
    ours, plain = encoders(shape[1], use_linear_attention=use_linear_attention)
    x, grad = random_image(shape, layout=layout), random_image(shape, seed=1)
    mine, same = (module_numbers(module, module, x, grad) for module in (ours, plain))
    truth = module_numbers(plain.double(), plain, x.double(), grad.double())
    assert_close_to_reference(mine, same, truth)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_sdta_encoder_copies_no_heads(layout):
    ours, _ = encoders(16)
    x = random_image((2, 16, 6, 5), layout=layout)
    seen = {}
    ours.qkv.register_forward_hook(lambda module, inputs, y: seen.update(qkv=y))
    ours.proj.register_forward_pre_hook(lambda module, inputs: seen.update(mixed=inputs[0]))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(x)
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    assert seen["mixed"].is_contiguous(memory_format=memory_format)
    views = [t for t in kept if t.untyped_storage().data_ptr() == seen["qkv"].untyped_storage().data_ptr()]
    assert [view.shape for view in views] == [(2, 3, 8, 30, 2)]
    heads = [t for t in kept if t.numel() == x.numel() and t.dim() >= 4 and t.shape != x.shape]
    assert not heads


def test_sdta_encoder_dtype_under_autocast():
    ours, plain = encoders(16)
    x = random_image((2, 16, 5, 7))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        mine, same = ours(x), plain(x)
        assert mine.dtype == same.dtype == torch.float32
        assert ours(x.bfloat16()).dtype == plain(x.bfloat16()).dtype
    assert torch.allclose(mine, same, atol=0.05)


def test_sdta_encoder_dropout_and_attention_expert():
    torch.manual_seed(0)
    module = cx.nn.SDTAEncoder(16, 4, drop_path=0.5).to(DEVICE)
    x = random_image((2, 16, 8, 8))
    assert 0.3 < (module(x) == x).float().mean() < 0.7
    module.eval()
    assert torch.equal(module(x), module(x))
    expert = cx.nn.AttentionExpert(16).to(DEVICE)
    assert isinstance(expert.attention, cx.nn.SDTAEncoder) and expert.attention.drop_path.p == 0.1
    assert list(expert.state_dict()) == ["attention.qkv.weight", "attention.proj.weight", "attention.proj.bias"]


def plain_tokens(module, x, key_mask=None):
    """LinearAttention as a chain of PyTorch operators, normalize "sum"."""
    batch, length, dim = x.shape
    heads = module.qkv(x).view(batch, length, 3, module.num_heads, dim // module.num_heads).permute(2, 0, 3, 1, 4)
    q, k, v = heads
    q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    if key_mask is not None:
        k = k.masked_fill(key_mask[:, None, :, None], 0)
    out = q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(-2).unsqueeze(-1) + 1e-6)
    return module.proj(out.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("masked", [False, True])
def test_linear_attention_module(masked):
    torch.manual_seed(0)
    module = cx.nn.LinearAttention(24, 4, qkv_bias=True).to(DEVICE)
    x, grad = (random_image((2, 1, 33, 24), seed=seed)[:, 0] for seed in (0, 1))
    mask = torch.arange(33, device=DEVICE) % 3 == torch.arange(2, device=DEVICE)[:, None] if masked else None
    mine = module_numbers(module, lambda x: module(x, mask), x, grad)
    same = module_numbers(module, lambda x: plain_tokens(module, x, mask), x, grad)
    double = module.double()
    truth = module_numbers(double, lambda x: plain_tokens(double, x, mask), x.double(), grad.double())
    assert_close_to_reference(mine, same, truth)
    assert "normalize='sum'" in repr(module)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: cx.nn.SDTAEncoder(10, 8), "dim must be a positive multiple of num_heads=8, got 10"),
        (lambda: cx.nn.SDTAEncoder(8, 0), "num_heads must be >= 1, got 0"),
        (lambda: cx.nn.SDTAEncoder(8)(torch.rand(2, 4, 3, 3)), r"\(B, 8, H, W\), got \(2, 4, 3, 3\)"),
        (lambda: cx.nn.LinearAttention(0, 1), "dim must be a positive multiple of num_heads=1, got 0"),
        (lambda: cx.nn.LinearAttention(8)(torch.rand(2, 3, 4)), r"\(B, T, 8\), got \(2, 3, 4\)"),
        (lambda: cx.nn.LinearAttention(8, normalize="max")(torch.rand(2, 3, 8)), "normalize must be one of"),
    ],
)
def test_errors_of_modules(build, said):
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.slow
def test_memory_example(tmp_path, capsys, monkeypatch):
    example = example_path.load("linear_attention_memory", None)
    monkeypatch.setattr(example, "free_memory", lambda device: 60 << 20)
    example.main(["--sizes", "64", "192", "--repeats", "1", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "linear_attention_memory.json").read_text())["rows"]
    assert [row["positions"] for row in rows] == [256, 2304]
    small, large = (row["steps"] for row in rows)
    assert small["softmax, matrix"]["peak_mb"] > 3 * 8 * 256**2 * 4 / 1e6
    assert large["softmax, matrix"] is None and "does not fit" in shown
    assert large["linear, camox"]["peak_mb"] < large["linear, PyTorch"]["peak_mb"]
    assert (tmp_path / "linear_attention_memory.png").read_bytes().startswith(b"\x89PNG")
