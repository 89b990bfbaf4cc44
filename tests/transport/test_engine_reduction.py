# SPDX-License-Identifier: Apache-2.0
"""Sums that are formed while packets arrive: bit by bit what NumPy adds up in the stated order, whatever comes when."""

import numpy as np
import pytest

from dlcp.transport import RELIABLE, EncodedReduction, MessageKey, ReceiveRequest, StreamingReduction
from dlcp.values.planes import CODED_BITS, PlaneLayout
from dlcp.values.tags import BLOCK_PACKETS, ChunkOrder
from tests.native.tagging_oracle import send_order
from tests.transport.bare_engine import SIZE, BareEngine

PER_PACKET = SIZE // 4


def shares_of(members, count, seed):
    """Own values and those of the others, of very different size, so that the order of addition shows."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-3, 4, (members + 1, count))
    return (rng.standard_normal((members + 1, count)) * scales).astype(np.float32)


def order_of(packet, packets, members, first_block):
    """The others in the order in which they are added: region by region another one begins."""
    if first_block is None:
        return range(members)
    blocks = -(-packets // BLOCK_PACKETS)
    region = (packet // BLOCK_PACKETS - first_block) % blocks * members // blocks
    return sorted(range(members), key=lambda position: (position + region) % members)


def expected_sum(shares, arrived, *, rescale, divisor=None, first_block=None):
    """The average, by packets: own values first, then the others in their order."""
    ranks = len(shares)
    divisor = np.float32(divisor or ranks)
    total = shares[0].copy()
    packets = -(-len(total) // PER_PACKET)
    for packet in range(packets):
        part = slice(packet * PER_PACKET, (packet + 1) * PER_PACKET)
        order = order_of(packet, packets, ranks - 1, first_block)
        here = [shares[position + 1][part] for position in order if arrived[position][packet]]
        for share in here:
            total[part] += share
        missing = len(here) < ranks - 1
        total[part] /= np.float32(1 + len(here)) if rescale and missing else divisor
    return total


class Folding:
    """A sum of rank 0's values and those of ``members`` others."""

    def __init__(self, shares, *, divisor=None, first_block=None):
        self.shares, self.members, self.count = shares, len(shares) - 1, shares.shape[1]
        self.packets = -(-self.count // PER_PACKET)
        self.bare = BareEngine(peers=range(1, self.members + 1))
        self.values = shares[0].copy()
        self.in_turns = first_block is not None
        self.fold = StreamingReduction(
            self.values, PER_PACKET, self.members, divisor or self.members + 1, first_block if self.in_turns else -1
        )
        self.copy = np.full_like(self.values, np.nan)
        self.fold.copy_into(self.copy)
        self.rooms = {}

    def key(self, position):
        return MessageKey(0, position)

    def expect(self, position):
        """Post the receive of a contribution, some of which may have arrived."""
        room = np.full(self.count * 4, 0xEE, np.uint8) if self.fold.needs_buffer(position) else None
        self.rooms[position] = room
        key, size = self.key(position), self.count * 4
        request = ReceiveRequest(position + 1, key, size, RELIABLE, "layer", reduction=self.fold, position=position)
        self.bare.engine.receive(request, self.packets, room, RELIABLE, 0.0)
        self.bare.drain()

    def take(self, position, packet):
        payload = self.shares[position + 1][packet * PER_PACKET : (packet + 1) * PER_PACKET].tobytes()
        self.bare.take_data(packet, self.packets, payload, key=self.key(position), rank=position + 1)

    def finish(self, rescale):
        self.bare.engine.stop()
        return self.fold.finish(rescale)


def run(shares, seed, *, loss, rescale, early, duplicate=0.1, divisor=None, first_block=None):
    """Let packets arrive in a random order, some of them before their receive is posted; return the result."""
    rng = np.random.default_rng(seed)
    folding = Folding(shares, divisor=divisor, first_block=first_block)
    members, packets = folding.members, folding.packets
    arrived = rng.random((members, packets)) >= loss
    early = rng.random(members) < early
    for position in np.flatnonzero(~early).tolist():
        folding.expect(position)
    joins = rng.permutation(np.flatnonzero(early)).tolist()
    order = rng.permutation(np.argwhere(arrived)).tolist()
    joined_at = sorted(rng.integers(0, len(order) + 1, len(joins)).tolist())
    for number in range(len(order) + 1):
        while joined_at and joined_at[0] == number:
            folding.expect(joins.pop())
            del joined_at[0]
        if number < len(order):
            folding.take(*order[number])
            if rng.random() < duplicate:
                folding.take(*order[rng.integers(0, number + 1)])
    included = [folding.fold.included(position) for position in range(members)]
    partial = folding.values.copy()
    complete = np.repeat(arrived.all(0), PER_PACKET)[: folding.count]
    assert folding.copy[complete].tobytes() == partial[complete].tobytes(), "complete averages are there twice"
    assert np.isnan(folding.copy[~complete]).all()
    incomplete = folding.finish(rescale)
    return folding.values, incomplete, arrived, included, partial


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_sums_are_those_of_numpy_in_the_stated_order(ranks, loss, rescale):
    for seed, count in enumerate((1, PER_PACKET, PER_PACKET * 5 - 1, PER_PACKET * 13 + 7, PER_PACKET * 70)):
        shares = shares_of(ranks - 1, count, seed)
        values, incomplete, arrived, _, _ = run(shares, seed, loss=loss, rescale=rescale, early=0.4)
        assert values.tobytes() == expected_sum(shares, arrived, rescale=rescale).tobytes()
        assert incomplete == np.count_nonzero(~arrived.all(0))


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_in_each_region_another_member_is_the_first(members, loss):
    for first_block, packets in ((0, 100), (1, BLOCK_PACKETS * 2), (4, BLOCK_PACKETS * 4 + 77)):
        shares = shares_of(members, PER_PACKET * packets - 3, packets)
        told = {"rescale": True, "first_block": first_block}
        values, incomplete, arrived, included, _ = run(shares, packets, loss=loss, early=0.4, **told)
        assert values.tobytes() == expected_sum(shares, arrived, **told).tobytes()
        assert incomplete == np.count_nonzero(~arrived.all(0))
        for packet in range(packets):
            order = order_of(packet, packets, members, first_block)
            there = [bool(arrived[position][packet]) for position in order]
            count = there.index(False) if False in there else members
            assert [bool(included[position][packet]) for position in order] == [k < count for k in range(members)]


@pytest.mark.parametrize("members", [2, 3, 6])
def test_nothing_waits_where_members_take_turns(members):
    packets, seed = BLOCK_PACKETS * 6, 40
    shares = shares_of(members, PER_PACKET * packets, members)
    folding = Folding(shares, first_block=seed % 6)
    orders = []
    for position in range(members):
        folding.expect(position)
        turn = ChunkOrder(-position % members, members)
        orders.append(send_order(np.zeros(packets, np.uint8), np.zeros(packets, bool), seed, turn).tolist())
    for sent_together in zip(*orders, strict=True):
        assert len(set(sent_together)) == members
        for position, packet in enumerate(sent_together):
            folding.take(position, packet)
    assert all((room == 0xEE).all() for room in folding.rooms.values())
    assert folding.finish(True) == 0
    arrived = np.ones((members, packets), bool)
    assert folding.values.tobytes() == expected_sum(shares, arrived, rescale=True, first_block=seed % 6).tobytes()


@pytest.mark.parametrize("divisor", [1, 2, 3, 10])
def test_a_sum_may_be_divided_by_anything(divisor):
    shares = shares_of(3, PER_PACKET * 9 + 1, divisor)
    values, _, arrived, _, _ = run(shares, 1, loss=0.0, rescale=False, early=0.4, divisor=divisor)
    assert values.tobytes() == expected_sum(shares, arrived, rescale=False, divisor=divisor).tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_included_is_exactly_what_the_partial_sum_holds(seed):
    shares = shares_of(4, PER_PACKET * 20 + 3, seed)
    *_, arrived, included, partial = run(shares, seed, loss=0.3, rescale=True, early=0.4)
    for packet in range(21):
        part = slice(packet * PER_PACKET, (packet + 1) * PER_PACKET)
        total = shares[0][part].copy()
        inside = [position for position in range(4) if included[position][packet]]
        for position in inside:
            assert arrived[position][packet]
            total += shares[position + 1][part]
        assert inside == list(range(len(inside))), "in the order of positions, without gaps"
        first_missing = next((p for p in range(4) if not arrived[p][packet]), 4)
        assert len(inside) == first_missing, "whatever can be added has been"
        if len(inside) == 4:
            total /= np.float32(5)
        assert partial[part].tobytes() == total.tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_sums_of_infinity_and_of_the_largest_numbers_are_those_of_numpy(seed):
    rng = np.random.default_rng(seed)
    members, count = int(rng.integers(1, 6)), int(rng.integers(1, 900))
    shares = shares_of(members, count, seed)
    shares.flat[:: 37 + seed] = np.inf
    shares.flat[5 :: 91 + seed] = 3e38
    how = {"rescale": bool(seed % 2), "first_block": (None, 0, 1)[seed % 3]}
    values, _, arrived, _, _ = run(shares, seed, loss=rng.random() * 0.5, early=0.5, **how)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(values, expected_sum(shares, arrived, **how))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_where_contributions_are_missing(value):
    # A loss scaler has to see it.
    shares = np.ones((3, PER_PACKET), np.float32)
    shares[0, 7] = value
    folding = Folding(shares)
    for position in (0, 1):
        folding.expect(position)
    folding.take(0, 0)
    assert folding.finish(True) == 1
    assert not np.isfinite(folding.values[7])
    np.testing.assert_array_equal(np.delete(folding.values, 7), 1)


def test_nothing_of_a_message_that_is_lost_altogether_is_needed():
    shares = shares_of(3, 50, 1)
    folding = Folding(shares)
    for position in (0, 2):
        folding.expect(position)
        for packet in range(folding.packets):
            folding.take(position, packet)
    assert folding.finish(True) == folding.packets
    np.testing.assert_array_equal(folding.values, ((shares[0] + shares[1]) + shares[3]) / np.float32(3))


def test_what_has_been_summed_stands_after_the_messages_are_gone():
    # After a failure the endpoint lets go of its messages; what is in the sum is asked for afterwards.
    shares = shares_of(2, PER_PACKET * 3, 2)
    folding = Folding(shares)
    for position in (0, 1):
        folding.expect(position)
    for position, packet in ((0, 0), (0, 2), (1, 2), (1, 1)):
        folding.take(position, packet)
    folding.bare.engine.stop()
    assert folding.fold.included(0).tolist() == [True, False, True]
    assert folding.fold.included(1).tolist() == [False, False, True]


@pytest.mark.parametrize(
    "values",
    [np.zeros(10), np.zeros(20, np.float32)[::2], np.frombuffer(bytes(40), np.float32)],
    ids=["double", "strided", "constant"],
)
def test_sums_are_formed_in_writable_contiguous_float32_only(values):
    with pytest.raises(ValueError, match="contiguous, writable float32"):
        StreamingReduction(values, PER_PACKET, 1, 2)


# Encoded contributions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", CODED_BITS)
@pytest.mark.parametrize("members", [0, 1, 3])
def test_encoded_contributions_are_combined_whatever_comes_when(members, bits):
    """With a tail, duplicates, early packets, and packets of the lower plane that never come."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        shares = rng.standard_normal((members + 1, (1, 700, 5003)[seed % 3])).astype(np.float32)
        layout = PlaneLayout(shares.shape[1], bits, SIZE)
        tail_bytes, packets = 200, -(-(layout.bytes + 200) // SIZE)
        codes = np.zeros((members, layout.bytes + tail_bytes), np.uint8)
        for code, share in zip(codes, shares[1:], strict=True):
            layout.encode(share, code[: layout.bytes])
            code[layout.bytes :] = rng.integers(0, 256, tail_bytes)
        arrived = np.ones((members, packets), np.bool_)
        lower = arrived[:, layout.packets : layout.planes * layout.packets]
        lower[:] = rng.random(lower.shape) >= 0.3
        bare, values = BareEngine(peers=range(1, members + 1)), shares[0].copy()
        sent, rest = np.full(layout.bytes, 9, np.uint8), np.full_like(values, np.nan)
        how = {"has_own": True, "factor": 0.5, "code": sent, "rest": rest, "weight": 2.0}
        total = EncodedReduction(layout, values, members, **how)
        tails, rooms = np.zeros((members, tail_bytes), np.uint8), np.zeros((members, layout.bytes), np.uint8)
        order = rng.permutation(np.argwhere(arrived)).tolist()
        posted_at = rng.integers(0, len(order) + 1, members).tolist()
        for number in range(len(order) + 1):
            for position in (k for k in range(members) if posted_at[k] == number):
                key, tail = MessageKey(0, position), tails[position]
                request = ReceiveRequest(
                    position + 1, key, codes.shape[1], RELIABLE, "layer", tail=tail, reduction=total, position=position
                )
                assert request.checked_into() is None
                bare.engine.receive(request, packets, rooms[position], RELIABLE, 0.0)
                bare.drain()
            for position, packet in order[number : number + 1] + order[: number : number + 1]:
                payload = codes[position][packet * SIZE : (packet + 1) * SIZE].tobytes()
                bare.take_data(packet, packets, payload, key=MessageKey(0, position), rank=position + 1)
        bare.engine.stop()
        total.finish()
        expected = shares[0].copy()
        for code, delivered in zip(codes, arrived, strict=True):
            layout.add(code[: layout.bytes].copy(), expected, delivered[: layout.planes * layout.packets].copy())
        expected *= np.float32(0.5)
        code, lacks = np.zeros(layout.bytes, np.uint8), np.empty_like(expected)
        layout.round(expected, code, lacks, 2.0)
        assert (values.tobytes(), sent.tobytes(), rest.tobytes()) == (
            expected.tobytes(),
            code.tobytes(),
            lacks.tobytes(),
        )
        for tail, code, delivered in zip(tails, codes, arrived, strict=True):
            assert not delivered.all() or tail.tobytes() == code[layout.bytes :].tobytes()


def test_only_encoded_contributions_have_a_tail():
    total = StreamingReduction(np.zeros(10, np.float32), PER_PACKET, 1, 2)
    request = ReceiveRequest(1, MessageKey(0, 0), 48, RELIABLE, "layer", tail=np.zeros(8, np.uint8), reduction=total)
    with pytest.raises(ValueError, match="second destination"):
        request.checked_into()
