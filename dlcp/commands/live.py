# SPDX-License-Identifier: Apache-2.0
"""``dlcp live``: a page, and metrics for Prometheus, of what the ranks of a job are at."""

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from dlcp.commands.common import refuse
from dlcp.live.server import AddressError, LiveServer

_LISTEN: Final = "127.0.0.1:9465"
"""Where to serve by default: beside the port of ``dlcp fabric watch``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp live`` takes."""
    parser.epilog = (
        "Ranks leave snapshots of themselves in the folder that the option live names (DLCP_LIVE), once a second. "
        "`dlcp train --live PORT` does all of it for the ranks of one machine."
    )
    parser.add_argument("folder", nargs="+", type=Path, help="where ranks leave snapshots; it may be made later")
    parser.add_argument(
        "--listen", default=_LISTEN, metavar="[HOST:]PORT", help="where to serve (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says stop; return the exit status."""
    stopped = threading.Event()
    try:
        server = LiveServer(arguments.folder, arguments.listen)
    except AddressError as error:
        return refuse("live", f"--listen {error}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with server:
        say_where(server)
        stopped.wait()
    return 0


def say_where(server: LiveServer) -> None:
    """Say where the page is, and who sees it."""
    who = "" if server.is_local else "; everybody who reaches this machine sees it"
    print(
        f"dlcp: {server.url} shows the training, {server.url}metrics is for Prometheus{who}",
        file=sys.stderr,
        flush=True,
    )
