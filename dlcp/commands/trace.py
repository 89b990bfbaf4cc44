# SPDX-License-Identifier: Apache-2.0
"""``dlcp trace``: one trace of what the ranks of a job have noted, for Perfetto."""

import argparse
import sys
from pathlib import Path

from dlcp.commands.common import refuse
from dlcp.train import trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp trace`` takes."""
    parser.epilog = (
        "Ranks note what they do in the folder that the option trace names (DLCP_TRACE); bring together those of all "
        "hosts. `dlcp train --trace FILE` does all of it for the ranks of one machine."
    )
    parser.add_argument("folder", nargs="+", type=Path, help="where ranks have left their timelines")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write the trace; return the exit status."""
    try:
        write(arguments.out, arguments.folder)
    except (OSError, ValueError) as error:
        return refuse("trace", error, 1)
    return 0


def write(file: Path, folders: list[Path]) -> None:
    """Write the trace of the timelines in some folders, and say so."""
    timelines = trace.find(folders)
    events = trace.write(file, timelines)
    ranks = len({each.about["process_rank"] for each in timelines})
    print(f"{file}: {events:,} events of {ranks} ranks; open it at https://ui.perfetto.dev", file=sys.stderr)
