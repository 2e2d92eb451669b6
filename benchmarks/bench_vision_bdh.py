"""One training step of Vision-BDH, optimizer included: on camox_ops, as the public model computes, and with its tricks.

eager is the public model's own arithmetic in stock PyTorch; the peer ``optimized`` is what its authors made of it: the
angles' tables kept, PyTorch's fused attention where there is a softmax, torch.compile around it. The learning rate is
0, so that every step is the same step but for its dropout; outputs and gradients are compared without dropout first.
On a GPU the peer ``reduce_overhead`` is torch.compile with CUDA graphs of its own, and ``camox_graph`` replays camox's
step as a CUDA graph.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import Captured, Case, Skipped, camox_attr, on_gpu, random_tensor

BATCH = (32, 3, 32, 32)
LONG = (2, 3, 128, 128)  # 1024 patches
ROUNDS, FEW_ROUNDS = 7, 3  # few where steps take seconds and are far from their target
PUBLISHED = {"n_layer": 6, "n_embd": 192, "n_head": 6, "mlp_internal_dim_multiplier": 32, "dropout": 0.1}
SMALL = {"n_layer": 3, "n_embd": 48, "n_head": 3, "mlp_internal_dim_multiplier": 8, "dropout": 0.1}  # the demo's


class TrainStep(nn.Module):
    """Forward, backward, clipping and AdamW of one model: images -> loss."""

    def __init__(self, model, autocast=False, compiled=None, graph=False):
        super().__init__()
        from examples.common.graph import GraphedStep
        from examples.common.optimizer import capturable

        self.model = model.train()
        self.autocast = autocast
        self.run = torch.compile(model, mode=compiled) if compiled else model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = capturable(torch.optim.AdamW(self.trained, lr=0.0, fused=True))
        self.step = GraphedStep(self.compute) if graph else self.compute

    def forward(self, images):
        return self.step(images)[0]

    def compute(self, images):
        labels = torch.arange(len(images), device=images.device) % 10
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.run(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)


def require_equal(models, images, autocast):
    """Skipped unless logits and gradients of {"camox", "eager"} agree without dropout."""
    found = {}
    for name, model in models.items():
        model = copy.deepcopy(model).eval()
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = model(images[:2])
        logits.float().square().sum().backward()
        found[name] = [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for ours, theirs in zip(found["camox"], found["eager"], strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        if not error <= (5e-2 if autocast else 1e-3):
            raise Skipped(f"wrong result: logits or gradients without dropout differ by {error:.2g} of their norm")


def step_case(
    group,
    shape,
    model="v2",
    dtype=torch.float32,
    softmax=False,
    optimized=None,
    sizes=PUBLISHED,
    rounds=None,
) -> Case:
    """optimized: the peers that run a compiled model, {name: (how torch.compile does it, with kept tables)}."""
    expected = {}
    autocast = dtype == torch.bfloat16

    def candidates():
        camox_attr("nn.BidirectionalBDHAttention")
        from examples.vision_bdh.model import MODELS, BDHConfig

        config = BDHConfig(**sizes)

        def build(**arguments):
            torch.manual_seed(0)
            return MODELS[model](config, img_size=shape[-1], use_softmax_attn=softmax, **arguments)

        with torch.enable_grad():
            models = {"camox": build(ops="camox"), "eager": build(ops="torch")}
            images = random_tensor(shape, seed=1).to(torch.get_default_device())
            require_equal(models, images, autocast)
            steps = {name: TrainStep(built, autocast) for name, built in models.items()}
            for name, (mode, cached) in (optimized or {}).items():
                built = build(ops="torch", cached=cached)
                if cached:  # made before the graph is captured, which would be captured again with them
                    built.attn.tables(built.pos_embed.shape[1])
                steps[name] = TrainStep(built, autocast, mode)
            if images.is_cuda:
                steps["camox_graph"] = Captured(TrainStep(build(ops="camox"), autocast, graph=True))
            expected["loss"] = steps["eager"](images).item()
        return {**steps, "compile": None}

    def verify(numbers, _):
        loss = numbers["output0"].item()
        if not abs(loss - expected["loss"]) <= 0.1 * abs(expected["loss"]):  # another dropout
            return f"loss {loss:.6g}, stock PyTorch's {expected['loss']:.6g}"
        return None

    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, seed=1),),
        candidates=candidates,
        direction="step",
        dtype=dtype,
        grad_inputs=(),
        verify=verify,
        default_allocator=False,
        rounds=rounds,
        quick=sizes is SMALL,
    )


@on_gpu(
    shapes=((128, 3, 32, 32),),
    rehearsal=(2, 3, 8, 8),
    size="step",
    directions=("step",),
    dtypes=(torch.bfloat16,),
    full=True,
)
def make_case(shape, direction, dtype, layout) -> Case:
    sizes = PUBLISHED if shape[0] == 128 else SMALL  # the demo's in a rehearsal
    peers = {"reduce_overhead": ("reduce-overhead", False)} if sizes is PUBLISHED else {}
    return step_case("vision_bdh_step", shape, dtype=dtype, optimized=peers, sizes=sizes)


def cases() -> list[Case]:
    tricks = {"optimized": ("default", True)}
    return [
        step_case("vision_bdh_step", BATCH, optimized=tricks, rounds=FEW_ROUNDS),
        step_case("vision_bdh_step", BATCH, dtype=torch.bfloat16, rounds=ROUNDS),
        step_case("vision_bdh_step", LONG, rounds=FEW_ROUNDS),
        step_case("vision_bdh_small_step", BATCH, sizes=SMALL),
        step_case("vision_bdh_cls_softmax_step", BATCH, "cls", softmax=True, optimized=tricks, rounds=FEW_ROUNDS),
    ]
