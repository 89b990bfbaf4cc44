# SPDX-License-Identifier: Apache-2.0
"""SimPy processes that a scenario describes: collective jobs, background flows, failures of links."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dlcp.sim.arithmetic import DRAW_LIMIT, PS_PER_S, seconds_to_ps
from dlcp.sim.collectives import Exchange, direct, parameter_server, ring
from dlcp.sim.graph import OWN_LANE, Graph, GraphBuilder
from dlcp.sim.scenario import BackgroundSpec, CollectiveJob, FailureSpec
from dlcp.sim.simulation import Process, Simulation

_BATCH = 512
"""Background flows that are drawn and submitted at once; each begins at its own time. Chosen by us."""


@dataclass(slots=True)
class StepTimes:
    """When each step of a job began and ended, in picoseconds."""

    name: str
    begin_ps: list[int] = field(default_factory=list)
    end_ps: list[int] = field(default_factory=list)


def collective_job(simulation: Simulation, spec: CollectiveJob, number: int, times: StepTimes) -> Process:
    """Compute and exchange, step by step; every rank waits for the exchange to end everywhere."""
    env = simulation.env
    yield env.timeout(seconds_to_ps(spec.start_s))
    for step in range(spec.steps):
        times.begin_ps.append(int(env.now))
        if spec.compute_s:
            yield env.timeout(seconds_to_ps(spec.compute_s))
        graph = collective_graph(spec, simulation.transports[spec.transport], number, step)
        yield simulation.submit(graph, label=(spec.name, step)).done
        times.end_ps.append(int(env.now))


def collective_graph(spec: CollectiveJob, transport: int, job: int = 0, step: int = 0) -> Graph:
    """Return one step's exchange."""
    builder = GraphBuilder()
    servers = spec.servers if spec.collective == "parameter_server" else 0
    exchange = Exchange(
        spec.hosts[servers:],
        spec.size_bytes,
        transport,
        queue=spec.queue,
        loss_bound=spec.loss_bound,
        job=job,
        step=step,
    )
    if spec.collective == "ring":
        ring(builder, exchange)
    elif spec.collective == "direct":
        direct(builder, exchange)
    else:
        parameter_server(builder, exchange, spec.hosts[:servers])
    return builder.build()


def background(simulation: Simulation, spec: BackgroundSpec, number: int) -> Process:
    """Submit flows as a Poisson process, in batches; a flow's place in the batch tells when it begins."""
    env = simulation.env
    random = simulation.random(1, number)
    hosts = np.array(spec.hosts or range(simulation.network.hosts))
    # A host's first link leads to the network; where it has another one, that leads to its neighbours only.
    first = {link.source: link.spec.rate_gbps for link in reversed(simulation.network.links)}
    rate_bps = sum(first[host] for host in hosts.tolist()) * 1e9
    flows_per_s = spec.load * rate_bps / 8 / mean_size(spec.sizes)
    yield env.timeout(seconds_to_ps(spec.start_s))
    stop_ps = seconds_to_ps(spec.stop_s)
    while env.now < stop_ps:
        times = np.cumsum(random.exponential(PS_PER_S / flows_per_s, _BATCH)).astype(np.int64)
        span = int(times[-1])
        times = times[times + int(env.now) < stop_ps]
        if len(times):
            submit_flows(simulation, spec, random, hosts, times)
        yield env.timeout(span)


def submit_flows(
    simulation: Simulation, spec: BackgroundSpec, random: np.random.Generator, hosts: Any, times: Any
) -> None:
    """Submit one flow for each of ``times`` (picoseconds from now)."""
    count = len(times)
    source = random.integers(len(hosts), size=count)
    target = (source + random.integers(1, len(hosts), size=count)) % len(hosts)
    builder = GraphBuilder()
    builder.messages(
        hosts[source],
        hosts[target],
        draw_sizes(spec.sizes, random.random(count)),
        transport=simulation.transports[spec.transport],
        lane=OWN_LANE,
        delay_ps=times,
    )
    simulation.submit(builder.build(), label=(spec.name, 0))


def draw_sizes(sizes: tuple[tuple[float, float], ...], uniform: Any) -> Any:
    """Return flow sizes in bytes for numbers between 0 and 1, by the inverse of the distribution."""
    values, probabilities = np.array(sizes, float).T
    return np.maximum(1, np.interp(uniform, probabilities, values)).astype(np.int64)


def mean_size(sizes: tuple[tuple[float, float], ...]) -> float:
    """Return the mean of a distribution in bytes."""
    values, probabilities = np.array(sizes, float).T
    middle = (values[1:] + values[:-1]) / 2
    return float(values[0] * probabilities[0] + (middle * np.diff(probabilities)).sum())


def failure(simulation: Simulation, spec: FailureSpec) -> Process:
    """Let a link lose packets for a while; route round one that loses all."""
    env, engine, network = simulation.env, simulation.engine, simulation.network
    links = network.between(*spec.nodes)
    yield env.timeout(seconds_to_ps(spec.start_s))
    engine.set_loss(links, round(spec.loss_ratio * DRAW_LIMIT))
    if spec.loss_ratio >= 1:
        yield env.timeout(seconds_to_ps(spec.reroute_s))
        simulation.failed_links.update(links)
        engine.set_routes(network.routes(simulation.failed_links))
    if spec.stop_s == float("inf"):
        return
    yield env.timeout(max(0, seconds_to_ps(spec.stop_s) - int(env.now)))
    for link in links:
        engine.set_loss([link], simulation.plan.links[link].loss)
    if spec.loss_ratio >= 1:
        simulation.failed_links.difference_update(links)
        engine.set_routes(network.routes(simulation.failed_links))
