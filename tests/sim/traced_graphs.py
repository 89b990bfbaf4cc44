# SPDX-License-Identifier: Apache-2.0
"""Graphs to write as traces, and the end of a graph on a small network."""

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from dlcp.sim import Scenario, Simulation
from dlcp.sim.graphs.collectives import AllReduceSpec, all_reduce
from dlcp.sim.graphs.graph import Graph, GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.transports.specs import DctcpTransport

HOSTS = 4


def scenario(rate_gbps: float = 10.0, **more) -> Scenario:
    topology = Star(hosts=HOSTS, host_link=LinkSpec(rate_gbps=rate_gbps, delay_us=1.0))
    return Scenario(topology=topology, transports={"dctcp": DctcpTransport()}, **more)


def end_ps(graph: Graph, rate_gbps: float = 10.0) -> int:
    """Return when the last node of a graph is done, on links of some rate."""
    kept = []
    simulation = Simulation(
        scenario(rate_gbps), engine="reference", on_records=lambda running, records: kept.append(records)
    )
    running = simulation.submit(graph)
    simulation.run()
    assert running.done.processed
    return int(kept[0]["end_ps"].max())


@st.composite
def graphs(draw) -> Graph:
    """Draw graphs of computations and messages, each at a host, which wait for others that end at the same host."""
    builder = GraphBuilder()
    ended: list[list[int]] = [[] for _ in range(HOSTS)]
    for _ in range(draw(st.integers(1, 12))):
        host = draw(st.integers(0, HOSTS - 1))
        delay_ps = draw(st.integers(0, 30)) * 100_000
        if draw(st.booleans()):
            target = (host + draw(st.integers(1, HOSTS - 1))) % HOSTS
            size = draw(st.sampled_from([1, 1440, 1441, 40_000, 100_000]))
            order = draw(st.integers(0, 2))
            node = int(builder.messages(host, target, size, transport=0, order=order, lane=order)[0])
        else:
            target, node = host, int(builder.delays(delay_ps)[0])
        for before in draw(st.lists(st.sampled_from(ended[host]), max_size=3, unique=True)) if ended[host] else []:
            builder.follow(before, node)
        ended[target].append(node)
    graph = builder.build()
    assume((graph.nodes["size_bytes"] + graph.nodes["delay_ps"]).any())
    return graph


def step_of_ring(count: int = HOSTS) -> Graph:
    """Return two computations with an all-reduce between them, for each of some ranks."""
    builder = GraphBuilder()
    before = builder.delays(np.arange(count) * 1_500_000)
    done = all_reduce(builder, "ring", AllReduceSpec(range(count), 100_001, 0), before)
    after = builder.delays(np.full(count, 3_000_000))
    builder.follow(done, after)
    builder.barrier(after)
    return builder.build()
