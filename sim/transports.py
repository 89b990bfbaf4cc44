# SPDX-License-Identifier: Apache-2.0
"""How hosts send: one record per transport.

What all have in common: a packet carries up to ``packet_bytes - header_bytes`` of a message; every packet is
acknowledged on its own; loss is detected per (flow, queue) by packets that were sent later and arrived
(``reorder_packets``), and by a timer (RFC 6298 without its second). A flow (a stream) keeps its window from message to
message, as a connection does.

Each setting is what the transport's authors publish, named beside it, and not fitted to any result of ours. DLCP's
authors publish none; `sim/experiments/README.md` says by which rule ours were chosen.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Packets = Annotated[int, Meta(ge=1)]
Window = Annotated[float, Meta(ge=1)]
Microseconds = Annotated[float, Meta(gt=0)]
Balancing = Literal["flow", "packet"]
CLASS_SHARES = (0.30, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10)
"""Share of packets in drop classes 0 to 7 unless told otherwise: `dlcp.tags.FRONT_SHARES`."""


class _Transport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    packet_bytes: Annotated[int, Meta(ge=128, le=9216)] = 1500
    header_bytes: Annotated[int, Meta(ge=28, le=120)] = 60
    ack_bytes: Annotated[int, Meta(ge=40)] = 64
    initial_window_packets: Window = 10.0  # RFC 6928, and Linux whatever the packets' size
    max_window_packets: Window = 4096.0
    min_timeout_us: Microseconds = 2000.0  # min_rto of PIAS' public simulations, of DLCP's laboratory (PIAS-NS2)
    reorder_packets: Packets = 3  # DupThresh of RFC 5681 and RFC 6675
    balancing: Balancing = "flow"
    queue: Annotated[int, Meta(ge=0, le=7)] = 1


class WithTailProbe(_Transport, frozen=True):
    """What has a tail-loss probe (RFC 8985, section 7), as Linux has had since 2013.

    Parameters
    ----------
    tail_probe
        When nothing was sent or heard for two smoothed round trips, and nothing is being repaired, one more packet
        goes out: the next one, else the last one again. What was sent before it in its queue and has not arrived when
        it is answered is lost. There are no delayed acknowledgements here to wait for. RFC 8985's window for
        reordering is left out: ``reorder_packets`` tells instead.
    """

    tail_probe: bool = True


class NewReno(WithTailProbe, frozen=True, tag="new_reno"):
    """TCP NewReno (RFC 5681, RFC 6582) with selective acknowledgements."""


class Cubic(WithTailProbe, frozen=True, tag="cubic"):
    """TCP CUBIC (RFC 9438)."""


class Dctcp(WithTailProbe, frozen=True, tag="dctcp"):
    """DCTCP (SIGCOMM 2010, RFC 8257)."""

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 16  # SIGCOMM 2010, section 4; RFC 8257, section 4.2


class Swift(_Transport, frozen=True, tag="swift"):
    """Delay-based, after Swift (SIGCOMM 2020) without its pacing below one packet and without host delay.

    ``target_us`` is the round-trip time aimed at; 0 takes twice the smallest that was seen.
    """

    target_us: Annotated[float, Meta(ge=0)] = 0.0
    additive_packets: Annotated[float, Meta(gt=0)] = 1.0
    beta: Annotated[float, Meta(gt=0, le=1)] = 0.8
    max_decrease: Annotated[float, Meta(gt=0, lt=1)] = 0.5


class Pias(WithTailProbe, frozen=True, tag="pias"):
    """PIAS (NSDI 2015): DCTCP, and a message's packets sink from queue 7 by one with every threshold that was sent.

    The authors choose thresholds by the sizes of flows; these are theirs for web search at a load of 0.8 (PIAS-NS2,
    ``scripts/run_pias_dctcp.py``).
    """

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 16
    demotion_bytes: tuple[int, ...] = tuple(1460 * packets for packets in (909, 1329, 1648, 1960, 2143, 2337, 2484))

    def __post_init__(self) -> None:
        """Refuse thresholds that do not rise."""
        rising = list(self.demotion_bytes) == sorted(self.demotion_bytes)
        if not 1 <= len(self.demotion_bytes) <= 7 or not rising:
            raise ValueError(f"demotion_bytes takes one to seven sizes that rise, got {self.demotion_bytes}")


class PFabric(_Transport, frozen=True, tag="pfabric"):
    """pFabric (SIGCOMM 2013, section 4.3): a first window of a bandwidth-delay product, priority by what is left.

    Windows grow and shrink as in TCP, up to one packet less than the switches' two bandwidth-delay products (PIAS-NS2,
    ``maxcwnd_``). Only a timer tells of losses; it is three round trips and never backs off.

    Parameters
    ----------
    probe_after_timeouts
        After so many timeouts in a row a flow sends no data but asks, once a timeout, with a packet that carries none;
        the answer lets it start over with a window of 1.
    """

    initial_window_packets: Window = 18.0
    max_window_packets: Window = 35.0
    min_timeout_us: Microseconds = 45.0
    balancing: Balancing = "packet"
    probe_after_timeouts: Packets = 5


class Ndp(_Transport, frozen=True, tag="ndp"):
    """NDP (SIGCOMM 2017): a first window unasked, then one packet for each PULL that the receiver paces.

    The first window fills the path. Nothing is lost without a trace but by failures, so the timer is only for these:
    longer than a PULL waits where a hundred flows have a receiver in common. Chosen by us.
    """

    initial_window_packets: Window = 23.0
    balancing: Balancing = "packet"
    min_timeout_us: Microseconds = 20_000.0


class Dlcp(WithTailProbe, frozen=True, tag="dlcp"):
    """Bounded loss with tags: queue by layer, drop class by magnitude.

    Parameters
    ----------
    immediate
        Stop a message as soon as its bound allows, as the paper does; otherwise the bound is a ceiling: packets that
        were lost stay lost if the receiver agrees, all others are waited for.
    class_shares
        Share of packets in drop classes 0 (never dropped by policy) to 7, for messages that do not say.
    switch_hops
        Among how many switches the drop budget of a message is divided.
    error_feedback
        Values that were lost are added to those of the next step, so that only the last step's count as lost in a
        result; otherwise all do. The same packets are sent either way.
    """

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 8
    reorder_packets: Packets = 64
    balancing: Balancing = "packet"
    queue: Annotated[int, Meta(ge=0, le=7)] = 4
    immediate: bool = False
    class_shares: tuple[float, ...] = CLASS_SHARES
    switch_hops: Packets = 1
    min_timeout_us: Microseconds = 500.0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        shares = self.class_shares
        if len(shares) != 8 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"class_shares takes 8 numbers >= 0 that add up to 1, got {shares}")


TRANSPORTS_MAX = 32
"""Of a scenario: a stream is known by a number of this many values, among others."""
TransportSpec = NewReno | Cubic | Dctcp | Swift | Pias | PFabric | Ndp | Dlcp
KINDS: tuple[type[_Transport], ...] = (NewReno, Cubic, Dctcp, Swift, Pias, PFabric, Ndp, Dlcp)
