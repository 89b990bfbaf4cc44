# SPDX-License-Identifier: Apache-2.0
"""What the protocol asks of the per-packet machinery: data and acknowledgements, windows, and what is lost.

Two do it: :class:`dlcp.transport.native.NativeEngine` in C and :class:`dlcp.transport.plain.PlainEngine` in NumPy. They
speak the same wire format and differ in speed only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.congestion import Report
from dlcp.transport.messages import Address, Bytes, MessageKey
from dlcp.wire import Header

REPORT_MIN_S = 0.001
REPORT_CALM_S = 0.01
"""The least time between two reports on a flow: with something to react to, and without; a round trip where that is
longer. Chosen by us: a report costs as much as a burst of packets. That a window holds packets back is something to
react to while it is eager.
"""
REORDER_MIN_S = 0.001
"""Disorder that counts as none, at least: spraying sends neighbours over different paths."""
DISORDER_MIN, DISORDER_MAX = 0.25, 4.0
"""Disorder to be expected, in round-trip times; doubled when a packet that counted as lost arrives (RFC 8985)."""
DISORDER_DECAY = 0.98
MESSAGE_PACKETS_MAX = 1 << 22
SEGMENTS_MAX = 64
"""Datagrams in one send; the kernel's own limit (UDP_MAX_SEGMENTS)."""
BLOCK_PACKETS = 64
"""Packets that one entry of an acknowledgement tells of."""
ACK_EVERY_PACKETS = 8
ACK_DELAY_S = 0.001
"""An acknowledgement waits for this many packets, or this long. Chosen by us: it costs as much as a packet of data."""
ACK_SPACING_S = 0.0002
ACKS_PER_ROUND_TRIP = 8
ACK_AT_ONCE_PACKETS = 512
"""On fast paths they leave no closer than this, no more often, or after this many packets. Chosen by us, by CPU time on
a loopback; TACK (SIGCOMM 2020) finds that two to four a round trip are enough."""
ACK_WHOLE = 1 << 31
"""Set in the block of an acknowledgement's entry: the message is done, and all of it has arrived; nobody need ask."""
ACK_RECENT = 4
"""How many entries of the last acknowledgement the next one repeats, in case it was lost. Chosen by us."""


def first_block_seed(key: MessageKey) -> int:
    """Return what decides which block of a message is sent first; see :func:`dlcp.tags.send_order`."""
    return key.step * 31 + key.message


@dataclass(slots=True)
class Packets:
    """A message's packets as they are to leave.

    Parameters
    ----------
    payload, tail
        Its bytes, which must not change until it is removed: those of ``tail`` follow those of ``payload``.
    tags
        Bytes 1 to 3 of each packet's header (flags; queue and drop class; layer) and its IPv4 type of service, shape
        (packets, 4). The engine sets the retransmission flag in it.
    order
        The packets in the order of sending, shape (packets,); urgent queues first.
    head
        The header that all have in common.
    allowed
        How many may stay lost.
    """

    payload: Bytes
    tail: Bytes
    tags: Bytes
    order: NDArray[np.uint32]
    head: bytes
    allowed: int


class Outgoing(Protocol):
    """A message on its way out. After it is removed the numbers stay as they were."""

    @property
    def packets(self) -> int:
        """How many packets it has."""

    @property
    def flying(self) -> int:
        """Packets on the wire."""

    @property
    def unsent(self) -> int:
        """Packets that wait to be sent, for the first time or again."""

    @property
    def sent(self) -> int:
        """Transmissions so far."""

    @property
    def resent(self) -> int:
        """Transmissions of packets after their first."""

    @property
    def delivered(self) -> int:
        """Packets known to have arrived."""

    @property
    def active_s(self) -> float:
        """When a packet was last sent or found delivered."""


class Incoming(Protocol):
    """A message on its way in."""

    owner: Any
    """Whatever the protocol attaches, until the message is closed."""

    @property
    def packets(self) -> int:
        """How many packets it has."""

    @property
    def arrived(self) -> int:
        """How many of them are in."""

    @property
    def last_bytes(self) -> int:
        """Bytes in the last packet; 0 if not known."""

    def bitmap(self) -> NDArray[np.bool_]:
        """Return which packets are in, shape (packets,)."""

    def layers(self) -> Bytes:
        """Return the layer position that each packet told, shape (packets,)."""


class Fold(Protocol):
    """A sum over ranks, formed in place while packets arrive: own values first, then the others by position.

    With a key, the packets are divided into as many regions as there are others, and in region r the others come in the
    order of (position + r) modulo their number: in the order in which they send it, if they take turns
    (:class:`dlcp.tags.ChunkOrder`). The order does not depend on who comes first, so neither does the sum.
    """

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """Have each average in ``copy``, too, as soon as it is complete; to be called before anything is added.

        What :meth:`finish` averages is not written there.
        """

    def included(self, position: int) -> NDArray[np.bool_]:
        """Return which packets of a member are in the sum, shape (packets,); not to be asked after :meth:`finish`."""

    def finish(self, rescale: bool, owed: NDArray[np.float32] | None) -> int:
        """Average the packets to which some contribution will never come; return how many there were.

        Complete packets have been averaged before.

        Parameters
        ----------
        rescale
            Divide by how many ranks contributed, else by how many there are.
        owed
            Gets, for these packets, the sum less the number of ranks times the average, where that is finite; shape
            (values,).
        """


class Flow(Protocol):
    """Everything on its way to one peer."""

    window: float
    """Packets that may be on the wire; less than one admits one packet now and then."""
    largest_window: int
    """What the receiver's buffer admits, in packets."""
    eager: bool
    """Whether the window is to grow at once if it holds packets back."""
    burst: int
    """The most packets in one send."""
    mute: bool
    """Send nothing but control packets."""
    heard_s: float
    """When the peer was last heard of."""

    @property
    def flying(self) -> int:
        """Packets on the wire."""

    @property
    def smoothed_rtt_s(self) -> float:
        """Round-trip time, averaged as in RFC 6298; 0 if not known."""

    @property
    def rtt_variation_s(self) -> float:
        """Its mean deviation."""

    def take_report(self, now_s: float) -> Report | None:
        """Return what came back since the last report, or None if nothing did or it is too early for the next.

        Half its time before it is due (:meth:`Engine.report_due_s`) is not too early: those of several flows are taken
        together, for a turn of the protocol costs more than a report.
        """


OnControl = Callable[[int, Header, memoryview, float], None]
"""Rank, header, payload and time of a packet that is neither data that fits nor an acknowledgement."""
OnUnknown = Callable[[int, Header, int, float], Incoming | None]
"""Rank, header, payload bytes and time of data of a message not known; returns the message to store it in, if any."""
OnSettled = Callable[[Incoming, float], None]
"""A message that is waited for is done."""
OnTaken = Callable[[int, MessageKey, float], None]
"""A rank has taken all of a message that was sent to it: so it says with its acknowledgement."""
Emit = Callable[[int, bytes, int], bool]
"""Sends a datagram with an IPv4 type of service to a rank; False if the socket is full. For use without a socket."""


class Engine(Protocol):
    """The per-packet machinery of one rank. Not thread-safe, but for :meth:`wake`."""

    flows: dict[int, Flow]
    """By rank."""

    def counters(self) -> dict[str, int]:
        """Return what was counted so far; names that begin with ``refused_`` are of packets refused."""

    def send(self, rank: int, key: MessageKey, packets: Packets, now_s: float) -> Outgoing:
        """Queue a message for sending."""

    def remove(self, message: Outgoing) -> None:
        """Forget a message that is done or given up."""

    def replace_payload(self, message: Outgoing, payload: Bytes) -> None:
        """Go on sending a message from a copy of its payload, without the tail."""

    def take_bitmap(
        self, message: Outgoing, first: int, arrived: NDArray[np.bool_], before_s: float, now_s: float
    ) -> bool:
        """Take in which packets from ``first`` on have arrived; what was sent before ``before_s`` and has not is lost.

        Returns
        -------
        Whether that was news.
        """

    def expect(self, rank: int, key: MessageKey, packets: int, buffer: Bytes | None, tail: Bytes) -> Incoming:
        """Know a message from now on.

        Its bytes go to ``buffer`` and beyond that to ``tail``; without a buffer it must be joined to a sum before
        anything of it arrives: one without regions at position 0, or one of a single member.
        """

    def move(self, message: Incoming, buffer: Bytes, tail: Bytes) -> None:
        """Move a message that came before anybody waited for it to where it belongs."""

    def join(self, message: Incoming, fold: Fold, position: int) -> None:
        """Let a message be summed from now on; what has arrived of it must be in its buffer."""

    def wait(self, message: Incoming, required: int, immediate: bool, last_bytes: int, now_s: float) -> bool:
        """Wait for a message; return whether it is done: ``required`` packets and all protected ones are enough.

        ``last_bytes`` is the size of its last packet, 0 if that is not known.
        """

    def ask(self, message: Incoming, protected_packets: int, now_s: float) -> bool:
        """Note that the sender asked what is missing, and how many packets are protected; return whether it is done."""

    def close(self, message: Incoming) -> None:
        """Take no more packets for a message; what is known of it stays."""

    def free(self, message: Incoming) -> None:
        """Forget a message that is closed."""

    def fold(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int = -1
    ) -> Fold:
        """Return a sum of ``values`` with those of ``members`` others, divided by ``divisor``.

        ``first_block`` is the block of packets at which region 0 begins; below 0 for no regions.
        """

    def send_control(self, rank: int, datagram: bytes, tos: int) -> bool:
        """Send one datagram; False if the socket is full."""

    def take_in(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """Take in one datagram; whatever is wrong with it is counted."""

    def acknowledge(self, now_s: float) -> float:
        """Send the acknowledgements that are due; return when the next one will be."""

    def pump(self, now_s: float) -> int:
        """Send a burst to each peer whose window admits it; return how many packets, or -1 if the socket is full."""

    def report_due_s(self) -> float:
        """Return when the first report is due."""

    def turn(self, until_s: float) -> bool:
        """Move packets between socket and messages until a time, or until the protocol has something to do.

        Returns
        -------
        Whether a message has nothing left to send that is not confirmed.
        """

    def wake(self) -> None:
        """Make :meth:`turn` return; from any thread."""

    def release(self) -> None:
        """Free everything; the engine is of no use any more."""
