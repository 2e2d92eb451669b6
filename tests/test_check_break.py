"""scripts/check_break.py refuses tests that do not notice a wrong kernel."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import check_break  # noqa: E402

RED = {
    "test_known_values": ["failed"],
    "test_matches_reference": ["failed", "failed", "passed", "passed"],
    "test_grad": ["failed", "skipped"],
    "test_errors": ["passed"],
}


@pytest.mark.parametrize(
    ("changed", "green", "fault"),
    [
        ({}, {}, None),
        ({"test_known_values_of_noise": ["passed"]}, {"test_known_values_of_noise": "why"}, None),
        ({"test_known_values_of_noise": ["passed"]}, {}, "test_known_values_of_noise did not notice: 0 of 1 cases"),
        ({"test_matches_reference": ["failed", "passed", "passed"]}, {}, "did not notice: 1 of 3 cases failed"),
        ({"test_grad": ["error: no such operator"]}, {}, "no test of gradients failed"),
        ({"test_errors": ["failed"]}, {}, "the tests of error messages must pass"),
        ({}, {"test_known_values": "why"}, "STAY_GREEN names test_known_values, which failed"),
        ({}, {"test_known_values_of_old": "why"}, "STAY_GREEN names test_known_values_of_old, which did not run"),
    ],
)
def test_faults(changed, green, fault):
    found = check_break.faults(RED | changed, green)
    assert bool(found) == (fault is not None)
    assert fault is None or any(fault in line for line in found)


def test_every_exception_is_a_test_that_exists():
    for family, tests in check_break.STAY_GREEN.items():
        text = (ROOT / "tests" / f"test_{check_break.TEST_FILES.get(family, family)}.py").read_text()
        for name in tests:
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"tests/test_{family}.py: no {name}"


def test_kernels_that_this_cpu_cannot_run_are_not_checked(monkeypatch, capsys):
    monkeypatch.setattr(check_break, "build", lambda op: pytest.fail("nothing to build"))
    monkeypatch.setitem(check_break.NEEDS, "gemm", "a_word_of_no_cpu")
    assert check_break.main("gemm") == 0
    assert "gemm: not checked, its kernels need a_word_of_no_cpu" in capsys.readouterr().out
