# SPDX-License-Identifier: Apache-2.0
"""Jobs that train as FSDP does: bytes, times, order and what may be lost."""

import numpy as np
import pytest

from dlcp.sim.engines.packet_engine import PacketEngineName
from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting
from dlcp.sim.experiments.running import run
from dlcp.sim.graphs.collectives import RESULT_MESSAGE
from dlcp.sim.graphs.graph import Graph
from dlcp.sim.jobs.models import StepProfile, TimedLayer, joined_layers, step_profile
from dlcp.sim.jobs.step_graph import class_shares, parameter_pieces, pieces_of, step_graph
from dlcp.sim.jobs.training import TrainingJob, place_jobs, profile_of
from dlcp.sim.jobs.training_run import training
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import LeafSpine, Star, TopologySpec
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.simulation import Simulation
from dlcp.sim.transports.specs import (
    CubicTransport,
    DctcpTransport,
    DlcpTransport,
    NdpTransport,
    NewRenoTransport,
    PFabricTransport,
    PiasTransport,
    SwiftTransport,
)

WORKERS, VALUES, LAYERS = 4, 40_000, 5
FORWARD_S, BACKWARD_S = 0.001, 0.002
TRANSPORTS = {
    "dctcp": (DctcpTransport(), "fifo"),
    "reno": (NewRenoTransport(), "fifo"),
    "cubic": (CubicTransport(), "fifo"),
    "swift": (SwiftTransport(), "fifo"),
    "pias": (PiasTransport(), "priority"),
    "pfabric": (PFabricTransport(), "pfabric"),
    "ndp": (NdpTransport(), "trim"),
    "dlcp": (DlcpTransport(), "dlcp"),
    "wide": (DctcpTransport(initial_window_packets=1000.0, ack_bytes=1), "fifo"),  # as if nothing else were sent
    "mlt": (DlcpTransport(immediate=True, error_feedback=False), "dlcp"),
}


def profile(values: int = VALUES, scale: float = 1.0) -> StepProfile:
    layer = TimedLayer("layer", values, scale * FORWARD_S, scale * BACKWARD_S)
    return StepProfile("m", (layer,) * LAYERS, 1, "-")


def job(**changes: object) -> TrainingJob:
    return TrainingJob(**{"name": "j", "workers": WORKERS, "sharding": "fsdp", "transport": "t", "steps": 2} | changes)


def graph_of(spec: TrainingJob, given: StepProfile, steps: int = 1) -> Graph:
    placed = place_jobs([spec], WORKERS, 1)[0]
    placed.profile = given
    parts = pieces_of(spec, given.layers)
    return step_graph(placed, parts, np.ones((steps, WORKERS)), 0, 0).graph


STAR = Star(hosts=WORKERS, host_link=LinkSpec(rate_gbps=10.0))


def simulated(
    spec: TrainingJob,
    name: str,
    given: StepProfile,
    engine: PacketEngineName = "reference",
    topology: TopologySpec = STAR,
    buffer_packets: int = 240,
) -> tuple:
    """Return the durations of steps, and the nodes and records of all messages and computations."""
    transport, discipline = TRANSPORTS[name]
    setting = RunSetting(
        topology=topology,
        switches=SwitchSpec(discipline=discipline, buffer_packets=buffer_packets),
        transports={"t": transport},
        training=(spec,),
        seed=1,
    )
    kept = []
    simulation = Simulation(
        setting,
        engine=engine,
        class_shares=class_shares(),
        on_records=lambda submitted, records: kept.append((submitted.graph.nodes, records)),
    )
    progress = place_jobs([spec], WORKERS, 1)[0]
    progress.profile = given
    simulation.process(training(simulation, progress))
    simulation.run()
    simulation.flush_records()
    nodes, records = (np.concatenate(each) for each in zip(*kept, strict=True))
    return progress.step_s, nodes, records


@pytest.mark.parametrize("scheduler", ["fifo", "dlcp"])
@pytest.mark.parametrize("reshard", [True, False])
def test_bytes_are_those_of_fsdp(scheduler: str, reshard: bool) -> None:
    """Each rank sends (n - 1) / n of the model in each collective: one reduces, and one or two gather."""
    spec = job(scheduler=scheduler, reshard_after_forward=reshard)
    nodes = graph_of(spec, profile(), steps=3).nodes
    model = 4 * VALUES * LAYERS
    each = model * (WORKERS - 1) // WORKERS
    results = (nodes["message"] & RESULT_MESSAGE) != 0
    for step in range(3):
        for rank in range(WORKERS):
            own = (nodes["size_bytes"] > 0) & (nodes["source"] == rank) & (nodes["step"] == step)
            assert nodes["size_bytes"][own].sum() == (3 if reshard else 2) * each
            assert nodes["size_bytes"][own & ~results].sum() == each
    sends = nodes["size_bytes"] > 0
    named = nodes[["step", "message", "sender"]][sends]
    assert len(np.unique(named)) == len(named), "switches tell all messages apart"


@pytest.mark.parametrize("name", TRANSPORTS)
def test_any_transport_that_takes_a_ring_takes_shards(name: str) -> None:
    steps, nodes, records = simulated(
        job(loss_bound=0.1, scheduler="dlcp" if name in ("dlcp", "mlt") else "fifo"), name, profile(4000, 0.05)
    )
    assert len(steps) == 2
    assert (records["end_ps"][nodes["size_bytes"] > 0] > 0).all()
    assert min(steps) >= LAYERS * 0.05 * (FORWARD_S + BACKWARD_S)


@pytest.mark.parametrize("reshard", [True, False])
def test_an_empty_network_takes_what_theory_says(reshard: bool) -> None:
    """All but the first gathers and the last reduction is hidden; each takes n - 1 rounds of a shard over two hops."""
    spec = job(reshard_after_forward=reshard, steps=3)
    steps, *_ = simulated(spec, "wide", profile())
    shard = 4 * VALUES // WORKERS
    transport = TRANSPORTS["wide"][0]
    payload = transport.packet_bytes - transport.header_bytes
    full, rest = divmod(shard, payload)
    sizes = [transport.packet_bytes] * full + ([rest + transport.header_bytes] if rest else [])
    # The switch sends from when it has the first packet; each link delays by 1 us.
    round_s = (sizes[0] + sum(sizes)) * 8 / 10e9 + 2e-6
    exposed = 3 if reshard else 2
    expected = LAYERS * (FORWARD_S + BACKWARD_S) + exposed * (WORKERS - 1) * round_s
    # The first backward pass of all begins with parameters gathered, if they are kept.
    assert steps == pytest.approx([expected] * 3, rel=2e-4)


def test_collectives_share_the_links_if_nothing_is_computed() -> None:
    steps, nodes, _ = simulated(job(steps=3), "dctcp", profile(VALUES, 0.0))
    sent = nodes["size_bytes"][(nodes["source"] == 0) & (nodes["step"] == 1)].sum()
    least = sent * 1500 / 1440 * 8 / 10e9
    assert least < steps[1] < 1.25 * least


def test_parameters_are_gathered_one_layer_ahead() -> None:
    _, nodes, records = simulated(job(), "dctcp", profile())
    compute = (nodes["delay_ps"] > 0) & (nodes["source"] == 0) & (nodes["step"] == 1)
    begins = np.sort(records["end_ps"][compute] - nodes["delay_ps"][compute])
    results = (nodes["message"] & RESULT_MESSAGE) != 0
    numbers = np.unique(nodes["message"][results & (nodes["step"] == 1)] & ~RESULT_MESSAGE)
    gathers = [
        records["begin_ps"][results & (nodes["step"] == 1) & ((nodes["message"] & ~RESULT_MESSAGE) == number)].min()
        for number in numbers
    ]
    back, ahead = sorted(gathers[:LAYERS]), sorted(gathers[LAYERS:])
    # After the first, each gather begins when the layer before it begins to compute.
    assert len(gathers) == 2 * LAYERS
    for found, passes in ((back, begins[:LAYERS]), (ahead, begins[LAYERS:])):
        assert found[0] < passes[0]
        assert found[1:] == pytest.approx(passes[:-1], abs=1)


@pytest.mark.parametrize("name", ["dlcp", "mlt"])
def test_parameters_are_never_lost_and_gradients_within_the_bound(name: str) -> None:
    bound = 0.1
    spec = job(scheduler="dlcp", loss_bound=bound)
    # Two hops of the ring cross a slow link, which also loses packets at random.
    slow = LinkSpec(rate_gbps=4.0, loss_ratio=0.01)
    topology = LeafSpine(leaves=2, spines=1, hosts_per_leaf=2, host_link=LinkSpec(rate_gbps=10.0), fabric_link=slow)
    found = {}
    for engine in ("kernel", "reference"):
        steps, nodes, records = simulated(spec, name, profile(VALUES, 0.01), engine, topology, buffer_packets=20)
        results = (nodes["message"] & RESULT_MESSAGE) != 0
        sends = nodes["size_bytes"] > 0
        assert not records["missing_packets"][results & sends].any()
        assert (records["missing_packets"] <= bound * records["packets"]).all()
        found[engine] = (steps, records)
    np.testing.assert_array_equal(found["kernel"][1], found["reference"][1])
    assert found["kernel"][0] == found["reference"][0]
    gradients, parameters = sends & ~results, sends & results
    assert records["missing_packets"][gradients].sum() > 0
    assert (records["sent_packets"] > records["packets"])[parameters].any(), "nothing was lost that had to come again"
    queues = nodes["queue"]
    assert set(queues[parameters].tolist()) == {6}
    assert set(queues[gradients].tolist()) == {2, 3, 4, 5, 6}
    assert nodes["order"][parameters].max() < nodes["order"][gradients].min()


def test_blocks_are_sharded_as_one() -> None:
    spec = job(model="bert_large", gpu="a100", unit_bytes=50_000_000)
    found, whole = profile_of(spec), step_profile("bert_large", "a100")
    assert len(found.layers) == 1 + 24 + 1
    assert found.layers[1].name == "layer0.attention+layer0.ff"
    assert found.parameters == whole.parameters
    assert found.compute_s == pytest.approx(whole.compute_s)
    assert all(piece.size_bytes >= 50_000_000 for piece in parameter_pieces(spec, found.layers)[:-1])
    # A layer without parameters, such as an output that shares the embedding's, belongs to the one before it.
    layers = tuple(TimedLayer(str(count), count, 1.0, 2.0) for count in (0, 7, 0, 7, 0))
    joined = joined_layers(StepProfile("m", layers, 1, "-"), 0)
    assert [layer.name for layer in joined.layers] == ["0+7+0", "7+0"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collective": "direct"}, "sharding fsdp is for the collectives ring and .*; got collective 'direct'"),
        ({"scheduler": "p3"}, "scheduler 'p3'"),
        ({"pipeline": "3-1"}, "pipeline '3-1'"),
        ({"piece_bytes": 1000}, "piece_bytes 1000; change these, or leave out sharding"),
        ({"sharding": "none", "reshard_after_forward": False}, "are for `sharding: fsdp`; add it"),
        ({"sharding": "none", "unit_bytes": 1}, "are for `sharding: fsdp`; add it"),
    ],
)
def test_contradictions_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**fields)


def test_flows_take_about_as_long_and_files_count_what_is_lost() -> None:
    pytest.importorskip("numba")
    found = {}
    for engine in ("packets", "flows"):
        setting = RunSetting(
            topology=STAR,
            switches=SwitchSpec(discipline="dlcp"),
            transports={"t": DlcpTransport()},
            training=(job(model="10MB", scheduler="dlcp", loss_bound=0.1),),
            engine=engine,
        )
        found[engine] = run(ExperimentRun(experiment="test", point={}, setting=setting, convergence="published"))
    packets, flows = (found[engine]["metrics"] for engine in ("packets", "flows"))
    assert flows["step_s"] == pytest.approx(packets["step_s"], rel=0.05)
    assert packets["result_loss_ratio"] == packets["loss_ratio"] == 0
    assert packets["contribution_sent_ratio"] == pytest.approx(1, abs=0.01)
