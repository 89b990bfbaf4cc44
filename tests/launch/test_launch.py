# SPDX-License-Identifier: Apache-2.0
"""``dlcp launch``: every process knows its place, one that fails ends all, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys

import pytest

from dlcp.cli import main
from dlcp.host.processes import Attempts, JobLayout, Processes
from dlcp.inputs.addresses import format_address
from tests.families import both_families
from tests.transport.free_ports import free_port
from tests.waiting import gone, until

LIMIT_S = 40
TELL = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump([os.environ[name] for name in names] + sys.argv[2:], file)
"""
LIVE = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".part"), "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(file.name, os.path.join(sys.argv[1], os.environ["RANK"]))
if os.environ["RANK"] == sys.argv[2]:
    while len([name for name in os.listdir(sys.argv[1]) if name.isdecimal()]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    sys.exit(7)
signal.pause()
"""


def launch(*words, **how):
    return subprocess.Popen([sys.executable, "-m", "dlcp.cli", "launch", *map(str, words)], **how)


def told(folder, ranks):
    return [json.loads((folder / str(rank)).read_text()) for rank in ranks]


def test_every_process_knows_its_place(tmp_path):
    job = launch("-n", 3, "--", sys.executable, "-c", TELL, tmp_path, "--its", "-n", "own")
    assert job.wait(LIMIT_S) == 0
    found = told(tmp_path, range(3))
    ports = {place[5] for place in found}
    assert len(ports) == 1
    for rank, place in enumerate(found):
        assert place == [str(rank), str(rank), "3", "3", "127.0.0.1", *ports, "--its", "-n", "own"]


def test_several_machines_divide_the_ranks(tmp_path):
    place = ["-n", 2, "--nodes", 2, "--master", "10.1.2.3:777"]
    for node in range(2):
        job = launch(*place, "--node", node, "--", sys.executable, "-c", TELL, tmp_path)
        assert job.wait(LIMIT_S) == 0
    assert [(rank, local, size, host, port) for rank, local, size, _, host, port in told(tmp_path, range(4))] == [
        (str(rank), str(rank % 2), "4", "10.1.2.3", "777") for rank in range(4)
    ]


def pids(folder, count):
    until(lambda: len([name for name in os.listdir(folder) if name.isdecimal()]) >= count, "not all ranks began")
    return [int(pid) for rank in range(count) for pid in (folder / str(rank)).read_text().split()]


def test_one_that_fails_ends_all_with_what_they_started(tmp_path):
    job = launch("-n", 3, "--", sys.executable, "-c", LIVE, tmp_path, 1, stderr=subprocess.PIPE, text=True)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 7
    assert errors == "dlcp launch: rank 1 ended with status 7; ending the others\n"
    running = pids(tmp_path, 3)
    until(lambda: all(map(gone, running)), "a process is left behind")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all(tmp_path, number):
    job = launch("-n", 2, "--", sys.executable, "-c", LIVE, tmp_path, -1)
    running = pids(tmp_path, 2)
    job.send_signal(number)
    assert job.wait(LIMIT_S) == 128 + number
    until(lambda: all(map(gone, running)), "a process is left behind")


def test_a_signal_that_comes_between_two_processes_ends_both(monkeypatch):
    start = subprocess.Popen

    def interrupted(*words, **how):
        child = start(*words, **how)
        os.kill(os.getpid(), signal.SIGINT)
        return child

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    before = signal.getsignal(signal.SIGINT)
    with Processes(JobLayout.local(2), command, os.environ) as processes:
        started = [child.pid for child in processes._children.values()]
        assert processes.run() == 128 + signal.SIGINT
    assert all(map(gone, started))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_killed_process_is_told(tmp_path):
    job = launch("-n", 2, "--", sys.executable, "-c", LIVE, tmp_path, -1, stderr=subprocess.PIPE, text=True)
    os.kill(pids(tmp_path, 2)[2], signal.SIGKILL)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in errors


ONCE = """
import os, pathlib, sys, time
mark = pathlib.Path(sys.argv[1], os.environ["RANK"])
if os.environ["RANK"] == "1":
    if not mark.exists():
        mark.touch()
        sys.exit(7)
    pathlib.Path(sys.argv[1], "again").touch()
    time.sleep(60)
while not pathlib.Path(sys.argv[1], "again").exists():
    time.sleep(0.05)
"""


def test_a_process_that_fails_starts_again_while_others_run(tmp_path):
    words = ["-n", "2", "--elastic", "1", "--restart", "--", sys.executable, "-c", ONCE, tmp_path]
    with launch(*words, stderr=subprocess.PIPE, text=True) as job:
        until((tmp_path / "again").exists, "it did not start again")
        job.send_signal(signal.SIGTERM)
        assert job.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert "rank 1 ended with status 7; the others may go on; it starts again in 1 s" in job.stderr.read()


LEAVE = """
import os, pathlib, signal, sys
def leave(*_):
    sys.exit(128 + signal.SIGUSR1)
signal.signal(signal.SIGUSR1, leave)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    signal.pause()
"""


LEAVES_EARLY = """
import time
import numpy as np
import dlcp.session
with dlcp.session.join(dlcp.session.Options(deadline_s=30)) as group:
    group.register(["weights"])
    while group.step < (5 if group.rank == 0 else 40):
        group.average({"weights": np.ones(9, np.float32)})
        time.sleep(0.05)
"""


@both_families
def test_the_first_machine_serves_the_store_until_the_ranks_of_others_have_left(family):
    master = format_address((family.loopback, free_port()))
    place = ["-n", 1, "--nodes", 2, "--master", master, "--elastic", 1]
    ends = []
    machines = [
        launch(*place, "--node", node, "--", sys.executable, "-c", LEAVES_EARLY, stderr=subprocess.PIPE, text=True)
        for node in range(2)
    ]
    for machine in machines:
        _, error = machine.communicate(timeout=LIMIT_S)
        ends.append((machine.returncode, "Traceback" in error))
    assert ends == 2 * [(0, False)]


def test_a_notice_of_preemption_reaches_all_processes_of_an_elastic_job(tmp_path):
    words = ["-n", "2", "--elastic", "1", "--restart", "--", sys.executable, "-c", LEAVE, tmp_path]
    with launch(*words, stderr=subprocess.PIPE, text=True) as job:
        until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        job.send_signal(signal.SIGUSR1)
        assert job.wait(LIMIT_S) == 128 + signal.SIGUSR1
        assert "starts again" not in job.stderr.read()


FAILS_AT_EACH_START = """
import os, pathlib, sys, time
starts = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    starts.open("a").write(".")
    sys.exit(3)
while not starts.exists() or len(starts.read_text()) < int(sys.argv[2]):
    time.sleep(0.01)
time.sleep(2)  # the launcher sees the end of the last start, too
"""


JOB = """
import os, sys
from dlcp.host.processes import Attempts, JobLayout, Processes
Attempts.WAIT_S = 0.01
with Processes(JobLayout.local(2), sys.argv[1:], os.environ, elastic=True, restart=True) as job:
    assert job.run() == 0
    assert job._attempts[1].wait_s() is None
"""


def test_a_process_that_fails_at_each_start_is_given_up(tmp_path):
    command = [sys.executable, "-c", FAILS_AT_EACH_START, str(tmp_path / "starts"), str(Attempts.MOST)]
    # In a process of its own: forks of one where gRPC has run for other tests may abort before they start anything.
    subprocess.run([sys.executable, "-c", JOB, *command], timeout=LIMIT_S, check=True)
    assert len((tmp_path / "starts").read_text()) == Attempts.MOST


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no command: dlcp launch -n 4 python script.py"),
        (["--", "no-such-program"], "there is no program no-such-program"),
        (["--nodes", "2", "--", "true"], "several machines need --master"),
        (["--node", "1", "--", "true"], r"--node must lie in 0..0, got 1"),
        (["--master", "here", "--", "true"], "--master: expected host:port, got 'here', which has no port"),
        (["--restart", "--", "true"], "--restart needs --elastic"),
    ],
)
def test_what_makes_no_sense_is_refused(words, problem, capsys):
    assert main(["launch", "-n", "2", *words]) == 2
    assert problem in capsys.readouterr().err
