# SPDX-License-Identifier: Apache-2.0
"""Merge the timelines of all ranks into one trace of Chrome trace events, for Perfetto (https://ui.perfetto.dev).

Each rank is a process. It has a thread for each bucket of a step, with the bucket's phases, and further tracks:
messages to and from each peer, steps with their waiting time, collectives of process groups, and counters. A phase that
a rank's message ends names that rank as ``last``.

Hosts' clocks differ. Between a message's arrival and the sender's note of it lies the delay of a confirmation, and
confirmations are the smallest and most urgent of packets. The clock offset of two hosts is therefore half the
difference of the shortest such times in the two directions, over all their messages.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

from dlcp.host.timeline import SUFFIX, Note, RankTimeline

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
Event = dict[str, Any]


class TraceError(ValueError):
    """No timeline was found."""


@dataclass(slots=True)
class Step:
    """A training step on a rank, derived from its buckets. Times are in nanoseconds of the rank's clock."""

    first_ready_ns: int
    last_ready_ns: int = 0
    last_applied_ns: int = 0
    open: int = 0
    """Number of buckets that are ready but not applied."""


def find(folders: Sequence[Path]) -> list[RankTimeline]:
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


def write(file: Path, timelines: Sequence[RankTimeline]) -> int:
    """Write the trace of all ranks to a file, and return its number of events."""
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
        self._pid = 1 + timeline.about["process_rank"]  # Perfetto reserves process and thread 0 for idle time
        self._threads: set[int] = set()
        self._buckets: dict[tuple[int, int], list[Note]] = {}
        self._issued: dict[int, Note] = {}
        self._totals = {"lost": 0, "retransmitted": 0}

    def all(self) -> Iterator[Event]:
        """Yield them."""
        about = self._timeline.about
        name = f"rank {about['process_rank']} on {about['host']}"
        yield self._metadata("process_name", self._pid, name=name)
        yield self._metadata("process_sort_index", self._pid, sort_index=about["process_rank"])
        for counted in self._totals:
            yield self._counter(f"{counted} packets", about["began_ns"], 0)
        steps: dict[int, Step] = {}
        last_ns = about["began_ns"]
        for note in self._timeline.notes():
            last_ns = max(last_ns, note.time_ns)
            if note.event == "ready":
                step = steps.setdefault(note.step, Step(note.time_ns))
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

    def _take(self, note: Note) -> Iterator[Event]:
        values, which = note.values, (note.step, note.number)
        if note.event == "ready":
            self._buckets[which] = [note]
        elif note.event in PHASES:
            if which in self._buckets:  # other notes are of metadata, or of single hops
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
            arguments = {"step": ready.step, **after.values}
            if "last" in arguments:
                arguments["last"] = self._rank(arguments["last"])
            name = "exchange" if (before.event, after.event) == ("tagged", "averaged") else PHASES[after.event]
            yield self._slice(name, thread, before.time_ns, after.time_ns, arguments)

    def _step(self, number: int, step: Step) -> Iterator[Event]:
        """Yield a finished step, and the time that it waited for averages after its last gradient was ready."""
        yield from self._aside("step", "step", step.first_ready_ns, step.last_applied_ns, {"step": number})
        if step.last_applied_ns > step.last_ready_ns:
            yield from self._aside("step", "wait", step.last_ready_ns, step.last_applied_ns, {"step": number})

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
        """Return the rank in the job of a rank in the session; a parameter server's number stays unchanged."""
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
        """Yield a slice that may overlap others of the same name."""
        common = {"cat": kind, "name": name, "id2": {"local": hex(next(self._serial))}}
        common |= {"pid": self._pid, "tid": self._pid}
        yield {"ph": "b", **common, "ts": self._us(began_ns), "args": arguments}
        yield {"ph": "e", **common, "ts": self._us(end_ns)}


def _state(unfinished: bool) -> Event:
    return {"unfinished": True} if unfinished else {}


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
