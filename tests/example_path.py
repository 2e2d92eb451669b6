"""Where the tests of examples/camoxpert find it, and what they share."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOLDER = EXAMPLES / "camoxpert"


def load(name):
    """The module camoxpert.<name> of the example."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(f"camoxpert.{name}")


@pytest.fixture(autouse=True)
def one_thread(same_ground_for_every_test):
    """A fixture for a test file to take over by name: on the example's small tensors a second thread only costs."""
    torch.set_num_threads(1)
