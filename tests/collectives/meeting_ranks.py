# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads that can gather and add, as over a working process group."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

LIMIT_S = 20


class Channel:
    """One rank's end of a channel between threads."""

    def __init__(self, rank, table, barrier):
        self.rank, self.table, self.barrier = rank, table, barrier

    def gather(self, item):
        self.table[self.rank] = item
        self.barrier.wait(LIMIT_S)
        told = dict(sorted(self.table.items()))
        self.barrier.wait(LIMIT_S)
        return told

    def add(self, values):
        parts = self.gather(values)
        total = np.zeros_like(values)
        for rank in sorted(parts):
            assert parts[rank].shape == values.shape
            total += parts[rank]
        return total


def together(count, function):
    """Run ``function(channel, rank)`` on every rank at once; return results by rank, or raise the first error."""
    table, barrier = {}, threading.Barrier(count)

    def one(rank):
        try:
            return function(Channel(rank, table, barrier), rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, rank) for rank in range(count)]
        errors = [future.exception(LIMIT_S) for future in futures]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
