# SPDX-License-Identifier: Apache-2.0
from engines import engine

__all__ = ["engine"]
