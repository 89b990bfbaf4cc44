# SPDX-License-Identifier: Apache-2.0
"""Ranks that leave DLCP complete the same buckets, whatever each of them has got to; the network is made up."""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from dlcp.collectives import Bucket, ErrorFeedback
from dlcp.dtypes import ValueType
from dlcp.session.recovery import Handed, Mode, RecoveringExchange
from dlcp.tags import Layer, Segment
from dlcp.transport import DeadlineError, MessageMismatchError, PeerAbortedError, TransportError
from tests.group.recovery_ranks import FakeEndpoint, FakeReducer, Network, close_while_it_leaves, start_late

LIMIT_S = 20
VALUES = 100


@dataclass(slots=True, eq=False)
class Asked(Handed):
    answer: Future = field(default_factory=Future)

    def give_back(self):
        self.answer.set_result(self.bucket.values)

    def fail(self, error):
        if not self.answer.done():
            self.answer.set_exception(error)


class Exchange(RecoveringExchange):
    """What is fallen back to is a list: who is on it in which order is what counts."""

    INSTEAD = "a list"

    def __init__(self, network, rank, deadline_s=LIMIT_S):
        super().__init__(rank, range(network.ranks), deadline_s, ErrorFeedback())
        self.network, self.fallen_back = network, []
        self.reducer, self.endpoint = FakeReducer(rank), FakeEndpoint()
        self.use(self.endpoint, self.reducer, may_recover=True)

    def take(self, step, sequence, value):
        """Hand a bucket over that is not on the host yet."""
        segments = [Segment(Layer(f"layer{sequence}", sequence), 0, VALUES)]
        handed = Asked(step, sequence, segments)
        with self._changed:
            self.check()
            self._enter(handed)
            if self.mode is Mode.FALLBACK:
                self._fall_back(handed)
        handed.bucket = Bucket(np.full(VALUES, value, np.float32), ValueType.FLOAT32, segments)
        return handed

    def start(self, step, sequence, value):
        handed = self.take(step, sequence, value)
        if handed.which not in self.fallen_back:
            self._begin(handed)
        return handed

    def _look(self):
        if others := [reason for rank, reason in self.network.left.items() if rank != self.rank]:
            return PeerAbortedError(others[0])
        return None

    def _tell_left(self, reason):
        self.network.left[self.rank] = reason

    def _channel(self):
        return self.network.channel(self.rank)

    def _fall_back(self, handed):
        self.fallen_back.append(handed.which)


def pair(**options):
    network = Network(2, **options)
    return [Exchange(network, rank) for rank in range(2)]


def values(*buckets):
    return [float(bucket.answer.result(LIMIT_S)[0]) for bucket in buckets]


def fallen_back(exchange, within_s=LIMIT_S):
    end_s = time.monotonic() + within_s
    while exchange.mode is not Mode.FALLBACK and time.monotonic() < end_s:
        time.sleep(0.01)
    return exchange.mode is Mode.FALLBACK


def test_what_one_rank_has_given_dlcp_all_complete_and_nothing_else():
    first, second = pair()
    mine = [first.start(4, sequence, 1 + sequence) for sequence in range(3)]
    theirs = [second.start(4, 0, 3)]
    first.reducer.fail(DeadlineError("step 4: too late"))
    assert not mine[1].answer.done()
    theirs += [second.start(4, 1, 4), second.start(4, 2, 5)]  # came later than it was decided what to complete
    assert values(*mine) == values(*theirs) == [2, 3, 4]
    assert fallen_back(first)
    assert fallen_back(second)
    assert first.fallen_back == second.fallen_back == []
    assert first.reason == second.reason == "step 4: too late", "not that another has left"
    assert first.endpoint.closed == ["step 4: too late"]


def test_what_comes_meanwhile_falls_back_in_order_once_it_is_on_the_host():
    first, second = pair()
    done = [exchange.start(0, 0, 2) for exchange in (first, second)]
    first._leave(DeadlineError("broken"))
    second._leave(DeadlineError("broken"))
    later = [exchange.start(0, 2, 0) for exchange in (first, second)]
    middle = [exchange.take(0, 1, 0) for exchange in (first, second)]
    assert values(*done) == [2, 2]
    time.sleep(0.05)
    assert {first.mode, second.mode} == {Mode.RECOVERING}, "one is still on the device"
    for exchange, handed in zip((first, second), middle, strict=True):
        exchange._begin(handed)
    assert fallen_back(first)
    assert fallen_back(second)
    assert first.fallen_back == second.fallen_back == [(0, 1), (0, 2)]
    assert not any(handed.answer.done() for handed in later)


def test_a_bucket_that_dlcp_refuses_is_completed_with_what_is_owed():
    first, second = pair()
    taken = first.take(0, 0, 1)
    first.feedback.owe(np.full(VALUES, 10, np.float64), taken.segments)
    first.reducer.refuses = DeadlineError("no more")
    other = second.start(0, 0, 3)
    first._begin(taken)
    assert values(taken, other) == [7, 7]
    assert first.feedback.owed("layer0") is None


def test_what_a_rank_has_finished_it_does_not_wait_for():
    first, second = pair()
    finished, other = first.start(0, 0, 1), second.start(0, 0, 3)
    first.reducer.finish(0, 0, 2)
    assert values(finished) == [2]
    second.reducer.fail(DeadlineError("did not hear"))
    with pytest.raises(TransportError, match=r"a list cannot take over: .*contribution of rank 0"):
        other.answer.result(LIMIT_S)  # nobody has kept the result that rank 0 had: an error, and no wrong average


def test_a_step_begins_once_and_only_with_dlcp():
    (exchange, _) = pair()
    exchange.start(7, 1, 0)
    exchange.start(7, 0, 0)
    exchange.start(8, 0, 0)
    assert exchange.reducer.steps == [7, 8]
    assert exchange.step == 8


def test_ranks_that_run_different_models_do_not_recover():
    first, second = pair()
    handed = [exchange.start(0, 0, 1) for exchange in (first, second)]
    first.reducer.fail(MessageMismatchError("rank 1 has 8 bytes"))
    for one in handed:
        with pytest.raises(TransportError, match="rank 1 has 8 bytes"):
            one.answer.result(LIMIT_S)
    assert {first.mode, second.mode} == {Mode.FAILED}
    with pytest.raises(TransportError, match="rank 1 has 8 bytes"):
        first.start(1, 0, 0)


def test_a_rank_that_does_not_come_to_recover_is_an_error_within_the_deadline():
    exchange, silent = pair(limit_s=0.3)
    handed = exchange.start(0, 0, 1)
    silent.close()
    exchange.reducer.fail(DeadlineError("rank 1 is silent"))
    with pytest.raises(TransportError, match="rank 1 is silent; and a list cannot take over: not all ranks"):
        handed.answer.result(LIMIT_S)
    late = exchange.take
    with pytest.raises(TransportError):
        late(0, 1, 0)


def test_what_comes_from_the_device_after_all_has_failed_fails_too():
    (exchange, _) = pair()
    handed = exchange.take(0, 0, 1)
    exchange.give_up("over")
    exchange._begin(handed)
    with pytest.raises(TransportError, match="over"):
        handed.answer.result(0)
    assert handed.which not in exchange.reducer.running


def test_closing_waits_for_a_recovery_that_is_about_to_begin(monkeypatch):
    begins = threading.Event()
    exchange, other = pair(limit_s=0.3)
    other.close()
    exchange.start(0, 0, 1)
    start_late(monkeypatch, 0.2, begins)
    assert close_while_it_leaves(exchange, exchange.reducer, begins) == []
    assert exchange.mode is Mode.FAILED, "the recovery was over, not forgotten"


def test_whoever_waits_for_a_closed_exchange_is_told():
    exchange, _ = pair()
    handed = exchange.start(0, 0, 1)
    exchange.close()
    exchange.reducer.fail(DeadlineError("closed"))
    with pytest.raises(DeadlineError, match="closed"):
        handed.answer.result(0)
    assert exchange.mode is Mode.DLCP, "there is nothing to recover for"


def test_many_threads_hand_over_while_another_fails():
    """No bucket is lost or done twice, at whichever moment the path breaks."""
    for moment in range(8):
        exchanges = pair()

        def run(exchange, moment=moment):
            handed = []
            for sequence in range(12):
                if sequence == moment + exchange.rank:
                    exchange._leave(DeadlineError("broken"))
                handed.append(exchange.start(0, sequence, sequence))
            return handed

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(run, exchanges))
        assert all(fallen_back(exchange) for exchange in exchanges)
        for exchange, handed in zip(exchanges, found, strict=True):
            completed = [one.which for one in handed if one.answer.done()]
            assert sorted(completed + exchange.fallen_back) == [(0, sequence) for sequence in range(12)]
            assert exchange.fallen_back == exchanges[0].fallen_back == sorted(exchange.fallen_back)
            assert all(one.answer.result(0)[0] == one.sequence for one in handed if one.answer.done())


def test_rank_0_says_it_once(caplog):
    exchanges = pair()
    with caplog.at_level(logging.WARNING, "dlcp"):
        for exchange in exchanges:
            exchange._leave(DeadlineError("the cable is out"))
        assert all(fallen_back(exchange) for exchange in exchanges)
        end_s = time.monotonic() + 5
        while not caplog.messages and time.monotonic() < end_s:
            time.sleep(0.01)
    (message,) = caplog.messages
    assert "the cable is out. Training goes on over a list" in message
