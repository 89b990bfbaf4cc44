# SPDX-License-Identifier: Apache-2.0
"""Magnitudes of packets, and the drop classes that follow from them.

Both are computed in C, by ``dlcp/native/tags.c``.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.native import ffi, lib
from dlcp.values.dtypes import ValueType

BORDERS: Final[int] = lib.BORDERS
"""Number of magnitudes that separate the classes 7|6|...|1|0."""
_NUMPY_TYPES: Final[dict[str, Any]] = {"int64_t": np.int64, f"double[{BORDERS}]": (np.float64, BORDERS)}
LAYER_PACKETS: Final[np.dtype[np.void]] = np.dtype(
    [(name, _NUMPY_TYPES[field.type.cname]) for name, field in ffi.typeof("layer_packets").fields]
)
"""A layer's packets, from ``first`` to before ``stop``; its row of borders; the quantiles that separate classes."""


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
