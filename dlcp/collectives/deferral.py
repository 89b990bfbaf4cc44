# SPDX-License-Identifier: Apache-2.0
"""Deferral: if one rank's port is far slower than the others', the least valuable packets are sent in a later step.

Shards in proportion to the ranks' rates (:mod:`dlcp.collectives.shards`) make a step as short as its bytes allow. Only
fewer bytes can make it shorter. A sender to a slow rank defers the packets with the smallest values, within the bound:
enough for that rank's port to finish with the others. An owner decides once for all receivers of its averaged shard. A
deferred packet is zero on every rank, so replicas stay equal. Deferred values are residual and go into the next step's
contribution, like lost ones. If no rank is far slower than the others, nothing is deferred. Scattered buckets (FSDP2)
only have contributions to defer. With a parameter server all gradients pass one port; deferral starts when that port is
congested.

Error feedback makes this work: with half of the packets deferred by value, training reaches the same accuracy in 10 to
20 % more steps, if the first steps are sent in full and no packet waits too long (``python -m tests.bench
convergence``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, RankContext
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.magnitudes import packet_magnitudes
from dlcp.planes import PlaneLayout
from dlcp.slow_ports import REFRESH_STEPS, SHARE_MIN, PortLoads, share_to_defer, snap_to_fastest
from dlcp.tags import PacketTags
from dlcp.transport import LossBound

WHOLE_STEPS: Final = 3
"""The number of first steps without deferral, because gradients change most then (Accordion, MLSys 2021)."""
STEP_PART: Final = 2 / 3
"""The largest share of a step's packets to defer, relative to the ceiling for each message. Below 1, so that messages
of layers with small gradients can defer more than others."""
SIZE_JUMP: Final = 2.0
"""Values larger than usual by this factor stop deferral in the next step. Not tuned."""
USUAL_MEMORY: Final = 0.75
"""Weight of the past in the average. One step is not representative: values deferred in one double the next step's."""


class Deferral:
    """Decides how much one rank defers in a step, and to which ranks.

    Parameters
    ----------
    rank, contributors
        This rank, and all participants, ascending.
    ceiling
        The largest share of a message's packets that may be deferred; 0 for no deferral.

    Attributes
    ----------
    step_ceiling
        The approximate largest share of a step's packets to defer; each message's part is planned from earlier steps.
    """

    def __init__(self, rank: int, contributors: Sequence[int], ceiling: float) -> None:
        self.ceiling, self.step_ceiling = ceiling, STEP_PART * ceiling
        self._rank, self._contributors = rank, contributors
        self._steps = 0
        self._rates: dict[int, float] = {}
        self._slow: set[int] = set()
        self._seconds: dict[int, float] = {}
        """Total time that averages of this step took to each peer."""
        self._slowness: dict[int, float] = {}
        self._weights: Mapping[int, float] = {}
        self._chosen: dict[tuple[int, ...], tuple[NDArray[np.float32], float]] = {}
        """Magnitudes of this step's messages, and the intended share."""
        self._parts: dict[tuple[int, ...], float] = {}
        """Each message's share, relative to the common one."""
        self._usual_size: float | None = None
        self._jumped = False

    def begin_step(self, rates_bps: Mapping[int, float], slow: set[int], weights: Mapping[int, float]) -> None:
        """Begin a step.

        Parameters
        ----------
        rates_bps, slow
            Each rank's receive rate in the last step, in bit/s (:func:`dlcp.collectives.shards.inbound_rates`), and the
            ranks that count as slow.
        weights
            Each owner's share of every buffer.
        """
        self._steps += 1
        self._slowness, self._seconds = self._by_seconds() or self._slowness, {}
        self._rates, self._slow, self._weights = dict(rates_bps), slow, weights
        self._jumped = False
        if self._chosen:
            self._learn()
            self._chosen = {}

    def _learn(self) -> None:
        """Update the usual size of values, and each message's share of the least valuable packets."""
        every = np.concatenate([magnitudes for magnitudes, _ in self._chosen.values()])
        size = float(np.sqrt(np.mean(np.square(every, dtype=float))))
        self._jumped = not size <= SIZE_JUMP * (self._usual_size or size)
        if not math.isfinite(size):
            return
        self._usual_size = _smoothed(self._usual_size, size)
        most = min(self.ceiling, 1 - 1 / REFRESH_STEPS)
        for phase in {message[0] for message in self._chosen}:
            found = {message: each for message, each in self._chosen.items() if message[0] == phase}
            share = float(np.mean([share for _, share in found.values()]))
            shares = shares_by_value({message: magnitudes for message, (magnitudes, _) in found.items()}, share, most)
            for message, own in shares.items():
                self._parts[message] = _smoothed(self._parts.get(message), own / share)

    @property
    def is_allowed(self) -> bool:
        """Whether anything may be deferred in this step."""
        return self.ceiling > 0 and self._steps > WHOLE_STEPS and not self._jumped

    def note_average_sent(self, peer: int, seconds: float) -> None:
        """Record the time that a peer took to receive this rank's averaged shard."""
        self._seconds[peer] = self._seconds.get(peer, 0.0) + seconds

    def shares(self, rates_bps: Sequence[float] | NDArray[np.generic], *, scattered: bool = False) -> dict[int, float]:
        """Return the share of packets to defer for each rank that is or was slow, at most the ceiling.

        Parameters
        ----------
        rates_bps
            This rank's current rate to each contributor, in bit/s; 0 if unknown.
        scattered
            Only contributions are sent: there are no averages.
        """
        if not self.is_allowed:
            return {}
        others = len(self._contributors) - 1
        reached = zip(self._contributors, rates_bps, strict=True)
        live = {rank: float(rate) for rank, rate in reached if rate > 0}
        if others > 1 and live:  # other ranks send to these ports, too, so only the ratios of one sender's rates count
            scale = max(self._rates.values(), default=0.0) / max(live.values())
            live = {rank: scale * rate for rank, rate in live.items()}
        slowness: dict[int, float] = {}
        # Two steps, since a port looks fast when less is sent to it: otherwise every other step would be sent in full.
        for rates in (self._rates, {**self._rates, **live}):
            level_rates = snap_to_fastest(rates, self._slow)
            fastest = max(level_rates.values(), default=0.0)
            for rank, rate in level_rates.items():
                if rate < fastest and rank != self._rank:
                    slowness[rank] = max(slowness.get(rank, 1.0), fastest / rate)
        for seconds in (self._slowness, self._by_seconds()):
            slowness = {rank: max(times, seconds.get(rank, 1.0)) for rank, times in slowness.items()}
        shares = {rank: self._share(rank, times, scattered) for rank, times in slowness.items()}
        return {rank: share for rank, share in shares.items() if share >= SHARE_MIN}

    def share_through_server(self, is_clear: bool) -> float:
        """Return the share of packets to defer on the way to or from a parameter server.

        All ranks' gradients pass the server's port, in both directions. With n workers it is busy n times as long as
        any other port, so any deferral shortens the step.

        Parameters
        ----------
        is_clear
            Whether the server's port shows no sign of congestion. If so, nothing is deferred.
        """
        return self.step_ceiling if self.is_allowed and not is_clear else 0.0

    def _by_seconds(self) -> dict[int, float]:
        """Return the time of averages to each peer, relative to the fastest peer; empty if unknown.

        All peers get the same message at about the same time, so times are inversely proportional to the ports' rates.
        Rates alone are not enough: a port looks fast to its only sender.
        """
        if len(self._seconds) < max(2, len(self._contributors) - 1):
            return {}
        least = min(self._seconds.values())
        return {peer: seconds / least for peer, seconds in self._seconds.items()} if least > 0 else {}

    def _share(self, slow: int, slowness: float, scattered: bool) -> float:
        """Return the share to defer for a rank that is slower by this factor, so that it finishes with the others."""
        total = sum(self._weights.values())
        weight, largest = self._weights[slow] / total, max(self._weights.values()) / total
        loads = PortLoads.of_reduce_scatter if scattered else PortLoads.of_direct
        return share_to_defer(loads(len(self._contributors), weight, largest), slowness, self.step_ceiling)

    def choose(
        self,
        message: tuple[int, ...],
        magnitudes: NDArray[np.float32],
        candidates: NDArray[np.bool_],
        share: float,
        limit: int,
    ) -> NDArray[np.bool_] | None:
        """Choose the least valuable packets of a message to defer; None for none.

        Gradients differ in size between layers, so messages with small gradients defer more: about as many as were
        among the least valuable packets of recent steps.

        Parameters
        ----------
        message
            Identity of the message in every step. The phase comes first, because contributions are compared only with
            contributions, and averages with averages.
        magnitudes
            Magnitudes of its packets, shape (packets,).
        candidates
            Packets that may be deferred, of the same shape.
        share
            The share of a step's packets to defer.
        limit
            The largest number of packets to defer in this message.
        """
        self._chosen[message] = magnitudes, share
        indices = np.flatnonzero(candidates)
        count = min(limit, round(share * self._parts.get(message, 1.0) * len(magnitudes)), len(indices))
        if count <= 0:
            return None
        if count < len(indices):
            indices = indices[np.argpartition(magnitudes[indices], count)[:count]]
        deferred: NDArray[np.bool_] = np.zeros(len(magnitudes), np.bool_)
        deferred[indices] = True
        return deferred

    @staticmethod
    def due(first_packet: int, packets: int, step: int) -> NDArray[np.bool_]:
        """Return the mask of packets, from ``first_packet`` on, that must be sent in this step."""
        turn: NDArray[np.bool_] = (np.arange(first_packet, first_packet + packets) + step) % REFRESH_STEPS == 0
        return turn


class BucketDeferral:
    """Chooses the packets of one bucket to defer.

    Parameters
    ----------
    deferral, turn
        This rank's deferral, and the count that decides which packets must be sent in this step.
    context, sequence, bucket
        This rank, the bucket's number, and the bucket.
    bounds, packets
        Each owner's shard, in values and in packets of the bucket.
    bound
        The bound for deferral.
    """

    def __init__(
        self,
        deferral: Deferral,
        turn: int,
        context: RankContext,
        sequence: int,
        bucket: Bucket,
        bounds: Mapping[int, tuple[int, int]],
        packets: Mapping[int, slice],
        bound: LossBound,
    ) -> None:
        self._deferral, self._turn, self._context, self._sequence = deferral, turn, context, sequence
        self._bucket, self._bounds, self._packets, self._bound = bucket, bounds, packets, bound

    def of_contribution(
        self, owner: int, tags: PacketTags, rates_bps: NDArray[np.generic], layout: PlaneLayout | None
    ) -> tuple[PacketTags, NDArray[np.bool_] | None]:
        """Return the tags of a contribution to a shard, and the mask of deferred packets; None if all are sent.

        Packets that must be sent in this step are protected.

        Parameters
        ----------
        rates_bps
            See :meth:`Deferral.shares`.
        layout
            The layout of the message if it is encoded. All planes of the same values are deferred together.
        """
        if layout is None:  # the upper plane of an encoded message is protected
            due = self._deferral.due(self._packets[owner].start, len(tags.queue), self._turn)
            drop_class = np.where(due, np.uint8(0), tags.drop_class)
            tags = tags._replace(drop_class=drop_class, protected=tags.protected | due)
        if owner in self._context.contributors:
            share = self._deferral.shares(rates_bps, scattered=self._bucket.scattered).get(owner, 0.0)
        else:  # a parameter server
            share = self._deferral.share_through_server(self._context.connection.is_clear(owner))
        deferred = self._choose(REDUCE_SCATTER, owner, share, tags, layout)
        if deferred is not None:
            tags = tags._replace(protected=tags.protected & ~deferred)
        return tags, deferred

    def of_average(
        self, tags: PacketTags, rates_bps: NDArray[np.generic], layout: PlaneLayout | None
    ) -> NDArray[np.bool_] | None:
        """Return the mask of packets of this rank's averaged shard to defer for the slowest receiver; None for none."""
        share = max(self._deferral.shares(rates_bps).values(), default=0.0)
        return self._choose(ALL_GATHER, self._context.rank, share, tags, layout)

    def _choose(
        self, phase: int, owner: int, share: float, tags: PacketTags, layout: PlaneLayout | None
    ) -> NDArray[np.bool_] | None:
        if not share:
            return None
        (start, stop), packets, bucket, context = self._bounds[owner], self._packets[owner], self._bucket, self._context
        per_packet = context.connection.options.payload_bytes // bucket.values.itemsize
        matters = context.tagger.small_layer_packets(bucket.segments, len(bucket.values), per_packet)[packets]
        if context.options.layers:
            matters = matters | context.options.layers.exact_packets(bucket.segments, per_packet)[packets]
        first, planes = packets.start, 1
        if layout is not None:
            matters = np.logical_or.reduceat(matters, layout.starts(per_packet))
            first, planes, per_packet = start // layout.per_packet, layout.planes, layout.per_packet
        magnitudes = packet_magnitudes(bucket.values[start:stop], bucket.value_type, per_packet)
        matters = matters | self._deferral.due(first, len(magnitudes), self._turn)
        more = len(tags.queue) - planes * len(magnitudes)
        if not more:
            matters[-1] = True  # tells the size
        limit = self._bound.deferrable(len(tags.queue)) // planes
        deferred = self._deferral.choose((phase, self._sequence, owner), magnitudes, ~matters, share, limit)
        return deferred if deferred is None else np.append(np.tile(deferred, planes), np.zeros(more, np.bool_))


def shares_by_value(
    magnitudes: Mapping[tuple[int, ...], NDArray[np.float32]], share: float, most: float
) -> dict[tuple[int, ...], float]:
    """Return the share of each message's packets that is among the least valuable of all messages.

    Parameters
    ----------
    magnitudes
        Magnitudes of each message's packets, shape (packets,).
    share, most
        The share over all packets, and the maximum per message.
    """
    shares: dict[tuple[int, ...], float] = {}
    rest = dict(magnitudes)
    left = share * sum(map(len, magnitudes.values()))
    while rest:
        part = max(0.0, left) / sum(map(len, rest.values()))
        threshold = np.quantile(np.concatenate(list(rest.values())), min(1.0, part))
        found = {message: float(np.mean(each < threshold)) for message, each in rest.items()}
        full = [message for message, each in found.items() if each > most]
        if not full:
            return {**shares, **found}
        for message in full:  # the other messages take over the excess
            shares[message] = most
            left -= most * len(rest.pop(message))
    return shares


def _smoothed(past: float | None, now: float) -> float:
    return now if past is None else USUAL_MEMORY * past + (1 - USUAL_MEMORY) * now
