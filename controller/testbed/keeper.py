# SPDX-License-Identifier: Apache-2.0
"""The process that holds a testbed while it is up: Mininet's namespaces live as long as the shells it keeps in them.

``python -m dlcp.controller.testbed.keeper`` reads a layout from standard input, builds it, prints that it is ready,
restarts each switch that exits, and removes everything on SIGTERM, SIGINT or SIGHUP.

A switch serves P4Runtime (and BMv2 also Thrift, on all addresses and without authentication) only within its own
namespace. Controllers run outside, and reach it through a proxy on this machine's loopback.

BMv2's own rate is per priority queue: a port with k busy queues would send at k times the rate, and strict priority
would have no effect. Instead, its egress interfaces have a token bucket (``tbf``) and its packet sockets have small
send buffers. Then a send blocks while the interface is busy, and packets wait in BMv2's queues, as on a link of that
rate.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import msgspec

from dlcp.controller.fabric import SwitchKind
from dlcp.controller.testbed import TestbedError, came_true
from dlcp.controller.testbed.layout import (
    KEEPER_READY,
    LOOPBACK,
    HostLayout,
    Layout,
    PortLayout,
    ProcessId,
    StartedSwitch,
    StateFile,
    SwitchLayout,
    TestbedState,
)
from dlcp.controller.testbed.requirements import mininet_network
from dlcp.host.closing import Closing
from dlcp.host.ip import IPV4, IPV6, family_of
from dlcp.host.netlab import CONGESTION_CONTROL, HOST_INTERFACE, NamedNamespace, NamespaceError
from dlcp.host.processes import end, python_command
from dlcp.switch import write_ports

# -------------------------------------------------------------------------------------------------- ports of namespaces


_PROXY_DEADLINE_S: Final = 10.0
_CHUNK_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class ForwardedPort:
    """A port of this machine's loopback that is forwarded to a port of a namespace's loopback."""

    outside: int
    namespace: str
    inside: int


class NamespaceProxy(Closing):
    """Forwards connections into namespaces, in a thread; a context manager.

    Parameters
    ----------
    ports
        The ports to forward.

    Raises
    ------
    TestbedError
        A port is taken.
    """

    def __init__(self, ports: Sequence[ForwardedPort]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dlcp-namespace-proxy", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(ports), self._loop).result(_PROXY_DEADLINE_S)
        except OSError as error:
            self.close()
            raise TestbedError(f"cannot listen for connections to the switches: {error.strerror}") from error

    def close(self) -> None:
        """Close all connections, and accept no more."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_PROXY_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PROXY_DEADLINE_S)
        self._loop.close()

    async def _open(self, ports: Sequence[ForwardedPort]) -> None:
        for port in ports:
            await asyncio.start_server(partial(_carry, port), LOOPBACK, port.outside)


def connect(namespace: str, port: int) -> socket.socket:
    """Return a connection to a server on the loopback of a namespace.

    Raises
    ------
    OSError
        No server answers.
    """
    return NamedNamespace(namespace).call(lambda: socket.create_connection((LOOPBACK, port), timeout=5))


async def _cancel_others() -> None:
    """Cancel all tasks of this loop but this one, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _carry(port: ForwardedPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one connection until either end closes it."""
    try:
        inside = await asyncio.to_thread(connect, port.namespace, port.inside)
        inside.setblocking(False)
        far_reader, far_writer = await asyncio.open_connection(sock=inside)
    except OSError:
        writer.close()  # the switch is down; the controller retries
        return
    with contextlib.suppress(asyncio.CancelledError):  # the proxy closes; asyncio would log it as an error
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    writer.close()


# ------------------------------------------------------------------------------------------------------ switch programs


PORT_BURST_BYTES: Final = 3_028
"""Largest burst after a pause: two full frames. With less, the rate would fall whenever a timer is late."""
PORT_LIMIT_BYTES: Final = 262_144
"""More than a socket's send buffer holds, so that the token bucket itself never drops."""
SEND_BUFFER_BYTES: Final = 8_192
"""Send buffer of a packet socket, before the kernel doubles it: about seven full frames with their overhead."""
_PIDFD_GETFD: Final = 438
"""Number of the system call, the same on every architecture."""


def limit_port(namespace: NamedNamespace, interface: str, rate_bps: int) -> None:
    """Set or change the rate of a BMv2 port, in bit/s of Ethernet frames.

    Raises
    ------
    NamespaceError
        The kernel has no token bucket filter.
    """
    namespace.limit_rate(interface, rate_bps, burst_bytes=PORT_BURST_BYTES, limit_bytes=PORT_LIMIT_BYTES)


def shrink_packet_buffers(pid: int) -> None:
    """Shrink the send buffers of all packet sockets of a process.

    The sockets are duplicated from outside (``pidfd_getfd``): libpcap opens them with the system default and has no
    option for their size, and changing the default would affect every program of the machine.

    Raises
    ------
    TestbedError
        The process's sockets cannot be duplicated, or none is a packet socket.
    """
    pidfd = os.pidfd_open(pid)
    try:
        found = [fd for fd in _sockets(pid) if _shrink(pidfd, fd)]
    finally:
        os.close(pidfd)
    if not found:
        raise TestbedError(f"process {pid} has no packet socket: it has not opened its ports")


def _sockets(pid: int) -> list[int]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if str(link.readlink()).startswith("socket:"):
                found.append(int(link.name))
    return found


def _shrink(pidfd: int, fd: int) -> bool:
    """Shrink the send buffer of one socket of a process if it is a packet socket; return whether it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        number = ctypes.get_errno()
        if number == errno.EBADF:  # closed since
            return False
        raise TestbedError(
            f"cannot duplicate the switch's sockets: {os.strerror(number)}; this needs root and Linux 5.6 or newer"
        )
    with socket.socket(fileno=copy) as sock:
        if sock.family != socket.AF_PACKET:
            return False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return True


_START_DEADLINE_S: Final = 60.0
_STOP_DEADLINE_S: Final = 10.0
CONTROL_PORT: Final = 9559
THRIFT_PORT: Final = 9090
"""These ports are the same for all switches: each has a namespace of its own."""
PRIORITY_QUEUES: Final = 8


class SwitchProgram(ABC):
    """A switch as a process in its namespace. It starts without a program, which a controller installs over P4Runtime.

    Parameters
    ----------
    plan
        Its namespace and its ports.
    files
        The testbed's files, for its log.
    """

    def __init__(self, plan: SwitchLayout, files: StateFile) -> None:
        self.plan = plan
        self.log = files.path(f".{plan.name}.log")
        self._files = files
        self._process: subprocess.Popen[Any] | None = None

    @property
    @abstractmethod
    def argv(self) -> list[str]:
        """The command line."""

    @property
    def forwarded(self) -> list[ForwardedPort]:
        """The forwarded ports of its servers."""
        return [ForwardedPort(self.plan.control_port, self.plan.namespace, CONTROL_PORT)]

    @property
    def pid(self) -> int:
        """The process id; 0 if it was not started."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def queueing(self) -> Path:
        """The file of its ports' queueing. `dlcp testbed slow` changes it, for this process and for those after it."""
        return self._files.queueing(self.plan.name)

    def start(self) -> None:
        """Start the process, and wait until it accepts connections.

        Raises
        ------
        TestbedError
            It exited, or did not answer in time; the message has the end of its log.
        """
        if not self.queueing.exists():
            write_ports(self.queueing, {port.number: port.queueing for port in self.plan.ports})
        # `ip netns exec` remounts /sys for the namespace, where BMv2 reads the state of its ports.
        argv = ["ip", "netns", "exec", self.plan.namespace, *self.argv]
        with self.log.open("ab") as log:
            # In a session of its own, because Ctrl-C in a script's terminal is not for it.
            process = self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        in_time = came_true(lambda: process.poll() is not None or self._answers(), _START_DEADLINE_S)
        if process.poll() is not None:
            raise TestbedError(f"switch {self.plan.name} exited with status {process.returncode}: {self.said()}")
        if not in_time:
            raise TestbedError(
                f"switch {self.plan.name} does not answer after {_START_DEADLINE_S:.0f} s: {self.said()}"
            )

    def stop(self) -> None:
        """End the process, first with SIGTERM, then by force."""
        if self._process is not None:
            end(self._process, _STOP_DEADLINE_S)

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:].strip() or "it printed nothing"

    def _answers(self) -> bool:
        """Return whether it accepts connections of a controller."""
        try:
            connect(self.plan.namespace, CONTROL_PORT).close()
        except OSError:
            return False
        return True


class Bmv2(SwitchProgram):
    """``simple_switch_grpc``. The interfaces behind its ports limit their rate."""

    @property
    def argv(self) -> list[str]:
        """The command line. Without ``--priority-queues`` a packet of any priority but the lowest is dropped."""
        plan = self.plan
        return [
            *("simple_switch_grpc", "--no-p4", "--device-id", str(plan.device_id), "--log-level", "off"),
            *(word for port in plan.ports for word in ("-i", f"{port.number}@{port.interface}")),
            *("--thrift-port", str(THRIFT_PORT)),
            *("--notifications-addr", f"ipc://{self._files.path(f'.{plan.name}.notifications')}"),
            *("--", "--priority-queues", str(PRIORITY_QUEUES), "--grpc-server-addr", f"{LOOPBACK}:{CONTROL_PORT}"),
        ]

    @property
    def forwarded(self) -> list[ForwardedPort]:
        """The forwarded ports of its servers, including Thrift's."""
        return [*super().forwarded, ForwardedPort(self.plan.thrift_port, self.plan.namespace, THRIFT_PORT)]

    def start(self) -> None:
        """Start it and shrink its sockets' send buffers, so that waiting packets are in its queues."""
        super().start()
        shrink_packet_buffers(self.pid)


class Builtin(SwitchProgram):
    """``dlcp switch``, whose ports limit their own rate."""

    @property
    def counters(self) -> Path:
        """The file of its counters."""
        return self._files.counters(self.plan.name)

    @property
    def argv(self) -> list[str]:
        """The command line."""
        ports = self.plan.ports
        return [
            *python_command("dlcp.cli", "switch"),
            *(word for port in ports for word in ("--port", f"{port.number}=packet:{port.interface}")),
            *("--queueing", str(self.queueing)),
            *("--p4runtime", f"{LOOPBACK}:{CONTROL_PORT}", "--insecure", "--device-id", str(self.plan.device_id)),
            *("--counters", str(self.counters), "--counters-every", "0.2"),
        ]


_PROGRAMS: Final[dict[SwitchKind, type[SwitchProgram]]] = {"bmv2": Bmv2, "builtin": Builtin}


class Switches:
    """The switches of a testbed, as processes in namespaces that exist.

    Parameters
    ----------
    layout
        The testbed.
    files
        Files for the state, where the switches' processes are recorded, and for the logs.
    """

    def __init__(self, layout: Layout, files: StateFile) -> None:
        self._layout = layout
        self._files = files
        self._programs = {plan.name: _PROGRAMS[layout.kind](plan, files) for plan in layout.switches}
        self._restarts = dict.fromkeys(self._programs, 0)
        self._proxy: NamespaceProxy | None = None

    def start(self) -> None:
        """Prepare the interfaces, start the switches, and forward their control ports.

        Raises
        ------
        TestbedError, NamespaceError
            A switch does not start, or an interface cannot be prepared.
        """
        for switch in self._layout.switches:
            for port in switch.ports:
                self._prepare_port(switch, port)
        for name in self._programs:
            self._run(name)
        self._proxy = NamespaceProxy([port for program in self._programs.values() for port in program.forwarded])

    def supervise(self) -> None:
        """Restart each switch that has exited, empty as after a power cycle, unless it was broken by hand."""
        for name, program in self._programs.items():
            if not program.running and not self._files.broken(name).exists():
                self._restarts[name] += 1
                self._run(name)

    def stop(self) -> None:
        """End the switches."""
        for program in self._programs.values():
            program.stop()
        if self._proxy is not None:
            self._proxy.close()

    def _run(self, name: str) -> None:
        """Start the program of a switch, and record its process."""
        program = self._programs[name]
        program.start()
        self._files.update_switch(name, StartedSwitch(ProcessId.of(program.pid), self._restarts[name]))

    def _prepare_port(self, switch: SwitchLayout, port: PortLayout) -> None:
        namespace = NamedNamespace(switch.namespace)
        namespace.ip(f"link set {port.interface} mtu {self._layout.mtu_bytes} up")
        namespace.turn_off_offloads(port.interface)
        if self._layout.kind == "bmv2":
            limit_port(namespace, port.interface, port.queueing.rate_bps)


# ---------------------------------------------------------------------------------------------------------- the network


class Network:
    """A running Mininet network. For Mininet, switches are hosts: they have namespaces, and programs of their own.

    Parameters
    ----------
    layout
        The network to build.
    files
        Files of its switches.
    """

    def __init__(self, layout: Layout, files: StateFile) -> None:
        self._layout = layout
        self._mininet = mininet_network()
        self.switches = Switches(layout, files)

    def start(self) -> None:
        """Build everything and start the switches.

        Raises
        ------
        TestbedError
            A part could not be created.
        """
        plans: list[SwitchLayout | HostLayout] = [*self._layout.switches, *self._layout.hosts]
        nodes = {plan.name: self._add_node(plan) for plan in plans}
        for host in self._layout.hosts:
            port = self._layout.port_of(host)
            self._add_link(nodes[host.name], HOST_INTERFACE, nodes[host.switch], port.interface)
        for trunk in self._layout.trunks:
            (first, one), (second, other) = ((nodes[name], self._layout.port(name, port)) for name, port in trunk)
            self._add_link(first, one.interface, second, other.interface)
        self._mininet.build()
        for host in self._layout.hosts:
            self._introduce(host)
        self.switches.start()

    def stop(self) -> None:
        """End the switches and remove everything."""
        self.switches.stop()
        self._mininet.stop()

    def _add_node(self, plan: SwitchLayout | HostLayout) -> Any:
        # No address here: Mininet would set it with ifconfig, which cannot choose the route.
        node = self._mininet.addHost(plan.name, ip=None)
        namespace = NamedNamespace(plan.namespace)
        namespace.attach(node.pid)
        namespace.prepare(family_of(plan.address) if isinstance(plan, HostLayout) else IPV4)
        return node

    def _add_link(self, first: Any, interface: str, second: Any, other_interface: str) -> None:
        self._mininet.addLink(first, second, intfName1=interface, intfName2=other_interface)

    def _introduce(self, host: HostLayout) -> None:
        """Set a host's address, routes and neighbours, so that no ARP or neighbour discovery crosses the switches."""
        namespace = NamedNamespace(host.namespace)
        # Routes may name an IPv6 address as their source only once it is not tentative: with nodad it never is.
        commands = [
            f"link set {HOST_INTERFACE} down",
            f"link set {HOST_INTERFACE} address {host.mac} mtu {self._layout.mtu_bytes} up",
            f"addr add {_host_prefix(host)} dev {HOST_INTERFACE}{' nodad' * (family_of(host.address) is IPV6)}",
        ]
        for other in self._layout.hosts:
            if other is not host:
                commands += [
                    f"route replace {_host_prefix(other)} dev {HOST_INTERFACE} src {host.address} "
                    f"congctl {CONGESTION_CONTROL}",
                    f"neigh replace {other.address} lladdr {other.mac} dev {HOST_INTERFACE} nud permanent",
                ]
        namespace.ip(*commands)
        namespace.turn_off_offloads(HOST_INTERFACE)


def _host_prefix(host: HostLayout) -> str:
    """Return a host's address as a network of its own."""
    return str(ip_network(host.address))


# ---------------------------------------------------------------------------------------------------------- the process


SUPERVISE_S: Final = 0.2
"""Interval at which it checks that all switches run: short compared with the time that a restart takes."""


def keep(layout: Layout) -> None:
    """Build a testbed and hold it until a signal.

    Raises
    ------
    TestbedError, NamespaceError
        A part could not be created.
    """
    files = StateFile(layout.name)
    files.write(TestbedState(layout, ProcessId.of(os.getpid()), tuple(layout.namespaces)))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    network = Network(layout, files)
    try:
        network.start()
        made = files.read()
        assert made is not None
        files.write(dataclasses.replace(made, ready=True))
        print(KEEPER_READY, flush=True)
        while not stopped.wait(SUPERVISE_S):
            network.switches.supervise()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        network.stop()


def main() -> int:
    """Hold the testbed whose layout is on standard input; return the exit status."""
    try:
        keep(msgspec.json.decode(sys.stdin.buffer.read(), type=Layout))
    except (TestbedError, NamespaceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
