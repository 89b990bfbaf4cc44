# SPDX-License-Identifier: Apache-2.0
"""One rank of the digits example over the KVStore that is asked for; prints what came of it, as JSON."""

import hashlib
import json
import os
import signal
import sys

import mxnet as mx

from dlcp.examples.frameworks import gluon_digits, load

DIES_AFTER = 5


def train(name, epochs, *seeds):
    """Train from each of the seeds."""
    store = mx.kvstore.create(name)
    found = [trained(store, gluon_digits.arguments(["--epochs", epochs, "--seed", seed])) for seed in seeds]
    if name == "dist_dlcp":
        store.barrier()
    return {"runs": found}


def trained(store, args):
    training, testing = load()
    model = gluon_digits.train(training, store, args)
    weights = b"".join(parameter.data().asnumpy().tobytes() for parameter in model.collect_params().values())
    found = {
        "rank": store.rank,
        "workers": store.num_workers,
        "accuracy": float((gluon_digits.predict(model, testing) == testing.labels).mean()),
        "weights": hashlib.sha256(weights).hexdigest(),
    }
    if store.type == "dist_dlcp":
        found |= {"active": store.group.active, "reason": store.group.reason, **store.group.ledger.summary()}
    return found


def die():
    """Train over DLCP; the last rank is killed in the middle of it."""
    store = mx.kvstore.create("dist_dlcp")
    weights, gradient = mx.nd.zeros((40, 50)), mx.nd.ones((40, 50))
    store.broadcast(0, weights, out=weights)
    for step in range(100):
        if step == DIES_AFTER and store.rank == store.num_workers - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        store.pushpull(0, gradient)
        gradient.wait_to_read()
        gradient[:] = 1
    return {}


if __name__ == "__main__":
    print(json.dumps(die() if sys.argv[1] == "die" else train(*sys.argv[1:])), flush=True)
