"""The training run: batches of one domain each, the error path, logging, checkpoints, resuming, the final report."""

import csv
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from camox_ops.train import LossMeter

from ..common import checkpoint
from ..common.bdh import check_ops
from ..common.graph import GraphedStep, check_graph
from ..common.options import check_numbers, open_device
from ..common.text import windows
from .attribution import Attribution, ErrorPath, PlainErrorPath, check_updates
from .baseline import BaselineTransformer
from .data import build_corpus, check_corpus, texts
from .optimizer import PathAdamW, plain_adamw
from .report import node_lines, node_rows, path_lines, write_tree
from .tree import HierarchicalTree

MODELS = ("tree", "baseline")
ORDERS = ("mixed", "sequential")
METRICS, NODES, IMAGE, FINAL = "metrics.csv", "nodes.csv", "tree.png", "final_model.pth"
HELD_OUT_SEED = 1


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stopped and what to change."""


@dataclass
class Config:
    """Everything that decides a run's numbers. branching: children of a node per level."""

    data: str | None = None
    checkpoint_dir: str = "./checkpoints_k1"
    model: str = "tree"
    ops: str = "camox"
    updates: str = "path"
    order: str = "mixed"
    embed_dim: int = 128
    ff_dim: int = 256
    num_heads: int = 4
    branching: str = "4,3,2"
    num_layers: int = 4
    max_seq_len: int = 64
    dropout: float = 0.1
    vocab_size: int = 10000
    steps: int = 1000
    batch_size: int = 32
    lr: float = 0.001
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    bf16: bool = False
    seed: int = 42
    resume: bool = False
    init: str | None = None
    device: str = "cpu"
    graph: bool = False
    log_interval: int = 50
    save_interval: int = 500

    def __post_init__(self):
        check_numbers(self)
        for name in ("embed_dim", "ff_dim", "num_heads", "num_layers", "max_seq_len", "steps", "batch_size"):
            at_least(name, getattr(self, name), 1)
        for name in ("log_interval", "save_interval"):
            at_least(name, getattr(self, name), 1)
        at_least("vocab_size", self.vocab_size, 5)
        for name in ("lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads={self.num_heads}, got {self.embed_dim}")
        for name, known in (("model", MODELS), ("order", ORDERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        check_ops(self.ops)
        check_updates(self.updates)
        if self.graph:
            check_graph(self.ops, self.device)
        if self.resume and self.init:
            raise ValueError("init and resume exclude each other: a resumed run has its weights already")
        self.children()

    def children(self):
        """branching as numbers."""
        try:
            found = [int(part) for part in self.branching.split(",")] if self.branching else []
        except ValueError:
            found = [0]
        if any(number < 1 or number > 9 for number in found):
            raise ValueError(f"branching must be numbers from 1 to 9 between commas, got {self.branching!r}")
        return found


def at_least(name, value, least):
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def build_model(config):
    """The model that a Config asks for."""
    sizes = {"embed_dim": config.embed_dim, "ff_dim": config.ff_dim, "num_heads": config.num_heads}
    sizes |= {"max_seq_len": config.max_seq_len, "dropout": config.dropout, "ops": config.ops}
    if config.model == "baseline":
        return BaselineTransformer(config.vocab_size, num_layers=config.num_layers, **sizes)
    children = config.children()
    return HierarchicalTree(config.vocab_size, tree_depth=len(children) + 1, branching_factor=children or None, **sizes)


class Stepper:
    """One training step of a model: loss, backward, error path, update. The baseline has no path.

    With ops "camox" no step waits for the device. The norms and scales of `last`, an Attribution, are tensors of it.
    graph: steps are replayed as a CUDA graph, all of them with inputs of one shape.
    """

    def __init__(self, model, lr=1e-3, weight_decay=0.01, grad_clip=1.0, updates="path", bf16=False, graph=False):
        self.model, self.grad_clip, self.bf16, self.last = model, grad_clip, bf16, None
        self.attribute, by_path = None, False
        if isinstance(model, HierarchicalTree):
            kind = ErrorPath if model.ops == "camox" else PlainErrorPath
            self.attribute = kind(model, grad_clip, updates)
            by_path = kind is ErrorPath and updates == "path"
        self.by_path = by_path
        self.optimizer = (
            PathAdamW(model, lr, weight_decay) if by_path else plain_adamw(model.parameters(), lr, weight_decay)
        )
        self.run = GraphedStep(self.compute) if graph else self.compute

    def step(self, inputs, targets):
        """The loss, on the device."""
        loss, *found = self.run(inputs, targets)
        self.last = Attribution(*found) if found else None
        return loss

    def compute(self, inputs, targets):
        """(loss,) and after it what an Attribution holds, of a model with a path."""
        with self.model.gradients_in_rows() if self.by_path else nullcontext():
            return self.trained(inputs, targets)

    def trained(self, inputs, targets):
        device, found = inputs.device.type, ()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.model.loss(inputs, targets)
        loss.backward()
        if self.attribute is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        else:
            found = self.attribute()
        if self.by_path:
            self.optimizer.step(found.path)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), *found


def draw_batch(corpus, config, step):
    """(number of the domain, inputs, targets) of a step: all texts of a batch are of one domain.

    Drawn from seed and step alone, so that a resumed run draws the same.
    """
    drawn, choice = (int(word) for word in np.random.SeedSequence([config.seed, step]).generate_state(2, np.uint64))
    domains = corpus.domains
    number = choice % len(domains) if config.order == "mixed" else step * len(domains) // config.steps
    text = corpus.training[domains[number]]
    return number, *windows(text, config.max_seq_len, config.batch_size, torch.Generator().manual_seed(drawn >> 1))


@torch.no_grad()
def held_out_losses(model, corpus, length, count=64, left_out=None):
    """{domain: mean loss} over fixed windows of each held-out text; left_out as for HierarchicalTree.features."""
    was_training, found = model.training, {}
    model.eval()
    for domain, text in corpus.held_out.items():
        inputs, targets = windows(text, length, count, torch.Generator().manual_seed(HELD_OUT_SEED))
        found[domain] = model.loss(inputs, targets, **({} if left_out is None else {"left_out": left_out})).float()
    model.train(was_training)
    return {domain: loss.item() for domain, loss in found.items()}


class Trainer:
    """Builds all parts of a run from a Config; run() trains and returns {"history", "held_out", "nodes"}.

    Raises DataError, CheckpointError or TrainingError.
    """

    def __init__(self, config, documents=None):
        """documents: {domain: texts} in the place of those of config.data."""
        self.config, self.device = config, open_device(config.device)
        self.folder = Path(config.checkpoint_dir)
        checkpoint.check_folder(self.folder)
        state = checkpoint.load(self.folder / checkpoint.LAST) if config.resume else None
        torch.manual_seed(config.seed)
        documents = texts(config.data) if documents is None else documents
        words = None
        if state is not None:
            with checkpoint.fitting(self.folder / checkpoint.LAST):
                words = checkpoint.entry(state, "words", list)
        corpus = build_corpus(documents, config.vocab_size, words)
        check_corpus(corpus, config.vocab_size, config.max_seq_len)
        self.corpus = corpus.to(self.device)
        self.model = build_model(config).to(self.device).train()
        if config.init:
            self.load_weights(config.init)
        self.stepper = Stepper(
            self.model, config.lr, config.weight_decay, config.grad_clip, config.updates, config.bf16, config.graph
        )
        nodes, depth = (len(self.model.nodes), len(self.model.levels)) if config.model == "tree" else (0, 0)
        # how often a node lay on the path, per domain
        self.counts = torch.zeros(len(corpus.domains), nodes, device=self.device)
        self.ones = torch.ones(depth, device=self.device)
        self.history, self.start = [], 0
        if state is not None:
            self.resume(state)

    def load_weights(self, path):
        """Begin with the weights of a checkpoint, of this project's or of the public one's."""
        state = checkpoint.load(path, map_location=self.device)
        with checkpoint.fitting(path, "model"):
            self.model.load_state_dict(state.get("model_state_dict", state))

    def resume(self, state):
        """Go on after the step of a checkpoint, to the same numbers as an unbroken run."""
        with checkpoint.fitting(self.folder / checkpoint.LAST):
            self.model.load_state_dict(state["model_state_dict"])
            self.stepper.optimizer.load_state_dict(state["optimizer_state_dict"])
            self.counts.copy_(state["counts"])
            if state["domains"] != self.corpus.domains:
                raise ValueError(f"it has domains {state['domains']}, the texts {self.corpus.domains}")
            self.history, self.start = checkpoint.entry(state, "history", list), checkpoint.entry(state, "step", int)
            checkpoint.set_rng_state(state["rng"], self.device)

    def run(self):
        """Train to the last step, log, save, report."""
        config, meter = self.config, LossMeter()
        began = logged = time.perf_counter()
        since = self.start
        for step in range(self.start, config.steps):
            number, inputs, targets = draw_batch(self.corpus, config, step)
            meter.update(self.stepper.step(inputs, targets))
            if self.stepper.last is not None:
                self.counts[number].index_add_(0, self.stepper.last.path.to(self.device), self.ones)
            done = step + 1
            if done % config.log_interval == 0 or done == config.steps:
                now = time.perf_counter()
                speeds = (done - since) / (now - logged), (done - self.start) / (now - began)
                self.log(done, meter, self.corpus.domains[number], speeds)
                since, logged = done, time.perf_counter()
            if done % config.save_interval == 0 or done == config.steps:
                self.save(done)
        return self.finish()

    def log(self, done, meter, domain, speeds):
        """Print the loss, the speeds and the path: the one place where the host waits for the device."""
        config, last = self.config, self.stepper.last
        loss = meter.take()
        if not math.isfinite(loss):
            place = "" if last is None else f", worst at node {self.model.nodes[last.path[-1]].node_id}"
            raise TrainingError(f"loss became {loss} by step {done}{place}; lower --lr")
        recent, average = speeds
        print(
            f"[{done:6d}/{config.steps}] loss {loss:.4f}  {recent:.1f} step/s (average {average:.1f})  {domain}",
            flush=True,
        )
        if last is not None:
            print("\n".join(path_lines(self.model, last)), flush=True)
        row = {"step": done, "train_loss": loss, "steps_per_s": recent}
        held_out = held_out_losses(self.model, self.corpus, config.max_seq_len)
        self.history.append(row | {f"held_out_{name}": value for name, value in held_out.items()})

    def save(self, done):
        """Write the checkpoints and the metrics so far."""
        state = {
            "step": done,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.stepper.optimizer.state_dict(),
            "counts": self.counts,
            "domains": self.corpus.domains,
            "words": self.corpus.words,
            "history": self.history,
            "rng": checkpoint.rng_state(self.device),
            "args": asdict(self.config),
        }
        checkpoint.save_last(self.folder, state)
        write_rows(self.folder / METRICS, self.history)

    def finish(self):
        """Write the weights and, of a tree, which node learned what; returns what run() returns."""
        config, length = self.config, self.config.max_seq_len
        held_out = held_out_losses(self.model, self.corpus, length)
        checkpoint.save(self.folder / FINAL, self.model.state_dict())
        print("held-out loss: " + ", ".join(f"{name} {value:.4f}" for name, value in held_out.items()), flush=True)
        rows = []
        if config.model == "tree":
            costs = costs_of_leaving_out(self.model, self.corpus, length)
            rows = node_rows(self.model, self.counts.cpu(), self.corpus.domains, costs)
            print("\n".join(node_lines(rows, self.corpus.domains)), flush=True)
            write_rows(self.folder / NODES, rows)
            write_tree(self.folder / IMAGE, self.model, self.counts.cpu(), self.corpus.domains)
            print(f"wrote {self.folder / NODES} and {self.folder / IMAGE}", flush=True)
        return {"history": self.history, "held_out": held_out, "nodes": rows}


def costs_of_leaving_out(model, corpus, length, count=16):
    """How much each domain's held-out loss rises without a node: {node number: {domain: rise}}, the root left out."""
    whole = held_out_losses(model, corpus, length, count)
    found = {}
    for node in model.nodes:
        if len(model.levels[node.level]) > 1:
            without = held_out_losses(model, corpus, length, count, node)
            found[node.number] = {domain: without[domain] - whole[domain] for domain in whole}
    return found


def write_rows(path, rows):
    """Dicts of one set of keys as a CSV file."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
