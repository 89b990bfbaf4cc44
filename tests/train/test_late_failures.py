# SPDX-License-Identifier: Apache-2.0
"""Unwritable results are found before training begins; after it, they are a warning."""

import errno
import json
import os
from pathlib import Path

import pytest

from dlcp.train import worker
from dlcp.train.launcher import WorkerTask, read_reports
from tests.train import forked

SCRIPT = """
import json, os, shutil, sys
reports = json.loads(os.environ["DLCP_TRAIN_TASK"])["reports"]
what, path, status = sys.argv[1:]
if what == "no reports":
    shutil.rmtree(reports)
elif what == "half a report":
    open(os.path.join(reports, "7.json"), "w").write('{"rank": ')
elif what == "no summary":
    os.mkdir(path)
print("trained", flush=True)
sys.exit(int(status))
"""


@pytest.fixture
def train(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(what, status, *options, path=""):
        return forked.run(["train", *options, "--nproc-per-node", "1", "--", script, what, path, status])

    return run


@pytest.mark.parametrize("what", ["no reports", "half a report"])
def test_reports_that_cannot_be_written_or_read_are_a_warning(train, what):
    done = train(what, 0)
    assert done.returncode == 0, done.stderr
    assert "dlcp: warning: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_summary_that_cannot_be_written_keeps_the_status_of_training(train, tmp_path):
    path = tmp_path / "summary.json"
    done = train("no summary", 0, "--summary", str(path), path=path)
    assert done.returncode == 0, done.stderr
    assert f"dlcp train: warning: {path} was not written: Is a directory" in done.stderr
    full = train("nothing", 3, "--summary", "/dev/full")
    assert full.returncode == 3, full.stderr
    assert "warning: /dev/full was not written: No space left on device" in full.stderr


@pytest.mark.parametrize("option", ["--summary", "--trace"])
def test_a_path_that_cannot_be_written_is_found_before_training_begins(train, tmp_path, option):
    for path in (tmp_path, tmp_path / "nowhere" / "file", Path("/proc/nothing")):
        done = train("nothing", 0, option, str(path))
        assert done.returncode == 2, done.stderr
        assert "trained" not in done.stdout
        assert f"dlcp train: {option}: " in done.stderr


def test_no_room_for_temporary_files_is_found_before_training_begins(train, monkeypatch, tmp_path):
    from dlcp.train import launcher

    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(launcher.tempfile, "TemporaryDirectory", full)
    with pytest.raises(launcher.UsageError, match=r"No space left on device; set TMPDIR"):
        launcher.temporary_folder("dlcp-")


def test_a_disk_that_fills_while_a_rank_reports_leaves_no_report_and_no_error(monkeypatch, tmp_path, capsys):
    written = Path.write_text

    def full(path, text, *arguments, **named):
        if json.loads(text)["final"]:  # the note before was written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(path, text, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    with worker.ScriptSession(WorkerTask(reports=str(tmp_path))):
        assert len(read_reports(tmp_path)) == 1
    assert read_reports(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert "warning: rank 0 cannot write its report: [Errno 28]" in capsys.readouterr().err
