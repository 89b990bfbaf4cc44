# SPDX-License-Identifier: Apache-2.0
"""The pipeline that averages buckets: encode, reduce, decode.

A bucket passes these stages; most jobs use only the second:

1. *Encode*: the sum rule multiplies its values by the number of ranks; a compressor makes it smaller.
2. *Reduce*: direct all-reduce, ring, or parameter server; Adasum; or an all-gather, if compressed values cannot be
   added up.
3. *Decode*: compressed values become gradients again, and omitted values become residual.

Buckets without gradients (``Bucket.exact``) are only averaged. So are gradients of a flush (``Bucket.flush``), together
with all values that compressors have left out.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from dlcp.collectives import choice
from dlcp.collectives.bucket import Bucket, BucketRun, RankContext, Reducer, Strategy
from dlcp.collectives.choice import AUTO, COLLECTIVES, DIRECT, RING, SERVER, Costs, Topology
from dlcp.collectives.direct import DirectAllReduce
from dlcp.collectives.message_numbers import ring_buckets
from dlcp.collectives.reduction_rules import ADASUM, AVERAGE, COMBINES, REDUCTION_RULES, SUM, multiply_for_sum
from dlcp.collectives.residual import Residual
from dlcp.policies.arms import AUTO_PRECISION, is_coarse
from dlcp.values.planes import FULL_BITS

if TYPE_CHECKING:
    from dlcp.compress import Compressor


class MeasuringReducer(Reducer, Protocol):
    """A reducer that measures the ranks' receive rates."""

    def received_bps(self, slow: Container[int] = ()) -> Mapping[int, float]:
        """Return each rank's receive rate in the last step, in bit/s, by ``snap_to_fastest``; empty unless all know it.

        Parameters
        ----------
        slow
            Ranks that were slow before: see :func:`dlcp.policies.slow_ports.snap_to_fastest`.
        """


class AutoAllReduce:
    """All-reduce that chooses each bucket's collective.

    Parameters
    ----------
    reducers
        The reducers for ``direct`` and ``ring``, which share one context.
    ranks
        The ranks that contribute.
    topology, costs
        The inputs of the choice, the same on all ranks.

    Attributes
    ----------
    chosen
        The number of buckets for each collective.
    """

    def __init__(
        self,
        reducers: Mapping[str, MeasuringReducer],
        ranks: Sequence[int],
        *,
        topology: Topology | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.reducers = dict(reducers)
        self.ranks = sorted(ranks)
        self.topology = topology or Topology()
        self.costs = costs or Costs()
        self.chosen: Counter[str] = Counter()

    def begin_step(self, step: int, bits: int = FULL_BITS) -> None:
        """Begin a step, and choose by the rates of the last one.

        All results of the last step have arrived, so all ranks choose alike.
        """
        known = self.topology.rates_bps
        slow = {rank for rank, rate in known.items() if rate < max(known.values())}
        told = [self.reducers[kind].received_bps(slow) for kind in (RING, DIRECT) if kind in self.reducers]
        if rates := next(filter(None, told), None):  # a ring's are the most accurate: one flow enters each port
            rates_bps = {rank: rate for rank, rate in rates.items() if rate > 0}
            self.topology = replace(self.topology, rates_bps=rates_bps)
        for reducer in self.reducers.values():
            reducer.begin_step(step, bits)

    def start(self, step: int, sequence: int, bucket: Bucket) -> BucketRun:
        """Begin to average a bucket over the ranks, and return its run."""
        kind = choice.choose(bucket.values.nbytes, self.ranks, self.topology, self.costs)
        if kind == RING and sequence >= ring_buckets(len(self.ranks)):
            kind = DIRECT
        run = self.reducers[kind].start(step, sequence, bucket)
        self.chosen[kind] += 1
        return run

    def close(self) -> None:
        """Close the collectives."""
        for reducer in self.reducers.values():
            reducer.close()


class Pipeline:
    """Averages the buckets of one rank, stage by stage; made by :func:`make_reducer`.

    Parameters
    ----------
    plain
        The reducer for buckets as they are.
    gradients
        The strategy for gradients: ``plain``, or one that may use it.
    numbers_per_bucket
        The bucket numbers of ``plain`` that one bucket of gradients uses.
    multiplier
        Factor on gradients before reduction; 1 for their average.
    left_out
        Values that compression left out, if ``plain`` can send them with uncompressed gradients.
    """

    def __init__(
        self,
        plain: Reducer,
        gradients: Strategy,
        *,
        numbers_per_bucket: int = 1,
        multiplier: int = 1,
        left_out: Residual | None = None,
    ) -> None:
        self.plain, self.gradients = plain, gradients
        self._numbers_per_bucket, self._multiplier = numbers_per_bucket, multiplier
        self._left_out = left_out

    def begin_step(self, step: int, bits: int = FULL_BITS) -> None:
        """See :meth:`dlcp.collectives.Reducer.begin_step`."""
        self.plain.begin_step(step, bits)

    def start(self, step: int, sequence: int, bucket: Bucket) -> BucketRun:
        """Begin to reduce a bucket, and return its run; see :class:`Strategy`."""
        if not bucket.exact and self._multiplier != 1:
            multiply_for_sum(bucket.values, bucket.value_type, self._multiplier)
            bucket = replace(bucket, magnitudes=None)
        if bucket.flush and self._left_out is not None:
            self._left_out.apply(bucket.values, bucket.segments, bucket.value_type)
        elif not bucket.exact:
            return self.gradients.start(step, sequence, bucket)
        return self.plain.start(step, sequence * self._numbers_per_bucket, bucket)

    def close(self) -> None:
        """Stop the threads of all stages."""
        self.gradients.close()
        self.plain.close()


def make_reducer(
    collective: str,
    context: RankContext,
    *,
    topology: Topology | None = None,
    costs: Costs | None = None,
    compression: str = "",
    combine: str = AVERAGE,
    work: Executor | None = None,
) -> Reducer:
    """Return the reducer for a collective; a pipeline if it must do more than average.

    All ranks must request the same one.

    Parameters
    ----------
    collective
        ``direct``, ``ring``, ``server``, or ``auto``: the fastest for each bucket.
    context
        This rank, the contributors, and the state that its algorithms share. Its residual is that of gradients.
    topology, costs
        See :func:`dlcp.collectives.choice.choose`. The topology determines the ring's order, and the server.
    compression
        A compressor's name (:func:`dlcp.compress.make_compressor`), or ``""``. If compressed values cannot be added up,
        they are gathered, with any collective.
    combine
        ``average``, ``sum`` or ``adasum`` (:mod:`dlcp.collectives.reduction_rules`).
    work
        The executor for decoding and Adasum's arithmetic; by default a thread.

    Raises
    ------
    ValueError
        An unknown collective, compressor or rule, no server, or a conflict between them; the message says which.
    """
    topology = topology or Topology()
    check_stages(compression, combine, collective)
    options = context.options
    has_server = collective == SERVER and topology.server is not None
    context = replace(context, server=topology.server if has_server else None, beside_ring=collective in (AUTO, RING))
    multiplier = len(context.contributors) if combine == SUM else 1
    if not compression:
        plain = _plain(collective, context, topology, costs)
        if combine == AVERAGE:
            return plain
        if combine == SUM:
            return Pipeline(plain, plain, multiplier=multiplier)
        from dlcp.collectives import adasum  # most jobs average

        return Pipeline(plain, adasum.Adasum(context, work=work), numbers_per_bucket=adasum.NUMBERS_PER_BUCKET)
    # Most jobs do not compress, so these are loaded here.
    from dlcp.collectives.compressed import CompressedAllGather, CompressedAllReduce
    from dlcp.compress import Feedback, make_compressor

    small = context.tagger.policy.small_layer_values
    compressor = make_compressor(compression, error_feedback=options.error_feedback, whole_below=small)
    # Values that a compressor leaves out belong to positions of the gradient; losses of its output do not.
    transit = replace(context, residual=Residual(), noted=compressor.rounds == 1)
    # A compressor's recovery must know the losses of a contribution, which in one hop only the peer may know.
    plain = _plain(collective, transit, topology, costs, one_hop=False)
    # Neither a vote nor Adasum can be replaced by an average.
    averages = compressor.feedback is not Feedback.NOTHING and combine != ADASUM
    left_out = context.residual if averages and options.error_feedback else None
    if not compressor.reduces:
        gathered = CompressedAllGather(context, compressor, REDUCTION_RULES[combine], work)
        return Pipeline(plain, gathered, left_out=left_out if combine == AVERAGE else None)
    inner: Strategy = plain
    numbers = 1
    if combine == ADASUM:
        from dlcp.collectives import adasum  # most jobs average

        inner, numbers = adasum.Adasum(transit, work=work), adasum.NUMBERS_PER_BUCKET
    compressed = CompressedAllReduce(context, compressor, inner, transit.residual, work)
    per_bucket = compressor.rounds * numbers
    return Pipeline(plain, compressed, numbers_per_bucket=per_bucket, multiplier=multiplier, left_out=left_out)


def check_stages(
    compression: str,
    combine: str,
    collective: str = DIRECT,
    *,
    fallback: bool = False,
    precision: str = AUTO_PRECISION,
) -> None:
    """Check that a compression, a rule, a collective and a precision exist and are compatible.

    Parameters
    ----------
    compression, combine, collective
        See :func:`make_reducer`.
    precision
        One of ``PRECISIONS``.
    fallback
        Whether the framework's own all-reduce takes over if DLCP fails. It averages, so only averages can continue.

    Raises
    ------
    ValueError
        One does not exist, or two are incompatible; the message says what to do.
    """
    if combine not in COMBINES:
        raise ValueError(f"combine must be one of {', '.join(COMBINES)}, got {combine!r}")
    compressor: Compressor | None = None
    if compression:
        from dlcp.compress import Feedback, make_compressor  # most jobs do not compress

        compressor = make_compressor(compression)
    if fallback and combine != AVERAGE:
        raise ValueError(
            f"combine {combine!r} cannot continue with the framework's all-reduce, which averages; set "
            "fallback=False, so that a failed path is an error"
        )
    if compressor and compressor.feedback is Feedback.NOTHING and (fallback or combine != AVERAGE):
        wanted = f"combine={AVERAGE!r}" if combine != AVERAGE else "fallback=False"
        raise ValueError(
            f"the result of compression {compression!r} is a vote, which an average cannot replace: set {wanted}"
        )
    if is_coarse(precision) and has_own_format(compression, combine):
        what = f"combine {combine!r}" if combine == ADASUM else f"compression {compression!r}"
        raise ValueError(
            f"{what} sends gradients in a format of its own, to which precision {precision} does not apply: omit one "
            "of the two"
        )
    if combine == ADASUM and collective == SERVER:
        raise ValueError(f"a parameter server can only average; with combine {combine!r} set collective to {DIRECT!r}")
    if compressor and combine == ADASUM and compressor.rounds > 1:
        raise ValueError(f"compression {compression!r} averages factors; set combine to {AVERAGE!r} or {SUM!r}")
    if compressor and collective == SERVER and not compressor.reduces:
        raise ValueError(
            f"a parameter server adds up uncompressed gradients; with compression {compression!r} set collective to "
            f"{AUTO}, {DIRECT} or {RING}"
        )


def has_own_format(compression: str, combine: str) -> bool:
    """Return whether gradients are sent in a format to which no precision applies."""
    if not compression:
        return combine == ADASUM
    from dlcp.compress import make_compressor  # most jobs do not compress

    return combine == ADASUM or not make_compressor(compression).reduces


def _plain(
    collective: str, context: RankContext, topology: Topology, costs: Costs | None, *, one_hop: bool = True
) -> Reducer:
    """Return the reducer that averages buckets, without compression or another rule."""
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    if collective == SERVER and topology.server is None:
        raise ValueError("collective 'server' needs the rank of a server in the topology")
    reducers: dict[str, MeasuringReducer] = {}
    if collective in (AUTO, DIRECT):
        reducers[DIRECT] = DirectAllReduce(context, one_hop=one_hop)
    if collective in (AUTO, RING):
        from dlcp.collectives.ring import RingAllReduce  # most jobs use direct

        reducers[RING] = RingAllReduce(
            context, order=topology.ring_order(context.contributors), tells_rates=collective == AUTO
        )
    if collective == SERVER and topology.server is not None:
        from dlcp.collectives.parameter_server import AllReduceInParts  # most jobs have no server

        return AllReduceInParts(context, topology.server)
    if collective == AUTO:
        return AutoAllReduce(reducers, context.contributors, topology=topology, costs=costs)
    return reducers[collective]
