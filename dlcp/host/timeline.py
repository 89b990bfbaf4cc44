# SPDX-License-Identifier: Apache-2.0
"""Timelines: what each rank writes down while it trains, and the trace that all of them make together.

A note takes one or two microseconds where the event happens; a thread writes notes a few times a second. The file of a
killed process therefore ends a moment before its death. The first line of a file describes the rank, as JSON. Every
other line is a note: nanoseconds, event, step, number, and the values listed for the event below. The last value may be
text with commas.

The trace has Chrome trace events, for Perfetto (https://ui.perfetto.dev). Each rank is a process. It has a thread for
each bucket of a step, with the bucket's phases, and further tracks: messages to and from each peer, steps with their
waiting time, collectives of process groups, and counters. A phase that a rank's message ends names that rank as
``last``.

Hosts' clocks differ. Between a message's arrival and the sender's note of it lies the delay of a confirmation, and
confirmations are the smallest and most urgent of packets. The clock offset of two hosts is therefore half the
difference of the shortest such times in the two directions, over all their messages.
"""

import json
import logging
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

SUFFIX: Final = ".timeline"
WRITE_EVERY_S: Final = 0.25
BYTES_MAX: Final = 256 << 20
"""Largest file: some million notes, more than a trace viewer can show."""
EVENTS: Final = {
    "joined": ("session",),
    "ready": ("bytes", "layers"),
    "tagged": ("bits",),
    "contributed": ("last",),
    "summed": (),
    "gathered": ("last",),
    "averaged": (),
    "applied": (),
    "sent": ("peer", "began_ns", "packets", "lost", "retransmitted", "window", "rate_bps", "rtt_us", "what"),
    "arrived": ("peer", "began_ns", "packets", "lost", "what"),
    "issued": ("what",),
    "done": (),
    "left": ("reason",),
}
"""Values of each event's note.

Of a bucket, by step and its number: it is ``ready``, with the ``bytes`` of its values; its packets are ``tagged``, with
the precision ``bits`` (32 for full precision in any number format); all ranks have ``contributed`` to this rank's
shard, rank ``last`` as the last one; the shard is ``summed``; all shards are ``gathered``; the bucket is ``averaged``,
and ``applied`` when its waiter has it. Of a message, by step and its own number: a peer has acknowledged
it (``sent``), or it has ``arrived``. The note is taken when it ends; ``began_ns`` is when it was sent or its receive
posted; ``window`` is in packets, 0 through memory. A collective of a process group, by its number, is ``issued`` and
``done``. ``left`` means that the session stopped using DLCP."""
TEXTS: Final = frozenset({"session", "layers", "what", "reason"})
_ABOUT: Final = {"rank": int, "process_rank": int, "host": str, "clock": str, "began_unix_ns": int, "began_ns": int}
"""Fields of the first line that readers use, and their types."""
_FORMATS: Final = {
    event: ",".join(["%d,%s,%d,%d", *("%s" if name in TEXTS else "%d" for name in names)]) + "\n"
    for event, names in EVENTS.items()
}
log = logging.getLogger("dlcp")
_serial = count()


class Timeline:
    """Takes notes and writes them to a file. Thread-safe.

    Parameters
    ----------
    folder
        Folder of the file; created if missing.
    rank
        This rank within its session, which the event ``joined`` names.
    process_rank
        This process's rank in the job.

    Raises
    ------
    OSError
        The file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, process_rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{process_rank}-{os.getpid()}-{next(_serial)}{SUFFIX}"
        self._notes: deque[tuple[Any, ...]] = deque()
        self._file = self.path.open("wb", buffering=0)  # unbuffered, or a fork could write half a line again
        about = {
            "rank": rank,
            "process_rank": process_rank,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "clock": clock_name(),
            "began_unix_ns": time.time_ns(),
            "began_ns": time.monotonic_ns(),
        }
        self._left = BYTES_MAX
        self._write((json.dumps(about) + "\n").encode())
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._run, name="dlcp-timeline", daemon=True)
        self._writer.start()

    @classmethod
    def open(cls, folder: str, rank: int) -> "Timeline | None":
        """Return a timeline in a folder; None, with a warning, if it cannot be written."""
        try:
            return cls(Path(folder), rank, int(os.environ.get("RANK", rank)))
        except OSError as error:
            log.warning("DLCP: rank %d cannot write a timeline: %s", rank, error)
            return None

    def note(self, event: str, step: int, number: int, *values: int | str) -> None:
        """Take a note of an event of :data:`EVENTS`, at the current time."""
        self._notes.append((time.monotonic_ns(), event, step, number, *values))

    def note_message(
        self, event: str, step: int, number: int, peer: int, span_s: tuple[float, float], *values: int | str
    ) -> None:
        """Take a note of a message that began and ended at these times of the monotonic clock, in seconds."""
        began_s, ended_s = span_s
        self._notes.append((int(1e9 * ended_s), event, step, number, peer, int(1e9 * began_s), *values))

    def close(self) -> None:
        """Write the remaining notes; later ones are discarded."""
        self._closing.set()
        if threading.current_thread() is not self._writer:
            self._writer.join()

    def _run(self) -> None:
        over = False
        try:
            while not over:
                over = self._closing.wait(WRITE_EVERY_S)
                notes = [self._notes.popleft() for _ in range(len(self._notes))]
                if self._left > 0:
                    self._write(_lines(notes))
        except OSError as error:
            log.warning("DLCP: the timeline %s ends here: %s", self.path, error)
        finally:
            self._notes = deque(maxlen=0)
            self._file.close()

    def _write(self, lines: bytes) -> None:
        view = memoryview(lines)
        while view:
            view = view[self._file.write(view) :]
        self._left -= len(lines)
        if self._left <= 0:
            log.warning("DLCP: the timeline %s ends here: it has reached %d MB", self.path, BYTES_MAX >> 20)


def _lines(notes: list[tuple[Any, ...]]) -> bytes:
    lines = [_FORMATS[note[1]] % note for note in notes]
    text = "".join(lines)
    if text.count("\n") > len(lines):  # a reason may span several lines
        text = "".join(line[:-1].replace("\n", " ") + "\n" for line in lines)
    return text.encode()


def clock_name() -> str:
    """Return an identifier of this machine's monotonic clock, the same for all its processes until the next boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Note:
    """A note of an event: its time, and its values by the names in :data:`EVENTS`."""

    time_ns: int
    event: str
    step: int
    number: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """The timeline in a file.

    Parameters
    ----------
    about
        The first line, which describes the rank.
    session
        Name of the session, which its ranks have in common; ``""`` if the rank joined none.
    """

    path: Path
    about: dict[str, Any]
    session: str

    @classmethod
    def of(cls, path: Path) -> "RankTimeline | None":
        """Return the timeline in a file; None if its process ended before it could write a line.

        Raises
        ------
        ValueError
            The file is not a timeline.
        """
        with path.open("rb") as file:
            line = file.readline()
        if not line.endswith(b"\n"):
            return None
        try:
            about = json.loads(line)
            refused = [name for name, kind in _ABOUT.items() if type(about[name]) is not kind]
            if refused or any(abs(value) >> 64 for value in about.values() if isinstance(value, int)):
                raise ValueError(refused)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line 1 does not describe a rank: {error!r}; remove the file") from None
        first = next(cls(path, about, "").notes(), None)
        return cls(path, about, first.values["session"] if first and first.event == "joined" else "")

    def notes(self) -> Iterator[Note]:
        """Yield all notes; an incomplete last line, from a killed process, is left out.

        Raises
        ------
        ValueError
            A line is not a note; the message says where.
        """
        with self.path.open("rb") as file:
            offset = len(file.readline())
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    yield _parsed(line.decode().rstrip("\n"))
                except (ValueError, KeyError) as error:
                    raise ValueError(f"{self.path}, byte {offset}: {error!r} in {line[:80]!r}") from None
                offset += len(line)


def _parsed(line: str) -> Note:
    time_ns, event, rest = line.split(",", 2)
    names = EVENTS[event]
    step, number, *values = rest.split(",", 1 + len(names))
    found = {name: value if name in TEXTS else _whole(value) for name, value in zip(names, values, strict=True)}
    return Note(_whole(time_ns), event, _whole(step), _whole(number), found)


def _whole(text: str) -> int:
    """Return an integer of at most 64 bits; readers convert to float, which overflows beyond 1e308."""
    value = int(text)
    if abs(value) >> 64:
        raise ValueError("a number exceeds 64 bits")
    return value


# Merging --------------------------------------------------------------------------------------------------------------

PHASES: Final = {
    "tagged": "tag",
    "contributed": "reduce-scatter",
    "summed": "sum",
    "gathered": "all-gather",
    "averaged": "confirm",
    "applied": "apply",
}
"""A bucket's phases, by the event that ends them. Rings and compressed buckets have fewer events."""
THREADS: Final = 100_000
"""Thread numbers per session, for its buckets. The numbers below it belong to the processes."""
TraceEvent = dict[str, Any]
"""An event of the Chrome trace event format."""


class TraceError(ValueError):
    """No timeline was found."""


@dataclass(slots=True)
class _Step:
    """A training step on a rank, derived from its buckets. Times are in nanoseconds of the rank's clock."""

    first_ready_ns: int
    last_ready_ns: int = 0
    last_applied_ns: int = 0
    open: int = 0
    """Number of buckets that are ready but not applied."""


def find_timelines(folders: Sequence[Path]) -> list[RankTimeline]:
    """Return the timelines in some folders, sorted by rank.

    Raises
    ------
    TraceError
        The folders hold none.
    """
    paths = [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    found = [timeline for path in paths if (timeline := RankTimeline.of(path))]
    if not found:
        where = ", ".join(map(str, folders))
        raise TraceError(f"no rank has left a timeline in {where}: check that the script uses DLCP's option trace")
    return sorted(found, key=lambda each: (each.about["process_rank"], each.about["began_unix_ns"]))


def write_trace(file: Path, timelines: Sequence[RankTimeline]) -> int:
    """Write the trace of all ranks to a file, and return its number of events."""
    written = 0
    with file.open("w") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[')
        for written, event in enumerate(trace_events(timelines), 1):
            out.write("\n" if written == 1 else ",\n")
            out.write(json.dumps(event, separators=(",", ":")))
        out.write("\n]}\n")
    return written


def trace_events(timelines: Sequence[RankTimeline]) -> Iterator[TraceEvent]:
    """Return the Chrome trace events of all ranks; ``ts`` and ``dur`` are in microseconds."""
    offsets = clock_offsets(timelines)
    ranks = {(each.session, each.about["rank"]): each.about["process_rank"] for each in timelines if each.session}
    began_ns = min(each.about["began_ns"] + offsets[each.about["clock"]] for each in timelines)
    sessions = list(dict.fromkeys(each.session for each in timelines))
    serial = count()
    for each in timelines:
        shift_ns = offsets[each.about["clock"]] - began_ns
        yield from _RankEvents(each, ranks, sessions.index(each.session), shift_ns, serial).all()


class _RankEvents:
    """The events of one timeline."""

    def __init__(
        self,
        timeline: RankTimeline,
        ranks: Mapping[tuple[str, int], int],
        session: int,
        shift_ns: int,
        serial: "count[int]",
    ) -> None:
        self._timeline, self._ranks, self._session = timeline, ranks, session
        self._shift_ns, self._serial = shift_ns, serial
        self._pid = 1 + timeline.about["process_rank"]  # Perfetto reserves process and thread 0 for idle time
        self._threads: set[int] = set()
        self._buckets: dict[tuple[int, int], list[Note]] = {}
        self._issued: dict[int, Note] = {}
        self._totals = {"lost": 0, "retransmitted": 0}

    def all(self) -> Iterator[TraceEvent]:
        """Yield them."""
        about = self._timeline.about
        name = f"rank {about['process_rank']} on {about['host']}"
        yield self._event("M", "process_name", args={"name": name})
        yield self._event("M", "process_sort_index", args={"sort_index": about["process_rank"]})
        for counted in self._totals:
            yield self._counter(f"{counted} packets", about["began_ns"], 0)
        steps: dict[int, _Step] = {}
        last_ns = about["began_ns"]
        for note in self._timeline.notes():
            last_ns = max(last_ns, note.time_ns)
            if note.event == "ready":
                step = steps.setdefault(note.step, _Step(note.time_ns))
                step.last_ready_ns, step.open = note.time_ns, step.open + 1
            elif note.event == "applied" and note.step in steps:
                step = steps[note.step]
                step.last_applied_ns, step.open = note.time_ns, step.open - 1
            yield from self._take(note)
        for number, step in steps.items():
            if not step.open:
                yield from self._step(number, step)
        for notes in self._buckets.values():
            yield from self._bucket(notes, last_ns, unfinished=True)
        for issued in self._issued.values():
            yield from self._collective(issued, last_ns, unfinished=True)

    def _take(self, note: Note) -> Iterator[TraceEvent]:
        values, which = note.values, (note.step, note.number)
        if note.event == "ready":
            self._buckets[which] = [note]
        elif note.event in PHASES:
            if which in self._buckets:  # other notes concern metadata or single hops
                notes = self._buckets[which]
                if note.event == "applied":
                    del self._buckets[which]
                    # The thread that waited for it may begin the next step before this is noted.
                    later = [open_[0].time_ns for open_ in self._buckets.values() if open_[0].number == note.number]
                    note = replace(note, time_ns=min([note.time_ns, *later]))
                    yield from self._bucket([*notes, note], note.time_ns)
                else:
                    notes.append(note)
        elif note.event == "issued":
            self._issued[note.step] = note
        elif note.event == "done":
            if issued := self._issued.pop(note.step, None):
                yield from self._collective(issued, note.time_ns)
        elif note.event in ("sent", "arrived"):
            peer = self._rank(values["peer"])
            arguments = {"step": note.step, "message": note.number, "peer": peer}
            arguments |= {name: values[name] for name in ("packets", "lost", "retransmitted", "what") if name in values}
            toward = "to" if note.event == "sent" else "from"
            yield from self._aside("message", f"{toward} rank {peer}", values["began_ns"], note.time_ns, arguments)
            if note.event == "sent":
                yield from self._counters(note, peer)
        elif note.event == "left":
            yield self._event("i", "DLCP left", note.time_ns, cat="dlcp", s="p", args=values)

    def _bucket(self, notes: Sequence[Note], end_ns: int, *, unfinished: bool = False) -> Iterator[TraceEvent]:
        ready, thread = notes[0], notes[0].number + THREADS * (1 + self._session)
        if thread not in self._threads:
            self._threads.add(thread)
            yield self._event("M", "thread_name", thread=thread, args={"name": f"bucket {ready.number}"})
        arguments = {"step": ready.step, **ready.values, **({"unfinished": True} if unfinished else {})}
        yield self._slice(f"bucket {ready.number}", thread, ready.time_ns, end_ns, arguments)
        for before, after in pairwise(notes):
            arguments = {"step": ready.step, **after.values}
            if "last" in arguments:
                arguments["last"] = self._rank(arguments["last"])
            name = "exchange" if (before.event, after.event) == ("tagged", "averaged") else PHASES[after.event]
            yield self._slice(name, thread, before.time_ns, after.time_ns, arguments)

    def _step(self, number: int, step: _Step) -> Iterator[TraceEvent]:
        """Yield a finished step, and the time that it waited for averages after its last gradient was ready."""
        yield from self._aside("step", "step", step.first_ready_ns, step.last_applied_ns, {"step": number})
        if step.last_applied_ns > step.last_ready_ns:
            yield from self._aside("step", "wait", step.last_ready_ns, step.last_applied_ns, {"step": number})

    def _collective(self, issued: Note, end_ns: int, *, unfinished: bool = False) -> Iterator[TraceEvent]:
        arguments = {"number": issued.step, **({"unfinished": True} if unfinished else {})}
        yield from self._aside("collective", issued.values["what"], issued.time_ns, end_ns, arguments)

    def _counters(self, note: Note, peer: int) -> Iterator[TraceEvent]:
        for name in self._totals:
            if note.values[name]:
                self._totals[name] += note.values[name]
                yield self._counter(f"{name} packets", note.time_ns, self._totals[name])
        for name, unit, value in (
            ("window", "packets", note.values["window"]),
            ("rate", "Mbit/s", note.values["rate_bps"] / 1e6),
            ("round trip", "us", note.values["rtt_us"]),
        ):
            if value:
                yield self._counter(f"{name} to rank {peer}, {unit}", note.time_ns, value)

    def _rank(self, rank: int) -> int:
        """Return the rank in the job of a rank in the session; a parameter server's number stays unchanged."""
        return self._ranks.get((self._timeline.session, rank), rank)

    def _event(
        self, kind: str, name: str, time_ns: int | None = None, thread: int | None = None, **more: Any
    ) -> TraceEvent:
        when = {} if time_ns is None else {"ts": (time_ns + self._shift_ns) / 1e3}
        return {"ph": kind, "name": name, "pid": self._pid, "tid": thread or self._pid, **when, **more}

    def _counter(self, name: str, time_ns: int, value: float) -> TraceEvent:
        return self._event("C", name, time_ns, args={"value": value})

    def _slice(self, name: str, thread: int, began_ns: int, end_ns: int, arguments: TraceEvent) -> TraceEvent:
        took_us = (end_ns - began_ns) / 1e3
        return self._event("X", name, began_ns, thread, cat="bucket", dur=took_us, args=arguments)

    def _aside(self, kind: str, name: str, began_ns: int, end_ns: int, arguments: TraceEvent) -> Iterator[TraceEvent]:
        """Yield a slice that may overlap others of the same name."""
        identity: dict[str, Any] = {"cat": kind, "id2": {"local": hex(next(self._serial))}}
        yield self._event("b", name, began_ns, **identity, args=arguments)
        yield self._event("e", name, end_ns, **identity)


# Clocks ---------------------------------------------------------------------------------------------------------------


def clock_offsets(timelines: Sequence[RankTimeline]) -> dict[str, int]:
    """Return the nanoseconds to add to each clock's times to convert them to the first clock's.

    Clocks of hosts that exchanged no messages are aligned by the hosts' time of day.
    """
    days = {each.about["clock"]: each.about["began_unix_ns"] - each.about["began_ns"] for each in timelines}
    first, *others = dict.fromkeys(each.about["clock"] for each in timelines)
    offsets = {first: 0}
    if not others:
        return offsets
    leads = _leads(timelines)
    seen = deque([first])
    while seen:
        here = seen.popleft()
        for there in others:
            if there not in offsets and (here, there) in leads and (there, here) in leads:
                offsets[there] = offsets[here] + (leads[here, there] - leads[there, here]) // 2
                seen.append(there)
    return {clock: offsets.get(clock, days[clock] - days[first]) for clock in days}


def _leads(timelines: Iterable[RankTimeline]) -> dict[tuple[str, str], int]:
    """Return the shortest time from arrival to confirmation, in nanoseconds, by (sender's clock, receiver's clock)."""
    arrived: dict[tuple[Any, ...], tuple[str, int]] = {}
    confirmed: dict[tuple[Any, ...], tuple[str, int]] = {}
    for each in timelines:
        own, clock = each.about["rank"], each.about["clock"]
        for note in each.notes():
            if note.event in ("sent", "arrived"):
                peer, message = note.values["peer"], (each.session, note.step, note.number)
                if note.event == "sent":
                    confirmed[message, own, peer] = clock, note.time_ns
                else:
                    arrived[message, peer, own] = clock, note.time_ns
    leads: dict[tuple[str, str], int] = defaultdict(lambda: 1 << 62)
    for message, (sender, confirmed_ns) in confirmed.items():
        if message in arrived:
            receiver, arrived_ns = arrived[message]
            leads[sender, receiver] = min(leads[sender, receiver], confirmed_ns - arrived_ns)
    return dict(leads)
