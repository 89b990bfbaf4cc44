# SPDX-License-Identifier: Apache-2.0
"""``dlcp server``: a parameter server."""

import argparse
import json
import os
import signal
import threading
from pathlib import Path

from dlcp.collectives.parameter_server import ParameterServer, ServerOptions
from dlcp.commands.common import add_loss_bound, refuse
from dlcp.dtypes import ValueType
from dlcp.error_text import describe
from dlcp.transport import Endpoint, LossBound, TransportError, TransportOptions, bind_socket, parse_address
from dlcp.transport.options import CONGESTION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp server`` takes."""
    parser.add_argument("--bind", required=True, metavar="HOST:PORT", help="address of the server's socket")
    parser.add_argument("--workers", nargs="+", required=True, metavar="HOST:PORT", help="the workers, rank 0 first")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the session token, DLCP_TOKEN of the workers (default: the environment's DLCP_TOKEN)",
    )
    parser.add_argument("--token", help=argparse.SUPPRESS)  # refused: the machine's users see each other's arguments
    parser.add_argument("--job", type=int, default=0, help="job number; DLCP_JOB of the workers")
    add_loss_bound(parser)
    parser.add_argument("--immediate", action="store_true", help="stop at the bound even without congestion")
    parser.add_argument(
        "--deferral-bound",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="DLCP_DEFERRAL_BOUND of the workers (default: 0)",
    )
    parser.add_argument("--rescale", action="store_true", help="divide by what was delivered; without error feedback")
    parser.add_argument("--weighted", action="store_true", help="workers say samples=...: let --rescale count them")
    parser.add_argument("--value-type", choices=[kind.value for kind in ValueType], default="float32")
    parser.add_argument("--tagged", type=int, choices=[0, 1], default=1, help="DLCP_TAGGED of the workers (default: 1)")
    parser.add_argument("--congestion", choices=CONGESTION, default="dctcp")
    parser.add_argument("--report", type=Path, metavar="FILE", help="at the end, write there what was sent, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says stop; return the exit status."""
    try:
        token = _token(arguments)
    except (OSError, ValueError) as problem:
        return refuse("server", problem)
    workers = dict(enumerate(map(parse_address, arguments.workers)))
    # To each worker goes one flow, from the server.
    options = TransportOptions(tagged=bool(arguments.tagged), congestion=arguments.congestion, flow_weight=1.0)
    host, port = parse_address(arguments.bind)
    endpoint = Endpoint(
        len(workers), bind_socket(host, [port]), workers, job=arguments.job, token=token, options=options
    )
    server = ParameterServer(
        endpoint,
        list(workers),
        options=ServerOptions(
            LossBound(arguments.loss_bound, arguments.immediate),
            ValueType(arguments.value_type),
            arguments.rescale,
            arguments.weighted,
            arguments.deferral_bound,
        ),
    )
    stopped = threading.Event()
    server.failed.add_done_callback(lambda _: stopped.set())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    print(f"server ready at {arguments.bind} for {len(workers)} workers", flush=True)
    stopped.wait()
    error = server.failed.exception() if server.failed.done() else None
    endpoint.close(describe(error) if error else None)
    if arguments.report is not None:
        arguments.report.write_text(json.dumps({"ledger": server.ledger.summary()}), encoding="utf-8")
    if isinstance(error, TransportError) or error is None:
        # Workers that are through leave; the server cannot tell that from a failure, so it only says what it saw.
        return refuse("server", error, 1) if error else 0
    raise error


def _token(arguments: argparse.Namespace) -> int:
    """Return the session token, from a file or the environment."""
    if arguments.token is not None:
        raise ValueError(
            "--token shows the token to all users of this machine (ps): put it in a file that only you can read, and "
            "pass --token-file FILE; or set DLCP_TOKEN"
        )
    text = arguments.token_file.read_text() if arguments.token_file else os.environ.get("DLCP_TOKEN", "")
    if not text.strip():
        raise ValueError("no session token: set DLCP_TOKEN as the workers have it, or pass --token-file FILE")
    return int(text, 0)
