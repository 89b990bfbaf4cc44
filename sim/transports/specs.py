# SPDX-License-Identifier: Apache-2.0
"""Transports of the hosts: one class each, with its settings and its rules.

Every transport sends packets with up to ``packet_bytes - header_bytes`` of a message, and acknowledges each packet. A
packet counts as lost when one sent ``reorder_packets`` later in the same stream and queue has arrived, or when a timer
expires (RFC 6298 without its lower limit of a second). A stream keeps its window from message to message, like a
connection.

Each setting is the one that the transport's authors publish, with its source next to it; none is fitted to our results.
DLCP's authors publish none: `sim/experiments/README.md` says how ours were chosen.
"""

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from dlcp.sim.jit import shared
from dlcp.sim.limits import (
    PACKET_BYTES_MAX,
    PACKETS_MAX,
    TIMER_MAX_PS,
    Bytes,
    Gain,
    Microseconds,
    MicrosecondsOrNone,
    Packets,
    QueueNumber,
    Ratio,
    Window,
)
from dlcp.sim.rows import Row
from dlcp.values.tags import FRONT_SHARES
from dlcp.wire import Queue

# --------------------------------------------------------------------------------------------------------------- rules
#
# ``s`` is a stream, ``t`` the numbers of its transport (`dlcp.sim.engines.network_tables.TransportRules`), ``m`` a
# message: rows of the kernel's arrays, or objects of the reference with the same field names. The kernel compiles these
# functions and the reference calls them as Python, so they may use nothing but numbers. Flags are compared with 0 for
# Numba's sake.

TIMEOUT_BACKOFF_MAX: Final = 6
"""Most doublings of a timeout; not tuned."""
URGENT_QUEUE, EXCESS_QUEUE = int(Queue.CONTROL), int(Queue.EXCESS)
"""The most and the least urgent queue, as plain integers: Numba cannot unify an Enum member with another number."""


@shared
def follow_step(s: Row, t: Row, now: int) -> None:
    """Count the packets of a training step, which begins after a pause (MLTCP)."""
    if s.step_acked != 0 and now - s.acked_at >= t.step_gap_ps:
        s.step_packets = s.step_acked
        s.step_acked = 0
    s.step_acked += 1
    s.acked_at = now


@shared
def eagerness(s: Row, t: Row) -> float:
    """Return the factor on the window's growth: for MLTCP, it grows with the share of the step that has been sent.

    A stream's first step counts its packets, so it has the factor 1.
    """
    if s.step_packets == 0:
        return 1.0
    return t.slope * min(1.0, s.step_acked / s.step_packets) + t.intercept


@shared
def follow_marks(s: Row, t: Row, marked: int, number: int) -> None:
    """Average the share of marked packets, and shrink the window by it once per round trip with marks (RFC 8257)."""
    s.acked += 1
    s.marked += marked
    if number >= s.round_end:
        s.alpha = s.alpha * (1.0 - t.gain) + t.gain * (s.marked / s.acked)
        s.acked = 0
        s.marked = 0
        s.round_end = s.number
    if marked != 0 and number >= s.reduced:
        s.window = max(1.0, s.window * (1.0 - s.alpha / 2.0))
        s.threshold = s.window
        s.reduced = s.number


@shared
def grow(s: Row, t: Row, marked: int, rtt: int, number: int, now: int, limited: int) -> None:
    """Grow the window by a packet in a round trip, or in slow start by each acknowledged packet; follow marks."""
    if t.step_gap_ps != 0:
        follow_step(s, t, now)
    if t.ecn != 0:
        follow_marks(s, t, marked, number)
        if marked != 0:
            return
    if limited == 0 or number < s.recover:
        return
    s.window = min(t.max_window_packets, s.window + (1.0 if s.window < s.threshold else eagerness(s, t) / s.window))


@shared
def halve(s: Row, t: Row, number: int, now: int) -> None:
    """Halve the window."""
    s.window = max(2.0, s.window / 2.0)
    s.threshold = s.window


@shared
def begin_anew(s: Row, t: Row) -> None:
    """Begin with a window of one packet; slow start ends at the share of the window that remains after a loss."""
    s.threshold = max(2.0, s.window * t.loss_keep)
    s.peak = s.window
    s.window = 1.0
    s.epoch = -1


@shared
def smoothed_timeout_ps(s: Row, t: Row) -> int:
    """Return the timeout in picoseconds (RFC 6298), doubled after each timeout in a row."""
    wait = s.rtt + 4 * s.rtt_var
    if wait < t.min_timeout_ps:
        wait = t.min_timeout_ps
    if wait > TIMER_MAX_PS:
        wait = TIMER_MAX_PS
    return wait << s.backoff


@shared
def nothing(*_values: int) -> None:
    """Do nothing."""


@shared
def never(*_values: int) -> int:
    """Return no."""
    return 0


_Balancing = Literal["flow", "packet"]


class _Transport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    disciplines: ClassVar[tuple[str, ...]] = ("fifo", "priority", "dlcp")
    """Those of the switches that it was made for."""
    ecn: ClassVar[bool] = False
    """Whether switches mark its packets instead of dropping them."""
    slow_start: ClassVar[bool] = True
    credited: ClassVar[bool] = False
    """Whether a receiver's PULLs, not a window, let senders send."""
    smallest_first: ClassVar[bool] = False
    """Whether a host sends the message with the fewest packets left first."""
    reorders: ClassVar[bool] = False
    """Whether packets are reordered, so that only a timer or a NACK detects losses."""
    every_loss: ClassVar[bool] = False
    """Whether each loss counts, and not only the first of the packets that were in flight together."""
    backoff_max: ClassVar[int] = TIMEOUT_BACKOFF_MAX
    loss_keep: ClassVar[float] = 0.5
    """The share of the window that remains after a loss; 1 if losses do not change it."""
    packet_bytes: Annotated[int, Meta(ge=128, le=PACKET_BYTES_MAX)] = 1500
    header_bytes: Annotated[int, Meta(ge=28, le=120)] = 60
    ack_bytes: Annotated[int, Meta(ge=40, le=PACKET_BYTES_MAX)] = 64
    initial_window_packets: Window = 10.0  # RFC 6928; Linux uses it for any packet size
    max_window_packets: Window = 4096.0
    min_timeout_us: Microseconds = 2000.0  # min_rto of PIAS-NS2, from the laboratory of DLCP's authors
    reorder_packets: Packets = 3  # DupThresh of RFC 5681 and RFC 6675
    balancing: _Balancing = "flow"
    queue: QueueNumber = 1

    # The rules of NewReno; a subclass replaces those in which it differs.
    on_ack: ClassVar[Any] = staticmethod(grow)
    """Update the window after an acknowledgement: whether the packet was ``marked``, its round-trip time ``rtt`` and
    the time ``now`` in picoseconds, its ``number``, and whether the window was what ``limited`` the sender."""
    on_nack: ClassVar[Any] = staticmethod(nothing)
    """Handle the NACK of a trimmed packet, which came ``rtt`` after it."""
    on_loss: ClassVar[Any] = staticmethod(halve)
    """Shrink the window after the loss of packet ``number``: once for all packets that were in flight together."""
    on_timeout: ClassVar[Any] = staticmethod(begin_anew)
    """Shrink the window after a timeout."""
    timeout_ps: ClassVar[Any] = staticmethod(smoothed_timeout_ps)
    """Return the timeout in picoseconds."""
    on_begin: ClassVar[Any] = staticmethod(nothing)
    """Let a sender send the first packets of a message without PULLs."""
    add_backlog: ClassVar[Any] = staticmethod(nothing)
    """Add packets to those that a sender needs credit for."""
    may_pull: ClassVar[Any] = staticmethod(never)
    """Return whether a receiver has to queue a PULL, after a packet with the pull target ``wanted``."""
    give_credit: ClassVar[Any] = staticmethod(never)
    """Count the credit of a PULL that leaves, and return it in packets; a ``spare`` one is unrequested credit."""
    queue_after_pull: ClassVar[Any] = staticmethod(never)
    """Return the queue for a stream's next PULL after one left the queue ``spare``, or -1."""
    credit_ps: ClassVar[Any] = staticmethod(never)
    """Return the time from a PULL with ``credit`` to the next one; ``packet_ps`` is a packet's time on the link."""
    on_pull: ClassVar[Any] = staticmethod(nothing)
    """Take the credit of a PULL, which is all that was ``granted`` so far."""

    @staticmethod
    def queue_of(s: Row, t: Row, m: Row, index: int) -> int:
        """Return a packet's queue."""
        return int(m.queue)


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


CUBIC_SCALE: Final = 0.4
"""C of RFC 9438, packets per second cubed."""
CUBIC_KEEP: Final = 0.7
"""beta of RFC 9438: the share of the window that remains after a loss."""


@shared
def cube_root(value: float) -> float:
    """Return the cube root of ``value`` >= 0 by Newton's method. Unlike ``pow``, it is bit-exact on every machine."""
    if value <= 0.0:
        return 0.0
    root = max(1.0, value)
    for _ in range(200):
        better = (2.0 * root + value / (root * root)) / 3.0
        if better >= root:
            break
        root = better
    return root


class CubicTransport(TailProbeTransport, frozen=True, tag="cubic"):
    """TCP CUBIC (RFC 9438)."""

    loss_keep: ClassVar[float] = CUBIC_KEEP

    @staticmethod
    def on_ack(s: Row, t: Row, marked: int, rtt: int, number: int, now: int, limited: int) -> None:
        """Grow the window; ``alpha`` is K of RFC 9438 in seconds."""
        if limited == 0 or number < s.recover:
            return
        if s.window < s.threshold:
            s.window = min(t.max_window_packets, s.window + 1.0)
            return
        if s.epoch < 0:
            s.epoch = now
            s.reno = s.window
            s.peak = max(s.peak, s.window)
            s.alpha = cube_root((s.peak - s.window) / CUBIC_SCALE)
        since = (now - s.epoch + s.rtt) * 1e-12 - s.alpha
        target = CUBIC_SCALE * since * since * since + s.peak
        s.reno += 3.0 * (1.0 - CUBIC_KEEP) / (1.0 + CUBIC_KEEP) / s.window
        goal = max(target, s.reno)
        if goal > s.window:
            s.window = min(t.max_window_packets, s.window + min((goal - s.window) / s.window, 0.5))

    @staticmethod
    def on_loss(s: Row, t: Row, number: int, now: int) -> None:
        """Shrink the window, and note its peak."""
        s.peak = s.window * (1.0 + CUBIC_KEEP) / 2.0 if s.window < s.peak else s.window
        s.window = max(1.0, s.window * CUBIC_KEEP)
        s.threshold = max(2.0, s.window)
        s.epoch = -1


class DctcpTransport(InterleavingTransport, frozen=True, tag="dctcp"):
    """DCTCP (SIGCOMM 2010, RFC 8257)."""

    ecn: ClassVar[bool] = True

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 16  # SIGCOMM 2010, section 4; RFC 8257, section 4.2


class SwiftTransport(_Transport, frozen=True, tag="swift"):
    """Swift (SIGCOMM 2020), without its pacing below one packet and without host delay.

    ``target_us`` is the target round-trip time; 0 means twice the minimum measured so far.
    """

    slow_start: ClassVar[bool] = False

    target_us: MicrosecondsOrNone = 0.0
    additive_packets: Gain = 1.0
    beta: Annotated[float, Meta(gt=0, le=1)] = 0.8
    max_decrease: Annotated[float, Meta(gt=0, lt=1)] = 0.5

    @staticmethod
    def on_ack(s: Row, t: Row, marked: int, rtt: int, number: int, now: int, limited: int) -> None:
        """Grow the window below Swift's target delay; above it, shrink it in proportion, once per round trip."""
        target = t.target_ps
        if target == 0:
            target = 2 * s.rtt_min
        if rtt < target:
            if limited != 0:
                s.window = min(t.max_window_packets, s.window + t.additive_packets / s.window)
        elif now - s.cut_at >= s.rtt:
            late = (rtt - target) / rtt
            s.window = max(1.0, s.window * max(1.0 - t.beta * late, 1.0 - t.max_decrease))
            s.cut_at = now

    @staticmethod
    def on_loss(s: Row, t: Row, number: int, now: int) -> None:
        """Shrink the window once per round trip."""
        if now - s.cut_at >= s.rtt:
            s.window = max(1.0, s.window * (1.0 - t.max_decrease))
            s.cut_at = now

    @staticmethod
    def on_timeout(s: Row, t: Row) -> None:
        """Shrink the window."""
        s.window = max(1.0, s.window * (1.0 - t.max_decrease))


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

    @staticmethod
    def queue_of(s: Row, t: Row, m: Row, index: int) -> int:
        """Return a packet's queue, by the bytes of the message before it."""
        if t.levels == 0:
            return int(m.queue)
        queue = URGENT_QUEUE
        for level in range(t.levels):
            if index * t.payload >= t.demotion[level]:
                queue -= 1
        return queue


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
    smallest_first: ClassVar[bool] = True
    reorders: ClassVar[bool] = True

    initial_window_packets: Window = 18.0
    max_window_packets: Window = 35.0
    min_timeout_us: Microseconds = 45.0
    balancing: _Balancing = "packet"
    probe_after_timeouts: Packets = 5

    @staticmethod
    def timeout_ps(s: Row, t: Row) -> int:
        """Return the constant timeout."""
        return t.min_timeout_ps

    @staticmethod
    def on_timeout(s: Row, t: Row) -> None:
        """Begin anew, and probe after some timeouts in a row."""
        if s.backoff >= t.probe_after_timeouts:
            s.probe_mode = 1
        begin_anew(s, t)


class NdpTransport(_Transport, frozen=True, tag="ndp"):
    """NDP (SIGCOMM 2017): an initial window that fills the path, then one packet per PULL that the receiver paces.

    Only link failures lose whole packets, so the timer serves them alone. Its value is not published; it exceeds the
    wait for a PULL when a hundred flows share a receiver.
    """

    disciplines: ClassVar[tuple[str, ...]] = ("trim",)
    slow_start: ClassVar[bool] = False
    credited: ClassVar[bool] = True
    reorders: ClassVar[bool] = True
    loss_keep: ClassVar[float] = 1.0

    initial_window_packets: Window = 23.0
    balancing: _Balancing = "packet"
    min_timeout_us: Microseconds = 20_000.0

    on_ack, on_loss = staticmethod(nothing), staticmethod(nothing)

    @staticmethod
    def on_timeout(s: Row, t: Row) -> None:
        """Let the sender send as much as it had in flight."""
        s.credit += max(1, s.in_flight)

    @staticmethod
    def on_begin(s: Row, t: Row, m: Row) -> None:
        """Let the sender send the first window of a message."""
        m.pulls = min(int(t.initial_window_packets), m.packets)
        s.credit += m.pulls

    @staticmethod
    def may_pull(s: Row, t: Row, m: Row, wanted: int, trimmed: int) -> int:
        """Return whether a packet of the message still needs a PULL."""
        if m.pulls >= m.packets + m.trims:
            return 0
        m.pulls += 1
        return 1

    @staticmethod
    def give_credit(s: Row, t: Row, spare: int) -> int:
        """Give credit for one packet."""
        return 1

    @staticmethod
    def queue_after_pull(s: Row, t: Row, spare: int) -> int:
        """Queue no other PULL."""
        return -1

    @staticmethod
    def credit_ps(s: Row, t: Row, credit: int, packet_ps: int) -> int:
        """Pace PULLs by the time of a packet."""
        return packet_ps

    @staticmethod
    def on_pull(s: Row, t: Row, granted: int) -> None:
        """Take the credit for a packet."""
        s.credit += 1


class UltraEthernetTransport(_Transport, frozen=True):
    """The common part of Ultra Ethernet's transports (specification 1.0): windows by path, and entropies.

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


# Constants of NSCC, `NsccTransport`; those in packets are for the reference network and grow with the product of a
# network's rate and base round trip.
NSCC_REFERENCE_RTT_PS: Final = 12_000_000
NSCC_FAIR_PACKETS: Final = 5.0
"""Growth in packets for each acknowledged window when the delay is above the target and nothing is marked."""
NSCC_PROPORTIONAL_PACKETS: Final = 4.0
"""The same for a delay that is 12 us below the target."""
NSCC_FAST_SHARE: Final = 0.25
"""Growth for each acknowledged packet after a window without delay."""
NSCC_FAST_DELAY_PS: Final = 1_000_000
"""A shorter delay counts as none."""
NSCC_STEADY_PACKETS: Final = 0.15
"""Growth in each base round trip."""
NSCC_ADJUST_PACKETS: Final = 8
"""Growth is applied after more packets than this, or after a base round trip."""
NSCC_ADAPT_DELAY: Final = 4
"""Quick adapt needs a trimmed packet, or a delay above this multiple of the target."""
NSCC_ADAPT_SHARE: Final = 8
"""Quick adapt needs fewer arrivals than the largest window divided by this."""


@shared
def shrink_late(s: Row, t: Row, now: int) -> None:
    """Shrink the window by the average delay's share above the target, once per round trip (NSCC)."""
    s.fast = 0
    s.undelayed = 0
    if s.mean_delay > t.target_ps and now - s.cut_at > s.base_rtt:
        above = (s.mean_delay - t.target_ps) / s.mean_delay
        s.window *= max(1.0 - t.beta * above, t.max_decrease)
        s.cut_at = now


@shared
def update_base_rtt(s: Row, t: Row, rtt: int) -> None:
    """Keep a stream's shortest round trip (NSCC)."""
    if s.base_rtt == 0:
        s.base_rtt = t.base_rtt_ps
    s.base_rtt = min(s.base_rtt, rtt)


@shared
def average_delay(s: Row, t: Row, delay: int) -> None:
    """Add a delay to the average (NSCC)."""
    s.mean_delay += t.gain * (delay - s.mean_delay)


@shared
def bound_window(s: Row, t: Row) -> None:
    """Keep the window between one packet and the largest, which is smaller on a shorter path (NSCC)."""
    s.window = max(1.0, min(s.window, largest_window(s, t)))


@shared
def largest_window(s: Row, t: Row) -> float:
    """Return a stream's largest window: its path's share of the longest path's (NSCC)."""
    return t.max_window_packets * s.base_rtt / t.base_rtt_ps


@shared
def grow_fast(s: Row, t: Row, delay: int) -> int:
    """Grow by a share of every packet once a whole window has met no delay; return whether that is so (NSCC)."""
    if delay >= NSCC_FAST_DELAY_PS:
        s.fast = 0
        s.undelayed = 0
        return False
    s.undelayed += 1
    s.fast = 1 if s.fast != 0 or s.undelayed > s.window else 0
    if s.fast != 0:
        s.window += NSCC_FAST_SHARE * t.scale
    return s.fast != 0


@shared
def adapt_quickly(s: Row, t: Row, marked: int, severe: bool, now: int) -> int:
    """Set the window to what has arrived in a round trip, if that is little and delays are severe (NSCC).

    Returns whether that was done, or whether a mark is to be ignored because its packet was sent before.
    """
    if marked != 0 and s.ignoring > 0:
        done = True
    else:
        done = False
        if now > s.adapt_at:
            few = s.arrived < largest_window(s, t) / NSCC_ADAPT_SHARE
            if s.adapt_at != 0 and (s.trimmed != 0 or severe) and few:
                s.window = max(1.0, float(s.arrived))
                s.ignoring = s.in_flight
                s.trimmed = 0
                done = True
            s.arrived = 0
            s.adapt_at = now + s.base_rtt + t.target_ps
    if done:
        s.growth = 0.0
        s.arrived_since = 0
    return done


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
    slow_start: ClassVar[bool] = False
    every_loss: ClassVar[bool] = True
    loss_keep: ClassVar[float] = 1.0

    reorder_packets: Packets = 64
    target_us: MicrosecondsOrNone = 0.0
    gain: Annotated[float, Meta(gt=0, le=1)] = 0.0125
    beta: Annotated[float, Meta(gt=0, le=1)] = 0.8
    max_decrease: Annotated[float, Meta(gt=0, lt=1)] = 0.5

    @staticmethod
    def on_ack(s: Row, t: Row, marked: int, rtt: int, number: int, now: int, limited: int) -> None:
        """Follow the delay and the mark of an acknowledged packet, by their four combinations (NSCC).

        Without a mark the window grows: in proportion to the room below the target delay, or fairly above it. A mark
        alone only means that its path is busy. A mark and a delay above the target shrink the window, once per round
        trip.
        """
        update_base_rtt(s, t, rtt)
        delay = rtt - s.base_rtt
        late = delay >= t.target_ps
        # A late packet without a mark has left a queue that has drained since.
        average_delay(s, t, 0.25 * s.base_rtt if marked == 0 and delay > t.target_ps else delay)
        s.arrived += 1
        s.arrived_since += 1
        s.ignoring = max(0, s.ignoring - 1)
        if adapt_quickly(s, t, marked, delay > NSCC_ADAPT_DELAY * t.target_ps, now):
            return
        scale = t.scale * t.payload / (t.payload + t.header_bytes)  # the constants are packets without headers
        if marked == 0 and late:
            s.growth += NSCC_FAIR_PACKETS * scale
        elif marked == 0 and not grow_fast(s, t, delay):
            s.growth += NSCC_PROPORTIONAL_PACKETS * scale * (t.target_ps - delay) / NSCC_REFERENCE_RTT_PS
        elif marked != 0 and late:
            shrink_late(s, t, now)
        bound_window(s, t)
        since = now - s.grown_at
        if s.arrived_since > NSCC_ADJUST_PACKETS or since > t.base_rtt_ps:
            s.window += s.growth / s.window
            if since >= t.base_rtt_ps:
                s.window += NSCC_STEADY_PACKETS * scale
                s.grown_at = now
            s.growth = 0.0
            s.arrived_since = 0
        bound_window(s, t)

    @staticmethod
    def on_nack(s: Row, t: Row, rtt: int, now: int) -> None:
        """Shrink the window by the trimmed packet, unless quick adapt already has."""
        update_base_rtt(s, t, rtt)
        average_delay(s, t, t.base_rtt_ps)  # the queue was full, about a bandwidth-delay product
        s.ignoring = max(0, s.ignoring - 1)
        s.trimmed = 1
        if not adapt_quickly(s, t, 1, True, now):
            s.window -= 1.0
            bound_window(s, t)

    @staticmethod
    def on_loss(s: Row, t: Row, number: int, now: int) -> None:
        """Shrink the window by one packet."""
        s.window = max(1.0, s.window - 1.0)

    @staticmethod
    def on_timeout(s: Row, t: Row) -> None:
        """Shrink the window by the packets in flight."""
        s.window = max(1.0, s.window - s.in_flight)


RCCC_PULL_PERCENT: Final = 99
"""The share of a link's rate for which RCCC's receiver gives credit."""
PULL_QUEUED, SPARE_PULL_QUEUED = 1, 2
"""Bits of a stream's ``pulling``: the queues of PULLs at its receiver that it waits in (RCCC)."""


@shared
def stop_speculating(s: Row, *_values: int) -> None:
    """Give up credit that the receiver has not given: it has answered (RCCC)."""
    if s.speculating != 0:
        s.speculating = 0
        s.credit = 0


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
    slow_start: ClassVar[bool] = False
    credited: ClassVar[bool] = True
    reorders: ClassVar[bool] = True
    loss_keep: ClassVar[float] = 1.0

    credit_packets: Packets = 4
    credit_timeout_us: Microseconds = 20_000.0

    on_ack, on_nack = staticmethod(stop_speculating), staticmethod(stop_speculating)
    on_loss = staticmethod(nothing)

    @staticmethod
    def on_timeout(s: Row, t: Row) -> None:
        """Let the sender send a packet, which asks for credit."""
        s.credit = max(1, s.credit)

    @staticmethod
    def timeout_ps(s: Row, t: Row) -> int:
        """Return the timeout; with nothing in flight, a sender waits for credit, which takes longer."""
        return t.credit_timeout_ps << s.backoff if s.in_flight == 0 else smoothed_timeout_ps(s, t)

    @staticmethod
    def on_begin(s: Row, t: Row, m: Row) -> None:
        """Let the sender send a window after a pause, or otherwise a packet that asks for more."""
        if s.backlog == 0 and s.in_flight == 0:
            s.credit = int(t.initial_window_packets)
            s.speculating = 1
        elif s.backlog == 0:
            s.credit = max(1, s.credit)
        s.backlog += m.packets

    @staticmethod
    def add_backlog(s: Row, t: Row, packets: int) -> None:
        """Add packets to those that the sender needs credit for."""
        s.backlog += packets

    @staticmethod
    def may_pull(s: Row, t: Row, m: Row, wanted: int, trimmed: int) -> int:
        """Queue a PULL as long as the stream needs credit, which it also does for a packet that was trimmed."""
        s.asked = max(s.asked, wanted) + trimmed
        if s.pulling & PULL_QUEUED or s.asked <= s.granted:
            return 0
        s.pulling |= PULL_QUEUED
        return 1

    @staticmethod
    def give_credit(s: Row, t: Row, spare: int) -> int:
        """Give credit that the sender has asked for, or ``spare`` credit, because nobody asks."""
        credit = t.credit_packets if spare != 0 else min(t.credit_packets, s.asked - s.granted)
        s.granted += credit
        return credit

    @staticmethod
    def queue_after_pull(s: Row, t: Row, spare: int) -> int:
        """Queue another PULL as long as credit is wanted, then spare ones, for a window more."""
        s.pulling &= SPARE_PULL_QUEUED if spare == 0 else PULL_QUEUED
        if s.asked > s.granted:
            wanted = PULL_QUEUED
        elif s.granted - s.asked < int(t.max_window_packets):
            wanted = SPARE_PULL_QUEUED
        else:
            return -1
        if s.pulling & wanted:
            return -1
        s.pulling |= wanted
        return wanted - 1

    @staticmethod
    def credit_ps(s: Row, t: Row, credit: int, packet_ps: int) -> int:
        """Pace PULLs by the time of the packets, a little slower than the link."""
        return credit * packet_ps * 100 // RCCC_PULL_PERCENT

    @staticmethod
    def on_pull(s: Row, t: Row, granted: int) -> None:
        """Take all credit so far, so that a lost PULL does no harm."""
        stop_speculating(s)
        if granted > s.pulled:
            s.credit = min(s.credit + granted - s.pulled, int(t.max_window_packets))
            s.pulled = granted


DLCP_BACKOFF_MAX: Final = 1
"""The same for DLCP, where no answer may only mean that a stream waits in a lower queue. With six doublings, some steps
took 20 ms longer; see `sim/experiments/README.md`."""
DLCP_LOSS_KEEP: Final = 0.75
"""The share of DLCP's window that remains after a loss: 1 - `dlcp.transport.dctcp.LOSS_CUT`."""


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
    trimming
        Whether switches cut a packet that they give up by policy to its headers instead of dropping it.
    """

    ecn: ClassVar[bool] = True
    backoff_max: ClassVar[int] = DLCP_BACKOFF_MAX
    loss_keep: ClassVar[float] = DLCP_LOSS_KEEP

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 8
    reorder_packets: Packets = 64
    balancing: _Balancing = "packet"
    queue: QueueNumber = 4
    immediate: bool = False
    class_shares: tuple[Ratio, ...] = FRONT_SHARES
    switch_hops: Packets = 1
    min_timeout_us: Microseconds = 500.0
    error_feedback: bool = True
    trimming: bool = False

    def __post_init__(self) -> None:
        """Reject anything but eight shares."""
        shares = self.class_shares
        if len(shares) != 8 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"class_shares needs 8 shares that add up to 1, got {shares}")

    @staticmethod
    def on_loss(s: Row, t: Row, number: int, now: int) -> None:
        """Shrink the window."""
        s.window = max(1.0, s.window * DLCP_LOSS_KEEP)
        s.threshold = s.window

    @staticmethod
    def on_timeout(s: Row, t: Row) -> None:
        """Halve the window."""
        s.window = max(1.0, s.window / 2.0)
        s.threshold = s.window


class OwnTransport(TailProbeTransport, frozen=True):
    """Base class of transports in other packages; see `dlcp.sim.transports.plugins`.

    A subclass may have settings of its own, numbers with defaults, and any of the rules above as static methods. Rules
    are compiled, so they may use nothing but numbers. They read settings by name from ``t``, where those in
    microseconds end with ``_ps``, and change the window, ``s.window``.
    """


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
