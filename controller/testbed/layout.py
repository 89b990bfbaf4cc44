# SPDX-License-Identifier: Apache-2.0
"""What a testbed is built of, as the fabric describes it, with a place in the network and on disk for each part."""

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from dlcp.controller.fabric import Fabric, Port
from dlcp.controller.testbed.doorway import free_ports
from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.requirements import SwitchKind

HOST_INTERFACE: Final = "eth0"
RUN_FOLDER: Final = Path("/run/dlcp")
"""Where logs and the state are; emptied by every start of the machine, as the namespaces are."""
INTERFACE_NAME_MAX: Final = 15
"""Longest name the kernel takes for an interface (IFNAMSIZ without its final zero)."""


@dataclass(frozen=True)
class PortPlan:
    """One port of a switch: its interface in the switch's namespace, its rate, and how deep its queues are."""

    number: int
    interface: str
    rate_bps: int
    depth_packets: int


@dataclass(frozen=True)
class SwitchPlan:
    """One switch: its namespace, its ports, and where on this machine's loopback it answers P4Runtime and Thrift."""

    name: str
    device_id: int
    namespace: str
    control_port: int
    thrift_port: int
    ports: tuple[PortPlan, ...]


@dataclass(frozen=True)
class HostPlan:
    """One host: its namespace, addresses, and the switch port it is at."""

    name: str
    namespace: str
    address: str
    mac: str
    switch: str
    port: int


@dataclass(frozen=True)
class TrunkPlan:
    """A link between two switches: name and port of either end."""

    ends: tuple[tuple[str, int], tuple[str, int]]


@dataclass(frozen=True)
class Layout:
    """A whole testbed.

    Parameters
    ----------
    name
        Prefix of its namespaces and files.
    kind
        Which switches it has.
    mtu_bytes
        MTU of every link.
    """

    name: str
    kind: SwitchKind
    switches: tuple[SwitchPlan, ...]
    hosts: tuple[HostPlan, ...]
    trunks: tuple[TrunkPlan, ...] = ()
    mtu_bytes: int = 1500

    @property
    def namespaces(self) -> list[str]:
        """Names of all network namespaces."""
        return [*(switch.namespace for switch in self.switches), *(host.namespace for host in self.hosts)]

    def switch(self, name: str) -> SwitchPlan:
        """Return the switch of this name."""
        return next(switch for switch in self.switches if switch.name == name)

    def spread(self, count: int) -> tuple[HostPlan, ...]:
        """Return so many hosts, of each switch in turn, so that what they say to one another crosses the fabric."""
        by_switch: dict[str, list[HostPlan]] = {}
        for host in self.hosts:
            by_switch.setdefault(host.switch, []).append(host)
        turns = zip_longest(*by_switch.values())
        return tuple(host for turn in turns for host in turn if host is not None)[:count]


def lay_out(fabric: Fabric, kind: SwitchKind, name: str) -> Layout:
    """Return how to build a fabric with switches of one kind, whatever kinds the fabric has.

    Raises
    ------
    TestbedError
        The fabric asks for what a testbed cannot do, or names are too long.
    """
    free = iter(free_ports(2 * len(fabric.switches)))
    switches = tuple(
        SwitchPlan(
            switch.name,
            index + 1,
            f"{name}-{switch.name}",
            next(free),
            next(free),
            tuple(
                _port(fabric, Port(switch.name, number), switch.interface(number))
                for number in fabric.neighbours[switch.name]
            ),
        )
        for index, switch in enumerate(fabric.switches)
    )
    at = fabric.attachments
    hosts = tuple(
        HostPlan(host.name, f"{name}-{host.name}", host.address, host.mac, at[host.name].switch, at[host.name].number)
        for host in fabric.hosts
    )
    ends = [
        (Port(here, number), neighbour.port)
        for here, ports in fabric.neighbours.items()
        for number, neighbour in ports.items()
    ]
    trunks = tuple(
        TrunkPlan(((here.switch, here.number), (there.switch, there.number)))
        for here, there in ends
        if there is not None and here < there
    )
    return Layout(name, kind, switches, hosts, trunks)


def _port(fabric: Fabric, port: Port, interface: str) -> PortPlan:
    queueing = fabric.queueing_at(port)
    if len(interface) > INTERFACE_NAME_MAX:
        raise TestbedError(
            f"{port}: {interface!r} is longer than the {INTERFACE_NAME_MAX} letters of an interface's name"
        )
    if not queueing.rate_bps:
        raise TestbedError(f"{port} has no rate, so nothing would ever queue there; give its link a rate_bps")
    if len(set(queueing.depths())) > 1:
        raise TestbedError(f"{port}: a testbed's queues are equally deep; give one depth_packets")
    return PortPlan(port.number, interface, queueing.rate_bps, queueing.depths()[0])
