# SPDX-License-Identifier: Apache-2.0
"""A network with as many hosts as a job needs, from the name of a fabric, a rate and a transport."""

import math
from dataclasses import dataclass
from typing import Any, Final, get_args

from dlcp.sim.engines.network_tables import LongestPath
from dlcp.sim.limits import PACKETS_MAX, RATE_MAX_GBPS, check_within
from dlcp.sim.network.nodes import LinkSpec, NetworkTopology, Routes, TopologyError
from dlcp.sim.network.topology import (
    Dragonfly,
    FatTree,
    FileTopology,
    LeafSpine,
    RailOptimised,
    Star,
    TopologySpec,
    build_topology,
)
from dlcp.sim.scenario import EcnSpec, SwitchSpec
from dlcp.sim.transports.plugins import AnyTransport
from dlcp.sim.transports.specs import UltraEthernetTransport

FABRICS: Final = tuple(str(kind.__struct_config__.tag) for kind in get_args(TopologySpec) if kind is not FileTopology)
"""Names of topologies whose size can be chosen."""
TRANSPORT_KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyTransport)}
"""Transports, with their authors' settings, by name."""
_HOSTS_PER_LEAF: Final = 8
_SPINES: Final = 4


def suited_discipline(transport: str) -> str:
    """Return the discipline of switches that a transport was made for: its own, or else the simplest."""
    fitting = TRANSPORT_KINDS[transport].disciplines
    return transport if transport in fitting else fitting[0]


def suited_switches(transport: AnyTransport, discipline: Any, network: NetworkTopology) -> SwitchSpec:
    """Return switches with a discipline that suit a transport.

    Those of Ultra Ethernet follow the bandwidth-delay product of the longest path, as in its consortium's simulator:
    they mark from 0.2 of it, and all packets from 0.8; they trim at one, or hold five where they cannot trim.
    """
    if not isinstance(transport, UltraEthernetTransport):
        return SwitchSpec(discipline=discipline)
    product = LongestPath.of(network, Routes.of(network), transport).product_bytes / transport.packet_bytes
    what = "the switches' buffer, five bandwidth-delay products in packets,"
    check_within(what, math.ceil(5 * product), PACKETS_MAX, "lower the rate or the delay of the links")
    return SwitchSpec(
        discipline=discipline,
        packet_bytes=transport.packet_bytes,
        buffer_packets=math.ceil(5 * product),
        trim_packets=max(1, math.ceil(product) - 1),  # besides the one that is being sent
        trim_choice="random",
        ecn=EcnSpec(min_packets=math.ceil(0.2 * product), max_packets=math.ceil(0.8 * product)),
    )


@dataclass(frozen=True, slots=True)
class FittedNetwork:
    """A network that is as large as needed.

    Parameters
    ----------
    fabric
        A name in `FABRICS`: a star; at least two leaves of up to 8 hosts, or rails of servers with 8 GPUs, under 4
        spines, with fabric links so fast that nothing is oversubscribed; the smallest fat tree; or a dragonfly with 8
        hosts in a group. Or a file with its hosts, switches and links.
    rate_gbps, delay_us
        Of the links, unless they come from a file.
    transport
        A name in `TRANSPORT_KINDS`.
    discipline
        Of the switches; by default, the one that suits the transport.
    """

    fabric: str = "star"
    rate_gbps: float = 100.0
    delay_us: float = 1.0
    transport: str = "dctcp"
    discipline: str = ""

    def fields(self, hosts: int) -> dict[str, Any]:
        """Return the fields of a `dlcp.sim.scenario.NetworkSetting` with at least ``hosts`` hosts.

        Raises
        ------
        TopologyError
            The fabric cannot be so large.
        dlcp.inputs.document.DocumentError
            Its file is missing or wrong.
        """
        topology = self._topology(hosts)
        network = build_topology(topology)
        if network.hosts < hosts:
            largest = f"the largest {self.fabric}" if self.fabric in FABRICS else self.fabric
            raise TopologyError(f"{largest} has fewer than {hosts} hosts; choose another fabric")
        transport = TRANSPORT_KINDS[self.transport]()
        discipline = self.discipline or suited_discipline(self.transport)
        return {
            "topology": topology,
            "switches": suited_switches(transport, discipline, network),
            "transports": {self.transport: transport},
        }

    def _topology(self, hosts: int) -> TopologySpec:
        link = LinkSpec(rate_gbps=self.rate_gbps, delay_us=self.delay_us)
        groups = -(-hosts // _HOSTS_PER_LEAF)
        match self.fabric:
            case "star":
                return Star(hosts=max(2, hosts), host_link=link)
            case "leaf_spine":
                per_leaf = max(1, min(_HOSTS_PER_LEAF, -(-hosts // 2)))
                return LeafSpine(
                    leaves=-(-hosts // per_leaf),
                    spines=_SPINES,
                    hosts_per_leaf=per_leaf,
                    host_link=link,
                    fabric_link=self._faster(per_leaf / _SPINES),
                )
            case "fat_tree":
                ports = next(ports for ports in range(2, 66, 2) if ports**3 // 4 >= hosts or ports == 64)
                return FatTree(ports=ports, host_link=link, fabric_link=link)
            case "dragonfly":
                return Dragonfly(groups=max(2, groups), host_link=link, local_link=link, global_link=link)
            case "rail_optimised":
                pod = min(groups, RailOptimised().servers_per_pod)
                return RailOptimised(
                    servers=math.ceil(groups / pod) * pod,
                    servers_per_pod=pod,
                    spines=_SPINES,
                    host_link=link,
                    fabric_link=self._faster(max(1.0, pod / _SPINES)),
                )
            case _:
                return FileTopology(file=self.fabric)

    def _faster(self, factor: float) -> LinkSpec:
        if self.rate_gbps * factor > RATE_MAX_GBPS:
            raise TopologyError(
                f"the fabric's links need {self.rate_gbps * factor:,.0f} Gbit/s, {factor:g} times the hosts'; at most "
                f"{RATE_MAX_GBPS:,.0f} can be simulated: lower the hosts' rate"
            )
        return LinkSpec(rate_gbps=self.rate_gbps * factor, delay_us=self.delay_us)
