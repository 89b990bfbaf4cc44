# SPDX-License-Identifier: Apache-2.0
"""How switches treat packets: queueing, dropping, marking and load balancing. Queue 7 is the most urgent."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Packets = Annotated[int, Meta(ge=1)]
_Ratio = Annotated[float, Meta(ge=0, le=1)]


class EcnSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When an arriving packet is marked, by the number of packets in its queue.

    Between ``min_packets`` and ``max_packets`` the probability grows from 0 to ``max_probability`` (RED on the
    instantaneous queue); from ``max_packets`` on, every packet is marked. Equal values give DCTCP's step. With
    ``drop_incapable``, packets that do not support ECN are dropped instead, as in RED.
    """

    min_packets: _Packets = 65
    max_packets: _Packets = 65
    max_probability: _Ratio = 1.0
    drop_incapable: bool = False


class SwitchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How every switch of the network treats packets.

    Parameters
    ----------
    discipline
        ``fifo``; ``priority`` (eight queues, the most urgent first); ``dlcp`` (the same queues, with the decisions of
        the compiled P4 program: drops by queue and drop class within each message's budget, marks by depth);
        ``pfabric`` (sends the flow with the fewest packets left first, drops from the flow with the most left);
        ``trim`` (NDP: a packet that does not fit loses its payload, and headers go first).
    buffer_packets
        Buffer size in packets of ``packet_bytes``.
    buffer
        Scope of the buffer: each queue, each port, or the whole switch. With ``dlcp``, an empty queue accepts a packet
        even if the buffer is full.
    alpha
        With a buffer for the whole switch: a port may use this multiple of the free space (dynamic thresholds,
        Choudhury and Hahne, 1998).
    ecn
        Marking thresholds; None means no marks. With ``dlcp``, the program marks by ``mark_at`` instead.
    drop_at
        With ``dlcp``: the shares of ``buffer_packets`` above which a queue drops classes 1 to 7.
    mark_at
        With ``dlcp``: the share of ``buffer_packets`` above which a queue marks.
    trim_packets
        With ``trim``: how many packets wait with their payload. NDP's authors use 8.
    spraying
        How a switch chooses the path of a sprayed packet: by the P4 program's hash over packet index and step, at
        random, round robin, or by the shortest queue.
    """

    discipline: Literal["fifo", "priority", "dlcp", "pfabric", "trim"] = "fifo"
    buffer_packets: _Packets = 240
    packet_bytes: Annotated[int, Meta(ge=64)] = 1500
    buffer: Literal["queue", "port", "switch"] = "port"
    alpha: Annotated[float, Meta(gt=0)] = 1.0
    ecn: EcnSpec | None = msgspec.field(default_factory=EcnSpec)
    drop_at: tuple[float, ...] = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    mark_at: _Ratio = 0.27
    trim_packets: _Packets = 8
    spraying: Literal["hash", "random", "round_robin", "least_queue"] = "hash"

    def __post_init__(self) -> None:
        """Reject thresholds that would drop valuable packets first."""
        if len(self.drop_at) != 7 or not all(0 <= share <= 1 for share in self.drop_at):
            raise ValueError(f"drop_at takes 7 shares between 0 and 1, for drop classes 1 to 7, got {self.drop_at}")
        if list(self.drop_at) != sorted(self.drop_at, reverse=True):
            raise ValueError(f"drop_at has to fall from class 1 to class 7, got {self.drop_at}")
        if self.ecn is not None and self.ecn.max_packets < self.ecn.min_packets:
            raise ValueError(f"ecn: max_packets {self.ecn.max_packets} is less than min_packets {self.ecn.min_packets}")
