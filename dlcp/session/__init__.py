# SPDX-License-Identifier: Apache-2.0
"""DLCP for any framework: ranks join a group, and average gradients that are NumPy arrays."""

from dlcp.session.group import Group
from dlcp.session.job import join
from dlcp.session.joining import NotJoinedError
from dlcp.session.options import Options

__all__ = ["Group", "NotJoinedError", "Options", "join"]
