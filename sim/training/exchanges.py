# SPDX-License-Identifier: Apache-2.0
"""All-reduces beside those of `dlcp.sim.collectives`: recursive halving and doubling, a tree, and two levels."""

import dataclasses

import numpy as np
from dlcp.sim.collectives import PULL_MESSAGE, Exchange, direct, parameter_server, ring, shard_sizes
from dlcp.sim.graph import GraphBuilder, Nodes
from dlcp.sim.training.job import Collective


def all_reduce(
    builder: GraphBuilder,
    collective: Collective,
    exchange: Exchange,
    servers: tuple[int, ...],
    group: int,
    after: Nodes,
) -> Nodes:
    """Add an all-reduce.

    Parameters
    ----------
    servers
        Hosts that hold parameters, for ``parameter_server``.
    group
        Ranks that are close to each other, for ``hierarchical``.
    after
        One node per rank that has to be done before the rank takes part, int64 (ranks,).

    Returns
    -------
    One node per rank that is done when the rank has the result, int64 (ranks,).
    """
    if collective == "parameter_server":
        return parameter_server(builder, exchange, servers, after)
    if collective == "ring":
        return ring(builder, exchange, after)
    if collective == "direct":
        return direct(builder, exchange, after)
    if collective == "halving_doubling":
        return halving_doubling(builder, exchange, after)
    if collective == "tree":
        return tree(builder, exchange, after)
    return hierarchical(builder, exchange, group, after)


def halving_doubling(builder: GraphBuilder, exchange: Exchange, after: Nodes) -> Nodes:
    """Add Rabenseifner's all-reduce: halves with partners ever nearer, then back; ranks are a power of two."""
    hosts = np.asarray(exchange.hosts, np.int64)
    count = len(hosts)
    ranks = np.arange(count)
    done = after
    distances = [1 << bit for bit in reversed(range(count.bit_length() - 1))]
    turns = [(distance, True) for distance in distances] + [(distance, False) for distance in reversed(distances)]
    for turn, (distance, reducing) in enumerate(turns):
        size = max(1, exchange.size_bytes * distance // count)
        done = _turn(builder, exchange, hosts, ranks ^ distance, size, turn, reducing, done)
    return done


def _turn(
    builder: GraphBuilder,
    exchange: Exchange,
    hosts: Nodes,
    partners: Nodes,
    size: int,
    turn: int,
    reducing: bool,
    before: Nodes,
) -> Nodes:
    """Let every rank send to its partner once it is ready; return when each has sent nothing it still waits for."""
    ranks = np.arange(len(hosts))
    messages = builder.messages(
        hosts,
        hosts[partners],
        size,
        message=exchange.message | (0 if reducing else PULL_MESSAGE),
        sender=(ranks + turn * len(hosts)) & 0xFFFF,
        loss_bound=exchange.loss_bound if reducing else 0.0,
        **exchange.common(),
    )
    builder.follow(before, messages)
    ends = builder.delays(np.zeros(len(hosts), np.int64))
    builder.follow(before, ends)
    builder.follow(messages[np.argsort(partners)], ends)
    return ends


def tree(builder: GraphBuilder, exchange: Exchange, after: Nodes) -> Nodes:
    """Add a binary tree: everybody's values go up to rank 0, the result comes down. Rank r is below (r - 1) / 2."""
    hosts = np.asarray(exchange.hosts, np.int64)
    count = len(hosts)
    ranks = np.arange(count)
    ready = builder.delays(np.zeros(count, np.int64))
    builder.follow(after, ready)
    ups = builder.messages(
        hosts[1:],
        hosts[(ranks[1:] - 1) // 2],
        exchange.size_bytes,
        message=exchange.message,
        sender=ranks[1:],
        loss_bound=exchange.loss_bound,
        **exchange.common(),
    )
    builder.follow(ready[1:], ups)
    builder.follow(ups, ready[(ranks[1:] - 1) // 2])
    downs = builder.messages(
        hosts[(ranks[1:] - 1) // 2],
        hosts[1:],
        exchange.size_bytes,
        message=exchange.message | PULL_MESSAGE,
        sender=ranks[1:],
        **exchange.common(),
    )
    parents = (ranks[1:] - 1) // 2
    builder.follow(ready[0], downs[parents == 0])
    builder.follow(downs[parents[parents > 0] - 1], downs[parents > 0])
    return np.concatenate([ready[:1], downs])


def hierarchical(builder: GraphBuilder, exchange: Exchange, group: int, after: Nodes) -> Nodes:
    """Add two levels: shards are summed within a group, then in rings across groups, then collected within."""
    hosts = np.asarray(exchange.hosts, np.int64)
    groups = len(hosts) // group
    if groups == 1 or group == 1:
        return (direct if groups == 1 else ring)(builder, exchange, after)
    grid = np.arange(len(hosts)).reshape(groups, group)
    sizes = shard_sizes(exchange.size_bytes, group)
    summed = builder.delays(np.zeros(len(hosts), np.int64))
    builder.follow(after, summed)
    ends = builder.delays(np.zeros(len(hosts), np.int64))
    for offset in range(1, group):
        owners = np.roll(grid, -offset, axis=1)
        pushes = _within(builder, exchange, hosts, grid, owners, sizes, reducing=True)
        builder.follow(after[grid].ravel(), pushes)
        builder.follow(pushes, summed[owners].ravel())
    for shard in range(group):
        across = dataclasses.replace(
            exchange,
            hosts=hosts[grid[:, shard]].tolist(),
            size_bytes=int(sizes[shard]),
            message=(exchange.message + 64 * (shard + 1)) & (PULL_MESSAGE - 1),
        )
        summed[grid[:, shard]] = ring(builder, across, summed[grid[:, shard]])
    builder.follow(summed, ends)
    for offset in range(1, group):
        targets = np.roll(grid, -offset, axis=1)
        pulls = _within(builder, exchange, hosts, grid, targets, sizes, reducing=False)
        builder.follow(summed[grid].ravel(), pulls)
        builder.follow(pulls, ends[targets].ravel())
    return ends


def _within(
    builder: GraphBuilder,
    exchange: Exchange,
    hosts: Nodes,
    sources: Nodes,
    targets: Nodes,
    sizes: Nodes,
    *,
    reducing: bool,
) -> Nodes:
    """Add messages within groups: shards go to their owners, or owners' shards to the others."""
    shards = (targets if reducing else sources) % sources.shape[1]
    return builder.messages(
        hosts[sources].ravel(),
        hosts[targets].ravel(),
        sizes[shards].ravel(),
        message=exchange.message | (0 if reducing else PULL_MESSAGE),
        sender=(sources * sources.shape[1] + shards).ravel() & 0xFFFF,
        loss_bound=exchange.loss_bound if reducing else 0.0,
        **exchange.common(),
    )
