# SPDX-License-Identifier: Apache-2.0
"""Sends the steps of a recording to simple_switch, one at a time, and records its answers.

Nothing is taken from the built-in switch. That a packet was dropped is known because markers that were sent after it
came out and it did not; what was forwarded is counted by the program itself, and has to be as many as came out.
"""

import dataclasses
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from dlcp.wire import HEADER_BYTES
from tests.conformance.recording import (
    AgeSlot,
    Answer,
    Burst,
    Change,
    Markers,
    Packet,
    Recording,
    SetEntries,
    SetGroup,
    Sleep,
    Step,
    WriteRegister,
)
from tests.conformance.simple_switch import DEADLINE_S, SimpleSwitch, SwitchError, version
from tests.waiting import until

ANSWER_S = 0.005
"""How long a packet may take before a marker is sent after it. Ten times its duration when idle."""
ATTEMPTS = 3
"""How often a recording is begun before it is given up."""
BURST_RATE_PPS = 5
"""Rate of each queue during a burst: the second packet leaves 200 ms after the first, long after all others came."""
BURST_ENQUEUED_US = 100_000
"""A burst that took longer to be sent is not recorded."""
SLOT_IDLE_US = 1_000_000
"""As in p4/shared/constants.p4; only to keep clear of it."""
MARGIN_US = 100_000
"""How close to now a time stamp that lies ahead may be."""
OWNED = 1 << 31
"""Set in every owner of a slot, as in p4/shared/constants.p4."""
_EVENTS = 8
_FORWARDED = 0
_UDP_PORTS = range(53696, 53704)
_WORD = 1 << 32


class Uncertain(SwitchError):
    """The answer to a packet could not be determined."""


def _headers(data: bytes) -> tuple[bool, int, int]:
    """Return whether a frame is IPv6, and where its IP header and what follows UDP would begin."""
    at = 18 if data[12:14] == b"\x81\x00" else 14
    is_ipv6 = data[at - 2 : at] == b"\x86\xdd"
    return is_ipv6, at, at + (48 if is_ipv6 else 28)


def owner_of(data: bytes) -> int | None:
    """Return the owner that a packet's message would be of a slot, if there may be a DLCP header in it."""
    is_ipv6, at, udp_end = _headers(data)
    if len(data) < udp_end + HEADER_BYTES or (not is_ipv6 and data[at - 2 : at] != b"\x08\x00"):
        return None
    protocol, port = data[at + 6 if is_ipv6 else at + 9], int.from_bytes(data[udp_end - 6 : udp_end - 4], "big")
    if protocol != socket.IPPROTO_UDP or port not in _UDP_PORTS:
        return None
    header = data[udp_end:]
    return zlib.crc32(header[4:6] + header[8:16])


def slot_of(data: bytes) -> int | None:
    """Return the budget slot of a packet's message, if there may be a DLCP header in it."""
    owner = owner_of(data)
    return None if owner is None else owner & 0xFFFF


def _plausible(sent: bytes, came: bytes) -> bool:
    """Say whether a packet can have become another: a switch changes no IP addresses or payloads, but it may trim."""
    is_ipv6, at, udp_end = _headers(sent)
    addresses = slice(at + 8, at + 40) if is_ipv6 else slice(at + 12, at + 20)
    tags_end = udp_end + 4
    if len(came) not in (len(sent), udp_end + HEADER_BYTES):
        return False
    return sent[addresses] == came[addresses] and sent[tags_end : len(came)] == came[tags_end:]


def record(
    program: Path, digest: str, steps: Sequence[Step], *, answer_s: float = ANSWER_S, attempts: int = ATTEMPTS
) -> Recording:
    """Start simple_switch, and return the steps with its answers and its state in the end.

    A simple_switch of its own for each recording, because bm_reset_state leaves meters and groups in disorder (1.15.5).
    What is not certain, because the machine was busy, is recorded again.

    Raises
    ------
    SwitchError
        The answer to a packet is still uncertain.
    """
    for attempt in range(1, attempts + 1):
        try:
            with SimpleSwitch(program) as switch:
                return _Recorder(switch, answer_s).record(digest, steps)
        except Uncertain as error:
            if attempt == attempts:
                raise
            print(f"once more: {error}", file=sys.stderr)
    raise AssertionError("not reached")


class _Recorder:
    """Records on one simple_switch that was not used before."""

    def __init__(self, switch: SimpleSwitch, answer_s: float) -> None:
        self._switch = switch
        self._answer_s = answer_s
        self._markers = 0
        self._came_out = 0

    def record(self, digest: str, steps: Sequence[Step]) -> Recording:
        # Slots that nobody used yet count as last used when the switch started.
        until(lambda: self._switch.now_us() >= SLOT_IDLE_US + 2 * MARGIN_US)
        done: list[Step] = []
        for step in steps:
            done += self._do(step)
        stray = self._switch.receive(0.1)
        if stray is not None:
            raise Uncertain(f"a packet came out of port {stray[0]} that nobody sent: {stray[1].hex()}")
        state = self._switch.state()
        events = state.counters["egress_events"].items()
        forwarded = sum(packets for index, (packets, _) in events if index % _EVENTS == _FORWARDED)
        if forwarded != self._came_out:
            raise Uncertain(f"the program counted {forwarded} packets, but {self._came_out} came out")
        return Recording(digest, version(), done, state)

    def _do(self, step: Step) -> list[Step]:
        switch = self._switch
        match step:
            case Markers():
                return []  # of an earlier recording; new ones are sent where they are needed
            case Packet():
                return self._alone(step)
            case Burst():
                return [self._burst(step)]
            case SetEntries(entries):
                switch.set_entries(entries)
            case Change(operation, entry):
                switch.change(operation, entry)
            case SetGroup(profile, group, members):
                switch.set_group(profile, group, members)
            case WriteRegister(register, index, value):
                switch.write_register(register, index, value)
            case AgeSlot(register, index, age_us):
                value = (switch.now_us() - age_us) % _WORD
                switch.write_register(register, index, value)
                return [dataclasses.replace(step, value=value)]
            case Sleep(seconds):
                time.sleep(seconds)
        return [step]

    def _alone(self, packet: Packet) -> list[Step]:
        used_before = self._slot_used(packet)
        sent_us = self._switch.now_us()
        self._switch.send(packet.port, packet.data)
        answer: Answer = self._switch.receive(self._answer_s)
        steps: list[Step] = []
        if answer is None:
            self._markers += 1
            markers = Markers(self._markers, self._switch.now_us())
            steps.append(markers)
            answer = self._before(markers.packets())
        if answer is not None:
            self._came_out += 1
            if not _plausible(packet.data, answer[1]):
                raise Uncertain(f"{answer[1].hex()} came out, and cannot be the answer to {packet.data.hex()}")
        time_us = self._time_of(packet, sent_us, used_before)
        return [dataclasses.replace(packet, time_us=time_us, answer=answer), *steps]

    def _before(self, markers: list[Packet]) -> Answer:
        """Send markers and wait for them; return what came out besides."""
        for marker in markers:
            self._switch.send(marker.port, marker.data)
        awaited = [marker.answer for marker in markers]
        answer: Answer = None
        while awaited:
            came = self._switch.receive(DEADLINE_S)
            if came is None:
                self._switch.check()
                raise Uncertain("simple_switch did not answer in time")
            if came in awaited:
                awaited.remove(came)
                self._came_out += 1
            elif answer is not None:
                raise Uncertain(f"two packets came out for one: {answer} and {came}")
            else:
                answer = came
        # Queue 0 comes after the markers' own.
        return answer or self._switch.receive(self._answer_s)

    def _burst(self, burst: Burst) -> Burst:
        """Let a lead through each queue, then send all others before the next may leave."""
        switch = self._switch
        used_before = [self._slot_used(packet) for packet in burst.packets]
        for port, depth in burst.depths.items():
            switch.set_queues(port, BURST_RATE_PPS, depth)
        time.sleep(1 / BURST_RATE_PPS)  # what a queue let out a moment ago would hold the lead up
        start_us = switch.now_us()
        leads = []
        for lead in burst.leads:
            switch.send(lead.port, lead.data)
            answer = switch.receive(1 / BURST_RATE_PPS)
            if answer is None or answer[1][-4:] != lead.data[-4:]:
                raise Uncertain("the lead of a burst did not come out at once")
            leads.append(dataclasses.replace(lead, time_us=start_us, answer=answer))
        for packet in burst.packets:
            switch.send(packet.port, packet.data)
        took_us = switch.now_us() - start_us
        if took_us > BURST_ENQUEUED_US:
            raise Uncertain(f"sending a burst took {took_us} us; the machine is too busy")
        came: list[tuple[int, bytes]] = []
        while answer := switch.receive(3 / BURST_RATE_PPS):
            came.append(answer)
        for port in burst.depths:
            switch.set_queues(port)
        self._came_out += len(leads) + len(came)
        packets = []
        for packet, used in zip(burst.packets, used_before, strict=True):
            own = [answer for answer in came if answer[1][-4:] == packet.data[-4:]]
            if len(own) > 1:
                raise Uncertain("packets of a burst need different last bytes")
            time_us = self._time_of(packet, start_us, used)
            packets.append(dataclasses.replace(packet, time_us=time_us, answer=own[0] if own else None))
        if sum(packet.answer is not None for packet in packets) != len(came):
            raise Uncertain("more came out of a burst than went in")
        return Burst(leads, packets, burst.depths)

    def _slot_used(self, packet: Packet) -> int | None:
        slot = slot_of(packet.data)
        return None if slot is None else self._switch.read_register("slot_used_us", slot)

    def _is_of_another(self, packet: Packet) -> bool:
        slot, owner = slot_of(packet.data), owner_of(packet.data)
        assert slot is not None
        assert owner is not None
        return self._switch.read_register("slot_owner", slot) != owner | OWNED

    def _time_of(self, packet: Packet, sent_us: int, used_before: int | None) -> int:
        """Return the packet's time stamp: what the program stored, or else when it was sent, if that is good enough."""
        if used_before is None:
            return sent_us
        used_us = self._slot_used(packet)
        assert used_us is not None
        if used_us != used_before:
            return sent_us + (used_us - sent_us) % _WORD
        # Not written, so the slot was not old enough to be taken over; then it was not when the packet was sent either,
        # unless its age went through zero meanwhile.
        age_us = (sent_us - used_us) % _WORD
        if age_us > _WORD - MARGIN_US and self._is_of_another(packet):
            raise Uncertain(f"a slot was used {_WORD - age_us} us from now: too near to say what the switch saw")
        return sent_us
