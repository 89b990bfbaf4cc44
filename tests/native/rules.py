# SPDX-License-Identifier: Apache-2.0
"""The engine's constants, for tests that wait or count by them."""

import re

from dlcp import native

RULES = {
    name.lower(): float(value)
    for name, value in re.findall(r"\b([A-Z][A-Z_]+) = ([\d.]+)", (native.FOLDER / "tunables.h").read_text())
}
"""The constants of ``dlcp/native/tunables.h``, by name in lower case."""
