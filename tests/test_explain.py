"""cx.explain: the kernels that C names, forward and backward, in every way that an op is called."""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import run_python_with_torch

import camox_ops as cx
from camox_ops import _C, _explain, _torch_private

WIDE = torch.ones(80), torch.zeros(80)


def norm(x):
    return cx.layer_norm2d(x, *WIDE, activation="gelu")


def image(*size, **options):
    return torch.randn(*(size or (2, 80, 9, 9)), **options)


def names(explained):
    return [call.op for call in explained.calls]


def test_records_of_one_call():
    weight = WIDE[0].clone().requires_grad_()
    x = image()
    with cx.explain() as calls:
        y = cx.layer_norm2d(x, weight, WIDE[1])
    (call,) = calls.calls
    assert (call.op, call.backward, call.device, call.isa) == ("layer_norm2d", False, "cpu", cx.isa())
    assert call.kernels == (f"camox_norm2d_forward_kernel_f32_{cx.isa()}",)
    assert [tuple(facts) for facts in call.inputs] == [
        ("x", (2, 80, 9, 9), "f32", "contiguous"),
        ("weight", (80,), "f32", "contiguous"),
        ("bias", (80,), "f32", "contiguous"),
    ]
    assert call.options == {"residual": None, "eps": 1e-6, "groups": 1, "activation": 0, "save": True}
    statistics = 4 * 2 * 81
    assert call.bytes == 4 * (x.numel() + y.numel() + 2 * 80) + statistics
    assert call.threads == torch.get_num_threads()
    assert call.thread == threading.current_thread().name
    assert 0 < call.seconds < 60


def test_forward_and_backward():
    x = image(requires_grad=True)
    with cx.explain() as calls:
        norm(x).sum().backward()
    assert names(calls) == ["layer_norm2d", "layer_norm2d_backward"]
    assert [call.backward for call in calls.calls] == [False, True]
    backward = calls.calls[1]
    assert [kernel.rpartition("_f32")[0] for kernel in backward.kernels] == [
        "camox_norm2d_backward_kernel",
        "camox_norm2d_reduce_kernel",
    ]
    assert backward.inputs[0].layout == "expanded"
    assert backward.bytes < 4 * (3 * x.numel())  # an expanded gradient is one number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_layouts(dtype):
    x = image().to(dtype, memory_format=torch.channels_last)
    with cx.explain() as calls:
        cx.edge_maps(x)
        cx.edge_maps(x[:, :, ::2])
    name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}[dtype]
    isa = "portable" if dtype == torch.float64 else cx.isa()
    assert [call.inputs[0][2:] for call in calls.calls] == [(name, "channels_last"), (name, "strided")]
    assert all(call.kernels == (f"camox_edge_forward_kernel_{name}_{isa}",) for call in calls.calls)
    said = "float64 has one body, the portable one"
    assert all((said in call.reasons) == (dtype == torch.float64) for call in calls.calls)


def bdh(length=8, dim=16, dtype=torch.float32, **options):
    q = torch.randn(1, 2, length, dim).to(dtype).requires_grad_()
    v = torch.randn(1, 2, length, 8).to(dtype)
    return cx.bdh_attention(q, v, *cx.rope_tables(dim, length), **options)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "quadratic form: T(N+2D) = 256 <= 4ND = 512"),
        ({"length": 64}, "state form: T(N+2D) = 2048 > 4ND = 512"),
        ({"length": 64, "causal": True}, "state form: T(N+D) = 1536 > 4ND = 512"),
        ({"length": 64, "softmax": True}, "quadratic form: softmax has no other"),
    ],
)
def test_reasons_that_c_gives(arguments, reason):
    with cx.explain() as calls:
        bdh(**arguments).sum().backward()
    assert all(reason in call.reasons for call in calls.calls)
    assert len(calls.calls) == 2


def test_reason_for_the_products_of_bfloat16():
    with cx.explain() as calls:
        bdh(dtype=torch.bfloat16).sum().backward()
    backward = calls.calls[1]
    if _C.has_avx512_bf16():
        assert backward.kernels == ("camox_bdh_backward_kernel_bf16_avx512_bf16",)
    else:
        assert "not avx512_bf16: this CPU or instruction set has no dot product of bfloat16" in backward.reasons


def test_reason_for_the_instruction_set():
    """A lower one is forced in a process of its own."""
    script = (
        "import torch, camox_ops as cx\n"
        "with cx.explain() as calls: cx.edge_maps(torch.ones(1, 1, 9, 9))\n"
        "print(*calls.calls[0].kernels, *calls.calls[0].reasons, sep='\\n')"
    )
    kernel, *reasons = run_python_with_torch(script, CAMOX_FORCE_ISA="portable").splitlines()
    assert kernel == "camox_edge_forward_kernel_f32_portable"
    has = "CAMOX_FORCE_ISA is portable" if "avx2" in cx.supported_isas() else "this CPU or build has portable"
    assert reasons == [f"not avx2: {has}"]


def test_every_way_of_a_call():
    """In place, without gradients, under vmap, in compiled code, by the operator's own name, of a module: once each."""
    x, tables = image(2, 3, 8, 8), cx.rope_tables(8, 8)
    compiled = torch.compile(lambda x: norm(x).sum(), backend="aot_eager", fullgraph=True)
    wide = image(requires_grad=True)
    compiled(wide)
    tables_of_token = [table[0] for table in tables]
    ways = {
        "rope_": lambda: cx.rope(x.clone(), *tables, inplace=True),
        "edge_maps": lambda: torch.vmap(lambda x: cx.edge_maps(x).sobel)(x[:, None]),
        "bdh_attention_step": lambda: cx.bdh_attention_step(
            torch.ones(1, 2, 8), torch.ones(1, 2, 4), *tables_of_token, None
        ),
        "structure_weight": lambda: cx.structure_weight(torch.ones(1, 1, 8, 8)),
        "frequency_bands": lambda: torch.ops.camox_ops.frequency_bands(x),
        "layer_norm2d": lambda: cx.nn.LayerNorm2d(3)(x),
    }
    for name, call in ways.items():
        with cx.explain() as calls:
            call()
        assert names(calls) == [name]
    with cx.explain() as calls:
        compiled(wide).backward()
    assert names(calls) == ["layer_norm2d", "layer_norm2d_backward"]


def test_calls_that_run_no_kernel_are_not_listed():
    with cx.explain() as calls:
        with pytest.raises(ValueError, match="eps"):
            cx.edge_maps(image(), eps=-1)
        with torch._subclasses.FakeTensorMode():
            cx.edge_maps(torch.empty(1, 1, 4, 4))
        torch.relu(image())
    assert calls.calls == []
    assert "no op of camox_ops was called" in str(calls)


def test_every_operator_is_observed():
    """Those that have a way of their own are listed in _torch_private."""
    operators = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("camox_ops::")
    }
    assert {*_torch_private._observe, *_torch_private.WITHOUT_GRADIENT} == operators
    assert not {*_torch_private._observe} & {*_torch_private.WITHOUT_GRADIENT}


def operators_as_they_are():
    packets = [getattr(torch.ops.camox_ops, name) for name in _torch_private._observe]
    return [(hash(p), hash(p.default), p._op, p.default._op) for p in packets]


def test_nothing_is_left_behind():
    before = operators_as_they_are()
    with pytest.raises(KeyError), cx.explain() as calls:
        norm(image())
        assert [found[:2] for found in operators_as_they_are()] == [found[:2] for found in before]
        raise KeyError
    assert operators_as_they_are() == before
    norm(image())
    assert names(calls) == ["layer_norm2d"]
    assert _C.take_notes() == ""


def test_nested_and_entered_again():
    x = image()
    with cx.explain() as outer:
        norm(x)
        with cx.explain() as inner, outer:
            norm(x)
            cx.edge_maps(x)
        norm(x)
    assert names(inner) == ["layer_norm2d", "edge_maps"]
    assert names(outer) == ["layer_norm2d", "layer_norm2d", "edge_maps", "layer_norm2d"]
    with outer:
        cx.edge_maps(x)
    assert len(outer.calls) == 5
    with pytest.raises(TypeError, match=r"explain: model must be an nn\.Module or None, got 3"):
        cx.explain(3)


def test_left_without_being_entered():
    calls = cx.explain()
    with pytest.raises(RuntimeError, match="explain: it is left more often than it was entered"):
        calls.__exit__(None, None, None)
    with calls:
        norm(image())
    assert names(calls) == ["layer_norm2d"]


def test_a_generator_that_is_collected_while_another_block_begins(monkeypatch):
    """It ends in the middle of what the other does under the lock."""

    def generator():
        with cx.explain():
            yield

    class Collecting(list):
        def append(self, item):
            running.clear()
            super().append(item)

    def enter_and_leave():
        with cx.explain() as calls:
            norm(image())
        found.extend(names(calls))

    monkeypatch.setattr(_explain, "_open", Collecting())
    running, found = [], []
    other = generator()
    next(other)
    running.append(other)
    del other
    thread = threading.Thread(target=enter_and_leave, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and found == ["layer_norm2d"] and not _explain._open


def test_threads_are_all_recorded():
    def work():
        for _ in range(20):
            norm(image(requires_grad=True)).sum().backward()

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(3)]
    with cx.explain() as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for thread in threads:
        own = [call for call in calls.calls if call.thread == thread.name]
        assert [call.op for call in own] == ["layer_norm2d", "layer_norm2d_backward"] * 20
        assert all(len(call.kernels) == 1 + call.backward for call in own)


def test_the_table_sums_by_case():
    x = image()
    model = cx.nn.EdgeExpert(8)
    model.edge_fusion = model.fusion.register_forward_hook(lambda *_: None)
    with cx.explain(model) as calls:
        for _ in range(3):
            norm(x)
        norm(x[:1])
        bdh(dtype=torch.float64)
    # each call says why its kernel is not of a wider instruction set, where there is one
    table = [line for line in str(calls).splitlines() if not line.strip().startswith(("not avx2:", "not avx512:"))]
    assert table[0].split() == ["op", "calls", "ms", "GB/s"]
    assert table[1].split()[:2] == ["layer_norm2d", "3"]
    assert table[2] == "    x f32[2,80,9,9], weight f32[80], bias f32[80]"
    assert table[3] == f"    norm2d_forward_kernel_f32_{cx.isa()}"
    assert table[4].split()[:2] == ["layer_norm2d", "1"]
    assert "    quadratic form: T(N+2D) = 256 <= 4ND = 512" in table
    assert "not fused: the model" in table
    assert table[-1].startswith(f"kernels: {cx.isa()}, threads: up to {torch.get_num_threads()}")
    assert repr(calls) == "<explain: 5 calls>"


def test_to_dict_is_json():
    with cx.explain() as calls:
        bdh().sum().backward()
    found = json.loads(json.dumps(calls.to_dict()))
    assert [call["op"] for call in found["calls"]] == ["bdh_attention", "bdh_attention_backward"]
    assert found["calls"][0]["inputs"][0] == {
        "name": "q",
        "shape": [1, 2, 8, 16],
        "dtype": "f32",
        "layout": "contiguous",
    }
    assert found["isa"] == cx.isa()
    assert found["not_fused"] == {}


def test_a_call_outside_runs_the_same_code_as_before():
    """The same functions are called after as before, none of them explain's; in C one comparison is all there is."""
    x, weight, bias = image(1, 1, 2, 2), torch.ones(1), torch.zeros(1)

    def called():
        seen = []
        sys.setprofile(lambda frame, event, _: seen.append(frame.f_code) if event == "call" else None)
        cx.layer_norm2d(x, weight, bias)
        sys.setprofile(None)
        return seen

    called()
    before = called()
    with cx.explain():
        within = called()
    assert called() == before
    files = [{Path(code.co_filename).name for code in codes} for codes in (before, within)]
    assert "_explain.py" not in files[0] and "_explain.py" in files[1]


def test_a_record_of_cuda():
    """Without a GPU: what is written of a call there. C of the CUDA part notes nothing."""
    x = image(1, 1, 4, 4)
    with cx.explain() as calls:
        _explain._record("edge_maps", (x, 1e-8, 0), {}, (x, x, x), torch.device("cuda:1"), None)
    (call,) = calls.calls
    assert (call.device, call.isa, call.threads, call.seconds) == ("cuda:1", "cuda", 0, None)
    assert call.kernels == ("camox_edge_maps_cuda",)
    assert str(calls).splitlines()[1].split() == ["edge_maps", "1", "0.000", "-"]
    assert "    cuda:1" in str(calls).splitlines()


def test_lists_of_tensors_are_inputs():
    grads = [torch.ones(3), torch.ones(4, 5)]
    with cx.explain() as calls:
        norms = cx.grad_group_norms(grads, [0, 1], 2)
        cx.scale_grads_(grads, [0, 1], norms)
    assert [call.op for call in calls.calls] == ["grad_group_norms", "scale_grads_"]
    assert [facts.name for facts in calls.calls[1].inputs] == ["grads[0]", "grads[1]", "scales"]
    assert "kernel" in json.dumps(calls.to_dict())
