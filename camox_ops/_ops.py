"""The list of ops of one image and one image of its shape (csrc/common/image_op.h): here a new one is entered.

From the entry come its export from camox_ops and camox_ops.reference, its lines in `python -m camox_ops check` and
`bench`, its cases in tests/test_contract.py and in the tests of CUDA kernels, and its name in the tables of benchmarks.
What else an op needs, `make lint` asks for by name: of ops of other kinds the entries in all of these too."""

from __future__ import annotations

# Operator, which is the name of its files too -> what it computes, as README, docs and changelog say it.
IMAGE_OPS: dict[str, str] = {}
