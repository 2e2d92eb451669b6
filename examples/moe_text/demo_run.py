"""The demo: a mixture of experts in stock PyTorch and with camox_ops, a dense model of equal FLOP, several ranks."""

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from camox_ops.train import tune_cpu_allocator

from ..common import demo, duel, memory, parity, report
from .data import build_corpus, draw_batch, texts
from .model import BALANCES
from .report import draw, information, kinds_read
from .training import LN2, Config, Stepper, build_model, busiest, cross_entropy, held_out_bits

STEPS = {"full": 350, "quick": 50}
BALANCE_STEPS = {"full": 80, "quick": 16}
RANK_STEPS = {"full": 30, "quick": 12}
TIMING_ROUNDS = {"full": 4, "quick": 2}
RANKS = {"full": (1, 2, 4), "quick": (1, 2)}
# Bits per byte that the mixtures must come below, mean of the last 10 steps; a uniform guess has 8.
CEILING = {"full": 3.2, "quick": 4.6}
LARGEST_FINAL_GAP = 0.03  # between the final losses of both, as a share
LARGEST_RANK_GAP = 0.01  # between losses of one process and of several, as a share: see README.md
RANK_TIMEOUT = 300  # seconds
SHARPER = 8  # factor of the router's weights in the comparison, so that rounding changes no choice


def build_twins(config):
    """{"torch": model, "camox": model} of equal weights."""
    models = {name: build_model(replace(config, ops=name)).train() for name in ("torch", "camox")}
    models["camox"].load_state_dict(models["torch"].state_dict())
    return models


def make_step(model, config, usage=None):
    """Training of a model: a step for common/duel.py. usage: a list for the rows that experts took in every step."""
    stepper = Stepper(model, config)

    def step(index, inputs, targets):
        loss = stepper.step(inputs, targets)
        if usage is not None:
            usage.append(stepper.usage)
        return loss

    return step


def batches(corpus, config, steps):
    return (draw_batch(corpus, config, step) for step in range(steps))


def run_once(model, embedding, inputs, targets, shift=0):
    """{name: tensor} of output, losses and gradients with these embeddings and the batch rotated by shift."""
    model.zero_grad(set_to_none=True)
    model.embedding.weight.data.copy_(embedding)
    logits, aux_loss, infos = model(inputs.roll(shift, 0))
    loss = cross_entropy(logits, targets.roll(shift, 0))
    (loss + aux_loss).backward()
    found = {
        "output logits": logits.detach().roll(-shift, 0),
        "loss total": loss.detach(),
        "loss aux": aux_loss.detach(),
    }
    for number, info in enumerate(infos):
        found[f"output usage {number}"] = info["expert_usage"].double()
    return found | {f"gradient {name}": p.grad for name, p in model.named_parameters()}


def compare(models, inputs, targets):
    """Hold models {"torch", "camox"} to float64 by the rule of common/parity.py; "passed" says how that went."""
    stock, camox = (copy.deepcopy(models[name]).train() for name in ("torch", "camox"))
    for model in (stock, camox):
        for layer in model.mixtures():
            layer.router.weight.data *= SHARPER
    embedding = stock.embedding.weight.detach().clone()
    exact = run_once(copy.deepcopy(stock).double(), embedding.double(), inputs, targets)
    runs, samples = (
        parity.shifted_samples(
            lambda moved, shift, model=model: run_once(model, moved, inputs, targets, shift), embedding
        )
        for model in (camox, stock)
    )
    errors = parity.compare_with_float64(exact, runs, samples)
    return {"passed": not errors["missing"] and errors["worst"]["share_of_limit"] <= 1, **errors}


def used(model, config, batch):
    """{"peak_mb", "saved_mb"} of a training step; the model is left as it is."""
    model = copy.deepcopy(model)
    step = make_step(model, config)
    return memory.measure(model, lambda: cross_entropy(model(batch[0])[0], batch[1]), lambda: step(0, *batch))


def run_ranks(config, numbers, folder):
    """{number of ranks: metrics of train.py} with one thread per rank, several under torchrun."""
    script = Path(__file__).with_name("train.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = {}
    for number in numbers:
        path = Path(folder, f"ranks{number}.json")
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)] if number > 1 else []
        )
        command = [sys.executable, *launcher, str(script), "--steps", str(config.steps), "--metrics", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RANK_TIMEOUT)
        if done.returncode:
            raise RuntimeError(f"{number} ranks ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        found[str(number)] = json.loads(path.read_text())
        speeds = sum(found[str(number)]["tokens_per_s"])
        print(f"{number} ranks: {speeds:.0f} tokens/s in all", flush=True)
    return found


def run(mode, folder):
    """Do all of it, write folder/report.png and report.json, print the table; returns the result."""
    started = time.perf_counter()
    allocator, steps = tune_cpu_allocator(), STEPS[mode]
    config = Config(steps=steps)
    corpus = build_corpus(texts(), config.length)
    print(f"{len(corpus.training)} bytes of text; comparing with float64", flush=True)
    models = build_twins(config)
    first = draw_batch(corpus, config, 0)
    errors = compare(models, *(part[:4, :32] for part in first))
    rows = {name: used(model, config, first) for name, model in models.items()}
    gaps = duel.early_loss_gaps(
        models, lambda model: make_step(model, config), lambda: batches(corpus, config, duel.EARLY_STEPS)
    )
    models["dense"] = build_model(replace(config, feed_forward="dense", ops="torch")).train()

    def show(index, losses):
        if (index + 1) % max(1, steps // 6) == 0:
            shown = ", ".join(f"{name} {loss / LN2:.3f}" for name, loss in losses.items())
            print(f"step {index + 1}/{steps}  bits per byte: {shown}", flush=True)

    configs = {name: replace(config, feed_forward="dense") if name == "dense" else config for name in models}
    step_of = {name: make_step(model, configs[name]) for name, model in models.items()}
    trained = duel.alternate(step_of, batches(corpus, config, steps), seen=show)
    for name, model in models.items():
        rows[name] = rows.get(name, {}) | trained[name] | {"held_out": held_out_bits(model, corpus, config)}
        rows[name]["tokens_per_s"] = config.batch_size * config.length * 1000 / rows[name]["step_ms"]
        rows[name]["final_bits"] = statistics.mean(rows[name]["losses"][-10:]) / LN2
    print("timing with and without tune_cpu; balance", flush=True)
    times = duel.with_and_without_tune_cpu(
        {name: make_step(copy.deepcopy(model), configs[name]) for name, model in models.items()},
        first,
        rounds=TIMING_ROUNDS[mode],
    )
    tables = kinds_read(models["camox"], corpus, config)
    bits = [information(table) for table in tables]
    layer = bits.index(max(bits))
    result = {
        "mode": mode,
        "machine": report.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "allocator": str(allocator),
        "settings": asdict(config),
        "parameters": {name: models[key].parameters_used() for name, key in (("moe", "camox"), ("dense", "dense"))},
        "models": {name: rows[name] for name in ("torch", "camox")},
        "dense": rows["dense"],
        "times": times,
        "parity": errors,
        "early_loss_gaps": gaps,
        "kinds": {"layer": layer, "bits": bits[layer], "table": tables[layer].tolist()},
        "balance": {kind: balance_of(corpus, config, kind, BALANCE_STEPS[mode]) for kind in BALANCES},
    }
    with tempfile.TemporaryDirectory() as scratch:
        result["ranks"] = run_ranks(replace(config, steps=RANK_STEPS[mode]), RANKS[mode], scratch)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw(folder / "report.png", result)
    result["seconds"] = time.perf_counter() - started
    report.write_json(folder / "report.json", result)
    print(table(result))
    print(f"wrote {folder / 'report.png'} and {folder / 'report.json'} in {result['seconds']:.0f} s")
    return result


def balance_of(corpus, config, kind, steps):
    """Load of the busiest expert over training with one kind of balance, over a fair share."""
    config, usage = replace(config, balance=kind, steps=steps), []
    step = make_step(build_model(config).train(), config, usage)
    for index, batch in enumerate(batches(corpus, config, steps)):
        step(index, *batch)
    return busiest(torch.stack(usage))


def table(result):
    """The numbers as lines of text."""
    rows, dense = result["models"], result["dense"]

    def beside(key, form):
        return f"{form.format(dense[key]):>12}"

    lines = [
        report.HEADING + f"{'dense':>12}",
        report.ratio_row("time per step, ms", rows, "step_ms", "{:.1f}") + beside("step_ms", "{:.1f}"),
        report.ratio_row("tokens/s", rows, "tokens_per_s", "{:.0f}", better="higher")
        + beside("tokens_per_s", "{:.0f}"),
        report.ratio_row("peak memory of a step, MB", rows, "peak_mb", "{:.1f}"),
        report.ratio_row("kept for backward, MB", rows, "saved_mb", "{:.1f}"),
        report.plain_row("bits per byte (last 10)", rows, "final_bits") + " " * 9 + beside("final_bits", "{:.4f}"),
    ]
    for domain in dense["held_out"]:
        values = {name: {"bits": row["held_out"][domain]} for name, row in rows.items()}
        line = report.plain_row(f"held out: {domain}", values, "bits")
        lines.append(line + " " * 9 + f"{dense['held_out'][domain]:>12.4f}")
    moe, plain = (result["parameters"][name] for name in ("moe", "dense"))
    lines.append(f"parameters {moe[0]} and {plain[0]}, of them multiplied with each byte {moe[1]} and {plain[1]}")
    lines += ["", *report.tune_lines(result["times"]), ""]
    for name, busy in result["balance"].items():
        lines.append(f"busiest expert with balance {name:8} {statistics.mean(busy[-10:]):.2f} of a fair share")
    for number, row in result["ranks"].items():
        speeds = ", ".join(f"{speed:.0f}" for speed in row["tokens_per_s"])
        gap = rank_gap(result["ranks"], number)
        lines.append(f"{number} ranks, a thread each: tokens/s {speeds}; loss differs from one process by {gap:.1e}")
    return "\n".join([*lines, "", *parity.lines(result["parity"]), duel.gap_line(result["early_loss_gaps"])])


def rank_gap(ranks, number):
    """Largest difference between the loss curves of `number` ranks and of the first, as a share."""
    first = next(iter(ranks.values()))["losses"]
    return max(abs(a - b) / a for a, b in zip(first, ranks[number]["losses"], strict=True))


def failures(result):
    """What in a result must not be, as sentences."""
    found = []
    errors, ceiling = result["parity"], CEILING[result["mode"]]
    if not errors["passed"]:
        found.append(
            f"camox differs from float64 by more than the rule allows: {errors['worst']}, missing={errors['missing']}"
        )
    for name, row in result["models"].items():
        if not row["final_bits"] <= ceiling:
            found.append(f"--ops {name} reached {row['final_bits']:.4f} bits per byte, more than {ceiling}")
    torch_bits, camox_bits = (result["models"][name]["final_bits"] for name in ("torch", "camox"))
    if not abs(camox_bits - torch_bits) <= LARGEST_FINAL_GAP * torch_bits:
        found.append(f"final losses differ: torch {torch_bits:.4f}, camox {camox_bits:.4f} bits per byte")
    for number in result["ranks"]:
        gap = rank_gap(result["ranks"], number)
        if not gap <= LARGEST_RANK_GAP:
            found.append(f"{number} ranks give other losses than one process: by {gap:.1e} of them")
    return found


def main(arguments=None):
    return demo.main(STEPS, run, failures, arguments)
