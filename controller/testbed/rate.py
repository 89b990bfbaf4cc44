# SPDX-License-Identifier: Apache-2.0
"""Whether a port sends at the rate that was asked for, whatever queues its packets take."""

import socket
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from dlcp.controller.testbed.accounts import nic_counts
from dlcp.controller.testbed.layout import HostPlan, Layout
from dlcp.controller.testbed.namespaces import NamedNamespace

from dlcp.switch import QUEUES
from dlcp.wire import UDP_PORT_BASE, Header, PacketType

FRAME_BYTES: Final = 1_442
"""Length of the frames of the trial, Ethernet header and all."""
OVERLOAD: Final = 1.5
"""How many times the port's rate is sent to it. Chosen by us: enough to keep its queues filled."""
WARM_UP_S: Final = 0.3
MEASURED_S: Final = 1.0
_TICK_S: Final = 0.002
_HEADERS_BYTES: Final = 14 + 20 + 8


class PortRate(NamedTuple):
    """What a port carried while more was sent to it, in bit/s of whole frames."""

    queues: int
    asked_bps: int
    carried_bps: float


def port_rates(layout: Layout, mixes: Sequence[int] = (1, QUEUES)) -> list[PortRate]:
    """Overload the last host's port from the first host, over so many queues at once, and return what it carries.

    All traffic takes one queue, or is spread evenly over several; a port with a rate of its own carries the same.
    """
    return [_carried(layout, queues) for queues in mixes]


def _carried(layout: Layout, queues: int) -> PortRate:
    sender, receiver = layout.hosts[0], layout.hosts[-1]
    port = next(port for port in layout.switch(receiver.switch).ports if port.number == receiver.port)
    stopped = threading.Event()
    # Somebody has to be there, or the receiver would answer each packet that nobody is.
    sink = NamedNamespace(receiver.namespace).call(lambda: _bound(receiver))
    source = NamedNamespace(sender.namespace).call(lambda: _bound(sender))
    flood = threading.Thread(target=_flood, args=(source, receiver, queues, OVERLOAD * port.rate_bps, stopped))
    with sink, source:
        flood.start()
        try:
            time.sleep(WARM_UP_S)
            began_s, before = time.monotonic(), nic_counts(receiver)
            time.sleep(MEASURED_S)
            ended_s, after = time.monotonic(), nic_counts(receiver)
        finally:
            stopped.set()
            flood.join()
    carried = 8 * (after.received_bytes - before.received_bytes) / (ended_s - began_s)
    return PortRate(queues, port.rate_bps, carried)


def _bound(host: HostPlan) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((host.address, UDP_PORT_BASE))
    return sock


def _flood(source: socket.socket, to: HostPlan, queues: int, rate_bps: float, stopped: threading.Event) -> None:
    """Send at a rate until told to stop, each packet into the next of the lowest ``queues`` queues."""
    packets = [_packet(queue) for queue in range(queues)]
    per_s = rate_bps / (8 * FRAME_BYTES)
    began_s, sent = time.monotonic(), 0
    while not stopped.is_set():
        due = int((time.monotonic() - began_s) * per_s)
        while sent < due:
            source.sendto(packets[sent % queues], (to.address, UDP_PORT_BASE))
            sent += 1
        time.sleep(_TICK_S)


def _packet(queue: int) -> bytes:
    """Return a packet of data that asks for a queue and may not be dropped by choice."""
    header = Header(PacketType.DATA, 0, queue, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0).encode()
    return header.ljust(FRAME_BYTES - _HEADERS_BYTES, b"\0")
