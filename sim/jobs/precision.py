# SPDX-License-Identifier: Apache-2.0
"""Precision in simulated training: how many bits of each value a step's messages have.

Real and simulated ranks choose alike (`dlcp.policies.arms`), and have one layout of messages (`dlcp.values.planes`). A
message that is encoded has fewer packets. Those of the upper plane are in drop class 0. Those of the lower plane are in
classes 1 to 7 and may be lost within the loss bound.

A job chooses when its first worker has finished a step: by then all averages of the step have been sent, and no message
of the next step has begun. So all messages of a step have the same precision.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlcp.policies.arms import ArmChooser, StepReport, arms_over_dlcp
from dlcp.sim.simulation import Simulation, SubmittedGraph

Precision = Literal["auto", "fast", 32, 16, 8, 4]
"""As in `dlcp.policies.arms.PRECISIONS`."""


class SimulatedPrecision:
    """Chooses, step by step, the precision of a job's messages.

    Parameters
    ----------
    value_bytes
        Bytes of a value in full precision.
    has_servers
        Whether servers own the shards: then all steps have the fewest bits that are allowed, as with real ranks.
    error_feedback
        Whether rounding errors are sent with the next step.
    """

    def __init__(self, precision: Precision, value_bytes: int, *, has_servers: bool, error_feedback: bool) -> None:
        arms = arms_over_dlcp(str(precision), error_feedback=error_feedback, has_server=has_servers)
        self._chooser = ArmChooser(arms)
        self._value_bytes = value_bytes
        self._arm = self._chooser.choose(0)
        self._reported: tuple[int, StepReport] | None = None

    @property
    def bits(self) -> int:
        """Bits per value in the current step."""
        return min(self._arm.bits, 8 * self._value_bytes)

    def learn(
        self, submitted: SubmittedGraph, records: NDArray[np.void], step: int, step_s: float, compute_s: float
    ) -> None:
        """Choose the precision of the next step.

        Parameters
        ----------
        records
            The graph's records at the end of the step.
        step_s, compute_s
            How long the step took, and for how long of that the slowest worker computed, in seconds.
        """
        nodes = submitted.graph.nodes
        sent = records[(submitted.packets > 0) & (nodes["step"] == step)]
        congested = bool(sent["congested"].any())
        before, self._reported = self._reported, None
        if before is not None:
            self._chooser.observe(*before)
        if self._chooser.wants(step):
            self._reported = step, StepReport(step_s, max(0.0, step_s - compute_s), congested, congested)
        self._arm = self._chooser.choose(step + 1)

    def apply(self, simulation: Simulation, submitted: SubmittedGraph) -> None:
        """Set the precision of a graph's messages that have not begun."""
        simulation.encode(submitted, self.bits, self._value_bytes)
