# SPDX-License-Identifier: Apache-2.0
"""The command line: ``dlcp COMMAND``. Each command lives with what it is about and is imported when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from dlcp import __version__

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "demo": ("dlcp.demo.command", "train over a congested switch, with and without DLCP, and write a report page"),
    "server": ("dlcp.collectives.command", "run a parameter server"),
    "switch": ("dlcp.switch.command", "run the built-in switch"),
}
"""Module and purpose of each command. A module has ``add_arguments(parser)`` and ``run(arguments) -> exit status``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="dlcp", description="Data-parallel training over congested networks.")
    parser.add_argument("--version", action="version", version=f"dlcp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, purpose) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose.capitalize() + ".")
        if name == wanted:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
