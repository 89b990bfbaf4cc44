# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on handwritten digits with JAX and optax, on any number of ranks.

Comments mark the lines for DLCP. Run it with ``python -m dlcp.examples.frameworks.jax_digits``, or on two ranks with
``dlcp launch -n 2 python -m dlcp.examples.frameworks.jax_digits``.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

import dlcp.jax  # DLCP
import dlcp.session  # DLCP
from dlcp.examples.frameworks import Digits, load, parser

Params = dict[str, dict[str, jax.Array]]
SHAPES = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "fc1": (512, 128), "fc2": (128, 10)}


def network(seed: int) -> Params:
    """Return the parameters of a network for images of shape (8, 8, 1)."""
    random = np.random.default_rng(seed)
    return {
        name: {
            "kernel": jnp.asarray(random.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape), jnp.float32),
            "bias": jnp.zeros(shape[-1]),
        }
        for name, shape in SHAPES.items()
    }


def scores(params: Params, images: jax.Array) -> jax.Array:
    """Return scores of shape (n, 10) for images of shape (n, 8, 8, 1)."""
    x = images
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x, params[name]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[name]["bias"])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["fc1"]["kernel"] + params["fc1"]["bias"])
    return x @ params["fc2"]["kernel"] + params["fc2"]["bias"]


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, images), labels).mean()


def accuracy(params: Params, digits: Digits) -> float:
    """Return the share of images that are classified correctly."""
    return float((jax.jit(scores)(params, digits.images).argmax(1) == digits.labels).mean())


def train(training: Digits, testing: Digits, args: argparse.Namespace, group: dlcp.session.Group) -> Params:
    """Train a network and return it."""
    mine = training.shard(group.rank, group.size)  # DLCP: every rank has its own part of the data
    batches = len(mine.labels) // args.batch_size
    params: Params = network(args.seed)
    params = dlcp.jax.broadcast(params, group)  # DLCP: all ranks start with rank 0's parameters
    optimizer: Any = optax.sgd(optax.cosine_decay_schedule(args.lr, args.epochs * batches), momentum=0.9)
    optimizer = optax.chain(dlcp.jax.average_gradients(group), optimizer)  # DLCP: average gradients over the ranks
    state = optimizer.init(params)

    def step(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, Any, jax.Array]:
        cost, gradients = jax.value_and_grad(loss)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, cost

    jitted_step = jax.jit(step)
    for epoch in range(args.epochs):
        costs = []
        order = np.random.default_rng([args.seed, epoch]).permutation(len(mine.labels))
        for chosen in np.split(order[: batches * args.batch_size], batches):
            params, state, cost = jitted_step(params, state, mine.images[chosen], mine.labels[chosen])
            costs.append(float(cost))
        mean = dlcp.jax.average_metrics({"loss": np.mean(costs)}, group)  # DLCP: mean over the ranks
        if group.rank == 0:  # DLCP: one rank prints
            print(f"epoch {epoch + 1}: loss {mean['loss']:.4f}, accuracy {accuracy(params, testing):.4f}", flush=True)
    return params


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    return parser("JAX", rate=0.03).parse_args(given)


def main() -> None:
    """Join the other ranks and train."""
    with dlcp.session.join() as group:  # DLCP: join the other ranks
        train(*load(), arguments(), group)


if __name__ == "__main__":
    main()
