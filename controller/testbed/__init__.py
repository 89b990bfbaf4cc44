# SPDX-License-Identifier: Apache-2.0
"""A testbed on one machine: Mininet's hosts and links, with BMv2 or the built-in switch between them. It takes root."""

import time
from collections.abc import Callable
from typing import Final

_POLL_S: Final = 0.05


class TestbedError(RuntimeError):
    """Something of the testbed could not be made, reached or removed; the message says what, and what to do."""

    __test__ = False  # pytest takes what begins with Test for tests


def came_true(condition: Callable[[], object], deadline_s: float) -> bool:
    """Wait until ``condition()`` is true; return whether that was within ``deadline_s``."""
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(_POLL_S)
    return True
