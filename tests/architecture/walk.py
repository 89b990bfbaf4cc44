# SPDX-License-Identifier: Apache-2.0
"""The walk of one gradient bucket through the code, as Python sees it: what docs/architecture.md describes.

Run ``python -m tests.architecture.walk`` to see every call on the way that leads from one file to another.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.torch.workers import launch, values

ROOT = Path(__file__).parents[2]
LOOP = "dlcp/transport/endpoint.py _run", "dlcp/transport/endpoint.py _turn"
"""Frames that are always on the stack of the endpoint's thread."""
SETTLED_STEPS = 3
"""Steps before those that are traced: by then the buckets are rebuilt and round trips are known."""
TRACED_STEPS = 15
"""Steps that are traced, each by itself: on a busy machine a late acknowledgement lengthens some of them."""


class Call(NamedTuple):
    """A call that leads from one file of the project to another."""

    caller_file: str
    caller: str
    file: str
    function: str


class Walk(NamedTuple):
    """One rank's calls for one bucket, from the hook until the average is back and confirmed.

    ``files`` in the order of their first call, ``calls`` without repeats, ``crossings``: which functions of the C
    library Python calls, and how often, and ``frames``: what is on the stack from the hook to the first message that C
    is given, first in the thread of the hook, then in the endpoint's.
    """

    files: list[str]
    calls: list[Call]
    crossings: dict[str, int]
    frames: list[str]


class _Tracer:
    """Notes calls between the project's files in every thread that installs it, while it is on."""

    def __init__(self):
        self.on = False
        self.start()

    def start(self):
        """Forget what was noted."""
        self.files = {}
        self.calls = {}
        self.crossings = Counter()
        self.handed_over = []
        self.sending = []

    def walk(self):
        """Return what was noted since the start."""
        return Walk(list(self.files), list(self.calls), dict(self.crossings), self.sending)

    def install(self):
        sys.setprofile(self._note)

    def _note(self, frame, event, argument):
        if not self.on or (file := _file_of(frame)) is None:
            return
        if event == "c_call" and argument.__name__.startswith("dlcp_"):
            self._count(argument.__name__)
        if event != "call":
            return
        self.files.setdefault(file)
        if (file, frame.f_code.co_name) == ("dlcp/transport/endpoint.py", "call"):
            self.handed_over = _stack(frame)
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        if caller is not None and _file_of(caller) != file:
            self.calls.setdefault(Call(_file_of(caller), caller.f_code.co_name, file, frame.f_code.co_name))

    def _count(self, name):
        """Count a call of C."""
        self.crossings[name] += 1
        if name == "dlcp_send" and not self.sending:
            self.sending = self.handed_over + [each for each in _stack(sys._getframe(2)) if each not in LOOP]


def _stack(frame):
    """Return the project's functions on a stack, the outermost first."""
    found = []
    while frame is not None:
        if file := _file_of(frame):
            found.append(f"{file} {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


def _file_of(frame):
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT / "dlcp"):
        return None
    return path.relative_to(ROOT).as_posix()


def trace(worker):
    """Train a small model for some steps with the hook, and return rank 0's shortest walk of a step's only bucket."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from dlcp.torch import enable

    # Larger than what two ranks exchange in one hop.
    network = torch.nn.Sequential(torch.nn.Linear(1000, 400), torch.nn.Linear(400, 10))
    model = DistributedDataParallel(network, bucket_cap_mb=100)
    state = enable(model, worker.options())
    tracer = _Tracer()
    state.endpoint.call(tracer.install)
    walks = []
    for step in range(SETTLED_STEPS + TRACED_STEPS):
        loss = model(torch.randn(16, 1000)).square().mean()
        tracer.start()
        tracer.on = step >= SETTLED_STEPS
        tracer.install()
        loss.backward()
        sys.setprofile(None)
        state.endpoint.flush(5.0)  # until what was sent is confirmed, which is the end of the walk
        if tracer.on:
            walks.append(tracer.walk())
        tracer.on = False
    state.close()
    return min(walks, key=lambda walk: len(walk.calls))


def walk_of_a_bucket():
    """Return the walk of one float32 bucket of DDP over sockets between two ranks."""
    return values(launch(2, trace))[0]


def main():
    """Print the walk as one JSON document."""
    walk = walk_of_a_bucket()
    print(json.dumps(walk._asdict(), indent=1))
    counts = f"{len(walk.files)} files, {len(walk.calls)} moves, {len(walk.crossings)} C functions"
    print(f"{counts}, {len(walk.frames)} frames", file=sys.stderr)


if __name__ == "__main__":
    main()
