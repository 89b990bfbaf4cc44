# SPDX-License-Identifier: Apache-2.0
"""Networks that are described as an InfraGraph infrastructure (https://infragraph.dev), as for ASTRA-sim 3.0.

Such a description has the components of all devices: GPUs, network cards, PCIe switches, ports. Components of a device
that are joined by links without a bandwidth become one node, because nothing limits what they send each other. A device
without GPUs and network cards is a switch, and becomes one node in any case. Nodes with GPUs are hosts; if there are no
GPUs, those with network cards. So a server whose inner links have no bandwidth is one host with several links. If they
have one, each GPU is a host, and the server's switches and network cards are nodes between them.
"""

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from itertools import takewhile
from typing import Any, Final

from dlcp.inputs.document import Document, DocumentError

_INSTALL: Final = "pip install 'dlcp[infragraph]'"
_UNITS: Final = {
    "bandwidth": ("rate_gbps", {"Gbps": 1.0, "GBps": 8.0}, "give it in gigabits_per_second, after encoding"),
    "latency": ("delay_us", {"ms": 1e3, "us": 1.0, "ns": 1e-3}, "give ms, us or ns"),
}
"""For each property of an edge: the link's field, the factor of each unit, and what to do about other units."""
_COMPONENTS_MAX: Final = 1 << 20
"""Most components that are expanded: 16 for each of the most hosts. InfraGraph takes a minute for them."""


def infrastructure_of(content: Any) -> dict[str, Any] | None:
    """Return the InfraGraph infrastructure in a file's content, at its root or below ``infrastructure``; else None."""
    if not isinstance(content, dict):
        return None
    for key in ("infragraph", "infrastructure"):
        if isinstance(content.get(key), dict):
            return infrastructure_of({**content[key], "instances": content[key].get("instances", [])})
    return content if "instances" in content else None


def network_of(document: Document, infrastructure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network of a document's infrastructure, as the content of a `dlcp.sim.network.topology.NetworkFile`.

    Raises
    ------
    DocumentError
        The package infragraph is missing or refuses the file, it has too many components, none of them is a GPU or a
        network card, or a link has a bandwidth or latency in other units.
    """
    graph = _expanded(document, infrastructure)
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


def _expanded(document: Document, content: Mapping[str, Any]) -> Any:
    """Return the networkx graph of all components of all instances."""
    if "connections" in content:
        raise DocumentError(
            f"{document.path}: this is an InfraGraph infrastructure before version 1.0, with connections: describe it "
            "with instances and edges, as from 1.0 on"
        )
    if (count := _components(content)) > _COMPONENTS_MAX:
        raise DocumentError(
            f"{document.path}: instances: their components are {count:,}; at most {_COMPONENTS_MAX:,} can be simulated"
        )
    try:
        from infragraph import Infrastructure
        from infragraph.infragraph_service import InfraGraphService
    except ImportError:
        raise DocumentError(f"{document.path} is an InfraGraph infrastructure, which requires: {_INSTALL}") from None
    infrastructure, service = Infrastructure(), InfraGraphService()
    version = content.get("version")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ports without a link, which are common
            infrastructure.deserialize(json.dumps({key: each for key, each in content.items() if key != "version"}))
            service.set_graph(infrastructure)
    except Exception as problem:  # of any kind, such as a missing key, an unknown instance, an index
        reason = " ".join(str(problem).split())[:200] or repr(problem)
        own = f" (the file has version {version}, the package {metadata.version('infragraph')})" if version else ""
        raise DocumentError(f"{document.path}: not a valid InfraGraph infrastructure: {reason}{own}") from None
    graph = service.get_networkx_graph()
    unknown = next((component for component, kind in graph.nodes(data="type") if kind is None), None)
    if unknown is not None:
        raise document.error(f"an edge names {unknown}, which no instance has", ["edges"])
    return graph


def _components(content: Mapping[str, Any]) -> int:
    """Return the number of components of all instances, as far as their counts can be read."""
    devices: Counter[Any] = Counter()
    for device in _records(content.get("devices")):
        devices[str(device.get("name"))] = sum(_count(each) for each in _records(device.get("components")))
    return sum(_count(each) * max(1, devices[str(each.get("device"))]) for each in _records(content.get("instances")))


def _records(listed: Any) -> list[dict[str, Any]]:
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _count(record: Mapping[str, Any]) -> int:
    count = record.get("count", 1)
    return count if isinstance(count, int) and count > 0 else 0


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
    for name, (field, factors, advice) in _UNITS.items():
        if name in edge:
            value, _, unit = edge[name].partition(" ")
            if unit not in factors:
                raise DocumentError(f"{document.path}: link {edge['link']!r} has a {name} in {unit}: {advice}")
            link[field] = float(value) * factors[unit]
    return link
