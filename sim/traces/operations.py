# SPDX-License-Identifier: Apache-2.0
"""The operations of each rank of a traced job, and their graph on a network.

Every trace format is read into a `Workload`: for each rank, operations that compute, send, receive or take part in a
collective, and the operations that they wait for. `workload_graph` matches sends with receives and the ranks' parts of
a collective with one another, checks that the job can end, and returns a `dlcp.sim.graphs.graph.Graph`.

- **Matching.** The n-th send from one rank to another with some tag belongs to the n-th receive there, in the order of
  the trace. The n-th collective of a group with some tag is the same one on all its ranks.
- **Sends** of at most ``eager_bytes`` end when they begin: the network interface has its own copy. Larger ones begin
  when the receive has begun too, and end when the message has arrived (rendezvous), as in LogGOPSim.
- **Processors.** Computations of a rank with the same ``processor`` run one at a time. Their order is that in which
  they would be ready if messages took no time.
"""

import gc
import gzip
import heapq
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.graphs import collectives
from dlcp.sim.graphs.collectives import AllReduceSpec
from dlcp.sim.graphs.graph import Graph, GraphBuilder, Nodes
from dlcp.sim.limits import SECONDS_MAX, SIZE_BYTES_MAX, TIME_MAX_PS, SimulatorError
from dlcp.sim.scenario import TraceJob

GOAL_EAGER_BYTES: Final = 65_535
"""Default of LogGOPSim's parameter S, the largest message that is sent eagerly."""
ALWAYS_EAGER: Final = 1 << 62
NO_PROCESSOR: Final = -1
_AS_TRACED: Final = TraceJob(name="trace", file="")
"""The settings of a job that only repeats its trace."""
_COLUMN_RANGES: Final[dict[str, tuple[float, float]]] = {
    "queue": (-1, 7),
    "lane": (-1, 511),
    "class_shares": (-1, 256),
    "loss_bound": (0, 1),
    "order": (0, 1 << 62),
    **dict.fromkeys(("job", "step", "message", "sender"), (0, (1 << 31) - 1)),
}
"""The least and the largest value of each column that a trace may give a message, as in `GraphBuilder.messages`."""
_SHOWN: Final = 4
"""Operations that an error lists."""

TracedCollective = Literal[
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter", "barrier"
]
_ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
TraceAlgorithm = Literal["ring", "direct", "tree"]
"""All-reduces for any number of ranks, without parameters of their own."""


class TraceFormatError(SimulatorError):
    """A trace cannot be used; the message names the file, the rank, the operation and the reason."""


def trace_content(file: Path) -> bytes:
    """Return the content of a trace's file, which may be compressed with gzip.

    Raises
    ------
    TraceFormatError
        It cannot be read.
    """
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise TraceFormatError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


class OperationKind(Enum):
    """The kind of an operation."""

    COMPUTE = auto()
    SEND = auto()
    RECEIVE = auto()
    COLLECTIVE = auto()


@dataclass(slots=True)
class RankOperation:
    """An operation of a rank.

    Parameters
    ----------
    name
        Its name in the trace: a label, or a number.
    place
        Where the trace has it: a file, with the line if it has lines.
    after, after_begin
        Operations of the same rank, by position, that have to end, or to begin, before this one begins.
    duration_ps
        Of a computation.
    processor
        Computations with the same number run one at a time; `NO_PROCESSOR` does not wait for others.
    peer
        The other rank of a message, or the root of a collective, as a rank of the job.
    size_bytes
        Of a message; of a collective, a rank's input: its shard for ``all_gather`` and ``gather``, otherwise the whole
        buffer.
    collective, group
        The collective, and its ranks in order.
    order
        Position among the operations of all ranks; by default, the one within the rank. Operations that are ready at
        the same instant begin in this order.
    columns
        Further columns of a message, as in `GraphBuilder.messages`, that override those of the job.
    """

    kind: OperationKind
    name: str
    place: str
    after: list[int] = field(default_factory=list)
    after_begin: list[int] = field(default_factory=list)
    duration_ps: int = 0
    processor: int = NO_PROCESSOR
    peer: int = 0
    size_bytes: int = 0
    tag: int = 0
    collective: TracedCollective = "all_reduce"
    group: tuple[int, ...] = ()
    order: int = -1
    columns: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Workload:
    """A traced job.

    Parameters
    ----------
    name
        Its file, for error messages.
    ranks
        The operations of each rank.
    steps
        For each training step, the operations, as (rank, position), whose ends are the end of the step. Empty: the
        whole trace is one step.
    measured_s
        Duration of each step when it was traced, if the trace has it.
    eager_bytes
        The largest message whose sender does not wait for the receiver.
    algorithm
        The all-reduce, unless the job names another. An all-gather and a reduce-scatter are rings, a broadcast and a
        reduction binomial trees, and a barrier is an all-reduce of a byte along a tree.
    note
        Simplifications of the trace, in a sentence; empty if there are none.
    """

    name: str
    ranks: list[list[RankOperation]]
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    eager_bytes: int = GOAL_EAGER_BYTES
    algorithm: TraceAlgorithm = "ring"
    note: str = ""

    def operations(self) -> Iterator[RankOperation]:
        """Yield the operations of all ranks."""
        for operations in self.ranks:
            yield from operations

    def compute_s(self, rank: int) -> float:
        """Return the computing time of a rank's busiest processor."""
        times: dict[int, int] = defaultdict(int)
        for operation in self.ranks[rank]:
            if operation.processor != NO_PROCESSOR:
                times[operation.processor] += operation.duration_ps
        return max(times.values(), default=0) / 1e12

    @property
    def collectives(self) -> int:
        """Return the number of collectives, each on all ranks of its group."""
        return round(sum(1 / len(each.group) for each in self.operations() if each.kind is OperationKind.COLLECTIVE))

    @property
    def message_bytes(self) -> int:
        """Return the bytes of all messages outside collectives."""
        return sum(each.size_bytes for each in self.operations() if each.kind is OperationKind.SEND)


@dataclass(frozen=True, slots=True)
class TraceGraph:
    """The graph of a traced job.

    Parameters
    ----------
    ends
        One watched node per step; none if the whole trace is one step.
    serials
        Number of values that the column ``step`` takes in the graph.
    """

    graph: Graph
    ends: tuple[int, ...]
    serials: int


def workload_graph(
    workload: Workload, hosts: Sequence[int], transport: int, settings: TraceJob = _AS_TRACED, number: int = 0
) -> TraceGraph:
    """Return the graph of a traced job.

    Parameters
    ----------
    hosts
        A host for each rank.
    transport
        Number of the transport.
    settings
        How the job uses the network.
    number
        Number of the job in the simulation.

    Raises
    ------
    TraceFormatError
        A message or a collective lacks a part, operations wait for each other in a circle, one names a rank that does
        not exist or names it twice, or a number is too large to simulate.
    """
    with collection_paused():
        return _Assembly(workload, hosts, transport, settings, number).graph()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collection of circular garbage, which looks at all objects again and again while millions are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_workload(workload: Workload) -> None:
    """Raise `TraceFormatError` if the job cannot run on any network."""
    with collection_paused():
        _Assembly(workload, range(len(workload.ranks)), 0, _AS_TRACED, 0)


@dataclass(slots=True)
class _Row:
    """A node of the graph: a message, or else a delay."""

    delay_ps: int = 0
    source: int = -1
    target: int = -1
    size_bytes: int = 0
    columns: Mapping[str, Any] | None = None


class _Assembly:
    """Assembles the graph of a workload. Operations of all ranks are numbered together, rank by rank."""

    def __init__(
        self, workload: Workload, hosts: Sequence[int], transport: int, settings: TraceJob, number: int
    ) -> None:
        self._workload, self._hosts, self._transport = workload, hosts, transport
        self._settings, self._job = settings, number
        self._operations = list(workload.operations())
        if not self._operations:
            raise TraceFormatError(f"{workload.name}: no rank has an operation")
        self._firsts = np.cumsum([0, *map(len, workload.ranks)]).tolist()
        self._ranks = np.repeat(np.arange(len(workload.ranks)), list(map(len, workload.ranks))).tolist()
        self._check_operations()
        self._receive_of = self._matched_messages()
        self._send_of = {receive: send for send, receive in self._receive_of.items()}
        self._collectives = self._matched_collectives()
        self._before_on_processor = self._order_computations()
        self._rows: list[_Row] = []
        self._edges: list[tuple[int, int]] = []
        self._gates: dict[int, int] = {}
        """Of each operation, the row that waits for what the operation waits for."""
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._messages: dict[int, int] = {}
        self._end_followed, self._begin_followed = self._followed()
        self._serials = 0

    # Matching -------------------------------------------------------------------------------------------------------

    def error(self, number: int, reason: str) -> TraceFormatError:
        """Return an error about an operation."""
        return TraceFormatError(f"{self._operations[number].place}: {self._name(number)}: {reason}")

    def _name(self, number: int) -> str:
        operation = self._operations[number]
        kind = operation.collective if operation.kind is OperationKind.COLLECTIVE else operation.kind.name.lower()
        return f"rank {self._ranks[number]}: {kind} {operation.name}"

    def _number(self, rank: int, position: int) -> int:
        return int(self._firsts[rank]) + position

    def _check_operations(self) -> None:
        count = len(self._workload.ranks)
        for number, operation in enumerate(self._operations):
            self._check_numbers(number, operation)
            if operation.kind in (OperationKind.SEND, OperationKind.RECEIVE):
                if not 0 <= operation.peer < count:
                    raise self.error(number, f"there is no rank {operation.peer}; the ranks are 0 to {count - 1}")
                if operation.peer == self._ranks[number]:
                    raise self.error(number, "a rank cannot exchange a message with itself; make it a computation")
            elif operation.kind is OperationKind.COLLECTIVE:
                beyond = [rank for rank in (*operation.group, operation.peer) if not 0 <= rank < count]
                if beyond:
                    raise self.error(number, f"its group has rank {beyond[0]}; the ranks are 0 to {count - 1}")
                if self._ranks[number] not in operation.group:
                    raise self.error(number, f"its group {_list(operation.group)} lacks the rank itself")
                if len(set(operation.group)) < len(operation.group):
                    twice = next(rank for rank in operation.group if operation.group.count(rank) > 1)
                    raise self.error(number, f"its group has rank {twice} twice; a group has each rank once")

    def _check_numbers(self, number: int, operation: RankOperation) -> None:
        """Reject numbers that no engine can hold, in any format's trace."""
        if not 0 <= operation.duration_ps * self._settings.compute_factor <= TIME_MAX_PS:
            seconds = operation.duration_ps * self._settings.compute_factor / 1e12
            raise self.error(number, f"it takes {seconds:.6g} s; 0 to {SECONDS_MAX:,} s can be simulated")
        parts = len(operation.group) if operation.collective == "all_gather" else 1
        if not 0 <= operation.size_bytes * parts <= SIZE_BYTES_MAX:
            size = operation.size_bytes * parts
            raise self.error(number, f"it has {size:,} bytes; at most {SIZE_BYTES_MAX:,} can be simulated")
        for name, value in (operation.columns or {}).items():
            least, most = _COLUMN_RANGES[name]
            if not isinstance(value, int | float) or not least <= value <= most:
                raise self.error(number, f"its {name} is {value!r}; {least} to {most} are possible")

    def _matched_messages(self) -> dict[int, int]:
        """Return the receive of each send."""
        sends: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        receives: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, operation in enumerate(self._operations):
            if operation.kind is OperationKind.SEND:
                sends[self._ranks[number], operation.peer, operation.tag].append(number)
            elif operation.kind is OperationKind.RECEIVE:
                receives[operation.peer, self._ranks[number], operation.tag].append(number)
        matched: dict[int, int] = {}
        for source, target, tag in {**sends, **receives}:
            sent, received = sends[source, target, tag], receives[source, target, tag]
            if len(sent) < len(received):
                raise self.error(
                    received[len(sent)],
                    f"rank {source} sends {len(sent)} messages with tag {tag} to rank {target}, and this is receive "
                    f"number {len(sent) + 1}",
                )
            if len(received) < len(sent):
                raise self.error(
                    sent[len(received)],
                    f"rank {target} has no receive for it: rank {source} sends {len(sent)} messages with tag {tag} to "
                    f"rank {target}, which receives {len(received)}",
                )
            for one, other in zip(sent, received, strict=True):
                size, room = self._operations[one].size_bytes, self._operations[other].size_bytes
                if size > room:
                    place = self._operations[one].place
                    raise self.error(other, f"it takes {room} bytes, but {self._name(one)} ({place}) sends {size}")
                matched[one] = other
        return matched

    def _matched_collectives(self) -> list[list[int]]:
        """Return the collectives, each as its operations in the order of the group's ranks."""
        by_rank: dict[tuple[tuple[int, ...], int], dict[int, list[int]]] = {}
        for number, operation in enumerate(self._operations):
            if operation.kind is OperationKind.COLLECTIVE:
                by_rank.setdefault((operation.group, operation.tag), {}).setdefault(self._ranks[number], []).append(
                    number
                )
        found = []
        for (group, _), members in by_rank.items():
            most = max(members, key=lambda rank: len(members[rank]))
            for index, first in enumerate(members[most]):
                parts = []
                for rank in group:
                    own = members.get(rank, [])
                    if index >= len(own):
                        raise self.error(
                            first,
                            f"rank {rank} does not take part: it has {len(own)} such collectives of the group "
                            f"{_list(group)}, rank {most} has {len(members[most])}",
                        )
                    parts.append(own[index])
                    self._check_alike(parts[0], own[index])
                found.append(parts)
        return sorted(found)

    def _check_alike(self, one: int, other: int) -> None:
        first, second = self._operations[one], self._operations[other]
        for what in ("collective", "size_bytes", "peer"):
            if getattr(first, what) != getattr(second, what):
                named = {"size_bytes": "bytes", "peer": "root"}.get(what, what)
                raise self.error(
                    other,
                    f"its {named} is {getattr(second, what)}, but {getattr(first, what)} in the same collective of "
                    f"{self._name(one)} ({first.place})",
                )

    # Order ----------------------------------------------------------------------------------------------------------

    def _is_rendezvous(self, send: int) -> bool:
        return self._operations[send].size_bytes > self._workload.eager_bytes

    def _waits(self) -> list[list[int]]:
        """Return the predecessors of each event: event 2i is the beginning of operation i, 2i + 1 its end."""
        waits: list[list[int]] = []
        for number, operation in enumerate(self._operations):
            base = self._firsts[self._ranks[number]]
            for positions in (operation.after, operation.after_begin):
                if positions and max(positions) >= len(self._workload.ranks[self._ranks[number]]):
                    raise self.error(number, f"it waits for operation {max(positions)}, which the rank does not have")
            begin = [2 * (base + each) + 1 for each in operation.after]
            begin += [2 * (base + each) for each in operation.after_begin]
            end = [2 * number]
            if operation.kind is OperationKind.RECEIVE:
                end.append(2 * self._send_of[number])
            elif operation.kind is OperationKind.SEND and self._is_rendezvous(number):
                end.append(2 * self._receive_of[number])
            waits += [begin, end]
        for parts in self._collectives:
            # The first rank's end stands for all of them; this keeps the number of edges linear.
            waits[2 * parts[0] + 1] += [2 * each for each in parts[1:]]
            for each in parts[1:]:
                waits[2 * each + 1].append(2 * parts[0] + 1)
        return waits

    def _order_computations(self) -> dict[int, int]:
        """Return, for computations, the one before on the same processor; raise an error if operations form a circle.

        This runs the job with messages that take no time.
        """
        waits = self._waits()
        missing = [len(each) for each in waits]
        followers: list[list[int]] = [[] for _ in waits]
        for event, each in enumerate(waits):
            for before in each:
                followers[before].append(event)
        times = [0] * len(waits)
        order = list(map(self._order_of, range(len(self._operations))))
        heap = [(0, order[event >> 1], event) for event, count in enumerate(missing) if not count]
        computing = [
            (self._ranks[number], operation.processor)
            for number, operation in enumerate(self._operations)
            if operation.duration_ps and operation.processor != NO_PROCESSOR
        ]
        # Without computations that wait for each other, the order does not matter, and a stack is faster.
        competing = len(set(computing)) < len(computing)
        push, pop = (heapq.heappush, heapq.heappop) if competing else (list.append, list.pop)
        heapq.heapify(heap)
        free: dict[tuple[int, int], tuple[int, int]] = {}
        before_on_processor: dict[int, int] = {}
        handled = 0
        while heap:
            now, _, event = pop(heap)
            number = event >> 1
            operation = self._operations[number]
            handled += 1
            if operation.duration_ps and not event & 1 and operation.processor != NO_PROCESSOR:
                key = self._ranks[number], operation.processor
                if key in free:
                    before_on_processor[number], until = free[key]
                    now = max(now, until)
                free[key] = number, now + operation.duration_ps
            for follower in followers[event]:
                took = operation.duration_ps if follower == event + 1 and not event & 1 else 0
                times[follower] = max(times[follower], now + took)
                missing[follower] -= 1
                if not missing[follower]:
                    push(heap, (times[follower], order[follower >> 1], follower))
        if handled < len(waits):
            raise self._circle(waits, missing)
        return before_on_processor

    def _order_of(self, number: int) -> tuple[int, int]:
        order = self._operations[number].order
        rank = self._ranks[number]
        return (order if order >= 0 else number - self._firsts[rank]), rank

    def _circle(self, waits: list[list[int]], missing: list[int]) -> TraceFormatError:
        """Return an error that names the operations of a cycle in order."""
        event = next(event for event, count in enumerate(missing) if count)
        way: dict[int, None] = {}
        while event not in way:
            way[event] = None
            event = next(before for before in waits[event] if missing[before])
        events = list(way)
        circle = list(dict.fromkeys(each >> 1 for each in events[events.index(event) :]))
        shown = [f"{self._name(number)} ({self._operations[number].place})" for number in circle[:_SHOWN]]
        more = f", and {len(circle) - _SHOWN} more" if len(circle) > _SHOWN else ""
        if len(circle) == 1:
            return self.error(circle[0], "it waits for itself")
        kinds = (
            self._operations[number].kind is OperationKind.SEND and self._is_rendezvous(number) for number in circle
        )
        hint = f"; a send of more than {self._workload.eager_bytes} bytes waits for its receive" if any(kinds) else ""
        return TraceFormatError(
            f"{self._workload.name}: these operations wait for each other, so the job cannot end: "
            f"{' waits for '.join(shown)}{more}{hint}"
        )

    # Nodes ----------------------------------------------------------------------------------------------------------

    def graph(self) -> TraceGraph:
        """Return the graph."""
        for number in sorted(range(len(self._operations)), key=self._order_of):
            self._add_rows(number)
        self._connect_messages()
        builder = self._built_rows()
        self._add_collectives(builder)
        for number, gate in self._gates.items():
            operation, base = self._operations[number], self._firsts[self._ranks[number]]
            self._edges += [(self._ends[base + each], gate) for each in operation.after]
            self._edges += [(self._begins[base + each], gate) for each in operation.after_begin]
            if number in self._before_on_processor:
                self._edges.append((self._ends[self._before_on_processor[number]], gate))
        if self._edges:
            before, after = np.array(sorted(self._edges, key=lambda edge: edge[1]), np.int64).T
            builder.follow(before, after)
        ends = [
            builder.barrier([self._ends[self._number(*each)] for each in step], watched=True)
            for step in self._workload.steps
        ]
        graph = builder.build()
        if self._settings.ranks_per_node > 1:
            self._keep_within_nodes(graph.nodes)
        return TraceGraph(graph, tuple(ends), max(1, self._serials))

    def _keep_within_nodes(self, nodes: NDArray[Any]) -> None:
        """Make delays of nothing out of messages between ranks of a node."""
        hosts = np.asarray(self._hosts)
        node_of = np.full(hosts.max() + 1, -1)
        node_of[hosts] = np.arange(len(hosts)) // self._settings.ranks_per_node
        within = (nodes["size_bytes"] > 0) & (node_of[nodes["source"]] == node_of[nodes["target"]])
        nodes["size_bytes"][within] = 0
        nodes["target"][within] = nodes["source"][within]

    def _followed(self) -> tuple[set[int], set[int]]:
        """Return the operations whose end, and those whose beginning, something waits for."""
        ends = {self._number(*each) for step in self._workload.steps for each in step}
        begins: set[int] = set()
        for number, operation in enumerate(self._operations):
            base = self._firsts[self._ranks[number]]
            ends.update(base + each for each in operation.after)
            begins.update(base + each for each in operation.after_begin)
        return ends, begins

    def _add_rows(self, number: int) -> None:
        """Add an operation's rows: the main one, after one for its beginning if something waits for that."""
        operation = self._operations[number]
        needs_begin = number in self._begin_followed
        main: int | None = None
        match operation.kind:
            case OperationKind.COMPUTE:
                begin = self._row(_Row()) if needs_begin else None
                took = round(operation.duration_ps * self._settings.compute_factor)
                host = self._hosts[self._ranks[number]]
                main = self._ends[number] = self._row(_Row(took, host, host))
            case OperationKind.SEND:
                begin = self._row(_Row()) if needs_begin or number in self._end_followed else None
                host, target = (self._hosts[rank] for rank in (self._ranks[number], operation.peer))
                row = _Row(0, host, target, max(1, operation.size_bytes), operation.columns)
                main = self._messages[number] = self._row(row)
                self._ends[number] = main if begin is None or self._is_rendezvous(number) else begin
            case OperationKind.RECEIVE:
                waits = bool(operation.after or operation.after_begin)
                large = self._is_rendezvous(self._send_of[number])
                begin = self._row(_Row()) if needs_begin or (large and waits) else None
                if waits and not large:
                    main = self._ends[number] = self._row(_Row())
            case OperationKind.COLLECTIVE:
                begin = self._row(_Row())
        if begin is not None:
            self._begins[number] = begin
            if main is not None:
                self._edges.append((begin, main))
        gate = main if begin is None else begin
        if gate is not None:
            self._gates[number] = gate

    def _connect_messages(self) -> None:
        """Make receives wait for their messages, and large messages for their receives."""
        for send, receive in self._receive_of.items():
            message = self._messages[send]
            if receive in self._ends:
                self._edges.append((message, self._ends[receive]))
                continue
            self._ends[receive] = message
            if receive in self._gates and self._is_rendezvous(send):
                self._edges.append((self._gates[receive], message))

    def _row(self, row: _Row) -> int:
        self._rows.append(row)
        return len(self._rows) - 1

    def _built_rows(self) -> GraphBuilder:
        """Return a graph of the rows. All are added at once, because that is faster; a row without bytes is a delay."""
        rows = self._rows
        sends = np.array([row.size_bytes > 0 for row in rows])
        sources = np.array([row.source for row in rows])
        columns: dict[str, Any] = {
            "queue": np.full(len(rows), self._settings.queue),
            "order": np.zeros(len(rows), np.int64),
            "lane": np.zeros(len(rows), np.int64),
            "loss_bound": np.zeros(len(rows)),
            "class_shares": np.full(len(rows), -1),
            "job": np.full(len(rows), self._job),
            # Together with the sender, this identifies a message to switches.
            "step": np.cumsum(sends) - 1,
            "message": np.zeros(len(rows), np.int64),
            "sender": sources.copy(),
        }
        for number, row in enumerate(rows):
            for name, value in (row.columns or {}).items():
                columns[name][number] = value
        builder = GraphBuilder()
        builder.messages(
            sources,
            np.array([row.target for row in rows]),
            np.array([row.size_bytes for row in rows], np.int64),
            transport=self._transport,
            delay_ps=np.array([row.delay_ps for row in rows], np.int64),
            **columns,
        )
        self._serials = int(sends.sum())
        return builder

    def _add_collectives(self, builder: GraphBuilder) -> None:
        for parts in self._collectives:
            after = np.array([self._begins[number] for number in parts], np.int64)
            ends = self._add_collective(builder, self._operations[parts[0]], after)
            self._ends.update(zip(parts, ends.tolist(), strict=True))
            self._serials += 1

    def _add_collective(self, builder: GraphBuilder, operation: RankOperation, after: Nodes) -> Nodes:
        """Add a collective; return each rank's last node."""
        settings, group = self._settings, operation.group
        count, kind = len(group), operation.collective
        if count == 1:
            return after
        size = 1 if kind == "barrier" else max(1, operation.size_bytes)
        spec = AllReduceSpec(
            [self._hosts[rank] for rank in group],
            size * count if kind == "all_gather" else size,
            self._transport,
            queue=settings.queue,
            loss_bound=settings.loss_bound if kind == "all_reduce" else 0.0,
            job=self._job,
            step=self._serials,
        )
        algorithm = settings.collective or self._workload.algorithm
        return add_traced(builder, kind, algorithm, spec, group.index(operation.peer) if kind in _ROOTED else 0, after)


def add_traced(
    builder: GraphBuilder,
    kind: TracedCollective,
    algorithm: TraceAlgorithm,
    spec: AllReduceSpec,
    root: int,
    after: Nodes,
) -> Nodes:
    """Add a traced collective, from the position of its root if it has one; return each rank's last node."""
    if kind in ("all_reduce", "barrier"):
        return collectives.all_reduce(builder, "tree" if kind == "barrier" else algorithm, spec, after)
    add = getattr(collectives, kind)
    return np.asarray(add(builder, spec, root, after) if kind in _ROOTED else add(builder, spec, after))


def _list(ranks: Sequence[int]) -> str:
    """Return ranks as text, shortened."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"{shown}, … {ranks[-1]}" if len(ranks) > _SHOWN else shown
