# SPDX-License-Identifier: Apache-2.0
"""A path that becomes too narrow during training, without an ICMP message: packets cross it in pieces."""

import random

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import LossBound, MessageKey
from dlcp.transport.path_mtu import WIDER_AFTER_S
from dlcp.wire import Flag, PacketType
from tests.transport.bare_engine import KEY, SIZE, BareEngine, tags_of
from tests.transport.exchanges import datagram, deliver, exchange, payload_of, send
from tests.transport.network import Network

WHOLE = wire.HEADER_BYTES + 1440
QUICKLY_S = 3.0
"""Some probe timeouts of the slowest of these paths, and half a second of probing."""


class NarrowingNetwork(Network):
    """Drops packets of more than ``widest`` bytes, on the way to any rank or only to rank ``to``."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.widest, self.to = 1 << 16, None

    def send(self, source, target, datagram, tos):
        if len(datagram) > self.widest and self.to in (None, target):
            self.dropped["narrow"] += 1
            return True
        return super().send(source, target, datagram, tos)

    def seconds_of(self, size, step, **options):
        """Let rank 0 send rank 1 a message; return the virtual seconds that it takes."""
        began_s = self.now
        exchange(self, size, key=MessageKey(step, 1), seed=step, limit_s=30.0, **options)
        return self.now - began_s

    def largest_since(self, when_s):
        return max(len(data) for now_s, _, _, data in self.arrived if now_s > when_s)


@pytest.mark.parametrize("delay_s", [0.00005, 0.01, 0.05])
@pytest.mark.parametrize("packets", [2, 40, 3000])
@pytest.mark.parametrize("to", [None, 1])
def test_a_message_crosses_a_path_that_has_become_narrow(caplog, delay_s, packets, to):
    network = NarrowingNetwork(2, delay_s=delay_s)
    network.seconds_of(200_000, 1)
    network.widest, network.to = 1250, to
    before = network.seconds_of(1440 * packets - 100, 2)
    # Windows have shrunk meanwhile, and grow in some round trips.
    unhurried_s = 30 * 2 * delay_s + 4 * packets * 8 * 1500 / 100e6
    assert before < QUICKLY_S + unhurried_s
    said = [record.getMessage() for record in caplog.records if "no longer arrive" in record.getMessage()]
    assert said
    for message in said:
        assert "job 1, rank 1: " in message or to is None
        assert "packets of 1440 bytes no longer arrive, but those of 1216 do" in message
        assert "shrunk to at most 1395" in message
    assert network.seconds_of(1440 * packets - 100, 3) < 0.2 + unhurried_s, "the next message is not delayed"


def test_large_answers_cross_a_path_that_is_narrow_only_for_them(caplog):
    network = NarrowingNetwork(2, loss=0.05, seed=3)
    network.widest, network.to = 100, 0
    for step in range(1, 3):
        assert network.seconds_of(1440 * 3000, step, bound=LossBound(0.1)) < 2 * QUICKLY_S
    assert [record.getMessage()[:14] for record in caplog.records] == ["job 1, rank 0:"], "the other direction is wide"


def test_two_ranks_that_probe_each_other_come_to_an_end():
    network = NarrowingNetwork(2)
    network.ranks[0].engine.send_control(1, PacketType.HELLO, bytes(1440), 1440)
    end_s = network.now + WIDER_AFTER_S / 2
    network.run(lambda: network.now > end_s)
    assert len(network.sent) < 20, "each direction has been tried once, and is wide"


def test_packets_leave_whole_again_once_they_pass(caplog):
    network = NarrowingNetwork(2)
    network.widest = 800
    network.seconds_of(100_000, 1)
    narrow_s = network.now
    network.seconds_of(100_000, 2)
    assert network.largest_since(narrow_s) <= 800
    network.widest = 1 << 16
    wide_s = network.now + WIDER_AFTER_S + 1
    network.run(lambda: network.now > wide_s)
    network.seconds_of(100_000, 3)
    assert network.largest_since(wide_s) == WHOLE
    assert not any(data[1] & Flag.PIECE for now_s, _, _, data in network.arrived if now_s > wide_s)
    assert "packets of 1440 bytes arrive again" in caplog.text


def test_a_path_that_becomes_narrower_still_is_crossed_too():
    network = NarrowingNetwork(2)
    for step, widest in enumerate((1400, 700, 100), 1):
        network.widest = widest
        assert network.seconds_of(50_000, step) < 2 * QUICKLY_S


def test_a_path_that_is_only_bad_carries_no_pieces(caplog):
    network = NarrowingNetwork(2, loss=0.5, seed=5)
    for step in range(1, 6):
        network.seconds_of(50_000, step)
    assert not any(data[1] & Flag.PIECE for _, _, _, data in network.sent)
    assert "no longer arrive" not in caplog.text


def test_a_peer_that_is_gone_is_not_taken_for_a_narrow_path(caplog):
    network = NarrowingNetwork(2)
    network.seconds_of(50_000, 1)
    network.dead.add(1)
    send(network, payload_of(50_000), key=MessageKey(2, 1))
    end_s = network.now + 4
    network.run(lambda: network.now > end_s)
    probes = [data for _, _, _, data in network.sent if wire.decode(data).type is PacketType.HELLO and data[19]]
    assert probes == []
    assert "no longer arrive" not in caplog.text


def test_bounds_hold_in_pieces(caplog):
    network = NarrowingNetwork(2, loss=0.05, seed=2)
    network.widest = 600
    for step in range(1, 4):
        network.seconds_of(200_000, step, bound=LossBound(0.1))
    assert "no longer arrive" in caplog.text


def test_probes_of_the_path_are_answered_and_those_from_before_the_start_are_not():
    network = Network(2)
    protocol = network.ranks[1]
    deliver(protocol, datagram(PacketType.HELLO, index=1216, count=1216, payload=bytes(1216)))
    network.run(lambda: network.now > 0.1)
    answer, *others = [wire.decode(data) for _, _, target, data in network.arrived if target == 0]
    assert PacketType.HELLO in {each.type for each in others}, "it tries its own direction, too"
    assert (answer.type, answer.index, answer.count) == (PacketType.HELLO_ACK, 1216, 1216)
    deliver(protocol, datagram(PacketType.HELLO_ACK, index=1216, count=1216))  # nobody has asked
    deliver(protocol, datagram(PacketType.HELLO, index=1216, count=1216, payload=bytes(1200)))
    deliver(protocol, datagram(PacketType.HELLO_ACK, index=1216, count=1216, payload=b"1"))
    assert dict(protocol.refused) == {"stale": 1, "malformed": 2}
    assert protocol.engine.flows[0].piece_bytes == 0


# Pieces ---------------------------------------------------------------------------------------------------------------


def pieces_of(packets, piece_bytes, seed=0, flags=0):
    """The pieces that an engine sends of a message, and its bytes."""
    bare = BareEngine()
    bare.flow.piece_bytes = piece_bytes
    _, whole = bare.send(tags_of([4] * packets), seed=seed, short_by=7)
    bare.pump_all()
    return [data for _, data, _ in bare.sent], whole


@pytest.mark.parametrize("piece_bytes", [16, 40, 64, 88])
def test_pieces_are_no_larger_than_allowed_and_say_what_they_belong_to(piece_bytes):
    pieces, whole = pieces_of(3, piece_bytes)
    got = bytearray(len(whole))
    for data in pieces:
        header, body = wire.decode(data), data[wire.HEADER_BYTES :]
        assert len(body) <= piece_bytes
        assert header.type is PacketType.DATA
        assert header.flags == Flag.PIECE | Flag.PROTECTED, "no switch may drop a part of a packet"
        offset, total = int.from_bytes(body[2:4], "big"), int.from_bytes(body[4:6], "big")
        assert (body[0], total) == (0, SIZE if header.index < 2 else SIZE - 7)
        start = header.index * SIZE + offset
        got[start : start + len(body) - 6] = body[6:]
    assert bytes(got) == whole.tobytes()


def test_pieces_join_in_any_order_from_any_transmission():
    rng = random.Random(4)
    first, whole = pieces_of(20, 40)
    again, _ = pieces_of(20, 64)  # meanwhile the path has become wider
    again = [data[:1] + bytes([data[1] | Flag.RETRANSMISSION]) + data[2:32] + b"\x40" + data[33:] for data in again]
    bare = BareEngine()
    message, buffer, _ = bare.expect(len(whole))
    arriving = [data for data in first if rng.random() < 0.7] + again
    arriving += [arriving[3], arriving[-1]]  # twice
    by_packet = sorted(arriving, key=lambda data: (wire.decode(data).index // 10, rng.random()))
    for data in by_packet:
        bare.engine.take_in(memoryview(as_of_peer(data)), 0, ("10.0.0.1", 53696), 0.0)
    bare.drain()
    assert message.done
    assert buffer.tobytes() == whole.tobytes()
    assert not any(name.startswith("refused") for name in bare.engine.counters())


def as_of_peer(data):
    """The packet as rank 1 would have sent it."""
    return data[:14] + (1).to_bytes(2, "big") + data[16:]


@pytest.mark.parametrize(
    "change",
    [
        lambda head, body: (head, body[:6]),  # no bytes
        lambda head, body: (head, body[:3]),
        lambda head, body: (head, b""),
        lambda head, body: (head, body[:2] + b"\0\4" + body[4:]),  # no multiple of 8
        lambda head, body: (head, body[:2] + b"\0\x60" + body[4:]),  # behind the end
        lambda head, body: (head, body[:4] + b"\xff\xff" + body[6:]),  # larger than a packet
        lambda head, body: (head, body[:4] + b"\0\0" + body[6:]),
        lambda head, body: (head, body[:-1]),  # not the last, and no multiple of 8
        lambda head, body: (head, body + bytes(SIZE)),
        lambda head, body: (head, b"\x08" + body[1:]),  # a piece of a piece
        lambda head, body: (head[:1] + b"\x08" + head[2:], body),  # unprotected
        lambda head, body: (head, b"\x20" + body[1:]),  # other flags than the header's
    ],
)
def test_a_piece_that_is_wrong_is_refused_and_changes_nothing(change):
    pieces, whole = pieces_of(1, 40)
    data = as_of_peer(pieces[0])
    head, body = change(data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :])
    bare = BareEngine()
    message, buffer, _ = bare.expect(len(whole))
    bare.engine.take_in(memoryview(head + body), 0, ("10.0.0.1", 53696), 0.0)
    assert bare.engine.counters() == {"refused_malformed": 1}
    for piece in pieces:
        bare.engine.take_in(memoryview(as_of_peer(piece)), 0, ("10.0.0.1", 53696), 0.0)
    bare.drain()
    assert message.done
    assert buffer.tobytes() == whole.tobytes()


def test_incomplete_packets_take_no_more_memory_and_no_place_for_ever():
    whole = np.zeros(0, np.uint8)
    bare = BareEngine()
    for number in range(200):  # of each only the first piece
        pieces, _ = pieces_of(1, 40, seed=number)
        lone = bytearray(as_of_peer(pieces[0]))
        lone[12:14] = number.to_bytes(2, "big")
        bare.engine.take_in(memoryview(lone), 0, ("10.0.0.1", 53696), 0.0)
    pieces, whole = pieces_of(1, 40)
    message, buffer, _ = bare.expect(len(whole), key=KEY)
    for piece in pieces:
        bare.engine.take_in(memoryview(as_of_peer(piece)), 0, ("10.0.0.1", 53696), 0.0)
    bare.drain()
    assert message.done
    assert buffer.tobytes() == whole.tobytes()
