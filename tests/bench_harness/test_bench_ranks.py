# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: they carry out commands, and no error makes one hang or stay behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.ranks import RankError, Ranks
from tests.bench_harness.bench_rank import Rank
from tests.waiting import gone, until

ROOT = Path(__file__).parents[2]


def test_all_ranks_do_what_they_are_told():
    with Ranks(Rank, ["one "], [None] * 3) as ranks:
        answers = ranks.call("tell", "two")
        assert [answer[:2] for answer in answers] == [(rank, "one two") for rank in range(3)]
        pids = {answer[2] for answer in answers}
        assert len(pids | {os.getpid()}) == 4
    until(lambda: all(map(gone, pids)), "a rank is left behind")


def test_what_goes_wrong_is_named():
    with pytest.raises(RankError, match=r"(?s)rank 0 failed in start:.*LookupError: no such thing"):
        Ranks(Rank, ["fail at once"], [None])
    with Ranks(Rank, [""], [None] * 2) as ranks:
        with pytest.raises(RankError, match=r"(?s)rank 1 failed in fail:.*ArithmeticError: cannot do this"):
            ranks.call("fail", 1)
        pids = [answer[2] for answer in ranks.call("tell", "still here")]
        with pytest.raises(RankError, match="rank 0 has not answered sleep within 0 s"):
            ranks.call("sleep", 60, deadline_s=0.2)
        began_s = time.monotonic()
        ranks.close()
        assert time.monotonic() - began_s < 30, "the rank that sleeps for 60 s is not waited for"
    until(lambda: all(map(gone, pids)), "a rank is left behind")
    with Ranks(Rank, [""], [None] * 2) as ranks, pytest.raises(RankError, match=r"rank 1 ended during end, .* 7"):
        ranks.call("end", 1)


CRASH = """
from tests.bench_harness.bench_rank import Rank
from tests.bench.ranks import Ranks
if __name__ == "__main__":
    ranks = Ranks(Rank, [""], [None] * 2)
    print(*(answer[2] for answer in ranks.call("tell", "")), flush=True)
    ranks.call("sleep", 100)
"""


def test_ranks_end_with_a_program_that_is_killed(tmp_path):
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as program:
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 2
        program.send_signal(signal.SIGKILL)
    until(lambda: all(map(gone, pids)), "a rank is left behind")
