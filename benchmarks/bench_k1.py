"""One training step of K-1's tree of 41 nodes, optimizer included: level by level on camox_ops, and node by node.

eager is the arithmetic of the public model in stock PyTorch, its error path read on the host. Both update the nodes of
the path alone. The learning rate is 0, so that every step is the same step but for its dropout; logits, gradients and
paths are compared without dropout first. camox_graph, on a GPU, replays camox's step as a CUDA graph.
"""

import copy

import torch
from torch import nn

from benchmarks.common import Captured, Case, Skipped, camox_attr, on_gpu

WORDS = (32, 64)  # texts, words per text
ROUNDS = 7
SMALL = {"vocab_size": 500, "embed_dim": 32, "ff_dim": 32, "num_heads": 2, "branching": "2,2"}
LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


class TrainStep(nn.Module):
    """Forward, backward, error path and update of one model: words -> loss."""

    def __init__(self, model, autocast, graph=False):
        super().__init__()
        from examples.k1.training import Stepper

        self.stepper = Stepper(model.train(), lr=0.0, bf16=autocast, graph=graph)

    def forward(self, words):
        return self.stepper.step(words, words.roll(-1, 1))


def require_equal(models, words, dtype):
    """Skipped unless logits, gradients and the error path of {"camox", "eager"} agree without dropout."""
    from examples.k1.training import Stepper

    found = {}
    for name, model in models.items():
        model = copy.deepcopy(model).eval()
        with torch.autocast(words.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(words[:2])
            loss = model.loss(words[:2], words[:2].roll(-1, 1))
        loss.backward()
        found[name] = [logits.detach(), *(p.grad.clone() for p in model.parameters())]
        path = Stepper(model).attribute().path.tolist()
        found[name].append(torch.tensor(path, dtype=torch.float32))
    # rounding may choose another child, so that in half precision the path is not compared
    compared = len(found["eager"]) - (dtype != torch.float32)
    for ours, theirs in list(zip(found["camox"], found["eager"], strict=True))[:compared]:
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6)
        if not error <= LARGEST_ERROR[dtype]:
            raise Skipped(
                f"wrong result: logits, gradients or path without dropout differ by {error:.2g} of their norm"
            )


def random_words(shape, vocab_size):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, shape, generator=generator, device="cpu")


def step_case(shape, dtype=torch.float32, sizes=None) -> Case:
    expected = {}
    sizes = sizes or {}

    def words():
        return random_words(shape, sizes.get("vocab_size", 10000))

    def candidates():
        camox_attr("linear_cross_entropy")
        camox_attr("grad_group_norms")
        from examples.k1.training import Config, build_model

        def build(ops):
            torch.manual_seed(0)
            return build_model(Config(ops=ops, max_seq_len=shape[1], **sizes))

        with torch.enable_grad():
            models = {"camox": build("camox"), "eager": build("torch")}
            inputs = words().to(torch.get_default_device())
            require_equal(models, inputs, dtype)
            steps = {name: TrainStep(model, dtype == torch.bfloat16) for name, model in models.items()}
            if inputs.is_cuda:
                steps["camox_graph"] = Captured(TrainStep(build("camox"), dtype == torch.bfloat16, graph=True))
            expected["loss"] = steps["eager"](inputs).item()
        return {**steps, "compile": None}

    def verify(numbers, _):
        loss = numbers["output0"].item()
        if not abs(loss - expected["loss"]) <= 0.1 * abs(expected["loss"]):  # another dropout
            return f"loss {loss:.6g}, stock PyTorch's {expected['loss']:.6g}"
        return None

    return Case(
        group="k1_step",
        shape=shape,
        make_inputs=lambda: (words(),),
        candidates=candidates,
        direction="step",
        dtype=dtype,
        grad_inputs=(),
        verify=verify,
        default_allocator=False,
        rounds=ROUNDS,
        quick=bool(sizes),
    )


@on_gpu(shapes=(WORDS,), rehearsal=(2, 8), size="step", directions=("step",), dtypes=(torch.bfloat16,), full=True)
def make_case(shape, direction, dtype, layout) -> Case:
    return step_case(shape, dtype, SMALL if shape[0] < WORDS[0] else None)


def cases() -> list[Case]:
    return [step_case(WORDS), step_case((4, 16), sizes=SMALL)]
