"""Train K-1's tree: python examples/k1/train.py [--data folder] [options]."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    # Read when torch loads libgomp: its threads spin at each barrier, which on a machine that others use is slow.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from examples.k1.cli import main

    sys.exit(main())
