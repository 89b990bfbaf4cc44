# SPDX-License-Identifier: Apache-2.0
"""Meter configurations, of entries and of arrays."""

from typing import Final

from finsy.proto import p4r

from dlcp.switch.cells import MeterConfig
from dlcp.switch.p4runtime.refusal import INVALID_ARGUMENT, UNIMPLEMENTED, Refused

BURST_MAX: Final = (1 << 32) - 1
"""What BMv2 keeps a burst in."""


def read_config(config: p4r.MeterConfig, where: str) -> MeterConfig | None:
    """Return a configuration as the program takes it; None for the default, which finds everything green.

    Raises
    ------
    Refused
        It is none of a two-rate meter that counts only upwards, or a burst is larger than BMv2 knows.
    """
    rates = config.cir, config.cburst, config.pir, config.pburst
    # What PI, and so BMv2, takes for the default besides no configuration at all.
    if rates == (-1, -1, -1, -1):
        return None
    if min(rates) < 0:
        raise Refused(INVALID_ARGUMENT, f"{where}: rates and bursts must not be negative, {rates}")
    if config.eburst:
        raise Refused(INVALID_ARGUMENT, f"{where}: a two-rate meter has no excess burst")
    if config.cir > config.pir:
        raise Refused(INVALID_ARGUMENT, f"{where}: the committed rate {config.cir} exceeds the peak rate {config.pir}")
    if max(config.cburst, config.pburst) > BURST_MAX:
        raise Refused(UNIMPLEMENTED, f"{where}: a burst may have {BURST_MAX} at most")
    return MeterConfig(*rates)


def write_config(config: MeterConfig, message: p4r.MeterConfig) -> None:
    """Put a configuration into a message."""
    message.cir, message.cburst = config.cir, config.cburst
    message.pir, message.pburst = config.pir, config.pburst
