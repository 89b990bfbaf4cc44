# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a session: the value that everything between ranks is built from.

Ranks agree on it in :mod:`dlcp.session.joining`, the only place where a training session's is made. Endpoint, engine,
reducers, shards, weights and the exchange of reports are built from it, and are made anew for another epoch. What
belongs to the model outlives it: options, residual, ledger, and the table of buckets with the step in progress.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlcp.transport.messages import Address


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks of a session in one epoch, as one of them sees them.

    Parameters
    ----------
    rank
        This rank.
    peers
        The address of every other one that it exchanges messages with; empty until the ranks have joined.
    job, token
        Job number, and the session token that all of them share; packets without it are refused.
    ranks
        All ranks whose gradients are averaged, ascending, the same everywhere; by default this one and its peers.
    epoch
        How often the ranks of this session have changed.
    hosts
        The host of each rank. Ranks without one have a host of their own.
    server
        The parameter server's rank; None if there is none.
    """

    rank: int
    peers: Mapping[int, Address] = field(default_factory=dict)
    job: int = 0
    token: int = 0
    ranks: tuple[int, ...] = ()
    epoch: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict)
    server: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks or (self.rank, *self.peers))))
