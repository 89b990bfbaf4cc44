# SPDX-License-Identifier: Apache-2.0
"""Time the steps of an unchanged script, averaging gradients in turn with the framework, with DLCP, and not at all.

Without averaging every rank keeps its own gradients, so the replicas drift apart. This is therefore no training, and
the script ends after the last step. :class:`AdvisedMeasurement` then chooses settings from the measurement, and times
steps with them too: rules say what to try, the trial decides.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.session.options import DLCP_ROUTE
from dlcp.train.headroom import ADVISED, DLCP, NONE, UNCHANGED, WARM_UP_ROUNDS
from dlcp.tuning.rules import Advice, Settings, Survey, decide, figures_of_surveys


class MeasurementDoneError(SystemExit):
    """Ends the script, with exit status 0, once everything is measured."""


class Measurement:
    """The measurement of one model; all ranks make one, at the same forward pass.

    Parameters
    ----------
    model
        A model without a communication hook.
    steps
        Number of steps to time, a third of them each way.
    """

    def __init__(self, model: DistributedDataParallel, steps: int) -> None:
        self.model = model
        self.backend = dist.get_backend(model.process_group)
        self.seconds: dict[str, list[float]] = {}
        self.why_not: str | None = None
        self._states: dict[str, dlcp.torch.State] = {}
        self.join(DLCP, dlcp.torch.Options())
        self._ways = self.order(steps)
        self._way: str | None = None
        self._counts = False
        self._began_s = 0.0
        model.register_comm_hook(None, self._average)

    def before_step(self, model: DistributedDataParallel) -> None:
        """End one step and begin the next; called before each synchronised forward pass.

        Raises
        ------
        MeasurementDoneError
            The last step has ended.
        """
        if model is not self.model:
            return
        seconds = self._now_s() - self._began_s
        if self._way and self._counts:
            self.seconds.setdefault(self._way, []).append(seconds)
        following = next(self._ways, None)
        if following is None:
            raise MeasurementDoneError(0)
        self._way, self._counts = following
        # Without averaging ranks run ahead of each other; the next step must not include that.
        dist.barrier(model.process_group)
        self._began_s = self._now_s()

    def close(self, reason: str | None) -> None:
        """Leave the other ranks."""
        for way, state in self._states.items():
            if not state.active:  # all ranks fell back during the measurement: the times are not DLCP's
                self.why_not = state.reason
                self.seconds.pop(way, None)
            state.close(reason)

    def order(self, steps: int) -> Iterator[tuple[str, bool]]:
        """Yield the way of each step and whether it counts; all ranks advance the iterator together."""
        yield from in_turn([NONE, UNCHANGED, *self._states], steps)

    def join(self, way: str, options: dlcp.torch.Options) -> dlcp.torch.State | None:
        """Add DLCP with these options as a way. Return its state; on failure return None and set :attr:`why_not`."""
        state = dlcp.torch.State(options.with_(route=DLCP_ROUTE))
        try:
            state.attach(self.model)
        except ValueError as error:
            self.why_not = str(error)
            return None
        if not state.active:
            self.why_not = state.reason
            state.close()
            return None
        self._states[way] = state
        return state

    @property
    def gradient_bytes(self) -> int:
        """Size of a rank's gradients in a step."""
        return sum(p.numel() * p.element_size() for p in self.model.module.parameters() if p.requires_grad)

    def report(self) -> dict[str, Any]:
        """Return the report for the launcher."""
        return {
            "model": type(self.model.module).__name__,
            "gradient_bytes": self.gradient_bytes,
            "backend": self.backend,
            "seconds": self.seconds,
            "why_not": self.why_not,
        }

    def _average(self, _: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._way == NONE:
            return dlcp.torch.noop_hook(None, bucket)
        if self._way in self._states:
            return dlcp.torch.hook(self._states[self._way], bucket)
        return allreduce_hook(self.model.process_group, bucket)

    def _now_s(self) -> float:
        if self.model.device_type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()


def in_turn(ways: list[str], steps: int) -> Iterator[tuple[str, bool]]:
    """Yield the way of each step and whether it counts: rounds of all ways, shuffled in the same way on all ranks."""
    rng = random.Random(0)
    rounds = max(1, steps // len(ways))
    for number in range(WARM_UP_ROUNDS + rounds):
        for way in rng.sample(ways, len(ways)):
            yield way, number >= WARM_UP_ROUNDS


class AdvisedMeasurement(Measurement):
    """The measurement of one model, and a trial of the settings chosen from it; all ranks make one.

    Attributes
    ----------
    advice
        The advice; None until it is made, and where DLCP could not be used.
    """

    advice: Advice | None = None

    def order(self, steps: int) -> Iterator[tuple[str, bool]]:
        """Yield the way of each step and whether it counts; choose settings between the two parts."""
        yield from in_turn([NONE, UNCHANGED, *self._states], steps)
        state = self._states.get(DLCP)
        if state is None or not state.active:
            return
        self.advice = self._decide(state)
        if self.advice.changes and self.join(ADVISED, with_settings(state.options, self.advice.settings)):
            yield from in_turn([DLCP, ADVISED], 2 * steps // 3)

    def report(self) -> dict[str, Any]:
        """Return the report for the launcher."""
        return super().report() | {"advice": None if self.advice is None else self.advice.as_json()}

    def _decide(self, state: dlcp.torch.State) -> Advice:
        group = self.model.process_group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        assert state.endpoint
        mine = Survey.of(rank, ranks, state.ledger, state.endpoint.connection)
        surveyed: list[Any] = [None] * ranks
        dist.all_gather_object(surveyed, (mine, self.seconds[DLCP], self.seconds[NONE]), group=group)
        step_s, floor_s = (
            median(max(step) for step in zip(*(each[which] for each in surveyed), strict=False)) for which in (1, 2)
        )
        figures = figures_of_surveys(
            [each[0] for each in surveyed],
            state.hosts,
            gradient_bytes=self.gradient_bytes,
            step_s=step_s,
            waited_s=max(0.0, step_s - floor_s),
        )
        return decide(figures, Settings.of(state.options))


def with_settings(options: dlcp.torch.Options, settings: Settings) -> dlcp.torch.Options:
    """Return options with the chosen settings, and with a free port, because the first State still holds its own."""
    host = options.bind.rpartition(":")[0]
    return options.with_(**asdict(settings), bind=f"{host}:0" if host else "")
