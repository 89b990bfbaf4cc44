# SPDX-License-Identifier: Apache-2.0
"""A scenario's own jobs, background and failures, run to the end: one call, one result."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dlcp.sim.counters import NAMES
from dlcp.sim.engine import EngineName
from dlcp.sim.jobs import StepTimes, background, collective_job, failure
from dlcp.sim.scenario import BackgroundSpec, CollectiveJob, Scenario
from dlcp.sim.simulation import Running, Simulation
from dlcp.sim.transports import Dlcp, TransportSpec
from numpy.typing import NDArray

MESSAGE: np.dtype[Any] = np.dtype(
    [
        ("label", np.int32),
        ("step", np.int32),
        ("source", np.int32),
        ("target", np.int32),
        ("size_bytes", np.int64),
        ("begin_ps", np.int64),
        ("end_ps", np.int64),
        ("packets", np.int32),
        ("missing_packets", np.int32),
        ("sent_packets", np.int32),
    ]
)
"""What became of a message: begun when it could be sent, ended when its target had what it needed."""


@dataclass(slots=True)
class Result:
    """What came out of a scenario.

    Attributes
    ----------
    end_ps
        When the last event happened.
    counts
        Everything that was counted, by name; see `dlcp.sim.counters`.
    drops_by_class
        Packets dropped, by drop class 0 to 7.
    steps
        Of each job.
    messages
        `MESSAGE` (n,), in the order in which graphs were forgotten.
    labels
        Names of jobs and background, by the number in ``messages``.
    lost_packets
        Of each job: packets whose values never arrived. With a transport that has error feedback those of the last
        step only, for what is missing in a step goes with the next one's values.
    wall_s
        How long the run took; the only number here that differs from run to run.
    """

    end_ps: int
    counts: dict[str, int]
    drops_by_class: list[int]
    steps: list[StepTimes]
    messages: NDArray[Any]
    labels: list[str]
    lost_packets: dict[str, int]
    wall_s: float

    @property
    def hops(self) -> int:
        """Return how many times a packet, data or control, was sent over a link."""
        return self.counts["hops_data"] + self.counts["hops_control"]


@dataclass(slots=True)
class _Collector:
    labels: list[str]
    keep_messages: bool
    parts: list[NDArray[Any]] = field(default_factory=list)
    missing: dict[tuple[str, int], int] = field(default_factory=dict)

    def __call__(self, running: Running, records: NDArray[Any]) -> None:
        self.missing[running.label] = self.missing.get(running.label, 0) + int(records["missing_packets"].sum())
        if self.keep_messages:
            self._keep(running, records)

    def lost(self, job: CollectiveJob, transport: TransportSpec) -> int:
        """Return how many packets of a job have lost their values for good."""
        steps = [packets for (name, _), packets in sorted(self.missing.items()) if name == job.name]
        if isinstance(transport, Dlcp) and transport.error_feedback:
            return sum(steps[-1:])
        return sum(steps)

    def _keep(self, running: Running, records: NDArray[Any]) -> None:
        nodes = running.graph.nodes
        sent = nodes["size_bytes"] > 0
        rows = np.zeros(int(sent.sum()), MESSAGE)
        name, rows["step"] = running.label
        rows["label"] = self.labels.index(name)
        for column in ("source", "target", "size_bytes"):
            rows[column] = nodes[column][sent]
        for column in ("begin_ps", "end_ps", "packets", "missing_packets", "sent_packets"):
            rows[column] = records[column][sent]
        self.parts.append(rows)


def simulate(scenario: Scenario, *, engine: EngineName = "auto", keep_messages: bool = True) -> Result:
    """Run a scenario; see `Simulation` for one's own jobs.

    Parameters
    ----------
    keep_messages
        Whether ``messages`` is collected; without it memory holds only what is in flight.

    Raises
    ------
    ValueError
        The scenario contradicts itself.
    """
    check(scenario)
    labels = [spec.name for spec in _senders(scenario)]
    collector = _Collector(labels, keep_messages)
    simulation = Simulation(scenario, engine=engine, on_records=collector)
    steps = [StepTimes(job.name) for job in scenario.jobs]
    for number, job in enumerate(scenario.jobs):
        simulation.process(collective_job(simulation, job, number, steps[number]))
    for number, flows in enumerate(scenario.background):
        simulation.process(background(simulation, flows, number))
    for wrong in scenario.failures:
        simulation.process(failure(simulation, wrong))
    began = time.perf_counter()
    simulation.run()
    wall_s = time.perf_counter() - began
    counts = simulation.engine.counts
    return Result(
        simulation.engine.now_ps,
        {name: int(counts[cell]) for name, cell in NAMES.items() if name != "drops_by_class"},
        counts[NAMES["drops_by_class"] :].tolist(),
        steps,
        np.concatenate(collector.parts) if collector.parts else np.zeros(0, MESSAGE),
        labels,
        {job.name: collector.lost(job, scenario.transports[job.transport]) for job in scenario.jobs},
        wall_s,
    )


def check(scenario: Scenario) -> None:
    """Refuse names that nothing has, and names that two have.

    Raises
    ------
    ValueError
        The message says which.
    """
    names = [spec.name for spec in _senders(scenario)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two jobs or backgrounds are called {twice[0]!r}; names have to differ")
    for spec in _senders(scenario):
        if spec.transport not in scenario.transports:
            known = ", ".join(sorted(scenario.transports))
            raise ValueError(f"{spec.name}: there is no transport {spec.transport!r}; there are: {known}")


def _senders(scenario: Scenario) -> list[CollectiveJob | BackgroundSpec]:
    return [*scenario.jobs, *scenario.background]
