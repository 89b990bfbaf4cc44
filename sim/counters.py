# SPDX-License-Identifier: Apache-2.0
"""What engines count: one array of integers, the same cells in both."""

from typing import Final

(
    EVENTS,
    HOPS_DATA,
    HOPS_CONTROL,
    SENT,
    RESENT,
    ARRIVED,
    DUPLICATES,
    LATE_ANSWERS,
    DECLARED_LOST,
    TIMEOUTS,
    PROBES,
    MARKS,
    TRIMS,
    BUDGET_SPENT,
    SLOT_TAKEN,
    DROPS_POLICY,
    DROPS_TAIL,
    DROPS_EARLY,
    DROPS_LINK,
    DROPS_ROUTE,
    MESSAGES_DONE,
    TAIL_PROBES,
) = range(22)
DROPS_BY_CLASS: Final = 24
"""Cells 24 to 31: packets dropped in switches and on links, by drop class."""
CELLS: Final = 32

NAMES: Final = {
    name.lower(): value for name, value in globals().items() if name.isupper() and name not in ("CELLS", "NAMES")
}
