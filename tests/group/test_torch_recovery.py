# SPDX-License-Identifier: Apache-2.0
"""A DDP model's exchange when DLCP fails: what it does beside what all exchanges do; see test_group_recovery.py."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.group.recovery_ranks import FakeEndpoint, FakeReducer, Network, close_while_it_leaves, start_late

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from dlcp.collectives import ErrorFeedback
from dlcp.session.agreement import Agreement
from dlcp.session.recovery import LEFT, Mode
from dlcp.tags import Layer, Segment
from dlcp.torch import fallback
from dlcp.torch.fallback import Exchange, GroupChannel
from dlcp.torch.hook import hook
from dlcp.transport import DeadlineError, PeerSilentError, TransportError

LIMIT_S = 20
SEGMENTS = [Segment(Layer("w", 0), 0, 100)]


@pytest.fixture
def exchange(monkeypatch):
    """That of rank 0 of two, the other of which says nothing."""
    network = Network(2, limit_s=0.3)
    agreement = Agreement(HashStore(), 0, 2, 5)
    made = Exchange(None, agreement, range(2), LIMIT_S, ErrorFeedback())
    channel = network.channel(0)
    channel.close = lambda: None
    monkeypatch.setattr(fallback, "open_channel", lambda *_: channel)
    made.reducer = FakeReducer(0)
    made.use(FakeEndpoint(), made.reducer, may_recover=True)
    yield made
    made.close()


def test_closing_waits_for_a_recovery_that_is_about_to_begin(exchange, monkeypatch):
    begins = threading.Event()
    exchange.average(torch.ones(100), 0, 0, SEGMENTS, lambda: None)
    start_late(monkeypatch, 0.2, begins)
    assert close_while_it_leaves(exchange, exchange.reducer, begins) == []
    assert exchange.mode is Mode.FAILED, "the recovery was over, not forgotten"


def test_backward_says_what_was_wrong(exchange):
    """DDP reads the answer in C++, where it is the future's own error or a tensor."""
    tensor, noted = torch.ones(100), []
    bucket = SimpleNamespace(buffer=lambda: tensor)
    state = SimpleNamespace(average=lambda bucket: exchange.average(bucket.buffer(), 0, 0, SEGMENTS, noted.append))
    answer = hook(state, bucket)
    exchange.reducer.fail(DeadlineError("rank 1 has not sent layer w"))
    with pytest.raises(RuntimeError, match="TransportError: rank 1 has not sent layer w; and the framework's own"):
        torch._C.Future.wait(answer)
    assert noted == []


def test_an_average_comes_back_and_is_noted(exchange):
    tensor, noted = torch.arange(100.0), []
    answer = exchange.average(tensor, 0, 0, SEGMENTS, lambda: noted.append(1))
    exchange.reducer.finish(0, 0, np.full(100, 7))
    assert torch.equal(answer.wait(), torch.full((100,), 7.0))
    assert noted == [1]


def test_whoever_comes_after_a_failure_is_told_it(exchange):
    exchange.give_up("over")
    with pytest.raises(TransportError, match="over"):
        exchange.average(torch.ones(100), 0, 0, SEGMENTS, lambda: None).wait()


def test_a_rank_that_has_not_come_to_recover_is_named(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_object", broken)
    monkeypatch.setattr(dist, "all_reduce", broken)
    store = HashStore()
    agreements = [Agreement(store, rank, 3, 5) for rank in range(3)]
    channel = GroupChannel(None, agreements[0])
    agreements[0].tell(LEFT, "silent")
    agreements[2].tell(LEFT, "silent")
    for use in (channel.gather, channel.add):
        with pytest.raises(PeerSilentError, match=r"closed by peer \(not there: rank 1\)"):
            use(np.ones(3))
    agreements[1].tell(LEFT, "silent")
    with pytest.raises(RuntimeError, match=r"closed by peer$"):
        channel.gather(None)
