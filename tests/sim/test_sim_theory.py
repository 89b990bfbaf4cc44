# SPDX-License-Identifier: Apache-2.0
"""Queueing theory, a bound, and a published analysis against simulated results."""

import math

import numpy as np
import pytest

from dlcp.sim import CollectiveJob, Scenario, Simulation, simulate
from dlcp.sim.graphs.collectives import AllReduceSpec, byteps
from dlcp.sim.graphs.graph import OWN_LANE, GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import LeafSpine, Star
from dlcp.sim.scenario import EcnSpec, SwitchSpec
from dlcp.sim.transports.specs import (
    CubicTransport,
    DctcpTransport,
    DlcpTransport,
    NdpTransport,
    NewRenoTransport,
    NsccTransport,
    PFabricTransport,
    RcccTransport,
    SwiftTransport,
)

pytest.importorskip("numba")
SERVICE_PS = 1_200_000  # 1,500 bytes at 10 Gbit/s
PACKETS = 300_000


def waits_ps(load_by_queue: dict[int, float], seed: int) -> dict[int, float]:
    """Mean waits of single packets that come as Poisson processes to one port, by queue."""
    topology = LeafSpine(
        leaves=2,
        spines=1,
        hosts_per_leaf=40,
        host_link=LinkSpec(rate_gbps=4000.0, delay_us=0.1),
        fabric_link=LinkSpec(rate_gbps=10.0, delay_us=0.1),
    )
    switches = SwitchSpec(discipline="priority", buffer_packets=100_000, ecn=None)
    transports = {"t": NewRenoTransport(min_timeout_us=1e6, ack_bytes=64)}
    scenario = Scenario(topology=topology, switches=switches, transports=transports, seed=seed)
    means = {}

    def note(running, records):
        took = records["end_ps"] - records["begin_ps"]
        queues = running.graph.nodes["queue"]
        for queue in load_by_queue:
            chosen = took[queues == queue]
            # The least that anybody took is a packet that did not wait.
            means[queue] = chosen[len(chosen) // 20 :].mean() - took.min()

    simulation = Simulation(scenario, on_records=note)
    builder = GraphBuilder()
    total = sum(load_by_queue.values())
    for queue, load in load_by_queue.items():
        random = simulation.random(7, queue)
        count = int(PACKETS * load / total)
        times = np.cumsum(random.exponential(SERVICE_PS / load, count)).astype(np.int64)
        builder.messages(
            random.integers(0, 40, count),
            random.integers(40, 80, count),
            1440,
            transport=0,
            queue=queue,
            lane=OWN_LANE,
            delay_ps=times,
        )
    simulation.submit(builder.build())
    simulation.run()
    return means


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_waits_of_a_port_are_those_of_m_d_1(load: int):
    measured = waits_ps({1: load}, seed=3)[1]
    assert measured == pytest.approx(load * SERVICE_PS / (2 * (1 - load)), rel=0.02)


def test_waits_by_priority_are_those_of_cobham():
    urgent, other = 0.3, 0.4
    measured = waits_ps({6: urgent, 2: other}, seed=3)
    residual = (urgent + other) * SERVICE_PS / 2
    assert measured[6] == pytest.approx(residual / (1 - urgent), rel=0.02)
    assert measured[2] == pytest.approx(residual / ((1 - urgent) * (1 - urgent - other)), rel=0.02)


# A bandwidth-delay product is less than the smallest windows of all senders, and trimmed headers would take 4 %.
ULTRA_ETHERNET = SwitchSpec(discipline="trim", trim_packets=40, ecn=EcnSpec(min_packets=8, max_packets=32))
INCASTS = {
    "dctcp": (DctcpTransport(), SwitchSpec()),
    "swift": (SwiftTransport(), SwitchSpec(ecn=None)),
    "new_reno": (NewRenoTransport(), SwitchSpec(buffer_packets=1000, ecn=None)),
    "cubic": (CubicTransport(), SwitchSpec(buffer_packets=1000, ecn=None)),
    "pfabric": (PFabricTransport(), SwitchSpec(discipline="pfabric")),
    "ndp": (NdpTransport(), SwitchSpec(discipline="trim")),
    "nscc": (NsccTransport(), ULTRA_ETHERNET),
    "rccc": (RcccTransport(), ULTRA_ETHERNET),
    "dlcp": (DlcpTransport(), SwitchSpec(discipline="dlcp")),
}


@pytest.mark.parametrize("name", INCASTS)
def test_incast_takes_what_the_last_link_takes(name: str):
    transport, switches = INCASTS[name]
    senders, size = 16, 2_500_000
    scenario = Scenario(
        topology=Star(hosts=senders + 1, host_link=LinkSpec(rate_gbps=10.0, delay_us=1.0)),
        switches=switches,
        transports={"t": transport},
    )
    simulation = Simulation(scenario)
    builder = GraphBuilder()
    builder.messages(np.arange(1, senders + 1), 0, size, transport=0)
    running = simulation.submit(builder.build())
    simulation.run()
    packets = math.ceil(size / (transport.packet_bytes - transport.header_bytes))
    wire_bytes = senders * (size + packets * transport.header_bytes)
    bound_ps = wire_bytes * 800 + 2_000_000 + 1500 * 800
    assert running.done.value >= bound_ps
    assert running.done.value <= bound_ps * 1.01


def test_dctcp_keeps_its_queue_and_shares_as_published():
    """SIGCOMM 2010: the queue peaks at K + n and swings by sqrt(2 n (C RTT + K)) / 2; shares are equal."""
    flows, mark, rate_ps, rtt_ps = 2, 65, 1_200_000, 100_000_000
    scenario = Scenario(
        topology=Star(hosts=flows + 1, host_link=LinkSpec(rate_gbps=10.0, delay_us=24.0)),
        switches=SwitchSpec(buffer_packets=1000, ecn=EcnSpec(min_packets=mark, max_packets=mark)),
        transports={"t": DctcpTransport()},
        stop_s=0.3,
    )
    simulation = Simulation(scenario)
    builder = GraphBuilder()
    builder.messages(np.arange(1, flows + 1), 0, 1_000_000_000, transport=0)
    simulation.submit(builder.build())
    samples, received = [], []

    def watch():
        last = simulation.topology.between("host0", "switch0")
        downward = next(link for link in last if simulation.topology.links[link].target == 0)
        upward = [link for link, item in enumerate(simulation.topology.links) if item.source in range(1, flows + 1)]
        yield simulation.env.timeout(100_000_000_000)
        before = simulation.engine.port_bytes()["sent_bytes"]
        while simulation.env.now < 299_000_000_000:
            yield simulation.env.timeout(5_000_000)
            samples.append(simulation.engine.port_bytes()["bytes"][downward] / 1500)
        received.extend((simulation.engine.port_bytes()["sent_bytes"] - before)[upward])

    simulation.process(watch())
    simulation.run()
    queue = np.array(samples)
    product = rtt_ps / rate_ps
    swing = math.sqrt(2 * flows * (product + mark)) / 2
    assert queue.max() == pytest.approx(mark + flows, abs=4)
    assert queue.max() - np.quantile(queue, 0.01) == pytest.approx(swing, rel=0.35)
    assert queue.min() > 0  # so the link is never idle
    shares = np.array(received, float)
    assert shares.sum() ** 2 / (flows * (shares**2).sum()) > 0.99  # Jain's index; the paper's figure 16


def test_budget_is_the_most_that_a_switch_drops():
    job = CollectiveJob(
        name="job",
        hosts=tuple(range(9)),
        size_bytes=8_000_000,
        collective="parameter_server",
        transport="t",
        loss_bound=0.1,
    )
    scenario = Scenario(
        topology=Star(hosts=9), switches=SwitchSpec(discipline="dlcp"), transports={"t": DlcpTransport()}, jobs=(job,)
    )
    result = simulate(scenario)
    allowed = np.floor(0.1 * result.messages["packets"])
    assert (result.messages["missing_packets"] <= allowed).all()
    assert 0 < result.counts["drops_policy"] <= allowed[result.messages["target"] == 0].sum()
    assert result.messages["missing_packets"].any()
    assert result.drops_by_class[0] == 0
    assert result.drops_by_class[7] > result.drops_by_class[1]
    # What comes back is whole.
    assert not result.messages["missing_packets"][result.messages["source"] == 0].any()


@pytest.mark.parametrize(("ranks", "servers"), [(4, 1), (8, 0), (8, 4), (8, 8)])
def test_byteps_loads_all_links_alike(ranks, servers):
    """Jiang et al., OSDI 2020: t = 2 n (n - 1) M / ((n^2 + k n - 2 k) B) for k servers next to n ranks."""
    size, pieces = 80_000_000, 100
    transport = DctcpTransport(packet_bytes=9000)
    topology = Star(hosts=ranks + servers, host_link=LinkSpec(rate_gbps=10.0))
    switches = SwitchSpec(packet_bytes=9000, buffer_packets=400, ecn=EcnSpec(min_packets=11, max_packets=11))
    simulation = Simulation(Scenario(topology=topology, transports={"t": transport}, switches=switches))
    builder = GraphBuilder()
    for piece in range(pieces):
        spec = AllReduceSpec(range(ranks), size // pieces, 0, order=piece, message=piece)
        byteps(builder, spec, range(ranks, ranks + servers))
    graph = builder.build()
    simulation.submit(graph)
    simulation.run()
    busiest = 2 * ranks * (ranks - 1) * size / (ranks**2 + servers * ranks - 2 * servers)
    sent = graph.nodes[graph.nodes["size_bytes"] > 0]
    for end in ("source", "target"):
        loads = np.bincount(sent[end], sent["size_bytes"])
        assert loads == pytest.approx(np.full(ranks + servers, busiest), rel=1e-4)
    wire = transport.packet_bytes / (transport.packet_bytes - transport.header_bytes)
    assert 1.0 < simulation.engine.now_ps / 1e12 / (busiest * wire * 8 / 10e9) < 1.1


def test_byteps_takes_at_most_as_many_servers_as_ranks():
    with pytest.raises(ValueError, match="at most as many servers as ranks; got 3 and 2"):
        byteps(GraphBuilder(), AllReduceSpec((0, 1), 10, 0), (2, 3, 4))
    with pytest.raises(ValueError, match="workers and servers at once"):
        byteps(GraphBuilder(), AllReduceSpec((0, 1), 10, 0), (1,))
