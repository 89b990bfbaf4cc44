# SPDX-License-Identifier: Apache-2.0
"""Packet-hops a second of the simulator, beside ns.py; see `dlcp.bench.sim`.

Run ``python tests/bench/sim.py``; it prints one JSON document.
"""

import sys
from pathlib import Path

# A script's own folder comes first in the path, where this file would be taken for the package that it measures.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from dlcp.bench.sim import main  # noqa: E402

if __name__ == "__main__":
    main()
