"""The demo: train a small tree node by node in stock PyTorch and level by level with camox_ops, compare, and report.

Dropout is off there, for the two draw their masks differently; the tree of the published size is timed with it. The
baseline, all of whose weights are trained, learns the same batches beside them.
"""

import copy
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt

from camox_ops.train import tune_cpu_allocator

from ..common import demo, duel, memory, parity, report
from .data import build_corpus, check_corpus, texts
from .report import draw_costs, draw_tree, node_lines, node_rows
from .training import Config, Stepper, build_model, costs_of_leaving_out, draw_batch, held_out_losses

SMALL = Config(
    embed_dim=64, ff_dim=128, max_seq_len=32, vocab_size=4000, batch_size=16, dropout=0.0, lr=2e-3, seed=0, steps=300
)
PUBLISHED = Config(seed=0)
STEPS = {"full": 400, "quick": 60}
PUBLISHED_STEPS = {"full": 4, "quick": 0}
# The loss that both must come below, mean of the last 10 steps: that of a uniform guess is 8.3.
CEILING = {"full": 6.0, "quick": 7.5}
LARGEST_FINAL_GAP = 0.05  # between the final losses of both, as a share


def build_twins(config):
    """{"torch": model, "camox": model} of equal weights."""
    models = {}
    for name in ("torch", "camox"):
        torch.manual_seed(config.seed)
        models[name] = build_model(replace(config, ops=name)).train()
    return models


def make_step(model, config, paths=None):
    """Training of a model: a step for common/duel.py. paths: a list for the error path of every step."""
    stepper = Stepper(model, config.lr, config.weight_decay, config.grad_clip, config.updates)

    def step(index, number, inputs, targets):
        loss = stepper.step(inputs, targets)
        if paths is not None:
            paths.append(stepper.last.path)
        return loss

    return step


def batches(corpus, config, steps):
    """The batches of a training run, each (number of the domain, inputs, targets)."""
    return (draw_batch(corpus, config, step) for step in range(steps))


def run_once(model, embedding, inputs, targets, shift=0):
    """{name: tensor} of output, loss and gradients with these embeddings and the batch rotated by shift."""
    model.zero_grad(set_to_none=True)
    model.embedding.weight.data.copy_(embedding)
    logits = model(inputs.roll(shift, 0))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.roll(shift, 0).flatten())
    loss.backward()
    # the head's loss in blocks is compared by its own gradients
    head = model.loss(inputs.roll(shift, 0), targets.roll(shift, 0))
    (gradient,) = torch.autograd.grad(head, model.output_proj.weight)
    found = {"output logits": logits.detach().roll(-shift, 0), "loss total": loss.detach(), "loss head": head.detach()}
    found["gradient of head's loss"] = gradient
    return found | {f"gradient {name}": p.grad for name, p in model.named_parameters()}


def compare(models, inputs, targets):
    """Hold models {"torch", "camox"} to float64 by the rule of common/parity.py; "passed" says how that went."""
    stock, camox = (copy.deepcopy(models[name]).train() for name in ("torch", "camox"))
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
    return memory.measure(model, lambda: model.loss(*batch[1:]), lambda: step(0, *batch))


def published_step(corpus, steps):
    """Time and memory of a step of the published model, dropout 0.1: {name: row}, and its times with and without
    tune_cpu."""
    batch = draw_batch(corpus, PUBLISHED, 0)
    models = build_twins(PUBLISHED)
    step_of = {name: make_step(model, PUBLISHED) for name, model in models.items()}
    rows = duel.alternate(step_of, [batch] * (1 + steps), warmup=1)
    for name, model in models.items():
        rows[name] |= {"steps_per_s": 1000 / rows[name]["step_ms"], **used(model, PUBLISHED, batch)}
    return rows, duel.with_and_without_tune_cpu(step_of, batch)


def train_baseline(corpus, config, steps):
    """Losses of the baseline on the same batches, its time per step and its held-out losses."""
    torch.manual_seed(config.seed)
    model = build_model(replace(config, model="baseline")).train()
    row = duel.alternate({"baseline": make_step(model, config)}, batches(corpus, config, steps))["baseline"]
    return row | {"held_out": held_out_losses(model, corpus, config.max_seq_len)}


def run(mode, folder):
    """Do all of it, write folder/report.png and report.json, print the table; returns the result."""
    started = time.perf_counter()
    allocator, steps = tune_cpu_allocator(), STEPS[mode]
    config = replace(SMALL, steps=steps)
    documents = texts()
    corpus = build_corpus(documents, config.vocab_size)
    check_corpus(corpus, config.vocab_size, config.max_seq_len)
    sizes = ", ".join(f"{len(text)} words of {name}" for name, text in corpus.training.items())
    print(f"{sizes}; comparing with float64", flush=True)
    models = build_twins(config)
    first = draw_batch(corpus, config, 0)
    errors = compare(models, *first[1:])
    rows = {name: used(model, config, first) for name, model in models.items()}
    gaps = duel.early_loss_gaps(
        models, lambda model: make_step(model, config), lambda: batches(corpus, config, duel.EARLY_STEPS)
    )

    def show(index, losses):
        if (index + 1) % (steps // 10) == 0:
            shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            print(f"step {index + 1}/{steps}  loss: {shown}", flush=True)

    paths = {name: [] for name in models}
    step_of = {name: make_step(model, config, paths[name]) for name, model in models.items()}
    trained = duel.alternate(step_of, batches(corpus, config, steps), seen=show)
    for name, model in models.items():
        rows[name] |= trained[name] | {"held_out": held_out_losses(model, corpus, config.max_seq_len)}
        rows[name]["steps_per_s"] = 1000 / rows[name]["step_ms"]
        rows[name]["final_loss"] = statistics.mean(rows[name]["losses"][-10:])
    same = [torch.equal(*pair) for pair in zip(*paths.values(), strict=True)]
    counts = np.zeros((len(corpus.domains), len(models["camox"].nodes)))
    for (number, *_), path in zip(batches(corpus, config, steps), paths["camox"], strict=True):
        counts[number, path.numpy()] += 1
    print("training the baseline; timing with and without tune_cpu", flush=True)
    baseline = train_baseline(corpus, config, steps)
    costs = costs_of_leaving_out(models["camox"], corpus, config.max_seq_len)
    if PUBLISHED_STEPS[mode]:
        published, times = published_step(build_corpus(documents, PUBLISHED.vocab_size), PUBLISHED_STEPS[mode])
    else:
        step_of = {name: make_step(copy.deepcopy(model), config) for name, model in models.items()}
        published, times = None, duel.with_and_without_tune_cpu(step_of, first, rounds=2)
    result = {
        "mode": mode,
        "machine": report.machine(),
        "allocator": str(allocator),
        "settings": vars(config),
        "models": rows,
        "baseline": baseline,
        "published": published,
        "times": times,
        "parity": errors,
        "early_loss_gaps": gaps,
        "same_path_share": statistics.mean(same),
        "nodes": node_rows(models["camox"], counts, corpus.domains, costs),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw(folder / "report.png", result, models["camox"], counts, corpus.domains)
    result["seconds"] = time.perf_counter() - started
    report.write_json(folder / "report.json", result)
    print(table(result))
    print(f"wrote {folder / 'report.png'} and {folder / 'report.json'} in {result['seconds']:.0f} s")
    return result


def table(result):
    """The numbers as lines of text."""

    def block(rows):
        return [
            report.ratio_row("time per step, ms", rows, "step_ms", "{:.1f}"),
            report.ratio_row("steps/s", rows, "steps_per_s", "{:.2f}", better="higher"),
            report.ratio_row("peak memory of a step, MB", rows, "peak_mb", "{:.1f}"),
            report.ratio_row("kept for backward, MB", rows, "saved_mb", "{:.1f}"),
        ]

    rows, baseline = result["models"], result["baseline"]
    lines = [report.HEADING, *block(rows), report.plain_row("final loss (last 10)", rows, "final_loss")]
    domains = list(baseline["held_out"])
    for domain in domains:
        held_out = {name: {"loss": row["held_out"][domain]} for name, row in (*rows.items(), ("baseline", baseline))}
        added = f"   baseline {held_out['baseline']['loss']:.4f}"
        lines.append(report.plain_row(f"held out: {domain}", held_out, "loss") + added)
    if result["published"]:
        size = f"{PUBLISHED.embed_dim} wide, branching {PUBLISHED.branching}, dropout {PUBLISHED.dropout}"
        lines += ["", f"the published size, batch {PUBLISHED.batch_size}: {size}", *block(result["published"])]
    lines += ["", *report.tune_lines(result["times"]), "", *node_lines(result["nodes"], domains)]
    lines.append(f"both followed the same path in {100 * result['same_path_share']:.0f}% of the training steps")
    return "\n".join([*lines, "", *parity.lines(result["parity"]), duel.gap_line(result["early_loss_gaps"])])


def draw(path, result, tree, counts, domains):
    """Write the image: the tree and which domain's errors led where, losses, times, what each node is worth."""
    figure = plt.figure(figsize=(15, 9), constrained_layout=True)
    left, right = figure.subfigures(1, 2, width_ratios=[1.35, 1])
    axes = left.subplots()
    axes.set_title("where the errors of each domain led: a node's size is how often it was on the path")
    draw_tree(axes, tree, counts, domains)
    losses, times, costs = right.subplots(3, 1, height_ratios=[1, 1, 1.1])
    report.draw_losses(losses, result["models"])
    report.draw_times(times, result["times"], f"time per step, {'published' if result['published'] else 'small'} size")
    draw_costs(costs, result["nodes"], domains)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def failures(result):
    """What in a result must not be, as sentences."""
    found = []
    errors, ceiling = result["parity"], CEILING[result["mode"]]
    if not errors["passed"]:
        found.append(
            f"camox differs from float64 by more than the rule allows: {errors['worst']}, missing={errors['missing']}"
        )
    for name, row in result["models"].items():
        if not row["final_loss"] <= ceiling:
            found.append(f"--ops {name} reached a loss of {row['final_loss']:.4f}, more than {ceiling}")
    torch_loss, camox_loss = (result["models"][name]["final_loss"] for name in ("torch", "camox"))
    if not abs(camox_loss - torch_loss) <= LARGEST_FINAL_GAP * torch_loss:
        found.append(f"final losses differ: torch {torch_loss:.4f}, camox {camox_loss:.4f}")
    return found


def main(arguments=None):
    return demo.main(STEPS, run, failures, arguments)
