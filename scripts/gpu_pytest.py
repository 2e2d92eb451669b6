"""A pytest plugin for scripts/gpu_check.py: a line of JSON for each test, so that a killed run still tells what it did,
and an end at CAMOX_TESTS_DEADLINE (seconds since the epoch)."""

import json
import os
import time


class Lines:
    def __init__(self, path: str, deadline: float):
        self.file = open(path, "a", buffering=1)  # noqa: SIM115  closed with the process
        self.deadline = deadline

    def write(self, **line) -> None:
        self.file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session) -> None:
        self.write(collected=len(session.items))

    def pytest_runtest_logreport(self, report) -> None:
        # One verdict a test: of its call, or of a setup or teardown that did not pass.
        if report.when == "call" or not report.passed:
            self.write(test=report.nodeid, outcome=report.outcome, text=str(report.longrepr or "")[-600:])

    def pytest_runtest_teardown(self, item, nextitem) -> None:
        if nextitem is not None and time.time() > self.deadline:
            item.session.shouldstop = "time is up"


def pytest_configure(config) -> None:
    path = os.environ.get("CAMOX_TESTS_LINES")
    if path:
        config.pluginmanager.register(Lines(path, float(os.environ.get("CAMOX_TESTS_DEADLINE", "inf"))))
