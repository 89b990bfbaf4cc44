# SPDX-License-Identifier: Apache-2.0
"""The logic of the JAX adapter without JAX: trees, callbacks and optax are played by a few lines of NumPy."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.frameworks.mirror_group import MirrorGroup


@dataclass(frozen=True)
class DictKey:
    key: Any


@dataclass(frozen=True)
class SequenceKey:
    idx: int


@dataclass(frozen=True)
class GetAttrKey:
    name: str


class GradientTransformation(NamedTuple):
    init: Any
    update: Any


def leaves_with_path(tree, path=()):
    if isinstance(tree, dict):
        children = [(DictKey(key), tree[key]) for key in sorted(tree)]
    elif isinstance(tree, list):
        children = [(SequenceKey(index), child) for index, child in enumerate(tree)]
    else:
        return [(path, tree)]
    return [found for key, child in children for found in leaves_with_path(child, (*path, key))]


def rebuilt(tree, leaves):
    if isinstance(tree, dict):
        return {key: rebuilt(tree[key], leaves) for key in sorted(tree)}
    if isinstance(tree, list):
        return [rebuilt(child, leaves) for child in tree]
    return next(leaves)


def structure(tree):
    return SimpleNamespace(unflatten=lambda leaves: rebuilt(tree, iter(leaves)))


def io_callback(function, shapes, *arguments, ordered):
    """Call back at once, with memory that cannot be written, as JAX's is."""
    assert ordered
    given = [np.array(argument) for argument in arguments]
    for value in given:
        value.flags.writeable = False
    returned = function(*given)
    assert [(value.shape, value.dtype) for value in returned] == [(shape.shape, shape.dtype) for shape in shapes]
    return returned


@pytest.fixture
def adapter(monkeypatch):
    """``dlcp.jax``, imported with stand-ins for JAX and optax."""
    jax, experimental, optax = ModuleType("jax"), ModuleType("jax.experimental"), ModuleType("optax")
    experimental.io_callback = io_callback
    vars(jax).update(
        experimental=experimental,
        numpy=np,
        ShapeDtypeStruct=lambda shape, dtype: SimpleNamespace(shape=shape, dtype=dtype),
        tree_util=SimpleNamespace(
            tree_leaves_with_path=leaves_with_path,
            tree_flatten_with_path=lambda tree: (leaves_with_path(tree), structure(tree)),
            tree_flatten=lambda tree: ([leaf for _, leaf in leaves_with_path(tree)], structure(tree)),
        ),
    )
    vars(optax).update(GradientTransformation=GradientTransformation, EmptyState=tuple, Params=Any, Updates=Any)
    for name in [name for name in sys.modules if name.startswith("dlcp.jax")]:
        monkeypatch.delitem(sys.modules, name)
    for module in (jax, experimental, optax):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import dlcp.jax

    yield dlcp.jax
    for name in [name for name in sys.modules if name.startswith("dlcp.jax")]:
        del sys.modules[name]


def gradients():
    values = iter(np.arange(5, dtype=np.float32))
    return {f"Dense_{number}": {"kernel": np.full((2, 3), next(values))} for number in (1, 10, 2)} | {
        "rest": [np.full(2, next(values)), np.full((), next(values))]
    }


def test_gradients_become_means_and_go_out_from_the_back(adapter):
    group = MirrorGroup(lambda name, ours: 3 * ours)
    transformation, ours = adapter.average_gradients(group), gradients()
    state = transformation.init(ours)
    averaged, _ = transformation.update(ours, state)
    assert group.names == ["Dense_1.kernel", "Dense_2.kernel", "Dense_10.kernel", "rest.0", "rest.1"]
    assert group.steps == [group.names[::-1]]
    for (path, mean), (_, mine) in zip(leaves_with_path(averaged), leaves_with_path(gradients()), strict=True):
        assert np.array_equal(mean, 2 * mine), path
        assert mean.shape == mine.shape


def test_what_was_given_is_left_as_it_is(adapter):
    ours = gradients()
    adapter.average_gradients(MirrorGroup(lambda name, ours: ours + 1)).update(ours, ())
    assert all(
        np.array_equal(one, other)
        for (_, one), (_, other) in zip(leaves_with_path(ours), leaves_with_path(gradients()), strict=True)
    )


def test_layers_tell_the_order_where_names_do_not(adapter):
    tree = {"head": 0, "embed": {"table": 0}, "middle": [{"w": 0}, {"w": 0}], "embedding": 0}
    paths = [path for path, _ in leaves_with_path(tree)]
    names = [adapter.name_of(path) for path in paths]
    told = [names[leaf] for leaf in adapter.forward_order(paths, ["embed", "middle"])]
    assert told == ["embed.table", "middle.0.w", "middle.1.w", "embedding", "head"]
    with pytest.raises(ValueError, match="begins with 'tail'; the names are embed"):
        adapter.forward_order(paths, ["tail"])


def test_fields_and_places_keep_their_order(adapter):
    paths = [
        (GetAttrKey("weight"),),
        (GetAttrKey("bias"),),
        *[(GetAttrKey("parts"), SequenceKey(i)) for i in range(11)],
    ]
    assert adapter.forward_order(paths) == list(range(13))
    assert [adapter.name_of(path) for path in paths[:3]] == ["weight", "bias", "parts.0"]
    assert adapter.name_of(()) == "value"


def test_a_group_serves_one_model_and_one_alone_is_left_alone(adapter):
    group = MirrorGroup()
    for _ in range(2):
        adapter.average_gradients(group).init(gradients())
    with pytest.raises(ValueError, match="another model"):
        adapter.average_gradients(group).init({"other": np.zeros(2)})
    alone, ours = MirrorGroup(size=1), gradients()
    assert adapter.average_gradients(alone).update(ours, ())[0] is ours


def test_broadcasts_and_means_of_metrics(adapter):
    group = MirrorGroup(root_values=lambda values: values * 0 + 4)
    received = adapter.broadcast({"a": [np.ones(2), np.ones((), np.int32)]}, group, root=1)
    assert received["a"][0].tolist() == [4, 4]
    assert received["a"][1].dtype == np.int32
    assert adapter.broadcast([np.ones(2)], group)[0].tolist() == [1, 1]
    assert adapter.average_metrics({"loss": 2.0, "accuracy": 0.0}, group) == {"accuracy": 2.0, "loss": 3.0}
