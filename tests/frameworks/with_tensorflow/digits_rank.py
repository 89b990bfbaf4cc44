# SPDX-License-Identifier: Apache-2.0
"""One rank of the digits example, by TensorFlow's own all-reduce and by DLCP; prints what came of it, as JSON."""

import hashlib
import json
import os
import signal
import sys
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

import dlcp.tensorflow
from dlcp.examples.frameworks import keras_digits, load

DIES_AFTER = 5


def digest(variables):
    values = (np.ascontiguousarray(keras.ops.convert_to_numpy(variable)) for variable in variables)
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def trained(seed):
    return told(keras_digits.train(*load(), keras_digits.arguments(["--seed", seed])))


def told(model):
    _, testing = load()
    right = model.predict(testing.images, batch_size=600, verbose=0).argmax(1) == testing.labels
    return {
        "accuracy": float(right.mean()),
        "weights": digest(model.weights),
        "optimizer": digest(model.optimizer.variables),
        "steps": int(model.optimizer.iterations),
    }


class CollectiveSGD(keras.optimizers.SGD):
    """Averages with TensorFlow's own ring all-reduce."""

    def apply(self, grads, trainable_variables=None):
        size, means = int(os.environ["WORLD_SIZE"]), []
        for instance, gradient in enumerate(grads):
            means.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=gradient,
                    group_size=size,
                    group_key=1,
                    instance_key=100 + instance,
                    ordering_token=[],
                    merge_op="Add",
                    final_op="Div",
                    communication_hint="ring",
                )
            )
        super().apply(means, trainable_variables)


def by_tensorflow(seeds):
    """Run the example with TensorFlow's own means in DLCP's place."""
    ours = keras_digits.dlcp
    keras_digits.dlcp = SimpleNamespace(
        DistributedOptimizer=lambda optimizer: CollectiveSGD.from_config(optimizer.get_config()),
        BroadcastGlobalVariablesCallback=lambda root: keras.callbacks.Callback(),
        MetricAverageCallback=keras.callbacks.Callback,
        rank=lambda: int(os.environ["RANK"]),
        size=lambda: int(os.environ["WORLD_SIZE"]),
    )
    try:
        return [trained(seed) for seed in seeds]
    finally:
        keras_digits.dlcp = ours


def both(*seeds):
    """Train by TensorFlow's all-reduce, then by DLCP."""
    tf.distribute.MultiWorkerMirroredStrategy()  # connects the ranks' runtimes; has to come first
    found = {"tensorflow": by_tensorflow(seeds)}
    group = dlcp.tensorflow.init()
    found["dlcp"] = [{**trained(seed), "active": group.active, **group.ledger.summary()} for seed in seeds]
    group.barrier()
    dlcp.tensorflow.shutdown()
    return found


def dying():
    """Train by DLCP; the last rank is killed in the middle of it."""
    group = dlcp.tensorflow.init()
    killed = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            os.kill(os.getpid(), signal.SIGKILL) if batch == DIES_AFTER and group.rank == group.size - 1 else None
        )
    )
    keras.utils.set_random_seed(0)
    model = keras_digits.network()
    model.compile(dlcp.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.01)), "sparse_categorical_crossentropy")
    mine = load()[0].shard(group.rank, group.size)
    model.fit(mine.images, mine.labels, 8, 1, verbose=0, callbacks=[killed])
    return told(model)


if __name__ == "__main__":
    print(json.dumps({"both": both, "dying": dying}[sys.argv[1]](*sys.argv[2:])))
