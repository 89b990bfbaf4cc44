# SPDX-License-Identifier: Apache-2.0
"""One trace of the timelines of all ranks, as Chrome trace events, which Perfetto opens (https://ui.perfetto.dev).

Each rank is a process. It has a thread for each bucket of a step, with the phases that the bucket goes through, and
tracks beside them: messages to and from each peer, steps with what of them was waiting, collectives of process groups,
and counters. A phase that ends with what a rank sends says which rank was the ``last``.

Hosts have clocks of their own. A message is at its receiver before the sender knows it, by as long as a confirmation
takes, and confirmations are the smallest and most urgent of packets. So the shortest such time in either direction,
over all messages between two hosts, says how far their clocks are apart: half the difference.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

from dlcp.configuration import short
from dlcp.timeline import SUFFIX, Note, TimelineReader

PHASES: Final = {
    "tagged": "tag",
    "contributed": "reduce-scatter",
    "summed": "sum",
    "gathered": "all-gather",
    "averaged": "confirm",
    "applied": "apply",
}
"""A bucket's phases, by the event that ends them. A ring and compressed buckets know fewer events."""
THREADS: Final = 100_000
"""So many numbers of threads a session has, for its buckets. Chosen by us: beyond processes' own, which come first."""
Event = dict[str, Any]
_ABOUT: Final = {"rank": int, "process_rank": int, "host": str, "clock": str, "began_unix_ns": int, "began_ns": int}
"""What is used of the first line of a timeline."""


class TraceError(ValueError):
    """There is nothing to make a trace of; the message says where."""


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one endpoint of a rank has noted.

    Parameters
    ----------
    path
        The file.
    about
        Its first line.
    session
        What the ranks that it exchanged messages with have in common; ``""`` if it did not come to that.
    """

    path: Path
    about: Mapping[str, Any]
    session: str

    @classmethod
    def of(cls, path: Path) -> "RankTimeline | None":
        """Return the timeline in a file; None if its process ended before it could write a line."""
        reader = TimelineReader(path)
        first = next(reader.read(), None)
        if not reader.about:
            return None
        for name, kind in _ABOUT.items():
            value = reader.about.get(name)
            if type(value) is not kind or (isinstance(value, int) and abs(value) >> 64):
                raise TraceError(f"{path}, line 1: {name} must be {kind.__name__}, got {short(value)}; leave it out")
        return cls(path, reader.about, first.values["session"] if first and first.event == "joined" else "")

    def notes(self) -> Iterator[Note]:
        """Return all notes, by and by."""
        return TimelineReader(self.path).read()


@dataclass(slots=True)
class Step:
    """A training step on a rank, as its buckets tell. Times are in nanoseconds of the rank's clock."""

    number: int
    first_ready_ns: int
    last_ready_ns: int
    last_applied_ns: int = 0
    open: int = 0

    @property
    def waited_ns(self) -> int:
        """How long the step waited for averages when the last gradient was there."""
        return max(0, self.last_applied_ns - self.last_ready_ns)


@dataclass(slots=True)
class Steps:
    """Makes steps of the notes of one timeline."""

    _open: dict[int, Step] = field(default_factory=dict)

    def take(self, note: Note) -> list[Step]:
        """Return the steps that this note shows to be over: their buckets are applied, and a later one has begun."""
        if note.event == "ready":
            over = [number for number, step in self._open.items() if number < note.step and not step.open]
            found = [self._open.pop(number) for number in over]
            step = self._open.setdefault(note.step, Step(note.step, note.time_ns, note.time_ns))
            step.last_ready_ns, step.open = note.time_ns, step.open + 1
            return found
        if note.event == "applied" and (applied := self._open.get(note.step)):
            applied.last_applied_ns, applied.open = note.time_ns, applied.open - 1
        return []

    def rest(self) -> list[Step]:
        """Return the steps that are over, although no later one has begun."""
        return [step for step in self._open.values() if not step.open]


def find(folders: Sequence[Path]) -> list[RankTimeline]:
    """Return the timelines in some folders, by rank.

    Raises
    ------
    TraceError
        There are none.
    """
    paths = [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    found = [timeline for path in paths if (timeline := RankTimeline.of(path))]
    if not found:
        where = ", ".join(map(str, folders))
        raise TraceError(f"no rank has left a timeline in {where}: did the script use DLCP, with the option trace?")
    return sorted(found, key=lambda each: (each.about["process_rank"], each.about["began_unix_ns"]))


def write(file: Path, timelines: Sequence[RankTimeline]) -> int:
    """Write the trace of all ranks to a file, and return how many events it has."""
    written = 0
    with file.open("w") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[')
        for written, event in enumerate(events(timelines), 1):
            out.write("\n" if written == 1 else ",\n")
            json.dump(event, out, separators=(",", ":"))
        out.write("\n]}\n")
    return written


def events(timelines: Sequence[RankTimeline]) -> Iterator[Event]:
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
        self._pid = 1 + timeline.about["process_rank"]  # Perfetto takes process and thread 0 for the idle ones
        self._threads: set[int] = set()
        self._buckets: dict[tuple[int, int], list[Note]] = {}
        self._issued: dict[int, Note] = {}
        self._totals = {"lost": 0, "retransmitted": 0}

    def all(self) -> Iterator[Event]:
        """Return them."""
        about = self._timeline.about
        name = f"rank {about['process_rank']} on {about['host']}"
        yield self._metadata("process_name", self._pid, name=name)
        yield self._metadata("process_sort_index", self._pid, sort_index=about["process_rank"])
        for counted in self._totals:
            yield self._counter(f"{counted} packets", about["began_ns"], 0)
        steps, last_ns = Steps(), about["began_ns"]
        for note in self._timeline.notes():
            last_ns = max(last_ns, note.time_ns)
            for over in steps.take(note):
                yield from self._step(over)
            yield from self._take(note)
        for over in steps.rest():
            yield from self._step(over)
        for notes in self._buckets.values():
            yield from self._bucket(notes, last_ns, unfinished=True)
        for issued in self._issued.values():
            yield from self._collective(issued, last_ns, unfinished=True)

    def _take(self, note: Note) -> Iterator[Event]:
        values, which = note.values, (note.step, note.number)
        if note.event == "ready":
            self._buckets[which] = [note]
        elif note.event in PHASES:
            if which in self._buckets:  # else the note is of metadata, or of one hop of something larger
                notes = self._buckets[which]
                if note.event == "applied":
                    del self._buckets[which]
                    # Whoever waited for it may begin the next step before this is noted.
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
            where = {"ph": "i", "s": "p", "pid": self._pid, "tid": self._pid, "ts": self._us(note.time_ns)}
            yield {"name": "DLCP left", "cat": "dlcp", **where, "args": values}

    def _bucket(self, notes: Sequence[Note], end_ns: int, *, unfinished: bool = False) -> Iterator[Event]:
        ready, thread = notes[0], notes[0].number + THREADS * (1 + self._session)
        if thread not in self._threads:
            self._threads.add(thread)
            yield self._metadata("thread_name", thread, name=f"bucket {ready.number}")
        arguments = {"step": ready.step, **ready.values, **_state(unfinished)}
        yield self._slice(f"bucket {ready.number}", thread, ready.time_ns, end_ns, arguments)
        for before, after in pairwise(notes):
            arguments = {"step": ready.step} | {name: self._rank(rank) for name, rank in after.values.items()}
            name = "exchange" if (before.event, after.event) == ("tagged", "averaged") else PHASES[after.event]
            yield self._slice(name, thread, before.time_ns, after.time_ns, arguments)

    def _step(self, step: Step) -> Iterator[Event]:
        arguments = {"step": step.number}
        yield from self._aside("step", "step", step.first_ready_ns, step.last_applied_ns, arguments)
        if step.waited_ns:
            yield from self._aside("step", "wait", step.last_ready_ns, step.last_applied_ns, arguments)

    def _collective(self, issued: Note, end_ns: int, *, unfinished: bool = False) -> Iterator[Event]:
        arguments = {"number": issued.step, **_state(unfinished)}
        yield from self._aside("collective", issued.values["what"], issued.time_ns, end_ns, arguments)

    def _counters(self, note: Note, peer: int) -> Iterator[Event]:
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
        """Return what a rank of the session is among all of the job; a parameter server's stays as it is."""
        return self._ranks.get((self._timeline.session, rank), rank)

    def _us(self, time_ns: int) -> float:
        return (time_ns + self._shift_ns) / 1e3

    def _metadata(self, what: str, thread: int, **arguments: str | int) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": thread, "args": arguments}

    def _counter(self, name: str, time_ns: int, value: float) -> Event:
        where = {"pid": self._pid, "tid": self._pid, "ts": self._us(time_ns)}
        return {"ph": "C", "name": name, **where, "args": {"value": value}}

    def _slice(self, name: str, thread: int, began_ns: int, end_ns: int, arguments: Event) -> Event:
        where = {"pid": self._pid, "tid": thread, "ts": self._us(began_ns), "dur": (end_ns - began_ns) / 1e3}
        return {"ph": "X", "cat": "bucket", "name": name, **where, "args": arguments}

    def _aside(self, kind: str, name: str, began_ns: int, end_ns: int, arguments: Event) -> Iterator[Event]:
        """Return a slice that others of its name may overlap."""
        common = {"cat": kind, "name": name, "id2": {"local": hex(next(self._serial))}}
        common |= {"pid": self._pid, "tid": self._pid}
        yield {"ph": "b", **common, "ts": self._us(began_ns), "args": arguments}
        yield {"ph": "e", **common, "ts": self._us(end_ns)}


def _state(unfinished: bool) -> Event:
    return {"unfinished": True} if unfinished else {}


# Clocks ---------------------------------------------------------------------------------------------------------------


def clock_offsets(timelines: Sequence[RankTimeline]) -> dict[str, int]:
    """Return what to add to the times of each clock, in nanoseconds, so that they are those of the first one.

    Clocks between which no messages went are aligned by the hosts' time of day.
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
    """Return by sender's and receiver's clock the least nanoseconds from a message's arrival to its confirmation."""
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
