# SPDX-License-Identifier: Apache-2.0
"""All of the kernel's arrays in one record that every function is given.

Handing arrays over one by one costs more than what most functions do with them, and so does counting references to
them. So the record holds their addresses and lengths, and functions make arrays of what they need: a load or two each.
Whoever fills the record has to keep the arrays alive.
"""

import importlib
from typing import Any, Final

import numpy as np
from dlcp.sim.kernel.jit import AVAILABLE, call
from dlcp.sim.kernel.state import EVENT, GRAPH, MESSAGE, PACKET, PORT, QUEUE, RECORD, SLOT, STREAM, SWITCH, Rows
from dlcp.sim.plan import TRANSPORT
from numpy.typing import NDArray

_INT: Final = np.dtype(np.int64)
_INT32: Final = np.dtype(np.int32)
_BYTE: Final = np.dtype(np.uint8)

ARRAYS: Final = {
    "times": _INT,
    "keys": _INT,
    "far_times": _INT,
    "far_keys": _INT,
    "events": EVENT,
    "buckets": _INT32,
    "occupied": _INT,
    "ports": PORT,
    "queues": QUEUE,
    "packets": PACKET,
    "switches": SWITCH,
    "slots": SLOT,
    "streams": STREAM,
    "messages": MESSAGE,
    "graphs": GRAPH,
    "followers": _INT32,
    "notes": _INT,
    "records": RECORD,
    "seg": _BYTE,
    "transports": TRANSPORT,
    "profiles": _BYTE,
    "route_row": _INT32,
    "route_table": _INT32,
    "choices": _INT32,
    "rules": _INT,
    "counts": _INT,
}
"""The arrays by name; those of more than one dimension are flat here."""

SCALARS: Final = (
    "now",
    "sequence",
    "heap_length",
    "far_length",
    "bucketed",
    "events_waiting",
    "bucket_now",
    "bucket_shift",
    "free_event",
    "touched",
    "free_packet",
    "free_packets",
    "free_record",
    "free_records",
    "serial",
    "noted",
    "hosts",
    "free_stream",
    "flying_max",
    "followers_max",
)
"""Numbers of the whole network. ``free_packet`` is the first of ``free_packets`` unused ones, and so on; ``noted``
counts notes; ``flying_max`` and ``followers_max`` bound what one event may need."""

WORLD: Final = np.dtype(
    [(name, np.int64) for name in SCALARS]
    + [(f"{name}_at", np.int64) for name in ARRAYS]
    + [(f"{name}_len", np.int64) for name in ARRAYS]
)


def bind(world: Any, name: str, array: NDArray[Any]) -> None:
    """Let the record refer to an array, which has to be contiguous and of the right type."""
    if array.dtype != ARRAYS[name] or not array.flags.c_contiguous:
        raise TypeError(f"{name} has to be a contiguous array of {ARRAYS[name]}, not of {array.dtype}")
    world[f"{name}_at"] = array.ctypes.data
    world[f"{name}_len"] = array.size


carray: Any = None
_pointer: Any = None
if AVAILABLE:
    numba: Any = importlib.import_module("numba")
    ir: Any = importlib.import_module("llvmlite.ir")
    extending: Any = importlib.import_module("numba.extending")
    carray = numba.carray

    def _make_pointer(typingctx: Any, address: Any) -> Any:
        """Make a pointer of an address."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

        return numba.core.types.voidptr(numba.types.int64), generate

    _pointer = extending.intrinsic(_make_pointer)


@call
def times_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.times_at), w.times_len, _INT)


@call
def keys_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.keys_at), w.keys_len, _INT)


@call
def ports_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.ports_at), w.ports_len, PORT)


@call
def queues_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.queues_at), w.queues_len, QUEUE)


@call
def packets_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.packets_at), w.packets_len, PACKET)


@call
def switches_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.switches_at), w.switches_len, SWITCH)


@call
def slots_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.slots_at), w.slots_len, SLOT)


@call
def streams_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.streams_at), w.streams_len, STREAM)


@call
def messages_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.messages_at), w.messages_len, MESSAGE)


@call
def graphs_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.graphs_at), w.graphs_len, GRAPH)


@call
def followers_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.followers_at), w.followers_len, _INT32)


@call
def notes_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.notes_at), w.notes_len, _INT)


@call
def records_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.records_at), w.records_len, RECORD)


@call
def seg_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.seg_at), w.seg_len, _BYTE)


@call
def transports_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.transports_at), w.transports_len, TRANSPORT)


@call
def profiles_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.profiles_at), w.profiles_len, _BYTE)


@call
def route_row_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.route_row_at), w.route_row_len, _INT32)


@call
def route_table_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.route_table_at), w.route_table_len, _INT32)


@call
def choices_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.choices_at), w.choices_len, _INT32)


@call
def rules_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.rules_at), w.rules_len, _INT)


@call
def counts_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.counts_at), w.counts_len, _INT)


@call
def far_times_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.far_times_at), w.far_times_len, _INT)


@call
def far_keys_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.far_keys_at), w.far_keys_len, _INT)


@call
def events_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.events_at), w.events_len, EVENT)


@call
def buckets_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.buckets_at), w.buckets_len, _INT32)


@call
def occupied_of(w: Rows) -> Rows:
    """Return the array."""
    return carray(_pointer(w.occupied_at), w.occupied_len, _INT)
