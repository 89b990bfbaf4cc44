# SPDX-License-Identifier: Apache-2.0
"""The command line: ``dlcp COMMAND``. Each command lives with what it is about and is imported when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from dlcp import __version__

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "train": ("dlcp.commands.train", "run a training script with DLCP, unchanged, as torchrun would"),
    "launch": ("dlcp.commands.launch", "start a script once per rank, whatever framework it uses"),
    "doctor": ("dlcp.commands.doctor", "say what works here, what is in force, and what DLCP can win"),
    "advise": ("dlcp.commands.advise", "measure a training script, and say which settings suit it here, and why"),
    "bench": ("dlcp.commands.bench", "measure DLCP against its peers, in turns, and print one JSON document"),
    "demo": ("dlcp.commands.demo", "train over a congested switch, with and without DLCP, and write a report page"),
    "server": ("dlcp.commands.server", "run a parameter server"),
    "switch": ("dlcp.commands.switch", "run the built-in switch"),
    "sim": ("dlcp.commands.sim", "simulate training on a cluster you do not have, and reproduce the paper's figures"),
    "fabric": ("dlcp.commands.fabric", "tell the switches of a fabric what to do, and keep them so"),
    "testbed": ("dlcp.commands.testbed", "train over real switches in Mininet, and compare (root)"),
}
"""Module and purpose of each command. A module has ``add_arguments(parser)`` and ``run(arguments) -> exit status``.

If it sets ``PASSES_ON``, ``arguments.torchrun`` gets the options before ``--`` that it does not know, and
``arguments.script`` what stands after it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="dlcp", description="Data-parallel training over congested networks.")
    parser.add_argument("--version", action="version", version=f"dlcp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    passes_on = False
    for name, (module_name, purpose) in COMMANDS.items():
        # Abbreviations would take options that are meant for torchrun.
        command = commands.add_parser(
            name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False
        )
        if name == wanted:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
            passes_on = getattr(module, "PASSES_ON", False)
    if not passes_on:
        arguments = parser.parse_args(argv)
    else:
        end = argv.index("--") if "--" in argv else len(argv)
        arguments, unknown = parser.parse_known_args(argv[:end])
        arguments.torchrun, arguments.script = unknown, argv[end + 1 :]
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
