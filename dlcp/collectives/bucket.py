# SPDX-License-Identifier: Apache-2.0
"""The input of an all-reduce: a bucket of gradients, its loss bounds, and this rank's role.

Layers may have their own loss bounds: for example exact embeddings and norms, and a looser bound for the front of the
model. A message may hold several layers, and its receiver counts packets, not layers. So a message's bound is the mean
of its packets' bounds. Within each layer, only as many packets as it may lose stay droppable, the least valuable ones;
the sender protects the others. Protected packets always arrive, so no layer can use up another one's bound.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.message_numbers import ALL_GATHER, two_hop_number
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.residual import Residual
from dlcp.transport import RELIABLE, Connection, LossBound, MessageKey, TransportError
from dlcp.transport.ledger import Ledger
from dlcp.values.dtypes import ValueType
from dlcp.values.planes import FULL_BITS, PlaneLayout
from dlcp.values.tags import PacketTags, Segment, Tagger

RATE: Final = np.dtype(">f4")
"""A rate that ranks report after an average, in bit/s; 0 if unknown."""
R = TypeVar("R", bound="BucketRun")
FORMATS: Final = tuple(ValueType)
"""Number formats by their index in :class:`ContributionTail`."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A buffer of gradients: flat ``values`` in the storage of ``value_type``, and the layers in it.

    The record is immutable; the average is written into the memory of ``values``.

    Parameters
    ----------
    magnitudes
        Magnitudes of its packets, shape (packets,), if known; see :func:`dlcp.values.tags.packet_magnitudes`.
    exported
        Whether ``values`` are in exported memory (``Connection.exported``), which local peers read in place. The caller
        gets them back once no peer reads them.
    exact
        Whether it holds other data than gradients, which arrives without loss or rounding. The same on all ranks, as
        are the fields below.
    flush
        Whether this step's gradients are sent in full, with everything pending: nothing is lost or left out.
    samples
        The number of samples behind each contributor's mean, if contributors differ. The values have been multiplied by
        :func:`dlcp.collectives.reduction_rules.weight_of`. If contributions are lost, rescaling divides by the samples
        of the others.
    scattered
        Whether it is a reduce-scatter: each owner keeps the average of its shard, and the other shards' values become
        meaningless. Only for the direct all-reduce; shards are equal, owned by the contributors in ascending order.
    factor
        Factor on averages of a scattered bucket; the number of ranks turns them into sums.
    """

    values: NDArray[np.generic]
    value_type: ValueType
    segments: Sequence[Segment]
    magnitudes: NDArray[np.float32] | None = None
    exported: bool = False
    exact: bool = False
    flush: bool = False
    samples: Mapping[int, int] | None = None
    scattered: bool = False
    factor: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether nothing may be lost, regardless of the options."""
        return self.exact or self.flush

    def bits_at(self, precision: int) -> int:
        """Return how many bits each value has on the wire in a step of a precision, in bits."""
        return FULL_BITS if self.whole or self.value_type is ValueType.FLOAT64 else precision

    def label(self, start: int, stop: int) -> str:
        """Name the layers of the values ``start:stop``, for messages."""
        first, last = (
            self.segments[bisect_right(self.segments, position, key=attrgetter("start")) - 1].layer.name
            for position in (start, stop - 1)
        )
        return first if first == last else f"{first}..{last}"


_TAIL: Final = Struct(">IBBBH")
_REVOKED: Final = np.dtype(">u4")


class ContributionTail(NamedTuple):
    """The last bytes of a contribution to a parameter server, which knows nothing else about it.

    Parameters
    ----------
    value_type
        Number format.
    bits
        Bits of each value on the wire, if it is encoded; otherwise ``FULL_BITS``.
    values
        Number of values.
    gradients
        Whether they are gradients, to which the server may add its rounding errors of earlier averages.
    revocable
        Whether a later contribution may name ranges of these values as revoked.
    revoked
        Ranges of values, as pairs of start and end, whose last average no worker used (:meth:`Residual.revoke`).
    """

    value_type: ValueType
    bits: int
    values: int
    gradients: bool
    revocable: bool = False
    revoked: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> int:
        """Its size."""
        return 2 * len(self.revoked) * _REVOKED.itemsize + _TAIL.size

    def encode(self) -> NDArray[np.uint8]:
        """Return the bytes."""
        flags = int(self.gradients) | int(self.revocable) << 1
        data = _TAIL.pack(self.values, FORMATS.index(self.value_type), self.bits, flags, len(self.revoked))
        return np.frombuffer(np.array(self.revoked, _REVOKED).tobytes() + data, np.uint8)

    @classmethod
    def decode(cls, contribution: NDArray[np.uint8]) -> "ContributionTail":
        """Read the tail at the end of a contribution.

        Raises
        ------
        ValueError
            It is too short, has an unknown number format, or names ranges beyond its values.
        """
        if len(contribution) < _TAIL.size:
            raise ValueError(f"a contribution of {len(contribution)} bytes has no tail")
        values, number, bits, flags, count = _TAIL.unpack(contribution[-_TAIL.size :].tobytes())
        if number >= len(FORMATS):
            raise ValueError(f"a contribution has the unknown number format {number}")
        size = 2 * count * _REVOKED.itemsize + _TAIL.size
        if len(contribution) < size:
            raise ValueError(f"a contribution of {len(contribution)} bytes has no room for {count} ranges")
        ends = np.frombuffer(contribution[-size : -_TAIL.size].tobytes(), _REVOKED).tolist()
        revoked = tuple(zip(ends[::2], ends[1::2], strict=True))
        if any(not start < stop <= values for start, stop in revoked):
            raise ValueError(f"a contribution of {values} values names the ranges {revoked}")
        return cls(FORMATS[number], bits, values, bool(flags & 1), bool(flags & 2), revoked)


@dataclass(frozen=True, slots=True)
class LayerBounds:
    """Loss bounds by layer name.

    Parameters
    ----------
    rules
        Pairs of a pattern (``*``, ``?`` and ``[...]``, as for file names) and the share of packets that matching layers
        may lose, 0 to 1. The first match counts; other layers have the bound of their bucket.
    """

    rules: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

    def of(self, name: str) -> float | None:
        """Return the bound of a layer; None if it has none of its own."""
        return next((ratio for pattern, ratio in self.rules if fnmatchcase(name, pattern)), None)

    def bound_of(
        self, segments: Sequence[Segment], start: int, stop: int, values_per_packet: int, bound: LossBound
    ) -> LossBound:
        """Return the bound of the values from ``start`` to ``stop``, as both sender and receiver compute it.

        Parameters
        ----------
        segments
            The bucket's layers.
        bound
            The bound of layers without their own.
        """
        if not self.rules or stop <= start:
            return bound
        ratios = _packet_ratios(self, tuple(segments), values_per_packet)
        part = ratios[start // values_per_packet : -(-stop // values_per_packet)]
        return LossBound(float(np.where(np.isnan(part), bound.ratio, part).mean()), bound.immediate)

    def exact_packets(self, segments: Sequence[Segment], values_per_packet: int) -> NDArray[np.bool_]:
        """Return the mask of packets in layers that may lose nothing, shape (packets,)."""
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
        """Protect, in place, all packets of a bucket except the number that each layer may lose.

        Those of the highest drop class stay droppable; ``seed`` breaks ties. Several hops share a layer's bound
        equally.
        """
        if not self.rules:
            return
        ratios = _packet_ratios(self, tuple(segments), values_per_packet)
        for packets in _groups(self, tuple(segments), values_per_packet):
            ratio = ratios[packets[0]]
            protect_all_but(tags, packets, (bound.ratio if np.isnan(ratio) else float(ratio)) / hops, seed)


def protect_all_but(tags: PacketTags, packets: NDArray[np.int64], ratio: float, seed: int = 0) -> None:
    """Protect, in place, these packets except the share ``ratio``; see :meth:`LayerBounds.protect`."""
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
    """The loss that an all-reduce may suffer, and its compensation.

    Parameters
    ----------
    bound
        The loss bound of the first hop.
    error_feedback
        Send lost values with the next step.
    layers
        Bounds of individual layers.
    """

    bound: LossBound = field(default_factory=lambda: LossBound(0.1))
    error_feedback: bool = True
    layers: LayerBounds = field(default_factory=LayerBounds)
    rescale: bool = field(init=False)
    """Whether each sum is divided by the number of its contributions, not of ranks: loss does not shrink it.

    Together with error feedback this would diverge: the next step would subtract what the division had added. If only
    one of four ranks delivered a packet in every step, its average would change sign and triple from step to step.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "rescale", not self.error_feedback)

    def bound_of(self, bucket: Bucket) -> LossBound:
        """Return the loss bound of layers that have none of their own."""
        return RELIABLE if bucket.whole else self.bound

    def bound_within(self, bucket: Bucket, start: int, stop: int, values_per_packet: int) -> LossBound:
        """Return the loss bound of a bucket's values ``start:stop``."""
        if bucket.whole:
            return RELIABLE
        return self.layers.bound_of(bucket.segments, start, stop, values_per_packet, self.bound_of(bucket))


@dataclass(frozen=True, slots=True, eq=False)
class RankContext:
    """State that all algorithms of one rank share.

    Parameters
    ----------
    connection
        This rank's connection.
    contributors
        The ranks that contribute and get the result, including this one.
    options, tagger, ledger, residual
        Loss limits, tagging of packets, the record of messages, and earlier losses.
    server
        The parameter server's rank, if buckets may go there; it counts in the numbering of messages.
    beside_ring
        Whether a ring may take buckets of the same steps.
    noted
        Whether the endpoint's timeline records the phases of buckets. It must not if their numbers differ from the
        session's, as those of parts do.
    """

    connection: Connection
    contributors: Sequence[int]
    options: ReduceOptions = field(default_factory=ReduceOptions)
    tagger: Tagger = field(default_factory=Tagger)
    ledger: Ledger = field(default_factory=Ledger)
    residual: Residual = field(default_factory=Residual)
    server: int | None = None
    beside_ring: bool = False
    noted: bool = True
    rank: int = field(init=False)
    """This rank."""
    peers: Sequence[int] = field(init=False)
    """The other contributors, ascending."""
    ranks: int = field(init=False)
    """One more than the highest rank that sends or receives, for the numbering of messages."""

    def __post_init__(self) -> None:
        contributors = sorted(self.contributors)
        object.__setattr__(self, "contributors", contributors)
        object.__setattr__(self, "rank", self.connection.rank)
        object.__setattr__(self, "peers", [rank for rank in contributors if rank != self.connection.rank])
        object.__setattr__(self, "ranks", max(contributors[-1], -1 if self.server is None else self.server) + 1)

    def key(self, step: int, sequence: int, phase: int, receiver: int) -> MessageKey:
        """Return a message's key in two hops; see :func:`dlcp.collectives.message_numbers.two_hop_number`."""
        return MessageKey(step, two_hop_number(sequence, phase, receiver, self.ranks, shared=self.beside_ring))

    def check_key(self, step: int, sequence: int) -> None:
        """Raise ValueError if a bucket's messages cannot be numbered."""
        self.key(step, sequence, ALL_GATHER, self.contributors[-1])


class Strategy(Protocol):
    """One way to combine all ranks' buckets into one."""

    def start(self, step: int, sequence: int, bucket: Bucket) -> "BucketRun":
        """Begin to reduce a bucket, and return its run.

        Parameters
        ----------
        step, sequence
            Training step, and the bucket's number within it; the same on all ranks.

        Raises
        ------
        ValueError
            The values are not contiguous, or the step has too many buckets; the message says which.
        """

    def close(self) -> None:
        """Stop the threads; call it when the endpoint is closed."""


class Reducer(Strategy, Protocol):
    """Averages the buckets of one rank, step by step."""

    def begin_step(self, step: int, bits: int = FULL_BITS) -> None:
        """Begin a step: all averages of the last one have arrived. Its runs refuse packets of earlier steps.

        Parameters
        ----------
        bits
            Bits of each value on the wire, where the step's messages can have fewer than all.
        """


class BucketRun(Future[NDArray[np.generic]], ABC):
    """One bucket's run through an algorithm: the future of ``bucket.values``, which are averaged in place.

    Parameters
    ----------
    context, step, sequence, bucket
        This rank, the training step, the bucket's number within it, and the bucket.
    work
        The executor of long computations, if any, because the endpoint's thread must keep up with packets.

    Raises
    ------
    ValueError
        The values are not contiguous and writable.
    """

    def __init__(
        self, context: RankContext, step: int, sequence: int, bucket: Bucket, work: Executor | None = None
    ) -> None:
        if not bucket.values.flags.c_contiguous or not bucket.values.flags.writeable:
            raise ValueError(f"step {step}, bucket {sequence}: values must be contiguous and writable")
        super().__init__()
        self.context, self.step, self.sequence, self.bucket = context, step, sequence, bucket
        self.timeline = context.connection.timeline if context.noted else None
        self.values_per_packet = context.connection.options.payload_bytes // bucket.values.itemsize
        self._work = work

    def start(self: R) -> R:
        """Begin in the endpoint's thread."""
        try:
            connection = self.context.connection
            connection.call(partial(self.attempt, partial(connection.begin_step, self.step), self.begin))
        except TransportError as error:
            self.set_exception(error)
        return self

    def attempt(self, *actions: Callable[[], None]) -> None:
        """Run actions; an error in one fails the bucket."""
        try:
            for action in actions:
                action()
        except Exception as error:
            self.fail(error)

    @abstractmethod
    def begin(self) -> None:
        """Send the first messages and post the first receives, in the endpoint's thread."""

    @abstractmethod
    def partial_result(self) -> PartialResult | None:
        """Return this rank's state of the bucket; None if no other rank can need it.

        Call it when the endpoint is closed, so that nothing changes any more. Once a bucket of a later step is averaged
        here, all ranks have this one: each contributes to a step only with all averages of the last one.
        """

    @property
    def label(self) -> str:
        """The bucket's layers, for error messages."""
        return self.bucket.label(0, len(self.bucket.values))

    def _note(self, event: str, *values: int) -> None:
        if self.timeline is not None:
            self.timeline.note(event, self.step, self.sequence, *values)

    def _may_drop(self, layout: PlaneLayout, packets: slice) -> NDArray[np.bool_]:
        """Return which lower packets of an encoded message may be lost: those without values of exact layers.

        ``packets`` are the message's in the bucket, if it is not encoded.
        """
        layers = self.context.options.layers
        if not layers:
            return np.ones(layout.packets, np.bool_)
        exact = layers.exact_packets(self.bucket.segments, self.values_per_packet)[packets]
        may_drop: NDArray[np.bool_] = ~np.logical_or.reduceat(exact, layout.starts(self.values_per_packet))
        return may_drop

    def _positions(self, packets: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
        """Return the positions of the values in these packets, of ``count`` in all."""
        per_packet = self.values_per_packet
        positions = (np.flatnonzero(packets)[:, None] * per_packet + np.arange(per_packet)).ravel()
        return positions[positions < count]

    def aside(self, action: Callable[[], None]) -> None:
        """Run a long action in the work executor."""
        assert self._work
        try:
            self._work.submit(self.attempt, action)
        except RuntimeError as error:  # the interpreter is shutting down
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.done():
            self.set_exception(error)


@lru_cache(4096)
def _packet_ratios(bounds: LayerBounds, segments: tuple[Segment, ...], values_per_packet: int) -> NDArray[np.float64]:
    """Return the bound of each packet, the tightest of its layers; NaN if no layer has a bound of its own."""
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
    """Return the packets of each layer with its own bound, and those of all others together.

    Packets shared with a layer of a tighter bound form a group of their own.
    """
    ratios = _packet_ratios(bounds, segments, values_per_packet)
    first = np.arange(len(ratios)) * values_per_packet
    starts = np.array([segment.start for segment in segments])
    owner = np.searchsorted(starts, first, "right") - 1
    owner[np.isnan(ratios)] = -1
    _, group = np.unique(np.column_stack([owner, np.nan_to_num(ratios, nan=-1.0)]), axis=0, return_inverse=True)
    return tuple(np.flatnonzero(group.ravel() == number) for number in range(int(group.max()) + 1))
