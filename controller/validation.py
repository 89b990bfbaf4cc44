# SPDX-License-Identifier: Apache-2.0
"""What makes a description a fabric that can be: every check names the place of what it refuses."""

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from dlcp.controller.fabric import PORT_MAX, Fabric, FabricError, Job, Link, Port, Switch, as_port

from dlcp.document import Step
from dlcp.suggestion import nearest

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", re.IGNORECASE)
_ADDRESS: Final = re.compile(r"(\[[0-9a-f:]+\]|[^\s:]+):[0-9]{1,5}", re.IGNORECASE)


def validate(fabric: Fabric) -> None:
    """Refuse a fabric that cannot be.

    Raises
    ------
    FabricError
        With what is wrong; its ``steps`` lead to the place.
    """
    _check_switches(fabric)
    _check_hosts(fabric)
    _check_links(fabric)
    _check_reach(fabric)
    _check_jobs(fabric)


def _check_switches(fabric: Fabric) -> None:
    if not fabric.switches:
        raise FabricError("a fabric without switches", "switches")
    _check_names("switches", [switch.name for switch in fabric.switches])
    _refuse_repeated("switches", "grpc", [switch.grpc for switch in fabric.switches])
    _refuse_repeated("switches", "thrift", [switch.thrift for switch in fabric.switches])
    # BMv2 names a socket file after its device id, so two of them on a machine must not share one.
    of_bmv2 = [str(switch.device_id) if switch.kind == "bmv2" else "" for switch in fabric.switches]
    _refuse_repeated("switches", "device_id", of_bmv2)
    for index, switch in enumerate(fabric.switches):
        _check_control(switch, ("switches", index))


def _check_control(switch: Switch, steps: tuple[Step, ...]) -> None:
    for name, address in (("grpc", switch.grpc), ("thrift", switch.thrift)):
        if address and not _ADDRESS.fullmatch(address):
            raise FabricError(f"{address!r} is no address; write HOST:PORT, as in 127.0.0.1:9559", *steps, name)
    if switch.grpc and switch.tls is None and not switch.insecure:
        raise FabricError(
            "a control connection takes certificates (tls) or the word that it may do without (insecure: true)",
            *steps,
            "grpc",
        )
    if switch.tls is not None and switch.insecure:
        raise FabricError("tls and insecure contradict each other; leave one out", *steps, "insecure")
    if switch.thrift and switch.kind != "bmv2":
        raise FabricError(f"only bmv2 answers Thrift; {switch.name} is {switch.kind}", *steps, "thrift")
    if switch.kind == "bmv2" and switch.ports == "loopback":
        raise FabricError("bmv2 has packet ports only; loopback ports are for the built-in switch", *steps, "ports")
    if switch.device_id < 1:
        raise FabricError(f"a device id is 1 or more, not {switch.device_id}", *steps, "device_id")
    for port in switch.interfaces:
        if not 1 <= port <= PORT_MAX:
            raise FabricError(f"port {port} is not one of 1..{PORT_MAX}", *steps, "interfaces", str(port))


def _check_hosts(fabric: Fabric) -> None:
    if not fabric.hosts:
        raise FabricError("a fabric without hosts", "hosts")
    _check_names("hosts", [host.name for host in fabric.hosts])
    for index, host in enumerate(fabric.hosts):
        try:
            ipaddress.IPv4Address(host.address)
        except ValueError:
            raise FabricError(f"{host.address!r} is no IPv4 address", "hosts", index, "address") from None
        if not _MAC.fullmatch(host.mac) or int(host.mac[:2], 16) & 1:
            raise FabricError(f"{host.mac!r} is no Ethernet address of one host", "hosts", index, "mac")
    for what in ("address", "mac"):
        _refuse_repeated("hosts", what, [getattr(host, what).lower() for host in fabric.hosts])
    names = {switch.name for switch in fabric.switches}
    for index, host in enumerate(fabric.hosts):
        if host.name in names:
            raise FabricError(f"{host.name!r} is the name of a switch, too", "hosts", index, "name")


def _check_links(fabric: Fabric) -> None:
    switches = {switch.name: switch for switch in fabric.switches}
    hosts = {host.name for host in fabric.hosts}
    taken: dict[str, int] = {}
    for index, link in enumerate(fabric.links):
        for side, end in (("a", link.a), ("b", link.b)):
            _check_end(end, switches, hosts, ("links", index, side))
            if end in taken:
                raise FabricError(f"{end} has a link already, links[{taken[end]}]", "links", index, side)
            taken[end] = index
        _check_ends(link, switches, ("links", index))
        try:
            link.queueing(fabric.queueing)
        except ValueError as error:
            raise FabricError(str(error), "links", index) from None
    for index, host in enumerate(fabric.hosts):
        if host.name not in taken:
            raise FabricError(f"host {host.name!r} has no link", "hosts", index)


def _check_end(end: str, switches: Collection[str], hosts: Collection[str], steps: tuple[Step, ...]) -> None:
    """Refuse an end of a link that names nothing there is."""
    name, separator, number = end.rpartition(":")
    if end in switches:
        raise FabricError(f"say which port of {end}, as in {end}:1", *steps)
    if not separator:
        if end not in hosts:
            raise FabricError(f"there is no host {end!r}{nearest(end, sorted(hosts))}", *steps)
        return
    if name not in switches:
        raise FabricError(f"there is no switch {name!r}{nearest(name, switches)}", *steps)
    if not number.isdecimal() or not 1 <= int(number) <= PORT_MAX or number != str(int(number)):
        raise FabricError(f"port {number} is not one of 1..{PORT_MAX}", *steps)


def _check_ends(link: Link, switches: Mapping[str, Switch], steps: tuple[Step, ...]) -> None:
    """Refuse a link whose ends do not go together."""
    a, b = as_port(link.a), as_port(link.b)
    if a is None and b is None:
        raise FabricError(f"{link.a} and {link.b} are both hosts; a link has a switch at one end", *steps)
    for side, port, other in (("a", a, b), ("b", b, a)):
        if port is not None and other is not None and switches[port.switch].ports == "loopback":
            raise FabricError(
                f"loopback ports lead to hosts; {port.switch} needs packet ports to reach a switch", *steps, side
            )


def _check_reach(fabric: Fabric) -> None:
    """Refuse a fabric in several pieces."""
    first = fabric.attachments[fabric.hosts[0].name].switch
    reached, waiting = {first}, [first]
    while waiting:
        for neighbour in fabric.neighbours[waiting.pop()].values():
            if neighbour.port is not None and neighbour.port.switch not in reached:
                reached.add(neighbour.port.switch)
                waiting.append(neighbour.port.switch)
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
    if not 0 <= job.id <= 0xFFFF:
        raise FabricError(f"a job is numbered 0..65535, not {job.id}", *steps, "id")
    for name, share in (("share", job.share), ("control_share", job.control_share)):
        if not 0 < share <= 1:
            raise FabricError(f"job {job.id}: a share lies above 0 and up to 1, not {share}", *steps, name)
    for end, share in job.shares.items():
        if end not in ends:
            raise FabricError(f"no port or host {end!r} has a link{nearest(end, ends)}", *steps, "shares", end)
        if not 0 < share <= 1:
            raise FabricError(f"job {job.id}: a share lies above 0 and up to 1, not {share}", *steps, "shares", end)
    if job.burst_s <= 0:
        raise FabricError(f"job {job.id}: burst_s lies above 0, unlike {job.burst_s}", *steps, "burst_s")


def _ports(fabric: Fabric) -> list[Port]:
    return [Port(switch, number) for switch, ports in fabric.neighbours.items() for number in ports]


def _place(fabric: Fabric, port: Port) -> str:
    neighbour = fabric.neighbours[port.switch][port.number]
    return f"port {port} ({neighbour.host.name if neighbour.host is not None else neighbour.port})"


def _check_names(part: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise FabricError(f"{name!r} is no name: letters, digits, '_', '.' and '-'", part, index, "name")
    _refuse_repeated(part, "name", names)


def _refuse_repeated(part: str, what: str, values: Iterable[str]) -> None:
    """Refuse a value that two members of a part share; empty values do not count."""
    seen: dict[str, int] = {}
    for index, value in enumerate(values):
        if value and value in seen:
            raise FabricError(f"{what} {value} belongs to {part}[{seen[value]}] already", part, index, what)
        seen[value] = index
