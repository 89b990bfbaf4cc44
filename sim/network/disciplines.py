# SPDX-License-Identifier: Apache-2.0
"""Disciplines of switches: the names of those built in, and the base class of others."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final

BUILT_IN_DISCIPLINES: Final = ("fifo", "priority", "dlcp", "pfabric", "trim")


class Admission(IntEnum):
    """The fate of a packet that arrives at a busy port. One that cannot be marked is queued."""

    QUEUE = 0
    MARK = 1
    DROP = 2


class OwnDiscipline:
    """Base class of disciplines in other packages; see `dlcp.sim.transports.plugins`.

    A port has eight queues and sends the most urgent packets first. A packet that does not fit its buffer is dropped.
    The static method ``admit`` decides what happens to each other packet that has to wait; by default, it is queued.
    The method is compiled, so it may use nothing but numbers.

    Attributes
    ----------
    transports
        Kinds of the transports that it was made for.
    settings
        Names and defaults of at most eight numbers, which `dlcp.sim.scenario.SwitchSpec.settings` can change.
    """

    transports: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[Mapping[str, float]] = {}

    @staticmethod
    def admit(x: Any, own: Any, waiting: Any, waiting_bytes: Any, port_bytes: Any, chance: Any) -> Any:
        """Return an `Admission`, as a number.

        Parameters
        ----------
        x
            The packet: ``kind`` (`dlcp.sim.engines.network_tables.PacketKind`), ``size``, ``queue``, ``drop_class``,
            and ``ecn``, which is 0 if it cannot be marked.
        own
            ``own[0]``, ``own[1]``, ...: the values of ``settings``, in their order.
        waiting, waiting_bytes, port_bytes
            Packets and bytes in its queue, and bytes in all queues of the port.
        chance
            A random number in [0, 1).
        """
        return 0
