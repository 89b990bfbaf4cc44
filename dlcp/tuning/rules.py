# SPDX-License-Identifier: Apache-2.0
"""Which settings suit what ranks have measured, and why. The rules guess nothing: figures in, words out.

What counts is the time to an accuracy, not that of a step. What makes steps shorter and takes more of them is charged
with these: with what was measured of loss and deferral (:mod:`dlcp.convergence`). Of compression to 16 bits nothing
was; what it rounds away is sent with the next step, and counts for nothing.

Every threshold has its reason beside it. All ranks that know the same figures choose the same.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Annotated, Any, Final

import numpy as np

from dlcp.collectives.choice import AUTO, DIRECT, RING, SERVER, Topology, choose, direct_seconds, ring_seconds
from dlcp.collectives.choice import Costs as CollectiveCosts
from dlcp.collectives.deferral import STEP_PART
from dlcp.collectives.shards import inbound_rates, weights_for_rates
from dlcp.collectives.step_metadata import StepMetadata
from dlcp.configuration import Range, check
from dlcp.convergence import COST_OF_DEFERRAL, COST_OF_DEFERRAL_TO_ALL, COST_OF_LOSS, steps_factor
from dlcp.ledger import Ledger, MessageRecord
from dlcp.slow_ports import SHARE_MIN, PortLoads, level, share_to_defer
from dlcp.transport import Endpoint

LOSS_MATTERS: Final = 0.001
"""From this share of lost packets on reliable transport suffers and bounded loss does not (MLT, NSDI'24: 0.1 %)."""
LOSS_ENDS: Final = LOSS_MATTERS / 10
"""Below this share a path that has lost packets counts as clean again. Chosen by us, against going to and fro."""
WAITING_MATTERS: Final = 0.05
"""A share of a step that is worth winning; as for ``dlcp train --measure``. Chosen by us."""
BOUNDS: Final = (0.01, 0.02, 0.05, 0.1)
"""Loss bounds to choose from. The last leaves convergence unharmed (DLCP, arXiv 2008.08445)."""
BLIND: Final = 0.5
"""Protected packets are lost like others if at least this part of their share of losses is theirs. Chosen by us."""
FEW_PROTECTED: Final = 0.1
"""The share of packets to protect where the network does not spare them. Chosen by us: the largest tenth."""
CAST_BYTES_PER_S: Final = 0.5e9
CAST_S: Final = 0.005
"""How fast a busy core casts to 16 bits, adds up and casts back, and what a step takes more because a thread has to be
woken for it. Chosen by us: the order of magnitude on a machine with more to do than cores."""
COMPRESSION: Final = "bf16"
"""Halves every message, can be added up anywhere, and has the range of float32."""
CODED_IN_PLACE: Final = ("", "fp16", "bf16")
"""Compressions of which packets are deferred as those of plain gradients are."""
RATES_OFF: Final = 2.0
"""A slow port is so many times slower at most than rates say. Chosen by us: what is waited for is not always it."""
DEFERRAL_BOUNDS: Final = (0.25, 0.5, 0.75)
"""Deferral bounds to choose from. Chosen by us: with the last, half of a step may be deferred."""


_Count = Annotated[int, Range(1, 1 << 16)]
"""A packet has 16 bits for its sender's rank."""
_Seconds = Annotated[float, Range(0.0, 1e9)]
_Portion = Annotated[float, Range(0.0, 1)]
_RATE: Final = Range(0.0, 1e15)


@dataclass(frozen=True, slots=True)
class Figures:
    """What has been measured. Times are medians over steps, in seconds, of the slowest rank.

    Parameters
    ----------
    ranks, hosts
        How many ranks there are, and on how many hosts.
    gradient_bytes
        What a rank contributes in a step.
    step_s, waited_s
        How long a step takes with DLCP, and what part of that is communication that nothing hides.
    packets
        How many packets have been offered to the network: below some thousand, shares of them say little.
    wanting, worst
        What share of packets did not arrive at first, and of how large a part of a message that is true in the worst
        hundredth of them.
    spared
        What share of those was never sent again, because the bound allowed it.
    protected
        What share of packets may not be lost.
    rtt_s
        Round trip under load.
    rates_bps
        How fast each rank takes in what waits to be sent to it, in bit/s, by rank; empty if nobody had to wait.
    """

    ranks: _Count
    hosts: _Count
    gradient_bytes: Annotated[int, Range(0, 1 << 50)]
    step_s: _Seconds
    waited_s: _Seconds
    packets: Annotated[int, Range(0, 1 << 62)] = 0
    wanting: _Portion = 0.0
    worst: _Portion = 0.0
    spared: _Portion = 0.0
    protected: _Portion = 0.0
    rtt_s: _Seconds = 0.0
    rates_bps: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            check(self)
            for rank, rate in self.rates_bps.items():
                _RATE.check(f"rates_bps of rank {rank}", rate)
        except ValueError as error:
            raise ValueError(f"figures must be those of a measurement: {error}") from None
        if self.step_s <= 0 or not 0 <= self.waited_s <= self.step_s:
            raise ValueError(
                f"{self.ranks} ranks, steps of {self.step_s} s with {self.waited_s} s of waiting: figures must be of "
                "at least one rank, and waiting no longer than steps, which take time"
            )

    @property
    def waiting(self) -> float:
        """The share of a step in which ranks wait for communication."""
        return self.waited_s / self.step_s

    @property
    def rate_bps(self) -> float:
        """How fast the slowest rank takes in what waits to be sent to it; 0 if nobody had to wait."""
        return min((rate for rate in self.rates_bps.values() if rate > 0), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self) | {"rates_bps": {str(rank): rate for rank, rate in sorted(self.rates_bps.items())}}

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> "Figures":
        """Return the figures that :meth:`as_json` has written.

        Raises
        ------
        ValueError
            Something is missing, or none of it; the message says what.
        """
        try:
            given = dict(plain)
            given["rates_bps"] = {int(rank): float(rate) for rank, rate in given.get("rates_bps", {}).items()}
            return cls(**given)
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not the figures of a measurement: {error}") from None


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that are chosen; see :class:`dlcp.session.Options`."""

    loss_bound: float = 0.1
    protected_share: float = -1.0
    compression: str = ""
    collective: str = "direct"
    deferral_bound: float = 0.0

    @classmethod
    def of(cls, options: object) -> "Settings":
        """Return those of a session's options that are chosen."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Choice:
    """One option: what to set, what it was, and why, with the figures that it rests on."""

    option: str
    value: float | str
    was: float | str
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What is to be set, and what it follows from.

    Parameters
    ----------
    steps_factor, given_steps_factor
        How many times as many steps the choices take to the same accuracy as training that lacks nothing, and how many
        what was set takes: infinitely many if that is beyond what was measured.
    """

    figures: Figures
    choices: Sequence[Choice]
    steps_factor: float = 1.0
    given_steps_factor: float = 1.0

    @property
    def settings(self) -> Settings:
        """The options as chosen."""
        chosen: dict[str, Any] = {choice.option: choice.value for choice in self.choices}
        return Settings(**chosen)

    @property
    def changes(self) -> dict[str, float | str]:
        """What differs from what was set."""
        return {choice.option: choice.value for choice in self.choices if choice.value != choice.was}

    def as_json(self) -> dict[str, Any]:
        """Return the advice as plain values."""
        return {
            "figures": self.figures.as_json(),
            "choices": [asdict(choice) for choice in self.choices],
            "changes": self.changes,
            "steps_factor": self.steps_factor,
            "given_steps_factor": self.given_steps_factor if math.isfinite(self.given_steps_factor) else None,
        }


def decide(
    figures: Figures,
    given: Settings | None = None,
    now: Settings | None = None,
    *,
    most_deferred: float = DEFERRAL_BOUNDS[-1],
) -> Advice:
    """Choose settings.

    Parameters
    ----------
    given
        What the user has set, and what ``was`` in the choices: its loss bound is not exceeded.
    now
        What is in force while the figures were taken, if that is something else: what it has brought to an end by
        itself is no reason to take it back.
    most_deferred
        The largest deferral bound that may be chosen, if the user has not set a larger one.
    """
    given = given or Settings()
    now = now or given
    bound, bound_why = _bound(figures, given, now)
    protected, protected_why = _protected(figures, bound, given, now)
    compression, compression_why = _compression(figures, given, now)
    collective, collective_why = _collective(figures, given)
    deferral = DeferralEstimate.of(figures, now, replace(now, compression=compression, collective=collective))
    deferral_bound, deferral_why = _deferral(deferral, given, now, max(most_deferred, given.deferral_bound))
    return Advice(
        figures,
        (
            Choice("loss_bound", bound, given.loss_bound, bound_why),
            Choice("protected_share", protected, given.protected_share, protected_why),
            Choice("compression", compression, given.compression, compression_why),
            Choice("collective", collective, given.collective, collective_why),
            Choice("deferral_bound", deferral_bound, given.deferral_bound, deferral_why),
        ),
        _loss_factor(figures, bound) * deferral.steps_factor(deferral_bound),
        _loss_factor(figures, given.loss_bound) * deferral.steps_factor(given.deferral_bound),
    )


def _loss_factor(figures: Figures, bound: float) -> float:
    """Return how many times as many steps it takes with what is lost within a bound: no more than does not arrive."""
    return steps_factor(COST_OF_LOSS, min(bound, figures.wanting)) or math.inf


def _bound(figures: Figures, given: Settings, now: Settings) -> tuple[float, str]:
    enough = LOSS_ENDS if now.loss_bound else LOSS_MATTERS
    seen = f"{figures.wanting:.2%} of {figures.packets:,} packets did not arrive at first"
    if figures.ranks < 2:
        return given.loss_bound, "one rank exchanges nothing"
    if figures.wanting < enough:
        return 0.0, f"{seen}, less than {enough:.2%}: averages may as well be exact, and packets need no classes"
    found = next((bound for bound in BOUNDS if bound >= figures.worst), BOUNDS[-1])
    bound = min(found, given.loss_bound)
    worst = f"of the worst hundredth of messages {figures.worst:.1%}"
    # To send it again takes another round trip, and that part of the time on the way.
    saved_s = min(figures.waited_s, figures.rtt_s + figures.wanting * figures.waited_s)
    factor = _loss_factor(figures, bound)
    if (factor - 1) * figures.step_s > saved_s:
        return (
            0.0,
            f"{seen}; to pass over that takes {factor:.2f} times as many steps to the same accuracy, and sending it "
            f"again no more than {1e3 * saved_s:.1f} of the {1e3 * figures.step_s:.1f} ms of a step",
        )
    if bound < found:
        return (
            bound,
            f"{seen}, {worst}; {found:.0%} would pass over that, but no more than {bound:.1%} has been allowed",
        )
    if figures.worst > bound:
        return bound, f"{seen}, {worst}; more than {bound:.0%} is not known to leave every model unharmed"
    return bound, f"{seen}, {worst}: a bound of {bound:.0%} passes over it without sending again"


def _protected(figures: Figures, bound: float, given: Settings, now: Settings) -> tuple[float, str]:
    if not bound:
        return given.protected_share, "nothing may be lost, so classes make no difference"
    if now.protected_share != given.protected_share:
        return now.protected_share, "chosen before; what it has cured is no reason to take it back"
    theirs = 1 - figures.spared
    seen = f"{theirs:.0%} of what was lost had to be sent again; {figures.protected:.0%} of packets are protected"
    if figures.protected > FEW_PROTECTED and theirs >= BLIND * figures.protected and figures.worst <= bound:
        return (
            FEW_PROTECTED,
            f"{seen}: the network does not spare them, so each costs a round trip; the largest tenth is enough",
        )
    if theirs < BLIND * figures.protected:
        return given.protected_share, f"{seen}: the network drops what matters least, as the classes ask"
    return given.protected_share, f"{seen}; messages lose more than the bound, so more would be sent again anyway"


def _compression(figures: Figures, given: Settings, now: Settings) -> tuple[str, str]:
    if given.compression:
        return given.compression, "has been chosen already"
    if now.compression:
        return now.compression, "chosen before; what it has cured is no reason to take it back"
    saved_s, cost_s = figures.waited_s / 2, CAST_S + figures.gradient_bytes / CAST_BYTES_PER_S
    seen = (
        f"steps wait {1e3 * figures.waited_s:.1f} ms of {1e3 * figures.step_s:.1f} for {_size(figures.gradient_bytes)}"
    )
    if given.collective == SERVER:
        return "", f"{seen}; a parameter server has to be started for 16 bits, so that is left alone"
    if figures.hosts == 1:
        return "", f"{seen}; on one host they go through memory, and casting costs more than it saves"
    if figures.waiting < WAITING_MATTERS:
        return "", f"{seen}: less than {WAITING_MATTERS:.0%}, so nothing is to be won"
    if not figures.rate_bps or figures.wanting < LOSS_MATTERS:
        return "", f"{seen}, but no path was found to be full, which would lose some: fewer would not come sooner"
    wire_s = 2 * (figures.ranks - 1) / figures.ranks * 8 * figures.gradient_bytes / figures.rate_bps
    if wire_s < figures.waited_s / 2:
        return "", f"{seen}; they need {1e3 * wire_s:.1f} ms of a path, so it is not bytes that steps wait for"
    if saved_s <= cost_s:
        return "", f"{seen}; casting them takes {1e3 * cost_s:.1f} ms, more than half of them on the way"
    return (
        COMPRESSION,
        f"{seen}, at {figures.rate_bps / 1e6:,.0f} Mbit/s: half the bytes save {1e3 * saved_s:.1f} ms, "
        f"casting takes {1e3 * cost_s:.1f} ms",
    )


def _collective(figures: Figures, given: Settings) -> tuple[str, str]:
    if given.collective in (SERVER, AUTO):
        return given.collective, "has been chosen already"
    ranks = range(figures.ranks)
    if figures.ranks < 3:
        return given.collective, "between two ranks all ways are alike"
    if figures.hosts < figures.ranks:
        hosts = {rank: str(rank * figures.hosts // figures.ranks) for rank in ranks}
    else:
        hosts = {}
    rates = {rank: rate for rank, rate in figures.rates_bps.items() if rate > 0}
    topology = Topology(hosts, rates if len(rates) == figures.ranks else {})
    costs = CollectiveCosts()
    size = figures.gradient_bytes
    direct_s, ring_s = direct_seconds(size, ranks, topology, costs), ring_seconds(size, ranks, topology, costs)
    seen = (
        f"{_size(size)} among {figures.ranks} ranks on {figures.hosts} {'host' if figures.hosts == 1 else 'hosts'}: "
        f"direct about {1e3 * direct_s:.1f} ms, ring {1e3 * ring_s:.1f} ms"
    )
    chosen = choose(size, ranks, topology, costs)
    if chosen == DIRECT and ring_s < direct_s:
        seen += f"; a ring waits for its slowest hop, so it has to win by more than {costs.ring_margin - 1:.0%}"
    return chosen, seen


@dataclass(frozen=True, slots=True)
class DeferralEstimate:
    """How long steps would take, and how many, if so much were deferred: the arithmetic of ranks that do it.

    Parameters
    ----------
    step_s, bytes_s
        How long a step takes with nothing deferred, and what part of that is waiting for the busiest port.
    loads, slowness
        What that port carries, and how many times slower it is than the others; None if nothing would be deferred.
    what
        Whose steps it takes, see :func:`dlcp.convergence.steps_factor`.
    seen
        What that rests on, in words; or why nothing would be deferred.
    """

    step_s: float
    bytes_s: float
    loads: PortLoads | None
    slowness: float
    what: str
    seen: str

    @classmethod
    def of(cls, figures: Figures, now: Settings, chosen: Settings) -> "DeferralEstimate":
        """Return the estimate for settings that were chosen, from figures that were taken with those of now."""
        collective, size = chosen.collective, float(figures.gradient_bytes)
        loads, slowness, what, seen = None, 1.0, COST_OF_DEFERRAL, ""
        slowest_s = math.inf
        rates = level(figures.rates_bps)
        slow = sorted((rate, rank) for rank, rate in rates.items() if rate < max(rates.values()))
        if figures.ranks < 2:
            seen = "one rank exchanges nothing"
        elif chosen.compression not in CODED_IN_PLACE:
            seen = f"what {chosen.compression} leaves out is not sent either; nothing of the rest is put off"
        elif collective == RING:
            seen = "around a ring nothing is put off"
        elif collective == SERVER:
            what, seen = COST_OF_DEFERRAL_TO_ALL, "all gradients pass the parameter server's port"
            if figures.wanting >= LOSS_MATTERS:
                loads = PortLoads.of_server(figures.ranks, 1.0)
            else:
                seen += ", which is not congested: nothing would be put off"
        elif not slow or len(rates) < figures.ranks:
            seen = "no rank's port was found to be far slower than the others'; where none is, nothing is put off"
        else:
            rate, rank = slow[0]
            weights, fastest = weights_for_rates(rates), max(rates.values())
            loads = PortLoads.of_direct(figures.ranks, weights[rank], max(weights.values()))
            unit_s = 8 * size / fastest
            slowness = _slowness(loads, fastest / rate, figures.waited_s / unit_s, STEP_PART * now.deferral_bound)
            slowest_s = unit_s * _port_units(loads, slowness)
            what = COST_OF_DEFERRAL if len(slow) == 1 else COST_OF_DEFERRAL_TO_ALL
            seen = f"rank {rank} takes in {slowness:.1f} times more slowly than the fastest"
        estimate = cls(figures.step_s, 0.0, loads, slowness, what, seen)
        left = estimate.left(now.deferral_bound)
        bytes_s = min(figures.waited_s, slowest_s * left)
        step_s = figures.step_s - bytes_s
        bytes_s /= left  # what was deferred while the figures were taken had made the waiting shorter
        if chosen.compression and not now.compression:
            bytes_s /= 2
        return replace(estimate, step_s=step_s + bytes_s, bytes_s=bytes_s)

    def share(self, bound: float) -> float:
        """Return what share of a step's packets ranks with a deferral bound would put off."""
        share = share_to_defer(self.loads, self.slowness, STEP_PART * bound) if self.loads else 0.0
        return share if share >= SHARE_MIN else 0.0

    def left(self, bound: float) -> float:
        """Return what part is left of the time that the busiest port takes."""
        if self.loads is None:
            return 1.0
        return _port_units(self.loads, self.slowness, self.share(bound)) / _port_units(self.loads, self.slowness)

    def seconds(self, bound: float) -> float:
        """Return how long a step would take, in seconds."""
        return self.step_s - self.bytes_s * (1 - self.left(bound))

    def steps_factor(self, bound: float) -> float:
        """Return how many times as many steps it would take to the same accuracy; infinitely many if unknown."""
        return steps_factor(self.what, self.share(bound)) or math.inf

    def accuracy_factor(self, bound: float) -> float:
        """Return how many times as long it would take to the same accuracy as with nothing deferred."""
        return self.seconds(bound) * self.steps_factor(bound) / self.step_s

    def told(self, bound: float) -> str:
        """Return in words what a bound would bring."""
        return (
            f"{self.seen}: to put off {self.share(bound):.0%} of a step's packets shortens it from "
            f"{1e3 * self.step_s:.1f} to {1e3 * self.seconds(bound):.1f} ms, and takes up to "
            f"{self.steps_factor(bound):.2f} times as many steps to the same accuracy"
        )


def _slowness(loads: PortLoads, by_rates: float, waited: float, ceiling: float) -> float:
    """Return how many times slower a port is than the others, by rates and by how long is waited for it.

    Rates say too little: whoever is the only one that sends to a port just then finds it fast. Averages begin when
    contributions are in, so that the rest of the waiting, in the time that a fast port takes for a unit of load, is the
    slow port's.
    """
    sent = 1 - share_to_defer(loads, by_rates, ceiling)
    by_waiting = (waited - loads.whole) / (loads.slow * sent)
    return min(max(by_rates, by_waiting), RATES_OFF * by_rates)


def _port_units(loads: PortLoads, slowness: float, share: float = 0.0) -> float:
    """Return how long both ports take if so much is deferred, in the time that the other takes for a unit of load."""
    sent = 1 - share
    return max(slowness * loads.slow * sent, loads.whole + loads.cut * sent)


def _deferral(estimate: DeferralEstimate, given: Settings, now: Settings, most: float) -> tuple[float, str]:
    if estimate.loads is None:
        return given.deferral_bound, estimate.seen
    if not most:
        return 0.0, f"{estimate.seen}, but deferral has not been allowed"
    bounds = sorted({most, *(bound for bound in DEFERRAL_BOUNDS if bound < most)})
    best = min(bounds, key=estimate.accuracy_factor)
    factor, told = estimate.accuracy_factor(best), estimate.told(best)
    if factor == math.inf:
        return 0.0, f"{estimate.seen}, but what deferral costs in steps was not measured that far"
    if factor > (1.0 if now.deferral_bound else 1 - WAITING_MATTERS):
        return 0.0, f"{told}: that takes {factor:.2f} times as long, so nothing is to be won with deferral"
    if given.collective == SERVER and best > given.deferral_bound:
        server = f"with {best:g} here, and `dlcp server --deferral-bound {best:g}`"
        return given.deferral_bound, f"{told}: {1 / factor:.2f} times as soon, {server}"
    return best, f"{told}: {1 / factor:.2f} times as soon"


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


WORST_QUANTILE: Final = 0.99
"""The quantile of messages that counts as the worst: else a single odd one would decide."""


def losses(records: Iterable[MessageRecord], ledger: Ledger, worst_quantile: float = 1.0) -> dict[str, float]:
    """Return what some records of a ledger come to: ``packets``, ``wanting``, ``lost``, ``worst`` and ``protected``."""
    found = list(records)
    shares = [min(record.packets, record.recovered + record.lost) / record.packets for record in found]
    by_class = ledger.loss_by_class()[:, 0]
    return {
        "packets": sum(record.packets for record in found),
        "wanting": sum(record.recovered + record.lost for record in found),
        "lost": sum(record.lost for record in found),
        "worst": float(np.quantile(shares, worst_quantile)) if shares else 0.0,
        "protected": float(by_class[0] / by_class.sum()) if by_class.sum() else 0.0,
    }


@dataclass(frozen=True, slots=True)
class Survey:
    """What one rank has measured of its messages and its paths; see :class:`dlcp.tuning.rules.Figures`.

    Parameters
    ----------
    worst
        What share of each message did not arrive at first: the 99th percentile.
    rates_bps
        At which each contributor takes in what this rank sends; 0 for itself and where nothing had to wait.
    """

    rank: int
    packets: int
    wanting: int
    lost: int
    worst: float
    protected: float
    rtt_s: float
    rates_bps: tuple[float, ...]

    @classmethod
    def of(cls, rank: int, ranks: int, ledger: Ledger, endpoint: Endpoint) -> "Survey":
        """Return what a rank's ledger and paths show."""
        rtt_s = max(map(endpoint.rtt_to, range(ranks)), default=0.0)
        rates_bps = tuple(map(endpoint.rate_to, range(ranks)))
        found: dict[str, Any] = losses(ledger.records, ledger, WORST_QUANTILE)
        return cls(rank, **found, rtt_s=rtt_s, rates_bps=rates_bps)

    def as_json(self) -> dict[str, Any]:
        """Return the survey as plain values."""
        return asdict(self)


def figures_of_surveys(
    surveys: Sequence[Survey], hosts: int, *, gradient_bytes: int, step_s: float, waited_s: float
) -> Figures:
    """Return what the surveys of all ranks come to, of steps of ``step_s`` with ``waited_s`` of waiting in them."""
    rates = inbound_rates({each.rank: np.array(each.rates_bps) for each in surveys})
    return Figures(
        ranks=len(surveys),
        hosts=hosts,
        gradient_bytes=gradient_bytes,
        step_s=step_s,
        waited_s=max(0.0, min(waited_s, step_s)),
        **_shares(surveys),
        worst=min(1.0, max(each.worst for each in surveys)),
        rtt_s=max(each.rtt_s for each in surveys),
        rates_bps={rank: rate for rank, rate in rates.items() if rate > 0},
    )


def figures_of_steps(
    steps: Sequence[dict[int, StepMetadata]],
    hosts: int,
    gradient_bytes: int,
    inbound_rates_bps: Sequence[Mapping[int, float]] = (),
) -> Figures:
    """Return what all ranks' metadata of some steps comes to, and how fast they received, where that is known."""
    by_step = [list(metadata.values()) for metadata in steps]
    every = [one for step in by_step for one in step]
    step_s = max(median(max(one.step_s for one in step) for step in by_step), 1e-9)
    known = [one.rate_bps for one in every if one.rate_bps]
    # Each rank takes in from all others at once; the metadata does not say which of them is the slow one.
    rates = dict.fromkeys(steps[0], (len(steps[0]) - 1) * median(known)) if known else {}
    told = [by_rank for by_rank in inbound_rates_bps if by_rank and min(by_rank.values()) > 0]
    if told:
        rates = {rank: median(by_rank[rank] for by_rank in told) for rank in told[0]}
    # What the rank waits for that the others wait for is the network: that is the rank behind a slow port, which waits
    # until its packets are through, or else the one that waits least.
    slow = [rank for rank, rate in level(rates).items() if rate < max(rates.values())]
    waited_s = median(
        max(step[rank].waited_s for rank in slow) if slow else min(one.waited_s for one in step.values())
        for step in steps
    )
    return Figures(
        ranks=len(steps[0]),
        hosts=hosts,
        gradient_bytes=gradient_bytes,
        step_s=step_s,
        waited_s=min(step_s, waited_s),
        **_shares(every),
        worst=min(1.0, float(np.quantile([one.worst for one in every], WORST_QUANTILE))),  # it may round up
        rtt_s=median(one.rtt_s for one in every),
        rates_bps=rates,
    )


def _shares(measured: Sequence[Survey | StepMetadata]) -> dict[str, Any]:
    """Return how many packets were offered, and what became of them: part of :class:`Figures`."""
    packets, wanting, lost = (
        int(sum(getattr(one, name) for one in measured)) for name in ("packets", "wanting", "lost")
    )
    return {
        "packets": packets,
        # Ranks' metadata went through float32, which may round a share up.
        "wanting": min(1.0, wanting / packets) if packets else 0.0,
        "spared": min(1.0, lost / wanting) if wanting else 0.0,
        "protected": min(1.0, median(one.protected for one in measured)),
    }
