"""patch on BDH's attention: strictly causal as pathwaycom/bdh has it, over all tokens as Vision-BDH has it."""

import copy
import math

import pytest
import torch
from torch import nn

import camox_ops as cx

SIZE, WIDTH = 64, 24


class Attention(nn.Module):
    """Keys are the queries; frequencies a buffer, or a frozen parameter."""

    def __init__(self, causal=True, softmax=False, parameter=False, shift=0):
        super().__init__()
        pairs = 1.0 / 2.0**16 ** (torch.arange(0, SIZE, 2) / SIZE) / (2 * math.pi)
        freqs = pairs.repeat_interleave(2).view(1, 1, 1, SIZE)
        if parameter:
            self.freqs = nn.Parameter(freqs, requires_grad=False)
        else:
            self.register_buffer("freqs", freqs)
        self.causal, self.softmax, self.shift = causal, softmax, shift

    def rotated(self, x):
        phases = torch.arange(x.shape[2], dtype=self.freqs.dtype).view(1, 1, -1, 1) * self.freqs
        phases = (phases % 1) * (2 * math.pi)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).view(*x.size())
        return (x * phases.cos()).to(x.dtype) + (turned * phases.sin()).to(x.dtype)

    def forward(self, Q, K, V):
        assert self.freqs.dtype == torch.float32
        assert K is Q
        rotated = self.rotated(Q)
        scores = rotated @ rotated.mT
        if self.causal:
            scores = scores.tril(diagonal=-1 + self.shift)
        if self.softmax:
            scores = (scores / math.sqrt(SIZE)).softmax(-1)
        return scores @ V


class HalfSplit(Attention):
    """krychu's: pairs (i, i + N/2)."""

    def rotated(self, x):
        phases = torch.arange(x.shape[2], dtype=self.freqs.dtype).view(1, 1, -1, 1) * self.freqs * 2 * math.pi
        first, second = x.chunk(2, -1)
        return x * phases.cos() + torch.cat((-second, first), -1) * phases.sin()


KINDS = {
    "strictly causal": {},
    "all tokens": {"causal": False, "parameter": True},
    "softmax": {"causal": False, "softmax": True, "parameter": True},
}


def inputs(heads=2, length=20):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, heads, length, SIZE, generator=generator).relu().requires_grad_()
    return q, torch.randn(3, 1, length, WIDTH, generator=generator).requires_grad_()


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_matches(name, by_name):
    module = Attention(**KINDS[name])
    plain = copy.deepcopy(module)
    report = cx.patch(module)
    assert [entry.recogniser for entry in report.patched] == ["bdh_attention"]
    q, v = inputs()
    for _ in range(2):
        results = []
        for m in (module, plain):
            y = m(Q=q, K=q, V=v) if by_name else m(q, q, v)
            results.append([y, *torch.autograd.grad(y.square().mean(), [q, v])])
        for mine, original in zip(*results, strict=True):
            assert (mine - original).abs().max() <= 1e-5 * original.abs().max()
    assert report.patched and report.patched[0].first_error is not None, report
    assert list(module.state_dict()) == list(plain.state_dict()) and set(vars(module)) == set(vars(plain))


def test_other_calls_go_to_the_original():
    module = Attention()
    cx.patch(module)
    q, v = inputs()
    module(q, q, v)
    with pytest.raises(AssertionError):
        module(q, q.clone(), v)
    with pytest.raises(TypeError):
        module(q, q)
    other = torch.randn_like(module.freqs)
    module.freqs.copy_(other)  # used as they are
    torch.testing.assert_close(module(q, q, v), Attention.forward(module, q, q, v), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("made", [lambda: Attention(shift=1), lambda: Attention(softmax=True), HalfSplit])
def test_not_taken(made):
    assert not cx.patch(made()).patched


def test_bfloat16_and_compile():
    module = Attention().eval()
    plain = copy.deepcopy(module)
    cx.patch(module)
    q, v = (x.detach().bfloat16() for x in inputs())
    for _ in range(2):
        ours, theirs = module(q, q, v), plain(q, q, v)
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).abs().max() < 0.05 * theirs.double().abs().max()
    q, v = inputs()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, q, v), plain(q, q, v), rtol=1e-3, atol=1e-3)
