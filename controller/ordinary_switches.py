# SPDX-License-Identifier: Apache-2.0
"""Configurations of switches that run no P4 program, but have queues by DSCP: Linux routers, and switches with SONiC.

A packet's DSCP says which queue it takes and whether it may be dropped (`dlcp.wire.dscp`). So packets that may be
dropped wait in queues of their own, with less room. Such a switch sees neither drop classes nor budgets: hosts alone
keep the loss bound, by sending again what is lost beyond it.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from dlcp.controller.fabric import Fabric, FabricError, Port
from dlcp.switch import QUEUES
from dlcp.switch.ports import ETHERNET_BYTES
from dlcp.wire import Queue, dscp

_CLASS_OF_ALL: Final = 4
"""A single threshold for all drop classes is that of the middle one, 1 to 7."""
_FIRST_CLASS: Final = 0x10
_ROOT_CLASS: Final = 0x1
_GUARANTEED: Final = 1000
"""Each queue is guaranteed this part of the port's rate. Strict priority is no discipline of HTB: it lends what is left
to the most urgent class first."""


def export_tc(fabric: Fabric, switch: str) -> str:
    """Return a shell script that makes a Linux router one of a fabric's switches, with tc's HTB and nftables.

    A port's queues share its rate, most urgent first. Their depths are those of the fabric's ``queueing``.

    Raises
    ------
    FabricError
        A port has no rate.
    """
    ports = _interfaces(fabric, switch)
    lines = [
        "#!/bin/sh",
        f"# Queues and limits by DSCP for {switch}: dlcp fabric export tc. To undo: nft delete table inet dlcp, and",
        "# tc qdisc del dev INTERFACE root.",
        "set -e",
        *_nft_rules(fabric, switch, list(ports.values())),
    ]
    for port, interface in ports.items():
        lines += _htb(fabric, Port(switch, port), interface)
    return "\n".join(lines) + "\n"


def _interfaces(fabric: Fabric, switch: str) -> dict[int, str]:
    """Return the interfaces of a switch's linked ports, by port."""
    described = fabric.switch(switch)
    return {port: described.interface(port) for port in sorted(fabric.neighbours[switch])}


def _nft_rules(fabric: Fabric, switch: str, interfaces: list[str]) -> Iterator[str]:
    places = ", ".join(
        f"{dscp(queue, droppable)} : 1:{_minor(queue, droppable):x}"
        for queue in range(QUEUES)
        for droppable in (False, True)
    )
    clear = _untrusted(fabric, switch)
    yield "nft -f - <<'END'"
    yield "table inet dlcp"
    yield "delete table inet dlcp"
    yield "table inet dlcp {"
    if clear:
        yield "  chain untrusted {"
        yield "    type filter hook prerouting priority mangle;"
        for family in ("ip", "ip6"):
            yield f"    iifname {{ {_quoted(clear)} }} {family} dscp set 0"
        yield "  }"
    yield "  chain queues {"
    yield "    type filter hook postrouting priority mangle;"
    for family in ("ip", "ip6"):
        yield f"    oifname {{ {_quoted(interfaces)} }} meta priority set {family} dscp map {{ {places} }}"
    yield "  }"
    yield "}"
    yield "END"


def _untrusted(fabric: Fabric, switch: str) -> list[str]:
    """Return the interfaces to hosts whose tags are not trusted."""
    neighbours = fabric.neighbours[switch]
    hosts = {port: neighbour.host for port, neighbour in neighbours.items() if neighbour.host is not None}
    return [fabric.switch(switch).interface(port) for port, host in sorted(hosts.items()) if not host.trusted]


def _quoted(interfaces: list[str]) -> str:
    return ", ".join(f'"{each}"' for each in interfaces)


def _minor(queue: int, droppable: bool) -> int:
    return _FIRST_CLASS + 2 * queue + droppable


def _htb(fabric: Fabric, port: Port, interface: str) -> Iterator[str]:
    queueing = fabric.queueing_at(port)
    if not queueing.rate_bps:
        raise FabricError(f"port {port.switch}:{port.number} has no rate, which tc's HTB needs; give it a rate_bps")
    rate = f"{queueing.rate_bps}bit"
    least = f"{max(1, queueing.rate_bps // _GUARANTEED)}bit"
    ordinary = _minor(Queue.ORDINARY, False)
    yield f"tc qdisc del dev {interface} root 2>/dev/null || true"
    yield f"tc qdisc add dev {interface} root handle 1: htb default {ordinary:x}"
    yield (
        f"tc class add dev {interface} parent 1: classid 1:{_ROOT_CLASS:x} "
        f"htb rate {rate} ceil {rate} quantum {fabric.mtu_bytes + ETHERNET_BYTES}"
    )
    for queue, depth in enumerate(queueing.depths()):
        for droppable in (False, True):
            room = fabric.policy.of_queue(queue).drop_above(_CLASS_OF_ALL, depth) if droppable else depth
            minor = f"{_minor(queue, droppable):x}"
            yield (
                f"tc class add dev {interface} parent 1:{_ROOT_CLASS:x} classid 1:{minor} "
                f"htb rate {least} ceil {rate} prio {QUEUES - 1 - queue} quantum {fabric.mtu_bytes + ETHERNET_BYTES}"
            )
            yield f"tc qdisc add dev {interface} parent 1:{minor} handle {minor}: pfifo limit {max(1, room)}"


_SONIC_QUEUES: Final = {
    (Queue.CONTROL, False): 7,
    **{(queue, False): 6 for queue in (6, 5)},
    **{(queue, True): 5 for queue in (6, 5)},
    **{(queue, False): 4 for queue in (4, 3)},
    **{(queue, True): 3 for queue in (4, 3)},
    **{(2, droppable): 2 for droppable in (False, True)},
    (Queue.ORDINARY, False): 1,
    (Queue.EXCESS, False): 0,
    (Queue.EXCESS, True): 0,
}
"""SONiC has eight queues a port. So two of DLCP's share one, and the least urgent data have one for both kinds."""
_SONIC_DROPPABLE: Final = (5, 3)
_DSCPS: Final = 64
_TRIMMED_DSCP: Final = 48
_TRIMMED_BYTES: Final = 128
"""SONiC's example has the same (doc/packet_trimming in sonic-net/SONiC); DLCP's DSCPs end with 11 in binary."""


def export_sonic(fabric: Fabric, switch: str) -> str:
    """Return tables for SONiC's ``config_db.json`` (for ``config load``) that make a switch one of a fabric's.

    Queues are served in strict priority. Those of packets that may be dropped take a smaller share of the buffer, and
    with jobs in ``policy.trim`` the switch trims what does not fit.
    """
    ports = _interfaces(fabric, switch)
    untrusted = _untrusted(fabric, switch)
    others = dict.fromkeys(map(str, range(_DSCPS)), str(int(Queue.ORDINARY)))
    ours = {str(dscp(*place)): str(queue) for place, queue in _SONIC_QUEUES.items()}
    if fabric.policy.trim:
        ours[str(_TRIMMED_DSCP)] = str(int(Queue.CONTROL))
    discard = "trim" if fabric.policy.trim else "drop"
    profile = {"pool": "egress_lossy_pool", "size": "0", "dynamic_th": "-3", "packet_discard_action": discard}
    tables: dict[str, dict[str, Any]] = {
        "DSCP_TO_TC_MAP": {"DLCP": others | ours} | ({"DLCP_UNTRUSTED": others} if untrusted else {}),
        "TC_TO_QUEUE_MAP": {"DLCP": {str(queue): str(queue) for queue in range(QUEUES)}},
        "PORT_QOS_MAP": {
            interface: {
                "dscp_to_tc_map": "DLCP_UNTRUSTED" if interface in untrusted else "DLCP",
                "tc_to_queue_map": "DLCP",
            }
            for interface in ports.values()
        },
        "SCHEDULER": {"DLCP": {"type": "STRICT"}},
        "WRED_PROFILE": {},
        "QUEUE": {},
        "BUFFER_PROFILE": {"DLCP": profile},
        "BUFFER_QUEUE": {
            f"{interface}|{queue}": {"profile": "DLCP"} for interface in ports.values() for queue in _SONIC_DROPPABLE
        },
    }
    if fabric.policy.trim:
        trimming = {"size": _TRIMMED_BYTES, "dscp_value": _TRIMMED_DSCP, "queue_index": int(Queue.CONTROL)}
        tables["SWITCH_TRIMMING"] = {"GLOBAL": {name: str(value) for name, value in trimming.items()}}
    for port, interface in ports.items():
        depths = fabric.queueing_at(Port(switch, port)).depths()
        for queue in range(QUEUES):
            entry = {"scheduler": "DLCP"}
            if queue not in (Queue.CONTROL, Queue.ORDINARY):  # it would drop what cannot carry marks
                above = fabric.policy.of_queue(queue).mark_above(depths[queue]) * fabric.mtu_bytes
                entry["wred_profile"] = f"DLCP_{above}"
                tables["WRED_PROFILE"][f"DLCP_{above}"] = _ecn_above(above)
            tables["QUEUE"][f"{interface}|{queue}"] = entry
    return json.dumps(tables, indent=4) + "\n"


def _ecn_above(count: int) -> dict[str, str]:
    """Return a WRED profile that marks all ECN-capable packets in a queue of more bytes."""
    profile = {"ecn": "ecn_all"}
    for colour in ("green", "yellow", "red"):
        profile |= {
            f"wred_{colour}_enable": "true",
            f"{colour}_min_threshold": str(count),
            f"{colour}_max_threshold": str(count + 1),
            f"{colour}_drop_probability": "100",
        }
    return profile
