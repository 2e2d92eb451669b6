"""The training run, in one process or under torchrun: experts divided among ranks, everything else averaged over them.

Of n ranks, each takes 1/n of the windows of a step. The ranks are a grid of `data` rows and `experts` columns:

    rank 0   experts 0-7  | rank 1   experts 8-15        expert_parallel exchanges rows of tokens within a row,
    rank 2   experts 0-7  | rank 3   experts 8-15        gradients of equal experts are averaged within a column,
                                                         DistributedDataParallel averages all others over the grid
"""

import contextlib
import json
import math
import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ..common import distributed
from ..common.bdh import check_ops
from ..common.checkpoint import CheckpointError, check_file, check_folder
from ..common.options import check_numbers, open_device
from .data import build_corpus, draw_batch, held_out_batch, texts
from .model import BALANCES, FEED_FORWARDS, LanguageModel, Sizes

WARMUP = 20  # steps until the learning rate is reached
UNTIMED = 3  # first steps that the speed leaves out
LN2 = math.log(2)


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stopped and what to change."""


@dataclass
class Config(Sizes):
    """Everything that decides a run's numbers, and how many ranks share the experts."""

    data: str | None = None
    expert_ranks: int = 0
    length: int = 128
    batch_size: int = 16
    steps: int = 300
    lr: float = 0.002
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    aux_weight: float = 0.01
    bias_rate: float = 0.001
    bf16: bool = False
    double: bool = False
    seed: int = 0
    device: str = "cpu"
    log_interval: int = 50
    save: str | None = None
    load: str | None = None
    metrics: str | None = None

    def __post_init__(self):
        check_numbers(self)
        for name in (
            "dim",
            "num_heads",
            "num_layers",
            "num_experts",
            "top_k",
            "hidden",
            "length",
            "batch_size",
            "steps",
        ):
            at_least(name, getattr(self, name), 1)
        at_least("log_interval", self.log_interval, 1)
        for name in ("shared_hidden", "expert_ranks", "aux_weight"):
            at_least(name, getattr(self, name), 0)
        for name in ("lr", "grad_clip", "bias_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.dim % (2 * self.num_heads):
            raise ValueError(f"dim must be a multiple of 2 * num_heads = {2 * self.num_heads}, got {self.dim}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts = {self.num_experts}, got {self.top_k}")
        check_ops(self.ops)
        for name, known in (("feed_forward", FEED_FORWARDS), ("balance", BALANCES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    @property
    def divided(self):
        """Whether the model's experts can be divided among ranks."""
        return self.feed_forward == "moe" and self.ops == "camox"


def at_least(name, value, least):
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


class Ranks:
    """The processes that train together; a single one without torchrun."""

    def __init__(self, config):
        self.rank, self.world, self.device = distributed.start(open_device(config.device))
        columns = config.expert_ranks or self.world
        if config.batch_size % self.world:
            raise ValueError(f"batch_size must be a multiple of the {self.world} ranks, got {config.batch_size}")
        if self.world % columns:
            raise ValueError(f"expert_ranks must divide the {self.world} ranks, got {columns}")
        self.mesh = None
        if self.world > 1:
            shape, names = (self.world // columns, columns), ("data", "experts")
            self.mesh = dist.init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def own(self, tensor):
        """This rank's part of the rows of a tensor."""
        return tensor.chunk(self.world)[self.rank].to(self.device)

    def sum(self, tensor, group=None):
        """tensor, replaced by its sum over the ranks."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def divide(self, model, config):
        """(the module to call, its experts' parameters if they are divided)."""
        if self.mesh is None:
            return model, []
        experts = []
        if config.divided:
            from camox_ops.nn import expert_parallel

            expert_parallel(model, self.mesh["experts"])
            experts = [p for layer in model.mixtures() for p in (layer.w_in, layer.w_out)]
        return DistributedDataParallel(model), experts


class Stepper:
    """One training step: loss, backward, the norm of all gradients, update, balance."""

    def __init__(self, model, config, ranks=None):
        self.model, self.config, self.ranks, self.taken = model, config, ranks, 0
        self.module, self.experts = (model, []) if ranks is None else ranks.divide(model, config)
        kept = {"lr": config.lr, "weight_decay": config.weight_decay}
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **kept)
        self.usage = None

    def step(self, inputs, targets):
        """The cross-entropy of this rank's part of a batch, on the device."""
        config = self.config
        device = inputs.device.type
        with torch.autocast(device, dtype=torch.bfloat16) if config.bf16 else contextlib.nullcontext():
            logits, aux_loss, infos = self.module(inputs)
        loss = cross_entropy(logits, targets)
        (loss + config.aux_weight * aux_loss).backward()
        self.average_equal_experts()
        self.clip()
        self.taken += 1
        warm = min(1.0, self.taken / WARMUP)
        self.optimizer.param_groups[0]["lr"] = config.lr * warm * (1 - 0.9 * (self.taken - 1) / config.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if config.balance == "bias":
            for layer in self.model.mixtures():
                group = {} if self.ranks is None or self.ranks.mesh is None else {"group": dist.group.WORLD}
                layer.update_router_bias(config.bias_rate, **group)
        self.usage = torch.stack([info["expert_usage"] for info in infos]) if infos[0] else None
        return loss.detach()

    def average_equal_experts(self):
        """Ranks of one column have the same experts and different windows."""
        if self.experts and self.ranks.mesh["data"].size() > 1:
            group = self.ranks.mesh["data"].get_group()
            for parameter in self.experts:
                self.ranks.sum(parameter.grad, group).div_(self.ranks.mesh["data"].size())

    def clip(self):
        """clip_grad_norm_ of all gradients: those of the experts that other ranks have are counted too."""
        own = {id(p) for p in self.experts}
        rest = [p.grad for p in self.model.parameters() if id(p) not in own]
        total = torch.nn.utils.get_total_norm(rest).square()
        if self.experts:
            mine = torch.nn.utils.get_total_norm([p.grad for p in self.experts]).square()
            total = total + self.ranks.sum(mine, self.ranks.mesh["experts"].get_group())
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.grad_clip, total.sqrt())


def cross_entropy(logits, targets):
    real = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(real), targets.flatten())


def build_model(config):
    """The model that a Config asks for, its weights drawn from the seed."""
    torch.manual_seed(config.seed)
    model = LanguageModel(config)
    return model.double() if config.double else model


@torch.no_grad()
def held_out_bits(model, corpus, config, ranks=None, count=64):
    """{domain: bits per byte} over fixed windows of each held-out text."""
    was_training, found = model.training, {}
    model.eval()
    for domain, text in corpus.held_out.items():
        batch = held_out_batch(text, config.length, count)
        inputs, targets = batch if ranks is None else map(ranks.own, batch)
        loss = cross_entropy(model(inputs)[0], targets) * len(inputs)
        found[domain] = (loss if ranks is None else ranks.sum(loss)).item() / count / LN2
    model.train(was_training)
    return found


class Trainer:
    """Builds all parts of a run from a Config; run() trains and returns the metrics.

    Raises DataError, CheckpointError, TrainingError or ValueError.
    """

    def __init__(self, config, documents=None):
        """documents: {domain: texts} in the place of those of config.data."""
        self.config, self.ranks = config, Ranks(config)
        if config.save:
            check_folder(config.save)
        if config.metrics:
            check_file(config.metrics)
        documents = texts(config.data) if documents is None else documents
        self.corpus = build_corpus(documents, config.length)
        self.model = build_model(config).to(self.ranks.device).train()
        self.stepper = Stepper(self.model, config, self.ranks)
        if config.load:
            self.load(config.load)

    def load(self, folder):
        """Weights that any number of ranks has saved."""
        if not Path(folder, ".metadata").is_file():
            why = "was not written by --save, or not to its end" if Path(folder).exists() else "does not exist"
            raise CheckpointError(f"checkpoint {folder} {why}")
        state = {"model": self.model.state_dict()}
        with quiet():
            try:
                dcp.load(state, checkpoint_id=folder, no_dist=self.ranks.mesh is None)
            except dcp.CheckpointException as error:  # a BaseException whose text is the tracebacks of all ranks
                why = next(iter(error.failures.values()))[0]
                raise CheckpointError(f"checkpoint {folder} does not fit this model: {why}") from error
        self.model.load_state_dict(state["model"])

    def run(self):
        """Train, log, save; returns what metrics.json has: losses, busiest, tokens_per_s, held_out."""
        config, ranks = self.config, self.ranks
        losses, usage, times = [], [], []
        for step in range(config.steps):
            start = time.perf_counter()
            inputs, targets = map(ranks.own, draw_batch(self.corpus, config, step))
            losses.append(self.stepper.step(inputs, targets))
            if self.stepper.usage is not None:
                usage.append(self.stepper.usage)
            done = step + 1
            if done % config.log_interval == 0 or done == config.steps:
                self.log(done, losses[-config.log_interval :])
            times.append(time.perf_counter() - start)
        own_tokens = config.batch_size // ranks.world * config.length
        median = statistics.median(times[UNTIMED:] or times)
        metrics = {
            "world": ranks.world,
            "settings": asdict(config),
            "losses": (ranks.sum(torch.stack(losses)) / ranks.world).tolist(),
            "busiest": busiest(ranks.sum(torch.stack(usage))) if usage else None,
            "tokens_per_s": distributed.gather(own_tokens / median),
            "held_out": held_out_bits(self.model, self.corpus, config, ranks),
        }
        if config.save:
            state = {"model": self.model.state_dict()}
            if ranks.rank == 0:  # written last: a save that is killed leaves no mixture of two models that would load
                Path(config.save, ".metadata").unlink(missing_ok=True)
            with quiet():
                dcp.save(state, checkpoint_id=config.save, no_dist=ranks.mesh is None)
        if ranks.rank == 0:
            self.finish(metrics)
        return metrics

    def log(self, done, losses):
        """Print the mean loss over all ranks: the one place where the host waits for the device."""
        mean = self.ranks.sum(torch.stack(losses).mean()).item() / self.ranks.world
        if not math.isfinite(mean):
            raise TrainingError(f"loss became {mean} by step {done}; lower --lr")
        if self.ranks.rank == 0:
            print(f"[{done:6d}/{self.config.steps}] {mean / LN2:.4f} bits per byte", flush=True)

    def finish(self, metrics):
        print("held out, bits per byte: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics["held_out"].items()))
        speeds = ", ".join(f"{speed:.0f}" for speed in metrics["tokens_per_s"])
        print(f"tokens/s of each rank: {speeds}", flush=True)
        if self.config.metrics:
            Path(self.config.metrics).parent.mkdir(parents=True, exist_ok=True)
            Path(self.config.metrics).write_text(json.dumps(metrics, indent=1) + "\n")


@contextlib.contextmanager
def quiet():
    """Without torch's warning that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def busiest(usage):
    """(steps, layers, experts) rows taken -> per step, rows of the busiest expert over a fair share, mean of layers."""
    return (usage.amax(2) / usage.mean(2)).mean(1).tolist()
