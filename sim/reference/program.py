# SPDX-License-Identifier: Apache-2.0
"""Switches that run the compiled P4 program, with the headers of every packet as bytes."""

import struct
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from dlcp.sim.arithmetic import HOST_ADDRESS, PS_PER_US
from dlcp.sim.packet_engine import ORDINARY_PORT, source_port
from dlcp.sim.plan import (
    EVENT_BUDGET_SPENT,
    EVENT_MARKED,
    EVENT_SLOT_TAKEN,
    PORT_INDEX_WIDTH,
    PORT_QUEUES,
    ROUTE_MEMBERS_SIZE,
    EnginePlan,
    PacketKind,
    PathChoice,
    TransportKind,
)
from dlcp.sim.reference.parts import SimulatedPacket
from dlcp.switch import DROP_PORT, PROGRAM_PATH, Action, GroupRef, Program, ProgramDef, load_definition
from dlcp.wire import UDP_PORT_BASE, Queue

if TYPE_CHECKING:
    from dlcp.sim.reference.reference_engine import ReferenceEngine
    from dlcp.sim.reference.switch import ReferenceSwitch

_PORTS_MAX = (1 << PORT_INDEX_WIDTH) - 1
_PORT_ADDRESS = 0x0B000000
"""Destination that has port n, and no other, as its next hop: this + n."""
_EVENTS = 8
"""Kinds of events that each counter array has room for, the low bits of its index."""
_FRAME_BYTES = 74


def chooses_paths(plan: EnginePlan) -> bool:
    """Return whether switches choose paths as the program does: by hash, and DLCP's packets one by one."""
    dlcp = [transport for transport in plan.transports if transport.kind == TransportKind.DLCP]
    return plan.switches.path_choice == PathChoice.HASH and all(transport.sprayed for transport in dlcp)


@cache
def _definition() -> ProgramDef:
    return load_definition(PROGRAM_PATH)


class P4Pipeline:
    """A switch's program, with the entries that a controller would write.

    Where paths are not chosen as the program chooses them, it gets each packet with the address of the port that was
    chosen. Nothing but its routes depends on the address.
    """

    def __init__(self, engine: "ReferenceEngine", switch: "ReferenceSwitch") -> None:
        if len(switch.ports) > _PORTS_MAX:
            raise ValueError(
                f"{engine.plan.topology.names[switch.node]} has {len(switch.ports)} ports; the P4 program, which the "
                f"reference runs, counts to {_PORTS_MAX}: use the kernel"
            )
        self._engine, self._switch = engine, switch
        self._program = Program(_definition())
        self._port_of = {link: port for port, link in enumerate(switch.ports, start=1)}
        self._link_of = {port: link for link, port in self._port_of.items()}
        self._chooses = chooses_paths(engine.plan)
        self.refused = False
        self.populate()

    def populate(self) -> None:
        """Write all entries."""
        program, rules = self._program, self._switch.rules
        program.clear_entries()
        tables = program.tables
        tables["port_trust"].insert({"ig_port": 0}, Action("trust"))
        for queue in range(PORT_QUEUES):
            for drop_class in range(1, 8):
                limit = Action("drop_above", {"depth": rules.drop_above[drop_class]})
                tables["drop_threshold"].insert({"queue": queue, "drop_class": drop_class}, limit)
            if queue != Queue.CONTROL:
                tables["ecn_threshold"].insert({"queue": queue}, Action("mark_above", {"depth": rules.mark_above}))
        destinations: dict[int, tuple[int, ...]]
        destinations = {_PORT_ADDRESS + port: (link,) for port, link in self._link_of.items()}
        if self._chooses:
            routes, hosts = self._engine.routes, range(self._engine.plan.hosts)
            destinations = {HOST_ADDRESS + host: tuple(routes.links(self._switch.node, host)) for host in hosts}
        profile = program.profiles["route_selector"]
        groups: dict[tuple[int, ...], int] = {}
        members = 0
        for destination, links in destinations.items():
            if not links:
                continue
            if links not in groups:
                # The program chooses a member by the remainder of the hash. To choose by the quotient, as behind a
                # switch that has chosen by the remainder, each next hop is there as often as that one has choices.
                repeat = self._switch.divisor if len(links) > 1 else 1
                numbers = range(members + 1, members + 1 + len(links) * repeat)
                members += len(numbers)
                if members > ROUTE_MEMBERS_SIZE:
                    raise ValueError(f"{self._switch.node}: more than {ROUTE_MEMBERS_SIZE} next hops")
                for position, number in enumerate(numbers):
                    port = self._port_of[links[position // repeat]]
                    profile.add_member(number, Action("to_next_hop", {"port": port, "mac": 1}))
                groups[links] = len(groups) + 1
                profile.add_group(groups[links], list(numbers))
            tables["ipv4_route"].insert({"ipv4_dst": (destination, 32)}, GroupRef(groups[links]))

    def ingress(self, packet: SimulatedPacket, link: int) -> int:
        """Return the link that the program sends a packet to, and set ``refused`` if it drops the packet.

        ``link`` is the simulator's choice, which counts where the program does not choose.
        """
        packet.frame = frame_of(packet, None if self._chooses else _PORT_ADDRESS + self._port_of[link])
        now_us = self._engine.now_ps // PS_PER_US
        port, priority, packet.carry = self._program.ingress(packet.frame, 0, now_us)
        self.refused = port == DROP_PORT
        if self.refused:
            return link
        if priority != packet.queue:
            raise AssertionError(f"the P4 program puts {packet} into queue {priority}")
        return self._link_of[port]

    def egress(self, packet: SimulatedPacket, link: int, depth: int) -> None:
        """Let the program edit a packet that leaves."""
        now_us = self._engine.now_ps // PS_PER_US
        waited_us = now_us - packet.enqueued_us
        port, depth_then = self._port_of[link], packet.enqueued_depth
        self._program.egress(packet.frame, packet.carry, port, packet.enqueued_us, waited_us, depth_then, depth, now_us)
        packet.ecn = packet.frame[15] & 3

    def events(self) -> tuple[int, int, int]:
        """Return how often a budget was spent, a slot was taken, a packet was marked."""
        snapshot = self._program.snapshot().counters
        ingress = next(cells for name, cells in snapshot.items() if name.endswith("ingress_events"))[:, 0]
        egress = next(cells for name, cells in snapshot.items() if name.endswith("egress_events"))[:, 0]
        return (
            int(ingress[EVENT_BUDGET_SPENT::_EVENTS].sum()),
            int(ingress[EVENT_SLOT_TAKEN::_EVENTS].sum()),
            int(egress[EVENT_MARKED::_EVENTS].sum()),
        )


def frame_of(packet: SimulatedPacket, destination: int | None = None) -> bytearray:
    """Return a packet's headers as bytes, to another address if one is given. The program reads no payload."""
    message = packet.message
    stream = message.flow
    dlcp = message.transport.kind == TransportKind.DLCP
    source, target = stream.source, stream.target
    if packet.back:
        source, target = target, source
    destination = HOST_ADDRESS + target if destination is None else destination
    port = int(source_port(np.int64(stream.serial)))
    head = struct.pack(
        ">BBHHHBBHII",
        *(0x45, packet.ecn, _FRAME_BYTES - 14, 0, 0, 64, 17, 0, HOST_ADDRESS + source, destination),
    )
    total = sum(struct.unpack(">10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    total = 0xFFFF ^ ((total & 0xFFFF) + (total >> 16))
    udp = struct.pack(">HHHH", port, UDP_PORT_BASE if dlcp else ORDINARY_PORT, _FRAME_BYTES - 34, 0)
    data = packet.kind is PacketKind.DATA
    header = struct.pack(
        ">BBBBHHIHHIIQ",
        *(0x11 if data else 0x12, 0x40 if packet.retransmission else 0),
        *(packet.queue << 5 | packet.drop_class << 2, 0, message.job & 0xFFFF, message.budget),
        *(message.step & 0xFFFFFFFF, message.number & 0xFFFF, message.sender & 0xFFFF),
        *(packet.index, message.packets, 0),
    )
    return bytearray(bytes(12) + b"\x08\x00" + head[:10] + total.to_bytes(2, "big") + head[12:] + udp + header)
