# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed or hangs in mid-step: training goes on from its checkpoint over DLCP, or ends with its name."""

import json
import re
import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from tests.cluster.fail import HOST
from tests.cluster.nodes import ROOT
from tests.group.group_ranks import serving
from tests.train import forked
from tests.transport.free_ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.timeout(500)
SCRIPT = ROOT / "dlcp" / "examples" / "resumable.py"
LIMIT_S = 400


def command(folder, *torchrun, how=None, rank=1, step=25, steps=60, options=(), nproc=2):
    """The words of a training run whose rank fails, if ``how`` says so."""
    script = [SCRIPT, "--checkpoint", folder / "digits.pt", "--steps", steps, "--save-every", 10]
    fail = ["-m", "tests.cluster.fail", how, rank, step, folder] if how else []
    given = [word for option in (f"bind={HOST}:0", *options) for word in ("--option", option)]
    words = ["train", *given, "--summary", folder / "summary.json", "--nproc-per-node", nproc, *torchrun]
    return list(map(str, [*words, "--", *fail, *script]))


def run(words):
    done = forked.run(words, LIMIT_S)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a training in which one of two ranks was killed, and its outcome."""
    folder = tmp_path_factory.mktemp("killed")
    yield folder, run(command(folder, "--max-restarts", 1, how="kill", options=["shared_memory=1"]))
    shutil.rmtree(folder)  # which ends the ghost, too


def test_a_rank_is_killed_in_mid_step_and_training_goes_on_over_dlcp_from_the_checkpoint(killed):
    folder, (status, out, err) = killed
    assert status == 0, out + err
    assert re.findall(r"from step (\d+) on, 2 processes", out) == ["0", "20"]
    assert re.findall(r"step (\d+) of 60", out) == ["10", "20", "30", "40", "50", "60"]
    assert len((folder / "failed").read_text().split()) >= 2, "both ranks had sockets"
    assert (folder / "left-over").read_text() == "", "the sockets of the dead are gone"
    found = json.loads((folder / "summary.json").read_text())
    (model,) = found["models"]
    assert (found["restarts"], found["errors"], found["ranks_here"]) == (1, {}, [0, 1])
    assert (model["steps"], model["fallback"], model["bound_exceeded"]) == (40, None, 0), "of the last start"
    assert model["sent"] == model["delivered"] > 0
    assert model["through"] == "memory"
    assert model["refused"]["token"] > 0, "what the start before had on its way is refused, and counted"
    assert "restarted          once; this summary covers the last start" in err


def test_a_parameter_server_serves_the_next_start_too(tmp_path):
    lines = []
    with serving(lines.append) as server:
        options = [f"collective=server:{server.address[0]}:{server.address[1]}", "fallback=0"]
        status, out, err = run(command(tmp_path, "--max-restarts", 1, how="kill", options=options))
    assert status == 0, out + err
    (model,) = json.loads((tmp_path / "summary.json").read_text())["models"]
    assert (model["steps"], model["fallback"], model["bound_exceeded"]) == (40, None, 0), "of the last start"
    shutil.rmtree(tmp_path)  # which ends the ghost, too
    begun, ended, *again = lines
    assert begun == "job 0 with 2 workers begins"
    assert ended.startswith("job 0 with 2 workers has ended: ")
    assert again == ["job 0 with 2 workers begins", "job 0 with 2 workers has ended"]


def test_training_goes_on_with_another_number_of_ranks(killed, tmp_path):
    shutil.copy(killed[0] / "digits.pt", tmp_path)
    status, out, err = run(command(tmp_path, nproc=3, steps=100))
    assert status == 0, out + err
    assert "from step 60 on, 3 processes" in out
    (model,) = json.loads((tmp_path / "summary.json").read_text())["models"]
    assert (model["steps"], model["fallback"]) == (40, None)
    assert model["sent"] == model["delivered"] > 0
    assert re.search(r"1\d{3} of 1797 recognised", out), "it has learnt"


def test_a_node_is_lost_and_the_other_goes_on_alone(tmp_path):
    """Two agents of torchrun meet, as on two nodes; one is killed with its rank, and of three ranks two are left."""
    endpoint = f"127.0.0.1:{free_port()}"
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "a job", "--nnodes", "1:2"]
    # So the agents notice within seconds that one of them is gone; by default it takes them some more.
    soon = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    folders = [tmp_path / "staying", tmp_path / "lost"]
    words = []
    for folder, nproc, host in zip(folders, (2, 1), ("true", "false"), strict=True):
        folder.mkdir()
        conf = ["--max-restarts", 3, "--rdzv-conf", f"is_host={host},{soon}"]
        words.append(command(folder, *meet, *conf, nproc=nproc, steps=400))
    shared = f"{tmp_path}/digits.pt"
    words = [[shared if word.endswith("digits.pt") else word for word in each] for each in words]
    with forked.Launcher(words[0]) as staying:
        with forked.Launcher(words[1]) as lost:
            until((tmp_path / "digits.pt").exists, "no checkpoint", LIMIT_S)
            lost.kill()
        done = staying.finish(LIMIT_S)
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    begun = re.findall(r"from step (\d+) on, (\d) processes", out)
    assert begun[0] == ("0", "3")
    assert begun[-1][1] == "2"
    assert int(begun[-1][0]) >= 10, "from the checkpoint"
    found = json.loads((folders[0] / "summary.json").read_text())
    (model,) = found["models"]
    assert (found["ranks"], found["ranks_here"], model["fallback"]) == (2, [0, 1], None)
    assert found["restarts"] >= 1
    assert model["steps"] == 400 - int(begun[-1][0])


def test_a_rank_that_is_stopped_ends_the_run_with_its_name_within_the_deadline(tmp_path):
    options = ["silence_s=3", "deadline_s=6", "shared_memory=0"]
    status, _, err = run(command(tmp_path, how="stop", options=options))
    assert status != 0
    # A stopped process says nothing more, in no way.
    assert "rank 1 is silent" in err or "rank 1 has been silent" in err or "not there: rank 1" in err, err
    summary = tmp_path / "summary.json"
    assert set(json.loads(summary.read_text())["errors"]) == {"0", "1"}
    # Two deadlines, and the 30 s after which torchrun kills processes that ignore signals; the rest is for a busy
    # machine.
    assert summary.stat().st_mtime - (tmp_path / "failed").stat().st_mtime < 100


def test_a_rank_that_hangs_is_named_and_killed_and_training_goes_on(tmp_path):
    options = ["silence_s=3", "deadline_s=6", "shared_memory=0"]
    status, out, err = run(command(tmp_path, "--max-restarts", 1, how="sleep", options=options))
    assert status == 0, out + err
    assert re.findall(r"from step (\d+) on", out) == ["0", "20"]
    (model,) = json.loads((tmp_path / "summary.json").read_text())["models"]
    assert (model["steps"], model["fallback"], model["through"]) == (40, None, "sockets")
    assert "rank 1 answers but has not reached bucket" in err
    assert "DLCP: rank 1 hangs before bucket" in err
    assert "in hang_here" in err, "the stack of the one that hangs"
