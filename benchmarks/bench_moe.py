"""moe: routing of tokens to 8 of 64 experts, and dispatch and combine of images that go to 3 of 7.

The eager side of routing is softmax, topk, bincount and argsort, what every plain implementation does; of the rows an
index and an index_add, with the routing ready on both sides. On GPUs dispatch and combine are measured apart.

Ideal bytes of rows in elements of x, with K copies: dispatch reads 1, writes K; combine reads K, writes 1; combine's
backward reads 1 and K, writes K; dispatch's backward reads K, writes 1.
"""

import math

import torch

from benchmarks.common import Case, camox_attr, on_gpu, random_tensor
from benchmarks.shapes import DIRECTIONS

EXPERTS, TOP_K = 7, 3
# CamoXpert's stages at batch 8, its first at batch 32, and tokens.
ROWS = ((8, 48, 56, 56), (8, 96, 28, 28), (8, 160, 14, 14), (8, 304, 7, 7), (32, 48, 56, 56), (16384, 256))


def plain_route(logits, top_k=8):
    weights, experts = logits.softmax(dim=1).topk(top_k, dim=1)
    flat = experts.flatten()
    return weights, experts, torch.bincount(flat, minlength=logits.shape[1]), torch.argsort(flat, stable=True)


@on_gpu(shapes=((16384, 64),), rehearsal=(20, 9), size="route", dtypes=(torch.float32,))
def make_case_route(shape, direction, dtype=torch.float32, layout="contiguous") -> Case:
    def candidates():
        route = camox_attr("moe_route")
        return {
            "camox": lambda logits: tuple(route(logits, 8, score="softmax_topk")[:6]),
            "eager": plain_route,
            "compile": None,  # bincount's length is not known while it is traced
        }

    return Case(
        group="moe_route",
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, seed=1),),
        candidates=candidates,
        direction=direction,
        floor_bytes=4 * (math.prod(shape) + 7 * 8 * shape[0]) * (2 if direction == "forward_backward" else 1),
        quick=True,
    )


def rows_case(shape, direction, layout="contiguous") -> Case:
    def inputs():
        logits = random_tensor((shape[0], EXPERTS), seed=2)
        routing = camox_attr("moe_route")(logits, TOP_K)
        x = random_tensor(shape, layout=layout if len(shape) == 4 else "contiguous", seed=1)
        return (x, *routing[:6])

    def candidates():
        routing_of, dispatch, combine = (camox_attr(name) for name in ("Routing", "moe_dispatch", "moe_combine"))

        def ours(x, *routed):
            routing = routing_of(*routed, EXPERTS, TOP_K, None)
            return combine(dispatch(x, routing), routing)

        def plain(x, weights, experts, counts, offsets, order, position):
            rows = order // TOP_K
            scale = weights.flatten()[order].view(-1, *[1] * (x.dim() - 1))
            return torch.zeros_like(x).index_add(0, rows, x[rows] * scale)

        return {"camox": ours, "eager": plain}

    elements = 2 * TOP_K + 2 if direction == "forward" else 5 * TOP_K + 4
    return Case(
        group="moe_rows",
        shape=shape,
        make_inputs=inputs,
        candidates=candidates,
        direction=direction,
        layout=layout,
        floor_bytes=4 * elements * math.prod(shape),
        grad_inputs=(0, 1),
        quick=shape == ROWS[0],
    )


def routed(shape, dtype) -> tuple:
    """x and the first six of its rows' routing."""
    routing = camox_attr("moe_route")(random_tensor((shape[0], EXPERTS), seed=2), TOP_K)
    return (random_tensor(shape, dtype=dtype, seed=1), *routing[:6])


def one_way_case(group, inputs, ours, plain, shape, direction, dtype) -> Case:
    """dispatch, or combine; its backward reads the gradient and the copies and writes theirs."""
    elements = 1 + TOP_K
    if direction == "forward_backward":
        elements += 1 + (2 if group == "moe_combine" else 1) * TOP_K
    return Case(
        group=group,
        shape=shape,
        make_inputs=inputs,
        candidates=lambda: {"camox": ours, "eager": plain, "compile": None},
        direction=direction,
        dtype=dtype,
        floor_bytes=dtype.itemsize * elements * math.prod(shape),
        grad_inputs=(0,) if group == "moe_dispatch" else (0, 1),
    )


def routing_of(*routed):
    return camox_attr("Routing")(*routed, EXPERTS, TOP_K, None)


GPU_ROWS = on_gpu(shapes=(ROWS[4],), rehearsal=(5, 3, 2, 2))


@GPU_ROWS
def make_case_dispatch(shape, direction, dtype, layout="contiguous") -> Case:
    def ours(x, *routed):
        return camox_attr("moe_dispatch")(x, routing_of(*routed))

    def plain(x, weights, experts, counts, offsets, order, position):
        return x[order // TOP_K]

    return one_way_case("moe_dispatch", lambda: routed(shape, dtype), ours, plain, shape, direction, dtype)


@GPU_ROWS
def make_case_combine(shape, direction, dtype, layout="contiguous") -> Case:
    def inputs():
        x, *routing = routed(shape, dtype)
        return (x[routing[4] // TOP_K] * 2, *routing)

    def ours(y, *routed):
        return camox_attr("moe_combine")(y, routing_of(*routed))

    def plain(y, weights, experts, counts, offsets, order, position):
        scale = weights.flatten()[order].view(-1, *[1] * (y.dim() - 1)).to(y.dtype)
        x = torch.zeros(y.shape[0] // TOP_K, *y.shape[1:], dtype=y.dtype, device=y.device)
        return x.index_add(0, order // TOP_K, y * scale)

    return one_way_case("moe_combine", inputs, ours, plain, shape, direction, dtype)


def cases() -> list[Case]:
    found = [make_case_route((16384, 64), direction) for direction in DIRECTIONS]
    for direction in DIRECTIONS:
        found += [rows_case(shape, direction) for shape in ROWS]
        found.append(rows_case(ROWS[0], direction, "channels_last"))
    return found
