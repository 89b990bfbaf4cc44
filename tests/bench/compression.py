# SPDX-License-Identifier: Apache-2.0
"""Compressors on one core: their cost, how small they make a bucket, and how much of it they leave out.

The peer is the bucket as it is: the ratio is how many times fewer bytes travel from each rank. Time is what a rank
computes for that, to encode its own and to decode one result; where contents are gathered, it decodes each rank's.
"""

import time
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.bench import BenchResult, median, result
from dlcp.compress import Compressor, Occasion, make_compressor
from dlcp.values.tags import Layer, Segment
from tests.bench.harness import Benchmark, Turns

TRIED: Final = (
    *("topk:0.01", "randomk:0.01", "qsgd:4", "qsgd:8", "terngrad", "signsgd", "efsignsgd"),
    *("atomo:3", "powersgd:2"),
)
SHAPE: Final = (512, 512)
_LAYERS: Final = 4
"""Four layers of 512 x 512 values, 4 MB in all."""


def measure(turns: Turns) -> list[BenchResult]:
    """Compress and decompress a bucket of about a million values.

    Returns
    -------
    ``compression.NAME``: bytes that a rank sends, against those of float32; in the details, the time it takes in ms and
    the squared error over the squared norm.
    """
    values, segments = _bucket()
    seconds: dict[str, list[float]] = {name: [] for name in TRIED}
    compressors = {name: make_compressor(name) for name in TRIED}
    steps = dict.fromkeys(TRIED, 0)
    errors: dict[str, float] = {}

    def run(name: str) -> float:
        started_s = time.process_time()
        sent, decoded = through(compressors[name], values, segments, steps[name])
        seconds[name].append(time.process_time() - started_s)
        steps[name] += 1
        errors[name] = float(np.sum((values - decoded) ** 2) / np.sum(values**2))
        return sent

    samples = turns.take({name: partial(run, name) for name in TRIED})
    return [
        result(
            f"compression.{name}",
            "bytes",
            samples[name],
            [float(values.nbytes)] * turns.rounds,
            details={
                "peer": "float32",
                "encode_and_decode_ms": round(1e3 * median(seconds[name][turns.warm_up :]), 2),
                "clock": "CPU time",
                "squared_error": round(errors[name], 4),
                "reduces": compressors[name].reduces,
                "values": len(values),
            },
        )
        for name in TRIED
    ]


def through(
    compressor: Compressor, values: NDArray[np.float32], segments: list[Segment], step: int
) -> tuple[float, NDArray[np.floating]]:
    """Return how many bytes one rank alone sends of a bucket, in all rounds, and what comes out."""
    encoded, sent = compressor.encode(values, segments, Occasion(step, 0)), 0.0
    while True:
        sent += encoded.content.nbytes
        following = compressor.refine(encoded, encoded.content)
        if following is None:
            return sent, compressor.decode(encoded, encoded.content)
        encoded = following


def _bucket() -> tuple[NDArray[np.float32], list[Segment]]:
    """Return layers whose singular values fall off as those of gradients do, and entries with heavy tails."""
    rng = np.random.default_rng(1)
    rows, columns = SHAPE
    parts = []
    for _ in range(_LAYERS):
        left, right = rng.standard_normal((rows, 64)), rng.standard_normal((64, columns))
        sizes = 1.0 / np.arange(1, 65)
        noise = 0.02 * rng.standard_normal((rows, columns)) * rng.lognormal(0, 1, (rows, columns))
        parts.append(((left * sizes) @ right + noise).astype(np.float32).ravel())
    size = rows * columns
    segments = [
        Segment(Layer(f"layer{number}", round(255 * number / (_LAYERS - 1)), SHAPE), number * size, (number + 1) * size)
        for number in range(_LAYERS)
    ]
    return np.concatenate(parts), segments


BENCHMARK: Final = Benchmark(lambda arguments: measure(arguments.turns), rounds=7)
