# SPDX-License-Identifier: Apache-2.0
"""Deferral in simulated training: which share of a step's messages is deferred to a later step.

The amount follows the arithmetic of real ranks (`dlcp.slow_ports`). The simulator only counts packets, and sends a
message with fewer of them. The amount depends on the times of earlier steps:

- A shard is sent whole if its messages take no longer than the ranks compute: nobody waits for it. Otherwise enough is
  deferred for the shard to finish by the end of the computation.
- With a direct all-reduce, deferral also requires a rank that receives at a far lower rate than the others, as with
  real ranks. With parameter servers, a server's port carries more than a worker's if there are fewer servers.

An owner chooses one share for all receivers of its average. The first step is sent whole because no times are known
yet, and so are messages that begin before the end of the step that decides about them. Real ranks send their first
steps whole, and do not measure how long they compute.
"""

from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dlcp.sim.arithmetic import PS_PER_S
from dlcp.sim.collectives import RESULT_MESSAGE
from dlcp.sim.simulation import Simulation, SubmittedGraph
from dlcp.slow_ports import REFRESH_STEPS, SHARE_MIN, PortLoads, share_to_defer, snap_to_fastest

_ROUNDING: Final = 1e-9


class DeferralSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a job's deferral.

    Parameters
    ----------
    ceiling
        The largest share of a message's packets to defer.
    halves
        Which half of an all-reduce may be deferred.
    ports
        ``slow``: defer where one port delays the others, like real ranks. ``all``: defer wherever a step waits for the
        network. The two differ only if all ports carry the same load, as in a direct all-reduce.
    """

    ceiling: Annotated[float, Meta(ge=0, lt=1)]
    halves: Literal["both", "contributions", "averages"] = "both"
    ports: Literal["slow", "all"] = "slow"


class SimulatedDeferral:
    """Decides, step by step, how many packets of a job's messages are sent.

    Parameters
    ----------
    ranks
        Hosts of the workers.
    servers
        Hosts that own the shards; if empty, every rank owns one.

    Attributes
    ----------
    shares
        Shares of packets to defer, by owner: of the contributions to it, and of the averages from it.
    """

    def __init__(self, spec: DeferralSpec, ranks: tuple[int, ...], servers: tuple[int, ...]) -> None:
        self.spec, self._ranks, self._servers = spec, ranks, servers
        self._ports = RankPorts(ranks)
        self.shares: dict[int, tuple[float, float]] = {}

    def learn(self, submitted: SubmittedGraph, records: NDArray[np.void], step: int, compute_s: float) -> None:
        """Update the shares from the times of a step.

        Parameters
        ----------
        records
            The graph's records at the end of the step.
        compute_s
            Computing time of the slowest rank in the step.
        """
        nodes = submitted.graph.nodes
        chosen = np.flatnonzero((submitted.packets > 0) & (nodes["step"] == step))
        nodes, records, whole = nodes[chosen], records[chosen], submitted.sizes["packets"][chosen]
        results = (nodes["message"] & RESULT_MESSAGE) != 0
        owners = np.where(results, nodes["source"], nodes["target"])
        slow = self._of_slow_ports(nodes["source"], nodes["target"], records)
        for owner in self._servers or self._ranks:
            under_way_s = 0.0
            for half in (results, ~results):
                own = (owners == owner) & half
                sent = records["packets"][own].sum() / whole[own].sum() if own.any() else 1.0
                under_way_s = max(under_way_s, seconds_under_way(records[own]) / sent)
            most = share_to_defer(PortLoads(under_way_s, compute_s, 0.0), 1.0, self.spec.ceiling)
            shares = (min(most, share) for share in slow[owner])
            contributions, averages = (share if share >= SHARE_MIN else 0.0 for share in shares)
            self.shares[owner] = (
                contributions if self.spec.halves != "averages" else 0.0,
                averages if self.spec.halves != "contributions" else 0.0,
            )

    def _of_slow_ports(
        self, senders: NDArray[np.int32], receivers: NDArray[np.int32], records: NDArray[np.void]
    ) -> dict[int, tuple[float, float]]:
        """Return the shares to defer because of slow ports, by owner, from a step's messages."""
        count, ceiling = len(self._ranks), self.spec.ceiling
        if self.spec.ports == "all":
            return dict.fromkeys(self._servers or self._ranks, (ceiling, ceiling))
        if self._servers:
            share = share_to_defer(PortLoads.of_server(count, 1 / len(self._servers)), 1.0, ceiling)
            return dict.fromkeys(self._servers, (share, share))
        rates = self._ports.learn(senders, receivers, records)
        fastest = max(rates.values())
        loads = PortLoads.of_direct(count, 1 / count, 1 / count)
        shares = {
            rank: share_to_defer(loads, fastest / rates[rank], ceiling) if rank in self._ports.slow else 0.0
            for rank in self._ranks
        }
        return {owner: (shares[owner], max(shares[rank] for rank in self._ranks if rank != owner)) for owner in shares}

    def apply(self, simulation: Simulation, submitted: SubmittedGraph) -> None:
        """Remove the deferred packets from a graph's messages that have not begun."""
        nodes = submitted.graph.nodes
        messages = np.flatnonzero(submitted.packets > 0)
        results = (nodes["message"][messages] & RESULT_MESSAGE) != 0
        owners = np.where(results, nodes["source"][messages], nodes["target"][messages])
        shares = np.zeros((int(owners.max()) + 1, 2))
        for owner, pair in self.shares.items():
            shares[owner] = pair
        sizes = submitted.sizes[messages]
        # The planes of the same values are deferred together.
        encoded = sizes["upper"] > 0
        planes = np.where(encoded, sizes["packets"] // np.maximum(sizes["upper"], 1), 1)
        deferred = deferred_packets(sizes["packets"] // planes, shares[owners, results.astype(int)])
        sizes["packets"] -= planes * deferred
        sizes["upper"] -= np.where(encoded, deferred, 0)
        simulation.resize(submitted, messages, sizes)


class RankPorts:
    """The rates at which a job's ranks receive.

    Attributes
    ----------
    slow
        The ranks that received at a far lower rate than others in the last step.
    slowest
        The lowest rate between two ranks in the last step, in packets a second; 0 if none is known.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self.slow: set[int] = set()
        self.slowest = 0.0

    def learn(
        self, senders: NDArray[np.int32], receivers: NDArray[np.int32], records: NDArray[np.void]
    ) -> dict[int, float]:
        """Return each rank's rate from a step's messages, in packets a second; 0 if unknown."""
        pairs = {rank: _inbound_rates(rank, senders, receivers, records) for rank in self._ranks}
        self.slowest = min((rate for rates in pairs.values() for rate in rates), default=0.0)
        # The median ignores a slow sender, whose rate says nothing about the receiver.
        measured = {rank: float(np.median(rates or [0.0])) for rank, rates in pairs.items()}
        rates = snap_to_fastest(measured, self.slow)
        fastest = max(rates.values())
        self.slow = {rank for rank, rate in rates.items() if rate < fastest}
        return rates


def deferred_packets(packets: NDArray[np.int32], shares: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the deferred packets of each message: the share, except for packets whose turn it is to be sent."""
    turns = -(-packets // REFRESH_STEPS)
    deferred: NDArray[np.int32] = np.minimum(np.floor(shares * packets + _ROUNDING).astype(np.int32), packets - turns)
    return deferred


def seconds_under_way(records: NDArray[np.void]) -> float:
    """Return the time in seconds during which at least one of the messages was in progress."""
    if not len(records):
        return 0.0
    order = np.argsort(records["begin_ps"], kind="stable")
    begin, end = records["begin_ps"][order], np.maximum.accumulate(records["end_ps"][order])
    idle = np.maximum(0, begin[1:] - end[:-1]).sum()
    return float(end[-1] - begin[0] - idle) / PS_PER_S


def _inbound_rates(
    rank: int, senders: NDArray[np.int32], receivers: NDArray[np.int32], records: NDArray[np.void]
) -> list[float]:
    """Return the packets a second that a rank receives from each sender whose rate is known."""
    received = (receivers == rank) & (records["end_ps"] > 0)
    from_each = [records[received & (senders == sender)] for sender in np.unique(senders[received])]
    return [float(own["packets"].sum()) / seconds_under_way(own) for own in from_each]
