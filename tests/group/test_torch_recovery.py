# SPDX-License-Identifier: Apache-2.0
"""A DDP model's session when DLCP fails: its behaviour beyond that of all sessions; see test_group_recovery.py."""

import threading

import numpy as np
import pytest

from tests.group.group_ranks import on_ranks
from tests.group.recovery_ranks import FakeEndpoint, FakeReducer, Network, close_while_it_leaves, start_late

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from dlcp.bench.allreduce import WholeBucket
from dlcp.session.averager import StepAverager
from dlcp.session.joining import Agreement
from dlcp.session.training_session import LEFT, Fallback, TrainingSession
from dlcp.torch import Options, framework
from dlcp.torch.framework import GlooChannel, GlooWatch
from dlcp.torch.hook import hook
from dlcp.torch.state import FRAMEWORK, State
from dlcp.transport import DeadlineError, PeerSilentError, TransportError
from dlcp.values.tags import Layer

LIMIT_S = 20


@pytest.fixture
def state(monkeypatch):
    """That of rank 0 of two, the other of which says nothing."""
    network = Network(2, limit_s=0.3)
    agreement = Agreement(HashStore(), 0, 2, 5)
    channel = network.channel(0)
    channel.close = lambda: None
    monkeypatch.setattr(framework, "open_channel", lambda *_: channel)
    made = State(Options(deadline_s=LIMIT_S))
    fallback = Fallback(FRAMEWORK, None, GlooWatch(None, agreement, LIMIT_S))
    shared = {"ledger": made.ledger, "feedback": made.feedback, "tagger": made.tagger}
    made.session = TrainingSession(StepAverager(made.options, agreement.membership, **shared), fallback)
    made.reducer = FakeReducer(0)
    made.session.use(FakeEndpoint(), made.reducer)
    yield made
    made.close()


def bucket_of(state, tensor):
    """Return a bucket of DDP's, of one layer, that comes to the state."""
    state.attached, state._layers = True, {id(tensor): Layer("w", 0)}
    return WholeBucket(tensor)


def submit(state, tensor):
    return state.average_bucket(bucket_of(state, tensor))


def test_closing_waits_for_a_recovery_that_is_about_to_begin(state, monkeypatch):
    begins = threading.Event()
    submit(state, torch.ones(100))
    start_late(monkeypatch, 0.2, begins)
    assert close_while_it_leaves(state.session, state.reducer, begins) == []
    with pytest.raises(TransportError, match="cannot take over"):  # the recovery was over, not forgotten
        state.session.check()


def test_threads_that_close_at_once_close_it_once(state, monkeypatch):
    closings, second = [], threading.Event()

    def close():
        closings.append(threading.current_thread())
        if len(closings) > 1:
            second.set()
        second.wait(0.2)  # time for the other thread to come here, too

    monkeypatch.setattr(state.session.averager, "close", close)
    assert on_ranks(2, lambda _: state.close()) == {0: None, 1: None}
    assert len(closings) == 1
    assert state.session.fallback.watch.close() is None


def test_backward_says_what_was_wrong(state):
    """DDP reads the answer in C++, where it is the future's own error or a tensor."""
    answer = hook(state, bucket_of(state, torch.ones(100)))
    state.reducer.fail(DeadlineError("rank 1 has not sent layer w"))
    with pytest.raises(RuntimeError, match="TransportError: rank 1 has not sent layer w; and the framework's own"):
        torch._C.Future.wait(answer)
    assert state.layer_seconds() == {}


def test_an_average_comes_back_and_is_noted(state):
    answer = submit(state, torch.arange(100.0))
    state.reducer.finish(0, 0, np.full(100, 7))
    assert torch.equal(answer.wait(), torch.full((100,), 7.0))
    assert len(state.layer_seconds()["0"]) == 1


def test_whoever_comes_after_a_failure_is_told_it(state):
    state.session.fail("over")
    with pytest.raises(TransportError, match="over"):
        submit(state, torch.ones(100)).wait()


def test_a_rank_that_has_not_come_to_recover_is_named(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_object", broken)
    monkeypatch.setattr(dist, "all_reduce", broken)
    store = HashStore()
    agreements = [Agreement(store, rank, 3, 5) for rank in range(3)]
    channel = GlooChannel(None, agreements[0])
    agreements[0].publish(LEFT, "silent")
    agreements[2].publish(LEFT, "silent")
    for use in (channel.gather, channel.add):
        with pytest.raises(PeerSilentError, match=r"closed by peer \(not there: rank 1\)"):
            use(np.ones(3))
    agreements[1].publish(LEFT, "silent")
    with pytest.raises(RuntimeError, match=r"closed by peer$"):
        channel.gather(None)
