# SPDX-License-Identifier: Apache-2.0
"""P4Runtime on the built-in switch, with the features that BMv2 offers to controllers.

This package is imported only if P4Runtime is requested, because its protocol messages require finsy
(``pip install 'dlcp[p4runtime]'``). `P4RuntimeServer` is the entry point. The layers, from the wire inwards: ``server``
(the six calls and arbitration), ``device`` (one switch and its pipeline), ``entities`` (readable and writable objects:
p4info joined to a running program).

Where the specification (1.4.1) and BMv2 differ, this follows the specification; comments mark the places.
"""

from dlcp.switch.p4runtime.device import ForwardingPipeline, P4RuntimeDevice, PacketLoop
from dlcp.switch.p4runtime.entities import Refused
from dlcp.switch.p4runtime.service import P4RUNTIME_PORT, P4RuntimeServer, TlsFiles, make_way_for_packets

__all__ = [
    "P4RUNTIME_PORT",
    "ForwardingPipeline",
    "P4RuntimeDevice",
    "P4RuntimeServer",
    "PacketLoop",
    "Refused",
    "TlsFiles",
    "make_way_for_packets",
]
