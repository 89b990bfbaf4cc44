# SPDX-License-Identifier: Apache-2.0
"""Each way to share a buffer and to choose a path, alone, against what arithmetic says of it; on both engines."""

import numpy as np
import pytest

from dlcp.sim import CollectiveJob, FailureSpec, Scenario, Simulation, simulate
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.graphs.graph import GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import LeafSpine, Star
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.transports.specs import NewRenoTransport

pytest.importorskip("numba")
ENGINES = ("kernel", "reference")
PACKET = 1500
ROOM = 60
"""Packets that the buffer holds."""


def flood(
    engine: str, switches: SwitchSpec, targets: tuple[int, ...], queues: tuple[int, ...] = (0,), stop_s: float = 2e-3
) -> Simulation:
    """Let eight hosts send 80 packets at once to each target, shares of them in each queue."""
    transports = {"t": NewRenoTransport(initial_window_packets=100.0, min_timeout_us=1e5)}
    scenario = Scenario(topology=Star(hosts=8 + len(targets)), switches=switches, transports=transports, stop_s=stop_s)
    simulation = Simulation(scenario, engine=engine)
    builder = GraphBuilder()
    for target in targets:
        for senders, queue in zip(np.split(np.arange(8), len(queues)), queues, strict=True):
            builder.messages(senders, target, 80 * 1440, transport=0, queue=queue)
    simulation.submit(builder.build())
    simulation.run()
    return simulation


def at_ports(simulation: Simulation, values: np.ndarray, targets: tuple[int, ...]) -> np.ndarray:
    """Return what holds at the switch's ports to the targets; at the hosts' own end it is 0."""
    return np.array([values[simulation.topology.between("switch0", f"host{target}")].max() for target in targets])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_port_holds_what_it_has_room_for(engine: str) -> None:
    simulation = flood(engine, SwitchSpec(buffer="port", buffer_packets=ROOM, ecn=None), (8, 9))
    assert at_ports(simulation, simulation.engine.port_bytes()["bytes_max"], (8, 9)).tolist() == [ROOM * PACKET] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_each_queue_has_room_of_its_own(engine: str) -> None:
    switches = SwitchSpec(discipline="priority", buffer="queue", buffer_packets=ROOM, ecn=None)
    for queues in ((2,), (2, 5)):
        simulation = flood(engine, switches, (8,), queues)
        most = at_ports(simulation, simulation.engine.port_bytes()["bytes_max"], (8,))
        assert most.tolist() == [len(queues) * ROOM * PACKET]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("targets", "alpha"), [((8,), 1.0), ((8, 9), 1.0), ((8, 9, 10), 2.0)])
def test_a_shared_buffer_leaves_room_by_dynamic_thresholds(engine: str, targets: tuple[int, ...], alpha: float) -> None:
    """Choudhury and Hahne, 1998: n ports that want all come to alpha / (1 + n alpha) of the buffer each."""
    switches = SwitchSpec(buffer="switch", buffer_packets=ROOM * 2, alpha=alpha, ecn=None)
    # Each host sends for 9.6 us to each target, and all ports are full long before that is over.
    simulation = flood(engine, switches, targets, stop_s=9e-6 * len(targets))
    share = alpha / (1 + len(targets) * alpha) * ROOM * 2 * PACKET
    waiting = at_ports(simulation, simulation.engine.port_bytes()["bytes"], targets)
    # The eight send to one target after the other, so that packets come by eights.
    np.testing.assert_allclose(waiting, share, atol=4 * PACKET)


def uplink_packets(engine: str, spraying: str, balancing: str, fabric_gbps: float = 100.0) -> np.ndarray:
    """Packets of 400 that each of four uplinks carried."""
    topology = LeafSpine(leaves=2, spines=4, hosts_per_leaf=1, fabric_link=LinkSpec(rate_gbps=fabric_gbps))
    scenario = Scenario(
        topology=topology,
        switches=SwitchSpec(spraying=spraying, buffer_packets=1000, ecn=None),
        transports={"t": NewRenoTransport(initial_window_packets=400.0, reorder_packets=1000, balancing=balancing)},
        seed=3,
    )
    simulation = Simulation(scenario, engine=engine)
    builder = GraphBuilder()
    builder.messages(0, 1, 400 * 1440, transport=0)
    simulation.submit(builder.build())
    simulation.run()
    assert simulation.engine.counts[EngineCounter.RETRANSMITTED] == 0
    carried = simulation.engine.port_bytes()["sent_bytes"]
    names = simulation.topology.names
    ups = [simulation.topology.between("leaf0", name) for name in names if name.startswith("spine")]
    source = names.index("leaf0")
    forth = [next(link for link in pair if simulation.topology.links[link].source == source) for pair in ups]
    return carried[forth] / PACKET


@pytest.mark.parametrize("engine", ENGINES)
def test_packets_take_paths_as_configured(engine: str) -> None:
    assert sorted(uplink_packets(engine, "hash", "flow").tolist()) == [0, 0, 0, 400]
    assert uplink_packets(engine, "round_robin", "packet").tolist() == [100] * 4
    # Four standard deviations of a binomial distribution around a quarter.
    deviation = 4 * np.sqrt(400 * 0.25 * 0.75)
    at_random = uplink_packets(engine, "random", "packet")
    assert np.all(np.abs(at_random - 100) < deviation)
    assert len(set(at_random.tolist())) > 1
    # Uplinks of a quarter of the host's rate: one that is chosen while it has less than others is never far ahead.
    assert np.ptp(uplink_packets(engine, "least_queue", "packet", fabric_gbps=25.0)) <= 4
    assert uplink_packets(engine, "hash", "packet").sum() == 400


def test_a_lossy_link_loses_its_share() -> None:
    topology = Star(hosts=2, host_link=LinkSpec(loss_ratio=0.01))
    job = CollectiveJob(name="job", hosts=(0, 1), size_bytes=60_000_000, collective="ring", transport="t")
    counts = simulate(Scenario(topology=topology, transports={"t": NewRenoTransport()}, jobs=(job,))).counts
    hops = counts["hops_data"] + counts["hops_control"]
    assert hops > 100_000
    assert counts["drops_link"] == pytest.approx(0.01 * hops, abs=4 * np.sqrt(0.01 * hops))


@pytest.mark.parametrize("engine", ENGINES)
def test_packets_go_round_a_failed_link_once_it_is_known(engine: str) -> None:
    def lost(reroute_s: float) -> tuple[int, int]:
        failure = FailureSpec(nodes=("leaf0", "spine0"), loss_ratio=1.0, start_s=1e-5, reroute_s=reroute_s)
        scenario = Scenario(
            topology=LeafSpine(leaves=2, spines=2, hosts_per_leaf=2, host_link=LinkSpec(rate_gbps=10.0)),
            transports={"t": NewRenoTransport(balancing="packet", min_timeout_us=200.0)},
            jobs=(CollectiveJob(name="job", hosts=(0, 1, 2, 3), size_bytes=400_000, transport="t"),),
            failures=(failure,),
            stop_s=0.5,
        )
        result = simulate(scenario, engine=engine)
        return result.counts["drops_link"], result.steps[0].end_ps[0]

    soon, late = lost(1e-6), lost(2e-4)
    assert soon[0] < late[0]
    assert soon[1] < late[1]
