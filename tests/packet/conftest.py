# SPDX-License-Identifier: Apache-2.0
"""Packet tests use what tests/conformance knows of simple_switch, the ports by hand of tests/switch, and the P4Runtime
client of tests/p4runtime."""

import sys
from pathlib import Path

for folder in ("conformance", "switch", "p4runtime"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
