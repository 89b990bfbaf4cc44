# SPDX-License-Identifier: Apache-2.0
"""The sender's choices: in which order packets go out, and which of the lost ones are sent again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp import wire
from dlcp.tags import PacketTags
from dlcp.transport.bound import LossBound
from dlcp.transport.outgoing import DELIVERED, MessageKey, OutgoingMessage

PAYLOAD_BYTES = 100
KEY = MessageKey(1, 2)


def tags_of(queue, drop_class=None, protected=None):
    count = len(queue)
    return PacketTags(
        np.array(queue, np.uint8),
        np.array([7] * count if drop_class is None else drop_class, np.uint8),
        np.zeros(count, np.uint8),
        np.zeros(count, np.bool_) if protected is None else np.array(protected, np.bool_),
    )


def message(tags, *, ratio=0.0, key=KEY, short_by=0):
    count = len(tags.queue)
    payload = np.arange(count * PAYLOAD_BYTES - short_by, dtype=np.int64).astype(np.uint8)
    headers = wire.pack(count, packet_type=wire.PacketType.DATA, index=np.arange(count), count=count)
    return OutgoingMessage(
        key,
        payload.data,
        PAYLOAD_BYTES,
        tags,
        LossBound(ratio),
        headers.view(np.uint8).reshape(count, wire.HEADER_BYTES),
        np.zeros(count, np.uint8),
        "layer",
        0.0,
        10.0,
    )


def take_all(outgoing, now_s=0.0):
    taken = []
    while outgoing.has_unsent:
        queue = outgoing.next_queue
        index = outgoing.take(now_s)[0]
        assert outgoing.queue[index] == queue
        taken.append(index)
    return taken


def test_urgent_queues_go_first_and_every_packet_once():
    queue = np.random.default_rng(0).integers(2, 7, 300)
    taken = take_all(message(tags_of(queue)))
    assert sorted(taken) == list(range(300))
    assert (np.diff(queue[taken]) <= 0).all()


def test_the_order_within_a_queue_is_another_each_step_but_the_same_if_asked_again():
    tags = tags_of([4] * 200)
    orders = [take_all(message(tags, key=MessageKey(step, 0))) for step in (0, 1, 2, 0)]
    assert orders[0] == orders[3]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(np.subtract(orders[one], orders[other])).mean() > 30
    assert abs(np.corrcoef(orders[0], range(200))[0, 1]) < 0.3, "the tail of the tensor must not always go last"


def test_packets_carry_their_bytes():
    outgoing = message(tags_of([3] * 5), short_by=40)
    for _ in range(5):
        index, header, payload, _ = outgoing.take(0.0)
        assert wire.decode(header).index == index
        assert not wire.decode(header).flags
        stop = min((index + 1) * PAYLOAD_BYTES, 5 * PAYLOAD_BYTES - 40)
        assert list(payload) == [byte % 256 for byte in range(index * PAYLOAD_BYTES, stop)]


def test_a_packet_that_the_socket_refused_is_not_skipped():
    outgoing = message(tags_of([3] * 5), ratio=0.0)
    first = outgoing.take(0.0)[0]
    outgoing.put_back()
    assert (outgoing.flying, outgoing.sent) == (0, 0)
    assert outgoing.take(0.0)[0] == first
    outgoing.mark_lost(first)
    assert outgoing.take(1.0)[0] == first
    outgoing.put_back()
    assert (outgoing.flying, outgoing.sent, outgoing.resent) == (0, 1, 0)
    assert outgoing.take(1.0)[0] == first


def test_what_is_sent_again_says_so():
    outgoing = message(tags_of([3] * 4))
    take_all(outgoing)
    outgoing.mark_lost(2)
    index, header, _, _ = outgoing.take(1.0)
    assert index == 2
    assert wire.decode(header).flags == wire.Flag.RETRANSMISSION
    assert outgoing.resent == 1


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.7]),
    st.randoms(use_true_random=False),
)
def test_protected_packets_are_resent_and_the_least_valuable_others_forgone(packets, ratio, random):
    drop_class = [drop for drop, _, _ in packets]
    protected = [shield for _, shield, _ in packets]
    lost = [index for index, (_, _, gone) in enumerate(packets) if gone]
    outgoing = message(tags_of([4] * len(packets), drop_class, protected), ratio=ratio)
    take_all(outgoing)
    random.shuffle(lost)
    for index in lost:
        outgoing.mark_lost(index)
    again = take_all(outgoing, 1.0)
    assert len(set(again)) == len(again)
    forgone = set(lost) - set(again)
    bearable = [index for index in lost if not protected[index]]
    assert {index for index in lost if protected[index]} <= set(again)
    assert len(forgone) == min(len(bearable), LossBound(ratio).allowed(len(packets)))
    least = sorted((drop_class[index] for index in bearable), reverse=True)[: len(forgone)]
    assert sorted((drop_class[index] for index in forgone), reverse=True) == least


def test_a_packet_lost_again_is_chosen_again():
    outgoing = message(tags_of([4] * 10, range(10)), ratio=0.1)
    take_all(outgoing)
    for index in (0, 9):
        outgoing.mark_lost(index)
    assert take_all(outgoing, 1.0) == [0], "class 9 stands for the least valuable"
    outgoing.mark_lost(0)
    assert take_all(outgoing, 2.0) == [0]


def test_a_packet_that_arrives_after_all_is_not_sent_again():
    outgoing = message(tags_of([4] * 5))
    take_all(outgoing)
    outgoing.mark_lost(3)
    assert outgoing.has_unsent
    assert not outgoing.mark_delivered(3)
    assert not outgoing.has_unsent
    assert outgoing.flying == 4
    assert outgoing.state[3] == DELIVERED


def test_a_message_is_done_once_every_part_of_the_confirmation_is_in():
    outgoing = message(tags_of([4] * 10), ratio=0.5)
    take_all(outgoing)
    late, early = np.array([True, False]), np.array([True] * 7 + [False])
    assert not outgoing.confirm(8, late)
    assert not outgoing.confirm(8, late), "a repeated part is no other part"
    assert outgoing.confirm(0, early)
    outgoing.finish(2.5)
    delivery = outgoing.done.result(0)
    assert delivery.delivered.tolist() == [True] * 7 + [False, True, False]
    assert (delivery.sent, delivery.resent, delivery.recovered) == (10, 0, 0)
    assert delivery.seconds == pytest.approx(2.5)
