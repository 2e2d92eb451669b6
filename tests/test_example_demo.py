"""The example's demo: twins, comparison with float64, memory, report, and the whole of it."""

import copy
import functools
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import example_path
import numpy as np
import pytest
import torch

one_thread = example_path.one_thread
MODULES = ("balance", "demo_run", "duel", "memory", "parity", "report", "steptime", "twins")
balance, demo_run, duel, memory, parity, report, steptime, twins = map(example_path.load, MODULES)
common_duel, common_memory, common_parity, common_report = (
    example_path.load(name, "common") for name in ("duel", "memory", "parity", "report")
)

ROOT = Path(__file__).resolve().parents[1]
SIZE = 32


@pytest.fixture(scope="module")
def dataset():
    return example_path.load("data").BuiltinSet("train", SIZE, augmented=True, count=24)


@pytest.fixture(scope="module")
def batch(dataset):
    return next(iter(duel.batches(dataset, 6, 1)))


@functools.cache
def built_once(dataset):
    return twins.build_twins(next(iter(duel.batches(dataset, 24, 1)))[0])


def build(dataset):
    return copy.deepcopy(built_once(dataset))


@pytest.fixture(scope="module")
def compared(dataset, batch):
    return parity.compare(build(dataset), *batch)


def test_twins_share_weights_and_spread_their_images(dataset):
    models = build(dataset)
    first, second = (models[name].state_dict() for name in ("torch", "camox"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    recorder = twins.RoutingRecorder(models["torch"].eval())
    with torch.no_grad():
        models["torch"](next(iter(duel.batches(dataset, 24, 1)))[0])
    usage = torch.stack(recorder.take()[1])
    assert usage.shape == (4, 7)
    assert (usage > 0).all()


@pytest.mark.slow
def test_camox_is_as_near_to_float64_as_torch(compared):
    assert compared["passed"], compared["worst"]
    assert compared["routing_same"] and not compared["missing"]
    assert min(compared["edge_images"]) > 0
    assert compared["kinds"]["gradient"]["torch_vs_float64"] > 0
    assert 0 < compared["worst"]["share_of_limit"] <= 1


@pytest.mark.slow
def test_a_wrong_expert_fails_the_comparison(dataset, batch):
    models = build(dataset)
    for layer in models["camox"].moe_layers:
        right = layer.experts[parity.EDGE_EXPERT]
        right.register_forward_hook(lambda module, inputs, output: output + 1e-3 * inputs[0])
    result = parity.compare(models, *batch)
    assert not result["passed"]
    assert result["worst"]["share_of_limit"] > 10


@pytest.mark.slow
def test_a_scaled_gradient_fails_the_comparison(dataset, batch):
    """Right values, but one expert's gradients 1e-4 too large."""
    models = build(dataset)
    expert = models["camox"].moe_layers[0].experts[0]
    expert.register_forward_hook(lambda module, inputs, output: output + 1e-4 * (output - output.detach()))
    result = parity.compare(models, *batch)
    assert not result["passed"]
    assert result["worst"]["tensor"].startswith("gradient") and result["worst"]["share_of_limit"] > 3


def test_one_run_that_is_not_finite_is_not_outvoted():
    exact = {"loss total": torch.ones(1, dtype=torch.float64)}
    good, bad = {"loss total": torch.ones(1)}, {"loss total": torch.full((1,), torch.nan)}
    assert common_parity.compare_with_float64(exact, [good] * 3, [good])["worst"]["share_of_limit"] == 0
    assert common_parity.compare_with_float64(exact, [good, good, bad], [good])["worst"]["share_of_limit"] == np.inf


@pytest.mark.slow
def test_a_missing_gradient_fails_the_comparison(dataset, batch):
    models = build(dataset)
    models["camox"].moe_layers[0].experts[parity.EDGE_EXPERT].fusion[0].bias.requires_grad_(False)
    result = parity.compare(models, *batch)
    assert not result["passed"]
    assert result["missing"] == ["gradient moe_layers.0.experts.4.fusion.0.bias"]


@pytest.mark.slow
def test_nan_fails_the_comparison(dataset, batch):
    models = build(dataset)
    models["camox"].deep_heads[0].weight.data[0, 0] = torch.nan
    assert not parity.compare(models, *batch)["passed"]


@pytest.mark.slow
def test_training_side_by_side_and_its_report(dataset, batch, compared, tmp_path):
    models = build(dataset)
    gaps = duel.early_loss_gaps(models, dataset, 4, 1e-3, warmup=10)
    trained, training = duel.train_both(models, dataset, 4, 8, 1e-3)
    assert set(gaps) == {"camox", "torch_one_rounding_away"} and max(gaps.values()) < 0.1
    for name in ("torch", "camox"):
        assert len(trained[name]["losses"]) == 8 and np.isfinite(trained[name]["losses"]).all()
        assert trained[name]["images_per_s"] == pytest.approx(4000 / trained[name]["step_ms"])
        assert np.sum(trained[name]["expert_share_per_layer"], 1) == pytest.approx([1] * 4)
        history = np.array(trained[name]["expert_share_history"])
        assert history.shape == (8, 4, 7) and history.sum(2) == pytest.approx(np.ones((8, 4)))
        assert history.mean(0) == pytest.approx(np.array(trained[name]["expert_share_per_layer"]))
        trained[name] |= {"peak_mb": 2.0, "saved_mb": 1.0, "final_loss": 3.0} | dict.fromkeys(report.MEASURES, 0.5)
        trained[name]["convolution_share"] = 0.625
    assert abs(trained["torch"]["losses"][0] - trained["camox"]["losses"][0]) < 1e-5
    training["early_loss_gaps"] = gaps
    result = {
        "models": trained,
        "training": training,
        "times": common_duel.with_and_without_tune_cpu(
            {name: duel.make_step(model, 1e-3, lambda _: 1.0) for name, model in models.items()}, batch, rounds=1
        ),
        "parity": compared,
        "untrained": {"iou": 0.1},
        "constant_mask_iou": 0.2,
    }
    lines = report.table(result).splitlines()
    assert any(line.startswith("time per step, ms") and line.endswith("x") for line in lines)
    tuned = next(line.split() for line in lines if line.startswith("times as fast"))
    assert tuned[3] == "1.00" and len(tuned) == 3 + 4
    assert list(result["times"]) == ["torch", "torch + tune_cpu", "camox", "camox + tune_cpu"]
    assert [line.split()[-2:] for line in lines if line.startswith("of it convolutions")] == [["62%", "62%"]]
    assert [line.split()[0] for line in lines if len(line.split()) == 5 and "e-" in line] == list(common_parity.KINDS)
    image, mask = dataset.images[0], dataset.masks[0] / 255
    report.draw(tmp_path / "report.png", result, [(image, mask, {"torch": mask, "camox": mask})] * 3)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    common_report.write_json(tmp_path / "report.json", result)
    assert json.loads((tmp_path / "report.json").read_text())["models"].keys() == {"torch", "camox"}


def test_failures_are_said_and_success_is_silent():
    good = {
        "parity": {"passed": True},
        "untrained": {"iou": 0.1},
        "constant_mask_iou": 0.2,
        "models": {"torch": {"iou": 0.5}, "camox": {"iou": 0.6}},
    }
    assert demo_run.failures(good) == []
    weak = good | {"models": {"torch": {"iou": 0.5}, "camox": {"iou": 0.2}}}
    assert demo_run.failures(weak) == ["--ops camox reached an IoU of 0.2000, not above 0.2000 without training"]
    found = {"passed": False, "worst": "w", "routing_same": True, "missing": [], "edge_images": [1]}
    assert "camox differs from float64" in demo_run.failures(good | {"parity": found})[0]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_found_before_the_training(capsys, monkeypatch):
    monkeypatch.setattr(demo_run, "run", lambda mode, folder: pytest.fail("it ran"))
    assert demo_run.main(["--out", f"{__file__}/demo"]) == 2
    assert capsys.readouterr().err == f"error: cannot write to {__file__}/demo: {__file__} is no folder\n"


def test_memory_that_was_counted_is_freed():
    """Also outputs that their own node keeps, as ReLU's does."""
    made = []
    net = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.ReLU())
    net.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    assert common_memory.saved_bytes(net, lambda: net(torch.ones(2, 3)).sum()) >= 2400
    assert [reference() for reference in made] == [None]


def test_memory_of_known_steps(dataset, batch):
    peak = common_memory.peak_bytes(lambda: torch.ones(1000, 1000) + torch.ones(1000, 1000))
    assert peak == pytest.approx(12e6, rel=1e-3)
    model = build(dataset)["torch"]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    images, masks = batch
    small, large = (memory.measure(model, images[:n], masks[:n]) for n in (2, 4))
    assert 1.6 < large["saved_mb"] / small["saved_mb"] < 2.1
    assert small["saved_mb"] < small["peak_mb"] < large["peak_mb"]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_convolutions_share_of_a_step(dataset, batch):
    model = build(dataset)["camox"]
    assert 0 < steptime.convolution_share(model, *batch, repeats=1) < 1
    with steptime.Stopwatch([model.final_conv[0].weight]) as watch:
        logits = model.final_conv(torch.zeros(1, 64, 8, 8))
        forward = watch.seconds
        logits.sum().backward()
        both = watch.seconds
        model.backbone(torch.zeros(1, 3, 64, 64))
        assert 0 < forward < both == watch.seconds
    linear = torch.nn.Linear(3, 5)
    for other, counted in ((linear.weight, True), (model.final_conv[0].weight, False)):
        with steptime.Stopwatch([other]) as watch:
            linear(torch.zeros(2, 3)).sum().backward()
        assert (watch.seconds > 0) is counted


@pytest.mark.slow
def test_switch_balances_the_experts_and_usage_mse_does_not(dataset):
    """From the same fresh gates; effective experts of 7, the mean of the four layers."""
    runs = {kind: balance.train(kind, dataset, steps=24, batch_size=6) for kind in ("usage_mse", "switch")}
    first, last = ({kind: np.mean(run[name]) for kind, run in runs.items()} for name in ("first", "last"))
    assert first["usage_mse"] == first["switch"] < 5
    assert last["switch"] > first["switch"] + 1
    assert last["switch"] > last["usage_mse"] + 1
    assert np.isfinite(runs["switch"]["losses"]).all()


@pytest.mark.slow
def test_quick_demo(tmp_path):
    command = [sys.executable, str(example_path.FOLDER / "demo.py"), "--mode", "quick", "--out", str(tmp_path / "demo")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "demo/report.json").read_text())
    floor = max(result["untrained"]["iou"], result["constant_mask_iou"])
    assert all(row["iou"] > floor for row in result["models"].values())
    assert (tmp_path / "demo/report.png").stat().st_size > 10_000
    assert "time per step, ms" in done.stdout
