# SPDX-License-Identifier: Apache-2.0
"""``dlcp switch``: run the built-in switch, or show the counters of a running one."""

import argparse
import gc
import importlib.util
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dlcp.commands.common import DEPTH_MAX, DURATIONS, add, real, refuse, whole
from dlcp.host.ip import IPV4
from dlcp.host.processes import end_with_parent
from dlcp.inputs.addresses import parse_listening
from dlcp.inputs.configuration import Range

if TYPE_CHECKING:
    from rich.console import Group

    from dlcp.controller.fabric import Fabric, FabricSwitch
    from dlcp.switch import Backend, Entries, PortGroup, PortQueueing, Program, Switch
    from dlcp.switch.p4runtime import P4RuntimeDevice

_PortSetting: TypeAlias = tuple[int | None, float]
"""A port, or None for all ports, and its value from the command line."""
_RATE_BPS: Final = Range(0.0, 1e12)
_DEPTH_PACKETS: Final = Range(0, DEPTH_MAX)
_LAST_PORT: Final = 65_535
_Place: TypeAlias = "tuple[Fabric, FabricSwitch] | None"
"""The fabric of the command line and this switch in it; None without a fabric."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp switch``."""
    what = parser.add_argument_group("what to connect (one of these)").add_mutually_exclusive_group()
    add(what, "--fabric", "FILE", Path, "a fabric and its policy, as YAML or JSON")
    add(parser, "--name", "SWITCH", str, "which switch of the fabric to run, if it has several")
    add(what, "--hosts", "N", whole(0, 250), "N processes of this machine, over 127.0.0.0/8")
    port = "one port; may be repeated; requires --entries or --p4runtime"
    add(what, "--port", "N=loopback|N=packet:INTERFACE", str, port, action="append")
    how = parser.add_argument_group("how to switch")
    add(how, "--entries", "FILE", Path, "table entries and queues, as JSON")
    rate = "rate of every port, or of one, in bit/s; may be repeated"
    add(how, "--rate-bps", "[PORT=]RATE", _setting(_RATE_BPS), rate, action="append")
    depth = "depth of every queue, or of those of one port, in packets; may be repeated"
    add(how, "--depth-packets", "[PORT=]PACKETS", _setting(_DEPTH_PACKETS), depth, action="append")
    queueing = "rate, depths, delay and loss of single ports, as the `ports` of --entries; read again on SIGHUP"
    add(how, "--queueing", "FILE", Path, queueing)
    add(how, "--program", "FILE", Path, "compiled program, as BMv2's JSON (default: DLCP's own)")
    how.add_argument(
        "--backend",
        choices=("auto", "python", "numba"),
        default="auto",
        help="plain Python, or compiled by Numba, which pays from some 20,000 packets/s (default: numba for network "
        "interfaces, if installed)",
    )
    control = parser.add_argument_group("controlled over P4Runtime")
    served = (
        "accept program and entries from a controller; listens on 127.0.0.1 unless HOST is given. Without --entries "
        "or --fabric, the switch drops all packets until the controller sends a program"
    )
    add(control, "--p4runtime", "[HOST:]PORT", str, served)
    device = "the controller's number for this switch"
    add(control, "--device-id", "N", whole(1, (1 << 63) - 1), device, default=1)
    add(control, "--tls-cert", "FILE", Path, "certificate of the switch, PEM")
    add(control, "--tls-key", "FILE", Path, "its private key, PEM")
    add(
        control, "--tls-ca", "FILE", Path, "CA that must have signed controllers' certificates, PEM; others are refused"
    )
    insecure = "use plain text instead of TLS; anyone who can reach the address can control the switch"
    control.add_argument("--insecure", action="store_true", help=insecure)
    look = parser.add_argument_group("counters")
    add(look, "--counters", "FILE", Path, "write all counters to a file, as JSON")
    add(look, "--counters-every", "SECONDS", real(DURATIONS), "interval of writes", default=1.0)
    watch = "show the counters; with --counters alone, those of a running switch"
    look.add_argument("--watch", action="store_true", help=watch)
    add(look, "--write-entries", "FILE", Path, "write the entries to a file and exit")


def _setting(allowed: Range) -> Callable[[str], _PortSetting]:
    """Return a type for argparse: ``VALUE`` or ``PORT=VALUE``."""
    value_of, port_of = real(allowed), whole(0, _LAST_PORT)

    def convert(word: str) -> _PortSetting:
        port, equals, value = word.rpartition("=")
        return port_of(port) if equals else None, value_of(value)

    return convert


def run(arguments: argparse.Namespace) -> int:
    """Run the switch, show its counters or write its entries; return the exit status."""
    try:
        if arguments.write_entries is not None:
            _write_entries(arguments)
        elif arguments.watch:
            return _watch(arguments)
        else:
            _serve(arguments)
    except (OSError, ValueError) as error:
        return refuse("switch", error)
    return 0


def build(arguments: argparse.Namespace) -> "tuple[Switch, P4RuntimeDevice | None]":
    """Return a switch that is ready to run, and its device for P4Runtime, if asked for.

    Raises
    ------
    ValueError, OSError
        A file is wrong, or a port cannot be opened; nothing stays open.
    """
    from dlcp.switch import EmptyProgram, PortQueueing, Program, Switch

    _check_p4runtime(arguments)
    place = _place(arguments)
    backend = _backend(arguments, place)
    # Loaded even if a controller is to send the program: it will most likely be this one, and is then compiled already.
    program: Program | None = Program.load(_program_file(arguments), backend=backend)
    if arguments.p4runtime is not None and arguments.entries is None and arguments.fabric is None:
        program = None
    entries = _entries(arguments, place, program)
    device: P4RuntimeDevice | None = None
    with ExitStack() as opened:
        groups = []
        for group in _ports(arguments, place):
            opened.callback(group.close)
            groups.append(group)
        ports = [port for group in groups for port in group.counters]
        _check_settings(arguments, ports)
        queueing = {port: _override(entries.ports.get(port, PortQueueing()), arguments, port) for port in ports}
        if arguments.queueing is not None:
            queueing |= _port_settings(arguments.queueing, ports)
        switch = Switch(program or EmptyProgram(), groups, queueing)
        if arguments.p4runtime is not None:
            device = _device(arguments, switch, program, backend)
        opened.pop_all()  # from here on the switch closes them
    return switch, device


def _backend(arguments: argparse.Namespace, place: _Place) -> "Backend":
    """Return the backend that runs programs."""
    if arguments.backend != "auto":
        chosen: Backend = arguments.backend
        return chosen
    words = arguments.port or []
    interfaces = any("=packet:" in word for word in words) if place is None else place[1].ports == "packet"
    return "numba" if interfaces and importlib.util.find_spec("numba") is not None else "python"


def _program_file(arguments: argparse.Namespace) -> Path:
    from dlcp.switch import PROGRAM_PATH

    return arguments.program or PROGRAM_PATH


def _place(arguments: argparse.Namespace) -> _Place:
    """Return the fabric of the command line and this switch in it."""
    if arguments.fabric is None and arguments.hosts is None:
        return None
    # The controller is not part of the switch; only the command line brings the two together.
    from dlcp.controller.fabric import load, star

    fabric = load(arguments.fabric) if arguments.fabric is not None else star(arguments.hosts)
    if arguments.name is None and len(fabric.switches) > 1:
        raise ValueError(f"choose a switch with --name {'|'.join(switch.name for switch in fabric.switches)}")
    own = fabric.switch(arguments.name or fabric.switches[0].name)
    return replace(fabric, queueing=_override(fabric.queueing, arguments)), own


def _entries(arguments: argparse.Namespace, place: _Place, program: "Program | None") -> "Entries":
    """Load the entries into the program, if there is one, and return them."""
    from dlcp.switch import Entries, apply_entries, read_entries

    if program is None:
        if not (arguments.port or arguments.hosts):
            raise ValueError("nothing to connect: give --port, once for each port, or --hosts N")
        return Entries()
    document = None
    if arguments.entries is not None:
        entries, document = read_entries(arguments.entries, program.definition)
    elif place is not None:
        entries = _policy_entries(*place)
    else:
        raise ValueError("nothing to connect: give --fabric FILE, --hosts N, or --port and --entries")
    apply_entries(entries, program, document)
    return entries


def _policy_entries(fabric: "Fabric", own: "FabricSwitch") -> "Entries":
    from dlcp.controller.entries import entries

    return entries(fabric, own.name)


def _override(queueing: "PortQueueing", arguments: argparse.Namespace, port: int | None = None) -> "PortQueueing":
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


def _port_settings(file: Path, ports: Collection[int]) -> "dict[int, PortQueueing]":
    """Return the queueing of the ports that a file names."""
    from dlcp.switch import read_ports

    found = read_ports(file)
    unknown = sorted(found.keys() - set(ports))
    if unknown:
        raise ValueError(f"{file}: unknown port {unknown[0]}; the ports are {sorted(ports)}")
    return found


def _change_settings(switch: "Switch", file: Path) -> None:
    """Read the queueing of ports again, and change it before the next packets; a wrong file changes nothing."""
    try:
        found = _port_settings(file, switch.queues)
    except (OSError, ValueError) as error:
        refuse("switch", f"nothing has changed: {error}")
        return

    def change() -> None:
        for port, queueing in found.items():
            switch.queues[port].configure(queueing)

    switch.call(change)


def _ports(arguments: argparse.Namespace, place: _Place) -> "Iterator[PortGroup]":
    """Open the switch's ports in its fabric, or those of --port."""
    from dlcp.switch import LoopbackHost, LoopbackPorts, PacketPort
    from dlcp.wire import UDP_PORT_BASE

    loopback: list[LoopbackHost] = []
    interfaces: dict[int, str] = {}
    carried: tuple[Any, ...] = ((UDP_PORT_BASE,),)
    if place is None:
        for word in arguments.port or []:
            number, _, kind = word.partition("=")
            if not number.isdecimal() or not (kind == "loopback" or kind.startswith("packet:")):
                raise ValueError(f"--port {word}: expected N=loopback or N=packet:INTERFACE, as in 1=packet:eth1")
            if kind == "loopback":
                loopback.append(LoopbackHost.numbered(int(number) - 1))
            else:
                interfaces[int(number)] = kind.removeprefix("packet:")
    else:
        fabric, own = place
        carried = fabric.udp_ports, fabric.mtu_bytes
        for port, neighbour in fabric.neighbours[own.name].items():
            if own.ports == "packet":
                interfaces[port] = own.interface(port)
            else:
                assert neighbour.host is not None  # loopback ports lead only to hosts
                host = LoopbackHost.numbered(port - 1)
                loopback.append(replace(host, address=neighbour.host.address, mac=neighbour.host.mac))
    if loopback:
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
    arguments: argparse.Namespace, switch: "Switch", program: "Program | None", backend: "Backend"
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


def _serve(arguments: argparse.Namespace) -> None:
    """Run the switch until SIGTERM or SIGINT."""
    from dlcp.switch import READY

    switch, device = build(arguments)
    if arguments.queueing is not None:  # before a controller can reach it
        signal.signal(signal.SIGHUP, lambda *_: _change_settings(switch, arguments.queueing))
    server, at = None, ""
    if device is not None:
        from dlcp.switch.p4runtime import P4RUNTIME_PORT, P4RuntimeServer, TlsFiles, make_way_for_packets

        make_way_for_packets()
        tls = None if arguments.insecure else TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
        listen = parse_listening(arguments.p4runtime, (IPV4.loopback, P4RUNTIME_PORT))
        server = P4RuntimeServer(device, listen, arguments.device_id, tls)
        at = f"; P4Runtime on {server.address}"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: switch.stop())
    # All existing objects stay alive, so the garbage collector need not visit them while packets wait.
    gc.collect()
    gc.freeze()
    print(f"{READY}: ports {', '.join(map(str, sorted(switch.queues)))}{at}", flush=True)
    try:
        switch.run(arguments.counters, arguments.counters_every)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if server is not None:
            server.close()
        switch.close()


def _write_entries(arguments: argparse.Namespace) -> None:
    from dlcp.switch import load_definition, write_entries

    place = _place(arguments)
    if place is None:
        raise ValueError("--write-entries needs --fabric or --hosts")
    write_entries(arguments.write_entries, _policy_entries(*place), load_definition(_program_file(arguments)))


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
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before: dict[str, Any] | None = None
    with Live(Text(f"waiting for {path}"), auto_refresh=False) as live:
        try:
            while alive():
                snapshot = _read_snapshot(path)
                if snapshot is not None and (before is None or snapshot["uptime_s"] != before["uptime_s"]):
                    live.update(render(snapshot, before), refresh=True)
                    before = snapshot
                time.sleep(_SHOW_EVERY_S)
        except KeyboardInterrupt:
            return


def render(snapshot: dict[str, Any], before: dict[str, Any] | None = None) -> "Group":
    """Return a snapshot as tables; rates are means since ``before``, or since the start."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

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


def _read_snapshot(path: Path) -> dict[str, Any] | None:
    from dlcp.inputs.document import read_json

    if not path.exists():
        return None
    snapshot = read_json(path)
    if not isinstance(snapshot, dict) or not {"uptime_s", "busy", "ports", "program", "no_port"} <= snapshot.keys():
        raise ValueError(f"{path}: not the counters of a switch; give the file of its --counters")
    return snapshot
