# SPDX-License-Identifier: Apache-2.0
"""``dlcp fabric``: check a description, show what differs, write it, keep it in force, and show its state."""

import argparse
from pathlib import Path
from typing import Final

from dlcp.commands.common import DIFFERS, DURATIONS, add, add_json, real, whole

_METRICS: Final = "127.0.0.1:9464"
"""Where ``watch`` serves metrics by default: the customary port of exporters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp fabric``."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="fabric_command")
    for name, purpose in {
        "check": "report what is wrong with a description, or what it makes of each switch",
        "plan": f"show what differs between switches and description (exit status {DIFFERS}), and change nothing",
        "apply": "write what differs",
        "watch": "write what differs whenever it differs, and serve metrics to Prometheus",
        "status": "show the state of the switches and their counters",
    }.items():
        command = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        command.add_argument("file", type=Path, metavar="FILE", help="the fabric and its policy, as YAML or JSON")
        add(command, "--program", "FOLDER", Path, "compiled program to use instead of DLCP's own")
        if name in ("plan", "status"):
            add_json(command)
        if name == "plan":
            command.add_argument("--all", action="store_true", help="show all changes, however many")
        if name in ("apply", "watch"):
            election = "of several controllers, the highest id writes"
            add(command, "--election-id", "N", whole(1, (1 << 63) - 1), election, default=10)
        if name == "watch":
            add(command, "--every", "SECONDS", real(DURATIONS), "interval of comparisons", default=5.0)
            add(command, "--metrics", "HOST:PORT", str, "where to serve metrics", default=_METRICS)


def run(arguments: argparse.Namespace) -> int:
    """Run one of the commands; return the exit status."""
    from dlcp.commands.actions import fabric

    return fabric.run(arguments)
