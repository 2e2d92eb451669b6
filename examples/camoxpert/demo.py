"""Stock PyTorch and camox_ops side by side: python examples/camoxpert/demo.py [--mode quick] [--out demo]."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from camoxpert.demo_run import main

    sys.exit(main())
