# SPDX-License-Identifier: Apache-2.0
"""Generate ``dissector.lua``, the Wireshark dissector of the DLCP header, from the field table in ``dlcp.wire``.

``python -m dlcp.wire.dissector`` updates the file next to this module. Wireshark and tshark read it with
``-X lua_script:dissector.lua``, or from their plugins folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dlcp.wire.header import FIELD_BITS, HEADER_BYTES, UDP_PORT_BASE, UDP_PORT_COUNT, VERSION, Flag, PacketType
from dlcp.wire.payloads import ACK_ENTRY, ACK_FIELD_BITS, ACK_PATH, GREETING, GREETING_PORT

DISSECTOR_PATH: Final = Path(__file__).with_suffix(".lua")
_TEMPLATE_PATH: Final = Path(__file__).with_suffix(".template.lua")
"""The parts that do not depend on the field table, with ``@NAME@`` placeholders for the rest."""

LABELS: Final = {
    "version": "Version",
    "type": "Type",
    "protected": "Protected",
    "retransmission": "Retransmission",
    "trimmed": "Trimmed",
    "congestion": "Congestion echo",
    "flags_spare": "Coding (0 = none, 1 to 3 = 4, 8, 16 bits a value, +4 = lower digits, +8 = a piece of a packet)",
    "queue": "Queue (7 = the most urgent)",
    "drop_class": "Drop class (0 = never, 7 = the least valuable)",
    "spare": "Spare",
    "layer": "Layer (0 = nearest the input)",
    "job": "Job",
    "budget": "Drop budget at this switch [packets]",
    "step": "Step",
    "message": "Message",
    "sender": "Sender rank",
    "index": "Packet index",
    "count": "Packets in the message",
    "token": "Session token",
}
"""Wireshark's label of each field; its filter name is ``dlcp.`` and the field's name."""

ACK_LABELS: Final = {
    "step": "Step",
    "message": "Message",
    "whole": "The message is complete, every packet has arrived",
    "trimmed": "The packets below were trimmed",
    "block": "Block of 64 packets",
    "arrived": "Arrived (bit k = packet 64 block + k)",
}
"""Wireshark's label of each field of an acknowledgement's entry; its filter name is ``dlcp.ack_`` and the name."""
WORD_BITS: Final = 32
"""Fields that are not whole bytes are parts of a word of this size."""


def _bit_offsets() -> dict[str, int]:
    """Return the first bit of every field, counted from the start of the header."""
    offsets, at = {}, 0
    for name, bits in FIELD_BITS.items():
        offsets[name] = at
        at += bits
    return offsets


def _byte_range(name: str, first_bit: int) -> str:
    """Return the Lua expression for a field's bytes: whole bytes, or one byte shared with other fields."""
    return f"buffer({first_bit // 8}, {max(1, FIELD_BITS[name] // 8)})"


def _value(name: str, first_bit: int) -> str:
    """Return the Lua expression for the value of a field of at most 32 bits."""
    bits = FIELD_BITS[name]
    whole = _byte_range(name, first_bit)
    return f"{whole}:uint()" if bits % 8 == 0 else f"{whole}:bitfield({first_bit % 8}, {bits})"


def _declaration(name: str, first_bit: int) -> str:
    """Return the Lua line that declares a field: kind, label, base and mask."""
    bits = FIELD_BITS[name]
    mask = ((1 << bits) - 1) << (8 - bits - first_bit % 8) if bits < 8 else 0
    filter_name, label = f'"dlcp.{name}"', f'"{LABELS[name]}"'
    if bits == 1:
        return f"    {name} = ProtoField.bool({filter_name}, {label}, 8, nil, 0x{mask:02x}),"
    base = "base.HEX" if bits == 64 else "base.DEC"
    names = "TYPES" if name == "type" else "nil"
    masked = f", 0x{mask:02x}" if mask else ""
    return f"    {name} = ProtoField.uint{max(8, bits)}({filter_name}, {label}, {base}, {names}{masked}),"


def _entry_words() -> Iterator[tuple[str, int, int, int]]:
    """Yield each field of an ACK's entry: name, and its word's first byte, bits and mask; 0 for the whole word."""
    first_bit = 0
    for name, bits in ACK_FIELD_BITS.items():
        if bits % 8 == 0:
            yield name, first_bit // 8, bits, 0
        else:
            yield name, first_bit // 8, WORD_BITS, ((1 << bits) - 1) << (WORD_BITS - first_bit % 8 - bits)
        first_bit += bits


def _entry_declarations() -> list[str]:
    """Return the Lua lines that declare the fields of an ACK's payload."""
    lines = []
    for name, _, word_bits, mask in _entry_words():
        bits, label = ACK_FIELD_BITS[name], ACK_LABELS[name]
        kind = f'ProtoField.{"bool" if bits == 1 else f"uint{word_bits}"}("dlcp.ack_{name}", "{label}"'
        base = word_bits if bits == 1 else "base.HEX" if bits == 64 else "base.DEC"
        lines.append(f"    ack_{name} = {kind}, {base}{f', nil, 0x{mask:08x}' if mask else ''}),")
    return lines


def _entry_adds() -> list[str]:
    """Return the Lua lines that show one entry of an ACK's payload, starting at ``at``."""
    return [
        f"            entry:add(f.ack_{name}, buffer(at + {first}, {word_bits // 8}))"
        for name, first, word_bits, _ in _entry_words()
    ]


def generate() -> str:
    """Return the text of the Lua dissector, for every field of ``FIELD_BITS`` in wire order.

    Raises
    ------
    ValueError
        A field neither lies within one byte nor fills 1, 2, 4 or 8 bytes; the generator supports no others.
    """
    offsets = _bit_offsets()
    for name, first_bit in offsets.items():
        bits = FIELD_BITS[name]
        if not (first_bit % 8 + bits <= 8 or (first_bit % 8 == 0 and bits in (16, 32, 64))):
            raise ValueError(f"field {name}: {bits} bits from bit {first_bit} on are not a byte-aligned integer")
    parts = {
        "VERSION": str(VERSION),
        "HEADER_BYTES": str(HEADER_BYTES),
        "FIRST_PORT": str(UDP_PORT_BASE),
        "LAST_PORT": str(UDP_PORT_BASE + UDP_PORT_COUNT - 1),
        "TYPES": "\n".join(f'    [{int(kind)}] = "{kind.name}",' for kind in PacketType),
        "FIELDS": "\n".join([*(_declaration(name, first) for name, first in offsets.items()), *_entry_declarations()]),
        "FIELD_LIST": ",\n    ".join(f"f.{name}" for name in (*offsets, *(f"ack_{name}" for name in ACK_FIELD_BITS))),
        "ACK": str(int(PacketType.ACK)),
        "PROBE": str(int(PacketType.PROBE)),
        "STOP": str(int(PacketType.STOP)),
        "HELLO": str(int(PacketType.HELLO)),
        "HELLO_ACK": str(int(PacketType.HELLO_ACK)),
        "ENTRY_BYTES": str(ACK_ENTRY.size),
        "ACK_PATH": str(ACK_PATH),
        "PIECE": str(int(Flag.PIECE)),
        "GREETING_BYTES": str(GREETING.size),
        "PORT_BYTES": str(GREETING_PORT.size),
        "ENTRY_ADDS": "\n".join(_entry_adds()),
        "PLACES": "\n".join(
            f"    {{ f.{name}, {first // 8}, {max(1, FIELD_BITS[name] // 8)} }}," for name, first in offsets.items()
        ),
    }
    parts |= {f"{name}_range": _byte_range(name, first) for name, first in offsets.items()}
    parts |= {f"{name}_value": _value(name, first) for name, first in offsets.items()}
    text = _TEMPLATE_PATH.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


if __name__ == "__main__":
    DISSECTOR_PATH.write_text(generate())
