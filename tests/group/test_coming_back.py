# SPDX-License-Identifier: Apache-2.0
"""A rank that comes back, or comes later, gets the state at a step's beginning and from then on equals the others."""

import signal
import time

import pytest

from dlcp.session import Options
from dlcp.session.secret import job_secret
from dlcp.session.store import serve
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


@pytest.fixture
def start():
    """Return a function that starts jobs; all of their processes end with the test."""
    jobs = []

    def one(*arguments, **named):
        jobs.append(Job(*arguments, **named))
        return jobs[-1]

    yield one
    for each in jobs:
        for process in each.started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "variables",
    [{}, {"DLCP_SHARED_MEMORY": "0"}, {"DLCP_COLLECTIVE": "ring", "DLCP_PRECISION": "auto", "DLCP_SHARED_MEMORY": "0"}],
    ids=lambda variables: "-".join(variables.values()),
)
def test_a_killed_rank_comes_back(start, variables):
    job = start(3, [0, 2, 3], **variables)
    job.wait_for(job.processes[0], ["0", "1", "2"])
    job.processes[1].kill()
    job.wait_for(job.processes[0], ["0", "2"])
    back = job.start(1)
    history, firsts, _ = job.ends([job.processes[0], job.processes[2], back])
    assert firsts[:2] == [0, 0]
    assert history[firsts[2] - 1 :] == [[0, 2], *20 * [[0, 2, 3]]]


@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_a_rank_that_is_left_alone_lets_another_in(start, collective):
    job = start(2, [0, 2], DLCP_COLLECTIVE=collective, DLCP_PRECISION="auto", DLCP_SHARED_MEMORY="0")
    job.wait_for(job.processes[0], ["0", "1"])
    job.processes[1].kill()
    job.wait_for(job.processes[0], ["0"])
    job.ends([job.processes[0], job.start(1)])


def test_rank_0_ends_once_another_serves_the_state(start):
    job = start(3, [0, 3])
    job.wait_for(job.processes[0], ["0", "1", "2"])
    extra = job.start(7)
    job.wait_for(job.processes[0], ["0", "1", "2", "3"])
    job.processes[1].kill()
    job.processes[2].kill()
    job.ends([job.processes[0], extra])


def test_several_come_at_once(start):
    job = start(2, [0, 1, 2, 3])
    job.wait_for(job.processes[0], ["0", "1"])
    job.ends([*job.processes, job.start(2), job.start(3)])


def test_a_rank_that_does_not_fit_is_told_why(start):
    job = start(2, [])
    job.wait_for(job.processes[0], ["0", "1"])
    (_, error), *_ = ends_of([job.start(1, TRAINING.replace(", load=load", ""))])
    assert "give register() functions to save and load" in error
    job.variables["DLCP_PRECISION"] = 16
    (_, error), *_ = ends_of([job.start(1)])
    assert "rank 0 has precision='32' and rank 3 precision='16'; give all ranks the same" in error
    job.variables["DLCP_PRECISION"] = 32
    (_, error), *_ = ends_of([job.start(1, TRAINING.replace("list(model)", "list(model)[1:]"))])
    assert "parameter 0 is back on rank 4 and front on rank 0" in error


def test_a_rank_that_ends_while_it_gets_the_state_costs_the_others_nothing(start):
    job = start(2, [0, 1, 3])
    job.wait_for(job.processes[0], ["0", "1"])
    dying = TRAINING.replace("def load(data):", "def load(data):\n    os.kill(os.getpid(), 9)")
    unlucky = job.start(2, dying)
    unlucky.communicate()
    job.ends([*job.processes, job.start(2)])


def test_a_rank_that_comes_too_late_is_told_so(start):
    port = free_port()
    server = serve(("127.0.0.1", port), job_secret(Options()))
    job = start(2, [0, 1], port=port, DLCP_IN_LAUNCHERS_STORE=1)
    job.ends(job.processes)
    (_, error), *_ = ends_of([job.start(1)])
    server.close()
    assert "rank 2 comes too late: ranks [0, 1] have ended" in error


def test_ranks_of_which_one_dies_before_it_has_joined_train_without_it(start):
    dying = TRAINING.replace("    group.register(", "    os.kill(os.getpid(), 9)\n    group.register(")
    job = start(3, [0, 1], codes={2: dying})
    job.ends(job.processes[:2])
