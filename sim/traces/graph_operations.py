# SPDX-License-Identifier: Apache-2.0
"""Turn a graph back into operations of ranks, to write it as a trace. Rank r is host r."""

from collections import defaultdict
from typing import Final

import numpy as np

from dlcp.sim.graphs.graph import NODE_ROW, Graph
from dlcp.sim.traces.operations import NO_PROCESSOR, OperationKind, RankOperation

_NOWHERE: Final = -1
COLUMNS: Final = ("queue", "order", "lane", "class_shares", "loss_bound", "job", "step", "message", "sender")
"""Columns of a message, beyond hosts and size, that a trace may keep."""


def operations_of(graph: Graph) -> list[list[RankOperation]]:
    """Return the operations of each host.

    A message becomes a send and a receive, a delay a computation at the host whose messages it waits for or precedes.
    Computations that may overlap have different processors. A delay that takes no time, and that nothing waits for, is
    left out: it only marks an end.

    Raises
    ------
    ValueError
        A node waits for something on another host without a message, or the graph neither sends nor takes time.
    """
    ranks = _Operations(graph).ranks
    if not any(ranks):
        raise ValueError("the graph neither sends nor takes time, so there is nothing to write")
    return ranks


class _Operations:
    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        count = len(graph)
        self._sends = (graph.nodes["size_bytes"] > 0).tolist()
        self._source, self._target = graph.nodes["source"].tolist(), graph.nodes["target"].tolist()
        self._delay = graph.nodes["delay_ps"].tolist()
        self._before: list[list[int]] = [[] for _ in range(count)]
        for node in range(count):
            for follower in graph.followers[graph.starts[node] : graph.starts[node + 1]].tolist():
                self._before[follower].append(node)
        followed = np.diff(graph.starts) > 0
        self._kept = [
            sends or took > 0 or bool(follows)
            for sends, took, follows in zip(self._sends, self._delay, followed.tolist(), strict=True)
        ]
        self._host = self._hosts()
        hosts = 1 + max([host for host in (*self._host, *self._target) if host >= 0], default=0)
        self.ranks: list[list[RankOperation]] = [[] for _ in range(hosts)]
        self._ends: dict[int, int] = {}
        """The operation that ends a node, by position in its rank: a receive for a message."""
        self._pairs: dict[tuple[int, int], int] = defaultdict(int)
        self._last_of_processor: dict[tuple[int, int], int] = {}
        self._processors: dict[int, int] = defaultdict(int)
        for node in self._in_order(graph):
            self._add(node)

    def _hosts(self) -> list[int]:
        """Return where each node is: a message at its source, a delay at the host of those it is connected to."""
        hosts = [source if sends else _NOWHERE for source, sends in zip(self._source, self._sends, strict=True)]
        joined = list(range(len(hosts)))

        def root(node: int) -> int:
            while joined[node] != node:
                joined[node] = joined[joined[node]]
                node = joined[node]
            return node

        found: dict[int, int] = {}
        edges = [(before, node) for node, befores in enumerate(self._before) if self._kept[node] for before in befores]
        for before, node in edges:
            if not self._sends[before] and not self._sends[node]:
                joined[root(before)] = root(node)
        for before, node in edges:
            here = self._target[before] if self._sends[before] else _NOWHERE
            there = self._source[node] if self._sends[node] else _NOWHERE
            delays = [each for each in (before, node) if not self._sends[each]]
            host = here if here != _NOWHERE else there
            if delays and host != _NOWHERE:
                there = found.setdefault(root(delays[0]), host)
                here = host
            if _NOWHERE not in (here, there) and here != there:
                raise ValueError(
                    f"node {node} waits for node {before}: one is at host {there}, the other at host {here}, and a "
                    "trace can express that only with a message"
                )
        # Delays without any message may be at any host.
        return [host if host != _NOWHERE else found.get(root(node), 0) for node, host in enumerate(hosts)]

    def _in_order(self, graph: Graph) -> list[int]:
        """Return the nodes, each after those that it waits for."""
        missing = graph.waits.tolist()
        ready = [node for node, count in enumerate(missing) if not count]
        for node in ready:
            for follower in graph.followers[graph.starts[node] : graph.starts[node + 1]].tolist():
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        if len(ready) < len(missing):
            raise ValueError("nodes of the graph wait for each other")
        return ready

    def _add(self, node: int) -> None:
        if not self._kept[node]:
            return
        host = self._host[node]
        after = [self._ends[before] for before in self._before[node]]
        if not self._sends[node]:
            self._ends[node] = self._compute(host, node, "n", after)
            return
        if self._delay[node]:
            after = [self._compute(host, node, "d", after)]
        target, size = self._target[node], int(self._nodes["size_bytes"][node])
        tag = self._pairs[host, target]
        self._pairs[host, target] += 1
        columns = {name: self._nodes[name][node].item() for name in COLUMNS}
        send, receive = OperationKind.SEND, OperationKind.RECEIVE
        self._append(
            host,
            RankOperation(
                send, f"s{node}", "", after, order=node, peer=target, tag=tag, size_bytes=size, columns=columns
            ),
        )
        self._ends[node] = self._append(
            target, RankOperation(receive, f"r{node}", "", [], order=node, peer=host, tag=tag, size_bytes=size)
        )

    def _compute(self, host: int, node: int, letter: str, after: list[int]) -> int:
        """Add a node's delay; return its position in the rank. Without a duration it needs no processor."""
        duration_ps = self._delay[node]
        processor = self._processor(host, node, after) if duration_ps else NO_PROCESSOR
        operation = RankOperation(
            OperationKind.COMPUTE,
            f"{letter}{node}",
            "",
            after,
            order=node,
            duration_ps=duration_ps,
            processor=processor,
        )
        return self._append(host, operation)

    def _append(self, host: int, operation: RankOperation) -> int:
        """Add an operation; return its position in the rank."""
        self.ranks[host].append(operation)
        return len(self.ranks[host]) - 1

    def _processor(self, host: int, node: int, after: list[int]) -> int:
        """Return the processor of a computation: that of one it waits for, if no other took its place, or a new one."""
        key = host, 0
        for before in after:
            operation = self.ranks[host][before]
            key = host, operation.processor
            if operation.processor != NO_PROCESSOR and self._last_of_processor.get(key) == before:
                break
        else:
            key = host, self._processors[host]
            self._processors[host] += 1
        self._last_of_processor[key] = len(self.ranks[host])
        return key[1]


assert set(COLUMNS) < set(NODE_ROW.names or ())
