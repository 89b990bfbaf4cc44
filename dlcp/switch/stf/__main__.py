# SPDX-License-Identifier: Apache-2.0
"""``python -m dlcp.switch.stf FILE ...``: run packet tests on the built-in switch."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dlcp.switch.executor.program import BACKENDS, PROGRAM_PATH, Program
from dlcp.switch.stf import BuiltIn, StfTarget, read, run


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a test failed, 2 if one could not be run."""
    parser = argparse.ArgumentParser(prog="python -m dlcp.switch.stf", description="Run packet tests (STF).")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="tests; see p4/stf/README.md")
    parser.add_argument(
        "--program", type=Path, default=PROGRAM_PATH, metavar="FILE", help="compiled program (BMv2 JSON)"
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, default="python", help="back end of the built-in switch (python)"
    )
    options = parser.parse_args(words)
    try:
        return run_files(options.files, BuiltIn(Program.load(options.program, backend=options.backend)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def run_files(files: Sequence[Path], target: StfTarget) -> int:
    """Run files and print a line for each; return 1 if one failed.

    Raises
    ------
    StfError, EntryError
        A file cannot be run.
    """
    failed = 0
    for path in files:
        outcome = run(read(path), target)
        failed += not outcome.passed
        came = f"{outcome.packets} packets, {outcome.expected} received as expected"
        print(f"{'ok    ' if outcome.passed else 'FAILED'} {path}: {came}")
        for line in outcome.failures:
            print(f"  {line}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
