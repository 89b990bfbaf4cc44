# SPDX-License-Identifier: Apache-2.0
"""What was sent, delivered, lost and recovered, by step, layer and message; and the check that bounds were kept."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import PacketTags
from dlcp.transport import BoundExceededError, Delivery, LossBound, MessageKey
from dlcp.wire import DROP_CLASSES

LAYER_POSITIONS = 256
COUNTED_TOGETHER = 1 << 17
"""How many packets are counted by layer and class at a time: of a few, counting is the least that it costs. Chosen by
us."""


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """One message in the ledger of its sender. Counts are in packets; ``bound`` is the share that may be lost.

    ``retransmitted`` counts transmissions after a packet's first, ``recovered`` the packets that arrived thanks to
    them, ``lost`` those that never did.
    """

    step: int
    message: int
    receiver: int
    layers: str
    packets: int
    sent: int
    retransmitted: int
    delivered: int
    recovered: int
    lost: int
    bound: float
    seconds: float


class Ledger:
    """The accounts of one rank's messages. Safe to use from several threads.

    Parameters
    ----------
    job
        Job number, for error messages.
    keep
        How many of the latest records to keep; totals cover everything.
    sink
        Called with every record, for instance to write it to a file.
    """

    def __init__(self, job: int = 0, keep: int = 10_000, sink: Callable[[MessageRecord], None] | None = None) -> None:
        self.job = job
        self.records: deque[MessageRecord] = deque(maxlen=keep)
        self.violations = 0
        self.max_message_ratio = 0.0
        self._sink = sink
        self._lock = threading.Lock()
        self._totals = [0, 0, 0, 0]
        self._uncounted: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        """Layers and classes of packets that have not been counted by them."""
        self._uncounted_packets = 0
        self._by_layer = np.zeros((LAYER_POSITIONS, 2), np.int64)
        self._by_class = np.zeros((DROP_CLASSES, 2), np.int64)

    def record(
        self, key: MessageKey, receiver: int, layers: str, tags: PacketTags, bound: LossBound, delivery: Delivery
    ) -> MessageRecord:
        """Enter a message that its receiver has confirmed; its tags must not change any more.

        Raises
        ------
        BoundExceededError
            More was lost than the bound allows, or a protected packet was; the message is entered nevertheless.
        """
        packets, lost = len(delivery.delivered), delivery.lost
        entry = MessageRecord(
            key.step,
            key.message,
            receiver,
            layers,
            packets,
            delivery.sent,
            delivery.resent,
            packets - lost,
            delivery.recovered,
            lost,
            bound.ratio,
            delivery.seconds,
        )
        missing = np.flatnonzero(~delivery.delivered) if lost else ()
        protected_lost = int(np.count_nonzero(tags.protected[missing])) if lost else 0
        broken = lost > bound.allowed(packets) or protected_lost > 0
        with self._lock:
            self.records.append(entry)
            self.violations += broken
            self.max_message_ratio = max(self.max_message_ratio, lost / packets)
            counts = entry.sent, entry.delivered, lost, entry.retransmitted
            self._totals = [total + count for total, count in zip(self._totals, counts, strict=True)]
            self._uncounted.append((tags.layer, tags.drop_class))
            self._uncounted_packets += packets
            if self._uncounted_packets >= COUNTED_TOGETHER:
                self._count()
            if lost:
                for table, index in ((self._by_layer, tags.layer), (self._by_class, tags.drop_class)):
                    table[:, 1] += np.bincount(index[missing], minlength=len(table))
        if self._sink:
            self._sink(entry)
        if broken:
            raise BoundExceededError(
                f"job {self.job}, step {key.step}: rank {receiver} got {entry.delivered / packets:.1%} of {layers} "
                f"(bound {1 - bound.ratio:.1%}), protected packets lost: {protected_lost}"
            )
        return entry

    def of_step(self, step: int) -> list[MessageRecord]:
        """Return the latest records that are of a step; of its messages, those that have been confirmed."""
        with self._lock:
            latest = list(takewhile(lambda record: record.step >= step, reversed(self.records)))
        return [record for record in reversed(latest) if record.step == step]

    def loss_by_layer(self) -> NDArray[np.int64]:
        """Return packets and lost packets per layer position, shape (256, 2)."""
        with self._lock:
            self._count()
            return np.array(self._by_layer)

    def loss_by_class(self) -> NDArray[np.int64]:
        """Return packets and lost packets per drop class, shape (8, 2)."""
        with self._lock:
            self._count()
            return np.array(self._by_class)

    def summary(self) -> dict[str, Any]:
        """Return the totals: packets sent, delivered, lost and retransmitted, the worst message and the violations."""
        with self._lock:
            self._count()
            sent, delivered, lost, retransmitted = self._totals
            return {
                "sent": sent,
                "delivered": delivered,
                "lost": lost,
                "retransmitted": retransmitted,
                "max_message_ratio": self.max_message_ratio,
                "violations": self.violations,
                "by_class": self._by_class.tolist(),
                "by_layer": {str(position): row for position, row in enumerate(self._by_layer.tolist()) if row[0]},
            }

    def _count(self) -> None:
        """Count packets by layer and class that have not been."""
        if self._uncounted:
            for table, parts in zip((self._by_layer, self._by_class), zip(*self._uncounted, strict=True), strict=True):
                table[:, 0] += np.bincount(np.concatenate(parts), minlength=len(table))
            self._uncounted.clear()
            self._uncounted_packets = 0


def add_up(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summaries of some ledgers, of different ranks, as one."""
    counts = ("sent", "delivered", "lost", "retransmitted", "violations")
    layers = sorted({layer for each in summaries for layer in each["by_layer"]}, key=int)
    return {
        **{name: sum(each[name] for each in summaries) for name in counts},
        "max_message_ratio": max((each["max_message_ratio"] for each in summaries), default=0.0),
        "by_class": sum((np.array(each["by_class"]) for each in summaries), np.zeros((DROP_CLASSES, 2), int)).tolist(),
        "by_layer": {
            layer: [sum(each["by_layer"].get(layer, (0, 0))[column] for each in summaries) for column in (0, 1)]
            for layer in layers
        },
    }


def as_json(record: MessageRecord) -> dict[str, Any]:
    """Return a record as plain values."""
    return asdict(record)
