# SPDX-License-Identifier: Apache-2.0
"""Graphs wait for what they should, and exchanges move the bytes that they should."""

import numpy as np
import pytest

from dlcp.sim import Scenario, Simulation
from dlcp.sim.graphs.collectives import AllReduceSpec, direct, parameter_server, ring
from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.transports.specs import DctcpTransport


def simulation(hosts: int = 4, engine: str = "reference", **options) -> Simulation:
    topology = Star(hosts=hosts, host_link=LinkSpec(rate_gbps=10.0, delay_us=1.0))
    return Simulation(Scenario(topology=topology, transports={"t": DctcpTransport()}), engine=engine, **options)


def run(builder: GraphBuilder, hosts: int = 4):
    kept = []
    sim = simulation(hosts, on_records=lambda running, records: kept.append(records))
    running = sim.submit(builder.build())
    sim.run()
    assert running.done.processed
    assert running.closed.processed
    return kept[0]


def test_a_message_takes_what_its_links_take():
    builder = GraphBuilder()
    builder.messages(0, 1, 1440, transport=0, delay_ps=5_000)
    record = run(builder)[0]
    assert record["begin_ps"] == 5_000
    assert record["end_ps"] - record["begin_ps"] == 2 * (1500 * 800 + 1_000_000)
    assert (record["packets"], record["sent_packets"], record["missing_packets"]) == (1, 1, 0)


def test_nodes_wait_for_all_before_them():
    builder = GraphBuilder()
    first = builder.delays([1000, 3000, 2000])
    gate = builder.barrier(first)
    last = builder.delays(500)
    builder.follow(gate, last)
    records = run(builder)
    assert records["end_ps"].tolist() == [1000, 3000, 2000, 3000, 3500]


def test_order_decides_within_a_stream_and_what_has_begun_is_not_interrupted():
    builder = GraphBuilder()
    builder.messages(0, 1, 144_000, transport=0, order=[9, 5, 1])
    records = run(builder)
    assert np.argsort(records["end_ps"]).tolist() == [0, 2, 1]


def test_watched_nodes_can_be_waited_for():
    sim = simulation()
    builder = GraphBuilder()
    builder.messages(0, 1, [1440, 14400], transport=0, watched=[True, False])
    running = sim.submit(builder.build())
    seen = []

    def wait():
        seen.append((yield running.nodes[0]))
        seen.append((yield running.done))

    sim.process(wait())
    sim.run()
    assert 0 < seen[0] < seen[1] < sim.engine.now_ps


@pytest.mark.parametrize("count", [2, 5])
def test_ring(count: int):
    builder = GraphBuilder()
    ends = ring(builder, AllReduceSpec(range(count), 100_001, 0), builder.delays(np.zeros(count, int)))
    graph = builder.build()
    sizes = graph.nodes["size_bytes"]
    assert (sizes > 0).sum() == 2 * count * (count - 1)
    for host in range(count):
        # All but one shard go out twice: once to be reduced, once reduced.
        assert sizes[graph.nodes["source"] == host].sum() == pytest.approx(2 * 100_001 * (count - 1) / count, abs=count)
    records = run(builder, count)
    assert len(ends) == count
    assert (records["end_ps"][ends] > 0).all()
    assert records["end_ps"][ends].max() == records["end_ps"].max()


def test_direct_and_parameter_server():
    builder = GraphBuilder()
    direct(builder, AllReduceSpec(range(4), 40_000, 0))
    parameter_server(builder, AllReduceSpec((0, 1, 2), 40_000, 0, message=1), (3,))
    graph = builder.build()
    sends = graph.nodes["size_bytes"] > 0
    assert sends.sum() == 2 * 4 * 3 + 2 * 3
    assert graph.nodes["size_bytes"].sum() == 2 * 3 * 40_000 + 2 * 3 * 40_000
    records = run(builder)
    pulls = graph.nodes["message"] >= 0x8000
    pushed = records["end_ps"][sends & ~pulls & (graph.nodes["target"] == 3) & (graph.nodes["size_bytes"] == 40_000)]
    pulled = records["begin_ps"][pulls & (graph.nodes["source"] == 3) & (graph.nodes["size_bytes"] == 40_000)]
    assert pulled.min() >= pushed.max()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="a graph needs a node"):
        GraphBuilder().build()
    with pytest.raises(ValueError, match=r"hosts \[1\] are workers and servers"):
        parameter_server(GraphBuilder(), AllReduceSpec((0, 1), 10, 0), (1,))
    builder = GraphBuilder()
    builder.messages(0, 9, 100, transport=0)
    with pytest.raises(ValueError, match="hosts 0 to 3"):
        simulation().submit(builder.build())


def test_memory_holds_only_what_is_in_flight():
    pytest.importorskip("numba")
    sim = simulation(engine="kernel")

    def steps():
        for _ in range(30):
            builder = GraphBuilder()
            ring(builder, AllReduceSpec(range(4), 30_000, 0))
            yield sim.submit(builder.build()).closed

    sim.process(steps())
    sim.run()
    assert len(sim.engine._a.messages) <= 2 * (2 * 4 * 3 + 4)
