# SPDX-License-Identifier: Apache-2.0
"""``dlcp server``: a parameter server."""

import argparse
import json
import signal
import threading
from pathlib import Path

from dlcp.commands.common import check_writable, option, refuse, write_late
from dlcp.ledger import add_up
from dlcp.session.options import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp server`` takes."""
    parser.add_argument(
        "--bind",
        type=option("server"),
        metavar="HOST:PORT",
        help="where workers find the server: their DLCP_SERVER (default: DLCP_BIND)",
    )
    parser.add_argument(
        "--advertise",
        type=option("advertise"),
        metavar="HOST:PORT",
        help="where workers send gradients, if not there (default: DLCP_ADVERTISE)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="holds the job's secret, as the workers have it (default: DLCP_SECRET_FILE, DLCP_SECRET, or your own key)",
    )
    parser.add_argument("--tls", metavar="FOLDER", help="certificates, if the workers have them (default: DLCP_TLS)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="at the end, write there what was sent, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says stop; return the exit status."""
    from dlcp.session.serving import SessionServer  # which loads gRPC

    given = {name: getattr(arguments, name) for name in ("bind", "advertise", "secret_file", "tls")}
    try:
        check_writable("--report", arguments.report)
        options = Options.from_environment().with_(**{name: text for name, text in given.items() if text is not None})
        if not options.bind:
            raise ValueError("no address: give --bind HOST:PORT, and the same as DLCP_SERVER to the workers")
        server = SessionServer(options, lambda line: print(line, flush=True))
    except (OSError, ValueError) as problem:
        return refuse("server", problem)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with server:
        print(f"server ready at {server.address[0]}:{server.address[1]}", flush=True)
        server.serve(stopped)
    if arguments.report is not None:
        ledger = add_up([ledger.summary() for ledger in server.ledgers])
        write_late("server", arguments.report, json.dumps({"ledger": ledger}))
    return 0
