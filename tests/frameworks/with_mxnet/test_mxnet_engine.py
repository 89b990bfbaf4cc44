# SPDX-License-Identifier: Apache-2.0
"""The KVStore on MXNet's own engine, in one process: what waits for what, and what a trainer sees."""

import threading
import time

import numpy as np
import pytest

pytest.importorskip("mxnet")

import mxnet as mx
from mxnet import autograd, gluon

from dlcp.mxnet import NAME, Dist_DLCP, scheduling
from dlcp.transport import PeerSilentError
from tests.frameworks.mirror_group import MirrorGroup

LIMIT_S = 20


@pytest.fixture
def store():
    store = Dist_DLCP(group=MirrorGroup(lambda name, ours: 3 * ours))
    yield store
    store.close()


def test_work_waits_for_what_it_reads_and_holds_back_who_reads_what_it_writes():
    source, target, result = mx.nd.zeros((4,)), mx.nd.zeros((4,)), mx.nd.zeros((4,))
    values, begun, release = scheduling.memory(target), threading.Event(), threading.Event()

    def work(done):
        begun.set()

        def later():
            release.wait(LIMIT_S)
            values[:] += scheduling.memory(source)
            done()

        threading.Thread(target=later).start()

    for _ in range(3):
        source += 1
    scheduling.push(work, reads=[source], writes=[target])
    target.copyto(result)
    assert begun.wait(LIMIT_S)
    release.set()
    assert result.asnumpy().tolist() == [3] * 4


def test_a_sum_is_there_while_another_gradient_is_still_computed(store):
    slow, quick = mx.nd.zeros((8,)), mx.nd.ones((8,))
    store.broadcast([0, 1], [slow, quick], out=[slow, quick])
    computed = threading.Event()
    scheduling.push(
        lambda done: threading.Thread(target=lambda: (computed.wait(LIMIT_S), done())).start(), reads=[], writes=[slow]
    )
    began_s = time.monotonic()
    store.pushpull(0, slow, priority=0)
    store.pushpull(1, quick, priority=-1)
    assert time.monotonic() - began_s < LIMIT_S / 2, "nothing waits for the slow one"
    assert quick.asnumpy().tolist() == [4] * 8
    assert not computed.is_set()
    computed.set()
    assert slow.asnumpy().tolist() == [0] * 8


def test_gradients_of_several_devices_are_added(store):
    parts = [mx.nd.full((3,), value, ctx=mx.cpu(value)) for value in (1, 2)]
    sums = [mx.nd.zeros((3,), ctx=mx.cpu(value)) for value in (1, 2)]
    store.broadcast("w", parts[0], out=sums)
    store.pushpull("w", parts, out=sums)
    assert [one.asnumpy().tolist() for one in sums] == [[12] * 3] * 2


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_all_formats_of_gradients(store, dtype):
    values = mx.nd.array(np.arange(6).reshape(2, 3), dtype=dtype)
    store.init("w", values)
    store.pushpull("w", values)
    assert values.asnumpy().tolist() == (4 * np.arange(6).reshape(2, 3)).tolist()


def test_a_trainer_asks_for_it_by_its_name(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    weights = {}
    for kvstore in (NAME, None):
        mx.random.seed(3)
        model = gluon.nn.Dense(4, in_units=5)
        model.initialize()
        trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore)
        for _ in range(3):
            with autograd.record():
                loss = (model(mx.nd.ones((2, 5))) ** 2).sum()
            loss.backward()
            trainer.step(2)
        weights[kvstore] = model.weight.data().asnumpy()
        if kvstore:
            assert isinstance(trainer._kvstore, Dist_DLCP)
            assert (trainer._kvstore.rank, trainer._kvstore.num_workers) == (0, 1)
            assert trainer._update_on_kvstore is False
            trainer._kvstore.close()
    assert (weights[NAME] == weights[None]).all()
    with pytest.raises(ValueError, match="update_on_kvstore=False"):
        gluon.Trainer(model.collect_params(), "sgd", kvstore=NAME, update_on_kvstore=True).step(1)


def test_a_failed_exchange_leaves_no_gradient_and_is_raised_by_the_next_call(store):
    gradient = mx.nd.ones((5,))
    store.init(0, gradient)
    store.group.failure = PeerSilentError("step 3: rank 1 is silent")
    store.pushpull(0, gradient)
    assert np.isnan(gradient.asnumpy()).all()
    with pytest.raises(PeerSilentError, match="rank 1 is silent"):
        store.pushpull(0, gradient)
