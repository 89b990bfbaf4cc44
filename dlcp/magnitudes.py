# SPDX-License-Identifier: Apache-2.0
"""How large the values in a packet are, and which drop class that makes it.

Both are done by the compiled library where there is one (``dlcp/native/tags.c``), else in NumPy. Classes of the same
magnitudes are the same either way; magnitudes agree but for the rounding of their sums.
"""

import ctypes
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp import native
from dlcp.dtypes import ValueType
from dlcp.native import address
from dlcp.wire import DROP_CLASSES

BORDERS: Final = DROP_CLASSES - 1
"""How many magnitudes part the classes 7|6|...|1|0."""

LAYER_PACKETS: Final = np.dtype(
    [("first", np.int64), ("stop", np.int64), ("row", np.int64), ("quantiles", np.float64, BORDERS)]
)
"""The packets of a layer, from ``first`` to before ``stop``; its row of borders; the quantiles where classes part."""

_FORMATS: Final = {value_type: number for number, value_type in enumerate(ValueType)}


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

    Raises
    ------
    TypeError
        The buffer is held in another type than ``value_type.storage``.
    """
    value_type.check_storage(values)
    library = native.library()
    if library is None:
        return _magnitudes_numpy(values, value_type, values_per_packet)
    if not (values.flags.c_contiguous and values.flags.aligned):
        values = np.require(values, requirements=("C", "A"))
    count = len(values)
    magnitudes = np.empty(-(-count // values_per_packet), np.float32)
    _compiled(library).dlcp_packet_magnitudes(
        address(values), _FORMATS[value_type], count, values_per_packet, address(magnitudes)
    )
    return magnitudes


def classify(
    magnitudes: NDArray[np.float32],
    kept: NDArray[np.bool_],
    layers: NDArray[np.void],
    memory: float,
    borders: NDArray[np.float64],
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Judge packets by the distribution of their own layer, so that classes hold their shares whatever its scale.

    Parameters
    ----------
    magnitudes
        One per packet, as :func:`packet_magnitudes` returns them.
    kept
        Which packets are protected whatever their magnitude, shape (packets,).
    layers
        Whose packets they are, of ``LAYER_PACKETS``, without gaps or overlap.
    memory
        Weight of the past in the borders.
    borders
        Magnitudes that part the classes, ascending, shape (rows, 7); a row of NaN for a layer not seen before. They
        are moved: to the quantiles of the layer's finite magnitudes, ``1 - memory`` of the way.

    Returns
    -------
    Drop class of each packet, and which packets are protected: those in class 0.
    """
    library = native.library()
    if library is None:
        return _classify_numpy(magnitudes, kept, layers, memory, borders)
    count = len(magnitudes)
    classes, protected = np.empty(count, np.uint8), np.empty(count, np.bool_)
    scratch = np.empty(2 * count, np.uint32)
    _compiled(library).dlcp_classify(
        address(magnitudes),
        address(kept),
        address(layers),
        len(layers),
        memory,
        address(borders),
        address(scratch),
        count,
        address(classes),
        address(protected),
    )
    return classes, protected


@cache
def _compiled(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare what the library's functions take."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.dlcp_packet_magnitudes.argtypes = [pointer, ctypes.c_int, number, number, pointer]
    library.dlcp_classify.argtypes = [
        *(pointer, pointer, pointer, number, ctypes.c_double, pointer, pointer, number, pointer, pointer)
    ]
    library.dlcp_classify.restype = None
    return library


def _magnitudes_numpy(
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


def _classify_numpy(
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
