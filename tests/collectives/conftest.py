# SPDX-License-Identifier: Apache-2.0
from tests.transport.engines import engine

__all__ = ["engine"]
