"""grad_group_norms and scale_grads_ of 500 gradients of 8 million elements in 41 groups.

The sizes are those of small transformer blocks: matrices, and as many vectors. The eager side of the norms is one
``.norm()`` for each gradient, stacked, and summed by group; a peer uses ``torch._foreach_norm``. That of the scaling is
one ``mul_`` for each gradient by its factor, whose peer is ``torch._foreach_mul_``. Ideal bytes: each gradient read
once, and written once by the scaling.
"""

import torch

from benchmarks.common import Case, camox_attr, on_gpu, random_tensor

SHAPE = (500, 41)  # gradients, groups
SIZES = (31744, 256)  # by turns


def groups_of(shape) -> list[int]:
    count, groups = shape
    return [i * groups // count for i in range(count)]


def elements_of(shape) -> int:
    return shape[0] // 2 * sum(SIZES)


def inputs_of(shape, dtype):
    """Gradients, and the group of each."""
    grads = [random_tensor((SIZES[i % 2],), dtype=dtype, seed=i) for i in range(shape[0])]
    return (*grads, torch.tensor(groups_of(shape)))


def norms_case(dtype, shape=SHAPE) -> Case:
    def by_group(norms, groups):
        return torch.zeros(shape[1]).to(norms.device).index_add_(0, groups, norms.float())

    def candidates():
        op, groups = camox_attr("grad_group_norms"), groups_of(shape)
        return {
            "camox": lambda *inputs: op(inputs[:-1], groups, shape[1]),
            "eager": lambda *inputs: by_group(torch.stack([g.norm() for g in inputs[:-1]]), inputs[-1]),
            "foreach": lambda *inputs: by_group(torch.stack(torch._foreach_norm(inputs[:-1])), inputs[-1]),
            "compile": None,
        }

    return Case(
        group="grad_group_norms",
        shape=shape,
        make_inputs=lambda: inputs_of(shape, dtype),
        candidates=candidates,
        dtype=dtype,
        floor_bytes=elements_of(shape) * dtype.itemsize,
        quick=True,
    )


@on_gpu(shapes=(SHAPE,), rehearsal=(6, 2), directions=("forward",), dtypes=(torch.float32,))
def make_case(shape, direction, dtype, layout="contiguous") -> Case:
    return norms_case(dtype, shape)


def scale_case(dtype) -> Case:
    """Factors so near 1 that no number of rounds takes a gradient to 0 or inf, and none that is exactly 1."""

    def candidates():
        op = camox_attr("scale_grads_")
        groups = groups_of(SHAPE)
        scales = torch.full((SHAPE[1],), 1 + 2**-20)

        def camox(*inputs):
            op(inputs[:-1], groups, scales)
            return inputs[0]

        def eager(*inputs):
            for grad, group in zip(inputs[:-1], groups, strict=True):
                grad.mul_(scales[group])
            return inputs[0]

        def foreach(*inputs):
            torch._foreach_mul_(inputs[:-1], scales[0])
            return inputs[0]

        return {"camox": camox, "eager": eager, "foreach": foreach, "compile": None}

    return Case(
        group="scale_grads_",
        shape=SHAPE,
        make_inputs=lambda: inputs_of(SHAPE, dtype),
        candidates=candidates,
        dtype=dtype,
        floor_bytes=2 * elements_of(SHAPE) * dtype.itemsize,
        verify=lambda numbers, inputs: None if numbers["output0"].isfinite().all() else "a gradient is not finite",
    )


def cases() -> list[Case]:
    return [make(dtype) for dtype in (torch.float32, torch.bfloat16) for make in (norms_case, scale_case)]
