# SPDX-License-Identifier: Apache-2.0
"""One rank of the digits example with JAX, by exact means and by DLCP; prints what came of it, as JSON."""

import hashlib
import json
import os
import signal
import sys

import jax
import numpy as np
import optax

import dlcp.jax
import dlcp.session
from dlcp.examples.frameworks import jax_digits, load

DIES_AFTER = 5


def told(params):
    _, testing = load()
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    return {"accuracy": jax_digits.accuracy(params, testing), "weights": hashlib.sha256(bits).hexdigest()}


def by_exact_means(args, size):
    """Compute the gradients of all ranks here, one after the other, and their mean."""
    training, _ = load()
    parts = [training.shard(rank, size) for rank in range(size)]
    count = len(parts[0].labels)
    batches = count // args.batch_size
    params = jax_digits.network(args.seed)
    optimizer = optax.sgd(optax.cosine_decay_schedule(args.lr, args.epochs * batches), momentum=0.9)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels):
        gradients = jax.vmap(jax.grad(jax_digits.loss), (None, 0, 0))(params, images, labels)
        means = jax.tree.map(lambda leaf: leaf.mean(0), gradients)
        updates, state = optimizer.update(means, state, params)
        return optax.apply_updates(params, updates), state

    for epoch in range(args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(count)
        for chosen in np.split(order[: batches * args.batch_size], batches):
            images, labels = (
                np.stack([getattr(part, what)[chosen] for part in parts]) for what in ("images", "labels")
            )
            params, state = step(params, state, images, labels)
    return told(params)


def by_dlcp(args, group):
    found = told(jax_digits.train(*load(), args, group))
    return {**found, "active": group.active, "steps": group.step, **group.ledger.summary()}


def both(*seeds):
    each = [jax_digits.arguments(["--seed", seed]) for seed in seeds]
    with dlcp.session.join() as group:
        found = [by_dlcp(args, group) for args in each]
        group.barrier()
    return {"exact": [by_exact_means(args, group.size) for args in each], "dlcp": found}


def dying():
    """Train by DLCP; the last rank is killed in the middle of it."""
    with dlcp.session.join() as group:
        optimizer = optax.chain(dlcp.jax.average_gradients(group), optax.sgd(0.1))
        mine = load()[0].shard(group.rank, group.size)
        params = jax_digits.network(0)
        state = optimizer.init(params)

        @jax.jit
        def step(params, state):
            gradients = jax.grad(jax_digits.loss)(params, mine.images[:8], mine.labels[:8])
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(params, updates), state

        for number in range(100):
            params, state = step(params, state)
            if number == DIES_AFTER and group.rank == group.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return told(params)


if __name__ == "__main__":
    print(json.dumps({"both": both, "dying": dying}[sys.argv[1]](*sys.argv[2:])))
