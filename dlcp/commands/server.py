# SPDX-License-Identifier: Apache-2.0
"""``dlcp server``: a parameter server."""

import argparse
import json
import signal
import threading
from pathlib import Path

from dlcp.commands.common import add, check_writable, option, refuse, write_late
from dlcp.inputs.addresses import format_address
from dlcp.inputs.configuration import HostPort
from dlcp.session.options import Options
from dlcp.transport.ledger import add_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp server``."""
    parser.epilog = (
        "Workers have DLCP_COLLECTIVE=server:HOST:PORT with this address, and the same secret. They tell the server "
        "all options of their job. It serves any number of jobs until a signal stops it."
    )
    add(parser, "--bind", "HOST:PORT", option("bind"), "where workers find the server (default: DLCP_BIND)")
    advertise = "where workers send gradients, if elsewhere (default: DLCP_ADVERTISE)"
    add(parser, "--advertise", "HOST:PORT", option("advertise"), advertise)
    secret = "file with the job's secret, the workers' own (default: DLCP_SECRET_FILE, DLCP_SECRET, or your own key)"
    add(parser, "--secret-file", "FILE", str, secret)
    add(parser, "--tls", "FOLDER", str, "certificates, if the workers have them (default: DLCP_TLS)")
    add(parser, "--report", "FILE", Path, "at the end, write the totals of sent packets there, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    from dlcp.session.serving import SessionServer  # which loads gRPC

    given = {name: getattr(arguments, name) for name in ("bind", "advertise", "secret_file", "tls")}
    try:
        check_writable("--report", arguments.report)
        options = Options(**{name: text for name, text in given.items() if text is not None})
        if not options.bind:
            raise ValueError("no address: give --bind HOST:PORT, and DLCP_COLLECTIVE=server:HOST:PORT to the workers")
        HostPort(least_port=1).check("bind", options.bind)  # workers could not know another port
        server = SessionServer(options, lambda line: print(line, flush=True))
    except (OSError, ValueError) as problem:
        return refuse("server", problem)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with server:
        print(f"server ready at {format_address(server.address)}", flush=True)
        server.serve(stopped)
    if arguments.report is not None:
        ledger = add_up([ledger.summary() for ledger in server.ledgers])
        write_late("server", arguments.report, json.dumps({"ledger": ledger}))
    return 0
