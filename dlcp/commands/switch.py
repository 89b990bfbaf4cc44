# SPDX-License-Identifier: Apache-2.0
"""``dlcp switch``: run the built-in switch, or look at the counters of one that runs."""

import argparse
import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dlcp import native
from dlcp.switch.artifacts import PROGRAM_PATH
from dlcp.switch.entries import Entries
from dlcp.switch.p4runtime import options as p4runtime
from dlcp.switch.ports import PortGroup
from dlcp.switch.program import BACKENDS
from dlcp.switch.queues import PortQueueing
from dlcp.wire import UDP_PORT_BASE

if TYPE_CHECKING:
    from dlcp.switch.p4runtime.device import Device
    from dlcp.switch.program import Backend, Program
    from dlcp.switch.switch import Switch

READY: Final = "switch ready"
"""How the line begins that is printed when packets are taken."""


Setting: TypeAlias = tuple[int | None, float]
"""What the command line says of a port, or of all ports (None)."""


@dataclass(frozen=True)
class Plan:
    """What a switch is to be made of."""

    groups: list[PortGroup]
    entries: Entries
    queueing: dict[int, PortQueueing]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp switch`` takes."""
    what = parser.add_argument_group("what to connect (one of these)").add_mutually_exclusive_group()
    what.add_argument("--fabric", type=Path, metavar="FILE", help="a fabric and its policy, as YAML or JSON")
    parser.add_argument("--name", metavar="SWITCH", help="which switch of the fabric to be, if it has several")
    what.add_argument("--hosts", type=int, metavar="N", help="N processes of this machine, over 127.0.0.0/8")
    what.add_argument(
        "--port",
        action="append",
        metavar="N=loopback|N=packet:INTERFACE",
        help="one port; give one --port for each, and --entries or --p4runtime",
    )
    how = parser.add_argument_group("how to switch")
    how.add_argument("--entries", type=Path, metavar="FILE", help="table entries and queues, as JSON")
    how.add_argument(
        "--rate-bps",
        action="append",
        type=_setting,
        metavar="[PORT=]RATE",
        help="rate of every port, or of one, in bit/s; again for each port that has another",
    )
    how.add_argument(
        "--depth-packets",
        action="append",
        type=_setting,
        metavar="[PORT=]PACKETS",
        help="depth of every queue, or of those of one port, in packets",
    )
    how.add_argument("--program", type=Path, default=PROGRAM_PATH, metavar="FILE", help="compiled program (BMv2 JSON)")
    how.add_argument(
        "--backend",
        choices=("auto", *BACKENDS),
        default="auto",
        help="plain Python, or compiled by Numba, of use from some 20,000 packets/s on (default: numba for network "
        "interfaces, if Numba and the compiled library are there)",
    )
    p4runtime.add_arguments(parser)
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


def build(arguments: argparse.Namespace) -> "tuple[Switch, Device | None]":
    """Return a switch that is ready to run, and how controllers see it if they may.

    Raises
    ------
    ValueError, OSError
        A file is wrong, or a port cannot be opened; nothing stays open.
    """
    from dlcp.switch.p4runtime.empty import EmptyProgram
    from dlcp.switch.program import Program
    from dlcp.switch.switch import Switch

    p4runtime.check(arguments)
    backend = _backend(arguments)
    # Loaded even by a switch that waits for a controller to send one: most likely it will be this one, and what has
    # been compiled once is taken from disk then.
    program: Program | None = Program.load(arguments.program, backend=backend)
    if p4runtime.starts_empty(arguments):
        program = None
    device: Device | None = None
    plan = _plan(arguments, program)
    try:
        switch = Switch(
            program or EmptyProgram(),
            plan.groups,
            plan.queueing,
            describe_program=lambda: describe(program if device is None else device.program),
        )
        if arguments.p4runtime is not None:
            device = p4runtime.device(arguments, switch, program, backend)
    except (ValueError, OSError):
        for group in plan.groups:
            group.close()
        raise
    return switch, device


def describe(program: "Program | None") -> dict[str, Any]:
    """Return what a program has counted, with the events named, as a dict that JSON can hold; empty for no program."""
    from dlcp.switch.counters import EgressEvent, IngressEvent, decode_events, totals

    if program is None:
        return {}
    found = {}
    for name, events in (("ingress_events", IngressEvent), ("egress_events", EgressEvent)):
        # A controller may have sent a program that counts other things.
        if name in program.counters:
            counted = program.counters[name].values()
            decoded = decode_events(events, counted[:, 0], counted[:, 1])
            found[name] = {"totals": totals(decoded), "by_queue": [event._asdict() for event in decoded]}
    return {"digest": program.digest, "backend": program.backend, **found}


def _backend(arguments: argparse.Namespace) -> "Backend":
    """Return how programs are to be run."""
    if arguments.backend != "auto":
        chosen: Backend = arguments.backend
        return chosen
    fabric = _fabric(arguments)
    if fabric is not None:
        interfaces = fabric.switch(_own_name(fabric, arguments.name)).ports == "packet"
    else:
        interfaces = any("=packet:" in word for word in arguments.port or [])
    compiled = native.library() is not None and importlib.util.find_spec("numba") is not None
    return "numba" if interfaces and compiled else "python"


def _plan(arguments: argparse.Namespace, program: "Program | None") -> Plan:
    """Load the entries into the program, if there is one, and open the ports."""
    from dlcp.switch import entries as entry_files

    fabric = _fabric(arguments)
    entries, document = Entries(), None
    if program is None:
        if not (arguments.port or arguments.hosts):
            raise ValueError("nothing to connect: give --port, once for each port, or --hosts N")
    elif arguments.entries is not None:
        entries, document = entry_files.read(arguments.entries)
    elif fabric is not None:
        entries = _policy_entries(fabric, arguments.name)
    else:
        raise ValueError("nothing to connect: give --fabric FILE, --hosts N, or --port and --entries")
    if program is not None:
        entry_files.apply(entries, program, document)
    groups = _open_fabric(fabric, arguments.name) if fabric is not None else _open_ports(arguments.port or [])
    ports = [port for group in groups for port in group.counters]
    try:
        _check_settings(arguments, ports)
    except ValueError:
        for group in groups:
            group.close()
        raise
    queueing = {port: _override(entries.ports.get(port, PortQueueing()), arguments, port) for port in ports}
    return Plan(groups, entries, queueing)


def _fabric(arguments: argparse.Namespace) -> Any:
    """Return the fabric that was asked for, or None."""
    if arguments.fabric is None and arguments.hosts is None:
        return None
    # The controller is not part of the switch; only the command line brings the two together.
    from dlcp.controller.fabric import load
    from dlcp.controller.shapes import star

    fabric = load(arguments.fabric) if arguments.fabric is not None else star(arguments.hosts)
    return replace(fabric, queueing=_override(fabric.queueing, arguments))


def _own_name(fabric: Any, name: str | None) -> str:
    """Return the name of the switch that this one is in a fabric."""
    if name is None and len(fabric.switches) > 1:
        raise ValueError(f"say which switch to be: --name {'|'.join(switch.name for switch in fabric.switches)}")
    found: str = fabric.switch(name or fabric.switches[0].name).name
    return found


def _policy_entries(fabric: Any, name: str | None) -> Entries:
    from dlcp.controller.entries import entries

    return entries(fabric, _own_name(fabric, name))


def _setting(word: str) -> Setting:
    """Return what ``VALUE`` or ``PORT=VALUE`` says."""
    port, _, value = word.rpartition("=")
    return int(port) if port else None, float(value)


def _override(queueing: PortQueueing, arguments: argparse.Namespace, port: int | None = None) -> PortQueueing:
    """Return the queueing with what the command line says of all ports, or of this one, in its place."""
    for name in ("rate_bps", "depth_packets"):
        given = dict(getattr(arguments, name) or ())
        value = given.get(port, given.get(None))
        if value is not None:
            queueing = replace(queueing, **{name: round(value)})
    return queueing


def _check_settings(arguments: argparse.Namespace, ports: Sequence[int]) -> None:
    """Refuse what is said of a port that there is not, or that the fabric's file says."""
    for option, given in (("--rate-bps", arguments.rate_bps), ("--depth-packets", arguments.depth_packets)):
        for port, value in given or ():
            if port is not None and arguments.fabric is not None:
                raise ValueError(f"{option} {port}={value:g}: with --fabric, its file says so, at the port's link")
            if port is not None and port not in ports:
                raise ValueError(f"{option} {port}={value:g}: there is no port {port}")


def _open_fabric(fabric: Any, name: str | None) -> list[PortGroup]:
    """Open the ports that a switch has in a fabric."""
    switch = fabric.switch(_own_name(fabric, name))
    neighbours = fabric.neighbours[switch.name]
    if switch.ports == "packet":
        return _open_packet_ports({port: switch.interface(port) for port in neighbours})
    from dlcp.switch.ports.loopback import LoopbackHost, LoopbackPorts

    hosts = [
        replace(LoopbackHost.numbered(port - 1), address=neighbour.host.address, mac=neighbour.host.mac)
        for port, neighbour in neighbours.items()
    ]
    return [LoopbackPorts(hosts, fabric.udp_ports, fabric.mtu_bytes)]


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
    switch, device = build(arguments)
    server = None if device is None else p4runtime.serve(arguments, device)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: switch.stop())
    # What is alive now stays alive; the collector need not look at it again while packets wait.
    gc.collect()
    gc.freeze()
    place = "" if server is None else f"; P4Runtime on {server.address}"
    print(f"{READY}: ports {', '.join(map(str, sorted(switch.queues)))}{place}", flush=True)
    try:
        switch.run(counters, arguments.counters_every)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if server is not None:
            server.close()
        switch.close()


def _write_entries(arguments: argparse.Namespace) -> int:
    from dlcp.switch.entries import write

    fabric = _fabric(arguments)
    if fabric is None:
        raise ValueError("--write-entries needs --fabric or --hosts")
    write(arguments.write_entries, _policy_entries(fabric, arguments.name))
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
