# SPDX-License-Identifier: Apache-2.0
"""Choose settings from the ranks' measurements, and say why. The rules depend on their arguments only.

The criterion is the time to an accuracy, not the time of a step. A setting that makes steps shorter but needs more of
them is penalised by the additional steps that were measured for loss and deferral (:mod:`dlcp.convergence`).
Compression to 16 bits was not measured; its rounding errors are sent with the next step, so it is not penalised.

Ranks with the same figures make the same choice.
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
from dlcp.collectives.shards import inbound_rates
from dlcp.collectives.step_metadata import StepMetadata
from dlcp.configuration import Range, check
from dlcp.convergence import COST_OF_DEFERRAL, COST_OF_DEFERRAL_TO_ALL, COST_OF_LOSS, steps_factor
from dlcp.ledger import Ledger, MessageRecord
from dlcp.slow_ports import SHARE_MIN, PortLoads, share_to_defer, snap_to_fastest, weights_for_rates
from dlcp.transport import Connection

LOSS_MATTERS: Final = 0.001
"""Share of lost packets from which reliable transport suffers and bounded loss does not (MLT, NSDI'24: 0.1 %)."""
LOSS_ENDS: Final = LOSS_MATTERS / 10
"""Below this share a path that has lost packets counts as clean again. Lower, as hysteresis; not tuned."""
WAITING_MATTERS: Final = 0.05
"""Smallest share of a step worth saving, as for ``dlcp train --measure``. Not tuned."""
BOUNDS: Final = (0.01, 0.02, 0.05, 0.1)
"""Loss bounds to choose from. The last does not harm convergence (DLCP, arXiv 2008.08445)."""
BLIND: Final = 0.5
"""The network ignores protection if the protected packets' share of losses is at least this part of their share of all
packets. Not tuned."""
FEW_PROTECTED: Final = 0.1
"""Share of packets to protect where the network ignores protection: the largest tenth. Not tuned."""
CAST_BYTES_PER_S: Final = 0.5e9
CAST_S: Final = 0.005
"""Speed at which a busy core casts to 16 bits, adds up and casts back, and time per step to wake a thread for it.
Orders of magnitude, for a machine with more busy threads than cores."""
COMPRESSION: Final = "bf16"
"""Halves every message, can be summed anywhere, and has the range of float32."""
CODED_IN_PLACE: Final = ("", "fp16", "bf16")
"""Compressions whose packets can be deferred like those of uncompressed gradients."""
RATES_OFF: Final = 2.0
"""Limit on how much slower than its rate a port is taken to be, since ranks also wait for other reasons. Not tuned."""
DEFERRAL_BOUNDS: Final = (0.25, 0.5, 0.75)
"""Deferral bounds to choose from. With the last, half of a step may be deferred."""


_Count = Annotated[int, Range(1, 1 << 16)]
"""A packet has 16 bits for its sender's rank."""
_Seconds = Annotated[float, Range(0.0, 1e9)]
_Portion = Annotated[float, Range(0.0, 1)]
_RATE: Final = Range(0.0, 1e15)


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a measurement. Times are medians over steps, in seconds, of the slowest rank.

    Parameters
    ----------
    ranks, hosts
        Numbers of ranks and of hosts.
    gradient_bytes
        Size of a rank's gradients in a step.
    step_s, waited_s
        Duration of a step with DLCP, and the part of it that is communication not overlapped with computing.
    packets
        Packets offered to the network. With fewer than some thousand, the shares below mean little.
    wanting, worst
        Share of packets whose first transmission did not arrive: of all packets, and of a message at the 99th
        percentile of messages.
    spared
        Share of those that were never retransmitted, because the bound allowed it.
    protected
        Share of packets that must not be lost.
    rtt_s
        Round-trip time under load.
    rates_bps
        Rate at which each rank receives queued packets, in bit/s, by rank; empty if no packet had to wait.
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
            raise ValueError(f"figures must be results of a measurement: {error}") from None
        if self.step_s <= 0 or not 0 <= self.waited_s <= self.step_s:
            raise ValueError(
                f"steps of {self.step_s} s with {self.waited_s} s of waiting: figures must be results of a "
                "measurement, with steps longer than 0 s and waiting no longer than steps"
            )

    @property
    def waiting(self) -> float:
        """Share of a step in which ranks wait for communication."""
        return self.waited_s / self.step_s

    @property
    def rate_bps(self) -> float:
        """Rate at which the slowest rank receives queued packets, in bit/s; 0 if no packet had to wait."""
        return min((rate for rate in self.rates_bps.values() if rate > 0), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self) | {"rates_bps": {str(rank): rate for rank, rate in sorted(self.rates_bps.items())}}

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> "Figures":
        """Return the figures in a document written by :meth:`as_json`.

        Raises
        ------
        ValueError
            A value is missing, unknown or invalid; the message says which.
        """
        try:
            given = dict(plain)
            given["rates_bps"] = {int(rank): float(rate) for rank, rate in given.get("rates_bps", {}).items()}
            return cls(**given)
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not the results of a measurement: {error}") from None


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that the rules choose; see :class:`dlcp.session.Options`."""

    loss_bound: float = 0.1
    protected_share: float = -1.0
    compression: str = ""
    collective: str = "direct"
    deferral_bound: float = 0.0

    @classmethod
    def of(cls, options: object) -> "Settings":
        """Return these options of a session's options."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Choice:
    """One option: its new and its previous value, and the reason, with the figures it is based on."""

    option: str
    value: float | str
    was: float | str
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings to use, and the figures they are based on.

    Parameters
    ----------
    steps_factor, given_steps_factor
        Steps to the same accuracy relative to training without loss and deferral, with the chosen settings and with the
        given ones; infinite beyond what was measured.
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
        """The settings that differ from the given ones."""
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
        The user's settings, which are ``was`` in the choices. Their loss bound is not exceeded.
    now
        The settings in force during the measurement, if others. A setting is not withdrawn because the problem that it
        solves is no longer seen.
    most_deferred
        Largest deferral bound to choose, unless the user has set a larger one.
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
    """Return the relative number of steps with the loss under a bound, which is at most the measured loss."""
    return steps_factor(COST_OF_LOSS, min(bound, figures.wanting)) or math.inf


def _bound(figures: Figures, given: Settings, now: Settings) -> tuple[float, str]:
    enough = LOSS_ENDS if now.loss_bound else LOSS_MATTERS
    seen = f"{figures.wanting:.2%} of {figures.packets:,} packets did not arrive at first"
    if figures.ranks < 2:
        return given.loss_bound, "one rank exchanges nothing"
    if figures.wanting < enough:
        return 0.0, f"{seen}, less than {enough:.2%}: exact averages cost nothing, and packets need no classes"
    found = next((bound for bound in BOUNDS if bound >= figures.worst), BOUNDS[-1])
    bound = min(found, given.loss_bound)
    worst = f"{figures.worst:.1%} in the worst hundredth of messages"
    # Retransmission takes another round trip, and the same share of the transfer time.
    saved_s = min(figures.waited_s, figures.rtt_s + figures.wanting * figures.waited_s)
    factor = _loss_factor(figures, bound)
    if (factor - 1) * figures.step_s > saved_s:
        return (
            0.0,
            f"{seen}; to accept that loss takes {factor:.2f} times as many steps to the same accuracy, while "
            f"retransmission takes at most {1e3 * saved_s:.1f} of the {1e3 * figures.step_s:.1f} ms of a step",
        )
    if bound < found:
        return (
            bound,
            f"{seen}, {worst}; a bound of {found:.0%} would accept that, but no more than {bound:.1%} has been allowed",
        )
    if figures.worst > bound:
        return bound, f"{seen}, {worst}; more than {bound:.0%} is not known to be harmless for every model"
    return bound, f"{seen}, {worst}: a bound of {bound:.0%} avoids retransmissions"


def _protected(figures: Figures, bound: float, given: Settings, now: Settings) -> tuple[float, str]:
    if not bound:
        return given.protected_share, "nothing may be lost, so classes make no difference"
    if now.protected_share != given.protected_share:
        return now.protected_share, "chosen before; kept, as it may be why the problem is gone"
    theirs = 1 - figures.spared
    seen = f"{theirs:.0%} of lost packets had to be retransmitted; {figures.protected:.0%} of packets are protected"
    if figures.protected > FEW_PROTECTED and theirs >= BLIND * figures.protected and figures.worst <= bound:
        return (
            FEW_PROTECTED,
            f"{seen}: the network does not spare them, so each loss costs a round trip; protect the largest tenth only",
        )
    if theirs < BLIND * figures.protected:
        return given.protected_share, f"{seen}: the network drops the least important packets, as the classes ask"
    return given.protected_share, f"{seen}; messages lose more than the bound, so retransmissions are needed anyway"


def _compression(figures: Figures, given: Settings, now: Settings) -> tuple[str, str]:
    if given.compression:
        return given.compression, "set by the user"
    if now.compression:
        return now.compression, "chosen before; kept, as it may be why the problem is gone"
    saved_s, cost_s = figures.waited_s / 2, CAST_S + figures.gradient_bytes / CAST_BYTES_PER_S
    seen = (
        f"steps wait {1e3 * figures.waited_s:.1f} ms of {1e3 * figures.step_s:.1f} for {_size(figures.gradient_bytes)}"
    )
    if given.collective == SERVER:
        return "", f"{seen}; left as it is: a parameter server adds up gradients as they are"
    if figures.hosts == 1:
        return "", f"{seen}; on one host they go through memory, and casting costs more than it saves"
    if figures.waiting < WAITING_MATTERS:
        return "", f"{seen}: less than {WAITING_MATTERS:.0%}, so compression gains nothing"
    if not figures.rate_bps or figures.wanting < LOSS_MATTERS:
        return "", f"{seen}, but no path was full and lost packets: fewer bytes would not arrive sooner"
    wire_s = 2 * (figures.ranks - 1) / figures.ranks * 8 * figures.gradient_bytes / figures.rate_bps
    if wire_s < figures.waited_s / 2:
        return "", f"{seen}; their transfer takes only {1e3 * wire_s:.1f} ms, so steps wait for something else"
    if saved_s <= cost_s:
        return "", f"{seen}; casting them takes {1e3 * cost_s:.1f} ms, more than compression saves"
    return (
        COMPRESSION,
        f"{seen}, at {figures.rate_bps / 1e6:,.0f} Mbit/s: half the bytes save {1e3 * saved_s:.1f} ms, "
        f"casting takes {1e3 * cost_s:.1f} ms",
    )


def _collective(figures: Figures, given: Settings) -> tuple[str, str]:
    if given.collective in (SERVER, AUTO):
        return given.collective, "set by the user"
    ranks = range(figures.ranks)
    if figures.ranks < 3:
        return given.collective, "with fewer than three ranks all collectives are alike"
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
        seen += f"; a ring waits for its slowest hop, so it must be faster by more than {costs.ring_margin - 1:.0%}"
    return chosen, seen


@dataclass(frozen=True, slots=True)
class DeferralEstimate:
    """Predicts the duration and the number of steps with deferral, by the same arithmetic as the ranks that defer.

    Parameters
    ----------
    step_s, bytes_s
        Duration of a step with nothing deferred, and the part of it spent waiting for the busiest port.
    loads, slowness
        Load of that port, and how many times slower it is than the others; None if nothing would be deferred.
    what
        Name of the convergence curve, see :func:`dlcp.convergence.steps_factor`.
    seen
        The observation behind the estimate, or the reason why nothing would be deferred; for people.
    """

    step_s: float
    bytes_s: float
    loads: PortLoads | None
    slowness: float
    what: str
    seen: str

    @classmethod
    def of(cls, figures: Figures, now: Settings, chosen: Settings) -> "DeferralEstimate":
        """Return the estimate for the chosen settings, from figures that were measured with the current ones."""
        collective, size = chosen.collective, float(figures.gradient_bytes)
        loads, slowness, what, seen = None, 1.0, COST_OF_DEFERRAL, ""
        slowest_s = math.inf
        rates = snap_to_fastest(figures.rates_bps)
        slow = sorted((rate, rank) for rank, rate in rates.items() if rate < max(rates.values()))
        if figures.ranks < 2:
            seen = "one rank exchanges nothing"
        elif chosen.compression not in CODED_IN_PLACE:
            seen = f"{chosen.compression} already leaves values out; the rest is not deferred"
        elif collective == RING:
            seen = "a ring defers nothing"
        elif collective == SERVER:
            what, seen = COST_OF_DEFERRAL_TO_ALL, "all gradients pass the parameter server's port"
            if figures.wanting >= LOSS_MATTERS:
                loads = PortLoads.of_server(figures.ranks, 1.0)
            else:
                seen += ", which is not congested: nothing would be deferred"
        elif not slow or len(rates) < figures.ranks:
            seen = "no rank's port was found to be far slower than the others', so nothing would be deferred"
        else:
            rate, rank = slow[0]
            weights, fastest = weights_for_rates(rates), max(rates.values())
            loads = PortLoads.of_direct(figures.ranks, weights[rank], max(weights.values()))
            unit_s = 8 * size / fastest
            slowness = _slowness(loads, fastest / rate, figures.waited_s / unit_s, STEP_PART * now.deferral_bound)
            slowest_s = unit_s * _port_units(loads, slowness)
            what = COST_OF_DEFERRAL if len(slow) == 1 else COST_OF_DEFERRAL_TO_ALL
            seen = f"rank {rank} receives {slowness:.1f} times more slowly than the fastest"
        estimate = cls(figures.step_s, 0.0, loads, slowness, what, seen)
        left = estimate.left(now.deferral_bound)
        bytes_s = min(figures.waited_s, slowest_s * left)
        step_s = figures.step_s - bytes_s
        bytes_s /= left  # deferral during the measurement had made the waiting shorter
        if chosen.compression and not now.compression:
            bytes_s /= 2
        return replace(estimate, step_s=step_s + bytes_s, bytes_s=bytes_s)

    def share(self, bound: float) -> float:
        """Return the share of a step's packets that ranks would defer under a deferral bound."""
        share = share_to_defer(self.loads, self.slowness, STEP_PART * bound) if self.loads else 0.0
        return share if share >= SHARE_MIN else 0.0

    def left(self, bound: float) -> float:
        """Return the time of the busiest port with deferral, as a fraction of that without."""
        if self.loads is None:
            return 1.0
        return _port_units(self.loads, self.slowness, self.share(bound)) / _port_units(self.loads, self.slowness)

    def seconds(self, bound: float) -> float:
        """Return the duration of a step, in seconds."""
        return self.step_s - self.bytes_s * (1 - self.left(bound))

    def steps_factor(self, bound: float) -> float:
        """Return the relative number of steps to the same accuracy; infinite if it was not measured."""
        return steps_factor(self.what, self.share(bound)) or math.inf

    def accuracy_factor(self, bound: float) -> float:
        """Return the time to the same accuracy, relative to that without deferral."""
        return self.seconds(bound) * self.steps_factor(bound) / self.step_s

    def describe(self, bound: float) -> str:
        """Describe the effect of a bound, for people."""
        return (
            f"{self.seen}: deferring {self.share(bound):.0%} of a step's packets shortens it from "
            f"{1e3 * self.step_s:.1f} to {1e3 * self.seconds(bound):.1f} ms, and takes up to "
            f"{self.steps_factor(bound):.2f} times as many steps to the same accuracy"
        )


def _slowness(loads: PortLoads, by_rates: float, waited: float, ceiling: float) -> float:
    """Return how many times slower a port is than the others, from its rate and from the time ranks wait for it.

    Rates alone understate it: a sender that has the port to itself for a moment finds it fast. Averages start once all
    contributions have arrived, so the rest of the waiting is due to the slow port. ``waited`` is in units of the time
    that a fast port takes for a unit of load.
    """
    sent = 1 - share_to_defer(loads, by_rates, ceiling)
    by_waiting = (waited - loads.whole) / (loads.slow * sent)
    return min(max(by_rates, by_waiting), RATES_OFF * by_rates)


def _port_units(loads: PortLoads, slowness: float, share: float = 0.0) -> float:
    """Return the time until both ports finish if ``share`` is deferred, in the other port's time per unit of load."""
    sent = 1 - share
    return max(slowness * loads.slow * sent, loads.whole + loads.cut * sent)


def _deferral(estimate: DeferralEstimate, given: Settings, now: Settings, most: float) -> tuple[float, str]:
    if estimate.loads is None:
        return given.deferral_bound, estimate.seen
    if not most:
        return 0.0, f"{estimate.seen}, but deferral has not been allowed"
    # A parameter server keeps the bound that it began with: its workers defer so much, or nothing.
    others = () if given.collective == SERVER and given.deferral_bound else DEFERRAL_BOUNDS
    bounds = sorted({most, *(bound for bound in others if bound < most)})
    best = min(bounds, key=estimate.accuracy_factor)
    factor, effect = estimate.accuracy_factor(best), estimate.describe(best)
    if factor == math.inf:
        return 0.0, f"{estimate.seen}, but the cost of deferral in steps was not measured that far"
    if factor > (1.0 if now.deferral_bound else 1 - WAITING_MATTERS):
        return 0.0, f"{effect}: that takes {factor:.2f} times as long, so deferral gains nothing"
    return best, f"{effect}: {1 / factor:.2f} times as fast overall"


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


WORST_QUANTILE: Final = 0.99
"""Quantile of messages that counts as the worst, so that a single outlier does not decide."""


def losses(records: Iterable[MessageRecord], ledger: Ledger, worst_quantile: float = 1.0) -> dict[str, float]:
    """Return ``packets``, ``wanting``, ``lost``, ``worst`` and ``protected`` over some records of a ledger."""
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
    """One rank's measurements of its messages and paths; see :class:`dlcp.tuning.rules.Figures`.

    Parameters
    ----------
    worst
        Share of a message that did not arrive at first: the 99th percentile over messages.
    rates_bps
        Rate at which each contributor receives this rank's packets; 0 for itself and where no packet had to wait.
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
    def of(cls, rank: int, ranks: int, ledger: Ledger, connection: Connection) -> "Survey":
        """Return the survey of a rank's ledger and paths."""
        rtt_s = max(map(connection.rtt_to, range(ranks)), default=0.0)
        rates_bps = tuple(map(connection.rate_to, range(ranks)))
        found: dict[str, Any] = losses(ledger.records, ledger, WORST_QUANTILE)
        return cls(rank, **found, rtt_s=rtt_s, rates_bps=rates_bps)


def figures_of_surveys(
    surveys: Sequence[Survey], hosts: int, *, gradient_bytes: int, step_s: float, waited_s: float
) -> Figures:
    """Return the figures of all ranks' surveys, for steps of ``step_s`` with ``waited_s`` of waiting in them."""
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
    """Return the figures of some steps, from all ranks' metadata and, where known, their receive rates."""
    by_step = [list(metadata.values()) for metadata in steps]
    every = [one for step in by_step for one in step]
    step_s = max(median(max(one.step_s for one in step) for step in by_step), 1e-9)
    known = [one.rate_bps for one in every if one.rate_bps]
    # Each rank receives from all others at once; the metadata does not show which rank is slow.
    rates = dict.fromkeys(steps[0], (len(steps[0]) - 1) * median(known)) if known else {}
    received = [by_rank for by_rank in inbound_rates_bps if by_rank and min(by_rank.values()) > 0]
    if received:
        rates = {rank: median(by_rank[rank] for by_rank in received) for rank in received[0]}
    # Time spent waiting for the network: that of the rank behind a slow port, which waits until its packets are
    # through; without a slow port that of the rank that waits least, since the others also wait for that rank.
    slow = [rank for rank, rate in snap_to_fastest(rates).items() if rate < max(rates.values())]
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
    """Return the number of offered packets and the shares of them: part of :class:`Figures`."""
    packets, wanting, lost = (
        int(sum(getattr(one, name) for one in measured)) for name in ("packets", "wanting", "lost")
    )
    return {
        "packets": packets,
        # Metadata travels as float32, which may round a share up.
        "wanting": min(1.0, wanting / packets) if packets else 0.0,
        "spared": min(1.0, lost / wanting) if wanting else 0.0,
        "protected": min(1.0, median(one.protected for one in measured)),
    }
