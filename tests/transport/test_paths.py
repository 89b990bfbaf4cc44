# SPDX-License-Identifier: Apache-2.0
"""Packets to a peer leave from several ports, and so take several routes of a fabric; bad ones are left."""

import pytest

from dlcp import wire
from dlcp.transport import TransportOptions
from dlcp.transport.messages import RELIABLE
from dlcp.wire import ACK_ENTRY, ACK_PATH, GREETING, PacketType
from tests.native.rules import RULES
from tests.transport.bare_engine import KEY, BareEngine, tags_of
from tests.transport.exchanges import MessageKey, Network, all_done, packets_of, payload_of, receive, send
from tests.transport.test_exchange import mixed_tags

RATE_BPS = 50e6
BYTES = 3_000_000
RTT_S = 0.02


def routes(**odd):
    """Four routes, of which the last one is odd."""
    return [{"rate_bps": RATE_BPS}, {"rate_bps": RATE_BPS}, {"rate_bps": RATE_BPS}, {"rate_bps": RATE_BPS, **odd}]


def network_of(kinds, *, paths=8, depth=60, ecn_depth=16, **options):
    options = TransportOptions(paths=paths, **options)
    network = Network(2, routes=kinds, options=options, depth=depth, ecn_depth=ecn_depth)
    for protocol in network.ranks:
        protocol.liveness.greet_all()
    network.run(lambda: all(not protocol.liveness.strangers for protocol in network.ranks))
    return network


def exchange(network, number, size=BYTES, bound=RELIABLE):
    """Send a message each way; return how long both took."""
    began, payload = network.now, payload_of(size, number)
    tags = mixed_tags(packets_of(size), number)
    futures = []
    for source, target in ((0, 1), (1, 0)):
        key = MessageKey(0, number)
        futures.append(receive(network, size, source=source, target=target, key=key, bound=bound))
        futures.append(send(network, payload, source=source, target=target, key=key, bound=bound, tags=tags))
    network.run(all_done(*futures))
    for future in futures[::2]:
        assert future.result().payload.tobytes() == payload.tobytes()
    return network.now - began


def allowed_s(good_routes):
    """How long the good routes need for a message each way."""
    return BYTES * 8 / (good_routes * RATE_BPS) * 1514 / 1440


def weights(network, rank=0):
    return [state.weight for state in network.ranks[rank].engine.paths_to(1 - rank)]


def test_one_window_fills_all_routes():
    network = network_of(routes())
    exchange(network, 0)
    took_s = exchange(network, 1)
    assert took_s < 1.2 * allowed_s(4)
    counts = [route["packets"] for route in network.routes]
    assert max(counts) < 1.5 * min(counts)  # acknowledgements take the first


SPREADS = ([0, 1, 2, 3] * 3, [0] * 3 + [1] * 3 + [2] * 2 + [3] * 4, [0] * 2 + [1] * 4 + [2] * 2 + [3] * 4)
"""Which route each of twelve paths takes, as a fabric hashes it."""


@pytest.mark.parametrize("spread", SPREADS, ids=["even", "uneven", "more uneven"])
@pytest.mark.parametrize(("odd", "good"), [({}, 4), ({"rate_bps": RATE_BPS / 10}, 3), ({"loss": 0.05}, 3)])
def test_routes_that_mark_nothing_are_filled_and_only_bad_ones_left(odd, good, spread):
    """A queue that stands on one route shows although another one's is empty, and a full one is not taken for lossy."""
    kinds = routes(**odd)
    network = network_of([kinds[number] for number in spread], paths=12, depth=41, ecn_depth=1 << 30)
    exchange(network, 0, 2 * BYTES)
    took_s = sorted(exchange(network, number, 2 * BYTES) for number in range(1, 6))
    assert took_s[2] < 1.5 * 2 * allowed_s(good)
    packets = [route["packets"] for route in kinds]
    assert not odd or packets[3] < 0.7 * max(packets[:3])


def test_one_path_has_what_one_route_has():
    network = network_of(routes(), paths=1)
    assert exchange(network, 0) > allowed_s(1)
    assert [bool(route.get("packets")) for route in network.routes] == [True, False, False, False]


def test_a_slow_route_is_left():
    network = network_of(routes(rate_bps=RATE_BPS / 10))
    exchange(network, 0)
    took_s = min(exchange(network, number) for number in range(1, 4))
    assert took_s < 1.2 * allowed_s(3)
    assert max(weights(network)[number] for number in (3, 7)) < 0.5
    assert network.routes[3]["packets"] < network.routes[2]["packets"] / 3


def test_a_route_that_loses_at_random_is_left_within_a_second():
    network = network_of(routes(loss=0.05))
    left, number = set(), 0
    while left < {3, 7}:
        exchange(network, number)
        number += 1
        left |= {path for path, weight in enumerate(weights(network)) if not weight}
        assert network.now < 1
    assert left == {3, 7}
    before = network.dropped["loss"]
    exchange(network, number)
    assert network.dropped["loss"] - before < 40


def test_a_dead_route_is_left_at_once_and_taken_again_once_it_is_back():
    network = network_of(routes(), silence_s=30.0)
    exchange(network, 0)
    network.routes[3]["loss"] = 1.0
    exchange(network, 1)
    assert [weights(network)[number] for number in (3, 7)] == [0, 0]
    began, packets = network.now, network.routes[3]["packets"]
    exchange(network, 2)
    assert network.routes[3]["packets"] - packets < 20
    del network.routes[3]["loss"]
    number = 3
    while network.now < began + 4 * RULES["path_again_s"]:
        exchange(network, number)
        number += 1
    assert all(weights(network))


def test_what_is_lost_where_nobody_stays_does_not_shrink_the_window():
    network = network_of(routes(loss=0.05))
    number = 0
    while network.now < 1:
        exchange(network, number)
        number += 1
    window = network.ranks[0].engine.flows[1].window
    for more in range(10):
        exchange(network, number + more)
    assert network.ranks[0].engine.flows[1].window > window / 2


def test_routes_that_all_lose_alike_are_all_kept_in_use():
    kinds = routes(loss=0.02)
    for route in kinds:
        route["loss"] = 0.02
    network = network_of(kinds)
    for number in range(6):
        exchange(network, number, bound=RELIABLE)
    assert sum(weights(network)) > 4


def test_a_small_window_uses_few_paths():
    bare = BareEngine(window=2 * RULES["path_packets"] - 1)
    bare.engine.spread(1, 16)
    bare.send(tags_of([4] * 200))
    bare.pump_all(burst=8)
    assert set(bare.paths) == {0, 1}


def test_packets_are_lost_by_later_ones_of_their_own_path():
    bare = BareEngine(window=16.0)
    bare.engine.spread(1, 2)
    message, _ = bare.send(tags_of([4] * 60), ratio=0.5)
    assert (bare.pump(1.0, burst=8), bare.pump(1.005, burst=8)) == (list(range(8)), list(range(8, 16)))
    first, other = bare.paths[0], bare.paths[8]
    assert first != other
    bare.acknowledge(1.01, *range(8, 16))
    assert message.flying == 8  # those left earlier, but took another way
    bare.flow.window = 64.0
    while bare.paths[-1] == other:
        assert bare.pump(1.012, burst=1)
    newest = len(bare.paths) - 1
    bare.acknowledge(1.015, newest)
    assert message.flying == newest + 1 - 8 - 1 - 8  # acknowledged, acknowledged, and lost


def test_a_path_on_which_nothing_arrives_is_judged_by_the_others_and_left():
    bare = BareEngine(window=64.0)
    bare.engine.spread(1, 2)
    bare.send(tags_of([4] * 1000), ratio=0.5)
    now_s, told, left = 1.0, 0, False
    while not left and now_s < 1.0 + 20 * RTT_S:
        bare.pump_all(now_s, burst=8)
        now_s += RTT_S
        news = zip(bare.paths[told:], bare.sent[told:], strict=True)
        bare.acknowledge(now_s, *(wire.decode(datagram).index for path, (_, datagram, _) in news if path == 0))
        told = len(bare.paths)
        left = bare.engine.paths_to(1)[1].weight == 0
    assert 1.0 + 2 * RTT_S < now_s < 1.0 + 9 * RTT_S
    assert left
    assert sum(report.delivered for report in bare.reports) >= 32
    assert not any(report.lost for report in bare.reports)  # the window has no part in it


def test_marks_are_told_by_path():
    bare = BareEngine(window=100.0)
    bare.engine.accept(1, [40000, 40001])
    bare.expect(20 * bare.size)
    header = wire.Header(PacketType.DATA, 0, 4, 0, 0, 1, 0, *KEY, 1, 0, 20, 0x1122334455667788)
    for index, port in enumerate([53696, 40000, 40001, 40001]):
        packet = header._replace(index=index).encode() + bytes(bare.size)
        bare.engine.take_in(memoryview(packet), 3 if port != 40000 else 2, ("10.0.0.1", port), 1.0)
    bare.tick(2.0)
    ((_, entries),) = bare.acknowledgements()
    assert [(key.step, bits) for key, block, bits in entries if block == ACK_PATH] == [(0, 1), (2, 2)]


def test_a_path_with_more_marks_carries_less():
    bare = BareEngine(window=400.0)
    bare.engine.spread(1, 2)
    bare.send(tags_of([4] * 2000))
    marked = 0
    for turn in range(1, 20):
        first = len(bare.sent)
        bare.pump_all(turn * 0.01, burst=8)
        headers = [wire.decode(datagram) for _, datagram, _ in bare.sent[first:]]
        marked += bare.paths[first:].count(1)
        bits = {}
        for header in headers:
            bits[header.index // 64] = bits.get(header.index // 64, 0) | 1 << header.index % 64
        entries = [ACK_ENTRY.pack(*KEY, *entry) for entry in bits.items()]
        payload = b"".join([*entries, ACK_ENTRY.pack(1, 0, ACK_PATH, marked)])
        bare.take(PacketType.ACK, payload, step=0, count=0, now_s=turn * 0.01 + 0.005)
    clean, congested = bare.engine.paths_to(1)
    assert clean.marks == 0
    assert congested.marks > 0.5
    assert clean.weight == 1 > congested.weight


def test_only_announced_ports_are_accepted():
    bare = BareEngine()
    bare.expect(20 * bare.size)
    packet = wire.Header(PacketType.DATA, 0, 4, 0, 0, 1, 0, *KEY, 1, 0, 20, 0x1122334455667788).encode()
    packet += bytes(bare.size)

    def refused_from(host, port):
        before = bare.engine.counters().get("refused_sender", 0)
        bare.engine.take_in(memoryview(packet), 0, (host, port), 1.0)
        return bare.engine.counters().get("refused_sender", 0) > before

    assert refused_from("10.0.0.1", 40000)
    bare.engine.accept(1, [40000])
    assert not refused_from("10.0.0.1", 40000)
    assert not refused_from("10.0.0.1", 53696)
    assert refused_from("10.0.0.1", 40001)
    assert refused_from("10.0.0.2", 40000)
    bare.engine.accept(1, [40001])  # it has been started again
    assert refused_from("10.0.0.1", 40000)
    assert not refused_from("10.0.0.1", 40001)


@pytest.mark.parametrize("length", [7, 9, 11])
def test_greetings_of_odd_length_are_refused(length):
    network = network_of(routes())
    header = wire.Header(PacketType.HELLO, 0, 7, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0x1122334455667788)
    hello = (GREETING.pack(1440, 100) + bytes(3))[:length]
    network.ranks[0].on_datagram(memoryview(header.encode() + hello), 0, ("10.0.0.1", 53696), network.now)
    assert network.ranks[0].refused["malformed"] == 1
