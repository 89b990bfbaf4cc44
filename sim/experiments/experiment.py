# SPDX-License-Identifier: Apache-2.0
"""Experiments: their common setting, the axes they vary, figures and claims; and how to read their files.

Every combination of points is checked before anything runs. Errors name the line of the file and the nearest valid
name.
"""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from dlcp.inputs.document import Document, DocumentError, PlaceError, Step, Steps
from dlcp.inputs.error_text import nearest
from dlcp.sim.jobs.pipeline_training import pipeline_of
from dlcp.sim.jobs.step_graph import check_messages
from dlcp.sim.jobs.training import TrainingJob, place_jobs
from dlcp.sim.limits import SECONDS_MAX, Seed, check_within
from dlcp.sim.network.topology import build_topology
from dlcp.sim.scenario import Fidelity, NetworkSetting, TraceJob
from dlcp.sim.traces.traced_jobs import place_traces
from dlcp.values.planes import FULL_BITS


class RunSetting(NetworkSetting, frozen=True, kw_only=True):
    """The complete setting of one run.

    Parameters
    ----------
    skip_steady
        Skip steps of training when the mean duration of a step is known within this share, such as 0.01
        (`dlcp.sim.jobs.skipping`); 0 simulates every step.
    """

    training: tuple[TrainingJob, ...] = ()
    traces: tuple[TraceJob, ...] = ()
    skip_steady: Annotated[float, Meta(ge=0, le=0.1)] = 0.0

    def check_content(self) -> None:
        """Reject a setting without anything to simulate.

        Raises
        ------
        dlcp.inputs.document.PlaceError
            It has neither jobs nor traffic, or one of them would begin after the run's end.
        """
        senders = ("training", "traces", "traffic", "patterns")
        if not any(getattr(self, field) for field in senders):
            raise PlaceError("there is nothing to simulate: add training, traces, traffic or patterns")
        for field in senders:
            for number, each in enumerate(getattr(self, field)):
                if each.start_s >= self.stop_s:
                    raise PlaceError(
                        f"{each.name} begins at {each.start_s:g} s, but the run ends at stop_s, {self.stop_s:g} s; "
                        "raise stop_s, or begin earlier",
                        *(field, number, "start_s"),
                    )

    def check_jobs(self) -> None:
        """Reject lower precision without DLCP's transport, and jobs that the engine or skipping does not support.

        Raises
        ------
        dlcp.inputs.document.PlaceError
            There is such a job; ``steps`` lead to its place.
        """
        for number, job in enumerate(self.training):
            kind = self.transports[job.transport].__struct_config__.tag
            if job.precision != FULL_BITS and kind != "dlcp":
                message = f"precision {job.precision} needs a transport of kind dlcp, but {job.transport!r} is {kind}"
                raise PlaceError(message, "training", number, "precision")
            if job.learn and self.engine == "flows":  # which does not know which packets are missing
                message = "learn needs `engine: packets`, which knows the missing ones"
                raise PlaceError(message, "training", number, "learn")
            for name in ("learn", "pipeline"):
                if self.skip_steady and getattr(job, name):
                    message = f"skip_steady is for jobs without {name}: leave out one of the two"
                    raise PlaceError(message, "training", number, name)
        if self.skip_steady and self.traces:
            raise PlaceError("skip_steady is for training, not for traces: leave out one of the two", "traces")


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A value of an axis: ``set`` changes the setting by dotted names such as ``switches.discipline``.

    A number in a name is an index into a list (``training.0.model``); ``*`` means all entries.
    """

    name: str
    set: dict[str, Any] = {}


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A dimension of an experiment, which runs all combinations of its axes' points."""

    name: str
    points: Annotated[tuple[Point, ...], Meta(min_length=1)]


class Quick(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The selection that ``--quick`` runs.

    Parameters
    ----------
    set
        Changes of the setting, as for a point.
    only
        Points to run, by axis; other axes keep all points.
    skip
        Whether to leave out the whole experiment.
    """

    set: dict[str, Any] = {}
    only: dict[str, tuple[str, ...]] = {}
    skip: bool = False


LEARNING_CURVES: Final = ("accuracy", "loss")
"""The measures of a model's tests."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plot.

    Parameters
    ----------
    metric
        A name in the results; see `sim/experiments/README.md`.
    x, series
        Axes to show. ``where`` has to fix all others.
    kind
        ``curves``: the tests of the model that a job with ``learn`` trains, ``accuracy`` or ``loss`` over time, with a
        curve for each point of ``x``.
    relative_to
        Divide each value by the value at this point of ``series`` (of ``x`` without ``series``).
    inverse
        With ``relative_to``: invert the ratio, as for speed-ups from times.
    """

    title: str
    metric: str
    x: str
    series: str | None = None
    kind: Literal["bars", "lines", "curves"] = "bars"
    where: dict[str, str] = {}
    relative_to: str | None = None
    inverse: bool = False
    logarithmic: bool = False

    def __post_init__(self) -> None:
        """Reject curves of anything but tests."""
        if self.kind == "curves" and (self.metric not in LEARNING_CURVES or self.series or self.relative_to):
            raise ValueError(
                f"curves show {' or '.join(LEARNING_CURVES)}, without series and relative_to; got {self.metric!r}"
            )


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published figure and the simulated result to compare with it.

    Parameters
    ----------
    paper, source
        The published value in ``unit``, and its source. Leave out ``paper`` if only a trend was published, and both if
        nothing was.
    ours, theirs
        Points by axis. If they match several combinations, ``over`` takes the best or the mean.
    form
        ``change_percent``: 100 (ours / theirs - 1). ``speedup_percent``: 100 (theirs / ours - 1). ``value``: ours.
    against
        A note on a weak peer that a reader could take for a stronger one; the report shows it next to the number.
    reason
        Why the result differs, as far as our experiments show; call a guess a guess.
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
    """The contents of an experiment file.

    Parameters
    ----------
    name
        Name of the experiment and of its results folder.
    question
        The question that it answers, in one sentence.
    setting
        The common setting of all runs, in the form of `RunSetting`. It is checked with each point's changes applied.
    seeds
        Every combination runs once with each seed; by default, with the setting's own.
    convergence
        The curve of `dlcp.convergence` that turns loss into additional steps.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z0-9_]+$")]
    title: str
    question: str
    setting: dict[str, Any]
    seeds: tuple[Seed, ...] = ()
    axes: tuple[Axis, ...] = ()
    quick: Quick = Quick()
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    convergence: str = "published"


class ExperimentRun(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of points, with a seed.

    Parameters
    ----------
    point
        Point names by axis.
    """

    experiment: str
    point: Mapping[str, str]
    setting: RunSetting
    convergence: str

    @property
    def name(self) -> str:
        """Return the name of its result file: its points, in the order of axes, and the seed."""
        words = [_file_word(name) for name in self.point.values()] or ["run"]
        if self.setting.engine != "packets":
            words.append(self.setting.engine)
        return "-".join([*words, f"seed{self.setting.seed}"])


def _file_word(name: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in name.lower())
    return kept.strip("_") or "_"


# ------------------------------------------------------------------------------------------------------- writing files


def changed_fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that differ from their defaults, and its kind, as a file would give them."""
    tag = struct.__struct_config__.tag
    found: dict[str, Any] = {"kind": tag} if tag else {}
    for each in msgspec.structs.fields(struct):
        value = getattr(struct, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if value != default or type(value) is not type(default):
            found[each.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return changed_fields(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


# -------------------------------------------------------------------------------------------------------- reading files


@dataclass(frozen=True, slots=True)
class PlannedExperiment:
    """An experiment with its runs."""

    experiment: Experiment
    runs: tuple[ExperimentRun, ...]


def read(
    path: Path, *, quick: bool = False, seeds: Sequence[int] = (), engine: Fidelity | None = None
) -> PlannedExperiment:
    """Read an experiment, and check each of its runs.

    Parameters
    ----------
    quick
        Whether to take only the quick selection.
    seeds
        Seeds to use instead of the file's.
    engine
        What to simulate, packets or flows, instead of the file's.

    Raises
    ------
    DocumentError
        The file is wrong; the message names the file, the line, and the mistake.
    """
    document = Document(path)
    experiment = document.convert(Experiment)
    _check_names(document, experiment)
    runs = tuple(_runs(document, experiment, quick, seeds or experiment.seeds or (None,), engine))
    names = [run.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise document.error(f"two combinations of points are both called {twice[0]!r}; rename a point", ("axes",))
    return PlannedExperiment(experiment, runs)


@dataclass(frozen=True, slots=True)
class _Change:
    """A changed value: its place in the setting (``target``), and its place in the file (``origin``)."""

    target: Steps
    value: Any
    origin: Steps


@dataclass(frozen=True, slots=True)
class _ChangedSetting:
    """The file's setting with changes applied; its errors name places in the file."""

    document: Document
    content: dict[str, Any]
    changes: Sequence[_Change]

    def origin_of(self, steps: Steps) -> Steps:
        """Return where the file sets the value at ``steps``: in the last change of it, or in the setting itself."""
        for change in reversed(self.changes):
            depth = len(change.target)
            if depth <= len(steps) and all(
                mine in ("*", step) for mine, step in zip(change.target, steps, strict=False)
            ):
                return (*change.origin, *steps[depth:])
        return ("setting", *steps)

    def apply(self, change: _Change) -> None:
        """Set the value in all places that the change names."""
        places: list[Any] = [self.content]
        *way, last = change.target
        for depth, step in enumerate(way):
            following = change.target[depth + 1]
            inner: list[Any] = []
            for place in places:
                if step == "*" and isinstance(place, list):
                    inner += place
                elif isinstance(place, dict) and isinstance(step, str):
                    inner.append(place.setdefault(step, [] if isinstance(following, int) else {}))
                elif isinstance(place, list) and isinstance(step, int) and step < len(place):
                    inner.append(place[step])
                else:
                    raise self.document.error(f"the setting has no place {step!r} to set a value in", change.origin)
            places = inner
        for place in places:
            in_list = isinstance(place, list) and isinstance(last, int) and last < len(place)
            if not in_list and not (isinstance(place, dict) and isinstance(last, str)):
                raise self.document.error(f"the setting has no place {last!r} to set", change.origin)
            place[last] = copy.deepcopy(change.value)

    def convert(self) -> RunSetting:
        """Return the setting, checked."""
        setting = self.document.convert(RunSetting, content=self.content, origin_of=self.origin_of)
        with self._blamed():
            setting.check_content()
            setting.check_senders("training", "traces", "traffic", "patterns")
        with self._blamed("topology"):
            topology = build_topology(setting.topology)
        with self._blamed("training"):
            placed = place_jobs(setting.training, topology.hosts, setting.seed)
        with self._blamed():
            place_traces(setting.traces, placed, topology.hosts, setting.seed)
        for number, failing in enumerate(setting.failures):
            with self._blamed("failures", number, "nodes"):
                topology.between(*failing.nodes)
        for number, pattern in enumerate(setting.patterns):
            with self._blamed("patterns", number, "hosts"):
                pattern.check_hosts(topology.hosts)
        for number, traffic in enumerate(setting.traffic):
            with self._blamed("traffic", number, "load"):
                traffic.check_load(topology, setting.transports[traffic.transport])
        for number, spec in enumerate(setting.training):
            job = next(each for each in placed if each.spec is spec)
            with self._blamed("training", number, "model"):
                profile = job.profile
            with self._blamed("training", number, "stragglers" if spec.stragglers else "model"):
                step_s = spec.slowest_step_s(profile)
                check_within("the computing time of a step in seconds", step_s, SECONDS_MAX, "make it shorter")
            if spec.pipeline:
                with self._blamed("training", number, "pipeline"):
                    pipeline_of(job, topology)
            with self._blamed("training", number):
                check_messages(job, setting.transports[spec.transport])
        with self._blamed("engine"):
            setting.check_engine(setting.engine)
        with self._blamed():
            setting.check_jobs()
        return setting

    @contextmanager
    def _blamed(self, *steps: Step) -> Iterator[None]:
        """Turn a ValueError into an error that names a place in the file."""
        try:
            yield
        except DocumentError:  # of a profile's own file
            raise
        except ValueError as error:
            more = error.steps if isinstance(error, PlaceError) else ()
            raise self.document.error(str(error), self.origin_of((*steps, *more))) from None


def _runs(
    document: Document, experiment: Experiment, quick: bool, seeds: Sequence[int | None], engine: Fidelity | None
) -> Iterator[ExperimentRun]:
    selection = experiment.quick
    base = [_change(key, value, ("quick", "set")) for key, value in selection.set.items() if quick]
    choices = []
    for number, axis in enumerate(experiment.axes):
        only = selection.only.get(axis.name) if quick else None
        choices.append([(number, index) for index, point in enumerate(axis.points) if not only or point.name in only])
    for chosen in itertools.product(*choices):
        changes = list(base)
        for number, index in chosen:
            origin = ("axes", number, "points", index, "set")
            values = experiment.axes[number].points[index].set
            changes += [_change(key, value, origin) for key, value in values.items()]
        changed = _ChangedSetting(document, copy.deepcopy(experiment.setting), changes)
        for change in changes:
            changed.apply(change)
        point = {experiment.axes[number].name: experiment.axes[number].points[index].name for number, index in chosen}
        if engine is not None:
            changed.content["engine"] = engine
        for seed in seeds:
            if seed is not None:
                changed.content["seed"] = seed
            yield ExperimentRun(
                experiment=experiment.name, point=point, setting=changed.convert(), convergence=experiment.convergence
            )


def _change(key: str, value: Any, origin: Steps) -> _Change:
    target = tuple(int(word) if re.fullmatch("[0-9]{1,9}", word) else word for word in key.split("."))
    return _Change(target, value, (*origin, key))


def _check_names(document: Document, experiment: Experiment) -> None:
    """Reject unknown axes and points in figures, claims and the quick selection."""
    axes = {axis.name: axis for axis in experiment.axes}
    for number, known in enumerate(experiment.axes):
        if axes[known.name] is not known:
            raise document.error(f"two axes are called {known.name!r}; rename one of them", ("axes", number, "name"))

    def point(axis: str, name: str | None, steps: Steps) -> None:
        if axis not in axes:
            raise document.error(f"there is no axis {axis!r}{nearest(axis, axes)}", steps)
        names = [known.name for known in axes[axis].points]
        if name is not None and name not in names:
            raise document.error(f"axis {axis} has no point {name!r}{nearest(name, names)}", steps)

    for axis, names in experiment.quick.only.items():
        for name in names:
            point(axis, name, ("quick", "only", axis))
    for number, figure in enumerate(experiment.figures):
        for key in ("x", "series"):
            if getattr(figure, key) is not None:
                point(getattr(figure, key), None, ("figures", number, key))
        if figure.relative_to is not None:
            point(figure.series or figure.x, figure.relative_to, ("figures", number, "relative_to"))
        for axis, name in figure.where.items():
            point(axis, name, ("figures", number, "where", axis))
        shown = {figure.x, figure.series, *figure.where}
        for name, known in axes.items():
            if name not in shown and len(known.points) > 1:
                raise document.error(f"axis {name} is neither shown nor fixed; add it to where", ("figures", number))
    for number, claim in enumerate(experiment.claims):
        for key in ("ours", "theirs"):
            for axis, name in getattr(claim, key).items():
                point(axis, name, ("claims", number, key, axis))
