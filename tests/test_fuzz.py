# SPDX-License-Identifier: Apache-2.0
"""Hostile datagrams by the hundred thousand: never an exception, never a wrong gradient, everything refused is counted.

What a stranger can send, who does not know the session token, must change nothing at all. What a peer sends must at
least never break the one who reads it.
"""

import random
import time

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import LossBound, MessageKey, TransportError, TransportOptions
from dlcp.wire import PacketType
from tests.transport.exchanges import Network, all_done, datagram, payload_of, plain_tags, receive, send

STRANGERS = 70_000
INSIDERS = 40_000


def forged(rng, captured):
    """A datagram that the receiver must refuse, and where it comes from: rank 0's address, or another."""
    data = bytearray(rng.choice(captured))
    source = 0
    fault = rng.randrange(8)
    if fault == 0:
        data = bytearray(rng.randbytes(rng.randrange(0, 200)))
        if len(data) >= 32:
            data[0] |= 0x80  # no version of ours
    elif fault == 1:
        data = data[: rng.randrange(wire.HEADER_BYTES)]
    elif fault == 2:
        position = rng.randrange(24, 32)
        data[position] ^= rng.randrange(1, 256)
        for _ in range(rng.randrange(4)):
            data[rng.randrange(2, 24)] ^= rng.randrange(256)
    elif fault == 3:
        data[rng.randrange(4, 6)] ^= rng.randrange(1, 256)
    elif fault == 4:
        data[rng.randrange(14, 16)] ^= rng.randrange(1, 256)
    elif fault == 5:
        source = rng.choice([2, 7])
    elif fault == 6:
        data[0] = rng.choice([kind for kind in range(256) if kind >> 4 != 1 or not 1 <= kind & 15 <= 9])
    else:
        data[8:12] = rng.randrange(0, 5).to_bytes(4, "big")  # a step that is over
        data[0] = 0x10 | rng.choice([PacketType.DATA, PacketType.PROBE])
    return bytes(data), source


def test_strangers_change_nothing():
    rng = random.Random(1)
    network = Network(3, loss=0.03, duplicate=0.1, jitter_s=0.002, rate_bps=60e6, seed=1)
    receiver = network.ranks[1]
    receiver.begin_step(5)
    captured = [datagram(PacketType.DATA, step=7, count=3, payload=bytes(1440))]
    injected = 0
    delivering = network.deliver

    def deliver_among_noise(target, packet):
        nonlocal injected
        if target == 1:
            captured.append(packet[1])
            for _ in range(rng.randrange(60) if injected < STRANGERS else 0):
                data, source = forged(rng, captured)
                before = receiver.refused.total()
                receiver.on_datagram(memoryview(data), rng.randrange(256), (f"10.0.0.{source}", 53696), network.now)
                assert receiver.refused.total() == before + 1, f"taken for good: {data[:32].hex()} from rank {source}"
                injected += 1
        delivering(target, packet)

    network.deliver = deliver_among_noise
    for step in range(5, 40):
        payloads = [payload_of(rng.randrange(1, 80_000), seed=100 * step + number) for number in range(3)]
        bound = LossBound(0.1 * (step % 2))
        tags = [plain_tags(-(-len(payload) // 1440), protected=1) for payload in payloads]
        futures = []
        for number, payload in enumerate(payloads):
            key = MessageKey(step, number)
            # One of them comes before it is waited for.
            if number:
                futures.append(receive(network, len(payload), key=key, bound=bound))
            futures.append(send(network, payload, key=key, bound=bound, tags=tags[number]))
        late = network.now + 0.003
        network.run(lambda late=late: network.now > late)
        futures.insert(0, receive(network, len(payloads[0]), key=MessageKey(step, 0), bound=bound))
        network.run(all_done(*futures))
        arrivals, deliveries = [futures[0], futures[2], futures[4]], [futures[1], futures[3], futures[5]]
        for payload, arrival, delivery in zip(payloads, arrivals, deliveries, strict=True):
            got = arrival.result()
            present = np.repeat(got.delivered, 1440)[: len(payload)]
            np.testing.assert_array_equal(got.payload, np.where(present, payload, 0))
            assert got.delivered.sum() >= bound.required(len(got.delivered))
            np.testing.assert_array_equal(delivery.result().delivered, got.delivered)
        if injected >= STRANGERS:
            break
    assert injected >= STRANGERS
    assert set(receiver.refused) == {"malformed", "token", "job", "sender", "stale"}
    assert all(count > injected / 50 for count in receiver.refused.values())


def mangled(rng, captured):
    """A packet with the right token, and anything else wrong."""
    data = bytearray(rng.choice(captured))
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        place = rng.choice([0, 1, 2, 6, rng.randrange(8, 14), rng.randrange(16, 24)])
        data[place] = rng.choice([0, 1, 7, 0x7F, 0x80, 0xFF, data[place] ^ 1 << rng.randrange(8)])
    data[0] = 0x10 | rng.choice([data[0] & 15, rng.randrange(1, 9)])
    size = rng.choice([len(data), len(data), rng.randrange(32, len(data) + 1), 32])
    return bytes(data[:size]) + (rng.randbytes(rng.randrange(40)) if rng.random() < 0.2 else b"")


@pytest.mark.parametrize("payload_bytes", [64, 1440])
def test_no_packet_of_a_peer_breaks_the_reader(payload_bytes):
    rng = random.Random(payload_bytes)
    options = TransportOptions(payload_bytes=payload_bytes, early_buffer_bytes=1 << 20, deadline_s=1e6, silence_s=1e6)
    injected = 0
    sessions = 0
    while injected < INSIDERS // 2:
        sessions += 1
        network = Network(2, options=options, seed=sessions, rate_bps=30e6, loss=0.02)
        captured = [
            datagram(kind, sender=sender, step=step, count=count, payload=bytes(size))
            for kind in set(PacketType) - {PacketType.ABORT}
            for sender in (0, 1)
            for step, count, size in ((0, 1, 0), (1, 30, payload_bytes), (2, 600, 75), (0xFFFFFFFF, 1 << 22, 10))
        ]
        delivering = network.deliver

        def deliver_among_noise(target, packet, network=network, captured=captured, delivering=delivering):
            nonlocal injected
            captured.append(packet[1])
            for _ in range(rng.randrange(12)):
                data = bytearray(mangled(rng, captured))
                data[14:16] = (1 - target).to_bytes(2, "big")
                if data[0] & 15 == PacketType.HELLO or data[0] & 15 == PacketType.HELLO_ACK:
                    data[32:] = payload_bytes.to_bytes(4, "big") + rng.randrange(50).to_bytes(4, "big")
                reader = network.ranks[target]
                reader.on_datagram(memoryview(bytes(data)), rng.randrange(256), (f"10.0.0.{1 - target}", 53696),
                                   network.now)  # fmt: skip
                injected += 1
            delivering(target, packet)

        network.deliver = deliver_among_noise
        futures = []
        for step in (0, 1, 2):
            for source in (0, 1):
                key, bound = MessageKey(step, source), LossBound(0.2, immediate=step == 1)
                payload = payload_of(rng.randrange(1, 60 * payload_bytes))
                tags = plain_tags(-(-len(payload) // payload_bytes))
                futures.append(receive(network, len(payload), source=source, target=1 - source, key=key, bound=bound))
                futures.append(
                    send(network, payload, source=source, target=1 - source, key=key, bound=bound, tags=tags)
                )
        network.run(lambda network=network: network.now > 0.2)
        for future in futures:
            if future.done() and future.exception() is not None:
                assert isinstance(future.exception(), TransportError)
        for protocol in network.ranks:
            protocol.begin_step(1 << 20)
            assert protocol.engine.view.early_bytes == 0
            protocol.fail(TransportError("the session is over"))
        assert all(future.done() for future in futures)


def test_random_bytes_are_refused_fast():
    # A flood of noise must cost little, or it would starve the endpoint's thread.
    rng = random.Random(3)
    receiver = Network(2).ranks[1]
    noise = [memoryview(rng.randbytes(rng.randrange(1500))) for _ in range(2000)]
    began_s = time.process_time()
    for data in noise * 5:
        receiver.on_datagram(data, 0, ("10.0.0.0", 53696), 0.0)
    assert receiver.refused.total() == 10_000
    assert not receiver.counters()
    assert time.process_time() - began_s < 5, "processor time: a busy machine does not lengthen it"
