# SPDX-License-Identifier: Apache-2.0
"""Messages over a network in virtual time, and what must hold of each."""

import numpy as np

from dlcp import wire
from dlcp.transport import RELIABLE, MessageKey, ReceiveRequest, SendRequest
from dlcp.wire import Header, PacketType
from tests.transport.network import TOKEN, Network, all_done, outcome_of, packets_of, plain_tags

KEY = MessageKey(3, 1)


class Selective(Network):
    """A network that loses packets by ``lose(network, source, header)``, in addition to random losses."""

    def __init__(self, ranks, lose, **fields):
        self.lose = lose
        super().__init__(ranks, **fields)

    def send(self, source, target, datagram, tos):
        if self.lose and self.lose(self, source, wire.decode(datagram)):
            self.dropped["selected"] += 1
            return True
        return super().send(source, target, datagram, tos)


def payload_of(size, seed=0):
    return np.random.default_rng(seed).integers(1, 256, size, np.uint8)


def send(network, payload, *, source=0, target=1, key=KEY, bound=RELIABLE, tags=None, label="conv1.weight"):
    connection = network.ranks[source]
    if tags is None:
        tags = plain_tags(packets_of(len(payload), connection.options))
    return outcome_of(connection.send, SendRequest(target, key, memoryview(payload), tags, bound, label))


def receive(network, size, *, source=0, target=1, key=KEY, bound=RELIABLE, label="conv1.weight", **place):
    return outcome_of(network.ranks[target].receive, ReceiveRequest(source, key, size, bound, label, **place))


def exchange(network, size, *, bound=RELIABLE, tags=None, key=KEY, seed=0, limit_s=60.0):
    """Send a message from rank 0 to rank 1 and check what holds of any; return its delivery and arrival."""
    payload = payload_of(size, seed)
    arrival = receive(network, size, bound=bound, key=key)
    delivery = send(network, payload, bound=bound, tags=tags, key=key)
    network.run(all_done(arrival, delivery), limit_s=limit_s)
    if tags is None:
        tags = plain_tags(packets_of(size, network.ranks[0].options))
    check(payload, tags, bound, delivery.result(), arrival.result(), network.ranks[0].options.payload_bytes)
    return delivery.result(), arrival.result()


def check(payload, tags, bound, delivery, arrival, payload_bytes):
    packets = len(tags.queue)
    assert arrival.delivered.sum() >= bound.required(packets)
    assert arrival.delivered[tags.protected].all()
    np.testing.assert_array_equal(delivery.delivered, arrival.delivered, "sender and receiver must agree")
    present = np.repeat(arrival.delivered, payload_bytes)[: len(payload)]
    np.testing.assert_array_equal(arrival.payload, np.where(present, payload, 0))
    np.testing.assert_array_equal(arrival.layer[arrival.delivered], tags.layer[arrival.delivered])
    assert 0 <= delivery.resent <= delivery.sent


def datagram(kind, *, sender=0, token=TOKEN, job=1, step=3, message=1, index=0, count=1, payload=b"", flags=0):
    """One packet as rank ``sender`` would send it."""
    return Header(kind, flags, 4, 0, 0, job, 0, step, message, sender, index, count, token).encode() + payload


def deliver(protocol, data, *, source=0, now_s=0.0, tos=0):
    protocol.on_datagram(memoryview(data), tos, (f"10.0.0.{source}", 53696), now_s)


__all__ = [
    "KEY",
    "TOKEN",
    "Network",
    "PacketType",
    "Selective",
    "all_done",
    "check",
    "datagram",
    "deliver",
    "exchange",
    "packets_of",
    "payload_of",
    "plain_tags",
    "receive",
    "send",
]
