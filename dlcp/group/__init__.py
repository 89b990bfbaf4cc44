# SPDX-License-Identifier: Apache-2.0
"""DLCP for any framework: ranks join a group, and average gradients that are NumPy arrays."""

from dlcp.group.group import Group
from dlcp.group.job import join
from dlcp.group.joining import NotJoinedError
from dlcp.group.options import Options

__all__ = ["Group", "NotJoinedError", "Options", "join"]
