# SPDX-License-Identifier: Apache-2.0
"""With ``elastic`` and a parameter server, any rank may end and come back, and the server may end, too."""

import signal

import pytest

from dlcp.session import Options
from dlcp.session.secret import job_secret
from dlcp.session.store import Store, serve
from tests.group.elastic_jobs import TRAINING
from tests.group.test_parameter_server import command
from tests.transport.free_ports import free_port


@pytest.fixture
def server():
    address = f"127.0.0.1:{free_port()}"
    with command(address) as process:
        process.address = address
        yield process
        process.kill()


def test_any_rank_may_end_and_come_back(start, server):
    port = free_port()
    store = serve(("127.0.0.1", port), job_secret(Options()))
    job = start(3, [2, 3, 4], port=port, DLCP_IN_LAUNCHERS_STORE=1, DLCP_COLLECTIVE=f"server:{server.address}")
    job.wait_for(job.processes[2], ["0", "1", "2"])
    job.processes[1].kill()
    job.wait_for(job.processes[2], ["0", "2"])
    first = job.start(1)
    job.wait_for(job.processes[2], ["0", "2", "3"])
    job.processes[0].kill()  # it has invited the server
    job.wait_for(job.processes[2], ["2", "3"])
    job.ends([job.processes[2], first, job.start(0)])
    view = Store(("127.0.0.1", port), 10, job_secret(Options()))
    assert [view.check([f"dlcp/0/epoch-{epoch}/place/2"]) for epoch in range(5)] == [False, True, True, True, True]
    view.close()
    store.close()
    server.terminate()
    said = server.communicate()[0]
    assert said.count("begins") == 5, said


def test_the_others_go_on_without_a_rank_that_leaves(start, server):
    leaving = TRAINING.replace(
        "        group.begin_step()",
        "        if group.step == 9:\n            group.close()\n            sys.exit()\n        group.begin_step()",
    )
    job = start(3, [0, 1], codes={2: leaving}, DLCP_COLLECTIVE=f"server:{server.address}")
    job.ends(job.processes[:2])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_ranks_go_on_without_the_server_and_let_others_in(start, server, how):
    job = start(2, [0, 1, 2], DLCP_COLLECTIVE=f"server:{server.address}", DLCP_SILENCE_S=3)
    job.wait_for(job.processes[0], ["0", "1"])
    server.send_signal(how)
    _, _, ends = job.ends([*job.processes, job.start(2)])
    assert "the parameter server is lost: " in ends[0][1]
    assert "From now on, ranks exchange directly" in ends[0][1]


def test_without_a_server_from_the_beginning_ranks_exchange_directly(start):
    job = start(2, [0, 1], DLCP_COLLECTIVE=f"server:127.0.0.1:{free_port()}", DLCP_MEET_S=3)
    _, _, ends = job.ends(job.processes)
    assert "the parameter server is lost: rank 0 has no parameter server: no answer from" in ends[0][1]
