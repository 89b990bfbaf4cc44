# SPDX-License-Identifier: Apache-2.0
"""Precision in simulated training: how many bits of each value a step's messages have.

Real and simulated ranks follow one rule (`dlcp.precision`) and one layout of messages (`dlcp.planes`). A message that
is encoded has fewer packets. Those of the upper plane are in drop class 0. Those of the lower plane are in classes 1 to
7 and may be lost within the loss bound.

A job chooses when its first worker has finished a step: by then all averages of the step have been sent, and no message
of the next step has begun. So all messages of a step have the same precision.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlcp.precision import PrecisionChooser
from dlcp.sim.arithmetic import PS_PER_S
from dlcp.sim.simulation import Simulation, SubmittedGraph
from dlcp.slow_ports import snap_to_fastest

Precision = Literal["auto", 32, 16, 8, 4]
"""As in `dlcp.precision.PRECISIONS`."""


class SimulatedPrecision:
    """Chooses, step by step, the precision of a job's messages.

    Parameters
    ----------
    value_bytes
        Bytes of a value in full precision.
    payload_bytes
        Payload of a packet in bytes.
    ranks
        Hosts of the workers.
    has_servers
        Whether servers own the shards. If not, a slow port counts as congestion, and rates between ranks are known.
    error_feedback
        Whether rounding errors are sent with the next step.
    """

    def __init__(
        self,
        precision: Precision,
        value_bytes: int,
        payload_bytes: int,
        ranks: tuple[int, ...],
        *,
        has_servers: bool,
        error_feedback: bool,
    ) -> None:
        self._chooser = PrecisionChooser(str(precision), error_feedback=error_feedback)
        self._value_bytes, self._payload_bytes, self._has_servers = value_bytes, payload_bytes, has_servers
        self._ports = RankPorts(ranks)
        self._congested = False

    @property
    def bits(self) -> int:
        """Bits per value in the current step."""
        return min(self._chooser.bits, 8 * self._value_bytes)

    def learn(self, submitted: SubmittedGraph, records: NDArray[np.void], step: int) -> None:
        """Choose the precision of the next step by what was lost or marked in the step, and by its rates.

        Parameters
        ----------
        records
            The graph's records at the end of the step.
        """
        nodes = submitted.graph.nodes
        chosen = np.flatnonzero((submitted.packets > 0) & (nodes["step"] == step))
        nodes, records = nodes[chosen], records[chosen]
        if not self._has_servers:
            self._ports.learn(nodes["source"], nodes["target"], records)
        # Real ranks report congestion in the middle of a step, and so in this step or the last one.
        before, self._congested = self._congested, bool(records["congested"].any())
        congested = self._congested or before or bool(self._ports.slow)
        self._chooser.begin_step(congested, self._ports.slowest * self._payload_bytes * 8)

    def apply(self, simulation: Simulation, submitted: SubmittedGraph) -> None:
        """Set the precision of a graph's messages that have not begun."""
        simulation.encode(submitted, self.bits, self._value_bytes)


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

    def learn(self, senders: NDArray[np.int32], receivers: NDArray[np.int32], records: NDArray[np.void]) -> None:
        """Update the rates from a step's messages."""
        pairs = {rank: _inbound_rates(rank, senders, receivers, records) for rank in self._ranks}
        self.slowest = min((rate for rates in pairs.values() for rate in rates), default=0.0)
        # The median ignores a slow sender, whose rate says nothing about the receiver.
        measured = {rank: float(np.median(rates or [0.0])) for rank, rates in pairs.items()}
        rates = snap_to_fastest(measured, self.slow)
        fastest = max(rates.values())
        self.slow = {rank for rank, rate in rates.items() if rate < fastest}


def _seconds_under_way(records: NDArray[np.void]) -> float:
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
    return [float(own["packets"].sum()) / _seconds_under_way(own) for own in from_each]
