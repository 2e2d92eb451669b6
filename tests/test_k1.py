"""The example k1: the tree by levels and node by node, the error path, training, texts, the demo."""

import copy
import csv
import os
import subprocess
import sys
from pathlib import Path

import example_path
import pytest
import torch
from helpers import DEVICE, on_device

import camox_ops as cx

one_thread = example_path.one_thread
bdh, checkpoint, graph = (example_path.load(name, "common") for name in ("bdh", "checkpoint", "graph"))
attribution, baseline, cli, data, demo_run, optimizer, report, training, tree = (
    example_path.load(name, "k1")
    for name in (
        *("attribution", "baseline", "cli", "data", "demo_run", "optimizer", "report", "training"),
        "tree",
    )
)

VOCABULARY, WIDTH, LENGTH = 60, 16, 12
SIZES = {"embed_dim": WIDTH, "ff_dim": 24, "num_heads": 2, "max_seq_len": LENGTH, "dropout": 0.0}
BRANCHING = [3, 2]  # 1 + 3 + 6 nodes
# Names and shapes of the public node's state_dict at these sizes, in its order.
NODE = {
    "attn.in_proj_weight": (48, 16),
    "attn.in_proj_bias": (48,),
    "attn.out_proj.weight": (16, 16),
    "attn.out_proj.bias": (16,),
    "attn_norm.weight": (16,),
    "attn_norm.bias": (16,),
    "ff.0.weight": (24, 16),
    "ff.0.bias": (24,),
    "ff.3.weight": (16, 24),
    "ff.3.bias": (16,),
    "ff_norm.weight": (16,),
    "ff_norm.bias": (16,),
}
SHARED = {"output_norm.weight": (16,), "output_norm.bias": (16,)}
SHARED |= {"output_proj.weight": (60, 16), "output_proj.bias": (60,)}
pytestmark = on_device


def public_names(prefix="root", branching=BRANCHING):
    """Names and shapes of a public tree's nodes."""
    found = {f"{prefix}.{name}": shape for name, shape in NODE.items()}
    for child in range(branching[0] if branching else 0):
        found |= public_names(f"{prefix}.child_nodes.{child}", branching[1:])
    return found


def build(ops, branching=BRANCHING, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = SIZES | sizes
    made = tree.HierarchicalTree(
        VOCABULARY, tree_depth=len(branching) + 1, branching_factor=branching or None, ops=ops, **sizes
    )
    return made.to(DEVICE)


def words(batch=3, seed=1):
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (2, batch, LENGTH), generator=generator, device="cpu").to(DEVICE)
    return drawn[0], drawn[1]


def gradients(made, inputs, targets):
    """Logits and gradients by name."""
    made.zero_grad()
    logits = made(inputs)
    made.loss(inputs, targets).backward()
    return {"logits": logits.detach()} | {name: p.grad.clone() for name, p in made.named_parameters()}


def assert_equal_to_rounding(found, expected, share=2e-5):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        scale = expected[name].abs().max().clamp(min=1e-6)
        assert (value - expected[name]).abs().max() <= share * scale, name


# ---- the tree ----


def test_the_tree_has_the_public_parameters():
    expected = {"pos_encoding": (12, 16), "embedding.weight": (60, 16)} | public_names() | SHARED
    for ops in bdh.OPS:
        made = build(ops)
        found = {name: tuple(value.shape) for name, value in made.state_dict().items()}
        assert list(found.items()) == list(expected.items())
        assert list(dict(made.named_parameters())) == list(expected)
    assert [node.node_id for node in made.nodes] == [0, 1, 2, 3, 11, 12, 21, 22, 31, 32]
    assert len(tree.HierarchicalTree(30, 8, 8, 2).nodes) == 41


@pytest.mark.parametrize("branching", [BRANCHING, [1, 2], []], ids=str)
def test_levels_give_the_numbers_of_node_by_node(branching):
    plain, ours = build("torch", branching), build("camox", branching)
    ours.load_state_dict(plain.state_dict(), strict=True)
    inputs, targets = words()
    exact = gradients(plain, inputs, targets)
    assert_equal_to_rounding(gradients(ours, inputs, targets), exact)
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(inputs), plain(inputs), rtol=1e-4, atol=1e-5)
    left_out = ours.nodes[-1], plain.nodes[-1]
    pair = [made.features(inputs, node) for made, node in zip((ours, plain), left_out, strict=True)]
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


def test_texts_longer_than_the_short_attention():
    plain, ours = (build(ops, [2], max_seq_len=70).eval() for ops in ("torch", "camox"))
    inputs = words()[0].repeat(1, 6)[:, :70]
    torch.testing.assert_close(ours(inputs), plain(inputs), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="at most 70 words"):
        ours(words()[0].repeat(1, 6))


def test_the_weights_of_a_level_are_views_wherever_the_parameters_go():
    made = build("camox")
    inputs, targets = words()
    expected = gradients(made, inputs, targets)
    buffer = made.buffer()
    assert made.buffer() is buffer
    assert made.nodes[4].ff[0].weight.data_ptr() - buffer[4].data_ptr() < buffer[4].nbytes
    copied = copy.deepcopy(made)
    assert_equal_to_rounding(gradients(copied, inputs, targets), expected)
    made.load_state_dict({name: value * 1.5 for name, value in copied.state_dict().items()})
    assert not torch.allclose(made(inputs), copied(inputs))
    assert torch.equal(made.buffer()[4, :768].view(48, 16), 1.5 * copied.nodes[4].attn.in_proj_weight)
    if DEVICE.type == "cpu":
        double = copied.double()
        assert double(inputs).dtype == torch.float64
        assert double.nodes[9].ff_norm.bias.data_ptr() > double.buffer().data_ptr()


@pytest.mark.parametrize("branching", [BRANCHING, []], ids=str)
def test_gradients_in_rows_are_those_of_the_parameters(branching):
    made = build("camox", branching)
    inputs, targets = words()
    made.loss(inputs, targets).backward()
    expected = [made.own_gradients(), [p.grad for p in made.shared_parameters()]]
    made.zero_grad()
    with made.gradients_in_rows():
        made.loss(inputs, targets).backward()
        found = [made.own_gradients(), [p.grad for p in made.shared_parameters()]]
        rows = made.gradient_rows()
        assert rows[0].data_ptr() == found[0][0].data_ptr()  # no copy
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(torch.cat([level.flatten() for level in rows]), torch.cat([g.flatten() for g in expected[0]]))
    assert all(parameter.grad is None for node in made.nodes for parameter in node.own_parameters())
    made.loss(inputs, targets).backward()
    assert torch.equal(made.root.ff_norm.bias.grad, expected[0][11])


def test_dropout_is_drawn_from_the_seed_and_off_in_evaluation():
    made = build("camox", dropout=0.5)
    inputs, _ = words()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(made(inputs))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    made.eval()
    assert torch.equal(made(inputs), made(inputs))


def test_tree_under_autocast():
    inputs, targets = words()
    for ops in bdh.OPS:
        made = build(ops)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = made.loss(inputs, targets)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in made.parameters())
        torch.testing.assert_close(loss.float(), made.loss(inputs, targets), rtol=0.05, atol=0.05)


def test_baselines_agree():
    sizes = {"embed_dim": WIDTH, "ff_dim": 24, "num_heads": 2, "num_layers": 2, "max_seq_len": LENGTH, "dropout": 0.0}
    made = {}
    for ops in bdh.OPS:
        torch.manual_seed(0)
        made[ops] = baseline.BaselineTransformer(VOCABULARY, **sizes, ops=ops).to(DEVICE)
    assert {"causal_mask", "transformer.layers.1.self_attn.in_proj_weight"} <= made["camox"].state_dict().keys()
    made["camox"].load_state_dict(made["torch"].state_dict(), strict=True)
    batch = words()
    assert_equal_to_rounding(gradients(made["camox"], *batch), gradients(made["torch"], *batch))


@pytest.mark.parametrize("arguments", [{"tree_depth": 0}, {"branching_factor": [2, 0]}, {"ops": "jax"}])
def test_tree_errors(arguments):
    with pytest.raises(ValueError, match="must be"):
        tree.HierarchicalTree(30, 8, 8, 2, **arguments)


# ---- the error path ----


def attributed(kind, updates, fill=None):
    """(tree, Attribution) after a backward pass; fill: {node number: value of all its gradients}, 0 elsewhere."""
    made = build("camox" if kind is attribution.ErrorPath else "torch")
    made.load_state_dict(build("torch", seed=3).state_dict())
    made.loss(*words()).backward()
    if fill is not None:
        for node in made.nodes:
            for parameter in node.own_parameters():
                parameter.grad.fill_(fill.get(node.number, 0.0))
        for parameter in made.shared_parameters():
            parameter.grad.zero_()
    return made, kind(made, 1.0, updates)()


@pytest.mark.parametrize("updates", attribution.UPDATES)
def test_error_path_matches_the_plain_one(updates):
    (ours, found), (plain, expected) = (
        attributed(kind, updates) for kind in (attribution.ErrorPath, attribution.PlainErrorPath)
    )
    assert found.path.tolist() == expected.path.tolist()
    for name in ("norms", "scales", "total_norm"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-7)
    for (name, first), second in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if second.grad is None:
            assert updates == "path" and not first.grad.any(), name
        else:
            torch.testing.assert_close(first.grad, second.grad, rtol=1e-3, atol=1e-7)


def test_error_path_known_values():
    """Node 2 of the root and its second child; the gradients of a node of P elements filled with g have norms of
    g * sum of sqrt of the sizes."""
    unit = sum(torch.Size(shape).numel() ** 0.5 for shape in NODE.values())
    fill = {0: 1e-4, 2: 3e-4, 6: 1e-4, 7: 2e-4}  # below the clip; numbers 6, 7 are the children of number 2
    _, found = attributed(attribution.ErrorPath, "path", fill)
    assert found.path.tolist() == [0, 2, 7]
    torch.testing.assert_close(found.norms[[0, 2, 6, 7]], torch.tensor([7e-4, 6e-4, 1e-4, 2e-4]) * unit)
    scales = torch.zeros(10)
    scales[0], scales[2], scales[7] = 0.3, 0.3, 0.5 + 2 / 15  # shares 7/15 and 6/15 are capped
    torch.testing.assert_close(found.scales, scales)
    _, found = attributed(attribution.ErrorPath, "original", fill)
    scales = torch.full((10,), 0.3)  # the root's, on every node
    scales[[2, 6]] = 0.3 * 0.3
    scales[7] = 0.3 * 0.3 * (0.5 + 2 / 15)
    torch.testing.assert_close(found.scales, scales)


@pytest.mark.parametrize("kind", [attribution.ErrorPath, attribution.PlainErrorPath])
def test_error_path_without_gradients(kind):
    _, found = attributed(kind, "path", {})
    assert found.path.tolist() == [0, 1, 4]
    torch.testing.assert_close(found.scales[[0, 1, 4]], torch.tensor([0.05, 0.1, 1.0]))
    single = build("torch" if kind is attribution.PlainErrorPath else "camox", [])
    single.loss(*words()).backward()
    found = kind(single, 1.0, "path")()
    assert found.path.tolist() == [0] and found.scales.tolist() == [1.0]


@pytest.mark.parametrize("updates", attribution.UPDATES)
def test_nodes_off_the_path(updates):
    """With "path" they keep their weights and moments; with "original" all of them move."""
    made = build("camox")
    stepper = training.Stepper(made, lr=0.01, weight_decay=0.1, updates=updates)
    for seed in range(3):
        before = made.buffer().clone()
        stepper.step(*words(seed=seed))
        moved = (made.buffer() != before).any(1).nonzero().flatten().tolist()
        assert moved == (sorted(stepper.last.path.tolist()) if updates == "path" else list(range(10)))
    if updates == "path":
        assert stepper.optimizer.steps.sum() == 3 * len(made.levels)
        other = training.Stepper(build("camox"), lr=0.5)
        other.optimizer.load_state_dict(stepper.optimizer.state_dict())
        assert other.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("updates", attribution.UPDATES)
def test_steps_match_the_plain_trainer(updates):
    models = {ops: build(ops) for ops in bdh.OPS}
    steppers = {ops: training.Stepper(made, lr=0.01, updates=updates) for ops, made in models.items()}
    for seed in range(4):
        losses = {ops: stepper.step(*words(seed=seed)) for ops, stepper in steppers.items()}
        torch.testing.assert_close(losses["camox"], losses["torch"], rtol=1e-4, atol=1e-5)
        assert steppers["camox"].last.path.tolist() == steppers["torch"].last.path.tolist()
    first, second = (made.state_dict() for made in models.values())
    for name, value in first.items():
        assert (value - second[name]).abs().mean() <= 1e-4, name


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("updates", attribution.UPDATES)
def test_a_graph_replays_the_same_steps(updates):
    models = [build("camox") for _ in range(2)]
    steppers = [
        training.Stepper(made, lr=0.01, updates=updates, graph=graph)
        for made, graph in zip(models, (False, True), strict=True)
    ]
    for seed in range(8):
        losses = [stepper.step(*words(seed=seed)) for stepper in steppers]
        assert torch.equal(*losses)
        assert torch.equal(*(stepper.last.path for stepper in steppers))
        assert torch.equal(*(made.buffer() for made in models))
    assert steppers[1].run.graph is not None
    with pytest.raises(ValueError, match=r"argument 0 .* of shape \(3, 12\), got .* of shape \(2, 12\)"):
        steppers[1].step(*words(batch=2))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_graph_writes_to_no_workspace_that_others_free():
    x, weight = (torch.randn(512, 512, device=DEVICE) for _ in range(2))
    step = graph.GraphedStep(lambda x: (x @ weight,))
    for _ in range(graph.WARM_UP + 1):
        (product,) = step(x)
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile's graphs do
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(product, x @ weight)


@pytest.mark.parametrize("updates", attribution.UPDATES)
def test_a_step_reads_nothing_from_the_device(updates):
    found = {}
    for ops in bdh.OPS:
        stepper = training.Stepper(build(ops, dropout=0.1), updates=updates)
        batch = words()
        stepper.step(*batch)
        with example_path.Reads() as reads:
            stepper.step(*batch)
        found[ops] = reads.count
    assert found["camox"] == 0
    assert found["torch"] >= 2 * len(BRANCHING)  # the plain trainer reads every choice and every norm of the path


# ---- texts ----


def write_texts(folder):
    """Two domains: a folder of files and a file."""
    (folder / "numbers").mkdir(parents=True)
    for number in range(12):
        (folder / "numbers" / f"{number}.txt").write_text(" ".join(str(index % 7) for index in range(number, 400)))
    (folder / "letters.md").write_text("a b, c d. " * 300)
    (folder / "numbers" / "image.bin").write_bytes(b"\0\1")
    return folder


def test_texts_of_a_folder(tmp_path):
    found = data.texts(write_texts(tmp_path / "texts"))
    assert list(found) == ["letters", "numbers"] and len(found["numbers"]) == 12
    corpus = data.build_corpus(found, 17)
    assert corpus.words[:4] == list(data.SPECIAL) and len(corpus.words) == 17
    assert len(corpus.held_out["letters"]) == 180 and len(corpus.training["letters"]) == 1620
    shown = [corpus.words[index] for index in corpus.training["letters"][:6]]
    assert shown == ["a", "b", ",", "c", "d", "."]
    small = data.build_corpus(found, 6)  # two words and the special ones
    assert (small.training["letters"] == data.UNKNOWN).any() and small.training["letters"].max() < 6
    again = data.build_corpus(found, 6, corpus.words)
    assert torch.equal(again.training["numbers"], corpus.training["numbers"])


def test_texts_of_this_machine():
    found = data.texts(limit=12)
    assert list(found) == ["python", "documentation", "licences"] and len(found["python"]) == 12
    assert sum(map(len, found["documentation"])) > 100_000
    corpus = data.build_corpus({name: texts[:40] for name, texts in found.items()}, 2000)
    data.check_corpus(corpus, 2000, 64)
    batches = {demo_run.draw_batch(corpus, training.Config(), step)[0] for step in range(20)}
    assert batches == {0, 1, 2}
    order = [demo_run.draw_batch(corpus, training.Config(order="sequential", steps=9), step)[0] for step in range(9)]
    assert order == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_texts_that_cannot_be_used(tmp_path):
    for folder, message in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "has no text")):
        with pytest.raises(data.DataError, match=message):
            data.texts(folder)
    with pytest.raises(data.DataError, match="domain 'a' has 3 words, fewer than 1000"):
        data.build_corpus({"a": ["b c d"]}, 10)
    text = torch.arange(100) % 10
    corpus = data.Corpus([], {"a": text}, {"a": text})
    data.check_corpus(corpus, 10, 20)
    with pytest.raises(data.DataError, match="part of 100 words, too few for a text of 100"):
        data.check_corpus(corpus, 10, 100)
    with pytest.raises(data.DataError, match="target 9 at word 9 is outside the vocabulary of 9"):
        data.check_corpus(corpus, 9, 20)


# ---- training ----

TINY = {"embed_dim": 16, "ff_dim": 16, "num_heads": 2, "branching": "2,2", "num_layers": 1, "max_seq_len": 8}
TINY |= {"vocab_size": 20, "steps": 12, "batch_size": 4, "lr": 0.01, "log_interval": 4, "save_interval": 6}


def config(tmp_path, **options):
    if not (tmp_path / "texts").exists():
        write_texts(tmp_path / "texts")
    options = {"data": str(tmp_path / "texts"), "checkpoint_dir": str(tmp_path / "run")} | TINY | options
    return training.Config(device=str(DEVICE), **options)


# What differs with "original" are single steps, which the quick run has above.
RUNS = [{}, pytest.param({"updates": "original"}, marks=pytest.mark.slow), {"model": "baseline"}]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_resuming_gives_the_numbers_of_an_unbroken_run(tmp_path, monkeypatch, capsys, options):
    unbroken = training.Trainer(config(tmp_path, checkpoint_dir=str(tmp_path / "unbroken"), **options)).run()
    shown = capsys.readouterr().out
    save = training.Trainer.save

    def stop_after_the_first(self, done):
        save(self, done)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "save", stop_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        training.Trainer(config(tmp_path, **options)).run()
    monkeypatch.setattr(training.Trainer, "save", save)
    resumed = training.Trainer(config(tmp_path, resume=True, **options)).run()
    assert resumed["held_out"] == unbroken["held_out"]
    assert resumed["nodes"] == unbroken["nodes"]
    first, second = (checkpoint.load(tmp_path / name / checkpoint.LAST) for name in ("unbroken", "run"))
    for name, value in first["model_state_dict"].items():
        assert torch.equal(value, second["model_state_dict"][name]), name
    assert torch.equal(first["counts"], second["counts"])
    with open(tmp_path / "unbroken" / training.METRICS, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["4", "8", "12"]
    assert "held_out_letters" in rows[0] and "step/s (average" in shown
    if options.get("model") != "baseline":
        assert first["counts"][:, 0].sum() == 12  # the root is on every path
        assert "<- responsible" in shown and "└─ " in shown and "loss without it" in shown
        assert (tmp_path / "run" / training.IMAGE).read_bytes().startswith(b"\x89PNG")
        with open(tmp_path / "run" / training.NODES, newline="") as file:
            assert [row["node"] for row in csv.DictReader(file)] == ["0", "1", "2", "11", "12", "21", "22"]


def test_weights_to_begin_with(tmp_path):
    made = training.build_model(config(tmp_path))
    for name, state in (("own", made.state_dict()), ("public", {"model_state_dict": made.state_dict(), "results": {}})):
        checkpoint.save(tmp_path / name, state)
        begun = training.Trainer(config(tmp_path, init=str(tmp_path / name))).model
        assert torch.equal(begun.embedding.weight.cpu(), made.embedding.weight.cpu())
    with pytest.raises(checkpoint.CheckpointError, match="does not fit this model"):
        training.Trainer(config(tmp_path, init=str(tmp_path / "own"), branching="2"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere"], "folder /nowhere does not exist"),
        (["--resume"], "does not exist"),
        (["--init", "/nowhere.pth"], "checkpoint /nowhere.pth does not exist"),
        (["--lr", "0"], "lr must be > 0, got 0.0"),
        (["--device", "gpu"], "device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["--checkpoint-dir", f"{__file__}/run"], f"cannot write to {__file__}/run: {__file__} is no folder"),
        (["--branching", "4,x"], "branching must be numbers from 1 to 9 between commas, got '4,x'"),
        (["--num-heads", "5"], "embed_dim must be a multiple of num_heads=5, got 128"),
        (["--dropout", "1"], "dropout must be in [0, 1), got 1.0"),
        (["--lr", "inf"], "lr must be a finite number, got inf"),
        (["--seed", str(2**70)], f"seed must be from 0 to 2**63 - 1, got {2**70}"),
        (["--resume", "--init", "a"], "init and resume exclude each other"),
        (["--graph", "--device", "cpu"], "graph needs ops camox on a CUDA device, got ops camox on cpu"),
        (["--graph", "--device", "cuda", "--ops", "torch"], "graph needs ops camox on a CUDA device, got ops torch on"),
    ],
)
def test_command_line_errors(arguments, message, tmp_path, capsys):
    folder = tmp_path / "run"
    assert cli.main(["--checkpoint-dir", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_folders_that_no_run_wrote(tmp_path, capsys):
    (tmp_path / "file").touch()
    checkpoint.save(tmp_path / "foreign" / checkpoint.LAST, {"a": 1})
    checkpoint.save(tmp_path / "empty" / checkpoint.LAST, {})
    for arguments, message in (
        (["file", "--steps", "1"], f"{tmp_path / 'file'} is no folder"),
        (
            ["foreign", "--resume"],
            f"checkpoint {tmp_path / 'foreign' / checkpoint.LAST} does not fit this run: no words",
        ),
        (["empty", "--resume"], f"checkpoint {tmp_path / 'empty' / checkpoint.LAST} does not fit this run: no words"),
    ):
        folder, *more = arguments
        assert cli.main(["--checkpoint-dir", str(tmp_path / folder), *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "has no values by name: it holds a list"),
        ({"model_state_dict": [1]}, "does not fit this model: Expected state_dict to be dict-like"),
    ],
)
def test_weights_that_are_none_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "init.pth"
    torch.save(content, path)
    with pytest.raises(checkpoint.CheckpointError, match=f"checkpoint {path} {message}"):
        training.Trainer(config(tmp_path, init=str(path)))


def test_a_vocabulary_that_has_shrunk_is_refused(tmp_path):
    training.Trainer(config(tmp_path, steps=1)).run()
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir())
    with pytest.raises(data.DataError, match="outside the vocabulary of 9"):
        training.Trainer(config(tmp_path, resume=True, vocab_size=9))
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()) == before


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    trainer = training.Trainer(config(tmp_path))
    trainer.model.nodes[3].ff[0].weight.data.fill_(torch.inf)
    with pytest.raises(training.TrainingError, match="loss became nan by step 4"):
        trainer.run()


def test_every_option_is_explained():
    assert cli.HELP.keys() == training.Config.__dataclass_fields__.keys()


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_run_reads_from_the_device_only_where_it_logs(tmp_path, options):
    found = []
    for steps in (3, 9):
        trainer = training.Trainer(config(tmp_path, steps=steps, log_interval=9, save_interval=9, **options))
        with example_path.Reads() as reads:
            trainer.run()
        found.append(reads.count)
    assert found[0] == found[1] > 0


# ---- the report and the demo ----


def test_which_node_learned_which_domain():
    made = build("torch", [2])
    counts = torch.tensor([[8.0, 6, 2], [2, 0, 2]], device="cpu")  # the second domain was drawn less often
    rows = report.node_rows(made, counts, ["a", "b"], {1: {"a": 0.5, "b": 0.0}, 2: {"a": 0.0, "b": 0.25}})
    assert [(row["node"], row["on_path"], row["domain"]) for row in rows] == [(0, 10, "a"), (1, 6, "a"), (2, 4, "b")]
    assert rows[2]["share"] == pytest.approx(0.8)  # 2 of 2 batches against 2 of 8
    assert rows[1]["without_it_a"] == 0.5 and rows[0]["without_it_a"] == ""
    assert "3 of 3 nodes" in report.node_lines(rows, ["a", "b"])[-1]
    where = report.positions(made)
    assert where[0][:2] == (0, 0) and where[1][0] == pytest.approx(1) and where[2][0] == pytest.approx(-1)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 on the CPU")
def test_twins_are_held_to_float64_and_a_wrong_one_fails():
    small = training.Config(**TINY | {"dropout": 0.0})
    models = demo_run.build_twins(small)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(20, (2, 4, 8), generator=generator)
    errors = demo_run.compare(models, *batch)
    assert errors["passed"], errors["worst"]
    models["camox"].output_norm.register_forward_hook(lambda module, inputs, out: out * (1 + 1e-3))
    assert not demo_run.compare(models, *batch)["passed"]


def test_demo_says_what_failed():
    good = {
        "mode": "full",
        "parity": {"passed": True},
        "models": {"torch": {"final_loss": 5.0}, "camox": {"final_loss": 5.01}},
    }
    assert demo_run.failures(good) == []
    weak = good | {"models": {"torch": {"final_loss": 5.0}, "camox": {"final_loss": 7.0}}}
    assert len(demo_run.failures(weak)) == 2
    wrong = good | {"parity": {"passed": False, "worst": "w", "missing": []}}
    assert "camox differs from float64" in demo_run.failures(wrong)[0]


@pytest.mark.slow
def test_quick_demo(tmp_path):
    command = [sys.executable, str(example_path.EXAMPLES / "k1/demo.py"), "--mode", "quick"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cx.__file__).parents[1])}
    command += ["--out", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "time per step, ms" in done.stdout
    assert (tmp_path / "demo/report.png").stat().st_size > 10_000
