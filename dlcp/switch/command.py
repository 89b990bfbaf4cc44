# SPDX-License-Identifier: Apache-2.0
"""``dlcp switch``: run the built-in switch, or look at the counters of one that runs."""

import argparse
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlcp.switch.entries import Entries
from dlcp.switch.ports import PortGroup
from dlcp.switch.queues import PortQueueing
from dlcp.wire import UDP_PORT_BASE

if TYPE_CHECKING:
    from dlcp.switch.program import Program
    from dlcp.switch.switch import Switch

PROGRAM_PATH: Final = Path(__file__).with_name("p4") / "dlcp.json"
"""The compiled program that comes with the package."""
READY: Final = "switch ready"
"""How the line begins that is printed when packets are taken."""


@dataclass(frozen=True)
class Plan:
    """What a switch is to be made of."""

    groups: list[PortGroup]
    entries: Entries
    queueing: dict[int, PortQueueing]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp switch`` takes."""
    what = parser.add_argument_group("what to connect (one of these)").add_mutually_exclusive_group()
    what.add_argument("--fabric", type=Path, metavar="FILE", help="a fabric and its policy, as JSON")
    what.add_argument("--hosts", type=int, metavar="N", help="N processes of this machine, over 127.0.0.0/8")
    what.add_argument(
        "--port",
        action="append",
        metavar="N=loopback|N=packet:INTERFACE",
        help="one port; give one --port for each, and --entries",
    )
    how = parser.add_argument_group("how to switch")
    how.add_argument("--entries", type=Path, metavar="FILE", help="table entries and queues, as JSON")
    how.add_argument("--rate-bps", type=float, metavar="RATE", help="rate of every port, in bit/s")
    how.add_argument("--depth-packets", type=int, metavar="PACKETS", help="depth of every queue, in packets")
    how.add_argument("--program", type=Path, default=PROGRAM_PATH, metavar="FILE", help="compiled program (BMv2 JSON)")
    look = parser.add_argument_group("looking at it")
    look.add_argument("--counters", type=Path, metavar="FILE", help="write all counters there, as JSON")
    look.add_argument("--counters-every", type=float, default=1.0, metavar="SECONDS", help="how often (default: 1)")
    look.add_argument(
        "--watch", action="store_true", help="show the counters; with --counters alone, those of a switch that runs"
    )
    look.add_argument("--write-entries", type=Path, metavar="FILE", help="write the entries to a file and stop")


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says and return the exit status."""
    try:
        if arguments.write_entries is not None:
            return _write_entries(arguments)
        if arguments.watch:
            return _watch(arguments)
        _serve(arguments, arguments.counters)
    except (OSError, ValueError) as error:
        print(f"dlcp switch: {error}", file=sys.stderr)
        return 2
    return 0


def build(arguments: argparse.Namespace) -> "Switch":
    """Return a switch that is ready to run.

    Raises
    ------
    ValueError, OSError
        A file is wrong, or a port cannot be opened; nothing stays open.
    """
    from dlcp.switch.program import Program
    from dlcp.switch.switch import Switch

    program = Program.load(arguments.program)
    plan = _plan(arguments, program)
    try:
        return Switch(program, plan.groups, plan.queueing, describe_program=lambda: describe(program))
    except ValueError:
        for group in plan.groups:
            group.close()
        raise


def describe(program: "Program") -> dict[str, Any]:
    """Return what a program has counted, with the events named, as a dict that JSON can hold."""
    from dlcp.switch.counters import EgressEvent, IngressEvent, decode_events, totals

    found = {}
    for name, events in (("ingress_events", IngressEvent), ("egress_events", EgressEvent)):
        counted = program.counters[name].values()
        decoded = decode_events(events, counted[:, 0], counted[:, 1])
        found[name] = {"totals": totals(decoded), "by_queue": [event._asdict() for event in decoded]}
    return {"digest": program.digest, "backend": program.backend, **found}


def _plan(arguments: argparse.Namespace, program: "Program") -> Plan:
    """Load the entries into the program and open the ports."""
    from dlcp.switch import entries as entry_files

    star = _star(arguments)
    document = None
    if arguments.entries is not None:
        entries, document = entry_files.read(arguments.entries)
    elif star is not None:
        entries = _policy_entries(star)
    else:
        raise ValueError("nothing to connect: give --fabric FILE, --hosts N, or --port and --entries")
    entry_files.apply(entries, program, document)
    groups = _open_star(star) if star is not None else _open_ports(arguments.port or [])
    ports = [port for group in groups for port in group.counters]
    queueing = {port: _override(entries.ports.get(port, PortQueueing()), arguments) for port in ports}
    return Plan(groups, entries, queueing)


def _star(arguments: argparse.Namespace) -> Any:
    """Return the fabric that was asked for, or None."""
    if arguments.fabric is None and arguments.hosts is None:
        return None
    # The controller is not part of the switch; only the command line brings the two together.
    from controller.fabric import Star, load

    star = load(arguments.fabric) if arguments.fabric is not None else Star.numbered(arguments.hosts)
    return replace(star, queueing=_override(star.queueing, arguments))


def _policy_entries(star: Any) -> Entries:
    from controller.policy import entries

    return entries(star)


def _override(queueing: PortQueueing, arguments: argparse.Namespace) -> PortQueueing:
    """Return the queueing with what the command line says in its place."""
    if arguments.rate_bps is not None:
        queueing = replace(queueing, rate_bps=round(arguments.rate_bps))
    if arguments.depth_packets is not None:
        queueing = replace(queueing, depth_packets=arguments.depth_packets)
    return queueing


def _open_star(star: Any) -> list[PortGroup]:
    if star.kind == "packet":
        return _open_packet_ports({host.port: host.interface or f"port{host.port}" for host in star.hosts})
    from dlcp.switch.ports.loopback import LoopbackHost, LoopbackPorts

    hosts = [replace(LoopbackHost.numbered(host.port - 1), address=host.address, mac=host.mac) for host in star.hosts]
    return [LoopbackPorts(hosts, star.udp_ports, star.mtu_bytes)]


def _open_ports(words: Sequence[str]) -> list[PortGroup]:
    """Open what --port asks for."""
    from dlcp.switch.ports.loopback import LoopbackHost, LoopbackPorts

    loopback, interfaces = [], {}
    for word in words:
        number, _, kind = word.partition("=")
        if not number.isdecimal() or not (kind == "loopback" or kind.startswith("packet:")):
            raise ValueError(f"--port {word}: expected N=loopback or N=packet:INTERFACE, as in 1=packet:eth1")
        if kind == "loopback":
            loopback.append(LoopbackHost.numbered(int(number) - 1))
        else:
            interfaces[int(number)] = kind.removeprefix("packet:")
    groups: list[PortGroup] = [LoopbackPorts(loopback, (UDP_PORT_BASE,))] if loopback else []
    return groups + _open_packet_ports(interfaces)


def _open_packet_ports(interfaces: dict[int, str]) -> list[PortGroup]:
    from dlcp.switch.ports.packet import PacketPort

    opened: list[PortGroup] = []
    try:
        for port, interface in interfaces.items():
            opened.append(PacketPort(port, interface))
    except OSError:
        for group in opened:
            group.close()
        raise
    return opened


def _serve(arguments: argparse.Namespace, counters: Path | None) -> None:
    """Run the switch until a signal says stop."""
    switch = build(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: switch.stop())
    # What is alive now stays alive; the collector need not look at it again while packets wait.
    gc.collect()
    gc.freeze()
    print(f"{READY}: ports {', '.join(map(str, sorted(switch.queues)))}", flush=True)
    try:
        switch.run(counters, arguments.counters_every)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        switch.close()


def _write_entries(arguments: argparse.Namespace) -> int:
    from dlcp.switch.entries import write

    star = _star(arguments)
    if star is None:
        raise ValueError("--write-entries needs --fabric or --hosts")
    write(arguments.write_entries, _policy_entries(star))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    """Show counters; the switch runs in another process, for drawing takes longer than a packet may wait."""
    from dlcp.switch.watch import watch

    if arguments.fabric is None and arguments.hosts is None and arguments.port is None:
        if arguments.counters is None:
            raise ValueError("--watch needs a switch to start, or --counters FILE of one that runs")
        watch(arguments.counters, lambda: True)
        return 0
    with tempfile.TemporaryDirectory(prefix="dlcp-switch-") as folder:
        counters = arguments.counters or Path(folder) / "counters.json"
        child = os.fork()
        if child == 0:
            status = run(argparse.Namespace(**{**vars(arguments), "watch": False, "counters": counters}))
            sys.stdout.flush()
            os._exit(status)
        ended: list[int] = []

        def alive() -> bool:
            if not ended:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    ended.append(os.waitstatus_to_exitcode(status))
            return not ended

        try:
            watch(counters, alive)
        finally:
            if alive():
                os.kill(child, signal.SIGTERM)
                ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return ended[0]
