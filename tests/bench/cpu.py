# SPDX-License-Identifier: Apache-2.0
"""What ``dlcp bench cpu`` prints; takes the same options."""

import sys

from dlcp.commands.bench import main

if __name__ == "__main__":
    sys.exit(main("cpu"))
