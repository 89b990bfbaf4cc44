# SPDX-License-Identifier: Apache-2.0
"""The program keeps its promises, and z3 finds out if it does not: each fault is refused, and its attack succeeds."""

import json
from typing import Any

import pytest

pytest.importorskip("z3", reason="proofs need z3: pip install z3-solver")

import promises
from attacks import find_attack
from prove import prove

from dlcp.switch import DROP_PORT, Program, apply_entries
from dlcp.switch.executor import bmv2_json
from dlcp.wire import FIELD_BITS, HEADER_BYTES, PacketType
from tests.p4.mutants import PROGRAM, mutants
from tests.p4.p4source import constants

pytestmark = pytest.mark.compiled("v1model")

BY_NAME = {mutant.name: mutant for mutant in mutants()}
ALWAYS = ("a drop beyond the budget", "any slot taken over", "control packets dropped", "trimmed without a flag")
"""The faults of `make test`; `make prove` has all."""


def test_the_promises_have_the_program_s_numbers():
    found = constants()
    slots = promises.SLOTS, promises.SLOT_IDLE_US, promises.SLOT_OWNED
    assert slots == (1 << found["SLOT_WIDTH"], found["SLOT_IDLE_US"], found["SLOT_OWNED"])


def test_the_program_keeps_its_promises():
    found = {name: is_proven for name, is_proven, _ in prove(bmv2_json.load_definition(PROGRAM))}
    assert found == dict.fromkeys([*promises.PROMISES, promises.BOUND], True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.prove) for name in BY_NAME]
)
def test_a_fault_is_refused_and_its_attack_succeeds(name):
    mutant = BY_NAME[name]
    document = mutant.document()
    program = bmv2_json.parse(document)
    ((_, is_proven, _),) = prove(program, [mutant.promise])
    assert not is_proven
    attack = find_attack(program, mutant.promise)
    assert attack is not None
    assert broken(document, attack), attack
    assert not broken(json.loads(PROGRAM.read_text()), attack), "the attack works on the program itself"


def broken(document: dict[str, Any], attack: Any) -> bool:
    """Run an attack on the built-in switch; return whether it breaks the promise."""
    program = Program(bmv2_json.parse(document))
    apply_entries(attack.entries, program)
    for name, (value, cells) in attack.registers.items():
        register = program.registers[name]
        for index in range(len(register)):
            if value or index in cells:
                register[index] = cells.get(index, value)
    left = []
    for packet in attack.packets:
        data = bytearray(packet.data)
        left.append((data, *program.ingress(data, packet.port, packet.time_us)))
    results = []
    for packet, (data, port, queue, carry) in zip(attack.packets, left, strict=True):
        size = 0
        if port != DROP_PORT:
            size = program.egress(data, carry, port, packet.time_us, 0, 0, packet.left_behind, packet.time_us)
        results.append((packet.data, bytes(data[:size]), queue))
    if attack.promise == promises.BOUND:
        lost = sum(is_of(before, attack.message) and given_up(before, after, queue) for before, after, queue in results)
        return lost > attack.budget
    return BREAKS[attack.promise](*results[0], attack)


def layers(frame: bytes) -> tuple[int, int, int]:
    """Return the IP version, and where IP and DLCP begin."""
    at = 18 if frame[12:14] == b"\x81\x00" else 14
    version = 6 if frame[at - 2 : at] == b"\x86\xdd" else 4
    return version, at, at + {4: 28, 6: 48}[version]


def header_of(frame: bytes) -> dict[str, int]:
    """Return the fields of the DLCP header, whatever they are."""
    bits, at, fields = int.from_bytes(frame[layers(frame)[2] :][:HEADER_BYTES], "big"), HEADER_BYTES * 8, {}
    for name, width in FIELD_BITS.items():
        at -= width
        fields[name] = bits >> at & ((1 << width) - 1)
    return fields


def is_of(frame: bytes, message: tuple[int, ...]) -> bool:
    header = header_of(frame)
    return tuple(header[name] for name in ("job", "step", "message", "sender")) == message


def given_up(before: bytes, after: bytes, queue: int) -> bool:
    return len(after) < len(before) and (bool(after) or queue != 0)


def breaks_protection(before: bytes, after: bytes, queue: int, attack: Any) -> bool:
    header = header_of(before)
    actions = [entry.target for entry in attack.entries.entries if entry.table.endswith("classify")]
    classes = [action.params["drop_class"] for action in actions if action.params]
    drop_class = classes[0] if classes else header["drop_class"]
    kept = header["protected"] or header["retransmission"] or header["trimmed"]
    return len(after) < len(before) and (header["type"] != PacketType.DATA or kept or not drop_class)


def breaks_other_traffic(before: bytes, after: bytes, queue: int, attack: Any) -> bool:
    return queue != 1 or unchanging(before) != unchanging(after)


def unchanging(frame: bytes) -> bytes:
    """Return what a router leaves as it is: without Ethernet addresses, TTL or hop limit, ECN and header checksum."""
    version, at, _ = layers(frame)
    kept = bytearray(frame)
    kept[:12] = bytes(12)
    kept[at + 1] &= 0xFC if version == 4 else 0xCF
    if version == 4:
        kept[at + 8], kept[at + 10 : at + 12] = 0, b"\0\0"
    else:
        kept[at + 7] = 0
    return bytes(kept)


def breaks_trust(before: bytes, after: bytes, queue: int, attack: Any) -> bool:
    if not after:
        return True
    header, (version, at, _) = header_of(after), layers(after)
    service = int.from_bytes(after[at : at + 2], "big")
    dscp = service >> 2 & 63 if version == 4 else service >> 6 & 63
    priority = after[14] >> 5 if at == 18 else 0
    return (queue, header["queue"], header["drop_class"], dscp, priority) != (1, 1, 0, 0, 0)


def breaks_ecn(before: bytes, after: bytes, queue: int, attack: Any) -> bool:
    version, at, _ = layers(before)
    one, other = ((frame[at + 1] & 3) if version == 4 else (frame[at + 1] >> 4 & 3) for frame in (before, after))
    return one != other and (one == 0 or other != 3)


def breaks_trimming(before: bytes, after: bytes, queue: int, attack: Any) -> bool:
    version, at, dlcp = layers(before)
    if len(after) == len(before):
        return False
    length = int.from_bytes(after[at + 2 : at + 4] if version == 4 else after[at + 4 : at + 6], "big")
    right = length == (len(after) - at if version == 4 else len(after) - at - 40)
    return len(after) != dlcp + HEADER_BYTES or not right or not after[dlcp + 1] & 0x20


BREAKS = {
    "protection": breaks_protection,
    "other traffic": breaks_other_traffic,
    "trust": breaks_trust,
    "ecn": breaks_ecn,
    "trimming": breaks_trimming,
}
