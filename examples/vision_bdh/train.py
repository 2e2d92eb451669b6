"""Train Vision-BDH: python examples/vision_bdh/train.py [--data cifar-10-batches-py] [options]."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from examples.vision_bdh.cli import main

    sys.exit(main())
