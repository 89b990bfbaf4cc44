# SPDX-License-Identifier: Apache-2.0
"""What ``dlcp bench loss`` prints; takes the same options."""

from dlcp.commands.bench import main

if __name__ == "__main__":
    main("loss")  # where namespaces are refused there are no results, and `make bench` goes on
