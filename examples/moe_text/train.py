"""Train a mixture of experts on text: python examples/moe_text/train.py, or torchrun with the same script."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    # Read when torch loads libgomp: its threads spin at each barrier, which on a machine that others use is slow.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from examples.moe_text.cli import main

    sys.exit(main())
