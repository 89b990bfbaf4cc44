# SPDX-License-Identifier: Apache-2.0
"""DLCP for any framework: ranks join a group, and average gradients that are NumPy arrays."""

from typing import TYPE_CHECKING

from dlcp import on_demand
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
# PyTorch needs no groups.
__getattr__ = on_demand(__name__, dict.fromkeys(set(__all__) - {"NotJoinedError", "Options"}, "job"))
