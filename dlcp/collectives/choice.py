# SPDX-License-Identifier: Apache-2.0
"""Which collective a bucket takes: direct, around a ring, or by a parameter server.

Each costs some latency and some bandwidth (Thakur, Rabenseifner and Gropp, IJHPCA 2005: a message of S bytes takes
alpha + S beta); and each message occupies its sender and its receiver for a while (o, as in LogP, Culler et al. 1993).
For n ranks, with the largest number m of them on a host, behind ports of rate R:

========= ===================== ============================================= ====================
collective latency              bytes through the busiest port                flows into that port
========= ===================== ============================================= ====================
direct    2 (alpha + (n-1) o)   2 m (n-m) / n S                               m (n-m)
ring      2 (n-1) (alpha + o)   2 (n-1) / n S                                 1
server    2 (alpha + n o)       2 n S                                         n
========= ===================== ============================================= ====================

So small messages go direct, and large ones around the ring where ranks share ports, or where many flows into a port get
in each other's way. That incast penalty is measured: over a port of 64 packets in virtual time, at 4, 8 and 12 ranks,
direct took 1.16, 1.41 and 1.36 times as long as the ring, of which the transport of today is the cause as much as the
network. Ranks that all run on one host share memory and no port: there fewer messages win. Where ranks receive at
different rates, direct gives the slow ones less to add up, and may put some off (:mod:`dlcp.collectives.deferral`); the
ring goes at the pace of the slowest. A server pays where its port is several times as fast as the ranks', or where
messages are tiny and ranks many.

All ranks must choose alike, so the choice follows from what they all know: sizes, hosts, and reported rates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dlcp.collectives.shards import weights_for_rates

AUTO: Final = "auto"
DIRECT: Final = "direct"
RING: Final = "ring"
SERVER: Final = "server"
COLLECTIVES: Final = (AUTO, DIRECT, RING, SERVER)
LARGE_BUCKET_BYTES: Final = 25 << 20
"""What PyTorch's DistributedDataParallel puts in a bucket; most bytes travel in buckets of this size."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What all ranks know of where they are.

    Parameters
    ----------
    hosts
        Each rank's host, by any name; ranks that are not in it have a host of their own.
    rates_bps
        How fast each rank can receive, in bit/s; ranks that are not in it receive at ``Costs.rate_bps``.
    server
        The parameter server's rank; None if there is none.
    server_rate_bps
        How fast the server's port is; None for ``Costs.rate_bps``.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    rates_bps: Mapping[int, float] = field(default_factory=dict)
    server: int | None = None
    server_rate_bps: float | None = None

    def ranks_by_host(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the ranks of each host, hosts in the order of their lowest rank."""
        groups: dict[object, list[int]] = {}
        for rank in sorted(ranks):
            groups.setdefault(self.hosts.get(rank, rank), []).append(rank)
        return list(groups.values())

    def ring_order(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks in an order in which those of one host are next to each other."""
        return [rank for group in self.ranks_by_host(ranks) for rank in group]


@dataclass(frozen=True, slots=True)
class Costs:
    """What messages cost. The values are ours: the order of magnitude on a busy host and a 10-gigabit network.

    Parameters
    ----------
    latency_s
        Until a short message is there and acted upon.
    message_s
        For which a message occupies its sender, or its receiver.
    rate_bps
        Rate of a host's port.
    flow_penalty, flow_penalty_max
        By how much each flow into a port beyond the first lengthens a transfer, and by how much they do at most.
        Measured as the module's description says.
    ring_margin
        How many times as fast as another the ring has to be. What disturbs one hop holds up the ring, and its hops have
        the loss bound to share: at 5 % random loss it took 1.3 times as long as direct (8 ranks, virtual time).
    """

    latency_s: float = 200e-6
    message_s: float = 20e-6
    rate_bps: float = 10e9
    flow_penalty: float = 0.05
    flow_penalty_max: float = 0.35
    ring_margin: float = 1.2

    def incast(self, flows: int) -> float:
        """Return how many times as long a transfer takes if ``flows`` enter one port."""
        return 1 + min(self.flow_penalty_max, self.flow_penalty * max(0, flows - 1))


def direct_seconds(size: int, ranks: Sequence[int], topology: Topology, costs: Costs) -> float:
    """Return about how long a direct all-reduce of ``size`` bytes takes."""
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
    """Return about how long an all-reduce of ``size`` bytes around a ring takes."""
    count = len(ranks)
    latency_s = 2 * (count - 1) * (costs.latency_s + costs.message_s)
    if len(topology.ranks_by_host(ranks)) == 1:
        return latency_s
    slowest_bps = min(costs.rate_bps, *(topology.rates_bps.get(rank, costs.rate_bps) for rank in ranks))
    return latency_s + 2 * (count - 1) / count * size * 8 / slowest_bps


def server_seconds(size: int, ranks: Sequence[int], topology: Topology, costs: Costs) -> float:
    """Return about how long an all-reduce of ``size`` bytes by a parameter server takes."""
    count = len(ranks)
    latency_s = 2 * (costs.latency_s + count * costs.message_s)
    rate_bps = topology.server_rate_bps or costs.rate_bps
    busiest_s = max(
        costs.incast(count) * 2 * count * size * 8 / rate_bps,
        *(2 * len(group) * size * 8 / costs.rate_bps for group in topology.ranks_by_host(ranks)),
        *(2 * size * 8 / topology.rates_bps.get(rank, costs.rate_bps) for rank in ranks),
    )
    return latency_s + busiest_s


def choose(size: int, ranks: Sequence[int], topology: Topology | None = None, costs: Costs | None = None) -> str:
    """Return the collective to take for a bucket of ``size`` bytes: ``direct``, ``ring`` or ``server``.

    It is the fastest, the ring only by a margin; of those that cost the same, the first.
    """
    topology, costs = topology or Topology(), costs or Costs()
    seconds = {
        DIRECT: direct_seconds(size, ranks, topology, costs),
        RING: costs.ring_margin * ring_seconds(size, ranks, topology, costs),
    }
    if topology.server is not None:
        seconds[SERVER] = server_seconds(size, ranks, topology, costs)
    return min(seconds, key=seconds.__getitem__)


def flow_weight(
    collective: str, ranks: Sequence[int], topology: Topology | None = None, costs: Costs | None = None
) -> float | None:
    """Return the share of a flow that each of a rank's flows should count as (``TransportOptions.flow_weight``).

    A job counts as one flow on a port. Around a ring there is one flow into each; to a server go as many as ranks. What
    ``auto`` chooses for large buckets decides.
    """
    if collective == AUTO:
        collective = choose(LARGE_BUCKET_BYTES, ranks, topology, costs)
    return {RING: 1.0, SERVER: 1 / len(ranks)}.get(collective)
