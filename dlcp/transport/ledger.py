# SPDX-License-Identifier: Apache-2.0
"""Counts of packets sent, delivered, lost and recovered, by step, layer and message; and bound violations."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.transport import BoundExceededError, Delivery, LossBound, MessageKey
from dlcp.values.planes import FULL_BITS, PlaneLayout
from dlcp.values.tags import PacketTags
from dlcp.wire import DROP_CLASSES

LAYER_POSITIONS = 256
COUNTS = ("sent", "delivered", "lost", "retransmitted")
"""Totals over all messages, in packets."""
COUNTED_TOGETHER = 1 << 17
"""How many packets are counted by layer and class at a time: for a few, the fixed cost dominates."""


class MessageRecord(NamedTuple):
    """One message in the ledger of its sender. Counts are in packets; ``bound`` is the share that may be lost.

    ``retransmitted`` counts transmissions after a packet's first, ``recovered`` the packets that arrived thanks to
    them, ``lost`` those that never did. ``bits`` is the precision of values. Below 32 they are encoded, and lost
    packets held lower digits only.
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
    bits: int = FULL_BITS


_Counted = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Layers and drop classes of a message's packets."""


class Ledger:
    """The records of one rank's messages. Thread-safe.

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
        self.extra = 0
        """Packets in the gradients' queues without any: probes for missing packets, and ranks' reports on a step."""
        self.max_message_ratio = 0.0
        self._sink = sink
        self._lock = threading.Lock()
        self._totals: dict[int, list[int]] = {}
        """By receiver, in the order of :data:`COUNTS`."""
        self._uncounted: tuple[list[_Counted], list[_Counted]] = [], []
        """Packets that are not counted yet: those in full precision, and the others."""
        self._uncounted_packets = 0
        self._by_layer = np.zeros((LAYER_POSITIONS, 3), np.int64)
        self._by_class = np.zeros((DROP_CLASSES, 3), np.int64)
        self._by_bits: dict[int, list[int]] = {}
        """Packets, and lost ones, by precision."""

    def record(
        self,
        key: MessageKey,
        receiver: int,
        layers: str,
        tags: PacketTags,
        bound: LossBound,
        delivery: Delivery,
        layout: PlaneLayout | None = None,
    ) -> MessageRecord:
        """Record a message that its receiver has acknowledged; its tags must not change any more.

        ``layout`` is that of its values if they are encoded.

        Raises
        ------
        BoundExceededError
            More was lost than the bound allows, or a protected packet was lost; the message is recorded nevertheless.
        """
        bits = layout.bits if layout else FULL_BITS
        packets, arrived = len(delivery.delivered), int(np.count_nonzero(delivery.delivered))
        recovered = min(delivery.resent, arrived)  # after a loss and a retransmission
        lost = packets - arrived
        entry = MessageRecord(
            key.step,
            key.message,
            receiver,
            layers,
            packets,
            delivery.sent,
            delivery.resent,
            arrived,
            recovered,
            lost,
            bound.ratio,
            delivery.seconds,
            bits,
        )
        error: BoundExceededError | None = None
        with self._lock:
            self.records.append(entry)
            totals = self._totals.setdefault(receiver, [0] * len(COUNTS))
            totals[:] = map(add, totals, (delivery.sent, arrived, lost, delivery.resent))
            self.extra += delivery.probes
            self._uncounted[bits < FULL_BITS].append((tags.layer, tags.drop_class))
            self._uncounted_packets += packets
            if self._uncounted_packets >= COUNTED_TOGETHER:
                self._count()
            of_bits = self._by_bits.setdefault(bits, [0, 0])
            of_bits[:] = of_bits[0] + packets, of_bits[1] + lost
            if lost:
                error = self._note_lost(entry, tags, bound, delivery)
        if self._sink:
            self._sink(entry)
        if error:
            raise error
        return entry

    def note_report(self, delivery: Delivery) -> None:
        """Count the packets of a report on a step."""
        with self._lock:
            self.extra += delivery.sent + delivery.probes

    def _note_lost(
        self, entry: MessageRecord, tags: PacketTags, bound: LossBound, delivery: Delivery
    ) -> BoundExceededError | None:
        """Count lost packets; return the error if they exceed the bound."""
        packets, lost = entry.packets, entry.lost
        self.max_message_ratio = max(self.max_message_ratio, lost / packets)
        missing = np.flatnonzero(~delivery.delivered)
        for table, index in ((self._by_layer, tags.layer), (self._by_class, tags.drop_class)):
            table[:, 1] += np.bincount(index[missing], minlength=len(table))
        protected_lost = int(np.count_nonzero(tags.protected[missing]))
        if lost <= bound.allowed(packets) and not protected_lost:
            return None
        self.violations += 1
        return BoundExceededError(
            f"job {self.job}, step {entry.step}: rank {entry.receiver} got {entry.delivered / packets:.1%} of "
            f"{entry.layers} (bound {1 - bound.ratio:.1%}), protected packets lost: {protected_lost}"
        )

    def of_step(self, step: int) -> list[MessageRecord]:
        """Return the latest records of a step; of its messages, only the acknowledged ones."""
        with self._lock:
            latest = list(takewhile(lambda record: record.step >= step, reversed(self.records)))
        return [record for record in reversed(latest) if record.step == step]

    def latest_bits(self) -> int:
        """Return the lowest precision of the messages in the last two steps, because small ones are never encoded."""
        with self._lock:
            last = self.records[-1].step if self.records else 0
            latest = takewhile(lambda record: record.step >= last - 1, reversed(self.records))
            return min((record.bits for record in latest), default=FULL_BITS)

    def by_receiver(self) -> dict[int, dict[str, int]]:
        """Return totals by receiver, by the names in :data:`COUNTS`, in packets."""
        with self._lock:
            return {receiver: dict(zip(COUNTS, totals, strict=True)) for receiver, totals in self._totals.items()}

    def summary(self) -> dict[str, Any]:
        """Return the totals in packets, the worst message, and violations."""
        with self._lock:
            self._count()
            return {
                **{name: sum(totals[place] for totals in self._totals.values()) for place, name in enumerate(COUNTS)},
                "max_message_ratio": self.max_message_ratio,
                "violations": self.violations,
                "extra": self.extra,
                "by_bits": {str(bits): counts for bits, counts in sorted(self._by_bits.items())},
                "by_class": self._by_class.tolist(),
                "by_layer": {str(position): row for position, row in enumerate(self._by_layer.tolist()) if row[0]},
            }

    def _count(self) -> None:
        """Count pending packets by layer and class."""
        for columns, uncounted in zip(([0], [0, 2]), self._uncounted, strict=True):
            parts_by_table = zip(*uncounted, strict=True)  # none if nothing is uncounted
            for table, parts in zip((self._by_layer, self._by_class), parts_by_table, strict=False):
                table[:, columns] += np.bincount(np.concatenate(parts), minlength=len(table))[:, None]
            uncounted.clear()
        self._uncounted_packets = 0


def add_up(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the summaries of different ranks' ledgers."""
    counts = (*COUNTS, "violations", "extra")
    return {
        **{name: sum(each[name] for each in summaries) for name in counts},
        "max_message_ratio": max((each["max_message_ratio"] for each in summaries), default=0.0),
        "by_bits": _added([each["by_bits"] for each in summaries]),
        "by_class": sum((np.array(each["by_class"]) for each in summaries), np.zeros((DROP_CLASSES, 3), int)).tolist(),
        "by_layer": _added([each["by_layer"] for each in summaries]),
    }


def coded(by_bits: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the rows of a summary's ``by_bits``, packets and lost ones, for the precisions that are encoded."""
    return {bits: row for bits, row in by_bits.items() if int(bits) < FULL_BITS}


def _added(tables: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the sums of rows of the same name, in ascending order of the numbers that their names are."""
    total: dict[str, list[int]] = {}
    for table in tables:
        for name, row in table.items():
            total[name] = list(map(add, total[name], row)) if name in total else list(row)
    return dict(sorted(total.items(), key=lambda item: int(item[0])))


def as_json(record: MessageRecord) -> dict[str, Any]:
    """Return a record as plain values for JSON."""
    return record._asdict()
