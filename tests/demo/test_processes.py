# SPDX-License-Identifier: Apache-2.0
"""Communication among the processes of a run."""

import json
import multiprocessing
import os

import pytest

from dlcp.demo.run import command
from dlcp.host.processes import ReportingFork, send_fact

WAIT_S = 60


class Version(str):
    """A version as PyTorch has it; a pickle of it takes PyTorch to read."""


def work(channel, factor):
    send_fact(channel, {"ready": True})
    start_s = channel.recv()
    send_fact(channel, {"report": [factor * start_s, os.environ["DLCP_JOB"]]})


def fail(channel):
    send_fact(channel, {"ready": True})
    raise ValueError("out of paper")


def test_facts_are_plain_values_that_take_nothing_to_read():
    here, there = multiprocessing.Pipe()
    with here, there:
        send_fact(there, {"torch": Version("2.13"), "steps": [0.5]})
        fact = json.loads(here.recv_bytes())
    assert fact == {"torch": "2.13", "steps": [0.5]}
    assert type(fact["torch"]) is str


def test_a_process_is_ready_starts_and_reports():
    facts = []
    with ReportingFork("worker", work, [3], environment={"DLCP_JOB": "7"}, on_fact=facts.append) as process:
        assert process.ready.wait(WAIT_S), process.errors()
        process.start_at(2.0)
        assert process.finish(WAIT_S) == [6.0, "7"]
        assert process.status() == 0
    assert facts[0] == {"ready": True}


@pytest.mark.parametrize(
    ("function", "arguments", "status", "words"),
    [(fail, (), 1, "ValueError: out of paper"), (command, (["server"],), 2, "give --bind HOST:PORT")],
)
def test_what_goes_wrong_is_told(function, arguments, status, words):
    with ReportingFork("worker", function, arguments) as process:
        process.finish(WAIT_S)
        assert process.status() == status
        assert words in process.errors()
