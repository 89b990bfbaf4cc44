# SPDX-License-Identifier: Apache-2.0
"""A scenario that runs: SimPy processes for everything that takes decisions, an engine for packets.

The two share one clock. The engine runs no further than SimPy's next event, and stops at the end of the first instant
at which something is done that somebody waits for; so neither ever sees the other's past, and no time window is
involved. At one instant packets come first, then processes.
"""

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import numpy as np
import simpy
from dlcp.sim.arithmetic import seconds_to_ps
from dlcp.sim.engine import FOREVER_PS, GRAPH_CLOSED, GRAPH_DONE, EngineName, make_engine
from dlcp.sim.graph import Graph
from dlcp.sim.plan import make_plan
from dlcp.sim.scenario import Scenario
from dlcp.sim.submission import Submitter
from dlcp.sim.topology.build import build
from numpy.typing import NDArray

Process: TypeAlias = Generator[simpy.Event, Any, Any]
RecordSink: TypeAlias = Callable[["Running", NDArray[Any]], None]


class Running:
    """A graph that was submitted.

    Attributes
    ----------
    done
        SimPy event: all nodes are done. Its value is the picosecond.
    nodes
        SimPy events of watched nodes, by number.
    closed
        SimPy event: nothing of it is on its way any more, acknowledgements included.
    label
        Whatever the submitter wants to find with the records.
    """

    def __init__(self, env: simpy.Environment, graph: Graph, number: int, label: Any) -> None:
        self.graph, self.number, self.label = graph, number, label
        self.done, self.closed = env.event(), env.event()
        self.nodes = {int(node): env.event() for node in np.flatnonzero(graph.nodes["watched"])}


class Simulation:
    """One run of a scenario.

    Parameters
    ----------
    class_shares
        Further distributions of drop classes that messages may name, by number.
    on_records
        Is given the records of every graph, `dlcp.sim.graph.RECORD` (n,), when nothing of it is on its way any more:
        results leave as they come, so that memory holds only what is in flight.

    Attributes
    ----------
    env
        SimPy's environment; its clock counts picoseconds.
    transports
        Numbers of the scenario's transports, by name.
    failed_links
        Links that routes avoid now.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        engine: EngineName = "auto",
        class_shares: tuple[tuple[float, ...], ...] = (),
        on_records: RecordSink | None = None,
    ) -> None:
        self.scenario = scenario
        self.network = build(scenario.topology)
        self.plan = make_plan(self.network, scenario.switches, scenario.transports, class_shares, scenario.seed)
        self.engine = make_engine(self.plan, engine)
        self.env = simpy.Environment(0)
        self.transports = {name: number for number, name in enumerate(scenario.transports)}
        self._submitter = Submitter(self.plan)
        self._running: dict[int, Running] = {}
        self._on_records = on_records
        self.failed_links: set[int] = set()

    def process(self, generator: Process) -> simpy.Process:
        """Start a SimPy process."""
        return self.env.process(generator)

    def random(self, *concern: int) -> np.random.Generator:
        """Return random numbers for a concern of its own, which no other draws from: the same in every run."""
        return np.random.default_rng(np.random.SeedSequence([self.scenario.seed, 0x51D, *concern]))

    def submit(self, graph: Graph, label: Any = None) -> Running:
        """Let a graph begin now."""
        submission = self._submitter.prepare(graph, int(self.env.now))
        running = Running(self.env, graph, submission.number, label)
        self._running[submission.number] = running
        self.engine.submit(submission)
        return running

    def run(self) -> None:
        """Run until nothing is left to happen, or to the scenario's end."""
        env, engine = self.env, self.engine
        end = min(FOREVER_PS, seconds_to_ps(self.scenario.stop_s))
        while True:
            coming = env.peek()
            limit = end if coming == float("inf") else min(end, int(coming))
            if engine.has_events():
                notes = engine.run(limit)
                if notes:
                    self._tell(notes)
                    continue
            if coming == float("inf") or coming > end:
                return
            # Packets of this instant are through; now the processes, one event after the other.
            env.step()

    def _tell(self, notes: list[Any]) -> None:
        """Move SimPy's clock to the engine's, and wake those who wait."""
        env = self.env
        now = self.engine.now_ps
        if now > env.now:
            env.run(until=now)
        for note in notes:
            running = self._running[note.graph]
            if note.kind == GRAPH_DONE:
                running.done.succeed(now)
            elif note.kind == GRAPH_CLOSED:
                if self._on_records is not None:
                    self._on_records(running, self.engine.records(note.graph))
                self.engine.forget(note.graph)
                del self._running[note.graph]
                running.closed.succeed(now)
            else:
                running.nodes[note.node].succeed(now)
