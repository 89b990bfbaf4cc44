# SPDX-License-Identifier: Apache-2.0
"""``dlcp trace``: merge the timelines of a job's ranks into one trace for Perfetto."""

import argparse
import sys
from pathlib import Path

from dlcp.commands.common import add, refuse
from dlcp.host.timeline import find_timelines, write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp trace``."""
    parser.epilog = (
        "Ranks write timelines to the folder that the option trace names (DLCP_TRACE); collect those of all hosts. For "
        "the ranks of one machine, `dlcp train --trace FILE` does all of this."
    )
    parser.add_argument("folder", nargs="+", type=Path, help="where ranks have written timelines")
    add(parser, "--out", "FILE", Path, "the trace, as JSON", required=True)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace; return the exit status."""
    try:
        write(arguments.out, arguments.folder)
    except (OSError, ValueError) as error:
        return refuse("trace", error, 1)
    return 0


def write(file: Path, folders: list[Path]) -> None:
    """Write the trace of the timelines in some folders, and print its size."""
    timelines = find_timelines(folders)
    events = write_trace(file, timelines)
    ranks = len({each.about["process_rank"] for each in timelines})
    print(f"{file}: {events:,} events of {ranks} ranks; open it at https://ui.perfetto.dev", file=sys.stderr)
