# SPDX-License-Identifier: Apache-2.0
"""Read topologies of p4-utils (``p4app.json``) and of p4lang's tutorials (``topology.json``) as fabrics.

Hosts keep the names and addresses that they have there, and switches their ports and interfaces. Programs, entries and
controllers that the files name are for another switch program, and have no effect: the switches run DLCP's.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from dlcp.inputs.document import PlaceError, Step, converted
from dlcp.inputs.foreign_formats import is_tutorial

_OF_PROGRAM: Final = {
    *("p4_src", "program", "json_path", "cli_input", "runtime_json", "client_module", "sw_bin", "sw_path"),
    *("thrift_port", "grpc_port", "device_id", "priority_queues"),
    *("log_enabled", "log_dir", "log_file", "pcap_dump", "pcap_dir"),
}
"""Options of a switch that concern its own program and process."""
_OF_DEFAULT: Final = {"auto_arp_tables", "auto_gw_arp"}
_SECONDS: Final = {"s": 1.0, "sec": 1.0, "secs": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6}
_INSTEAD: Final = {
    "cpu_port": "the switches have no port to a controller's CPU; set it to false, or remove it",
    "weight": "packets take the paths with the fewest links; remove it",
    "jitter": "delays are constant; remove it",
    "auto": "hosts have fixed addresses instead of DHCP; give an ip",
    "routers": "there are only hosts and switches; put a switch in each one's place",
    "switch_node": "all switches run DLCP's program; remove it",
}
"""What to do instead of what is not supported."""
_INTERFACE_NAME_MAX: Final = 15
_PORT: Final = re.compile(r"(.+)-p(\d+)")
"""A switch's port in a tutorial's link."""


@dataclass(frozen=True)
class _Topology:
    """The part that both formats have; options are checked one by one, to say what to do instead."""

    links: list[list[Any]]
    hosts: dict[str, dict[str, Any]]
    switches: dict[str, dict[str, Any]]
    assignment_strategy: Literal["l2", "mixed", "l3", "manual"] = "mixed"
    default: dict[str, Any] = field(default_factory=dict)
    auto_arp_tables: bool = True
    auto_gw_arp: bool = True


@dataclass(frozen=True)
class _Host:
    ip: str = ""
    mac: str = ""
    commands: tuple[str, ...] = ()
    defaultRoute: Any = None  # noqa: N815 - as p4-utils writes it
    gw: Any = None


def is_topology(content: Any) -> bool:
    """Return whether a file's content is one of the formats that :func:`fabric_content` reads."""
    return isinstance(content, dict) and (is_p4_utils(content) or is_tutorial(content))


def fabric_content(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content that a fabric file for the same topology would have; see :func:`dlcp.controller.fabric.load`.

    Raises
    ------
    PlaceError
        The topology has something that is not supported, or lacks something; its ``steps`` lead there.
    """
    prefix = _prefix(content)
    try:
        return _Converter(content["topology"] if prefix else content, "mixed" if prefix else "manual").fabric()
    except PlaceError as error:
        raise PlaceError(str(error), *prefix, *error.steps) from None


def origin_of(content: Mapping[str, Any]) -> Callable[[tuple[Step, ...]], tuple[Step, ...]]:
    """Return a function from the steps to a part of the fabric's content to those of its place in the file."""
    prefix = _prefix(content)

    def origin(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        if len(steps) < 2 or steps[0] not in ("hosts", "switches") or not isinstance(steps[1], int):
            return (*prefix, *steps[:2])
        part = content.get("topology", content)[steps[0]]
        return (*prefix, steps[0], list(part)[steps[1]])

    return origin


def _prefix(content: Mapping[str, Any]) -> tuple[Step, ...]:
    return ("topology",) if is_p4_utils(content) else ()


def is_p4_utils(content: Mapping[str, Any]) -> bool:
    """Return whether a document is a p4app.json of p4-utils, with what a fabric needs."""
    topology = content.get("topology")
    return isinstance(topology, dict) and {"links", "hosts", "switches"} <= topology.keys()


class _Converter:
    """Converts hosts, switches and links, which both formats write alike.

    Parameters
    ----------
    content
        The mapping that has ``hosts``, ``switches`` and ``links``.
    strategy
        How hosts without addresses get theirs, if the content does not say.

    Raises
    ------
    PlaceError
        As :func:`fabric_content`.
    """

    def __init__(self, content: Mapping[str, Any], strategy: str) -> None:
        _refuse_others(content, {each.name for each in fields(_Topology)}, "a topology", ())
        topology = converted({"assignment_strategy": strategy, **content}, _Topology)
        self._strategy = topology.assignment_strategy
        self._usual = {name: value for name, value in topology.default.items() if name not in _OF_DEFAULT}
        self._links, self._hosts, self._switches = topology.links, topology.hosts, topology.switches
        self._ports: dict[str, dict[int, str]] = {name: {} for name in self._switches}
        """The interface at each port of each switch."""
        self._at: dict[str, tuple[str, Any]] = {}
        """The switch of each host, and its Ethernet address if the link gives it."""

    def fabric(self) -> dict[str, Any]:
        for name, options in self._switches.items():
            used = {key: value for key, value in options.items() if value}
            _refuse_others(used, _OF_PROGRAM, name, ("switches", name))
        links = [self._link(index, link) for index, link in enumerate(self._links)]
        hosts = [self._host(index, name) for index, name in enumerate(self._hosts)]
        switches = [
            {"name": name, "ports": "packet", "device_id": index + 1, "interfaces": self._ports[name]}
            for index, name in enumerate(self._switches)
        ]
        return {"switches": switches, "hosts": hosts, "links": links}

    def _link(self, index: int, link: list[Any]) -> dict[str, Any]:
        steps = ("links", index)
        if not 2 <= len(link) <= 4:
            raise PlaceError("a link is a list: two ends, and options", *steps)
        options = dict(self._usual)
        if len(link) > 2 and isinstance(link[2], dict):
            options |= link[2]
        elif len(link) > 2:
            options |= {"delay": link[2], "bw": link[3] if len(link) > 3 else None}
        options = {name: value for name, value in options.items() if value is not None}
        found: dict[str, Any] = {}
        ends = str(link[0]), str(link[1])
        for number, side, end in ((1, "a", ends[0]), (2, "b", ends[1])):
            port, interface = options.pop(f"port{number}", None), options.pop(f"intfName{number}", None)
            address = options.pop(f"addr{number}", None)
            found[side] = end if end in self._hosts else self._end(end, port, interface, steps)
            if end in self._hosts:
                self._at[end] = ends[2 - number], address
        if options.get("weight") == 1:
            del options["weight"]
        try:
            return found | link_fields(options)
        except PlaceError as error:
            raise PlaceError(str(error), *steps) from None

    def _end(self, end: str, port: int | None, interface: str | None, steps: tuple[Step, ...]) -> str:
        """Return a switch's end of a link as ``SWITCH:PORT``; without a number it is the next port, as in Mininet."""
        written = _PORT.fullmatch(end) if end not in self._switches else None
        name, number = (written[1], int(written[2])) if written else (end, port)
        if name not in self._switches:
            raise PlaceError(f"{end!r} is neither a host nor a switch", *steps)
        ports = self._ports[name]
        if number is not None and not isinstance(number, int):
            raise PlaceError(f"{number!r} is not the number of a port", *steps)
        if number is None:
            number = next(free for free in range(len(ports) + 1, 2 * len(ports) + 2) if free not in ports)
        interface = str(interface or f"{name}-eth{number}")
        ports[number] = interface if len(interface) <= _INTERFACE_NAME_MAX else f"port{number}"
        return f"{name}:{number}"

    def _host(self, index: int, name: str) -> dict[str, Any]:
        steps = ("hosts", name)
        _refuse_others(self._hosts[name], {each.name for each in fields(_Host)}, name, steps)
        try:
            host = converted(self._hosts[name], _Host)
        except PlaceError as error:
            raise PlaceError(str(error), *steps, *error.steps) from None
        for command in host.commands:
            if not re.match(r"\s*(route|arp|ip)\s", command):
                instead = f"remove it, and run it with `dlcp testbed shell {name} {command}`"
                raise PlaceError(f"commands of hosts are not run: {instead}", *steps)
        if name not in self._at:
            raise PlaceError(f"host {name} has no link", *steps)
        other, address = self._at[name]
        switch = other if other in self._switches else _PORT.sub(r"\1", other)
        if switch not in self._switches:
            raise PlaceError(f"host {name} is linked to {other}, which is not a switch", *steps)
        ip = host.ip.partition("/")[0] or self._address(name, index, switch, steps)
        try:
            # What p4-utils derives from an IPv4 address.
            derived = "00:00:" + ipaddress.ip_address(ip).packed[-4:].hex(":")
        except ValueError as error:
            raise PlaceError(str(error), *steps) from None
        return {"name": name, "address": ip, "mac": host.mac or address or derived}

    def _address(self, name: str, index: int, switch: str, steps: tuple[Step, ...]) -> str:
        """Return the address that p4-utils assigns to a host, by its number and its switch's."""
        if self._strategy == "manual":
            raise PlaceError(f"host {name} has no ip, which it needs without an assignment strategy", *steps)
        host, at = _number("h", name, index), _number("s", switch, list(self._switches).index(switch))
        return {
            "l2": f"10.0.{host >> 8}.{host & 255}",
            "mixed": f"10.{at >> 8}.{at & 255}.{host}",
            "l3": f"10.{at}.{host}.2",
        }[self._strategy]


def _number(letter: str, name: str, index: int) -> int:
    """Return the number in a name such as h3; for other names, that of its place, from 1."""
    written = re.fullmatch(rf"{letter}(\d+)", name)
    return int(written[1]) if written else index + 1


def _delay_s(value: Any) -> float:
    number, unit = re.fullmatch(r"([\d.]+)\s*([a-z]*)", str(value)).groups()  # type: ignore[union-attr]
    return float(number) * _SECONDS[unit or "ms"]


LINK_OPTIONS: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "bw": ("rate_bps", lambda value: round(float(value) * 1e6)),
    "delay": ("delay_s", _delay_s),
    "loss": ("loss", lambda value: float(value) / 100),
    "max_queue_size": ("depth_packets", int),
    "queue_length": ("depth_packets", int),
}
"""The field of a fabric's link for each option, and its conversion."""


def link_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of Mininet's TCLink (in Mbit/s, percent, packets, and times as 5ms) as a fabric link's fields.

    Raises
    ------
    PlaceError
        An option is not supported, or its value is wrong.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in LINK_OPTIONS:
            raise PlaceError(_unsupported(name, "a link"))
        own, convert = LINK_OPTIONS[name]
        try:
            found[own] = convert(value)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise PlaceError(f"{name} is {value!r}; write a number, or a delay as 5ms") from None
    return found


def _refuse_others(options: Mapping[str, Any], known: set[str], owner: str, steps: tuple[Step, ...]) -> None:
    for name in options:
        if name not in known:
            raise PlaceError(_unsupported(name, owner), *steps, name)


def _unsupported(name: str, owner: str) -> str:
    return f"{name} of {owner} is not supported: {_INSTEAD.get(name, 'remove it')}"
