# SPDX-License-Identifier: Apache-2.0
"""Training jobs that run as a pipeline: activations forward, their gradients back, averages among replicas of a stage.

A step is as many minibatches as the job has workers, so that its time compares with that of data parallelism. Each
worker runs forward and backward passes in turn, without a flush. Replicas of a stage average their gradients while they
compute, with the job's collective. A worker applies them after its next backward pass, which is one update later than
with data parallelism; otherwise the planner's estimate, the longer of computing and averaging, would be out of reach.
"""

import dataclasses
import itertools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.graphs.collectives import all_reduce
from dlcp.sim.graphs.graph import OWN_LANE, GraphBuilder, Nodes
from dlcp.sim.jobs.stage_planner import NetworkLevel, PipelinePlan, PipelineStage, parse_replicas, plan_pipeline
from dlcp.sim.jobs.step_graph import StepGraph, piece_spec, pieces_of
from dlcp.sim.jobs.training import PLANNED_PIPELINE, PlacedJob, computing_factors
from dlcp.sim.limits import picoseconds
from dlcp.sim.network.nodes import NetworkTopology
from dlcp.sim.simulation import Process, Simulation

PASSING_LANE: Final = 8
"""Lane of activations and their gradients, above those of averages, which are queues."""


def pipeline_of(job: PlacedJob, topology: NetworkTopology) -> PipelinePlan:
    """Return the stages of a pipelined job; the planner takes the rate of the workers' slowest link.

    Raises
    ------
    StagesError
        The model cannot be cut into the stages that the job names.
    """
    workers = set(job.workers)
    rate_gbps = min(link.spec.rate_gbps for link in topology.links if link.source in workers)
    named = None if job.spec.pipeline == PLANNED_PIPELINE else parse_replicas(job.spec.pipeline)
    return plan_pipeline(job.profile, [NetworkLevel(len(job.workers), rate_gbps * 1e9 / 8)], named)


def pipelined_training(simulation: Simulation, job: PlacedJob) -> Process:
    """Run a pipelined job's steps, and note when they end."""
    plan = pipeline_of(job, simulation.topology)
    # The pipeline drains while it ends; another step keeps it full until the last one that counts.
    factors = computing_factors(simulation.scenario.seed, job)
    factors = np.concatenate([factors, factors[-1:]])
    yield from simulation.until(job.start_s)
    job.begin(simulation)
    steps = pipeline_graph(job, plan, factors, simulation.transports[job.spec.transport])
    running = simulation.submit(steps.graph, label=(job.name, 0))
    job.minibatches = len(steps.ends) * len(job.workers)
    job.pipeline = plan.replicas
    for end in steps.ends:
        yield running.nodes[end]
        job.end_step(simulation)
    del job.end_ps[job.spec.steps :]
    yield running.closed


def pipeline_graph(job: PlacedJob, plan: PipelinePlan, factors: NDArray[np.float64], transport: int) -> StepGraph:
    """Return the passes of all minibatches through all stages.

    Parameters
    ----------
    factors
        float64 (steps, workers): each worker's computing time relative to the profile.
    transport
        Its number.
    """
    builder = GraphBuilder()
    size = len(job.workers)
    count = size * len(factors)
    minibatches = np.arange(count)
    steps = minibatches // size
    forward, backward = [], []
    first_worker = 0
    for number, stage in enumerate(plan.stages):
        workers = np.array(job.workers[first_worker : first_worker + stage.replicas])
        speed = factors[steps, first_worker + minibatches % stage.replicas]
        ahead, back = _stage_passes(builder, plan, stage, speed, workers[minibatches % stage.replicas], steps)
        _average(builder, job, plan, number, workers, ahead, back, transport)
        forward.append(ahead)
        backward.append(back)
        first_worker += stage.replicas
    first_worker = 0
    for number, (stage, following) in enumerate(itertools.pairwise(plan.stages)):
        sender = np.array(job.workers)[first_worker + minibatches % stage.replicas]
        first_worker += stage.replicas
        receiver = np.array(job.workers)[first_worker + minibatches % following.replicas]
        size_bytes = plan.profile.layers[stage.end - 1].output_bytes
        for source, target, before, after, message in (
            (sender, receiver, forward[number], forward[number + 1], 2 * number),
            (receiver, sender, backward[number + 1], backward[number], 2 * number + 1),
        ):
            sent = builder.messages(
                source,
                target,
                size_bytes,
                transport=transport,
                lane=OWN_LANE if job.spec.flows == "own" else PASSING_LANE,
                order=minibatches,
                job=job.number,
                step=steps,
                message=message,
                sender=minibatches & 0xFFFF,
            )
            builder.follow(before, sent)
            builder.follow(sent, after)
    ends = [builder.barrier(backward[0][steps == step], watched=True) for step in range(len(factors))]
    return StepGraph(builder.build(), tuple(ends), ())


def _stage_passes(
    builder: GraphBuilder,
    plan: PipelinePlan,
    stage: PipelineStage,
    speed: NDArray[np.float64],
    hosts: Nodes,
    steps: Nodes,
) -> tuple[Nodes, Nodes]:
    """Add a stage's passes; return the nodes of forward and backward passes, int64 (minibatches,) each."""
    layers = plan.profile.layers[stage.begin : stage.end]
    forward_s, backward_s = sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)
    forward, backward = (
        builder.delays(picoseconds(seconds * speed), host=hosts, step=steps) for seconds in (forward_s, backward_s)
    )
    for replica in range(stage.replicas):
        ahead, back = forward[replica :: stage.replicas], backward[replica :: stage.replicas]
        started = min(stage.in_flight, len(ahead))
        order = list(ahead[:started])
        for number, node in enumerate(back):
            order += [node, *ahead[started + number : started + number + 1]]
        builder.follow(order[:-1], order[1:])
    return forward, backward


def _average(
    builder: GraphBuilder,
    job: PlacedJob,
    plan: PipelinePlan,
    number: int,
    workers: NDArray[np.int64],
    forward: Nodes,
    backward: Nodes,
    transport: int,
) -> None:
    """Add the averages of a stage's gradients, once per round of its replicas, piece by piece."""
    stage = plan.stages[number]
    if stage.replicas == 1:
        return
    spec = job.spec
    layers = plan.profile.layers[stage.begin : stage.end]
    parts = pieces_of(spec, layers, stage.replicas)
    rounds = len(backward) // stage.replicas
    for turn in range(rounds):
        own = slice(turn * stage.replicas, (turn + 1) * stage.replicas)
        for at, piece in enumerate(parts):
            message = number * len(parts) + at + 2 * len(plan.stages)
            exchange = piece_spec(job, workers.tolist(), piece, transport, turn, message)
            exchange = dataclasses.replace(exchange, order=turn * len(parts) + piece.order)
            done = all_reduce(builder, spec.collective, exchange, backward[own], group=spec.group)
            # Applied after the next backward pass: the forward pass after that waits for the average.
            if (waiting := turn + 1 + stage.in_flight) < rounds:
                builder.follow(done, forward[waiting * stage.replicas : (waiting + 1) * stage.replicas])
