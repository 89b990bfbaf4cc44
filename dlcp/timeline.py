# SPDX-License-Identifier: Apache-2.0
"""What one rank does and when: notes of events, written to a file while training runs.

A note is taken where an event happens, in one or two microseconds; a thread writes notes down a few times a
second. So the file of a process that was killed ends a moment before its death, and a page can follow it while it
grows. :mod:`dlcp.train.trace` makes one trace of the files of all ranks.

The first line of a file says in JSON whose it is. Every other line is a note: nanoseconds, event, step, number, and
what the event's entry below says, the last of which is text and may hold commas.
"""

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

SUFFIX: Final = ".timeline"
WRITE_EVERY_S: Final = 0.25
BYTES_MAX: Final = 256 << 20
"""No more is written than this: some million notes, more than a page of a trace can show. Chosen by us."""
EVENTS: Final = {
    "joined": ("session",),
    "ready": ("layers",),
    "tagged": (),
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
"""What is noted of each event. Of a bucket, by step and its number: it is ``ready``, its packets are ``tagged``, this
rank's shard is ``contributed`` to by all, of whom a rank was the ``last``, and ``summed``; all shards are ``gathered``;
the bucket is ``averaged``, and ``applied`` when whoever waited has it. Of a message, by step and its own number: a peer
has confirmed it (``sent``), or it is here (``arrived``); ``window`` is in packets, 0 through memory. A collective of a
process group, by its number, is ``issued`` and ``done``. DLCP was ``left``. A note of a message is taken when it ends;
``began_ns`` says when it was sent, or its receive posted."""
TEXTS: Final = frozenset({"session", "layers", "what", "reason"})
_FORMATS: Final = {
    event: ",".join(["%d,%s,%d,%d", *("%s" if name in TEXTS else "%d" for name in names)]) + "\n"
    for event, names in EVENTS.items()
}
log = logging.getLogger("dlcp")
_serial = count()


class Timeline:
    """Takes notes; from any thread.

    Parameters
    ----------
    folder
        Where the file is made; the folder is, too.
    rank
        This rank within its session, which "joined" names.
    process_rank
        This process among all of the job.

    Raises
    ------
    OSError
        There is no writing there.
    """

    def __init__(self, folder: Path, rank: int, process_rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{process_rank}-{os.getpid()}-{next(_serial)}{SUFFIX}"
        self._notes: deque[tuple[Any, ...]] = deque()
        self._file = self.path.open("wb", buffering=0)  # a fork must not hold half a line
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
        """Return a timeline in a folder; None, with a warning, if there is no writing there."""
        try:
            return cls(Path(folder), rank, int(os.environ.get("RANK", rank)))
        except OSError as error:
            log.warning("DLCP: rank %d leaves no timeline: %s", rank, error)
            return None

    def note(self, event: str, step: int, number: int, *values: int | str) -> None:
        """Note that an event of :data:`EVENTS` has happened just now."""
        self._notes.append((time.monotonic_ns(), event, step, number, *values))

    def note_message(
        self, event: str, step: int, number: int, peer: int, span_s: tuple[float, float], *values: int | str
    ) -> None:
        """Note a message that began and ended at these times of the monotonic clock, in seconds."""
        began_s, ended_s = span_s
        self._notes.append((int(1e9 * ended_s), event, step, number, peer, int(1e9 * began_s), *values))

    def close(self) -> None:
        """Write the last notes; those that come later are not written."""
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
            log.warning("DLCP: the timeline %s ends here: it has %d MB", self.path, BYTES_MAX >> 20)


def _lines(notes: list[tuple[Any, ...]]) -> bytes:
    lines = [_FORMATS[note[1]] % note for note in notes]
    text = "".join(lines)
    if text.count("\n") > len(lines):  # a reason may have several
        text = "".join(line[:-1].replace("\n", " ") + "\n" for line in lines)
    return text.encode()


def clock_name() -> str:
    """Return what tells this machine's monotonic clock from another's: it is the same for all until the next boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Note:
    """An event, when it happened, and what was noted of it, by the names in :data:`EVENTS`."""

    time_ns: int
    event: str
    step: int
    number: int
    values: dict[str, Any]


@dataclass(slots=True)
class TimelineReader:
    """Reads a rank's timeline, also while it grows.

    Attributes
    ----------
    about
        Whose it is; empty until the first line is there.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    _offset: int = 0

    def read(self) -> Iterator[Note]:
        """Return the notes that were written since the last call; a half line is left for the next one.

        Raises
        ------
        ValueError
            The file is no timeline; the message says where.
        """
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    if not self._offset:
                        self.about = _parsed_first(line)
                    else:
                        yield _parsed(line.decode().rstrip("\n"))
                except (ValueError, KeyError, RecursionError) as error:
                    raise ValueError(f"{self.path}, byte {self._offset}: {error!r} in {line[:80]!r}") from None
                self._offset += len(line)


def _parsed_first(line: bytes) -> dict[str, Any]:
    about = json.loads(line)
    if not isinstance(about, dict):
        raise ValueError("the first line is no object")
    return about


def _parsed(line: str) -> Note:
    time_ns, event, rest = line.split(",", 2)
    names = EVENTS[event]
    step, number, *values = rest.split(",", 1 + len(names))
    found = {name: value if name in TEXTS else _whole(value) for name, value in zip(names, values, strict=True)}
    return Note(_whole(time_ns), event, _whole(step), _whole(number), found)


def _whole(text: str) -> int:
    """Return a whole number of at most 64 bits: readers compute with floats, too, which end at 1e308."""
    value = int(text)
    if abs(value) >> 64:
        raise ValueError("a number of more than 64 bits")
    return value
