# SPDX-License-Identifier: Apache-2.0
"""Which settings suit what ranks have measured, and why. The rules guess nothing: figures in, words out.

Every threshold has its reason beside it. All ranks that know the same figures choose the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, Final

import numpy as np

from dlcp.collectives.choice import AUTO, DIRECT, SERVER, Topology, choose, direct_seconds, ring_seconds
from dlcp.collectives.choice import Costs as CollectiveCosts
from dlcp.collectives.shards import inbound_rates
from dlcp.collectives.step_metadata import StepMetadata
from dlcp.ledger import Ledger, MessageRecord
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

    ranks: int
    hosts: int
    gradient_bytes: int
    step_s: float
    waited_s: float
    packets: int = 0
    wanting: float = 0.0
    worst: float = 0.0
    spared: float = 0.0
    protected: float = 0.0
    rtt_s: float = 0.0
    rates_bps: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.step_s <= 0 or not 0 <= self.waited_s <= self.step_s:
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
        given = dict(plain)
        try:
            given["rates_bps"] = {int(rank): float(rate) for rank, rate in given.get("rates_bps", {}).items()}
            return cls(**given)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"these are no figures of a measurement: {error}") from None


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that are chosen; see :class:`dlcp.session.Options`."""

    loss_bound: float = 0.1
    protected_share: float = -1.0
    compression: str = ""
    collective: str = "direct"

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
    """What is to be set, and what it follows from."""

    figures: Figures
    choices: Sequence[Choice]

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
        }


def decide(figures: Figures, given: Settings | None = None, now: Settings | None = None) -> Advice:
    """Choose settings.

    Parameters
    ----------
    given
        What the user has set, and what ``was`` in the choices: its loss bound is not exceeded.
    now
        What is in force while the figures were taken, if that is something else: what it has brought to an end by
        itself is no reason to take it back.
    """
    given = given or Settings()
    now = now or given
    bound, bound_why = _bound(figures, given, now)
    protected, protected_why = _protected(figures, bound, given, now)
    compression, compression_why = _compression(figures, given, now)
    collective, collective_why = _collective(figures, given)
    return Advice(
        figures,
        (
            Choice("loss_bound", bound, given.loss_bound, bound_why),
            Choice("protected_share", protected, given.protected_share, protected_why),
            Choice("compression", compression, given.compression, compression_why),
            Choice("collective", collective, given.collective, collective_why),
        ),
    )


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
        worst=max(each.worst for each in surveys),
        rtt_s=max(each.rtt_s for each in surveys),
        rates_bps={rank: rate for rank, rate in rates.items() if rate > 0},
    )


def figures_of_steps(steps: Sequence[dict[int, StepMetadata]], hosts: int, gradient_bytes: int) -> Figures:
    """Return what all ranks' metadata of some steps comes to."""
    by_step = [list(metadata.values()) for metadata in steps]
    every = [one for step in by_step for one in step]
    step_s = max(median(max(one.step_s for one in step) for step in by_step), 1e-9)
    # The rank that waits least is the one that the others wait for: what it waits for is the network.
    waited_s = min(step_s, median(min(one.waited_s for one in step) for step in by_step))
    known = [one.rate_bps for one in every if one.rate_bps]
    # Each rank takes in from all others at once; the metadata does not say which of them is the slow one.
    rates = dict.fromkeys(steps[0], (len(steps[0]) - 1) * median(known)) if known else {}
    return Figures(
        ranks=len(steps[0]),
        hosts=hosts,
        gradient_bytes=gradient_bytes,
        step_s=step_s,
        waited_s=waited_s,
        **_shares(every),
        worst=float(np.quantile([one.worst for one in every], WORST_QUANTILE)),
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
        "wanting": wanting / packets if packets else 0.0,
        "spared": lost / wanting if wanting else 0.0,
        "protected": median(one.protected for one in measured),
    }
