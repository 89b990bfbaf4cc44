# SPDX-License-Identifier: Apache-2.0
"""Parses packet tests: the statements of p4c's STF, and a few extensions. p4/stf/README.md describes them.

A line that begins with a blank continues the previous statement. ``#`` begins a comment. An unknown statement is an
error, never skipped.
"""

import gzip
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dlcp.error_text import nearest
from dlcp.switch.entries import TableEntry, Value
from dlcp.switch.events import EgressEvent, IngressEvent, event_index
from dlcp.switch.executor.cells import MeterConfig
from dlcp.switch.stf.frames import FrameError, Pattern, frame


class StfError(ValueError):
    """A test cannot be run; the message has file, line and reason."""


class StfTarget(Protocol):
    """A switch under test."""

    def restart(self) -> None:
        """Remove all entries, and set registers and counters to zero."""

    def insert(self, entry: TableEntry) -> None:
        """Add an entry."""

    def modify(self, entry: TableEntry) -> None:
        """Change an entry's action, member or group."""

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        """Remove an entry."""

    def remove_all(self) -> None:
        """Remove all entries, members and groups."""

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        """Set a default action."""

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        """Add a member to an action profile."""

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        """Create a group, or replace its members."""

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterConfig) -> None:
        """Set an entry's meter and fill its buckets."""

    def write_register(self, name: str, index: int, value: int) -> None:
        """Write a cell."""

    def read_register(self, name: str, index: int) -> int:
        """Read a cell."""

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        """Return packets and bytes of a cell."""

    def now_us(self) -> int:
        """Return the clock of the packets' time stamps."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""

    def slow(self, port: int, depth_packets: int) -> None:
        """Let each queue of a port send one packet, then hold up to ``depth_packets``."""

    def release(self, port: int) -> None:
        """Release the packets in a port's queues."""

    def send(self, port: int, data: bytes) -> None:
        """Send a packet to the switch."""

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the packets received since the last call, once the switch has settled."""


@dataclass(frozen=True)
class Statement:
    """One statement of a test, with its line number."""

    line: int


class Preparation(Statement):
    """A statement that neither compares nor sends anything."""

    @abstractmethod
    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""


@dataclass(frozen=True)
class Write(Preparation):
    """Add or modify a table entry."""

    operation: str
    """``add`` or ``modify``."""
    entry: TableEntry

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        (target.insert if self.operation == "add" else target.modify)(self.entry)


@dataclass(frozen=True)
class Remove(Preparation):
    """Remove an entry."""

    table: str
    match: Mapping[str, Value]
    priority: int

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.remove(self.table, self.match, self.priority)


@dataclass(frozen=True)
class RemoveAll(Preparation):
    """Remove all entries, members and groups."""

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.remove_all()


@dataclass(frozen=True)
class SetDefault(Preparation):
    """Set a table's default action."""

    table: str
    action: str
    params: Mapping[str, Value]

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.set_default(self.table, self.action, self.params)


@dataclass(frozen=True)
class AddMember(Preparation):
    """Add a member to an action profile."""

    profile: str
    id: int
    action: str
    params: Mapping[str, Value]

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.add_member(self.profile, self.id, self.action, self.params)


@dataclass(frozen=True)
class SetGroup(Preparation):
    """Set a group's members; create the group if it does not exist."""

    profile: str
    id: int
    members: tuple[int, ...]

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.set_group(self.profile, self.id, self.members)


@dataclass(frozen=True)
class SetMeter(Preparation):
    """Set the direct meter of an entry."""

    table: str
    match: Mapping[str, Value]
    priority: int
    rates: MeterConfig

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.set_meter(self.table, self.match, self.priority, self.rates)


@dataclass(frozen=True)
class WriteRegister(Preparation):
    """Write a cell of a register."""

    register: str
    index: int
    value: int
    ago: bool = False
    """Write the time ``value`` microseconds ago instead."""

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        value = (target.now_us() - self.value) % (1 << 32) if self.ago else self.value
        target.write_register(self.register, self.index, value)


@dataclass(frozen=True)
class CheckRegister(Statement):
    """Compare a cell of a register."""

    register: str
    index: int
    comparison: str
    value: int


@dataclass(frozen=True)
class CheckCounter(Statement):
    """Compare a cell of a counter."""

    counter: str
    index: int
    unit: str
    """``packets`` or ``bytes``."""
    comparison: str
    value: int


@dataclass(frozen=True)
class SendPacket(Statement):
    """Send a packet."""

    port: int
    data: bytes


@dataclass(frozen=True)
class Expect(Statement):
    """Expect a packet."""

    port: int
    pattern: Pattern | None
    """None: any packet."""
    longer: bool = False


@dataclass(frozen=True)
class NoPacket(Statement):
    """Expect no packet, which is also the default."""


@dataclass(frozen=True)
class Wait(Preparation):
    """Let time pass, for meters and other state that depends on it."""

    seconds: float

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.wait(self.seconds)


@dataclass(frozen=True)
class Slow(Preparation):
    """Make the queues of a port slow: each sends one packet and then none until ``release``."""

    port: int
    depth_packets: int

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.slow(self.port, self.depth_packets)


@dataclass(frozen=True)
class Release(Preparation):
    """Release the packets in a port's queues."""

    port: int

    def carry_out(self, target: StfTarget) -> None:
        """Carry out the statement on a target."""
        target.release(self.port)


@dataclass(frozen=True)
class Script:
    """A file of statements."""

    path: Path
    statements: tuple[Statement, ...] = field(default=())

    def packets(self) -> int:
        """Return the number of packets sent."""
        return sum(isinstance(statement, SendPacket) for statement in self.statements)


_COMMENT: Final = re.compile(r'#.*|"')
_CALL: Final = re.compile(r"^(?P<before>.*?)(?P<name>[A-Za-z_$][\w.$]*)\s*\((?P<arguments>[^()]*)\)\s*$", re.DOTALL)
_CELL: Final = re.compile(r"^(?P<name>[\w.]+)\s*\((?P<index>[^()]*)\)\s*(?P<rest>.*)$", re.DOTALL)
_COMPARISON: Final = re.compile(r"^(?:(?P<unit>packets|bytes)\s*)?(?P<comparison>==|!=|<=|>=|<|>)\s*(?P<value>\w+)$")
_EVENTS: Final[dict[str, int]] = {event.name: int(event) for event in (*IngressEvent, *EgressEvent)}


def read(path: Path) -> Script:
    """Read a file, which may be gzipped (``.gz``).

    Raises
    ------
    StfError
        An unknown or invalid statement, or a file that sends no packet; with file and line.
    """
    packed = path.suffix == ".gz"
    text = gzip.decompress(path.read_bytes()).decode() if packed else path.read_text(encoding="utf-8")
    return parse(text, path)


def parse(text: str, path: Path = Path("test")) -> Script:
    """Read a text; errors as `read`."""
    statements = []
    for line, keyword, rest in _lines(text, path):
        if keyword not in _READERS:
            raise StfError(f"{path}:{line}: no statement {keyword!r}{nearest(keyword, _READERS)}")
        try:
            statements.append(_READERS[keyword](line, rest))
        except (FrameError, ValueError) as error:
            raise StfError(f"{path}:{line}: {keyword}: {error}") from None
    script = Script(path, tuple(statements))
    if not script.packets():
        raise StfError(f"{path}: sends no packet, so it tests nothing")
    return script


def _lines(text: str, path: Path) -> Iterator[tuple[int, str, str]]:
    """Return line number, keyword and rest of each statement."""
    start, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), "end"], 1):
        bare = _COMMENT.sub("", line).rstrip()
        if not bare:
            continue
        if bare[0].isspace():
            if not parts:
                raise StfError(
                    f"{path}:{number}: a line that begins with a blank continues a statement, but none began"
                )
            parts.append(bare)
            continue
        if parts:
            keyword, _, rest = " ".join(parts).partition(" ")
            yield start, keyword.lower(), rest.strip()
        start, parts = number, [bare]


# ------------------------------------------------------------------------------------------------------------ entries


def _write(operation: str) -> Callable[[int, str], Statement]:
    def read_it(line: int, rest: str) -> Statement:
        call = _CALL.match(rest)
        if call is not None:
            table, priority, match = _matched(call["before"].split())
            params = _params(call["arguments"])
            return Write(line, operation, TableEntry(table, match, call["name"], params, priority=priority))
        words = rest.split()
        if len(words) < 3 or words[-2] not in ("member", "group"):
            raise ValueError(f"ends with {words[-1:]}, expected ACTION(NAME:VALUE, ...), member ID or group ID")
        table, priority, match = _matched(words[:-2])
        number = int(words[-1], 0)
        member, group = (number, None) if words[-2] == "member" else (None, number)
        return Write(line, operation, TableEntry(table, match, member=member, group=group, priority=priority))

    return read_it


def _matched(words: Sequence[str]) -> tuple[str, int, dict[str, Value]]:
    """Parse the words before an action into table, priority and match."""
    if not words:
        raise ValueError("names no table")
    table, *fields = words
    priority = 0
    if fields and fields[0].isdecimal():
        priority = int(fields.pop(0))
    match: dict[str, Value] = {}
    for word in fields:
        name, colon, value = word.partition(":")
        if not colon:
            raise ValueError(f"{word!r} is not FIELD:VALUE")
        match[name] = _wildcards(value)
    return table, priority, match


def _wildcards(text: str) -> str:
    """Convert a match with p4c's ``*`` digits to value and mask; return others unchanged."""
    prefix, digits = text[:2].lower(), text[2:]
    if prefix not in ("0x", "0b") or "*" not in digits:
        return text
    ones = "f" if prefix == "0x" else "1"
    return f"{prefix}{digits.replace('*', '0')}&&&{prefix}{re.sub('[^*]', ones, digits).replace('*', '0')}"


def _params(text: str) -> dict[str, Value]:
    params: dict[str, Value] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, colon, value = item.partition(":")
        if not colon:
            raise ValueError(f"{item!r} is not PARAMETER:VALUE")
        params[name.strip()] = value.strip()
    return params


def _remove(line: int, rest: str) -> Statement:
    if rest == "all":
        return RemoveAll(line)
    table, priority, match = _matched(rest.split())
    return Remove(line, table, match, priority)


def _set_default(line: int, rest: str) -> Statement:
    call = _CALL.match(rest)
    if call is None or len(call["before"].split()) != 1:
        raise ValueError("expected TABLE ACTION(NAME:VALUE, ...)")
    return SetDefault(line, call["before"].strip(), call["name"], _params(call["arguments"]))


def _member(line: int, rest: str) -> Statement:
    call = _CALL.match(rest)
    if call is None:
        raise ValueError("expected PROFILE ID ACTION(NAME:VALUE, ...)")
    profile, number = call["before"].split()
    return AddMember(line, profile, int(number, 0), call["name"], _params(call["arguments"]))


def _group(line: int, rest: str) -> Statement:
    profile, number, *members = rest.split()
    return SetGroup(line, profile, int(number, 0), tuple(int(member, 0) for member in members))


def _meter(line: int, rest: str) -> Statement:
    *words, committed, peak = rest.split()
    table, priority, match = _matched(words)
    (cir, cburst), (pir, pburst) = (map(int, pair.split(":")) for pair in (committed, peak))
    return SetMeter(line, table, match, priority, MeterConfig(cir, cburst, pir, pburst))


# -------------------------------------------------------------------------------------------------------------- state


def _register_write(line: int, rest: str) -> Statement:
    name, index, value = _cell_words(rest)
    ago = value.startswith("now-")
    return WriteRegister(line, name, _index(index), int(value.removeprefix("now-"), 0), ago)


def _cell_words(rest: str) -> tuple[str, str, str]:
    cell = _CELL.match(rest)
    if cell is not None:
        return cell["name"], cell["index"], cell["rest"]
    name, index, value = rest.split()
    return name, index, value


def _index(text: str) -> int:
    """Parse an index: a number, PORT,QUEUE of a depth, or PORT,QUEUE,CLASS,EVENT."""
    parts = [part.strip() for part in text.split(",")]
    match parts:
        case [index]:
            return int(index, 0)
        case [port, queue]:
            return int(port, 0) << 3 | int(queue, 0)
        case [port, queue, drop_class, event]:
            if event not in _EVENTS:
                raise ValueError(f"no event {event!r}{nearest(event, _EVENTS)}")
            return event_index(int(port, 0), int(queue, 0), int(drop_class, 0), _EVENTS[event])
    raise ValueError(f"{text!r} is not an index; give a number, PORT,QUEUE or PORT,QUEUE,CLASS,EVENT")


def _check(line: int, rest: str) -> tuple[str, int, "re.Match[str]"]:
    cell = _CELL.match(rest)
    said = cell and _COMPARISON.match(cell["rest"].strip())
    if cell is None or said is None:
        raise ValueError("expected NAME(INDEX) == VALUE, for a counter NAME(INDEX) packets == VALUE or bytes == VALUE")
    return cell["name"], _index(cell["index"]), said


def _check_counter(line: int, rest: str) -> Statement:
    name, index, said = _check(line, rest)
    if said["unit"] is None:
        raise ValueError("the unit is missing; give packets or bytes")
    return CheckCounter(line, name, index, said["unit"], said["comparison"], int(said["value"], 0))


def _check_register(line: int, rest: str) -> Statement:
    name, index, said = _check(line, rest)
    if said["unit"] is not None:
        raise ValueError("a register has no packets or bytes; omit the unit")
    return CheckRegister(line, name, index, said["comparison"], int(said["value"], 0))


# ------------------------------------------------------------------------------------------------------------ packets


def _packet(line: int, rest: str) -> Statement:
    port, _, text = rest.partition(" ")
    pattern = frame(text)
    if any(byte != 0xFF for byte in pattern.mask):
        raise ValueError("a packet to send cannot contain *; only expect can")
    return SendPacket(line, int(port, 0), pattern.value)


def _expect(line: int, rest: str) -> Statement:
    port, _, text = rest.partition(" ")
    text = text.strip()
    if not text:
        return Expect(line, int(port, 0), None)
    pattern: Pattern = frame(text.removesuffix("$"))
    # As in p4c's STF, further bytes may follow unless the text ends with $; a frame of layers is complete.
    longer = not text.endswith("$") and "(" not in text
    return Expect(line, int(port, 0), pattern, longer)


def _no_packet(line: int, rest: str) -> Statement:
    if rest:
        raise ValueError(f"takes no arguments; remove {rest!r}")
    return NoPacket(line)


def _wait(line: int, rest: str) -> Statement:
    return Wait(line, float(rest) if rest else 0.1)


def _slow(line: int, rest: str) -> Statement:
    port, depth = rest.split()
    return Slow(line, int(port, 0), int(depth, 0))


def _release(line: int, rest: str) -> Statement:
    return Release(line, int(rest, 0))


_READERS: Final[dict[str, Callable[[int, str], Statement]]] = {
    "add": _write("add"),
    "modify": _write("modify"),
    "remove": _remove,
    "setdefault": _set_default,
    "member": _member,
    "group": _group,
    "meter_set_rates": _meter,
    "register_write": _register_write,
    "check_register": _check_register,
    "check_counter": _check_counter,
    "packet": _packet,
    "expect": _expect,
    "no_packet": _no_packet,
    "wait": _wait,
    "slow": _slow,
    "release": _release,
}
