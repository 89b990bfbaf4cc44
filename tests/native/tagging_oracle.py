# SPDX-License-Identifier: Apache-2.0
"""The computations of ``dlcp/native/tags.c`` in NumPy: tests compare the two."""

import numpy as np
from numpy.typing import NDArray

from dlcp.values.dtypes import ValueType
from dlcp.values.tags import AS_SEEDED, BLOCK_PACKETS, BORDERS, ChunkOrder, PacketTags
from dlcp.wire import Flag


def packet_magnitudes(
    values: NDArray[np.generic], value_type: ValueType, values_per_packet: int
) -> NDArray[np.float32]:
    floats = value_type.widen(values)
    whole = len(floats) // values_per_packet
    body = floats[: whole * values_per_packet].reshape(whole, values_per_packet)
    squares = np.einsum("ij,ij->i", body, body) / values_per_packet
    rest = floats[whole * values_per_packet :]
    if len(rest):
        squares = np.append(squares, np.dot(rest, rest) / len(rest))
    with np.errstate(over="ignore"):
        magnitudes: NDArray[np.float32] = np.sqrt(squares).astype(np.float32)
    magnitudes[np.isnan(magnitudes)] = np.inf
    return magnitudes


def classify(
    magnitudes: NDArray[np.float32],
    kept: NDArray[np.bool_],
    layers: NDArray[np.void],
    memory: float,
    borders: NDArray[np.float64],
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    classes = np.zeros(len(magnitudes), np.uint8)
    counted = np.isfinite(magnitudes) & ~kept
    for layer in layers:
        mine, row, quantiles = slice(layer["first"], layer["stop"]), borders[layer["row"]], layer["quantiles"]
        own = magnitudes[mine]
        ordered = np.sort(own[counted[mine]])
        if len(ordered):
            now = _at_quantiles(ordered, quantiles)
            row[:] = now if np.isnan(row[0]) else memory * row + (1 - memory) * now
        elif np.isnan(row[0]):
            continue
        below = np.searchsorted(row, own, "right")
        # Where most packets are zeros, as in an embedding, so are the borders: zeros are worth least all the same.
        below[own == 0] = np.count_nonzero(quantiles == 0)
        classes[mine] = BORDERS - below
    classes[kept] = 0
    return classes, classes == 0


def _at_quantiles(ordered: NDArray[np.float32], quantiles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate between the two magnitudes next to each quantile, in the very steps of the compiled library."""
    last = len(ordered) - 1
    place = np.minimum(quantiles * last, last)
    below = place.astype(np.int64)
    low, high = ordered[below].astype(np.float64), ordered[np.minimum(below + 1, last)].astype(np.float64)
    return np.minimum(low + (high - low) * (place - below), high)


def encode_tags(
    tags: PacketTags, bounded: bool, service: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    encoded = np.empty((len(tags.queue), 4), np.uint8)
    droppable = ~tags.protected & (tags.drop_class > 0) & bounded
    encoded[:, 0] = np.where(tags.protected, np.uint8(Flag.PROTECTED), np.uint8(0))
    encoded[:, 1] = tags.queue << 5 | np.where(droppable, tags.drop_class, 0) << 2
    encoded[:, 2] = tags.layer
    encoded[:, 3] = service[tags.queue, droppable.view(np.uint8)]
    return encoded, droppable


def send_order(
    queue: NDArray[np.uint8], droppable: NDArray[np.bool_] | NDArray[np.uint8], seed: int, order: ChunkOrder = AS_SEEDED
) -> NDArray[np.uint32]:
    """Return the order in which the packets of a message are sent.

    The most urgent queue goes first. Within a queue packets go by blocks of 256, so that neighbours stay together, and
    a block in the middle begins: else congestion, which hits the last ones, would hit the same layers at every step.
    Within a block those go first that may not be dropped.
    """
    parts = [np.empty(0, np.uint32)]
    for number in np.unique(queue)[::-1]:
        indices = np.flatnonzero(queue == number).astype(np.uint32)
        blocks = -(-len(indices) // BLOCK_PACKETS)
        start = (seed & 0xFFFFFFFF) % blocks + blocks * order.chunk // order.chunks
        when = (np.arange(len(indices)) // BLOCK_PACKETS - start) % blocks
        parts.append(indices[np.argsort(2 * when + (droppable[indices] != 0), kind="stable")])
    return np.concatenate(parts)
