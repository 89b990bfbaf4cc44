# SPDX-License-Identifier: Apache-2.0
"""Choice of a bucket's collective: direct or ring.

A message of S bytes takes alpha + S beta (Thakur, Rabenseifner and Gropp, IJHPCA 2005), and occupies its sender and its
receiver for a time o (LogP, Culler et al. 1993). For n ranks, at most m of them on a host, behind ports of rate R:

========= ===================== ============================================= ====================
collective latency              bytes through the busiest port                flows into that port
========= ===================== ============================================= ====================
direct    2 (alpha + (n-1) o)   2 m (n-m) / n S                               m (n-m)
ring      2 (n-1) (alpha + o)   2 (n-1) / n S                                 1
========= ===================== ============================================= ====================

So small buckets use direct, and large ones the ring if ranks share ports, or if many flows enter a port. The penalty of
such incast is measured: over a port of 64 packets in virtual time, at 4, 8 and 12 ranks, direct took 1.16, 1.41 and
1.36 times as long as the ring, due to the transport as much as to the network. Ranks of one host share memory and no
port, so fewer messages win. If ranks receive at different rates, direct gives slow ones smaller shards; the ring
runs at the slowest rank's rate.

All ranks must make the same choice, so it depends only on sizes, hosts and reported rates, which all ranks know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

AUTO: Final = "auto"
DIRECT: Final = "direct"
RING: Final = "ring"
SERVER: Final = "server"
COLLECTIVES: Final = (AUTO, DIRECT, RING, SERVER)
LARGE_BUCKET_BYTES: Final = 25 << 20
"""The bucket size of PyTorch's DistributedDataParallel; most bytes travel in such buckets."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The placement of ranks, known to all of them.

    Parameters
    ----------
    hosts
        Each rank's host, by any name; missing ranks have a host of their own.
    rates_bps
        Each rank's receive rate in bit/s; for missing ranks, ``Costs.rate_bps``.
    server
        The parameter server's rank; None if there is none.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    rates_bps: Mapping[int, float] = field(default_factory=dict)
    server: int | None = None

    def ranks_by_host(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the ranks of each host, ordered by the hosts' lowest ranks."""
        groups: dict[object, list[int]] = {}
        for rank in sorted(ranks):
            groups.setdefault(self.hosts.get(rank, rank), []).append(rank)
        return list(groups.values())

    def ring_order(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks in an order that keeps those of one host together."""
        return [rank for group in self.ranks_by_host(ranks) for rank in group]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of messages. The defaults are the order of magnitude on a busy host and a 10-gigabit network.

    Parameters
    ----------
    latency_s
        Time until a short message has arrived and been processed.
    message_s
        Time for which a message occupies its sender or its receiver.
    rate_bps
        Rate of a host's port.
    flow_penalty, flow_penalty_max
        The part by which each flow into a port beyond the first lengthens a transfer, and its maximum; measured as
        described above.
    ring_margin
        The ring is chosen only if it is faster than the others by this factor. A disturbance of one hop delays the
        whole ring, and its hops share the loss bound: at 5 % random loss it took 1.3 times as long as direct (8 ranks,
        virtual time).
    """

    latency_s: float = 200e-6
    message_s: float = 20e-6
    rate_bps: float = 10e9
    flow_penalty: float = 0.05
    flow_penalty_max: float = 0.35
    ring_margin: float = 1.2

    def incast(self, flows: int) -> float:
        """Return the factor by which ``flows`` into one port lengthen a transfer."""
        return 1 + min(self.flow_penalty_max, self.flow_penalty * max(0, flows - 1))


def direct_seconds(size: int, ranks: Sequence[int], topology: Topology, costs: Costs) -> float:
    """Estimate the time of a direct all-reduce of ``size`` bytes."""
    from dlcp.policies.slow_ports import weights_for_rates  # only needed for a choice by rates

    count = len(ranks)
    latency_s = 2 * (costs.latency_s + (count - 1) * costs.message_s)
    groups = topology.ranks_by_host(ranks)
    if len(groups) == 1:
        return latency_s
    entering = max(len(group) * (count - len(group)) for group in groups)
    host_s = 2 * entering / count * size * 8 / costs.rate_bps
    rates = {rank: topology.rates_bps.get(rank, costs.rate_bps) for rank in ranks}
    weights = weights_for_rates(rates)
    total = sum(weights.values())
    rank_s = max((1 + (count - 2) * weights[rank] / total) * size * 8 / rates[rank] for rank in ranks)
    return latency_s + costs.incast(entering) * max(host_s, rank_s)


def ring_seconds(size: int, ranks: Sequence[int], topology: Topology, costs: Costs) -> float:
    """Estimate the time of a ring all-reduce of ``size`` bytes."""
    count = len(ranks)
    latency_s = 2 * (count - 1) * (costs.latency_s + costs.message_s)
    if len(topology.ranks_by_host(ranks)) == 1:
        return latency_s
    slowest_bps = min(costs.rate_bps, *(topology.rates_bps.get(rank, costs.rate_bps) for rank in ranks))
    return latency_s + 2 * (count - 1) / count * size * 8 / slowest_bps


def choose(size: int, ranks: Sequence[int], topology: Topology | None = None, costs: Costs | None = None) -> str:
    """Choose the collective of a bucket of ``size`` bytes: ``direct``, or ``ring`` if that is faster by a margin."""
    topology, costs = topology or Topology(), costs or Costs()
    ring_s = costs.ring_margin * ring_seconds(size, ranks, topology, costs)
    return RING if ring_s < direct_seconds(size, ranks, topology, costs) else DIRECT


def flow_weight(
    collective: str, ranks: Sequence[int], topology: Topology | None = None, costs: Costs | None = None
) -> float:
    """Return the weight of each of a rank's flows (``TransportOptions.flow_weight``); 0 for the default.

    A job counts as one flow on a port. In a ring, one flow enters each port; one per rank enters a server's port. With
    ``auto``, the choice for large buckets decides.
    """
    if collective == AUTO:
        collective = choose(LARGE_BUCKET_BYTES, ranks, topology, costs)
    return {RING: 1.0, SERVER: 1 / len(ranks)}.get(collective, 0.0)
