# SPDX-License-Identifier: Apache-2.0
"""P4Runtime on the built-in switch: whatever a controller can ask of BMv2 it can ask of this switch.

Nothing imports this package unless P4Runtime is asked for, because it needs finsy (``pip install 'dlcp[p4runtime]'``)
for the protocol's messages. `P4RuntimeServer` is the way in; from the wire inwards: ``server`` (the six calls, and who
may write), ``device`` (one switch and its pipeline), ``entities`` (what can be written and read: p4info joined to a
running program), ``messages`` (values, matches, actions, errors).

Where the specification (1.4.1) and BMv2 differ, this follows the specification; each place says so.
"""

from dlcp.switch.p4runtime.device import ForwardingPipeline, P4RuntimeDevice, PacketLoop
from dlcp.switch.p4runtime.messages import Refused
from dlcp.switch.p4runtime.server import P4RuntimeServer, TlsFiles, make_way_for_packets, parse_address

__all__ = [
    "ForwardingPipeline",
    "P4RuntimeDevice",
    "P4RuntimeServer",
    "PacketLoop",
    "Refused",
    "TlsFiles",
    "make_way_for_packets",
    "parse_address",
]
