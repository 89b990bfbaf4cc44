# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run tell one another."""

import json
import multiprocessing

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from dlcp.demo.worker import send_fact


class Version(str):
    """A version as PyTorch has it; a pickle of it takes PyTorch to read."""


def test_facts_are_plain_values_that_take_nothing_to_read():
    here, there = multiprocessing.Pipe()
    with here, there:
        send_fact(there, {"torch": Version("2.13"), "steps": [0.5]})
        fact = json.loads(here.recv_bytes())
    assert fact == {"torch": "2.13", "steps": [0.5]}
    assert type(fact["torch"]) is str
