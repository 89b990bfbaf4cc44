# SPDX-License-Identifier: Apache-2.0
"""Which hosts a job gets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dlcp.sim.training.job import TrainingJob


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A job with its hosts.

    Parameters
    ----------
    name
        Of this copy.
    number
        Among all jobs of the experiment.
    """

    spec: TrainingJob
    name: str
    number: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    start_s: float


def place(jobs: Sequence[TrainingJob], hosts: int, seed: int) -> list[PlacedJob]:
    """Give every copy of every job hosts that no other has.

    Servers come from between the workers, so that they do not all hang at the same switch.

    Raises
    ------
    ValueError
        There are not enough hosts.
    """
    needed = sum((job.workers + job.servers) * job.copies for job in jobs)
    if needed > hosts:
        raise ValueError(f"the jobs need {needed} hosts and the topology has {hosts}")
    free = list(range(hosts))
    placed: list[PlacedJob] = []
    for job in jobs:
        for copy in range(job.copies):
            size = job.workers + job.servers
            taken = _choose(free, size, job, np.random.default_rng([seed, 0x91ACE, len(placed)]))
            free = [host for host in free if host not in set(taken)]
            at = {round((index + 0.5) * size / job.servers) % size for index in range(job.servers)}
            placed.append(
                PlacedJob(
                    job,
                    job.name if job.copies == 1 else f"{job.name}{copy}",
                    len(placed),
                    tuple(host for index, host in enumerate(taken) if index not in at),
                    tuple(host for index, host in enumerate(taken) if index in at),
                    job.start_s + copy * job.stagger_s,
                )
            )
    return placed


def _choose(free: list[int], size: int, job: TrainingJob, random: np.random.Generator) -> list[int]:
    if job.placement == "packed":
        return free[:size]
    if job.placement == "spread":
        return [free[index * len(free) // size] for index in range(size)]
    return [free[int(index)] for index in random.permutation(len(free))[:size]]
