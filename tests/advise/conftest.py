# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

for folder in ("collectives", "torch"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from engines import engine  # noqa: E402

__all__ = ["engine"]
