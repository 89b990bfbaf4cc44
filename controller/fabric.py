# SPDX-License-Identifier: Apache-2.0
"""What a fabric consists of: switches, hosts, the links between them, and the jobs that run on them.

As a file, see ``controller/examples``. A link's end is ``HOST`` or ``SWITCH:PORT``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from dlcp.controller.policy import Policy

from dlcp.document import Document, PlaceError
from dlcp.switch import PortQueueing
from dlcp.wire import UDP_PORT_BASE

PORT_MAX: Final = 63
"""The program counts and watches ports 0-63; fabrics begin at port 1."""
RATE_BPS: Final = 200_000_000
"""A link's rate unless told otherwise. Chosen by us: plain Python carries four such ports with room to spare."""

SwitchKind = Literal["builtin", "bmv2"]
PortKind = Literal["packet", "loopback"]


class FabricError(PlaceError):
    """A fabric that cannot be; the message says what is wrong with which part of it."""


class Port(NamedTuple):
    """A port of a switch."""

    switch: str
    number: int

    def __str__(self) -> str:
        return f"{self.switch}:{self.number}"


@dataclass(frozen=True)
class Tls:
    """Certificates for a control connection, in PEM files.

    Parameters
    ----------
    ca
        Who has to have signed the switch's certificate.
    certificate, key
        What shows the switch who we are.
    server_name
        The name in the switch's certificate, if it is not the one in its address.
    """

    ca: str
    certificate: str
    key: str
    server_name: str = ""


@dataclass(frozen=True)
class Switch:
    """A switch and how it is controlled.

    Parameters
    ----------
    name
        For people and for links.
    kind
        ``builtin``: ``dlcp switch``; ``bmv2``: ``simple_switch_grpc``.
    ports
        Of the built-in switch: ``packet``, network interfaces; ``loopback``, processes of this machine over
        127.0.0.0/8.
    interfaces
        Network interface of each port; ``port<number>`` unless given.
    grpc
        Where it answers P4Runtime, ``HOST:PORT``; empty: nowhere.
    device_id
        Its P4Runtime device id.
    tls
        Certificates for the control connection.
    insecure
        Whether to do without; has to be said, for anyone in between can then program the switch.
    thrift
        Where BMv2 answers Thrift, ``HOST:PORT``: it alone can set the depth of BMv2's queues.
    """

    name: str
    kind: SwitchKind = "builtin"
    ports: PortKind = "packet"
    interfaces: dict[int, str] = field(default_factory=dict)
    grpc: str = ""
    device_id: int = 1
    tls: Tls | None = None
    insecure: bool = False
    thrift: str = ""

    def interface(self, port: int) -> str:
        """Return the network interface of a port."""
        return self.interfaces.get(port, f"port{port}")


@dataclass(frozen=True)
class Host:
    """A host.

    Parameters
    ----------
    name
        For people and for links.
    address, mac
        IPv4 address and Ethernet address.
    trusted
        Whether the switch believes the tags of what comes from it.
    """

    name: str
    address: str
    mac: str
    trusted: bool = True

    @classmethod
    def numbered(cls, index: int) -> "Host":
        """Return host ``index`` (0 is the first) with the name and addresses it has by custom."""
        high, low = divmod(index + 1, 256)
        return cls(f"host{index}", f"10.0.{high}.{low}", f"02:00:00:00:{high:02x}:{low:02x}")


@dataclass(frozen=True)
class Link:
    """A link between two ports, or a port and a host.

    Parameters
    ----------
    a, b
        Its ends, ``HOST`` or ``SWITCH:PORT``.
    rate_bps, depth_packets, limit_packets, limit_bytes, delay_s, loss
        How the ports at its ends queue and send, where that differs from the fabric's ``queueing``; see
        :class:`dlcp.switch.PortQueueing`.
    """

    a: str
    b: str
    rate_bps: int | None = None
    depth_packets: int | tuple[int, ...] | None = None
    limit_packets: int | None = None
    limit_bytes: int | None = None
    delay_s: float | None = None
    loss: float | None = None

    def queueing(self, default: PortQueueing) -> PortQueueing:
        """Return how the ports at its ends queue and send."""
        names = ("rate_bps", "depth_packets", "limit_packets", "limit_bytes", "delay_s", "loss")
        return replace(default, **{name: getattr(self, name) for name in names if getattr(self, name) is not None})


@dataclass(frozen=True)
class Job:
    """A training job and its share of each egress port.

    Parameters
    ----------
    id
        The job number in the DLCP header, 0..65535.
    share, control_share
        Part of a port's rate that its data and its control packets may use, 0..1, each. What exceeds it is not lost
        but waits below all other traffic.
    shares
        Data shares of single ports that differ from ``share``, by ``SWITCH:PORT`` or by the host the port leads to.
    burst_s
        How long a burst at the port's rate may last before the share is held against the job, in seconds.
    """

    id: int
    share: float = 0.9
    control_share: float = 0.05
    shares: dict[str, float] = field(default_factory=dict)
    burst_s: float = 0.01


class Neighbour(NamedTuple):
    """What is at the other end of a port's link: a host, or another switch's port."""

    link: Link
    host: Host | None
    port: Port | None


@dataclass(frozen=True)
class Fabric:
    """Switches, hosts, links, and what runs over them.

    Parameters
    ----------
    switches, hosts, links
        What there is. Every host has one link.
    jobs
        Jobs that have a share. Where any is named, what others send comes after all other traffic; where none is,
        nobody has a limit.
    policy
        When packets are dropped and marked, and which queue they take.
    queueing
        Rate, depths, delay and loss of the links that say nothing of their own.
    udp_ports
        UDP ports served on loopback ports.
    mtu_bytes
        Largest IPv4 packet.

    Raises
    ------
    FabricError
        Something is named that there is not, or twice; a host cannot be reached; numbers are out of range; shares add
        up to more than a port.
    """

    switches: tuple[Switch, ...]
    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    jobs: tuple[Job, ...] = ()
    policy: Policy = field(default_factory=Policy)
    queueing: PortQueueing = field(default_factory=lambda: PortQueueing(rate_bps=RATE_BPS))
    udp_ports: tuple[int, ...] = (UDP_PORT_BASE,)
    mtu_bytes: int = 9000

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        # The checks need the classes above.
        from dlcp.controller.validation import validate

        validate(self)

    @cached_property
    def neighbours(self) -> Mapping[str, Mapping[int, Neighbour]]:
        """What is at the other end of each port that has a link, by switch and port number, both in order."""
        hosts = {host.name: host for host in self.hosts}
        found: dict[str, dict[int, Neighbour]] = {switch.name: {} for switch in self.switches}
        for link in self.links:
            for here, there in ((link.a, link.b), (link.b, link.a)):
                port = as_port(here)
                if port is not None:
                    found[port.switch][port.number] = Neighbour(link, hosts.get(there), as_port(there))
        return {name: dict(sorted(ports.items())) for name, ports in found.items()}

    @cached_property
    def attachments(self) -> Mapping[str, Port]:
        """The port at which each host is, by the host's name."""
        return {
            neighbour.host.name: Port(switch, number)
            for switch, ports in self.neighbours.items()
            for number, neighbour in ports.items()
            if neighbour.host is not None
        }

    def switch(self, name: str) -> Switch:
        """Return the switch of that name.

        Raises
        ------
        FabricError
            There is none; with the names there are.
        """
        for switch in self.switches:
            if switch.name == name:
                return switch
        raise FabricError(f"there is no switch {name!r}; there are {', '.join(each.name for each in self.switches)}")

    def queueing_at(self, port: Port) -> PortQueueing:
        """Return how a port that has a link queues and sends."""
        return self.neighbours[port.switch][port.number].link.queueing(self.queueing)

    def share_at(self, job: Job, port: Port) -> float:
        """Return the data share of a job at a port."""
        host = self.neighbours[port.switch][port.number].host
        by_host = job.shares.get(host.name, job.share) if host is not None else job.share
        return job.shares.get(str(port), by_host)


def as_port(end: str) -> Port | None:
    """Return the port that a link's end names; None if it names a host."""
    switch, separator, number = end.rpartition(":")
    return Port(switch, int(number)) if separator and number.isdecimal() else None


def load(path: Path) -> Fabric:
    """Read a fabric from a YAML or JSON file that holds the fields of :class:`Fabric`.

    ``hosts`` may be a number instead of a list, and ``links`` left out: that many hosts with the customary names and
    addresses, around the one switch. Without ``switches`` that is a built-in one with loopback ports. Names of
    certificate files are relative to the file.

    Raises
    ------
    DocumentError
        Naming the file, the line and the place in it, and what is wrong.
    """
    document = Document(path)
    content = document.content
    if isinstance(content, dict) and isinstance(content.get("hosts"), int):
        _spell_out(content)
    fabric = document.convert(Fabric)
    switches = tuple(_beside(path.parent, switch) for switch in fabric.switches)
    return replace(fabric, switches=switches)


def _spell_out(content: dict[str, Any]) -> None:
    """Put the hosts of a star, its switch and its links in the place of the number of hosts."""
    content["hosts"] = [vars(Host.numbered(index)) for index in range(content["hosts"])]
    switches = content.setdefault("switches", [{"name": "switch", "ports": "loopback"}])
    if "links" not in content and isinstance(switches, list) and len(switches) == 1:
        name = switches[0].get("name")
        hosts = enumerate(content["hosts"])
        content["links"] = [{"a": f"{name}:{index + 1}", "b": host["name"]} for index, host in hosts]


def _beside(folder: Path, switch: Switch) -> Switch:
    """Return a switch with the names of its certificate files made relative to where we are."""
    if switch.tls is None:
        return switch
    files = {name: str(folder / getattr(switch.tls, name)) for name in ("ca", "certificate", "key")}
    return replace(switch, tls=replace(switch.tls, **files))
