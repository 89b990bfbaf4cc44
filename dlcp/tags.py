# SPDX-License-Identifier: Apache-2.0
"""What a packet's tags say: the queue from its layer, the drop class from its magnitude.

Front layers go first, because the next forward pass needs them first. Packets of small values are dropped first,
because losing them changes a step least. Both are judged by packet: by value it would cost more than it saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.dtypes import ValueType
from dlcp.wire import DROP_CLASSES, Queue

FRONT_SHARES = (0.30, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10)
"""Share of packets per drop class, 0 to 7, in the layer nearest the input. Chosen by us."""
BACK_SHARES = (0.60, 0.06, 0.06, 0.06, 0.06, 0.06, 0.05, 0.05)
"""The same in the layer nearest the output, which bears less loss (0.4 % against 1.1 %, MLT). Chosen by us."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A parameter of the model.

    ``position`` is 0 for the layer nearest the input and 255 for the one nearest the output.
    """

    name: str
    position: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a layer's values lie in a buffer: ``start`` to ``stop``, in values."""

    layer: Layer
    start: int
    stop: int


class PacketTags(NamedTuple):
    """Tags of the packets of a message, each of shape (packets,)."""

    queue: NDArray[np.uint8]
    drop_class: NDArray[np.uint8]
    layer: NDArray[np.uint8]
    protected: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TagPolicy:
    """How tags follow layer and magnitude.

    Parameters
    ----------
    front_shares, back_shares
        Share of packets in each drop class, 0 to 7, for the first and the last layer; layers between are interpolated.
    small_layer_values
        Layers of fewer values than this (biases, norms) are protected whole: they are cheap and matter.
    memory
        Weight of the past in a layer's recent distribution of magnitudes, 0 to 1.
    """

    front_shares: tuple[float, ...] = FRONT_SHARES
    back_shares: tuple[float, ...] = BACK_SHARES
    small_layer_values: int = 1024
    memory: float = 0.5

    def __post_init__(self) -> None:
        for shares in (self.front_shares, self.back_shares):
            if len(shares) != DROP_CLASSES or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
                raise ValueError(f"shares must be {DROP_CLASSES} numbers >= 0 that add up to 1, got {shares}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory must lie in [0, 1), got {self.memory}")

    def quantiles(self, position: int) -> NDArray[np.float64]:
        """Return the quantiles of magnitude that part the classes 7|6|...|1|0 in a layer, ascending, shape (7,)."""
        back = position / 255
        shares = (1 - back) * np.asarray(self.front_shares) + back * np.asarray(self.back_shares)
        return np.cumsum(shares[:0:-1])


def layers_in_order(names: Sequence[str]) -> dict[str, Layer]:
    """Give each parameter its position by order of definition, input side first.

    Parameters of one module (``conv1.weight`` and ``conv1.bias``) share a position.
    """
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    scale = 255 / max(1, len(modules) - 1)
    position = {module: round(index * scale) for index, module in enumerate(modules)}
    return {name: Layer(name, position[name.rpartition(".")[0] or name]) for name in names}


def queue_of_layer(position: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the queue for layer positions: 6 for the front of the model down to 2 for its back."""
    bands = Queue.LAST_GRADIENT - Queue.FIRST_GRADIENT + 1
    return (Queue.LAST_GRADIENT - (position.astype(np.uint16) * bands >> 8)).astype(np.uint8)


def packet_magnitudes(
    values: NDArray[np.generic], value_type: ValueType, values_per_packet: int
) -> NDArray[np.float32]:
    """Return the root mean square of each packet's values: its L2 norm, made comparable for a short last packet.

    Parameters
    ----------
    values
        A flat buffer of ``value_type``.
    values_per_packet
        How many values a packet carries; the last may carry fewer.

    Returns
    -------
    Magnitudes, shape (ceil(values / values_per_packet),). A packet with NaN or infinity counts as the largest.
    """
    floats = value_type.widen(values)
    whole = len(floats) // values_per_packet
    body = floats[: whole * values_per_packet].reshape(whole, values_per_packet)
    squares = np.einsum("ij,ij->i", body, body) / values_per_packet
    rest = floats[whole * values_per_packet :]
    if len(rest):
        squares = np.append(squares, np.dot(rest, rest) / len(rest))
    magnitudes: NDArray[np.float32] = np.sqrt(squares).astype(np.float32)
    magnitudes[np.isnan(magnitudes)] = np.inf
    return magnitudes


@dataclass(slots=True)
class Tagger:
    """Tags the packets of gradients, remembering how large each layer's values have been of late."""

    policy: TagPolicy = field(default_factory=TagPolicy)
    _borders: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def tag(
        self, values: NDArray[np.generic], value_type: ValueType, segments: Sequence[Segment], values_per_packet: int
    ) -> PacketTags:
        """Tag the packets of a buffer.

        Parameters
        ----------
        values
            Flat buffer of ``value_type``, shape (m,).
        segments
            The layers in it: ascending, without gaps, from 0 to m.
        values_per_packet
            How many values a packet carries.

        Returns
        -------
        Tags of shape (ceil(m / values_per_packet),).
        """
        count = -(-len(values) // values_per_packet)
        starts = np.array([segment.start for segment in segments])
        small = np.array([s.stop - s.start < self.policy.small_layer_values for s in segments])
        positions = np.array([segment.layer.position for segment in segments], np.uint8)
        first_value = np.arange(count) * values_per_packet
        last_value = np.minimum(first_value + values_per_packet, len(values)) - 1
        first = np.searchsorted(starts, first_value, "right") - 1
        last = np.searchsorted(starts, last_value, "right") - 1
        middle = np.searchsorted(starts, (first_value + last_value) // 2, "right") - 1
        small_before = np.concatenate([[0], np.cumsum(small)])
        protected = small_before[last + 1] > small_before[first]
        magnitudes = packet_magnitudes(values, value_type, values_per_packet)
        classes = np.zeros(count, np.uint8)
        for index in np.unique(middle):
            mine = (middle == index) & ~protected
            if mine.any():
                classes[mine] = self._classify(segments[index].layer, magnitudes[mine])
        # A packet on a border is as urgent as the most urgent layer in it.
        spans = np.column_stack([first, last + 1]).ravel()
        layer = np.minimum.reduceat(np.append(positions, np.uint8(255)), spans)[::2]
        return PacketTags(queue_of_layer(layer), classes, layer, protected | (classes == 0))

    def _classify(self, layer: Layer, magnitudes: NDArray[np.float32]) -> NDArray[np.uint8]:
        finite = magnitudes[np.isfinite(magnitudes)]
        quantiles = self.policy.quantiles(layer.position)
        if len(finite):
            # Judged by the distribution of its own layer, so that classes hold their shares whatever the scale.
            borders: NDArray[np.float64] = np.quantile(finite.astype(np.float64), quantiles)
            past = self._borders.get(layer.name)
            if past is not None:
                borders = self.policy.memory * past + (1 - self.policy.memory) * borders
            self._borders[layer.name] = borders
        elif layer.name not in self._borders:
            return np.zeros(len(magnitudes), np.uint8)
        below = np.searchsorted(self._borders[layer.name], magnitudes, "right")
        # Where most packets are zeros, as in an embedding, so are the borders: zeros are worth least all the same.
        below[magnitudes == 0] = np.count_nonzero(quantiles == 0)
        return (DROP_CLASSES - 1 - below).astype(np.uint8)
