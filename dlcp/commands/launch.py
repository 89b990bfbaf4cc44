# SPDX-License-Identifier: Apache-2.0
"""``dlcp launch -n 4 python script.py``: start a command once per rank, without any framework."""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dlcp.commands.common import add, refuse, whole
from dlcp.host.processes import JobLayout, Processes
from dlcp.inputs.addresses import parse_address
from dlcp.inputs.configuration import STORE_VARIABLE

if TYPE_CHECKING:  # it loads gRPC
    from dlcp.session.store import StoreServer

_POLL_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp launch``."""
    parser.usage = "dlcp launch -n PROCESSES [options] command [its arguments]"
    parser.epilog = (
        "Each process finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its "
        "environment. When one fails, the others are ended and its exit status is returned; with --elastic they go on "
        "without it. On several machines, run it on each with the same --nodes and --master, and its own --node."
    )
    parser.add_argument("-n", "--processes", type=whole(1, 100_000), required=True, help="processes on this machine")
    parser.add_argument("--nodes", type=whole(1, 1_000_000), default=1, help="machines (default: 1)")
    parser.add_argument("--node", type=whole(0), default=0, help="index of this machine (default: 0)")
    parser.add_argument(
        "--elastic",
        type=whole(1, 65535),
        metavar="RANKS",
        help="when processes end, go on as long as at least this many ranks are left (DLCP_ELASTIC)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with --elastic, start failed processes again; the script must give register() functions to save and load",
    )
    add(parser, "--master", "HOST:PORT", str, "address of rank 0 (default for one machine: a free port)")


def run(arguments: argparse.Namespace) -> int:
    """Run the processes; return the exit status of the first that failed, or 0."""
    try:
        layout, command = _layout(arguments), _command(arguments)
        if arguments.elastic:
            return run_elastic(layout, command, arguments.elastic, restart=arguments.restart)
    except (ValueError, OSError) as error:
        return refuse("launch", error)
    with Processes(layout, command, os.environ) as processes:
        return processes.run()


def run_elastic(layout: JobLayout, command: Sequence[str], least: int, *, restart: bool) -> int:
    """Run the processes of a job that goes on while ``least`` of them are left; return its exit status.

    Raises
    ------
    OSError
        The store cannot be served.
    """
    environment = {**os.environ, "DLCP_ELASTIC": str(least), STORE_VARIABLE: "1"}
    # Its handlers of forks would let some children abort before they become the command.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    store = _serve_store(layout) if layout.node == 0 else None
    with Processes(layout, command, environment, elastic=True, restart=restart) as processes:
        status = processes.run()
    if store and not processes.ended_by_signal and not _wait_for_others(store):
        return 128 + signal.SIGINT
    return status


def _wait_for_others(store: "StoreServer") -> bool:
    """Serve the store until the ranks on other machines have left; return False if the user does not want to wait."""
    if store.users:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nobody is left here to be told
        print(
            "dlcp launch: all processes here have ended; the store is served until those on other machines have, too",
            file=sys.stderr,
            flush=True,
        )
    with suppress(KeyboardInterrupt):
        while store.users:
            time.sleep(_POLL_S)
        return True
    return False


def _serve_store(layout: JobLayout) -> "StoreServer":
    """Serve the store in this process, so that it outlives each rank."""
    from dlcp.session.options import Options  # loads gRPC, as the next ones: only for elastic jobs
    from dlcp.session.secret import job_secret
    from dlcp.session.store import serve

    options = Options.from_environment()
    return serve((layout.host, layout.port), job_secret(options), options.tls)


def _layout(arguments: argparse.Namespace) -> JobLayout:
    if not 0 <= arguments.node < arguments.nodes:
        raise ValueError(f"--node must lie in 0..{arguments.nodes - 1}, got {arguments.node}")
    if arguments.master is None:
        if arguments.nodes > 1:
            raise ValueError("several machines need --master HOST:PORT, an address of machine 0 and a free port there")
        return JobLayout.local(arguments.processes)
    try:
        address = parse_address(arguments.master, least_port=1)
    except ValueError as error:
        raise ValueError(f"--master: {error}") from None
    return JobLayout(arguments.processes, arguments.nodes, arguments.node, *address)


def _command(arguments: argparse.Namespace) -> list[str]:
    command = list(arguments.script)
    if not command:
        raise ValueError("no command: dlcp launch -n 4 python script.py")
    if arguments.restart and not arguments.elastic:
        raise ValueError("--restart needs --elastic: otherwise one process that fails ends the others")
    if shutil.which(command[0]) is None:
        raise ValueError(f"there is no program {command[0]}")
    return command
