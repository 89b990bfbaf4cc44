# SPDX-License-Identifier: Apache-2.0
"""``dlcp doctor``: say what works here, what is in force and where it came from, and what DLCP can win."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from dlcp import wire
from dlcp.configuration import Setting
from dlcp.doctor import machine, page, sockets
from dlcp.doctor.finding import Finding, Section, Status, anything_missing
from dlcp.doctor.options import examine_options, examine_payload
from dlcp.doctor.path import COUNT, PeerError, try_path
from dlcp.doctor.probe import DEFAULT_PORT, Listener, open_socket
from dlcp.doctor.wording import describe
from dlcp.transport import Address

PASSES_ON = True
"""What this command does not know goes to torchrun, and what stands after ``--`` is the training script."""
_LISTEN_TURN_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp doctor`` takes."""
    parser.usage = (
        "dlcp doctor [--json] [--all-options] [--peer HOST[:PORT] ...]\n"
        "       dlcp doctor --listen [HOST[:PORT]] [--seconds SECONDS]\n"
        "       dlcp doctor [--steps STEPS] [torchrun's options] -- script.py [the script's arguments]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--all-options", action="store_true", help="show the options that nobody chose, too")
    path = parser.add_argument_group("the path to another machine")
    path.add_argument(
        "--peer", action="append", default=[], metavar="HOST[:PORT]", help="try the path to a doctor that listens"
    )
    path.add_argument("--packets", type=int, default=COUNT, help="packets to count loss by (default: %(default)s)")
    path.add_argument("--listen", nargs="?", const="", metavar="HOST[:PORT]", help="answer the doctors of others")
    path.add_argument("--seconds", type=float, metavar="SECONDS", help="listen for so long (default: until Ctrl-C)")
    room = parser.add_argument_group("what DLCP can win here: dlcp doctor [torchrun's options] -- script.py ...")
    room.add_argument("--steps", type=int, default=60, help="training steps to measure (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Examine, listen or measure; return the exit status: 1 if something needed is missing."""
    if arguments.script:
        from dlcp.commands.train import measure

        return measure(arguments.torchrun, arguments.script, arguments.steps, as_json=arguments.json)
    if arguments.torchrun:
        print(f"dlcp doctor: unknown: {' '.join(arguments.torchrun)}; see dlcp doctor --help", file=sys.stderr)
        return 2
    if arguments.listen is not None:
        return _listen(arguments.listen, arguments.seconds)
    sections, settings = examine(arguments.peer, arguments.packets)
    if arguments.json:
        print(json.dumps(as_json(sections, settings), indent=2))
    else:
        page.show(sections, settings, every_option=arguments.all_options, to=sys.stdout)
    return int(anything_missing(sections))


def examine(peers: list[str], packets: int = COUNT) -> tuple[list[Section], list[Setting]]:
    """Examine this machine, the options, and the paths to ``peers``."""
    network = sockets.interfaces()
    sections = [
        Section(
            "Machine",
            [
                _safely(look)
                for look in (machine.examine_kernel, machine.examine_namespaces, machine.examine_shared_memory)
            ],
        ),
        Section(
            "Python",
            [
                _safely(look)
                for look in (
                    machine.examine_python,
                    machine.examine_torch,
                    machine.examine_native,
                    machine.examine_extras,
                )
            ],
        ),
        Section(
            "UDP",
            [
                _safely(sockets.examine_segmentation),
                _safely(sockets.examine_coalescing),
                *sockets.examine_buffers(),
                _safely(sockets.examine_ports),
                *(sockets.examine_interface(interface) for interface in network),
            ],
        ),
    ]
    options, settings = examine_options()
    paths = [_examine_path(peer, packets, settings) for peer in peers]
    return [*sections, *paths, options], settings


def as_json(sections: list[Section], settings: list[Setting]) -> dict[str, Any]:
    """Return everything as one document."""
    return {
        "works": not anything_missing(sections),
        "sections": [
            {"title": section.title, "findings": [finding.as_json() for finding in section.findings]}
            for section in sections
        ],
        "options": [
            {
                "name": setting.name,
                "value": "(set)" if setting.name == "token" and setting.value else setting.value,
                "origin": setting.origin,
            }
            for setting in settings
        ],
    }


def _examine_path(text: str, packets: int, settings: list[Setting]) -> Section:
    try:
        peer = _address(text)
        report = try_path(peer, packets)
    except PeerError as error:
        return Section(f"Path to {text}", [Finding("answer", Status.MISSING, str(error), error.fix)])
    except (OSError, ValueError) as error:
        return Section(f"Path to {text}", [Finding("answer", Status.MISSING, f"cannot be asked: {_reason(error)}")])
    section = describe(report)
    section.findings.extend(examine_payload(settings, report.mtu_bytes, "this path"))
    return section


def _listen(text: str, seconds: float | None) -> int:
    host, port = _address(text or "0.0.0.0")
    ports = [port] if ":" in text else range(port, wire.UDP_PORT_BASE - 1, -1)
    try:
        listener = Listener(open_socket(host, ports))
    except OSError as error:
        print(f"dlcp doctor: cannot listen: {_reason(error)}", file=sys.stderr)
        return 1
    port = listener.address[1]
    own = ", ".join(interface.address for interface in sockets.interfaces() if not interface.loopback)
    where = listener.address[0] if host != "0.0.0.0" else (own or "127.0.0.1")
    print(f"listening at UDP port {port} of {where}", flush=True)
    suffix = "" if port == DEFAULT_PORT else f":{port}"
    print(f"on the other machine: dlcp doctor --peer {where.split(', ')[0]}{suffix}", flush=True)
    end_s = None if seconds is None else time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(listener):
        while (left_s := _LISTEN_TURN_S if end_s is None else min(_LISTEN_TURN_S, end_s - time.monotonic())) > 0:
            for asker, _ in listener.serve(left_s):
                print(f"answering {asker}", flush=True)
    return 0


def _address(text: str) -> Address:
    host, _, port = text.partition(":")
    if not port:
        return host, DEFAULT_PORT
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"expected HOST or HOST:PORT, got {text!r}")
    return host, int(port)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _safely(look: Callable[[], Finding]) -> Finding:
    """Look at one thing; a system on which that fails in a way nobody thought of still gets the rest of the page."""
    try:
        return look()
    except (OSError, AttributeError) as error:
        subject = look.__name__.removeprefix("examine_").replace("_", " ")
        return Finding(subject, Status.NOTE, f"could not be examined: {error!r}")
