"""The public project's YAML files as dataclasses; a key that none of them has is an error that names it.

Keys of configs/emberformer*.yaml of tampueroc/emberformer at d511660, with the defaults of its training script. Ours,
in no public file: model.temporal.slot, train.amp, train.gradient_checkpointing, train.train_refinement, simulator.
"""

import difflib
import types
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path

from ..common.options import check_numbers
from .decoders import PUBLIC_SEGFORMER
from .losses import LOSSES
from .model import DECODERS, SLOTS

AMP = ("auto", "off", "bf16", "fp16")
MONITORS = ("val/f1", "val/iou", "val/loss")


class ConfigError(ValueError):
    """A key or value that is not known; the message names both."""


@dataclass
class Global:
    seed: int = 42
    cudnn_benchmark: bool = True


@dataclass
class Data:
    data_dir: str = ""
    batch_size: int = 8
    num_workers: int = 4
    pin_memory: bool = True
    drop_last: bool = False
    shuffle: bool = True
    sequence_length: int = 3  # read by no public code either


@dataclass
class Encoding:
    fire_channel: int = 1
    fire_value: int = 231
    isochrone_channel: int = 1
    isochrone_value: int = 231


@dataclass
class Previews:
    """The section `wandb`. Nothing is sent anywhere: of it, the previews' number and size are used."""

    enabled: bool = True
    mode: str = "online"
    project: str = "emberformer"
    entity: str | None = None
    run_name: str | None = None
    run_name_template: str = ""
    tags: list = field(default_factory=list)
    auto_tags: bool = True
    log_batch_preview: bool = False
    max_preview_images: int = 2
    preview_size: int = 400
    watch: bool = False
    log_artifacts: bool = True


@dataclass
class Temporal:
    d_model: int = 64
    nhead: int = 4
    num_layers: int = 3
    dim_feedforward: int = 256
    dropout: float = 0.1
    max_seq_len: int = 32
    use_wind: bool = True
    use_static: bool = True
    slot: str = "public"


@dataclass
class Spatial:
    decoder_type: str = "segformer"
    pretrained: bool = True
    model_name: str = PUBLIC_SEGFORMER
    freeze_initially: bool = False
    freeze_epochs: int = 0
    base_channels: int = 32


@dataclass
class Metrics:
    pred_thresh: float = 0.5
    target_thresh: float = 0.05
    pos_weight: float | str | None = "auto"


@dataclass
class Loss:
    type: str = "bce_dice"
    use_dice: bool = True
    bce_weight: float = 0.5
    dice_weight: float = 0.5
    focal_weight: float = 0.7
    tversky_weight: float = 0.3
    focal_alpha: float = 0.25
    focal_gamma: float = 2.0
    tversky_alpha: float = 0.7
    tversky_beta: float = 0.3


@dataclass
class Model:
    temporal: Temporal = field(default_factory=Temporal)
    spatial: Spatial = field(default_factory=Spatial)
    metrics: Metrics = field(default_factory=Metrics)
    loss: Loss = field(default_factory=Loss)


@dataclass
class Stopping:
    enabled: bool = False
    patience: int = 10
    min_delta: float = 0.001
    mode: str = "max"
    monitor: str = "val/f1"


@dataclass
class Train:
    model: str = "emberformer"
    epochs: int = 20
    lr: float = 1e-3  # only names runs
    lr_temporal: float = 1e-3
    lr_spatial: float = 1e-4
    weight_decay: float = 1e-4
    log_images_every: int = 1
    log_metrics_every: int = 50
    save_checkpoints: bool = True
    checkpoint_dir: str = "checkpoints"
    early_stopping: Stopping = field(default_factory=Stopping)
    amp: str = "auto"
    gradient_checkpointing: int = 0
    train_refinement: bool = False


@dataclass
class Cache:
    enabled: bool = True
    cache_dir: str = ""
    patch_size: int = 16
    stride: int = 16
    pad_mode: str = "strict"
    log_artifact: bool = True
    progress_use_tqdm: bool = True
    progress_log_every: int = 25
    progress_log_to_wandb: bool = True
    preview_n: int = 1


@dataclass
class Split:
    train: float = 0.8
    val: float = 0.1
    test: float = 0.1
    seed: int = 42


@dataclass
class Simulator:
    """Built-in fires instead of a cache: squares of `size` pixels, `frames` of them for each of `sequences` fires."""

    enabled: bool = False
    sequences: int = 64
    size: int = 96
    frames: int = 8
    seed: int = 0


@dataclass
class Config:
    run: Global = field(default_factory=Global)  # the section `global`
    data: Data = field(default_factory=Data)
    encoding: Encoding = field(default_factory=Encoding)
    wandb: Previews = field(default_factory=Previews)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    patchify_on_disk: Cache = field(default_factory=Cache)
    split: Split = field(default_factory=Split)
    simulator: Simulator = field(default_factory=Simulator)

    def check(self):
        """ConfigError where a value cannot be."""
        keys = {name: key for key, name in SECTIONS.items()}
        for section in fields(self):
            try:
                check_numbers(getattr(self, section.name), f"{keys.get(section.name, section.name)}.")
            except ValueError as error:
                raise ConfigError(str(error)) from None
        temporal, spatial, train = self.model.temporal, self.model.spatial, self.train
        for where, name, value, choices in (
            ("model.temporal", "slot", temporal.slot, SLOTS),
            ("model.spatial", "decoder_type", spatial.decoder_type, DECODERS),
            ("model.loss", "type", self.model.loss.type, LOSSES),
            ("train", "amp", train.amp, AMP),
            ("train.early_stopping", "monitor", train.early_stopping.monitor, MONITORS),
            ("train.early_stopping", "mode", train.early_stopping.mode, ("max", "min")),
        ):
            if value not in choices:
                raise ConfigError(f"{where}.{name} must be one of {', '.join(choices)}, got {value!r}")
        least = {
            "data": (self.data, {"batch_size": 1, "num_workers": 0}),
            "model.temporal": (temporal, dict.fromkeys(("nhead", "num_layers", "dim_feedforward", "max_seq_len"), 1)),
            "model.spatial": (spatial, {"base_channels": 1, "freeze_epochs": 0}),
            "train": (train, {"epochs": 1, "log_images_every": 0, "log_metrics_every": 1, "gradient_checkpointing": 0}),
            "train.early_stopping": (train.early_stopping, {"patience": 1}),
            "patchify_on_disk": (self.patchify_on_disk, {"patch_size": 1, "stride": 1}),
            "wandb": (self.wandb, {"max_preview_images": 1, "preview_size": 16}),
            "simulator": (self.simulator, {"sequences": 3, "size": 16, "frames": 2}),
        }
        for where, (section, limits) in least.items():
            for name, limit in limits.items():
                if getattr(section, name) < limit:
                    raise ConfigError(f"{where}.{name} must be >= {limit}, got {getattr(section, name)}")
        if temporal.d_model < 2 or temporal.d_model % 2 or temporal.d_model % temporal.nhead:
            raise ConfigError(
                f"model.temporal.d_model must be even and a multiple of nhead={temporal.nhead}, got {temporal.d_model}"
            )
        if not 0 <= temporal.dropout < 1:
            raise ConfigError(f"model.temporal.dropout must be in [0, 1), got {temporal.dropout}")
        for name in ("lr_temporal", "lr_spatial"):
            if not getattr(train, name) > 0:
                raise ConfigError(f"train.{name} must be > 0, got {getattr(train, name)}")
        patch = self.patchify_on_disk.patch_size
        if patch & (patch - 1):
            raise ConfigError(f"patchify_on_disk.patch_size must be a power of 2, got {patch}")
        shares = self.split.train, self.split.val, self.split.test
        if min(shares) < 0 or not self.split.train > 0 or sum(shares) > 1 + 1e-9:
            raise ConfigError(f"split: shares must be >= 0, of train > 0, and at most 1 together, got {shares}")
        weight = self.model.metrics.pos_weight
        if isinstance(weight, str) and weight != "auto":
            raise ConfigError(f"model.metrics.pos_weight must be 'auto', a number or null, got {weight!r}")
        if self.simulator.enabled and self.simulator.size % patch:
            raise ConfigError(f"simulator.size must be a multiple of patch_size={patch}, got {self.simulator.size}")
        return self


SECTIONS = {"global": "run"}


def fill(made, values, where=""):
    """An instance of the dataclass `made` from a mapping."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{where or 'the file'} must be a mapping of keys, got {values!r}")
    known = {field.name: field for field in fields(made)}
    arguments = {}
    for key, value in values.items():
        name = SECTIONS.get(key, key) if made is Config else key
        full = f"{where}.{key}" if where else str(key)
        if name not in known or (made is Config and key == "run"):
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown key {full}{hint} (known here: {', '.join(sorted(known))})")
        wanted = known[name].type
        arguments[name] = fill(wanted, value, full) if is_dataclass(wanted) else convert(wanted, value, full)
    return made(**arguments)


def convert(wanted, value, where):
    """value as one of the types wanted; YAML reads 1e-3, which has no dot, as text."""
    types_wanted = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
    if value is None and type(None) in types_wanted:
        return None
    for kind in types_wanted:
        if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                continue
        if type(value) is kind:
            return value
    names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types_wanted)
    raise ConfigError(f"{where} must be {names}, got {value!r}")


def read(path):
    """The Config of a YAML file; ConfigError names the file and the key."""
    import yaml  # here so that what needs no file runs without PyYAML

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    try:
        return fill(Config, values).check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def model_arguments(config, static_channels):
    """Keyword arguments of EmberFormer."""
    temporal, spatial = asdict(config.model.temporal), config.model.spatial
    return {
        **temporal,
        "static_channels": static_channels,
        "spatial_decoder": spatial.decoder_type,
        "spatial_base_channels": spatial.base_channels,
        "segformer_pretrained": spatial.pretrained,
        "segformer_model": spatial.model_name,
        "freeze_decoder": spatial.freeze_initially,
        "patch_size": config.patchify_on_disk.patch_size,
    }
