# SPDX-License-Identifier: Apache-2.0
"""Dependency graphs of messages and computation, the input of an engine.

A node without bytes is computation, or a barrier if it takes no time. A message begins at its source when all its
predecessors are done and its delay is over. It is done when its target has what it needs. Nodes and edges are added in
bulk: a ring of 1,024 ranks has two million of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlcp.sim.limits import GRAPH_NODES_MAX, SIZE_BYTES_MAX, TIME_MAX_PS, check_within

Nodes = NDArray[np.int64]
OWN_LANE = -1


def row_type(*columns: tuple[Any, str]) -> np.dtype[Any]:
    """Return a row type with these columns, given as (type, names), in this order."""
    return np.dtype([(name, kind) for kind, names in columns for name in names.split()], align=True)


NODE_ROW = row_type(
    (np.int32, "source target"),
    (np.int64, "size_bytes delay_ps order"),
    (np.int16, "transport lane"),
    (np.int8, "queue"),
    (np.bool_, "watched"),
    (np.int16, "class_shares"),
    (np.float64, "loss_bound"),
    (np.int32, "job step message sender"),
)
"""A node's description; see `GraphBuilder.messages`."""

NODE_RECORD = row_type(
    (np.int64, "begin_ps end_ps"),
    (np.int32, "packets missing_packets"),
    (np.int64, "sent_packets"),
    (np.bool_, "congested"),
)
"""A node's outcome: when it began (packets could be sent) and ended, the number of the message's packets, how many of
them never reached its target, how many were sent, including retransmissions, and whether the sender knows of any that
was lost or marked. The times are -1 before."""


_MOST: Final[Mapping[str, tuple[str, int, str]]] = {
    "size_bytes": ("the size of a message in bytes", SIZE_BYTES_MAX, "send less"),
    "delay_ps": ("a duration in picoseconds", TIME_MAX_PS, "compute less"),
}
"""A column's content and its largest value, and the advice if that is exceeded."""


class GraphBuilder:
    """Collects nodes and edges."""

    def __init__(self) -> None:
        self._nodes: list[NDArray[Any]] = []
        self._befores: list[Nodes] = []
        self._afters: list[Nodes] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def messages(
        self, source: ArrayLike, target: ArrayLike, size_bytes: ArrayLike, *, transport: int, **columns: ArrayLike
    ) -> Nodes:
        """Add messages. A scalar parameter applies to all of them; the default is 0 unless stated otherwise.

        Parameters
        ----------
        source, target
            Hosts.
        transport
            Number of the transport in `Simulation.transports`.
        queue
            0 to 7, 7 the most urgent; -1, the default, takes the transport's.
        lane
            Messages with the same job, hosts, transport and lane share a stream: one window, and one sending order.
            `OWN_LANE` gives each message a stream of its own, like the flows of background traffic.
        order
            A stream sends the message with the smallest order first; of equal ones, the one that began first. A message
            that is being sent is not interrupted.
        delay_ps
            Time from the end of the last predecessor to the message's beginning.
        loss_bound
            Share of its packets that may be lost, if the transport bounds loss.
        class_shares
            Number of a distribution of drop classes, from `Simulation.class_shares`; -1, the default, takes the
            transport's.
        job, step, message, sender
            Header fields. Together they identify the message to a switch. The default sender is ``source``.
        watched
            Whether a process can wait for its end.

        Returns
        -------
        Node numbers, int64 (n,).

        Raises
        ------
        dlcp.sim.limits.LimitError
            A size or a delay is negative or too large.
        """
        defaults = {"queue": -1, "class_shares": -1, "sender": source}
        own = {"source": source, "target": target, "size_bytes": size_bytes, "transport": transport}
        given = {**defaults, **columns, **own}
        nodes = np.zeros(max(np.size(values) for values in given.values()), NODE_ROW)
        for name, values in given.items():
            nodes[name] = _checked(name, values)
        return self._add(nodes)

    def delays(
        self, delay_ps: ArrayLike, *, host: ArrayLike = -1, step: ArrayLike = 0, watched: ArrayLike = False
    ) -> Nodes:
        """Add nodes that take time and send nothing: computation.

        Parameters
        ----------
        host, step
            Where, and in which step of the job, for those who show what happened; -1 if it is nowhere in particular.
        """
        nodes = np.zeros(max(np.size(delay_ps), np.size(watched)), NODE_ROW)
        nodes["source"] = nodes["target"] = host
        nodes["delay_ps"], nodes["step"], nodes["watched"] = _checked("delay_ps", delay_ps), step, watched
        return self._add(nodes)

    def barrier(self, before: ArrayLike, *, watched: bool = False) -> int:
        """Add a node that is done when all of ``before`` are."""
        node = int(self.delays(0, watched=watched)[0])
        self.follow(before, node)
        return node

    def follow(self, before: ArrayLike, after: ArrayLike) -> None:
        """Make each node of ``after`` wait for the node of ``before`` at the same position; shapes are broadcast."""
        first, second = np.broadcast_arrays(np.asarray(before, np.int64), np.asarray(after, np.int64))
        self._befores.append(first.ravel())
        self._afters.append(second.ravel())

    def _add(self, nodes: NDArray[Any]) -> Nodes:
        first = self._count
        check_within(
            "the number of messages and computations at once", first + len(nodes), GRAPH_NODES_MAX, "use fewer ranks"
        )
        self._nodes.append(nodes)
        self._count += len(nodes)
        return np.arange(first, self._count)

    def build(self) -> "Graph":
        """Return the graph.

        Raises
        ------
        ValueError
            It is empty, or an edge names a node that does not exist.
        """
        if not self._count:
            raise ValueError("a graph needs a node")
        nodes = self._nodes[0] if len(self._nodes) == 1 else np.concatenate(self._nodes)
        before, after = _joined(self._befores), _joined(self._afters)
        for end in (before, after):
            if len(end) and not 0 <= end.min() <= end.max() < self._count:
                raise ValueError(f"an edge names node {end.max()}; there are {self._count}")
        waits = np.bincount(after, minlength=self._count).astype(np.int32)
        followers = np.bincount(before, minlength=self._count)
        starts = np.zeros(self._count + 1, np.int64)
        np.cumsum(followers, out=starts[1:])
        return Graph(nodes, waits, starts, after[np.argsort(before, kind="stable")].astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Nodes and the edges between them.

    Attributes
    ----------
    nodes
        `NODE_ROW` (n,).
    waits
        int32 (n,): number of predecessors.
    starts, followers
        The nodes that wait for node i are ``followers[starts[i]:starts[i + 1]]``.
    """

    nodes: NDArray[Any]
    waits: NDArray[np.int32]
    starts: Nodes
    followers: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.nodes)


def _checked(name: str, values: ArrayLike) -> ArrayLike:
    """Return a column's values, or raise `LimitError`: NumPy would cut off their upper bits."""
    if name in _MOST and np.size(values):
        least, most = int(np.min(values)), int(np.max(values))
        what, limit, advice = _MOST[name]
        check_within(what, most if least >= 0 else least, limit, advice)
    return values


def _joined(parts: Sequence[Nodes]) -> Nodes:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
