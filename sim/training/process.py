# SPDX-License-Identifier: Apache-2.0
"""A training job that runs: a SimPy process that submits steps and notes when they end."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from dlcp.sim.arithmetic import seconds_to_ps
from dlcp.sim.models.files import read_profile
from dlcp.sim.models.profile import StepProfile
from dlcp.sim.models.throughput import step_profile
from dlcp.sim.simulation import Process, Simulation
from dlcp.sim.training.job import TrainingJob
from dlcp.sim.training.placement import PlacedJob
from dlcp.sim.training.schedulers import piece_limit, pieces
from dlcp.sim.training.steps import STEPS_PER_GRAPH, step_graph
from numpy.typing import NDArray


@dataclass(slots=True)
class Progress:
    """What became of a job.

    Attributes
    ----------
    compute_s
        What a step would take without communication.
    step_s
        How long each step took, the forward pass after it included.
    """

    job: PlacedJob
    profile: StepProfile
    step_s: list[float] = field(default_factory=list)

    @property
    def compute_s(self) -> float:
        """Return how long a step of one worker computes."""
        return self.profile.compute_s


def profile_of(job: TrainingJob) -> StepProfile:
    """Return what a worker of a job does in a step.

    Raises
    ------
    ValueError
        There is no such model, nothing is published of it on that GPU, or the profile cannot be read.
    """
    if job.model.endswith((".yaml", ".yml", ".json")):
        return read_profile(Path(job.model))
    return step_profile(job.model, job.gpu, job.precision, job.batch)


def training(simulation: Simulation, progress: Progress) -> Process:
    """Train step by step; a step is a backward pass, the exchange, and the next forward pass, which waits for it."""
    env, job = simulation.env, progress.job
    spec = job.spec
    parts = pieces(
        spec.scheduler,
        progress.profile.layers,
        spec.bytes_per_value / spec.compression,
        piece_limit(spec),
        layer_queues=spec.layer_queues,
        magnitude_classes=spec.magnitude_classes,
    )
    factors = _factors(simulation, job)
    yield env.timeout(seconds_to_ps(job.start_s))
    before = int(env.now)
    for first in range(0, spec.steps, STEPS_PER_GRAPH):
        steps = step_graph(
            job,
            progress.profile,
            parts,
            factors[first : first + STEPS_PER_GRAPH],
            first,
            simulation.transports[spec.transport],
        )
        running = simulation.submit(steps.graph, label=(job.name, first))
        for end in steps.ends:
            yield running.nodes[end]
            progress.step_s.append((int(env.now) - before) / 1e12)
            before = int(env.now)
        yield running.closed if first + STEPS_PER_GRAPH >= spec.steps else running.done


def _factors(simulation: Simulation, job: PlacedJob) -> NDArray[np.float64]:
    """Return how many times as long as the profile each worker computes in each step, float64 (steps, workers)."""
    spec = job.spec
    random = simulation.random(3, job.number)
    # A log-normal of mean 1 whose deviation is `jitter`.
    sigma = math.sqrt(math.log1p(spec.jitter**2))
    factors = random.lognormal(-(sigma**2) / 2, sigma, (spec.steps, spec.workers))
    for straggler in spec.stragglers:
        factors[:, straggler.worker] *= straggler.factor
    return factors
