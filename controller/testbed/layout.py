# SPDX-License-Identifier: Apache-2.0
"""The parts of a testbed, and its state on disk while it is up.

From the state on disk, any later command can find a testbed, and remove it after a crash.
"""

import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from dlcp.controller.fabric import Fabric, Port, SwitchKind, as_port
from dlcp.controller.testbed import TestbedError, came_true
from dlcp.host.netlab import HOST_INTERFACE, NamedNamespace
from dlcp.inputs.error_text import nearest
from dlcp.switch import PortQueueing

LOOPBACK: Final = "127.0.0.1"
RUN_FOLDER: Final = Path("/run/dlcp")
"""Folder of logs and states; a reboot empties it, and removes the namespaces."""
KEEPER_READY: Final = "testbed ready"
"""The line that a testbed's keeper prints once everything is built."""
INTERFACE_NAME_MAX: Final = 15
"""Longest interface name that the kernel allows (IFNAMSIZ without its final zero)."""


@dataclass(frozen=True)
class PortLayout:
    """One port of a switch: its interface in the switch's namespace, and the queueing that the fabric gives it."""

    number: int
    interface: str
    queueing: PortQueueing


@dataclass(frozen=True)
class SwitchLayout:
    """One switch: its namespace, its ports, and the ports of this machine's loopback for its P4Runtime and Thrift."""

    name: str
    device_id: int
    namespace: str
    control_port: int
    thrift_port: int
    ports: tuple[PortLayout, ...]


@dataclass(frozen=True)
class HostLayout:
    """One host: its namespace, its addresses, its switch port, and its own interface."""

    name: str
    namespace: str
    address: str
    mac: str
    switch: str
    port: int
    interface: str = HOST_INTERFACE


class WireEnd(NamedTuple):
    """One end of a link: the node, its interface there and the namespace; ``port`` is 0 at a host."""

    node: str
    port: int
    namespace: str
    interface: str

    def __str__(self) -> str:
        return f"{self.node}:{self.port}" if self.port else self.node


_Node = TypeVar("_Node", SwitchLayout, HostLayout)


@dataclass(frozen=True)
class Layout:
    """A whole testbed.

    Parameters
    ----------
    name
        Prefix of its namespaces and files.
    kind
        The kind of its switches.
    trunks
        Links between switches, by their two ends.
    mtu_bytes
        MTU of every link.
    """

    name: str
    kind: SwitchKind
    switches: tuple[SwitchLayout, ...]
    hosts: tuple[HostLayout, ...]
    trunks: tuple[tuple[Port, Port], ...] = ()
    mtu_bytes: int = 1500

    @property
    def namespaces(self) -> list[str]:
        """Names of all network namespaces."""
        return [*(switch.namespace for switch in self.switches), *(host.namespace for host in self.hosts)]

    def switch(self, name: str) -> SwitchLayout:
        """Return the switch of this name.

        Raises
        ------
        TestbedError
            There is none; the message lists the known names.
        """
        return _named("switch", self.switches, name)

    def port_of(self, host: HostLayout) -> PortLayout:
        """Return the switch port of a host."""
        return self.port(host.switch, host.port)

    def port(self, switch: str, number: int) -> PortLayout:
        """Return a port of a switch."""
        return next(port for port in self.switch(switch).ports if port.number == number)

    def host(self, name: str) -> HostLayout:
        """Return the host of this name.

        Raises
        ------
        TestbedError
            There is none; the message lists the known names.
        """
        return _named("host", self.hosts, name)

    @property
    def links(self) -> list[tuple[WireEnd, WireEnd]]:
        """The two ends of every link. The first end is a switch's; the second is a host's or a switch's."""
        at_hosts = [
            (self._end(Port(host.switch, host.port)), WireEnd(host.name, 0, host.namespace, host.interface))
            for host in self.hosts
        ]
        return [*at_hosts, *((self._end(a), self._end(b)) for a, b in self.trunks)]

    def links_of(self, names: Sequence[str]) -> list[tuple[WireEnd, WireEnd]]:
        """Return the links that have each of these names at one end.

        Parameters
        ----------
        names
            One or two, each a host, a switch, or a port as ``SWITCH:PORT``. One name means all links there.

        Raises
        ------
        TestbedError
            No node or port has such a name, or no link joins the two.
        """
        known = {name for link in self.links for end in link for name in (end.node, str(end))}
        for name in names:
            if name not in known:
                raise TestbedError(f"no host, switch or port is named {name!r}{nearest(name, sorted(known))}")
        found = [
            link for link in self.links if all(any(name in (end.node, str(end)) for end in link) for name in names)
        ]
        if not found:
            raise TestbedError(
                f"no link joins {' and '.join(names)}; `dlcp testbed status` shows where hosts are linked"
            )
        return found

    def _end(self, port: Port) -> WireEnd:
        plan = self.port(port.switch, port.number)
        return WireEnd(port.switch, port.number, self.switch(port.switch).namespace, plan.interface)

    def spread(self, count: int) -> tuple[HostLayout, ...]:
        """Return ``count`` hosts, taken from each switch in turn, so that their traffic crosses the fabric."""
        by_switch: dict[str, list[HostLayout]] = {}
        for host in self.hosts:
            by_switch.setdefault(host.switch, []).append(host)
        turns = zip_longest(*by_switch.values())
        return tuple(host for turn in turns for host in turn if host is not None)[:count]


def lay_out(fabric: Fabric, kind: SwitchKind, name: str) -> Layout:
    """Return the layout of a fabric whose switches are all of one kind, whatever kinds the fabric names.

    Raises
    ------
    TestbedError
        A testbed cannot provide a port's rate or queue depths, or a name is too long.
    """
    free = iter(free_ports(2 * len(fabric.switches)))
    switches = tuple(
        SwitchLayout(
            switch.name,
            index + 1,
            f"{name}-{switch.name}",
            next(free),
            next(free),
            tuple(
                _port(fabric, kind, Port(switch.name, number), switch.interface(number))
                for number in fabric.neighbours[switch.name]
            ),
        )
        for index, switch in enumerate(fabric.switches)
    )
    at = fabric.attachments
    hosts = tuple(
        HostLayout(host.name, f"{name}-{host.name}", host.address, host.mac, at[host.name].switch, at[host.name].number)
        for host in fabric.hosts
    )
    ends = [(as_port(link.a), as_port(link.b)) for link in fabric.links]
    trunks = tuple((min(a, b), max(a, b)) for a, b in ends if a is not None and b is not None)
    return Layout(name, kind, switches, hosts, trunks)


def _named(kind: str, parts: Sequence[_Node], name: str) -> _Node:
    """Return the host or switch of a name; refuse an unknown one."""
    by_name = {part.name: part for part in parts}
    if name not in by_name:
        raise TestbedError(f"no {kind} is named {name!r}{nearest(name, by_name)}")
    return by_name[name]


def free_ports(count: int) -> list[int]:
    """Return ports of this machine's loopback that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def _port(fabric: Fabric, kind: SwitchKind, port: Port, interface: str) -> PortLayout:
    queueing = fabric.queueing_at(port)
    if len(interface) > INTERFACE_NAME_MAX:
        raise TestbedError(
            f"{port}: interface name {interface!r} is longer than {INTERFACE_NAME_MAX} characters; give a shorter one"
        )
    if not queueing.rate_bps:
        raise TestbedError(f"{port} has no rate, so no packet would ever queue there; give its link a rate_bps")
    if len(set(queueing.depths())) > 1:
        raise TestbedError(f"{port}: a testbed's queues must be equally deep; give a single depth_packets")
    if kind == "bmv2" and (queueing.delay_s or queueing.loss):
        raise TestbedError(
            f"{port}: BMv2 has neither delay nor loss; leave both out at the link, or use built-in switches"
        )
    return PortLayout(port.number, interface, queueing)


KEEPER_DEADLINE_S: Final = 15.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class ProcessId:
    """A process, identified by its id and its start time in ticks since boot: ids are reused."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """Return the identity of a running process.

        Raises
        ------
        ProcessLookupError
            No process has this id.
        """
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return _started(self.pid) == self.started

    def end(self, deadline_s: float = KEEPER_DEADLINE_S) -> None:
        """End it if it runs: with SIGTERM, and with SIGKILL after ``deadline_s`` seconds."""
        for number, patience_s in ((signal.SIGTERM, deadline_s), (signal.SIGKILL, 5.0)):
            if self.alive:
                os.kill(self.pid, number)
            came_true(lambda: not self.alive, patience_s)


@dataclass(frozen=True)
class StartedSwitch:
    """A started switch, and how often it has been restarted."""

    process: ProcessId
    restarts: int = 0


@dataclass(frozen=True)
class TestbedState:
    """A testbed, complete or partly built.

    Parameters
    ----------
    layout
        All of its parts. It is on disk before the first part is created.
    keeper
        The process that holds it.
    namespaces
        The names of its network namespaces.
    ready
        Whether it is complete.
    switches
        The switches that have been started, by name.
    is_script
        Whether the keeper is a Mininet script of the user's.
    """

    __test__ = False

    layout: Layout
    keeper: ProcessId
    namespaces: tuple[str, ...]
    ready: bool = False
    switches: dict[str, StartedSwitch] = field(default_factory=dict)
    is_script: bool = False

    @property
    def alive(self) -> bool:
        """Whether its keeper runs."""
        return self.keeper.alive


@dataclass(frozen=True)
class Traces:
    """The part of a testbed's state that is needed to remove it, even one that another version of DLCP created."""

    keeper: ProcessId
    namespaces: tuple[str, ...]
    switches: dict[str, StartedSwitch] = field(default_factory=dict)
    is_script: bool = False


@dataclass(frozen=True)
class StateFile:
    """The state file of the testbed with a name, and its other files."""

    name: str = "dlcp"

    def path(self, suffix: str) -> Path:
        """Return the file of this testbed with the given suffix, such as ``.json``."""
        return RUN_FOLDER / f"{self.name}{suffix}"

    def counters(self, switch: str) -> Path:
        """Return the file of a built-in switch's own counters."""
        return self.path(f".{switch}.counters.json")

    def queueing(self, switch: str) -> Path:
        """Return the file of the queueing of a built-in switch's ports."""
        return self.path(f".{switch}.queueing.json")

    def broken(self, switch: str) -> Path:
        """Return the file that exists while a switch is to stay down."""
        return self.path(f".{switch}.broken")

    def read(self) -> TestbedState | None:
        """Return the state on disk; None if there is no testbed.

        Raises
        ------
        TestbedError
            The file is not one that :meth:`write` wrote.
        """
        return self._decode(TestbedState)

    def write(self, state: TestbedState) -> None:
        """Replace the state on disk atomically."""
        RUN_FOLDER.mkdir(parents=True, exist_ok=True)
        partial = self.path(f".json.{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(state))
        partial.replace(self.path(".json"))

    def update_switch(self, name: str, switch: StartedSwitch) -> None:
        """Record the current process of a switch."""
        state = self.read()
        assert state is not None
        self.write(dataclasses.replace(state, switches={**state.switches, name: switch}))

    def remove(self) -> int:
        """Take down the testbed on disk, complete or partly built; return the number of processes ended.

        Raises
        ------
        TestbedError
            A Mininet script holds the testbed, a process does not end, or a namespace cannot be removed. The state
            stays, so that it can be retried.
        """
        state = self._decode(Traces)
        if state is None:
            return 0
        if state.is_script and state.keeper.alive:
            raise TestbedError(
                f"testbed {self.name!r} belongs to the Mininet script in process {state.keeper.pid}; end the script, "
                "or call net.stop() in it"
            )
        ended = sum(process.alive for process in (state.keeper, *(made.process for made in state.switches.values())))
        state.keeper.end()
        for made in state.switches.values():
            made.process.end()
        for name in state.namespaces:
            namespace = NamedNamespace(name)
            ended += len(namespace.pids())
            namespace.remove()
        for path in RUN_FOLDER.glob(f"{self.name}.*"):
            path.unlink()
        return ended

    def _decode(self, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode(self.path(".json").read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise TestbedError(
                f"{self.path('.json')} is not a testbed's state: {error}; remove it, and its namespaces in `ip netns`"
            ) from None


def _started(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; None if it has ended. A zombie has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
