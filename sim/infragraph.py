# SPDX-License-Identifier: Apache-2.0
"""Networks that are described as an InfraGraph infrastructure (https://infragraph.dev), as for ASTRA-sim 3.0.

Such a description has the components of all devices: GPUs, network cards, PCIe switches, ports. Components of a device
that are joined by links without a bandwidth become one node, because nothing limits what they send each other. A device
without GPUs and network cards is a switch, and becomes one node in any case. Nodes with GPUs are hosts; if there are no
GPUs, those with network cards. So a server whose inner links have no bandwidth is one host with several links. If they
have one, each GPU is a host, and the server's switches, and its network cards, are nodes between them.
"""

import json
from collections import Counter
from itertools import takewhile
from typing import Any, Final

from dlcp.document import Document, DocumentError

_INSTALL: Final = "pip install 'dlcp[infragraph]'"
_GBPS: Final = {"Gbps": 1.0, "GBps": 8.0}
_MICROSECONDS: Final = {"ms": 1e3, "us": 1.0, "ns": 1e-3}


def is_infrastructure(content: object) -> bool:
    """Return whether a file's content looks like an InfraGraph infrastructure."""
    return isinstance(content, dict) and "instances" in content


def network_of(document: Document) -> dict[str, Any]:
    """Return the network of an infrastructure, as the content of a network's file (`dlcp.sim.topology.NetworkFile`).

    Raises
    ------
    DocumentError
        The package infragraph is missing or refuses the file, no component is a GPU or a network card, or a link states
        its bandwidth in transfers.
    """
    graph = _expanded(document)
    kinds = {kind for _, kind in graph.nodes(data="type")}
    ends = next((kind for kind in ("xpu", "nic") if kind in kinds), None)
    if ends is None:
        raise document.error("no component is an xpu or a nic, so the network has no hosts", ["devices"])
    parts = _parts(graph)
    part_of = {component: number for number, part in enumerate(parts) for component in part}
    links = [
        (part_of[one], part_of[other], _link(document, edge))
        for one, other, edge in graph.edges(data=True)
        if part_of[one] != part_of[other]
    ]
    hosts = [number for number, part in enumerate(parts) if any(graph.nodes[each]["type"] == ends for each in part)]
    linked = {number for one, other, _ in links for number in (one, other)}
    names = _names(parts)
    return {
        "hosts": [names[number] for number in hosts],
        "switches": [names[number] for number in sorted(linked - set(hosts))],
        "links": [{"between": [names[one], names[other]], **link} for one, other, link in links],
    }


def _expanded(document: Document) -> Any:
    """Return the networkx graph of all components of all instances."""
    try:
        from infragraph import Infrastructure
        from infragraph.infragraph_service import InfraGraphService
    except ImportError:
        raise DocumentError(f"{document.path} is an InfraGraph infrastructure, which requires: {_INSTALL}") from None
    infrastructure, service = Infrastructure(), InfraGraphService()
    try:
        infrastructure.deserialize(json.dumps(document.content))
        service.set_graph(infrastructure)
    except Exception as problem:  # of any kind: a key that is missing, an instance that is unknown, an index
        raise DocumentError(f"{document.path}: not a valid InfraGraph infrastructure: {problem}") from None
    return service.get_networkx_graph()


def _parts(graph: Any) -> list[list[str]]:
    """Return lists of components that are one node each, in the order of the file."""
    import networkx

    joined = networkx.Graph()
    joined.add_nodes_from(graph)
    joined.add_edges_from(
        (one, other)
        for one, other, edge in graph.edges(data=True)
        if "bandwidth" not in edge and _device(one) == _device(other)
    )
    devices: dict[str, list[str]] = {}
    for component in graph:
        devices.setdefault(_device(component), []).append(component)
    for components in devices.values():
        if not any(graph.nodes[each]["type"] in ("xpu", "nic") for each in components):
            networkx.add_path(joined, components)
    order = {component: number for number, component in enumerate(graph)}
    return sorted(
        (sorted(part, key=order.__getitem__) for part in networkx.connected_components(joined)),
        key=lambda part: order[part[0]],
    )


def _device(component: str) -> str:
    """Return the device that a component belongs to: host.0 of host.0.nic.1, or of host.0.card.1.port.0."""
    return ".".join(component.split(".")[:2])


def _names(parts: list[list[str]]) -> list[str]:
    """Name each node after its components' common prefix; if two share that, after the first component."""
    common = []
    for part in parts:
        levels = zip(*(component.split(".") for component in part), strict=False)
        common.append(".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)))
    uses = Counter(common)
    return [name if uses[name] == 1 else part[0] for name, part in zip(common, parts, strict=True)]


def _link(document: Document, edge: dict[str, str]) -> dict[str, float]:
    """Return the rate and the delay of an edge, {"bandwidth": "100 Gbps", "latency": "5 ns"}, as far as it has them."""
    link = {}
    if "bandwidth" in edge:
        rate, unit = edge["bandwidth"].split()
        if unit not in _GBPS:
            problem = f"link {edge['link']!r} has a bandwidth in {unit}: give it in gigabits_per_second, after encoding"
            raise DocumentError(f"{document.path}: {problem}")
        link["rate_gbps"] = float(rate) * _GBPS[unit]
    if "latency" in edge:
        delay, unit = edge["latency"].split()
        link["delay_us"] = float(delay) * _MICROSECONDS[unit]
    return link
