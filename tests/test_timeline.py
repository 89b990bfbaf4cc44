# SPDX-License-Identifier: Apache-2.0
"""A rank's timeline: what is noted is read again, while it grows too, and also if the process is killed."""

import os
import signal

import pytest

from dlcp import timeline
from dlcp.timeline import Timeline, TimelineReader
from tests import waiting


def test_notes_are_read_as_they_were_taken(tmp_path):
    notes = Timeline(tmp_path / "made", 1, 3)
    notes.note("joined", 0, 0, "a session")
    notes.note("ready", 7, 2, "fc1.weight, scaled..fc2\nbias")
    notes.note_message("sent", 7, 12, 0, (1.5, 2.25), 100, 3, 4, 20, 10**9, 700, "fc1, fc2")
    notes.note("applied", 7, 2)
    notes.close()
    notes.note("ready", 8, 0, "too late")
    reader = TimelineReader(notes.path)
    joined, ready, sent, applied = reader.read()
    assert (reader.about["rank"], reader.about["process_rank"], reader.about["process"]) == (1, 3, os.getpid())
    assert joined.values == {"session": "a session"}
    assert (ready.event, ready.step, ready.number) == ("ready", 7, 2)
    assert ready.values == {"layers": "fc1.weight, scaled..fc2 bias"}
    assert joined.time_ns <= ready.time_ns <= applied.time_ns
    assert (sent.time_ns, sent.values["began_ns"], sent.values["what"]) == (2_250_000_000, 1_500_000_000, "fc1, fc2")
    assert [sent.values[name] for name in ("peer", "packets", "lost", "retransmitted")] == [0, 100, 3, 4]
    assert [sent.values[name] for name in ("window", "rate_bps", "rtt_us")] == [20, 10**9, 700]


def test_a_file_is_followed_while_it_grows(tmp_path):
    with (tmp_path / "some.timeline").open("wb", buffering=0) as file:
        reader = TimelineReader(tmp_path / "some.timeline")
        assert list(reader.read()) == []
        file.write(b'{"rank":0}\n5,applied,1,')
        assert list(reader.read()) == []
        assert reader.about == {"rank": 0}
        file.write(b"2\n6,done,9,0\n")
        assert [(note.time_ns, note.step) for note in reader.read()] == [(5, 1), (6, 9)]
        assert list(reader.read()) == []


@pytest.mark.parametrize("line", [b"5,applied,1", b"5,invented,1,2", b"5,contributed,1,2", b"x,applied,1,2", b"\xff"])
def test_what_is_no_note_is_named_with_its_place(tmp_path, line):
    path = tmp_path / "some.timeline"
    path.write_bytes(b"{}\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"some\.timeline, byte 3: "):
        list(TimelineReader(path).read())


def test_a_killed_process_leaves_what_it_had_written(tmp_path):
    pid = os.fork()
    if pid == 0:
        try:
            notes = Timeline(tmp_path, 0, 0)
            notes.note("ready", 1, 0, "fc1")
            signal.pause()
        finally:
            os._exit(1)

    def written():
        return [note for path in tmp_path.iterdir() for note in TimelineReader(path).read()]

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
    assert [note.step for note in TimelineReader(notes.path).read()] == list(range(100))
    assert "ends here" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert Timeline.open(str(tmp_path / "file"), 2) is None
    assert "rank 2 cannot write a timeline" in caplog.text
