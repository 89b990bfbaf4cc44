# SPDX-License-Identifier: Apache-2.0
"""The memory of both compiled engines: arrays that grow, ranges of them, and the rows of graphs and their nodes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.engines.network_tables import NetworkTables
from dlcp.sim.engines.packet_engine import Completion, CompletionKind, Submission
from dlcp.sim.graphs.graph import NODE_RECORD

_LINE_BYTES: Final = 64
_DERIVED: Final = {"owner", "salt", "queue", "bounded"}
_DESCRIBED: Final = {"order", "step", "transport", "watched"}
"""Columns that rows of nodes may have from a submission, and from its graph."""
_ROWS_AT_ONCE: Final = 2048
"""Nodes of a graph that are written at once: their rows fit in the second-level cache."""


class Room:
    """Allocates ranges of a growing array."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        self._end = 0

    def take(self, count: int) -> slice:
        """Allocate the first free range that is large enough."""
        for position, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                if stop - start == count:
                    del self._free[position]
                else:
                    self._free[position] = (start + count, stop)
                return slice(start, start + count)
        start = self._end
        self._end += count
        return slice(start, self._end)

    def give(self, room: slice) -> None:
        """Free a range, and merge it with adjacent free ranges."""
        if room.start == room.stop:
            return
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self._free, (room.start, room.stop)]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        if merged[-1][1] == self._end:
            self._end = merged.pop()[0]
        self._free = merged


def enlarged(array: NDArray[Any], needed: int) -> NDArray[Any]:
    """Return an array with room for ``needed`` rows: the same array if it is large enough."""
    if len(array) >= needed:
        return array
    larger = aligned_zeros(max(needed, 2 * len(array)), array)
    larger[: len(array)] = array
    return larger


def aligned_zeros(count: int, like: NDArray[Any]) -> NDArray[Any]:
    """Return zeros with the rows of ``like``, aligned to a cache line."""
    size = count * like.itemsize * math.prod(like.shape[1:])
    room = np.zeros(size + _LINE_BYTES, np.uint8)
    start = -room.ctypes.data % _LINE_BYTES
    return room[start : start + size].view(like.dtype).reshape(count, *like.shape[1:])


class CompiledEngine(ABC):
    """Keeps the rows of graphs; see `dlcp.sim.engines.packet_engine.PacketEngine`.

    Parameters
    ----------
    arrays
        The compiled code's arrays by name; growing an array replaces it. Both engines have ``messages``, ``followers``,
        ``graphs``, ``completions`` (a kind and a number, in turn) and ``counts``.
    """

    def __init__(self, plan: NetworkTables, arrays: SimpleNamespace) -> None:
        self.plan, self._a = plan, arrays
        self._message_room, self._follower_room, self._graph_room = Room(), Room(), Room()
        self._places: dict[int, tuple[int, slice, slice]] = {}
        """By graph, its row, and those of its nodes and their followers."""
        self._graph_at: dict[int, int] = {}

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the counts, indexed by `dlcp.sim.engines.packet_engine.EngineCounter`."""
        counts: NDArray[np.int64] = self._a.counts
        return counts

    def _place(self, submission: Submission, streams: Mapping[int, int]) -> tuple[int, slice]:
        """Make room for a graph, and write the rows of its nodes; return its own row, and theirs.

        The rows are written in blocks. Writing thirty columns over more rows than fit in the caches takes three times
        as long as everything else for a graph of millions of nodes.

        Parameters
        ----------
        streams
            The row of each stream by serial number.
        """
        graph, arrays = submission.graph, self._a
        nodes, edges = self._message_room.take(len(graph)), self._follower_room.take(len(graph.followers))
        slot = self._graph_room.take(1).start
        arrays.messages = enlarged(arrays.messages, nodes.stop)
        arrays.followers = enlarged(arrays.followers, edges.stop)
        arrays.graphs = enlarged(arrays.graphs, slot + 1)
        arrays.followers[edges] = graph.followers + nodes.start
        self._places[submission.number], self._graph_at[slot] = (slot, nodes, edges), submission.number
        for start in range(0, len(graph), _ROWS_AT_ONCE):
            part = slice(start, min(start + _ROWS_AT_ONCE, len(graph)))
            described, rows = graph.nodes[part], arrays.messages[nodes.start + part.start : nodes.start + part.stop]
            rows.view(np.uint8)[:] = 0
            rows["begin"] = rows["end"] = -1
            serials, inverse = np.unique(submission.streams[part], return_inverse=True)
            rows["stream"] = np.array([streams[serial] for serial in serials.tolist()], np.int32)[inverse]
            rows["graph"], rows["waits"], rows["delay"] = slot, graph.waits[part], described["delay_ps"]
            starts = graph.starts[part.start : part.stop + 1]
            rows["followers"], rows["follower_count"] = edges.start + starts[:-1], np.diff(starts)
            for name in _DERIVED & {*(rows.dtype.names or ())}:
                rows[name] = getattr(submission, name)[part]
            for name in _DESCRIBED & {*(rows.dtype.names or ())}:
                rows[name] = described[name]
            self._set_sizes(rows, slice(None), submission.sizes[part])
        return slot, nodes

    def _completions(self, count: int) -> list[Completion]:
        """Return the completions that the compiled code has noted."""
        found = []
        for number, at in self._a.completions.reshape(-1, 2)[:count].tolist():
            kind = CompletionKind(number)
            if kind == CompletionKind.NODE_DONE:
                graph = self._graph_at[int(self._a.messages[at]["graph"])]
                found.append(Completion(kind, graph, at - self._places[graph][1].start))
            else:
                found.append(Completion(kind, self._graph_at[at]))
        return found

    def _rows(self, number: int) -> NDArray[Any]:
        rows: NDArray[Any] = self._a.messages[self._places[number][1]]
        return rows

    def records(self, number: int) -> NDArray[Any]:
        """Return the records of a graph that has not been forgotten, `dlcp.sim.graphs.graph.NODE_RECORD` (n,)."""
        rows = self._rows(number)
        records = np.zeros(len(rows), NODE_RECORD)
        records["begin_ps"], records["end_ps"], records["packets"] = rows["begin"], rows["end"], rows["packets"]
        records["missing_packets"], records["sent_packets"] = rows["missing"], rows["sent"]
        records["congested"] = rows["congested"]
        return records

    def resize(self, number: int, nodes: NDArray[np.int64], sizes: NDArray[Any]) -> None:
        """Set the sizes of messages that have not begun; see `dlcp.sim.engines.packet_engine.PacketEngine.resize`."""
        rows = self._rows(number)
        waiting = rows["begin"][nodes] < 0
        self._set_sizes(rows, nodes[waiting], sizes[waiting])

    @abstractmethod
    def _set_sizes(self, rows: NDArray[Any], where: slice | NDArray[np.int64], sizes: NDArray[Any]) -> None:
        """Write `MESSAGE_SIZE` rows into rows of messages."""

    def forget(self, number: int) -> None:
        """Free the rows of a closed graph."""
        slot, nodes, edges = self._places.pop(number)
        self._graph_room.give(slice(slot, slot + 1))
        self._message_room.give(nodes)
        self._follower_room.give(edges)
        del self._graph_at[slot]
