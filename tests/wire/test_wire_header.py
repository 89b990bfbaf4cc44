# SPDX-License-Identifier: Apache-2.0
import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcp.wire import (
    FIELD_BITS,
    HEADER,
    HEADER_BYTES,
    UDP_PORT_BASE,
    UDP_PORT_COUNT,
    VERSION,
    Flag,
    Header,
    HeaderError,
    PacketType,
    Queue,
    decode,
    drop_class_of,
    dscp,
    pack,
    queue_of,
    unpack,
)
from tests.wire.wirebits import HEADER_BITS, join, random_fields, split

WIDE_FIELDS = ("layer", "job", "budget", "step", "message", "sender", "index", "count", "token")


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, (1 << bits) - 1)


HEADERS = st.builds(
    Header,
    type=st.sampled_from(PacketType),
    flags=unsigned(8),
    queue=unsigned(3),
    drop_class=unsigned(3),
    **{name: unsigned(FIELD_BITS[name]) for name in WIDE_FIELDS},
)


def bit_values(header: Header) -> dict[str, int]:
    """A header by the field table: its flags one by one, spare bits 0."""
    flags = {
        "protected": Flag.PROTECTED,
        "retransmission": Flag.RETRANSMISSION,
        "trimmed": Flag.TRIMMED,
        "congestion": Flag.CONGESTION,
    }
    values = {name: int(header.flags & flag != 0) for name, flag in flags.items()}
    values |= {"version": VERSION, "type": int(header.type), "flags_spare": header.flags & 15}
    return values | {name: getattr(header, name) for name in ("queue", "drop_class", *WIDE_FIELDS)}


def burst(headers: list[Header]) -> np.ndarray:
    columns = {name: [getattr(header, name) for header in headers] for name in Header._fields if name != "type"}
    columns["token"] = np.array(columns["token"], np.uint64)
    records = pack(len(headers), packet_type=PacketType.DATA, **columns)
    records["kind"] = [VERSION << 4 | header.type for header in headers]
    return records


def test_the_table_is_32_bytes_of_known_layout():
    assert sum(FIELD_BITS.values()) == HEADER_BITS == 8 * HEADER.itemsize == 8 * 32
    ends = np.cumsum(list(FIELD_BITS.values()))
    starts = dict(zip(FIELD_BITS, [0, *ends[:-1]], strict=True))
    documented = {
        "version": 0,
        "type": 4,
        "protected": 8,
        "retransmission": 9,
        "trimmed": 10,
        "congestion": 11,
        "queue": 16,
        "drop_class": 19,
        "layer": 24,
        "job": 32,
        "budget": 48,
        "step": 64,
        "message": 96,
        "sender": 112,
        "index": 128,
        "count": 160,
        "token": 192,
    }
    assert {name: starts[name] for name in documented} == documented
    for name in WIDE_FIELDS:
        assert 8 * HEADER.fields[name][1] == starts[name], name
        assert 8 * HEADER.fields[name][0].itemsize == FIELD_BITS[name], name


def test_ports_are_one_aligned_block_of_the_dynamic_range():
    assert UDP_PORT_COUNT & (UDP_PORT_COUNT - 1) == 0
    assert UDP_PORT_BASE % UDP_PORT_COUNT == 0
    assert 49152 <= UDP_PORT_BASE <= 65536 - UDP_PORT_COUNT


@given(HEADERS)
def test_encode_writes_what_the_table_says_and_decode_reads_it(header):
    data = header.encode()
    assert data == join(bit_values(header))
    assert split(data) == bit_values(header) | {"spare": 0}
    for datagram in (data, bytearray(data + b"payload"), memoryview(data + b"payload")):
        assert decode(datagram) == header


@given(st.lists(HEADERS, max_size=8), st.integers(0, 40))
def test_a_burst_equals_its_headers_one_by_one(headers, payload_bytes):
    records = burst(headers)
    assert records.tobytes() == b"".join(header.encode() for header in headers)
    datagrams = np.full((len(headers), HEADER_BYTES + payload_bytes), 0xA5, np.uint8)
    datagrams[:, :HEADER_BYTES] = records.view("u1").reshape(-1, HEADER_BYTES)
    read, valid = unpack(datagrams)
    assert valid.all()
    assert np.array_equal(read, records)
    assert queue_of(read["tags"]).tolist() == [header.queue for header in headers]
    assert drop_class_of(read["tags"]).tolist() == [header.drop_class for header in headers]


@given(st.lists(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), min_size=1, max_size=8))
def test_unpack_and_decode_agree_on_any_bytes(rows):
    headers, valid = unpack(np.frombuffer(b"".join(rows), np.uint8).reshape(-1, HEADER_BYTES))
    for row, record, accepted in zip(rows, headers, valid, strict=True):
        fields = split(row)
        known = fields["version"] == VERSION and fields["type"] in set(PacketType)
        assert bool(accepted) == known
        if not known:
            with pytest.raises(HeaderError):
                decode(row)
            continue
        header = decode(row)
        assert {name: int(record[name]) for name in WIDE_FIELDS} == {name: fields[name] for name in WIDE_FIELDS}
        fields.pop("spare")
        assert bit_values(header) == fields


@given(st.binary(max_size=HEADER_BYTES - 1))
def test_too_few_bytes_are_refused(data):
    with pytest.raises(HeaderError, match=f"{len(data)} bytes are too few for a header of 32"):
        decode(data)
    with pytest.raises(HeaderError, match="shape"):
        unpack(np.frombuffer(data, np.uint8).reshape(1, -1))
    with pytest.raises(HeaderError, match="shape"):
        unpack(np.zeros(64, np.uint8))


@pytest.mark.parametrize("version", [v for v in range(16) if v != VERSION])
def test_other_versions_are_refused_by_number(version):
    data = join({"version": version, "type": 1})
    with pytest.raises(HeaderError, match=rf"version {version}, expected {VERSION}"):
        decode(data)
    assert not unpack(np.frombuffer(data, np.uint8)[None])[1][0]


@pytest.mark.parametrize("kind", sorted(set(range(16)) - set(PacketType)))
def test_unknown_types_are_refused_by_number(kind):
    data = join({"version": VERSION, "type": kind})
    with pytest.raises(HeaderError, match=f"unknown packet type {kind}"):
        decode(data)
    assert not unpack(np.frombuffer(data, np.uint8)[None])[1][0]


@pytest.mark.parametrize(("queue", "drop_class"), [(8, 0), (-1, 0), (0, 8), (0, -1)])
def test_tags_out_of_range_are_refused(queue, drop_class):
    header = decode(join({"version": VERSION, "type": 1}))._replace(queue=queue, drop_class=drop_class)
    with pytest.raises(HeaderError, match=r"0\.\.7"):
        header.encode()
    with pytest.raises(HeaderError, match=r"0\.\.7"):
        pack(3, packet_type=PacketType.DATA, queue=queue, drop_class=[0, drop_class, 0])


@pytest.mark.parametrize("name", WIDE_FIELDS)
def test_encode_refuses_values_that_do_not_fit(name):
    header = decode(join({"version": VERSION, "type": 1}))
    for value in (-1, 1 << FIELD_BITS[name]):
        with pytest.raises(struct.error):
            header._replace(**{name: value}).encode()


def test_spare_bits_are_ignored():
    rng = Random(7)
    for _ in range(50):
        fields = random_fields(rng)
        quiet = decode(join(fields | {"spare": 0}))
        assert decode(join(fields)) == quiet


def test_dscp_lies_in_the_local_use_pool_and_tells_queues_apart():
    points = {dscp(queue, droppable) for queue in range(8) for droppable in (False, True)}
    assert len(points) == 16
    assert all(point & 3 == 3 and 0 <= point < 64 for point in points)


def test_gradients_and_control_have_queues_of_their_own():
    gradients = range(Queue.FIRST_GRADIENT, Queue.LAST_GRADIENT + 1)
    assert Queue.EXCESS < Queue.ORDINARY < gradients[0]
    assert gradients[-1] < Queue.CONTROL == 7
