# SPDX-License-Identifier: Apache-2.0
import json
import re
import shutil
import struct
import subprocess

import pytest

from dlcp.wire import (
    ACK_ENTRY,
    ACK_PATH,
    ACK_TRIMMED,
    ACK_WHOLE,
    FIELD_BITS,
    GREETING,
    GREETING_PORT,
    HEADER_BYTES,
    UDP_PORT_BASE,
    UDP_PORT_COUNT,
    VERSION,
    Header,
    PacketType,
    decode,
    dissector,
)
from dlcp.wire.dissector import ACK_LABELS, DISSECTOR_PATH, LABELS, generate
from dlcp.wire.payloads import ACK_FIELD_BITS, QUESTION
from tests.wire.golden import GOLDEN_PATH, OTHER_FRAMES, Golden, capture, packets
from tests.wire.wirebits import split

TSHARK = shutil.which("tshark")
needs_tshark = pytest.mark.skipif(TSHARK is None, reason="tshark is not installed")


def tshark(*options: str) -> str:
    command = [TSHARK, "-r", str(GOLDEN_PATH), "-X", f"lua_script:{DISSECTOR_PATH}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def number(shown: str) -> int:
    """A field as tshark shows it: decimal, hexadecimal, or a truth value in the words of its version."""
    return {"True": 1, "False": 0}[shown] if shown in ("True", "False") else int(shown, 0)


def test_the_committed_dissector_is_the_generated_one():
    assert DISSECTOR_PATH.read_text() == generate(), "run: python -m dlcp.wire.dissector"


def test_every_field_has_a_label():
    assert list(LABELS) == list(FIELD_BITS)
    assert list(ACK_LABELS) == list(ACK_FIELD_BITS)


def test_an_acknowledgements_fields_fill_its_entry():
    assert sum(ACK_FIELD_BITS.values()) == 8 * ACK_ENTRY.size


def test_nothing_is_left_of_the_template():
    assert re.findall(r"@\w+@", generate()) == []


def test_a_field_that_lua_cannot_cut_out_is_refused(monkeypatch):
    monkeypatch.setattr(dissector, "FIELD_BITS", FIELD_BITS | {"layer": 9})
    with pytest.raises(ValueError, match="field layer: 9 bits from bit 24 on"):
        generate()


def test_the_golden_capture_is_reproducible():
    assert GOLDEN_PATH.read_bytes() == capture(), "run: python -m tests.wire.golden"


def test_the_golden_capture_covers_every_type_port_and_refusal():
    made = list(packets())
    valid = [packet for packet in made if packet.valid]
    assert {decode(packet.datagram).type for packet in valid} == set(PacketType)
    assert {packet.port for packet in valid} == set(range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT))
    assert len(made) - len(valid) == 12


@needs_tshark
def test_tshark_shows_exactly_the_decoded_fields():
    columns = [f"-edlcp.{name}" for name in FIELD_BITS]
    rows = tshark("-T", "fields", "-E", "separator=,", *columns).splitlines()
    made = list(packets())
    assert len(rows) == len(made)
    for row, packet in zip(rows, made, strict=True):
        shown = dict(zip(FIELD_BITS, row.split(","), strict=True))
        if packet.valid:
            fields, header = split(packet.datagram), decode(packet.datagram)
            assert {name: number(text) for name, text in shown.items()} == fields
            assert all(getattr(header, name) == fields[name] for name in header._fields if name != "flags")
        elif len(packet.datagram) < HEADER_BYTES or not UDP_PORT_BASE <= packet.port < UDP_PORT_BASE + UDP_PORT_COUNT:
            assert not any(shown.values())
        elif packet.datagram[0] >> 4 != VERSION:
            assert {name for name, text in shown.items() if text} == {"version"}


@needs_tshark
def test_tshark_says_what_is_wrong_with_a_packet():
    complaints = [line.strip() for line in tshark("-T", "fields", "-e", "_ws.expert.message").splitlines()]
    for complaint, packet in zip(complaints, packets(), strict=True):
        inside = UDP_PORT_BASE <= packet.port < UDP_PORT_BASE + UDP_PORT_COUNT
        if packet.valid or not inside or not packet.datagram:
            assert complaint == ""
        elif len(packet.datagram) < HEADER_BYTES:
            assert complaint == "Too short for a DLCP header"
        elif packet.datagram[0] >> 4 != VERSION:
            assert complaint == "Not a DLCP version that this dissector knows"
        else:
            assert complaint == "Unknown DLCP packet type"


@needs_tshark
def test_tshark_shows_the_payload_and_a_summary():
    layers = json.loads(tshark("-T", "json", "-x", "-Y", "frame.number==12"))[0]["_source"]["layers"]
    packet = list(packets())[11]
    assert layers["data"]["data.data_raw"][0] == packet.datagram[HEADER_BYTES:].hex()
    header = decode(packet.datagram)
    summary = tshark("-T", "fields", "-e", "_ws.col.Info", "-Y", "frame.number==12").strip()
    assert summary == (
        f"{header.type.name} job {header.job} step {header.step} message {header.message} sender {header.sender} "
        f"packet {header.index}/{header.count} layer {header.layer} queue {header.queue} class {header.drop_class}"
    )


def shown(datagrams, folder, *columns):
    """Packets as tshark shows them, one row each."""
    path = folder / "control.pcap"
    made = [Golden(UDP_PORT_BASE, datagram, True) for datagram in datagrams]
    path.write_bytes(capture(made))
    command = [TSHARK, "-r", str(path), "-X", f"lua_script:{DISSECTOR_PATH}", "-T", "fields", "-E", "separator=;"]
    command += [f"-e{column}" for column in columns]
    return [
        row.split(";")
        for row in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    ]


@needs_tshark
@pytest.mark.parametrize(("family", "tags"), OTHER_FRAMES.values(), ids=OTHER_FRAMES)
def test_tshark_finds_packets_behind_any_header(tmp_path, family, tags):
    made = [packet for packet in packets() if packet.valid]
    path = tmp_path / "other.pcap"
    path.write_bytes(capture(made, family, tags))
    command = [TSHARK, "-r", str(path), "-X", f"lua_script:{DISSECTOR_PATH}", "-T", "fields", "-edlcp.token"]
    rows = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert [number(row) for row in rows] == [decode(packet.datagram).token for packet in made]


@needs_tshark
def test_tshark_reads_what_is_acknowledged(tmp_path):
    entries = [(7, 2, 0, 0, 0, 0xFF), (7, 2, 0, 1, 0, 0x100), (0xFFFFFFFF, 0xFFFF, 1, 0, 1 << 20, 1 << 63)]
    header = Header(PacketType.ACK, 0, 7, 0, 0, 3, 0, 120, 0, 5, 400, 17, 9).encode()
    columns = [f"dlcp.ack_{name}" for name in ACK_FIELD_BITS]
    payload = b"".join(
        ACK_ENTRY.pack(step, message, whole * ACK_WHOLE | trimmed * ACK_TRIMMED | block, arrived)
        for step, message, whole, trimmed, block, arrived in entries
    )
    whole, broken = shown([header + payload, header + payload[:-1]], tmp_path, "_ws.col.Info", *columns)
    assert whole[0] == "ACK job 3 sender 5 received at 400 us marked 17 after 120 us"
    assert [tuple(int(column.split(",")[row], 0) for column in whole[1:]) for row in range(3)] == entries
    assert broken[1:] == [""] * len(columns)


@needs_tshark
def test_tshark_reads_what_came_marked_on_a_path(tmp_path):
    header = Header(PacketType.ACK, 0, 7, 0, 0, 3, 0, 120, 0, 5, 400, 17, 9).encode()
    entries = ACK_ENTRY.pack(7, 2, 0, 1), ACK_ENTRY.pack(11, 0, ACK_PATH, 17)
    columns = ["dlcp.ack_block", "dlcp.ack_path", "dlcp.ack_marked"]
    assert shown([header + b"".join(entries)], tmp_path, *columns) == [["0", "11", "17"]]


@needs_tshark
@pytest.mark.parametrize("kind", [PacketType.HELLO, PacketType.HELLO_ACK])
def test_tshark_reads_a_greeting_and_its_further_ports(kind, tmp_path):
    header = Header(kind, 0, 7, 0, 0, 3, 0, 0, 0, 5, 0, 0, 9).encode()
    greeting = GREETING.pack(1400, 512)
    ports = GREETING_PORT.pack(40001) + GREETING_PORT.pack(40002)
    columns = ["dlcp.packet_bytes", "dlcp.room", "dlcp.path_port"]
    rows = shown([header + greeting, header + greeting + ports, header + greeting[:-1]], tmp_path, *columns)
    assert rows == [["1400", "512", ""], ["1400", "512", "40001,40002"], ["", "", ""]]


@needs_tshark
def test_tshark_says_what_a_question_and_a_stop_mean(tmp_path):
    def packet(kind, payload):
        return Header(kind, 0, 7, 0, 0, 1, 0, 2, 3, 4, 5, 6, 9).encode() + payload

    told = {
        (PacketType.PROBE, b""): "",
        (PacketType.PROBE, QUESTION.pack(1)): ", more to come",
        (PacketType.STOP, b""): ", all arrived",
        (PacketType.STOP, b"\xff"): "",
    }
    rows = shown([packet(*each) for each in told], tmp_path, "_ws.col.Info")
    assert [row[0].partition("class 0")[2] for row in rows] == list(told.values())


BEFORE_DLCP = 14 + 20 + 8
"""Bytes of Ethernet, IPv4 and UDP."""


def cut(file, most):
    """A capture as tcpdump would have taken it with ``--snapshot-length=most``."""
    kept, at = [file[:24]], 24
    while at < len(file):
        *stamp, captured, length = struct.unpack_from("<IIII", file, at)
        kept += [
            struct.pack("<IIII", *stamp, min(captured, most), length),
            file[at + 16 : at + 16 + min(captured, most)],
        ]
        at += 16 + captured
    return b"".join(kept)


@needs_tshark
@pytest.mark.parametrize("most", [1, 2, 5, 17, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 6])
def test_a_capture_that_was_cut_is_marked_and_what_is_there_is_shown(tmp_path, most):
    greeting = Header(PacketType.HELLO, 0, 7, 0, 0, 3, 0, 0, 0, 5, 0, 0, 9).encode() + GREETING.pack(1400, 512)
    acks = Header(PacketType.ACK, 0, 7, 0, 0, 3, 0, 120, 0, 5, 400, 17, 9).encode() + ACK_ENTRY.pack(7, 2, 0, 1) * 2
    stop = Header(PacketType.STOP, 0, 7, 0, 0, 1, 0, 2, 3, 4, 5, 6, 9).encode() + b"\1" * 9
    probe = Header(PacketType.PROBE, 0, 7, 0, 0, 1, 0, 2, 3, 4, 5, 6, 9).encode() + QUESTION.pack(1)
    made = [*packets(), *(Golden(UDP_PORT_BASE, datagram, True) for datagram in (greeting, acks, stop, probe))]
    path = tmp_path / "cut.pcap"
    path.write_bytes(cut(capture(made), BEFORE_DLCP + most))
    columns = ["_ws.expert.message", "_ws.col.Info", *(f"dlcp.{name}" for name in FIELD_BITS)]
    command = [TSHARK, "-r", str(path), "-X", f"lua_script:{DISSECTOR_PATH}", "-T", "fields", "-E", "separator=;"]
    command += [f"-e{column}" for column in columns]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "Lua" not in done.stdout + done.stderr
    for row, packet in zip(done.stdout.splitlines(), made, strict=True):
        expert, info, *fields = row.split(";")
        if not UDP_PORT_BASE <= packet.port < UDP_PORT_BASE + UDP_PORT_COUNT:
            continue
        assert ("[truncated]" in expert) == (len(packet.datagram) > most), row
        if not packet.valid:
            continue
        assert info.endswith("[truncated]") == (len(packet.datagram) > most)
        assert "all arrived" not in info or len(packet.datagram) == HEADER_BYTES
        first_bit, right = 0, split(packet.datagram)
        for (name, bits), text in zip(FIELD_BITS.items(), fields, strict=True):
            first_bit += bits
            assert (number(text) if text else None) == (right[name] if first_bit <= 8 * most else None), name
