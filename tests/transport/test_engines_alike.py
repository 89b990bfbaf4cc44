# SPDX-License-Identifier: Apache-2.0
"""The engines in C and in NumPy do the same: on the same network they send the same packets at the same times."""

import numpy as np
import pytest

from dlcp.transport import LossBound, TransportError, TransportOptions
from tests.transport.engines import is_here
from tests.transport.exchanges import MessageKey, Network, all_done, packets_of, payload_of, receive, send
from tests.transport.test_exchange import mixed_tags
from tests.transport.test_paths import RATE_BPS, exchange, network_of, routes

pytestmark = pytest.mark.skipif(not is_here("C"), reason="the engine in C is not here")

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

ODD_ROUTES = {
    "equal": {},
    "slow": {"rate_bps": RATE_BPS / 10},
    "lossy": {"loss": 0.05},
    "dead": {"loss": 1.0},
}


def converse(compiled, seed, fields, options):
    """Let three ranks send each other messages of all kinds; return the network and what became of them."""
    rng = np.random.default_rng(seed)
    network = Network(3, seed=seed, options=options, compiled=compiled, **fields)
    size = options.payload_bytes
    futures, buffers = [], []
    for number in range(10):
        source, target = rng.permutation(3)[:2].tolist()
        payload = payload_of(int(rng.integers(1, 90 * size)), number)
        key = MessageKey(number // 3, number)
        bound = LossBound(float(rng.choice([0.0, 0.1, 0.4])), immediate=bool(rng.random() < 0.2))
        tags = mixed_tags(packets_of(len(payload), options), number)
        where = {}
        if rng.random() < 0.5:
            where["into"] = np.full(len(payload), 0xEE, np.uint8)
            buffers.append(where["into"])
        late_s = float(rng.choice([0.0, 0.004]))

        def ask(size=payload.size, ends=(source, target), key=key, bound=bound, where=where):
            futures.append(receive(network, size, source=ends[0], target=ends[1], key=key, bound=bound, **where))

        network.at(network.now + late_s, ask)
        futures.append(send(network, payload, source=source, target=target, key=key, bound=bound, tags=tags))
        pause = network.now + float(rng.choice([0.0, 0.003]))
        network.run(lambda pause=pause: network.now >= pause)
    network.run(lambda: len(futures) == 20 and all_done(*futures)())
    network.run(lambda: all(protocol.settled for protocol in network.ranks))
    return network, [future.result() for future in futures], buffers


def numbers(result):
    return [np.asarray(getattr(result, name)).tolist() for name in result.__slots__]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fields", NETWORKS.values(), ids=NETWORKS)
def test_both_engines_send_the_same_packets_at_the_same_times(fields, options):
    ours, theirs = (converse(compiled, 1, fields, options) for compiled in (True, False))
    for number, (one, other) in enumerate(zip(ours[0].sent, theirs[0].sent, strict=False)):
        assert one == other, f"packet {number} differs"
    assert len(ours[0].sent) == len(theirs[0].sent)
    assert [numbers(result) for result in ours[1]] == [numbers(result) for result in theirs[1]]
    for one, other in zip(ours[2], theirs[2], strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(ours[0].ranks, theirs[0].ranks, strict=True):
        assert one.counters() == other.counters()
        assert one.refused == other.refused
        assert one.inbound_bps == other.inbound_bps
        for peer, flow in one._engine.flows.items():
            twin = other._engine.flows[peer]
            assert (flow.flying, flow.window, flow.heard_s) == (twin.flying, twin.window, twin.heard_s)
            assert (flow.smoothed_rtt_s, flow.rtt_variation_s) == (twin.smoothed_rtt_s, twin.rtt_variation_s)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_comparison_sees_what_it_should(compiled):
    # It would be worth nothing on networks where nothing goes wrong.
    network, results, _ = converse(compiled, 1, NETWORKS["everything"], OPTIONS["tagged"])
    assert network.dropped["loss"] > 20
    assert sum(result.resent for result in results if hasattr(result, "resent")) > 20
    assert any(not result.delivered.all() for result in results)
    other, _, _ = converse(compiled, 2, NETWORKS["everything"], OPTIONS["tagged"])
    assert network.sent != other.sent


def test_a_dead_peer_fails_alike():
    errors = []
    for compiled in (True, False):
        network = Network(2, options=TransportOptions(silence_s=1.0), compiled=compiled)
        network.dead.add(1)
        delivery = send(network, payload_of(50_000))
        network.run(delivery.done)
        with pytest.raises(TransportError) as caught:
            delivery.result()
        errors.append((str(caught.value), network.now, network.sent))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("odd", ODD_ROUTES.values(), ids=ODD_ROUTES)
def test_both_engines_take_the_same_paths(odd, monkeypatch):
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(Network, "compiled", compiled)
        network = network_of(routes(**odd))
        for number in range(3):
            exchange(network, number, 600_000)
        found.append((network, [protocol.paths_to(1 - rank) for rank, protocol in enumerate(network.ranks)]))
    (ours, our_paths), (theirs, their_paths) = found
    for number, (one, other) in enumerate(zip(ours.sent, theirs.sent, strict=False)):
        assert one == other, f"packet {number} differs"
    assert len(ours.sent) == len(theirs.sent)
    assert our_paths == their_paths
