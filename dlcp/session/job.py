# SPDX-License-Identifier: Apache-2.0
"""A process's place in its job: how it joins, and what scripts ask without handing a group around.

Rank, size and where rank 0 serves the store come from the environment that a launcher sets.
"""

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.session.group import Group
from dlcp.session.options import Options
from dlcp.session.secret import job_secret
from dlcp.session.store import Store, ended_key, serve
from dlcp.transport import Address

DEFAULT_MASTER_PORT: Final = 29500
"""What PyTorch's launcher takes, too."""
_joined: list[Group] = []
"""The group that :func:`init` has joined."""
_counts: Counter[tuple[Address, int]] = Counter()
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
        Rank 0 cannot serve the store, or is not reached; or this rank does not know the job's secret, see
        :func:`dlcp.session.secret.job_secret`.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. Otherwise gradients go over the store: slowly.
    """
    options = options or Options.from_environment()
    rank, size = _who(rank, size)
    if size == 1:
        return Group(options, 0, 1, None)
    host, _, port = (master or _master()).rpartition(":")
    address = host, int(port)
    secret = job_secret(options)
    if rank == 0:
        serve(address, secret, options.tls)
    number = _counts[address, rank]
    _counts[address, rank] += 1
    store = Store(address, options.meet_s, secret, options.tls).under(f"dlcp/{number}")
    try:
        store.leave(ended_key(rank), "its process or its connection is gone")
        group = Group(options, rank, size, store)
        group.join(host)
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
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', DEFAULT_MASTER_PORT)}"


# The group of this process, for frameworks whose users expect init() and rank() ---------------------------------------


def init(options: Options | None = None, **where: Any) -> Group:
    """Join the other ranks; call it once, before anything else here. See :func:`join`."""
    if _joined:
        raise RuntimeError("this process has joined its group already; call shutdown() before another init()")
    _joined.append(join(options, **where))
    return _joined[0]


def current() -> Group:
    """Return the group that :func:`init` has joined.

    Raises
    ------
    RuntimeError
        It has not been called.
    """
    if not _joined:
        raise RuntimeError(
            "this process has joined no group: call init() first, such as dlcp.tensorflow.init(), once in every process"
        )
    return _joined[0]


def shutdown(reason: str | None = None) -> None:
    """Leave the other ranks; with a ``reason``, tell them that this one gives up."""
    while _joined:
        _joined.pop().close(reason)


def rank() -> int:
    """Return this process's rank, 0 to ``size() - 1``."""
    return current().rank


def size() -> int:
    """Return how many ranks there are."""
    return current().size


def local_rank() -> int:
    """Return the rank among those of this host (``LOCAL_RANK``), to choose a GPU by; without that the rank itself."""
    return int(os.environ.get("LOCAL_RANK", rank()))


# Means of what every rank has of its own, such as the loss on its part of the data ------------------------------------


def mean_over_ranks(values: NDArray[Any], group: Group) -> NDArray[np.float64]:
    """Return the mean of an array over all ranks, nothing lost, bit by bit the same on all; between steps.

    Parameters
    ----------
    values
        Of one shape on all ranks.

    Raises
    ------
    TransportError
        A rank was not reached, or not in time; the message names it.
    """
    total = np.zeros(values.shape)
    for rank in range(group.size):
        theirs = np.array(values, np.float64, order="C")
        group.broadcast(theirs, rank)
        total += theirs
    return total / group.size


def average_metrics(metrics: Mapping[str, Any], group: Group) -> dict[str, float]:
    """Return the mean of each metric over all ranks; all ranks must give metrics of the same names.

    Raises
    ------
    TransportError
        A rank was not reached, or not in time; the message names it.
    """
    names = sorted(metrics)
    means = mean_over_ranks(np.array([metrics[name] for name in names], np.float64), group)
    return dict(zip(names, means.tolist(), strict=True))
