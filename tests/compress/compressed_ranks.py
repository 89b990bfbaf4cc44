# SPDX-License-Identifier: Apache-2.0
"""Ranks that exchange compressed buckets over a network in virtual time."""

from concurrent.futures import Executor

import numpy as np

from dlcp.collectives import Bucket, RankContext, ReduceOptions, Residual, make_reducer
from dlcp.transport import LossBound, TransportOptions
from dlcp.transport.ledger import Ledger
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment, Tagger, TagPolicy, layers_in_order
from tests.transport.network import Network

SHAPES = {"conv.weight": (48, 80), "conv.bias": (50,), "fc.weight": (60, 64)}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
LAYERS = layers_in_order(list(SHAPES), SHAPES)
STOPS = np.cumsum(list(SIZES.values())).tolist()
SEGMENTS = [Segment(LAYERS[name], stop - SIZES[name], stop) for name, stop in zip(SHAPES, STOPS, strict=True)]
SIZE = STOPS[-1]
NOTHING_PROTECTED = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)
PAYLOAD_BYTES = 128
EVERY = ["topk:0.1", "randomk:0.1", "qsgd:4", "terngrad", "signsgd", "efsignsgd", "atomo:2", "powersgd:2"]


class AtOnce(Executor):
    """Does everything at once, for there are no threads in virtual time."""

    def submit(self, function, /, *arguments, **named):
        function(*arguments, **named)


class CompressedRanks:
    """``count`` ranks that compress, or combine, or both."""

    def __init__(self, count, compression="", combine="average", *, bound=0.1, error_feedback=True,
                 collective="direct", value_type=ValueType.FLOAT32, policy=NOTHING_PROTECTED, network=Network,
                 **fields):  # fmt: skip
        self.count, self.value_type = count, value_type
        fields.setdefault("options", TransportOptions(payload_bytes=PAYLOAD_BYTES))
        self.network = network(count, **fields)
        self.ledgers = [Ledger(1) for _ in range(count)]
        self.residuals = [Residual() for _ in range(count)]
        self.connections = self.network.ranks[:]
        self.reducers = [
            make_reducer(
                collective,
                RankContext(
                    self.connections[rank],
                    range(count),
                    ReduceOptions(LossBound(bound), error_feedback),
                    Tagger(policy),
                    self.ledgers[rank],
                    self.residuals[rank],
                ),
                compression=compression,
                combine=combine,
                work=AtOnce(),
            )
            for rank in range(count)
        ]

    def gradients(self, seed, scale=1.0):
        rng = np.random.default_rng(seed)
        floats = [scale * rng.standard_normal(SIZE) * rng.lognormal(0, 1, SIZE) for _ in range(self.count)]
        kind = np.float64 if self.value_type is ValueType.FLOAT64 else np.float32
        return [self.value_type.narrow(values.astype(kind)) for values in floats]

    def start(self, step, gradients, ranks=None, sequence=0, segments=SEGMENTS, **fields):
        started = {}
        for rank in range(self.count) if ranks is None else ranks:
            self.reducers[rank].begin_step(step)
            bucket = Bucket(gradients[rank].copy(), self.value_type, segments, **fields)
            started[rank] = self.reducers[rank].start(step, sequence, bucket)
        return started

    def reduce(self, step, gradients, **fields):
        """Each rank's result of one bucket."""
        started = self.start(step, gradients, **fields)
        self.network.run(lambda: all(future.done() for future in started.values()))
        return [started[rank].result() for rank in range(self.count)]

    def settle(self):
        """Let all confirmations come in, without which a message is not in the ledger."""
        self.network.run(lambda: all(connection.all_confirmed for connection in self.connections))

    def owed(self):
        """The residual of all ranks together."""
        total = np.zeros(SIZE)
        for residual in self.residuals:
            for segment in SEGMENTS:
                owed = residual.of(segment.layer.name)
                if owed is not None:
                    total[segment.start : segment.stop] += owed
        return total

    @property
    def lost(self):
        return sum(ledger.summary()["lost"] for ledger in self.ledgers)

    @property
    def packets(self):
        """Packets of all messages, each counted once."""
        return sum(record.packets for ledger in self.ledgers for record in ledger.records)

    def check_bounds(self, bound):
        for ledger in self.ledgers:
            assert ledger.violations == 0
            assert ledger.max_message_ratio <= bound


def assert_identical(results):
    for other in results[1:]:
        assert results[0].tobytes() == other.tobytes(), "replicas differ"
