# SPDX-License-Identifier: Apache-2.0
"""Averaging from within a compiled graph: a callback for each gradient hands it over, one more waits for all."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dlcp.session.group import Group

_registered: "WeakKeyDictionary[Group, list[str]]" = WeakKeyDictionary()
"""The parameters of each group. A group takes them once, and what averages may be made or loaded again."""


class GraphAverager:
    """Averages over a group what a graph's callbacks hand over; for one model at a time.

    Parameters
    ----------
    group
        The ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._step: dict[str, NDArray[Any]] = {}

    def register(self, names: Sequence[str]) -> None:
        """Register the parameters, in forward order.

        Raises
        ------
        ValueError
            The group has the parameters of another model; the message names some.
        """
        known = _registered.get(self.group)
        if known is None:
            self.group.register(names)
            _registered[self.group] = list(names)
        elif list(names) != known:
            odd = sorted(set(names) ^ set(known)) or names
            raise ValueError(
                f"the group averages the gradients of another model, which differs in {', '.join(odd[:3])}; join "
                "another group for this one"
            )

    def hand_over(self, name: str, gradient: Any) -> None:
        """Start to average a gradient."""
        self._step[name] = np.array(gradient)  # the framework's own memory is read only, or is used again
        self.group.start(name, self._step[name])

    def collect(self, names: Sequence[str]) -> list[NDArray[Any]]:
        """End the step, and return the averages of some parameters."""
        self.group.end_step()
        return [self._step.pop(name) for name in names]
