# SPDX-License-Identifier: Apache-2.0
"""How a process comes to its group: by the environment that a launcher has set, and the store that rank 0 serves."""

import os
from collections import Counter
from typing import Final

from dlcp.session.channel import ended_key
from dlcp.session.group import Group
from dlcp.session.options import Options
from dlcp.session.store import Store, serve
from dlcp.transport import Address

DEFAULT_PORT: Final = 29500
"""What PyTorch's launcher takes, too."""
_joined: Counter[tuple[Address, int]] = Counter()
"""How many groups this process has joined, by store and rank: the ranks join them in the same order."""


def join(
    options: Options | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    master: str | None = None,
) -> Group:
    """Join the other ranks of this job; all must call it, and as often as each other.

    Parameters
    ----------
    options
        By default :meth:`Options.from_environment`.
    rank, size
        This rank and how many there are; by default ``RANK`` and ``WORLD_SIZE``, and without either a group of one.
    master
        ``host:port`` where rank 0 serves the store that ranks meet by; by default ``MASTER_ADDR:MASTER_PORT``.

    Raises
    ------
    ValueError
        Ranks are not known, or not in 0..size-1.
    OSError, StoreError
        Rank 0 cannot serve the store, or is not reached.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. Otherwise gradients go over the store: slowly.
    """
    options = options or Options.from_environment()
    rank, size = _who(rank, size)
    if size == 1:
        return Group(options, 0, 1, None)
    host, _, port = (master or _master()).rpartition(":")
    address = host, int(port)
    if rank == 0:
        serve(address)
    number = _joined[address, rank]
    _joined[address, rank] += 1
    store = Store(address, options.meet_s).under(f"dlcp/{number}")
    try:
        store.leave(ended_key(rank), "its process or its connection is gone")
        group = Group(options, rank, size, store)
        group.meet(host)
    except BaseException:
        store.close()
        raise
    return group


def _who(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size as given, or as the environment has them."""
    found: dict[str, int] = {}
    for what, given, variable in (("rank", rank, "RANK"), ("size", size, "WORLD_SIZE")):
        text = os.environ.get(variable)
        if given is not None:
            found[what] = given
        elif text is not None:
            try:
                found[what] = int(text)
            except ValueError:
                raise ValueError(f"{variable} must be a number, got {text!r}") from None
    if not found:
        return 0, 1
    for what in ("rank", "size"):
        if what not in found:
            raise ValueError(f"the {what} is not known: set RANK and WORLD_SIZE, or start with `dlcp launch`")
    if not 0 <= found["rank"] < found["size"]:
        raise ValueError(f"the rank must lie in 0..{found['size'] - 1}, got {found['rank']}")
    return found["rank"], found["size"]


def _master() -> str:
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', DEFAULT_PORT)}"
