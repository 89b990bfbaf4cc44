# SPDX-License-Identifier: Apache-2.0
"""A P4 program as specialised Python text that runs plain and under Numba."""

from dlcp.switch.codegen.layout import Layout, ProfileSlot, TableSlot
from dlcp.switch.codegen.source import DROP_PORT, Generated, generate

__all__ = ["DROP_PORT", "Generated", "Layout", "ProfileSlot", "TableSlot", "generate"]
