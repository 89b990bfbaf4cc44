# SPDX-License-Identifier: Apache-2.0
"""``dlcp live``: a page, and metrics for Prometheus, of what each rank of a job is doing."""

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dlcp.commands.common import add, refuse

if TYPE_CHECKING:
    from dlcp.live.http_server import LiveServer

_LISTEN: Final = "9465"
"""Default address, next to the port of ``dlcp fabric watch``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp live``."""
    parser.epilog = (
        "Ranks write snapshots once a second to the folder that the option live names (DLCP_LIVE). For the ranks of "
        "one machine, `dlcp train --live PORT` does all of this."
    )
    parser.add_argument("folder", nargs="+", type=Path, help="where ranks write snapshots; it may be created later")
    add(parser, "--listen", "[HOST:]PORT", str, "where to serve; without HOST, this machine only", default=_LISTEN)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    from dlcp.live.http_server import AddressError, LiveServer

    stopped = threading.Event()
    try:
        server = LiveServer(arguments.folder, arguments.listen)
    except AddressError as error:
        return refuse("live", f"--listen {error}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with server:
        say_where(server)
        for folder in arguments.folder:
            if not folder.exists():
                print(f"dlcp: {folder} does not exist yet; the page waits for ranks to write there", file=sys.stderr)
        stopped.wait()
    return 0


def say_where(server: "LiveServer") -> None:
    """Print the page's address, and who can see it."""
    who = "" if server.is_local else "; anyone who can reach this machine can see it"
    print(
        f"dlcp: {server.url} shows the training, {server.url}metrics is for Prometheus{who}",
        file=sys.stderr,
        flush=True,
    )
