"""Train CamoXpert: python examples/camoxpert/train_ultimate.py train --dataset-path PATH [options]."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from examples.camoxpert.cli import main

    sys.exit(main())
