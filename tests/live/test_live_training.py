# SPDX-License-Identifier: Apache-2.0
"""Real training, watched while it runs: by ``dlcp train --live``, through a fall-back, and until its end."""

import http.client
import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client", reason="the live page takes the packages of the extra live")

from prometheus_client.parser import text_string_to_metric_families

from tests.torch.workers import WAYS, launch, values
from tests.train import forked
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.timeout(600)
REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import pathlib, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(500, 200), torch.nn.Linear(200, 10)))
    over = torch.zeros(1)
    while not over:
        if dist.get_rank() == 1:
            time.sleep(0.1)  # the slow rank, for the test to find
        model(torch.ones(4, 500)).square().mean().backward()
        over[0] = pathlib.Path(sys.argv[1]).exists()
        dist.all_reduce(over, dist.ReduceOp.MIN)
    dist.destroy_process_group()
"""


def ask(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def members(url):
    (session,) = json.loads(ask(f"{url}state"))["sessions"] or [{"members": []}]
    return session["members"]


def straggles(first, second):
    """Whether the first rank waits for the second at present: for long, and for longer than this one waits."""
    waits_s = first["present"]["waiting_s"].get("1", 0.0)
    return waits_s > max(0.05, sum(second["present"]["waiting_s"].values()))


def test_two_ranks_are_watched_while_they_train_and_are_seen_to_end(tmp_path):
    script, stop = tmp_path / "script.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    words = ["train", "--live", "0", "--nproc-per-node", "2", "--", script, stop]
    with forked.Launcher(words, **WAYS["memory"]) as training:
        told = until(lambda: re.search(r"http://127\.0\.0\.1:\d+/", training.errors.read_text()))
        url = told[0]
        assert b"<!doctype html>" in ask(url)
        until(lambda: [member["step"] > 5 for member in members(url)] == [True, True], training.errors.read_text)
        until(lambda: all(member["present"]["steps"] > 5 for member in members(url)))
        first, second = members(url)
        assert [member["phase"] for member in (first, second)] == ["ready", "ready"]
        assert first["present"]["step_s"] > 0.08, "but for the first step, each waits for the straggler"
        until(lambda: straggles(*members(url)), "rank 0 waits for the straggler, who waits less")
        assert second["present"]["computing_s"] > 0.09
        assert [peer["rank"] for peer in first["peers"]] == [1]
        assert first["peers"][0]["local"]
        assert 0 < first["packets"]["delivered"] <= first["packets"]["sent"]
        layers = json.loads(ask(f"{url}state"))["sessions"][0]["layers"]
        assert [layer["names"] for layer in layers] == [["0"], ["1"]]
        samples = [
            each for family in text_string_to_metric_families(ask(f"{url}metrics").decode()) for each in family.samples
        ]
        counted = {each.labels["rank"]: each.value for each in samples if each.name == "dlcp_rank_step_seconds_count"}
        assert min(counted["0"], counted["1"]) > 5
        follower = http.client.HTTPConnection(url.split("/")[2], timeout=100)
        follower.request("GET", "/events")
        events = follower.getresponse()
        stop.touch()
        *_, last = (line for line in events if line.startswith(b"data: "))
        done = training.finish()
    assert done.returncode == 0, done.stderr
    state = json.loads(last[6:])
    assert state["over"]
    ended = state["sessions"][0]["members"]
    assert [(member["ended"], member["phase"], member["gave_up"]) for member in ended] == [(True, "ready", None)] * 2
    assert "over DLCP" in done.stderr


def fall_back(worker, folder):
    """Train, leave DLCP in the middle, and train on; return what its snapshot says before and after, and at the end."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch
    from dlcp.session import snapshots
    from dlcp.transport import TransportError

    def steps(count):
        for _ in range(count):
            model(torch.ones(4, 20)).square().mean().backward()

    def seen(condition):
        """Return a snapshot of which something holds, and which was begun after all this rank knows now."""
        path, now_s = Path(folder) / f"rank-{worker.rank}-0{snapshots.SNAPSHOT_SUFFIX}", time.time()

        def is_seen():
            found.append(json.loads(path.read_text()))
            return condition(found[-1]) and (found[-1]["ended"] or found[-1]["written_unix_s"] > now_s)

        found = []
        until(is_seen)
        return found[-1]

    os.environ["RANK"] = str(worker.rank)
    snapshots.EVERY_S = 0.05
    model = DistributedDataParallel(torch.nn.Linear(20, 10))
    state = dlcp.torch.enable(model, worker.options(live=folder))
    steps(10)
    # The last step's messages count once they are confirmed, which is after its averages are in.
    assert state.endpoint.flush(DEADLINE_S)
    before = seen(lambda snapshot: sum(snapshot["steps"]) == 9)
    dist.barrier()  # the other rank leaves with this one
    state.session.leave(TransportError("the test cuts the path <here>"))
    until(lambda: not state.active)
    until(lambda: state.session.phase.value == "fallback")
    steps(10)
    after = seen(lambda snapshot: sum(snapshot["steps"]) == 19 and snapshot["phase"] == "fallback")
    state.close()
    return before, after, seen(lambda snapshot: snapshot["ended"])


def test_after_a_fall_back_steps_go_on_to_be_counted_and_the_reason_is_told(tmp_path):
    for before, after, ended in values(launch(2, fall_back, str(tmp_path))):
        assert (before["phase"], before["reason"], list(before["peers"])) == ("ready", "", [str(1 - before["rank"])])
        assert not before["peers"][str(1 - before["rank"])]["local"], "through sockets"
        assert "the test cuts the path <here>" in after["reason"]
        assert after["fallback"] == "the framework's own all-reduce"
        assert after["peers"] == {}
        assert after["waiting_s"][""] > before["waiting_s"].get("", 0.0), "for whom, the framework does not tell"
        assert after["step"] == 19
        assert (ended["phase"], ended["ended"], ended["gave_up"]) == ("fallback", True, None)
        assert before["session"] == after["session"] != ""
        assert before["packets"] == after["packets"], "nothing goes over DLCP any more"


def unwatched(worker):
    """Train without the option; return the traces it leaves, which should be none."""
    import threading

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch

    model = DistributedDataParallel(torch.nn.Linear(20, 10))
    state = dlcp.torch.enable(model, worker.options())
    model(torch.ones(4, 20)).square().mean().backward()
    threads = {thread.name for thread in threading.enumerate()}
    found = threads & {"dlcp-snapshots"}, state.endpoint.connection.on_message, "dlcp.session.snapshots" in sys.modules
    state.close()
    return found


def test_where_it_is_off_nothing_of_it_is_there():
    assert values(launch(2, unwatched)) == [(set(), None, False)] * 2
