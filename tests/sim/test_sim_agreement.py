# SPDX-License-Identifier: Apache-2.0
"""The kernel and the pure SimPy engine, which runs the compiled P4 program in its switches, agree in everything."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dlcp.sim import CollectiveJob, Scenario, SimulationResult, simulate
from dlcp.sim.arithmetic import slot_owners
from dlcp.sim.engines import network_tables
from dlcp.sim.engines.kernel.arrays import SEQUENCE_MAX
from dlcp.sim.engines.kernel.kernel_engine import KernelEngine
from dlcp.sim.engines.packet_engine import EngineCounter, counts_by_name
from dlcp.sim.engines.reference import chooses_paths
from dlcp.sim.graphs.graph import Graph, GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.simulation import Simulation, SubmittedGraph
from dlcp.sim.transports.specs import DlcpTransport, NewRenoTransport, PFabricTransport
from tests.p4.p4source import constants
from tests.sim.sim_scenarios import RARE, draw

pytest.importorskip("numba")
CASES = 60


def outcome(result: SimulationResult) -> tuple:
    steps = [(job.name, job.begin_ps, job.end_ps) for job in result.steps]
    return result.end_ps, result.counts, result.drops_by_class, steps


@pytest.fixture
def submitted(monkeypatch) -> list[SubmittedGraph]:
    """Graphs, which keep what became of their packets."""
    graphs: list[SubmittedGraph] = []

    class KeepingSimulation(Simulation):
        def submit(self, graph: Graph, label: object = None, *, keeps_outcomes: bool = True) -> SubmittedGraph:
            graphs.append(super().submit(graph, label, keeps_outcomes=True))
            return graphs[-1]

    monkeypatch.setattr("dlcp.sim.experiments.scenario_run.Simulation", KeepingSimulation)
    return graphs


@pytest.mark.parametrize(
    "scenario",
    [*map(draw, range(CASES)), *RARE],
    ids=[*map(str, range(CASES)), "RED", "pFabric", "trimmed-again", "trimmed-probe", "MLTCP-Reno", "MLTCP-DCTCP"],
)
def test_engines_agree(scenario: Scenario, submitted: list[SubmittedGraph]):
    kernel, reference = simulate(scenario, engine="kernel"), simulate(scenario, engine="reference")
    assert outcome(kernel) == outcome(reference)
    np.testing.assert_array_equal(kernel.messages, reference.messages)
    half = len(submitted) // 2
    for ours, theirs in zip(submitted[:half], submitted[half:], strict=True):
        np.testing.assert_equal(ours.last_outcomes, theirs.last_outcomes)
    lacking = [packets for graph in submitted[:half] for packets in graph.last_outcomes.values()]
    assert sum(int((~packets["delivered"]).sum()) for packets in lacking) == kernel.messages["missing_packets"].sum()


def test_cases_make_everything_happen():
    """Timeouts, probes of tails, pFabric's questions and all reasons to drop: what never happens is not compared."""
    happened: Counter[str] = Counter()
    for scenario in (*map(draw, range(CASES)), *RARE):
        counts = simulate(scenario, engine="kernel", keep_messages=False).counts
        happened.update({name: count for name, count in counts.items() if count})
        if isinstance(scenario.transports["t"], PFabricTransport):
            happened["pfabric_probes"] += counts["probes"]
        if isinstance(scenario.transports["t"], DlcpTransport):
            happened["dlcp_trims"] += counts["trims"]
    # Two messages seldom share a slot by chance; test_shared_slots_are_counted_as_the_program_does makes them.
    names = {cell.name.lower() for cell in EngineCounter}
    wanted = {*names, "pfabric_probes", "dlcp_trims"} - {"drops_by_class", "slot_taken"}
    assert not {name for name in wanted if not happened[name]}


def test_cases_cover_what_there_is():
    scenarios = [draw(seed) for seed in range(CASES)]
    dlcp = [case for case in scenarios if case.switches.discipline == "dlcp"]
    by_program = [case for case in dlcp if chooses_paths(Simulation(case, engine="kernel").plan)]
    assert len(by_program) >= 8
    assert len(dlcp) - len(by_program) >= 8
    for values in (
        {type(case.topology) for case in scenarios},
        {type(case.transports["t"]) for case in scenarios},
        {case.switches.discipline for case in scenarios},
    ):
        assert len(values) >= 5


def test_constants_are_the_programs():
    for name, value in constants().items():
        assert getattr(network_tables, name, value) == value, name
    repeated = {"SLOT_REGISTER_SIZE", "SLOT_OWNED", "SLOT_IDLE_US", "ROUTE_MEMBERS_SIZE", "EVENT_MARKED"}
    assert repeated <= {*constants()} & {*vars(network_tables)}


def test_shared_slots_are_counted_as_the_program_does():
    """Messages whose hashes have the same low bits share a switch's slot, which the first of them holds."""
    steps = np.arange(1 << 20)
    slots = slot_owners(steps * 0, steps, steps * 0, steps * 0) & (network_tables.SLOT_REGISTER_SIZE - 1)
    same = np.flatnonzero(slots == slots[0])[:8]
    scenario = Scenario(
        topology=Star(hosts=9, host_link=LinkSpec(rate_gbps=10.0)),
        switches=SwitchSpec(discipline="dlcp", buffer_packets=40),
        transports={"t": DlcpTransport()},
    )
    counts = {}
    for engine in ("kernel", "reference"):
        simulation = Simulation(scenario, engine=engine)
        builder = GraphBuilder()
        builder.messages(np.arange(1, 9), 0, 288_000, transport=0, loss_bound=0.1, queue=4, step=same, sender=0)
        simulation.submit(builder.build())
        simulation.run()
        counts[engine] = counts_by_name(simulation.engine.counts)
    assert counts["kernel"] == counts["reference"]
    assert counts["kernel"]["slot_taken"] > 0
    assert counts["kernel"]["drops_policy"] > 0


def test_arrays_grow_while_packets_fly():
    """More packets on their way than there is room for at first."""
    scenario = Scenario(
        topology=Star(hosts=3, host_link=LinkSpec(rate_gbps=100.0, delay_us=1000.0)),
        transports={"t": NewRenoTransport(initial_window_packets=3000.0, min_timeout_us=20_000.0)},
        jobs=(CollectiveJob(name="job", hosts=(0, 1, 2), size_bytes=12_000_000, transport="t"),),
    )
    kernel = simulate(scenario, engine="kernel")
    assert kernel.counts["sent"] == kernel.counts["arrived"] > 3 * 4096
    assert outcome(kernel) == outcome(simulate(scenario, engine="reference"))


def test_events_are_numbered_anew_before_their_numbers_are_used_up(monkeypatch):
    """After eight billion events, on a run of an hour or so."""
    late: list[KernelEngine] = []

    class LateEngine(KernelEngine):
        def __init__(self, described: network_tables.NetworkTables) -> None:
            super().__init__(described)
            self._w["sequence"] = SEQUENCE_MAX - 500
            late.append(self)

    expected = [outcome(simulate(draw(seed), engine="kernel")) for seed in (2, 9)]
    monkeypatch.setattr("dlcp.sim.engines.kernel.kernel_engine.KernelEngine", LateEngine)
    assert [outcome(simulate(draw(seed), engine="kernel")) for seed in (2, 9)] == expected
    for engine in late:
        assert engine.counts[EngineCounter.EVENTS] > 1000
        assert engine._w["sequence"] < SEQUENCE_MAX // 2


def test_more_than_an_event_can_name_is_refused(monkeypatch):
    monkeypatch.setattr("dlcp.sim.engines.kernel.arrays.ID_MASK", 100)
    monkeypatch.setattr("dlcp.sim.engines.kernel.kernel_engine._POOL", 64)
    with pytest.raises(MemoryError, match="exceed the simulator's limit of 100; simulate a smaller setting"):
        simulate(draw(2), engine="kernel")


def test_another_process_gets_the_same():
    code = "from tests.sim.test_sim_agreement import *; print(outcome(simulate(draw(4), engine='kernel')))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "77"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert there.stdout.strip() == str(outcome(simulate(draw(4), engine="kernel"))), there.stderr


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_same_seed_same_result_another_seed_another(engine: str):
    def run(scenario: Scenario) -> tuple:
        return outcome(simulate(scenario, engine=engine))

    scenario = draw(1)
    assert run(scenario) == run(scenario)
    assert run(scenario) != run(draw(12))
