# SPDX-License-Identifier: Apache-2.0
"""A rank that comes back, or comes later, gets the state at a step's beginning and from then on equals the others."""

import pytest

from dlcp.session import Options
from dlcp.session.secret import job_secret
from dlcp.session.store import serve
from tests.group.elastic_jobs import TRAINING
from tests.group.group_ranks import ends_of
from tests.transport.free_ports import free_port


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


def test_a_rank_that_came_later_goes_on_without_those_of_the_beginning(start):
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


def test_a_rank_that_comes_to_others_without_dlcp_is_told_so(start):
    alone = """
from dlcp.session import joining, training_session

def join(*_, **__):
    raise joining.NotJoinedError("no packets get through")

training_session.join = join
with"""
    fallen_back = TRAINING.replace("\nwith", alone, 1)
    job = start(2, [], codes={0: fallen_back, 1: fallen_back}, DLCP_MEET_S=3)
    job.wait_for(job.processes[0], ["0", "1"])
    (_, error), *_ = ends_of([job.start(1)])
    assert "rank 2 cannot join ranks [0, 1], which train without DLCP: no packets get through" in error


def test_ranks_of_which_one_dies_before_it_has_joined_train_without_it(start):
    dying = TRAINING.replace("    group.register(", "    os.kill(os.getpid(), 9)\n    group.register(")
    job = start(3, [0, 1], codes={2: dying})
    job.ends(job.processes[:2])
