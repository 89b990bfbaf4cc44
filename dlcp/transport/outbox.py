# SPDX-License-Identifier: Apache-2.0
"""Messages on their way out of one rank, until their receivers have confirmed them."""

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.control_packets import MORE, ControlPackets
from dlcp.transport.engine import MESSAGE_PACKETS_MAX, Engine
from dlcp.transport.errors import DeadlineError, TransportError, at_step
from dlcp.transport.messages import Bytes, Delivery, LossBound, MessageKey, SendRequest
from dlcp.transport.options import TransportOptions
from dlcp.transport.peer import Peer
from dlcp.transport.promise import Promise
from dlcp.transport.sending import PROBE_TIMEOUT_MIN_S, Sending, packets_of, probe_timeout_s
from dlcp.wire import Header, PacketType

LOOK_S = 0.1
LOOK_SPACING_S = PROBE_TIMEOUT_MIN_S / 2
"""Where there are messages to ask about some time, it is found out when, at least and at most this often: there may be
many. Of one that is idle it is found out at once. Chosen by us."""


class Outbox:
    """Messages on their way out. Not thread-safe: the thread of the protocol drives it.

    Parameters
    ----------
    engine
        What sends their packets.
    packets
        What asks their receivers.
    peers
        The receivers, by rank.
    job
        Job number, for error messages.
    options
        See :class:`dlcp.transport.TransportOptions`.
    refused, counted
        Where packets that are refused are counted by reason, and other events by name.
    """

    def __init__(
        self,
        engine: Engine,
        packets: ControlPackets,
        peers: Mapping[int, Peer],
        *,
        job: int,
        options: TransportOptions,
        refused: Counter[str],
        counted: Counter[str],
    ) -> None:
        self._engine, self._packets, self._peers, self._job, self._options = engine, packets, peers, job, options
        self._refused, self._counted = refused, counted

    def check(self, size: int, packets: int) -> None:
        """Refuse a message of ``size`` bytes that is tagged as so many ``packets``.

        Raises
        ------
        ValueError
            They are not as many as it needs, or more than a message may have.
        """
        payload_bytes = self._options.payload_bytes
        if packets != -(-size // payload_bytes) or not 0 < packets <= MESSAGE_PACKETS_MAX:
            raise ValueError(f"{size} bytes need other than {packets} packets of {payload_bytes}")

    def send(self, request: SendRequest, bound: LossBound, now_s: float) -> Promise[Delivery]:
        """Send a message of which ``bound`` may be lost; see :class:`dlcp.transport.SendRequest`."""
        rank, key, tags, label = request.peer, request.key, request.tags, request.label
        peer = self._peers[rank]
        packets = packets_of(
            self._packets.header(PacketType.DATA, key, count=len(tags.queue)),
            np.frombuffer(request.payload, np.uint8),
            request.tail,
            tags,
            bound,
            self._options,
            request.order,
            ecn_capable=peer.control.ecn_capable,
        )
        message = self._engine.send(rank, key, packets, now_s)
        sending = Sending(
            rank,
            key,
            bound,
            label,
            now_s,
            now_s + self._options.deadline_s,
            int(np.count_nonzero(tags.protected)),
            packets.payload,
            message,
        )
        peer.sending.pop(key, None)  # they stay in the order of their deadlines
        peer.sending[key] = sending
        peer.look_s = min(peer.look_s, now_s + PROBE_TIMEOUT_MIN_S)
        if bound.immediate:
            self._probe(peer, sending, now_s)  # tells the receiver how many packets are protected
        return sending.done

    def detach(self, rank: int, key: MessageKey, copy: Bytes | None) -> None:
        """Go on sending from a copy; see :meth:`dlcp.transport.protocol.Protocol.detach`."""
        sending = self._peers[rank].sending.get(key)
        if sending is not None and sending.message.delivered < sending.message.packets:
            self._engine.replace_payload(sending.message, sending.payload.copy() if copy is None else copy)

    def unconfirmed_by(self, rank: int) -> Iterator[tuple[int, str]]:
        """Return step and label of what a rank has not confirmed."""
        return ((sending.key.step, sending.label) for sending in self._peers[rank].sending.values())

    @property
    def settled(self) -> bool:
        """Whether everything is confirmed."""
        return not any(peer.sending for peer in self._peers.values())

    def fail(self) -> list[Promise[Delivery]]:
        """Drop everything; return what has not been confirmed."""
        failed = []
        for peer in self._peers.values():
            for sending in peer.sending.values():
                self._engine.remove(sending.message)
                failed.append(sending.done)
            peer.sending.clear()
        return failed

    # What receivers answer --------------------------------------------------------------------------------------------

    def on_taken(self, rank: int, key: MessageKey, now_s: float) -> None:
        """Note that a rank has taken all of a message."""
        sending = self._peers[rank].sending.get(key)
        if sending is not None:
            self._finish(sending, np.ones(sending.message.packets, np.bool_), now_s)

    def on_bitmap(self, rank: int, header: Header, payload: memoryview, now_s: float) -> None:
        """Take in which packets of a message have arrived, or that no more of them are needed."""
        key, peer = MessageKey(header.step, header.message), self._peers[rank]
        sending = peer.sending.get(key)
        if sending is None:
            if header.type is PacketType.STOP:  # our last answer was lost; the bitmap has been read
                self._packets.send(rank, PacketType.STOP_ACK, key, index=header.index)
            else:
                self._counted["late"] += 1
            return
        packets, span = sending.message.packets, self._packets.bitmap_packets
        whole = header.type is PacketType.STOP and not payload
        part = packets if whole else min(span, packets - header.index)
        fits = not header.index if whole else not header.index % span and len(payload) == -(-part // 8)
        if header.count != packets or part < 1 or not fits:
            self._refused["malformed"] += 1
            return
        if whole:
            delivered = np.ones(packets, np.bool_)
        else:
            delivered = np.unpackbits(np.frombuffer(payload, np.uint8), count=part).astype(np.bool_)
        if header.type is PacketType.STOP:
            self._packets.send(rank, PacketType.STOP_ACK, key, index=header.index)
            confirmed = sending.confirm(header.index, delivered)
            if confirmed is not None:
                self._finish(sending, confirmed, now_s)
        elif sending.asked_s is not None:
            # A peer that is not there yet answers without news: ask it less often, but the network is not to blame.
            sending.probes_unanswered = 0
            peer.look_s = now_s
            if self._engine.take_bitmap(sending.message, header.index, delivered, sending.asked_s, now_s):
                sending.probes_without_news = 0
            if header.index + part >= packets:
                sending.asked_s = None

    def _finish(self, sending: Sending, delivered: NDArray[np.bool_], now_s: float) -> None:
        del self._peers[sending.peer].sending[sending.key]
        self._engine.remove(sending.message)
        sending.finish(delivered, now_s)

    # What time brings -------------------------------------------------------------------------------------------------

    def on_time(self, rank: int, now_s: float, *, idle: bool) -> float:
        """Ask a rank what is missing, where that is due; return when to do so next.

        Each message is looked at only when one may be due, or is ``idle``: there may be many, and little time.
        """
        peer, due_s = self._peers[rank], now_s + LOOK_S
        if not idle and now_s < peer.look_s:
            return peer.look_s
        timeout_s = probe_timeout_s(peer.flow, peer.local)
        for sending in peer.sending.values():
            probe_due_s = sending.probe_due_s(timeout_s)
            if now_s >= probe_due_s:
                self._probe(peer, sending, now_s)
                probe_due_s = sending.probe_due_s(timeout_s)
            due_s = min(due_s, probe_due_s)
        peer.look_s = max(due_s, now_s + LOOK_SPACING_S)
        return peer.look_s

    def overdue(self, rank: int, now_s: float) -> TransportError | None:
        """Return the error of a message that a rank has not confirmed by its deadline, if there is one."""
        for sending in self._peers[rank].sending.values():
            return (
                self._unconfirmed(sending, now_s) if now_s >= sending.deadline_s else None
            )  # the others are due later
        return None

    def _probe(self, peer: Peer, sending: Sending, now_s: float) -> None:
        if sending.probes_unanswered > 1:
            peer.on_timeout()
        sending.asked(now_s)
        self._counted["probe"] += 1
        message = sending.message
        self._packets.send(
            peer.rank,
            PacketType.PROBE,
            sending.key,
            index=sending.protected_packets,
            count=message.packets,
            payload=MORE if message.unsent and not sending.bound.immediate else b"",
        )

    def _unconfirmed(self, sending: Sending, now_s: float) -> TransportError:
        message = sending.message
        share = message.delivered / message.packets
        need = sending.bound.required(message.packets) / message.packets
        return DeadlineError(
            f"{at_step(self._job, sending.key.step)}: rank {sending.peer} confirmed {share:.0%} of {sending.label} "
            f"(bound {need:.0%}) in {now_s - sending.started_s:.1f} s"
        )
