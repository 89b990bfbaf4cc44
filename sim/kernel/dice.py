# SPDX-License-Identifier: Apache-2.0
"""`dlcp.sim.arithmetic.draw` and `dlcp.sim.arithmetic.mix` for signed integers of 64 bits that wrap round."""

from typing import Final

from dlcp.sim.arithmetic import GOLDEN
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.state import Number, Rows

_MULTIPLIER: Final = GOLDEN - (1 << 64)
_BELOW_57: Final = (1 << 57) - 1
_BELOW_31: Final = (1 << 31) - 1


@call
def draw(row: Rows) -> Number:
    """Return 31 random bits, and move the generator in ``row.random`` on."""
    state = row.random
    state ^= state << 13
    state ^= (state >> 7) & _BELOW_57
    state ^= state << 17
    row.random = state
    return (state >> 33) & _BELOW_31


@call
def mix(value: int, salt: int) -> Number:
    """Return 31 bits that depend on both."""
    return (((value ^ salt) * _MULTIPLIER) >> 33) & _BELOW_31
