# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job in a ring over a network in virtual time."""

from dlcp.collectives.message_numbers import RING_RANGE
from dlcp.collectives.ring import RingAllReduce
from tests.collectives.virtual_ranks import Ranks


class RingRanks(Ranks):
    """Ranks in a ring, in the order ``order``."""

    def __init__(self, count, *, order=None, tells_rates=False, **fields):
        super().__init__(count, **fields)
        self.reducers = [
            RingAllReduce(reducer.context, order=order, tells_rates=tells_rates) for reducer in self.reducers
        ]

    def records(self):
        """All messages in the ledgers, as (rank that sent, phase, hop, record)."""
        self.network.run(lambda: all(protocol.settled for protocol in self.network.ranks))
        return [
            (rank, *divmod((record.message - RING_RANGE.first) % (2 * self.count), self.count), record)
            for rank, ledger in enumerate(self.ledgers)
            for record in ledger.records
        ]
