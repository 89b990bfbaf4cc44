# SPDX-License-Identifier: Apache-2.0
"""``dlcp completion``: print a script that makes a shell complete the command line."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dlcp.commands.common import own_experiments

_EXPERIMENTS: Final = {
    "bash": '_dlcp_experiments() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_dlcp_experiments() {{ compadd {names}; _files }}",
}
"""For each shell, a function that completes experiments: the names of DLCP's own, or files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp completion``."""
    parser.epilog = "The script completes commands, options, their choices, files, and the names of experiments."
    parser.add_argument("shell", choices=tuple(_EXPERIMENTS), help="the shell that reads the script")


def run(arguments: argparse.Namespace) -> int:
    """Print the script; return the exit status."""
    import shtab

    for parser, wraps in _commands(arguments.parser):
        if wraps:
            parser.add_argument("script", nargs="*", type=Path)
        for action in parser._actions:
            if action.metavar == "FOLDER" or action.dest == "folder":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.dest in ("experiments", "old", "new"):
                action.complete = dict.fromkeys(_EXPERIMENTS, "_dlcp_experiments")  # type: ignore[attr-defined]
            elif action.type is Path or action.metavar in ("FILE", "TRACE"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    preamble = _EXPERIMENTS[arguments.shell].format(names=" ".join(own_experiments()))
    script = shtab.complete(arguments.parser, arguments.shell, preamble=preamble)
    # shtab makes zsh complete only the first of several arguments: (*) excludes those that follow.
    print(script.replace('"(*)::', '"*:').replace('"(*):', '"*:'))
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, bool]]:
    """Return the parsers of all commands and their actions, and whether each is followed by a script."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield child, bool(child.get_default("wraps"))
                yield from _commands(child)
