# SPDX-License-Identifier: Apache-2.0
"""Train with whatever ranks are there, and note every step; a script for the benchmark ``elastic``.

``elastic_rank NOTES END VALUES PAUSE_S``: the file of its notes, one that tells all ranks to end once it is there, the
number of gradients, and how long a step computes. Times are of the monotonic clock, which all processes share.
"""

import json
import logging
import os
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any


class Notes(logging.Handler):
    """Writes what this rank does and logs into a file, a line of JSON each."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - lives as long as the process

    def note(self, what: str, **more: Any) -> None:
        """Write a line with the time."""
        self._file.write(json.dumps({"what": what, "at_s": time.monotonic(), **more}) + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line of the log."""
        self.note("log", text=record.getMessage())


def resident_bytes() -> int:
    """Return how much memory this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train() -> None:
    """Train until the average says that a rank has found the file ``END``: so all end with the same step."""
    notes = Notes(sys.argv[1])
    notes.note("python")
    import numpy as np

    import dlcp.session

    notes.note("imported")
    logging.basicConfig(handlers=[notes, logging.StreamHandler()])
    end, pause_s = Path(sys.argv[2]), float(sys.argv[4])
    model = np.zeros(int(sys.argv[3]), np.float32)

    def load(state: bytes) -> None:
        model[:] = np.frombuffer(state, np.float32)

    with dlcp.session.join() as group:
        notes.note("joined")
        group.register(["model", "end"], save=model.tobytes, load=load)
        notes.note("begun", step=group.step, rank=group.rank)
        own = np.random.default_rng(group.rank).standard_normal(len(model), np.float32)
        ends = False
        while not ends:
            group.begin_step()
            step = group.step
            given = {"model": own * np.float32(1 + step % 7), "end": np.full(1, end.exists(), np.float32)}
            time.sleep(pause_s)
            group.average(given)
            model -= np.float32(0.1) * given["model"]
            ends = given["end"][0] > 0
            notes.note("step", step=step, ranks=group.ranks, resident=resident_bytes())
        notes.note("end", digest=sha256(model.tobytes()).hexdigest())


if __name__ == "__main__":
    train()
