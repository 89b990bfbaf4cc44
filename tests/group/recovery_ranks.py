# SPDX-License-Identifier: Apache-2.0
"""A session's surroundings when DLCP fails: a network and a reducer that a test controls."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from dlcp.collectives.partial_result import PartialResult
from dlcp.transport import DeadlineError

PAYLOAD_BYTES = 64


class Network:
    """A channel of ranks that are threads, and their announcements that they leave."""

    def __init__(self, ranks, limit_s=20):
        self.ranks, self.left = ranks, {}
        self._turn = threading.Barrier(ranks, timeout=limit_s)
        self._told = {}

    def gather(self, rank, item):
        self._told[rank] = item
        try:
            self._turn.wait()
            told = dict(self._told)
            self._turn.wait()
        except threading.BrokenBarrierError:
            raise DeadlineError("not all ranks are there") from None
        return dict(sorted(told.items()))

    def channel(self, rank):
        return SimpleNamespace(
            gather=lambda item: self.gather(rank, item),
            add=lambda values: sum(self.gather(rank, values.copy()).values()),
        )


class FakeEndpoint:
    def __init__(self):
        options = SimpleNamespace(payload_bytes=PAYLOAD_BYTES)
        self.connection = SimpleNamespace(options=options, timeline=None)
        self.closed = []

    def close(self, reason=None):
        self.closed.append(reason)


class FakeRun(Future):
    """A bucket's run; while it is not done, the rank holds its contribution."""

    def __init__(self, rank, bucket):
        super().__init__()
        self.rank, self.bucket = rank, bucket

    def partial_result(self):
        if self.done() and not self.exception():
            return None
        return PartialResult.untouched(self.rank, self.bucket.values.astype(np.float32), PAYLOAD_BYTES // 4)


class FakeReducer:
    """Averages when a test says so; until then it leaves buckets untouched."""

    def __init__(self, rank):
        self.rank, self.steps = rank, []
        self.running = {}
        self.refuses = None

    def begin_step(self, step, bits=32):
        self.steps.append(step)

    def start(self, step, sequence, bucket):
        if self.refuses:
            raise self.refuses
        run = self.running[step, sequence] = FakeRun(self.rank, bucket)
        return run

    def finish(self, step, sequence, average):
        run = self.running.pop((step, sequence))
        run.bucket.values[:] = average
        run.set_result(run.bucket.values)

    def fail(self, error):
        for run in list(self.running.values()):
            run.set_exception(error)

    def close(self):
        pass


def start_late(monkeypatch, seconds, begins=None):
    """Let a recovery's thread begin late, as on a busy machine; ``begins`` is set when it is about to."""
    start = threading.Thread.start

    def late(thread):
        if thread.name == "dlcp-recovery":
            if begins:
                begins.set()
            threading.Event().wait(seconds)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)


def recovering():
    """The threads in which a session of this process recovers just now."""
    return [thread for thread in threading.enumerate() if thread.name == "dlcp-recovery"]


def close_while_it_leaves(session, reducer, begins):
    """Fail a session, and close it in the very moment in which its recovery is about to begin."""
    failing = threading.Thread(target=reducer.fail, args=(DeadlineError("too late"),))
    failing.start()
    assert begins.wait(20)
    session.close()
    found = recovering()
    failing.join(20)
    return found
