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
from dlcp.doctor.examination import as_json, examine, reason_of
from dlcp.doctor.path import DOCTOR_PORT, PROBES, ProbeListener, open_everywhere, open_socket
from dlcp.host.interfaces import interfaces
from dlcp.host.ip import FAMILIES, IpFamily, family_of, resolve
from dlcp.inputs.addresses import format_address, format_host, parse_address
from dlcp.train.headroom import MEASURED_STEPS

_LISTEN_TURN_S: Final = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp doctor``."""
    parser.usage = (
        "dlcp doctor [--json] [--all-options] [--peer HOST[:PORT] ...]\n"
        "       dlcp doctor --listen [HOST[:PORT]] [--seconds SECONDS]\n"
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
            address = parse_address(arguments.listen, 0, least_port=1) if arguments.listen else ("", 0)
        except ValueError as error:
            return refuse("doctor", f"--listen: {error}")
        return _listen(*address, arguments.seconds)
    sections, settings = examine(arguments.peer, arguments.packets)
    if arguments.json:
        print(json.dumps(as_json(sections, settings), indent=2))
    else:
        show(sections, settings, every_option=arguments.all_options, to=sys.stdout)
    return int(anything_missing(sections))


def _listen(host: str, port: int, seconds: float | None) -> int:
    """Answer doctors at a host, or at every address of this machine if it is ``""``; port 0 takes a free one."""
    ports = [port] if port else range(DOCTOR_PORT, wire.UDP_PORT_BASE - 1, -1)
    try:
        socks = [open_socket(resolve(host)[0], ports)] if host else open_everywhere(ports)
    except OSError as error:
        return refuse("doctor", f"cannot listen: {reason_of(error)}", 1)
    listener = ProbeListener(*socks)
    where, port = listener.address
    own = [where]
    if where in [family.any_address for family in FAMILIES]:
        families = [IpFamily.of(sock) for sock in socks]
        found = [each.address for each in interfaces() if not each.loopback and family_of(each.address) in families]
        own = found or [families[0].loopback]
    print(f"listening at UDP port {port} of {', '.join(own)}", flush=True)
    peer = format_host(own[0]) if port == DOCTOR_PORT else format_address((own[0], port))
    print(f"on the other machine: dlcp doctor --peer {peer}", flush=True)
    end_s = None if seconds is None else time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt), listener:
        while (left_s := _LISTEN_TURN_S if end_s is None else min(_LISTEN_TURN_S, end_s - time.monotonic())) > 0:
            for asker, _ in listener.serve(left_s):
                print(f"answering {asker}", flush=True)
    return 0
