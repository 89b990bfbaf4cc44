# SPDX-License-Identifier: Apache-2.0
"""The flow-level engine: exact where theory is simple, near the packets elsewhere, and never mistaken for them."""

import io

import numpy as np
import pytest

from dlcp.sim import CollectiveJob, Scenario, Simulation, simulate
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.results import findings, load
from dlcp.sim.experiments.running import run
from dlcp.sim.experiments.sweep import sweep
from dlcp.sim.graphs.graph import OWN_LANE, GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import FatTree, LeafSpine, RailOptimised, Star, TopologySpec
from dlcp.sim.scenario import FailureSpec, SwitchSpec, TrafficSpec
from dlcp.sim.transports.specs import DctcpTransport, DlcpTransport, PFabricTransport
from tests.sim.experiments_small import write_experiment

SIZE = 1_440_000
"""A thousand packets of 1,500 bytes: 1.2 ms at 10 Gbit/s."""


def records(pairs, topology, *, engine="flows", discipline="fifo", transport=None, **columns):
    """Send one message for each pair of hosts; return the records."""
    found = []
    setting = Scenario(
        topology=topology,
        switches=SwitchSpec(discipline=discipline),
        transports={"t": transport or DctcpTransport(ack_bytes=40)},
    )
    simulation = Simulation(setting, engine=engine, on_records=lambda _, rows: found.append(rows))
    builder = GraphBuilder()
    source, target = np.array(pairs).T
    builder.messages(source, target, transport=0, **{"size_bytes": SIZE, **columns})
    simulation.submit(builder.build())
    simulation.run()
    return found[0], simulation


def star(hosts: int) -> Star:
    return Star(hosts=hosts, host_link=LinkSpec(rate_gbps=10.0))


def test_one_message_takes_its_bytes_and_the_path() -> None:
    rows, simulation = records([(0, 1)], star(2))
    assert rows["end_ps"][0] == 1_200_000_000 + 2 * 1_000_000 + 1_200_000  # bytes, two links, last packet once more
    assert simulation.engine.port_bytes()["sent_bytes"].tolist() == [1_500_000, 40_000, 40_000, 1_500_000]


def test_senders_share_a_port_and_leave_it_full() -> None:
    rows, _ = records([(source, 0) for source in range(1, 9)], star(9))
    assert rows["end_ps"].max() == pytest.approx(8 * 1.2e9, rel=0.01)
    assert rows["end_ps"].min() > 0.7 * rows["end_ps"].max()  # shares are similar, not equal
    assert rows["congested"].all()


def test_rates_are_max_min() -> None:
    # Hosts 1 and 2 share the port of host 0, so host 1 leaves two thirds of its own port to host 3.
    topology = Star(hosts=4, host_link=LinkSpec(rate_gbps=10.0), host_links={"host0": LinkSpec(rate_gbps=20 / 3)})
    rows, _ = records([(1, 0), (2, 0), (1, 3)], topology)
    assert rows["end_ps"][2] == pytest.approx(1.2e9 * 3 / 2, rel=0.1)


@pytest.mark.parametrize("discipline", ["priority", "dlcp"])
def test_urgent_queues_come_first(discipline: str) -> None:
    rows, _ = records([(1, 0), (2, 0)], star(3), discipline=discipline, queue=[2, 5], transport=DlcpTransport())
    assert rows["end_ps"][1] == pytest.approx(1.2e9, rel=0.01)
    assert rows["end_ps"][0] == pytest.approx(2.4e9, rel=0.01)


def test_a_stream_sends_by_order() -> None:
    rows, _ = records([(0, 1)] * 3, star(2), order=[1, 2, 0])
    assert np.argsort(rows["end_ps"]).tolist() == [0, 2, 1]  # the one that is being sent is not interrupted


def test_bundled_links_give_the_same_times_as_single_ones() -> None:
    fat_tree = FatTree(ports=4, host_link=LinkSpec(rate_gbps=10.0))
    pairs = [(host, (host + 5) % 16) for host in range(16)]
    bundled, simulation = records(pairs, fat_tree, transport=DlcpTransport())
    single = records(pairs, fat_tree, transport=DlcpTransport(), engine="kernel")[0]
    assert len(simulation.engine._a.ports) < len(simulation.plan.links)
    assert np.allclose(bundled["end_ps"], single["end_ps"], rtol=0.05)


def job(**options) -> CollectiveJob:
    return CollectiveJob(**{"name": "job", "hosts": tuple(range(16)), "size_bytes": 8_000_000, "steps": 3, **options})


RACKS = LeafSpine(leaves=4, spines=4, hosts_per_leaf=4)
CASES = {
    "ring": Scenario(topology=Star(hosts=16), jobs=(job(),)),
    "direct": Scenario(topology=RACKS, jobs=(job(collective="direct"),)),
    "servers": Scenario(topology=RACKS, jobs=(job(collective="parameter_server", servers=2),)),
    "dlcp": Scenario(
        topology=RACKS,
        switches=SwitchSpec(discipline="dlcp"),
        transports={"dlcp": DlcpTransport()},
        jobs=(job(collective="parameter_server", servers=2, transport="dlcp", loss_bound=0.1, compute_s=0.001),),
    ),
    "rails": Scenario(topology=RailOptimised(servers=4, gpus_per_server=4, servers_per_pod=2), jobs=(job(),)),
    "background": Scenario(
        topology=RACKS,
        jobs=(job(collective="parameter_server", servers=2),),
        traffic=(TrafficSpec(load=0.1, stop_s=0.05),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_take_about_as_long_as_with_packets(name: str) -> None:
    flows, packets = (simulate(CASES[name], engine=engine) for engine in ("flows", "kernel"))
    assert (flows.fidelity, packets.fidelity) == ("flows", "packets")
    mean = [np.mean(each.steps[0].step_s) for each in (flows, packets)]
    assert mean[0] == pytest.approx(mean[1], rel=0.08)
    assert len(flows.messages) == len(packets.messages) or name == "background"


CABLES = LinkSpec(rate_gbps=100.0, delay_us=0.1)
"""Links so short that each further switch takes about as long as a packet."""


@pytest.mark.parametrize(
    ("collective", "topology", "hosts", "packets"),
    [
        *(("ring", Star(hosts=2), 2, packets) for packets in (1, 10, 30, 300)),
        *(("ring", Star(hosts=64), 64, packets) for packets in (1, 2.1, 3)),
        *(("ring", FatTree(ports=4, host_link=CABLES), 16, packets) for packets in (1, 1.1, 2.1, 5)),
        *(("ring", RACKS, 16, packets) for packets in (1, 10, 30, 100)),
        *(("direct", Star(hosts=4), 4, packets) for packets in (1, 30, 1000)),
        *(("direct", Star(hosts=8), 8, packets) for packets in (1, 1.1, 2, 300)),
        *(("direct", Star(hosts=32), 32, packets) for packets in (1, 2, 10)),
        *(("direct", RACKS, 16, packets) for packets in (1.1, 10, 100)),
    ],
)
def test_messages_of_any_size_take_as_long_as_with_packets(
    collective: str, topology: TopologySpec, hosts: int, packets: float
) -> None:
    exchange = CollectiveJob(
        name="job",
        hosts=tuple(range(hosts)),
        size_bytes=round(1440 * packets) * hosts,
        collective=collective,
        steps=2,
    )
    scenario = Scenario(topology=topology, jobs=(exchange,))
    ends = [simulate(scenario, engine=engine).steps[0].end_ps[-1] for engine in ("flows", "kernel")]
    assert ends[0] == pytest.approx(ends[1], rel=0.05)


def test_same_seed_same_result() -> None:
    ends = [simulate(CASES["dlcp"], engine="flows").end_ps for _ in range(2)]
    assert ends[0] == ends[1]


def test_losses_slow_down_and_failures_are_routed_around() -> None:
    def step(**failure) -> float:
        failures = (FailureSpec(nodes=("leaf0", "spine0"), **failure),) if failure else ()
        scenario = Scenario(topology=RACKS, jobs=(job(steps=1),), failures=failures)
        result = simulate(scenario, engine="flows")
        return result.steps[0].step_s[0]

    whole = step()
    assert step(loss_ratio=0.01) > 1.1 * whole
    assert whole < step(loss_ratio=1.0, start_s=0.0002, reroute_s=0.001) < whole + 0.004


def test_memory_of_graphs_is_used_again() -> None:
    setting = Scenario(topology=star(4))
    simulation = Simulation(setting, engine="flows")
    sizes = []

    def submit_often(env):
        for _ in range(5):
            builder = GraphBuilder()
            builder.messages([0, 1, 2], 3, 10_000, transport=0, lane=OWN_LANE)
            yield simulation.submit(builder.build()).closed
            sizes.append((len(simulation.engine._a.messages), len(simulation.engine._a.flows)))

    simulation.process(submit_often(simulation.env))
    simulation.run()
    assert len(sizes) == 5
    assert len(set(sizes)) == 1


def test_windows_that_count_steps_are_refused() -> None:
    setting = Scenario(transports={"t": DctcpTransport(step_gap_us=100.0)}, engine="flows")
    with pytest.raises(ValueError, match="engine flows has no windows, as step_gap_us of 't' needs"):
        simulate(setting)


def test_pfabric_is_refused() -> None:
    setting = Scenario(switches=SwitchSpec(discipline="pfabric"), transports={"t": PFabricTransport()}, engine="flows")
    with pytest.raises(ValueError, match="engine flows does not support pfabric, transport 't'"):
        Simulation(setting)


def test_results_of_flows_are_no_findings(tmp_path) -> None:
    described = read(write_experiment(tmp_path), engine="flows")
    assert sweep(described.runs, tmp_path / "small", progress=io.StringIO()) == len(described.runs)
    results = load(described, tmp_path)
    assert results.approximate == len(described.runs)
    assert {document["engine"] for _, document in results.documents} == {"flows"}
    assert all(finding.measured is None for finding in findings(results))
    assert len(load(read(write_experiment(tmp_path)), tmp_path).missing) == len(described.runs)


CIRCLING = """\
name: circling
title: Flows whose weights differ by port
question: Do their rates settle?
setting:
  topology: {kind: star, hosts: 4, host_link: {rate_gbps: 100, delay_us: 1}}
  transports: {t: {kind: dctcp}}
  training:
    - {name: job, model: 1MB, workers: 4, collective: ring, transport: t, steps: 2, start_s: 0.0001, jitter: 0.1}
  traffic: [{name: others, load: 0.1, transport: t, stop_s: 0.0005, most_bytes: 100000}]
  failures: [{nodes: [host0, switch0], start_s: 0.0001, stop_s: 0.0002}]
  engine: flows
  seed: 3
  stop_s: 0.01
"""


def test_rates_that_do_not_settle_are_left_as_they_are(tmp_path) -> None:
    document = run(read(write_experiment(tmp_path, CIRCLING)).runs[0])
    assert document["complete"], "the levels of its ports followed each other in a circle, for ever"
    assert len(document["jobs"][0]["step_s"]) == 2
