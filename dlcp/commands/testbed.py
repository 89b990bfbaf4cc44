# SPDX-License-Identifier: Apache-2.0
"""``dlcp testbed``: Mininet's hosts and links with real switches between them; train over them, and compare."""

import argparse
import re
from pathlib import Path
from typing import Final

from dlcp.commands.common import add, add_link, add_training
from dlcp.inputs.configuration import short

_NAME: Final = "dlcp"
_PROPER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp testbed``."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = commands.add_parser("up", help="create hosts, links and switches, program them, and leave them running")
    run = commands.add_parser("run", help="train over a testbed with Gloo and with DLCP, and write a report page")
    status = commands.add_parser("status", help="show the running testbed")
    down = commands.add_parser("down", help="remove a testbed, or the rest of a crashed one")
    for each in (up, run, status, down):
        add(each, "--name", "NAME", _name, "prefix of its namespaces and files", default=_NAME)
    for each in (up, run):
        _add_shape(each)
    add_training(run.add_argument_group("what to train"), 24, Path("out/testbed"))


def _name(text: str) -> str:
    """Check that files, namespaces and interfaces can have this name."""
    if not _PROPER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"takes up to 32 letters, digits, - and _, got {short(text)}")
    return text


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to build")
    add(group, "--fabric", "star|leaf-spine|FILE", str, "shape, or a fabric as YAML (default: star)")
    group.add_argument("--switch", choices=["builtin", "bmv2"], help="kind of switches (default: builtin)")
    add_link(group, None, None, ("32", "32; BMv2: 64"))


def run(arguments: argparse.Namespace) -> int:
    """Run one of the actions and return the exit status."""
    from dlcp.commands.actions import testbed

    return testbed.run(arguments)
