# SPDX-License-Identifier: Apache-2.0
"""What ``dlcp/native/engine.h`` declares, as ctypes knows it: structures, functions, and constants of both."""

import ctypes
import math
from ctypes import POINTER, c_double, c_int, c_int64, c_uint8, c_void_p
from functools import cache
from typing import Any

import dlcp.native
from dlcp.tags import BLOCK_PACKETS as SEND_BLOCK_PACKETS
from dlcp.transport.congestion import Report
from dlcp.transport.engine import (
    ACK_AT_ONCE_PACKETS,
    ACK_DELAY_S,
    ACK_EVERY_PACKETS,
    ACK_RECENT,
    ACK_SPACING_S,
    ACKS_PER_ROUND_TRIP,
    BLOCK_PACKETS,
    DISORDER_DECAY,
    DISORDER_MAX,
    DISORDER_MIN,
    REORDER_MIN_S,
    REPORT_CALM_S,
    REPORT_MIN_S,
    SEGMENTS_MAX,
)
from dlcp.transport.errors import TransportError

COUNTERS = (
    "refused_malformed",
    "refused_token",
    "refused_job",
    "refused_sender",
    "data",
    "duplicate",
    "send_errors",
    "last_errno",
    "truncated",
    "acknowledgements",
    "received_bursts",
    "sent_bursts",
)
"""What an engine counts."""
PARAMETERS: dict[str, tuple[type[c_double] | type[c_int64], float]] = {
    "reorder_min_s": (c_double, REORDER_MIN_S),
    "disorder_min": (c_double, DISORDER_MIN),
    "disorder_max": (c_double, DISORDER_MAX),
    "disorder_decay": (c_double, DISORDER_DECAY),
    "report_min_s": (c_double, REPORT_MIN_S),
    "report_calm_s": (c_double, REPORT_CALM_S),
    "acknowledge_delay_s": (c_double, ACK_DELAY_S),
    "acknowledge_spacing_s": (c_double, ACK_SPACING_S),
    "acknowledge_round_trips": (c_double, 1 / ACKS_PER_ROUND_TRIP),
    "acknowledge_every": (c_int64, ACK_EVERY_PACKETS),
    "acknowledge_at_once": (c_int64, ACK_AT_ONCE_PACKETS),
}
"""What an engine goes by, to be set before its peers are named: type and value."""
COMPILED_IN = (BLOCK_PACKETS, SEGMENTS_MAX, SEND_BLOCK_PACKETS, ACK_RECENT)
"""What the library was compiled with, because arrays are as long; in the order of ``dlcp_constants``."""


class EngineNumbers(ctypes.Structure):
    """The public part of an engine."""

    _fields_ = [
        *((name, c_int64) for name in (*COUNTERS, "woken", "offload")),
        *((name, kind) for name, (kind, _) in PARAMETERS.items()),
    ]


class NativeFlow(ctypes.Structure):
    """See :class:`dlcp.transport.engine.Flow`."""

    _fields_ = [
        ("window", c_double),
        ("largest_window", c_int64),
        ("flying", c_int64),
        ("smoothed_rtt_s", c_double),
        ("rtt_variation_s", c_double),
        ("heard_s", c_double),
        ("delivered", c_int64),
        ("marked", c_int64),
        ("lost", c_int64),
        ("rtt_s", c_double),
        ("limited", c_int64),
        ("reported_s", c_double),
        ("report_due_s", c_double),
        ("burst", c_int64),
        ("mute", c_int64),
        ("eager", c_int64),
    ]
    window: float
    largest_window: int
    flying: int
    smoothed_rtt_s: float
    rtt_variation_s: float
    heard_s: float
    delivered: int
    marked: int
    lost: int
    rtt_s: float
    limited: int
    reported_s: float
    report_due_s: float
    burst: int
    mute: bool
    eager: bool

    def take_report(self, now_s: float) -> Report | None:
        """See :meth:`dlcp.transport.engine.Flow.take_report`."""
        if now_s < (self.reported_s + self.report_due_s) / 2:
            return None
        report = Report(
            now_s, self.delivered, self.marked, self.lost, self.rtt_s, self.smoothed_rtt_s, bool(self.limited)
        )
        self.delivered = self.marked = self.lost = self.limited = 0
        self.rtt_s = 0.0
        self.reported_s, self.report_due_s = now_s, math.inf
        return report


class OutgoingNumbers(ctypes.Structure):
    """The public part of an outgoing message."""

    _fields_ = [
        *((name, c_int64) for name in ("packets", "flying", "sent", "resent", "delivered", "unsent")),
        ("active_s", c_double),
    ]


class IncomingNumbers(ctypes.Structure):
    """The public part of an incoming message."""

    _fields_ = [
        *((name, c_int64) for name in ("packets", "arrived", "arrived_protected", "protected_packets", "required")),
        *((name, c_int64) for name in ("immediate", "asked", "last_bytes", "settled")),
        ("bits", POINTER(c_uint8)),
        ("layer", POINTER(c_uint8)),
    ]


ControlFunction = ctypes.CFUNCTYPE(c_int, c_int64, c_void_p, c_int64, c_double)
UnknownFunction = ctypes.CFUNCTYPE(c_void_p, c_int64, c_void_p, c_int64, c_double)
SettledFunction = ctypes.CFUNCTYPE(None, c_void_p, c_double)
TakenFunction = ctypes.CFUNCTYPE(None, c_int64, c_int64, c_int64, c_double)
EmitFunction = ctypes.CFUNCTYPE(c_int, c_int64, c_void_p, c_int64, c_int64)

SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dlcp_engine_new": (
        c_void_p,
        (
            *(c_int64, c_int64, ctypes.c_uint64, *(c_int64,) * 4, c_int, c_int, c_int),
            *(ControlFunction, UnknownFunction, SettledFunction, TakenFunction, c_void_p),
        ),
    ),
    "dlcp_engine_peer": (c_void_p, (c_void_p, c_int64, c_int64, ctypes.c_uint32, c_int64, c_double)),
    "dlcp_engine_share_in": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int)),
    "dlcp_engine_share_out": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int)),
    "dlcp_engine_lend": (None, (c_void_p, c_void_p, c_int64)),
    "dlcp_engine_borrow": (None, (c_void_p, c_int64, c_void_p, c_int64)),
    "dlcp_engine_free": (None, (c_void_p,)),
    "dlcp_engine_send": (c_int64, (c_void_p, c_int64, ctypes.c_char_p, c_int64, c_int64)),
    "dlcp_engine_take_in": (
        None,
        (c_void_p, c_void_p, c_int64, ctypes.c_uint32, c_int64, c_int64, c_double),
    ),
    "dlcp_engine_pump": (c_int64, (c_void_p, c_double)),
    "dlcp_engine_acknowledge": (c_double, (c_void_p, c_double)),
    "dlcp_engine_report_due": (c_double, (c_void_p,)),
    "dlcp_engine_turn": (c_int64, (c_void_p, c_double)),
    "dlcp_sizes": (c_int64, (c_int64,)),
    "dlcp_constants": (c_int64, (c_int64,)),
    "dlcp_outgoing_new": (
        c_void_p,
        (
            *(c_void_p, *(c_int64,) * 4, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
            *(ctypes.c_char_p, c_int64, c_double),
        ),
    ),
    "dlcp_outgoing_remove": (None, (c_void_p, c_void_p)),
    "dlcp_outgoing_replace": (None, (c_void_p, c_void_p)),
    "dlcp_outgoing_bitmap": (
        c_int64,
        (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_double, c_double),
    ),
    "dlcp_incoming_new": (
        c_void_p,
        (c_void_p, *(c_int64,) * 4, c_void_p, c_int64, c_void_p, c_int64),
    ),
    "dlcp_incoming_close": (None, (c_void_p, c_void_p)),
    "dlcp_incoming_free": (None, (c_void_p,)),
    "dlcp_incoming_move": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "dlcp_incoming_join": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
    "dlcp_incoming_wait": (c_int64, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_double)),
    "dlcp_incoming_ask": (c_int64, (c_void_p, c_void_p, c_int64, c_double)),
    "dlcp_fold_new": (c_void_p, (c_void_p, c_int64, c_int64, c_int64, ctypes.c_float, c_int64)),
    "dlcp_fold_copy": (None, (c_void_p, c_void_p)),
    "dlcp_fold_free": (None, (c_void_p,)),
    "dlcp_fold_included": (None, (c_void_p, c_int64, c_void_p)),
    "dlcp_fold_finish": (c_int64, (c_void_p, c_int64, c_void_p)),
}


def available() -> bool:
    """Return whether the engine in C is here.

    Raises
    ------
    TransportError
        It is, but its structures or constants are not those that this module knows.
    """
    library = dlcp.native.library()
    return library is not None and _declared(library)


@cache
def _declared(library: ctypes.CDLL) -> bool:
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for which, mirror in enumerate((EngineNumbers, NativeFlow, OutgoingNumbers, IncomingNumbers)):
        if library.dlcp_sizes(which) != ctypes.sizeof(mirror):
            raise TransportError(f"{mirror.__name__} in C has another size; compile DLCP again")
    if tuple(map(library.dlcp_constants, range(len(COMPILED_IN)))) != COMPILED_IN:
        raise TransportError(f"the constants in C are not {COMPILED_IN}; compile DLCP again")
    return True
