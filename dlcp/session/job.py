# SPDX-License-Identifier: Apache-2.0
"""How a process joins its job, and functions for scripts that do not pass a group around.

The rank, the number of ranks and the address of rank 0's store come from the environment that a launcher sets.
"""

import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.inputs.addresses import parse_address
from dlcp.inputs.configuration import STORE_VARIABLE
from dlcp.session.addresses import master_address
from dlcp.session.group import Group
from dlcp.session.joining import next_number, running_number
from dlcp.session.options import Options
from dlcp.session.secret import job_secret
from dlcp.session.store import Store, ended_key, serve

_joined: list[Group] = []
"""The group that :func:`init` has joined, if any."""


def join(
    options: Options | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    master: str | None = None,
) -> Group:
    """Join the other ranks of this job in a group. All ranks must call this, equally often.

    Parameters
    ----------
    options
        By default ``Options()``.
    rank, size
        This rank, and the number of ranks; by default ``RANK`` and ``WORLD_SIZE``. If neither is set, the group has one
        rank. With ``elastic``, a process whose rank has begun before, or is not below ``size``, comes later: it gets
        the next free number, and takes part once it has called :meth:`Group.register`.
    master
        Address of the store that rank 0 serves, ``host:port`` or ``[ipv6]:port``; by default ``MASTER_ADDR`` and
        ``MASTER_PORT``.

    Returns
    -------
    The group. If not all ranks can use DLCP and ``options.fallback`` is on, it averages over the store, slowly.

    Raises
    ------
    ValueError
        The rank or the size is unknown, the rank is not in 0..size-1, or the address is malformed.
    OSError, StoreError
        Rank 0 cannot serve the store, or cannot be reached; or this rank does not have the job's secret, see
        :func:`dlcp.session.secret.job_secret`.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off.
    """
    options = options or Options()
    rank, size = _who(rank, size, may_be_later=options.elastic > 0)
    if size == 1 and rank == 0:
        return Group(options, 0, 1, None)
    address = parse_address(master) if master else master_address()
    secret = job_secret(options)
    serves = rank == 0 and STORE_VARIABLE not in os.environ
    if serves:
        serve(address, secret, options.tls)
    owner = "the launcher" if STORE_VARIABLE in os.environ else "rank 0"
    store = Store(address, options.meet_s, secret, options.tls, owner)
    try:
        jobs = store.under("dlcp")
        running = _running(jobs, options, rank, size)
        store = jobs.under(str(next_number(jobs, rank) if running is None else running))
        if running is not None:
            rank = _new_number(store, size)
        store.leave(ended_key(rank), "its process ended, or its connection broke")
        group = Group(options, rank, size, store, serves=serves)
        if running is None:
            group.join(address)
        else:
            group.join_later(address)
    except BaseException:
        store.close()
        raise
    return group


def _running(jobs: Store, options: Options, rank: int, size: int) -> int | None:
    """Return the number of the group that trains without this process; None if all ranks are to join now."""
    if not options.elastic:
        return None
    return int(jobs.get("newest", options.meet_s)) if rank >= size else running_number(jobs, rank)


def _new_number(store: Store, size: int) -> int:
    """Return a number for a rank that comes later: a number belongs to one process, so that what ended stays so."""
    rank, mine = size, secrets.token_hex(8)
    while store.compare_set(f"number/{rank}", "", mine) != mine.encode():
        rank += 1
    return rank


def _who(rank: int | None, size: int | None, *, may_be_later: bool) -> tuple[int, int]:
    """Return rank and size as given, or from the environment."""
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
            raise ValueError(f"the {what} is unknown: set RANK and WORLD_SIZE, or start with `dlcp launch`")
    if found["rank"] < 0 or (found["rank"] >= found["size"] and not may_be_later):
        raise ValueError(f"the rank must be in 0..{found['size'] - 1}, got {found['rank']}")
    return found["rank"], found["size"]


# The group of this process, for frameworks whose users expect init() and rank() ---------------------------------------


def init(options: Options | None = None, **where: Any) -> Group:
    """Join the other ranks, once per process and before any other function below. See :func:`join` for arguments."""
    if _joined:
        raise RuntimeError("this process has already joined its group; call shutdown() before another init()")
    _joined.append(join(options, **where))
    return _joined[0]


def current() -> Group:
    """Return the group that :func:`init` has joined.

    Raises
    ------
    RuntimeError
        :func:`init` has not been called.
    """
    if not _joined:
        raise RuntimeError(
            "this process has not joined a group: call init() first, e.g. dlcp.tensorflow.init(), once in every process"
        )
    return _joined[0]


def shutdown(reason: str | None = None) -> None:
    """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
    while _joined:
        _joined.pop().close(reason)


def rank() -> int:
    """Return this process's rank, 0 to ``size() - 1``."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().size


def local_rank() -> int:
    """Return this process's rank on its host (``LOCAL_RANK``), for example to choose a GPU; by default :func:`rank`."""
    return int(os.environ.get("LOCAL_RANK", rank()))


# Means over ranks, such as that of the losses on their parts of the data ----------------------------------------------


def mean_over_ranks(values: NDArray[Any], group: Group) -> NDArray[np.float64]:
    """Return the mean of an array over all ranks, without loss, with identical bits on all. Call it between steps.

    Parameters
    ----------
    values
        An array of any shape, the same on all ranks.
    group
        The ranks.

    Raises
    ------
    TransportError
        A rank was not reached, or not in time; the message names it.
    """
    if group.options.elastic:  # ranks may end, but a gathering has the same items on all of them
        every = group.gather(np.ascontiguousarray(values, np.float64).tobytes()) or {0: values.astype(np.float64)}
        parts = [np.frombuffer(part, np.float64) for _, part in sorted(every.items())]
        return np.asarray(np.mean(parts, axis=0).reshape(values.shape), np.float64)
    total = np.zeros(values.shape)
    for rank in group.ranks:
        theirs = np.array(values, np.float64, order="C")
        group.broadcast(theirs, rank)
        total += theirs
    return total / group.size


def average_metrics(metrics: Mapping[str, Any], group: Group) -> dict[str, float]:
    """Return the mean of each metric over all ranks, by name. All ranks must pass the same names.

    Raises
    ------
    TransportError
        A rank was not reached, or not in time; the message names it.
    """
    names = sorted(metrics)
    means = mean_over_ranks(np.array([metrics[name] for name in names], np.float64), group)
    return dict(zip(names, means.tolist(), strict=True))
