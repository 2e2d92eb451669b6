"""moe: routing of tokens to 8 of 64 experts, and dispatch and combine of pictures that go to 3 of 7.

The eager side of routing is softmax, topk, bincount and argsort, what every plain implementation does; of the rows an
index and an index_add, with the routing ready on both sides.

Ideal bytes of rows in elements of x, with K copies: dispatch reads 1, writes K; combine reads K, writes 1; combine's
backward reads 1 and K, writes K; dispatch's backward reads K, writes 1.
"""

import math

import torch

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS

EXPERTS, TOP_K = 7, 3
# CamoXpert's stages at batch 8, its first at batch 32, and tokens.
ROWS = ((8, 48, 56, 56), (8, 96, 28, 28), (8, 160, 14, 14), (8, 304, 7, 7), (32, 48, 56, 56), (16384, 256))


def plain_route(logits, top_k=8):
    weights, experts = logits.softmax(dim=1).topk(top_k, dim=1)
    flat = experts.flatten()
    return weights, experts, torch.bincount(flat, minlength=logits.shape[1]), torch.argsort(flat, stable=True)


def route_case(direction) -> Case:
    shape = (16384, 64)

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


def cases() -> list[Case]:
    found = [route_case(direction) for direction in DIRECTIONS]
    for direction in DIRECTIONS:
        found += [rows_case(shape, direction) for shape in ROWS]
        found.append(rows_case(ROWS[0], direction, "channels_last"))
    return found
