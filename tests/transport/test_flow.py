# SPDX-License-Identifier: Apache-2.0
"""How the sender tells what is lost, from acknowledgements and from bitmaps."""

import numpy as np
import pytest
from test_outgoing import message, tags_of

from dlcp.transport.congestion import Proportional
from dlcp.transport.flow import Flow
from dlcp.transport.outgoing import DELIVERED, FLYING, LOST

RTT_S = 0.02


class Sent:
    """A flow of one message, and the order in which its packets went out."""

    def __init__(self, queue, window=100):
        self.flow = Flow(Proportional(), 1000)
        self.flow.control.window = window
        self.message = message(tags_of(queue))
        self.flow.add(self.message)
        self.order = []

    def pump(self, now_s, limit):
        def emit(header, payload, tos):
            self.order.append(int.from_bytes(bytes(header[16:20]), "big"))
            return True

        return self.flow.pump(now_s, limit, emit)

    def acknowledge(self, now_s, *indices, marked=0):
        self.flow.on_ack(now_s, [(*self.message.key, index) for index in indices], marked)

    def state(self, *indices):
        return [self.message.state[index] for index in indices]


def test_what_later_packets_have_overtaken_by_far_is_lost():
    sent = Sent([4] * 4)
    for now_s in (0.0, 0.1, 0.2, 0.3):
        sent.pump(now_s, 1)
    first, second, third, fourth = sent.order
    sent.acknowledge(0.1 + RTT_S, second)
    assert sent.state(first, third) == [LOST, FLYING]
    assert sent.flow.flying == 2
    sent.acknowledge(0.3 + RTT_S, fourth)
    assert sent.state(third) == [LOST]
    assert sent.message.has_unsent


def test_a_little_disorder_is_no_loss():
    sent = Sent([4] * 2)
    sent.pump(0.0, 1)
    sent.pump(0.0005, 1)
    sent.acknowledge(RTT_S, sent.order[1])
    assert sent.state(sent.order[0]) == [FLYING]


def test_overtaking_between_queues_is_no_loss():
    # Strict priority lets urgent packets overtake others, which are late and not lost.
    sent = Sent([6, 2])
    sent.pump(0.0, 1)
    sent.pump(0.5, 1)
    sent.acknowledge(0.5 + RTT_S, sent.order[1])
    assert sent.state(sent.order[0]) == [FLYING]


@pytest.mark.parametrize("before_s", [0.5, 1.5])
def test_a_bitmap_says_nothing_of_what_was_sent_after_it_was_asked_for(before_s):
    sent = Sent([4] * 20)
    sent.pump(0.0, 10)
    sent.pump(1.0, 10)
    early, late = sent.order[:10], sent.order[10:]
    arrived = np.zeros(20, np.bool_)
    arrived[early[:4]] = True
    assert sent.flow.on_bitmap(1.1, sent.message, 0, arrived, before_s)
    assert set(sent.state(*early[:4])) == {DELIVERED}
    assert set(sent.state(*early[4:])) == {LOST}
    assert set(sent.state(*late)) == {LOST if before_s > 1 else FLYING}
    assert sent.flow.flying == sent.message.flying == (0 if before_s > 1 else 10)
    assert not sent.flow.on_bitmap(1.2, sent.message, 0, arrived, before_s), "the same again is no news"


def test_an_acknowledgement_counts_once():
    sent = Sent([4] * 10)
    sent.pump(5.0, 10)
    for _ in range(3):
        sent.acknowledge(5.0 + RTT_S, 3, 3, 4)
    assert sent.flow.flying == 8
    assert sent.flow.smoothed_rtt_s == pytest.approx(RTT_S)


def test_the_round_trip_time_follows_the_path():
    sent = Sent([4] * 60)
    for step in range(60):
        sent.pump(float(step), 1)
        sent.acknowledge(step + (0.01 if step < 5 else 0.05), sent.order[-1])
    assert sent.flow.smoothed_rtt_s == pytest.approx(0.05, rel=0.05)
    assert sent.flow.smoothed_rtt_s <= sent.flow.probe_timeout_s <= 0.2


def test_marks_are_counted_in_total_and_may_wrap():
    marks = []
    sent = Sent([4] * 30)
    sent.flow.control.on_feedback = lambda now_s, delivered, marked, lost, rtt_s: marks.append(marked)
    sent.pump(0.0, 30)
    for count, total in ((3, 0xFFFFFFFE), (3, 1), (2, 0), (2, 2)):
        start = sum(state == DELIVERED for state in sent.message.state)
        sent.flow._marked_seen = 0xFFFFFFFE if total == 0xFFFFFFFE else sent.flow._marked_seen
        sent.acknowledge(RTT_S, *range(start, start + count), marked=total)
    assert marks == [0, 3, 0, 1], "an acknowledgement that was overtaken tells no marks"


def test_what_is_given_up_leaves_room_for_others():
    sent = Sent([4] * 30, window=20)
    sent.pump(0.0, 30)
    assert sent.flow.flying == 20
    sent.flow.remove(sent.message)
    assert sent.flow.flying == 0
    sent.acknowledge(RTT_S, *range(20))
    assert sent.flow.flying == 0
