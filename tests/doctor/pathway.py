# SPDX-License-Identifier: Apache-2.0
"""A path with faults between two doctors, over loopback: a relay that drops, and that changes tags."""

import contextlib
import select
import struct
import threading

from dlcp.doctor.path import ProbeListener, before_payload, open_socket, tos_of
from dlcp.host.ip import IPV4


@contextlib.contextmanager
def listening(sock):
    """Answer at a socket meanwhile; gives the listener."""
    listener, stopped = ProbeListener(sock), threading.Event()

    def serve():
        while not stopped.is_set():
            listener.serve(0.05)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        stopped.set()
        thread.join(5)
        assert not thread.is_alive()
        listener.close()


class Pathway:
    """A listening doctor behind a relay; ``address`` is where to ask. A context manager.

    ``drop(way, number, size)`` says whether a packet is lost (way ``there`` or ``back``, its number from 0, its size as
    an IP packet); ``tag(way, tos)`` says what becomes of its TOS byte, None if that gets it lost.
    """

    def __init__(self, drop=lambda way, number, size: False, tag=lambda way, tos: tos, family=IPV4):
        self.drop, self.tag, self.family = drop, tag, family
        self.front, self.back = open_socket(family.loopback), open_socket(family.loopback)
        self.address = self.front.getsockname()[:2]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self.listener = self._stack.enter_context(listening(open_socket(self.family.loopback)))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join(5)
        assert not self._thread.is_alive()
        self._stack.close()
        self.front.close()
        self.back.close()

    def _relay(self):
        asker, numbers = None, {"there": 0, "back": 0}
        while not self._stopped.is_set():
            for sock in select.select([self.front, self.back], [], [], 0.05)[0]:
                data, ancillary, _, source = sock.recvmsg(65536, 128)
                if sock is self.front:
                    asker, way, out, target = source, "there", self.back, self.listener.address
                else:
                    way, out, target = "back", self.front, asker
                number = numbers[way]
                numbers[way] += 1
                tos = self.tag(way, tos_of(ancillary))
                if tos is not None and not self.drop(way, number, len(data) + before_payload(self.family)):
                    out.sendmsg([data], [(self.family.level, self.family.tos, struct.pack("i", tos))], 0, target)
