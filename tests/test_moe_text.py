"""The example moe_text: its twins, the same run on any number of ranks, what the ranks send, the demo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import example_path
import pytest
import torch
import torch.distributed as dist
from helpers import DEVICE, leave_process_group, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import camox_ops as cx

one_thread = example_path.one_thread
cli, data, demo_run, model, report, training = (
    example_path.load(name, "moe_text") for name in ("cli", "data", "demo_run", "model", "report", "training")
)

TINY = {"dim": 16, "num_heads": 2, "num_layers": 2, "num_experts": 4, "hidden": 12, "shared_hidden": 8}
TINY |= {"length": 16, "batch_size": 8, "steps": 6, "log_interval": 3}
DOCUMENTS = {
    "letters": ["the quick brown fox jumps over the lazy dog. " * 20],
    "code": [f"def f{n}(x):\n    return x + {n}\n" * 5 for n in range(20)],
}


def config(**options):
    return training.Config(**TINY | options)


# ---- the model ----


def test_dense_and_mixture_multiply_as_often():
    sizes = model.Sizes()
    used = {kind: model.LanguageModel(model.Sizes(feed_forward=kind)).parameters_used() for kind in ("moe", "dense")}
    assert used["moe"][0] > 3 * used["dense"][0]
    assert used["moe"][1] == pytest.approx(used["dense"][1], rel=1e-3)
    # by hand: attention, experts with the shared one, router, norms; the head and its norm
    layer = 4 * sizes.dim**2 + 3 * sizes.dim * (2 * sizes.hidden + sizes.shared_hidden) + 4 * sizes.dim
    layer += sizes.dim * sizes.num_experts
    assert used["moe"][1] == sizes.num_layers * layer + 256 * sizes.dim + 2 * sizes.dim


@pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 on the CPU")
@pytest.mark.parametrize("balance", model.BALANCES)
def test_twins_are_held_to_float64_and_a_wrong_one_fails(balance):
    models = demo_run.build_twins(config(balance=balance))
    inputs, targets = torch.randint(256, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    errors = demo_run.compare(models, inputs, targets)
    assert errors["passed"], errors
    with torch.no_grad():
        models["camox"].layers[0].feed_forward.w_out *= 1 + 1e-3
    assert not demo_run.compare(models, inputs, targets)["passed"]


@pytest.mark.parametrize("ops", ["torch", "camox"])
def test_no_byte_sees_a_later_one(ops):
    made = training.build_model(config(ops=ops)).eval()
    x = torch.randint(256, (2, 16))
    changed = x.clone()
    changed[:, 10:] = 255 - changed[:, 10:]
    first, second = (made(inputs)[0] for inputs in (x, changed))
    assert torch.allclose(first[:, :10], second[:, :10], atol=1e-6)
    assert not torch.allclose(first[:, 10:], second[:, 10:], atol=1e-3)


def test_twins_move_their_router_bias_alike():
    models = demo_run.build_twins(config(balance="bias"))
    corpus = data.build_corpus(DOCUMENTS, 16)
    for name, made in models.items():
        stepper = training.Stepper(made, config(balance="bias", ops=name))
        stepper.step(*data.draw_batch(corpus, config(), 0))
    biases = [[layer.router_bias for layer in made.mixtures()] for made in models.values()]
    assert all(torch.equal(a, b) for a, b in zip(*biases, strict=True))
    assert max(bias.abs().max() for bias in biases[0]) == pytest.approx(config().bias_rate)


# ---- texts and the command line ----


def test_texts_as_bytes():
    corpus = data.build_corpus(DOCUMENTS, 16)
    held_out = {name: bytes(text.tolist()).decode() for name, text in corpus.held_out.items()}
    assert held_out["letters"] == DOCUMENTS["letters"][0][:90]  # a tenth of the one document
    assert held_out["code"] == "\n".join((DOCUMENTS["code"][0], DOCUMENTS["code"][10]))
    assert bytes(corpus.training[:810].tolist()).decode() == DOCUMENTS["letters"][0][90:]
    inputs, targets = data.draw_batch(corpus, config(), 3)
    assert inputs.shape == (8, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, data.draw_batch(corpus, config(), 3)[0])
    assert not torch.equal(inputs, data.draw_batch(corpus, config(), 4)[0])
    with pytest.raises(data.DataError, match="domain 'a' has a part of 9 bytes, too few for a text of 16"):
        data.build_corpus({"a": ["0123456789"]}, 16)


def test_kinds_of_bytes():
    kinds = data.kind_of_bytes()
    found = [data.KINDS[kinds[byte]] for byte in b"aZ7 \n(+"] + [data.KINDS[kinds[200]]]
    assert found == [
        "lower case", "upper case", "digit", "space", "line break", "quote, bracket", "other sign", "not ASCII",
    ]  # fmt: skip
    assert report.information(torch.eye(4)) == pytest.approx(2) and report.information(torch.ones(4, 4)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere"], "folder /nowhere does not exist"),
        (["--load", "/nowhere"], "checkpoint /nowhere does not exist"),
        (["--load", "/"], "checkpoint / was not written by --save"),
        (["--lr", "0"], "lr must be > 0, got 0.0"),
        (["--dim", "20", "--num-heads", "4"], "dim must be a multiple of 2 * num_heads = 8, got 20"),
        (["--device", "gpu"], "device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["--save", __file__], f"cannot write to {__file__}: {__file__} is no folder"),
        (["--metrics", "/"], "cannot write /: it is a folder"),
        (["--top-k", "17"], "top_k must be at most num_experts = 16, got 17"),
        (["--lr", "inf"], "lr must be a finite number, got inf"),
        (["--seed", "-1"], "seed must be from 0 to 2**63 - 1, got -1"),
        (["--aux-weight", "-1"], "aux_weight must be >= 0, got -1.0"),
        (["--expert-ranks", "2"], "expert_ranks must divide the 1 ranks, got 2"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_every_option_is_explained():
    assert cli.HELP.keys() == training.Config.__dataclass_fields__.keys()


def test_a_loss_that_is_not_finite_stops_the_run():
    trainer = training.Trainer(config(log_interval=1), DOCUMENTS)
    trainer.model.head.weight.data.fill_(torch.inf)
    with pytest.raises(training.TrainingError, match="loss became nan by step 1"):
        trainer.run()


# ---- ranks ----


class Sent:
    """Bytes that the collectives of camox_ops.nn send, by name: all_to_all_single also to a rank itself."""

    def __enter__(self):
        self.bytes = dict.fromkeys(("all_to_all_single", "all_gather", "all_reduce"), 0)
        self.real = {name: getattr(dist, name) for name in self.bytes}
        for name in self.bytes:
            setattr(dist, name, self.counted(name))
        return self

    def __exit__(self, *_):
        for name, function in self.real.items():
            setattr(dist, name, function)

    def counted(self, name):
        def call(first, *rest, **options):
            given = first if name == "all_reduce" else rest[0]
            self.bytes[name] += given.numel() * given.element_size()
            return self.real[name](first, *rest, **options)

        return call


def sent_by(dtype, rows=40, dim=16, experts=4, top_k=2):
    """What one layer sends forward, and forward and backward, of one rank."""
    torch.manual_seed(0)
    layer = cx.nn.expert_parallel(cx.nn.TokenMoE(dim, 24, experts, top_k), dist.group.WORLD)
    x = torch.randn(rows, dim, requires_grad=True)
    with Sent() as sent:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output, aux_loss, _ = layer(x)
        forward = dict(sent.bytes)
        (output.float().square().mean() + aux_loss).backward()
    return {"forward": forward, "both": sent.bytes}


def sent_by_images():
    torch.manual_seed(0)
    experts = [torch.nn.Conv2d(3, 3, 1) for _ in range(4)]
    layer = cx.nn.expert_parallel(cx.nn.MoELayer(3, 4, 2, experts=experts, aux_loss="switch"), dist.group.WORLD)
    with Sent() as sent:
        output, aux_loss, _ = layer(torch.randn(5, 3, 6, 7, requires_grad=True))
        (output.mean() + aux_loss).backward()
    return dict(sent.bytes)


def averaged_bytes():
    """(gradient bytes that DistributedDataParallel averages, those of all parameters but the divided experts)"""
    made = training.build_model(config())
    cx.nn.expert_parallel(made, dist.group.WORLD)
    wrapped, found = DistributedDataParallel(made), []

    def hook(group, bucket):
        found.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, hook)
    logits, aux_loss, _ = wrapped(torch.randint(256, (2, 16)))
    (logits.mean() + aux_loss).backward()
    own = {id(p) for layer in made.mixtures() for p in (layer.w_in, layer.w_out)}
    return sum(found), sum(p.numel() * 4 for p in made.parameters() if id(p) not in own)


def worker(rank, world, port, folder):
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in (environment | {"MASTER_PORT": port}).items()})
    torch.set_num_threads(1)
    options = {"save": f"{folder}/checkpoint", "metrics": f"{folder}/metrics.json"}
    if world == 4:  # a grid: a loss of the rows of a pair of ranks is none of all rows
        options |= {"expert_ranks": 2, "balance": "bias"}
    training.Trainer(config(double=True, **options), DOCUMENTS).run()
    found = {"float32": sent_by(torch.float32), "bfloat16": sent_by(torch.bfloat16), "images": sent_by_images()}
    found["averaged"] = averaged_bytes()
    torch.save(found, f"{folder}/rank{rank}")
    leave_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    """(number, folder) of a finished run."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(worker, (request.param, port, str(folder)), request.param)
    return request.param, folder


def test_ranks_give_the_losses_of_one_process(ranks):
    number, folder = ranks
    found = json.loads((folder / "metrics.json").read_text())
    balance = "bias" if number == 4 else "switch"
    trainer = training.Trainer(config(double=True, balance=balance), DOCUMENTS)
    expected = trainer.run()
    assert found["world"] == number == len(found["tokens_per_s"])
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-11)
    assert found["losses"][-1] < found["losses"][0]
    assert found["busiest"] == expected["busiest"]
    assert found["held_out"] == pytest.approx(expected["held_out"], rel=1e-11)
    loaded = training.Trainer(config(double=True, balance=balance, load=str(folder / "checkpoint")), DOCUMENTS)
    bits = training.held_out_bits(loaded.model, loaded.corpus, loaded.config)
    assert bits == pytest.approx(expected["held_out"], rel=1e-11)
    with pytest.raises(training.CheckpointError, match="does not fit this model: Size mismatch"):
        training.Trainer(config(hidden=6, load=str(folder / "checkpoint")), DOCUMENTS)


def test_weights_whose_saving_was_interrupted_are_refused(tmp_path, monkeypatch):
    """Also over older ones, some of whose files may be left."""
    folder = str(tmp_path / "checkpoint")
    options = {"steps": 1, "num_layers": 1}
    trainer = training.Trainer(config(save=folder, **options), DOCUMENTS)
    trainer.run()
    trainer.load(folder)

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(training.dcp, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    with pytest.raises(training.CheckpointError, match=f"{folder} was not written by --save, or not to its end"):
        trainer.load(folder)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_sent_are_those_of_the_formula(ranks, dtype, size):
    """docs/scaling.md: a rank's copies and their results forward, the gradients of both backward, counts, one sum."""
    number, folder = ranks
    rows, dim, experts, top_k = 40, 16, 4, 2
    found = [torch.load(folder / f"rank{rank}")[dtype] for rank in range(number)]
    for name, exchanges in (("forward", 2), ("both", 4)):
        # A rank sends its own copies, and the results of those that came: over all ranks both are all copies.
        total = sum(rank[name]["all_to_all_single"] for rank in found)
        assert total == exchanges * number * rows * top_k * dim * size
        for rank in found:
            assert rank[name]["all_gather"] == 8 * (10 + experts)
            assert rank[name]["all_reduce"] == 4 * (experts + 2)


def test_bytes_sent_of_images_and_by_data_parallel(ranks):
    number, folder = ranks
    found = [torch.load(folder / f"rank{rank}") for rank in range(number)]
    assert sum(rank["images"]["all_to_all_single"] for rank in found) == 4 * number * 5 * 2 * (3 * 6 * 7) * 4
    for rank in found:
        assert rank["averaged"][0] == rank["averaged"][1]


# ---- the demo ----


def test_demo_says_what_failed():
    good = {
        "mode": "full",
        "parity": {"passed": True},
        "models": {"torch": {"final_bits": 3.0}, "camox": {"final_bits": 3.01}},
        "ranks": {"1": {"losses": [2.0, 1.0]}, "2": {"losses": [2.0, 1.0001]}},
    }
    assert demo_run.failures(good) == []
    weak = good | {"models": {"torch": {"final_bits": 3.0}, "camox": {"final_bits": 4.0}}}
    assert len(demo_run.failures(weak)) == 2
    wrong = good | {"parity": {"passed": False, "worst": "w", "missing": []}}
    assert "camox differs from float64" in demo_run.failures(wrong)[0]
    apart = good | {"ranks": {"1": {"losses": [2.0, 1.0]}, "2": {"losses": [2.0, 1.1]}}}
    assert demo_run.failures(apart) == ["2 ranks give other losses than one process: by 1.0e-01 of them"]


@pytest.mark.slow
def test_quick_demo(tmp_path):
    command = [sys.executable, str(example_path.EXAMPLES / "moe_text/demo.py"), "--mode", "quick"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cx.__file__).parents[1])}
    command += ["--out", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "time per step, ms" in done.stdout and "2 ranks, a thread each" in done.stdout
    assert (tmp_path / "demo/report.png").stat().st_size > 10_000
