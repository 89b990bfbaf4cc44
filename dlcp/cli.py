# SPDX-License-Identifier: Apache-2.0
"""The command line: ``dlcp COMMAND``. A command's module is imported when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from dlcp import __version__


class Command(NamedTuple):
    """A command: ``dlcp.commands.NAME`` has ``add_arguments(parser)`` and ``run(arguments) -> exit status``.

    If it wraps another program, ``arguments.torchrun`` gets the options before ``--`` that it does not know, and
    ``arguments.script`` what follows.
    """

    purpose: str
    wraps: bool = False
    needs: str = ""
    """The extra of the package that it takes, ``pip install 'dlcp[EXTRA]'``."""


COMMANDS: Final = {
    "train": Command("run an unchanged training script with DLCP, as torchrun would", True),
    "launch": Command("start a command once per rank, whatever framework it uses", True),
    "doctor": Command("report what works here, which options are in force, and what DLCP can gain", True),
    "advise": Command("measure a training script and recommend settings for it here, with reasons", True),
    "bench": Command("measure DLCP against its peers, in turns, and print one JSON document"),
    "demo": Command("train over a congested switch, with and without DLCP, and write a report page", needs="demo"),
    "server": Command("run a parameter server"),
    "switch": Command("run the built-in switch"),
    "sim": Command("simulate training on a cluster you do not have, and reproduce the paper's figures"),
    "fabric": Command("program the switches of a fabric, and keep them so", needs="fabric"),
    "testbed": Command("train over real switches in Mininet, and compare (needs root)", needs="fabric,demo"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="dlcp", description="Data-parallel training over congested networks.")
    parser.add_argument("--version", action="version", version=f"dlcp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        purpose = f"{command.purpose[0].upper()}{command.purpose[1:]}."
        # Abbreviations would take options that are meant for torchrun.
        subparser = commands.add_parser(name, help=command.purpose, description=purpose, allow_abbrev=False)
        if name == wanted:
            try:
                module = importlib.import_module(f"dlcp.commands.{name}")
            except ModuleNotFoundError as error:
                if not command.needs or (error.name or "").startswith("dlcp"):
                    raise
                missing = f"{error.name} is missing: pip install 'dlcp[{command.needs}]'"
                print(f"dlcp {name}: {missing}", file=sys.stderr)
                return 2
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    if wanted in COMMANDS and COMMANDS[wanted].wraps:
        end = argv.index("--") if "--" in argv else len(argv)
        arguments, unknown = parser.parse_known_args(argv[:end])
        arguments.torchrun, arguments.script = unknown, argv[end + 1 :]
    else:
        arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
