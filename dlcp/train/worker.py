# SPDX-License-Identifier: Apache-2.0
"""One rank of ``dlcp train``: runs the script as if it had been started itself, with DistributedDataParallel watched.

``python -m dlcp.train.worker script.py ARGUMENTS`` or ``... -m module ARGUMENTS``; started by torchrun.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from dlcp.train.plan import Plan, report_folder
from dlcp.train.session import Session


def main(argv: Sequence[str]) -> None:
    """Run a script or a module to its end; what it raises, ``SystemExit`` too, goes on to the caller."""
    with Session(Plan.from_environment(), report_folder()):
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.path[0] = str(Path.cwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
