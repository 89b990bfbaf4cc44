# SPDX-License-Identifier: Apache-2.0
"""Packet loops without packets."""

from collections import deque
from concurrent.futures import Future


class Loop:
    """Runs functions at once, one after the other, and counts them."""

    def __init__(self):
        self.calls, self.programs = 0, []
        self._waiting = deque()

    def call(self, function):
        self.calls += 1
        future = Future()
        self._waiting.append((function, future))
        if len(self._waiting) == 1:
            while self._waiting:
                function, answer = self._waiting[0]
                answer.set_result(function())
                self._waiting.popleft()
        return future

    def replace(self, program):
        self.programs.append(program)


class DeadLoop(Loop):
    """Never gets to anything."""

    def call(self, function):
        self.calls += 1
        return Future()
