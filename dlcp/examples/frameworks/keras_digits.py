# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on handwritten digits with Keras, on any number of ranks.

Comments mark the lines for DLCP. Run it with ``python -m dlcp.examples.frameworks.keras_digits``, or on two ranks with
``dlcp launch -n 2 python -m dlcp.examples.frameworks.keras_digits``.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import keras

import dlcp.tensorflow as dlcp  # DLCP
from dlcp.examples.frameworks import Digits, load, parser


def network() -> Any:
    """Return a network for images of shape (8, 8, 1)."""
    layers = keras.layers
    rectified = {"activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", name="conv1", **rectified),
            layers.Conv2D(32, 3, padding="same", name="conv2", **rectified),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, name="fc1", **rectified),
            layers.Dense(10, name="fc2"),
        ],
        name="digits",
    )


def train(training: Digits, testing: Digits, args: argparse.Namespace) -> Any:
    """Train a network and return it."""
    keras.utils.set_random_seed(args.seed)
    model = network()
    batches = len(training.labels) // dlcp.size() // args.batch_size
    rate = keras.optimizers.schedules.CosineDecay(args.lr, args.epochs * batches)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer = dlcp.DistributedOptimizer(optimizer)  # DLCP: average gradients over the ranks
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    mine = training.shard(dlcp.rank(), dlcp.size())  # DLCP: every rank has its own part of the data
    model.fit(
        mine.images,
        mine.labels,
        args.batch_size,
        args.epochs,
        validation_data=(testing.images, testing.labels),
        validation_freq=args.epochs,
        verbose=2 if dlcp.rank() == 0 else 0,  # DLCP: one rank prints
        callbacks=[
            dlcp.BroadcastGlobalVariablesCallback(0),  # DLCP: all ranks start with rank 0's weights
            dlcp.MetricAverageCallback(),  # DLCP: average loss and accuracy over the ranks
        ],
    )
    return model


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    options = parser("Keras", rate=0.05)
    options.add_argument("--save", metavar="FILE", help="write the model to FILE, which must end in .keras")
    return options.parse_args(given)


def main() -> None:
    """Join the other ranks, train, save."""
    args = arguments()
    dlcp.init()  # DLCP: join the other ranks
    model = train(*load(), args)
    if args.save and dlcp.rank() == 0:  # DLCP: all ranks have the same model
        model.save(args.save)
    dlcp.shutdown()  # DLCP


if __name__ == "__main__":
    main()
