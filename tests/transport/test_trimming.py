# SPDX-License-Identifier: Apache-2.0
"""Packets that a switch has cut to their headers: both ends know at once what is lost, and nothing else changes."""

from itertools import chain
from statistics import median

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import LossBound, MessageKey
from dlcp.wire import ACK_TRIMMED, Flag, PacketType, Queue
from tests.transport.bare_engine import KEY, SIZE, BareEngine, tags_of
from tests.transport.network import Network, all_done, packets_of, plain_tags
from tests.transport.test_exchange import receive, send

FOREIGN_TOS = 0b001010 << 2
"""A DSCP that switches of other vendors may give to what they trim."""


def trim(bare, index, count, *, flags=Flag.TRIMMED, **fields):
    bare.take(PacketType.DATA, index=index, count=count, flags=flags, **fields)


# Receiving ------------------------------------------------------------------------------------------------------------


def test_a_message_is_complete_once_each_packet_has_come_or_been_trimmed():
    bare = BareEngine()
    message, *_ = bare.expect(10 * SIZE, ratio=0.2)
    for index in range(8):
        bare.take_data(index, 10, protected=index == 0)
    trim(bare, 8, 10)
    assert message.done is None
    trim(bare, 8, 10)
    assert message.done is None
    trim(bare, 9, 10)
    assert message.done.delivered.tolist() == 8 * [True] + 2 * [False]
    assert bare.engine.counters() | {"acknowledgements": 1} == {"data": 8, "trimmed": 3, "acknowledgements": 1}
    assert wire.decode(bare.sent[-1][1]).type is PacketType.STOP


def test_beyond_the_bound_the_rest_is_awaited():
    bare = BareEngine()
    message, *_ = bare.expect(10 * SIZE, ratio=0.1)
    for index in (8, 9):
        trim(bare, index, 10)
    for index in range(8):
        bare.take_data(index, 10)
    assert message.done is None
    bare.take(PacketType.DATA, bytes(SIZE), index=9, count=10, flags=Flag.RETRANSMISSION)
    assert message.done.delivered.tolist() == 8 * [True] + [False, True]


def test_a_protected_packet_is_awaited_even_if_another_vendor_s_switch_trims_it():
    bare = BareEngine()
    message, *_ = bare.expect(10 * SIZE, ratio=0.5)
    trim(bare, 0, 10, flags=Flag.TRIMMED | Flag.PROTECTED)
    for index in range(1, 10):
        bare.take_data(index, 10)
    assert message.done is None
    bare.take_data(0, 10, protected=True)
    assert message.done.delivered.all()


def test_what_has_arrived_is_not_lost_and_what_is_sent_again_may_come():
    bare = BareEngine()
    message, *_ = bare.expect(3 * SIZE, ratio=0.4)
    bare.take_data(0, 3)
    trim(bare, 0, 3)
    trim(bare, 1, 3, flags=Flag.TRIMMED | Flag.RETRANSMISSION)
    bare.take_data(2, 3)
    assert message.done is None
    trim(bare, 1, 3)
    assert message.done.delivered.tolist() == [True, False, True]


@pytest.mark.parametrize("known", [False, True])
def test_trimmed_packets_may_come_before_the_receive_is_posted(known):
    bare = BareEngine()
    trim(bare, 1, 3)
    bare.take_data(0, 3)
    bare.take_data(2, 3)
    assert [event.key for event in bare.unexpected] == [KEY]
    message, buffer, _ = bare.expect(3 * SIZE, ratio=0.4, known=known)
    assert message.done.delivered.tolist() == [True, False, True]
    assert buffer[:SIZE].all()
    assert not buffer[SIZE : 2 * SIZE].any()


def test_other_vendors_set_no_flag_but_leave_less_than_the_header_says():
    bare = BareEngine()
    message, *_ = bare.expect(4 * SIZE - 8, ratio=0.5)
    bare.take_data(0, 4, bytes(40), tos=FOREIGN_TOS)
    bare.take_data(3, 4, bytes(40), tos=FOREIGN_TOS)
    assert not bare.mismatches
    assert bare.engine.counters()["trimmed"] == 2
    bare.take_data(1, 4)
    bare.take_data(2, 4)
    assert message.done.delivered.tolist() == [False, True, True, False]


@pytest.mark.parametrize("tos", [0, 1, wire.dscp(4, False) << 2, wire.dscp(4, True) << 2 | 2])
def test_a_last_packet_of_another_size_is_a_mismatch_if_its_dscp_is_ours(tos):
    bare = BareEngine()
    bare.expect(4 * SIZE)
    bare.take_data(3, 4, bytes(40), tos=tos)
    assert [event.packets for event in bare.mismatches] == [4]


def test_headers_that_fit_no_packet_are_refused():
    bare = BareEngine()
    bare.expect(3 * SIZE)
    for index, count in ((3, 3), (1 << 31, 3), (0, 4), (3, 4)):
        trim(bare, index, count)
    trim(bare, 7, 7, message=5)
    trim(bare, 0, 0, message=6)
    assert bare.engine.counters() == {"refused_malformed": 6}


# Telling the sender ---------------------------------------------------------------------------------------------------


def trimmed_in(bare):
    """The packets that the last acknowledgement reports as trimmed, and as arrived."""
    trimmed, arrived = set(), set()
    for _, block, bits in bare.acknowledgements()[-1][1]:
        indices = {64 * (block & ~ACK_TRIMMED) + k for k in range(64) if bits >> k & 1}
        (trimmed if block & ACK_TRIMMED else arrived).update(indices)
    return trimmed, arrived


def test_acknowledgements_tell_what_was_trimmed():
    bare = BareEngine()
    bare.expect(200 * SIZE, ratio=0.2)
    for index in range(0, 140, 2):
        bare.take_data(index, 200)
        trim(bare, index + 1, 200)
    bare.tick(1.0)
    trimmed, arrived = trimmed_in(bare)
    assert arrived == set(range(0, 140, 2)) & arrived
    assert trimmed == set(range(1, 140, 2)) & trimmed
    assert {130, 138} <= arrived
    assert {129, 139} <= trimmed
    bare.take_data(139, 200, now_s=2.0)
    bare.tick(3.0)
    assert 139 not in trimmed_in(bare)[0]
    assert 139 in trimmed_in(bare)[1]


def tell_trimmed(bare, *indices, now_s=1.0):
    bare.acknowledge(now_s, *(ACK_TRIMMED * 64 + index for index in indices))


def test_a_sender_gives_up_what_was_trimmed_within_the_bound_and_sends_the_rest_again():
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * 10), ratio=0.2)
    bare.pump_all()
    bare.acknowledge(1.0, 0, 1, 2)
    tell_trimmed(bare, 3, 4)
    assert (message.flying, message.unsent) == (5, 0)
    tell_trimmed(bare, 3, 4, 5)
    assert (message.flying, message.unsent) == (4, 1)
    assert bare.pump_all(1.1) == [5]
    assert message.resent == 1
    tell_trimmed(bare, 5, now_s=1.2)
    assert message.flying == 5, "the copy may be under way"


def test_a_sender_sends_protected_packets_again_at_once():
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * 4, drop_class=[0, 7, 7, 7], protected=[1, 0, 0, 0]), ratio=0.5)
    bare.pump_all()
    tell_trimmed(bare, 0)
    assert bare.pump_all(1.0) == [0]
    assert message.resent == 1


def test_a_sender_ignores_what_cannot_be_trimmed():
    bare = BareEngine(window=2)
    message, _ = bare.send(tags_of([4] * 4), ratio=0.5)
    assert bare.pump_all() == [0, 1]
    bare.acknowledge(1.0, 0)
    tell_trimmed(bare, 0, 2, 3, 63, 700)
    assert (message.delivered, message.flying, message.unsent) == (1, 1, 2)


# Through a switch -----------------------------------------------------------------------------------------------------


class DroppingNetwork(Network):
    """A network whose switch gives packets up in queues deeper than ``THRESHOLD``, as the P4 program does: it drops
    them, or trims them."""

    THRESHOLD = 12

    def __init__(self, ranks, *, trims, **options):
        super().__init__(ranks, **options)
        self.trims, self.given_up = trims, {}

    def enqueue(self, target, queue, packet):
        source, datagram, tos = packet
        header = wire.decode(datagram)
        given_up = self.given_up.setdefault(message_of(header), {})
        kept = header.flags & (Flag.PROTECTED | Flag.RETRANSMISSION) or not header.drop_class
        deep = len(self.queues[target][queue]) >= self.THRESHOLD
        if header.type is PacketType.DATA and not kept and deep and len(given_up) < header.budget:
            given_up[header.index] = self.now
            if not self.trims:
                return
            queue = int(Queue.CONTROL)
            packet = source, header._replace(flags=header.flags | Flag.TRIMMED, queue=queue).encode(), tos
        super().enqueue(target, queue, packet)

    def delays_s(self):
        """Return how long it took until receivers could know of each packet given up.

        They can from what is left of it, from the next probe, or from a second copy.
        """
        told = {}
        for now_s, _, _, datagram in self.arrived:
            header = wire.decode(datagram)
            if header.type is PacketType.PROBE:
                told.setdefault((message_of(header), None), []).append(now_s)
            elif header.flags & (Flag.TRIMMED | Flag.RETRANSMISSION):
                told.setdefault((message_of(header), header.index), []).append(now_s)
        return [
            min(now_s for which in (index, None) for now_s in told.get((message, which), ()) if now_s > lost_s) - lost_s
            for message, given_up in self.given_up.items()
            for index, lost_s in given_up.items()
        ]


def message_of(header):
    return header.step, header.message, header.sender


def incast(trims, *, senders=16, size=60_000, ratio=0.1, seed=0, steps=4):
    """Send to rank 0 from all others at once; return how long messages took, and the delays until losses were known."""
    network = DroppingNetwork(senders + 1, trims=trims, seed=seed, jitter_s=2e-5, depth=400)
    bound, payload, packets, took = LossBound(ratio), np.zeros(size, np.uint8), packets_of(size), []
    for step in range(steps):
        began_s, futures = network.now, []
        for sender in range(1, senders + 1):
            place = {"source": sender, "target": 0, "key": MessageKey(step, sender), "bound": bound}
            arrival = receive(network, size, **place)
            arrival.add_done_callback(lambda _, began_s=began_s: took.append(network.now - began_s))
            futures += [arrival, send(network, payload, tags=plain_tags(packets), **place)]
        network.run(all_done(*futures))
        assert all(arrival.result().delivered.sum() >= bound.required(packets) for arrival in futures[::2])
    return took, network.delays_s()


def test_incast_ends_no_later_and_receivers_know_their_losses_sooner():
    dropped, trimmed = (
        [list(chain.from_iterable(each)) for each in zip(*(incast(trims, seed=seed) for seed in range(3)), strict=True)]
        for trims in (False, True)
    )
    assert np.quantile(trimmed[0], 0.99) <= np.quantile(dropped[0], 0.99)
    assert median(trimmed[1]) <= median(dropped[1]) / 2
