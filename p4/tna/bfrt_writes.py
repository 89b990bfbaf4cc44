# SPDX-License-Identifier: Apache-2.0
"""What has to be written to a Tofino for a fabric: ports, queues, depth reports and the program's own entries.

Nothing here talks to a device; ``set_up.py`` does. Table and field names are those of BF Runtime: the driver's tables
(``tf1.tm.*``, ``$PORT``, ``$pre.*``, ``$mirror.cfg``), and the program's as in ``p4/build/tna/bf-rt.json``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dlcp.controller.entries import entries as entries_of
from dlcp.controller.fabric import Fabric, Port
from dlcp.switch import QUEUES, Entries, MeterConfig, PortQueueing, Profile, TableEntry, parse_match, parse_number

CELL_BYTES: Final = 80
"""The traffic manager of a Tofino stores packets in cells of this size, and counts the depth of a queue in them."""
FRAME_OVERHEAD_BYTES: Final = 18
"""Ethernet header and frame check sequence, around a packet of the MTU."""
PIPE_SHIFT: Final = 7
"""A device port is the number of its pipe and seven bits."""
RECIRCULATION_PORT: Final = 68
"""Of each pipe; ``RECIRCULATION_PORT`` in constants.p4."""

REPORT_SESSION: Final = 1
"""Mirror session, multicast group and node of the depth reports; ``REPORT_SESSION`` in constants.p4."""
REPORT_BYTES: Final = 64
"""A report is cut to the shortest frame there is."""

SPEEDS_BPS: Final = {
    "10G": 10 * 10**9,
    "25G": 25 * 10**9,
    "40G": 40 * 10**9,
    "50G": 50 * 10**9,
    "100G": 100 * 10**9,
}
FECS: Final = {"NONE": "BF_FEC_TYP_NONE", "FC": "BF_FEC_TYP_FC", "RS": "BF_FEC_TYP_RS"}

MATCH_PRIORITY_MAX: Final = 0xFFFFFF
"""BF Runtime serves the lowest number first, P4Runtime the highest; so ours are counted down from here."""
SHAPER_BURST_PACKETS: Final = 2
"""Burst of a port's shaper in packets of the largest size. Ours: the least that keeps a port busy."""

Data = int | bool | str | list[int] | list[bool]

_MATCHES: Final = {"ipv4_dst": ("lpm", 32)}
_TERNARY: Final = {"classify": {"job": 16, "type": 4, "queue": 3, "drop_class": 3}}
_DEPTHS: Final = ("drop_threshold", "ecn_threshold")


class SetUpError(ValueError):
    """A fabric, or a list of ports, that does not fit this switch; the message says what and what to do."""


class Key(NamedTuple):
    """One field of a key: exact, with a mask, or with a prefix length."""

    name: str
    value: int | str
    mask: int | None = None
    prefix_len: int | None = None


@dataclass(frozen=True)
class Write:
    """One entry of a table.

    Parameters
    ----------
    table
        Its name, or the end of it where only one table has that.
    key, data, action
        As the table wants them.
    pipe
        The pipe whose table it is; None: all pipes.
    there_already
        Whether the table has a fixed set of entries, that can only be modified.
    """

    table: str
    key: tuple[Key, ...]
    data: Mapping[str, Data] = field(default_factory=dict)
    action: str | None = None
    pipe: int | None = None
    there_already: bool = False


class DevicePort(NamedTuple):
    """A port of the fabric and where it is on the device."""

    number: int
    device_port: int
    speed: str
    fec: str = "NONE"

    @property
    def pipe(self) -> int:
        """The pipe that serves it."""
        return self.device_port >> PIPE_SHIFT


class QueuePlace(NamedTuple):
    """Where the traffic manager keeps the queues of a port: its port group, and the group's queue for each of ours."""

    group: int
    queues: tuple[int, ...]


def cells(depth_packets: int, mtu_bytes: int) -> int:
    """Return how many cells as many packets of the largest size take up."""
    return depth_packets * math.ceil((mtu_bytes + FRAME_OVERHEAD_BYTES) / CELL_BYTES)


def check_ports(fabric: Fabric, switch: str, ports: Sequence[DevicePort]) -> None:
    """Find out whether each port of a switch that has a link has its place on the device, and no two the same.

    Raises
    ------
    SetUpError
        Naming the port, and what to do.
    """
    wanted, given = set(fabric.neighbours[switch]), [port.number for port in ports]
    for number_ in sorted(wanted - set(given)):
        raise SetUpError(f"{switch}:{number_} has a link but no device port: add --port {number_}=DEVICE_PORT,SPEED")
    for number_ in given:
        if number_ not in wanted or given.count(number_) > 1:
            raise SetUpError(f"--port {number_}=... is given twice, or {switch}:{number_} has no link in the fabric")
    devices = [port.device_port for port in ports]
    for port in ports:
        if devices.count(port.device_port) > 1:
            raise SetUpError(f"device port {port.device_port} is given to two ports")
        rate = fabric.queueing_at(Port(switch, port.number)).rate_bps
        if rate > SPEEDS_BPS[port.speed]:
            raise SetUpError(f"{switch}:{port.number} has a rate of {rate} bit/s, more than {port.speed}")


def port_writes(ports: Sequence[DevicePort]) -> Iterator[Write]:
    """Yield what brings the ports up, and what translates between their numbers and the fabric's."""
    for port in ports:
        yield Write(
            "$PORT",
            (Key("$DEV_PORT", port.device_port),),
            {"$SPEED": f"BF_SPEED_{port.speed}", "$FEC": FECS[port.fec], "$PORT_ENABLE": True},
        )
        yield Write("$PORT_METADATA", (Key("ig.ingress_port", port.device_port),), {"port": port.number})
        yield Write("device_port", (Key("eg_port", port.number),), {"device_port": port.device_port}, "to_device_port")


def report_writes(ports: Sequence[DevicePort]) -> Iterator[Write]:
    """Yield what carries a report of a queue's depth to the ingress of every pipe that has ports."""
    pipes = sorted({port.pipe for port in ports})
    node: dict[str, Data] = {
        "$MULTICAST_RID": REPORT_SESSION,
        "$MULTICAST_LAG_ID": [],
        "$DEV_PORT": [pipe << PIPE_SHIFT | RECIRCULATION_PORT for pipe in pipes],
    }
    yield Write("$pre.node", (Key("$MULTICAST_NODE_ID", REPORT_SESSION),), node)
    group: dict[str, Data] = {
        "$MULTICAST_NODE_ID": [REPORT_SESSION],
        "$MULTICAST_NODE_L1_XID_VALID": [False],
        "$MULTICAST_NODE_L1_XID": [0],
    }
    yield Write("$pre.mgid", (Key("$MGID", REPORT_SESSION),), group)
    session: dict[str, Data] = {
        "$direction": "EGRESS",
        "$session_enable": True,
        "$mcast_grp_a": REPORT_SESSION,
        "$mcast_grp_a_valid": True,
        "$max_pkt_len": REPORT_BYTES,
    }
    yield Write("$mirror.cfg", (Key("$sid", REPORT_SESSION),), session, "$normal")


def queue_writes(
    fabric: Fabric, switch: str, ports: Sequence[DevicePort], places: Mapping[int, QueuePlace], total_cells: int
) -> list[Write]:
    """Return priorities, depths and colour limits of the queues, and the rates of the ports.

    Parameters
    ----------
    fabric, switch, ports
        The ports, and what the fabric says of their queues.
    places
        By device port.
    total_cells
        The buffer of the device. Queues have their depth for themselves, so that a limit is what the fabric says and a
        colour's limit a known part of it.

    Raises
    ------
    SetUpError
        The depths add up to more than the buffer.
    """
    thresholds = _lowest_thresholds(entries_of(fabric, switch))
    writes: list[Write] = []
    taken = 0
    for port in ports:
        queueing = fabric.queueing_at(Port(switch, port.number))
        for queue, depth_packets in enumerate(queueing.depths()):
            depth_cells = cells(depth_packets, fabric.mtu_bytes)
            taken += depth_cells
            place = places[port.device_port]
            key = (Key("pg_id", place.group), Key("pg_queue", place.queues[queue]))
            red = _color_limit(thresholds.get(queue, depth_packets), depth_packets)
            writes += _queue(queue, depth_cells, red, key, port.pipe)
        writes += _rate(port, queueing, fabric.mtu_bytes)
    if taken > total_cells:
        raise SetUpError(
            f"the queues of {switch} hold {taken} cells of {CELL_BYTES} bytes, and the device has {total_cells}: "
            "lower depth_packets or mtu_bytes in the fabric"
        )
    return writes


def entry_writes(entries: Entries, mtu_bytes: int) -> Iterator[Write]:
    """Yield the program's entries in an order in which nothing refers to what is not there yet."""
    for profile in entries.profiles:
        yield from _profile(profile)
    for entry in entries.entries:
        yield _entry(entry, mtu_bytes)


def _lowest_thresholds(entries: Entries) -> dict[int, int]:
    """Return for each queue the depth in packets above which its least valuable class is dropped."""
    found: dict[int, int] = {}
    for entry in entries.entries:
        if entry.table == "drop_threshold":
            queue, depth = parse_number(entry.match["queue"]), parse_number(entry.params["depth"])
            found[queue] = min(depth, found.get(queue, depth))
    return found


def _color_limit(threshold_packets: int, depth_packets: int) -> str:
    """Return the colour limit that lies at or below a threshold; the traffic manager knows eighths of a queue."""
    eighths = max(1, min(8, 8 * threshold_packets // max(1, depth_packets)))
    return f"{12.5 * eighths:g}%"


def _queue(queue: int, depth_cells: int, red: str, key: tuple[Key, ...], pipe: int) -> list[Write]:
    parts: list[tuple[str, dict[str, Data], str | None]] = [
        (
            "tf1.tm.queue.sched_cfg",
            {"scheduling_enable": True, "max_priority": str(queue), "min_priority": str(queue)},
            None,
        ),
        (
            "tf1.tm.queue.buffer",
            {"guaranteed_cells": depth_cells, "hysteresis_cells": 0, "tail_drop_enable": True},
            "buffer_only",
        ),
        ("tf1.tm.queue.color", {"drop_enable": True, "drop_limit_red": red, "drop_limit_yellow": "100%"}, None),
    ]
    return [Write(table, key, data, action, pipe, there_already=True) for table, data, action in parts]


def _rate(port: DevicePort, queueing: PortQueueing, mtu_bytes: int) -> list[Write]:
    """Return the shaper of a port, which is off where the port may send as fast as it can."""
    key = (Key("dev_port", port.device_port),)
    shaped = 0 < queueing.rate_bps < SPEEDS_BPS[port.speed]
    switch = Write("tf1.tm.port.sched_cfg", key, {"max_rate_enable": shaped}, there_already=True)
    if not shaped:
        return [switch]
    rate: dict[str, Data] = {
        "unit": "BPS",
        "provisioning": "MIN_ERROR",
        "max_rate": queueing.rate_bps // 1000,
        "max_burst_size": SHAPER_BURST_PACKETS * (mtu_bytes + FRAME_OVERHEAD_BYTES),
    }
    return [Write("tf1.tm.port.sched_shaping", key, rate, there_already=True), switch]


def _profile(profile: Profile) -> Iterator[Write]:
    """Yield members, then groups. On a Tofino the members are a table of their own, beside the selector's."""
    for member in profile.members:
        params: dict[str, Data] = {name: parse_number(value) for name, value in member.params.items()}
        yield Write("route_members", (Key("$ACTION_MEMBER_ID", member.id),), params, member.action)
    for group in profile.groups:
        data: dict[str, Data] = {
            "$MAX_GROUP_SIZE": len(group.members),
            "$ACTION_MEMBER_ID": list(group.members),
            "$ACTION_MEMBER_STATUS": [True] * len(group.members),
        }
        yield Write(profile.profile, (Key("$SELECTOR_GROUP_ID", group.id),), data)


def _entry(entry: TableEntry, mtu_bytes: int) -> Write:
    params: dict[str, Data] = {name: parse_number(value) for name, value in entry.params.items()}
    if entry.table in _DEPTHS:
        params["depth"] = cells(parse_number(entry.params["depth"]), mtu_bytes)
    if entry.group is not None:
        params["$SELECTOR_GROUP_ID"] = entry.group
    if entry.member is not None:
        params["$ACTION_MEMBER_ID"] = entry.member
    if entry.meter is not None:
        params.update(_meter(entry.meter))
    return Write(entry.table, tuple(_keys(entry)), params, entry.action)


def _keys(entry: TableEntry) -> Iterator[Key]:
    for name, value in entry.match.items():
        if entry.table in _TERNARY:
            found = parse_match(value, "ternary", _TERNARY[entry.table][name])
            assert not isinstance(found, int)
            yield Key(name, found[0], mask=found[1])
        elif name in _MATCHES:
            found = parse_match(value, *_MATCHES[name])
            assert not isinstance(found, int)
            yield Key(name, found[0], prefix_len=found[1])
        else:
            yield Key(name, parse_number(value))
    if entry.table in _TERNARY:
        for name in _TERNARY[entry.table]:
            if name not in entry.match:
                yield Key(name, 0, mask=0)
        yield Key("$MATCH_PRIORITY", MATCH_PRIORITY_MAX - entry.priority)


def _meter(rates: MeterConfig) -> dict[str, Data]:
    """Return rates in kbit/s and bursts in kbit, rounded up: a share is not made smaller."""
    return {
        "$METER_SPEC_CIR_KBPS": math.ceil(rates.cir * 8 / 1000),
        "$METER_SPEC_CBS_KBITS": math.ceil(rates.cburst * 8 / 1000),
        "$METER_SPEC_PIR_KBPS": math.ceil(rates.pir * 8 / 1000),
        "$METER_SPEC_PBS_KBITS": math.ceil(rates.pburst * 8 / 1000),
    }


assert QUEUES <= 8  # sched_cfg knows priorities 0 to 7
