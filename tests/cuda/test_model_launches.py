"""scripts/cuda_model.py launches what the launchers do: their grids and blocks at small sizes."""

import math
import sys
from pathlib import Path

import bdh_cases
import bias_gelu_cases
import box_cases
import dropout_cases
import emulator
import grad_norms_cases
import linear_attention_cases
import moe_cases
import norm2d_cases
import pytest
import rope_cases
import structure_loss_cases
import torch
from helpers import random_image

sys.path.append(str(emulator.ROOT))

from camox_ops import reference
from scripts import cuda_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Recorder:
    """The emulator's runtime, whose launches are kept: (kernel, blocks, threads of a block)."""

    def __init__(self, runtime):
        self.runtime, self.launches = runtime, []

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def camox_emulator_take_runs(self):
        text = self.runtime.camox_emulator_take_runs()
        for line in text.decode().splitlines():
            path, offset, blocks, threads, name = line.split("\t")
            kernel = emulator._symbols(emulator.BUILD / Path(path).name).get(int(offset), name)
            self.launches.append((emulator.short_name(kernel), int(blocks), int(threads)))
        return text


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder(emulator._runtime())
    monkeypatch.setattr(emulator, "_runtime", lambda: recorder)
    return recorder


def modelled(cases):
    launches = [each for case in cases for each in case.launches if not getattr(each, "of_last_block", False)]
    # the emulator has two multiprocessors, which hold 64 blocks each
    launches = [each.of(2, 64) if isinstance(each, cuda_model.Divided) else each for each in launches]
    return [(launch.kernel, launch.blocks, launch.threads) for launch in launches]


@pytest.mark.parametrize(("rows", "columns"), [(90, 640), (70, 16), (4500, 8)])
def test_rows(monkeypatch, recorder, rows, columns):
    monkeypatch.setattr(cuda_model, "ROWS", rows)
    monkeypatch.setattr(cuda_model, "WIDTH", columns)
    for name, dtype in DTYPES.items():
        x = random_image((1, 1, rows, columns), dtype)[0, 0]
        weight = torch.ones(columns)
        bias_gelu_cases.run(x, weight, x, None, 0.0)
        cases = cuda_model.row_cases(name)
        if columns <= 512:  # the model has a warp for each row
            dropout_cases.norm(x, x, weight, weight, x, dropout_cases.SEED, 0.3)
        else:
            cases = [case for case in cases if case.op == "bias_gelu"]
        assert recorder.launches == modelled(cases)
        recorder.launches.clear()


def test_elements(monkeypatch, recorder):
    monkeypatch.setattr(cuda_model, "ELEMENTS", 9000)
    for name, dtype in DTYPES.items():
        x = torch.ones(9000).to(dtype)
        dropout_cases.dropout(x, dropout_cases.SEED, 0.3)
        dropout_cases.sparse_gate(x, x, dropout_cases.SEED, 0.3)
        dropout_cases.sparse_gate_backward(x, x, x, dropout_cases.SEED, 0.3)
        assert recorder.launches == modelled(cuda_model.dropout_cases(name))
        recorder.launches.clear()


# of channels_last, edge's backward: a block has all columns, some, or some of the channels
@pytest.mark.parametrize("size", [(1, 8, 33, 40), (1, 80, 9, 24), (1, 272, 5, 16)])
def test_images(monkeypatch, recorder, size):
    for name, value in zip(("BATCH", "CHANNELS", "HEIGHT", "WIDTH"), size, strict=True):
        monkeypatch.setattr(cuda_model, name, value)
    cases = emulator.all_cases()
    for name, dtype in DTYPES.items():
        for op in ("edge", "spatial_gradient", "bands"):
            for layout in ("contiguous", "channels_last"):
                x = random_image(size, dtype, layout)
                maps = cases[op].OP.forward(x)
                cases[op].OP.backward(x, maps)
        assert recorder.launches == modelled(cuda_model.image_cases(name))
        recorder.launches.clear()


@pytest.mark.parametrize(
    "size, layouts",
    [
        ((2, 16, 9, 8), ["contiguous", "channels_last"]),
        ((1, 80, 40, 30), ["contiguous", "channels_last"]),
        ((1, 640, 3, 8), ["channels_last"]),
    ],
)
def test_norm(monkeypatch, recorder, size, layouts):
    for name, value in zip(("BATCH", "CHANNELS", "HEIGHT", "WIDTH", "ELEMENTS"), (*size, math.prod(size)), strict=True):
        monkeypatch.setattr(cuda_model, name, value)
    cases = {"contiguous": cuda_model.norm_cases, "channels_last": cuda_model.norm_lines_cases}
    for name, dtype in DTYPES.items():
        for layout in layouts:
            norm2d_cases.forward_and_gradients(*norm2d_cases.norm2d_inputs(size, dtype, layout))
            assert recorder.launches == modelled(cases[layout](name))
            recorder.launches.clear()


def test_rope(monkeypatch, recorder):
    size = (2, 3, 40, 64)
    for name, value in zip(("BATCH", "HEADS", "TOKENS", "HEAD_DIM"), size, strict=True):
        monkeypatch.setattr(cuda_model, name, value)
    for name, dtype in DTYPES.items():
        x, tables = rope_cases.rope_input(size, dtype), rope_cases.rope_tables(40, 32)
        rope_cases.forward(x, *tables)
        rope_cases.backward(x, x, *tables)
        assert recorder.launches == modelled(cuda_model.rope_cases(name))
        recorder.launches.clear()


@pytest.mark.parametrize("size", [(2, 3, 64, 200, 72), (1, 5, 130, 104, 72), (1, 2, 130, 200, 136)])
def test_products(monkeypatch, recorder, size):
    batch, _, tokens, columns, values = size
    monkeypatch.setattr(cuda_model, "PRODUCTS", (("", *size),))
    q, tables = rope_cases.rope_input(size[:4], torch.bfloat16), rope_cases.rope_tables(tokens, columns // 2)
    v = torch.randn(batch, 1, tokens, values, dtype=torch.bfloat16)
    bdh_cases.forward(q, v, *tables, form=1 if tokens == 64 else 2)
    assert recorder.launches == modelled(cuda_model.product_cases("bfloat16"))


def test_moe(monkeypatch, recorder):
    monkeypatch.setattr(cuda_model, "MOE_ROWS", 5)
    monkeypatch.setattr(cuda_model, "MOE_ROW_SIZE", 8200)
    weights, experts, _, offsets, _, position = reference.moe_route(moe_cases.moe_logits(5, 4), cuda_model.MOE_TOP_K)
    routed = experts, offsets, position
    for name, dtype in DTYPES.items():
        x, y = torch.ones(5, 8200, dtype=dtype), torch.ones(15, 8200, dtype=dtype)
        moe_cases.dispatch(x, *routed)
        moe_cases.combine(y, None, *routed)
        moe_cases.combine(y, weights, *routed)
        moe_cases.combine_backward(x, y, weights, *routed)
        assert recorder.launches == modelled(cuda_model.moe_cases(name))
        recorder.launches.clear()


def test_moe_route(monkeypatch, recorder):
    monkeypatch.setattr(cuda_model, "MOE_ROUTES", (("moe_route", 300, 9, 3), ("moe_route of 8", 34000, 8, 2)))
    for name, dtype in DTYPES.items():
        for _, rows, experts, top_k in cuda_model.MOE_ROUTES:
            logits = moe_cases.moe_logits(rows, experts, dtype)
            weights, chosen, _, _, _, position = moe_cases.route(logits, top_k, score="softmax_topk")
            moe_cases.route_backward(weights, logits, chosen, position, score="softmax_topk")
        assert recorder.launches == modelled(cuda_model.moe_route_cases(name))
        recorder.launches.clear()


def test_linear_attention(monkeypatch, recorder):
    size = (2, 3, 136, 32)
    for name, value in zip(("LA_BATCH", "LA_HEADS", "LA_LENGTH", "LA_DIM"), size, strict=True):
        monkeypatch.setattr(cuda_model, name, value)
    monkeypatch.setattr(cuda_model, "attention_chunks", lambda processors, backward: (3, 136 / 3))
    q, k, v, grad = linear_attention_cases.heads((*size, 32), torch.bfloat16, "image")
    _, *state = linear_attention_cases.forward(q, k, v, chunk=64)
    linear_attention_cases.backward([grad], q, k, v, state, chunk=64)
    assert recorder.launches == modelled(cuda_model.linear_attention_cases("bfloat16"))


def test_gradients(monkeypatch, recorder):
    sizes = (20000, 40, 8192) * 12  # more pieces than the emulator's blocks
    for name, value in {"SIZES": sizes, "BATCH": grad_norms_cases.BATCH, "BLOCKS": grad_norms_cases.BLOCKS}.items():
        monkeypatch.setattr(cuda_model, f"GRAD_{name}", value)
    for name, dtype in DTYPES.items():
        grads = grad_norms_cases.gradients(dtype, sizes)
        groups = [i % 5 for i in range(len(sizes))]
        grad_norms_cases.norms(grads, groups)
        grad_norms_cases.scale(grads, list(enumerate(groups)), torch.full((5,), 0.5))
        assert recorder.launches == modelled(cuda_model.grad_cases(name))
        recorder.launches.clear()


def test_structure_loss(monkeypatch, recorder):
    monkeypatch.setattr(cuda_model, "STRUCTURE_PIXELS", 2400)
    monkeypatch.setattr(cuda_model, "STRUCTURE_BATCHES", (("structure_loss", 2), ("structure_loss of 3", 3)))
    for name, dtype in DTYPES.items():
        for _, images in cuda_model.STRUCTURE_BATCHES:
            inputs = structure_loss_cases.inputs_of((images, 2400), dtype, of_mask=dtype)
            structure_loss_cases.run(*inputs, **structure_loss_cases.OPTIONS[0])
        assert recorder.launches == modelled(cuda_model.structure_cases(name))
        recorder.launches.clear()


def test_box(monkeypatch, recorder):
    monkeypatch.setitem(cuda_model.BLOCK_SHARED, 2, 232448)  # the emulator's
    shapes = (2, 5, 40, 40), (1, 1, 20, 1200)
    for name, value in zip(("BOX_SHAPE", "STRUCTURE_SHAPE"), shapes, strict=True):
        monkeypatch.setattr(cuda_model, name, value)
    for name, dtype in DTYPES.items():
        for layout in ("contiguous", "channels_last"):
            for window in cuda_model.BOX_WINDOWS:
                box_cases.run(random_image(shapes[0], dtype, layout), "MEAN", (window, window))
        window = (cuda_model.STRUCTURE_WINDOW,) * 2
        box_cases.run(random_image(shapes[1], dtype), "STRUCTURE_WEIGHT", window)
        assert recorder.launches == modelled(cuda_model.box_cases(name))
        recorder.launches.clear()
