"""Writes the files of a new op of one image and one image of its shape, y = f(a pixel and its eight neighbours).

    python scripts/new_op.py roberts_maps "Roberts' diagonal differences, their absolute values added"

What it writes builds and passes its tests at once, with |r - l| + |b - t| as its formula, of the right, left, bottom
and top neighbours. "the formula" marks the places to replace, as CONTRIBUTING.md says. The op is entered in
camox_ops/_ops.py and gets its lines in README.md, docs/index.md, docs/benchmarks.md and CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import keyword
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FILES = {
    "csrc/NAME/NAME.h": """\
/* NAME: WHAT, of every channel of an image.

   x (B,C,H,W), extended by `border` by one pixel; y of its shape:
     y = |r - l| + |b - t|      the formula: l, r, t, b are the neighbours of a pixel
   dtypes    float32, bfloat16, float16 computed in float32; float64 in float64. One rounding, at the store.
   backward  needs x alone; the differences are recomputed. d|v|/dv at 0 is 0.
   errors    those of camox_image_check.
   source    where the formula is from. */
#ifndef CAMOX_UPPER_H
#define CAMOX_UPPER_H

#include "../common/image_op.h"

#ifdef __cplusplus
extern "C" {
#endif
CAMOX_DECLARE_IMAGE_OP(NAME)
#ifdef __cplusplus
}
#endif
#endif
""",
    "csrc/NAME/NAME.inc": """\
/* NAME of a vector of pixels; ../common/image_op.inc says what these functions are and has the rest.

     .  t  .         gx = r - l, gy = b - t: two filters
     l  .  r   ->    y = |gx| + |gy|
     .  b  .
*/

#define CAMOX_FILTERS 2

/* the formula */
CAMOX_INLINE vr ELEM(forward)(const ELEM(pixels) *x, vr number) {
  (void)number;
  return VR(abs)(x->r - x->l) + VR(abs)(x->b - x->t);
}

/* dy/dgx = sign(gx), dy/dgy = sign(gy) */
CAMOX_INLINE void ELEM(filter_gradients)(const ELEM(pixels) *x, vr number, vr grad, vr *filter) {
  (void)number;
  filter[0] = grad * ELEM(sign)(x->r - x->l);
  filter[1] = grad * ELEM(sign)(x->b - x->t);
}

/* A pixel is r to its left neighbour and l to its right one, b to the one above and t to the one below. */
CAMOX_INLINE vr ELEM(adjoint)(const ELEM(pixels) *filter) {
  const ELEM(pixels) *gx = &filter[0], *gy = &filter[1];
  return (gx->l - gx->r) + (gy->t - gy->b);
}
""",
    "csrc/NAME/NAME.c": """\
#include "NAME.h"

#include "../common/kernel_table.h"

#ifndef CAMOX_CUDA_PART
CAMOX_KERNEL_TABLE(camox_image_kernel, camox_NAME_forward, camox_NAME_forward_kernel)
CAMOX_KERNEL_TABLE(camox_image_kernel, camox_NAME_backward, camox_NAME_backward_kernel)
#endif

int camox_NAME_check(const camox_image_params *p, int backward) {
  /* A number that the formula cannot have is refused here, before it. */
  return camox_image_check("NAME", p, backward);
}
""",
    "csrc/NAME/NAME_cpu.c": """\
#include "../common/image_plan.h"

#define CAMOX_OP NAME
#define CAMOX_FORMULA "../NAME/NAME.inc"
#define CAMOX_BODY "image_op.inc"
#include "../common/simd_foreach.h"
""",
    "csrc/NAME/NAME_cuda.cu": """\
#define CAMOX_OP NAME
#define CAMOX_FORMULA "../NAME/NAME.inc"
#include "../common/image_op.cuh"
""",
    "csrc/NAME/NAME_bind.cpp": """\
#include "NAME.h"

#include "../common/image_bind.h"

CAMOX_BIND_IMAGE_OP(NAME)
""",
    "csrc/NAME/README.md": """\
# NAME: how it is computed

`NAME.inc` has the formula for a vector of pixels and its neighbours, its filters, their gradients and their adjoint.
Traversals, tiles and work items are those of [edge_maps](../edge/README.md) (`../common/stencil.inc`); the kernels
around the formula are in `../common/image_op.inc`, on the GPU in `../common/image_op.cuh`, where threads exchange
nothing.
""",
    "camox_ops/ops/NAME.py": '''\
"""NAME: WHAT."""

from __future__ import annotations

import torch

from .. import reference
from ._image import image_op


def NAME(x: torch.Tensor, *, border: str = "zeros") -> torch.Tensor:
    """Of every channel of an image: WHAT.

    Args:
        x: (B, C, H, W), float32, bfloat16, float16 or float64; any strides, any size from 0 on.
        border: "zeros", "replicate" (the edge pixel again) or "reflect" (mirrored about the edge pixel; H, W >= 2).

    Returns:
        |r - l| + |b - t| of each pixel's neighbours, in x's shape, dtype and memory format (contiguous or
        channels_last). Computed in float32 (float64 for float64) and rounded once. Autocast leaves x's dtype alone.

    Saved for backward: x. Derivatives of any order; that of |v| at 0 is 0. Forward-mode AD raises NotImplementedError.

    Raises:
        TypeError: x is not a dense tensor of one of these dtypes.
        ValueError: x is not 4-dimensional or on an unsupported device, an unknown border, "reflect" on a side of 1."""
    return _NAME(x, border)


_NAME = image_op("NAME", lambda x, number, border: reference.NAME(x, border))
''',
    "camox_ops/reference/NAME.py": '''\
"""NAME from its formula (see camox_ops.NAME)."""

from __future__ import annotations

import torch

from ._image import neighbours


def NAME(x: torch.Tensor, border: str = "zeros") -> torch.Tensor:
    """x (B, C, H, W) -> (B, C, H, W)."""
    n = neighbours(x, border)
    return (n.r - n.l).abs() + (n.b - n.t).abs()  # the formula
''',
    "tests/test_NAME.py": '''\
"""NAME."""

import torch
from image_op import ImageOpTests

import camox_ops as cx


class TestCAMEL(ImageOpTests):
    op = "NAME"

    def test_known_values(self):
        """A pixel of 3 is seen by the four beside it, one filter each: the formula by hand."""
        x = torch.zeros(1, 1, 5, 5)
        x[0, 0, 2, 2] = 3.0
        expected = torch.tensor([[0.0, 3.0, 0.0], [3.0, 0.0, 3.0], [0.0, 3.0, 0.0]])
        y = cx.NAME(x)
        assert torch.equal(y[0, 0, 1:4, 1:4], expected)
        assert y.sum() == expected.sum()
''',
    "tests/c/test_NAME.c": """\
/* NAME against its formula. */
#include "../../csrc/NAME/NAME.h"

#define OP NAME

/* the formula, in double */
static double formula(const double w[3][3], double number, double d[3][3]) {
  double gx = w[1][2] - w[1][0], gy = w[2][1] - w[0][1];
  double sx = (gx > 0) - (gx < 0), sy = (gy > 0) - (gy < 0);
  double of[3][3] = {{0, -sy, 0}, {-sx, 0, sx}, {0, sy, 0}};
  (void)number;
  for (int i = 0; i < 9; ++i) d[i / 3][i % 3] = of[i / 3][i % 3];
  return (gx < 0 ? -gx : gx) + (gy < 0 ? -gy : gy);
}

#include "image_op_test.h"
""",
    "benchmarks/bench_NAME.py": '''\
"""NAME: WHAT.

The eager side is its formula in shifted slices, as camox_ops.reference has it."""

from benchmarks.common import Case
from benchmarks.image_ops import case_maker
from benchmarks.shapes import few_channels_cases, image_cases

make_case = case_maker("NAME")


def cases() -> list[Case]:
    return image_cases(make_case) + few_channels_cases(make_case)
''',
    "docs/NAME.md": """\
# NAME

Of every channel of an image: WHAT.

```python
import torch
import camox_ops as cx

x = torch.rand(2, 8, 64, 48, requires_grad=True)
y = cx.NAME(x, border="replicate")
assert y.shape == x.shape
y.mean().backward()
```

`|r - l| + |b - t|` of a pixel's right, left, bottom and top neighbours. `border`: `"zeros"`, `"replicate"` (the edge
pixel again) or `"reflect"` (mirrored about the edge pixel; sides of at least 2).

| | read | written | kept for backward |
|---|---|---|---|
| forward | `x` once | `y` | `x` |
| backward | `x` and the gradient of `y`, once | the gradient of `x` | |

Derivatives of any order. Dtypes, errors: [conventions.md](conventions.md). How it is computed:
[csrc/NAME](../csrc/NAME/README.md).
""",
}
# File -> what to find there (the last line that matches), and the line to write behind it.
ENTRIES = {
    "README.md": (r"^\| .*\[spatial_gradient\]\(docs/.*$", "| WHAT | `NAME` | [NAME](docs/NAME.md) |"),
    "docs/index.md": (r"^\| \[spatial_gradient\.md\].*$", "| [NAME.md](NAME.md) | `NAME` |"),
    "CHANGELOG.md": (r"^- `spatial_gradient`: Sobel.*$", "- `NAME`: WHAT; on the CPU and in the CUDA part."),
}


def written(text: str, name: str, what: str) -> str:
    camel = "".join(part.capitalize() for part in name.split("_"))
    for word, value in (("NAME", name), ("UPPER", name.upper()), ("CAMEL", camel), ("WHAT", what)):
        text = text.replace(word, value)
    return text


def entered(text: str, name: str, what: str) -> str:
    """camox_ops/_ops.py with one more op, the names in order."""
    head, _, rest = text.partition("IMAGE_OPS: dict[str, str] = {")
    ops = dict(re.findall(r"^    \"(\w+)\": (.*),$", rest, re.MULTILINE))
    ops[name] = f'"{what}"'
    lines = "".join(f'    "{op}": {ops[op]},\n' for op in sorted(ops))
    return f"{head}IMAGE_OPS: dict[str, str] = {{\n{lines}}}\n"


def refusal(root: Path, name: str, what: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        return f"the name must be lower case words joined by _, got {name!r}"
    if (root / "csrc" / name).exists():
        return f"csrc/{name} exists already"
    if not what or len(what) > 70 or re.search(r'[|*\\"`\n]', what):
        return 'what it computes must be one line of at most 70 characters, without | * \\ ` "'
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of the operator, the function and the files, such as roberts_maps")
    parser.add_argument("what", help="what it computes, in a few words that README, docs and changelog can say")
    parser.add_argument("--into", type=Path, default=ROOT, help="the tree to write into (default: this one)")
    options = parser.parse_args(arguments)
    root, name, what = options.into.resolve(), options.name, options.what.rstrip(".")
    if fault := refusal(root, name, what):
        parser.error(fault)
    changed = {path: (root / path).read_text() for path in (*ENTRIES, "camox_ops/_ops.py")}
    for path, (pattern, line) in ENTRIES.items():
        places = list(re.finditer(pattern, changed[path], re.MULTILINE))
        if not places:
            parser.error(f"{path} has no line like {pattern}")
        end = places[-1].end()
        changed[path] = f"{changed[path][:end]}\n{written(line, name, what)}{changed[path][end:]}"
    changed["camox_ops/_ops.py"] = entered(changed["camox_ops/_ops.py"], name, what)
    for path, text in FILES.items():
        changed[path.replace("NAME", name)] = written(text, name, what)
    for path, text in changed.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        print(f"{path}: {f'{len(text.splitlines())} lines' if name in path else 'a line'}")
    subprocess.run([sys.executable, str(root / "scripts" / "benchmark_pages.py")], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
