# SPDX-License-Identifier: Apache-2.0
"""Graphs as engines take them: with everything that both would otherwise have to find out each for itself."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from dlcp.sim.arithmetic import path_hashes, slot_owners
from dlcp.sim.graph import OWN_LANE, Graph
from dlcp.sim.plan import DLCP, ORDINARY_QUEUE, OTHER_PORT, Plan, source_port
from numpy.typing import NDArray

from dlcp.wire import UDP_PORT_BASE


@dataclass(slots=True)
class Submission:
    """A graph with all that both engines would otherwise have to find out each for itself.

    Attributes
    ----------
    packets, last_bytes
        Of each message, and what the last packet carries; 0 of a node that sends nothing.
    streams
        int64 (n,): serial number of the stream of each message, -1 of others.
    new_streams
        Rows of (serial, source, target, transport, hash there, hash back, own) for streams not known before.
    bounded
        Whether packets of it may stay lost.
    """

    graph: Graph
    number: int
    now_ps: int
    packets: NDArray[np.int32]
    last_bytes: NDArray[np.int32]
    streams: NDArray[np.int64]
    new_streams: NDArray[np.int64]
    bounded: NDArray[np.bool_]
    allowed: NDArray[np.int32]
    budget: NDArray[np.int32]
    owner: NDArray[np.int64]
    queue: NDArray[np.int8]
    profile: NDArray[np.int16]
    salt: NDArray[np.int64]


class Submitter:
    """Prepares graphs for an engine, and knows which streams there are."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._streams: dict[int, int] = {}
        self._next_stream = 0
        self._next_graph = 0

    def prepare(self, graph: Graph, now_ps: int) -> Submission:
        """Return what an engine needs to know of a graph that begins at ``now_ps``.

        Raises
        ------
        ValueError
            A message is between hosts that there are not, or from a host to itself.
        """
        nodes, rows = graph.nodes, self.plan.transports
        sends = nodes["size_bytes"] > 0
        self._check(nodes, sends)
        # Column by column: a graph may have millions of nodes.
        transport = nodes["transport"]
        kind, payload = rows["kind"][transport], rows["payload"][transport]
        packets = np.where(sends, -(-nodes["size_bytes"] // payload), 0)
        last = np.where(sends, nodes["size_bytes"] - (packets - 1) * payload, 0)
        bounded = sends & (kind == DLCP) & (nodes["loss_bound"] > 0)
        allowed = np.where(bounded, np.floor(nodes["loss_bound"] * packets + 1e-9), 0).astype(np.int32)
        budget = np.minimum(allowed // rows["hops"][transport], 0xFFFF)
        owner = np.zeros(len(nodes), np.int64)
        if bounded.any():
            names = (nodes[name][bounded] for name in ("job", "step", "message", "sender"))
            owner[bounded] = slot_owners(*names)
        streams, new = self._assign_streams(nodes, np.flatnonzero(sends))
        preset = (rows["control_queue"][transport] == ORDINARY_QUEUE) | (nodes["queue"] < 0)
        number = self._next_graph
        self._next_graph += 1
        return Submission(
            graph,
            number,
            now_ps,
            packets.astype(np.int32),
            last.astype(np.int32),
            streams,
            new,
            bounded,
            allowed,
            budget.astype(np.int32),
            owner,
            np.where(preset, rows["queue"][transport], nodes["queue"]).astype(np.int8),
            np.where(nodes["class_shares"] < 0, rows["profile"][transport], nodes["class_shares"]).astype(np.int16),
            (nodes["step"] * 131 + nodes["message"]) * 257 + nodes["sender"] + self.plan.seed * 65537,
        )

    def _check(self, nodes: NDArray[Any], sends: NDArray[np.bool_]) -> None:
        hosts, transports = self.plan.hosts, len(self.plan.transports)
        source, target, transport = nodes["source"], nodes["target"], nodes["transport"]
        wrong = (source == target) | (source < 0) | (target < 0) | (source >= hosts) | (target >= hosts)
        wrong = np.flatnonzero(wrong & sends)
        if len(wrong):
            raise ValueError(
                f"a message from host {source[wrong[0]]} to host {target[wrong[0]]}: there are hosts 0 to {hosts - 1}, "
                "and a message needs two"
            )
        if not 0 <= transport.min() <= transport.max() < transports:
            raise ValueError(f"there is no transport {transport.max()}; there are {transports}")

    def _assign_streams(
        self, nodes: NDArray[Any], where: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        streams = np.full(len(nodes), -1, np.int64)
        own = nodes["lane"][where] == OWN_LANE
        key = nodes["job"][where].astype(np.int64) & 0xFFFF
        for name, width in (("source", 16), ("target", 16), ("transport", 5), ("lane", 9)):
            key = key << width | (nodes[name][where].astype(np.int64) & ((1 << width) - 1))
        fresh: list[int] = []
        serials = np.empty(len(where), np.int64)
        shared = np.flatnonzero(~own)
        keys, first, inverse = np.unique(key[shared], return_index=True, return_inverse=True)
        known = np.empty(len(keys), np.int64)
        for position in np.argsort(first, kind="stable").tolist():
            known_as = int(keys[position])
            serial = self._streams.get(known_as)
            if serial is None:
                serial = self._streams[known_as] = self._next_stream
                self._next_stream += 1
                fresh.append(int(shared[first[position]]))
            known[position] = serial
        serials[shared] = known[inverse]
        alone = np.flatnonzero(own)
        serials[alone] = self._next_stream + np.arange(len(alone))
        self._next_stream += len(alone)
        fresh += alone.tolist()
        streams[where] = serials
        chosen = nodes[where[fresh]]
        new = np.zeros((len(fresh), 7), np.int64)
        new[:, 0] = serials[fresh]
        new[:, 1], new[:, 2], new[:, 3] = chosen["source"], chosen["target"], chosen["transport"]
        ports = source_port(new[:, 0])
        to_port = np.where(self.plan.transports["kind"][new[:, 3]] == DLCP, UDP_PORT_BASE, OTHER_PORT)
        new[:, 4] = path_hashes(new[:, 1], new[:, 2], ports, to_port)
        new[:, 5] = path_hashes(new[:, 2], new[:, 1], ports, to_port)
        new[:, 6] = own[fresh]
        return streams, new
