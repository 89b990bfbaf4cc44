# SPDX-License-Identifier: Apache-2.0
"""The gradient transformation on a real JAX, with another rank that is made up."""

import threading

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import optax
from jax import numpy as jnp

from dlcp.jax import average_gradients, average_metrics, broadcast, forward_order, name_of
from dlcp.transport import PeerSilentError
from tests.frameworks.mirror_group import MirrorGroup

pytestmark = pytest.mark.timeout(120)
IMAGES = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)


def network():
    keys = jax.random.split(jax.random.PRNGKey(0))
    return {
        "front": {"kernel": jax.random.normal(keys[0], (6, 5)), "bias": jnp.zeros(5)},
        "back": {"kernel": jax.random.normal(keys[1], (5, 3)), "bias": jnp.zeros(3)},
    }


def loss(params, x):
    x = jnp.tanh(x @ params["front"]["kernel"] + params["front"]["bias"])
    return ((x @ params["back"]["kernel"] + params["back"]["bias"] - 1) ** 2).mean()


def trained(*transformations, jit=True, params=None, batches=IMAGES):
    optimizer = optax.chain(*transformations)
    params = network() if params is None else params
    state = optimizer.init(params)

    def step(params, state, x):
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for x in batches:
        params, state = step(params, state, x)
    return jax.block_until_ready(params)


def same(ours, theirs):
    return all(np.array_equal(one, other) for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True))


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_with_equal_ranks_training_is_as_without(jit):
    group = MirrorGroup()
    ours = trained(average_gradients(group, ["front", "back"]), optax.adam(0.01), jit=jit)
    assert same(ours, trained(optax.adam(0.01), jit=jit))
    assert group.names == ["front.bias", "front.kernel", "back.bias", "back.kernel"]
    assert group.steps == [group.names[::-1]] * 4, "the last layer's gradients are there first"


def test_what_is_applied_is_the_mean():
    group = MirrorGroup(lambda name, ours: -ours / 2)
    clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))
    ours = trained(average_gradients(group), clipped)
    assert same(ours, trained(optax.scale(0.25), clipped))


def test_gradients_travel_while_backward_runs():
    """The front layer's backward waits until the back layer's gradient has been handed over."""
    handed_over, waited = threading.Event(), []

    def wait(gradient):
        waited.append(handed_over.wait(20))
        return np.asarray(gradient)

    @jax.custom_vjp
    def slow(x):
        return x

    def backward(_, gradient):
        return (jax.pure_callback(wait, jax.ShapeDtypeStruct(gradient.shape, gradient.dtype), gradient),)

    slow.defvjp(lambda x: (x, None), backward)

    def notice(name, ours):
        if name == "back":
            handed_over.set()
        return ours

    optimizer = average_gradients(MirrorGroup(notice), ["front", "back"])
    params = {"front": jnp.ones((6, 5)), "back": jnp.ones((5, 3))}

    @jax.jit
    def step(params, x):
        gradients = jax.grad(lambda params: (slow(x @ params["front"]) @ params["back"]).sum())(params)
        return optimizer.update(gradients, optimizer.init(params))[0]

    jax.block_until_ready(step(params, IMAGES[0]))
    assert waited == [True]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_gradients_keep_their_type(kind):
    group = MirrorGroup(lambda name, ours: ours * 0)
    update = jax.jit(average_gradients(group).update)
    gradients = {"a": jnp.full((3, 2), 4, kind), "empty": jnp.zeros((0, 2), kind), "scalar": jnp.asarray(2, kind)}
    averaged, _ = update(gradients, optax.EmptyState())
    assert {name: leaf.dtype.name for name, leaf in averaged.items()} == dict.fromkeys(gradients, kind)
    assert {name: leaf.shape for name, leaf in averaged.items()} == {"a": (3, 2), "empty": (0, 2), "scalar": ()}
    assert (averaged["a"] == 2).all()
    assert averaged["scalar"] == 1


def test_a_group_of_one_exchanges_nothing():
    group = MirrorGroup(size=1)
    assert same(trained(average_gradients(group), optax.sgd(0.1)), trained(optax.sgd(0.1)))
    assert group.steps == []


def test_a_transformation_may_be_made_again_but_not_for_another_model():
    group = MirrorGroup()
    for _ in range(2):
        trained(average_gradients(group), optax.sgd(0.1))
    assert len(group.steps) == 8
    with pytest.raises(ValueError, match="another model"):
        average_gradients(group).init({"head": jnp.ones(3)})


def test_a_failed_exchange_ends_training_with_its_reason():
    group = MirrorGroup()
    group.failure = PeerSilentError("step 3: rank 1 is silent")
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1 is silent"):
        trained(average_gradients(group), optax.sgd(0.1))


def test_a_tree_is_broadcast_whole():
    group = MirrorGroup(root_values=lambda values: values * 0 + 7)
    tree = {"params": [jnp.ones((2, 3)), jnp.ones(2, jnp.bfloat16)], "count": jnp.zeros((), jnp.int32), "none": None}
    received = broadcast(tree, group, root=1)
    assert jax.tree.structure(received) == jax.tree.structure(tree)
    for ours, theirs in zip(*map(jax.tree.leaves, (tree, received)), strict=True):
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
        assert (theirs == 7).all()
    assert same(broadcast(tree, group, root=0), tree)


def test_metrics_are_means_over_ranks():
    group = MirrorGroup(root_values=lambda values: np.array([0.5, 3.0]))
    assert average_metrics({"loss": jnp.asarray(1.0), "accuracy": 0.5}, group) == {"accuracy": 0.5, "loss": 2.0}


def test_names_and_order_follow_the_tree():
    layers = {f"Dense_{number}": {"kernel": 0, "bias": 0} for number in (0, 2, 10)}
    tree = {"params": {**layers, "blocks": [0, {"scale": 0}, 0]}}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = [name_of(path) for path in paths]
    assert names[4:6] == ["params.Dense_2.bias", "params.Dense_2.kernel"], "JAX sorts 10 before 2"
    ordered = [names[leaf] for leaf in forward_order(paths)]
    numbers = [name.split(".")[1] for name in ordered]
    assert numbers == ["Dense_0", "Dense_0", "Dense_2", "Dense_2", "Dense_10", "Dense_10", "blocks", "blocks", "blocks"]
    assert ordered[6:] == ["params.blocks.0", "params.blocks.1.scale", "params.blocks.2"]
    told = [names[leaf] for leaf in forward_order(paths, ["params.blocks", "params.Dense_10"])]
    assert told[:3] == ordered[6:]
    assert told[3].startswith("params.Dense_10.")
    with pytest.raises(ValueError, match=r"begins with 'params\.Dense_1'"):
        forward_order(paths, ["params.Dense_1"])
