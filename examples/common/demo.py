"""The command line of a demo."""

import argparse
import sys


def main(modes, run, failures, arguments=None):
    """run(mode, folder) of the mode that was asked for; 1 and a line for each of its failures, or 0."""
    parser = argparse.ArgumentParser(prog="demo.py")
    parser.add_argument("--mode", choices=sorted(modes), default="full")
    parser.add_argument("--out", default="demo", help="folder for report.png and report.json")
    options = parser.parse_args(arguments)
    problems = failures(run(options.mode, options.out))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0
