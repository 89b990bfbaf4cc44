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
different rates, direct gives the slow ones less to add up, and the ring goes at the pace of the slowest. A server pays
where its port is several times as fast as the ranks', or where messages are tiny and ranks many.

All ranks must choose alike, so the choice follows from what they all know: sizes, hosts, and rates that all were told.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.adasum import AdasumReducer
from dlcp.collectives.bucket import Bucket, ReduceOptions
from dlcp.collectives.combining import ADASUM, AVERAGE, COMBINES, RULES, SUM
from dlcp.collectives.compressed import CompressedReducer
from dlcp.collectives.direct import DirectAllReduce
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.gathered import GatheredReducer
from dlcp.collectives.message_numbers import RING as RING_RANGE
from dlcp.collectives.message_numbers import ring_buckets
from dlcp.collectives.reducer import Reducer, Salvageable
from dlcp.collectives.ring import RingAllReduce
from dlcp.collectives.salvage import Salvage
from dlcp.collectives.shards import inbound_rates, weights_for_rates
from dlcp.collectives.summed import SummedReducer
from dlcp.compress.choice import make_compressor
from dlcp.compress.compressor import Feedback
from dlcp.ledger import Ledger
from dlcp.tags import Tagger
from dlcp.transport import Endpoint

__all__ = [
    "AutoAllReduce",
    "Costs",
    "Reducer",
    "Salvageable",
    "Topology",
    "check_coding",
    "choose",
    "flow_weight",
    "make_reducer",
]

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


class AutoAllReduce:
    """All-reduce that chooses a collective for each bucket.

    Parameters
    ----------
    reducers
        By ``direct``, ``ring`` and perhaps ``server``; over one endpoint, with one ledger and one feedback.
    ranks
        The ranks that contribute.
    topology, costs
        What the choice follows from, the same on all ranks.

    Attributes
    ----------
    chosen
        How many buckets each collective got.
    """

    def __init__(
        self,
        reducers: Mapping[str, Reducer],
        ranks: Sequence[int],
        *,
        topology: Topology | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.reducers = dict(reducers)
        self.ranks = sorted(ranks)
        self.topology = topology or Topology()
        self.costs = costs or Costs()
        self.chosen: Counter[str] = Counter()

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on, and choose as the last step has taught.

        All results of the last step are in on every rank, so that all choose alike.
        """
        direct = self.reducers[DIRECT]
        if isinstance(direct, DirectAllReduce) and len(direct.rates_bps) == len(self.ranks):
            rates_bps = {rank: rate for rank, rate in inbound_rates(direct.rates_bps).items() if rate > 0}
            self.topology = Topology(
                self.topology.hosts, rates_bps, self.topology.server, self.topology.server_rate_bps
            )
        for reducer in self.reducers.values():
            reducer.begin_step(step)

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket over the ranks; the future's result is ``bucket.values``, written in place.

        Raises
        ------
        ValueError
            The step has more buckets than messages can be numbered for.
        """
        kind = choose(bucket.values.nbytes, self.ranks, self.topology, self.costs)
        if kind == RING and sequence >= ring_buckets(len(self.ranks)):
            kind = DIRECT
        if kind != RING and sequence >= RING_RANGE.first // (2 * (len(self.ranks) + 1)):
            raise ValueError(
                f"step {step}: bucket {sequence} among {len(self.ranks)} ranks finds no message number left beside the "
                "ring's; use larger buckets, or the collective 'direct'"
            )
        self.chosen[kind] += 1
        return self.reducers[kind].start(step, sequence, bucket)

    def salvage(self) -> list[Salvage]:
        """Return what this rank holds of buckets that are not finished; call it when the endpoint is closed."""
        able = [reducer for reducer in self.reducers.values() if isinstance(reducer, Salvageable)]
        return [held for reducer in able for held in reducer.salvage()]


def make_reducer(
    collective: str,
    endpoint: Endpoint,
    ranks: Sequence[int],
    *,
    options: ReduceOptions | None = None,
    tagger: Tagger | None = None,
    ledger: Ledger | None = None,
    feedback: ErrorFeedback | None = None,
    topology: Topology | None = None,
    costs: Costs | None = None,
    compression: str = "",
    combine: str = AVERAGE,
) -> Reducer:
    """Return what averages buckets by a collective; all ranks must ask for the same one.

    Parameters
    ----------
    collective
        ``direct``, ``ring``, ``server``, or ``auto``: the fastest for each bucket.
    endpoint, ranks
        This rank's endpoint, and the ranks that contribute.
    options, tagger, ledger, feedback
        See :class:`DirectAllReduce`; shared by all collectives.
    topology, costs
        See :func:`choose`. The order of the ring and the server are taken from the topology.
    compression
        A compressor's name (:func:`dlcp.compress.make_compressor`), or ``""``. What cannot be added up is gathered,
        whatever the collective.
    combine
        ``average``, ``sum`` or ``adasum`` (:mod:`dlcp.collectives.combining`), which goes a way of its own, whatever
        the collective.

    Raises
    ------
    ValueError
        There is no such collective, compressor or rule, no server, or they do not go together; the message says which.
    """
    topology, options = topology or Topology(), options or ReduceOptions()
    check_coding(compression, combine, collective)
    tagger, ledger, feedback = tagger or Tagger(), ledger or Ledger(), feedback or ErrorFeedback()
    shared: dict[str, Any] = {"options": options, "tagger": tagger, "ledger": ledger}
    compressor = None
    if compression:
        small = tagger.policy.small_layer_values
        compressor = make_compressor(compression, error_feedback=options.error_feedback, whole_below=small)
    gathered = compressor is not None and not compressor.reduces
    # What a compressor owes belongs into the gradient's places; what is lost of what it sends, does not.
    transit = feedback if compressor is None else ErrorFeedback()
    plain = _plain_reducer(collective, endpoint, ranks, topology, costs, **shared, feedback=transit)
    if compressor is not None and gathered:
        rule = RULES[combine]
        return GatheredReducer(plain, endpoint, ranks, compressor, **shared, feedback=feedback, rule=rule)
    if combine == ADASUM:
        plain = AdasumReducer(plain, endpoint, ranks, **shared, feedback=transit)
    if compressor is not None:
        plain = CompressedReducer(
            plain, endpoint, ranks, compressor, options=options, feedback=feedback, transit=transit
        )
    return SummedReducer(plain, len(ranks)) if combine == SUM else plain


def check_coding(compression: str, combine: str, collective: str = DIRECT, *, fallback: bool = False) -> None:
    """Check that a compression, a rule and a collective exist and go together.

    Parameters
    ----------
    compression, combine, collective
        See :func:`make_reducer`.
    fallback
        Whether the framework's own all-reduce is to take over if DLCP fails: that is an average, so none but averages
        can go on so.

    Raises
    ------
    ValueError
        They do not; the message says what to do.
    """
    if combine not in COMBINES:
        raise ValueError(f"combine must be one of {', '.join(COMBINES)}, got {combine!r}")
    compressor = make_compressor(compression) if compression else None
    if fallback and combine != AVERAGE:
        raise ValueError(
            f"combine {combine!r} cannot go on over the framework's all-reduce, which averages: set fallback=False, so "
            "that a path that fails is an error"
        )
    if compressor and compressor.feedback is Feedback.NOTHING and (fallback or combine != AVERAGE):
        wanted = f"combine={AVERAGE!r}" if combine != AVERAGE else "fallback=False"
        raise ValueError(
            f"the result of compression {compression!r} is a vote, which no average can stand for: set {wanted}"
        )
    if combine == ADASUM and collective == SERVER:
        raise ValueError(f"a parameter server averages; with combine {combine!r} collective must be {DIRECT!r}")
    if compressor and combine == ADASUM and compressor.rounds > 1:
        raise ValueError(
            f"compression {compression!r} averages factors; combine must be {AVERAGE!r} or {SUM!r} with it"
        )
    if compressor and collective == SERVER and not (compressor.reduces and compressor.name not in ("fp16", "bf16")):
        raise ValueError(
            f"a parameter server adds up gradients as they are: with compression {compression!r} collective must be "
            f"{AUTO}, {DIRECT} or {RING}"
        )


def _plain_reducer(
    collective: str,
    endpoint: Endpoint,
    ranks: Sequence[int],
    topology: Topology,
    costs: Costs | None,
    **shared: Any,
) -> Reducer:
    """Return what averages buckets as they are."""
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    if collective == SERVER and topology.server is None:
        raise ValueError("collective 'server' needs a server: set its address with server='host:port' or DLCP_SERVER")
    reducers: dict[str, Reducer] = {}
    if collective in (AUTO, DIRECT):
        reducers[DIRECT] = DirectAllReduce(endpoint, ranks, **shared)
    if collective in (AUTO, RING):
        reducers[RING] = RingAllReduce(endpoint, ranks, order=topology.ring_order(ranks), **shared)
    if collective in (AUTO, SERVER) and topology.server is not None:
        reducers[SERVER] = DirectAllReduce(endpoint, ranks, weights={topology.server: 1.0}, **shared)
    if collective == AUTO:
        return AutoAllReduce(reducers, ranks, topology=topology, costs=costs)
    return reducers[collective]
