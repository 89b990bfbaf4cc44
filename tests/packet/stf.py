# SPDX-License-Identifier: Apache-2.0
"""Packet tests as text: entries, registers, input packets and expected output packets.

``python -m tests.packet.stf p4/stf/*.stf`` runs them on the built-in switch. In Python::

    from dlcp.switch import Program
    from tests.packet import stf

    outcome = stf.run(stf.read(path), stf.BuiltIn(Program.load("p4/build/dlcp.json")))
    assert outcome.passed, outcome.failures

Any other implementation of `StfTarget` can replace `BuiltIn`. The statements are those of p4c's STF, with a few
extensions; p4/stf/README.md describes them. An unknown statement is an error, never skipped.
"""

import argparse
import gzip
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from dlcp.inputs.error_text import nearest
from dlcp.switch.entry_files import Value, parse_entries, parse_match, parse_number
from dlcp.switch.event_counters import EgressEvent, IngressEvent, event_index
from dlcp.switch.executor.bmv2_json import PROGRAM_PATH
from dlcp.switch.executor.hashes import csum16, pack
from dlcp.switch.executor.model import COMPARISONS, Action, EntryError, MeterConfig, TableEntry
from dlcp.switch.executor.program import BACKENDS, Program
from dlcp.switch.executor.tables import Table
from dlcp.switch.queues import DEPTH_PACKETS, DROP_PORT
from dlcp.wire import FIELD_BITS, UDP_PORT_BASE, VERSION

# ------------------------------------------------------------------------------------------------------------ frames

_PART: Final = re.compile(r"\s*(?:(?P<layer>[a-z]\w*)\s*\((?P<fields>[^()]*)\)|(?P<digits>[0-9a-fA-F*]+))")
_LAYERS: Final[dict[str, dict[str, tuple[int, int | None]]]] = {
    "ethernet": {"dst": (48, 0x0200000000FF), "src": (48, 0x020000000001), "type": (16, None)},
    "vlan": {"pcp": (3, 0), "dei": (1, 0), "vid": (12, 1), "type": (16, None)},
    "ipv6": {
        "version": (4, 6),
        "dscp": (6, 0),
        "ecn": (2, 0),
        "flow": (20, 0),
        "length": (16, None),
        "protocol": (8, None),
        "ttl": (8, 64),
        "src": (128, None),
        "dst": (128, None),
    },
    "ipv4": {
        "version": (4, 4),
        "ihl": (4, 5),
        "dscp": (6, 0),
        "ecn": (2, 0),
        "length": (16, None),
        "id": (16, 0),
        "fragment": (16, 0),
        "ttl": (8, 64),
        "protocol": (8, None),
        "checksum": (16, None),
        "src": (32, None),
        "dst": (32, None),
    },
    "udp": {"src": (16, UDP_PORT_BASE), "dst": (16, UDP_PORT_BASE), "length": (16, None), "checksum": (16, None)},
    "tcp": {
        "src": (16, 40000),
        "dst": (16, 80),
        "sequence": (32, 0),
        "acknowledgement": (32, 0),
        "flags": (16, 5 << 12 | 0x10),
        "window": (16, 65535),
        "checksum": (16, 0),
        "urgent": (16, 0),
    },
    "dlcp": {name: (bits, {"version": VERSION, "type": 1}.get(name, 0)) for name, bits in FIELD_BITS.items()},
}
"""Fields of each layer in wire order: (bits, default); the default is None for a field that is computed or required."""
_ETHER_TYPES: Final = {"ipv4": 0x0800, "ipv6": 0x86DD, "vlan": 0x8100}
_OTHER_TYPE: Final = 0x88B5
"""Reserved for experiments (IEEE 802)."""
_PROTOCOLS: Final = {"udp": 17, "tcp": 6}
_OTHER_PROTOCOL: Final = 253
"""Reserved for experiments (RFC 3692)."""


class FrameError(ValueError):
    """A frame has a syntax error; the message says where."""


class Pattern(NamedTuple):
    """Bytes with a mask; a zero bit in the mask matches anything."""

    value: bytes
    mask: bytes

    def matches(self, data: bytes, *, longer: bool = False) -> bool:
        """Whether ``data`` matches; ``longer`` allows trailing bytes."""
        if len(data) < len(self.value) or (len(data) > len(self.value) and not longer):
            return False
        return all((left ^ right) & bits == 0 for left, right, bits in zip(data, self.value, self.mask, strict=False))


class _Layer(NamedTuple):
    name: str
    """Empty for raw bytes."""
    fields: dict[str, int | None]
    digits: str = ""


def frame(text: str) -> Pattern:
    """Parse a frame into its bytes and the mask of its ``*`` digits.

    Raises
    ------
    FrameError
        An unknown layer or field, a value that does not fit, or half a byte.
    """
    layers, cut = _layers(text)
    value, mask = b"", b""
    for index in range(len(layers) - 1, -1, -1):
        layer = layers[index]
        if layer.name:
            following = layers[index + 1].name if index + 1 < len(layers) else ""
            before = layers[index - 1] if index else None
            made = _header(layer, value, following, before)
            value, mask = made + value, b"\xff" * len(made) + mask
        else:
            digits = layer.digits
            value = bytes.fromhex(digits.replace("*", "0")) + value
            mask = bytes.fromhex(re.sub(r"[^*]", "f", digits).replace("*", "0")) + mask
    return Pattern(value[:cut], mask[:cut])


def _layers(text: str) -> tuple[list[_Layer], int | None]:
    layers: list[_Layer] = []
    position, cut = 0, None
    text = text.strip()
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or cut is not None:
            raise FrameError(
                f"cannot parse {text[position : position + 30]!r}; write LAYER(FIELD=VALUE, ...) or hexadecimal digits"
            )
        position = part.end()
        name, digits = part["layer"], part["digits"]
        if digits:
            if layers and not layers[-1].name:
                digits = layers.pop().digits + digits
            layers.append(_Layer("", {}, digits))
        elif name == "cut":
            cut = _number("cut", part["fields"].strip())
        else:
            layers.append(_Layer(name, _fields(name, part["fields"])))
    odd = [layer.digits for layer in layers if len(layer.digits) % 2]
    if odd:
        raise FrameError(f"{odd[0]!r} ends with half a byte")
    return layers, cut


def _fields(layer: str, text: str) -> dict[str, int | None]:
    if layer not in _LAYERS:
        raise FrameError(f"no layer {layer!r}; choose from {', '.join(_LAYERS)} and cut")
    known = _LAYERS[layer]
    fields = {name: default for name, (_, default) in known.items()}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, given = (side.strip() for side in item.partition("="))
        if name not in known:
            raise FrameError(f"{layer} has no field {name!r}; it has {', '.join(known)}")
        value, (bits, _) = _number(f"{layer}.{name}", given), known[name]
        if not 0 <= value < 1 << bits:
            raise FrameError(f"{layer}.{name} has {bits} bits; {given} does not fit")
        fields[name] = value
    return fields


def _number(what: str, text: str) -> int:
    try:
        return parse_number(text)
    except EntryError as error:
        raise FrameError(f"{what}: {error}") from None


def _header(layer: _Layer, payload: bytes, following: str, before: _Layer | None) -> bytes:
    """Return the bytes of a layer; fields not given are computed from its neighbours."""
    follows: dict[str, int] = {}
    if layer.name in ("ethernet", "vlan"):
        follows["type"] = _ETHER_TYPES.get(following, _OTHER_TYPE)
    elif layer.name in ("ipv4", "ipv6"):
        if layer.fields["src"] is None or layer.fields["dst"] is None:
            raise FrameError(f"{layer.name} needs src and dst")
        follows = {"length": len(payload), "protocol": _PROTOCOLS.get(following, _OTHER_PROTOCOL)}
        if layer.name == "ipv6":
            return _packed(layer, follows)
        follows["length"] += 20
        # Options, if any, are the following bytes; the checksum covers the whole header.
        options = payload[: max(0, 4 * (layer.fields["ihl"] or 0) - 20)]
        follows["checksum"] = csum16(_packed(layer, follows) + options)
    elif layer.name == "udp":
        size = 8 + len(payload)
        follows["length"] = size
        if layer.fields["checksum"] is None:
            if before is None or before.name not in ("ipv4", "ipv6"):
                raise FrameError("udp needs ipv4 or ipv6 before it, or a checksum")
            addresses = [before.fields["src"] or 0, before.fields["dst"] or 0]
            bits = 32 if before.name == "ipv4" else 128
            pseudo = pack([*addresses, _PROTOCOLS["udp"], size], [bits, bits, 16, 16])
            follows["checksum"] = csum16(pseudo + _packed(layer, follows) + payload) or 0xFFFF
    return _packed(layer, follows)


def _packed(layer: _Layer, follows: Mapping[str, int]) -> bytes:
    values = [follows.get(name, 0) if value is None else value for name, value in layer.fields.items()]
    return pack(values, [bits for bits, _ in _LAYERS[layer.name].values()])


# ------------------------------------------------------------------------------------------------------------ script


class StfError(ValueError):
    """A test cannot be run; the message has file, line and reason."""


class StfTarget(Protocol):
    """A switch under test. Entries are as in a file of entries; see `dlcp.switch.entry_files`."""

    def restart(self) -> None:
        """Remove all entries, and set registers and counters to zero."""

    def insert(self, entry: Mapping[str, Any]) -> None:
        """Add an entry."""

    def modify(self, entry: Mapping[str, Any]) -> None:
        """Change an entry's action, member or group."""

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        """Remove an entry."""

    def remove_all(self) -> None:
        """Remove all entries, members and groups."""

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        """Set a table's default action."""

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        """Add a member to an action profile."""

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        """Set a group's members; create the group if it does not exist."""

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterConfig) -> None:
        """Set the direct meter of an entry, and fill its buckets."""

    def write_register(self, name: str, index: int, value: int) -> None:
        """Write a cell."""

    def read_register(self, name: str, index: int) -> int:
        """Read a cell."""

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        """Return packets and bytes of a cell."""

    def now_us(self) -> int:
        """Return the clock of the packets' time stamps."""

    def wait(self, seconds: float) -> None:
        """Let time pass, for meters and other state that depends on it."""

    def slow(self, port: int, depth_packets: int) -> None:
        """Let each queue of a port send one packet, then hold up to ``depth_packets`` until :meth:`release`."""

    def release(self, port: int) -> None:
        """Release the packets in a port's queues, most urgent queue first."""

    def send(self, port: int, data: bytes) -> None:
        """Send a packet to the switch."""

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the packets received since the last call, once the switch has settled."""


@dataclass(frozen=True)
class Statement:
    """One statement of a test, with its line number."""

    line: int


@dataclass(frozen=True)
class Call(Statement):
    """Call a method of the target, such as ``insert``."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class WriteTimeAgo(Statement):
    """Write the time of ``ago_us`` microseconds ago to a cell of a register."""

    register: str
    index: int
    ago_us: int


@dataclass(frozen=True)
class CheckRegister(Statement):
    """Compare a cell of a register."""

    register: str
    index: int
    comparison: str
    value: int


@dataclass(frozen=True)
class CheckCounter(Statement):
    """Compare the ``packets`` or ``bytes`` of a cell of a counter."""

    counter: str
    index: int
    unit: str
    comparison: str
    value: int


@dataclass(frozen=True)
class SendPacket(Statement):
    """Send a packet."""

    port: int
    data: bytes


@dataclass(frozen=True)
class Expect(Statement):
    """Expect a packet; without ``pattern`` any packet."""

    port: int
    pattern: Pattern | None
    longer: bool = False


@dataclass(frozen=True)
class NoPacket(Statement):
    """Expect no packet, which is also the default."""


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
        except ValueError as error:
            raise StfError(f"{path}:{line}: {keyword}: {error}") from None
    script = Script(path, tuple(statements))
    if not script.packets():
        raise StfError(f"{path}: sends no packet, so it tests nothing")
    return script


def _lines(text: str, path: Path) -> Iterator[tuple[int, str, str]]:
    """Return line number, keyword and rest of each statement. A line that begins with a blank continues the last."""
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


def _write(method: str) -> Callable[[int, str], Statement]:
    def read_it(line: int, rest: str) -> Statement:
        call = _CALL.match(rest)
        if call is not None:
            table, match, priority = _matched(call["before"].split())
            does: dict[str, Any] = {"action": call["name"], "params": _params(call["arguments"])}
            return Call(line, method, ({"table": table, "match": match, "priority": priority, **does},))
        words = rest.split()
        if len(words) < 3 or words[-2] not in ("member", "group"):
            raise ValueError(f"ends with {words[-1:]}, expected ACTION(NAME:VALUE, ...), member ID or group ID")
        table, match, priority = _matched(words[:-2])
        entry = {"table": table, "match": match, "priority": priority, words[-2]: int(words[-1], 0)}
        return Call(line, method, (entry,))

    return read_it


def _matched(words: Sequence[str]) -> tuple[str, dict[str, Value], int]:
    """Parse the words before an action into table, match and priority."""
    if not words:
        raise ValueError("names no table")
    table, *fields = words
    priority = int(fields.pop(0)) if fields and fields[0].isdecimal() else 0
    match: dict[str, Value] = {}
    for word in fields:
        name, colon, value = word.partition(":")
        if not colon:
            raise ValueError(f"{word!r} is not FIELD:VALUE")
        match[name] = _wildcards(value)
    return table, match, priority


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
    return Call(line, "remove_all") if rest == "all" else Call(line, "remove", _matched(rest.split()))


def _set_default(line: int, rest: str) -> Statement:
    call = _CALL.match(rest)
    if call is None or len(call["before"].split()) != 1:
        raise ValueError("expected TABLE ACTION(NAME:VALUE, ...)")
    return Call(line, "set_default", (call["before"].strip(), call["name"], _params(call["arguments"])))


def _member(line: int, rest: str) -> Statement:
    call = _CALL.match(rest)
    if call is None:
        raise ValueError("expected PROFILE ID ACTION(NAME:VALUE, ...)")
    profile, number = call["before"].split()
    return Call(line, "add_member", (profile, int(number, 0), call["name"], _params(call["arguments"])))


def _group(line: int, rest: str) -> Statement:
    profile, number, *members = rest.split()
    return Call(line, "set_group", (profile, int(number, 0), tuple(int(member, 0) for member in members)))


def _meter(line: int, rest: str) -> Statement:
    *words, committed, peak = rest.split()
    (cir, cburst), (pir, pburst) = (map(int, pair.split(":")) for pair in (committed, peak))
    return Call(line, "set_meter", (*_matched(words), MeterConfig(cir, cburst, pir, pburst)))


def _register_write(line: int, rest: str) -> Statement:
    cell = _CELL.match(rest)
    name, index, value = (cell["name"], cell["index"], cell["rest"]) if cell is not None else rest.split()
    if value.startswith("now-"):
        return WriteTimeAgo(line, name, _index(index), int(value.removeprefix("now-"), 0))
    return Call(line, "write_register", (name, _index(index), int(value, 0)))


def _index(text: str) -> int:
    """Parse an index: a number, PORT,QUEUE of a depth, or PORT,QUEUE,CLASS,EVENT."""
    match [part.strip() for part in text.split(",")]:
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
    # As in p4c's STF, further bytes may follow unless the text ends with $; a frame of layers is complete.
    longer = not text.endswith("$") and "(" not in text
    return Expect(line, int(port, 0), frame(text.removesuffix("$")), longer)


def _no_packet(line: int, rest: str) -> Statement:
    if rest:
        raise ValueError(f"takes no arguments; remove {rest!r}")
    return NoPacket(line)


def _wait(line: int, rest: str) -> Statement:
    return Call(line, "wait", (float(rest) if rest else 0.1,))


def _slow(line: int, rest: str) -> Statement:
    port, depth = rest.split()
    return Call(line, "slow", (int(port, 0), int(depth, 0)))


def _release(line: int, rest: str) -> Statement:
    return Call(line, "release", (int(rest, 0),))


_READERS: Final[dict[str, Callable[[int, str], Statement]]] = {
    "add": _write("insert"),
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

# --------------------------------------------------------------------------------------------------------------- run


@dataclass
class StfOutcome:
    """The outcome of a test."""

    packets: int = 0
    """Packets sent."""
    expected: int = 0
    """Packets received as expected."""
    failures: list[str] = field(default_factory=list)
    """Failures, each with file and line; empty if the test passed."""

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return not self.failures


def run(script: Script, target: StfTarget) -> StfOutcome:
    """Restart the target and run a test.

    Raises
    ------
    EntryError
        An entry, name or index does not fit the program.
    """
    return _Run(script, target).outcome


class _Run:
    def __init__(self, script: Script, target: StfTarget) -> None:
        self._script, self._target = script, target
        self.outcome = StfOutcome()
        self._sent_line = 0
        """Line of the statement that made packets come out; 0 if none has since the last comparison."""
        self._awaited: list[Expect] = []
        target.restart()
        for statement in script.statements:
            if not isinstance(statement, Expect | NoPacket):
                self._settle()
            self._do(statement)
        self._settle()

    def _do(self, statement: Statement) -> None:
        target = self._target
        match statement:
            case SendPacket(line, port, data):
                self.outcome.packets += 1
                self._sent_line = line
                target.send(port, data)
            case Expect():
                self._awaited.append(statement)
            case NoPacket(line):
                if self._awaited:
                    self._fail(line, "no_packet, but a packet is expected as well")
            case CheckRegister(line, register, index, comparison, value):
                found = target.read_register(register, index)
                self._compare(line, f"register {register}({index})", found, comparison, value)
            case CheckCounter(line, counter, index, unit, comparison, value):
                found = target.read_counter(counter, index)[unit == "bytes"]
                self._compare(line, f"counter {counter}({index}) {unit}", found, comparison, value)
            case WriteTimeAgo(_, register, index, ago_us):
                target.write_register(register, index, (target.now_us() - ago_us) % (1 << 32))
            case Call(line, method, arguments):
                if method == "release":
                    self._sent_line = line
                getattr(target, method)(*arguments)

    def _settle(self) -> None:
        """Compare the packets received since the last one sent with those expected."""
        came = self._target.receive()
        for expect in self._awaited:
            found = next((one for one in came if _fits(expect, *one)), None)
            if found is None:
                self._missing(expect, came)
            else:
                came.remove(found)
                self.outcome.expected += 1
        for port, data in came:
            self._fail(self._sent_line, f"unexpected packet at port {port}: {data.hex()}")
        self._awaited, self._sent_line = [], 0

    def _missing(self, expect: Expect, came: list[tuple[int, bytes]]) -> None:
        pattern = expect.pattern
        what = "a packet" if pattern is None else pattern.value.hex()
        line = f"expected at port {expect.port}: {what}"
        near = [data for port, data in came if port == expect.port]
        if near and pattern is not None:
            places = [
                i for i, (a, b, m) in enumerate(zip(near[0], pattern.value, pattern.mask, strict=False)) if (a ^ b) & m
            ]
            at = f"bytes {', '.join(map(str, places[:8]))}" if places else "the length"
            line += f"; received {near[0].hex()}, which differs in {at}"
        self._fail(expect.line, line)

    def _compare(self, line: int, what: str, found: int, comparison: str, value: int) -> None:
        if not COMPARISONS[comparison](found, value):
            self._fail(line, f"{what} is {found}, expected {comparison} {value}")

    def _fail(self, line: int, message: str) -> None:
        self.outcome.failures.append(f"{self._script.path}:{line}: {message}")


def _fits(expect: Expect, port: int, data: bytes) -> bool:
    return port == expect.port and (expect.pattern is None or expect.pattern.matches(data, longer=expect.longer))


START_US: Final = 2_000_000
"""Initial clock: unused budget slots count as last used at 0, which must be long ago."""
PACKET_US: Final = 1_000
"""Clock advance per packet sent."""


class _Waiting(NamedTuple):
    """A packet in a slow queue: its state from ingress, when it was enqueued, and how many were before it."""

    packet: bytearray
    carry: Any
    enqueued_us: int
    depth: int


def _numbers(table: Table, match: Mapping[str, Value]) -> dict[str, int | tuple[int, int]]:
    keys = {key.name: key for key in table.definition.keys}
    return {name: parse_match(value, keys[name].match, keys[name].width) for name, value in match.items()}


def _action(name: str, params: Mapping[str, Value]) -> Action:
    return Action(name, {param: parse_number(value) for param, value in params.items()})


class BuiltIn:
    """A program on the built-in switch, with a clock that only the test advances.

    Each queue of a port has its own line, as in BMv2, so a slow queue does not block another.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._now_us = START_US
        self._slow: dict[int, tuple[int, dict[int, deque[_Waiting]]]] = {}
        """Depth and queues of each slow port; a queue exists once it has sent its first packet."""
        self._out: list[tuple[int, bytes]] = []

    def restart(self) -> None:
        """Remove all entries, and set registers and counters to zero."""
        self._program.clear_entries()
        self._program.reset_state()
        self._now_us = START_US
        self._slow.clear()
        self._out.clear()

    def insert(self, entry: Mapping[str, Any]) -> None:
        """Add an entry."""
        parsed = self._parsed(entry)
        self._program.tables[parsed.table].insert(parsed.match, parsed.target, parsed.priority, parsed.meter)

    def modify(self, entry: Mapping[str, Any]) -> None:
        """Change an entry's action, member or group."""
        parsed = self._parsed(entry)
        self._program.tables[parsed.table].modify(parsed.match, parsed.target, parsed.priority)

    def _parsed(self, entry: Mapping[str, Any]) -> TableEntry:
        return parse_entries({"entries": [entry]}, self._program.definition).entries[0]

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        """Remove an entry."""
        known = self._program.tables[table]
        known.delete(_numbers(known, match), priority)

    def remove_all(self) -> None:
        """Remove all entries, members and groups."""
        self._program.clear_entries()

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        """Set a default action."""
        self._program.tables[table].set_default(_action(action, params))

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        """Add a member to an action profile."""
        self._program.profiles[profile].add_member(number, _action(action, params))

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        """Create a group, or replace its members."""
        known = self._program.profiles[profile]
        (known.modify_group if number in known.groups() else known.add_group)(number, members)

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterConfig) -> None:
        """Set an entry's meter and fill its buckets."""
        known = self._program.tables[table]
        known.set_meter(_numbers(known, match), rates, priority)

    def write_register(self, name: str, index: int, value: int) -> None:
        """Write a cell."""
        self._program.registers[name][index] = value

    def read_register(self, name: str, index: int) -> int:
        """Read a cell."""
        return self._program.registers[name][index]

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        """Return packets and bytes of a cell."""
        return self._program.counters[name][index]

    def now_us(self) -> int:
        """Return the clock of the packets' time stamps."""
        return self._now_us

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self._now_us += round(seconds * 1e6)

    def slow(self, port: int, depth_packets: int) -> None:
        """Let each queue of a port send one packet, then hold up to ``depth_packets``."""
        self._slow[port] = depth_packets, {}

    def release(self, port: int) -> None:
        """Release the packets in a port's queues, most urgent queue first."""
        if port not in self._slow:
            raise EntryError(f"release: port {port} is not slow")
        _, queues = self._slow.pop(port)
        for _, waiting in sorted(queues.items(), reverse=True):
            while waiting:
                self._leave(port, waiting.popleft(), len(waiting))

    def send(self, port: int, data: bytes) -> None:
        """Run a packet through ingress, its queue and, unless the queue holds it, egress."""
        self._now_us += PACKET_US
        packet = bytearray(data)
        out_port, queue, carry = self._program.ingress(packet, port, self._now_us)
        if out_port == DROP_PORT:
            return
        depth, queues = self._slow.get(out_port, (DEPTH_PACKETS, {}))
        waiting = queues.get(queue)
        if waiting is None:
            queues[queue] = deque()
            if depth:
                self._leave(out_port, _Waiting(packet, carry, self._now_us, 0), 0)
        elif len(waiting) < depth:
            waiting.append(_Waiting(packet, carry, self._now_us, len(waiting)))

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the packets received since the last call."""
        came, self._out = self._out, []
        return came

    def _leave(self, port: int, left: _Waiting, depth: int) -> None:
        """Run egress on a packet that has left its queue, in which ``depth`` packets remain."""
        times = left.enqueued_us, self._now_us - left.enqueued_us
        size = self._program.egress(left.packet, left.carry, port, *times, left.depth, depth, self._now_us)
        if size:
            self._out.append((port, bytes(left.packet[:size])))


# ----------------------------------------------------------------------------------------------------------- command


def main(words: Sequence[str] | None = None) -> int:
    """Run tests on the built-in switch; return 1 if a test failed, 2 if one could not be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.packet.stf", description="Run packet tests (STF).")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="tests; see p4/stf/README.md")
    parser.add_argument(
        "--program", type=Path, default=PROGRAM_PATH, metavar="FILE", help="compiled program (BMv2 JSON)"
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, default="python", help="back end of the built-in switch (python)"
    )
    options = parser.parse_args(words)
    failed = False
    try:
        target = BuiltIn(Program.load(options.program, backend=options.backend))
        for path in options.files:
            outcome = run(read(path), target)
            failed |= not outcome.passed
            came = f"{outcome.packets} packets, {outcome.expected} received as expected"
            print(f"{'ok    ' if outcome.passed else 'FAILED'} {path}: {came}")
            for line in outcome.failures:
                print(f"  {line}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
