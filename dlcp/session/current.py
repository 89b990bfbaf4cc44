# SPDX-License-Identifier: Apache-2.0
"""The group that a process trains in, so that scripts need not hand it around: for adapters that have an ``init``."""

import os
from typing import Any

from dlcp.session.group import Group
from dlcp.session.job import join
from dlcp.session.options import Options

_joined: list[Group] = []


def init(options: Options | None = None, **where: Any) -> Group:
    """Join the other ranks; call it once, before anything else here. See :func:`dlcp.session.join`."""
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
    """Return the rank among those of this host (``LOCAL_RANK``), to choose a GPU by; the rank if nobody has told it."""
    return int(os.environ.get("LOCAL_RANK", rank()))
