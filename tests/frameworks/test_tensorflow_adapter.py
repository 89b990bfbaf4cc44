# SPDX-License-Identifier: Apache-2.0
"""The logic of the Keras adapter without TensorFlow: what of both it calls is played by a few lines of NumPy."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.frameworks.mirror_group import MirrorGroup


class Tensor(np.ndarray):
    def set_shape(self, shape):
        assert self.shape == tuple(shape)


def tensor(values):
    return np.asarray(values).view(Tensor)


def numpy_function(function, inputs, kinds, stateful=True):
    """Call back at once, with memory that cannot be written, as TensorFlow's may be."""
    given = [np.array(value) for value in inputs]
    for value in given:
        value.flags.writeable = False
    returned = function(*given)
    if not isinstance(kinds, list):
        return tensor(returned)
    assert [value.dtype for value in returned] == kinds
    return list(map(tensor, returned))


class Optimizer:
    """The way of Keras 3's optimizers with gradients, step by step, as far as the adapter relies on it."""

    def __init__(self, rate=1.0):
        self.rate, self.built, self.name = rate, False, "plain"
        self._trainable_variables = []

    def build(self, variables):
        self._trainable_variables, self.built = list(variables), True

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        pairs = zip(grads, trainable_variables or self._trainable_variables, strict=True)
        kept = [(grad, variable) for grad, variable in pairs if grad is not None]
        self._backend_apply_gradients([grad for grad, _ in kept], [variable for _, variable in kept])

    def _backend_apply_gradients(self, grads, trainable_variables):
        for grad, variable in zip(self._clip_gradients(grads), trainable_variables, strict=True):
            variable.value = variable.value - self.rate * grad

    def _clip_gradients(self, grads):
        return grads


class LossScaleOptimizer(Optimizer):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.dynamic_scale, self.applied = inner, np.float32(8), []

    def apply(self, grads, trainable_variables=None):
        self.applied.append([None if grad is None else grad / self.dynamic_scale for grad in grads])


class Variable:
    def __init__(self, path, values=(1.0, 1.0)):
        self.path, self.value = path, np.array(values, np.float32)

    def assign(self, values):
        self.value = values


@pytest.fixture
def adapter(monkeypatch):
    """``dlcp.tensorflow``, imported with stand-ins for TensorFlow and Keras."""
    tensorflow, keras = ModuleType("tensorflow"), ModuleType("keras")
    vars(tensorflow).update(
        convert_to_tensor=tensor,
        constant=lambda value: tensor(np.int32(value)),
        int32=np.dtype(np.int32),
        float32=np.dtype(np.float32),
        newaxis=np.newaxis,
        numpy_function=numpy_function,
        reduce_all=np.all,
        math=SimpleNamespace(is_finite=np.isfinite),
        cast=lambda value, kind: tensor(np.asarray(value).astype(kind)),
        where=lambda which, yes, no: tensor(np.where(which, yes, np.float32(no))),
    )
    vars(keras).update(
        __version__="fake",
        backend=SimpleNamespace(backend=lambda: "tensorflow"),
        callbacks=SimpleNamespace(Callback=object),
        config=SimpleNamespace(dtype_policy=lambda: SimpleNamespace(name="float32")),
        ops=SimpleNamespace(convert_to_numpy=lambda variable: variable.value),
        optimizers=SimpleNamespace(LossScaleOptimizer=LossScaleOptimizer),
    )
    for name in [name for name in sys.modules if name.startswith("dlcp.tensorflow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    monkeypatch.setitem(sys.modules, "keras", keras)
    import dlcp.tensorflow

    yield dlcp.tensorflow
    for name in [name for name in sys.modules if name.startswith("dlcp.tensorflow")]:
        del sys.modules[name]


GRADIENTS = [tensor(np.array(values, np.float32)) for values in ([1, 2], [3, 4], [5, 6])]


def variables():
    return [Variable("net/front/kernel"), Variable("net/front/bias"), Variable("net/back/kernel")]


def test_the_mean_is_applied_and_goes_out_from_the_back(adapter):
    group = MirrorGroup(lambda name, ours: 3 * ours)
    optimizer, layers = adapter.DistributedOptimizer(Optimizer(), group), variables()
    optimizer.apply(GRADIENTS, layers)
    assert group.names == ["front.kernel", "front.bias", "back.kernel"]
    assert group.steps == [group.names[::-1]]
    for variable, gradient in zip(layers, GRADIENTS, strict=True):
        assert np.array_equal(variable.value, 1 - 2 * gradient)
    optimizer.apply([GRADIENTS[0], None, GRADIENTS[2]])
    assert group.steps[1] == ["back.kernel", "front.kernel"]


def test_it_says_that_it_is_the_plain_optimizer(adapter):
    plain = Optimizer()
    optimizer = adapter.DistributedOptimizer(plain, MirrorGroup())
    assert optimizer is plain
    assert optimizer.__class__ is Optimizer
    assert type(optimizer) is not Optimizer
    assert isinstance(optimizer, Optimizer)
    with pytest.raises(ValueError, match="averages gradients already"):
        adapter.DistributedOptimizer(optimizer, MirrorGroup())


def test_an_optimizer_that_would_bypass_it_is_noticed(adapter):
    class OfAnotherKeras(Optimizer):
        def apply(self, grads, trainable_variables=None):
            self.build(trainable_variables)

    optimizer = adapter.DistributedOptimizer(OfAnotherKeras(), MirrorGroup())
    with pytest.raises(RuntimeError, match="Keras fake applies gradients in a way that DLCP does not support"):
        optimizer.apply(GRADIENTS, variables())
    optimizer.apply([None] * 3, variables())

    class OfAnOlderKeras(Optimizer):
        def apply(self, grads, trainable_variables=None):
            self._clip_gradients(grads)

    with pytest.raises(RuntimeError, match=r"install Keras 3\.5"):
        adapter.DistributedOptimizer(OfAnOlderKeras(), MirrorGroup()).apply(GRADIENTS, variables())


@pytest.mark.parametrize(("their_flag", "finite"), [(1, True), (0, False)])
def test_a_step_is_finite_if_it_is_on_all_ranks(adapter, their_flag, finite):
    group = MirrorGroup(lambda name, ours: ours * 0 + their_flag if name == "finite" else 3 * ours)
    optimizer = adapter.DistributedOptimizer(LossScaleOptimizer(Optimizer()), group)
    scaled = [8 * GRADIENTS[0], None, 8 * GRADIENTS[2]]
    optimizer.apply(scaled, variables())
    assert group.steps == [["finite", "back.kernel", "front.kernel"]]
    ((front, none, back),) = optimizer.applied
    assert none is None
    if finite:
        assert np.array_equal(front, 2 * GRADIENTS[0])
        assert np.array_equal(back, 2 * GRADIENTS[2])
    else:
        assert np.isinf(front).all()
        assert np.isinf(back).all()


def test_zeros_travel_in_place_of_what_is_not_finite(adapter):
    sent = {}
    group = MirrorGroup(lambda name, ours: sent.setdefault(name, ours) * 0 + 1)
    optimizer = adapter.DistributedOptimizer(LossScaleOptimizer(Optimizer()), group)
    optimizer.apply([tensor(np.float32([1, np.nan])), GRADIENTS[1], None], variables())
    assert {name: values.tolist() for name, values in sent.items()} == {
        "finite": [0],
        "front.bias": [0, 0],
        "front.kernel": [0, 0],
    }
    assert np.isinf(optimizer.applied[0][0]).all()


def test_names_leave_the_model_out_and_are_told_apart(adapter):
    from dlcp.tensorflow import names_of

    paths = ["net_3/a/kernel", "net_3/a/bias", "net_3/a/kernel"]
    assert names_of(list(map(Variable, paths))) == ["a.kernel", "a.bias", "a.kernel_2"]
    assert names_of([Variable("kernel"), Variable("net/bias")]) == ["kernel", "net.bias"]
    assert names_of([Variable("dense/kernel"), Variable("dense/bias")]) == ["dense.kernel", "dense.bias"]


def test_a_group_serves_one_model(adapter):
    group = MirrorGroup()
    for _ in range(2):
        adapter.DistributedOptimizer(Optimizer(), group).apply(GRADIENTS, variables())
    with pytest.raises(ValueError, match="another model"):
        adapter.DistributedOptimizer(Optimizer(), group).build([Variable("other/kernel")])


def test_broadcasts_and_means_of_metrics(adapter):
    group = MirrorGroup(root_values=lambda values: values * 0 + 4)
    ours, theirs = Variable("a/b"), Variable("a/b")
    adapter.broadcast_variables([ours], 0, group)
    adapter.broadcast_variables([theirs], 1, group)
    assert (ours.value.tolist(), theirs.value.tolist()) == ([1, 1], [4, 4])
    assert adapter.average_metrics({"loss": 2.0, "accuracy": 0.0}, group) == {"accuracy": 2.0, "loss": 3.0}


def test_whoever_has_not_joined_is_told_to(adapter):
    for call in (adapter.rank, adapter.size, adapter.local_rank, adapter.current):
        with pytest.raises(RuntimeError, match=r"call init\(\) first, e\.g\. dlcp\.tensorflow\.init\(\)"):
            call()
    adapter.shutdown()
