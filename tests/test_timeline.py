# SPDX-License-Identifier: Apache-2.0
"""A rank's timeline: notes can be read again, also while it grows, and after the process is killed."""

import os
import signal

import pytest

from dlcp.host import timeline
from dlcp.host.timeline import RankTimeline, Timeline
from tests import waiting

ABOUT_FIELDS = b'{"rank":0,"process_rank":0,"host":"a","clock":"a","began_unix_ns":1,"began_ns":%s}'
ABOUT = ABOUT_FIELDS % b"1" + b"\n"


def notes_in(path):
    timeline = RankTimeline.of(path)
    return list(timeline.notes()) if timeline else []


def test_notes_are_read_as_they_were_taken(tmp_path):
    notes = Timeline(tmp_path / "made", 1, 3)
    notes.note("joined", 0, 0, "a session")
    notes.note("ready", 7, 2, 400, "fc1.weight, scaled..fc2\nbias")
    notes.note_message("sent", 7, 12, 0, (1.5, 2.25), 100, 3, 4, 20, 10**9, 700, "fc1, fc2")
    notes.note("applied", 7, 2)
    notes.close()
    notes.note("ready", 8, 0, 400, "too late")
    reader = RankTimeline.of(notes.path)
    joined, ready, sent, applied = reader.notes()
    assert reader.session == "a session"
    assert (reader.about["rank"], reader.about["process_rank"], reader.about["process"]) == (1, 3, os.getpid())
    assert joined.values == {"session": "a session"}
    assert (ready.event, ready.step, ready.number) == ("ready", 7, 2)
    assert ready.values == {"bytes": 400, "layers": "fc1.weight, scaled..fc2 bias"}
    assert joined.time_ns <= ready.time_ns <= applied.time_ns
    assert (sent.time_ns, sent.values["began_ns"], sent.values["what"]) == (2_250_000_000, 1_500_000_000, "fc1, fc2")
    assert [sent.values[name] for name in ("peer", "packets", "lost", "retransmitted")] == [0, 100, 3, 4]
    assert [sent.values[name] for name in ("window", "rate_bps", "rtt_us")] == [20, 10**9, 700]


def test_an_incomplete_line_is_left_out(tmp_path):
    path = tmp_path / "some.timeline"
    path.write_bytes(b'{"rank":0')
    assert RankTimeline.of(path) is None
    path.write_bytes(ABOUT + b"5,applied,1,2\n6,done,9,0")
    timeline = RankTimeline.of(path)
    assert timeline.about["rank"] == 0
    assert [(note.time_ns, note.step) for note in timeline.notes()] == [(5, 1)]


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"rank":"0"}', b"x", ABOUT_FIELDS % b"1e30", b"[" * 100_000])
def test_what_describes_no_rank_is_refused(tmp_path, line):
    path = tmp_path / "some.timeline"
    path.write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"some\.timeline, line 1 does not describe a rank: .*; remove the file"):
        RankTimeline.of(path)


@pytest.mark.parametrize("line", [b"5,applied,1", b"5,invented,1,2", b"5,contributed,1,2", b"x,applied,1,2", b"\xff"])
def test_what_is_no_note_is_named_with_its_place(tmp_path, line):
    path = tmp_path / "some.timeline"
    path.write_bytes(ABOUT + b"1,joined,0,0,a\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"some\.timeline, byte {len(ABOUT) + 15}: "):
        list(RankTimeline.of(path).notes())


def test_a_killed_process_leaves_what_it_had_written(tmp_path):
    pid = os.fork()
    if pid == 0:
        try:
            notes = Timeline(tmp_path, 0, 0)
            notes.note("ready", 1, 0, 400, "fc1")
            signal.pause()
        finally:
            os._exit(1)

    def written():
        return [note for path in tmp_path.iterdir() for note in notes_in(path)]

    try:
        waiting.until(written)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (note,) = written()
    assert (note.event, note.values["layers"]) == ("ready", "fc1")


def test_a_full_timeline_ends_with_a_warning_and_harms_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(timeline, "BYTES_MAX", 1000)
    notes = Timeline(tmp_path, 0, 0)
    for step in range(100):
        notes.note("applied", step, 0)
    waiting.until(lambda: notes.path.stat().st_size > 1000)
    notes.note("applied", 100, 0)
    notes.close()
    assert [note.step for note in notes_in(notes.path)] == list(range(100))
    assert "ends here" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert Timeline.open(str(tmp_path / "file"), 2) is None
    assert "rank 2 cannot write a timeline" in caplog.text
