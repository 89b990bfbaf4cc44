# SPDX-License-Identifier: Apache-2.0
"""What everything between ranks is built from: who takes part in a session, and the options of the transport.

Ranks agree on their membership in :mod:`dlcp.session.joining`, the only place where a training session's is made.
Endpoint, engine, reducers, shards, weights and the exchange of reports are built from it, and are made anew for another
epoch. What belongs to the model outlives it: options, residual, ledger, and the table of buckets with the step in
progress.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from dlcp.inputs.configuration import OneOf, Range, Unit, check
from dlcp.native import lib
from dlcp.transport.congestion import CubicWindow, RateControl
from dlcp.transport.dctcp import DctcpWindow
from dlcp.transport.messages import Address

CONGESTION: Final = ("dctcp", "ecn", "cubic")
"""Ways to react to congestion."""
Congestion = Annotated[str, OneOf(CONGESTION)]
PATHS_MAX: Final[int] = lib.PATHS_MAX
"""The most paths to a peer."""
SECONDS: Final = Range(0, 1e9, above=True)
"""Deadlines. At most 30 years, because the system's clocks and locks overflow not far beyond."""
Seconds = Annotated[float, SECONDS, Unit("s")]


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks of a session in one epoch, as one of them sees them.

    Parameters
    ----------
    rank
        This rank.
    peers
        The address of every other one that it exchanges messages with; empty until the ranks have joined.
    job, token
        Job number, and the session token that all of them share; packets without it are refused.
    ranks
        All ranks whose gradients are averaged, ascending, the same everywhere; by default this one and its peers.
    epoch
        How often the ranks of this session have changed.
    hosts
        The host of each rank. Ranks without one have a host of their own.
    server
        The parameter server's rank; None if there is none.
    """

    rank: int
    peers: Mapping[int, Address] = field(default_factory=dict)
    job: int = 0
    token: int = 0
    ranks: tuple[int, ...] = ()
    epoch: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict)
    server: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks or (self.rank, *self.peers))))


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Options of the transport between ranks.

    Parameters
    ----------
    payload_bytes
        Bytes of a message per packet. 1440 fills an MTU of 1500 over IPv4 (20 IP, 8 UDP, 32 DLCP).
    tagged
        False sends all packets as ordinary traffic in one queue, without tags, drop classes or urgency.
    congestion
        ``dctcp`` (DCTCP-like: reacts to ECN, loss and delay, for tagged traffic), ``ecn`` (the same without delay: for
        paths where packets wait behind other traffic after leaving their queues, as in BMv2), or ``cubic`` (for a queue
        shared with TCP).
    flow_weight
        The share of a flow that traffic to each peer counts as; 0 divides one flow among a rank's senders. A flow of
        weight 100 leaves nothing to others.
    silence_s
        A peer that is silent for this long is considered dead.
    deadline_s
        A message that takes longer than this fails.
    paths
        Ports to send from, 1 to 64. A fabric that chooses among equal routes by addresses and ports (ECMP) can then use
        several routes to one peer. Of four routes, 8 ports miss one in 38 % of all cases, 12 ports in 13 %, 16 in 4 %.
        On a loopback, which has one route, an all-reduce took as much processor time with 8 ports as with 1, and 2 to 3
        % more with 16.
    early_buffer_bytes
        Maximum memory for messages that arrive before their receives are posted.
    foreign_trimming
        Receive packets that switches of other vendors have trimmed without correcting the length in UDP's header, which
        the kernel refuses. It takes ``CAP_NET_RAW``.
    clear_after_s
        A path without a loss or mark for this time is clear: its traffic is not tagged by magnitude. With infinity, no
        path is clear. The default is a minute, because bursts of other traffic that matter are more frequent.
    """

    payload_bytes: int = 1440
    tagged: bool = True
    congestion: Congestion = "dctcp"
    flow_weight: Annotated[float, Range(0.0, 100)] = 0.0
    silence_s: Seconds = 10.0
    deadline_s: Seconds = 120.0
    paths: Annotated[int, Range(1, PATHS_MAX)] = 12
    early_buffer_bytes: Annotated[int, Range(1, 1 << 62)] = 1 << 28
    foreign_trimming: bool = False
    clear_after_s: Annotated[float, Range(0, math.inf, infinite=True)] = 60.0

    def __post_init__(self) -> None:
        check(self)
        if not 64 <= self.payload_bytes <= 65000 or self.payload_bytes % 8:
            raise ValueError(f"payload_bytes must be a multiple of 8 from 64 to 65000, got {self.payload_bytes}")

    def rate_control(self, senders: int) -> RateControl:
        """Return the window control of one flow to a receiver with ``senders`` senders."""
        weight = self.flow_weight or 1 / max(1, senders)  # by default, the senders to one receiver share one flow
        if self.congestion == "cubic":
            return CubicWindow(weight)
        return DctcpWindow(weight, heed_delay=self.congestion == "dctcp")
