# SPDX-License-Identifier: Apache-2.0
"""The ranks of these tests."""

import os
import socket
import time


class Rank:
    def __init__(self, rank, word):
        if word == "fail at once":
            raise LookupError("no such thing")
        self.rank, self.word = rank, word

    def tell(self, more):
        return self.rank, self.word + more, os.getpid()

    def fail(self, rank):
        if self.rank == rank:
            raise ArithmeticError("cannot do this")

    def end(self, rank):
        if self.rank == rank:
            os._exit(7)

    def sleep(self, seconds):
        time.sleep(seconds)

    def interfaces(self):
        return [name for _, name in socket.if_nameindex()]
