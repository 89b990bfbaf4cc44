# SPDX-License-Identifier: Apache-2.0
"""Find the rank or link that makes the others wait, and why, although all-reduce makes all ranks equally slow.

Every rank takes part in each average, so all steps take as long as the slowest rank's. But only the others wait: the
culprit is the rank that is busy for longest, step after step, and so waits least. Its activities are compared with the
other ranks' to find the cause. If even the rank that waits least waits for long, the network is slow, and the rates of
the ranks' connections show where.

Only durations are compared, never times of different hosts, whose clocks differ. This is pure computation, without
input or output; :mod:`dlcp.torch.watching` measures.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import reduce
from operator import add
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.session.tcp_links import TcpEnds, TcpUse

Seconds = NDArray[np.float64]


class Activity(Enum):
    """A rank's activity in a part of a step."""

    LOADING = "loading"
    """Between the optimizer and the next forward pass: the data loader, and other work of the script."""
    FORWARD = "forward"
    BACKWARD = "backward"
    """The loss and the backward pass."""
    OPTIMIZER = "optimizer"
    """From the averages to the end of the optimizer's step, if PyTorch's optimizers perform it."""
    EVALUATION = "evaluation"
    """After a forward pass without gradients, until the next one with them."""
    WAITING = "waiting"
    """For other ranks: from the last gradient until all averages have arrived, and in other collectives."""


ACTIVITIES: Final = tuple(Activity)
"""The columns of a step's durations."""
_BUSY: Final = slice(0, ACTIVITIES.index(Activity.WAITING))
_COMPUTING: Final = [ACTIVITIES.index(Activity.FORWARD), ACTIVITIES.index(Activity.BACKWARD)]
UNCOMPARED_STEPS: Final = 3
"""Steps that do not count: DDP rearranges its buckets after the first, and the first few fault memory in."""
LEAST_STEPS: Final = 8
"""Fewest steps for a verdict: with fewer, the standard error is not reliable."""
NOTABLE: Final = 0.05
"""Shorter waits than this share of a step are not worth a culprit."""
SURE: Final = 4.0
"""A rank is named if its mean excess is this many times the standard error, or if it is the last one in half of the
steps and by as many standard errors more often than chance makes it. A rank that is slow once for long, because it
writes a checkpoint, has an excess of about one standard error. On a busy machine all ranks have long steps now and
then, which make the error large, but not the same rank the last."""
SLOW_LINK: Final = 0.5
"""A slow link has at most this part of the usual rate. Equal links differed by 10 % on an emulated network."""
LEAST_BYTES: Final = 20_000
LEAST_SHARE: Final = 0.1
"""Connections that carried fewer bytes between two reports, or less than this share of the busiest one's, say nothing
about a rate: their few bytes wait for delayed confirmations. Around a ring, each link carries as much as the others."""
RECENT_REPORTS: Final = 15
"""The latest verdict covers as many reports: half a minute."""


class RankReport(NamedTuple):
    """A rank's figures since its last report.

    Attributes
    ----------
    seconds
        Durations of the activities in each finished step, shape (steps, activities).
    layers
        Total duration of the forward and backward pass of each group of layers, shape (groups,).
    connections
        Use of its TCP connections.
    rates_bps
        Rates at which other ranks, by number, receive from this one, where its transport knows them.
    """

    seconds: Seconds
    layers: Seconds
    connections: Mapping[TcpEnds, TcpUse]
    rates_bps: Mapping[int, float]


class Cause(Enum):
    """Why a rank is slow, as words that follow its name."""

    LOADING = "data loading"
    COMPUTING = "computing"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    LINK = "link"


_CAUSES: Final = {
    Activity.LOADING: Cause.LOADING,
    Activity.FORWARD: Cause.COMPUTING,
    Activity.BACKWARD: Cause.COMPUTING,
    Activity.OPTIMIZER: Cause.OPTIMIZER,
    Activity.EVALUATION: Cause.EVALUATION,
}


SPAN: Final = " to "
"""Joins the first and the last name of a group of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who makes the others wait. Durations are in seconds and means per step.

    Parameters
    ----------
    steps
        Number of steps compared.
    step_s, network_s
        Duration of a step, and of its part in which even the last rank waits.
    rank
        The culprit; None if no rank stands out.
    peer
        The receiving rank, if a single link from ``rank`` is slow.
    cause
        Its cause; None without a culprit.
    lost_s
        How long it makes the others wait.
    own_s, usual_s
        Duration of the culprit's slow activity, and the median of the other ranks'.
    layers
        The layers that most of the excess computing is in; ``""`` if it is in many.
    rate_bps, usual_bps
        Rate of the slow link, and the usual one.
    others
        Further ranks that stand out.
    """

    steps: int = 0
    step_s: float = 0.0
    network_s: float = 0.0
    rank: int | None = None
    peer: int | None = None
    cause: Cause | None = None
    lost_s: float = 0.0
    own_s: float = 0.0
    usual_s: float = 0.0
    layers: str = ""
    rate_bps: float = 0.0
    usual_bps: float = 0.0
    others: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the verdict as one sentence."""
        if self.steps < LEAST_STEPS:
            return f"no verdict: {self.steps} steps were compared, and it takes {LEAST_STEPS}"
        if self.rank is None:
            network = f", {_ms(self.network_s)} of it for the network" if self.network_s > NOTABLE * self.step_s else ""
            return f"no rank stands out over {self.steps:,} steps of {_ms(self.step_s)}{network}"
        also = f"; so do ranks {', '.join(map(str, self.others))}, for less" if self.others else ""
        also = also.replace("ranks", "rank").replace("so do", "so does") if len(self.others) == 1 else also
        who, whom = f"rank {self.rank}", "the others wait"
        if self.cause is Cause.LINK:
            who = f"the link of rank {self.rank}"
            if self.peer is not None:
                who = f"the link from rank {self.rank} to rank {self.peer}"
            whom = "all ranks wait"
        return f"{who} makes {whom} {_ms(self.lost_s)} of {_ms(self.step_s)} a step: {self._reason()}{also}"

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain values, with its sentence as ``text``."""
        return {"text": str(self), **asdict(self), "cause": self.cause and self.cause.value}

    def _reason(self) -> str:
        own, usual = _ms(self.own_s), _ms(self.usual_s)
        match self.cause:
            case Cause.COMPUTING:
                often = f"{self.own_s / self.usual_s:.1f} times the median" if self.usual_s > 0 else own
                plural = "s" if SPAN in self.layers else ""
                where = f", most of the excess in layer{plural} {self.layers}" if self.layers else ""
                return f"its forward and backward pass take {often} ({own}, not {usual}){where}"
            case Cause.LOADING:
                return f"its data loader, or other work before the forward pass, takes {own}, the others' {usual}"
            case Cause.OPTIMIZER:
                return f"after the averages, its optimizer takes {own}, the others' {usual}"
            case Cause.EVALUATION:
                return f"its evaluation, passes without gradients, takes {own}, the others' {usual}"
            case _:
                return f"{_rate(self.rate_bps)}, the usual is {_rate(self.usual_bps)}"


class RankLink(NamedTuple):
    """A direction between two ranks, by their places in the order of reports."""

    sender: int
    receiver: int


class _Sums(NamedTuple):
    """Sums over compared steps; those of different steps add up."""

    steps: int
    seconds: Seconds
    """By rank and activity."""
    excess: Seconds
    """By rank: duration of its busy activities beyond the median."""
    squares: Seconds
    """Sums of the squares of these."""
    last: Seconds
    """By rank: number of steps in which it was busy for longest."""
    network_s: float
    waited: Seconds
    """One rank's waiting time, by the rank that was last."""
    layers: Seconds
    """By rank and group of layers."""
    sent_bits: "Counter[RankLink]"
    busy_s: "Counter[RankLink]"
    """How long that took."""

    @classmethod
    def zero(cls, ranks: int, layers: int) -> "_Sums":
        """Return empty sums."""
        seconds, each = np.zeros((ranks, len(ACTIVITIES))), np.zeros(ranks)
        return cls(0, seconds, each, each, each, 0.0, each, np.zeros((ranks, layers)), Counter(), Counter())

    def plus(self, other: "_Sums") -> "_Sums":
        """Return the sums of both."""
        return _Sums(*map(add, self, other))


class RankComparison:
    """Compares the reports of all ranks, which must report the same steps, though not in the same reports.

    Parameters
    ----------
    rank
        The number of this rank.
    ranks
        The numbers of all, in the order of their reports.
    layers
        Names of the groups of layers.
    """

    def __init__(self, rank: int, ranks: Sequence[int], layers: Sequence[str]) -> None:
        self.ranks, self.layers = tuple(ranks), tuple(layers)
        self._place = self.ranks.index(rank)
        self._pending = [np.zeros((0, len(ACTIVITIES))) for _ in ranks]
        """Steps that not all ranks have reported yet."""
        self._skip = UNCOMPARED_STEPS
        self._all = _Sums.zero(len(self.ranks), len(self.layers))
        self._recent: deque[_Sums] = deque(maxlen=RECENT_REPORTS)

    def add(self, reports: Sequence[RankReport]) -> None:
        """Add the next report of each rank."""
        self._pending = [np.vstack([old, new.seconds]) for old, new in zip(self._pending, reports, strict=True)]
        count = min(map(len, self._pending))
        steps = np.stack([rows[:count] for rows in self._pending])[:, self._skip :]
        self._pending = [rows[count:] for rows in self._pending]
        self._skip = max(0, self._skip - count)
        found = self._summed(steps, reports)
        self._all = self._all.plus(found)
        self._recent.append(found)

    def overall(self) -> Verdict:
        """Return the verdict on all steps."""
        return self._judge(self._all)

    def latest(self) -> Verdict:
        """Return the verdict on the latest steps; while they are too few, on all."""
        recent = reduce(_Sums.plus, self._recent, _Sums.zero(len(self.ranks), len(self.layers)))
        return self._judge(recent if recent.steps >= LEAST_STEPS else self._all)

    def totals(self) -> tuple[int, dict[str, float], dict[int | None, float]]:
        """Return the number of compared steps, and this rank's total seconds in them.

        Returns
        -------
        Steps; seconds by activity; waiting by the rank waited for, or None for the network.
        """
        spent = dict(zip((each.value for each in ACTIVITIES), self._all.seconds[self._place].tolist(), strict=True))
        waited: dict[int | None, float] = {
            peer: seconds for peer, seconds in zip(self.ranks, self._all.waited.tolist(), strict=True) if seconds > 0
        }
        waited[None] = max(0.0, spent[Activity.WAITING.value] - sum(waited.values()))
        return self._all.steps, spent, waited

    def as_json(self) -> dict[str, Any]:
        """Return the verdict on all steps and the figures it rests on, as plain values."""
        steps, sums = max(1, self._all.steps), self._all
        names = [each.value for each in ACTIVITIES]
        return {
            "verdict": self.overall().as_json(),
            "activities_s": {
                str(rank): dict(zip(names, row, strict=True))
                for rank, row in zip(self.ranks, (sums.seconds / steps).tolist(), strict=True)
            },
            "rates_bps": [
                {"from": self.ranks[link.sender], "to": self.ranks[link.receiver], "rate_bps": rate_bps}
                for link, rate_bps in sorted(_rates(sums).items())
            ],
        }

    # Sums -------------------------------------------------------------------------------------------------------------

    def _summed(self, steps: Seconds, reports: Sequence[RankReport]) -> _Sums:
        busy = steps[:, :, _BUSY].sum(2)
        excess = busy - _usual(busy)
        waits = steps[:, :, ACTIVITIES.index(Activity.WAITING)]
        network = waits.min(0)
        waited, last = np.zeros((2, len(self.ranks)))
        np.add.at(last, busy.argmax(0), 1)
        np.add.at(waited, busy.argmax(0), waits[self._place] - network)
        waited[self._place] = 0.0
        return _Sums(
            steps.shape[1],
            steps.sum(1),
            excess.sum(1),
            np.square(excess).sum(1),
            last,
            float(network.sum()),
            waited,
            np.stack([report.layers for report in reports]) if not self._skip else np.zeros_like(self._all.layers),
            *self._links(reports, float(network.sum())),
        )

    def _links(self, reports: Sequence[RankReport], waited_s: float) -> "tuple[Counter[RankLink], Counter[RankLink]]":
        """Return the bits sent over each link, and the time that took.

        Parameters
        ----------
        waited_s
            How long all ranks waited: the busy time of links whose rate the transport knows.
        """
        owners = {ends: place for place, report in enumerate(reports) for ends in report.connections}
        uses: dict[RankLink, TcpUse] = {}
        for place, report in enumerate(reports):
            for ends, use in report.connections.items():
                link = RankLink(place, owners.get(TcpEnds(ends.peer, ends.own), place))
                if link.receiver != place and use.busy_s > 0:
                    uses[link] = max(use, uses.get(link, use))  # ranks may have several connections
        least_bytes = max(LEAST_BYTES, LEAST_SHARE * max((use.acked_bytes for use in uses.values()), default=0))
        sent_bits: Counter[RankLink] = Counter()
        busy_s: Counter[RankLink] = Counter()
        for link, use in uses.items():
            if use.acked_bytes >= least_bytes:
                sent_bits[link] = 8 * use.acked_bytes
                busy_s[link] = use.busy_s  # type: ignore[assignment]  # annotated as whole numbers
        for place, report in enumerate(reports):
            for rank, rate_bps in report.rates_bps.items():
                if rank in self.ranks and waited_s > 0:
                    link = RankLink(place, self.ranks.index(rank))
                    sent_bits[link] = rate_bps * waited_s  # type: ignore[assignment]
                    busy_s[link] = waited_s  # type: ignore[assignment]
        return sent_bits, busy_s

    # The verdict ------------------------------------------------------------------------------------------------------

    def _judge(self, sums: _Sums) -> Verdict:
        steps = sums.steps
        if steps < LEAST_STEPS:
            return Verdict(steps=steps)
        step_s, network_s = float(sums.seconds.sum()) / len(self.ranks) / steps, sums.network_s / steps
        verdict = Verdict(steps=steps, step_s=step_s, network_s=network_s)
        found = [self._of_rank(verdict, sums), self._of_link(verdict, sums)]
        return max(found, key=lambda each: each.lost_s)

    def _of_rank(self, verdict: Verdict, sums: _Sums) -> Verdict:
        """Return the verdict on the ranks' own work."""
        steps = sums.steps
        excess = sums.excess / steps
        error = np.sqrt(np.maximum(0.0, sums.squares / steps - excess**2) / (steps - 1))
        chance = 1 / len(self.ranks)
        often = steps * max(0.5, chance + SURE * (chance * (1 - chance) / steps) ** 0.5)
        standing = [
            int(place)
            for place in np.argsort(-excess)
            if excess[place] > NOTABLE * verdict.step_s
            and (excess[place] > SURE * error[place] or sums.last[place] >= often)
        ]
        if not standing:
            return verdict
        culprit, *others = standing
        means = sums.seconds / steps
        usual = _usual(means)[culprit]
        largest = int(np.argmax((means[culprit] - usual)[_BUSY]))
        cause = _CAUSES[ACTIVITIES[largest]]
        columns = _COMPUTING if cause is Cause.COMPUTING else [largest]
        return replace(
            verdict,
            rank=self.ranks[culprit],
            cause=cause,
            lost_s=float(excess[culprit]),
            own_s=float(means[culprit, columns].sum()),
            usual_s=float(usual[columns].sum()),
            layers=self._slow_layers(sums, culprit) if cause is Cause.COMPUTING else "",
            others=tuple(self.ranks[place] for place in others),
        )

    def _slow_layers(self, sums: _Sums, culprit: int) -> str:
        if not self.layers:
            return ""
        excess = np.maximum(0.0, sums.layers - _usual(sums.layers))[culprit]
        place = int(np.argmax(excess))
        return self.layers[place] if excess[place] > excess.sum() / 2 else ""

    def _of_link(self, verdict: Verdict, sums: _Sums) -> Verdict:
        """Return the verdict on the network: a rank with slow links only, or else a slow link."""
        rates = _rates(sums)
        if verdict.network_s <= NOTABLE * verdict.step_s or len(rates) < 2:
            return verdict
        fastest: dict[int, float] = {}
        """The fastest link of each rank, into or out of it: if even that one is slow, the rank's own link is."""
        for link, rate in rates.items():
            for end in link:
                fastest[end] = max(rate, fastest.get(end, 0.0))
        usual_bps = median(fastest.values())
        place, peer = min(fastest, key=fastest.__getitem__), None
        rate_bps = fastest[place]
        if rate_bps > SLOW_LINK * usual_bps:
            place, peer = min(rates, key=rates.__getitem__)
            rate_bps = rates[RankLink(place, peer)]
        if rate_bps > SLOW_LINK * usual_bps:
            return verdict
        own = [sums.busy_s[link] for link in rates if place == link.sender or (peer is None and place == link.receiver)]
        busy_s = max(own) / verdict.steps
        if busy_s < verdict.network_s / 2:  # most of the waiting has another reason
            return verdict
        return replace(
            verdict,
            rank=self.ranks[place],
            peer=None if peer is None else self.ranks[peer],
            cause=Cause.LINK,
            lost_s=min(busy_s, verdict.network_s) * (1 - rate_bps / usual_bps),
            rate_bps=rate_bps,
            usual_bps=usual_bps,
        )


def _rates(sums: _Sums) -> dict[RankLink, float]:
    """Return the rates of the links in use, in bit/s."""
    return {link: bits / sums.busy_s[link] for link, bits in sums.sent_bits.items()}


def _usual(values: Seconds) -> Seconds:
    """Return each rank's baseline: with two ranks the other's values, with more the median of all."""
    if len(values) == 2:
        return values[::-1]
    return np.broadcast_to(np.median(values, axis=0), values.shape)


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _rate(bps: float) -> str:
    return f"{bps / 1e6:.3g} Mbit/s" if bps < 1e9 else f"{bps / 1e9:.3g} Gbit/s"
