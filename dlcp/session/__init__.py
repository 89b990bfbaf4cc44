# SPDX-License-Identifier: Apache-2.0
"""DLCP for any framework: ranks join a group, and average gradients that are NumPy arrays."""

from typing import TYPE_CHECKING, Any

from dlcp.session.joining import NotJoinedError
from dlcp.session.options import Options

if TYPE_CHECKING:
    from dlcp.session.group import Group
    from dlcp.session.job import (
        average_metrics,
        current,
        init,
        join,
        local_rank,
        mean_over_ranks,
        rank,
        shutdown,
        size,
    )

__all__ = [
    "Group",
    "NotJoinedError",
    "Options",
    "average_metrics",
    "current",
    "init",
    "join",
    "local_rank",
    "mean_over_ranks",
    "rank",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    """Load groups when they are asked for: PyTorch needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dlcp.session import job

    return getattr(job, name)
