# SPDX-License-Identifier: Apache-2.0
"""Steps of a recording, with their answers, as statements of a packet test."""

from collections.abc import Iterator, Sequence
from typing import Any

from dlcp.switch import MeterConfig
from tests.conformance.recording import (
    AgeSlot,
    Burst,
    Change,
    Markers,
    Packet,
    SetEntries,
    SetGroup,
    Sleep,
    Step,
    WriteRegister,
)
from tests.packet import stf

MARKERS = [entry["match"] for entry in Markers.ENTRIES]


def statements(steps: Sequence[Step]) -> Iterator[stf.Statement]:
    """Return statements that do the same, without the markers, which are not needed any more."""
    for step in steps:
        match step:
            case SetEntries(document):
                yield from of_entries(document)
            case Change(operation, entry):
                yield from _change(operation, entry)
            case SetGroup(profile, group, members):
                yield stf.Call(0, "set_group", (profile, group, tuple(members)))
            case WriteRegister(register, index, value):
                yield stf.Call(0, "write_register", (register, index, value))
            case AgeSlot(register, index, age_us):
                yield stf.WriteTimeAgo(0, register, index, age_us)
            case Sleep(seconds):
                yield stf.Call(0, "wait", (seconds,))
            case Packet():
                yield from _packet(step)
            case Burst(leads, packets, depths):
                for port, depth in depths.items():
                    yield stf.Call(0, "slow", (port, depth))
                for lead in leads:
                    yield from _packet(lead)
                yield from (stf.SendPacket(0, packet.port, packet.data) for packet in packets)
                for port in depths:
                    yield stf.Call(0, "release", (port,))
                    yield from (expect(*p.answer) for p in packets if p.answer and p.answer[0] == port)


def expect(port: int, data: bytes, mask: bytes | None = None) -> stf.Expect:
    return stf.Expect(0, port, stf.Pattern(data, mask or b"\xff" * len(data)))


def of_entries(document: dict[str, Any]) -> Iterator[stf.Statement]:
    """Return statements that remove all entries and write these."""
    yield stf.Call(0, "remove_all")
    for profile in document.get("profiles", ()):
        for member in profile["members"]:
            name, params = member["action"], member.get("params", {})
            yield stf.Call(0, "add_member", (profile["profile"], member["id"], name, params))
        for group in profile.get("groups", ()):
            yield stf.Call(0, "set_group", (profile["profile"], group["id"], tuple(group["members"])))
    for entry in document["entries"]:
        if entry["match"] not in MARKERS:
            yield from _write("insert", entry)


def _write(operation: str, document: dict[str, Any]) -> Iterator[stf.Statement]:
    entry = {name: value for name, value in document.items() if name != "meter"}
    yield stf.Call(0, operation, (entry,))
    if document.get("meter"):
        place = entry["table"], entry.get("match", {}), entry.get("priority", 0)
        yield stf.Call(0, "set_meter", (*place, MeterConfig(**document["meter"])))


def _change(operation: str, document: dict[str, Any]) -> Iterator[stf.Statement]:
    if operation == "delete":
        yield stf.Call(0, "remove", (document["table"], document.get("match", {}), document.get("priority", 0)))
    else:
        yield from _write(operation, document)


def _packet(packet: Packet) -> Iterator[stf.Statement]:
    yield stf.SendPacket(0, packet.port, packet.data)
    yield expect(*packet.answer) if packet.answer else stf.NoPacket(0)
