# SPDX-License-Identifier: Apache-2.0
"""Three ranks send each other messages of all kinds at once: every one arrives as it should, on any network."""

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import LossBound, MessageKey, TransportOptions
from dlcp.wire import PacketType, Queue
from tests.transport.exchanges import Network, all_done, check, packets_of, payload_of, receive, send
from tests.transport.test_exchange import mixed_tags

FILL = 0xEE
NETWORKS = {
    "idle": {"depth": 10_000},
    "shallow": {"depth": 12, "ecn_depth": 4, "rate_bps": 30e6},
    "lossy": {"loss": 0.05},
    "hopeless": {"loss": 0.25, "rate_bps": 30e6},
    "disorderly": {"jitter_s": 0.004, "duplicate": 0.2, "depth": 10_000},
    "long": {"delay_s": 0.01, "depth": 12, "ecn_depth": 10_000, "rate_bps": 30e6},
    "everything": {"loss": 0.08, "jitter_s": 0.006, "duplicate": 0.1, "depth": 20, "ecn_depth": 5},
}
OPTIONS = {
    "tagged": TransportOptions(),
    "small": TransportOptions(payload_bytes=64),
    "cubic": TransportOptions(congestion="cubic", tagged=False),
}


def converse(seed, fields, options):
    """Let ten messages go between three ranks; return the network, what was asked for each, and what became of it.

    Their sizes, bounds and tags differ, some receives are posted late, and some messages have a given place.
    """
    rng = np.random.default_rng(seed)
    network = Network(3, seed=seed, options=options, **fields)
    size = options.payload_bytes
    messages, arrivals, deliveries = [], {}, []
    for number in range(10):
        source, target = rng.permutation(3)[:2].tolist()
        payload = payload_of(int(rng.integers(1, 90 * size)), number)
        key = MessageKey(number // 3, number)
        bound = LossBound(float(rng.choice([0.0, 0.1, 0.4])), immediate=bool(rng.random() < 0.2))
        tags = mixed_tags(packets_of(len(payload), options), number)
        place = {"into": np.full(len(payload), FILL, np.uint8)} if rng.random() < 0.5 else {}
        late_s = float(rng.choice([0.0, 0.004]))

        def ask(number=number, size=payload.size, ends=(source, target), key=key, bound=bound, place=place):
            arrivals[number] = receive(network, size, source=ends[0], target=ends[1], key=key, bound=bound, **place)

        network.at(network.now + late_s, ask)
        deliveries.append(send(network, payload, source=source, target=target, key=key, bound=bound, tags=tags))
        messages.append((payload, tags, bound, place.get("into")))
        pause = network.now + float(rng.choice([0.0, 0.003]))
        network.run(lambda pause=pause: network.now >= pause)
    network.run(lambda: len(arrivals) == 10 and all_done(*deliveries, *arrivals.values())())
    network.run(lambda: all(protocol.settled for protocol in network.ranks))
    results = [(delivery.result(), arrivals[number].result()) for number, delivery in enumerate(deliveries)]
    return network, messages, results


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fields", NETWORKS.values(), ids=NETWORKS)
def test_every_message_arrives_as_its_bound_and_its_place_ask(fields, options):
    network, messages, results = converse(1, fields, options)
    for (payload, tags, bound, into), (delivery, arrival) in zip(messages, results, strict=True):
        if into is not None:
            assert arrival.payload.ctypes.data == into.ctypes.data
            present = np.repeat(arrival.delivered, options.payload_bytes)[: len(payload)]
            assert (into[~present] == FILL).all(), "a given place stays as it is where packets are missing"
            arrival = arrival._replace(payload=np.where(present, into, 0))
        check(payload, tags, bound, delivery, arrival, options.payload_bytes)
    for protocol in network.ranks:
        assert protocol.refused.keys() <= {"stale"}, "late answers about messages that are over, at the most"
        assert all(flow.flying == 0 for flow in protocol.engine.flows.values())


def test_the_same_conversation_sends_the_same_packets_at_the_same_times():
    # Nothing but what the engine is given decides what it does: no clock, no address in memory, no order of hashes.
    first, _, results = converse(1, NETWORKS["everything"], OPTIONS["tagged"])
    again, _, _ = converse(1, NETWORKS["everything"], OPTIONS["tagged"])
    assert first.sent == again.sent
    other, _, _ = converse(2, NETWORKS["everything"], OPTIONS["tagged"])
    assert first.sent != other.sent
    # It would be worth nothing on a network where nothing goes wrong.
    assert first.dropped["loss"] > 20
    assert sum(delivery.resent for delivery, _ in results) > 20
    assert any(not delivery.delivered.all() for delivery, _ in results)


def test_probes_in_the_queue_of_packets_are_counted_with_them():
    """Switches tell gradients by their queue, so hosts have to know how many packets of it are none."""
    network, _, results = converse(1, NETWORKS["lossy"], OPTIONS["tagged"])
    sent = [wire.decode(entry[3]) for entry in network.sent]
    probes = [header for header in sent if header.type is PacketType.PROBE and header.queue != Queue.CONTROL]
    assert sum(delivery.probes for delivery, _ in results) == len(probes) > 0
