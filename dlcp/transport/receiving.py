# SPDX-License-Identifier: Apache-2.0
"""Messages on their way in, but for their packets: who waits for them, and how senders learn that they are done."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.engine import Incoming
from dlcp.transport.messages import EMPTY, Arrival, Bytes, LossBound
from dlcp.transport.promise import Promise
from dlcp.transport.reduction import StreamingReduction

STOP_REPEAT_S = 0.02
STOP_REPEAT_MAX_S = 0.5

Name = tuple[int, int, int]
"""Sender, step and number of a message."""


@dataclass(slots=True)
class Awaited:
    """Somebody waits for a message of which ``bound`` may be lost, until ``deadline_s``."""

    message_bytes: int | None
    bound: LossBound
    label: str
    deadline_s: float
    done: Promise[Arrival] = field(default_factory=Promise)


@dataclass(slots=True)
class Receiving:
    """One message from one peer: known from its first packet or from when somebody waits for it, whichever is first."""

    name: Name
    message: Incoming
    started_s: float
    stash: Bytes
    """Where it is kept until somebody waits for it; empty where somebody did from the beginning."""
    payload: Bytes = field(default_factory=lambda: EMPTY)
    awaited: Awaited | None = None
    reduction: StreamingReduction | None = None
    placed: bool = False
    """Whether somebody gave a place for it."""

    def arrival(self, now_s: float, payload_bytes: int) -> Arrival:
        """Return the message as it arrived."""
        message = self.message
        delivered = message.bitmap()
        if not self.placed and self.reduction is None:
            for index in np.flatnonzero(~delivered).tolist():
                self.payload[index * payload_bytes : (index + 1) * payload_bytes] = 0
        return Arrival(self.payload, delivered, message.layers(), now_s - self.started_s)


@dataclass(slots=True)
class Stopping:
    """A message that is done here, of which the sender may not know yet."""

    bitmap: bytes
    """Most significant bit first; empty if every packet is in."""
    packets: int
    due_s: float
    give_up_s: float
    unconfirmed: set[int]
    repeat_s: float = STOP_REPEAT_S

    @classmethod
    def of(cls, delivered: NDArray[np.bool_], span: int, now_s: float, give_up_s: float) -> "Stopping":
        """Return the STOP of a message, told in parts of ``span`` packets."""
        packets = len(delivered)
        return cls(np.packbits(delivered).tobytes(), packets, now_s, give_up_s, set(range(0, packets, span)))
