# SPDX-License-Identifier: Apache-2.0
"""Trainings of ranks as processes, which a test kills and starts again."""

import signal
import time
from contextlib import contextmanager

from tests.group.group_ranks import ends_of, start_process
from tests.transport.free_ports import free_port

TRAINING = """
import hashlib, json, logging, os, sys, time
import numpy as np
import dlcp.session
logging.basicConfig()
wanted, size, pause_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
options = dlcp.session.Options(elastic=1, deadline_s=60)
model = {"front": np.zeros(size, np.float32), "back": np.zeros(9, np.float32)}
history = []  # what every rank did in every step: it must be the same

def save():
    return json.dumps(history).encode() + b"\\n" + b"".join(values.tobytes() for values in model.values())

def load(data):
    text, _, rest = data.partition(b"\\n")
    history[:] = json.loads(text)
    for values in model.values():
        values[:] = np.frombuffer(rest[: values.nbytes], values.dtype)
        rest = rest[values.nbytes :]

with dlcp.session.join(options) as group:
    group.register(list(model), save=save, load=load)
    first = group.step
    while history[-20:] != 20 * [wanted]:
        group.begin_step()
        rng = np.random.default_rng([group.rank, group.step])
        given = {name: rng.standard_normal(values.shape).astype(np.float32) for name, values in model.items()}
        ranks = list(group.ranks)
        group.average(given)
        for name, values in model.items():
            values -= 0.1 * given[name]
        if history[-1:] != [ranks]:
            print("step", group.step, *ranks, flush=True)
        history.append(ranks)
        time.sleep(pause_s)
    assert group.active or group.size == 1, group.reason
    digest = hashlib.sha256(b"".join(values.tobytes() for values in model.values())).hexdigest()
    print("end", digest, first, json.dumps(history), flush=True)
"""


class Job:
    """A training of some ranks, which a test kills and starts again."""

    def __init__(self, size, until, values=100_000, pause_s=0.01, port=None, codes=None, **variables):
        """Train until 20 steps had exactly the ranks ``until``; ``codes`` are other scripts than TRAINING, by rank."""
        self.size, self.port = size, port or free_port()
        self.arguments = until, values, pause_s
        self.variables = {"DLCP_PRECISION": "32", **variables}
        self.started = []
        self.processes = [self.start(rank, (codes or {}).get(rank, TRAINING)) for rank in range(size)]

    def start(self, rank, code=TRAINING):
        self.started.append(start_process(rank, self.size, self.port, code, *self.arguments, **self.variables))
        return self.started[-1]

    def wait_for(self, process, wanted):
        """Wait until a process has printed a line that ends with some ranks; return its step."""
        for line in process.stdout:
            if line.split()[2:] == wanted:
                return int(line.split()[1])
        raise AssertionError(process.stderr.read())

    def ends(self, processes):
        """Check that these end well and alike; return who took part in each step, and the first step of each."""
        end_s = time.monotonic() + 60
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end_s or any(process.poll() for process in processes):  # the others may wait forever
                for process in processes:
                    process.send_signal(signal.SIGABRT)
            time.sleep(0.1)
        ends = ends_of(processes)
        statuses = [process.returncode for process in processes]
        assert statuses == [0] * len(processes), "\n".join(error for _, error in ends)
        last = [out.strip().splitlines()[-1].split(maxsplit=3) for out, _ in ends]
        assert len({(digest, history) for _, digest, _, history in last}) == 1, ends
        return eval(last[0][3]), [int(first) for _, _, first, _ in last], ends


@contextmanager
def jobs():
    """Yield a function that starts jobs; all of their processes end with the context."""
    started = []

    def start(*arguments, **named):
        started.append(Job(*arguments, **named))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            for process in job.started:
                process.kill()
                process.communicate()
