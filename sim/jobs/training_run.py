# SPDX-License-Identifier: Apache-2.0
"""Run a training job: submit its steps, whose outcome decides what the next ones send."""

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dlcp.policies.arms import ArmChooser, StepReport, arms_over_dlcp
from dlcp.sim.jobs.learning import GradientExchange, SimulatedLearning, StepOutcome, TaskTrainer
from dlcp.sim.jobs.run_size import step_nodes, steps_per_graph
from dlcp.sim.jobs.step_graph import pieces_of, step_graph
from dlcp.sim.jobs.training import PlacedJob, Precision, computing_factors
from dlcp.sim.simulation import Process, Simulation, SubmittedGraph
from dlcp.sim.transports.specs import DlcpTransport
from dlcp.values.planes import FULL_BITS


class SimulatedPrecision:
    """Chooses, step by step, the precision of a job's messages: how many bits of each value they have.

    Real and simulated ranks choose alike (`dlcp.policies.arms`), and have one layout of messages
    (`dlcp.values.planes`). A message that is encoded has fewer packets. Those of the upper plane are in drop class 0.
    Those of the lower plane are in classes 1 to 7 and may be lost within the loss bound.

    A job chooses when its first worker has finished a step: by then all averages of the step have been sent, and no
    message of the next step has begun. So all messages of a step have the same precision.

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


def training(simulation: Simulation, job: PlacedJob, skip_steps: Callable[[PlacedJob], None] | None = None) -> Process:
    """Run a job's steps, and note when they end.

    Parameters
    ----------
    skip_steps
        Called after each graph to skip steps; see `dlcp.sim.jobs.skipping`.
    """
    env, spec = simulation.env, job.spec
    parts = pieces_of(spec, job.profile.layers)
    factors = computing_factors(simulation.scenario.seed, job)
    weights = spec.shard_weights(job.workers, simulation.topology)
    precision = _precision(simulation, job)
    learning = _learning(simulation, job) if spec.learn else None
    together = steps_per_graph(step_nodes(job, parts))
    yield from simulation.until(job.start_s)
    job.begin(simulation)
    first = 0
    while first < spec.steps:
        steps = step_graph(
            job,
            parts,
            factors[first : first + together],
            first,
            simulation.transports[spec.transport],
            weights=weights,
            watch_workers=precision is not None,
        )
        running = simulation.submit(steps.graph, label=(job.name, first), keeps_outcomes=learning is not None)
        if precision:
            precision.apply(simulation, running)
        for step, end, worker_ends in zip(itertools.count(first), steps.ends, steps.worker_ends):
            if precision:
                job.bits.append(precision.bits)
                yield env.any_of([running.nodes[node] for node in worker_ends.tolist()])
                before_ps = job.end_ps[-1] if job.end_ps else job.begin_ps
                taken_s = (int(env.now) + job.skipped_ps - before_ps) / 1e12
                compute_s = job.compute_s * float(factors[step].max())
                precision.learn(running, simulation.records(running), step, taken_s, compute_s)
                precision.apply(simulation, running)
            yield running.nodes[end]
            job.end_step(simulation)
            if learning:
                outcome = _step_outcome(simulation, running, step, job.bits[-1] if job.bits else FULL_BITS)
                nodes, seconds = running.graph.nodes, (job.end_ps[-1] - job.begin_ps) / 1e12
                learning.finish_step(nodes, outcome, step, seconds, last=step + 1 == spec.steps)
        yield running.done
        if skip_steps:
            skip_steps(job)
        first = len(job.end_ps)
    yield running.closed


def _precision(simulation: Simulation, job: PlacedJob) -> SimulatedPrecision | None:
    """Return the object that chooses the precision of a job's messages; None for full precision."""
    spec, transport = job.spec, simulation.scenario.transports[job.spec.transport]
    if spec.precision == FULL_BITS or not isinstance(transport, DlcpTransport):
        return None
    return SimulatedPrecision(
        spec.precision,
        spec.bytes_per_value,
        has_servers=bool(job.servers),
        error_feedback=transport.error_feedback,
    )


def _learning(simulation: Simulation, job: PlacedJob) -> SimulatedLearning:
    """Return the training of a job."""
    spec = job.spec
    assert spec.learn is not None
    trainer = TaskTrainer(spec.learn, spec.optimizer, spec.workers, spec.steps, simulation.scenario.seed)
    transport = simulation.scenario.transports[spec.transport]
    exchange = None
    if isinstance(transport, DlcpTransport) and (spec.loss_bound > 0 or spec.precision != FULL_BITS):
        exchange = GradientExchange(
            trainer.sizes,
            spec.workers,
            value_bytes=spec.bytes_per_value,
            payload_bytes=transport.packet_bytes - transport.header_bytes,
            error_feedback=transport.error_feedback,
        )
    return SimulatedLearning(spec.learn, trainer, job.workers, exchange, job.curve)


def _step_outcome(simulation: Simulation, running: SubmittedGraph, step: int, bits: int) -> StepOutcome:
    """Return what has become of the messages of a step with ``bits`` bits per value."""
    lacking = simulation.outcomes(running, np.flatnonzero(running.graph.nodes["step"] == step))
    return StepOutcome(running.sizes, bits, lacking)
