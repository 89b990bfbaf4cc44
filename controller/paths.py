# SPDX-License-Identifier: Apache-2.0
"""Shortest paths between hosts, and the sets of equal-cost ports over which a switch sprays."""

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from dlcp.controller.fabric import PORT_MAX, Fabric, Port

_GROUP_BITS: Final = 0x3FFFFFFF


class SprayGroup(NamedTuple):
    """A set of ports that lead to some host at equal cost, and the number it has in the action profile."""

    id: int
    ports: tuple[int, ...]


def next_hops(fabric: Fabric, switch: str) -> dict[str, tuple[int, ...]]:
    """Return for each host the ports of a switch that are the first step of a shortest path to it, lowest first.

    A path is as long as the switches on it are many. The hosts at one switch share their ports.
    """
    to_edge: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for host in fabric.hosts:
        at = fabric.attachments[host.name]
        if at.switch == switch:
            found[host.name] = (at.number,)
            continue
        if at.switch not in to_edge:
            to_edge[at.switch] = _ports_toward(fabric, switch, distances(fabric, at.switch))
        found[host.name] = to_edge[at.switch]
    return found


def distances(fabric: Fabric, switch: str) -> dict[str, int]:
    """Return how many links lie between a switch and each switch, itself included, on the shortest path."""
    found = {switch: 0}
    waiting = deque([switch])
    while waiting:
        here = waiting.popleft()
        for neighbour in fabric.neighbours[here].values():
            if neighbour.port is not None and neighbour.port.switch not in found:
                found[neighbour.port.switch] = found[here] + 1
                waiting.append(neighbour.port.switch)
    return found


def most_switches(fabric: Fabric) -> int:
    """Return how many switches the longest of the shortest paths between two hosts crosses."""
    edges = {at.switch for at in fabric.attachments.values()}
    return 1 + max(distances(fabric, one)[other] for one in edges for other in edges)


def spray_groups(hops: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], SprayGroup]:
    """Return one group for each set of ports in ``hops``.

    The number of a group follows from its ports. So a set that changes gets a group of its own, which is there before
    the first route leads to it, and an unchanged one is never touched.
    """
    found: dict[tuple[int, ...], SprayGroup] = {}
    taken: set[int] = set()
    for ports in sorted(set(hops.values())):
        number = ports[0] if len(ports) == 1 else PORT_MAX + 1 + (zlib.crc32(bytes(ports)) & _GROUP_BITS)
        while number in taken:
            number += 1
        taken.add(number)
        found[ports] = SprayGroup(number, ports)
    return found


def next_hop_mac(fabric: Fabric, port: Port) -> str:
    """Return the Ethernet address at the other end of a port: the host's, or the one that a switch's port goes by."""
    neighbour = fabric.neighbours[port.switch][port.number]
    if neighbour.host is not None:
        return neighbour.host.mac.lower()
    assert neighbour.port is not None  # a link has two ends
    return port_mac(fabric, neighbour.port)


def port_mac(fabric: Fabric, port: Port) -> str:
    """Return the Ethernet address that a switch's port goes by: locally administered, 02:00:01, switch, port."""
    index = [switch.name for switch in fabric.switches].index(port.switch)
    return f"02:00:01:{index >> 8:02x}:{index & 0xFF:02x}:{port.number:02x}"


def _ports_toward(fabric: Fabric, switch: str, distance: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        number
        for number, neighbour in fabric.neighbours[switch].items()
        if neighbour.port is not None and distance[neighbour.port.switch] == distance[switch] - 1
    )
