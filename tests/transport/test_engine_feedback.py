# SPDX-License-Identifier: Apache-2.0
"""An engine's handling of feedback: losses, reports, and retransmissions."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlcp import wire
from dlcp.transport import LossBound, MessageKey
from dlcp.wire import ACK_WHOLE, Flag, PacketType
from tests.native.rules import RULES
from tests.transport.bare_engine import KEY, BareEngine, tags_of

RTT_S = 0.02
OTHER = MessageKey(1, 3)


# What comes back ------------------------------------------------------------------------------------------------------


class Sending(BareEngine):
    """An engine with one message on the way, and the order in which its packets went out."""

    def __init__(self, queue, **fields):
        super().__init__(window=100.0)
        self.message, _ = self.send(tags_of(queue), **fields)
        self.order = []

    def one(self, now_s, count=1):
        self.order += self.pump(now_s, count)


def test_what_later_packets_have_overtaken_by_far_is_lost():
    sent = Sending([4] * 4)
    for now_s in (1.0, 1.1, 1.2, 1.3):
        sent.one(now_s)
    _, second, _, fourth = sent.order
    sent.acknowledge(1.1 + RTT_S, second)
    assert (sent.message.unsent, sent.message.flying, sent.flow.flying) == (1, 2, 2)
    sent.acknowledge(1.3 + RTT_S, fourth)
    assert (sent.message.unsent, sent.message.flying) == (2, 0)
    assert sum(report.lost for report in sent.reports) == 2
    assert sent.pump_all(2.0) == [sent.order[0], sent.order[2]]


@pytest.mark.parametrize(("gap_s", "lost"), [(0.0005, 0), (0.019, 0), (0.021, 1)])
def test_disorder_of_a_round_trip_is_no_loss_at_first(gap_s, lost):
    sent = Sending([4] * 2)
    sent.one(1.0)
    sent.one(1.0 + gap_s)
    sent.acknowledge(1.0 + gap_s + RTT_S, sent.order[1])
    assert sent.message.unsent == lost


def lose_in_order(sent, times=20):
    """Let packets get lost, each found so by the next one, and none be late: then little disorder is expected."""
    for number in range(times):
        sent.one(10.0 + number)
        sent.one(10.5 + number)
        sent.acknowledge(10.5 + number + RTT_S, sent.order[-1])
    assert sum(report.lost for report in sent.reports) == times


@pytest.mark.parametrize(("gap_s", "lost"), [(0.0005, 0), (0.004, 0), (0.006, 1)])
def test_disorder_of_a_quarter_of_a_round_trip_is_no_loss_where_none_was_seen(gap_s, lost):
    sent = Sending([4] * 60, ratio=0.9)
    lose_in_order(sent)
    sent.one(50.0)
    sent.one(50.0 + gap_s)
    sent.acknowledge(50.0 + gap_s + RTT_S, sent.order[-1])
    assert sent.message.flying == 1 - lost


@pytest.mark.parametrize(
    ("told", "gap_s", "lost"),
    [
        ([(1, 0)], 0.008, 0),
        ([(1, 0)], 0.012, 1),
        ([(1, 0), (4, RTT_S / 2)], 0.012, 1),
        ([(1, 0), (4, 1.5 * RTT_S)], 0.018, 0),
        ([(1, 0), (1, 1.5 * RTT_S), (0, 3 * RTT_S)], 0.012, 1),
    ],
    ids=["once", "no more than that", "a round trip is one piece of news", "twice", "no news"],
)
def test_disorder_is_expected_where_packets_are_sent_again_that_were_late(told, gap_s, lost):
    sent = Sending([4] * 60, ratio=0.9)
    lose_in_order(sent)
    for late, after_s in told:
        sent.acknowledge(49.0 + after_s, sent.order[-1], late=late)
    sent.one(50.0)
    sent.one(50.0 + gap_s)
    sent.acknowledge(50.0 + gap_s + RTT_S, sent.order[-1], late=max(told)[0])
    assert sent.message.flying == 1 - lost


@pytest.mark.parametrize(("wait_s", "lost"), [(0.003, 0), (0.007, 1)])
def test_what_has_been_overtaken_for_a_quarter_of_a_round_trip_is_lost_though_nothing_comes(wait_s, lost):
    sent = Sending([4] * 60, ratio=0.9)
    lose_in_order(sent)
    sent.one(50.0, 2)
    sent.acknowledge(50.0 + RTT_S, sent.order[-1])
    sent.tick(50.0 + RTT_S + wait_s)
    assert sent.message.flying == 1 - lost


@pytest.mark.parametrize("late_s", [0.003, 0.012])
def test_disorder_that_was_seen_is_expected_from_then_on(late_s):
    """Whether or not what was late had been taken for lost."""
    sent = Sending([4] * 60, ratio=0.9)
    lose_in_order(sent)
    sent.one(50.0)
    sent.one(50.0 + 0.001)
    first, second = sent.order[-2:]
    sent.acknowledge(50.001 + RTT_S, second)
    sent.tick(50.001 + RTT_S + late_s)
    sent.acknowledge(50.001 + RTT_S + late_s, first)
    sent.one(51.0)
    sent.one(51.0 + 0.001)
    sent.acknowledge(51.001 + RTT_S, sent.order[-1])
    sent.tick(51.001 + RTT_S + late_s)
    assert sent.message.flying == 1


def test_overtaking_between_queues_is_no_loss():
    # Strict priority lets urgent packets overtake others, which are late and not lost.
    sent = Sending([6, 2])
    sent.one(1.0)
    sent.one(1.5)
    sent.acknowledge(1.5 + RTT_S, sent.order[1])
    assert sent.message.flying == 1


def test_packets_sent_again_may_be_lost_again():
    sent = Sending([4] * 3)
    sent.one(1.0, 3)
    sent.lose(sent.message, [0], 1.1)
    sent.one(1.2)
    other, _ = sent.send(tags_of([4] * 1), key=MessageKey(2, 0))
    sent.pump_all(1.5)
    sent.acknowledge(1.5 + RTT_S, 0, key=MessageKey(2, 0))
    assert other.delivered == 1
    assert sent.message.unsent == 1


@pytest.mark.parametrize("asked_s", [1.5, 2.5])
def test_a_bitmap_says_nothing_of_what_was_sent_after_it_was_asked_for(asked_s):
    sent = Sending([4] * 20)
    sent.one(1.0, 10)
    if asked_s < 2:
        sent.ask(asked_s)
    sent.one(2.0, 10)
    if asked_s > 2:
        sent.ask(asked_s)
    arrived = np.zeros(20, np.bool_)
    arrived[sent.order[:4]] = True
    sent.answer(sent.message, arrived, 2.6)
    assert sent.message.delivered == 4
    assert sent.message.unsent == (16 if asked_s > 2 else 6)
    assert sent.flow.flying == sent.message.flying == (0 if asked_s > 2 else 10)


def test_a_bitmap_that_nobody_asked_for_says_nothing():
    sent = Sending([4] * 10)
    sent.one(1.0, 10)
    sent.answer(sent.message, np.zeros(10), 1.5)
    assert (sent.message.flying, sent.message.unsent) == (10, 0)


def test_a_part_of_a_bitmap_says_nothing_of_the_rest():
    packets, part = 1000, 96 * 8
    sent = Sending([4] * packets)
    sent.flow.window = 2000.0
    sent.pump_all(1.0)
    sent.ask(2.0)
    sent.answer(sent.message, np.zeros(packets - part), 2.1, first=part)
    assert (sent.message.unsent, sent.message.flying) == (packets - part, part)
    assert sorted(sent.pump_all(3.0)) == list(range(part, packets))


def test_what_was_not_sent_cannot_have_arrived():
    sent = Sending([4] * 100)
    sent.one(1.0, 10)
    sent.acknowledge(1.1, *range(100))
    assert (sent.message.delivered, sent.message.unsent) == (10, 90)
    sent.one(1.2, 5)
    sent.ask(2.0)
    sent.answer(sent.message, np.ones(100), 2.1)
    assert (sent.message.delivered, sent.message.unsent) == (15, 85)


def test_an_acknowledgement_counts_once():
    sent = Sending([4] * 10)
    sent.one(5.0, 10)
    for _ in range(3):
        sent.acknowledge(5.0 + RTT_S, 3, 4)
    assert (sent.flow.flying, sent.message.delivered) == (8, 2)
    assert sent.flow.smoothed_rtt_s == pytest.approx(RTT_S, abs=1e-6)
    assert sum(report.delivered for report in sent.reports) == 2


def test_acknowledgements_of_what_is_not_there_change_nothing():
    sent = Sending([4] * 70)
    sent.one(1.0, 64)
    sent.one(1.0, 64)
    sent.acknowledge(1.1, 5, key=MessageKey(1, 3))
    sent.acknowledge(1.1, 70, 127, 128, 1 << 30, (1 << 38) - 1)
    assert (sent.message.delivered, sent.flow.flying) == (0, 70)
    sent.acknowledge(1.1, 69, 70)
    assert sent.message.delivered == 1


@pytest.mark.parametrize(
    ("slow_start", "due_s"), [(True, 1.0 + RULES["report_min_s"]), (False, 1.0 + RULES["report_calm_s"])]
)
def test_that_a_window_holds_packets_back_is_reported_soon_only_in_slow_start(slow_start, due_s):
    sent = Sending([4] * 200)
    sent.flow.window, sent.flow.slow_start = 10.0, slow_start
    sent.one(0.9999, 64)
    sent.acknowledge(1.0, *sent.order[:5])
    assert sent.reports
    sent.one(1.0, 64)
    sent.one(1.0, 64)
    sent.reports.clear()
    sent.acknowledge(1.0001, *sent.order[5:12])
    assert not sent.reports
    assert sent.report(due_s - 1e-5) is None
    assert sent.report(due_s + 1e-9).limited


def test_packets_leave_at_the_pace_of_the_flow_in_short_bursts():
    sent = Sending([4] * 60)
    sent.flow.pace = 1000.0
    left = [len(sent.pump_all(1.0 + k * 0.001)) for k in range(41)]
    assert sum(left) == pytest.approx(40, abs=RULES["path_burst"] + 1)
    assert max(left) == RULES["path_burst"]
    sent.flow.pace = math.inf
    assert len(sent.pump_all(2.0)) == 60 - sum(left)


def test_how_long_packets_took_one_way_is_reported_but_for_what_the_clocks_differ_by():
    sent = Sending([4] * 30)
    # The receiver's clock is 4294 s ahead, and begins anew meanwhile: 2**32 microseconds are 4295 s.
    for sent_s, took_s in [(0.5, 0.04), (1.5, 0.06), (2.5, 0.045)]:
        sent.one(sent_s, 10)
        sent.acknowledge(sent_s + 0.1, *sent.order[-10:], arrived_s=4294 + sent_s + took_s)
    assert [report.one_way_s for report in sent.reports] == pytest.approx([0, 0.02, 0.005], abs=3e-6)


def test_a_question_waits_for_a_late_acknowledgement():
    sent = Sending([4] * 60, ratio=0.9)
    for number in range(30):  # the round trip is known well
        sent.one(float(number))
        sent.acknowledge(number + RTT_S, sent.order[-1])
    sent.one(50.0, 30)
    (asked_s,) = times_asked(sent, np.arange(50.0, 50.06, 0.001))
    assert 50 + 2 * RTT_S <= asked_s <= 50 + 2 * RTT_S + 0.002, "disorder of a round trip may still be met"


def test_where_packets_get_lost_a_question_follows_the_last_one_in_its_queue():
    sent = Sending([4] * 60, ratio=0.9)
    lose_in_order(sent)
    sent.one(50.0, 20)
    before = len(sent.sent)
    assert times_asked(sent, np.arange(50.0, 50.015, 0.001)) == [pytest.approx(50 + RTT_S / 4, abs=0.0011)]
    question = wire.decode(sent.sent[before][1])
    assert (question.type, question.queue) == (PacketType.PROBE, 4)


def test_until_a_round_trip_is_known_a_question_is_repeated_after_as_long_as_an_answer_took():
    sent = Sending([4] * 8)
    sent.one(1.0, 8)
    sent.ask(1.1)
    sent.answer(sent.message, np.zeros(8), 2.6)
    sent.one(2.7, 8)
    asked = times_asked(sent, np.arange(2.7, 6, 0.01))
    assert asked[-1] - asked[-2] >= 1.5
    assert asked[1] <= 2.7 + 1.5 + 0.1


def times_asked(sent, seconds):
    """Let time pass; return when the engine probed."""
    asked = []
    for now_s in seconds:
        before = len(sent.sent)
        sent.tick(now_s)
        asked += [now_s] * any(wire.decode(data).type is PacketType.PROBE for _, data, _ in sent.sent[before:])
    return asked


def test_questions_that_were_lost_before_an_answer_without_news_do_not_delay_the_next():
    sent = Sending([4] * 8, ratio=0.9)
    sent.one(1.0, 8)
    sent.acknowledge(1.0 + RTT_S, 7)
    sent.lose(sent.message, range(7), 2.0)  # all may stay lost, if the receiver agrees
    asked = times_asked(sent, np.arange(2.01, 60, 0.01))
    assert len(asked) > RULES["unanswered_patience"], "with nothing to be heard"
    sent.answer(sent.message, np.arange(8) == 7, 60.0)
    waits = np.diff([60.0, *times_asked(sent, np.arange(60.01, 90, 0.01))])
    assert waits[0] <= 2 * RULES["probe_timeout_max_s"] + 0.01


def test_an_answer_tells_of_what_was_sent_before_its_question():
    sent = Sending([4] * 8)
    other, _ = sent.send(tags_of([4] * 8), key=OTHER)
    sent.one(1.0, 8)
    first = times_asked(sent, np.arange(1.01, 3, 0.01))[0]
    del sent.sent[:]
    sent.one(3.0, 8)
    sent.acknowledge(3.1, *range(8), key=OTHER)  # overtaken by that, the first message is lost
    assert (other.delivered, sent.message.unsent) == (8, 8)
    sent.one(3.2, 8)
    assert sent.message.flying == 8
    assert first < 3.2, "before these packets were sent"
    asked = times_asked(sent, np.arange(3.21, 20, 0.01))
    sent.answer(sent.message, np.zeros(8), 20, question=sent.questions[0])
    assert (sent.message.flying, sent.message.unsent) == (8, 0), "that was asked before they were sent"
    for never_asked in (0, sent.questions[-1] + 1, sent.questions[0] - 1):
        sent.answer(sent.message, np.zeros(8), 20, question=never_asked)
        assert sent.message.flying == 8
    assert len(asked) > 1, "the second one overtakes what it is about, and tells of what was sent before the first"
    sent.answer(sent.message, np.zeros(8), 20, question=sent.questions[-1])
    assert (sent.message.flying, sent.message.unsent) == (0, 8)


def test_a_receiver_that_has_taken_all_confirms_what_no_acknowledgement_has():
    sent = Sending([4] * 70)
    sent.one(1.0, 64)
    sent.acknowledge(1.1, ACK_WHOLE * 64, key=KEY)
    assert (sent.message.delivered, sent.confirmed) == (1, []), "not all has been sent: nobody can have got it"
    sent.one(1.2, 64)
    sent.acknowledge(1.3, (ACK_WHOLE + 2) * 64, key=KEY)
    assert (sent.message.delivered, sent.confirmed) == (1, []), "it has no such block"
    sent.acknowledge(1.4, (ACK_WHOLE + 1) * 64 + 5, key=KEY)
    assert (sent.message.delivered, sent.message.flying, sent.message.unsent, sent.flow.flying) == (70, 0, 0, 0)
    assert [(event.peer, event.key) for event in sent.confirmed] == [(1, KEY)]


@pytest.mark.parametrize("size", [0, 1, 17, 19, 35])
def test_acknowledgements_of_no_whole_entries_are_refused(size):
    sent = Sending([4])
    sent.take(PacketType.ACK, bytes(size))
    assert sent.engine.counters()["refused_malformed"] == 1


def test_the_round_trip_time_follows_the_path():
    sent = Sending([4] * 60)
    for step in range(1, 60):
        sent.one(float(step))
        sent.acknowledge(step + (0.01 if step < 5 else 0.05), sent.order[-1])
    assert sent.flow.smoothed_rtt_s == pytest.approx(0.05, rel=0.05)
    assert 0 < sent.flow.rtt_variation_s < 0.01


def test_the_receiver_s_delay_is_no_part_of_the_round_trip():
    sent = Sending([4] * 2)
    sent.one(1.0, 2)
    sent.acknowledge(1.0 + RTT_S + 0.005, 0, 1, ago_us=5000)
    assert sent.flow.smoothed_rtt_s == pytest.approx(RTT_S, abs=1e-6)
    assert sent.reports[-1].rtt_s == pytest.approx(RTT_S, abs=1e-6)


def test_the_time_of_a_packet_sent_twice_is_no_round_trip():
    sent = Sending([4] * 2)
    sent.one(1.0, 2)
    sent.lose(sent.message, [0, 1], 1.5)
    sent.pump_all(2.0)
    sent.acknowledge(2.001, 0, 1)
    assert sent.flow.smoothed_rtt_s == 0
    assert sent.message.delivered == 2


def test_marks_are_counted_in_total_and_may_wrap():
    sent = Sending([4] * 64)
    sent.one(1.0, 64)
    sent.acknowledge(1.01, 0, marked=0x7FFFFFFF)
    sent.acknowledge(2.01, 1, marked=0xFFFFFFFE)
    told = []
    for number, (first, last, total) in enumerate([(2, 5, 1), (5, 7, 0), (7, 9, 2), (9, 11, 50)]):
        now_s = 10.0 * 100**number
        sent.reports.clear()
        sent.acknowledge(now_s, *range(first, last), marked=total)
        told.append((sent.reports or [sent.report(now_s * 50)])[-1].marked)
    assert told == [3, 0, 1, 2], "an overtaken acknowledgement tells no marks, and none tells more than arrived"


def test_reports_come_at_once_after_a_pause_and_then_once_a_round_trip():
    sent = Sending([4] * 50)
    assert sent.report(1.0) is None
    sent.one(1.0, 50)
    sent.acknowledge(1.0 + RTT_S, 0, 1, 2)
    (report,) = sent.reports
    assert (report.delivered, report.lost, report.limited) == (3, 0, False)
    assert report.smoothed_rtt_s == report.rtt_s == pytest.approx(RTT_S, abs=1e-6)
    sent.reports.clear()
    sent.acknowledge(1.0 + RTT_S + 0.001, 3)
    assert not sent.reports
    due_s = 1.0 + RTT_S + sent.flow.smoothed_rtt_s
    assert sent.report(due_s + 1e-9).delivered == 1
    assert sent.report(9.0) is None


def test_a_report_says_whether_the_window_held_packets_back():
    sent = Sending([4] * 150)
    sent.pump_all(1.0)
    sent.acknowledge(1.1, *range(64))
    assert sent.reports[-1].limited
    sent.pump_all(2.0)
    sent.acknowledge(2.1, *range(64, 150))
    assert not sent.reports[-1].limited


# What is sent again ---------------------------------------------------------------------------------------------------


def test_what_is_sent_again_says_so():
    bare = BareEngine()
    message, _ = bare.send(tags_of([3] * 4, protected=[True, False, True, False]))
    bare.pump_all()
    assert not any(wire.decode(datagram).flags & Flag.RETRANSMISSION for _, datagram, _ in bare.sent)
    bare.sent.clear()
    bare.lose(message, [2, 3])
    assert bare.pump_all(1.0) == [2, 3]
    flags = [wire.decode(datagram).flags for _, datagram, _ in bare.sent]
    assert flags == [Flag.RETRANSMISSION | Flag.PROTECTED, Flag.RETRANSMISSION]
    assert (message.sent, message.resent) == (6, 2)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.7]),
)
def test_protected_packets_are_resent_and_the_least_valuable_others_abandoned(packets, ratio):
    drop_class = [0 if shield else drop for drop, shield, _ in packets]
    protected = [shield for _, shield, _ in packets]
    lost = [index for index, (_, _, gone) in enumerate(packets) if gone]
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * len(packets), drop_class, protected), ratio=ratio)
    bare.pump_all()
    bare.lose(message, lost)
    again = bare.pump_all(1.0)
    assert len(set(again)) == len(again)
    abandoned = set(lost) - set(again)
    bearable = [index for index in lost if not protected[index]]
    assert {index for index in lost if protected[index]} <= set(again)
    assert len(abandoned) == min(len(bearable), LossBound(ratio).allowed(len(packets)))
    least = sorted((drop_class[index] for index in bearable), reverse=True)[: len(abandoned)]
    assert sorted((drop_class[index] for index in abandoned), reverse=True) == least


def test_a_packet_lost_again_is_chosen_again():
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * 8, range(8)), ratio=0.125)
    bare.pump_all()
    bare.lose(message, [0, 7])
    assert bare.pump_all(1.0) == [0], "class 7 is the least valuable"
    bare.lose(message, [0, 7], 2.0)
    assert bare.pump_all(2.0) == [0]
    assert (message.sent, message.resent, message.delivered) == (10, 2, 6)


def test_a_packet_that_arrives_after_all_is_not_sent_again():
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * 5))
    bare.pump_all(1.0)
    bare.lose(message, [2, 3], 1.5)
    assert (message.unsent, message.flying, message.delivered) == (2, 0, 3)
    bare.acknowledge(1.6, 3)
    assert (message.unsent, message.flying, message.delivered) == (1, 0, 4)
    assert bare.pump_all(2.0) == [2]
    bare.acknowledge(2.1, 2)
    assert (message.unsent, message.flying, message.delivered) == (0, 0, 5)


def test_hundreds_of_rounds_of_loss_end_with_all_that_must_arrive():
    # The ring of packets to be sent again goes round many times.
    bare = BareEngine()
    rng = np.random.default_rng(7)
    tags = tags_of([4] * 300, rng.integers(1, 8, 300), rng.random(300) < 0.2)
    tags.drop_class[tags.protected] = 0
    message, _ = bare.send(tags, ratio=0.1)
    arrived = np.zeros(300, np.bool_)
    now_s, rounds = 1.0, 0
    while message.unsent:
        now_s += 1.0
        rounds += 1
        flying = bare.pump_all(now_s, burst=int(rng.integers(1, 65)))
        assert not arrived[flying].any(), "what is there is not sent again"
        arrived[[index for index in flying if rng.random() < 0.05]] = True
        now_s += 20.0  # longer than any question waits
        bare.ask(now_s)
        bare.answer(message, arrived, now_s)
    assert rounds > 50
    assert arrived[tags.protected].all()
    assert np.count_nonzero(~arrived) == 30
    assert message.delivered == 270
    assert message.sent == len(bare.sent)
