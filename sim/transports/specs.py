# SPDX-License-Identifier: Apache-2.0
"""Transports of the hosts: one record each.

Every transport sends packets with up to ``packet_bytes - header_bytes`` of a message, and acknowledges each packet. A
packet counts as lost when one sent ``reorder_packets`` later in the same stream and queue has arrived, or when a timer
expires (RFC 6298 without its lower limit of a second). A stream keeps its window from message to message, like a
connection.

Each setting is the one that the transport's authors publish, with its source beside it; none is fitted to our results.
DLCP's authors publish none: `sim/experiments/README.md` says how ours were chosen.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from dlcp.sim.limits import (
    PACKET_BYTES_MAX,
    PACKETS_MAX,
    Bytes,
    Gain,
    Microseconds,
    MicrosecondsOrNone,
    Packets,
    QueueNumber,
    Ratio,
    Window,
)
from dlcp.tags import FRONT_SHARES

_Balancing = Literal["flow", "packet"]


class _Transport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    disciplines: ClassVar[tuple[str, ...]] = ("fifo", "priority", "dlcp")
    """Those of the switches that it was made for."""
    ecn: ClassVar[bool] = False
    """Whether switches mark its packets instead of dropping them."""
    packet_bytes: Annotated[int, Meta(ge=128, le=PACKET_BYTES_MAX)] = 1500
    header_bytes: Annotated[int, Meta(ge=28, le=120)] = 60
    ack_bytes: Annotated[int, Meta(ge=40, le=PACKET_BYTES_MAX)] = 64
    initial_window_packets: Window = 10.0  # RFC 6928; Linux uses it for any packet size
    max_window_packets: Window = 4096.0
    min_timeout_us: Microseconds = 2000.0  # min_rto of PIAS-NS2, from the laboratory of DLCP's authors
    reorder_packets: Packets = 3  # DupThresh of RFC 5681 and RFC 6675
    balancing: _Balancing = "flow"
    queue: QueueNumber = 1


class TailProbeTransport(_Transport, frozen=True):
    """A transport with a tail-loss probe (RFC 8985, section 7), as Linux has had since 2013.

    Parameters
    ----------
    tail_probe
        After two smoothed round trips without sending or receiving, and with no loss under repair, the sender sends one
        more packet: the next one, or the last one again. When the probe is acknowledged, every packet sent before it in
        its queue that has not arrived counts as lost. There are no delayed acknowledgements to wait for.
        ``reorder_packets`` replaces RFC 8985's reordering window.
    """

    tail_probe: bool = True


class InterleavingTransport(TailProbeTransport, frozen=True):
    """A transport that can follow MLTCP (Rajasekaran et al., HotNets 2024), so that training jobs take turns on a link.

    In congestion avoidance the window grows by ``slope`` times the share of the step's packets that was acknowledged,
    plus ``intercept``, packets per round trip instead of one. So the job that began first gets more of a shared link,
    and ends its exchange sooner, until the jobs' exchanges no longer overlap.

    Parameters
    ----------
    step_gap_us
        A pause between acknowledgements that ends a training step: shorter than computing, and longer than pauses
        within an exchange. 0 turns MLTCP off. A step is taken to have as many packets as the one before.
    slope, intercept
        The published ones; with them, the growth is from 0.25 to 2 packets per round trip.
    """

    step_gap_us: MicrosecondsOrNone = 0.0
    slope: Annotated[float, Meta(ge=0, le=1000)] = 1.75
    intercept: Gain = 0.25


class NewRenoTransport(InterleavingTransport, frozen=True, tag="new_reno"):
    """TCP NewReno (RFC 5681, RFC 6582) with selective acknowledgements."""


class CubicTransport(TailProbeTransport, frozen=True, tag="cubic"):
    """TCP CUBIC (RFC 9438)."""


class DctcpTransport(InterleavingTransport, frozen=True, tag="dctcp"):
    """DCTCP (SIGCOMM 2010, RFC 8257)."""

    ecn: ClassVar[bool] = True

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 16  # SIGCOMM 2010, section 4; RFC 8257, section 4.2


class SwiftTransport(_Transport, frozen=True, tag="swift"):
    """Swift (SIGCOMM 2020), without its pacing below one packet and without host delay.

    ``target_us`` is the target round-trip time; 0 means twice the minimum measured so far.
    """

    target_us: MicrosecondsOrNone = 0.0
    additive_packets: Gain = 1.0
    beta: Annotated[float, Meta(gt=0, le=1)] = 0.8
    max_decrease: Annotated[float, Meta(gt=0, lt=1)] = 0.5


class PiasTransport(TailProbeTransport, frozen=True, tag="pias"):
    """PIAS (NSDI 2015): DCTCP whose packets start in queue 7 and move down one queue at each threshold of bytes sent.

    The authors derive the thresholds from the flow size distribution; these are theirs for web search at a load of 0.8
    (PIAS-NS2, ``scripts/run_pias_dctcp.py``).
    """

    disciplines: ClassVar[tuple[str, ...]] = ("priority",)
    ecn: ClassVar[bool] = True

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 16
    demotion_bytes: tuple[Bytes, ...] = tuple(1460 * packets for packets in (909, 1329, 1648, 1960, 2143, 2337, 2484))

    def __post_init__(self) -> None:
        """Reject thresholds that do not ascend."""
        rising = list(self.demotion_bytes) == sorted(self.demotion_bytes)
        if not 1 <= len(self.demotion_bytes) <= 7 or not rising:
            raise ValueError(f"demotion_bytes needs one to seven ascending sizes, got {self.demotion_bytes}")


class PFabricTransport(_Transport, frozen=True, tag="pfabric"):
    """pFabric (SIGCOMM 2013, section 4.3): an initial window of a bandwidth-delay product, priority by remaining size.

    Windows grow and shrink as in TCP, up to one packet less than the switches' queues of two bandwidth-delay products
    (PIAS-NS2, ``maxcwnd_``). Only a timer of three round trips detects losses; it never backs off.

    Parameters
    ----------
    probe_after_timeouts
        Consecutive timeouts after which a flow enters probe mode: it then sends a packet without data at each timeout.
        A reply lets it start again with a window of 1.
    """

    disciplines: ClassVar[tuple[str, ...]] = ("pfabric",)

    initial_window_packets: Window = 18.0
    max_window_packets: Window = 35.0
    min_timeout_us: Microseconds = 45.0
    balancing: _Balancing = "packet"
    probe_after_timeouts: Packets = 5


class NdpTransport(_Transport, frozen=True, tag="ndp"):
    """NDP (SIGCOMM 2017): an initial window that fills the path, then one packet per PULL that the receiver paces.

    Only link failures lose whole packets, so the timer serves them alone. Its value is not published; it exceeds the
    wait for a PULL when a hundred flows share a receiver.
    """

    disciplines: ClassVar[tuple[str, ...]] = ("trim",)

    initial_window_packets: Window = 23.0
    balancing: _Balancing = "packet"
    min_timeout_us: Microseconds = 20_000.0


class UltraEthernetTransport(_Transport, frozen=True):
    """What Ultra Ethernet's transports share (specification 1.0): windows by path, and entropies.

    Constants are those of the Ultra Ethernet Consortium's simulator (ultraethernet/uet-htsim 40ccb05, ``uec.cpp``).
    Every packet is acknowledged; the specification lets a receiver acknowledge several at a time.

    Parameters
    ----------
    initial_window_packets, max_window_packets
        0 is 1.5 times the bandwidth-delay product of the longest path.
    base_rtt_us
        The round trip of a packet over the longest path without queues; 0 takes it from the topology.
    entropies
        Packets take this many entropy values in turn, in another order each time (oblivious spraying); a power of two.
    """

    packet_bytes: Annotated[int, Meta(ge=128, le=PACKET_BYTES_MAX)] = 4160
    header_bytes: Annotated[int, Meta(ge=28, le=120)] = 64
    initial_window_packets: Annotated[float, Meta(ge=0, le=PACKETS_MAX)] = 0.0
    max_window_packets: Annotated[float, Meta(ge=0, le=PACKETS_MAX)] = 0.0
    min_timeout_us: Microseconds = 100.0
    balancing: _Balancing = "packet"
    base_rtt_us: MicrosecondsOrNone = 0.0
    entropies: Annotated[int, Meta(ge=1, le=1 << 16)] = 64

    def __post_init__(self) -> None:
        """Reject a number of entropies that is no power of two."""
        if self.entropies & (self.entropies - 1):
            raise ValueError(f"entropies needs a power of two, got {self.entropies}")


class NsccTransport(UltraEthernetTransport, frozen=True, tag="nscc"):
    """Network-signalled congestion control of Ultra Ethernet: a window that follows queueing delay and marks.

    A packet that is trimmed takes a packet from the window. After a round trip that delivered less than an eighth of
    the largest window, the window becomes what arrived (quick adapt). A stream over a shorter path than the longest has
    a smaller largest window, in proportion.

    Parameters
    ----------
    reorder_packets
        For switches that do not trim: about the largest window at 100 Gbit/s and 14 us.
    target_us
        The queueing delay that it aims at; 0 is three quarters of ``base_rtt_us`` with trimming, otherwise all of it.
    gain
        Weight of a packet in the average of queueing delays.
    beta, max_decrease
        The window falls by ``beta`` times the share of the average delay that is above the target, at most so far.
    """

    disciplines: ClassVar[tuple[str, ...]] = ("trim", "priority")  # acknowledgements overtake data
    ecn: ClassVar[bool] = True

    reorder_packets: Packets = 64
    target_us: MicrosecondsOrNone = 0.0
    gain: Annotated[float, Meta(gt=0, le=1)] = 0.0125
    beta: Annotated[float, Meta(gt=0, le=1)] = 0.8
    max_decrease: Annotated[float, Meta(gt=0, lt=1)] = 0.5


class RcccTransport(UltraEthernetTransport, frozen=True, tag="rccc"):
    """Receiver-credit congestion control of Ultra Ethernet: credits that the receiver paces, to its senders in turn.

    A sender that has been idle sends up to its largest window without credit, until the first answer. Each packet says
    how much credit its sender wants: for all that it has to send, up to a window.

    Parameters
    ----------
    credit_packets
        Credits in a PULL; the specification's default.
    credit_timeout_us
        How long a sender with nothing in flight waits for credit before it sends a packet without. Its value is not
        published; it exceeds the wait when thousands of senders share a receiver.
    """

    disciplines: ClassVar[tuple[str, ...]] = ("trim",)

    credit_packets: Packets = 4
    credit_timeout_us: Microseconds = 20_000.0


class DlcpTransport(TailProbeTransport, frozen=True, tag="dlcp"):
    """Bounded loss with tags: queue by layer, drop class by magnitude.

    Parameters
    ----------
    immediate
        Complete a message as soon as its bound is met, as in the paper. Otherwise the bound is a ceiling: lost packets
        stay lost if the receiver agrees, but it waits for all others.
    class_shares
        Share of packets in drop classes 0 (never dropped by policy) to 7, for messages without shares of their own.
    switch_hops
        Number of switches that share a message's drop budget: all that its packets may cross, on any path.
    error_feedback
        Add lost values to the next step; otherwise they are lost for good. The packets are the same either way.
    """

    ecn: ClassVar[bool] = True

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 8
    reorder_packets: Packets = 64
    balancing: _Balancing = "packet"
    queue: QueueNumber = 4
    immediate: bool = False
    class_shares: tuple[Ratio, ...] = FRONT_SHARES
    switch_hops: Packets = 1
    min_timeout_us: Microseconds = 500.0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Reject anything but eight shares."""
        shares = self.class_shares
        if len(shares) != 8 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"class_shares needs 8 shares that add up to 1, got {shares}")


class OwnTransport(TailProbeTransport, frozen=True):
    """Base class of transports in other packages; see `dlcp.sim.transports.plugins`.

    A subclass may have settings of its own, numbers with defaults, and any of these static methods. Each replaces the
    rule of the same name in `dlcp.sim.transports.rules`, whose documentation explains the parameters; without it, a
    transport behaves as NewReno. Rules are compiled, so they may use nothing but numbers. They read settings by name
    from ``t``, where those in microseconds end with ``_ps``, and change the window, ``s.window``.
    """

    on_ack: ClassVar[Callable[..., Any] | None] = None
    on_loss: ClassVar[Callable[..., Any] | None] = None
    on_timeout: ClassVar[Callable[..., Any] | None] = None


TRANSPORTS_MAX = 32
"""Most transports in a scenario: a stream's key has five bits for the transport."""
TransportSpec = (
    NewRenoTransport
    | CubicTransport
    | DctcpTransport
    | SwiftTransport
    | PiasTransport
    | PFabricTransport
    | NdpTransport
    | NsccTransport
    | RcccTransport
    | DlcpTransport
)
