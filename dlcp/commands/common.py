# SPDX-License-Identifier: Apache-2.0
"""Options that several commands take, in the same words everywhere, and how commands refuse."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_Parser = argparse._ActionsContainer
"""A parser or a group of its options."""


def refuse(command: str, error: object, status: int = 2) -> int:
    """Print why a command cannot go on; return the exit status: 2 for a wrong command line or file."""
    print(f"dlcp {command}: {error}", file=sys.stderr)
    return status


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
    parser.add_argument("--steps", type=int, default=default, metavar="N", help=f"{use} (default: %(default)s)")


def add_loss_bound(parser: _Parser) -> None:
    """Declare ``--loss-bound SHARE``."""
    parser.add_argument(
        "--loss-bound",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of a message that may be lost (default: %(default)s)",
    )


def add_link(parser: _Parser, rate_mbps: float | None, depth_packets: int | None, defaults: Sequence[str] = ()) -> None:
    """Declare ``--rate-mbps RATE`` and ``--depth PACKETS``; ``defaults`` explain those that depend on others."""
    rate, depth = defaults or (f"{rate_mbps:g}", f"{depth_packets}")
    parser.add_argument(
        "--rate-mbps",
        type=float,
        default=rate_mbps,
        metavar="RATE",
        help=f"rate of each link (default: {rate})",
    )
    parser.add_argument(
        "--depth",
        type=int,
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
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of everything (default: %(default)s)")
    add_steps(parser, steps)
    add_loss_bound(parser)
    parser.add_argument(
        "--deferral-bound",
        type=float,
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
