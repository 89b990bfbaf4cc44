# SPDX-License-Identifier: Apache-2.0
"""Scenarios drawn at random, small enough for the slow engine, with everything in them that a scenario can have."""

import random

from dlcp.sim import CollectiveJob, FailureSpec, Scenario, TrafficSpec
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Dragonfly, FatTree, LeafSpine, RailOptimised, Star, TopologySpec, build_topology
from dlcp.sim.scenario import EcnSpec, SwitchSpec
from dlcp.sim.transports.specs import (
    CubicTransport,
    DctcpTransport,
    DlcpTransport,
    InterleavingTransport,
    NdpTransport,
    NewRenoTransport,
    NsccTransport,
    PFabricTransport,
    PiasTransport,
    RcccTransport,
    SwiftTransport,
    TailProbeTransport,
    TransportSpec,
)

TRANSPORTS = (
    DlcpTransport,
    DctcpTransport,
    DlcpTransport,
    NewRenoTransport,
    DlcpTransport,
    CubicTransport,
    SwiftTransport,
    DlcpTransport,
    PiasTransport,
    PFabricTransport,
    NdpTransport,
    NsccTransport,
    DlcpTransport,
    RcccTransport,
)

OWN_DISCIPLINE = {
    PFabricTransport: "pfabric",
    NdpTransport: "trim",
    NsccTransport: "trim",
    RcccTransport: "trim",
    PiasTransport: "priority",
}


def draw(seed: int) -> Scenario:
    dice = random.Random(seed)
    topology = _topology(dice)
    hosts = list(range(build_topology(topology).hosts))
    dice.shuffle(hosts)
    kind = TRANSPORTS[seed % len(TRANSPORTS)]
    jobs = [
        CollectiveJob(
            name="first",
            hosts=tuple(hosts[: dice.randint(3, min(8, len(hosts)))]),
            size_bytes=dice.choice([20_000, 100_000, 250_000]),
            collective=dice.choice(["ring", "direct", "parameter_server", "parameter_server"]),
            transport="t",
            steps=dice.randint(1, 2),
            compute_s=dice.choice([0.0, 2e-5]),
            loss_bound=dice.choice([0.0, 0.05, 0.2]),
            queue=dice.choice([2, 4, 6]),
        )
    ]
    if dice.random() < 0.4:
        jobs.append(
            CollectiveJob(
                name="second",
                hosts=tuple(hosts[-3:]),
                size_bytes=60_000,
                transport="t",
                steps=2,
                start_s=1e-5,
                loss_bound=0.1,
            )
        )
    sizes = ((500.0, 0.0), (5000.0, 0.6), (60000.0, 1.0))
    flows = TrafficSpec(name="flows", load=0.3, sizes=sizes, transport="flows", stop_s=1e-4)
    return Scenario(
        any_discipline=True,
        topology=topology,
        switches=_switches(dice, kind),
        transports={"t": _transport(dice, kind, trimming=seed // len(TRANSPORTS) % 2 == 0), "flows": DctcpTransport()},
        jobs=tuple(jobs),
        traffic=(flows,) if dice.random() < 0.5 else (),
        failures=_failures(dice, topology) if dice.random() < 0.3 else (),
        seed=seed,
        stop_s=0.2,
    )


def _incast(
    transport: TransportSpec, switches: SwitchSpec, failures: tuple[FailureSpec, ...] = (), loss_bound: float = 0.0
) -> Scenario:
    job = CollectiveJob(
        name="job",
        hosts=tuple(range(6)),
        size_bytes=200_000,
        collective="parameter_server",
        transport="t",
        loss_bound=loss_bound,
    )
    topology = LeafSpine(leaves=2, spines=1, hosts_per_leaf=3, host_link=LinkSpec(rate_gbps=10.0))
    return Scenario(
        topology=topology, switches=switches, transports={"t": transport}, jobs=(job,), failures=failures, stop_s=0.5
    )


def _taking_turns(transport: InterleavingTransport, switches: SwitchSpec) -> Scenario:
    """Jobs that share a link, for steps that are long enough to leave slow start."""
    topology = LeafSpine(leaves=2, spines=1, hosts_per_leaf=3, fabric_link=LinkSpec(rate_gbps=10.0))
    jobs = tuple(
        CollectiveJob(
            name=f"job{number}",
            hosts=(number, number + 3),
            size_bytes=300_000,
            transport="t",
            steps=4,
            compute_s=2e-4,
            start_s=number * 5e-5,
        )
        for number in range(2)
    )
    return Scenario(topology=topology, switches=switches, transports={"t": transport}, jobs=jobs)


RARE = (
    _incast(
        NewRenoTransport(),
        SwitchSpec(ecn=EcnSpec(min_packets=3, max_packets=40, max_probability=0.2, drop_incapable=True)),
    ),
    _incast(
        PFabricTransport(probe_after_timeouts=2),
        SwitchSpec(discipline="pfabric", buffer_packets=12),
        (FailureSpec(nodes=("leaf0", "spine0"), loss_ratio=0.9, start_s=2e-5, stop_s=8e-4),),
    ),
    _incast(
        DlcpTransport(trimming=True),
        SwitchSpec(discipline="dlcp", buffer="queue", buffer_packets=60),
        (FailureSpec(nodes=("leaf0", "spine0"), loss_ratio=0.3, start_s=2e-5, stop_s=8e-4),),
        loss_bound=0.03,
    ),
    _incast(
        DlcpTransport(trimming=True),
        SwitchSpec(discipline="dlcp", buffer="queue", buffer_packets=30),
        loss_bound=0.1,
    ),
    _taking_turns(NewRenoTransport(step_gap_us=100), SwitchSpec(buffer_packets=12)),
    _taking_turns(DctcpTransport(step_gap_us=100), SwitchSpec(ecn=EcnSpec(min_packets=5, max_packets=5))),
)
"""Cases that random scenarios seldom reach: RED's drops, pFabric's questions, a trimmed packet that the loss bound does
not cover, a trimmed tail probe, and MLTCP's second step."""


def _topology(dice: random.Random) -> TopologySpec:
    rate = dice.choice([10.0, 25.0, 40.0, 100.0])

    def link(loss_ratio: float = 0.0) -> LinkSpec:
        slower, delay = dice.choice([1, 1, 0.4]), dice.choice([0.2, 1.0, 3.0])
        return LinkSpec(rate_gbps=rate * slower, delay_us=delay, loss_ratio=loss_ratio)

    lossy = link(dice.choice([0, 0, 0.002]))
    return dice.choice(
        [
            Star(hosts=dice.randint(3, 9), host_link=link()),
            LeafSpine(leaves=3, spines=2, hosts_per_leaf=2, host_link=link(), fabric_link=lossy),
            LeafSpine(leaves=2, spines=dice.randint(1, 3), hosts_per_leaf=3, host_link=link(), fabric_link=link()),
            FatTree(ports=4, host_link=link(), fabric_link=link()),
            Dragonfly(
                groups=3,
                routers_per_group=2,
                hosts_per_router=1,
                host_link=link(),
                local_link=link(),
                global_link=link(),
            ),
            RailOptimised(
                servers=4, gpus_per_server=2, servers_per_pod=2, spines=2, host_link=link(), fabric_link=link()
            ),
        ]
    )


def _switches(dice: random.Random, kind: type) -> SwitchSpec:
    discipline = OWN_DISCIPLINE.get(kind) or dice.choice(["fifo", "priority", "dlcp"])
    if kind is DlcpTransport and dice.random() < 0.8:
        discipline = "dlcp"
    low = dice.randint(2, 20)
    red = EcnSpec(min_packets=low, max_packets=low + 20, max_probability=0.3, drop_incapable=dice.random() < 0.5)
    return SwitchSpec(
        discipline=discipline,
        buffer_packets=dice.choice([12, 30, 100]),
        buffer=dice.choice(("queue", "port", "switch")),
        ecn=dice.choice([None, EcnSpec(min_packets=low, max_packets=low), red]),
        spraying=dice.choice(("hash", "hash", "random", "round_robin", "least_queue")),
        mark_at=dice.choice([0.1, 0.3]),
        trim_choice=dice.choice(["arriving", "random"]),
    )


def _transport(dice: random.Random, kind: type, *, trimming: bool) -> TransportSpec:
    options: dict[str, object] = {}
    if dice.random() < 0.5:
        options["min_timeout_us"] = dice.choice([60.0, 400.0])
    if dice.random() < 0.3:
        options["packet_bytes"] = 9000
    if issubclass(kind, TailProbeTransport):
        options["tail_probe"] = dice.random() < 0.7
    if kind is PFabricTransport and dice.random() < 0.5:
        options["probe_after_timeouts"] = 2
    if kind is DlcpTransport:
        options["immediate"] = dice.random() < 0.4
        options["trimming"] = trimming
        options["switch_hops"] = dice.choice([1, 2])
        options["reorder_packets"] = dice.choice([8, 64])
        options["queue"] = dice.choice([0, 4, 4, 4])
    if dice.random() < (0.15 if kind is DlcpTransport else 0.5):
        options["balancing"] = dice.choice(["flow", "packet"])
    return kind(**options)


def _failures(dice: random.Random, topology: TopologySpec) -> tuple[FailureSpec, ...]:
    network = build_topology(topology)
    link = network.links[2 * dice.randrange(len(network.links) // 2)]
    return (
        FailureSpec(
            nodes=(network.names[link.source], network.names[link.target]),
            loss_ratio=dice.choice([0.01, 0.1, 1.0]),
            start_s=2e-5,
            stop_s=dice.choice([1.5e-4, 6e-4]),
            reroute_s=1e-5,
        ),
    )
