# SPDX-License-Identifier: Apache-2.0
"""Tests wait for conditions, not for time."""

import asyncio
import time
from pathlib import Path

DEADLINE_S = 60.0
"""How long a test waits for what has to come. Only a test that fails waits so long, on a busy machine, too."""
_POLL_S = 0.005


def until(condition, what="what the test waits for did not come", deadline_s=DEADLINE_S):
    """Return what ``condition`` returns as soon as that is true; fail with ``what`` if it is not in time."""
    end_s = time.monotonic() + deadline_s
    asked_s = time.monotonic()
    while not (found := condition()):
        now_s = time.monotonic()
        assert now_s < end_s, what() if callable(what) else what
        time.sleep(max(_POLL_S, 4 * (now_s - asked_s)))  # what takes long to find out is asked less often
        asked_s = time.monotonic()
    return found


async def soon(condition, what="what the test waits for did not come", deadline_s=DEADLINE_S):
    """Do the same while other tasks go on."""
    end_s = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end_s, what() if callable(what) else what
        await asyncio.sleep(_POLL_S)
    return found


def gone(pid):
    """Return whether a process has ended; a zombie has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
