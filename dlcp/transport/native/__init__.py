# SPDX-License-Identifier: Apache-2.0
"""The engine in C."""

from dlcp.transport.native.engine import NativeEngine
from dlcp.transport.native.mirror import available

__all__ = ["NativeEngine", "available"]
