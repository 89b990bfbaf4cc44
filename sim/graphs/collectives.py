# SPDX-License-Identifier: Apache-2.0
"""Collectives as graphs.

All-reduces: ring, direct, parameter server, BytePS, halving and doubling, tree, and two levels.

Each function adds one collective to a graph. ``after`` has one node per rank, which has to be done before the rank
takes part. The function returns one node per rank, int64 (ranks,), which is done when the rank has the result.

Contributions (reduce-scatter, and up a tree) may lose packets within the loss bound. Results (all-gather, and down a
tree) are always delivered whole.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlcp.sim.graphs.graph import GraphBuilder, Nodes

RESULT_MESSAGE: Final = 0x8000
"""Bit set in the message number of a result, so that switches distinguish it from the contribution."""
SHARD_MESSAGES: Final = 64
"""Distance between the message numbers of two shards: a step of a job has about 64 all-reduces."""

CollectiveName = Literal["parameter_server", "byteps", "ring", "direct", "halving_doubling", "tree", "hierarchical"]
WITH_SERVERS: Final = ("parameter_server", "byteps")
"""All-reduces with servers, although BytePS can do without them."""


@dataclass(frozen=True, slots=True)
class AllReduceSpec:
    """An all-reduce, independent of the algorithm.

    Parameters
    ----------
    hosts
        One host per rank.
    size_bytes
        Size of the buffer.
    transport
        Number of the transport in the simulation.
    queue, order, lane, class_shares, job, step
        As in `GraphBuilder.messages`.
    loss_bound
        Loss bound of contributions.
    message
        Number of the all-reduce within the step, below `RESULT_MESSAGE`.
    """

    hosts: Sequence[int]
    size_bytes: int
    transport: int
    queue: int = -1
    order: int = 0
    lane: int = 0
    loss_bound: float = 0.0
    class_shares: int = -1
    job: int = 0
    step: int = 0
    message: int = 0

    def shard_message(self, shard: int) -> int:
        """Return the message number of a shard."""
        return (self.message + shard * SHARD_MESSAGES) & (RESULT_MESSAGE - 1)

    def messages(
        self,
        builder: GraphBuilder,
        source: ArrayLike,
        target: ArrayLike,
        size_bytes: ArrayLike,
        *,
        sender: ArrayLike,
        result: bool,
        message: int | None = None,
    ) -> Nodes:
        """Add messages of the all-reduce.

        Parameters
        ----------
        sender
            Distinguishes messages with the same number at switches.
        result
            Whether they carry results.
        message
            Their number; by default, the all-reduce's.
        """
        number = self.message if message is None else message
        return builder.messages(
            source,
            target,
            size_bytes,
            transport=self.transport,
            **{name: getattr(self, name) for name in ("queue", "order", "lane", "class_shares", "job", "step")},
            message=number | RESULT_MESSAGE if result else number,
            sender=sender,
            loss_bound=0.0 if result else self.loss_bound,
        )


def all_reduce(
    builder: GraphBuilder,
    collective: CollectiveName,
    spec: AllReduceSpec,
    after: Nodes | None = None,
    *,
    servers: Sequence[int] = (),
    group: int = 1,
    weights: Sequence[float] = (),
) -> Nodes:
    """Add an all-reduce with the named algorithm.

    Parameters
    ----------
    servers
        Hosts of the parameter servers, for ``parameter_server`` and ``byteps``.
    group
        Number of ranks in a group of neighbours, for ``hierarchical``.
    weights
        Each rank's share of the buffer as an owner, for ``direct``; by default, shares are equal.
    """
    if collective in WITH_SERVERS:
        return (parameter_server if collective == "parameter_server" else byteps)(builder, spec, servers, after)
    if collective == "direct":
        return direct(builder, spec, after, weights)
    if collective == "ring":
        return ring(builder, spec, after)
    if after is None:
        after = builder.delays(np.zeros(len(spec.hosts), np.int64))
    if collective == "hierarchical":
        return hierarchical(builder, spec, group, after)
    return (tree if collective == "tree" else halving_doubling)(builder, spec, after)


def shard_sizes(size_bytes: int, shards: int) -> NDArray[np.int64]:
    """Return the bytes of each shard: as equal as possible, at least one."""
    sizes = np.full(shards, size_bytes // shards, np.int64)
    sizes[: size_bytes % shards] += 1
    return np.maximum(sizes, 1)


def ring(builder: GraphBuilder, spec: AllReduceSpec, after: Nodes | None = None) -> Nodes:
    """Add a ring: 2 (n - 1) rounds, in which each rank sends a shard to the next rank."""
    count = len(spec.hosts)
    if count < 2:
        raise ValueError(f"a ring needs at least two hosts, and has {count}")
    return _ring_rounds(builder, spec, after, range(2 * (count - 1)))


def reduce_scatter(builder: GraphBuilder, spec: AllReduceSpec, after: Nodes, group: int = 1) -> Nodes:
    """Add a reduce-scatter: each rank begins with ``size_bytes`` and ends with its shard.

    It is the first half of a ring, or of `hierarchical` if there are groups.
    """
    count = len(spec.hosts)
    if group > 1:
        reduced = _within_groups(builder, spec, group, after, result=False)
        return _across_groups(builder, spec, group, reduced, reduce_scatter)
    return _ring_rounds(builder, spec, after, range(count - 1))


def all_gather(builder: GraphBuilder, spec: AllReduceSpec, after: Nodes, group: int = 1) -> Nodes:
    """Add an all-gather: each rank begins with its shard and ends with ``size_bytes``.

    It is the second half of a ring, or of `hierarchical` if there are groups.
    """
    count = len(spec.hosts)
    if group > 1:
        gathered = _across_groups(builder, spec, group, after, all_gather)
        return _within_groups(builder, spec, group, gathered, result=True)
    return _ring_rounds(builder, spec, after, range(count - 1, 2 * (count - 1)))


def _ring_rounds(builder: GraphBuilder, spec: AllReduceSpec, after: Nodes | None, turns: range) -> Nodes:
    """Add rounds of a ring: the first n - 1 reduce and scatter, the last n - 1 gather."""
    hosts = np.asarray(spec.hosts, np.int64)
    count = len(hosts)
    sizes = shard_sizes(spec.size_bytes, count)
    ranks = np.arange(count)
    previous: Nodes | None = None
    results: list[Nodes] = []
    for turn in turns:
        nodes = spec.messages(
            builder,
            hosts,
            np.roll(hosts, -1),
            sizes[(ranks - turn) % count],
            # Switches have to distinguish the rounds, and the sender is the only free field.
            sender=(ranks + turn * count) & 0xFFFF,
            result=turn >= count - 1,
        )
        if after is not None and turn < turns.start + count:
            # A rank first sends its own shard, then n - 1 times what it received plus its own values.
            builder.follow(after, nodes)
        if previous is not None:
            builder.follow(previous, np.roll(nodes, -1))
        if turn >= count - 2:
            results.append(nodes)
        previous = nodes
    ends = builder.delays(np.zeros(count, np.int64))
    if after is not None:
        # In half a ring, what a rank receives does not imply that the rank itself has begun.
        builder.follow(after, ends)
    for nodes in results:
        # The last sum completes one shard of the rank; all other shards arrive complete. Messages may be reordered.
        builder.follow(np.roll(nodes, 1), ends)
    return ends


def direct(
    builder: GraphBuilder, spec: AllReduceSpec, after: Nodes | None = None, weights: Sequence[float] = ()
) -> Nodes:
    """Add a direct all-reduce: every rank sends each other rank that rank's shard, and receives the averages."""
    sizes = _weighted_sizes(spec.size_bytes, weights) if weights else shard_sizes(spec.size_bytes, len(spec.hosts))
    return _through_owners(builder, spec, spec.hosts, sizes, after)


def parameter_server(
    builder: GraphBuilder, spec: AllReduceSpec, servers: Sequence[int], after: Nodes | None = None
) -> Nodes:
    """Add an exchange through parameter servers: ``servers`` own equal shards, ranks are the workers."""
    _check_servers(spec, servers)
    return _through_owners(builder, spec, servers, shard_sizes(spec.size_bytes, len(servers)), after)


def byteps(builder: GraphBuilder, spec: AllReduceSpec, servers: Sequence[int], after: Nodes | None = None) -> Nodes:
    """Add BytePS' exchange: n ranks and up to n additional servers own shards that load all links alike.

    A rank's link also carries the rank's own gradients, so its shard is smaller than a server's (Jiang et al., OSDI
    2020, section 4.1). Without servers this is a direct all-reduce.
    """
    _check_servers(spec, servers)
    ranks, extra = len(spec.hosts), len(servers)
    if extra > ranks:
        raise ValueError(f"byteps divides the load over at most as many servers as ranks; got {extra} and {ranks}")
    sizes = _weighted_sizes(spec.size_bytes, [ranks - extra] * ranks + [2 * (ranks - 1)] * extra)
    return _through_owners(builder, spec, [*spec.hosts, *servers], sizes, after)


def _weighted_sizes(size_bytes: int, weights: Sequence[float]) -> NDArray[np.int64]:
    """Return the bytes of each shard, in proportion to weights; some may be 0."""
    ends = np.rint(np.cumsum([0, *weights]) * (size_bytes / sum(weights))).astype(np.int64)
    return np.diff(ends)


def _check_servers(spec: AllReduceSpec, servers: Sequence[int]) -> None:
    overlap = sorted(set(spec.hosts) & set(servers))
    if overlap:
        raise ValueError(f"hosts {overlap} are workers and servers at once; use the direct all-reduce instead")


def _through_owners(
    builder: GraphBuilder,
    spec: AllReduceSpec,
    owners: Sequence[int],
    sizes: NDArray[np.int64],
    after: Nodes | None,
) -> Nodes:
    """Add an exchange in which each rank sends each shard to its owner, a rank or a server, and receives the result."""
    hosts = np.asarray(spec.hosts, np.int64)
    ranks = np.arange(len(hosts))
    ends = builder.delays(np.zeros(len(hosts), np.int64))
    for shard, (owner, size) in enumerate(zip(owners, sizes.tolist(), strict=True)):
        if not size:
            continue
        others = ranks[hosts != owner]
        number = spec.shard_message(shard)
        contributions = spec.messages(builder, hosts[others], owner, size, sender=others, result=False, message=number)
        if after is not None:
            builder.follow(after[others], contributions)
        reduced = builder.barrier(contributions)
        own = ranks[hosts == owner]
        if after is not None:
            builder.follow(after[own], reduced)
        builder.follow(reduced, ends[own])
        results = spec.messages(builder, owner, hosts[others], size, sender=others, result=True, message=number)
        builder.follow(reduced, results)
        builder.follow(results, ends[others])
    return ends


def halving_doubling(builder: GraphBuilder, spec: AllReduceSpec, after: Nodes) -> Nodes:
    """Add Rabenseifner's all-reduce: recursive halving with ever nearer partners, then doubling; 2^k ranks."""
    hosts = np.asarray(spec.hosts, np.int64)
    count = len(hosts)
    ranks = np.arange(count)
    ready = after
    distances = [1 << bit for bit in reversed(range(count.bit_length() - 1))]
    turns = [(distance, False) for distance in distances] + [(distance, True) for distance in reversed(distances)]
    for turn, (distance, result) in enumerate(turns):
        partners = ranks ^ distance
        messages = spec.messages(
            builder,
            hosts,
            hosts[partners],
            max(1, spec.size_bytes * distance // count),
            sender=(ranks + turn * count) & 0xFFFF,
            result=result,
        )
        builder.follow(ready, messages)
        ends = builder.delays(np.zeros(count, np.int64))
        builder.follow(ready, ends)
        builder.follow(messages[np.argsort(partners)], ends)
        ready = ends
    return ready


def tree(builder: GraphBuilder, spec: AllReduceSpec, after: Nodes) -> Nodes:
    """Add a binary tree: contributions go up to rank 0, the result comes down. Rank r has the parent (r - 1) // 2."""
    hosts = np.asarray(spec.hosts, np.int64)
    ranks = np.arange(len(hosts))
    parents = (ranks[1:] - 1) // 2
    ready = builder.delays(np.zeros(len(hosts), np.int64))
    builder.follow(after, ready)
    ups = spec.messages(builder, hosts[1:], hosts[parents], spec.size_bytes, sender=ranks[1:], result=False)
    builder.follow(ready[1:], ups)
    builder.follow(ups, ready[parents])
    downs = spec.messages(builder, hosts[parents], hosts[1:], spec.size_bytes, sender=ranks[1:], result=True)
    builder.follow(ready[0], downs[parents == 0])
    builder.follow(downs[parents[parents > 0] - 1], downs[parents > 0])
    return np.concatenate([ready[:1], downs])


def hierarchical(builder: GraphBuilder, spec: AllReduceSpec, group: int, after: Nodes) -> Nodes:
    """Add two levels: reduce-scatter within a group, rings across the groups, all-gather within a group."""
    hosts = np.asarray(spec.hosts, np.int64)
    groups = len(hosts) // group
    if groups == 1 or group == 1:
        return (direct if groups == 1 else ring)(builder, spec, after)
    reduced = _within_groups(builder, spec, group, after, result=False)
    return _within_groups(builder, spec, group, _across_groups(builder, spec, group, reduced, ring), result=True)


def _within_groups(builder: GraphBuilder, spec: AllReduceSpec, group: int, after: Nodes, *, result: bool) -> Nodes:
    """Add an exchange within each group: ranks send the shards' owners contributions, or owners send results to all.

    Returns the nodes at which each rank has its own shard reduced, or all shards.
    """
    hosts = np.asarray(spec.hosts, np.int64)
    grid = np.arange(len(hosts)).reshape(-1, group)
    sizes = shard_sizes(spec.size_bytes, group)
    ends = builder.delays(np.zeros(len(hosts), np.int64))
    builder.follow(after, ends)
    for offset in range(1, group):
        targets = np.roll(grid, -offset, axis=1)
        shards = (grid if result else targets) % group
        messages = spec.messages(
            builder,
            hosts[grid].ravel(),
            hosts[targets].ravel(),
            sizes[shards].ravel(),
            sender=(grid * group + shards).ravel() & 0xFFFF,
            result=result,
        )
        builder.follow(after[grid].ravel(), messages)
        builder.follow(messages, ends[targets].ravel())
    return ends


def _across_groups(
    builder: GraphBuilder,
    spec: AllReduceSpec,
    group: int,
    after: Nodes,
    exchange: Callable[[GraphBuilder, AllReduceSpec, Nodes], Nodes],
) -> Nodes:
    """Add an exchange of each shard between its owners in all groups; return when each owner has the result."""
    grid = np.arange(len(spec.hosts)).reshape(-1, group)
    if len(grid) == 1:
        return after
    hosts: Nodes = np.asarray(spec.hosts, np.int64)
    done: Nodes = after.copy()
    for shard, size in enumerate(shard_sizes(spec.size_bytes, group).tolist()):
        ranks = grid[:, shard]
        across = dataclasses.replace(
            spec, hosts=hosts[ranks].tolist(), size_bytes=size, message=spec.shard_message(shard + 1)
        )
        done[ranks] = exchange(builder, across, after[ranks])
    return done


def all_to_all(builder: GraphBuilder, spec: AllReduceSpec, after: Nodes) -> Nodes:
    """Add an all-to-all: each rank sends each other rank one of the n equal parts of its ``size_bytes``."""
    hosts = np.asarray(spec.hosts, np.int64)
    count = len(hosts)
    sizes = shard_sizes(spec.size_bytes, count)
    ranks = np.arange(count)
    ends = builder.delays(np.zeros(count, np.int64))
    builder.follow(after, ends)
    for offset in range(1, count):
        # In each turn, every rank sends to another one: no rank receives from all others at once at the start.
        targets = (ranks + offset) % count
        parts = spec.messages(builder, hosts, hosts[targets], sizes[targets], sender=ranks, result=True)
        builder.follow(after, parts)
        builder.follow(parts, ends[targets])
    return ends


def _binomial(builder: GraphBuilder, spec: AllReduceSpec, root: int, after: Nodes, *, up: bool) -> Nodes:
    """Add a binomial tree, whose edges span 1, 2, 4, ... ranks from the root on: the longest first unless ``up``."""
    count = len(spec.hosts)
    hosts = np.roll(np.asarray(spec.hosts, np.int64), -root)
    ready = np.roll(after, -root)
    spans = [1 << bit for bit in range((count - 1).bit_length())]
    for span in spans if up else reversed(spans):
        inner = np.arange(0, count - span, 2 * span)
        sources, targets = (inner + span, inner) if up else (inner, inner + span)
        messages = spec.messages(
            builder, hosts[sources], hosts[targets], spec.size_bytes, sender=sources, result=not up
        )
        builder.follow(ready[sources], messages)
        received = builder.delays(np.zeros(len(messages), np.int64))
        builder.follow(messages, received)
        builder.follow(ready[targets], received)
        ready[targets] = received
    return np.roll(ready, root)


def _with_root(builder: GraphBuilder, spec: AllReduceSpec, root: int, after: Nodes, *, inwards: bool) -> Nodes:
    """Add a message between one rank and each other rank."""
    size_bytes = spec.size_bytes if inwards else -(-spec.size_bytes // len(spec.hosts))
    hosts = np.asarray(spec.hosts, np.int64)
    others = np.delete(np.arange(len(hosts)), root)
    roots = np.full(len(others), root)
    sources, targets = (others, roots) if inwards else (roots, others)
    messages = spec.messages(builder, hosts[sources], hosts[targets], size_bytes, sender=others, result=True)
    builder.follow(after[sources], messages)
    ends = builder.delays(np.zeros(len(hosts), np.int64))
    builder.follow(after, ends)
    builder.follow(messages, ends[targets])
    return ends


broadcast, reduce = partial(_binomial, up=False), partial(_binomial, up=True)
"""Add a broadcast of ``size_bytes`` from a rank, or a reduction to it, along a binomial tree."""
gather, scatter = partial(_with_root, inwards=True), partial(_with_root, inwards=False)
"""Each other rank sends its ``size_bytes`` to a rank; or a rank sends each one of the n equal parts of its own."""
