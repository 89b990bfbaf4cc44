# SPDX-License-Identifier: Apache-2.0
"""A rank's snapshots: present while it joins, small however long it trains, and never a reason to fail."""

import json
import os
import threading

import pytest

from dlcp.collectives import Residual
from dlcp.session import Options, snapshots
from dlcp.session.averager import StepAverager
from dlcp.session.snapshots import SnapshotWriter
from dlcp.session.training_session import Fallback, SessionPhase, Situation, TrainingSession
from dlcp.transport import Delivery, LossBound, Membership, MessageKey
from dlcp.transport.ledger import Ledger
from dlcp.values.planes import PlaneLayout
from dlcp.values.tags import PacketTags, Tagger
from tests.waiting import until

np = pytest.importorskip("numpy")


@pytest.fixture
def session():
    options = Options()
    parts = {"ledger": Ledger(), "feedback": Residual(), "tagger": Tagger(options.tag_policy)}
    return TrainingSession(StepAverager(options, Membership(1, ranks=(0, 1, 2)), **parts), Fallback("nothing"))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(snapshots, "EVERY_S", 0.01)


def read(folder):
    (path,) = folder.glob("*.snapshot")
    return json.loads(path.read_text())


def enter(session, receiver, packets, lost, layout=None):
    """Enter a message that lost packets."""
    zeros = np.zeros(packets, np.uint8)
    tags = PacketTags(queue=zeros, drop_class=zeros, layer=zeros, protected=zeros.astype(bool))
    delivered = np.arange(packets) >= lost
    delivery = Delivery(delivered, packets + 2, 2, 0.01)
    session.averager.ledger.record(MessageKey(0, receiver), receiver, "fc", tags, LossBound(0.5), delivery, layout)


def test_it_tells_of_the_session_and_at_the_end_says_so(session, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    writer = SnapshotWriter.open(session, str(tmp_path / "made"))
    assert [path.name.rpartition("-")[0] for path in (tmp_path / "made").iterdir()] == ["rank-5"]
    found = read(tmp_path / "made")
    assert (found["rank"], found["ranks"], found["process_rank"], found["phase"]) == (1, [0, 1, 2], 5, "joining")
    assert (found["session"], found["ended"], found["packets"], found["layers"]) == ("", False, {}, [])
    enter(session, 0, 10, 1)
    enter(session, 2, 20, 0, PlaneLayout(9999, 8, 1440))
    session.label = "0-abc"
    until(lambda: read(tmp_path / "made")["session"] == "0-abc")
    writer.close("ready", "the test is over")
    found = read(tmp_path / "made")
    assert (found["ended"], found["phase"], found["gave_up"]) == (True, "ready", "the test is over")
    assert found["packets"]["0"] == {"sent": 12, "delivered": 9, "lost": 1, "retransmitted": 2}
    assert found["packets"]["2"]["delivered"] == 20
    assert found["layers"] == [[0, [], 30, 1, 20]]
    assert (found["bits"], found["by_bits"]) == (8, {"8": [20, 0], "32": [10, 1]})
    assert session.averager.ledger.summary()["sent"] == 34, "totals of a ledger are the sums over its receivers"
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".snapshot"]


def test_a_session_that_nobody_watches_has_no_thread_and_no_meter(session):
    assert session.table.meter is None
    assert not [thread for thread in threading.enumerate() if thread.name == "dlcp-snapshots"]


def test_a_folder_that_cannot_be_written_is_a_warning(session, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert SnapshotWriter.open(session, str(tmp_path / "file")) is None
    assert "rank 1 cannot be watched" in caplog.text


def test_a_folder_that_vanishes_is_a_warning_and_ends_the_thread_only(session, tmp_path, caplog):
    folder = tmp_path / "vanishing"
    writer = SnapshotWriter.open(session, str(folder))
    for path in folder.iterdir():
        until(lambda path=path: path.unlink() is None if path.exists() else True)
    while folder.exists():
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError:  # it has written another one
            continue
    until(lambda: "cannot be watched any more" in caplog.text)
    writer.close("ready", None)


def test_an_endpoint_that_does_not_answer_delays_nothing_but_the_snapshot(session, tmp_path, monkeypatch):
    class Stuck:
        connection = None

        def call(self, function):
            """Never run it."""

        def close(self, reason):
            """Called when the tests end."""

    monkeypatch.setattr(snapshots, "ASKING_S", 0.01)
    session.endpoint, session.situation = Stuck(), Situation(SessionPhase.READY)
    writer = SnapshotWriter.open(session, str(tmp_path))
    first = read(tmp_path)["written_unix_s"]
    until(lambda: read(tmp_path)["written_unix_s"] > first)
    assert read(tmp_path)["peers"] == {}
    writer.close("ready", None)


def test_a_script_that_does_not_close_its_session_is_seen_to_end(session, tmp_path):
    writer = SnapshotWriter.open(session, str(tmp_path))
    writer._at_exit()
    found = read(tmp_path)
    assert (found["ended"], found["phase"], found["gave_up"]) == (True, "joining", None)


def test_the_end_of_a_fork_is_not_the_rank_s(session, tmp_path, monkeypatch):
    writer = SnapshotWriter.open(session, str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        writer._exit._run()
    assert not read(tmp_path)["ended"]
    writer.close("ready", None)
