# SPDX-License-Identifier: Apache-2.0
"""A group whose other rank is simulated by a function. For the logic of adapters, not for sockets."""

from concurrent.futures import Future

import numpy as np

from dlcp.session import Options


class MirrorGroup:
    """Rank 0 of two; the other's gradients are ``theirs(name, ours)``, and ``root_values`` what it broadcasts.

    ``steps`` has what was started in each step that is over, in order.
    """

    def __init__(self, theirs=lambda name, ours: ours, root_values=None, size=2):
        self.rank, self.size, self.ranks = 0, size, range(size)
        self.options = Options()
        self.names = None
        self.steps = []
        self.failure = None
        self._theirs = theirs
        self._root_values = root_values
        self._started = []

    def register(self, names):
        assert self.names is None, "a group takes the names of one model"
        assert len(set(names)) == len(names)
        self.names = list(names)

    def start(self, name, values):
        assert name in self.names
        assert name not in self._started
        assert values.flags.writeable
        if self.failure:
            raise self.failure
        self._started.append(name)
        values[...] = (values + self._theirs(name, values.copy())) / self.size
        done = Future()
        done.set_result(values)
        return done

    def end_step(self):
        self.steps.append(self._started)
        self._started = []

    def broadcast(self, values, root=0):
        assert values.flags.writeable
        if root == 1:
            values[...] = np.asarray(self._root_values(values))

    def close(self, reason=None):
        self.closed = True
