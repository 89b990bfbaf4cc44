# SPDX-License-Identifier: Apache-2.0
"""A spine or a link dies or loses packets while ranks train over it.

Nothing ends, nothing is lost beyond the bound, and routes avoid what is bad until it is good again.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

pytest.importorskip("finsy", reason="switches are programmed over P4Runtime: pip install dlcp[fabric]")

from dlcp.controller.compiled_program import CompiledProgram
from dlcp.controller.fabric import leaf_spine
from dlcp.controller.testbed.faults import break_links, break_switch, change_links, mend_links, mend_switch
from dlcp.controller.testbed.lifecycle import fabric_of, up
from dlcp.controller.watch import Watcher
from dlcp.switch import PortQueueing
from tests.waiting import until

FABRIC = leaf_spine(2, 2, 2, queueing=PortQueueing(rate_bps=20_000_000))
BACK_S = 2.0
"""Longest pause in which no step may end once the spine is down."""
FOUND_S = 10.0
"""Longest time until routes avoid a bad link."""
RANK = """
import os, sys, time
import numpy as np
import dlcp.session
with dlcp.session.join(dlcp.session.Options(loss_bound=0.1, deadline_s=60, route="dlcp")) as group:
    group.register(["weights", "stop"])
    stop = np.zeros(1, np.float32)
    while not stop[0]:  # of all ranks, so that all end after the same step
        values = np.full(20_000, group.rank + 1, np.float32)
        stop[0] = os.path.exists(sys.argv[1])
        group.average({"weights": values, "stop": stop})
        assert (values == 2.5).all()
        if group.rank == 0:
            print(time.monotonic(), flush=True)
"""


class Ranks:
    """A process in each host's network that averages again and again, until ``end``."""

    def __init__(self, name, fabric, folder):
        self._stop, self._log = folder / "stop", folder / "steps"
        shell = [sys.executable, "-m", "dlcp.cli", "testbed", "shell", "--name", name]
        self._processes = []
        for rank, host in enumerate(fabric.hosts):
            settings = {"RANK": rank, "WORLD_SIZE": len(fabric.hosts), "LOCAL_RANK": 0}
            settings |= {"MASTER_ADDR": fabric.hosts[0].address, "MASTER_PORT": 29500}
            settings |= {"DLCP_SECRET": "of this test only, and long enough"}
            words = [f"{name}={value}" for name, value in settings.items()]
            command = [*shell, host.name, "env", *words, sys.executable, "-c", RANK, str(self._stop)]
            output = self._log if rank == 0 else os.devnull
            with open(output, "w") as out:
                self._processes.append(subprocess.Popen(command, stdout=out))

    @property
    def ends_s(self):
        """When each step ended, on CLOCK_MONOTONIC."""
        return [float(line) for line in self._log.read_text().splitlines()]

    def end(self):
        self._stop.touch()
        return [process.wait(60) for process in self._processes]


@contextlib.contextmanager
def training(name, folder):
    """Bring a testbed up whose routes are watched; yield its state and the ranks that train on it."""
    state = up(FABRIC, "builtin", name)
    fabric, loop = fabric_of(name), asyncio.new_event_loop()
    watching = loop.create_task(Watcher(fabric, CompiledProgram(), election_id=50).run())
    watcher = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([watching])))
    watcher.start()
    try:
        ranks = Ranks(name, fabric, folder)
        until(lambda: len(ranks.ends_s) > 20)
        yield state, ranks
        assert ranks.end() == 4 * [0]
    finally:
        loop.call_soon_threadsafe(watching.cancel)
        watcher.join()


@pytest.mark.timeout(200)
def test_training_goes_on_when_a_spine_dies(needs, name, tmp_path):
    needs("builtin")
    with training(name, tmp_path) as (state, ranks):
        break_switch(state, "spine1")
        broken_s = time.monotonic()
        until(lambda: ranks.ends_s[-1] > broken_s + 2 * BACK_S)
        mend_switch(state, "spine1")
        mended = len(ranks.ends_s)
        until(lambda: len(ranks.ends_s) > mended + 20)
    assert max(later - sooner for sooner, later in pairwise(ranks.ends_s)) < BACK_S


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["dead", "lossy"])
def test_routes_avoid_a_bad_link_until_it_is_good_again(needs, name, tmp_path, caplog, how):
    needs("builtin")
    caplog.set_level("INFO", "dlcp.fabric")

    def said(words):
        return any(words in record.getMessage() for record in caplog.records)

    with training(name, tmp_path) as (state, ranks):
        if how == "dead":
            break_links(state, ["leaf1", "spine1"])
        else:
            change_links(state, ["leaf1", "spine1"], loss=0.05)
        until(lambda: said("routes avoid leaf1:3, spine1:1"), deadline_s=FOUND_S)
        mend_links(state, ["leaf1", "spine1"])
        until(lambda: said("link leaf1:3 - spine1:1 is good again"))
        mended = len(ranks.ends_s)
        until(lambda: len(ranks.ends_s) > mended + 20)
    assert max(later - sooner for sooner, later in pairwise(ranks.ends_s)) < FOUND_S
