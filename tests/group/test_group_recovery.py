# SPDX-License-Identifier: Apache-2.0
"""Ranks that leave DLCP complete the same buckets, whatever each of them has got to; the network is made up."""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from dlcp.collectives import Bucket, Residual
from dlcp.session import Options
from dlcp.session.averager import PendingBucket, StepAverager
from dlcp.session.recovery import PeerWatch
from dlcp.session.training_session import Fallback, SessionPhase, TrainingSession
from dlcp.transport import DeadlineError, Membership, MessageMismatchError, PeerAbortedError, TransportError
from dlcp.transport.ledger import Ledger
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment, Tagger
from tests.group.recovery_ranks import FakeEndpoint, FakeReducer, Network, close_while_it_leaves, start_late
from tests.waiting import until

LIMIT_S = 20
VALUES = 100


class ListWatch(PeerWatch):
    """Ranks meet in a network of threads."""

    def __init__(self, network, rank):
        self.network, self.rank = network, rank

    def channel(self):
        return self.network.channel(self.rank)

    def check_peers(self, where):
        if others := [reason for rank, reason in self.network.left.items() if rank != self.rank]:
            return PeerAbortedError(others[0])
        return None

    def publish_left(self, reason):
        self.network.left[self.rank] = reason


class Given(PendingBucket):
    """A bucket, and whether the session took it in."""

    admitted = True

    def __init__(self, step, sequence, segments):
        self.averaged = Future()
        super().__init__(step, sequence, segments, sum(each.stop - each.start for each in segments) * 4, self._resolve)

    def _resolve(self, error):
        if error is None:
            self.averaged.set_result(self.bucket.values)
        else:
            self.averaged.set_exception(error)


class Session(TrainingSession):
    """A session with a reducer that averages when a test says so."""

    def __init__(self, network, rank, deadline_s=LIMIT_S, error_feedback=True):
        options = Options(deadline_s=deadline_s, error_feedback=error_feedback)
        made = {"ledger": Ledger(), "feedback": Residual(), "tagger": Tagger()}
        self.fallen_back = []
        """Buckets that the fallback has averaged, in this order."""
        average = lambda pending, done: self.fallen_back.append(pending.id)  # noqa: E731
        fallback = Fallback("a list", average, ListWatch(network, rank))
        super().__init__(StepAverager(options, Membership(rank, ranks=tuple(range(network.ranks))), **made), fallback)
        self.reducer = FakeReducer(rank)
        self.use(FakeEndpoint(), self.reducer)

    def take(self, step, sequence, value):
        """Hand a bucket over that is not on the host yet."""
        segments = [Segment(Layer(f"layer{sequence}", sequence), 0, VALUES)]
        pending = Given(step, sequence, segments)
        pending.admitted = self.admit(pending)
        if not pending.admitted:
            self.fallback.average(pending, None)
        pending.bucket = Bucket(np.full(VALUES, value, np.float32), ValueType.FLOAT32, segments)
        return pending

    def give(self, step, sequence, value):
        """Hand a bucket over that is on the host."""
        pending = self.take(step, sequence, value)
        if pending.admitted:
            self.start(pending)
        return pending


def pair(**options):
    network = Network(2, **options)
    return [Session(network, rank) for rank in range(2)]


def values(*buckets):
    return [float(bucket.averaged.result(LIMIT_S)[0]) for bucket in buckets]


def fallen_back(session):
    return until(lambda: session.phase is SessionPhase.FALLBACK, lambda: f"the session is {session.phase}")


def test_what_one_rank_has_given_dlcp_all_complete_and_nothing_else():
    first, second = pair()
    mine = [first.give(4, sequence, 1 + sequence) for sequence in range(3)]
    theirs = [second.give(4, 0, 3)]
    first.reducer.fail(DeadlineError("step 4: too late"))
    assert not mine[1].averaged.done()
    theirs += [second.give(4, 1, 4), second.give(4, 2, 5)]  # came later than it was decided what to complete
    assert values(*mine) == values(*theirs) == [2, 3, 4]
    assert fallen_back(first)
    assert fallen_back(second)
    assert first.fallen_back == second.fallen_back == []
    assert first.reason == second.reason == "step 4: too late", "not that another has left"
    assert first.endpoint.closed == ["step 4: too late"]


def test_what_comes_meanwhile_falls_back_in_order_once_it_is_on_the_host():
    first, second = pair()
    done = [session.give(0, 0, 2) for session in (first, second)]
    middle = [session.take(0, 1, 0) for session in (first, second)]  # no recovery can end before these have come
    first.leave(DeadlineError("broken"))
    second.leave(DeadlineError("broken"))
    later = [session.give(0, 2, 0) for session in (first, second)]
    assert values(*done) == [2, 2]
    time.sleep(0.05)  # nothing comes: that is what is tested
    assert {first.phase, second.phase} == {SessionPhase.RECOVERING}, "one is still on the device"
    for session, pending in zip((first, second), middle, strict=True):
        session.start(pending)
    assert fallen_back(first)
    assert fallen_back(second)
    assert first.fallen_back == second.fallen_back == [(0, 1), (0, 2)]
    assert not any(pending.averaged.done() for pending in later)


def test_a_bucket_that_dlcp_refuses_is_completed_with_what_is_owed():
    first, second = pair()
    taken = first.take(0, 0, 1)
    first.averager.feedback.add(np.full(VALUES, 10, np.float64), taken.segments)
    first.reducer.refuses = DeadlineError("no more")
    other = second.give(0, 0, 3)
    first.start(taken)
    assert values(taken, other) == [7, 7]
    assert first.averager.feedback.of("layer0") is None


@pytest.mark.parametrize("error_feedback", [True, False])
def test_what_was_lost_is_owed_only_with_error_feedback(error_feedback):
    network = Network(2)
    first, second = (Session(network, rank, error_feedback=error_feedback) for rank in range(2))
    buckets = first.give(0, 0, 1), second.give(0, 0, 3)
    runs = [session.reducer.running[0, 0] for session in (first, second)]
    contributed, averaged = (run.partial_result() for run in runs)
    contributed.residual = np.full(VALUES, 5, np.float32)
    averaged.values[:], averaged.final[:] = 2, True
    runs[0].partial_result, runs[1].partial_result = lambda: contributed, lambda: averaged
    first.reducer.fail(DeadlineError("step 0: too late"))
    assert values(*buckets) == [2, 2]
    owed = first.averager.feedback.of("layer0")
    if error_feedback:
        np.testing.assert_array_equal(owed, 5 + 1, "what was lost before, and what the average lacks")
    else:
        assert owed is None
    assert second.averager.feedback.of("layer0") is None


def test_what_a_rank_has_finished_it_does_not_wait_for():
    first, second = pair()
    finished, other = first.give(0, 0, 1), second.give(0, 0, 3)
    first.reducer.finish(0, 0, 2)
    assert values(finished) == [2]
    second.reducer.fail(DeadlineError("did not hear"))
    with pytest.raises(TransportError, match=r"a list cannot take over: .*contribution of rank 0"):
        other.averaged.result(LIMIT_S)  # nobody has kept the result that rank 0 had: an error, and no wrong average


def test_what_a_rank_has_finished_it_keeps_for_others_until_a_later_step_is_finished():
    (session, _) = pair()
    for step in (3, 7):
        for sequence in (0, 1):
            session.give(step, sequence, 0)
        assert list(session.table.buckets) == [(3, 0), (3, 1), (7, 0), (7, 1)][: 4 if step == 7 else 2]
        if step == 3:
            session.reducer.finish(3, 0, 0)
            session.reducer.finish(3, 1, 0)
    session.reducer.finish(7, 1, 0)
    assert list(session.table.buckets) == [(7, 0), (7, 1)]


def test_a_step_begins_once_and_only_with_dlcp():
    (session, _) = pair()
    session.give(7, 1, 0)
    session.give(7, 0, 0)
    session.give(8, 0, 0)
    assert session.reducer.steps == [7, 8]
    assert session.table.step == 8


def test_ranks_that_run_different_models_do_not_recover():
    first, second = pair()
    pending = [session.give(0, 0, 1) for session in (first, second)]
    first.reducer.fail(MessageMismatchError("rank 1 has 8 bytes"))
    for one in pending:
        with pytest.raises(TransportError, match="rank 1 has 8 bytes"):
            one.averaged.result(LIMIT_S)
    assert {first.phase, second.phase} == {SessionPhase.FAILED}
    with pytest.raises(TransportError, match="rank 1 has 8 bytes"):
        first.give(1, 0, 0)


def test_a_rank_that_does_not_come_to_recover_is_an_error_within_the_deadline():
    session, silent = pair(limit_s=0.3)
    pending = session.give(0, 0, 1)
    silent.close()
    session.reducer.fail(DeadlineError("rank 1 is silent"))
    with pytest.raises(TransportError, match="rank 1 is silent; and a list cannot take over: not all ranks"):
        pending.averaged.result(LIMIT_S)
    late = session.take
    with pytest.raises(TransportError):
        late(0, 1, 0)


def test_a_rank_that_hangs_is_named_by_all_and_says_where(caplog):
    network = Network(3)
    sessions = [Session(network, rank, deadline_s=1.0) for rank in range(3)]
    pending = [session.give(4, 0, 1) for session in sessions[:2]]
    woken = threading.Event()
    hanging = threading.Thread(target=woken.wait, args=(LIMIT_S,), name="script")
    hanging.start()
    sessions[0].reducer.fail(DeadlineError("step 4: rank 1 delivered 0% of layer0"))
    named = r"^job 0, step 4: rank 2 answers but has not reached bucket 0, 0.9 s after others left DLCP"
    for one in pending:
        with pytest.raises(TransportError, match=named):
            one.averaged.result(LIMIT_S)
    until(lambda: sessions[2].phase is SessionPhase.FAILED)
    with pytest.raises(TransportError, match=named):  # whenever it goes on
        sessions[2].give(4, 0, 1)
    woken.set()
    hanging.join()
    (said,) = caplog.messages
    assert said.startswith("DLCP: rank 2 hangs before bucket 0 of step 4, which other ranks have reached.")
    assert "thread script:" in said
    assert "in wait" in said


def test_what_comes_from_the_device_after_all_has_failed_fails_too():
    (session, _) = pair()
    pending = session.take(0, 0, 1)
    session.fail("over")
    session.start(pending)
    with pytest.raises(TransportError, match="over"):
        pending.averaged.result(0)
    assert pending.id not in session.reducer.running


def test_closing_waits_for_a_recovery_that_is_about_to_begin(monkeypatch):
    begins = threading.Event()
    session, other = pair(limit_s=0.3)
    other.close()
    session.give(0, 0, 1)
    start_late(monkeypatch, 0.2, begins)
    assert close_while_it_leaves(session, session.reducer, begins) == []
    with pytest.raises(TransportError, match="cannot take over"):  # the recovery was over, not forgotten
        session.check()


def test_whoever_waits_for_a_closed_exchange_is_told():
    session, _ = pair()
    pending = session.give(0, 0, 1)
    session.close()
    session.reducer.fail(DeadlineError("closed"))
    with pytest.raises(DeadlineError, match="closed"):
        pending.averaged.result(0)
    assert session.phase is SessionPhase.CLOSED, "there is nothing to recover for"


def test_many_threads_hand_over_while_another_fails():
    """No bucket is lost or done twice, at whichever moment the path breaks."""
    for moment in range(8):
        sessions = pair()

        def run(session, moment=moment):
            pending = []
            for sequence in range(12):
                if sequence == moment + session.rank:
                    session.leave(DeadlineError("broken"))
                pending.append(session.give(0, sequence, sequence))
            return pending

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(run, sessions))
        assert all(fallen_back(session) for session in sessions)
        for session, pending in zip(sessions, found, strict=True):
            completed = [one.id for one in pending if one.averaged.done()]
            assert sorted(completed + session.fallen_back) == [(0, sequence) for sequence in range(12)]
            assert session.fallen_back == sessions[0].fallen_back == sorted(session.fallen_back)
            assert all(one.averaged.result(0)[0] == one.sequence for one in pending if one.averaged.done())


def test_rank_0_says_it_once(caplog):
    sessions = pair()
    with caplog.at_level(logging.WARNING, "dlcp"):
        for session in sessions:
            session.leave(DeadlineError("the cable is out"))
        assert all(fallen_back(session) for session in sessions)
        until(lambda: caplog.messages, "nobody said why")
    (message,) = [each for each in caplog.messages if "the cable is out" in each]  # another test's rank may speak late
    assert "the cable is out. Training continues with a list" in message
