# SPDX-License-Identifier: Apache-2.0
"""Packet tags: the queue from the layer, the drop class from the magnitude.

Front layers go first, because the next forward pass needs them first. Packets of small values are dropped first,
because losing them changes a step least. Both are judged per packet: per value it would cost more than it saves.
``dlcp/native/tags.c`` computes magnitudes, and the drop classes that follow from them.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.native import ffi, lib
from dlcp.values.dtypes import ValueType
from dlcp.wire import DROP_CLASSES, Queue

BORDERS: Final[int] = lib.BORDERS
"""Number of magnitudes that separate the classes 7|6|...|1|0."""
_NUMPY_TYPES: Final[dict[str, Any]] = {"int64_t": np.int64, f"double[{BORDERS}]": (np.float64, BORDERS)}
LAYER_PACKETS: Final[np.dtype[np.void]] = np.dtype(
    [(name, _NUMPY_TYPES[field.type.cname]) for name, field in ffi.typeof("layer_packets").fields]
)
"""A layer's packets, ``first:stop``; its row of borders; the quantiles that separate classes."""


def packet_magnitudes(
    values: NDArray[np.generic], value_type: ValueType, values_per_packet: int
) -> NDArray[np.float32]:
    """Return the root mean square of each packet's values: its L2 norm, but comparable for a short last packet.

    Parameters
    ----------
    values
        A flat buffer of ``value_type``.
    values_per_packet
        How many values a packet carries; the last may carry fewer.

    Returns
    -------
    Magnitudes, shape (ceil(values / values_per_packet),). A packet with NaN or infinity counts as the largest.

    Raises
    ------
    TypeError
        The buffer has another type than ``value_type.storage``.
    """
    value_type.check_storage(values)
    if not (values.flags.c_contiguous and values.flags.aligned):
        values = np.require(values, requirements=("C", "A"))
    count = len(values)
    magnitudes = np.empty(-(-count // values_per_packet), np.float32)
    into_magnitudes = getattr(lib, f"dlcp_magnitudes_{value_type.value}")
    into_magnitudes(ffi.from_buffer(values), count, values_per_packet, ffi.from_buffer("float[]", magnitudes))
    return magnitudes


def classify(
    magnitudes: NDArray[np.float32],
    kept: NDArray[np.bool_],
    layers: NDArray[np.void],
    memory: float,
    borders: NDArray[np.float64],
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Classify packets by the distribution within their own layer, so that class shares do not depend on its scale.

    Parameters
    ----------
    magnitudes
        One per packet, as returned by :func:`packet_magnitudes`.
    kept
        Packets that are protected whatever their magnitude, shape (packets,).
    layers
        The packets' layers, of ``LAYER_PACKETS``, without gaps or overlap.
    memory
        Weight of the past in the borders.
    borders
        Magnitudes that separate the classes, ascending, shape (rows, 7); a row of NaN for a new layer. Updated in
        place: moved by ``1 - memory`` of the way to the quantiles of the layer's finite magnitudes.

    Returns
    -------
    Drop class of each packet, and which packets are protected: those in class 0.
    """
    count = len(magnitudes)
    classes, protected = np.empty(count, np.uint8), np.empty(count, np.bool_)
    scratch = np.empty(2 * count, np.uint32)
    lib.dlcp_classify(
        ffi.from_buffer("float[]", magnitudes),
        ffi.from_buffer(kept),
        ffi.from_buffer("layer_packets[]", layers),
        len(layers),
        memory,
        ffi.from_buffer("double[]", borders),
        ffi.from_buffer("uint32_t[]", scratch),
        count,
        ffi.from_buffer(classes),
        ffi.from_buffer(protected),
    )
    return classes, protected


FRONT_SHARES = (0.30, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10)
"""Share of packets per drop class, 0 to 7, in the layer nearest the input. Not tuned."""
BACK_SHARES = (0.60, 0.06, 0.06, 0.06, 0.06, 0.06, 0.05, 0.05)
"""The same in the layer nearest the output, which tolerates less loss (0.4 % against 1.1 %, MLT). Not tuned."""

BLOCK_PACKETS: Final[int] = lib.SEND_BLOCK_PACKETS
"""How many packets of a queue are sent together. A burst (UDP_SEGMENT) has at most 64 of one kind, and a block two
kinds. In smaller blocks most bursts are short, so there are a fifth more of them."""
LAYOUTS: Final = 4096
"""How many layouts of buffers are remembered: more than a model has buckets or layers."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A parameter of the model.

    ``position`` is 0 for the layer nearest the input and 255 for the one nearest the output. ``shape`` is the
    parameter's, ``()`` if unknown: some compressors treat it as a matrix.
    """

    name: str
    position: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a buffer that holds values of a layer: ``start`` to ``stop``, in values.

    ``offset`` is where in the layer they begin. A layer split into shards has a segment for each. Values beyond the
    layer's end belong to nothing, such as padding of a packet.
    """

    layer: Layer
    start: int
    stop: int
    offset: int = 0

    @property
    def is_beyond(self) -> bool:
        """Whether it begins at or after the layer's end, and so holds nothing of it; False if the end is unknown."""
        return bool(self.layer.shape) and self.offset >= math.prod(self.layer.shape)


class PacketTags(NamedTuple):
    """Tags of the packets of a message, each of shape (packets,)."""

    queue: NDArray[np.uint8]
    drop_class: NDArray[np.uint8]
    layer: NDArray[np.uint8]
    protected: NDArray[np.bool_]

    def part(self, packets: slice, more: int = 0) -> "PacketTags":
        """Return the tags of some packets, as views; with ``more`` packets, tagged like the last, as a copy."""
        fields: list[NDArray[Any]] = [each[packets] for each in self]
        if more > 0:
            fields = [np.append(each, each[-1:].repeat(more)) for each in fields]
        return PacketTags(*fields)


@dataclass(frozen=True, slots=True)
class TagPolicy:
    """How tags depend on layer and magnitude.

    Parameters
    ----------
    front_shares, back_shares
        Share of packets in each drop class, 0 to 7, for the first and the last layer; interpolated in between.
    small_layer_values
        Layers of fewer values than this (biases, norms) are fully protected: they are cheap and matter.
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
        """Return the quantiles of magnitude that separate the classes 7|6|...|1|0 in a layer, ascending, shape (7,)."""
        back = position / 255
        shares = (1 - back) * np.asarray(self.front_shares) + back * np.asarray(self.back_shares)
        return np.cumsum(shares[:0:-1])


def layers_in_order(names: Sequence[str], shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Layer]:
    """Give each parameter its position by order of definition, input side first.

    Parameters of one module (``conv1.weight`` and ``conv1.bias``) share a position. ``shapes`` are the parameters', by
    name, as far as known.
    """
    shapes = shapes or {}
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    scale = 255 / max(1, len(modules) - 1)
    position = {module: round(index * scale) for index, module in enumerate(modules)}
    return {name: Layer(name, position[name.rpartition(".")[0] or name], tuple(shapes.get(name, ()))) for name in names}


class ChunkOrder(NamedTuple):
    """Which part of a message is sent first: of ``chunks`` equal parts, ``chunk`` parts after the seeded one.

    Ranks that send to the same receiver begin with different chunks, so that the receiver, which adds them up in a
    fixed order, can use all of them at once.
    """

    chunk: int = 0
    chunks: int = 1


AS_SEEDED: Final = ChunkOrder()
"""Begins with the seeded chunk."""


def queue_of_layer(position: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the queue for layer positions: 6 for the front of the model down to 2 for its back."""
    bands = Queue.LAST_GRADIENT - Queue.FIRST_GRADIENT + 1
    return (Queue.LAST_GRADIENT - (position.astype(np.uint16) * bands >> 8)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class PacketLayout:
    """The layers of a buffer's packets, and the tags that depend on nothing else.

    Parameters
    ----------
    segments
        The layers of the buffer.
    values, values_per_packet
        Its number of values, and how many of them a packet carries.
    queue, layer
        Tags, shape (packets,).
    kept
        Packets that carry values of a small layer, shape (packets,).
    owners
        The layers' packets, of ``LAYER_PACKETS``; layers without packets are omitted.
    whole
        The tags if nothing may be lost.
    """

    segments: tuple[Segment, ...]
    values: int
    values_per_packet: int
    queue: NDArray[np.uint8]
    layer: NDArray[np.uint8]
    kept: NDArray[np.bool_]
    owners: NDArray[np.void]
    whole: PacketTags

    @classmethod
    def of(
        cls, segments: Sequence[Segment], values: int, values_per_packet: int, policy: TagPolicy, rows: dict[str, int]
    ) -> "PacketLayout":
        """Lay out a buffer; ``rows`` gives each layer its row of borders, new layers the next ones."""
        starts = np.array([segment.start for segment in segments])
        small = np.array([s.stop - s.start < policy.small_layer_values for s in segments])
        positions = np.array([segment.layer.position for segment in segments], np.uint8)
        first_value = np.arange(0, values, values_per_packet)
        last_value = np.minimum(first_value + values_per_packet, values) - 1
        first = np.searchsorted(starts, first_value, "right") - 1
        last = np.searchsorted(starts, last_value, "right") - 1
        small_before = np.concatenate([[0], np.cumsum(small)])
        # A packet with several layers is as urgent as the most urgent one, and belongs to the one in its middle.
        spans = np.column_stack([first, last + 1]).ravel()
        layer = np.minimum.reduceat(np.append(positions, np.uint8(255)), spans)[::2]
        middle = np.searchsorted(starts, (first_value + last_value) // 2, "right") - 1
        numbers, begins = np.unique(middle, return_index=True)
        owners = np.empty(len(numbers), LAYER_PACKETS)
        owners["first"], owners["stop"] = begins, np.append(begins[1:], len(middle))
        for owner, number in zip(owners, numbers, strict=True):
            mine = segments[number].layer
            owner["row"] = rows.setdefault(mine.name, len(rows))
            owner["quantiles"] = policy.quantiles(mine.position)
        kept, queue = small_before[last + 1] > small_before[first], queue_of_layer(layer)
        whole = PacketTags(queue, np.zeros(len(queue), np.uint8), layer, np.ones(len(queue), np.bool_))
        return cls(tuple(segments), values, values_per_packet, queue, layer, kept, owners, whole)

    def fits(self, segments: Sequence[Segment], values: int, values_per_packet: int) -> bool:
        """Return whether this is the layout of such a buffer."""
        same_sizes = values == self.values and values_per_packet == self.values_per_packet
        return same_sizes and tuple(segments) == self.segments


@lru_cache(64)
def plain_tags(packets: int) -> PacketTags:
    """Return the tags of a message without layers that may lose nothing; shared, so read-only."""
    queue = Queue.LAST_GRADIENT if packets == 1 else (Queue.FIRST_GRADIENT + Queue.LAST_GRADIENT) // 2
    nothing = np.zeros(packets, np.uint8)
    return PacketTags(np.full(packets, queue, np.uint8), nothing, nothing, nothing.astype(np.bool_))


class Tagger:
    """Tags the packets of gradients, tracking the recent magnitudes of each layer.

    Thread-safe; it may be pickled or copied with its state.
    """

    def __init__(self, policy: TagPolicy | None = None) -> None:
        self._policy = policy or TagPolicy()
        self._rows: dict[str, int] = {}
        self._borders = np.empty((0, BORDERS))
        self._layouts: dict[tuple[str, int, int], PacketLayout] = {}
        """By the buffer's first layer and its end: a model's buckets are the same in every step."""
        self._lock = threading.Lock()

    @property
    def policy(self) -> TagPolicy:
        """How tags depend on layer and magnitude; setting it keeps the layers' state."""
        return self._policy

    @policy.setter
    def policy(self, policy: TagPolicy) -> None:
        with self._lock:
            self._policy = policy
            self._layouts.clear()

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
        magnitudes = packet_magnitudes(values, value_type, values_per_packet)
        return self.tag_magnitudes(magnitudes, len(values), segments, values_per_packet)

    def tag_whole(self, values: int, segments: Sequence[Segment], values_per_packet: int) -> PacketTags:
        """Tag the packets of a buffer of ``values`` values that may lose nothing: by layer only.

        The tags are shared, so they must not be changed.
        """
        with self._lock:
            return self._layout(segments, values, values_per_packet).whole

    def tag_magnitudes(
        self, magnitudes: NDArray[np.float32], values: int, segments: Sequence[Segment], values_per_packet: int
    ) -> PacketTags:
        """Tag the packets of a buffer of ``values`` values by known magnitudes, for example computed on a GPU.

        Parameters
        ----------
        magnitudes
            As returned by :func:`packet_magnitudes`, without NaN.
        """
        with self._lock:
            layout = self._layout(segments, values, values_per_packet)
            classes, protected = classify(magnitudes, layout.kept, layout.owners, self._policy.memory, self._borders)
        return PacketTags(layout.queue.copy(), classes, layout.layer.copy(), protected)

    def __getstate__(self) -> tuple[TagPolicy, dict[str, int], NDArray[np.float64]]:
        with self._lock:
            return self._policy, dict(self._rows), self._borders.copy()

    def __setstate__(self, state: tuple[TagPolicy, dict[str, int], NDArray[np.float64]]) -> None:
        self.__init__(state[0])  # type: ignore[misc]  # creates a new lock and new layouts
        _, self._rows, self._borders = state

    def _layout(self, segments: Sequence[Segment], values: int, values_per_packet: int) -> PacketLayout:
        key = (segments[0].layer.name, segments[0].offset, values) if len(segments) else ("", 0, 0)
        layout = self._layouts.get(key)
        if layout is None or not layout.fits(segments, values, values_per_packet):
            layout = PacketLayout.of(segments, values, values_per_packet, self._policy, self._rows)
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
            unseen = np.full((len(self._rows) - len(self._borders), BORDERS), np.nan)
            self._borders = np.concatenate([self._borders, unseen])
        return layout
