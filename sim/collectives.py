# SPDX-License-Identifier: Apache-2.0
"""Exchanges as graphs: ring, direct and parameter server, each from given nodes to the nodes that end it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from dlcp.sim.graph import GraphBuilder, Nodes
from numpy.typing import NDArray

PULL_MESSAGE: Final = 0x8000
"""Set in the number of a message that carries results, so that it is another message to a switch."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the messages of an exchange have in common.

    Parameters
    ----------
    hosts
        By rank.
    size_bytes
        Of the buffer.
    transport
        Number of the transport in the simulation.
    loss_bound
        Of what is being reduced; results are delivered whole.
    message
        Number of the exchange within the step, below 2^15.
    """

    hosts: Sequence[int]
    size_bytes: int
    transport: int
    queue: int = -1
    order: int = 0
    lane: int = 0
    loss_bound: float = 0.0
    class_shares: int = -1
    layer: int = 0
    job: int = 0
    step: int = 0
    message: int = 0

    def common(self) -> dict[str, int]:
        """Return the arguments of `GraphBuilder.messages` that are the same for all messages."""
        return {
            "transport": self.transport,
            "queue": self.queue,
            "order": self.order,
            "lane": self.lane,
            "class_shares": self.class_shares,
            "layer": self.layer,
            "job": self.job,
            "step": self.step,
        }


def shard_sizes(size_bytes: int, shards: int) -> NDArray[np.int64]:
    """Return how many bytes each shard has: as equal as can be, at least one."""
    sizes = np.full(shards, size_bytes // shards, np.int64)
    sizes[: size_bytes % shards] += 1
    return np.maximum(sizes, 1)


def ring(builder: GraphBuilder, exchange: Exchange, after: Nodes | None = None) -> Nodes:
    """Add a ring all-reduce: 2 (n - 1) rounds, in which each rank sends a shard to the next one.

    Parameters
    ----------
    after
        One node per rank that has to be done before the rank takes part.

    Returns
    -------
    One node per rank that is done when the rank has the result, int64 (n,).
    """
    hosts = np.asarray(exchange.hosts, np.int64)
    count = len(hosts)
    if count < 2:
        raise ValueError(f"a ring needs at least two hosts, and has {count}")
    sizes = shard_sizes(exchange.size_bytes, count)
    ranks = np.arange(count)
    previous: Nodes | None = None
    results: list[Nodes] = []
    for turn in range(2 * (count - 1)):
        shard = (ranks - turn) % count
        reducing = turn < count - 1
        nodes = builder.messages(
            hosts,
            np.roll(hosts, -1),
            sizes[shard],
            message=exchange.message | (0 if reducing else PULL_MESSAGE),
            # A switch has to tell the rounds apart, and there is no other field left to do it with.
            sender=(ranks + turn * count) & 0xFFFF,
            loss_bound=exchange.loss_bound if reducing else 0.0,
            **exchange.common(),
        )
        if after is not None and turn < count:
            # First a rank sends its own shard, then n - 1 times what has come with its own values added.
            builder.follow(after, nodes)
        if previous is not None:
            builder.follow(previous, np.roll(nodes, -1))
        if turn >= count - 2:
            results.append(nodes)
        previous = nodes
    ends = builder.delays(np.zeros(count, np.int64))
    for nodes in results:
        # The last of the sums completes a rank's own shard; the others come whole. They may overtake each other.
        builder.follow(np.roll(nodes, 1), ends)
    return ends


def direct(builder: GraphBuilder, exchange: Exchange, after: Nodes | None = None) -> Nodes:
    """Add a direct all-reduce: every rank sends each other one its shard, and gets the results from each.

    Parameters and result as of `ring`.
    """
    return _through_owners(builder, exchange, list(range(len(exchange.hosts))), after)


def parameter_server(
    builder: GraphBuilder, exchange: Exchange, servers: Sequence[int], after: Nodes | None = None
) -> Nodes:
    """Add an exchange over parameter servers: ``servers`` are hosts, each with an equal shard; ranks are the workers.

    Parameters and result as of `ring`.
    """
    hosts = list(exchange.hosts)
    overlap = sorted(set(hosts) & set(servers))
    if overlap:
        raise ValueError(f"hosts {overlap} are workers and servers at once; use the direct exchange for that")
    return _through_owners(builder, exchange, list(servers), after, owners_are_hosts=True)


def _through_owners(
    builder: GraphBuilder,
    exchange: Exchange,
    owners: Sequence[int],
    after: Nodes | None,
    *,
    owners_are_hosts: bool = False,
) -> Nodes:
    hosts = np.asarray(exchange.hosts, np.int64)
    count = len(hosts)
    ranks = np.arange(count)
    sizes = shard_sizes(exchange.size_bytes, len(owners))
    ends = builder.delays(np.zeros(count, np.int64))
    for shard, owner in enumerate(owners):
        others = ranks if owners_are_hosts else ranks[ranks != owner]
        home = owner if owners_are_hosts else int(hosts[owner])
        number = (exchange.message + shard * 64) & (PULL_MESSAGE - 1)
        pushes = builder.messages(
            hosts[others],
            home,
            sizes[shard],
            message=number,
            sender=others,
            loss_bound=exchange.loss_bound,
            **exchange.common(),
        )
        if after is not None:
            builder.follow(after[others], pushes)
        gathered = builder.barrier(pushes)
        if not owners_are_hosts:
            if after is not None:
                builder.follow(after[owner], gathered)
            builder.follow(gathered, ends[owner])
        pulls = builder.messages(
            home, hosts[others], sizes[shard], message=number | PULL_MESSAGE, sender=others, **exchange.common()
        )
        builder.follow(gathered, pulls)
        builder.follow(pulls, ends[others])
    return ends
