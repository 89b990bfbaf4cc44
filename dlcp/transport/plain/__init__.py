# SPDX-License-Identifier: Apache-2.0
"""The engine in NumPy, used where the C sources are not compiled.

Its modules are named as those sources are; ``engine`` and ``burst_socket`` together are ``loop.c``.
"""

from dlcp.transport.plain.engine import PlainEngine

__all__ = ["PlainEngine"]
