# SPDX-License-Identifier: Apache-2.0
from random import Random

import pytest

from dlcp.wire import FIELD_BITS, HEADER_BYTES, UDP_PORT_BASE, UDP_PORT_COUNT, VERSION, PacketType, decode
from tests.wire.golden import GOLDEN_PATH, OTHER_FRAMES, frame, packets
from tests.wire.wirebits import join, random_fields, split

pytest.importorskip("scapy", reason="Scapy is not installed")

from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw
from scapy.utils import rdpcap

from dlcp.wire.scapy import DLCP


def test_fields_are_those_of_the_wire():
    assert {field.name: field.size for field in DLCP.fields_desc} == FIELD_BITS
    assert [field.name for field in DLCP.fields_desc] == list(FIELD_BITS)


@pytest.mark.parametrize("seed", range(40))
def test_building_and_reading_equal_the_wire(seed):
    values = random_fields(Random(seed))
    assert bytes(DLCP(**values)) == join(values)
    layer = DLCP(join(values) + b"payload")
    assert {name: layer.getfieldval(name) for name in FIELD_BITS} == values
    assert bytes(layer.payload) == b"payload"
    header = decode(bytes(layer))
    assert (header.type, header.queue, header.token) == (values["type"], values["queue"], values["token"])


def test_defaults_are_a_valid_data_header():
    header = decode(bytes(DLCP()))
    assert (header.type, header.step, header.token) == (PacketType.DATA, 0, 0)
    assert (IP() / UDP() / DLCP())[UDP].dport == UDP_PORT_BASE


def test_types_are_shown_by_name():
    for kind in PacketType:
        layer = DLCP(type=kind.name)
        assert bytes(layer)[0] == VERSION << 4 | kind
        assert layer.summary().startswith(f"DLCP {kind.name} job")


def test_every_dlcp_port_is_bound_and_no_other():
    for port in range(UDP_PORT_BASE - 1, UDP_PORT_BASE + UDP_PORT_COUNT + 1):
        bound = UDP_PORT_BASE <= port < UDP_PORT_BASE + UDP_PORT_COUNT
        assert (DLCP in UDP(bytes(UDP(sport=49152, dport=port) / Raw(bytes(DLCP()))))) == bound


def test_the_golden_capture_is_read_as_it_was_made():
    frames, made = rdpcap(str(GOLDEN_PATH)), list(packets())
    assert len(frames) == len(made)
    for read, packet in zip(frames, made, strict=True):
        assert bytes(read) == frame(packet)
        if not packet.valid:
            assert DLCP not in read or split(packet.datagram)["type"] not in set(PacketType)
            continue
        assert {name: read[DLCP].getfieldval(name) for name in FIELD_BITS} == split(packet.datagram)
        assert bytes(read[DLCP].payload) == packet.datagram[HEADER_BYTES:]


@pytest.mark.parametrize(("family", "tags"), OTHER_FRAMES.values(), ids=OTHER_FRAMES)
def test_packets_are_found_behind_any_header(family, tags):
    packet = next(packets())
    read = Ether(frame(packet, family, tags))
    assert {name: read[DLCP].getfieldval(name) for name in FIELD_BITS} == split(packet.datagram)
    del read[UDP].chksum
    assert bytes(read) == frame(packet, family, tags)


def test_the_checksums_of_the_golden_capture_are_right():
    for packet in packets():
        rebuilt = Ether(frame(packet))
        del rebuilt[IP].chksum
        del rebuilt[UDP].chksum
        assert bytes(rebuilt) == frame(packet)
