"""Train CamoXpert: python examples/camoxpert/train_ultimate.py train --dataset-path PATH [options]."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from camoxpert.cli import main

    sys.exit(main())
