# SPDX-License-Identifier: Apache-2.0
"""Options that several commands take, in the same words everywhere, and how commands refuse."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from dlcp import configuration
from dlcp.configuration import Range, short

_Parser = argparse._ActionsContainer
"""A parser or a group of its options."""
MOST: Final = (1 << 31) - 1
"""The most of what is counted on a command line."""
MBPS: Final = Range(0.001, 1e6)
"""Rates of links, in Mbit/s: from 1 kbit/s to 1 Tbit/s."""
DEPTH_MAX: Final = 1_000_000
"""The deepest queue, in packets: at 1,500 bytes each, 1.5 GB."""
DURATIONS: Final = Range(0.0, 1e6, above=True)
"""Durations on a command line."""


def refuse(command: str, error: object, status: int = 2) -> int:
    """Print why a command cannot go on; return the exit status: 2 for a wrong command line or file."""
    print(f"dlcp {command}: {error}", file=sys.stderr)
    return status


def real(allowed: Range) -> Callable[[str], float]:
    """Return a type for argparse: numbers in a range."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {short(text)}") from None
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"must lie in {allowed}, got {short(text)}")
        return value

    return convert


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from ``least`` to ``most``."""
    allowed = Range(least, most)

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # of thousands of digits, too, which Python refuses to convert
            raise argparse.ArgumentTypeError(f"expected a whole number, got {short(text)}") from None
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"must lie in {allowed}, got {short(text)}")
        return value

    return convert


def option(name: str) -> Callable[[str], Any]:
    """Return a type for argparse: what the option of training of that name may hold."""
    from dlcp.session.options import Options  # few commands need it

    def convert(text: str) -> Any:
        try:
            return configuration.parse(Options, name, text, name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_json(parser: _Parser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_option(parser: _Parser) -> None:
    """Declare ``--option NAME=VALUE``."""
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set an option of DLCP, such as loss_bound=0.05; may be repeated (dlcp doctor --all-options lists them)",
    )


def add_steps(parser: _Parser, default: int, use: str = "training steps") -> None:
    """Declare ``--steps N``."""
    parser.add_argument("--steps", type=whole(1), default=default, metavar="N", help=f"{use} (default: %(default)s)")


def add_link(parser: _Parser, rate_mbps: float | None, depth_packets: int | None, defaults: Sequence[str] = ()) -> None:
    """Declare ``--rate-mbps RATE`` and ``--depth PACKETS``; ``defaults`` explain those that depend on others."""
    rate, depth = defaults or (f"{rate_mbps:g}", f"{depth_packets}")
    parser.add_argument(
        "--rate-mbps",
        type=real(MBPS),
        default=rate_mbps,
        metavar="RATE",
        help=f"rate of each link (default: {rate})",
    )
    parser.add_argument(
        "--depth",
        type=whole(1, DEPTH_MAX),
        default=depth_packets,
        metavar="PACKETS",
        help=f"depth of each queue (default: {depth})",
    )


def add_out(parser: _Parser, default: Path) -> None:
    """Declare ``--out FOLDER``."""
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FOLDER", help="where to write results (default: %(default)s)"
    )


def add_training(parser: _Parser, steps: int, out: Path) -> None:
    """Declare what ``dlcp demo`` and ``dlcp testbed run`` both take."""
    parser.add_argument("--collective", choices=["direct", "ps"], help="all-reduce (the default) or parameter server")
    parser.add_argument(
        "--seed", type=whole(0), default=1, metavar="N", help="seed of everything (default: %(default)s)"
    )
    add_steps(parser, steps)
    parser.add_argument(
        "--loss-bound",
        type=option("loss_bound"),
        default=0.1,
        metavar="SHARE",
        help="share of a message that may be lost (default: %(default)s)",
    )
    parser.add_argument(
        "--deferral-bound",
        type=option("deferral_bound"),
        default=0.75,
        metavar="SHARE",
        help="share of a message, and two thirds of it of a step, that may be put off (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="RUN",
        help="only these runs: gloo plain dlcp dlcp_priority; there is a page once the folder holds all of them",
    )
    add_out(parser, out)


def check_writable(flag: str, file: Path | None) -> None:
    """Raise ValueError if a file cannot be written, so that this is known before the work is done."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{flag}: {file} is a folder; give a file")
    if not file.parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {file.parent}")
    try:
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{flag}: {file} cannot be written: {error.strerror}") from None


def check_folder(flag: str, folder: Path) -> None:
    """Make a folder for results; raise ValueError if that cannot be, or if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag}: {folder} cannot be written: {error.strerror}") from None


def write_late(command: str, file: Path, text: str) -> None:
    """Write what the work has come to; where that fails, say so in a line. The work is done all the same."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        refuse(command, f"warning: {file} was not written: {error.strerror}")
