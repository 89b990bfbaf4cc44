# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's handwritten digits, and a small network in NumPy that learns them."""

import numpy as np
from sklearn.datasets import load_digits

from dlcp.values.tags import Segment, layers_in_order
from tests.compress.compressed_ranks import CompressedRanks

SHAPES = {"hidden.weight": (64, 24), "hidden.bias": (24,), "head.weight": (24, 10), "head.bias": (10,)}
LAYERS = layers_in_order(list(SHAPES), SHAPES)
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
STOPS = np.cumsum(SIZES).tolist()
SEGMENTS = [Segment(layer, stop - size, stop) for layer, size, stop in zip(LAYERS.values(), SIZES, STOPS, strict=True)]
BATCH = 32


def data():
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def parts(flat):
    return [flat[s.start : s.stop].reshape(shape) for s, shape in zip(SEGMENTS, SHAPES.values(), strict=True)]


def beginning():
    rng = np.random.default_rng(1)
    flat = np.zeros(STOPS[-1], np.float32)
    for values in parts(flat)[::2]:
        values[:] = rng.standard_normal(values.shape) / np.sqrt(len(values))
    return flat


def scores(flat, images):
    hidden, hidden_bias, head, head_bias = parts(flat)
    active = np.maximum(images @ hidden + hidden_bias, 0)
    return active, active @ head + head_bias


def gradient(flat, images, labels):
    """Of the mean cross entropy, flat."""
    active, logits = scores(flat, images)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = odds / odds.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    found = np.empty_like(flat)
    hidden, hidden_bias, head, head_bias = parts(found)
    head[:], head_bias[:] = active.T @ error, error.sum(axis=0)
    back = (error @ parts(flat)[2].T) * (active > 0)
    hidden[:], hidden_bias[:] = images.T @ back, back.sum(axis=0)
    return found


def accuracy(flat, images, labels):
    return float((scores(flat, images)[1].argmax(axis=1) == labels).mean())


def train(compression="", combine="average", *, ranks=2, steps=150, rate=0.5, momentum=0.0, loss=0.01, bound=0.1,
          **options):  # fmt: skip
    """Train by what ranks exchange; return the accuracy on what was held back, and the ranks. Replicas are compared."""
    (images, labels), held_back = data()
    job = CompressedRanks(ranks, compression, combine, loss=loss, bound=bound, **options)
    models = [beginning() for _ in range(ranks)]
    speeds = [np.zeros_like(model) for model in models]
    rng = np.random.default_rng(2)
    for step in range(steps):
        chosen = rng.permutation(len(labels))[: ranks * BATCH].reshape(ranks, BATCH)
        gradients = [gradient(model, images[mine], labels[mine]) for model, mine in zip(models, chosen, strict=True)]
        results = job.reduce(step, gradients, segments=SEGMENTS)
        for model, speed, result in zip(models, speeds, results, strict=True):
            speed[:] = momentum * speed + result
            model -= np.float32(rate) * speed
    for model in models[1:]:
        assert model.tobytes() == models[0].tobytes(), "replicas differ"
    job.check_bounds(bound)
    job.settle()
    return accuracy(models[0], *held_back), job
