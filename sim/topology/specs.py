# SPDX-License-Identifier: Apache-2.0
"""Topologies and links as somebody describes them."""

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A full-duplex link.

    Parameters
    ----------
    rate_gbps
        10^9 bits a second in each direction.
    delay_us
        Propagation, and whatever a hop costs besides sending and queueing.
    """

    rate_gbps: Annotated[float, Meta(gt=0, le=10_000)] = 100.0
    delay_us: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0
    loss_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class _Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    host_link: LinkSpec = msgspec.field(default_factory=LinkSpec)


class Star(_Topology, frozen=True, tag="star"):
    """Hosts around one switch."""

    hosts: Annotated[int, Meta(ge=2)] = 16


class LeafSpine(_Topology, frozen=True, tag="leaf_spine"):
    """Racks of hosts under leaves, each leaf linked to each spine.

    With equal links ``hosts_per_leaf / spines`` is the oversubscription.
    """

    leaves: Count = 9
    spines: Count = 4
    hosts_per_leaf: Count = 16
    fabric_link: LinkSpec = msgspec.field(default_factory=LinkSpec)


class FatTree(_Topology, frozen=True, tag="fat_tree"):
    """A three-level fat tree of switches with ``ports`` ports: ports^3 / 4 hosts (Al-Fares, SIGCOMM 2008).

    ``oversubscription`` times as many hosts hang at each edge switch as it has uplinks.
    """

    ports: Annotated[int, Meta(ge=2, le=64)] = 4
    oversubscription: Count = 1
    fabric_link: LinkSpec = msgspec.field(default_factory=LinkSpec)

    def __post_init__(self) -> None:
        """Refuse odd switches."""
        if self.ports % 2:
            raise ValueError(f"a fat tree needs an even number of ports, got {self.ports}")


class Dragonfly(_Topology, frozen=True, tag="dragonfly"):
    """Groups of fully meshed routers, and links between all pairs of groups (Kim, ISCA 2008), minimal routing."""

    groups: Annotated[int, Meta(ge=2)] = 9
    routers_per_group: Count = 4
    hosts_per_router: Count = 2
    local_link: LinkSpec = msgspec.field(default_factory=LinkSpec)
    global_link: LinkSpec = msgspec.field(default_factory=LinkSpec)


class RailOptimised(_Topology, frozen=True, tag="rail_optimised"):
    """Servers of GPUs; GPU i of every server in a pod hangs at the pod's leaf i, and all leaves at all spines.

    Hosts are GPUs, numbered server by server. GPUs of one server reach each other over ``server_link``.
    """

    servers: Count = 8
    gpus_per_server: Count = 8
    servers_per_pod: Count = 8
    spines: Count = 4
    server_link: LinkSpec = msgspec.field(default_factory=lambda: LinkSpec(rate_gbps=3600.0, delay_us=0.5))
    fabric_link: LinkSpec = msgspec.field(default_factory=LinkSpec)

    def __post_init__(self) -> None:
        """Refuse pods that are not full."""
        if self.servers % self.servers_per_pod:
            raise ValueError(f"{self.servers} servers do not fill pods of {self.servers_per_pod}")


TopologySpec = Star | LeafSpine | FatTree | Dragonfly | RailOptimised
