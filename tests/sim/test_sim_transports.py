# SPDX-License-Identifier: Apache-2.0
"""Each transport alone does what its authors say; on the slow engine, for the other one agrees with it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from dlcp.sim import CollectiveJob, FailureSpec, Scenario, Simulation, simulate
from dlcp.sim.engines.network_tables import TransportRules, make_plan
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.engines.reference import MessageStream
from dlcp.sim.engines.rules import (
    is_limited,
    measure_rtt,
    on_ack,
    on_begin,
    on_loss,
    on_nack,
    on_pull,
    on_send,
    on_timeout,
    packet_hash,
    timeout_ps,
    wanted_credit,
)
from dlcp.sim.experiments.fitted_network import suited_switches
from dlcp.sim.experiments.scenario_run import failure
from dlcp.sim.graphs.graph import OWN_LANE, GraphBuilder
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import LeafSpine, Star, build_topology
from dlcp.sim.scenario import EcnSpec, SwitchSpec
from dlcp.sim.transports.specs import (
    CubicTransport,
    DctcpTransport,
    DlcpTransport,
    NdpTransport,
    NewRenoTransport,
    NsccTransport,
    PFabricTransport,
    PiasTransport,
    RcccTransport,
    SwiftTransport,
)

LINK = LinkSpec(rate_gbps=10.0, delay_us=1.0)
PACKET_PS = 1_200_000


def stream(spec) -> tuple[MessageStream, TransportRules]:
    rules = make_plan(build_topology(Star(hosts=2)), SwitchSpec(), {"t": spec}, (), 1).transports[0]
    return MessageStream(None, rules), rules


def run(transport, switches: SwitchSpec, messages, topology=None, seed: int = 1, engine: str = "reference"):
    """Run messages of (source, target, bytes, begin_ps) and further options; return records, counts, simulation."""
    scenario = Scenario(
        topology=topology or Star(hosts=9, host_link=LINK), switches=switches, transports={"t": transport}, seed=seed
    )
    kept = []
    simulation = Simulation(scenario, engine=engine, on_records=lambda _, records: kept.append(records))
    builder = GraphBuilder()
    for source, target, size, begin, *options in messages:
        builder.messages(
            source, target, size, transport=0, lane=OWN_LANE, delay_ps=begin, **(options[0] if options else {})
        )
    simulation.submit(builder.build())
    simulation.run()
    assert len(kept) == 1, "everything ends, acknowledgements included"
    return kept[0], simulation.engine.counts, simulation


def took(record) -> int:
    return int(record["end_ps"] - record["begin_ps"])


def test_slow_start_doubles_every_round_trip():
    link = LinkSpec(rate_gbps=100.0, delay_us=100.0)
    records, _, _ = run(
        NewRenoTransport(), SwitchSpec(), [(0, 1, 1440 * (10 + 20 + 40 + 80), 0)], Star(hosts=2, host_link=link)
    )
    # Three round trips of 400 us before the last window leaves, which takes half of one.
    assert took(records[0]) == pytest.approx(3.5 * 400_000_000, rel=0.05)


def test_new_reno_halves_once_for_all_that_was_lost_together():
    reno, rules = stream(NewRenoTransport(initial_window_packets=40))
    reno.number = 40
    for number in (3, 4, 9):
        on_loss(reno, rules, number, 0)
    assert reno.window == 20
    reno.number = 60
    on_timeout(reno, rules)
    assert (reno.window, reno.threshold) == (1, 10)


def test_cubic_is_back_at_its_peak_after_k_seconds():
    cubic, rules = stream(CubicTransport(initial_window_packets=1000))
    cubic.number = 1000
    on_loss(cubic, rules, 0, 0)
    assert cubic.window == pytest.approx(700)
    cubic.threshold = 0
    rtt_ps = 50_000_000_000  # long enough that Reno would grow more slowly
    measure_rtt(cubic, rules, rtt_ps)
    k_s = math.cbrt(300 / 0.4)
    now = 0
    while now < (k_s + 0.05) * 1e12:
        now += rtt_ps // 700
        on_ack(cubic, rules, 0, rtt_ps, 2000, now, 1)
    assert cubic.window == pytest.approx(1000, rel=0.01)


def test_dctcp_averages_the_marked_share():
    dctcp, rules = stream(DctcpTransport(initial_window_packets=10))
    marked = np.random.default_rng(1).random(4000) < 0.2
    for number, mark in enumerate(marked):
        dctcp.number = number + 10
        on_ack(dctcp, rules, int(mark), 1, number, 0, 1)
        dctcp.window = 10.0
    assert dctcp.alpha == pytest.approx(0.2, abs=0.08)
    before = dctcp.window
    dctcp.number = 5010
    on_ack(dctcp, rules, 1, 1, 5000, 0, 1)
    assert dctcp.window == pytest.approx(before * (1 - dctcp.alpha / 2))


@pytest.mark.parametrize("kind", [NewRenoTransport, DctcpTransport])
def test_mltcp_grows_the_faster_the_more_of_a_step_is_sent(kind):
    mltcp, rules = stream(kind(step_gap_us=100))
    mltcp.threshold = 0
    grown = []
    for step in range(2):
        for number in range(200):
            mltcp.window = 10.0
            on_ack(mltcp, rules, 0, 1, number, step * 1_000_000_000 + number * 1_000_000, 1)
            grown.append((mltcp.window - 10) * 10)
    assert grown[:200] == pytest.approx([1] * 200), "nobody knows yet how long a step is"
    assert grown[200:] == pytest.approx(np.linspace(0.25, 2, 201)[1:])


def test_jobs_with_mltcp_take_turns():
    """Two jobs whose exchanges overlap at first: with MLTCP, each comes to a step as short as that of a job alone."""

    def last_steps_ms(jobs: int, step_gap_us: float) -> float:
        scenario = Scenario(
            topology=LeafSpine(leaves=2, spines=1, hosts_per_leaf=3, fabric_link=LinkSpec(rate_gbps=10.0)),
            switches=SwitchSpec(ecn=EcnSpec(min_packets=8, max_packets=8)),
            transports={"t": DctcpTransport(step_gap_us=step_gap_us)},
            jobs=tuple(
                CollectiveJob(
                    name=f"job{number}",
                    hosts=(number, number + 3),
                    size_bytes=6_000_000,
                    transport="t",
                    steps=50,
                    compute_s=9.6e-3,
                    start_s=number * 5e-4,
                )
                for number in range(jobs)
            ),
        )
        ended = simulate(scenario, engine="kernel").steps
        return float(np.mean([np.diff(job.end_ps)[-5:] for job in ended])) / 1e9

    alone = last_steps_ms(1, 1000)
    assert last_steps_ms(2, 0) > 1.25 * alone
    assert last_steps_ms(2, 1000) == pytest.approx(alone, rel=0.02)


def test_dlcp_takes_loss_as_a_signal_and_a_silence_too():
    dlcp, rules = stream(DlcpTransport(initial_window_packets=40))
    dlcp.number = 40
    on_loss(dlcp, rules, 5, 0)
    on_loss(dlcp, rules, 6, 0)
    assert dlcp.window == 30
    dlcp.number = 50
    on_timeout(dlcp, rules)
    assert dlcp.window == 15
    for _ in range(8):
        on_timeout(dlcp, rules)
    assert timeout_ps(dlcp, rules) == 2 * 500_000_000  # it may wait in a lower queue


def test_swift_shrinks_in_proportion_to_the_delay_above_its_target():
    swift, rules = stream(SwiftTransport(target_us=20.0, initial_window_packets=100))
    measure_rtt(swift, rules, 10_000_000)
    for number, now in ((1, 100_000_000), (2, 100_000_001)):  # once a round trip
        on_ack(swift, rules, 0, 25_000_000, number, now, 1)
        assert swift.window == pytest.approx(100 * (1 - 0.8 * 5 / 25))


def test_swift_holds_the_delay_that_it_aims_at():
    messages = [(source, 0, 3_000_000, 0) for source in (1, 2)]
    _, counts, simulation = run(SwiftTransport(target_us=30.0), SwitchSpec(ecn=None), messages)

    assert counts[EngineCounter.DECLARED_LOST] == 0
    # 30 us hold some 25 packets, of which 4 us are on the wire.
    assert simulation.engine.port_bytes()["bytes_max"].max() < 50 * 1500


@pytest.mark.parametrize("transport", [NewRenoTransport(), CubicTransport()])
def test_tcp_delivers_everything_through_a_small_buffer(transport):
    messages = [(source, 0, 600_000, 0) for source in (1, 2, 3)]
    records, counts, _ = run(transport, SwitchSpec(buffer_packets=20, ecn=None), messages)

    assert counts[EngineCounter.DROPS_TAIL] > 0
    assert counts[EngineCounter.RETRANSMITTED] >= counts[EngineCounter.DROPS_TAIL]
    assert counts[EngineCounter.ARRIVED] == records["packets"].sum()


@pytest.mark.parametrize("transport", [NewRenoTransport, DctcpTransport, CubicTransport])
def test_the_tail_of_a_message_is_repaired_after_two_round_trips(transport):

    def repaired(tail_probe: bool) -> tuple[float, int, int]:
        # Three senders overflow a queue of 20 packets with the last packets of what they send.
        spec = transport(tail_probe=tail_probe, min_timeout_us=200_000.0, initial_window_packets=16)
        messages = [(source, 0, 2 * 1440, 0) for source in (1, 2, 3)]  # the round-trip time is known after these
        messages += [(source, 0, 16 * 1440, 1_000_000_000) for source in (1, 2, 3)]
        scenario = Scenario(
            topology=Star(hosts=9, host_link=LINK),
            switches=SwitchSpec(buffer_packets=20, ecn=None),
            transports={"t": spec},
        )
        kept = []
        simulation = Simulation(scenario, engine="reference", on_records=lambda _, records: kept.append(records))
        builder = GraphBuilder()
        for source, target, size, begin in messages:
            builder.messages(source, target, size, transport=0, delay_ps=begin)
        simulation.submit(builder.build())
        simulation.run()
        counts = simulation.engine.counts
        return (
            float(kept[0]["end_ps"].max()) / 1e9,
            int(counts[EngineCounter.TAIL_PROBES]),
            int(counts[EngineCounter.TIMEOUTS]),
        )

    took_ms, probes, timeouts = repaired(True)
    assert took_ms < 3
    assert probes > 0
    assert timeouts == 0
    took_ms, probes, timeouts = repaired(False)
    assert took_ms > 200
    assert probes == 0
    assert timeouts > 0


def test_pfabric_goes_into_probe_mode_after_some_timeouts_and_leaves_it_when_answered():

    # The link loses everything at first: timeouts of 45 us, so five of them after 225 us, then a question at each.
    topology = LeafSpine(leaves=2, spines=1, hosts_per_leaf=1, host_link=LINK, fabric_link=LINK)
    scenario = Scenario(
        topology=topology,
        switches=SwitchSpec(discipline="pfabric", buffer_packets=36),
        transports={"t": PFabricTransport()},
        failures=(FailureSpec(nodes=("leaf0", "spine0"), loss_ratio=0.9999, stop_s=5e-4),),
    )
    kept = []
    simulation = Simulation(scenario, engine="reference", on_records=lambda _, records: kept.append(records))
    simulation.process(failure(simulation, scenario.failures[0]))
    builder = GraphBuilder()
    builder.messages(0, 1, 144_000, transport=0, lane=OWN_LANE)
    simulation.submit(builder.build())
    simulation.run()
    counts = simulation.engine.counts
    # Data five times at most: a window of 18, then one packet at a time.
    assert kept[0]["sent_packets"][0] <= 100 + 18 + 4 + 4
    assert 5 <= counts[EngineCounter.PROBES] <= 8
    assert counts[EngineCounter.TIMEOUTS] == counts[EngineCounter.PROBES] + 4
    assert 500_000_000 < kept[0]["end_ps"][0] < 900_000_000


def test_pias_lets_short_messages_overtake_long_ones():
    messages = [(1, 0, 2_000_000, 0), (2, 0, 30_000, 500_000_000)]
    switches = SwitchSpec(discipline="priority")
    demotion = (50_000, 150_000, 450_000, 1_000_000)
    pias, _, _ = run(PiasTransport(demotion_bytes=demotion), switches, messages)
    plain, _, _ = run(DctcpTransport(initial_window_packets=20), SwitchSpec(ecn=None, buffer_packets=4000), messages)
    alone = 21 * PACKET_PS + 3_000_000 + PACKET_PS
    assert took(pias[1]) < 2 * alone + 15_000_000
    assert took(pias[1]) < took(plain[1])


def test_pfabric_finishes_what_has_least_left_first():
    messages = [(1, 0, 3_000_000, 0), (2, 0, 300_000, 500_000_000), (3, 0, 60_000, 600_000_000)]
    records, _, _ = run(PFabricTransport(), SwitchSpec(discipline="pfabric", buffer_packets=36), messages)
    for place in (1, 2):
        packets = records["packets"][place:].sum()  # the smaller one may come in between
        assert took(records[place]) < 1.25 * (packets * PACKET_PS + 5_000_000)
    assert np.argmax(records["end_ps"]) == 0


def test_ndp_trims_instead_of_dropping_and_paces_by_pulls():

    messages = [(source, 0, 150_000, 0) for source in range(1, 9)]
    records, counts, simulation = run(NdpTransport(), SwitchSpec(discipline="trim"), messages)
    assert counts[EngineCounter.TRIMS] > 0
    assert counts[EngineCounter.RETRANSMITTED] == counts[EngineCounter.TRIMS]
    assert counts[EngineCounter.TIMEOUTS] == counts[EngineCounter.DROPS_TAIL] == 0
    bound = records["packets"].sum() * PACKET_PS
    assert records["end_ps"].max() < 1.1 * bound
    # Eight packets whole, and headers of 64 bytes.
    assert simulation.engine.port_bytes()["bytes_max"].max() <= 8 * 1500 + 64 * counts[EngineCounter.TRIMS]


def test_nscc_follows_the_four_signals():
    """Without marks it grows, in proportion below the target and fairly above; both signals together shrink it."""
    nscc, rules = stream(NsccTransport(header_bytes=64, packet_bytes=4160, max_window_packets=1000))
    base, target = rules.base_rtt_ps, rules.target_ps
    assert base == target == 4_000_000 + 2 * 4224 * 80  # no trimming
    share = 4096 / 4160 * base / 12_000_000  # of the published growth, which is for 12 us

    def grown(marked: int, delay: int) -> float:
        """Return how much a window of 100 grows by nine acknowledgements; the ninth applies what all of them add."""
        nscc.window, now = 100.0, nscc.grown_at + base
        for _ in range(9):
            on_ack(nscc, rules, marked, base + delay, 0, now, True)
        return nscc.window - 100

    grown(0, 0)
    steady = 0.15 * share
    assert grown(1, target // 2) == pytest.approx(steady)
    assert grown(0, target // 2) == pytest.approx(steady + 9 * 4 * share * (target / 2 / 12e6) / 100, rel=1e-6)
    assert grown(0, target) == pytest.approx(steady + 9 * 5 * share / 100, rel=1e-6)
    nscc.mean_delay, nscc.cut_at = 1.5 * target, -base
    assert grown(1, 2 * target) == pytest.approx(-0.8 * 0.5 / 1.5 * 100, rel=0.02)
    nscc.mean_delay, nscc.cut_at = 9.0 * target, 0
    assert grown(1, 2 * target) == pytest.approx(-50, abs=0.1)


def test_nscc_adapts_quickly_to_what_arrives():
    """A round trip with trimmed packets and few others: the window is what arrived, and earlier marks do not count."""
    nscc, rules = stream(NsccTransport(max_window_packets=80))
    now = rules.base_rtt_ps
    on_ack(nscc, rules, 0, rules.base_rtt_ps, 0, now, True)
    nscc.in_flight = 30
    for _ in range(4):
        on_ack(nscc, rules, 1, 2 * rules.base_rtt_ps, 0, now, True)
    nscc.window = 40.0
    on_nack(nscc, rules, 0, rules.base_rtt_ps, now)
    assert nscc.window == 39
    on_nack(nscc, rules, 0, rules.base_rtt_ps, now + rules.base_rtt_ps + rules.target_ps + 1)
    assert nscc.window == 4
    for _ in range(20):
        on_ack(nscc, rules, 1, 9 * rules.base_rtt_ps, 0, 9 * now, True)
    assert nscc.window == 4


def test_ultra_ethernet_takes_all_entropies_in_turn():
    nscc, rules = stream(NsccTransport(entropies=16))
    rounds = [[packet_hash(nscc, rules, None, 0, 16 * turn + at, 0) for at in range(16)] for turn in range(9)]
    assert {frozenset(taken) for taken in rounds} == {frozenset(rounds[0])}
    assert len(set(rounds[0])) == 16
    assert len({tuple(taken) for taken in rounds}) > 4


def test_nscc_keeps_the_queue_near_its_target():
    """Marks begin below the target, and a queue of a bandwidth-delay product trims only the first windows."""
    star = Star(hosts=9, host_link=LinkSpec(rate_gbps=100.0, delay_us=3.0))
    switches = suited_switches(NsccTransport(), "trim", build_topology(star))
    messages = [(source, 0, 4_000_000, 0) for source in range(1, 5)]
    records, counts, _ = run(NsccTransport(), switches, messages, star)
    packets = records["packets"].sum()
    assert 0 < counts[EngineCounter.TRIMS] < 0.1 * packets
    assert counts[EngineCounter.MARKS] > 0
    assert counts[EngineCounter.TIMEOUTS] == counts[EngineCounter.DROPS_TAIL] == 0
    assert records["end_ps"].max() < 1.03 * packets * 4160 * 80
    times = records["end_ps"] - records["begin_ps"]
    assert times.min() > 0.8 * times.max()


def test_rccc_trims_first_windows_only_and_shares_the_link():
    """Senders have no more in flight than was pulled, at 99 % of the link's rate."""
    star = Star(hosts=9, host_link=LinkSpec(rate_gbps=100.0, delay_us=3.0))
    switches = suited_switches(RcccTransport(), "trim", build_topology(star))
    records, counts, simulation = run(
        RcccTransport(), switches, [(source, 0, 2_000_000, 0) for source in range(1, 9)], star
    )
    first = 8 * int(simulation.plan.transports[0].max_window_packets)
    assert 0 < counts[EngineCounter.TRIMS] < first - switches.trim_packets
    assert counts[EngineCounter.RETRANSMITTED] == counts[EngineCounter.TRIMS]
    assert counts[EngineCounter.TIMEOUTS] == 0
    assert records["end_ps"].max() < 1.01 / 0.99 * records["packets"].sum() * 4160 * 80
    assert records["end_ps"].min() > 0.95 * records["end_ps"].max()


def test_rccc_sends_without_credit_only_until_the_first_answer():
    rccc, rules = stream(RcccTransport(initial_window_packets=12, max_window_packets=16))
    rccc.backlog = 0
    message = SimpleNamespace(packets=100, in_flight=0, sent=0, refs=0)
    on_begin(rccc, rules, message)
    assert rccc.credit == 12
    on_send(rccc, rules, message, 0)
    assert wanted_credit(rccc, rules) == 5  # it needs 16 packets of credit, and has 11
    on_pull(rccc, rules, 4)
    assert (rccc.credit, wanted_credit(rccc, rules)) == (4, 16)
    on_pull(rccc, rules, 30)
    assert rccc.credit == 16, "no more than a window"


def test_rccc_counts_credit_so_that_a_lost_pull_does_no_harm():
    topology = LeafSpine(leaves=2, spines=1, hosts_per_leaf=2)
    scenario = Scenario(
        topology=topology,
        switches=suited_switches(RcccTransport(), "trim", build_topology(topology)),
        transports={"t": RcccTransport()},
        jobs=(CollectiveJob(name="job", hosts=(0, 1, 2, 3), size_bytes=2_000_000, transport="t", steps=2),),
        failures=(FailureSpec(nodes=("leaf0", "spine0"), loss_ratio=0.05),),
    )
    result = simulate(scenario, engine="reference")
    assert result.counts["drops_link"] > 10
    assert len(result.steps[0].end_ps) == 2


BOUND = {"loss_bound": 0.1, "queue": 4}


def test_dlcp_loses_nothing_on_an_idle_network_unless_it_stops_at_once():
    switches = SwitchSpec(discipline="dlcp")
    ceiling, _, _ = run(DlcpTransport(), switches, [(1, 0, 720_000, 0, BOUND)])
    immediate, _, _ = run(DlcpTransport(immediate=True), switches, [(1, 0, 720_000, 0, BOUND)])
    assert ceiling[0]["missing_packets"] == 0
    assert 0 < immediate[0]["missing_packets"] <= 50
    assert took(immediate[0]) < took(ceiling[0])


def test_dlcp_loses_under_congestion_within_the_bound_and_only_what_may_be_lost():

    messages = [(source, 0, 288_000, 0, BOUND | {"sender": source}) for source in range(1, 9)]
    records, counts, _ = run(DlcpTransport(), SwitchSpec(discipline="dlcp", buffer_packets=100), messages)
    assert records["missing_packets"].sum() > 0
    assert (records["missing_packets"] <= 20).all()
    assert 0 < counts[EngineCounter.DROPS_POLICY] <= 8 * 20
    assert counts[EngineCounter.DROPS_BY_CLASS] == 0
    reliable = [(source, 0, 288_000, 0, {"sender": source}) for source in range(1, 9)]
    records, counts, _ = run(DlcpTransport(), SwitchSpec(discipline="dlcp", buffer_packets=100), reliable)
    assert records["missing_packets"].sum() == counts[EngineCounter.DROPS_POLICY] == 0


def test_trimming_tells_dlcp_what_is_lost():
    """Without a probe, the receiver completes each message; the sender sends nothing again, and counts marks."""
    messages = [(source, 0, 288_000, 0, BOUND | {"sender": source}) for source in range(1, 9)]
    transport = DlcpTransport(trimming=True, min_timeout_us=1e5)
    records, counts, _ = run(transport, SwitchSpec(discipline="dlcp", buffer_packets=100), messages)
    assert 0 < counts[EngineCounter.TRIMS] == counts[EngineCounter.DECLARED_LOST] == records["missing_packets"].sum()
    assert counts[EngineCounter.DROPS_POLICY] == counts[EngineCounter.PROBES] == 0
    dlcp, rules = stream(DlcpTransport(initial_window_packets=40))
    marked, _ = stream(DlcpTransport(initial_window_packets=40))
    for number in (3, 4, 9):
        on_nack(dlcp, rules, number, 1, 0)
        on_ack(marked, rules, 1, 1, number, 0, is_limited(marked))
    assert dlcp.window == marked.window < 40


def test_dlcp_recovers_beyond_its_bound():
    topology = LeafSpine(
        leaves=2,
        spines=1,
        hosts_per_leaf=2,
        host_link=LINK,
        fabric_link=LinkSpec(rate_gbps=10.0, delay_us=1.0, loss_ratio=0.2),
    )
    messages = [(0, 2, 288_000, 0, BOUND), (1, 3, 288_000, 0, BOUND)]
    records, _, _ = run(DlcpTransport(min_timeout_us=100.0), SwitchSpec(discipline="dlcp"), messages, topology)
    assert (records["missing_packets"] <= 20).all()
    assert (records["sent_packets"] > records["packets"]).all()


@pytest.mark.parametrize(
    ("senders", "size_bytes", "switches", "loss_bound", "min_timeout_us"),
    [
        # Ten microseconds are less than the queue takes: packets are given up whose acknowledgements are on the way.
        (8, 14_400, SwitchSpec(discipline="dlcp", buffer_packets=30), 0.2, 10.0),
        (8, 14_400, SwitchSpec(discipline="dlcp", buffer_packets=30), 0.05, 10.0),
        (7, 14_400, SwitchSpec(discipline="dlcp", buffer_packets=100), 0.1, 10.0),
        (4, 2_880, SwitchSpec(discipline="trim", trim_packets=2), 0.1, 200.0),
    ],
)
def test_dlcp_probes_for_what_is_missing_whatever_comes_last(senders, size_bytes, switches, loss_bound, min_timeout_us):
    """The last news may be a late acknowledgement of what waits to be sent again, or that a packet was trimmed."""
    pytest.importorskip("numba")
    transport = DlcpTransport(min_timeout_us=min_timeout_us, reorder_packets=8)
    options = {"loss_bound": loss_bound, "queue": 4}
    messages = [(source, 0, size_bytes, 0, options | {"sender": source}) for source in range(1, senders + 1)]
    kernel, _, _ = run(transport, switches, messages, engine="kernel")
    reference, _, _ = run(transport, switches, messages)
    np.testing.assert_array_equal(kernel, reference)
    assert (reference["missing_packets"] <= math.floor(size_bytes / 1440 * loss_bound)).all()


def test_red_drops_what_cannot_be_marked():

    red = SwitchSpec(ecn=EcnSpec(min_packets=5, max_packets=50, max_probability=0.1, drop_incapable=True))
    messages = [(source, 0, 300_000, 0) for source in (1, 2, 3)]
    _, counts, _ = run(NewRenoTransport(), red, messages)
    assert counts[EngineCounter.DROPS_EARLY] > 0
    assert counts[EngineCounter.MARKS] == 0
    _, counts, _ = run(DctcpTransport(), red, messages)
    assert counts[EngineCounter.DROPS_EARLY] == 0
    assert counts[EngineCounter.MARKS] > 0
