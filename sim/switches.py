# SPDX-License-Identifier: Apache-2.0
"""What a switch does with packets: how it queues, drops, marks and spreads them; queue 7 is the most urgent."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Packets = Annotated[int, Meta(ge=1)]
Ratio = Annotated[float, Meta(ge=0, le=1)]

Discipline = Literal["fifo", "priority", "dlcp", "pfabric", "trim"]
DISCIPLINES: tuple[Discipline, ...] = ("fifo", "priority", "dlcp", "pfabric", "trim")
Buffer = Literal["queue", "port", "switch"]
BUFFERS: tuple[Buffer, ...] = ("queue", "port", "switch")
Spraying = Literal["hash", "random", "round_robin", "least_queue"]
SPRAYINGS: tuple[Spraying, ...] = ("hash", "random", "round_robin", "least_queue")


class EcnSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When packets are marked, by the packets that wait in their queue when they come (without themselves).

    Between ``min_packets`` and ``max_packets`` the probability grows from 0 to ``max_probability`` (RED on the
    instantaneous queue); from ``max_packets`` on every packet is marked. Both equal is DCTCP's step. Packets that
    cannot be marked are dropped instead where ``drop_incapable`` is set, as RED does.
    """

    min_packets: Packets = 65
    max_packets: Packets = 65
    max_probability: Ratio = 1.0
    drop_incapable: bool = False


class SwitchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How every switch of the network treats packets.

    Parameters
    ----------
    discipline
        ``fifo``; ``priority`` (eight queues, the most urgent first); ``dlcp`` (the same, with the decisions of the
        compiled P4 program: drops by queue and drop class within each message's budget, marks by depth); ``pfabric``
        (the flow with the least left goes first, the packet of the flow with the most left is dropped); ``trim``
        (NDP: what does not fit loses its payload, and headers go first).
    buffer_packets
        Room for this many packets of ``packet_bytes``: in each queue, at each port, or in the whole switch.
    buffer
        Whose room that is.
    alpha
        With a buffer of the whole switch: a port may use this many times what is free (dynamic thresholds, Choudhury
        and Hahne, 1998).
    ecn
        None never marks. With ``dlcp`` the program marks by `mark_at` instead.
    drop_at
        With ``dlcp``: the share of ``buffer_packets`` above which a queue drops classes 1 to 7.
    mark_at
        With ``dlcp``: the share of ``buffer_packets`` above which a queue marks.
    trim_packets
        With ``trim``: how many packets wait whole; NDP has 8.
    spraying
        How a packet that may take any path chooses one: by the P4 program's hash of packet index and step, at random,
        in turns, or the port that has the least to send.
    """

    discipline: Discipline = "fifo"
    buffer_packets: Packets = 240
    packet_bytes: Annotated[int, Meta(ge=64)] = 1500
    buffer: Buffer = "port"
    alpha: Annotated[float, Meta(gt=0)] = 1.0
    ecn: EcnSpec | None = msgspec.field(default_factory=EcnSpec)
    drop_at: tuple[float, ...] = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    mark_at: Ratio = 0.27
    trim_packets: Packets = 8
    spraying: Spraying = "hash"

    def __post_init__(self) -> None:
        """Refuse thresholds that would drop the valuable first."""
        if len(self.drop_at) != 7 or not all(0 <= share <= 1 for share in self.drop_at):
            raise ValueError(f"drop_at takes 7 shares between 0 and 1, for drop classes 1 to 7, got {self.drop_at}")
        if list(self.drop_at) != sorted(self.drop_at, reverse=True):
            raise ValueError(f"drop_at has to fall from class 1 to class 7, got {self.drop_at}")
        if self.ecn is not None and self.ecn.max_packets < self.ecn.min_packets:
            raise ValueError(f"ecn: max_packets {self.ecn.max_packets} is less than min_packets {self.ecn.min_packets}")
