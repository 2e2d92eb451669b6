"""examples/emberformer: model, simulator, cache, configuration, losses, training."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise

import example_path
import numpy as np
import pytest
import torch
from helpers import DEVICE

one_thread, imitated_graphs = example_path.one_thread, example_path.imitated_graphs
checkpoint = example_path.load("checkpoint", "common")
cli, config, data, losses, model, simulator, sizes, training = (
    example_path.load(name, "emberformer")
    for name in ("cli", "config", "data", "losses", "model", "simulator", "sizes", "training")
)
CheckpointError, EmberFormer = checkpoint.CheckpointError, model.EmberFormer
Counts, EarlyStopping, Trainer = training.Counts, training.EarlyStopping, training.Trainer

SIZES = {"d_model": 24, "nhead": 4, "num_layers": 2, "dim_feedforward": 48, "dropout": 0.0, "patch_size": 4}
SIZES |= {"spatial_decoder": "unet", "spatial_base_channels": 8}
GRID = (8, 8)


def twins(**changes):
    """{"torch": model, "camox": model} of equal weights."""
    torch.manual_seed(0)
    models = {ops: EmberFormer(**{**SIZES, **changes}, ops=ops) for ops in ("torch", "camox")}
    models["camox"].load_state_dict(models["torch"].state_dict(), strict=True)
    return models


def batch_of(size=3, history=5):
    return sizes.random_batch(size, SIZES["patch_size"], GRID, history)


# ---- model ----


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slot": "last"},
        {"use_wind": False},
        {"use_static": False},
        {"max_seq_len": 3, "slot": "last"},
        {"spatial_decoder": "segformer", "segformer_pretrained": False},
    ],
    ids=str,
)
def test_evaluation_is_the_plain_models(changes):
    models, batch = twins(**changes), batch_of()
    for name in ("forward", "forward_pixels"):
        plain, ours = (getattr(models[ops].eval(), name)(*batch.inputs(), GRID) for ops in ("torch", "camox"))
        assert ours.shape == ((3, 1, 8, 8) if name == "forward" else (3, 1, 32, 32))
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slot", ["public", "last"])
def test_gradients_are_the_plain_models(slot):
    models, batch = twins(slot=slot), batch_of()
    for model in models.values():
        model.double()
        double = [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch.inputs()]
        model.forward_pixels(*double, GRID).square().mean().backward()
    for (name, plain), ours in zip(models["torch"].named_parameters(), models["camox"].parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, plain.grad, rtol=1e-6, atol=1e-12, msg=lambda text, name=name: f"{name} {text}"
        )


def test_names_and_shapes_of_parameters():
    state = {name: tuple(value.shape) for name, value in EmberFormer(**SIZES).state_dict().items()}
    expected = {
        "token_embedder.fire_embed.weight": (24, 1),
        "token_embedder.wind_embed.0.weight": (12, 2),
        "token_embedder.wind_embed.2.bias": (24,),
        "token_embedder.static_embed.weight": (24, 10),
        "token_embedder.pos_encoding.pe": (32, 24),
        "temporal_transformer.transformer.layers.1.self_attn.in_proj_weight": (72, 24),
        "temporal_transformer.transformer.layers.1.linear1.weight": (48, 24),
        "spatial_decoder.proj_in.weight": (8, 24, 1, 1),
        "spatial_decoder.inc.block.2.bias": (8,),
        "spatial_decoder.down2.conv.block.0.weight": (32, 16, 3, 3),
        "spatial_decoder.up1.conv.block.0.weight": (16, 48, 3, 3),
        "spatial_decoder.outc.weight": (1, 8, 1, 1),
        "refinement_decoder.input_proj.weight": (32, 25, 1, 1),
        "refinement_decoder.upsample_layers.0.weight": (32, 32, 4, 4),
        "refinement_decoder.upsample_layers.6.weight": (32, 16, 4, 4),
        "refinement_decoder.upsample_layers.10.running_mean": (16,),
        "refinement_decoder.output_conv.bias": (1,),
    }
    assert {name: state.get(name) for name in expected} == expected
    assert len(state) == 9 + 2 * 12 + 24 + 28


def test_public_segformer_checkpoints_load_without_the_encoder_that_is_never_called():
    sizes = {**SIZES, "spatial_decoder": "segformer", "segformer_pretrained": False}
    model = EmberFormer(**sizes)
    state = model.state_dict()
    assert state["spatial_decoder.segformer.decode_head.linear_c.2.proj.weight"].shape == (256, 160)
    assert state["spatial_decoder.feature_projections.3.weight"].shape == (256, 24, 1, 1)
    state["spatial_decoder.segformer.segformer.encoder.patch_embeddings.0.proj.weight"] = torch.zeros(3)
    EmberFormer(**sizes).load_state_dict(state, strict=True)


def test_pretrained_head_comes_from_a_file(tmp_path):
    sizes = {**SIZES, "spatial_decoder": "segformer"}
    made = EmberFormer(**sizes, segformer_pretrained=False).spatial_decoder.segformer.decode_head
    folder = tmp_path / "segformer-b0"
    folder.mkdir()
    stored = {f"decode_head.{name}": value for name, value in made.state_dict().items()}
    torch.save({**stored, "decode_head.classifier.weight": torch.zeros(150, 256, 1, 1)}, folder / "pytorch_model.bin")
    loaded = EmberFormer(**sizes, segformer_model=str(folder)).spatial_decoder.segformer.decode_head
    assert torch.equal(loaded.linear_fuse.weight, made.linear_fuse.weight)
    with pytest.raises(ValueError, match=r"nothing is downloaded, and 'nvidia/segformer-b0.*pretrained: false"):
        EmberFormer(**sizes)
    torch.save({name: value for name, value in stored.items() if "fuse" not in name}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lacks decode_head\.linear_fuse\.weight"):
        EmberFormer(**sizes, segformer_model=str(folder))


@pytest.mark.parametrize("ops", ["torch", "camox"])
def test_slot_of_histories_padded_on_the_left(ops):
    """Of five slots of which the last two are valid, the public model takes slot 1, which is padding; "last" slot 4."""
    public, last = (twins(slot=slot)[ops].eval() for slot in ("public", "last"))
    batch = batch_of(2)
    batch.valid_t[0], batch.valid_t[1] = torch.arange(5) >= 3, True
    at_1, at_4 = batch.fire.clone(), batch.fire.clone()
    at_1[0, :, 1] += 1
    at_4[0, :, 4] += 1

    def features(model, fire):
        return model.encode(fire, *batch.inputs()[1:])

    assert not torch.allclose(features(public, at_1)[0], features(public, batch.fire)[0])
    torch.testing.assert_close(features(last, at_1)[0], features(last, batch.fire)[0])
    assert not torch.allclose(features(last, at_4)[0], features(last, batch.fire)[0])
    # Where nothing is padded both take the same step.
    torch.testing.assert_close(features(last, batch.fire)[1], features(public, batch.fire)[1])
    # The last slot of a history alone is that of the padded one, but for the positions, which count from the left.
    model = twins(slot="last")[ops].eval()
    model.token_embedder.pos_encoding.pe.zero_()
    alone = model.encode(batch.fire[:1, :, 3:], batch.wind[:1, 3:], batch.static[:1], batch.valid_t[:1, 3:])
    torch.testing.assert_close(features(model, batch.fire)[:1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", ["torch", "camox"])
def test_checkpointing_gives_the_same_gradients(ops):
    found = []
    for parts in (0, 3):
        model = twins()[ops].double()
        model.gradient_checkpointing_enable(parts)
        inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch_of().inputs()]
        model(*inputs, GRID).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for with_all, in_parts in zip(*found, strict=True):
        torch.testing.assert_close(in_parts, with_all, rtol=1e-8, atol=1e-12)
    with pytest.raises(ValueError, match="parts must be >= 0, got -1"):
        model.gradient_checkpointing_enable(-1)


def test_checkpointing_repeats_dropout_and_keeps_less():
    """In one part and in four: the masks of a part are those of its forward pass, so the gradients are exact."""
    batch, kept = batch_of(), []
    for parts in (0, 4):
        own = twins(dropout=0.3)["camox"]
        own.gradient_checkpointing_enable(parts)
        storages = {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            own(*batch.inputs(), GRID)
        kept.append(sum(storages.values()))
    assert kept[1] < 0.5 * kept[0]
    own.double()
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch.inputs()]
    weight = own.temporal_transformer.transformer.layers[0].linear1.bias

    def loss(shift=0.0):
        torch.manual_seed(5)
        with torch.no_grad():
            weight[0] += shift
        result = own(*inputs, GRID).square().sum()
        with torch.no_grad():
            weight[0] -= shift
        return result

    loss().backward()
    numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
    torch.testing.assert_close(weight.grad[0], numeric.detach(), rtol=1e-5, atol=1e-9)


def test_model_errors():
    with pytest.raises(ValueError, match=r"grid_shape \(3, 4\) does not have the 64 patches"):
        EmberFormer(**SIZES)(*batch_of().inputs(), (3, 4))
    for changes, message in (
        ({"spatial_decoder": "fpn"}, "spatial_decoder must be one of"),
        ({"slot": "first"}, "slot must be one of"),
        ({"patch_size": 12}, "patch_size must be a power of 2, got 12"),
        ({"ops": "jax"}, "ops must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            EmberFormer(**{**SIZES, **changes})


# ---- simulator ----


def test_fires_repeat_with_the_seed_and_only_grow():
    fires, same, other = (simulator.simulate(3, 32, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(fires.masks, same.masks) and torch.equal(fires.landscape.static, same.landscape.static)
    assert not torch.equal(fires.masks, other.masks)
    areas = fires.masks.flatten(2).sum(2)
    assert (areas[:, 0] > 0).all() and areas[:, -1].sum() > 1.5 * areas[:, 0].sum()
    for before, after in pairwise(fires.masks.unbind(1)):
        assert not (before & ~after).any()
    assert not (fires.masks[:, -1] & (fires.landscape.channel("water") > 0)).any()
    assert fires.wind.min() >= 0 and fires.wind.max() <= 1
    static = fires.landscape.static
    assert static.min() >= -1 and static.max() <= 1 and static.isfinite().all()


def burn(landscape, speed, turn, steps=14):
    """Share of the cells on fire (S, H, W) after so many steps from the middle."""
    size = landscape.static.shape[-1]
    age = torch.zeros(len(landscape.static), size, size, dtype=torch.int8)
    age[:, size // 2, size // 2] = 1
    generator, chances = torch.Generator().manual_seed(0), simulator.chances(landscape)
    for _ in range(steps):
        simulator.step(age, chances, speed, turn, torch.rand(age.shape, generator=generator))
    return (age > 0).float().mean(0)


def flat(count=24, size=41, **channels):
    static = torch.zeros(count, len(simulator.CHANNELS), size, size)
    for name, value in {"shrub": 1.0, "density": 0.6, **channels}.items():
        static[:, simulator.CHANNELS.index(name)] = value
    return simulator.Landscape(static)


def test_fires_follow_wind_slope_and_fuel():
    still, fast = torch.zeros(24), torch.full((24,), 8.0)
    to_the_right = burn(flat(), fast, still)
    assert to_the_right[:, 21:].sum() > 3 * to_the_right[:, :20].sum()
    down = burn(flat(), fast, torch.full((24,), math.pi / 2))
    assert down[21:].sum() > 3 * down[:20].sum()
    uphill = burn(flat(elevation=torch.linspace(0, 0.3, 41)), still, still)
    assert uphill[:, 21:].sum() > 1.5 * uphill[:, :20].sum()
    assert burn(flat(shrub=0.0, forest=1.0), still, still).sum() > burn(flat(shrub=0.0, grass=1.0), still, still).sum()
    lake = torch.zeros(41, 41)
    lake[:, 24:27] = 1
    assert burn(flat(water=lake), fast, still, 40)[:, 24:].sum() == 0


# ---- cache ----


@pytest.fixture(scope="module")
def fires():
    return simulator.simulate(6, 16, 4, 3)


@pytest.fixture
def cache(tmp_path, fires):
    """(Config, cache folder) of the simulator's fires written in the public layout."""
    data.write_cache(fires, tmp_path / "cache", tmp_path / "raw", 4)
    made = config.Config()
    made.data.data_dir, made.data.num_workers, made.data.batch_size = str(tmp_path / "raw"), 0, 4
    made.patchify_on_disk.cache_dir, made.patchify_on_disk.patch_size = str(tmp_path / "cache"), 4
    return made, tmp_path / "cache"


def test_cache_gives_what_was_written(cache, fires):
    settings, _ = cache
    read = data.open_sequences(settings)
    assert [sequence.name for sequence in read] == [f"sequence_{number:03d}" for number in range(1, 7)]
    for number, sequence in enumerate(read):
        simulated = data.SimulatedSequence(fires, number, 4)
        for mine, theirs in zip(sequence.tokens(3), simulated.tokens(3), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert torch.equal(sequence.target(3), simulated.target(3))


def test_cache_of_a_file_for_each_frame(cache):
    settings, folder = cache
    expected = data.open_sequences(settings)[0].tokens(2)[0]
    sequence, meta = folder / "sequence_001", json.loads((folder / "sequence_001" / "meta.json").read_text())
    del meta["fire_tokens"]
    meta["fires"] = {str(t): f"fire_tokens_t{t:03d}.npy" for t in range(4)}
    for t, frame in enumerate(np.load(sequence / "fire_tokens.npy")):
        np.save(sequence / f"fire_tokens_t{t:03d}.npy", frame)
    (sequence / "meta.json").write_text(json.dumps(meta))
    assert torch.equal(data.open_sequences(settings)[0].tokens(2)[0], expected)


def test_batches_are_padded_on_the_left(fires):
    sequence = data.SimulatedSequence(fires, 0, 4)
    dataset = data.NextFrames([sequence])
    batch = data.collate([dataset[0], dataset[2]])
    assert batch.fire.shape == (2, 16, 3) and batch.wind.shape == (2, 3, 2)
    assert batch.valid_t.tolist() == [[False, False, True], [True, True, True]]
    assert torch.equal(batch.fire[0, :, 2], sequence.fire[0]) and not batch.fire[0, :, :2].any()
    assert torch.equal(batch.target[0], sequence.target(1)) and torch.equal(batch.target[1], sequence.target(3))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def zipped(path):
    with open(path, "wb") as file:
        np.savez(file, np.ones((4, 2)))


def with_wind(name):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"wind": name}))


def with_number(value):
    """The file's second row gets it."""

    def change(path):
        array = np.load(path)
        array[1, 0] = value
        np.save(path, array)

    return change


def other_patch(path):
    path.write_text(path.read_text().replace('"patch_size": 4', '"patch_size": 8'))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cache/sequence_003/wind.npy", lambda path: path.unlink(), "wind.npy is missing, truncated"),
        ("cache/sequence_003/fire_tokens.npy", truncate, "fire_tokens.npy is missing, truncated"),
        (
            "cache/sequence_003/static_tokens.npy",
            lambda path: np.save(path, np.ones((3, 10))),
            r"must have shape \(16, ",
        ),
        ("cache/sequence_003/meta.json", truncate, "cannot read .*meta.json"),
        ("cache/sequence_003/meta.json", lambda path: path.write_text("{}"), "meta.json: no usable 'num_frames'"),
        ("cache/sequence_003/meta.json", other_patch, "patch_size is 8, the configuration's 4"),
        ("cache/sequence_003/wind.npy", zipped, "wind.npy must be a .npy file of real numbers"),
        (
            "cache/sequence_003/wind.npy",
            lambda path: np.save(path, np.ones((4, 2), complex)),
            "wind.npy must be a .npy file of real numbers",
        ),
        ("cache/sequence_003/meta.json", with_wind(None), "meta.json: no usable name of a file in the folder: None"),
        (
            "cache/sequence_003/meta.json",
            with_wind("../sequence_002/wind.npy"),
            "no usable name of a file in the folder: '../sequence_002/wind.npy'",
        ),
        ("cache/sequence_003/meta.json", with_wind("/wind.npy"), "no usable name of a file in the folder: '/wind.npy'"),
        ("cache/sequence_003/meta.json", lambda path: path.write_text("[" * 100_000), "cannot read .*meta.json"),
        (
            "cache/sequence_003/wind.npy",
            with_number(np.nan),
            r"wind.npy must have finite numbers, has nan at \(1, 0\)",
        ),
        (
            "cache/sequence_003/static_tokens.npy",
            lambda path: np.save(path, np.load(path).astype(np.float64) * 1e300),
            "static_tokens.npy must have finite numbers",
        ),
        (
            "cache/sequence_003/fire_tokens.npy",
            with_number(np.inf),
            r"fire_tokens.npy must have finite numbers, has inf at \(1, 0\)",
        ),
        ("raw/isochrones/sequence_003/frame_002.png", lambda path: path.unlink(), "must have 4 PNG files, has 3"),
        ("raw/isochrones/sequence_003/frame_002.png", truncate, "frame_002.png is truncated"),
        ("cache", shutil.rmtree, "cache is no folder; simulator.enabled"),
    ],
)
def test_cache_errors_come_before_training(cache, tmp_path, name, change, message):
    settings, _ = cache
    settings.train.checkpoint_dir = str(tmp_path / "run")
    change(tmp_path / name)
    with pytest.raises(data.CacheError, match=message):
        Trainer(settings)
    assert not (tmp_path / "run").exists()


def test_a_damaged_image_is_named_when_it_is_read(cache):
    settings, _ = cache
    sequence = data.open_sequences(settings)[0]
    content = bytearray(sequence.images[1].read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(byte ^ 255 for byte in content[middle : middle + 8])
    sequence.images[1].write_bytes(content)
    with pytest.raises(data.CacheError, match=f"{sequence.images[1]} is damaged"):
        sequence.target(1)


def test_split_is_the_public_scripts(cache):
    settings, folder = cache
    sequences = data.open_sequences(settings)
    shares = config.Split(train=0.5, val=0.34, test=0.16, seed=42)
    names = {part: [s.name for s in found] for part, found in data.split(sequences, shares).items()}
    # random.Random(42).shuffle of the six names
    assert names == {
        "train": ["sequence_004", "sequence_002", "sequence_003"],
        "val": ["sequence_005", "sequence_001"],
        "test": ["sequence_006"],
    }
    stored = {"train": ["sequence_006"], "val": ["sequence_001"], "test": []}
    (folder / "_splits").mkdir()
    path = folder / "_splits" / "emberformer-seq-split-seed42.json"
    path.write_text(json.dumps(stored))
    parts = data.split(sequences, shares, folder)
    assert {part: [s.name for s in found] for part, found in parts.items()} == stored
    path.write_text(json.dumps({**stored, "val": ["sequence_009"]}))
    with pytest.raises(data.CacheError, match="does not fit the cache: 'sequence_009'"):
        data.split(sequences, shares, folder)
    path.write_text("[" * 100_000)
    with pytest.raises(data.CacheError, match=f"{path} does not fit the cache"):
        data.split(sequences, shares, folder)
    with pytest.raises(data.CacheError, match="leaves none of two frames to val"):
        data.split(sequences, config.Split(train=1.0, val=0.0, test=0.0))


# ---- configuration ----


PUBLIC_KEYS = """
global: {seed: 42, cudnn_benchmark: true}
data: {data_dir: "~/x", batch_size: 16, num_workers: 8, pin_memory: true, drop_last: false, shuffle: true,
       sequence_length: 3}
encoding: {fire_channel: 1, fire_value: 231, isochrone_channel: 1, isochrone_value: 231}
wandb: {enabled: true, mode: online, project: p, entity: e, run_name:, run_name_template: t, tags: [a], auto_tags: true,
        log_batch_preview: false, max_preview_images: 2, preview_size: 400, watch: false, log_artifacts: true}
model:
  temporal: {d_model: 96, nhead: 8, num_layers: 4, dim_feedforward: 384, dropout: 0.1, max_seq_len: 32, use_wind: true,
             use_static: true}
  spatial: {decoder_type: unet, pretrained: true, model_name: nvidia/segformer-b1, freeze_initially: false,
            freeze_epochs: 5, base_channels: 48}
  metrics: {pred_thresh: 0.5, target_thresh: 0.05, pos_weight: "auto"}
  loss: {type: focal_tversky, use_dice: true, bce_weight: 0.9, dice_weight: 0.1, focal_weight: 0.7, tversky_weight: 0.3,
         focal_alpha: 0.25, focal_gamma: 2.0, tversky_alpha: 0.7, tversky_beta: 0.3}
train: {model: m, epochs: 20, lr: 1e-3, lr_temporal: 1e-3, lr_spatial: 1e-4, weight_decay: 1e-4, log_images_every: 1,
        log_metrics_every: 50, save_checkpoints: true, checkpoint_dir: c,
        early_stopping: {enabled: true, patience: 3, min_delta: 0.002, mode: max, monitor: val/f1}}
patchify_on_disk: {enabled: true, cache_dir: "~/y", patch_size: 16, stride: 16, pad_mode: strict, log_artifact: true,
                   progress_use_tqdm: true, progress_log_every: 25, progress_log_to_wandb: true, preview_n: 1}
split: {train: 0.8, val: 0.1, test: 0.1, seed: 42}
"""


def test_public_keys_are_read(tmp_path):
    path = tmp_path / "public.yaml"
    path.write_text(PUBLIC_KEYS)
    read = config.read(path)
    assert read.train.lr_temporal == 1e-3 and read.model.temporal.nhead == 8 and read.wandb.run_name is None
    assert read.run.seed == 42 and read.train.early_stopping.patience == 3 and read.model.temporal.slot == "public"
    arguments = config.model_arguments(read, 10)
    EmberFormer(**arguments)
    assert arguments["patch_size"] == 16 and arguments["spatial_base_channels"] == 48


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {temporal: {d_modell: 8}}", r"x.yaml: unknown key model.temporal.d_modell; did you mean d_model\?"),
        ("model: {temporal_transformer: {}}", r"unknown key model.temporal_transformer; did you mean temporal\?"),
        ("run: {seed: 1}", "unknown key run"),
        ("data: {batch_size: many}", "data.batch_size must be int, got 'many'"),
        ("data: {batch_size: 0}", "data.batch_size must be >= 1, got 0"),
        ("train: {lr_temporal: fast}", "train.lr_temporal must be float, got 'fast'"),
        ("train: {amp: fp8}", "train.amp must be one of auto, off, bf16, fp16, got 'fp8'"),
        ("model: {loss: {type: mse}}", "model.loss.type must be one of"),
        ("model: {temporal: {d_model: 30, nhead: 4}}", "d_model must be even and a multiple of nhead=4, got 30"),
        ("patchify_on_disk: {patch_size: 12}", "patch_size must be a power of 2, got 12"),
        ("split: {train: 0.9, val: 0.2}", "split: shares"),
        ("train: {lr_temporal: .inf}", "x.yaml: train.lr_temporal must be a finite number, got inf"),
        ("global: {seed: -1}", r"global.seed must be from 0 to 2\*\*63 - 1, got -1"),
        ("train: [1]", "train must be a mapping"),
        ("a: [", "is not YAML"),
        ("[" * 1000, "x.yaml is not YAML"),
        (b"\xff\xfe\xfd", "x.yaml is not YAML"),
    ],
)
def test_configuration_errors_name_file_and_key(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(config.ConfigError, match=message):
        config.read(path)


def test_the_files_here_are_read_and_a_user_error_is_one_line(tmp_path, capsys):
    for path in sorted(cli.DEMO.parent.glob("*.yaml")):
        assert config.read(path).train.epochs > 0
    path = tmp_path / "x.yaml"
    path.write_text("trian: {}")
    assert cli.main(["--config", str(path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "unknown key trian; did you mean train?" in error and error.count("\n") == 1


# ---- losses ----


def test_losses_are_the_plain_formulas():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1, 6, 5, generator=generator, dtype=torch.float64)
    target = (torch.rand(3, 1, 6, 5, generator=generator) < 0.4).double()
    target[1] = 0
    mask = (torch.rand(3, 1, 6, 5, generator=generator) < 0.8).double()
    p, chosen = torch.sigmoid(logits), mask > 0
    of_truth = torch.where(target > 0, p, 1 - p)
    alpha = torch.where(target > 0, 0.25, 0.75)
    close = torch.testing.assert_close
    close(losses.bce_loss(logits, target, mask), -of_truth.log()[chosen].mean())
    weighted = torch.where(target > 0, 3.0, 1.0) * -of_truth.log()
    close(losses.bce_loss(logits, target, mask, torch.tensor(3.0)), weighted[chosen].mean())
    close(losses.focal_loss(logits, target, mask), (alpha * (1 - of_truth) ** 2 * -of_truth.log())[chosen].mean())
    indices, dices = [], []
    for own_p, own_y, own_m in zip(p, target, chosen, strict=True):
        own_p, own_y = own_p[own_m], own_y[own_m]
        hit, false_alarm, missed = (own_p * own_y).sum(), (own_p * (1 - own_y)).sum(), ((1 - own_p) * own_y).sum()
        indices.append((hit + 1) / (hit + 0.7 * false_alarm + 0.3 * missed + 1))
        if own_y.any():
            dices.append((2 * hit + 1) / (own_p.sum() + own_y.sum() + 1))
    close(losses.tversky_loss(logits, target, mask), 1 - torch.stack(indices).mean())
    assert len(dices) == 2
    close(losses.dice_loss(logits, target, mask), (1 - torch.stack(dices).mean() + 1e-7).sqrt())
    positive = (target * mask).sum()
    close(losses.auto_pos_weight(target, mask), (mask.sum() - positive) / positive)


def test_dice_of_images_that_do_not_burn_is_0():
    logits = torch.randn(2, 1, 4, 4, requires_grad=True)
    loss = losses.dice_loss(logits, torch.zeros(2, 1, 4, 4), torch.ones(2, 1, 4, 4))
    loss.backward()
    assert loss == 0 and not logits.grad.any()


def test_criterion_follows_the_configuration():
    logits, target, mask = torch.randn(2, 1, 4, 4), torch.eye(4).expand(2, 1, 4, 4), torch.ones(2, 1, 4, 4)
    total, parts = losses.Criterion(config.Loss(type="focal_tversky"))(logits, target, mask)
    torch.testing.assert_close(total, 0.7 * parts["focal"] + 0.3 * parts["tversky"])
    criterion = losses.Criterion(config.Loss())
    total, parts = criterion(logits, target, mask)
    torch.testing.assert_close(total, 0.5 * parts["bce"] + 0.5 * parts["dice"])
    torch.testing.assert_close(parts["bce"], losses.bce_loss(logits, target, mask, torch.tensor(3.0)))
    torch.testing.assert_close(
        criterion(logits, target, mask, training=False)[1]["bce"], losses.bce_loss(logits, target, mask)
    )
    assert list(losses.Criterion(config.Loss(use_dice=False), 2.0)(logits, target, mask)[1]) == ["bce"]
    patches = losses.pixel_mask(torch.tensor([[True, False, False, True]]), (2, 2), 2)
    assert patches[0, 0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_counts_are_scores_of_masked_pixels():
    logits = torch.tensor([[[[2.0, 2.0, -2.0, -2.0, 2.0]]]])
    target = torch.tensor([[[[1.0, 0.0, 1.0, 0.0, 1.0]]]])
    counts = Counts("cpu")
    mask = torch.tensor([[[[1.0, 1.0, 1.0, 1.0, 0.0]]]])
    counts.update(training.outcomes(logits, target, mask, config.Metrics()))
    assert counts.scores() == {"acc": 0.5, "prec": 0.5, "rec": 0.5, "f1": 0.5, "iou": 1 / 3}
    assert Counts("cpu").scores()["f1"] == 0


# ---- training ----


def test_early_stopping_waits_for_more_than_min_delta():
    stopping = EarlyStopping(config.Stopping(enabled=True, patience=2, min_delta=0.1))
    assert [stopping.update(epoch, value) for epoch, value in enumerate((0.5, 0.55, 0.7, 0.75, 0.79))] == [
        *(False, False, False, False),
        True,
    ]
    assert (stopping.best, stopping.best_epoch) == (0.7, 2)
    falling = EarlyStopping(config.Stopping(enabled=True, patience=1, min_delta=0.0, mode="min"))
    assert [falling.update(epoch, value) for epoch, value in enumerate((2.0, 1.0, 1.0))] == [False, False, True]


def settings_of(folder, **train):
    made = config.Config()
    made.simulator = config.Simulator(enabled=True, sequences=5, size=16, frames=3)
    made.patchify_on_disk.patch_size, made.data.batch_size = 4, 4
    made.model.temporal = config.Temporal(d_model=8, nhead=2, num_layers=1, dim_feedforward=16)
    made.model.spatial = config.Spatial(decoder_type="unet", base_channels=4)
    made.split = config.Split(train=0.6, val=0.4, test=0.0)
    made.wandb.preview_size = 40
    made.train = replace(made.train, checkpoint_dir=str(folder), **train)
    return made


def test_resumed_training_gives_the_same_numbers(tmp_path):
    whole = Trainer(settings_of(tmp_path / "whole", epochs=2, train_refinement=True))
    expected = whole.run()
    Trainer(settings_of(tmp_path / "parts", epochs=1, train_refinement=True)).run()
    resumed = Trainer(settings_of(tmp_path / "parts", epochs=2, train_refinement=True), resume=True)
    assert resumed.start_epoch == 1
    assert resumed.run() == expected
    for mine, theirs in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    names = {path.name for path in (tmp_path / "parts").iterdir()}
    assert names == {
        "last.pth",
        "previous.pth",
        "best_model.pth",
        "metrics.csv",
        *(f"preview_{n:03d}.png" for n in (1, 2)),
    }
    assert len((tmp_path / "parts" / "metrics.csv").read_text().splitlines()) == 3
    (tmp_path / "parts" / "last.pth").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"last.pth is truncated or damaged"):
        Trainer(settings_of(tmp_path / "parts", epochs=3), resume=True)


def test_training_stops_early_and_leaves_the_refinement_decoder_as_the_public_script(tmp_path):
    settings = settings_of(tmp_path, epochs=9, log_images_every=0, lr_temporal=1e-12, lr_spatial=1e-12, amp="bf16")
    settings.train.early_stopping = config.Stopping(enabled=True, patience=2, min_delta=1.0)
    trainer = Trainer(settings, ops="torch")
    before = [p.clone() for p in trainer.model.refinement_decoder.parameters()]
    result = trainer.run()
    assert (result["stopped"], result["best_epoch"], len(result["history"])) == (True, 1, 3)
    for mine, past in zip(trainer.model.refinement_decoder.parameters(), before, strict=True):
        assert torch.equal(mine, past)
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in trainer.model.refinement_decoder.parameters()}
    groups = training.parameter_groups(trainer.model, replace(settings.train, train_refinement=True))
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))


def test_both_op_sets_train_alike_without_dropout(tmp_path):
    found, start = [], None
    for ops in ("torch", "camox"):
        settings = settings_of(tmp_path / ops, epochs=1, log_images_every=0)
        settings.model.temporal.dropout = 0.0
        trainer = Trainer(settings, ops)
        if start is not None:
            trainer.model.load_state_dict(start)
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        found.append(trainer.run()["history"][0])
    assert found[0]["train/loss"] == pytest.approx(found[1]["train/loss"], rel=1e-4)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has graphs of its own")
def test_graphs_for_each_shape_of_a_batch_give_the_same_numbers(tmp_path, imitated_graphs):
    settings = settings_of(tmp_path, epochs=1, log_images_every=0)
    settings.data.batch_size = 1  # histories of one step and of two
    expected = Trainer(settings).run()
    graphed = Trainer(settings, graph=True)
    assert graphed.run() == expected
    assert len(graphed.step.by_shapes) == 2


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("amp", config.AMP)
def test_a_graph_replays_the_same_steps(tmp_path, amp):
    settings = settings_of(
        tmp_path, epochs=4, log_images_every=0, lr_temporal=0.01, lr_spatial=0.01, amp=amp, train_refinement=True
    )
    settings.model.temporal.dropout = 0.0
    settings.data.batch_size = 1
    plain, graphed = (Trainer(settings, device=DEVICE, graph=graph) for graph in (False, True))
    losses = [[row["train/loss"] for row in trainer.run()["history"]] for trainer in (plain, graphed)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[0][-1] < 0.9 * losses[0][0]  # else equal losses would prove nothing
    assert [step.graph is not None for step in graphed.step.by_shapes.values()] == [True, True]


def test_a_step_reads_nothing_from_the_device(tmp_path):
    settings = settings_of(tmp_path)
    settings.model.temporal.max_seq_len, settings.model.temporal.slot = 1, "last"
    settings.model.loss, settings.model.metrics.pos_weight = config.Loss(type="bce_dice"), 2.0
    trainer = Trainer(settings)
    batch = next(iter(trainer.batches))
    trainer.train_step(*batch)
    with example_path.Reads() as reads:
        trainer.train_step(*batch)
    assert reads.count == 0


def test_steps_that_cannot_be_captured_are_refused(tmp_path, capsys):
    assert cli.main(["--graph", "--device", "cpu", "--checkpoint_dir", str(tmp_path / "run")]) == 2
    assert "graph needs ops camox on a CUDA device, got ops camox on cpu" in capsys.readouterr().err
    with pytest.raises(ValueError, match="got ops torch on cuda:1"):
        Trainer(settings_of(tmp_path / "run"), "torch", "cuda:1", graph=True)
    with pytest.raises(ValueError, match=r"graph needs train.gradient_checkpointing: 0, got 4"):
        Trainer(settings_of(tmp_path / "run", gradient_checkpointing=4), device="cuda", graph=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_demo(tmp_path):
    assert example_path.load("demo_run", "emberformer").main(["--mode", "quick", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["parity"]["passed"] and set(result["times"]) >= {
        "torch",
        "torch + tune_cpu",
        "camox",
        "camox + tune_cpu",
    }
    assert (tmp_path / "report.png").stat().st_size > 20_000
