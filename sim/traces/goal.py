# SPDX-License-Identifier: Apache-2.0
"""Read and write GOAL, the traces of LogGOPSim and ATLAHS: text, and LogGOPSim's binary form of it.

The text has a block per rank; calculations last nanoseconds, and ``requires`` waits for an operation to end,
``irequires`` for it to begin::

    num_ranks 2
    rank 0 {
      l1: calc 1500 cpu 0
      l2: send 4096b to 1 tag 7
      l2 requires l1
    }
    rank 1 {
      l1: recv 4096b from 0 tag 7
    }

The grammar is that of LogGOPSim's ``txt2bin.re``, the binary form that of its ``Parser.hpp``, or of LogGOPSim2's, which
has more fields. A rank has one network interface here: operations with different ``nic`` share it, and the job's note
says so. A message without bytes is one of a byte. Receives from any rank or with any tag (-1) are not supported: which
message they take depends on the network.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.inputs.error_text import closest
from dlcp.sim.graphs.graph import Graph
from dlcp.sim.traces.graph_operations import operations_of
from dlcp.sim.traces.operations import OperationKind, RankOperation, TraceFormatError, Workload

PS_PER_NS: Final = 1000
MAGIC: Final = 4223
"""First eight bytes of a binary schedule."""
_ANY: Final = (-1, 0xFFFFFFFF)
_DIGITS_MAX: Final = 18
"""Most digits of a number: they fit in 64 bits."""
_NUMBERS: Final = ("size", "peer", "tag", "cpu", "nic")
"""The contents of the groups in a statement's pattern."""
_LABEL: Final = r"[A-Za-z]\w*"
_PATTERNS: Final = {
    "calc": (re.compile(r"calc\s+(\d+)()()(?:\s+cpu\s+(\d+))?()$"), "calc NANOSECONDS [cpu N]"),
    "send": (
        re.compile(r"send\s+(\d+)\s*b\s+to\s+(\d+)(?:\s+tag\s+(-1|\d+))?(?:\s+cpu\s+(\d+))?(?:\s+nic\s+(\d+))?$"),
        "send BYTESb to RANK [tag N] [cpu N] [nic N]",
    ),
    "recv": (
        re.compile(r"recv\s+(\d+)\s*b\s+from\s+(-1|\d+)(?:\s+tag\s+(-1|\d+))?(?:\s+cpu\s+(\d+))?(?:\s+nic\s+(\d+))?$"),
        "recv BYTESb from RANK [tag N] [cpu N] [nic N]",
    ),
}
"""Each operation's pattern (size, peer, tag, processor), and its syntax, for errors."""
_LABELLED: Final = re.compile(rf"({_LABEL})\s*:\s*(.*)$")
_REQUIRES: Final = re.compile(rf"({_LABEL})\s+(i?requires)\s+({_LABEL})$")
_RANK: Final = re.compile(r"rank\s+(\d+)\s*\{$")
_NUM_RANKS: Final = re.compile(r"num_ranks\s+(\d+)$")
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?(?:(\*/)|\Z)", re.DOTALL)
_RANKS_MAX: Final = 1 << 16
_KINDS: Final = {"calc": OperationKind.COMPUTE, "send": OperationKind.SEND, "recv": OperationKind.RECEIVE}
_NODE: Final = np.dtype(
    [
        ("waits", "<u4"),
        ("kind", "u1"),
        ("peer", "<u4"),
        ("size", "<u8"),
        ("tag", "<u4"),
        ("cpu", "u1"),
        ("nic", "u1"),
        ("followers", "<u4"),
        ("first_follower", "<u4"),
        ("begun_followers", "<u4"),
        ("first_begun_follower", "<u4"),
    ]
)
"""An operation in a binary schedule, without padding; the followers are in a table behind all operations."""
_LONG_NODE: Final = np.dtype([*_NODE.descr, ("portals", "V65")])
"""The same in LogGOPSim2, where a counter, handlers and their arguments follow."""
_BINARY_KINDS: Final = {1: OperationKind.SEND, 2: OperationKind.RECEIVE, 3: OperationKind.COMPUTE}


def read_goal(path: Path, content: bytes) -> Workload:
    """Return the job in a GOAL file, text or binary.

    Raises
    ------
    TraceFormatError
        The file is wrong; the message names the line, or the rank and the operation.
    """
    if is_binary_goal(content):
        return _Binary(path, content).workload()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise TraceFormatError(f"{path}: byte {error.start} is not text; this is not a GOAL file") from None
    return _Text(path).workload(text)


def is_binary_goal(content: bytes) -> bool:
    """Return whether a file is a binary schedule."""
    return content[:8] == MAGIC.to_bytes(8, "little")


def _operation(kind: OperationKind, name: str, place: str, size: int, cpu: int, peer: int, tag: int) -> RankOperation:
    if kind is OperationKind.COMPUTE:
        return RankOperation(kind, name, place, duration_ps=size * PS_PER_NS, processor=cpu)
    if peer in _ANY or tag in _ANY:
        what = "rank" if peer in _ANY else "tag"
        raise TraceFormatError(
            f"{place}: {kind.name.lower()} {name} takes any {what} (-1), which depends on the network; name the {what}"
        )
    return RankOperation(kind, name, place, size_bytes=size, peer=peer, tag=tag)


class _Text:
    """Reads the text form."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0
        self._ranks: dict[int, list[RankOperation]] = {}
        self._rank = -1
        self._labels: dict[str, int] = {}
        self._requirements: list[tuple[int, str, str, str]] = []
        """Line, the label that waits, the word, the label that it waits for."""
        self._interfaces: dict[int, set[int]] = defaultdict(set)

    def error(self, reason: str, line: int = 0) -> TraceFormatError:
        return TraceFormatError(f"{self._path}:{line or self._line}: {reason}")

    def workload(self, text: str) -> Workload:
        count = 0
        for statement in self._statements(text):
            if self._rank >= 0 and statement != "}" and not statement.startswith(("num_ranks", "rank")):
                self._add(statement)
            elif found := _NUM_RANKS.match(statement):
                if count:
                    raise self.error("num_ranks is given twice")
                count = self._number("num_ranks", found[1])
                if not 0 < count <= _RANKS_MAX:
                    raise self.error(f"num_ranks is {count}; it must be from 1 to {_RANKS_MAX}")
            elif found := _RANK.match(statement):
                if not count:
                    raise self.error("num_ranks has to come before the first rank")
                self._begin(self._number("the rank", found[1]), count)
            elif statement == "}":
                self._end()
            else:
                self._add(statement)
        if self._rank >= 0:
            raise self.error(f"the file ends within rank {self._rank}: its block has no closing bracket")
        missing = [rank for rank in range(count) if rank not in self._ranks]
        if missing or not count:
            known = f"rank {missing[0]} of {count} has no block" if count else "there is no num_ranks"
            raise self.error(f"{known}; the file is incomplete or not GOAL")
        ranks = [self._ranks[rank] for rank in range(count)]
        return Workload(str(self._path), ranks, note=_interfaces_note(self._interfaces))

    def _number(self, name: str, text: str) -> int:
        """Return a whole number; raise TraceFormatError if it has too many digits."""
        if len(text) > _DIGITS_MAX:
            raise self.error(f"{name} has {len(text)} digits; at most {_DIGITS_MAX} are possible")
        return int(text)

    def _statements(self, text: str) -> Iterator[str]:
        """Yield the lines without comments and empty lines."""
        for number, line in enumerate(_COMMENT.sub(self._newlines, text).split("\n"), 1):
            self._line = number
            # `rank 0 { ... }` may stand on one line, as far as its statements end there.
            for part in line.replace("{", "{\n").replace("}", "\n}").split("\n"):
                if statement := part.strip():
                    yield statement

    def _newlines(self, comment: re.Match[str]) -> str:
        """Return what replaces a comment, so that lines keep their numbers."""
        if comment[1] is None and comment[0].startswith("/*"):
            raise self.error("the file ends within a comment", comment.string.count("\n") + 1)
        return "\n" * comment[0].count("\n")

    def _begin(self, rank: int, count: int) -> None:
        if self._rank >= 0:
            raise self.error(f"rank {rank} begins within rank {self._rank}, whose block has no closing bracket")
        if rank >= count:
            raise self.error(f"there is no rank {rank}; num_ranks is {count}")
        if rank in self._ranks:
            raise self.error(f"rank {rank} has two blocks")
        self._rank, self._ranks[rank] = rank, []

    def _end(self) -> None:
        if self._rank < 0:
            raise self.error("a closing bracket without an opening one")
        operations = self._ranks[self._rank]
        for line, after, word, before in self._requirements:
            for label in (after, before):
                if label not in self._labels:
                    like = closest(label, self._labels)
                    raise self.error(f"rank {self._rank} has no operation with the label {label!r}{like}", line)
            operation = operations[self._labels[after]]
            (operation.after if word == "requires" else operation.after_begin).append(self._labels[before])
        self._rank = -1
        self._labels.clear()
        self._requirements.clear()

    def _add(self, statement: str) -> None:
        if self._rank < 0:
            raise self.error(f"expected num_ranks or a rank, got {statement[:40]!r}")
        label, body = "", statement
        if found := _LABELLED.match(statement):
            label, body = found[1], found[2]
        kind = body[:4]
        if kind not in _PATTERNS:
            if found := _REQUIRES.match(statement):
                self._requirements.append((self._line, found[1], found[2], found[3]))
                return
            raise self.error(f"rank {self._rank}: expected calc, send, recv, requires or irequires, got {body[:40]!r}")
        pattern, form = _PATTERNS[kind]
        found = pattern.match(body)
        if not found:
            raise self.error(f"rank {self._rank}: expected `{form}`, got {body[:60]!r}")
        operations = self._ranks[self._rank]
        if label:
            if label in self._labels:
                first = operations[self._labels[label]].place.rpartition(":")[2]
                raise self.error(f"rank {self._rank}: the label {label!r} is given twice, here and on line {first}")
            self._labels[label] = len(operations)
        size, peer, tag, cpu, nic = (
            self._number(name, part) if part else 0 for name, part in zip(_NUMBERS, found.groups(), strict=True)
        )
        if kind != "calc":
            self._interfaces[self._rank].add(nic)
        place = f"{self._path}:{self._line}"
        operations.append(_operation(_KINDS[kind], label or "without a label", place, size, cpu, peer, tag))


class _Binary:
    """Reads the binary form: a table of ranks, then for each rank its operations and their followers."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, memoryview(content)[8:]

    def workload(self) -> Workload:
        (count,) = self._array("<u4", 0, 1, "the header")
        if not 0 < count <= _RANKS_MAX:
            raise TraceFormatError(f"{self._path}: it has {count} ranks; 1 to {_RANKS_MAX} are possible")
        # The numbers of processors and of network interfaces, a byte each, follow the number of ranks.
        table = self._array("<u8", 6, 2 * int(count), "the table of ranks").reshape(-1, 2)
        interfaces: dict[int, set[int]] = defaultdict(set)
        ranks = [self._rank(rank, first, end, interfaces) for rank, (first, end) in enumerate(table.tolist())]
        return Workload(str(self._path), ranks, note=_interfaces_note(interfaces))

    def _array(self, kind: Any, offset: int, count: int, what: str) -> NDArray[Any]:
        size = np.dtype(kind).itemsize * count
        if offset + size > len(self._content):
            raise TraceFormatError(
                f"{self._path}: the file ends after {len(self._content) + 8} bytes, within {what}; it is incomplete"
            )
        return np.frombuffer(self._content, kind, count, offset)

    def _rank(self, rank: int, first: int, end: int, interfaces: dict[int, set[int]]) -> list[RankOperation]:
        """Return the operations between two bytes, ``first`` and ``end``."""
        what = f"rank {rank}"
        count, roots = map(int, self._array("<u4", first, 2, what))
        offset = first + 8 + 4 * roots
        fits_long = offset + _LONG_NODE.itemsize * count <= len(self._content)
        for form in (_NODE, _LONG_NODE) if fits_long else (_NODE,):
            nodes = self._array(form, offset, count, what)
            followers = int(nodes["followers"].sum(dtype=np.int64) + nodes["begun_followers"].sum(dtype=np.int64))
            if offset + nodes.nbytes + 4 * followers == end:
                break
        else:
            raise TraceFormatError(
                f"{self._path}: {what} ends at byte {end + 8}, but its operations do not end there; the file is damaged"
            )
        table = self._array("<u4", offset + nodes.nbytes, followers, f"the dependencies of {what}")
        operations = []
        for position, node in enumerate(nodes.tolist()):
            _, kind, peer, size, tag, cpu, nic, *_ = node
            if kind in (1, 2):
                interfaces[rank].add(nic)
            place = f"{self._path}: rank {rank}"
            if kind not in _BINARY_KINDS:
                raise TraceFormatError(f"{place}: operation {position} has the kind {kind}; 1, 2 and 3 are possible")
            operations.append(_operation(_BINARY_KINDS[kind], str(position), place, size, cpu, peer, tag))
        for position, node in enumerate(nodes.tolist()):
            ends, first_end, begins, first_begin = node[7:11]
            if max(first_end + ends if ends else 0, first_begin + begins if begins else 0) > followers:
                raise TraceFormatError(
                    f"{self._path}: {what}: operation {position} has dependencies beyond the {followers} in the file"
                )
            for follower in table[first_end : first_end + ends].tolist():
                self._follower(operations, rank, position, follower).after.append(position)
            for follower in table[first_begin : first_begin + begins].tolist():
                self._follower(operations, rank, position, follower).after_begin.append(position)
        return operations

    def _follower(self, operations: list[RankOperation], rank: int, position: int, follower: int) -> RankOperation:
        if follower >= len(operations):
            raise TraceFormatError(
                f"{self._path}: rank {rank}: operation {follower} waits for operation {position}, but the rank has "
                f"{len(operations)}"
            )
        return operations[follower]


def _interfaces_note(interfaces: Mapping[int, Collection[int]]) -> str:
    """Return a note on the ranks with several network interfaces."""
    several = [rank for rank, used in interfaces.items() if len(used) > 1]
    if not several:
        return ""
    most = max(len(interfaces[rank]) for rank in several)
    return (
        f"{len(several)} ranks use up to {most} network interfaces (nic), which are simulated as one: give hosts links "
        "with the rate of all together"
    )


def write_goal(graph: Graph, path: Path) -> None:
    """Write a graph as GOAL text. Rank r is host r; delays are rounded to nanoseconds.

    GOAL has no queues, orders, loss bounds or drop classes: messages lose theirs.

    Raises
    ------
    ValueError
        A node waits for something on another host without a message.
    OSError
        The file cannot be written.
    """
    ranks = operations_of(graph)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"num_ranks {len(ranks)}\n")
        for rank, operations in enumerate(ranks):
            file.write(f"\nrank {rank} {{\n")
            for operation in operations:
                file.write(f"{operation.name}: {_words(operation)}\n")
                file.writelines(f"{operation.name} requires {operations[before].name}\n" for before in operation.after)
            file.write("}\n")


def _words(operation: RankOperation) -> str:
    if operation.kind is OperationKind.COMPUTE:
        took = round(operation.duration_ps / PS_PER_NS)
        return f"calc {took}" + (f" cpu {operation.processor}" if operation.processor > 0 else "")
    word, toward = ("send", "to") if operation.kind is OperationKind.SEND else ("recv", "from")
    return f"{word} {operation.size_bytes}b {toward} {operation.peer} tag {operation.tag}"
