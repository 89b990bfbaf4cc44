# SPDX-License-Identifier: Apache-2.0
"""The program of a switch that no controller has given one yet."""

from typing import Any

from dlcp.switch.program import DROP_PORT


class EmptyProgram:
    """Drops every packet; what the switch asks of a program, as in `dlcp.switch.program.Program`."""

    def ingress(self, packet: bytearray, port: int, now_us: int) -> tuple[int, int, tuple[int, ...]]:
        """Drop a packet."""
        return DROP_PORT, 0, ()

    def egress(
        self,
        packet: bytearray,
        carry: Any,
        port: int,
        enq_us: int,
        deq_delta_us: int,
        enq_depth: int,
        deq_depth: int,
        now_us: int,
    ) -> bool:
        """Drop a packet; none gets so far."""
        return False
