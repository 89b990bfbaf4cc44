# SPDX-License-Identifier: Apache-2.0
"""Timeline of one rank: notes of events, written to a file while training runs.

A note takes one or two microseconds where the event happens; a thread writes notes a few times a second. The file of a
killed process therefore ends a moment before its death.
:mod:`dlcp.train.merged_trace` merges the files of all ranks into one trace.

The first line of a file describes the rank, as JSON. Every other line is a note: nanoseconds, event, step, number, and
the values listed for the event below. The last value may be text with commas.
"""

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
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
        """Yield all notes; a last incomplete line, of a killed process, is left out.

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
