"""patch on blocks around nn.MultiheadAttention, whose graph it rewrites: K-1's tree node and its relatives."""

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import default_device
from torch import nn

import camox_ops as cx

WIDTH, LENGTH, BATCH = 32, 24, 8


class Node(nn.Module):
    """Post-norm; asks for weights that it does not use; the children are not its own forward's."""

    def __init__(self, p=0.1, depth=1):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, dropout=p, batch_first=True)
        self.attn_norm = nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, WIDTH), nn.Dropout(p))
        self.ff_norm = nn.LayerNorm(WIDTH)
        self.children_of_node = nn.ModuleList(Node(p, depth - 1) for _ in range(2 if depth else 0))
        self.counts = {}

    def forward(self, x, mask=None):
        mixed, _ = self.attn(x, x, x, attn_mask=mask, is_causal=True)
        x = self.attn_norm(x + mixed)
        return self.ff_norm(x + self.ff(x))


class PreNorm(nn.Module):
    """GELU as a function, dropouts as modules of their own, keys and values from elsewhere."""

    def __init__(self, p=0.1):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=p, batch_first=True)
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(p)

    def forward(self, x, context):
        x = self.one(self.drop(self.attention(x, context, context)[0]) + x)
        return x + self.second(F.gelu(self.first(self.two(x))))


class OwnsABlock(nn.Module):
    """Calls what is inside a block of a list itself; a Sequential in a Sequential."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(WIDTH)})])
        self.ff = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU()), nn.Linear(64, WIDTH)))

    def forward(self, x):
        x = self.blocks[0]["norm"](x + self.attn(x, x, x)[0])
        return self.ff(x)


class UsesWeights(Node):
    def forward(self, x, mask=None):
        mixed, weights = self.attn(x, x, x, attn_mask=mask)
        return mixed * weights.mean(-1, keepdim=True)


class AsksForSizes(Node):
    def forward(self, x, mask=None):
        return super().forward(x, mask) if len(x) > 1 else x


class KeepsState(Node):
    def forward(self, x, mask=None):
        self.last = super().forward(x, mask)
        return self.last


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def inputs(count=1):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, LENGTH, WIDTH, generator=generator, requires_grad=True) for _ in range(count)]


def numbers(module, *args):
    y = module(*args)
    wanted = [a for a in (*args, *module.parameters()) if a.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().mean(), wanted, allow_unused=True)]


def close(ours, theirs):
    for mine, original in zip(ours, theirs, strict=True):
        assert (mine is None) == (original is None)
        if mine is not None:
            torch.testing.assert_close(mine, original, rtol=1e-4, atol=1e-5)


def outermost(report):
    return [entry.recogniser for entry in report.patched if entry.name == ""]


def calls_of(function):
    with torch.profiler.profile() as profile:
        function()
    return {event.key: event.count for event in profile.key_averages()}


def test_a_tree_of_nodes():
    torch.manual_seed(0)
    root = Node(p=0.0)
    plain = copy.deepcopy(root)
    report = cx.patch(root)
    assert outermost(report) == ["attention_block"]
    assert sum(entry.recogniser == "attention_block" for entry in report.patched) == 3
    (x,) = inputs()
    for mask in (CAUSAL, torch.zeros(LENGTH, LENGTH).masked_fill(CAUSAL, -math.inf)):
        for _ in range(2):
            close(numbers(root, x, mask), numbers(plain, x, mask))
    assert all(entry.patched for entry in report.entries), report
    calls = calls_of(lambda: numbers(root, x, CAUSAL))
    assert calls["camox_ops::short_attention_packed"] == 1 and calls["camox_ops::dropout_add_layer_norm"] == 2
    assert calls["camox_ops::bias_gelu"] == 1 and "aten::softmax" not in calls
    # a mask that is not causal, whatever is_causal says
    other = CAUSAL.t().contiguous()
    close(numbers(root, x, other), numbers(plain, x, other))
    with pytest.raises(RuntimeError, match="attn_mask"):  # as the original does
        root(x)


def test_the_default_device_is_neither_the_proofs_nor_the_graphs():
    class Shifted(Node):
        def forward(self, x, mask=None):
            return super().forward(x, mask) + torch.zeros(x.shape[-1])

    module = Shifted()
    expected = cx.patch(copy.deepcopy(module))
    with default_device("meta"):
        report = cx.patch(module)
    assert outermost(report) == ["attention_block"]
    assert report.to_dict() == expected.to_dict()
    for variant in type(module)._camox_patch.settings.variants:
        assert "zeros" in variant.source and "device" not in variant.source


def test_dropout_is_where_it_was():
    for module, count in ((Node(0.5), 1), (PreNorm(0.5), 2)):
        report = cx.patch(module)  # the proof has equal masks
        assert outermost(report) == ["attention_block"], report
        args = (*inputs(), CAUSAL) if count == 1 else inputs(2)
        module(*args)
        assert all(entry.patched for entry in report.entries), report
        assert not torch.equal(module(*args), module(*args))


def test_other_keys_and_a_function():
    torch.manual_seed(0)
    module = PreNorm(p=0.0)
    plain = copy.deepcopy(module)
    assert outermost(cx.patch(module)) == ["attention_block"]
    args = inputs(2)
    for _ in range(2):
        close(numbers(module, *args), numbers(plain, *args))
    calls = calls_of(lambda: numbers(module, *args))
    assert calls["camox_ops::bias_gelu"] == calls["camox_ops::dropout_add_layer_norm"] == 1


def test_hooks_and_modules_that_come_later():
    torch.manual_seed(0)
    module = Node(p=0.0)
    plain = copy.deepcopy(module)
    cx.patch(module)
    (x,) = inputs()
    module(x, CAUSAL)
    seen = []
    module.attn.register_forward_hook(lambda attention, args, y: seen.append(y[1].shape))
    module.attn_norm.register_forward_hook(lambda norm, args, y: y * 2)
    module.ff[1].register_forward_hook(lambda gelu, args, y: y + 1)
    plain.attn_norm.register_forward_hook(lambda norm, args, y: y * 2)
    plain.ff[1].register_forward_hook(lambda gelu, args, y: y + 1)
    close(numbers(module, x, CAUSAL), numbers(plain, x, CAUSAL))
    assert seen == [(BATCH, LENGTH, LENGTH)]  # the weights, which only a hook sees
    norm, gelu = nn.LayerNorm(x.shape[-1], bias=False), nn.GELU(approximate="tanh")
    for model in (module, plain):
        model.ff_norm, model.ff[1] = norm, gelu
    close(numbers(module, x, CAUSAL), numbers(plain, x, CAUSAL))
    norm = nn.LayerNorm(x.shape[1:])
    for model in (module, plain):
        model.ff_norm = norm
    close(numbers(module, x, CAUSAL), numbers(plain, x, CAUSAL))
    for model in (module, plain):
        model.ff.append(nn.Tanh())
    close(numbers(module, x, CAUSAL), numbers(plain, x, CAUSAL))


def test_modules_of_modules():
    torch.manual_seed(0)
    module = OwnsABlock()
    plain, seen = copy.deepcopy(module), []
    assert outermost(cx.patch(module)) == ["attention_block"]
    (x,) = inputs()
    for _ in range(2):
        close(numbers(module, x), numbers(plain, x))
    calls = calls_of(lambda: numbers(module, x))
    assert calls["camox_ops::bias_gelu"] == calls["camox_ops::dropout_add_layer_norm"] == 1
    module.ff[0][0].register_forward_hook(lambda *_: seen.append(1))
    close(numbers(module, x), numbers(plain, x))
    assert seen == [1]


def test_the_sequential_has_a_hook():
    module, seen = Node(p=0.0), []
    cx.patch(module)
    module.ff.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        module(*inputs(), CAUSAL)
    assert seen == [1, 1]


@pytest.mark.parametrize("kind", [UsesWeights, AsksForSizes, KeepsState])
def test_not_taken(kind):
    report = cx.patch(kind(depth=0))
    assert outermost(report) == [], report


def test_compile():
    torch.manual_seed(0)
    module = Node(p=0.0, depth=0)
    plain = copy.deepcopy(module)
    cx.patch(module)
    (x,) = inputs()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, CAUSAL), plain(x, CAUSAL), rtol=1e-4, atol=1e-5)


def test_other_modules_run_while_a_graph_is_traced():
    """fx sees the calls of all modules of the process, those of other threads too."""
    elsewhere, found = nn.Linear(4, 4), []

    class Meanwhile(PreNorm):
        def forward(self, x, context):
            found.append(elsewhere(torch.ones(2, 4)))
            return super().forward(x, context)

    assert outermost(cx.patch(Meanwhile())) == ["attention_block"]
    assert found and all(torch.equal(y, elsewhere(torch.ones(2, 4))) for y in found)


@pytest.mark.slow
def test_cycles_do_not_grow():
    module = Node(depth=0)
    counts = []
    for number in range(8):
        cx.patch(module, verify=False)
        cx.unpatch(module)
        gc.collect()
        if number in (3, 7):
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 8
