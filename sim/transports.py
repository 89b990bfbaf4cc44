# SPDX-License-Identifier: Apache-2.0
"""How hosts send: one record per transport.

What all have in common: a packet carries up to ``packet_bytes - header_bytes`` of a message; every packet is
acknowledged on its own; loss is detected per (flow, queue) by packets that were sent later and arrived
(``reorder_packets``), and by a timer (RFC 6298 without its second). A flow (a stream) keeps its window from message to
message, as a connection does.
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
    initial_window_packets: Window = 10.0
    max_window_packets: Window = 4096.0
    min_timeout_us: Microseconds = 2000.0
    reorder_packets: Packets = 3
    balancing: Balancing = "flow"
    queue: Annotated[int, Meta(ge=0, le=7)] = 1


class NewReno(_Transport, frozen=True, tag="new_reno"):
    """TCP NewReno (RFC 5681, RFC 6582) with selective acknowledgements."""


class Cubic(_Transport, frozen=True, tag="cubic"):
    """TCP CUBIC (RFC 9438)."""


class Dctcp(_Transport, frozen=True, tag="dctcp"):
    """DCTCP (SIGCOMM 2010, RFC 8257)."""

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 16


class Swift(_Transport, frozen=True, tag="swift"):
    """Delay-based, after Swift (SIGCOMM 2020) without its pacing below one packet and without host delay.

    ``target_us`` is the round-trip time aimed at; 0 takes twice the smallest that was seen.
    """

    target_us: Annotated[float, Meta(ge=0)] = 0.0
    additive_packets: Annotated[float, Meta(gt=0)] = 1.0
    beta: Annotated[float, Meta(gt=0, le=1)] = 0.8
    max_decrease: Annotated[float, Meta(gt=0, lt=1)] = 0.5


class Pias(_Transport, frozen=True, tag="pias"):
    """PIAS (NSDI 2015): DCTCP, and a message's packets sink from queue 7 by one with every threshold that was sent."""

    gain: Annotated[float, Meta(gt=0, le=1)] = 1 / 16
    demotion_bytes: tuple[int, ...] = (50_000, 150_000, 450_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)

    def __post_init__(self) -> None:
        """Refuse thresholds that do not rise."""
        rising = list(self.demotion_bytes) == sorted(self.demotion_bytes)
        if not 1 <= len(self.demotion_bytes) <= 7 or not rising:
            raise ValueError(f"demotion_bytes takes one to seven sizes that rise, got {self.demotion_bytes}")


class PFabric(_Transport, frozen=True, tag="pfabric"):
    """pFabric (SIGCOMM 2013): a constant window, priority by what is left of the message, a short timer."""

    initial_window_packets: Window = 18.0
    min_timeout_us: Microseconds = 45.0
    balancing: Balancing = "packet"


class Ndp(_Transport, frozen=True, tag="ndp"):
    """NDP (SIGCOMM 2017): a first window unasked, then one packet for each PULL that the receiver paces."""

    initial_window_packets: Window = 23.0
    balancing: Balancing = "packet"


class Dlcp(_Transport, frozen=True, tag="dlcp"):
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
    probe_timeout_us
        The least time without news after which the sender asks what arrived.
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


TransportSpec = NewReno | Cubic | Dctcp | Swift | Pias | PFabric | Ndp | Dlcp
KINDS: tuple[type[_Transport], ...] = (NewReno, Cubic, Dctcp, Swift, Pias, PFabric, Ndp, Dlcp)
