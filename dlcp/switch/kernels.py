# SPDX-License-Identifier: Apache-2.0
"""What the generated text calls: meters, and lookups over arrays.

All is plain Python that Numba can compile; the compiled flavour takes its source. The plain flavour runs `run_meter` as
it is, over lists, and looks up in dictionaries.
"""

from typing import Any, Final

TOKEN_CELLS: Final = 7
"""Numbers of one meter's row of tokens: whether it is configured, then tokens now, tokens gained since the origin of
time, and burst, for the peak and for the committed bucket. A row of rates: peak and committed tokens a microsecond."""


def run_meter(rates: Any, tokens: Any, cell: int, amount: int, now_us: int) -> int:
    """Return the colour (0 green, 1 yellow, 2 red) of ``amount`` bytes or packets at time ``now_us``.

    The arithmetic of BMv2's Meter::execute: two buckets, peak first, colour-blind; what a bucket has gained is reckoned
    from the origin of time, so that rounding never adds up; a packet that is red takes nothing.
    """
    row = tokens[cell]
    if row[0] == 0:
        return 0
    rate = rates[cell]
    gained = int(now_us * rate[0])
    have = row[1] + gained - row[2]
    row[2] = gained
    if have > row[3]:
        have = row[3]
    if have < amount:
        row[1] = have
        return 2
    row[1] = have - amount
    gained = int(now_us * rate[1])
    have = row[4] + gained - row[5]
    row[5] = gained
    if have > row[6]:
        have = row[6]
    if have < amount:
        row[4] = have
        return 1
    row[4] = have - amount
    return 0


def probe(index: Any, start: int, mask: int, key: int) -> int:
    """Look a key up in an open-addressing hash of (key, entry) pairs at ``start``; 0 if it is not there."""
    i = ((key * 0x9E3779B97F4A7C1) >> 20) & mask
    while True:
        found = index[start + 2 * i]
        if found == key:
            return int(index[start + 2 * i + 1])
        if found < 0:
            return 0
        i = (i + 1) & mask


def lookup_exact(index: Any, key: int) -> int:
    """Look a key up in an array that `dlcp.switch.tables` laid out: mask, then pairs."""
    return probe(index, 1, index[0], key)


def lookup_lpm(index: Any, key: int) -> int:
    """Look a key up among prefixes: their number, then (shift, start, mask) of each length, the longest first."""
    for i in range(index[0]):
        found = probe(index, index[3 * i + 2], index[3 * i + 3], key >> index[3 * i + 1])
        if found > 0:
            return found
    return 0


def lookup_ternary(index: Any, key: int) -> int:
    """Look a key up among entries: their number, then (mask, value, entry), the winner first."""
    for i in range(index[0]):
        if key & index[3 * i + 1] == index[3 * i + 2]:
            return int(index[3 * i + 3])
    return 0


def lookup_range(index: Any, key: int) -> int:
    """As `lookup_ternary` with range fields.

    Entries, range fields, (shift, mask) of each range field, then entries of mask, value, (low, high) of each, entry.
    """
    fields = index[1]
    size = 3 + 2 * fields
    start = 2 + 2 * fields
    for _ in range(index[0]):
        if key & index[start] == index[start + 1]:
            inside = True
            for i in range(fields):
                value = (key >> index[2 + 2 * i]) & index[3 + 2 * i]
                if value < index[start + 2 + 2 * i] or value > index[start + 3 + 2 * i]:
                    inside = False
                    break
            if inside:
                return int(index[start + size - 1])
        start += size
    return 0


COMPILED: Final = (
    run_meter,
    probe,
    lookup_exact,
    lookup_lpm,
    lookup_ternary,
    lookup_range,
)
"""What the compiled flavour takes, callees first."""
