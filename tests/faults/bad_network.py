# SPDX-License-Identifier: Apache-2.0
"""A network of one's own making between ranks on this machine: a UDP proxy that loses, repeats, delays and cuts.

Each rank advertises a socket of the proxy; what comes there is sent on to the rank, from the socket that its sender
advertises. Ranks change the weather while they train, by a message to the proxy's control socket.
"""

import contextlib
import json
import os
import random
import select
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass

HOLD_S = 0.004
BURST_PACKETS = 20
CONTROL_LIMIT_S = 10
BUFFER_BYTES = 4 << 20
SO_RCVBUFFORCE = 33


@dataclass
class Weather:
    """The fate of packets; shares are of all packets.

    ``burst`` is the share at which a burst of 20 lost packets begins. Packets of more than ``swallow_over`` bytes after
    UDP vanish. ``forged`` packets are followed by a damaged copy, as an endpoint sees them only of somebody who writes
    his own: what was damaged on a wire fails its checksum, and the kernel drops it.
    """

    loss: float = 0.0
    burst: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    forged: float = 0.0
    swallow_over: int = 1 << 16
    blocked: bool = False


class BadNetwork:
    """The proxy, as a thread of this process; a context manager. ``places`` are what the ranks advertise."""

    def __init__(self, ports, seed=0):
        self.ports = list(ports)
        self.random = random.Random(seed)
        self.weather = Weather()
        self.seen = Counter()
        self.sockets = [self._socket() for _ in self.ports]
        self.control = self._socket()
        self.places = [sock.getsockname() for sock in self.sockets]
        self._rank_of = {("127.0.0.1", port): rank for rank, port in enumerate(self.ports)}
        self._held = []
        self._bad = 0
        self._stop, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @staticmethod
    def _socket():
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        with contextlib.suppress(PermissionError):  # a proxy that has to wait must lose nothing by itself
            sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        return sock

    def environment(self):
        return {
            "TEST_PLACES": json.dumps([f"{host}:{port}" for host, port in self.places]),
            "TEST_CONTROL": str(self.control.getsockname()[1]),
        }

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        os.write(self._wake, b"x")
        self._thread.join(10)
        for sock in [*self.sockets, self.control]:
            sock.close()
        os.close(self._stop)
        os.close(self._wake)

    def _run(self):
        targets = {sock: rank for rank, sock in enumerate(self.sockets)}
        while True:
            wait_s = HOLD_S if self._held else 1.0
            readable, _, _ = select.select([self._stop, self.control, *self.sockets], [], [], wait_s)
            if self._stop in readable:
                return
            if self.control in readable:
                request, source = self.control.recvfrom(4096)
                self.weather = Weather(**json.loads(request))
                self.control.sendto(b"done", source)
            for sock in readable:
                if sock in targets:
                    self._forward(sock, targets[sock])
            now_s = time.monotonic()
            while self._held and self._held[0][0] <= now_s:
                self._send(*self._held.pop(0)[1:])

    def _forward(self, sock, target):
        for _ in range(64):
            try:
                datagram, source = sock.recvfrom(65536)
            except BlockingIOError:
                return
            sender = self._rank_of.get(source)
            if sender is not None:
                self._suffer(sender, target, datagram)

    def _suffer(self, sender, target, datagram):
        weather, chance = self.weather, self.random.random
        self._bad = self._bad - 1 if self._bad else BURST_PACKETS if chance() < weather.burst else 0
        if weather.blocked or self._bad or len(datagram) > weather.swallow_over or chance() < weather.loss:
            self.seen["lost"] += 1
            return
        if chance() < weather.reorder:
            self.seen["reordered"] += 1
            self._held.append((time.monotonic() + HOLD_S, sender, target, datagram))
        else:
            self._send(sender, target, datagram)
        if chance() < weather.duplicate:
            self.seen["duplicated"] += 1
            self._send(sender, target, datagram)
        if chance() < weather.forged:
            self.seen["forged"] += 1
            self._send(sender, target, self._damaged(datagram))

    def _damaged(self, datagram):
        kind = self.random.randrange(4)
        if kind == 0:
            return datagram[: self.random.randrange(32)]
        if kind == 1:
            return self.random.randbytes(len(datagram))
        place = self.random.choice([0, 4, 5, 14, 15, *range(24, 32)])  # version, job, sender, token
        mask = 0xF0 if place == 0 else 0xFF
        return datagram[:place] + bytes([datagram[place] ^ mask]) + datagram[place + 1 :]

    def _send(self, sender, target, datagram):
        self.seen["sent"] += 1
        try:
            self.sockets[sender].sendto(datagram, ("127.0.0.1", self.ports[target]))
        except OSError:
            self.seen["unsent"] += 1


def place_of(rank):
    """The address that a rank advertises; called in a worker."""
    return json.loads(os.environ["TEST_PLACES"])[rank]


def set_weather(weather):
    """Change the proxy's behaviour; called in a worker, by one rank."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        end_s = time.monotonic() + CONTROL_LIMIT_S
        while time.monotonic() < end_s:
            sock.sendto(json.dumps(asdict(weather)).encode(), ("127.0.0.1", int(os.environ["TEST_CONTROL"])))
            try:
                sock.recvfrom(64)
            except TimeoutError:
                continue
            return
    raise TimeoutError("the proxy does not answer")
