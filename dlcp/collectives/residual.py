# SPDX-License-Identifier: Apache-2.0
"""Error feedback: lost values are kept as a residual, and sent with the next step.

This is the rule of error-compensated SGD (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019), with the
network in place of the compressor: the receiver's bitmap identifies the lost packets exactly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment


@dataclass(slots=True)
class _LayerResidual:
    """The residual of one parameter: values and their positions. A position may occur more than once."""

    size: int
    parts: list[tuple[NDArray[np.int64] | slice, NDArray[np.floating]]] = field(default_factory=list)

    def add_to(self, values: NDArray[Any]) -> None:
        for positions, residual in self.parts:
            values[positions] += residual

    def moved_to(self, segments: Sequence[Segment]) -> "_LayerResidual":
        """Return the residual for a buffer that holds the whole parameter in shards, at its positions there."""
        ordered = sorted(segments, key=lambda segment: segment.offset)
        offsets, starts, stops = np.array([(each.offset, each.start, each.stop) for each in ordered]).T
        moved = _LayerResidual(stops.max())
        for positions, residual in self.parts:
            within = np.arange(self.size)[positions] if isinstance(positions, slice) else positions
            shard = np.searchsorted(offsets, within, "right") - 1
            into = starts[shard] + within - offsets[shard]
            inside = into < stops[shard]  # excludes zeros from packet padding of a different sharding
            moved.parts.append((into[inside], residual[inside]))
        return moved


class Residual:
    """Values that this rank still has to send, by parameter, because frameworks may regroup their buffers.

    For losses in the network, only the lost values are kept, which are few. A compressor leaves out most values, which
    are kept without positions. Values beyond a layer's end are not kept.

    Attributes
    ----------
    revocable
        Whether :meth:`revoke` may follow; values that :meth:`apply` removes are then kept until its next call.
    revoked
        The parameters of the last :meth:`revoke`.
    """

    def __init__(self) -> None:
        self._layers: dict[str, _LayerResidual] = {}
        self._applied: dict[str, _LayerResidual] = {}
        self.revocable = False
        self.revoked: frozenset[str] = frozenset()

    def apply(
        self, values: NDArray[np.generic], segments: Sequence[Segment], value_type: ValueType | None = None
    ) -> None:
        """Add the residual to a buffer, in place, and forget it. The buffer holds either all of a parameter or nothing.

        Parameters
        ----------
        values
            Floats; with ``value_type`` a buffer in its storage.
        """
        if not self._layers:
            return
        shards: dict[str, list[Segment]] = {}
        for segment in segments:
            if not segment.is_beyond:
                shards.setdefault(segment.layer.name, []).append(segment)
        for name, own in shards.items():
            layer = self._layers.pop(name, None)
            if layer is None:
                continue
            if self.revocable:
                self._applied[name] = layer
            part = values[own[0].start : own[0].stop]
            if len(own) > 1:
                part, layer = values, layer.moved_to(own)
            if value_type in (None, ValueType.FLOAT32):
                layer.add_to(part)
                continue
            for positions, residual in layer.parts:  # rounded after each part, since bit patterns cannot be added
                part[positions] = value_type.narrow(value_type.widen(part[positions]) + residual)

    def add(self, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Keep the nonzero values of a buffer."""
        positions = np.flatnonzero(values)
        self.add_at(positions, values[positions], segments)

    def add_whole(self, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Keep all values of a dense buffer; it must not change any more."""
        self.add_range(0, values, segments)

    def add_range(self, start: int, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Keep all of ``values``, a part of a buffer that begins at ``start``; they must not change any more."""
        for segment in segments:
            first, stop = max(segment.start, start), min(segment.stop, start + len(values))
            if first < stop and not segment.is_beyond:
                offset = segment.offset + first - segment.start
                within = slice(offset, offset + stop - first)
                self._layer(segment).parts.append((within, values[first - start : stop - start]))

    def add_at(self, positions: NDArray[np.int64], values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Keep ``values`` that belong at ``positions`` of a buffer; these are ascending and unique."""
        if not len(positions):
            return
        borders = np.searchsorted(positions, [segment.start for segment in segments] + [segments[-1].stop])
        for segment, first, last in zip(segments, borders, borders[1:], strict=False):
            if first < last and not segment.is_beyond:
                within = positions[first:last] - segment.start + segment.offset
                self._layer(segment).parts.append((within, values[first:last].copy()))

    def allow_revoking(self, allowed: bool) -> None:
        """Set whether :meth:`revoke` may follow from the next step on; earlier steps are not revoked any more."""
        self.revocable, self.revoked = allowed, frozenset()
        self._applied.clear()

    def revoke(self, names: Iterable[str]) -> None:
        """End a step in which nobody used the averages of some parameters: restore their residual from before it.

        All ranks must revoke the same ones, after the step's last :meth:`add` and before the next one's first
        :meth:`apply`.
        """
        self.revoked = frozenset(names)
        for name in self.revoked:
            self._layers.pop(name, None)
            if name in self._applied:
                self._layers[name] = self._applied[name]
        self._applied.clear()

    def of(self, name: str) -> NDArray[np.floating] | None:
        """Return the residual of a parameter, flat and with zeros in the gaps, or None."""
        layer = self._layers.get(name)
        if layer is None:
            return None
        values: NDArray[np.floating] = np.zeros(layer.size, layer.parts[0][1].dtype)
        layer.add_to(values)
        return values

    def take_over(self, other: "Residual", factor: float) -> None:
        """Add another rank's residual, multiplied."""
        for name, layer in other._layers.items():
            kept = self._layers.setdefault(name, _LayerResidual(layer.size))
            kept.size = max(kept.size, layer.size)
            kept.parts += [(positions, residual * factor) for positions, residual in layer.parts]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(len(residual) for layer in self._layers.values() for _, residual in layer.parts)

    def reset(self) -> None:
        """Forget everything."""
        self._layers.clear()

    def _layer(self, segment: Segment) -> _LayerResidual:
        size = segment.offset + segment.stop - segment.start
        layer = self._layers.setdefault(segment.layer.name, _LayerResidual(size))
        layer.size = max(layer.size, size)
        return layer
