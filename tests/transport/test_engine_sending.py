# SPDX-License-Identifier: Apache-2.0
"""What an engine sends: in which order, within which window, what counts as lost and what of that is sent again."""

import numpy as np
import pytest
from bare_engine import KEY, SIZE, BareEngine, tags_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from network import TOKEN

from dlcp import wire
from dlcp.tags import send_order
from dlcp.transport import LossBound, MessageKey
from dlcp.wire import Flag, PacketType

pytestmark = pytest.mark.usefixtures("engine")
RTT_S = 0.02


def indices_of(sent):
    return [wire.decode(datagram).index for _, datagram, _ in sent]


# What leaves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("short_by", "tail_bytes"), [(0, 0), (40, 0), (95, 0), (0, 8), (40, 100), (40, 300), (0, 96)])
def test_packets_are_as_the_wire_format_has_them(short_by, tail_bytes):
    bare = BareEngine()
    rng = np.random.default_rng(1)
    count = 150
    tags = tags_of(rng.integers(2, 7, count), rng.integers(0, 8, count), rng.random(count) < 0.1)
    tags.layer[:] = rng.integers(0, 256, count)
    _, payload = bare.send(tags, ratio=0.2, short_by=short_by, tail_bytes=tail_bytes)
    order = bare.pump_all()
    droppable = ~tags.protected & (tags.drop_class > 0)
    expected = wire.pack(
        count,
        packet_type=PacketType.DATA,
        flags=np.where(tags.protected, int(Flag.PROTECTED), 0),
        queue=tags.queue,
        drop_class=np.where(droppable, tags.drop_class, 0),
        layer=tags.layer,
        job=1,
        budget=LossBound(0.2).allowed(count),
        step=KEY.step,
        message=KEY.message,
        sender=0,
        index=np.arange(count),
        count=count,
        token=TOKEN,
    )
    assert sorted(order) == list(range(count))
    for index, (rank, datagram, tos) in zip(order, bare.sent, strict=True):
        assert rank == 1
        assert datagram[:32] == expected[index].tobytes()
        assert datagram[32:] == payload[index * SIZE : (index + 1) * SIZE].tobytes()
        assert tos == wire.dscp(int(tags.queue[index]), bool(droppable[index])) << 2 | 2


def test_packets_leave_in_the_order_that_the_tags_ask_for():
    bare = BareEngine()
    queue = np.random.default_rng(0).integers(2, 7, 300).astype(np.uint8)
    message, _ = bare.send(tags_of(queue), ratio=0.5)
    order = bare.pump_all()
    assert order == send_order(queue, np.ones(300, np.bool_), seed=KEY.step * 31 + KEY.message).tolist()
    assert (np.diff(queue[order].astype(int)) <= 0).all()
    assert (message.sent, message.resent, message.unsent, message.flying) == (300, 0, 0, 300)


@pytest.mark.parametrize("short_by", [0, 1])
def test_a_burst_has_one_type_of_service_and_ends_with_the_short_packet(short_by):
    bare = BareEngine()
    rng = np.random.default_rng(2)
    tags = tags_of(rng.integers(2, 7, 200), rng.integers(0, 8, 200))
    message, _ = bare.send(tags, ratio=0.3, short_by=short_by)
    for again in (False, True):
        while True:
            before = len(bare.sent)
            if not bare.pump(burst=7):
                break
            burst = bare.sent[before:]
            assert 1 <= len(burst) <= 7
            assert len({(tos, datagram[2] >> 5) for _, datagram, tos in burst}) == 1
            assert {len(datagram) for _, datagram, _ in burst[:-1]} <= {32 + SIZE}
        assert not message.unsent
        if not again:
            bare.lose(message, range(200))


def test_a_burst_fits_the_largest_datagram():
    bare = BareEngine(size=9000)
    bare.send(tags_of([4] * 20))
    assert len(bare.pump()) == 65000 // 9032


def test_messages_go_by_queue_then_by_layer_then_by_age():
    bare = BareEngine()
    plans = [(3, 10), (5, 200), (5, 20), (5, 20), (6, 255), (3, 9)]
    for number, (queue, layer) in enumerate(plans):
        bare.send(tags_of([queue] * 3, layer=layer), key=MessageKey(1, number))
    bare.pump_all()
    order = [wire.decode(datagram).message for _, datagram, _ in bare.sent]
    assert order == [number for number in (4, 2, 3, 1, 5, 0) for _ in range(3)]


def test_a_message_is_as_urgent_as_its_next_packet():
    bare = BareEngine()
    bare.send(tags_of([6, 6, 2, 2]), key=MessageKey(1, 0))
    bare.send(tags_of([4, 4]), key=MessageKey(1, 1))
    bare.pump_all()
    assert [wire.decode(datagram).message for _, datagram, _ in bare.sent] == [0, 0, 1, 1, 0, 0]
    message, _ = bare.send(tags_of([5, 2]), key=MessageKey(1, 2))
    bare.pump_all()
    bare.send(tags_of([3, 3]), key=MessageKey(1, 3))
    bare.lose(message, [0])
    bare.pump_all()
    assert [wire.decode(datagram).message for _, datagram, _ in bare.sent[-3:]] == [2, 3, 3], (
        "what is sent again counts"
    )


def test_every_peer_gets_its_burst():
    bare = BareEngine(peers=(1, 2, 5))
    for rank in (1, 2, 5):
        bare.send(tags_of([4] * 3), rank=rank)
    assert bare.engine.pump(0.0) == 9
    assert [rank for rank, _, _ in bare.sent] == [1] * 3 + [2] * 3 + [5] * 3


# Windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "largest", "flying"), [(7.9, 100, 7), (20.0, 12, 12), (1.0, 1, 1)])
def test_no_more_is_on_the_wire_than_the_window_admits(window, largest, flying):
    bare = BareEngine()
    bare.flow.window, bare.flow.largest_window = window, largest
    message, _ = bare.send(tags_of([4] * 50))
    bare.pump_all()
    assert bare.flow.flying == message.flying == len(bare.sent) == flying
    bare.acknowledge(RTT_S, indices_of(bare.sent)[0])
    bare.pump_all(RTT_S)
    assert len(bare.sent) == flying + 1


def test_a_window_of_less_than_a_packet_admits_one_now_and_then():
    bare = BareEngine(window=4.0)
    bare.send(tags_of([4] * 50))
    first = bare.pump_all(1.0)
    bare.acknowledge(1.0 + RTT_S, *first)
    assert bare.flow.smoothed_rtt_s == pytest.approx(RTT_S)
    bare.flow.window = 0.25
    for when, leaves in ((1.05, 0), (1.079, 0), (1.081, 1), (1.081, 0), (1.5, 0)):
        assert len(bare.pump_all(when)) == leaves, when
    bare.acknowledge(1.5, indices_of(bare.sent)[-1])
    assert len(bare.pump_all(1.5)) == 1


def test_a_mute_flow_keeps_its_data():
    bare = BareEngine()
    bare.send(tags_of([4] * 5))
    bare.flow.mute = True
    assert bare.pump_all() == []
    assert bare.engine.send_control(1, b"control", 12)
    assert bare.sent == [(1, b"control", 12)]
    bare.flow.mute = False
    assert len(bare.pump_all()) == 5


@pytest.mark.parametrize("resent", [False, True])
def test_what_the_socket_refuses_is_not_skipped(resent):
    bare = BareEngine()
    message, _ = bare.send(tags_of([3] * 5))
    if resent:
        bare.pump_all()
        bare.lose(message, range(5))
        bare.sent.clear()
    numbers = (message.sent, message.resent, message.unsent, message.flying)
    bare.takes = lambda datagram: False
    assert bare.engine.pump(1.0) == -1
    assert (message.sent, message.resent, message.unsent, message.flying) == numbers
    bare.takes = lambda datagram: True
    assert sorted(bare.pump_all(2.0)) == list(range(5))
    assert message.resent == (5 if resent else 0)


def test_what_is_removed_leaves_room_for_others():
    bare = BareEngine(window=20.0)
    message, _ = bare.send(tags_of([4] * 30))
    other, _ = bare.send(tags_of([2] * 30), key=MessageKey(1, 9))
    bare.pump_all()
    assert (bare.flow.flying, message.flying) == (20, 20)
    for _ in range(2):
        bare.engine.remove(message)
        assert (bare.flow.flying, message.flying, message.unsent, message.sent) == (0, 0, 0, 20)
    bare.acknowledge(RTT_S, *range(20))
    assert (bare.flow.flying, message.delivered) == (0, 0)
    assert len(bare.pump_all()) == 20
    assert other.flying == 20


def test_a_message_can_be_sent_on_from_a_copy():
    bare = BareEngine()
    message, payload = bare.send(tags_of([4] * 6), tail_bytes=150)
    bare.pump(burst=3)
    copy = payload[:-150].copy()
    copy[:] ^= 255
    bare.engine.replace_payload(message, copy)
    bare.pump_all()
    bare.lose(message, range(6))
    bare.pump_all()
    now = np.concatenate([copy, payload[-150:]])
    for place, (_, datagram, _) in enumerate(bare.sent):
        index = wire.decode(datagram).index
        source = payload if place < 3 else now
        assert datagram[32:] == source[index * SIZE : (index + 1) * SIZE].tobytes()


# What comes back ------------------------------------------------------------------------------------------------------


class Sent(BareEngine):
    """An engine with one message on the way, and the order in which its packets went out."""

    def __init__(self, queue, **fields):
        super().__init__(window=100.0)
        self.message, _ = self.send(tags_of(queue), **fields)
        self.order = []

    def one(self, now_s, count=1):
        self.order += self.pump(now_s, count)


def test_what_later_packets_have_overtaken_by_far_is_lost():
    sent = Sent([4] * 4)
    for now_s in (1.0, 1.1, 1.2, 1.3):
        sent.one(now_s)
    _, second, _, fourth = sent.order
    sent.acknowledge(1.1 + RTT_S, second)
    assert (sent.message.unsent, sent.message.flying, sent.flow.flying) == (1, 2, 2)
    sent.acknowledge(1.3 + RTT_S, fourth)
    assert (sent.message.unsent, sent.message.flying) == (2, 0)
    assert sent.flow.take_report(5.0).lost == 2
    assert sent.pump_all(2.0) == [sent.order[0], sent.order[2]]


@pytest.mark.parametrize(("gap_s", "lost"), [(0.0005, 0), (0.004, 0), (0.006, 1)])
def test_disorder_of_a_quarter_of_a_round_trip_is_no_loss(gap_s, lost):
    sent = Sent([4] * 2)
    sent.one(1.0)
    sent.one(1.0 + gap_s)
    sent.acknowledge(1.0 + gap_s + RTT_S, sent.order[1])
    assert sent.message.unsent == lost


def test_disorder_that_was_taken_for_loss_is_expected_from_then_on():
    sent = Sent([4] * 4)
    for now_s in (1.0, 1.006, 2.0, 2.006):
        sent.one(now_s)
    first, second, _, fourth = sent.order
    sent.acknowledge(1.006 + RTT_S, second)
    assert sent.message.unsent == 1
    sent.acknowledge(1.03, first)
    assert (sent.message.unsent, sent.message.delivered) == (0, 2)
    sent.acknowledge(2.006 + RTT_S, fourth)
    assert (sent.message.unsent, sent.message.flying) == (0, 1)


def test_overtaking_between_queues_is_no_loss():
    # Strict priority lets urgent packets overtake others, which are late and not lost.
    sent = Sent([6, 2])
    sent.one(1.0)
    sent.one(1.5)
    sent.acknowledge(1.5 + RTT_S, sent.order[1])
    assert sent.message.flying == 1


def test_packets_sent_again_may_be_lost_again():
    sent = Sent([4] * 3)
    sent.one(1.0, 3)
    sent.lose(sent.message, [0], 1.1)
    sent.one(1.2)
    other, _ = sent.send(tags_of([4] * 1), key=MessageKey(2, 0))
    sent.pump_all(1.5)
    sent.acknowledge(1.5 + RTT_S, 0, key=MessageKey(2, 0))
    assert other.delivered == 1
    assert sent.message.unsent == 1


@pytest.mark.parametrize("before_s", [1.5, 2.5])
def test_a_bitmap_says_nothing_of_what_was_sent_after_it_was_asked_for(before_s):
    sent = Sent([4] * 20)
    sent.one(1.0, 10)
    sent.one(2.0, 10)
    arrived = np.zeros(20, np.bool_)
    arrived[sent.order[:4]] = True
    assert sent.engine.take_bitmap(sent.message, 0, arrived, before_s, 2.1)
    assert sent.message.delivered == 4
    assert sent.message.unsent == (16 if before_s > 2 else 6)
    assert sent.flow.flying == sent.message.flying == (0 if before_s > 2 else 10)
    assert not sent.engine.take_bitmap(sent.message, 0, arrived, before_s, 2.2), "the same again is no news"


def test_a_part_of_a_bitmap_says_nothing_of_the_rest():
    sent = Sent([4] * 200)
    sent.pump_all(1.0)
    sent.flow.window = 1000.0
    sent.pump_all(1.0)
    assert sent.engine.take_bitmap(sent.message, 64, np.zeros(64, np.bool_), 2.0, 2.0)
    assert (sent.message.unsent, sent.message.flying) == (64, 136)
    assert sorted(sent.pump_all(3.0)) == list(range(64, 128))


def test_what_was_not_sent_cannot_have_arrived():
    sent = Sent([4] * 100)
    sent.one(1.0, 10)
    sent.acknowledge(1.1, *range(100))
    assert sent.engine.take_bitmap(sent.message, 0, np.ones(100, np.bool_), 9.0, 1.2) is False
    assert (sent.message.delivered, sent.message.unsent) == (10, 90)


def test_an_acknowledgement_counts_once():
    sent = Sent([4] * 10)
    sent.one(5.0, 10)
    for _ in range(3):
        sent.acknowledge(5.0 + RTT_S, 3, 4)
    assert (sent.flow.flying, sent.message.delivered) == (8, 2)
    assert sent.flow.smoothed_rtt_s == pytest.approx(RTT_S)
    assert sent.flow.take_report(9.0).delivered == 2


def test_acknowledgements_of_what_is_not_there_change_nothing():
    sent = Sent([4] * 70)
    sent.one(1.0, 64)
    sent.one(1.0, 64)
    sent.acknowledge(1.1, 5, key=MessageKey(1, 3))
    sent.acknowledge(1.1, 70, 127, 128, 1 << 30, (1 << 38) - 1)
    assert (sent.message.delivered, sent.flow.flying) == (0, 70)
    sent.acknowledge(1.1, 69, 70)
    assert sent.message.delivered == 1


@pytest.mark.parametrize("size", [0, 1, 17, 19, 35])
def test_acknowledgements_of_no_whole_entries_are_refused(size):
    sent = Sent([4])
    sent.take(PacketType.ACK, bytes(size))
    assert sent.engine.counters()["refused_malformed"] == 1


def test_the_round_trip_time_follows_the_path():
    sent = Sent([4] * 60)
    for step in range(1, 60):
        sent.one(float(step))
        sent.acknowledge(step + (0.01 if step < 5 else 0.05), sent.order[-1])
    assert sent.flow.smoothed_rtt_s == pytest.approx(0.05, rel=0.05)
    assert 0 < sent.flow.rtt_variation_s < 0.01


def test_the_receiver_s_delay_is_no_part_of_the_round_trip():
    sent = Sent([4] * 2)
    sent.one(1.0, 2)
    sent.acknowledge(1.0 + RTT_S + 0.005, 0, 1, ago_us=5000)
    assert sent.flow.smoothed_rtt_s == pytest.approx(RTT_S)
    assert sent.flow.take_report(2.0).rtt_s == pytest.approx(RTT_S)


def test_the_time_of_a_packet_sent_twice_is_no_round_trip():
    sent = Sent([4] * 2)
    sent.one(1.0, 2)
    sent.lose(sent.message, [0, 1], 1.5)
    sent.pump_all(2.0)
    sent.acknowledge(2.001, 0, 1)
    assert sent.flow.smoothed_rtt_s == 0
    assert sent.message.delivered == 2


def test_marks_are_counted_in_total_and_may_wrap():
    sent = Sent([4] * 64)
    sent.one(1.0, 64)
    sent.acknowledge(1.01, 0, marked=0x7FFFFFFF)
    sent.acknowledge(1.01, 1, marked=0xFFFFFFFE)
    sent.flow.take_report(2.0)
    told = []
    for number, (first, last, total) in enumerate([(2, 5, 1), (5, 7, 0), (7, 9, 2), (9, 11, 50)]):
        sent.acknowledge(2.0, *range(first, last), marked=total)
        told.append(sent.flow.take_report(3.0 + number).marked)
    assert told == [3, 0, 1, 2], "an overtaken acknowledgement tells no marks, and none tells more than arrived"


def test_reports_come_at_once_after_a_pause_and_then_once_a_round_trip():
    sent = Sent([4] * 50)
    assert sent.engine.report_due_s() == float("inf")
    assert sent.flow.take_report(1.0) is None
    sent.one(1.0, 50)
    sent.acknowledge(1.0 + RTT_S, 0, 1, 2)
    assert sent.engine.report_due_s() <= 1.0 + RTT_S
    report = sent.flow.take_report(1.0 + RTT_S)
    assert (report.delivered, report.lost, report.limited) == (3, 0, False)
    assert report.smoothed_rtt_s == report.rtt_s == pytest.approx(RTT_S)
    sent.acknowledge(1.0 + RTT_S + 0.001, 3)
    assert sent.flow.take_report(1.0 + RTT_S + 0.001) is None
    due_s = 1.0 + RTT_S + sent.flow.smoothed_rtt_s
    assert sent.engine.report_due_s() == pytest.approx(due_s)
    assert sent.flow.take_report(due_s + 1e-9).delivered == 1
    assert sent.engine.report_due_s() == float("inf")


def test_a_report_says_whether_the_window_held_packets_back():
    sent = Sent([4] * 150)
    sent.pump_all(1.0)
    sent.acknowledge(1.1, *range(64))
    assert sent.flow.take_report(2.0).limited
    sent.pump_all(2.0)
    sent.acknowledge(2.1, *range(64, 150))
    assert not sent.flow.take_report(3.0).limited


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
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.7]),
    st.randoms(use_true_random=False),
)
def test_protected_packets_are_resent_and_the_least_valuable_others_forgone(packets, ratio, random):
    drop_class = [0 if shield else drop for drop, shield, _ in packets]
    protected = [shield for _, shield, _ in packets]
    lost = [index for index, (_, _, gone) in enumerate(packets) if gone]
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * len(packets), drop_class, protected), ratio=ratio)
    bare.pump_all()
    random.shuffle(lost)
    for index in lost:
        bare.engine.take_bitmap(message, index, np.zeros(1, np.bool_), 1.0, 0.0)
    again = bare.pump_all(1.0)
    assert len(set(again)) == len(again)
    forgone = set(lost) - set(again)
    bearable = [index for index in lost if not protected[index]]
    assert {index for index in lost if protected[index]} <= set(again)
    assert len(forgone) == min(len(bearable), LossBound(ratio).allowed(len(packets)))
    least = sorted((drop_class[index] for index in bearable), reverse=True)[: len(forgone)]
    assert sorted((drop_class[index] for index in forgone), reverse=True) == least


def test_a_packet_lost_again_is_chosen_again():
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * 8, range(8)), ratio=0.125)
    bare.pump_all()
    bare.lose(message, [0, 7])
    assert bare.pump_all(1.0) == [0], "class 7 is the least valuable"
    bare.lose(message, [0, 7])
    assert bare.pump_all(2.0) == [0]
    assert (message.sent, message.resent, message.delivered) == (10, 2, 6)


def test_a_packet_that_arrives_after_all_is_not_sent_again():
    bare = BareEngine()
    message, _ = bare.send(tags_of([4] * 5))
    bare.pump_all(1.0)
    bare.engine.take_bitmap(message, 2, np.zeros(2, np.bool_), 9.0, 1.0)
    assert (message.unsent, message.flying) == (2, 3)
    bare.acknowledge(1.1, 3)
    assert (message.unsent, message.flying, message.delivered) == (1, 3, 1)
    assert bare.pump_all(2.0) == [2]
    bare.acknowledge(2.1, 0, 1, 2, 4)
    assert (message.unsent, message.flying, message.delivered) == (0, 0, 5)
    assert message.active_s == 2.1


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
        bare.engine.take_bitmap(message, 0, arrived, now_s + 0.5, now_s + 0.6)
    assert rounds > 50
    assert arrived[tags.protected].all()
    assert np.count_nonzero(~arrived) == 30
    assert message.delivered == 270
    assert message.sent == len(bare.sent)
