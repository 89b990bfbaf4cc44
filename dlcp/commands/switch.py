# SPDX-License-Identifier: Apache-2.0
"""``dlcp switch``: run the built-in switch, or look at the counters of one that runs."""

import argparse
import gc
import importlib.util
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dlcp.children import end_with_parent
from dlcp.commands.common import DEPTH_MAX, DURATIONS, real, whole
from dlcp.configuration import Range
from dlcp.switch import (
    BACKENDS,
    PROGRAM_PATH,
    READY,
    Backend,
    EgressEvent,
    EmptyProgram,
    Entries,
    IngressEvent,
    LoopbackHost,
    LoopbackPorts,
    PacketPort,
    PortGroup,
    PortQueueing,
    Program,
    Switch,
    apply_entries,
    decode_events,
    event_totals,
    read_entries,
    write_entries,
)
from dlcp.wire import UDP_PORT_BASE

if TYPE_CHECKING:
    from dlcp.switch.p4runtime import P4RuntimeDevice, P4RuntimeServer

_INSTALL_P4RUNTIME: Final = "pip install 'dlcp[p4runtime]'"

_PortSetting: TypeAlias = tuple[int | None, float]
"""What the command line says of a port, or of all ports (None)."""
_RATE_BPS: Final = Range(0.0, 1e12)
_DEPTH_PACKETS: Final = Range(0, DEPTH_MAX)
_LAST_PORT: Final = 65_535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``dlcp switch`` takes."""
    what = parser.add_argument_group("what to connect (one of these)").add_mutually_exclusive_group()
    what.add_argument("--fabric", type=Path, metavar="FILE", help="a fabric and its policy, as YAML or JSON")
    parser.add_argument("--name", metavar="SWITCH", help="which switch of the fabric to be, if it has several")
    what.add_argument("--hosts", type=whole(0, 250), metavar="N", help="N processes of this machine, over 127.0.0.0/8")
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
        type=_setting(_RATE_BPS),
        metavar="[PORT=]RATE",
        help="rate of every port, or of one, in bit/s; again for each port that has another",
    )
    how.add_argument(
        "--depth-packets",
        action="append",
        type=_setting(_DEPTH_PACKETS),
        metavar="[PORT=]PACKETS",
        help="depth of every queue, or of those of one port, in packets",
    )
    how.add_argument("--program", type=Path, default=PROGRAM_PATH, metavar="FILE", help="compiled program (BMv2 JSON)")
    how.add_argument(
        "--backend",
        choices=("auto", *BACKENDS),
        default="auto",
        help="plain Python, or compiled by Numba, of use from some 20,000 packets/s on (default: numba for network "
        "interfaces, if Numba is there)",
    )
    control = parser.add_argument_group("controlled over P4Runtime")
    control.add_argument(
        "--p4runtime",
        metavar="[HOST:]PORT",
        help="take program and entries from a controller; listens on 127.0.0.1 unless HOST is given. Without --entries "
        "or --fabric the switch has no program, and drops everything, until the controller sends one",
    )
    control.add_argument(
        "--device-id",
        type=whole(0, (1 << 63) - 1),
        default=1,
        metavar="N",
        help="what it calls this switch (default: 1)",
    )
    control.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate of the switch, PEM")
    control.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    control.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="whose certificates controllers must have, PEM; all others are refused",
    )
    control.add_argument(
        "--insecure", action="store_true", help="use plain text instead of TLS, with anybody who can reach the address"
    )
    look = parser.add_argument_group("looking at it")
    look.add_argument("--counters", type=Path, metavar="FILE", help="write all counters there, as JSON")
    look.add_argument(
        "--counters-every", type=real(DURATIONS), default=1.0, metavar="SECONDS", help="how often (default: 1)"
    )
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


def build(arguments: argparse.Namespace) -> "tuple[Switch, P4RuntimeDevice | None]":
    """Return a switch that is ready to run, and how controllers see it if they may.

    Raises
    ------
    ValueError, OSError
        A file is wrong, or a port cannot be opened; nothing stays open.
    """
    _check_p4runtime(arguments)
    fabric, own = _fabric(arguments)
    backend = _backend(arguments, own)
    # Loaded even by a switch that waits for a controller to send one: most likely it will be this one, and what has
    # been compiled once is taken from disk then.
    program: Program | None = Program.load(arguments.program, backend=backend)
    if arguments.p4runtime is not None and arguments.entries is None and arguments.fabric is None:
        program = None
    entries = _entries(arguments, fabric, own, program)
    device: P4RuntimeDevice | None = None
    with ExitStack() as opened:
        groups = []
        for group in _ports(arguments, fabric, own):
            opened.callback(group.close)
            groups.append(group)
        ports = [port for group in groups for port in group.counters]
        _check_settings(arguments, ports)
        switch = Switch(
            program or EmptyProgram(),
            groups,
            {port: _override(entries.ports.get(port, PortQueueing()), arguments, port) for port in ports},
            describe_program=lambda: describe(program if device is None else device.program),
        )
        if arguments.p4runtime is not None:
            device = _device(arguments, switch, program, backend)
        opened.pop_all()  # from here on the switch closes them
    return switch, device


def describe(program: Program | None) -> dict[str, Any]:
    """Return what a program has counted, with the events named, as a dict that JSON can hold; empty for no program."""
    if program is None:
        return {}
    found = {}
    for name, events in (("ingress_events", IngressEvent), ("egress_events", EgressEvent)):
        # A controller may have sent a program that counts other things.
        if name in program.counters:
            counted = program.counters[name].values()
            decoded = decode_events(events, counted[:, 0], counted[:, 1])
            found[name] = {"totals": event_totals(decoded), "by_queue": [event._asdict() for event in decoded]}
    return {"digest": program.digest, "backend": program.backend, **found}


def _backend(arguments: argparse.Namespace, own: Any) -> Backend:
    """Return how programs are to be run."""
    if arguments.backend != "auto":
        chosen: Backend = arguments.backend
        return chosen
    words = arguments.port or []
    interfaces = any("=packet:" in word for word in words) if own is None else own.ports == "packet"
    return "numba" if interfaces and importlib.util.find_spec("numba") is not None else "python"


def _fabric(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the fabric that was asked for, and which of its switches this one is; None of both without one."""
    if arguments.fabric is None and arguments.hosts is None:
        return None, None
    # The controller is not part of the switch; only the command line brings the two together.
    from dlcp.controller.fabric import load, star

    fabric = load(arguments.fabric) if arguments.fabric is not None else star(arguments.hosts)
    if arguments.name is None and len(fabric.switches) > 1:
        raise ValueError(f"say which switch to be: --name {'|'.join(switch.name for switch in fabric.switches)}")
    own = fabric.switch(arguments.name or fabric.switches[0].name)
    return replace(fabric, queueing=_override(fabric.queueing, arguments)), own


def _entries(arguments: argparse.Namespace, fabric: Any, own: Any, program: Program | None) -> Entries:
    """Load the entries into the program, if there is one, and return them."""
    if program is None:
        if not (arguments.port or arguments.hosts):
            raise ValueError("nothing to connect: give --port, once for each port, or --hosts N")
        return Entries()
    document = None
    if arguments.entries is not None:
        entries, document = read_entries(arguments.entries)
    elif fabric is not None:
        entries = _policy_entries(fabric, own)
    else:
        raise ValueError("nothing to connect: give --fabric FILE, --hosts N, or --port and --entries")
    apply_entries(entries, program, document)
    return entries


def _policy_entries(fabric: Any, own: Any) -> Entries:
    from dlcp.controller.entries import entries

    return entries(fabric, own.name)


def _setting(allowed: Range) -> Callable[[str], _PortSetting]:
    """Return a type for argparse: what ``VALUE`` or ``PORT=VALUE`` says."""
    value_of, port_of = real(allowed), whole(0, _LAST_PORT)

    def convert(word: str) -> _PortSetting:
        port, equals, value = word.rpartition("=")
        return port_of(port) if equals else None, value_of(value)

    return convert


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


def _ports(arguments: argparse.Namespace, fabric: Any, own: Any) -> Iterator[PortGroup]:
    """Open the ports that the switch has in its fabric, or those that --port asks for."""
    loopback: list[LoopbackHost] = []
    interfaces: dict[int, str] = {}
    if fabric is None:
        for word in arguments.port or []:
            number, _, kind = word.partition("=")
            if not number.isdecimal() or not (kind == "loopback" or kind.startswith("packet:")):
                raise ValueError(f"--port {word}: expected N=loopback or N=packet:INTERFACE, as in 1=packet:eth1")
            if kind == "loopback":
                loopback.append(LoopbackHost.numbered(int(number) - 1))
            else:
                interfaces[int(number)] = kind.removeprefix("packet:")
    elif own.ports == "packet":
        interfaces = {port: own.interface(port) for port in fabric.neighbours[own.name]}
    else:
        for port, neighbour in fabric.neighbours[own.name].items():
            host = LoopbackHost.numbered(port - 1)
            loopback.append(replace(host, address=neighbour.host.address, mac=neighbour.host.mac))
    if loopback:
        carried = ((UDP_PORT_BASE,),) if fabric is None else (fabric.udp_ports, fabric.mtu_bytes)
        yield LoopbackPorts(loopback, *carried)
    for port, interface in interfaces.items():
        yield PacketPort(port, interface)


def _check_p4runtime(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, before anything is opened."""
    files = [arguments.tls_cert, arguments.tls_key, arguments.tls_ca]
    if arguments.p4runtime is None:
        if arguments.insecure or any(files):
            raise ValueError("--tls-cert, --tls-key, --tls-ca and --insecure are about --p4runtime, which is not given")
        return
    if arguments.insecure and any(files):
        raise ValueError("--insecure and TLS files are given; which of the two is meant?")
    if not arguments.insecure and not all(files):
        raise ValueError("--p4runtime needs --tls-cert, --tls-key and --tls-ca, or --insecure for plain text")
    if arguments.device_id < 1:
        raise ValueError(f"--device-id {arguments.device_id}: give 1 or more")


def _device(
    arguments: argparse.Namespace, switch: Switch, program: Program | None, backend: Backend
) -> "P4RuntimeDevice":
    """Return the switch as controllers will see it.

    Parameters
    ----------
    program
        What it runs already, from the file ``--program``; its p4info is read from beside that file.

    Raises
    ------
    ValueError
        The package for P4Runtime, or the p4info, is missing, or is of another program.
    """
    try:
        from dlcp.switch.p4runtime import ForwardingPipeline, P4RuntimeDevice, Refused
    except ImportError as error:
        raise ValueError(f"--p4runtime: {error}; install what it needs with: {_INSTALL_P4RUNTIME}") from None
    if program is None:
        return P4RuntimeDevice(switch, backend)
    try:
        return P4RuntimeDevice(switch, backend, ForwardingPipeline.of(program, arguments.program))
    except Refused as refusal:
        raise ValueError(f"{arguments.program}: {refusal}") from None


def _server(arguments: argparse.Namespace, device: "P4RuntimeDevice") -> "P4RuntimeServer":
    """Start the server; raises ValueError for an address that is none, OSError if it cannot listen there."""
    from dlcp.switch.p4runtime import P4RuntimeServer, TlsFiles, make_way_for_packets, parse_address

    make_way_for_packets()
    tls = None if arguments.insecure else TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    return P4RuntimeServer(device, parse_address(arguments.p4runtime), arguments.device_id, tls)


def _serve(arguments: argparse.Namespace, counters: Path | None) -> None:
    """Run the switch until a signal says stop."""
    switch, device = build(arguments)
    server = None if device is None else _server(arguments, device)
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
    fabric, own = _fabric(arguments)
    if fabric is None:
        raise ValueError("--write-entries needs --fabric or --hosts")
    write_entries(arguments.write_entries, _policy_entries(fabric, own))
    return 0


def _run_child(arguments: argparse.Namespace) -> None:
    """Be the switch beside the process that shows its counters."""
    end_with_parent()
    sys.exit(run(arguments))


def _watch(arguments: argparse.Namespace) -> int:
    """Show counters; the switch runs in another process, for drawing takes longer than a packet may wait."""
    from dlcp.commands.switch_watch import watch

    if arguments.fabric is None and arguments.hosts is None and arguments.port is None:
        if arguments.counters is None:
            raise ValueError("--watch needs a switch to start, or --counters FILE of one that runs")
        watch(arguments.counters, lambda: True)
        return 0
    with tempfile.TemporaryDirectory(prefix="dlcp-switch-") as folder:
        counters = arguments.counters or Path(folder) / "counters.json"
        own = argparse.Namespace(**{**vars(arguments), "watch": False, "counters": counters})
        process = multiprocessing.get_context("fork").Process(target=_run_child, args=(own,))
        process.start()
        try:
            watch(counters, process.is_alive)
        finally:
            process.terminate()
            process.join()
        return process.exitcode or 0
