# SPDX-License-Identifier: Apache-2.0
"""A fabric: switches, hosts, the links between them, the jobs that run on them, and the policy for their packets.

A fabric comes from a file (see ``controller/examples``), or from :func:`star` or :func:`leaf_spine`, and is validated.
A link's end is ``HOST`` or ``SWITCH:PORT``.
"""

import ipaddress
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from dlcp.controller import topology_files
from dlcp.host.ip import IPV6, family_of
from dlcp.inputs.addresses import parse_address
from dlcp.inputs.document import Document, PlaceError, Step
from dlcp.inputs.error_text import nearest
from dlcp.switch import QUEUES, PortQueueing
from dlcp.wire import DROP_CLASSES, UDP_PORT_BASE, Queue

PORT_MAX: Final = 63
"""The P4 program has counters for ports 0-63; fabrics number ports from 1."""
JOB_MAX: Final = 0xFFFF
_QUEUEING: Final = PortQueueing(rate_bps=200_000_000)
"""Default of a link: the pure-Python switch carries four ports of this rate with room to spare."""

SwitchKind = Literal["builtin", "bmv2"]
PortKind = Literal["packet", "loopback"]


_DROP_AT: Final = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_EXCESS_AT: Final = (0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55)
_ECN_AT: Final = 0.27


class PolicyError(PlaceError):
    """A policy that contradicts itself; the message says how."""


@dataclass(frozen=True)
class Thresholds:
    """Queue fill levels above which packets are dropped or marked.

    Parameters
    ----------
    drop_at
        For drop classes 1 to 7, the fraction of the queue's depth above which the class is dropped. Class 7 is the
        least valuable and is dropped first. The defaults are evenly spaced, so that dropping one class relieves the
        queue before the next class is affected, and leave room above class 1 for class 0, which is never dropped.
    ecn_at
        Fraction of the queue's depth above which ECN-capable packets are marked. The default follows DCTCP's 65 packets
        in queues of 240.
    """

    drop_at: tuple[float, ...] = _DROP_AT
    ecn_at: float = _ECN_AT

    def __post_init__(self) -> None:
        """Refuse thresholds that would drop a more valuable class first."""
        if len(self.drop_at) != DROP_CLASSES - 1:
            raise PolicyError(f"drop_at has {len(self.drop_at)} values; it needs 7, for classes 1 to 7", "drop_at")
        if not all(0 <= share <= 1 for share in (*self.drop_at, self.ecn_at)):
            raise PolicyError("drop_at and ecn_at are fractions of a queue's depth and must be in 0..1")
        for drop_class in range(1, DROP_CLASSES - 1):
            if self.drop_at[drop_class] > self.drop_at[drop_class - 1]:
                raise PolicyError(
                    f"drop_at puts class {drop_class + 1} at {self.drop_at[drop_class]} and class {drop_class} at "
                    f"{self.drop_at[drop_class - 1]}: the more valuable class {drop_class} would be dropped first",
                    "drop_at",
                )

    def drop_above(self, drop_class: int, depth_packets: int) -> int:
        """Return the fill level in packets above which a class is dropped in a queue of ``depth_packets``."""
        return int(self.drop_at[drop_class - 1] * depth_packets)

    def mark_above(self, depth_packets: int) -> int:
        """Return the fill level in packets above which packets are marked in a queue of ``depth_packets``."""
        return int(self.ecn_at * depth_packets)


@dataclass(frozen=True)
class Remap:
    """Overrides the queue or drop class in which a host has tagged gradient packets.

    Control packets are not remapped. If several remaps match a packet, the first applies.

    Parameters
    ----------
    job, queue, drop_class
        Match packets of this job, with this queue or class in their header; None matches any. If the fabric names jobs,
        only their packets match.
    to_queue, to_drop_class
        The new queue and class; None keeps the one in the header.
    """

    job: int | None = None
    queue: int | None = None
    drop_class: int | None = None
    to_queue: int | None = None
    to_drop_class: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers out of range, and a remap that changes nothing."""
        if self.to_queue is None and self.to_drop_class is None:
            raise PolicyError("a remap without to_queue and to_drop_class changes nothing; give one of them")
        for name, limit in (("job", JOB_MAX + 1), *((name, 8) for name in ("queue", "drop_class"))):
            for field_name in (name, f"to_{name}"):
                value = getattr(self, field_name, None)
                if value is not None and not 0 <= value < limit:
                    raise PolicyError(f"{field_name} must be in 0..{limit - 1}, not {value}", field_name)


@dataclass(frozen=True)
class Policy(Thresholds):
    """The queue that packets take, and the fill levels above which they are dropped or marked.

    Parameters
    ----------
    drop_at, ecn_at
        As in :class:`Thresholds`, for the queues that ``by_queue`` does not name; ``drop_at`` not for queue 0.
    by_queue
        Thresholds of single queues. Queue 0 holds the packets beyond a job's share. It drops packets even if their
        message's drop budget is spent, so its default thresholds are higher: in the upper half of the queue, with some
        room above class 1 for class 0, which is never dropped. They are not tuned.
    remap
        Overrides of the tags' queue or drop class, in decreasing precedence.
    trim
        Jobs, by number, whose packets are cut to their headers instead of being dropped, except in queue 0. What is
        left goes ahead of all data, so receivers know at once what is lost, and senders one way later.
    """

    by_queue: dict[int, Thresholds] = field(default_factory=dict)
    remap: tuple[Remap, ...] = ()
    trim: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers of queues and jobs out of range, and a job named twice."""
        super().__post_init__()
        for place, job in enumerate(self.trim):
            if not 0 <= job <= JOB_MAX:
                raise PolicyError(f"a job must be in 0..{JOB_MAX}, not {job}", "trim", place)
            if job in self.trim[:place]:
                raise PolicyError(f"job {job} is named twice", "trim", place)
        for queue in self.by_queue:
            if not 0 <= queue < QUEUES:
                raise PolicyError(f"a queue must be in 0..{QUEUES - 1}, not {queue}", "by_queue", str(queue))

    def of_queue(self, queue: int) -> Thresholds:
        """Return the thresholds of a queue."""
        usual = Thresholds(_EXCESS_AT, self.ecn_at) if queue == Queue.EXCESS else self
        return self.by_queue.get(queue, usual)


_POLICY: Final = Policy()


class FabricError(PlaceError):
    """An invalid fabric; the message names the part and what is wrong with it."""


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
        The authority that must have signed the switch's certificate.
    certificate, key
        The controller's own certificate and private key.
    server_name
        The name in the switch's certificate, if it is not the one in its address.
    """

    ca: str
    certificate: str
    key: str
    server_name: str = ""


@dataclass(frozen=True)
class FabricSwitch:
    """A switch and how it is controlled.

    Parameters
    ----------
    name
        Used in links and messages.
    kind
        ``builtin``: ``dlcp switch``; ``bmv2``: ``simple_switch_grpc``.
    ports
        For the built-in switch: ``packet`` for network interfaces, ``loopback`` for processes of this machine over
        127.0.0.0/8.
    interfaces
        Network interface of each port; ``port<number>`` unless given.
    grpc
        P4Runtime address, ``HOST:PORT``; empty if it has none.
    device_id
        Its P4Runtime device id.
    tls
        Certificates for the control connection.
    insecure
        Whether to connect without TLS. Explicit, because anyone on the path can then program the switch.
    thrift
        BMv2's Thrift address, ``HOST:PORT``. The depth of BMv2's queues can only be set over Thrift.
    pipes
        Pipes of a Tofino through which a job's packets enter: each counts drops on its own.
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
    pipes: int = 1

    def interface(self, port: int) -> str:
        """Return the network interface of a port."""
        return self.interfaces.get(port, f"port{port}")


@dataclass(frozen=True)
class Host:
    """A host.

    Parameters
    ----------
    name
        Used in links and messages.
    address, mac
        IPv4 or IPv6 address, and Ethernet address.
    trusted
        Whether the switch accepts the tags of its packets.
    """

    name: str
    address: str
    mac: str
    trusted: bool = True

    @classmethod
    def numbered(cls, index: int, ipv6: bool = False) -> "Host":
        """Return host ``index`` (0 is the first) with its default name and addresses."""
        high, low = divmod(index + 1, 256)
        address = f"fd00::{index + 1:x}" if ipv6 else f"10.0.{high}.{low}"
        return cls(f"host{index}", address, f"02:00:00:00:{high:02x}:{low:02x}")


@dataclass(frozen=True)
class Link:
    """A link between two ports, or a port and a host.

    Parameters
    ----------
    a, b
        Its ends, ``HOST`` or ``SWITCH:PORT``.
    rate_bps, depth_packets, limit_packets, limit_bytes, delay_s, loss
        Override the fabric's ``queueing`` at the ports at its ends; see :class:`dlcp.switch.PortQueueing`.
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
        """Return the queueing of the ports at its ends."""
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
        Fraction of a port's rate that its data packets and its control packets may use, each in (0, 1]. Packets beyond
        the share are not dropped: they get the lowest priority.
    shares
        Data shares of single ports that differ from ``share``, by ``SWITCH:PORT`` or by the host at the port.
    burst_s
        Longest burst at the port's rate that does not count as exceeding the share, in seconds.
    """

    id: int
    share: float = 0.9
    control_share: float = 0.05
    shares: dict[str, float] = field(default_factory=dict)
    burst_s: float = 0.01


class Neighbour(NamedTuple):
    """The other end of a port's link: a host, or another switch's port."""

    link: Link
    host: Host | None
    port: Port | None


@dataclass(frozen=True)
class Fabric:
    """Switches, hosts, links, and the jobs that run over them.

    Parameters
    ----------
    switches, hosts, links
        The topology. Every host has one link.
    jobs
        Jobs with a share of each port. If any are named, all other jobs get the lowest priority; if none are, no job
        is limited.
    policy
        Drop and marking thresholds, and remapping of queues and drop classes.
    queueing
        Default rate, depths, delay and loss of links.
    udp_ports
        UDP ports served on loopback ports.
    mtu_bytes
        Largest IP packet.

    Raises
    ------
    FabricError
        A name is unknown or used twice, a host cannot be reached, a number is out of range, or the shares of a port
        add up to more than 1.
    """

    switches: tuple[FabricSwitch, ...]
    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    jobs: tuple[Job, ...] = ()
    policy: Policy = _POLICY
    queueing: PortQueueing = _QUEUEING
    udp_ports: tuple[int, ...] = (UDP_PORT_BASE,)
    mtu_bytes: int = 9000

    def __post_init__(self) -> None:
        """Validate the fabric."""
        validate(self)

    @cached_property
    def neighbours(self) -> Mapping[str, Mapping[int, Neighbour]]:
        """The neighbour at each linked port, by switch (in the fabric's order) and port number (ascending)."""
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
        """The switch port of each host, by the host's name."""
        return {
            neighbour.host.name: Port(switch, number)
            for switch, ports in self.neighbours.items()
            for number, neighbour in ports.items()
            if neighbour.host is not None
        }

    @cached_property
    def budget_parts(self) -> Mapping[str, int]:
        """Each switch's part of a message's drop budget, as a number of halvings.

        Each switch, or pipe of a switch, counts its drops on its own. So the parts of all switches that a message may
        cross add up to 1 at most: they cannot drop more, however packets are sprayed. Each stage of a path gets an
        equal part, and each switch of a stage an equal part of that, rounded down to a power of one half. Then parts
        are doubled as long as there is room, those of switches with hosts first: at their ports paths meet.
        """
        return _budget_parts(self)

    def switch(self, name: str) -> FabricSwitch:
        """Return the switch of that name.

        Raises
        ------
        FabricError
            There is none; the message lists the known names.
        """
        for switch in self.switches:
            if switch.name == name:
                return switch
        raise FabricError(f"unknown switch {name!r}; the fabric has {', '.join(each.name for each in self.switches)}")

    def queueing_at(self, port: Port) -> PortQueueing:
        """Return the queueing of a linked port."""
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


def distances(fabric: Fabric, switch: str, without: Collection[str | Port] = ()) -> dict[str, int]:
    """Return the number of links on the shortest path from a switch to each switch that it reaches, itself included.

    No path leads through the switches of ``without``, or over links both of whose ports it holds.
    """
    found = {switch: 0}
    waiting = deque([switch])
    while waiting:
        here = waiting.popleft()
        for neighbour in fabric.neighbours[here].values():
            if neighbour.port is None or neighbour.port.switch in found:
                continue
            if neighbour.port.switch in without or neighbour.port in without:
                continue
            found[neighbour.port.switch] = found[here] + 1
            waiting.append(neighbour.port.switch)
    return found


def dispensable(fabric: Fabric, down: Collection[str], bad: Iterable[tuple[Port, Port]] = ()) -> frozenset[str | Port]:
    """Return those of some switches and links without which all hosts still reach each other.

    If the switches are too many, it is none of them; of links, which are given by both ports, the first go first.
    """
    edges = {at.switch for at in fabric.attachments.values()}
    found: set[str | Port] = set()
    parts: list[Collection[str | Port]] = [set(down) - edges, *bad]
    for part in parts:
        if edges <= distances(fabric, min(edges), found.union(part)).keys():
            found.update(part)
    return frozenset(found)


def stages_between(fabric: Fabric) -> list[list[list[str]]]:
    """Return the switches that the packets of a message may cross, for each pair of switches with hosts.

    Packets are sprayed over all shortest paths. The switches come in stages: every packet crosses one of each.
    """
    edges = sorted({at.switch for at in fabric.attachments.values()})
    found = {edge: distances(fabric, edge) for edge in edges}
    paths = []
    for one, other in combinations_with_replacement(edges, 2):
        stages: list[list[str]] = [[] for _ in range(found[one][other] + 1)]
        for switch in fabric.switches:
            if found[one][switch.name] + found[other][switch.name] == found[one][other]:
                stages[found[one][switch.name]].append(switch.name)
        paths.append(stages)
    return paths


def _budget_parts(fabric: Fabric) -> dict[str, int]:
    paths = stages_between(fabric)
    pipes = {switch.name: switch.pipes for switch in fabric.switches}
    denominators = dict(pipes)
    for stages in paths:
        for stage in stages:
            for switch in stage:
                denominators[switch] = max(denominators[switch], len(stages) * len(stage) * pipes[switch])

    def fits(halvings: Mapping[str, int]) -> bool:
        most = max(halvings.values())
        parts = {name: pipes[name] << (most - count) for name, count in halvings.items()}
        return all(sum(parts[switch] for stage in stages for switch in stage) <= 1 << most for stages in paths)

    halvings = {name: (count - 1).bit_length() for name, count in denominators.items()}
    edges = {at.switch for at in fabric.attachments.values()}
    groups = [edges, {switch.name for switch in fabric.switches} - edges]
    has_changed = True
    while has_changed:
        has_changed = False
        for group in groups:
            doubled = {name: count - (name in group and count > 0) for name, count in halvings.items()}
            if doubled != halvings and fits(doubled):
                halvings, has_changed = doubled, True
    return halvings


def load(path: Path) -> Fabric:
    """Read a fabric from a YAML or JSON file that holds the fields of :class:`Fabric`.

    It may also be a topology that `dlcp.controller.topology_files` reads.

    ``hosts`` may be a number instead of a list: that many hosts with default names and addresses. ``links`` may then be
    left out if there is one switch, to which all hosts are linked. Without ``switches``, it is a built-in switch with
    loopback ports. Paths of certificate files are relative to the file.

    Raises
    ------
    DocumentError
        The file is invalid; the message names the file, the line, the field, and what is wrong.
    """
    document = Document(path)
    content = document.content
    if topology_files.is_topology(content):
        return _converted(document)
    if isinstance(content, dict) and isinstance(content.get("hosts"), int):
        _spell_out(content)
    fabric = document.convert(Fabric)
    switches = tuple(_beside(path.parent, switch) for switch in fabric.switches)
    return replace(fabric, switches=switches)


def _converted(document: Document) -> Fabric:
    """Return the fabric of another tool's topology."""
    try:
        content = topology_files.fabric_content(document.content)
    except PlaceError as error:
        raise document.error(str(error), error.steps) from None
    return document.convert(Fabric, content=content, origin_of=topology_files.origin_of(document.content))


def _spell_out(content: dict[str, Any]) -> None:
    """Replace the number of hosts with a star's hosts, switch and links."""
    content["hosts"] = [vars(Host.numbered(index)) for index in range(content["hosts"])]
    switches = content.setdefault("switches", [{"name": "switch", "ports": "loopback"}])
    if "links" not in content and isinstance(switches, list) and len(switches) == 1:
        name = switches[0].get("name")
        hosts = enumerate(content["hosts"])
        content["links"] = [{"a": f"{name}:{index + 1}", "b": host["name"]} for index, host in hosts]


def _beside(folder: Path, switch: FabricSwitch) -> FabricSwitch:
    """Return a switch with the paths of its certificate files resolved against ``folder``."""
    if switch.tls is None:
        return switch
    files = {name: str(folder / getattr(switch.tls, name)) for name in ("ca", "certificate", "key")}
    return replace(switch, tls=replace(switch.tls, **files))


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", re.IGNORECASE)


def validate(fabric: Fabric) -> None:
    """Validate a fabric.

    Raises
    ------
    FabricError
        It is invalid; ``steps`` of the error lead to the wrong value.
    """
    _check_switches(fabric)
    _check_hosts(fabric)
    _check_links(fabric)
    _check_reach(fabric)
    _check_jobs(fabric)


def _check_switches(fabric: Fabric) -> None:
    if not fabric.switches:
        raise FabricError("a fabric needs at least one switch", "switches")
    _check_names("switches", [switch.name for switch in fabric.switches])
    _refuse_repeated("switches", "grpc", [switch.grpc for switch in fabric.switches])
    _refuse_repeated("switches", "thrift", [switch.thrift for switch in fabric.switches])
    # BMv2 names a socket file after its device id, so two of them on a machine must not share one.
    of_bmv2 = [str(switch.device_id) if switch.kind == "bmv2" else "" for switch in fabric.switches]
    _refuse_repeated("switches", "device_id", of_bmv2)
    for index, switch in enumerate(fabric.switches):
        _check_control(switch, ("switches", index))


def _check_control(switch: FabricSwitch, steps: tuple[Step, ...]) -> None:
    for name, address in (("grpc", switch.grpc), ("thrift", switch.thrift)):
        try:
            if address:
                parse_address(address)
        except ValueError as error:
            raise FabricError(f"{error} (an example: 127.0.0.1:9559)", *steps, name) from None
    if switch.grpc and switch.tls is None and not switch.insecure:
        raise FabricError(
            "a control connection needs certificates (tls), or insecure: true to go without",
            *steps,
            "grpc",
        )
    if switch.tls is not None and switch.insecure:
        raise FabricError("tls and insecure contradict each other; leave one out", *steps, "insecure")
    if switch.thrift and switch.kind != "bmv2":
        raise FabricError(f"only bmv2 has a Thrift server; {switch.name} is {switch.kind}", *steps, "thrift")
    if switch.kind == "bmv2" and switch.ports == "loopback":
        raise FabricError("bmv2 has packet ports only; loopback ports are for the built-in switch", *steps, "ports")
    if switch.pipes < 1:
        raise FabricError(f"a switch has 1 pipe or more, not {switch.pipes}", *steps, "pipes")
    if switch.device_id < 1:
        raise FabricError(f"a device id must be 1 or more, not {switch.device_id}", *steps, "device_id")
    for port in switch.interfaces:
        if not 1 <= port <= PORT_MAX:
            raise FabricError(f"port {port} is not in 1..{PORT_MAX}", *steps, "interfaces", str(port))


def _check_hosts(fabric: Fabric) -> None:
    if not fabric.hosts:
        raise FabricError("a fabric needs at least one host", "hosts")
    _check_names("hosts", [host.name for host in fabric.hosts])
    for index, host in enumerate(fabric.hosts):
        try:
            ipaddress.ip_address(host.address)
        except ValueError:
            raise FabricError(f"{host.address!r} is not an IP address", "hosts", index, "address") from None
        if not _MAC.fullmatch(host.mac) or int(host.mac[:2], 16) & 1:
            raise FabricError(f"{host.mac!r} is not a unicast Ethernet address", "hosts", index, "mac")
    for what in ("address", "mac"):
        _refuse_repeated("hosts", what, [getattr(host, what).lower() for host in fabric.hosts])
    names = {switch.name for switch in fabric.switches}
    for index, host in enumerate(fabric.hosts):
        if host.name in names:
            raise FabricError(f"{host.name!r} is also the name of a switch", "hosts", index, "name")


def _check_links(fabric: Fabric) -> None:
    switches = {switch.name: switch for switch in fabric.switches}
    hosts = {host.name for host in fabric.hosts}
    taken: dict[str, int] = {}
    for index, link in enumerate(fabric.links):
        for side, end in (("a", link.a), ("b", link.b)):
            _check_end(end, switches, hosts, ("links", index, side))
            if end in taken:
                raise FabricError(f"{end} already has a link, links[{taken[end]}]", "links", index, side)
            taken[end] = index
        _check_ends(fabric, link, switches, ("links", index))
        try:
            link.queueing(fabric.queueing)
        except ValueError as error:
            raise FabricError(str(error), "links", index) from None
    for index, host in enumerate(fabric.hosts):
        if host.name not in taken:
            raise FabricError(f"host {host.name!r} has no link", "hosts", index)


def _check_end(end: str, switches: Collection[str], hosts: Collection[str], steps: tuple[Step, ...]) -> None:
    """Refuse a link's end that names an unknown host, switch or port."""
    name, separator, number = end.rpartition(":")
    if end in switches:
        raise FabricError(f"{end} is a switch; name one of its ports, as in {end}:1", *steps)
    if not separator:
        if end not in hosts:
            raise FabricError(f"unknown host {end!r}{nearest(end, sorted(hosts))}", *steps)
        return
    if name not in switches:
        raise FabricError(f"unknown switch {name!r}{nearest(name, switches)}", *steps)
    if not number.isdecimal() or not 1 <= int(number) <= PORT_MAX or number != str(int(number)):
        raise FabricError(f"port {number} is not in 1..{PORT_MAX}", *steps)


def _check_ends(fabric: Fabric, link: Link, switches: Mapping[str, FabricSwitch], steps: tuple[Step, ...]) -> None:
    """Refuse a link between two hosts, and one from a loopback port to a switch or an IPv6 host."""
    a, b = as_port(link.a), as_port(link.b)
    if a is None and b is None:
        raise FabricError(f"{link.a} and {link.b} are both hosts; a link needs a switch at one end", *steps)
    for side, port, other in (("a", a, b), ("b", b, a)):
        if port is None or switches[port.switch].ports != "loopback":
            continue
        if other is not None:
            raise FabricError(
                f"loopback ports lead only to hosts; {port.switch} needs packet ports to reach a switch", *steps, side
            )
        host = next(item for item in fabric.hosts if item.name in (link.a, link.b))
        if family_of(host.address) is IPV6:
            raise FabricError(
                f"loopback ports carry IPv4; {port.switch} needs packet ports to reach {host.name!r}", *steps, side
            )


def _check_reach(fabric: Fabric) -> None:
    """Refuse a fabric that is not connected."""
    first = fabric.attachments[fabric.hosts[0].name].switch
    reached = distances(fabric, first)
    for index, host in enumerate(fabric.hosts):
        if fabric.attachments[host.name].switch not in reached:
            raise FabricError(f"host {host.name!r} cannot be reached from {fabric.hosts[0].name!r}", "hosts", index)
    for index, switch in enumerate(fabric.switches):
        if switch.name not in reached:
            raise FabricError(f"no link leads from the hosts to switch {switch.name!r}", "switches", index)


def _check_jobs(fabric: Fabric) -> None:
    _refuse_repeated("jobs", "id", [str(job.id) for job in fabric.jobs])
    ends = [str(port) for port in _ports(fabric)] + [host.name for host in fabric.hosts]
    for index, job in enumerate(fabric.jobs):
        _check_job(job, ends, ("jobs", index))
    for port in _ports(fabric) if fabric.jobs else ():
        total = sum(fabric.share_at(job, port) + job.control_share for job in fabric.jobs)
        if total > 1 + 1e-9:
            raise FabricError(f"the jobs' shares of {_place(fabric, port)} add up to {total:.3g}, more than 1", "jobs")
        if not fabric.queueing_at(port).rate_bps:
            raise FabricError(f"{_place(fabric, port)} has no rate, so no job can have a share of it", "jobs")


def _check_job(job: Job, ends: Sequence[str], steps: tuple[Step, ...]) -> None:
    if not 0 <= job.id <= JOB_MAX:
        raise FabricError(f"a job id must be in 0..{JOB_MAX}, not {job.id}", *steps, "id")
    for name, share in (("share", job.share), ("control_share", job.control_share)):
        if not 0 < share <= 1:
            raise FabricError(f"job {job.id}: a share must be in (0, 1], not {share}", *steps, name)
    for end, share in job.shares.items():
        if end not in ends:
            raise FabricError(f"no linked port or host is named {end!r}{nearest(end, ends)}", *steps, "shares", end)
        if not 0 < share <= 1:
            raise FabricError(f"job {job.id}: a share must be in (0, 1], not {share}", *steps, "shares", end)
    if job.burst_s <= 0:
        raise FabricError(f"job {job.id}: burst_s must be above 0, not {job.burst_s}", *steps, "burst_s")


def _ports(fabric: Fabric) -> list[Port]:
    return [Port(switch, number) for switch, ports in fabric.neighbours.items() for number in ports]


def _place(fabric: Fabric, port: Port) -> str:
    neighbour = fabric.neighbours[port.switch][port.number]
    return f"port {port} ({neighbour.host.name if neighbour.host is not None else neighbour.port})"


def _check_names(part: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise FabricError(
                f"{name!r} is not a valid name; use letters, digits, '_', '.' and '-'", part, index, "name"
            )
    _refuse_repeated(part, "name", names)


def _refuse_repeated(part: str, what: str, values: Iterable[str]) -> None:
    """Refuse a value that two members of a part share; empty values are ignored."""
    seen: dict[str, int] = {}
    for index, value in enumerate(values):
        if value and value in seen:
            raise FabricError(f"{what} {value} is already used by {part}[{seen[value]}]", part, index, what)
        seen[value] = index


def star(
    hosts: int,
    *,
    ports: PortKind = "loopback",
    queueing: PortQueueing = _QUEUEING,
    jobs: Sequence[Job] = (),
    policy: Policy = _POLICY,
    ipv6: bool = False,
) -> Fabric:
    """Return ``hosts`` hosts with default names and addresses around one built-in switch; host k is at port k+1.

    Raises
    ------
    FabricError
        As :class:`Fabric` does.
    """
    switch = FabricSwitch("switch", ports=ports)
    described = tuple(Host.numbered(index, ipv6) for index in range(hosts))
    links = tuple(Link(f"{switch.name}:{index + 1}", host.name) for index, host in enumerate(described))
    return Fabric((switch,), described, links, tuple(jobs), policy, queueing)


def leaf_spine(
    leaves: int,
    spines: int,
    hosts_per_leaf: int,
    *,
    queueing: PortQueueing = _QUEUEING,
    jobs: Sequence[Job] = (),
    policy: Policy = _POLICY,
    ipv6: bool = False,
) -> Fabric:
    """Return built-in switches ``leaf1..`` and ``spine1..`` in two tiers, each leaf linked to each spine.

    Hosts are at the first ports of a leaf, spines at the next ones; leaf k is at port k of every spine.

    Raises
    ------
    FabricError
        As :class:`Fabric` does.
    """
    if min(leaves, spines, hosts_per_leaf) < 1:
        raise FabricError(f"{leaves} leaves, {spines} spines, {hosts_per_leaf} hosts per leaf: each must be 1 or more")
    hosts = tuple(Host.numbered(index, ipv6) for index in range(leaves * hosts_per_leaf))
    links = [Link(f"leaf{1 + k // hosts_per_leaf}:{1 + k % hosts_per_leaf}", host.name) for k, host in enumerate(hosts)]
    links += [
        Link(f"leaf{leaf}:{hosts_per_leaf + spine}", f"spine{spine}:{leaf}")
        for leaf in range(1, leaves + 1)
        for spine in range(1, spines + 1)
    ]
    names = [f"leaf{leaf + 1}" for leaf in range(leaves)] + [f"spine{spine + 1}" for spine in range(spines)]
    switches = tuple(FabricSwitch(name, device_id=index + 1) for index, name in enumerate(names))
    return Fabric(switches, hosts, tuple(links), tuple(jobs), policy, queueing)
