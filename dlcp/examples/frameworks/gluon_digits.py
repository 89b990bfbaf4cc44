# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on handwritten digits with MXNet's Gluon, on any number of ranks.

Comments mark the lines for DLCP. Run it with ``python -m dlcp.examples.frameworks.gluon_digits``, or on two ranks with
``dlcp launch -n 2 python -m dlcp.examples.frameworks.gluon_digits``.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from numpy.typing import NDArray

import dlcp.mxnet  # DLCP: there is a kvstore "dist_dlcp" now
from dlcp.examples.frameworks import Digits, load, parser


def network(seed: int) -> Any:
    """Return a network for images of shape (1, 8, 8)."""
    mx.random.seed(seed)
    model = gluon.nn.HybridSequential()
    model.add(
        gluon.nn.Conv2D(16, 3, padding=1, activation="relu"),
        gluon.nn.Conv2D(32, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Flatten(),
        gluon.nn.Dense(128, activation="relu"),
        gluon.nn.Dense(10),
    )
    model.initialize(mx.init.Xavier())
    model.hybridize()
    return model


def train(training: Digits, store: Any, args: argparse.Namespace) -> Any:
    """Train a network and return it."""
    model = network(args.seed)
    mine = training.shard(store.rank, store.num_workers)
    batches = len(mine.labels) // args.batch_size
    rate = mx.lr_scheduler.CosineScheduler(args.epochs * batches, base_lr=args.lr)
    trainer = gluon.Trainer(
        model.collect_params(),
        "sgd",
        {"lr_scheduler": rate, "momentum": 0.9},
        kvstore=store,
        update_on_kvstore=False,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    images, labels = as_arrays(mine)
    generator = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        order = generator.permutation(len(mine.labels))
        for start in range(0, batches * args.batch_size, args.batch_size):
            batch = mx.nd.array(order[start : start + args.batch_size], dtype="int32")
            with autograd.record():
                loss = loss_of(model(images.take(batch)), labels.take(batch))
            loss.backward()
            trainer.step(args.batch_size * store.num_workers)
    return model


def as_arrays(digits: Digits) -> tuple[Any, Any]:
    """Return images, shape (n, 1, 8, 8), and labels as MXNet arrays."""
    return mx.nd.array(digits.images.transpose(0, 3, 1, 2)), mx.nd.array(digits.labels)


def predict(model: Any, digits: Digits) -> NDArray[np.int64]:
    """Return the network's predictions for the images."""
    guesses: NDArray[np.int64] = model(as_arrays(digits)[0]).asnumpy().argmax(1)
    return guesses


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    options = parser("Gluon", rate=0.1)
    options.add_argument("--kvstore", default=dlcp.mxnet.NAME)  # DLCP: instead of "dist_sync"
    options.add_argument("--save", metavar="FILE", help="write the parameters to FILE")
    return options.parse_args(given)


def main() -> None:
    """Join the other ranks, train, test, save."""
    args = arguments()
    training, testing = load()
    store = mx.kvstore.create(args.kvstore)
    model = train(training, store, args)
    if store.rank == 0:
        print(f"accuracy {(predict(model, testing) == testing.labels).mean():.1%}")
        if args.save:
            model.save_parameters(args.save)


if __name__ == "__main__":
    main()
