# SPDX-License-Identifier: Apache-2.0
"""Layers with a loss bound of their own: embeddings and norms exactly, say, and the front of the model with less care.

A message may hold several layers, and its receiver counts packets and not layers. So its bound is the mean of its
packets' bounds; and of each layer the sender protects all packets but as many as that layer may lose, the least
valuable ones being those. Protected packets are always delivered, so no layer can spend what another one may lose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import PacketTags, Segment
from dlcp.transport import LossBound


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
            if not pattern or not 0 <= ratio < 1:
                raise ValueError(f"a layer's bound must lie in [0, 1) and have a pattern, got {pattern!r}={ratio}")

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
        """Return what the values from ``start`` to ``stop`` of a bucket may lose, as sender and receiver reckon it.

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

    def protect(
        self,
        tags: PacketTags,
        segments: Sequence[Segment],
        values_per_packet: int,
        bound: LossBound,
        *,
        turn: int = 0,
        hops: int = 1,
    ) -> None:
        """Protect, in place, all packets of a bucket but as many of each layer as it may lose.

        Those stay droppable whose drop class is the highest; of equals others at every ``turn``. Where packets go over
        several hops that may lose some, each may lose a part of that.
        """
        if not self.rules:
            return
        ratios = _packet_ratios(self, tuple(segments), values_per_packet)
        for packets in _groups(self, tuple(segments), values_per_packet):
            ratio = ratios[packets[0]]
            protect_all_but(tags, packets, (bound.ratio if np.isnan(ratio) else float(ratio)) / hops, turn)


def protect_all_but(tags: PacketTags, packets: NDArray[np.int64], ratio: float, turn: int = 0) -> None:
    """Protect, in place, of some packets all but the share ``ratio``; see :meth:`LayerBounds.protect`."""
    droppable = packets[~tags.protected[packets]]
    excess = len(droppable) - LossBound(ratio).allowed(len(packets))
    if excess <= 0:
        return
    turned = np.roll(droppable, turn)
    chosen = turned[np.argsort(tags.drop_class[turned], kind="stable")][:excess]
    tags.protected[chosen] = True
    tags.drop_class[chosen] = 0


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
