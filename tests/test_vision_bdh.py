"""BidirectionalBDHAttention and the examples vision_bdh and bdh_text."""

import copy
import csv
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import example_path
import numpy as np
import pytest
import torch
from helpers import DEVICE, assert_close_to_reference, on_device
from torch._subclasses.fake_tensor import FakeTensorMode

import camox_ops as cx

one_thread, imitated_graphs = example_path.one_thread, example_path.imitated_graphs
bdh, checkpoint, common_parity, optimizer = (
    example_path.load(name, "common") for name in ("bdh", "checkpoint", "parity", "optimizer")
)
data, demo_run, model, report, training = (
    example_path.load(name, "vision_bdh") for name in ("data", "demo_run", "model", "report", "training")
)
cli = example_path.load("cli", "vision_bdh")
text_data, text_model, text_training = (example_path.load(name, "bdh_text") for name in ("data", "model", "training"))

SIZES = {"n_layer": 3, "n_embd": 24, "n_head": 3, "mlp_internal_dim_multiplier": 8, "dropout": 0.0}
CONFIG = bdh.BDHConfig(**SIZES)  # heads are 64 wide
# Names and shapes of the public models' state_dict at these sizes, 3x32x32 images, patches of 4, 10 classes.
SHARED = {
    "decoder": (192, 24),
    "encoder": (3, 24, 64),
    "encoder_v": (3, 24, 64),
    "patch_embed.weight": (24, 3, 4, 4),
    "patch_embed.bias": (24,),
    "attn.freqs": (1, 1, 1, 64),
    "head.weight": (10, 24),
    "head.bias": (10,),
}
PUBLIC = {
    "v2": SHARED | {"pos_embed": (1, 64, 24)},
    "cls": SHARED | {"pos_embed": (1, 65, 24), "cls_token": (1, 1, 24)},
}
PUBLIC_TEXT = {
    "decoder": (192, 24),
    "encoder": (3, 24, 64),
    "encoder_v": (3, 24, 64),
    "lm_head": (24, 256),
    "attn.freqs": (1, 1, 1, 64),
    "embed.weight": (256, 24),
}
pytestmark = on_device


def heads(batch=2, length=10, seed=0, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(seed)
    q = torch.randn(batch, 3, length, 64, generator=generator, device="cpu").to(DEVICE, dtype)
    v = torch.randn(batch, 1, length, 24, generator=generator, device="cpu").to(DEVICE, dtype)
    return q, v


def numbers(attention, q, v):
    """Result and gradients of an attention module."""
    q, v = q.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()
    out = attention(q, q, v)
    learned = [p for p in attention.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), [q, v, *learned])]


@pytest.mark.parametrize("softmax", [False, True])
def test_attention_matches_reference(softmax):
    q, v = heads()
    plain, ours = bdh.PlainAttention(CONFIG, softmax), cx.nn.BidirectionalBDHAttention(CONFIG, softmax)
    ours.load_state_dict(plain.state_dict(), strict=True)
    double = copy.deepcopy(plain).double()
    assert_close_to_reference(numbers(ours, q, v), numbers(plain, q, v), numbers(double, q.double(), v.double()))
    positive = q.relu()
    wide = positive.double()
    exact = double(wide, wide, v.double())
    assert_close_to_reference(ours(q, q, v, relu=True), plain(positive, positive, v), exact)


def test_attention_known_values():
    attention = cx.nn.BidirectionalBDHAttention(CONFIG)
    assert attention.use_softmax and attention.config is CONFIG
    assert {name: tuple(p.shape) for name, p in attention.state_dict().items()} == {"freqs": (1, 1, 1, 64)}
    assert torch.equal(attention.freqs, bdh.frequencies(64))
    assert attention.freqs[0, 0, 0, :2].tolist() == pytest.approx([1 / (2 * np.pi)] * 2)
    assert not attention.freqs.requires_grad
    cos, sin = cx.rope_tables(64, 7, theta=2.0**16, units="turns")
    assert all(torch.equal(a, b) for a, b in zip(attention.tables(7), (cos, sin), strict=True))
    first = attention.tables(7)
    assert DEVICE.type != "cpu" or attention.tables(7)[0] is first[0]
    assert attention.tables(9)[0].shape == (9, 32)


def test_attention_follows_its_freqs():
    q, v = heads()
    attention, plain = cx.nn.BidirectionalBDHAttention(CONFIG, False), bdh.PlainAttention(CONFIG)
    attention(q, q, v)
    for learned in (False, True):
        new = torch.rand(1, 1, 1, 64, generator=torch.Generator("cpu").manual_seed(3), device="cpu").to(DEVICE) / 50
        with torch.no_grad():
            attention.freqs.copy_(new), plain.freqs.copy_(new)  # unequal within the pairs
        attention.freqs.requires_grad_(learned), plain.freqs.requires_grad_(learned)
        exact = numbers(copy.deepcopy(plain).double(), q.double(), v.double())
        assert_close_to_reference(numbers(attention, q, v), numbers(plain, q, v), exact)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 on the CPU")
def test_attention_in_other_dtypes():
    q, v = heads()
    attention, plain = cx.nn.BidirectionalBDHAttention(CONFIG, False), bdh.PlainAttention(CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, q, v).dtype == plain(q, q, v).dtype == torch.bfloat16
    double, plain_double = copy.deepcopy(attention).double(), copy.deepcopy(plain).double()
    q, v = q.double(), v.double()
    torch.testing.assert_close(double(q, q, v), plain_double(q, q, v), rtol=1e-12, atol=1e-10)
    half, q = copy.deepcopy(attention).bfloat16(), q.bfloat16()
    assert half(q, q, v.bfloat16()).dtype == torch.bfloat16


def test_attention_copies_and_pickles():
    q, v = heads()
    attention = cx.nn.BidirectionalBDHAttention(CONFIG)
    out = attention(q, q, v)
    for copied in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert copied._cached is None
        assert torch.equal(copied(q, q, v), out)


def test_attention_errors():
    q, v = heads()
    attention = cx.nn.BidirectionalBDHAttention(CONFIG)
    with pytest.raises(ValueError, match="K must be Q itself"):
        attention(q, q.clone(), v)
    with pytest.raises(ValueError, match="even width, got mlp_internal_dim_multiplier"):
        cx.nn.BidirectionalBDHAttention(bdh.BDHConfig(n_embd=9, n_head=3, mlp_internal_dim_multiplier=1))
    with pytest.raises(TypeError, match="use_softmax must be a bool"):
        cx.nn.BidirectionalBDHAttention(CONFIG, "yes")
    with pytest.raises(TypeError, match=r"Q must be a torch\.Tensor"):
        attention(wrong := [1], wrong, v)


def through_data(attention):
    attention.freqs.data.mul_(3.3)


def loaded(attention):
    attention.load_state_dict({"freqs": attention.freqs * 3.3})


def in_inference_mode(attention):
    with torch.inference_mode():
        attention.freqs.mul_(3.3)


def one_element(attention):
    attention.freqs.data[..., -1] *= 1.5  # pairs are no longer equal


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [through_data, loaded, in_inference_mode, one_element], ids=lambda c: c.__name__)
def test_attention_tables_are_those_of_the_present_freqs(change, compiled):
    q, v = heads(length=50)
    attention, other = (cx.nn.BidirectionalBDHAttention(CONFIG, False) for _ in range(2))
    forward = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    before = forward(q, q, v) if not compiled else attention(q, q, v)
    for _ in range(2):
        change(attention)
        other.load_state_dict(attention.state_dict())
        other._cached = None
        torch.testing.assert_close(forward(q, q, v), other(q, q, v), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(before, attention(q, q, v), rtol=1e-2)


def test_attention_made_in_inference_mode():
    q, v = heads()
    with torch.inference_mode():
        attention = cx.nn.BidirectionalBDHAttention(CONFIG)
        expected = attention(q, q, v)
    q.requires_grad_()
    out = attention(q, q, v)
    torch.testing.assert_close(out, expected.clone())
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()
    assert torch.equal(copy.deepcopy(attention)(q, q, v), out)


def test_attention_ensembles():
    q, v = heads()
    attentions = [cx.nn.BidirectionalBDHAttention(CONFIG) for _ in range(2)]
    attentions[1].freqs.data.mul_(3.3)
    attentions[0](q, q, v)
    state = torch.func.stack_module_state(attentions)
    out = torch.vmap(lambda *state: torch.func.functional_call(attentions[0], state, (q, q, v)))(*state)
    torch.testing.assert_close(out, torch.stack([attention(q, q, v) for attention in attentions]))


def test_attention_without_values():
    with torch.device("meta"):
        attention, q, v = cx.nn.BidirectionalBDHAttention(CONFIG), torch.empty(2, 3, 5, 64), torch.empty(2, 1, 5, 24)
        assert attention(q, q, v).shape == (2, 3, 5, 24)
    real = cx.nn.BidirectionalBDHAttention(CONFIG)
    q, v = heads()
    expected = real(q, q, v)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        assert real(fake, fake, mode.from_tensor(v)).shape == expected.shape
    assert torch.equal(real(q, q, v), expected)


@pytest.mark.slow
def test_attention_compile():
    q, v = heads()
    attention = cx.nn.BidirectionalBDHAttention(CONFIG)
    compiled = torch.compile(attention, fullgraph=True)
    for left, right in zip(numbers(compiled, q, v), numbers(attention, q, v), strict=True):
        torch.testing.assert_close(left, right)


# ---- models ----


def random_batch(count=4, channels=3, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    images = torch.randn(count, channels, 32, 32, generator=generator, device="cpu")
    return images.to(DEVICE), torch.arange(count, device=DEVICE) % 10


@pytest.mark.parametrize("kind", ["v2", "cls"])
def test_models_have_the_public_parameters(kind):
    for ops in bdh.OPS:
        made = model.MODELS[kind](CONFIG, ops=ops)
        assert {name: tuple(value.shape) for name, value in made.state_dict().items()} == PUBLIC[kind]
    assert made.use_softmax_attn is (kind == "cls")  # the public defaults differ
    compiled = {f"_orig_mod.{name}": value for name, value in made.state_dict().items()}
    model.MODELS[kind](CONFIG).load_state_dict(model.without_compile_prefix(compiled), strict=True)


@pytest.mark.parametrize("kind", ["v2", "cls"])
@pytest.mark.parametrize("softmax", [False, True])
def test_models_of_both_op_sets_agree(kind, softmax):
    images, labels = random_batch()
    torch.manual_seed(0)
    stock = model.MODELS[kind](CONFIG, use_softmax_attn=softmax, ops="torch").to(DEVICE)
    found = {}
    for name, options in {"camox": {"ops": "camox"}, "cached": {"ops": "torch", "cached": True}}.items():
        made = model.MODELS[kind](CONFIG, use_softmax_attn=softmax, **options).to(DEVICE)
        made.load_state_dict(stock.state_dict(), strict=True)
        found[name] = demo_run.run_once(made, images, labels)
    expected = demo_run.run_once(stock, images, labels)
    for name, values in found.items():
        assert values.keys() == expected.keys()
        for key, value in values.items():
            scale = expected[key].abs().max()
            assert (value - expected[key]).abs().max() <= 2e-5 * scale, (name, key)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 on the CPU")
def test_models_are_held_to_float64_and_a_wrong_one_fails():
    models = demo_run.build_twins(CONFIG)
    errors = demo_run.compare(models, *random_batch())
    assert errors["passed"], errors["worst"]
    models["camox"].attn.register_forward_hook(lambda module, inputs, out: out * (1 + 1e-3))
    models["camox"].ln.eps = 1e-3
    assert not demo_run.compare(models, *random_batch())["passed"]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts what the CPU allocates")
def test_camox_saves_less_for_backward():
    config = bdh.BDHConfig(**SIZES | {"dropout": 0.1, "mlp_internal_dim_multiplier": 32})
    used = {name: demo_run.used(made, *random_batch(8)) for name, made in demo_run.build_twins(config).items()}
    wide = config.n_layer * 8 * 64 * config.n_head * config.head_size * 4 / 1e6  # one (B, H, T, N) tensor a pass, in MB
    assert used["camox"]["saved_mb"] <= 3.9 * wide  # both sides of the gate, its result, the small ones
    assert used["camox"]["saved_mb"] <= 0.6 * used["torch"]["saved_mb"]
    assert used["camox"]["peak_mb"] < used["torch"]["peak_mb"]


def test_dropout_is_drawn_from_the_seed_and_off_in_evaluation():
    made = model.VisionBDHv2(bdh.BDHConfig(**SIZES | {"dropout": 0.5})).to(DEVICE)
    images, _ = random_batch()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(made(images))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    made.eval()
    assert torch.equal(made(images), made(images))


def test_model_under_autocast():
    images, labels = random_batch()
    for ops in bdh.OPS:
        torch.manual_seed(0)
        made = model.VisionBDHv2(CONFIG, ops=ops).to(DEVICE)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            logits = made(images)
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
        assert logits.dtype == torch.bfloat16
        assert all(p.grad.isfinite().all() for p in made.parameters() if p.requires_grad)
        torch.testing.assert_close(logits.float(), made(images), rtol=0.1, atol=0.1)


def test_attention_on_given_tables():
    """The bits of its own; those of another length are refused by bdh_attention."""
    attention, (q, v) = cx.nn.BidirectionalBDHAttention(CONFIG, False), heads()
    given = attention.tables(q.shape[2])
    assert torch.equal(attention(q, q, v, tables=given), attention(q, q, v))
    assert not torch.equal(attention(q, q, v, tables=given[::-1]), attention(q, q, v))
    with pytest.raises(ValueError, match="cos and sin must have a row for each"):
        attention(q, q, v, tables=attention.tables(q.shape[2] - 1))


def test_a_step_makes_its_tables_once_and_casts_twice_a_pass():
    """The tokens, and what the pass adds to them; forward and again backward. A GPU waits for the host's launches."""
    images, casts = random_batch()[0], {}
    for layers in (1, 3):
        built = model.VisionBDHv2(replace(CONFIG, n_layer=layers), ops="camox").to(DEVICE)
        tables, made = built.attn.tables, []
        built.attn.tables = lambda length, tables=tables, made=made: made.append(length) or tables(length)
        with torch.profiler.profile() as profile, torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            built(images).float().sum().backward()
        assert made == [built.num_patches]
        casts[layers] = sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")
    assert casts[3] - casts[1] == 2 * 4


@pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 on the CPU")
def test_float64_model_stays_so_under_autocast():
    images, _ = random_batch(2)
    made = model.VisionBDHv2(CONFIG).eval().double()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = made(images.double())
    assert torch.equal(inside, made(images.double()))


class Adapter(torch.nn.Module):
    """Around an attention, as an adapter's library puts one."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    def forward(self, *args, **named):
        return 1.5 * self.base_layer(*args, **named)


def test_adapter_around_the_attention():
    images, _ = random_batch(2)
    outputs = []
    for ops in bdh.OPS:
        torch.manual_seed(0)
        made = model.VisionBDHv2(CONFIG, ops=ops).to(DEVICE).eval()
        plain = made(images)
        made.attn = Adapter(made.attn)
        outputs.append(made(images))
        assert not torch.equal(outputs[-1], plain)
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("ops", bdh.OPS)
@pytest.mark.parametrize("softmax", [False, True])
def test_attention_maps(ops, softmax):
    images, _ = random_batch(2)
    made = model.VisionBDHv2CLS(CONFIG, use_softmax_attn=softmax, ops=ops).to(DEVICE)
    maps = model.attention_maps(made, images)
    assert [tuple(one.shape) for one in maps] == [(2, 3, 65, 65)] * 3
    for one in maps:
        if softmax:
            torch.testing.assert_close(one.sum(-1), torch.ones(2, 3, 65))
        else:
            torch.testing.assert_close(one, one.mT)
    centre = report.maps_of_centre(made, images, passes=(0, -1))
    assert list(centre) == [0, 2]
    np.testing.assert_allclose(centre[2][1].ravel(), maps[2].mean(1)[1, 1 + 36, 1:].cpu(), rtol=1e-6)
    assert made.training


def test_unknown_ops_are_refused():
    with pytest.raises(ValueError, match="ops must be one of"):
        model.VisionBDHv2(CONFIG, ops="jax")


# ---- data ----


def write_cifar10(folder, per_file=4):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*data.TRAIN_FILES, data.TEST_FILE):
        images = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        content = {b"data": images, b"labels": [number % 10 for number in range(per_file)]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = [f"class {number}".encode() for number in range(10)]
    (folder / data.NAMES_FILE).write_bytes(pickle.dumps({b"label_names": names}, protocol=2))
    return folder


def test_cifar10_files(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    for path in (folder, tmp_path):
        train, test = data.open_data(path)
        assert len(train) == 20 and len(test) == 4
        assert train.images.shape == (20, 3, 32, 32) and train.images.dtype == torch.uint8
        assert test.names[3] == "class 3" and train.flipped
    (folder / "data_batch_3").unlink()
    with pytest.raises(data.DatasetError, match=r"no CIFAR-10 in python files: data_batch_3 missing"):
        data.open_data(folder)


@pytest.mark.parametrize("content", ["code", "truncated", "shape", "keys", "labels", "class", "type"])
def test_cifar10_files_that_cannot_be_used(tmp_path, content):
    folder = write_cifar10(tmp_path / "cifar")
    path = folder / "data_batch_2"
    whole = path.read_bytes()
    bad = {
        "code": pickle.dumps(os.getcwd, protocol=2),
        "truncated": whole[:-20],
        "shape": pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}, protocol=2),
        "keys": pickle.dumps({b"other": 1}, protocol=2),
        "labels": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]}, protocol=2),
        "class": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, protocol=2),
        "type": whole.replace(b"u1", b"u3"),
    }
    path.write_bytes(bad[content])
    with pytest.raises(data.DatasetError, match="data_batch_2"):
        data.open_data(folder)
    path.write_bytes(whole)
    (folder / data.NAMES_FILE).write_bytes(pickle.dumps({}, protocol=2))
    with pytest.raises(data.DatasetError, match=r"batches\.meta has no list of names"):
        data.open_data(folder)


@pytest.fixture(scope="module")
def digits():
    return data.open_digits()


def test_digits(digits):
    train, test = digits
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape[1:] == (1, 32, 32)
    assert torch.equal(data.open_digits()[1].images, test.images)
    assert torch.bincount(test.labels).min() >= 25
    rest, chosen = data.split(train, 0.1, seed=3)
    assert (len(rest), len(chosen)) == (1293, 144)


def test_batches_depend_on_seed_and_epoch_alone(digits):
    train = digits[0].part(torch.arange(40, device="cpu"))
    one, again, other = (list(data.batches(train, 8, 0, epoch)) for epoch in (1, 1, 2))
    assert len(one) == 5
    pairs = [pair for first, second in zip(one, again, strict=True) for pair in zip(first, second, strict=True)]
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(one[0][0], other[0][0])
    plain = torch.cat([labels for _, labels in data.batches(train, 8, 0, 1, augmented=False)])
    assert torch.equal(plain.sort().values.cpu(), train.labels.sort().values)


def test_augmentation_keeps_range_and_mirrors_only_where_allowed():
    images = torch.linspace(-1, 1, 32).expand(64, 1, 32, 32)
    rising = {}
    for flipped in (False, True):
        new = data.augment(images, torch.Generator("cpu").manual_seed(0), flipped)
        assert new.shape == images.shape and new.abs().max() <= 1
        rising[flipped] = (new[:, 0, 16, 31] > new[:, 0, 16, 0]).float().mean().item()
    assert rising[False] == 1 and 0.25 < rising[True] < 0.75


# ---- training ----

TINY = {"n_layer": 2, "n_embd": 12, "n_head": 2, "mlp_multiplier": 4, "epochs": 3, "warmup_steps": 4, "batch_size": 8}


@pytest.fixture
def few_digits(digits, monkeypatch):
    some = tuple(dataset.part(torch.arange(60, device="cpu")) for dataset in digits)
    monkeypatch.setattr(training, "open_data", lambda path: some)


@pytest.fixture
def few_stripes(monkeypatch):
    """Sixty images of three classes, stripes of one, two and four pixels: nothing that another package brings."""
    labels = torch.arange(60, device="cpu") % 3
    lines = (torch.arange(32, device="cpu") >> labels[:, None]) % 2
    images = (255 * lines).to(torch.uint8)[:, None, None].expand(-1, 1, 32, -1).contiguous()
    some = data.LabelledImages(images, labels, ["one", "two", "four"], False)
    monkeypatch.setattr(training, "open_data", lambda path: (some, some))


def trainer_of(folder, **options):
    return training.Trainer(training.Config(checkpoint_dir=str(folder), **TINY | options))


def run(folder, **options):
    return trainer_of(folder, **options).run()


def test_resuming_gives_the_numbers_of_an_unbroken_run(tmp_path, few_digits, monkeypatch):
    options = {"accumulation_steps": 2, "deterministic": True}
    unbroken = run(tmp_path / "unbroken", **options)
    record = training.Trainer.record

    def stop_after_the_second(self, epoch, *arguments):
        record(self, epoch, *arguments)
        if epoch == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "record", stop_after_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed", **options)
    monkeypatch.setattr(training.Trainer, "record", record)
    resumed = run(tmp_path / "resumed", **options, resume=True)
    assert resumed["test_accuracy"] == unbroken["test_accuracy"]
    first, second = (checkpoint.load(tmp_path / name / checkpoint.LAST) for name in ("unbroken", "resumed"))
    for name, value in first["model_state_dict"].items():
        assert torch.equal(value, second["model_state_dict"][name]), name
    with open(tmp_path / "resumed" / training.METRICS, newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == training.COLUMNS
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [float(row["train_loss"]) for row in rows] == [row["train_loss"] for row in unbroken["history"]]
    final = torch.load(tmp_path / "resumed" / training.FINAL, weights_only=True)
    model.VisionBDHv2(training.Config(**TINY).sizes(), in_channels=1).load_state_dict(final)
    assert (tmp_path / "resumed" / training.MAPS).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_killed_between_its_two_checkpoints_has_the_best_weights(tmp_path, few_stripes, monkeypatch):
    """The second epoch is the best one."""
    save, saved, shares = checkpoint.save, [], {1: 0.1, 2: 0.9, 3: 0.5}

    def killed_at_the_fourth(path, state):
        saved.append(path)
        if len(saved) == 4:
            raise KeyboardInterrupt
        save(path, state)

    def accuracy_of_epoch(model, dataset, device="cpu"):
        return shares.get(len(trainer.history) + 1, 0.0)

    monkeypatch.setattr(training, "accuracy", accuracy_of_epoch)
    monkeypatch.setattr(training, "write_attention", lambda *arguments: None)
    monkeypatch.setattr(checkpoint, "save", killed_at_the_fourth)
    trainer = trainer_of(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer = trainer_of(tmp_path, resume=True)
    trainer.run()
    assert checkpoint.load(tmp_path / checkpoint.BEST)["epoch"] == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epoch": 1.5}, "epoch must be of type int, got float"),
        ({"epoch": -3}, "epoch must be >= 0, got -3"),
        ({"history": {}}, "history must be of type list, got dict"),
        ({"best": None}, "best must be of type float, got NoneType"),
        ({"rng": {"cpu": None}}, "'NoneType' object has no attribute 'cpu'"),
        ({"optimizer_state_dict": None}, "'NoneType' object has no attribute 'copy'"),
    ],
)
def test_a_checkpoint_of_another_program_is_refused_by_name(tmp_path, few_stripes, changed, message):
    trainer = trainer_of(tmp_path)
    state = {
        "epoch": 0,
        "model_state_dict": trainer.model.state_dict(),
        "optimizer_state_dict": trainer.optimizer.state_dict(),
        "best": 0.5,
        "history": [],
        "rng": checkpoint.rng_state(trainer.device),
    }
    checkpoint.save(tmp_path / checkpoint.LAST, state)
    trainer_of(tmp_path, resume=True)
    checkpoint.save(tmp_path / checkpoint.LAST, state | changed)
    expected = f"checkpoint {tmp_path / checkpoint.LAST} does not fit this run: {message}"
    with pytest.raises(checkpoint.CheckpointError, match=expected):
        trainer_of(tmp_path, resume=True)


def test_best_weights_of_another_model_are_refused_by_name(tmp_path, few_stripes):
    checkpoint.save(tmp_path / checkpoint.BEST, {"model_state_dict": {}, "epoch": 0})
    trainer = trainer_of(tmp_path)
    trainer.start_epoch = trainer.config.epochs
    with pytest.raises(checkpoint.CheckpointError, match=f"checkpoint {tmp_path / checkpoint.BEST} does not fit"):
        trainer.run()


def test_accumulation_gives_the_gradients_of_one_batch(digits):
    train = digits[0].part(torch.arange(16, device="cpu"))
    torch.manual_seed(0)
    made = model.VisionBDHv2(CONFIG, in_channels=1)
    images, labels = data.normalise(train.images), train.labels
    whole = demo_run.run_once(made, images, labels)
    made.zero_grad()
    for half in (slice(0, 8), slice(8, 16)):
        (torch.nn.functional.cross_entropy(made(images[half]), labels[half]) / 2).backward()
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, whole[f"gradient {name}"], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has graphs of its own")
def test_graphs_for_each_number_of_micro_batches_give_the_same_numbers(tmp_path, few_stripes, imitated_graphs):
    options = {"epochs": 2, "accumulation_steps": 4}  # of the 6 batches of an epoch 4 and 2
    losses = []
    for graph in (False, True):
        trainer = trainer_of(tmp_path, graph=graph, **options)
        losses.append([trainer.train_epoch(epoch) for epoch in range(2)])
    assert losses[0] == losses[1]
    assert len(trainer.step.by_shapes) == 2


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("bf16", [False, True])
def test_a_graph_replays_the_same_steps(tmp_path, few_stripes, bf16):
    options = {"epochs": 6, "accumulation_steps": 4, "dropout": 0.0, "lr": 0.01, "bf16": bf16, "device": "cuda"}
    with torch.device("cpu"):  # generators of the CPU draw the batches
        plain, graphed = (trainer_of(tmp_path, graph=graph, **options) for graph in (False, True))
        losses = [[trainer.train_epoch(epoch) for epoch in range(6)] for trainer in (plain, graphed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-2)
    assert losses[0][-1] < 0.9 * losses[0][0]  # else equal losses would prove nothing
    assert [step.graph is not None for step in graphed.step.by_shapes.values()] == [True, True]
    assert float(graphed.optimizer.param_groups[0]["lr"]) == pytest.approx(graphed.rate(11))


def test_a_step_reads_nothing_from_the_device(tmp_path, few_stripes):
    trainer = trainer_of(tmp_path)
    batch = data.normalise(trainer.training.images[:8]), trainer.training.labels[:8]
    trainer.train_step(*batch)
    with example_path.Reads() as reads:
        trainer.train_step(*batch)
    assert reads.count == 0


def test_a_rate_in_a_tensor_is_written_in_place():
    """As on a GPU: captured steps see the rates of a schedule, and a checkpoint of either kind of run loads."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    number, tensor = (optimizer.capturable(torch.optim.AdamW([weight], fused=True)) for weight in weights)
    tensor.param_groups[0]["capturable"], kept = True, []
    for step, rate in enumerate((0.1, 0.02, 0.3)):
        for weight, updated in zip(weights, (number, tensor), strict=True):
            optimizer.set_rate(updated, rate)
            weight.grad = torch.tensor([1.0, -2.0, 0.5 * step])
            updated.step()
        kept.append(tensor.param_groups[0]["lr"])
        assert kept[-1] is kept[0]
        torch.testing.assert_close(*weights)
    number.load_state_dict(tensor.state_dict())
    optimizer.set_rate(number, 0.1)
    assert number.param_groups[0]["capturable"] is weights[0].is_cuda
    assert float(number.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_learning_rate():
    rates = [training.lr_factor(step, 4, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1 and rates[12] == pytest.approx(0.5) and 0 < rates[-1] < 0.02
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere"], "/nowhere has no CIFAR-10"),
        (["--resume", "--checkpoint-dir", "/nowhere"], "checkpoint /nowhere/last.pth does not exist"),
        (["--lr", "0"], "lr must be > 0, got 0.0"),
        (["--batch-size", "4000"], "batch_size=4000 is more than the"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there: torch finds"),
        (["--checkpoint-dir", __file__], f"cannot write to {__file__}: {__file__} is no folder"),
        (["--lr", "inf"], "lr must be a finite number, got inf"),
        (["--seed", str(2**70)], f"seed must be from 0 to 2**63 - 1, got {2**70}"),
        (["--patch-size", "33"], "patch_size must be at most 32, the side of an image, got 33"),
        (["--n-head", "1000", "--ops", "torch"], "heads must have an even width >= 2"),
        (["--cached"], "cached is an option of --ops torch"),
        (["--graph", "--device", "cpu"], "graph needs ops camox on a CUDA device, got ops camox on cpu"),
        (["--graph", "--device", "cuda", "--compile"], "graph and compile exclude each other"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_every_option_is_explained():
    assert cli.HELP.keys() == training.Config.__dataclass_fields__.keys()
    assert text_training.HELP.keys() == text_training.Config.__dataclass_fields__.keys()


@pytest.mark.slow
def test_digits_are_learned(tmp_path):
    """What the README promises: 95% in a few minutes of CPU time."""
    found = {}
    for ops in bdh.OPS:
        command = [sys.executable, str(example_path.EXAMPLES / "vision_bdh/train.py"), "--ops", ops]
        command += ["--checkpoint-dir", str(tmp_path / ops)]
        environment = {**os.environ, "PYTHONPATH": str(Path(cx.__file__).parents[1])}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
        found[ops] = float(done.stdout.rsplit("test accuracy ", 1)[1].split("%")[0])
    assert min(found.values()) >= 95, found


@pytest.mark.slow
def test_quick_demo(tmp_path):
    command = [sys.executable, str(example_path.EXAMPLES / "vision_bdh/demo.py"), "--mode", "quick"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cx.__file__).parents[1])}
    command += ["--out", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "time per step, ms" in done.stdout
    assert (tmp_path / "demo/report.png").stat().st_size > 10_000


def test_demo_says_what_failed():
    good = {
        "mode": "full",
        "parity": {"passed": True},
        "models": {"torch": {"accuracy": 0.96}, "camox": {"accuracy": 0.95}},
    }
    assert demo_run.failures(good) == []
    weak = good | {"models": {"torch": {"accuracy": 0.96}, "camox": {"accuracy": 0.5}}}
    assert demo_run.failures(weak) == ["--ops camox reached an accuracy of 0.5000, less than 0.95"]
    wrong = good | {"parity": {"passed": False, "worst": "w", "missing": []}}
    assert "camox differs from float64" in demo_run.failures(wrong)[0]


# ---- bdh_text ----


@pytest.fixture
def texts():
    torch.manual_seed(0)
    models = {ops: text_model.BDH(CONFIG, ops).to(DEVICE) for ops in bdh.OPS}
    models["camox"].load_state_dict(models["torch"].state_dict(), strict=True)
    idx = torch.randint(256, (2, 33), generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(DEVICE)
    return models, idx


def test_text_model_has_the_public_parameters(texts):
    for made in texts[0].values():
        assert {name: tuple(value.shape) for name, value in made.state_dict().items()} == PUBLIC_TEXT


def test_text_models_agree(texts):
    models, idx = texts
    found = {}
    for ops, made in models.items():
        logits, loss = made(idx[:, :-1], idx[:, 1:])
        loss.backward()
        found[ops] = [logits, loss, *(p.grad for p in made.parameters())]
    for ours, theirs in zip(found["camox"], found["torch"], strict=True):
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_steps_give_the_logits_of_the_whole(texts):
    models, idx = texts
    made = models["camox"].eval()
    with torch.no_grad():
        whole, _ = made(idx)
        states, found = [None] * CONFIG.n_layer, []
        for position in range(idx.shape[1]):
            logits, states = made.step(idx[:, position], position, states)
            found.append(logits)
    torch.testing.assert_close(torch.stack(found, 1), whole, rtol=1e-4, atol=1e-6)
    assert [tuple(state.shape) for state in states] == [(2, 3, 64, 24)] * 3


def test_generate_is_the_same_by_steps_and_by_the_whole(texts):
    models, idx = texts
    written = []
    for made in models.values():
        torch.manual_seed(5)
        written.append(made.generate(idx[:, :4], 20, top_k=5))
    assert written[0].shape == (2, 24)
    assert torch.equal(*written)
    with pytest.raises(ValueError, match="at least one token"):
        models["camox"].generate(idx[:, :0], 3)


def test_generate_runs_the_model_on_one_token_at_a_time(texts, monkeypatch):
    made = texts[0]["camox"]
    monkeypatch.setattr(made, "forward", lambda *_: pytest.fail("the whole text was run"))
    calls = []
    step = cx.bdh_attention_step
    monkeypatch.setattr(cx, "bdh_attention_step", lambda *args: calls.append(args) or step(*args))
    made.generate(texts[1][:1, :3], 5)
    assert len(calls) == CONFIG.n_layer * (3 + 5 - 1)


def test_library_sources(tmp_path):
    training_text, held_out = text_data.library_sources()
    assert len(training_text) > len(held_out) > 50_000
    inputs, targets = text_data.windows(held_out, 16, 3, torch.Generator("cpu").manual_seed(0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    with pytest.raises(ValueError, match=r"at least 2 \.py files, got 0"):
        text_data.library_sources(tmp_path)
    with pytest.raises(ValueError, match="length must be less than"):
        text_data.windows(held_out[:10], 10, 1, None)


def test_text_training_learns_and_its_weights_load_back(tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"m{number}.py").write_text("for i in range(10):\n    print(i)\n" * 30)
    saved = tmp_path / "weights.pth"
    sizes = ["--n-layer", "2", "--n-embd", "16", "--n-head", "2", "--mlp-multiplier", "4"]
    common = ["--text", str(folder), *sizes, "--length", "32", "--sample", "12"]
    assert (
        text_training.main([*common, "--steps", "100", "--batch-size", "8", "--lr", "0.01", "--save", str(saved)]) == 0
    )
    first = capsys.readouterr().out
    assert float(first.split("held-out text: ")[1].split()[0]) < 3
    assert text_training.main([*common, "--steps", "0", "--load", str(saved)]) == 0
    again = capsys.readouterr().out
    assert first.split("held-out")[1].split("\n")[0] == again.split("held-out")[1].split("\n")[0]
    assert text_training.main([*common, "--prompt", ""]) == 2
    capsys.readouterr()
    assert text_training.main([*common, "--save", str(saved.parent)]) == 2
    assert capsys.readouterr().err == f"error: cannot write {saved.parent}: it is a folder\n"
    torch.save([1, 2], saved)
    assert text_training.main([*common, "--load", str(saved)]) == 2
    assert f"checkpoint {saved} has no values by name" in capsys.readouterr().err
    torch.save({"a": torch.ones(2)}, saved)
    assert text_training.main([*common, "--load", str(saved)]) == 2
    assert f"checkpoint {saved} does not fit this model" in capsys.readouterr().err
