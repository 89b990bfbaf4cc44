# SPDX-License-Identifier: Apache-2.0
"""P4Runtime on the built-in switch: what a controller says to BMv2 it can say to this switch.

Nothing here is imported unless it is asked for, since it needs the package finsy (``pip install 'dlcp[p4runtime]'``)
for the messages of the protocol. `dlcp.switch.p4runtime.server.P4RuntimeServer` is the way in; the layers below it,
from the wire inwards: ``service`` (the six calls), ``arbitration`` (who may write), ``device`` (one switch and its
pipeline), ``pipeline`` (p4info joined to a running program), and a module for each kind of entity.

Where the specification (1.4.1) and BMv2 differ, the specification is followed; each place says so.
"""
