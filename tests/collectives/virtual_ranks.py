# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job over a network in virtual time, and their gradients by parameter."""

import numpy as np

from dlcp.collectives import Bucket, DirectAllReduce, ParameterServer, RankContext, ReduceOptions
from dlcp.transport import LossBound
from dlcp.transport.ledger import Ledger
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment, Tagger, TagPolicy, layers_in_order
from tests.collectives.cycles import cycles
from tests.transport.exchanges import Selective

SIZES = {"conv1.weight": 9000, "conv1.bias": 40, "conv2.weight": 20_000, "conv2.bias": 100, "fc.weight": 12_345}
SMALL_SIZES = {"conv1.weight": 4000, "conv1.bias": 40, "conv2.weight": 8000, "conv2.bias": 100, "fc.weight": 5345}
LAYERS = layers_in_order(list(SIZES))
ONE_BUCKET = [list(SIZES)]
NOTHING_PROTECTED = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)


class Ranks:
    """``count`` workers, and with ``server`` a parameter server as one more rank."""

    sizes = SIZES

    def __init__(self, count, *, bound=0.0, error_feedback=True, immediate=False,
                 policy=None, server=False, value_type=ValueType.FLOAT32, lose=None, network=Selective,
                 precision="32", **fields):  # fmt: skip
        self.count, self.value_type, self.bits = count, value_type, int(precision)
        self.network = network(count + server, lose, **fields)
        self.connections = self.network.ranks[:]
        options = self.options = ReduceOptions(LossBound(bound, immediate), error_feedback)
        self.ledgers = [Ledger(1) for _ in range(count)]
        self.reducers = [
            DirectAllReduce(
                RankContext(
                    self.connections[rank],
                    range(count),
                    options,
                    Tagger(policy or TagPolicy()),
                    self.ledgers[rank],
                    server=count if server else None,
                ),
                weights={count: 1.0} if server else None,
            )
            for rank in range(count)
        ]
        self.server = None

    def serve(self, **fields):
        """Let the last rank be the parameter server, with the workers' options."""
        server = self.connections[self.count]
        self.server = ParameterServer(server, range(self.count), options=self.options, **fields)

    def gradients(self, seed, sizes=None):
        """Each rank's gradients by parameter, in the storage of the format."""
        sizes = sizes or self.sizes
        rng = np.random.default_rng(seed)
        return [
            {name: self.value_type.narrow(self._floats(rng, size)) for name, size in sizes.items()}
            for _ in range(self.count)
        ]

    def _floats(self, rng, size):
        kind = np.float64 if self.value_type is ValueType.FLOAT64 else np.float32
        return (rng.standard_normal(size) * rng.lognormal(0, 1, size)).astype(kind)

    def start(self, step, gradients, buckets=ONE_BUCKET, delays_s=None, **fields):
        """Let every rank start its buckets, each rank after its delay; return their futures, filled in as they do."""
        started = [[None] * len(buckets) for _ in range(self.count)]
        layouts = [self._layout(names, gradients[0]) for names in buckets]

        def begin(rank):
            self.reducers[rank].begin_step(step, self.bits)
            for number, (names, segments) in enumerate(zip(buckets, layouts, strict=True)):
                values = np.concatenate([gradients[rank][name] for name in names])
                bucket = Bucket(values, self.value_type, segments, **fields)
                started[rank][number] = self.reducers[rank].start(step, number, bucket)

        for rank in range(self.count):
            if delays_s:
                self.network.at(self.network.now + delays_s[rank], begin, rank)
            else:
                begin(rank)
        return started

    @staticmethod
    def _layout(names, gradients):
        stops = np.cumsum([len(gradients[name]) for name in names]).tolist()
        starts = [0, *stops[:-1]]
        return [Segment(LAYERS[name], *ends) for name, *ends in zip(names, starts, stops, strict=True)]

    def reduce(self, step, gradients, buckets=ONE_BUCKET, delays_s=None, **fields):
        """One step; return each rank's averages by parameter, in the storage of the format."""
        started = self.start(step, gradients, buckets, delays_s, **fields)
        self.network.run(lambda: all(future and future.done() for row in started for future in row))
        averages = []
        for row in started:
            mine = {}
            for names, future in zip(buckets, row, strict=True):
                ends = np.cumsum([len(gradients[0][name]) for name in names])[:-1]
                mine.update(zip(names, np.split(future.result(), ends), strict=True))
            averages.append(mine)
        return averages

    def left_behind(self):
        """The types of what only Python's collector frees after two steps that follow a first."""
        gradients = [self.gradients(step) for step in range(3)]
        self.reduce(0, gradients[0])
        with cycles() as left:
            for step in (1, 2):
                self.reduce(step, gradients[step])
        return left

    def owed(self, name):
        """The residual of a parameter on all ranks together."""
        parts = [reducer.context.residual.of(name) for reducer in self.reducers]
        return sum(part for part in parts if part is not None)

    @property
    def lost(self):
        return sum(ledger.summary()["lost"] for ledger in self.ledgers)


class SmallRanks(Ranks):
    """The same with fewer gradients, for cases that are tried often."""

    sizes = SMALL_SIZES


def assert_identical(averages):
    for other in averages[1:]:
        for name, values in averages[0].items():
            assert values.tobytes() == other[name].tobytes(), f"replicas differ in {name}"


def is_contribution(header, ranks):
    """Whether a packet carries a rank's contribution, and not an averaged shard."""
    return header.message // ranks % 2 == 0
