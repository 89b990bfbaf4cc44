# SPDX-License-Identifier: Apache-2.0
"""The KVStore's logic without MXNet: arrays that are NumPy's, and an engine that does what is ready, in a random order.

What MXNet's real engine does with it, tests/frameworks/with_mxnet shows.
"""

import importlib
import random
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from dlcp.session import Options
from dlcp.transport import PeerSilentError
from tests.frameworks.mirror_group import MirrorGroup

LIMIT_S = 20


class FakeEngine:
    """Does work when all that was pushed before and touches the same arrays is done; of what is ready, any."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.waiting = []
        self.running = []
        self.ran = []

    def push(self, work, *, reads, writes, priority=0, name=""):
        assert not {id(array) for array in reads} & {id(array) for array in writes}
        self.waiting.append((work, list(reads), list(writes), priority))

    def ready(self):
        found = []
        for place, (_, reads, writes, _) in enumerate(self.waiting):
            before = self.running + [(r, w) for _, r, w, _ in self.waiting[:place]]
            clash = any(
                _common(writes, earlier_reads + earlier_writes) or _common(reads, earlier_writes)
                for earlier_reads, earlier_writes in before
            )
            if not clash:
                found.append(place)
        return found

    def run(self):
        """Do all that can be done; return whether everything is."""
        while places := self.ready():
            work, reads, writes, priority = self.waiting.pop(self.random.choice(places))
            entry = (reads, writes)
            self.running.append(entry)
            self.ran.append(priority)
            work(lambda entry=entry: self.running.remove(entry))
        return not self.waiting and not self.running


def _common(ours, theirs):
    return {id(array) for array in ours} & {id(array) for array in theirs}


class FakeArray:
    """The part of MXNet's NDArray that the store uses."""

    engine: FakeEngine

    def __init__(self, values, stype="default"):
        self.values = np.array(values)
        self.stype = stype
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def copyto(self, other):
        def copy(done):
            other.values[...] = self.values
            done()

        self.engine.push(copy, reads=[self], writes=[other])

    def as_in_context(self, context):
        return self

    def wait_to_read(self):
        self.engine.run()
        assert not any(_common([self], writes) for _, writes in self.engine.running), "this would wait for ever"

    @property
    def now(self):
        self.wait_to_read()
        return self.values.tolist()


def add_n(*arrays, out):
    def add(done):
        out.values[...] = sum(array.values for array in arrays)
        done()

    FakeArray.engine.push(add, reads=list(arrays), writes=[out])


@pytest.fixture(params=range(3))
def mxnet(request, monkeypatch):
    """A module that passes for MXNet, with an engine of its own; gives ``dlcp.mxnet`` as imported with it."""
    engine = FakeArray.engine = FakeEngine(request.param)
    registry = {}
    base = type("KVStoreBase", (), {"register": staticmethod(lambda cls: registry.update({cls.__name__.lower(): cls}))})
    fake, kvstore = ModuleType("mxnet"), ModuleType("mxnet.kvstore")
    fake.cpu = lambda: "cpu"
    fake.nd = SimpleNamespace(
        zeros=lambda shape, ctx=None, dtype=np.float32: FakeArray(np.zeros(shape, dtype)),
        add_n=add_n,
        waitall=engine.run,
    )
    kvstore.KVStoreBase = base
    ours = ModuleType("dlcp.mxnet.scheduling")
    ours.push, ours.memory = engine.push, lambda array: array.values
    monkeypatch.delitem(sys.modules, "dlcp.mxnet", raising=False)
    for name, module in {"mxnet": fake, "mxnet.kvstore": kvstore, "dlcp.mxnet.scheduling": ours}.items():
        monkeypatch.setitem(sys.modules, name, module)
    store = importlib.import_module("dlcp.mxnet")
    yield SimpleNamespace(engine=engine, registry=registry, Store=store.Dist_DLCP)
    sys.modules.pop("dlcp.mxnet", None)


def floats(*values):
    return FakeArray(np.array(values, np.float32))


def tripled(name, ours):
    return 3 * ours


def test_it_is_registered_under_its_name(mxnet):
    assert mxnet.registry == {"dist_dlcp": mxnet.Store}
    store = mxnet.Store(group=MirrorGroup())
    assert "dist" in store.type, "or trainers leave it out"
    assert (store.rank, store.num_workers) == (0, 2)
    assert not store.is_capable("optimizer")


def test_steps_are_sums_and_end_by_themselves(mxnet):
    group = MirrorGroup(tripled)
    store = mxnet.Store(group=group)
    weights = [floats(1, 2), floats(3)]
    for key, weight in enumerate(weights):
        store.broadcast(key, weight, out=weight)
    for step in range(3):
        gradients = [floats(step, 1), floats(2)]
        for key, gradient in enumerate(gradients):
            store.pushpull(key, [gradient], priority=-key)
        assert [gradient.now for gradient in gradients] == [[4.0 * step, 4.0], [8.0]]
    assert group.names == ["parameter 0", "parameter 1"]
    assert [sorted(step) for step in group.steps] == [["parameter 0", "parameter 1"]] * 2, "the third is not over yet"


def test_priorities_become_the_order_of_layers_and_reach_the_engine(mxnet):
    group = RegisteredGroup()
    store = mxnet.Store(group=group)
    for key in "abc":
        store.init(key, floats(1))
    for _ in range(3):
        for key, priority in zip("abc", (-5, 0, -2), strict=True):
            store.push(key, floats(1), priority=priority)
        mxnet.engine.run()
    assert group.registered == [
        ["parameter a", "parameter b", "parameter c"],
        ["parameter b", "parameter c", "parameter a"],
    ]
    assert {-5, -2} <= set(mxnet.engine.ran)


class RegisteredGroup(MirrorGroup):
    def __init__(self):
        super().__init__()
        self.registered = []

    def register(self, names):
        self.names = None
        super().register(names)
        self.registered.append(list(names))


def test_keys_without_gradients_are_left_out(mxnet):
    group = MirrorGroup()
    store = mxnet.Store(group=group)
    for key in ("weight", "running_mean"):
        store.init(key, floats(1))
    for _ in range(2):
        store.pushpull("weight", floats(1))
    mxnet.engine.run()
    assert group.names == ["parameter weight", "parameter running_mean"]
    assert group.steps == [["parameter weight"]]


def test_push_and_pull_and_lists_of_keys_and_devices(mxnet):
    store = mxnet.Store(group=MirrorGroup(tripled))
    store.init([1, 2], [floats(5), floats(6)])
    before = [floats(0), floats(0)]
    store.pull([1, 2], out=before)
    assert [one.now for one in before] == [[5.0], [6.0]]
    store.push([1, 2], [[floats(1), floats(2)], floats(7)])
    after = [[floats(0), floats(0)], floats(0)]
    store.pull([1, 2], out=after)
    assert [one.now for one in after[0]] == [[12.0]] * 2
    assert after[1].now == [28.0]


def test_a_gradient_that_is_not_ready_holds_up_no_other(mxnet):
    store = mxnet.Store(group=MirrorGroup(tripled))
    slow, quick = floats(1), floats(2)
    store.broadcast([0, 1], [slow, quick], out=[slow, quick])
    mxnet.engine.run()
    computed = []
    mxnet.engine.push(computed.append, reads=[], writes=[slow])
    store.pushpull(0, slow)
    store.pushpull(1, quick)
    assert quick.now == [8.0]
    assert not mxnet.engine.run(), "the other one waits"
    computed[0]()
    assert slow.now == [4.0]


def test_results_may_come_in_another_thread(mxnet):
    group = LateGroup()
    store = mxnet.Store(group=group)
    gradient = floats(1)
    store.init(0, gradient)
    store.pushpull(0, gradient)
    assert not mxnet.engine.run()
    thread = threading.Thread(target=group.answer)
    thread.start()
    thread.join(LIMIT_S)
    assert gradient.now == [2.0]


class LateGroup(MirrorGroup):
    def start(self, name, values):
        done = super().start(name, values)
        self.waiting = type(done)()
        self.answer = lambda: self.waiting.set_result(done.result())
        return self.waiting


@pytest.mark.parametrize("late", [True, False])
def test_a_failure_leaves_no_gradient_and_is_raised_by_the_next_call(mxnet, late):
    group = FailingGroup() if late else MirrorGroup()
    store = mxnet.Store(group=group)
    gradient = floats(1, 2)
    store.init(0, gradient)
    group.failure = None if late else PeerSilentError("step 3: rank 1 is silent")
    store.pushpull(0, gradient)
    assert np.isnan(gradient.now).all()
    for call in (lambda: store.pushpull(0, gradient), lambda: store.broadcast(0, gradient, out=gradient)):
        with pytest.raises(PeerSilentError, match="rank 1 is silent"):
            call()


class FailingGroup(MirrorGroup):
    def start(self, name, values):
        done = type(super().start(name, values))()
        done.set_exception(PeerSilentError("step 3: rank 1 is silent"))
        return done


def test_what_it_cannot_do_is_refused(mxnet):
    store = mxnet.Store(group=MirrorGroup())
    with pytest.raises(NotImplementedError, match="update_on_kvstore=False"):
        store.set_optimizer(None)
    with pytest.raises(NotImplementedError, match="compression_params"):
        store.set_gradient_compression({"type": "2bit"})
    with pytest.raises(TypeError, match="parameter 0 is row_sparse"):
        store.init(0, FakeArray(np.zeros(3), stype="row_sparse"))
    store.init(0, floats(1))
    store.push(0, floats(1))
    with pytest.raises(ValueError, match="parameter 1 is new; init or broadcast all keys before"):
        store.push(1, floats(1))


def test_what_a_group_has_summed_is_not_summed_again(mxnet):
    group = MirrorGroup(tripled)
    group.options = Options(combine="sum", fallback=False)
    store = mxnet.Store(group=group)
    gradient = floats(1)
    store.init(0, gradient)
    store.pushpull(0, gradient)
    assert gradient.now == [2.0]


def test_an_engine_that_cannot_wait_is_refused(mxnet, monkeypatch):
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")
    with pytest.raises(RuntimeError, match="unset MXNET_ENGINE_TYPE"):
        mxnet.Store(group=MirrorGroup())


def test_closing_it_closes_its_group(mxnet):
    group = MirrorGroup()
    store = mxnet.Store(group=group)
    gradient = floats(1)
    store.init(0, gradient)
    store.pushpull(0, gradient)
    store.close()
    assert group.closed
    assert gradient.values.tolist() == [2.0]
