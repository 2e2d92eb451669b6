"""Stock PyTorch and camox_ops side by side: python examples/moe_text/demo.py [--mode quick] [--out demo]."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    # Read when torch loads libgomp. Its threads spin for milliseconds at each barrier, which on a machine that others
    # use makes a step up to 50 times slower; a twentieth of that costs nothing measurable on a quiet one.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from examples.moe_text.demo_run import main

    sys.exit(main())
