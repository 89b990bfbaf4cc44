# SPDX-License-Identifier: Apache-2.0
"""Nodes of a network, and the links between them."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from dlcp.inputs.error_text import closest
from dlcp.sim.limits import HOSTS_MAX, LINKS_MAX, NODES_MAX, RATE_MAX_GBPS, RATE_MIN_GBPS

_Name = Annotated[str, Meta(pattern=r"^\S+$")]


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A full-duplex link.

    Parameters
    ----------
    rate_gbps
        Rate in each direction, in 10^9 bits a second.
    delay_us
        Propagation delay, and any other delay of a hop except serialization and queueing.
    """

    rate_gbps: Annotated[float, Meta(ge=RATE_MIN_GBPS, le=RATE_MAX_GBPS)] = 100.0
    delay_us: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0
    loss_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class TopologyError(ValueError):
    """A topology cannot be built, or a node or link does not exist."""


@dataclass(frozen=True, slots=True)
class TopologyLink:
    """One direction of a link, between two nodes."""

    source: int
    target: int
    spec: LinkSpec


@dataclass(slots=True)
class NetworkTopology:
    """Hosts, numbered from 0, then switches; link 2i + 1 is the reverse direction of link 2i.

    Attributes
    ----------
    names
        Names by node: ``host0`` and so on, then the switches.
    divisors
        By node: the divisor of a packet's hash before the hash chooses among equal paths. All switches compute the same
        hash. If one switch chooses by its remainder, the next has to choose by the quotient; otherwise all packets that
        reach it would take the same path.
    hosts
        Number of hosts. Hosts do not forward.
    """

    hosts: int
    names: list[str] = field(default_factory=list)
    links: list[TopologyLink] = field(default_factory=list)
    divisors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Name the hosts."""
        if not 2 <= self.hosts <= HOSTS_MAX:
            raise TopologyError(f"the topology has {self.hosts} hosts; it needs 2 to {HOSTS_MAX}")
        self.names = [f"host{i}" for i in range(self.hosts)]
        self.divisors = [1] * self.hosts

    def add_switch(self, name: str, divisor: int = 1) -> int:
        """Add a switch and return its number; see ``divisors``."""
        if len(self.names) == NODES_MAX:
            raise TopologyError(f"the topology has more than {NODES_MAX:,} hosts and switches; use fewer")
        self.names.append(name)
        self.divisors.append(divisor)
        return len(self.names) - 1

    def connect(self, one: int, other: int, spec: LinkSpec) -> None:
        """Link two nodes, in both directions."""
        if len(self.links) == 2 * LINKS_MAX:
            raise TopologyError(f"the topology has more than {LINKS_MAX:,} links; use fewer hosts or switches")
        self.links.append(TopologyLink(one, other, spec))
        self.links.append(TopologyLink(other, one, spec))

    def between(self, one: str, other: str) -> list[int]:
        """Return the links between two nodes, in both directions.

        Raises
        ------
        TopologyError
            There is no such node, or no link between the two.
        """
        for name in (one, other):
            if name not in self.names:
                like = closest(name, self.names)
                known = like or f"; there are {', '.join(self.names[:3])} … {self.names[-1]}"
                raise TopologyError(f"there is no node {name!r}{known}")
        ends = {self.names.index(one), self.names.index(other)}
        found = [number for number, link in enumerate(self.links) if {link.source, link.target} == ends]
        if not found:
            raise TopologyError(f"there is no link between {one} and {other}")
        return found
