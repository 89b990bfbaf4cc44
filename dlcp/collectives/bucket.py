# SPDX-License-Identifier: Apache-2.0
"""What an all-reduce is given: a bucket of gradients, what of it may be lost, and whose part in it this rank plays.

Layers may have a loss bound of their own: embeddings and norms are exact, say, and the front of the model is looser. A
message may hold several layers, and its receiver counts packets, not layers. So a message's bound is the mean of its
packets' bounds, and the sender protects all packets of a layer but as many as that layer may lose: the least valuable
ones stay droppable. Protected packets always arrive, so no layer can spend what another one may lose.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.message_numbers import ALL_GATHER, two_hop_number
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.residual import Residual
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.tags import PacketTags, Segment, Tagger
from dlcp.transport import RELIABLE, Connection, LossBound, MessageKey, Outcome, Then, TransportError
from dlcp.transport.messages import SHARE

RATE: Final = np.dtype(">f4")
"""A rate that ranks tell each other behind an average, in bit/s; 0 if it is not known."""
FORMATS: Final = tuple(ValueType)
"""A contribution to a parameter server ends with a byte: the place of its number format here."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A buffer of gradients: flat ``values`` in the storage of ``value_type``, and the layers in it.

    The record does not change on its way; the average is written into the memory of ``values``.

    Parameters
    ----------
    magnitudes
        Those of its packets, shape (packets,), if they are known: as :func:`dlcp.magnitudes.packet_magnitudes` finds
        them.
    exported
        ``values`` lie in exported memory (``Connection.exported``), which local peers read in place: the caller gets
        them back only when none of those reads them any more.
    bound
        What this bucket may lose, if not what ``ReduceOptions`` say. The same on all ranks, as all that follows.
    exact
        It holds no gradients: it arrives as it is, whatever gradients may lose or be rounded to.
    flush
        It holds gradients that are sent whole for once, with all that is residual: nothing is lost, deferred or left
        out.
    samples
        How many samples each contributor's values are the mean of, where contributors differ. The values have been
        multiplied by :func:`dlcp.collectives.reduction_rules.weight_of`; where contributions are lost, rescaling
        divides the rest by its own samples.
    scattered
        A reduce-scatter: each owner of a shard keeps the average of it, and the other shards' values mean nothing then.
        Only for the direct all-reduce, with shards of one size: its owners are the contributors, ascending.
    factor
        What averages of a scattered bucket are multiplied by: the number of ranks, say, makes sums of them.
    """

    values: NDArray[np.generic]
    value_type: ValueType
    segments: Sequence[Segment]
    magnitudes: NDArray[np.float32] | None = None
    exported: bool = False
    bound: LossBound | None = None
    exact: bool = False
    flush: bool = False
    samples: Mapping[int, int] | None = None
    scattered: bool = False
    factor: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether nothing of it may be lost or deferred, whatever options allow."""
        return self.exact or self.flush

    def label(self, start: int, stop: int) -> str:
        """Return the layers of the values from ``start`` to before ``stop`` in words, for messages."""
        first, last = (
            self.segments[bisect_right(self.segments, position, key=attrgetter("start")) - 1].layer.name
            for position in (start, stop - 1)
        )
        return first if first == last else f"{first}..{last}"


@dataclass(frozen=True, slots=True)
class LayerBounds:
    """Bounds by layer name.

    Parameters
    ----------
    rules
        Pairs of a pattern (``*``, ``?`` and ``[...]``, as of file names) and the share of packets that layers of such a
        name may lose, 0 to 1. The first that fits counts; a layer that none fits has the bound of its bucket.
    """

    rules: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for pattern, ratio in self.rules:
            if not pattern or ratio not in SHARE:
                raise ValueError(f"a layer's bound must lie in {SHARE} and have a pattern, got {pattern!r}={ratio}")

    @classmethod
    def parse(cls, text: str) -> "LayerBounds":
        """Return the bounds in words like ``embed*=0, *.norm?.*=0, head.*=0.01``.

        Raises
        ------
        ValueError
            A part is no pattern with a bound; the message says which.
        """
        rules = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            pattern, equals, ratio = part.rpartition("=")
            try:
                if not equals:
                    raise ValueError
                rules.append((pattern.strip(), float(ratio)))
            except ValueError:
                raise ValueError(f"a layer's bound is written PATTERN=SHARE, such as embed*=0, not {part!r}") from None
        return cls(tuple(rules))

    def __bool__(self) -> bool:
        return bool(self.rules)

    def of(self, name: str) -> float | None:
        """Return the bound of a layer; None if it has none of its own."""
        return next((ratio for pattern, ratio in self.rules if fnmatchcase(name, pattern)), None)

    def bound_of(
        self, segments: Sequence[Segment], start: int, stop: int, values_per_packet: int, bound: LossBound
    ) -> LossBound:
        """Return what the values from ``start`` to ``stop`` of a bucket may lose, as sender and receiver compute it.

        Parameters
        ----------
        segments
            The bucket's layers.
        bound
            Of layers without one of their own.
        """
        if not self.rules or stop <= start:
            return bound
        ratios = _packet_ratios(self, tuple(segments), values_per_packet)
        part = ratios[start // values_per_packet : -(-stop // values_per_packet)]
        return LossBound(float(np.where(np.isnan(part), bound.ratio, part).mean()), bound.immediate)

    def exact_packets(self, segments: Sequence[Segment], values_per_packet: int) -> NDArray[np.bool_]:
        """Return which packets of a bucket belong to layers of which nothing may be lost, shape (packets,)."""
        exact: NDArray[np.bool_] = _packet_ratios(self, tuple(segments), values_per_packet) == 0
        return exact

    def protect(
        self,
        tags: PacketTags,
        segments: Sequence[Segment],
        values_per_packet: int,
        bound: LossBound,
        *,
        seed: int = 0,
        hops: int = 1,
    ) -> None:
        """Protect, in place, all packets of a bucket but as many of each layer as it may lose.

        Those of the highest drop class stay droppable; of equals, ``seed`` chooses. Where packets go over several hops
        that may lose some, each hop may lose a part of that.
        """
        if not self.rules:
            return
        ratios = _packet_ratios(self, tuple(segments), values_per_packet)
        for packets in _groups(self, tuple(segments), values_per_packet):
            ratio = ratios[packets[0]]
            protect_all_but(tags, packets, (bound.ratio if np.isnan(ratio) else float(ratio)) / hops, seed)


def protect_all_but(tags: PacketTags, packets: NDArray[np.int64], ratio: float, seed: int = 0) -> None:
    """Protect, in place, of some packets all but the share ``ratio``; see :meth:`LayerBounds.protect`."""
    droppable = packets[~tags.protected[packets]]
    excess = len(droppable) - LossBound(ratio).allowed(len(packets))
    if excess <= 0:
        return
    rolled = np.roll(droppable, seed)
    chosen = rolled[np.argsort(tags.drop_class[rolled], kind="stable")][:excess]
    tags.protected[chosen] = True
    tags.drop_class[chosen] = 0


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """What an all-reduce may lose and how it makes up for it.

    Parameters
    ----------
    bound
        The loss that the first hop may suffer, and what may be deferred for ranks behind a slow port
        (:mod:`dlcp.collectives.deferral`). Nothing is deferred without error feedback.
    error_feedback
        Send what was lost with the next step.
    rescale
        Divide each sum by how many ranks it holds rather than by how many there are, so that loss does not shrink it.
        Only without error feedback: both at once are not stable over many steps (:class:`dlcp.session.Options`).
    adaptive_shards
        Give ranks that receive slowly, because their port is congested, smaller shards.
    layers
        Which layers have a bound of their own.

    Raises
    ------
    ValueError
        Both ``rescale`` and ``error_feedback`` are asked for.
    """

    bound: LossBound = field(default_factory=lambda: LossBound(0.1))
    error_feedback: bool = True
    rescale: bool = False
    adaptive_shards: bool = True
    layers: LayerBounds = field(default_factory=LayerBounds)

    def __post_init__(self) -> None:
        if self.rescale and self.error_feedback:
            raise ValueError(
                "rescale goes only without error_feedback: to divide sums by how many ranks they hold and to send what "
                "they lack with the next step is not stable over many steps (see dlcp.session.Options)"
            )

    @property
    def deferral_bound(self) -> float:
        """The largest share of a message's packets that may be deferred to a later step."""
        return self.bound.deferral if self.error_feedback else 0.0

    def bound_of(self, bucket: Bucket) -> LossBound:
        """Return what a bucket may lose where its layers have no bound of their own; it says nothing of deferral."""
        return RELIABLE if bucket.whole else replace(bucket.bound or self.bound, deferral=0.0)

    def bound_within(self, bucket: Bucket, start: int, stop: int, values_per_packet: int) -> LossBound:
        """Return what the values from ``start`` to before ``stop`` of a bucket may lose, and what may be deferred.

        What may be deferred is what averages may defer, whatever the bucket's own bound says.
        """
        if bucket.whole:
            return RELIABLE
        bound = self.layers.bound_of(bucket.segments, start, stop, values_per_packet, self.bound_of(bucket))
        return replace(bound, deferral=self.average_bound(bucket).deferral)

    def average_bound(self, bucket: Bucket) -> LossBound:
        """Return what averages of a bucket may lose, which is nothing, and what of them may be deferred."""
        return RELIABLE if bucket.whole else LossBound(deferral=self.deferral_bound)


@dataclass(frozen=True, slots=True, eq=False)
class RankContext:
    """What all algorithms of one rank share.

    Parameters
    ----------
    connection
        This rank's connection.
    contributors
        The ranks that contribute and get the result, this one among them.
    options, tagger, ledger, residual
        What may be lost, how packets are tagged, where messages are recorded, and what was lost before.
    server
        The parameter server's rank, if some bucket may go there: it counts when messages are numbered.
    beside_ring
        Whether a ring may take buckets of the same steps.
    inbound_rates_bps
        How fast each rank received in the last step, in bit/s, for whoever wants to know: the same on all ranks. Empty
        where none that reduces here goes by it.
    noted
        Whether the endpoint's timeline gets the phases of buckets: not where these have other numbers than the
        session's, as parts of them have.
    """

    connection: Connection
    contributors: Sequence[int]
    options: ReduceOptions = field(default_factory=ReduceOptions)
    tagger: Tagger = field(default_factory=Tagger)
    ledger: Ledger = field(default_factory=Ledger)
    residual: Residual = field(default_factory=Residual)
    server: int | None = None
    beside_ring: bool = False
    inbound_rates_bps: dict[int, float] = field(default_factory=dict)
    noted: bool = True
    rank: int = field(init=False)
    """The rank that this is."""
    peers: Sequence[int] = field(init=False)
    """The other contributors, ascending."""
    ranks: int = field(init=False)
    """One more than the highest rank that sends or receives: what messages are numbered by."""

    def __post_init__(self) -> None:
        contributors = sorted(self.contributors)
        object.__setattr__(self, "contributors", contributors)
        object.__setattr__(self, "rank", self.connection.rank)
        object.__setattr__(self, "peers", [rank for rank in contributors if rank != self.connection.rank])
        object.__setattr__(self, "ranks", max(contributors[-1], -1 if self.server is None else self.server) + 1)

    def key(self, step: int, sequence: int, phase: int, receiver: int) -> MessageKey:
        """Return the key of a message of two hops; see :func:`dlcp.collectives.message_numbers.two_hop_number`."""
        return MessageKey(step, two_hop_number(sequence, phase, receiver, self.ranks, shared=self.beside_ring))

    def check_key(self, step: int, sequence: int) -> None:
        """Raise ValueError if a bucket's messages cannot be numbered."""
        self.key(step, sequence, ALL_GATHER, self.contributors[-1])


class Strategy(Protocol):
    """One way to make one of all ranks' buckets."""

    @property
    def recoverable(self) -> bool:
        """Whether :meth:`partial_results` are enough to complete the averages in another way."""

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Reduce a bucket; the future's result is ``bucket.values``, written in place.

        Parameters
        ----------
        step, sequence
            Training step, and number of the bucket within it; the same on all ranks.

        Raises
        ------
        ValueError
            The values are not contiguous, or the step has too many buckets; the message says which.
        """

    def partial_results(self) -> list[PartialResult]:
        """Return what this rank holds of unfinished buckets; call it when the endpoint is closed."""

    def close(self) -> None:
        """End the threads; call it when the endpoint is closed."""


class Reducer(Strategy, Protocol):
    """What averages the buckets of one rank, step by step."""

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on; all averages of the last one are in."""


def guard(action: Callable[[Any], None], fail: Callable[[Exception], None]) -> Then[Any]:
    """Return a callback that gives ``action`` what became of a message, and ``fail`` the error of either."""

    def then(outcome: Outcome[Any]) -> None:
        if isinstance(outcome, Exception):
            fail(outcome)
            return
        try:
            action(outcome)
        except Exception as error:
            fail(error)

    return then


class BucketRun(ABC):
    """One bucket on its way through an algorithm, from :meth:`start` to the future ``done``.

    Parameters
    ----------
    context, step, sequence, bucket
        This rank, the training step, the number of the bucket within it, and the bucket.
    work
        Where long computations run, if there are any: the endpoint's thread has packets to wait for.

    Raises
    ------
    ValueError
        The values cannot be sent from and written to where they are.
    """

    def __init__(
        self, context: RankContext, step: int, sequence: int, bucket: Bucket, work: Executor | None = None
    ) -> None:
        if not bucket.values.flags.c_contiguous or not bucket.values.flags.writeable:
            raise ValueError(f"step {step}, bucket {sequence}: values must be contiguous and writable")
        self.context, self.step, self.sequence, self.bucket = context, step, sequence, bucket
        self.timeline = context.connection.timeline if context.noted else None
        self.values_per_packet = context.connection.options.payload_bytes // bucket.values.itemsize
        self.done: Future[NDArray[np.generic]] = Future()
        self._work = work

    def start(self) -> "Future[NDArray[np.generic]]":
        """Have the endpoint's thread begin."""
        try:
            self.context.connection.call(self._begin)
        except TransportError as error:
            self.done.set_exception(error)
        return self.done

    def _begin(self) -> None:
        try:
            self.begin()
        except Exception as error:
            self.fail(error)

    @abstractmethod
    def begin(self) -> None:
        """Send the first messages and post the first receives, in the endpoint's thread."""

    @property
    def label(self) -> str:
        """The bucket's layers, for error messages."""
        return self.bucket.label(0, len(self.bucket.values))

    def _note(self, event: str, *values: int) -> None:
        if self.timeline is not None:
            self.timeline.note(event, self.step, self.sequence, *values)

    def _positions(self, packets: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
        """Return the positions of the values in some packets of ``count`` values."""
        first = np.flatnonzero(packets)[:, None] * self.values_per_packet
        positions = (first + np.arange(self.values_per_packet)).ravel()
        return positions[positions < count]

    def guard(self, action: Callable[[Any], None]) -> Then[Any]:
        """Return a callback that gives ``action`` what became of a message; the bucket fails if either fails."""
        return guard(action, self.fail)

    def aside(self, action: Callable[[], None]) -> None:
        """Do what takes long in the thread for it."""
        assert self._work
        try:
            self._work.submit(guard(lambda _: action(), self.fail), None)
        except RuntimeError as error:  # the interpreter is ending
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.done.done():
            self.done.set_exception(error)


@lru_cache(4096)
def _packet_ratios(bounds: LayerBounds, segments: tuple[Segment, ...], values_per_packet: int) -> NDArray[np.float64]:
    """Return the bound of each packet of a bucket, the tightest of its layers'; NaN where none has one of its own."""
    packets = -(-segments[-1].stop // values_per_packet)
    ratios = np.full(packets, np.nan)
    for segment in segments:
        ratio = bounds.of(segment.layer.name)
        if ratio is not None and segment.start < segment.stop:
            mine = ratios[segment.start // values_per_packet : -(-segment.stop // values_per_packet)]
            np.fmin(mine, ratio, out=mine)
    ratios.setflags(write=False)
    return ratios


@lru_cache(4096)
def _groups(
    bounds: LayerBounds, segments: tuple[Segment, ...], values_per_packet: int
) -> tuple[NDArray[np.int64], ...]:
    """Return the packets of each layer that has a bound of its own, and those of all the others together.

    Packets that a layer shares with one of a tighter bound are a group of their own.
    """
    ratios = _packet_ratios(bounds, segments, values_per_packet)
    first = np.arange(len(ratios)) * values_per_packet
    starts = np.array([segment.start for segment in segments])
    owner = np.searchsorted(starts, first, "right") - 1
    owner[np.isnan(ratios)] = -1
    _, group = np.unique(np.column_stack([owner, np.nan_to_num(ratios, nan=-1.0)]), axis=0, return_inverse=True)
    return tuple(np.flatnonzero(group.ravel() == number) for number in range(int(group.max()) + 1))
