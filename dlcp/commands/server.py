# SPDX-License-Identifier: Apache-2.0
"""``dlcp server``: a parameter server."""

import argparse
import json
import os
import signal
import socket
import threading
from pathlib import Path

from dlcp import configuration
from dlcp.collectives.parameter_server import ParameterServer, ServerOptions
from dlcp.commands.common import add_loss_bound, check_writable, option, refuse, write_late
from dlcp.dtypes import ValueType
from dlcp.error_text import describe
from dlcp.session.options import Options
from dlcp.transport import Address, Endpoint, LossBound, TransportError, TransportOptions, bind_socket, parse_address
from dlcp.transport.options import CONGESTION

_Served = tuple[Endpoint, list[Address], ServerOptions]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp server`` takes."""
    parser.add_argument(
        "--bind", required=True, type=option("bind"), metavar="HOST:PORT", help="address of the server's socket"
    )
    parser.add_argument(
        "--workers",
        nargs="+",
        required=True,
        type=option("server"),
        metavar="HOST:PORT",
        help="the workers, rank 0 first",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the session token, DLCP_TOKEN of the workers (default: the environment's DLCP_TOKEN)",
    )
    parser.add_argument("--token", help=argparse.SUPPRESS)  # refused: the machine's users see each other's arguments
    parser.add_argument(
        "--job", type=option("job"), default=0, metavar="N", help="job number; DLCP_JOB of the workers (default: 0)"
    )
    add_loss_bound(parser)
    parser.add_argument("--immediate", action="store_true", help="stop at the bound even without congestion")
    parser.add_argument(
        "--deferral-bound",
        type=option("deferral_bound"),
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
        endpoint, workers, options = _open(arguments)
    except (OSError, ValueError) as problem:
        return refuse("server", problem)
    server = ParameterServer(endpoint.connection, list(range(len(workers))), options=options)
    stopped = threading.Event()
    server.failed.add_done_callback(lambda _: stopped.set())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    print(f"server ready at {arguments.bind} for {len(workers)} workers", flush=True)
    stopped.wait()
    error = server.failed.exception() if server.failed.done() else None
    endpoint.close(describe(error) if error else None)
    if arguments.report is not None:
        write_late("server", arguments.report, json.dumps({"ledger": server.ledger.summary()}))
    if isinstance(error, TransportError) or error is None:
        # Workers that are through leave; the server cannot tell that from a failure, so it only says what it saw.
        return refuse("server", error, 1) if error else 0
    raise error


def _open(arguments: argparse.Namespace) -> _Served:
    """Return the server's endpoint, its workers' addresses and its options.

    Raises
    ------
    ValueError, OSError
        The command line is wrong, or the address cannot be had.
    """
    check_writable("--report", arguments.report)
    token = _token(arguments)
    served = ServerOptions(
        LossBound(arguments.loss_bound, arguments.immediate),
        ValueType(arguments.value_type),
        arguments.rescale,
        arguments.weighted,
        arguments.deferral_bound,
    )
    if not arguments.bind or not all(arguments.workers):
        raise ValueError("an address of --bind or --workers is empty; give HOST:PORT")
    workers = list(map(parse_address, arguments.workers))
    for text, worker in zip(arguments.workers, workers, strict=True):
        if workers.count(worker) > 1:
            raise ValueError(f"--workers: {text} is given twice; each worker has an address of its own")
    for text, (host, _) in zip(arguments.workers, workers, strict=True):
        try:
            socket.getaddrinfo(host, None, socket.AF_INET)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"--workers: {text}: {error}") from None
    host, port = parse_address(arguments.bind)
    # To each worker goes one flow, from the server.
    options = TransportOptions(tagged=bool(arguments.tagged), congestion=arguments.congestion, flow_weight=1.0)
    peers = dict(enumerate(workers))
    endpoint = Endpoint(len(workers), bind_socket(host, [port]), peers, job=arguments.job, token=token, options=options)
    return endpoint, workers, served


def _token(arguments: argparse.Namespace) -> int:
    """Return the session token, from a file or the environment."""
    if arguments.token is not None:
        raise ValueError(
            "--token shows the token to all users of this machine (ps): put it in a file that only you can read, and "
            "pass --token-file FILE; or set DLCP_TOKEN"
        )
    file = arguments.token_file
    text = file.read_text(encoding="utf-8", errors="replace") if file else os.environ.get("DLCP_TOKEN", "")
    where = f"--token-file {file}" if file else "DLCP_TOKEN"
    if not text.strip():
        raise ValueError("no session token: set DLCP_TOKEN as the workers have it, or pass --token-file FILE")
    token: int = configuration.parse(Options, "token", text.strip(), where)
    if not token:
        raise ValueError(
            f"{where}: the token is 0, which stands for none; draw one, as `od -An -N8 -tu8 /dev/urandom` does"
        )
    return token
