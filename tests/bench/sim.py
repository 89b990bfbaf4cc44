# SPDX-License-Identifier: Apache-2.0
"""Packet-hops a second of the simulator, beside ns.py; see `dlcp.bench.sim`.

Run ``python tests/bench/sim.py``; it prints one JSON document.
"""

from dlcp.bench.sim import main

if __name__ == "__main__":
    main()
