# SPDX-License-Identifier: Apache-2.0
"""An experiment: what is the same in all of its runs, what is varied, and what is asked of the results."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from dlcp.sim.scenario import FailureSpec, Scenario
from dlcp.sim.switches import SwitchSpec
from dlcp.sim.topology.specs import Star, TopologySpec
from dlcp.sim.traffic import TrafficSpec
from dlcp.sim.training.job import TrainingJob
from dlcp.sim.transports import TRANSPORTS_MAX, Dctcp, TransportSpec
from msgspec import Meta


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that one run needs.

    Parameters
    ----------
    transports
        By the names that training and traffic refer to.
    stop_s
        When a run ends at the latest, whatever is still on its way; simulated time.
    """

    topology: TopologySpec = msgspec.field(default_factory=Star)
    switches: SwitchSpec = msgspec.field(default_factory=SwitchSpec)
    transports: Annotated[dict[str, TransportSpec], Meta(max_length=TRANSPORTS_MAX)] = msgspec.field(
        default_factory=lambda: {"dctcp": Dctcp()}
    )
    training: tuple[TrainingJob, ...] = ()
    traffic: tuple[TrafficSpec, ...] = ()
    failures: tuple[FailureSpec, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 1
    stop_s: Annotated[float, Meta(gt=0)] = 3600.0

    def scenario(self) -> Scenario:
        """Return what the engine has to know."""
        return Scenario(
            topology=self.topology,
            switches=self.switches,
            transports=self.transports,
            background=tuple(traffic.background() for traffic in self.traffic),
            failures=self.failures,
            seed=self.seed,
            stop_s=self.stop_s,
        )


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A value of an axis: ``set`` says what it changes, by dotted names such as ``switches.discipline``.

    A number in a name is a place in a list (``training.0.model``), ``*`` means all places.
    """

    name: str
    set: dict[str, Any] = {}


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that is varied; an experiment runs all combinations of its axes' points."""

    name: str
    points: Annotated[tuple[Point, ...], Meta(min_length=1)]


class Quick(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The selection that ``--quick`` runs.

    Parameters
    ----------
    set
        Changes of the base, as of a point.
    only
        Points by axis; all where nothing is said.
    skip
        Whether the experiment is left out.
    """

    set: dict[str, Any] = {}
    only: dict[str, tuple[str, ...]] = {}
    skip: bool = False


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plot.

    Parameters
    ----------
    metric
        A name in the results; see `dlcp.sim.measures`.
    x, series
        Axes. Other axes have to be fixed by ``where``.
    relative_to
        A point of ``series`` (or of ``x`` without ``series``) by whose value each is divided.
    inverse
        With ``relative_to``: the quotient the other way round, as for speed-ups from times.
    """

    title: str
    metric: str
    x: str
    series: str | None = None
    kind: Literal["bars", "lines"] = "bars"
    where: dict[str, str] = {}
    relative_to: str | None = None
    inverse: bool = False
    logarithmic: bool = False


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published figure and what stands against it.

    Parameters
    ----------
    paper, source
        What was published, in ``unit``, and where; no number where only a trend was, neither where nothing was.
    ours, theirs
        Points by axis. Of several combinations the best is taken with ``over: best``, else the mean.
    form
        ``change_percent``: 100 (ours / theirs - 1). ``speedup_percent``: 100 (theirs / ours - 1). ``value``: ours.
    against
        Whom the number stands against, where a reader could take that for more than it is; it is shown beside it.
    reason
        Why it differs, as far as an experiment of ours has shown it; what has not been tried is said to be a guess.
    """

    name: str
    metric: str
    ours: dict[str, str]
    theirs: dict[str, str] = {}
    form: Literal["change_percent", "speedup_percent", "value"] = "change_percent"
    over: Literal["mean", "best"] = "mean"
    paper: float | None = None
    unit: str = "%"
    source: str = ""
    against: str = ""
    reason: str = ""


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file.

    Parameters
    ----------
    name
        Of its folder of results.
    question
        What it answers, in a sentence.
    setting
        What runs have in common, in the form of `Setting`; it is checked with each point's changes in it.
    seeds
        Every combination is run with each of them; the setting's own alone if none is given.
    convergence
        The curve of `dlcp.sim.convergence` by which steps are turned into time to accuracy.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z0-9_]+$")]
    title: str
    question: str
    setting: dict[str, Any]
    seeds: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    axes: tuple[Axis, ...] = ()
    quick: Quick = Quick()
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    convergence: str = "published"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of points.

    Parameters
    ----------
    point
        Names of points by axis.
    """

    experiment: str
    point: Mapping[str, str]
    setting: Setting
    convergence: str

    @property
    def name(self) -> str:
        """Return the name of its file: the points', in the order of axes, and the seed."""
        words = [_word(name) for name in self.point.values()] or ["run"]
        return "-".join([*words, f"seed{self.setting.seed}"])


def _word(name: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in name.lower())
    return kept.strip("_") or "_"
