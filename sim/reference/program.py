# SPDX-License-Identifier: Apache-2.0
"""DLCP switches that run the compiled P4 program, with every packet as bytes."""

import struct
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from dlcp.sim.arithmetic import PS_PER_US
from dlcp.sim.plan import BY_HASH, CONTROL_QUEUE, DLCP, OTHER_PORT, QUEUES, Plan, source_port
from dlcp.sim.reference.parts import Kind, Packet

from dlcp.switch import DROP_PORT, PROGRAM_PATH, Action, GroupRef, Program, ProgramDef, load_definition
from dlcp.wire import UDP_PORT_BASE

if TYPE_CHECKING:
    from dlcp.sim.reference.engine import ReferenceEngine
    from dlcp.sim.reference.switch import Switch

PORTS_MAX = 63
MEMBERS_MAX = 1024
ADDRESS = 0x0A000001
EVENTS = 8
EVENT_MARKED, EVENT_BUDGET_SPENT, EVENT_SLOT_TAKEN = 1, 5, 6
FRAME_BYTES = 74


def fits(plan: Plan) -> bool:
    """Return whether the program's tables can express the plan: its ports, and DLCP's packets sprayed by hash."""
    degrees = np.bincount([link.source for link in plan.links], minlength=len(plan.network.names))
    dlcp = plan.transports["kind"] == DLCP
    sprayed = bool(plan.transports["sprayed"][dlcp].all())
    return bool(degrees.max() <= PORTS_MAX and sprayed and plan.rules.spraying == BY_HASH)


@cache
def _definition() -> ProgramDef:
    return load_definition(PROGRAM_PATH)


def load_switches(engine: "ReferenceEngine") -> None:
    """Give every switch a program, or new routes if it has one."""
    for switch in engine.switches.values():
        if switch.program is None:
            switch.program = ProgramSwitch(engine, switch)
        else:
            switch.program.populate()


class ProgramSwitch:
    """A switch's program, with the entries that a controller would write."""

    def __init__(self, engine: "ReferenceEngine", switch: "Switch") -> None:
        self._engine, self._switch = engine, switch
        self._program = Program(_definition())
        self._port_of = {link: port for port, link in enumerate(switch.ports, start=1)}
        self._link_of = {port: link for link, port in self._port_of.items()}
        self.refused = False
        self.populate()

    def populate(self) -> None:
        """Write all entries."""
        program, rules = self._program, self._switch.rules
        program.clear_entries()
        tables, profile = program.tables, program.profiles["route_selector"]
        tables["port_trust"].insert({"ig_port": 0}, Action("trust"))
        for queue in range(QUEUES):
            for drop_class in range(1, 8):
                limit = Action("drop_above", {"depth": rules.drop_above[drop_class]})
                tables["drop_threshold"].insert({"queue": queue, "drop_class": drop_class}, limit)
            if queue != CONTROL_QUEUE:
                tables["ecn_threshold"].insert({"queue": queue}, Action("mark_above", {"depth": rules.mark_above}))
        groups: dict[tuple[int, ...], int] = {}
        members = 0
        for host in range(self._engine.plan.hosts):
            links = tuple(self._engine.routes.links(self._switch.node, host))
            if not links:
                continue
            if links not in groups:
                # Members are chosen by the remainder of the hash; to choose by the quotient, each stands there often.
                count = len(links) * (self._switch.divisor if len(links) > 1 else 1)
                if members + count > MEMBERS_MAX:
                    raise ValueError(f"{self._switch.node}: more than {MEMBERS_MAX} next hops")
                numbers = []
                for place in range(count):
                    link = links[place // (count // len(links)) % len(links)]
                    members += 1
                    profile.add_member(members, Action("to_next_hop", {"port": self._port_of[link], "mac": 1}))
                    numbers.append(members)
                groups[links] = len(groups) + 1
                profile.add_group(groups[links], numbers)
            tables["ipv4_route"].insert({"ipv4_dst": (ADDRESS + host, 32)}, GroupRef(groups[links]))

    def ingress(self, packet: Packet, links: list[int]) -> int:
        """Return the link that the program sends a packet to; ``refused`` tells whether it drops it there."""
        frame = frame_of(packet)
        port, priority, packet.carry = self._program.ingress(frame, 0, self._engine.now_ps // PS_PER_US)
        packet.frame = frame
        self.refused = port == DROP_PORT
        if self.refused:
            return links[0]
        if priority != packet.queue:
            raise AssertionError(f"the P4 program puts {packet} into queue {priority}")
        return self._link_of[port]

    def egress(self, packet: Packet, link: int, depth: int) -> None:
        """Let the program edit a packet that leaves."""
        now_us = self._engine.now_ps // PS_PER_US
        frame = packet.frame
        assert frame is not None
        waited_us = now_us - packet.enqueued_us
        self._program.egress(
            frame,
            packet.carry,
            self._port_of[link],
            packet.enqueued_us,
            waited_us,
            packet.enqueued_depth,
            depth,
            now_us,
        )
        packet.ecn = frame[15] & 3

    def events(self) -> tuple[int, int, int]:
        """Return how often a budget was spent, a slot was taken, a packet was marked."""
        snapshot = self._program.snapshot().counters
        ingress = next(cells for name, cells in snapshot.items() if name.endswith("ingress_events"))[:, 0]
        egress = next(cells for name, cells in snapshot.items() if name.endswith("egress_events"))[:, 0]
        return (
            int(ingress[EVENT_BUDGET_SPENT::EVENTS].sum()),
            int(ingress[EVENT_SLOT_TAKEN::EVENTS].sum()),
            int(egress[EVENT_MARKED::EVENTS].sum()),
        )


def frame_of(packet: Packet) -> bytearray:
    """Return a packet's headers as bytes; of its payload the program reads nothing."""
    message = packet.message
    stream = message.flow
    dlcp = message.transport.kind == DLCP
    source, target = stream.source, stream.target
    if packet.back:
        source, target = target, source
    port = int(source_port(np.int64(stream.serial)))
    head = struct.pack(
        ">BBHHHBBHII",
        *(0x45, packet.ecn, FRAME_BYTES - 14, 0, 0, 64, 17, 0, ADDRESS + source, ADDRESS + target),
    )
    total = sum(struct.unpack(">10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    total = 0xFFFF ^ ((total & 0xFFFF) + (total >> 16))
    udp = struct.pack(">HHHH", port, UDP_PORT_BASE if dlcp else OTHER_PORT, FRAME_BYTES - 34, 0)
    data = packet.kind is Kind.DATA
    header = struct.pack(
        ">BBBBHHIHHIIQ",
        *(0x11 if data else 0x12, 0x40 if packet.again else 0),
        *(packet.queue << 5 | packet.drop_class << 2, 0, message.job & 0xFFFF, message.budget),
        *(message.step & 0xFFFFFFFF, message.number & 0xFFFF, message.sender & 0xFFFF),
        *(packet.index, message.packets, 0),
    )
    return bytearray(bytes(12) + b"\x08\x00" + head[:10] + total.to_bytes(2, "big") + head[12:] + udp + header)
