# SPDX-License-Identifier: Apache-2.0
"""Tagging of gradients on one core: the wait of an all-reduce before its first packet can leave.

The peer is a copy of the same buffer: what an all-reduce that buffers what it sends pays at the least.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.bench import BenchResult, result
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment, Tagger
from tests.bench.harness import Benchmark, Samples, Turns

VALUES: Final = 25_000_000
"""100 MB of float32."""
_LAYERS: Final = 50
PAYLOAD_BYTES: Final = 1440
"""Payload of a packet with an MTU of 1500."""
_PER_PACKET: Final = PAYLOAD_BYTES // 4


def measure(turns: Turns, values: int = VALUES) -> list[BenchResult]:
    """Time the tagging of ``values`` float32 values in 50 layers.

    Returns
    -------
    ``tags.100MB``, in one buffer; ``tags.100MB.by_layer``, each layer in a call of its own, as cross-step scheduling
    does it. Both in ms, and each compared with a copy of the buffer.
    """
    gradients = _gradients(values)
    whole, single = _layers(values)
    copied = np.empty_like(gradients)

    def tag_all(tagger: Tagger) -> None:
        tagger.tag(gradients, ValueType.FLOAT32, whole, _PER_PACKET)

    def tag_by_layer(tagger: Tagger) -> None:
        for place, segment in zip(whole, single, strict=True):
            tagger.tag(gradients[place.start : place.stop], ValueType.FLOAT32, [segment], _PER_PACKET)

    taggers = Tagger(), Tagger()
    with _one_core():
        samples = turns.take(
            {
                "copy": lambda: _ms(lambda: np.copyto(copied, gradients)),
                "tags": lambda: _ms(lambda: tag_all(taggers[0])),
                "by_layer": lambda: _ms(lambda: tag_by_layer(taggers[1])),
            }
        )
    return [
        _beside_copy("tags.100MB", samples, "tags", values),
        _beside_copy("tags.100MB.by_layer", samples, "by_layer", values),
    ]


def _beside_copy(name: str, samples: Samples, contender: str, values: int) -> BenchResult:
    details = {
        "peer": "copy of the buffer",
        "clock": "CPU time of the one thread that does it",
        "bytes": 4 * values,
        "layers": _LAYERS,
        "packets": -(-values // _PER_PACKET),
    }
    return result(name, "ms", samples[contender], samples["copy"], details=details)


def _gradients(values: int, seed: int = 1) -> NDArray[np.float32]:
    """Return normally distributed values whose scale differs from packet to packet, as rows of a layer do."""
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal(values, np.float32)
    scales = rng.lognormal(-5, 1, -(-values // _PER_PACKET)).astype(np.float32)
    gradients *= np.repeat(scales, _PER_PACKET)[:values]
    return gradients


def _layers(values: int) -> tuple[list[Segment], list[Segment]]:
    """Return the layers in places of the whole buffer, and each in places of its own."""
    bounds = np.linspace(0, values, _LAYERS + 1).astype(int).tolist()
    layers = [Layer(f"layer{number}", round(number * 255 / (_LAYERS - 1))) for number in range(_LAYERS)]
    whole = [Segment(layer, bounds[number], bounds[number + 1]) for number, layer in enumerate(layers)]
    return whole, [Segment(segment.layer, 0, segment.stop - segment.start) for segment in whole]


def _ms(action: Callable[[], None]) -> float:
    # The core's time, which other programs that use it too do not lengthen; one thread does it all.
    started_s = time.thread_time()
    action()
    return 1e3 * (time.thread_time() - started_s)


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


BENCHMARK: Final = Benchmark(lambda arguments: measure(arguments.turns), rounds=15)
