# SPDX-License-Identifier: Apache-2.0
"""Time the steps of an unchanged script: gradients are averaged by the framework, in DLCP's ways, and not at all.

Without averaging every rank keeps its own gradients, so the replicas drift apart. This is therefore no training, and
the script ends after the last step.
"""

import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.policies.arms import Arm, Route
from dlcp.session.options import DLCP_ROUTE, FRAMEWORK_ROUTE
from dlcp.train.headroom import NONE, UNCHANGED, WARM_UP_ROUNDS


class MeasurementDoneError(SystemExit):
    """Ends the script, with exit status 0, once everything is measured."""


class Measurement:
    """The measurement of one model; all ranks make one, at the same forward pass.

    Parameters
    ----------
    model
        A model without a communication hook.
    steps
        Number of steps to time, equally many each way.
    """

    def __init__(self, model: DistributedDataParallel, steps: int) -> None:
        self.model = model
        self.backend = dist.get_backend(model.process_group)
        self.seconds: dict[str, list[float]] = {}
        self.why_not: str | None = None
        self._arms: dict[str, Arm] = {}
        """DLCP's ways, by name."""
        self.steps_factors: dict[str, float] = {}
        """What DLCP chooses from without a measurement, the preferred way first: how many more steps each takes."""
        self._state = self._join()
        self._ways = in_turn([NONE, UNCHANGED, *self._arms], steps)
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
            self._combine()
            raise MeasurementDoneError(0)
        self._way, self._counts = following
        if self._way in self._arms and self._state and self._state.session and self._state.session.chooser:
            self._state.session.chooser.fix(self._arms[self._way])
        # Without averaging ranks run ahead of each other; the next step must not include that.
        dist.barrier(model.process_group)
        self._began_s = self._now_s()

    def _combine(self) -> None:
        """Replace the time of each step by that of its slowest rank, so that all machines report the same.

        If another rank has ended, this one's times are left.
        """
        found: list[Any] = [None] * dist.get_world_size(self.model.process_group)
        device = next(self.model.parameters()).device
        try:
            # Objects travel through the current device, which a script need not have set.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                dist.all_gather_object(found, self.seconds, self.model.process_group)
        except RuntimeError:
            return
        self.seconds = {
            way: [max(step) for step in zip(*(each[way] for each in found), strict=True)] for way in found[0]
        }

    def close(self, reason: str | None) -> None:
        """Leave the other ranks."""
        state = self._state
        if state is None:
            return
        if not state.active:  # all ranks fell back during the measurement: the times are not DLCP's
            self.why_not = state.reason
            self.seconds = {way: seconds for way, seconds in self.seconds.items() if way not in self._arms}
        state.close(reason)

    def _join(self) -> dlcp.torch.State | None:
        """Return the state that averages with DLCP; on failure return None and set :attr:`why_not`."""
        options = dlcp.torch.Options()
        state = dlcp.torch.State(options.with_(route=DLCP_ROUTE) if options.route == FRAMEWORK_ROUTE else options)
        try:
            state.attach(self.model)
        except ValueError as error:
            self.why_not = str(error)
            return None
        if not state.active:
            self.why_not = state.reason
            state.close()
            return None
        assert state.session
        assert state.session.chooser
        for arm in state.session.chooser.arms:
            name = UNCHANGED if arm.route is Route.FRAMEWORK else f"{arm.bits} bits"
            self.steps_factors[name] = arm.steps_factor
            if arm.route is Route.DLCP:
                self._arms[name] = arm
        return state

    def report(self) -> dict[str, Any]:
        """Return the report for the launcher."""
        trained = [each for each in self.model.module.parameters() if each.requires_grad]
        return {
            "model": type(self.model.module).__name__,
            "gradient_bytes": sum(each.numel() * each.element_size() for each in trained),
            "backend": self.backend,
            "seconds": self.seconds,
            "steps_factors": self.steps_factors,
            "why_not": self.why_not,
        }

    def _average(self, _: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._way == NONE:
            return dlcp.torch.noop_hook(None, bucket)
        if self._way in self._arms and self._state:
            return dlcp.torch.hook(self._state, bucket)
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
