# SPDX-License-Identifier: Apache-2.0
r"""Sets a Tofino up for a fabric over BF Runtime: ports, queues, depth reports and the program's entries.

Run it where both dlcp and the client of an SDE (the Python module ``bfrt_grpc``) can be imported, once for each
switch::

    python3 p4/tna/set_up.py leaf-spine.yaml leaf1 --grpc 127.0.0.1:50052 \
        --port 1=136,100G,RS --port 2=144,25G --port 3=152,100G,RS --port 4=160,100G,RS

Each ``--port`` has the port's number in the fabric, its device port, its speed, and its forward error correction
(``NONE``, ``FC`` or ``RS``; default NONE). The device must already run ``p4/tna/dlcp.p4``. Rates, depths, thresholds,
shares, trust and routes are written as to other switches; depths become cells. Previous entries of the program's
tables are removed. ``--dry-run`` reads from the device and only prints what it would write.

Table and field names are those of BF Runtime: the driver's tables (``tf1.tm.*``, ``$PORT``, ``$pre.*``,
``$mirror.cfg``), and the program's as in ``p4/build/tna/bf-rt.json``.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

if __package__ in (None, ""):  # run as a script: dlcp and controller are two folders above
    sys.path[:0] = [str(Path(__file__).parents[2])]

from dlcp.controller.entries import entries as entries_of
from dlcp.controller.fabric import Fabric, Port, load
from dlcp.switch import QUEUES, Action, Entries, MemberRef, MeterConfig, PortQueueing, Profile, TableEntry

CELL_BYTES: Final = 80
"""The traffic manager of a Tofino stores packets in cells of this size, and counts the depth of a queue in them."""
FRAME_OVERHEAD_BYTES: Final = 18
"""Ethernet header and frame check sequence."""
PIPE_SHIFT: Final = 7
"""The low bits of a device port are the port within its pipe, the others the pipe."""
RECIRCULATION_PORT: Final = 68
"""Recirculation port of each pipe; ``RECIRCULATION_PORT`` in constants.p4."""

REPORT_SESSION: Final = 1
"""Mirror session, multicast group and node of the depth reports; ``REPORT_SESSION`` in constants.p4."""
REPORT_BYTES: Final = 64
"""Length to which a report is cut: the shortest Ethernet frame."""

SPEEDS_BPS: Final = {
    "10G": 10 * 10**9,
    "25G": 25 * 10**9,
    "40G": 40 * 10**9,
    "50G": 50 * 10**9,
    "100G": 100 * 10**9,
}
FECS: Final = {"NONE": "BF_FEC_TYP_NONE", "FC": "BF_FEC_TYP_FC", "RS": "BF_FEC_TYP_RS"}

MATCH_PRIORITY_MAX: Final = 0xFFFFFF
"""In BF Runtime the lowest priority number wins, in P4Runtime the highest, so ours are subtracted from this."""
SHAPER_BURST_PACKETS: Final = 2
"""Burst of a port's shaper in packets of the largest size: the least that keeps a port busy."""

Data = int | bool | str | list[int] | list[bool]

_TERNARY: Final = {"classify": ("job", "type", "queue", "drop_class"), "budget_part": ("job",)}
"""Fields of the tables with ternary matches. In the other tables, only an exact or a longest prefix matches."""
_DEPTHS: Final = ("drop_threshold", "ecn_threshold")

BUDGET_PARTS: Final = (
    "all_of_budget",
    "half_of_budget",
    "quarter_of_budget",
    "eighth_of_budget",
    "sixteenth_of_budget",
    "thirtysecond_of_budget",
    "sixtyfourth_of_budget",
)
"""Actions of `budget_part`, by halvings: a Tofino shifts by constants only."""


class SetUpError(ValueError):
    """The fabric, the list of ports and the device do not fit each other; the message says why and what to do."""


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
        Name of the table, or a unique suffix of it.
    key, data, action
        The entry, in the table's terms.
    pipe
        The pipe whose table to write; None: all pipes.
    there_already
        Whether the table has a fixed set of entries, which can only be modified.
    """

    table: str
    key: tuple[Key, ...]
    data: Mapping[str, Data] = field(default_factory=dict)
    action: str | None = None
    pipe: int | None = None
    there_already: bool = False


class DevicePort(NamedTuple):
    """A port of the fabric, its device port, speed and forward error correction."""

    number: int
    device_port: int
    speed: str
    fec: str = "NONE"

    @property
    def pipe(self) -> int:
        """The pipe that serves it."""
        return self.device_port >> PIPE_SHIFT


class QueuePlace(NamedTuple):
    """The traffic manager's queues of a port: its port group, and the numbers of the eight queues in the group."""

    group: int
    queues: tuple[int, ...]


def cells(depth_packets: int, mtu_bytes: int) -> int:
    """Return the number of cells that ``depth_packets`` packets of the largest size occupy."""
    return depth_packets * math.ceil((mtu_bytes + FRAME_OVERHEAD_BYTES) / CELL_BYTES)


def check_ports(fabric: Fabric, switch: str, ports: Sequence[DevicePort]) -> None:
    """Check that each linked port of a switch has a device port of its own, and is fast enough.

    Raises
    ------
    SetUpError
        Names the port, and says what to do.
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
    """Yield the writes that bring the ports up and map between device ports and the fabric's port numbers."""
    for port in ports:
        yield Write(
            "$PORT",
            (Key("$DEV_PORT", port.device_port),),
            {"$SPEED": f"BF_SPEED_{port.speed}", "$FEC": FECS[port.fec], "$PORT_ENABLE": True},
        )
        yield Write("$PORT_METADATA", (Key("ig.ingress_port", port.device_port),), {"port": port.number})
        yield Write("device_port", (Key("eg_port", port.number),), {"device_port": port.device_port}, "to_device_port")


def report_writes(ports: Sequence[DevicePort]) -> Iterator[Write]:
    """Yield the mirror session and multicast group that carry depth reports to the ingress of each pipe with ports."""
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
    """Return the writes for the queues' priorities, depths and colour limits, and the ports' rates.

    Parameters
    ----------
    fabric, switch, ports
        The switch, its ports on the device, and the fabric that defines their queues.
    places
        The queues on the device, by device port.
    total_cells
        Size of the device's buffer. Each queue's depth is reserved for it, so that its limit is the fabric's, and a
        colour's limit a known fraction of it.

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
    """Yield the program's entries, each after the entries that it refers to.

    Raises
    ------
    SetUpError
        A Tofino cannot do what an entry asks for.
    """
    for profile in entries.profiles:
        yield from _profile(profile)
    for entry in entries.entries:
        yield _entry(entry, mtu_bytes)


def _lowest_thresholds(entries: Entries) -> dict[int, int]:
    """Return each queue's lowest drop threshold, in packets."""
    found: dict[int, int] = {}
    for entry in entries.entries:
        if entry.table == "drop_threshold":
            queue = entry.match["queue"]
            assert isinstance(queue, int)
            assert isinstance(entry.target, Action)
            depth = entry.target.params["depth"]
            found[queue] = min(depth, found.get(queue, depth))
    return found


def _color_limit(threshold_packets: int, depth_packets: int) -> str:
    """Return the largest colour limit not above a threshold; the traffic manager has steps of an eighth of a queue."""
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
    """Return the writes for a port's shaper, which is off if the port has no rate below its speed."""
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
    """Yield members, then groups. On a Tofino, members have a table of their own, separate from the selector's."""
    for number, action in profile.members:
        yield Write("route_members", (Key("$ACTION_MEMBER_ID", number),), dict(action.params), action.name)
    for number, members in profile.groups:
        data: dict[str, Data] = {
            "$MAX_GROUP_SIZE": len(members),
            "$ACTION_MEMBER_ID": list(members),
            "$ACTION_MEMBER_STATUS": [True] * len(members),
        }
        yield Write(profile.profile, (Key("$SELECTOR_GROUP_ID", number),), data)


def tofino_action(action: Action) -> Action:
    """Return the action that stands for one of the fabric's entries here.

    Raises
    ------
    SetUpError
        There is none.
    """
    if action.name == "part_of_budget":
        halvings = action.params["halvings"]
        if halvings >= len(BUDGET_PARTS):
            raise SetUpError(
                f"this switch would get 1/{1 << halvings} of each message's drop budget, and the program has parts "
                f"down to 1/{1 << len(BUDGET_PARTS) - 1}: use fewer equal paths, or fewer pipes"
            )
        return Action(BUDGET_PARTS[halvings])
    if action.name == "trim":
        raise SetUpError("a Tofino cannot trim packets: leave the entries of table trimming out")
    return action


def _entry(entry: TableEntry, mtu_bytes: int) -> Write:
    action: str | None = None
    params: dict[str, Data]
    if isinstance(entry.target, Action):
        here = tofino_action(entry.target)
        action, params = here.name, dict(here.params)
        if entry.table in _DEPTHS:
            params["depth"] = cells(here.params["depth"], mtu_bytes)
    else:
        params = {"$ACTION_MEMBER_ID" if isinstance(entry.target, MemberRef) else "$SELECTOR_GROUP_ID": entry.target.id}
    if entry.meter is not None:
        params.update(_meter(entry.meter))
    return Write(entry.table, tuple(_keys(entry)), params, action)


def _keys(entry: TableEntry) -> Iterator[Key]:
    ternary = _TERNARY.get(entry.table)
    for name, value in entry.match.items():
        if isinstance(value, int):
            yield Key(name, value)
        elif ternary:
            yield Key(name, value[0], mask=value[1])
        else:
            yield Key(name, value[0], prefix_len=value[1])
    if ternary:
        for name in ternary:
            if name not in entry.match:
                yield Key(name, 0, mask=0)
        yield Key("$MATCH_PRIORITY", MATCH_PRIORITY_MAX - entry.priority)


def _meter(rates: MeterConfig) -> dict[str, Data]:
    """Return rates in kbit/s and bursts in kbit, rounded up, so that no share becomes smaller."""
    return {
        "$METER_SPEC_CIR_KBPS": math.ceil(rates.cir * 8 / 1000),
        "$METER_SPEC_CBS_KBITS": math.ceil(rates.cburst * 8 / 1000),
        "$METER_SPEC_PIR_KBPS": math.ceil(rates.pir * 8 / 1000),
        "$METER_SPEC_PBS_KBITS": math.ceil(rates.pburst * 8 / 1000),
    }


PROGRAM: Final = "dlcp"
ALL_PIPES: Final = 0xFFFF
EMPTIED: Final = (
    "ipv4_route",
    "ipv6_route",
    "route_selector",
    "route_members",
    "ethernet_route",
    "port_trust",
    "classify",
    "job_share",
    "budget_part",
    "drop_threshold",
    "ecn_threshold",
    "device_port",
)
"""The program's tables; a table comes before those that it refers to."""

ADVICE: Final = """\
the Python module bfrt_grpc is missing; it comes with the SDE (https://github.com/p4lang/open-p4studio), in
install/lib/python3.*/site-packages/tofino; add that folder to PYTHONPATH"""


class Device:
    """A Tofino that runs the program, controlled over BF Runtime.

    Parameters
    ----------
    client
        The module ``bfrt_grpc.client``.
    info
        The result of its ``bfrt_info_get``: the tables of program and driver.
    device_id
        The device's number in its driver.
    """

    def __init__(self, client: Any, info: Any, device_id: int = 0) -> None:
        self._client, self._info, self._device_id = client, info, device_id

    @classmethod
    def connect(cls, address: str, device_id: int = 0, client_id: int = 0) -> "Device":
        """Connect to the driver's gRPC server at ``HOST:PORT``.

        Raises
        ------
        SetUpError
            ``bfrt_grpc`` is not installed.
        """
        try:
            client = importlib.import_module("bfrt_grpc.client")
        except ModuleNotFoundError:
            raise SetUpError(ADVICE) from None
        interface = client.ClientInterface(address, client_id=client_id, device_id=device_id)
        interface.bind_pipeline_config(PROGRAM)
        return cls(client, interface.bfrt_info_get(PROGRAM), device_id)

    def buffer_cells(self) -> int:
        """Return the number of cells in the device's buffer.

        Raises
        ------
        SetUpError
            Its cells do not have the size for which the thresholds are computed.
        """
        table = self._info.table_get("tf1.tm.cfg")
        data = next(table.default_entry_get(self._target()))[0].to_dict()
        if data["cell_size_bytes"] != CELL_BYTES:
            raise SetUpError(
                f"the device has cells of {data['cell_size_bytes']} bytes; this script supports {CELL_BYTES}"
            )
        return int(data["total_cells"])

    def queue_place(self, device_port: int) -> QueuePlace:
        """Return the place of a port's eight queues.

        Raises
        ------
        SetUpError
            The port has fewer queues.
        """
        table = self._info.table_get("tf1.tm.port.cfg")
        key = table.make_key([self._client.KeyTuple("dev_port", device_port)])
        data = next(table.entry_get(self._target(), [key], {"from_hw": False}))[0].to_dict()
        if data["port_queues_count"] < QUEUES:
            raise SetUpError(
                f"device port {device_port} has {data['port_queues_count']} queues: give it {QUEUES} "
                "through tf1.tm.port.group"
            )
        return QueuePlace(data["pg_id"], tuple(data["egress_qid_queues"][:QUEUES]))

    def clear(self, tables: Iterable[str] = EMPTIED) -> None:
        """Remove all entries of tables."""
        for name in tables:
            self._info.table_get(name).entry_del(self._target())

    def write(self, write: Write) -> None:
        """Add an entry, or modify it if it exists."""
        table = self._info.table_get(write.table)
        key = [self._client.KeyTuple(part.name, part.value, part.mask, part.prefix_len) for part in write.key]
        fields = [self._field(name, value) for name, value in write.data.items()]
        data = table.make_data(fields) if write.action is None else table.make_data(fields, write.action)
        target, keys = self._target(write.pipe), [table.make_key(key)]
        if not write.there_already:
            try:
                table.entry_add(target, keys, [data])
                return
            except self._client.BfruntimeReadWriteRpcException:
                pass  # it exists from an earlier run; not every driver table can add or modify in one call
        table.entry_mod(target, keys, [data])

    def _target(self, pipe: int | None = None) -> Any:
        return self._client.Target(device_id=self._device_id, pipe_id=ALL_PIPES if pipe is None else pipe)

    def _field(self, name: str, value: Data) -> Any:
        """Return a field as the client's DataTuple; the keyword depends on the value's type."""
        if isinstance(value, bool):
            return self._client.DataTuple(name, bool_val=value)
        if isinstance(value, str):
            return self._client.DataTuple(name, str_val=value)
        if isinstance(value, list):
            if value and isinstance(value[0], bool):
                return self._client.DataTuple(name, bool_arr_val=value)
            return self._client.DataTuple(name, int_arr_val=value)
        return self._client.DataTuple(name, value)


def writes(fabric: Fabric, switch: str, ports: Sequence[DevicePort], device: Device) -> list[Write]:
    """Return all writes for a switch, in order.

    Raises
    ------
    SetUpError
        The ports do not fit the fabric, or the fabric does not fit the device.
    """
    check_ports(fabric, switch, ports)
    places = {port.device_port: device.queue_place(port.device_port) for port in ports}
    return [
        *port_writes(ports),
        *queue_writes(fabric, switch, ports, places, device.buffer_cells()),
        *report_writes(ports),
        *entry_writes(entries_of(fabric, switch), fabric.mtu_bytes),
    ]


def device_port(text: str) -> DevicePort:
    """Parse ``NUMBER=DEVICE_PORT,SPEED[,FEC]``."""
    number, _, rest = text.partition("=")
    device, _, options = rest.partition(",")
    speed, _, fec = options.partition(",")
    if not (number.isdecimal() and device.isdecimal()) or speed not in SPEEDS_BPS or (fec and fec not in FECS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NUMBER=DEVICE_PORT,SPEED[,FEC] with a speed of {', '.join(SPEEDS_BPS)} "
            f"and {', '.join(FECS)}"
        )
    return DevicePort(int(number), int(device), speed, fec or "NONE")


def describe(write: Write) -> str:
    """Return a write as readable text."""
    key = ", ".join(
        f"{key.name}={key.value}"
        + (f"&&&{key.mask:#x}" if key.mask is not None else "")
        + (f"/{key.prefix_len}" if key.prefix_len is not None else "")
        for key in write.key
    )
    data = ", ".join(f"{name}={value}" for name, value in write.data.items())
    where = "" if write.pipe is None else f" pipe {write.pipe}"
    return f"{write.table}{where} [{key}] {write.action or ''}({data})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Set a switch up; return the exit status."""
    parser = argparse.ArgumentParser(description="Set a Tofino up for a fabric, over BF Runtime.")
    parser.add_argument("fabric", type=Path, help="the fabric's file, as for `dlcp fabric`")
    parser.add_argument("switch", help="name of this switch in the fabric")
    parser.add_argument(
        "--port", type=device_port, action="append", default=[], metavar="NUMBER=DEVICE_PORT,SPEED[,FEC]"
    )
    parser.add_argument(
        "--grpc", default="127.0.0.1:50052", metavar="HOST:PORT", help="address of the driver's gRPC server"
    )
    parser.add_argument("--device", type=int, default=0, help="the device's number in its driver")
    parser.add_argument("--dry-run", action="store_true", help="print the writes, and make none")
    options = parser.parse_args(arguments)
    try:
        fabric = load(options.fabric)
        fabric.switch(options.switch)
        device = Device.connect(options.grpc, options.device)
        planned = writes(fabric, options.switch, options.port, device)
        if options.dry_run:
            print(*map(describe, planned), sep="\n")
            return 0
        device.clear()
        for write in planned:
            device.write(write)
    except ValueError as error:  # all errors of fabric, ports and device are ValueErrors
        print(error, file=sys.stderr)
        return 1
    print(f"{options.switch}: {len(planned)} entries written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
