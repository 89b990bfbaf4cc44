# SPDX-License-Identifier: Apache-2.0
"""The work of ``dlcp switch``: run the built-in switch, or show the counters of a running one."""

import argparse
import gc
import importlib.util
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dlcp.host.processes import end_with_parent
from dlcp.inputs.document import read_json
from dlcp.switch import (
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
    load_definition,
    read_entries,
    write_entries,
)
from dlcp.wire import UDP_PORT_BASE

if TYPE_CHECKING:
    from dlcp.switch.p4runtime import P4RuntimeDevice, P4RuntimeServer

_INSTALL_P4RUNTIME: Final = "pip install 'dlcp[p4runtime]'"

_SHOW_EVERY_S: Final = 0.5
_TROUBLE: Final = (
    "refused",
    "malformed",
    "oversize",
    "undeliverable",
    "unreachable",
    "receive_errors",
    "send_errors",
    "overrun",
    "lost",
    "lost_arriving",
)


def run(arguments: argparse.Namespace) -> int:
    """Run the switch, show its counters or write its entries; return the exit status."""
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
    """Return a switch that is ready to run, and its device for P4Runtime, if asked for.

    Raises
    ------
    ValueError, OSError
        A file is wrong, or a port cannot be opened; nothing stays open.
    """
    _check_p4runtime(arguments)
    fabric, own = _fabric(arguments)
    backend = _backend(arguments, own)
    # Loaded even if a controller is to send the program: it will most likely be this one, and is then compiled already.
    program: Program | None = Program.load(_program_file(arguments), backend=backend)
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
    """Return a program's counters by the names of their events, as plain values; empty for no program."""
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
    """Return the backend that runs programs."""
    if arguments.backend != "auto":
        chosen: Backend = arguments.backend
        return chosen
    words = arguments.port or []
    interfaces = any("=packet:" in word for word in words) if own is None else own.ports == "packet"
    return "numba" if interfaces and importlib.util.find_spec("numba") is not None else "python"


def _program_file(arguments: argparse.Namespace) -> Path:
    return arguments.program or PROGRAM_PATH


def _fabric(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the fabric of the command line and this switch in it; None and None without a fabric."""
    if arguments.fabric is None and arguments.hosts is None:
        return None, None
    # The controller is not part of the switch; only the command line brings the two together.
    from dlcp.controller.fabric import load, star

    fabric = load(arguments.fabric) if arguments.fabric is not None else star(arguments.hosts)
    if arguments.name is None and len(fabric.switches) > 1:
        raise ValueError(f"choose a switch with --name {'|'.join(switch.name for switch in fabric.switches)}")
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
        entries, document = read_entries(arguments.entries, program.definition)
    elif fabric is not None:
        entries = _policy_entries(fabric, own)
    else:
        raise ValueError("nothing to connect: give --fabric FILE, --hosts N, or --port and --entries")
    apply_entries(entries, program, document)
    return entries


def _policy_entries(fabric: Any, own: Any) -> Entries:
    from dlcp.controller.entries import entries

    return entries(fabric, own.name)


def _override(queueing: PortQueueing, arguments: argparse.Namespace, port: int | None = None) -> PortQueueing:
    """Return the queueing with the command line's values for all ports, or for this port, in its place."""
    for name in ("rate_bps", "depth_packets"):
        given = dict(getattr(arguments, name) or ())
        value = given.get(port, given.get(None))
        if value is not None:
            queueing = replace(queueing, **{name: round(value)})
    return queueing


def _check_settings(arguments: argparse.Namespace, ports: Sequence[int]) -> None:
    """Refuse values for unknown ports, and for ports of a fabric's file."""
    for option, given in (("--rate-bps", arguments.rate_bps), ("--depth-packets", arguments.depth_packets)):
        for port, value in given or ():
            if port is not None and arguments.fabric is not None:
                raise ValueError(f"{option} {port}={value:g}: with --fabric, set it in its file, at the port's link")
            if port is not None and port not in ports:
                raise ValueError(f"{option} {port}={value:g}: unknown port {port}")


def _ports(arguments: argparse.Namespace, fabric: Any, own: Any) -> Iterator[PortGroup]:
    """Open the switch's ports in its fabric, or those of --port."""
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
    """Raise ValueError for contradictory options, before anything is opened."""
    files = [arguments.tls_cert, arguments.tls_key, arguments.tls_ca]
    if arguments.p4runtime is None:
        if arguments.insecure or any(files):
            raise ValueError("--tls-cert, --tls-key, --tls-ca and --insecure require --p4runtime")
        return
    if arguments.insecure and any(files):
        raise ValueError("--insecure and TLS files exclude each other: leave out one")
    if not arguments.insecure and not all(files):
        raise ValueError("--p4runtime needs --tls-cert, --tls-key and --tls-ca, or --insecure for plain text")


def _device(
    arguments: argparse.Namespace, switch: Switch, program: Program | None, backend: Backend
) -> "P4RuntimeDevice":
    """Return the switch as a device for P4Runtime.

    Parameters
    ----------
    program
        The program that it runs, from the file ``--program``; the p4info is beside that file.

    Raises
    ------
    ValueError
        The package for P4Runtime is missing, or the p4info is missing or of another program.
    """
    try:
        from dlcp.switch.p4runtime import ForwardingPipeline, P4RuntimeDevice, Refused
    except ImportError as error:
        raise ValueError(f"--p4runtime: {error}; install what it needs with: {_INSTALL_P4RUNTIME}") from None
    if program is None:
        return P4RuntimeDevice(switch, backend)
    try:
        return P4RuntimeDevice(switch, backend, ForwardingPipeline.of(program, _program_file(arguments)))
    except Refused as refusal:
        raise ValueError(f"{_program_file(arguments)}: {refusal}") from None


def _server(arguments: argparse.Namespace, device: "P4RuntimeDevice") -> "P4RuntimeServer":
    """Start the server; raise ValueError for an invalid address, OSError if it cannot listen there."""
    from dlcp.switch.p4runtime import P4RuntimeServer, TlsFiles, make_way_for_packets, parse_address

    make_way_for_packets()
    tls = None if arguments.insecure else TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    return P4RuntimeServer(device, parse_address(arguments.p4runtime), arguments.device_id, tls)


def _serve(arguments: argparse.Namespace, counters: Path | None) -> None:
    """Run the switch until SIGTERM or SIGINT."""
    switch, device = build(arguments)
    server = None if device is None else _server(arguments, device)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: switch.stop())
    # All present objects live on; the garbage collector need not visit them while packets wait.
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
    definition = load_definition(_program_file(arguments))
    write_entries(arguments.write_entries, _policy_entries(fabric, own), definition)
    return 0


def _run_child(arguments: argparse.Namespace) -> None:
    """Run the switch in a child of the process that shows its counters."""
    end_with_parent()
    sys.exit(run(arguments))


def _watch(arguments: argparse.Namespace) -> int:
    """Show counters; the switch runs in another process, because drawing would delay packets."""
    if arguments.fabric is None and arguments.hosts is None and arguments.port is None:
        if arguments.counters is None:
            raise ValueError("--watch needs a switch to start, or --counters FILE of one that runs")
        show_counters(arguments.counters, lambda: True)
        return 0
    with tempfile.TemporaryDirectory(prefix="dlcp-switch-") as folder:
        counters = arguments.counters or Path(folder) / "counters.json"
        own = argparse.Namespace(**{**vars(arguments), "watch": False, "counters": counters})
        process = multiprocessing.get_context("fork").Process(target=_run_child, args=(own,))
        process.start()
        try:
            show_counters(counters, process.is_alive)
        finally:
            process.terminate()
            process.join()
        return process.exitcode or 0


# Counters of a running switch -----------------------------------------------------------------------------------------


def show_counters(path: Path, alive: Callable[[], bool]) -> None:
    """Show the counters in a file while ``alive`` returns True, or until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before: dict[str, Any] | None = None
    with Live(Text(f"waiting for {path}"), auto_refresh=False) as live:
        try:
            while alive():
                snapshot = _read(path)
                if snapshot is not None and (before is None or snapshot["uptime_s"] != before["uptime_s"]):
                    live.update(render(snapshot, before), refresh=True)
                    before = snapshot
                time.sleep(_SHOW_EVERY_S)
        except KeyboardInterrupt:
            return


def render(snapshot: dict[str, Any], before: dict[str, Any] | None = None) -> Group:
    """Return a snapshot as tables; rates are means since ``before``, or since the start."""
    if before is not None and before["uptime_s"] >= snapshot["uptime_s"]:
        before = None  # another switch has taken over the file
    elapsed_s = snapshot["uptime_s"] - (before["uptime_s"] if before else 0.0)
    table = Table(title=f"switch, up {snapshot['uptime_s']:.0f} s, busy {snapshot['busy']:.0%}", title_justify="left")
    for heading in ("port", "leads to", "queue"):
        table.add_column(heading)
    for heading in ("waiting", "longest", "sent", "Mbit/s", "tail drops"):
        table.add_column(heading, justify="right")
    earlier = {port["port"]: port for port in before["ports"]} if before else {}
    for port in snapshot["ports"]:
        name, leads_to = str(port["port"]), port["leads_to"]
        for queue in reversed(port["queues"]):
            if not queue["enqueued"] and not queue["tail_drops"]:
                continue
            sent_bytes = queue["transmitted_bytes"]
            if port["port"] in earlier:
                sent_bytes -= earlier[port["port"]]["queues"][queue["queue"]]["transmitted_bytes"]
            table.add_row(
                name,
                leads_to,
                str(queue["queue"]),
                str(queue["depth"]),
                str(queue["max_depth"]),
                str(queue["transmitted"]),
                f"{sent_bytes * 8e-6 / elapsed_s:.1f}" if elapsed_s else "",
                str(queue["tail_drops"]),
            )
            name = leads_to = ""
        if name:
            table.add_row(name, leads_to, "", "", "", "0", "", "0")
    return Group(table, Text(_events(snapshot)), Text(_troubles(snapshot), style="yellow"))


def _events(snapshot: dict[str, Any]) -> str:
    """Return the program's events in one line."""
    totals: dict[str, int] = {}
    for direction in ("ingress_events", "egress_events"):
        totals.update(snapshot["program"].get(direction, {}).get("totals", {}))
    return "program: " + (", ".join(f"{name} {count}" for name, count in totals.items()) or "no events yet")


def _troubles(snapshot: dict[str, Any]) -> str:
    """Return the problems of each port, a line per port; empty if there are none."""
    lines = []
    for port in snapshot["ports"]:
        found = [f"{name.replace('_', ' ')} {port[name]}" for name in _TROUBLE if port[name]]
        if found:
            lines.append(f"port {port['port']}: {', '.join(found)}")
    if snapshot["no_port"]:
        lines.append(f"sent to ports that do not exist: {snapshot['no_port']}")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    snapshot = read_json(path)
    if not isinstance(snapshot, dict) or not {"uptime_s", "busy", "ports", "program", "no_port"} <= snapshot.keys():
        raise ValueError(f"{path}: not the counters of a switch; give the file of its --counters")
    return snapshot
