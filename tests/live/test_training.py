# SPDX-License-Identifier: Apache-2.0
"""The state from all ranks' snapshots: the present, the past, silent ranks, and files that are no snapshots."""

import json

import pytest

pytest.importorskip("prometheus_client", reason="the live page takes the packages of the extra live")

from dlcp.live import ranks
from dlcp.live.ranks import PRESENT_SNAPSHOTS, HistoryPoint, Training
from dlcp.session.snapshots import RankSnapshot
from tests.live.snapshots import COUNTS, snapshot, write


class Clock:
    now_s = 50.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return 1.75e9 + self.now_s


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(ranks, "time", found)
    return found


def only_session(watched):
    (session,) = watched.document()["sessions"]
    return session


def test_ranks_are_shown_with_what_they_do_at_present(tmp_path):
    watched = Training([tmp_path])
    for steps in range(1, 3 * PRESENT_SNAPSHOTS):
        # The first steps were slow, which is not the present any more.
        late_s = 5.0 if steps > 1 else 2.5
        write(tmp_path, *(snapshot(rank, steps=steps, step_s=0.1 * steps + late_s) for rank in (1, 0)))
        assert watched.refresh()
    assert not watched.refresh(), "nothing is new"
    session = only_session(watched)
    assert (session["session"], session["ranks"]) == ("7-0123abcd", [0, 1])
    assert [member["rank"] for member in session["members"]] == [0, 1]
    first = session["members"][0]
    assert (first["phase"], first["step"], first["silent_s"], first["gave_up"]) == ("ready", steps, None, None)
    assert first["present"]["steps"] == PRESENT_SNAPSHOTS - 1
    assert first["present"]["step_s"] == pytest.approx(0.1)
    assert first["present"]["waiting_s"] == {"1": pytest.approx(0.018), "": pytest.approx(0.002)}
    assert first["present"]["computing_s"] == pytest.approx(0.08)
    counts = {name: 35 * count for name, count in COUNTS.items()}
    assert first["packets"] == {**counts, "encoded": 35 * 600}
    assert first["peers"] == [{**first["peers"][0], "rank": 1, "sent": 35000, "rate_bps": 8e7, "local": False}]


def test_layers_are_those_of_all_ranks_from_the_input_on(tmp_path):
    write(tmp_path, snapshot(0), snapshot(1, layers=[[255, [], 10, 1, 0], [128, ["blocks.0.mlp"], 100, 0, 60]]))
    watched = Training([tmp_path])
    watched.refresh()
    layers = only_session(watched)["layers"]
    assert [layer["position"] for layer in layers] == [0, 128, 255, 256]
    counts = {"packets": 3000, "lost": 400, "encoded": 1500}
    assert layers[0] == {"position": 0, "names": ["embedding"], **counts}
    assert (layers[1]["packets"], layers[1]["encoded"]) == (3100, 1560)
    assert layers[2]["names"] == []


def test_the_past_is_as_long_as_training_and_never_more_than_so_many_points(tmp_path, clock, monkeypatch):
    most = 12
    monkeypatch.setattr(ranks, "HISTORY_POINTS", most)
    watched = Training([tmp_path])
    rounds = 5 * most
    for steps in range(1, rounds):
        clock.now_s += 1
        write(tmp_path, *(snapshot(rank, steps=steps) for rank in (0, 1)))
        watched.refresh()
    history = [HistoryPoint(*point) for point in only_session(watched)["history"]]
    assert most / 2 <= len(history) <= most
    assert history[-1].time_s == rounds - 2
    assert [point.time_s for point in history] == sorted({point.time_s for point in history})
    for point in history:
        assert point.step_s == pytest.approx(0.1)
        assert (point.computing_least_s, point.computing_most_s) == (pytest.approx(0.08), pytest.approx(0.08))
        assert (point.lost, point.retransmitted) == pytest.approx((0.05, 0.03))
        assert point.encoded == pytest.approx(0.6)


def test_the_past_tells_who_computes_longest(tmp_path, clock):
    watched = Training([tmp_path])
    for steps in (1, 2):
        write(tmp_path, snapshot(0, steps=steps), snapshot(1, steps=steps, waiting_s={"0": 0.09 * steps}))
        watched.refresh()
    point = HistoryPoint(*only_session(watched)["history"][-1])
    assert (point.computing_least_s, point.computing_most_s) == (pytest.approx(0.01), pytest.approx(0.08))


def test_two_points_become_one():
    first, second = HistoryPoint(1, 2, 0.5, 1.5, 0.2, 0, 1), HistoryPoint(3, 4, 1, 1.25, 0.4, 0.1, 0)
    assert first.merged(second) == HistoryPoint(3, 3, 0.5, 1.5, pytest.approx(0.3), 0.05, 0.5)


def test_a_rank_that_writes_no_more_is_silent_unless_it_has_ended(tmp_path, clock):
    write(tmp_path, snapshot(0), snapshot(1, ended=True, gave_up="out of memory"))
    watched = Training([tmp_path])
    watched.refresh()
    assert [member["silent_s"] for member in only_session(watched)["members"]] == [None, None]
    clock.now_s += 60
    silent, ended = only_session(watched)["members"]
    assert (silent["silent_s"], ended["silent_s"], ended["gave_up"]) == (60, None, "out of memory")
    assert not watched.document()["over"]
    write(tmp_path, snapshot(0, ended=True))
    watched.refresh()
    assert watched.document()["over"], "all have said so"


def test_it_may_be_known_from_elsewhere_that_training_is_over(tmp_path):
    write(tmp_path, snapshot(0))
    watched = Training([tmp_path])
    watched.refresh()
    watched.over = True
    assert watched.document()["over"]
    assert only_session(watched)["members"][0]["silent_s"] is not None, "it was killed before it could say so"


def test_a_process_that_takes_another_s_place_begins_anew(tmp_path):
    watched = Training([tmp_path])
    write(tmp_path, snapshot(0, steps=1000))
    watched.refresh()
    write(tmp_path, snapshot(0, steps=3, began_unix_s=1.76e9))
    watched.refresh()
    session = only_session(watched)
    assert session["members"][0]["present"]["steps"] == 3
    assert all(point[1] == pytest.approx(0.1) for point in session["history"])


def test_sessions_are_kept_apart_the_latest_first(tmp_path):
    write(tmp_path, snapshot(0, session="a"), snapshot(1, session="b", began_unix_s=1.76e9))
    watched = Training([tmp_path])
    watched.refresh()
    assert [session["session"] for session in watched.document()["sessions"]] == ["b", "a"]


def test_ranks_that_join_are_with_those_that_have(tmp_path):
    write(tmp_path, snapshot(0, ranks=3), snapshot(1, ranks=3, session="", phase="joining"))
    watched = Training([tmp_path])
    watched.refresh()
    assert [member["phase"] for member in only_session(watched)["members"]] == ["ready", "joining"]
    write(tmp_path, snapshot(2, ranks=2, session=""))
    watched.refresh()
    assert [session["session"] for session in watched.document()["sessions"]] == ["7-0123abcd", ""], "of other ranks"


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", '{"rank": 0}', "\ud800"])
def test_what_is_no_snapshot_is_left_out_with_a_word(tmp_path, caplog, text):
    write(tmp_path, snapshot(0))
    (tmp_path / "rank-9-0.snapshot").write_text(text, errors="surrogatepass")
    watched = Training([tmp_path])
    watched.refresh()
    assert len(only_session(watched)["members"]) == 1
    assert caplog.text.count("rank-9-0.snapshot is left out") == 1
    watched.refresh()
    assert caplog.text.count("left out") == 1, "it is said once"


def test_a_snapshot_that_lacks_something_changes_nothing(tmp_path, caplog):
    assert set(snapshot()) == RankSnapshot.__required_keys__
    watched = Training([tmp_path])
    write(tmp_path, snapshot(0, steps=10))
    watched.refresh()
    incomplete = snapshot(0, steps=20)
    del incomplete["ranks"], incomplete["host"]
    write(tmp_path, incomplete)
    watched.refresh()
    assert only_session(watched)["members"][0]["step"] == 10
    assert "missing required field `ranks`" in caplog.text


def test_a_folder_may_come_later(tmp_path):
    watched = Training([tmp_path / "later"])
    assert not watched.refresh()
    assert watched.document()["sessions"] == []
    (tmp_path / "later").mkdir()
    write(tmp_path / "later", snapshot(0))
    assert watched.refresh()


ODD = [
    {"step_s": float("nan")},
    {"loss_bound": float("inf")},
    {"step": "many"},
    {"step": 1e300},
    {"began_unix_s": "today"},
    {"written_unix_s": None},
    {"steps": [1, 2]},
    {"steps": "1234567890123456789"},
    {"waiting_s": {"1": float("nan")}},
    {"waiting_s": {"1": "long"}},
    {"packets": {"1": {"sent": 1}}},
    {"packets": {"1": {**dict.fromkeys(COUNTS, 0), "lost": "some"}}},
    {"layers": [[0, "conv", 1, 0, 0, 0]]},
    {"layers": [[0, ["conv"], float("nan"), 0, 0, 0]]},
    {"layers": [{}]},
    {"by_bits": {"eight": [1, 0]}},
    {"by_bits": {"8": [1]}},
    {"peers": {"x": {"local": True}}},
    {"peers": {"1": {"local": False}}},
    {"peers": {"1": {"local": "yes"}}},
    {"peers": {"1": {"local": True, "rtt_s": float("-inf")}}},
    {"ranks": {"0": 1}},
    {"rank": True},
    {"every_s": "1"},
    {"ended": 1},
    {"host": 5},
    {"worst_loss": 10**400},
]


@pytest.mark.parametrize("change", ODD, ids=lambda change: str(change)[:40])
def test_one_odd_snapshot_is_refused_and_shown_and_the_others_go_on(tmp_path, clock, change):
    watched = Training([tmp_path])
    for steps in (1, 2):
        write(tmp_path, snapshot(0, steps=steps), snapshot(1, steps=steps))
        watched.refresh()
    write(tmp_path, snapshot(0, steps=3), {**snapshot(1, steps=3), **change})
    clock.now_s += 1
    assert watched.refresh()
    document = watched.document()
    json.dumps(document, allow_nan=False)
    assert document["refused"] == ["rank-1-0.snapshot"]
    (session,) = document["sessions"]
    assert [member["step"] for member in session["members"]] == [3, 2], "of the odd one what it said before"
    write(tmp_path, snapshot(1, steps=4))
    watched.refresh()
    assert watched.document()["refused"] == []
    assert only_session(watched)["members"][1]["step"] == 4
