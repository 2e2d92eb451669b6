"""The example's training: steps, averages, checkpoints, resuming, the command line, several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import example_path
import pytest
import torch
from torch import nn

one_thread = example_path.one_thread
MODULES = ("cli", "data", "ema", "engine", "losses", "steps")
cli, data, ema, engine, losses, steps = map(example_path.load, MODULES)
checkpoint = example_path.load("checkpoint", "common")

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "backbone": "tiny",
    "img_size": 32,
    "batch_size": 4,
    "accumulation_steps": 2,
    "num_workers": 0,
    "gradient_checkpointing": "off",
    "ops": "torch",
    "no_amp": True,
}


class Plain(nn.Module):
    """A model with CamoXpert's interface and nothing that mixes the images of a batch."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x, return_deep_supervision=False):
        features = self.backbone(x).tanh()
        deep = [features[:, :1]] if return_deep_supervision else None
        return self.head(features), None, deep


def mean_loss(logits, target, aux_loss=None, deep=None):
    loss = (logits - target).square().mean() + sum(level.square().mean() for level in deep or ())
    return loss, {}


def make_stepper(model, **options):
    optimizer = steps.build_optimizer(model, 0.01)
    return steps.Stepper(model, mean_loss, optimizer, steps.Precision("cpu", enabled=False), **options)


@pytest.fixture
def small_set(monkeypatch):
    """Twelve training and five held-out images in place of the whole built-in set."""
    monkeypatch.setattr(example_path.load("synthetic"), "COUNTS", {"train": 12, "val": 5})


def config(folder, **options):
    return engine.Config(**{"dataset_path": "builtin", "checkpoint_dir": str(folder), **SMALL, **options})


def train(folder, **options):
    return engine.Trainer(config(folder, **options)).run()


def differing(first, second, path=""):
    """Paths at which two nested checkpoints differ, tensors compared bit for bit."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        first, second = dict(enumerate(first)), dict(enumerate(second))
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [found for key in first for found in differing(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return [] if torch.equal(first, second) else [path]
    return [] if first == second else [path]


def test_accumulation_equals_one_large_batch():
    torch.manual_seed(0)
    images, masks = torch.randn(6, 3, 8, 8), torch.rand(6, 1, 8, 8)
    results = []
    for parts in (1, 3):
        torch.manual_seed(1)
        stepper = make_stepper(Plain(), deep_supervision=True)
        for image_part, mask_part in zip(images.chunk(parts), masks.chunk(parts), strict=True):
            stepper.accumulate(image_part, mask_part, group_size=parts)
        stepper.step()
        results.append([*stepper.model.state_dict().values(), torch.tensor(stepper.take_loss())])
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole)


def test_step_clips_and_clears_the_gradients():
    torch.manual_seed(0)
    model = Plain()
    stepper = make_stepper(model, max_norm=1e-3)
    stepper.accumulate(torch.randn(2, 3, 8, 8), torch.full((2, 1, 8, 8), 100.0))
    norms = []
    stepper.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
    )
    stepper.step()
    assert norms == [pytest.approx(1e-3, rel=1e-2)]
    assert all(p.grad is None for p in model.parameters())


def test_the_loss_is_read_only_when_asked(monkeypatch):
    stepper = make_stepper(Plain())
    for scalar in ("item", "__float__", "tolist"):
        monkeypatch.setattr(torch.Tensor, scalar, lambda *_: pytest.fail("a step read a tensor's value"))
    for _ in range(3):
        stepper.accumulate(torch.randn(2, 3, 8, 8), torch.rand(2, 1, 8, 8))
        stepper.step()
    monkeypatch.undo()
    assert stepper.take_loss() > 0
    assert stepper.losses.weight == 0


def test_learning_rate_rises_then_falls():
    factors = [steps.lr_factor(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == 1
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0.01 <= factors[-1] < 0.02


def test_optimizer_leaves_a_frozen_backbone_out():
    model = Plain()
    model.backbone.requires_grad_(False)
    assert len(steps.build_optimizer(model, 0.1).param_groups) == 1
    model.backbone.requires_grad_(True)
    groups = steps.build_optimizer(model, 0.1, backbone_lr_scale=0.5).param_groups
    assert [group["base_lr"] for group in groups] == [0.05, 0.1]
    assert [len(group["params"]) for group in groups] == [2, 2]


def test_precision_of_the_cpu_is_bfloat16():
    with steps.Precision("cpu").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with steps.Precision("cpu", enabled=False).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert not steps.Precision("cpu").scaler.is_enabled()


def test_ema_follows_its_formula_and_swaps_back():
    torch.manual_seed(0)
    model = Plain()
    average = ema.EMA(model, decay=0.9)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    moved = {name: p.detach().clone() for name, p in model.named_parameters()}
    average.update()
    for name, value in average.shadow.items():
        torch.testing.assert_close(value, 0.9 * start[name] + 0.1 * moved[name])
    expected = {name: value.clone() for name, value in average.shadow.items()}
    with pytest.raises(KeyError), average.applied():
        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
        raise KeyError
    assert all(torch.equal(p, moved[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in average.shadow.items())


def test_ema_arguments_are_checked():
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1.5"):
        ema.EMA(Plain(), decay=1.5)
    with pytest.raises(ValueError, match=r"first differing name: 'backbone.bias'"):
        ema.EMA(Plain()).load({})


def test_loss_terms_at_known_values():
    criterion = losses.AdvancedCODLoss()
    target = torch.zeros(2, 1, 16, 16)
    target[:, :, 4:12, 4:12] = 1
    total, parts = criterion(30 * target - 15, target, torch.tensor(0.5), [torch.zeros(2, 1, 4, 4)])
    assert max(float(parts[name]) for name in ("bce", "iou", "edge")) < 1e-4
    assert parts["deep"] == pytest.approx(0.6931, abs=1e-4)
    assert float(total) == pytest.approx(0.1 * 0.5 + 0.4 * 0.6931, abs=1e-3)
    undecided, _ = criterion(torch.zeros_like(target), target)
    assert undecided > 1


def test_ssim_term_is_that_of_average_pooling():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 1, 20, 17, generator=generator, dtype=torch.float64).requires_grad_()
    target = torch.rand(2, 1, 20, 17, generator=generator, dtype=torch.float64)
    probability = logits.sigmoid()

    def pool(image):
        return torch.nn.functional.avg_pool2d(image, 11, 1, 5)

    x, y = pool(probability), pool(target)
    variances = pool(probability**2) - x**2, pool(target**2) - y**2, pool(probability * target) - x * y
    similar = (2 * x * y + 1e-4) * (2 * variances[2] + 9e-4)
    expected = 1 - (similar / ((x**2 + y**2 + 1e-4) * (variances[0] + variances[1] + 9e-4))).mean()
    total, parts = losses.AdvancedCODLoss(0, 0, 0, 0, ssim_weight=2)(logits, target)
    torch.testing.assert_close(parts["ssim"], expected.detach())
    (ours,), (theirs,) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (total, 2 * expected))
    torch.testing.assert_close(ours, theirs)
    assert losses.ssim_loss(target, target) < 1e-12


def test_checkpoint_round_trip_leaves_no_other_file(tmp_path):
    state = {"epoch": 3, "tensor": torch.randn(4), "nested": [{"a": 1.5}, None, "text"]}
    (tmp_path / ".last.pth.1.tmp").write_bytes(b"half of what a run wrote that was killed")
    checkpoint.save(tmp_path / "last.pth", state)
    assert differing(checkpoint.load(tmp_path / "last.pth"), state) == []
    assert [path.name for path in tmp_path.iterdir()] == ["last.pth"]


@pytest.mark.parametrize("failing", ["save", "fsync", "replace"])
def test_an_interrupted_write_keeps_the_old_checkpoint(tmp_path, monkeypatch, failing):
    path = tmp_path / "last.pth"
    checkpoint.save(path, {"epoch": 1})

    def interrupted(*arguments, **_):
        if failing == "save":
            arguments[1].write(b"half of a checkpoint")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch if failing == "save" else os, failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, {"epoch": 2})
    monkeypatch.undo()
    assert checkpoint.load(path) == {"epoch": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["last.pth"]


def test_a_run_that_was_killed_after_its_link_leaves_no_other_file(tmp_path):
    checkpoint.save_last(tmp_path, {"epoch": 0})
    os.link(tmp_path / checkpoint.LAST, tmp_path / checkpoint.PREVIOUS)
    checkpoint.save_last(tmp_path, {"epoch": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.LAST, checkpoint.PREVIOUS]


def test_the_checkpoint_before_the_last_is_kept(tmp_path):
    for epoch in range(3):
        checkpoint.save_last(tmp_path, {"epoch": epoch})
    assert checkpoint.load(tmp_path / checkpoint.LAST) == {"epoch": 2}
    assert checkpoint.load(tmp_path / checkpoint.PREVIOUS) == {"epoch": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pth", "previous.pth"]


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "text"])
def test_damaged_checkpoint_is_refused_by_name(tmp_path, damage):
    checkpoint.save_last(tmp_path, {"tensor": torch.randn(1000)})
    checkpoint.save_last(tmp_path, {"tensor": torch.randn(1000)})
    path = tmp_path / checkpoint.LAST
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2
    whole[middle] ^= 1
    damaged = {"empty": b"", "truncated": whole[:-100], "flipped": whole, "text": b"no checkpoint"}[damage]
    path.write_bytes(damaged)
    with pytest.raises(checkpoint.CheckpointError, match=f"{path} is .*damaged.*{tmp_path / 'previous.pth'}"):
        checkpoint.load(path)
    assert checkpoint.load(tmp_path / checkpoint.PREVIOUS)["tensor"].shape == (1000,)


def test_a_damaged_list_of_names_is_refused_by_name(tmp_path):
    """What zipfile reads as UTF-8 because a bit of the central directory says so."""
    path = tmp_path / checkpoint.LAST
    checkpoint.save(path, {"epoch": 1})
    whole = bytearray(path.read_bytes())
    entry = whole.rindex(b"PK\x01\x02")
    whole[entry + 9], whole[entry + 46] = whole[entry + 9] | 8, 0xFF
    path.write_bytes(whole)
    with pytest.raises(checkpoint.CheckpointError, match=f"{path} is truncated or damaged: 'utf-8' codec"):
        checkpoint.load(path)


def test_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=f"checkpoint {tmp_path}/none.pth does not exist"):
        checkpoint.load(tmp_path / "none.pth")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"use_ema": True, "stage1_epochs": 1}, {"no_amp": False, "img_size": 96, "stage1_epochs": 0}],
)
def test_resumed_run_equals_unbroken_run(tmp_path, small_set, options):
    unbroken = train(tmp_path / "unbroken", epochs=3, **options)
    two = tmp_path / "unbroken" / checkpoint.PREVIOUS
    resumed = train(tmp_path / "resumed", epochs=3, resume_from=str(two), **options)
    first, second = (checkpoint.load(tmp_path / run / checkpoint.LAST) for run in ("unbroken", "resumed"))
    assert checkpoint.load(two)["epoch"] == 1
    del first["args"], second["args"]
    assert differing(first, second) == []
    assert resumed == unbroken


@pytest.mark.slow
def test_resuming_across_the_stages_equals_unbroken_run(tmp_path, small_set):
    train(tmp_path / "unbroken", epochs=2, stage1_epochs=1)
    one = tmp_path / "unbroken" / checkpoint.PREVIOUS
    train(tmp_path / "resumed", epochs=2, stage1_epochs=1, resume_from=str(one))
    first, second = (checkpoint.load(tmp_path / run / checkpoint.LAST) for run in ("unbroken", "resumed"))
    del first["args"], second["args"]
    assert differing(first, second) == []


def test_stage_one_leaves_the_backbone_alone_and_its_checkpoint_fits_no_other_model(tmp_path, small_set):
    trainer = engine.Trainer(config(tmp_path, epochs=1, stage1_epochs=1))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.run()
    after = trainer.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(name.startswith("backbone.") for name in moved)
    with pytest.raises(checkpoint.CheckpointError, match=f"{tmp_path}/last.pth does not fit this run"):
        train(tmp_path, epochs=2, stage1_epochs=1, num_experts=3, resume_from=str(tmp_path / "last.pth"))


def test_averages_begin_with_the_weights_of_a_run_that_had_none(tmp_path, small_set):
    trainer = engine.Trainer(config(tmp_path, use_ema=True, num_experts=1))
    state = {
        "epoch": 0,
        "stage": 1,
        "model_state_dict": {name: 3 * value for name, value in trainer.model.state_dict().items()},
        "ema_state_dict": None,
        "scaler_state_dict": {},
        "best_iou": 0.5,
        "history": [],
        "rng": [checkpoint.rng_state(trainer.device)],
    }
    checkpoint.save(tmp_path / checkpoint.LAST, state)
    trainer.resume(tmp_path / checkpoint.LAST)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(trainer.ema.shadow[name], parameter), name


def test_refused_checkpoint_writes_nothing(tmp_path, small_set):
    broken = tmp_path / "broken.pth"
    broken.write_bytes(b"PK\x03\x04 not all of it")
    with pytest.raises(checkpoint.CheckpointError, match=str(broken)):
        train(tmp_path / "run", resume_from=str(broken))
    torch.save([1, 2], broken)
    with pytest.raises(checkpoint.CheckpointError, match=f"{broken} has no values by name"):
        train(tmp_path / "run", resume_from=str(broken))
    assert not (tmp_path / "run").exists()


def test_infinite_loss_stops_the_run(tmp_path, small_set):
    trainer = engine.Trainer(config(tmp_path, epochs=1, stage1_epochs=0))
    trainer.model.final_conv[3].weight.data.fill_(torch.nan)
    with pytest.raises(engine.TrainingError, match=r"loss became nan in epoch 1 .* lower --lr"):
        trainer.run()
    assert not (tmp_path / checkpoint.LAST).exists()


def test_too_large_a_batch_is_refused(tmp_path, small_set):
    with pytest.raises(engine.TrainingError, match="batch_size=13 on 1 process"):
        engine.Trainer(config(tmp_path, batch_size=13))


@pytest.mark.parametrize(
    ("name", "value"), [("num_experts", 0), ("batch_size", 0), ("accumulation_steps", 0), ("img_size", 8), ("lr", 0.0)]
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
        engine.Config("builtin", **{name: value})


@pytest.mark.slow
def test_loader_workers_change_no_number(tmp_path, small_set):
    runs = [train(tmp_path / str(workers), epochs=2, stage1_epochs=0, num_workers=workers) for workers in (0, 1)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("batch", "enabled"), [(4, True), (8, False)])
def test_checkpointing_by_policy(tmp_path, small_set, capsys, batch, enabled):
    trainer = engine.Trainer(config(tmp_path, batch_size=batch, gradient_checkpointing="auto"))
    assert trainer.model.gradient_checkpointing is enabled
    plain = engine.Trainer(config(tmp_path, batch_size=batch)).model.state_dict()
    assert differing(trainer.model.state_dict(), plain) == []
    shown = capsys.readouterr().out
    assert f"gradient checkpointing {'on' if enabled else 'off'}: batch {batch}" in shown
    assert "loader: num_workers=0 (as asked)" in shown


@pytest.mark.slow
def test_command_line_trains_with_every_option(tmp_path, small_set, capsys):
    options = (
        f"train --dataset-path builtin --checkpoint-dir {tmp_path} --backbone tiny --num-experts 7 --batch-size 4 "
        "--accumulation-steps 2 --img-size 32 --epochs 2 --stage1-epochs 1 --lr 0.001 --num-workers 0 "
        "--deep-supervision --gradient-checkpointing --use-ema --no-amp --ops torch --seed 3 --device cpu "
        "--log-interval 1 --aux-loss switch --ssim-weight 0.5"
    )
    assert cli.main(options.split()) == 0
    history = json.loads((tmp_path / "history.json").read_text())
    assert [(entry["epoch"], entry["stage"]) for entry in history] == [(0, 1), (1, 2)]
    assert {"train_loss", "iou", "s_measure", "e_measure", "weighted_f", "mae"} <= history[0].keys()
    assert {path.name for path in tmp_path.iterdir()} == {"last.pth", "previous.pth", "best_model.pth", "history.json"}
    shown = capsys.readouterr()
    assert "epoch 2/2 stage 2  loss=" in shown.out
    assert "images/s" in shown.err
    assert cli.main([*options.split(), "--resume-from", str(tmp_path / "last.pth")]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset-path", "/nowhere"], "/nowhere is not a folder"),
        (
            ["--dataset-path", "builtin", "--backbone", "tiny", "--resume-from", "/nowhere.pth"],
            "/nowhere.pth does not exist",
        ),
        (["--dataset-path", "builtin", "--backbone", "vgg"], "got 'vgg'"),
        (["--dataset-path", "builtin", "--device", "gpu"], "device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["--dataset-path", "builtin", "--checkpoint-dir", __file__], f"{__file__} is no folder"),
        (["--dataset-path", "builtin", "--lr", "nan"], "lr must be a finite number, got nan"),
        (["--dataset-path", "builtin", "--ema-decay", "2"], "ema_decay must be in [0, 1), got 2.0"),
        (["--dataset-path", "builtin", "--seed", str(2**70)], f"seed must be from 0 to 2**63 - 1, got {2**70}"),
        (["--dataset-path", "builtin", "--ssim-weight", "-1"], "ssim_weight must be >= 0, got -1.0"),
        (["--dataset-path", "builtin", "--epochs", "0"], "epochs must be >= 1, got 0"),
        (["--dataset-path", "builtin", "--img-size", "64"], "img_size must be >= 96 in bfloat16 on the CPU, got 64"),
    ],
)
def test_command_line_explains_errors(tmp_path, small_set, capsys, options, message):
    assert cli.main(["train", "--device", "cpu", "--num-workers", "0", "--img-size", "96", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_command_line_runs_from_another_folder(tmp_path):
    command = [sys.executable, str(example_path.FOLDER / "train_ultimate.py"), "train", "--dataset-path", "/nowhere"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "dataset path /nowhere is not a folder" in done.stderr


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        f"sys.path.append({str(example_path.EXAMPLES.parent)!r})\n"
        "from examples.camoxpert import synthetic\n"
        "synthetic.COUNTS = {'train': 16, 'val': 4}\n"
        "from examples.camoxpert.cli import main\n"
        "sys.exit(main())\n"
    )
    shared = "train --dataset-path builtin --backbone tiny --batch-size 2 --accumulation-steps 2 --img-size 32"
    rest = "--epochs 2 --stage1-epochs 1 --num-workers 0 --device cpu --no-amp --use-ema --deep-supervision"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command += [*shared.split(), *rest.split(), "--checkpoint-dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    state = checkpoint.load(tmp_path / "run" / checkpoint.LAST)
    assert len(state["rng"]) == 2 and not torch.equal(state["rng"][0]["cpu"], state["rng"][1]["cpu"])
    assert [entry["stage"] for entry in state["history"]] == [1, 2]
    resumed = [*command, "--resume-from", str(tmp_path / "run" / checkpoint.PREVIOUS)]
    resumed[resumed.index(str(tmp_path / "run"))] = str(tmp_path / "again")
    done = subprocess.run(resumed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    again = checkpoint.load(tmp_path / "again" / checkpoint.LAST)
    del state["args"], again["args"]
    assert differing(state, again) == []
