# SPDX-License-Identifier: Apache-2.0
"""Transports and disciplines of installed packages, found by entry points in the groups below.

They are loaded when this module is, because the types of an experiment's file and the compiled rules depend on them.
"""

import functools
import importlib.metadata
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from dlcp.inputs.error_text import nearest
from dlcp.sim.network.disciplines import BUILT_IN_DISCIPLINES, OwnDiscipline
from dlcp.sim.transports import specs as transports
from dlcp.sim.transports.specs import OwnTransport, TransportSpec

TRANSPORT_GROUP: Final = "dlcp.sim.transports"
DISCIPLINE_GROUP: Final = "dlcp.sim.disciplines"
OWN_SETTINGS_MAX: Final = 8
"""Most settings of a discipline of another package."""


def _loaded(group: str, base: type, taken: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield the subclasses of ``base`` in a group, by name: where each comes from, its name, and the class."""
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda each: each.name):
        where = f"{point.name!r} of the package {point.dist.name if point.dist else '?'} ({point.value}, {group})"
        try:
            kind = point.load()
        except AttributeError as error:
            raise ImportError(
                f"{where}: {error}; if the module is being imported, import dlcp.sim before it"
            ) from error
        if not isinstance(kind, type) or not issubclass(kind, base):
            raise ImportError(f"{where} is no subclass of {base.__module__}.{base.__qualname__}")
        if point.name in taken:
            raise ImportError(f"{where}: there is another one of this name; rename one of them")
        taken.add(point.name)
        yield where, point.name, kind


def _own_transports() -> Iterator[type[OwnTransport]]:
    known = {str(kind.__struct_config__.tag) for kind in vars(transports).values() if hasattr(kind, "disciplines")}
    for where, name, kind in _loaded(TRANSPORT_GROUP, OwnTransport, known):
        if kind.__struct_config__.tag != name:
            raise ImportError(f"{where} has the tag {kind.__struct_config__.tag!r}; give the entry point this name")
        yield kind


def _own_disciplines() -> Iterator[tuple[str, type[OwnDiscipline]]]:
    for where, name, kind in _loaded(DISCIPLINE_GROUP, OwnDiscipline, set(BUILT_IN_DISCIPLINES)):
        if len(kind.settings) > OWN_SETTINGS_MAX:
            raise ImportError(f"{where} has {len(kind.settings)} settings; at most {OWN_SETTINGS_MAX} are allowed")
        yield name, kind


OWN_TRANSPORTS: Final = tuple(_own_transports())
OWN_DISCIPLINES: Final = dict(_own_disciplines())
"""By name."""
if TYPE_CHECKING:
    AnyTransport = TransportSpec
else:
    AnyTransport = functools.reduce(operator.or_, OWN_TRANSPORTS, TransportSpec)
    """Any of the transports that are built in or installed."""


def setting_values(discipline: str, changed: Mapping[str, float]) -> tuple[float, ...]:
    """Return the values of a discipline's settings, padded with 0; ``changed`` replaces defaults.

    Raises
    ------
    ValueError
        There is no such discipline, or it has no such setting.
    """
    known = (*BUILT_IN_DISCIPLINES, *OWN_DISCIPLINES)
    if discipline not in known:
        raise ValueError(f"there is no discipline {discipline!r}{nearest(discipline, known)}")
    settings = OWN_DISCIPLINES[discipline].settings if discipline in OWN_DISCIPLINES else {}
    for name in changed:
        if name not in settings:
            others = nearest(name, settings) if settings else "; it has none"
            raise ValueError(f"settings: discipline {discipline} has no setting {name!r}{others}")
    values = [float(changed.get(name, default)) for name, default in settings.items()]
    return (*values, *[0.0] * (OWN_SETTINGS_MAX - len(values)))
