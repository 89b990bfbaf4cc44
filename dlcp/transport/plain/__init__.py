# SPDX-License-Identifier: Apache-2.0
"""The engine in NumPy, used where the C sources are not compiled, and what those are compared with.

Its modules are named as those sources are.
"""

from dlcp.transport.plain.engine import PlainEngine

__all__ = ["PlainEngine"]
