# SPDX-License-Identifier: Apache-2.0
"""``dlcp doctor``: report what works here, the options in force with their origin, and what DLCP can gain."""

import argparse
import contextlib
import json
import sys
import time
from typing import Final

from dlcp import wire
from dlcp.commands.common import DURATIONS, add, add_json, add_steps, real, refuse, whole
from dlcp.commands.train import measure
from dlcp.doctor import anything_missing, show
from dlcp.doctor.examination import as_json, examine, parse_peer, reason_of
from dlcp.doctor.path import DOCTOR_PORT, PROBES, ProbeListener, open_socket
from dlcp.host.interfaces import interfaces
from dlcp.train.headroom import MEASURED_STEPS

_LISTEN_TURN_S: Final = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp doctor``."""
    parser.usage = (
        "dlcp doctor [--json] [--all-options] [--peer HOST[:PORT] ...]\n"
        "       dlcp doctor --listen [HOST[:PORT]] [--seconds DURATIONS]\n"
        "       dlcp doctor [--steps N] [torchrun's options] script.py [the script's arguments]"
    )
    add_json(parser)
    parser.add_argument("--all-options", action="store_true", help="also list the options that are at their defaults")
    path = parser.add_argument_group("the path to another machine")
    peer = "probe the path to another machine, on which dlcp doctor --listen runs"
    add(path, "--peer", "HOST[:PORT]", str, peer, action="append", default=[])
    add(path, "--packets", "N", whole(1, 100_000), "packets to measure loss with", default=PROBES)
    add(path, "--listen", "HOST[:PORT]", str, "answer doctors on other machines", nargs="?", const="")
    add(path, "--seconds", "SECONDS", real(DURATIONS), "how long to listen (default: until Ctrl-C)")
    gain = parser.add_argument_group("what DLCP can gain here: dlcp doctor [torchrun's options] script.py ...")
    add_steps(gain, MEASURED_STEPS, "training steps to measure")


def run(arguments: argparse.Namespace) -> int:
    """Examine, listen or measure; return the exit status, 1 if something required is missing."""
    if arguments.script:
        return measure(arguments.torchrun, arguments.script, arguments.steps, command="doctor", as_json=arguments.json)
    if arguments.torchrun:
        return refuse("doctor", f"unknown: {' '.join(arguments.torchrun)}; see dlcp doctor --help")
    if arguments.listen is not None:
        try:
            host, port = parse_peer(arguments.listen or "0.0.0.0")
        except ValueError as error:
            return refuse("doctor", f"--listen: {error}")
        return _listen(host, port, ":" in arguments.listen, arguments.seconds)
    sections, settings = examine(arguments.peer, arguments.packets)
    if arguments.json:
        print(json.dumps(as_json(sections, settings), indent=2))
    else:
        show(sections, settings, every_option=arguments.all_options, to=sys.stdout)
    return int(anything_missing(sections))


def _listen(host: str, port: int, fixed: bool, seconds: float | None) -> int:
    ports = [port] if fixed else range(port, wire.UDP_PORT_BASE - 1, -1)
    try:
        listener = ProbeListener(open_socket(host, ports))
    except OSError as error:
        return refuse("doctor", f"cannot listen: {reason_of(error)}", 1)
    port = listener.address[1]
    own = ", ".join(interface.address for interface in interfaces() if not interface.loopback)
    where = listener.address[0] if host != "0.0.0.0" else (own or "127.0.0.1")
    print(f"listening at UDP port {port} of {where}", flush=True)
    suffix = "" if port == DOCTOR_PORT else f":{port}"
    print(f"on the other machine: dlcp doctor --peer {where.split(', ')[0]}{suffix}", flush=True)
    end_s = None if seconds is None else time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt), listener:
        while (left_s := _LISTEN_TURN_S if end_s is None else min(_LISTEN_TURN_S, end_s - time.monotonic())) > 0:
            for asker, _ in listener.serve(left_s):
                print(f"answering {asker}", flush=True)
    return 0
