# SPDX-License-Identifier: Apache-2.0
"""Experiments from files, each combination checked before anything runs; errors name line and nearest key."""

import copy
import itertools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from dlcp.sim.experiment import Axis, Experiment, Run, Setting
from dlcp.sim.topology.build import build
from dlcp.sim.topology.network import TopologyError
from dlcp.sim.training.placement import place
from dlcp.sim.training.process import profile_of

from dlcp.document import Document, DocumentError, Step
from dlcp.suggestion import nearest


@dataclass(frozen=True, slots=True)
class _Change:
    """A value that is set, and where in the file that is said."""

    target: tuple[Step, ...]
    value: Any
    said: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Described:
    """An experiment with its runs."""

    experiment: Experiment
    runs: tuple[Run, ...]


def read(path: Path, *, quick: bool = False, seeds: Sequence[int] = ()) -> Described:
    """Read an experiment.

    Parameters
    ----------
    quick
        Whether only its quick selection is meant.
    seeds
        Others than the file's.

    Raises
    ------
    DocumentError
        The message names the file, the line, and what is wrong there.
    """
    document = Document(path)
    _refuse_unknown(document, document.content, Experiment, ())
    experiment = _convert(document, document.content, Experiment, ())
    _check_names(document, experiment)
    runs = tuple(_runs(document, experiment, quick, seeds or experiment.seeds or (None,)))
    names = [run.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise document.error(f"two combinations of points are both called {twice[0]!r}", ("axes",))
    return Described(experiment, runs)


def _runs(document: Document, experiment: Experiment, quick: bool, seeds: Sequence[int | None]) -> Iterator[Run]:
    selection = experiment.quick
    base = [_Change(_steps(key), value, ("quick", "set", key)) for key, value in selection.set.items() if quick]
    choices = []
    for number, axis in enumerate(experiment.axes):
        only = selection.only.get(axis.name) if quick else None
        choices.append([(number, index) for index, point in enumerate(axis.points) if not only or point.name in only])
    for chosen in itertools.product(*choices):
        changes = list(base)
        for number, index in chosen:
            values = experiment.axes[number].points[index].set
            said = ("axes", number, "points", index, "set")
            changes += [_Change(_steps(key), value, (*said, key)) for key, value in values.items()]
        content = copy.deepcopy(experiment.setting)
        for change in changes:
            _apply(document, content, change)
        point = {experiment.axes[number].name: experiment.axes[number].points[index].name for number, index in chosen}
        for seed in seeds:
            if seed is not None:
                content["seed"] = seed
            setting = _setting(document, content, changes)
            yield Run(experiment=experiment.name, point=point, setting=setting, convergence=experiment.convergence)


def _setting(document: Document, content: Any, changes: Sequence[_Change]) -> Setting:
    """Return a setting, or the error at the place in the file that is to blame."""

    def blame(steps: Sequence[Step]) -> tuple[Step, ...]:
        for change in reversed(changes):
            if _covers(change.target, steps):
                return (*change.said, *steps[len(change.target) :])
        return ("setting", *steps)

    _refuse_unknown(document, content, Setting, (), blame)
    setting: Setting = _convert(document, content, Setting, (), blame)
    try:
        network = build(setting.topology)
    except TopologyError as error:
        raise document.error(str(error), blame(("topology",))) from None
    try:
        place(setting.training, network.hosts, setting.seed)
    except ValueError as error:
        raise document.error(str(error), blame(("training",))) from None
    for number, failing in enumerate(setting.failures):
        try:
            network.between(*failing.nodes)
        except TopologyError as error:
            raise document.error(str(error), blame(("failures", number, "nodes"))) from None
    for number, job in enumerate(setting.training):
        try:
            profile_of(job)
        except DocumentError:
            raise
        except ValueError as error:
            raise document.error(str(error), blame(("training", number, "model"))) from None
    _check_transports(document, setting, blame)
    return setting


def _check_transports(document: Document, setting: Setting, blame: Any) -> None:
    for place_name in ("training", "traffic"):
        for number, user in enumerate(getattr(setting, place_name)):
            if user.transport not in setting.transports:
                raise document.error(
                    f"there is no transport {user.transport!r}{nearest(user.transport, setting.transports)}",
                    blame((place_name, number, "transport")),
                )
    names = [*(job.name for job in setting.training), *(traffic.name for traffic in setting.traffic)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise document.error(f"two jobs or kinds of traffic are called {twice!r}; names have to differ", ("setting",))


def _check_names(document: Document, experiment: Experiment) -> None:
    """Refuse axes and points that figures, claims and the quick selection name and that there are not."""
    axes = {axis.name: axis for axis in experiment.axes}

    def point(axis: str, name: str | None, steps: tuple[Step, ...]) -> None:
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
        _check_fixed(document, axes, figure.where, {figure.x, figure.series}, number)
    for number, claim in enumerate(experiment.claims):
        for key in ("ours", "theirs"):
            for axis, name in getattr(claim, key).items():
                point(axis, name, ("claims", number, key, axis))


def _check_fixed(
    document: Document, axes: Mapping[str, Axis], where: Mapping[str, str], shown: set[str | None], number: int
) -> None:
    for name, axis in axes.items():
        if name not in shown and name not in where and len(axis.points) > 1:
            raise document.error(f"axis {name} is neither shown nor fixed by where", ("figures", number))


def _steps(key: str) -> tuple[Step, ...]:
    return tuple(int(word) if word.isdigit() else word for word in key.split("."))


def _covers(target: Sequence[Step], steps: Sequence[Step]) -> bool:
    return len(target) <= len(steps) and all(mine in ("*", step) for mine, step in zip(target, steps, strict=False))


def _apply(document: Document, content: Any, change: _Change) -> None:
    """Set a value in what a file says of the setting."""
    places = [content]
    *way, last = change.target
    for depth, step in enumerate(way):
        following = change.target[depth + 1]
        inner: list[Any] = []
        for place_ in places:
            if step == "*" and isinstance(place_, list):
                inner += place_
            elif isinstance(place_, dict) and isinstance(step, str):
                inner.append(place_.setdefault(step, [] if isinstance(following, int) else {}))
            elif isinstance(place_, list) and isinstance(step, int) and step < len(place_):
                inner.append(place_[step])
            else:
                raise document.error(f"the setting has no place {step!r} to set something in", change.said)
        places = inner
    for place_ in places:
        in_list = isinstance(place_, list) and isinstance(last, int) and last < len(place_)
        if in_list or (isinstance(place_, dict) and isinstance(last, str)):
            place_[last] = copy.deepcopy(change.value)
        else:
            raise document.error(f"the setting has no place {last!r} to set", change.said)


def _same(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(steps)


def _convert(document: Document, content: Any, kind: Any, steps: tuple[Step, ...], blame: Any = _same) -> Any:
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, place_ = str(error).partition(" - at `$")
        raise document.error(message, blame((*steps, *_path(place_.rstrip("`"), content)))) from None


def _path(place_: str, content: Any) -> tuple[Step, ...]:
    """Return the steps of msgspec's ``.a[0].b``; what it does not name (``[...]``, a dict's member) ends them."""
    steps: list[Step] = []
    for word in place_.replace("[", ".[").split("."):
        if not word:
            continue
        if word.startswith("["):
            if not word[1:-1].isdigit():
                break
            steps.append(int(word[1:-1]))
        else:
            steps.append(word)
    return tuple(steps)


def _refuse_unknown(document: Document, value: Any, kind: Any, steps: tuple[Step, ...], blame: Any = _same) -> None:
    """Refuse names that there are not, of fields or as values, at their own line, with those that look like them."""
    kind = _chosen(document, value, kind, steps, blame)
    arguments = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        hints = {field.name: field.type for field in msgspec.structs.fields(kind)}
        tag = kind.__struct_config__.tag_field
        for name, inner in value.items():
            if name == tag:
                continue
            if name not in hints:
                raise document.error(f"there is no field {name!r}{nearest(name, hints)}", blame((*steps, name)))
            _refuse_unknown(document, inner, hints[name], (*steps, name), blame)
    elif typing.get_origin(kind) is typing.Literal and value not in arguments and steps:
        known = [str(item) for item in arguments]
        raise document.error(f"there is no {steps[-1]} {value!r}{nearest(str(value), known)}", blame(steps))
    elif typing.get_origin(kind) is tuple and isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_unknown(document, inner, arguments[0], (*steps, index), blame)
    elif typing.get_origin(kind) is dict and isinstance(value, dict):
        for name, inner in value.items():
            _refuse_unknown(document, inner, arguments[1], (*steps, name), blame)


def _chosen(document: Document, value: Any, kind: Any, steps: tuple[Step, ...], blame: Any) -> Any:
    """Return the alternative of a union that a value's ``kind`` names; other types as they are."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    records = [item for item in typing.get_args(kind) if isinstance(item, type) and issubclass(item, msgspec.Struct)]
    tagged = {str(item.__struct_config__.tag): item for item in records if item.__struct_config__.tag is not None}
    if not tagged or not isinstance(value, dict):
        return records[0] if len(records) == 1 else kind
    name = value.get("kind")
    if name not in tagged:
        said = (
            f"there is no kind {name!r}{nearest(str(name), tagged)}"
            if name
            else f"kind is missing{nearest('', tagged)}"
        )
        raise document.error(said, blame((*steps, "kind") if name else steps))
    return tagged[str(name)]
