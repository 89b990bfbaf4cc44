# SPDX-License-Identifier: Apache-2.0
"""Packet tests use what tests/conformance knows of simple_switch, and the ports by hand of tests/switch."""

import sys
from pathlib import Path

for folder in ("conformance", "switch"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
