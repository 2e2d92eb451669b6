"""The command line of a demo."""

import argparse
import sys

from .checkpoint import CheckpointError, check_folder


def main(modes, run, failures, arguments=None):
    """run(mode, folder) of the mode that was asked for; 1 and a line for each of its failures, or 0. A folder that
    cannot be written is found before minutes of training: a line and 2."""
    parser = argparse.ArgumentParser(prog="demo.py")
    parser.add_argument("--mode", choices=sorted(modes), default="full")
    parser.add_argument("--out", default="demo", help="folder for report.png and report.json")
    options = parser.parse_args(arguments)
    try:
        check_folder(options.out)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = failures(run(options.mode, options.out))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0
