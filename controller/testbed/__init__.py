# SPDX-License-Identifier: Apache-2.0
"""A testbed on one machine: Mininet's hosts and links, with BMv2 or the built-in switch between them. Needs root."""

import time
from collections.abc import Callable
from typing import Final

_POLL_S: Final = 0.05


class TestbedError(RuntimeError):
    """A part of the testbed could not be created, reached or removed; the message names it and says what to do."""

    __test__ = False  # otherwise pytest would collect it because of its name


def came_true(condition: Callable[[], object], deadline_s: float) -> bool:
    """Wait up to ``deadline_s`` seconds for ``condition()`` to be true; return whether it was."""
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(_POLL_S)
    return True
