# SPDX-License-Identifier: Apache-2.0
"""Times a script's steps, chooses settings by them, and tries these in turn with those that were set.

So nothing is advised that is slower here and now: the rules say what should be tried, and the trial has the last word.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist

import dlcp.torch
from dlcp.train.headroom import ADVISED, DLCP, FRAMEWORK, NONE
from dlcp.train.measurement import Measurement, in_turn
from dlcp.tuning.rules import Advice, Settings, decide
from dlcp.tuning.survey import Survey, figures_of_surveys


class AdvisedMeasurement(Measurement):
    """The measurement of one model, and of the settings that follow from it; all ranks make one.

    Attributes
    ----------
    advice
        What was chosen; None before, and where DLCP could not be used.
    """

    advice: Advice | None = None

    def order(self, steps: int) -> Iterator[tuple[str, bool]]:
        """Yield the way of each step and whether it counts; between the first part and the second, choose."""
        yield from in_turn([NONE, FRAMEWORK, *self._states], steps)
        state = self._states.get(DLCP)
        if state is None or not state.active:
            return
        self.advice = self._decide(state)
        if self.advice.changes and self.join(ADVISED, with_settings(state.options, self.advice.settings)):
            yield from in_turn([DLCP, ADVISED], 2 * steps // 3)

    def report(self) -> dict[str, Any]:
        """Return what the launcher is told."""
        return super().report() | {"advice": None if self.advice is None else self.advice.as_json()}

    def _decide(self, state: dlcp.torch.State) -> Advice:
        group = self.model.process_group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        assert state.endpoint
        mine = Survey.of(rank, ranks, state.ledger, state.endpoint)
        told: list[Any] = [None] * ranks
        dist.all_gather_object(told, (mine, self.seconds[DLCP], self.seconds[NONE]), group=group)
        step_s, floor_s = (
            median(max(step) for step in zip(*(each[which] for each in told), strict=False)) for which in (1, 2)
        )
        figures = figures_of_surveys(
            [each[0] for each in told],
            state.hosts,
            gradient_bytes=self.gradient_bytes,
            step_s=step_s,
            waited_s=max(0.0, step_s - floor_s),
        )
        return decide(figures, settings_of(state.options))


def settings_of(options: dlcp.torch.Options) -> Settings:
    """Return those of some options that are chosen."""
    return Settings(
        **{name: getattr(options, name) for name in ("loss_bound", "protected_share", "compression", "collective")}
    )


def with_settings(options: dlcp.torch.Options, settings: Settings) -> dlcp.torch.Options:
    """Return options with those changed that were chosen; the socket's port is another, for the first has one."""
    host = options.bind.rpartition(":")[0]
    return replace(
        options,
        loss_bound=settings.loss_bound,
        protected_share=settings.protected_share,
        compression=settings.compression,
        collective=settings.collective,
        bind=f"{host}:0" if host else "",
    )
