"""Where the tests of the examples find them, and what they share."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOLDER = EXAMPLES / "camoxpert"


def load(name, example="camoxpert"):
    """The module <name> of an example, of "common", what they share, or, with None, one that is an example itself."""
    if str(EXAMPLES.parent) not in sys.path:
        sys.path.append(str(EXAMPLES.parent))
    return importlib.import_module(".".join(part for part in ("examples", example, name) if part))


@pytest.fixture(autouse=True)
def one_thread(same_ground_for_every_test):
    """A fixture for a test file to take over by name: on the example's small tensors a second thread only costs."""
    torch.set_num_threads(1)
