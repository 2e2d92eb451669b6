"""The products of camox_ops.nn's projections: bfloat16 by csrc/gemm where the CPU has it, the rest by PyTorch."""

import pytest
import torch
from helpers import DEVICE, REFUSAL, assert_close_to_reference, on_device
from torch.autograd import gradcheck

from camox_ops.nn.projections import _MULTIPLIED as MULTIPLIED
from camox_ops.nn.projections import project, project_heads

pytestmark = on_device


def strided(shape, layout, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    if layout == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator, device="cpu").to(DEVICE).mT
    if layout == "sliced":
        wider = torch.randn(*shape[:-1], 2 * shape[-1] + 1, generator=generator, device="cpu").to(DEVICE)
        return wider[..., 1 : 1 + shape[-1]]
    return torch.randn(shape, generator=generator, device="cpu").to(DEVICE)


def product_numbers(product, *operands):
    operands = [x.detach().requires_grad_() for x in operands]
    out = product(*operands)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, operands, grad)]


@pytest.mark.parametrize("x_layout", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize("w_layout", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize("product", [project, project_heads])
def test_matches_reference(product, x_layout, w_layout):
    x_shape, w_shape = ((7, 5, 12), (12, 9)) if product is project else ((35, 3, 12), (3, 12, 9))
    plain = torch.matmul if product is project else lambda x, w: torch.einsum("mhk,hkn->mhn", x, w)
    x, weight = strided(x_shape, x_layout), strided(w_shape, w_layout, seed=1)
    exact = product_numbers(plain, x.double(), weight.double())
    assert_close_to_reference(product_numbers(product, x, weight), product_numbers(plain, x, weight), exact)


def in_bfloat16(product, x_layout, w_layout):
    """(ours, PyTorch's in bfloat16, PyTorch's in float64), each the product and the gradients of both operands."""
    x_shape, w_shape = ((2, 210, 400), (400, 200)) if product is project else ((200, 2, 390), (2, 390, 70))
    plain = torch.matmul if product is project else lambda x, w: torch.einsum("mhk,hkn->mhn", x, w)
    x, weight = strided(x_shape, x_layout).bfloat16(), strided(w_shape, w_layout, seed=1).bfloat16()
    exact = product_numbers(plain, x.double(), weight.double())
    return product_numbers(product, x, weight), product_numbers(plain, x, weight), exact


def assert_close_in_bfloat16(ours, expected):
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - expected.double()).norm() <= 2**-8 * expected.double().norm()


LAYOUTS = [(x, w) for x in ("plain", "transposed", "sliced") for w in ("plain", "transposed")]


@pytest.mark.parametrize(("x_layout", "w_layout"), LAYOUTS)
@pytest.mark.parametrize("product", [project, project_heads])
def test_matches_reference_in_bfloat16(product, x_layout, w_layout):
    ours, _, exact = in_bfloat16(product, x_layout, w_layout)
    assert_close_in_bfloat16(ours[0], exact[0])


@pytest.mark.parametrize(("x_layout", "w_layout"), LAYOUTS)
@pytest.mark.parametrize("product", [project, project_heads])
def test_grad_in_bfloat16(product, x_layout, w_layout):
    """Against PyTorch's in bfloat16: the gradient that flows in is rounded to it."""
    ours, theirs, _ = in_bfloat16(product, x_layout, w_layout)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert_close_in_bfloat16(one, other)


def plain_project(x, weight, bias):
    return x @ weight + bias


def plain_project_heads(x, weight, bias):
    return torch.einsum("mhk,hkn->mhn", x, weight) + bias


WITH_BIAS = [(project, plain_project), (project_heads, plain_project_heads)]


def operands_with_bias(product, inner=40, dtype=torch.float32):
    """x, weight and a bias of every second number. By csrc/gemm on the CPU where inner is large enough; two blocks of
    a sum from 385 on."""
    x_shape, w_shape = ((2, 35, inner), (inner, 49)) if product is project else ((35, 3, inner), (3, inner, 49))
    bias = strided((*w_shape[:-2], 98), "plain", seed=2)[..., ::2]
    return [x.to(dtype) for x in (strided(x_shape, "plain"), strided(w_shape, "plain", seed=1), bias)]


@pytest.mark.parametrize("inner", [12, 40, 400])
@pytest.mark.parametrize(("product", "plain"), WITH_BIAS)
def test_bias_matches_reference(product, plain, inner):
    operands = operands_with_bias(product, inner)
    exact = product_numbers(plain, *(x.double() for x in operands))
    assert_close_to_reference(product_numbers(product, *operands), product_numbers(plain, *operands), exact)


@pytest.mark.parametrize(("product", "plain"), WITH_BIAS)
def test_bias_in_bfloat16(product, plain):
    """Against PyTorch's in bfloat16: the gradient that flows in is rounded to it."""
    operands = operands_with_bias(product, dtype=torch.bfloat16)
    for ours, theirs in zip(product_numbers(product, *operands), product_numbers(plain, *operands), strict=True):
        assert_close_in_bfloat16(ours, theirs)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="an operator of the CPU")
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (33, 32), (385, 49), (1931, 700)])
def test_matches_reference_sums(depth, columns, layout):
    """Of one block of the sums and of several, whose last is short; the product has the bits of gemm."""
    a, b = strided((3, 35, depth), "transposed"), strided((3, depth, columns), layout, seed=1)
    out, sums = torch.ops.camox_ops.gemm_sums(a, b)
    assert torch.equal(out, torch.ops.camox_ops.gemm(a, b, False))
    assert_close_to_reference(sums, b.sum(1), b.double().sum(1))
    torch.library.opcheck(torch.ops.camox_ops.gemm_sums, (a, b))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="an operator of the CPU")
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("rows", [720, 30])
def test_matches_reference_of_several_blocks(rows, layout):
    """Of columns, sums and perhaps rows: each block of columns needs all rows again; 30 transposed ones stay packed."""
    a, b = strided((1, rows, 770), layout), strided((1, 770, 700), "plain", seed=1)
    out = torch.ops.camox_ops.gemm(a, b, False)
    assert_close_to_reference(out, torch.bmm(a, b), torch.bmm(a.double(), b.double()))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="an operator of the CPU")
def test_product_with_sums_of_nothing_and_errors():
    product = torch.ops.camox_ops.gemm_sums
    out, sums = product(torch.rand(2, 3, 4), torch.rand(2, 4, 0))
    assert out.shape == (2, 3, 0) and sums.shape == (2, 0)
    with pytest.raises(REFUSAL, match="gemm_sums: a must have dtype float32"):
        product(torch.rand(2, 3, 4).bfloat16(), torch.rand(2, 4, 5).bfloat16())
    for a, b, message in (
        (torch.rand(2, 3, 4), torch.rand(2, 5, 4), "gemm: b must have the heads of a"),
        (torch.rand(2, 3, 0), torch.rand(2, 0, 4), "gemm: a must have columns, got 0"),
        (torch.rand(2, 0, 4), torch.rand(2, 4, 4), "gemm_sums: a must have rows, got 0"),
    ):
        with pytest.raises(REFUSAL, match=message):
            product(a, b)


def test_bias_of_another_shape_or_dtype():
    for product, letters in ((project, "N"), (project_heads, "H, N")):
        x, weight, bias = operands_with_bias(product)
        with pytest.raises(ValueError, match=rf"{product.__name__}: bias must have shape \({letters}\) = .*, got "):
            product(x, weight, bias[..., 1:])
        with pytest.raises(TypeError, match=f"{product.__name__}: bias must have the dtype of x, float32, got float64"):
            product(x, weight, bias.double())
        with pytest.raises(TypeError, match=f"{product.__name__}: bias must be a torch.Tensor, got int"):
            product(x, weight, 1)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="threads of the CPU")
@pytest.mark.skipif(torch.bfloat16 not in MULTIPLIED, reason="PyTorch's product, whose bits its threads may change")
def test_same_bits_for_any_number_of_threads():
    x, weight = strided((300, 2, 400), "plain").bfloat16(), strided((2, 400, 500), "plain", seed=1).bfloat16()
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(product_numbers(project_heads, x, weight))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="an operator of the CPU")
def test_errors():
    product = torch.ops.camox_ops.gemm
    a = torch.rand(2, 4, 6).bfloat16()
    for b in (a[:1].mT, a, a.mT.float(), a[0].mT):
        with pytest.raises(REFUSAL, match="gemm"):
            product(a, b, False)
    with pytest.raises(REFUSAL, match="gemm: a must have dtype float32 or bfloat16"):
        product(a.double(), a.mT.double(), False)
    for bias in (torch.rand(2, 5), torch.rand(4), torch.rand(2, 8)[:, ::2]):
        with pytest.raises(REFUSAL, match=r"gemm: bias must have shape \(H, N\)"):
            product(a.float(), a.float().mT, False, bias)
    with pytest.raises(REFUSAL, match="gemm: bias is for products of float32"):
        product(a, a.mT, False, torch.rand(2, 4).bfloat16())


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    assert project(torch.rand(rows, 4), torch.rand(4, 6)).shape == (rows, 6)
    assert project_heads(torch.rand(rows, 2, 4), torch.rand(2, 4, 6)).shape == (rows, 2, 6)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 on the CPU")
def test_grad():
    x, weight = torch.rand(3, 2, 4).double().requires_grad_(), torch.rand(2, 4, 5).double().requires_grad_()
    assert gradcheck(project_heads, (x, weight))
    (gradient,) = torch.autograd.grad(project_heads(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="project_heads: second derivatives are not implemented"):
        gradient.square().sum().backward()
    assert gradcheck(project, (x, weight[0]))
    assert gradcheck(project_heads, (x, weight, torch.rand(2, 5).double().requires_grad_()))
    assert gradcheck(project, (x, weight[0], torch.rand(5).double().requires_grad_()))
    assert torch.autograd.gradgradcheck(project, (x, weight[0]), fast_mode=True)


def test_vmap():
    """Of products whose own kernels take them, 32 and more each way; gradients through the mapping and inside it."""
    x, weight = torch.randn(3, 2, 40, 2, 48).unbind(1)[0], torch.randn(2, 48, 64)
    for product, each, given in ((project, x[:, :, 0], weight[0]), (project_heads, x, weight)):
        expected = torch.stack([product(one, given) for one in each])
        torch.testing.assert_close(torch.vmap(product, (0, None))(each, given), expected)
        bias = given[..., 0, :]
        with_bias = torch.vmap(product, (0, None, None))(each, given, bias)
        torch.testing.assert_close(with_bias, expected + bias)

        def loss(one, product=product, given=given):
            return product(one, given).square().sum()

        expected = torch.stack([torch.func.grad(loss)(one) for one in each])
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(each), expected)


def test_autocast():
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert project(torch.rand(3, 4), torch.rand(4, 5)).dtype == torch.bfloat16
        assert project_heads(torch.rand(3, 2, 4), torch.rand(2, 4, 5)).dtype == torch.bfloat16
        assert project(torch.rand(3, 4), torch.rand(4, 5), torch.rand(5)).dtype == torch.bfloat16
        assert project_heads(torch.rand(3, 2, 4), torch.rand(2, 4, 5), torch.rand(2, 5)).dtype == torch.bfloat16
