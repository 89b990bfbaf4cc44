# SPDX-License-Identifier: Apache-2.0
"""Packets that a sender keeps for a later step: nobody waits for them, and both ends agree on which they are."""

import numpy as np
import pytest

from dlcp.transport import LossBound, ReceiveRequest, SendRequest
from dlcp.wire import QUESTION
from tests.transport.exchanges import (
    KEY,
    Network,
    PacketType,
    Selective,
    all_done,
    datagram,
    deliver,
    packets_of,
    payload_of,
    plain_tags,
    receive,
    send,
)
from tests.transport.network import outcome_of

SIZE = 300_000
PACKETS = packets_of(SIZE)
HALF = LossBound(deferral=0.5)


def every_third(packets=PACKETS):
    deferred = np.arange(packets) % 3 == 1
    deferred[-1] = False
    return deferred


def request(deferred, *, bound=HALF, tags=None, size=SIZE):
    payload = payload_of(size)
    return SendRequest(
        1, KEY, memoryview(payload), tags or plain_tags(packets_of(size)), bound, "fc", deferred=deferred
    )


def exchange(network, deferred, *, bound=HALF, tags=None, limit_s=60.0):
    into = np.full(SIZE, 0xEE, np.uint8)
    arrival = outcome_of(network.ranks[1].receive, ReceiveRequest(0, KEY, SIZE, bound, "fc", into=into))
    delivery = outcome_of(network.ranks[0].send, request(deferred, bound=bound, tags=tags))
    network.run(all_done(arrival, delivery), limit_s=limit_s)
    network.run(lambda: all(protocol.settled for protocol in network.ranks))
    return delivery.result(), arrival.result(), into


def test_what_is_deferred_is_not_sent_and_nobody_waits_for_it():
    deferred = every_third()
    network = Network(2, depth=10_000)
    delivery, arrival, into = exchange(network, deferred)
    assert (delivery.sent, delivery.lost, delivery.resent) == (PACKETS - deferred.sum(), 0, 0)
    assert delivery.deferred.sum() == arrival.deferred == deferred.sum()
    np.testing.assert_array_equal(arrival.delivered, ~deferred)
    np.testing.assert_array_equal(delivery.delivered, ~deferred)
    skipped = np.repeat(deferred, 1440)[:SIZE]
    np.testing.assert_array_equal(into, np.where(skipped, 0xEE, payload_of(SIZE)))
    assert arrival.seconds < 0.75 * exchange(Network(2, depth=10_000), None)[1].seconds


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ratio", [0.0, 0.2])
@pytest.mark.parametrize("fields", [{"loss": 0.1}, {"jitter_s": 0.004, "duplicate": 0.2}, {"depth": 12}], ids=str)
def test_what_is_lost_on_top_keeps_to_the_loss_bound(fields, ratio, seed):
    deferred = every_third()
    bound = LossBound(ratio, deferral=0.4)
    delivery, arrival, _ = exchange(Network(2, seed=seed, **fields), deferred, bound=bound)
    np.testing.assert_array_equal(delivery.delivered, arrival.delivered)
    assert not (arrival.delivered & deferred).any()
    assert delivery.lost <= bound.allowed(PACKETS)
    assert delivery.lost == PACKETS - arrival.delivered.sum() - deferred.sum()


def test_a_question_that_is_lost_is_asked_again():
    probes = []

    def lose(_, source, header):
        if header.type is PacketType.PROBE:
            probes.append(header)
        return header.type is PacketType.PROBE and len(probes) < 3

    delivery, _, _ = exchange(Selective(2, lose, depth=10_000), every_third())
    assert len(probes) >= 3
    assert delivery.lost == 0


def test_a_message_of_which_something_is_deferred_may_arrive_before_its_receive():
    network, deferred = Network(2, depth=10_000), every_third()
    delivery = outcome_of(network.ranks[0].send, request(deferred))
    network.run(lambda: network.now > 0.2)
    arrival = receive(network, SIZE, bound=HALF)
    network.run(all_done(arrival, delivery))
    np.testing.assert_array_equal(arrival.result().delivered, ~deferred)
    present = np.repeat(~deferred, 1440)[:SIZE]
    np.testing.assert_array_equal(arrival.result().payload, np.where(present, payload_of(SIZE), 0))


@pytest.mark.parametrize("number", [6, 10, 11, 2**32 - 1])
def test_a_question_that_defers_more_than_the_bound_is_refused(number):
    network = Network(2)
    receiver = network.ranks[1]
    arrival = receive(network, 14_400, bound=HALF)
    for index in range(5):
        deliver(receiver, datagram(PacketType.DATA, index=index, count=10, payload=bytes(1440)))
    deliver(receiver, datagram(PacketType.PROBE, count=10, payload=QUESTION.pack(0, number)))
    assert not arrival.done()
    assert receiver.refused["malformed"] == 1
    deliver(receiver, datagram(PacketType.PROBE, count=10, payload=QUESTION.pack(0, 5)))
    assert arrival.result(0).deferred == 5


def test_one_that_came_early_is_held_to_the_bound_of_the_receive():
    network = Network(2)
    receiver = network.ranks[1]
    deliver(receiver, datagram(PacketType.DATA, index=0, count=10, payload=bytes(1440)))
    deliver(receiver, datagram(PacketType.PROBE, count=10, payload=QUESTION.pack(1, 9)))
    arrival = receive(network, 14_400, bound=HALF)
    assert not arrival.done()
    assert receiver.refused["malformed"] == 1


def test_every_packet_that_is_not_deferred_may_be_sent_again():
    lost = set()

    def lose(_, source, header):
        if header.type is not PacketType.DATA or header.index in lost:
            return False
        lost.add(header.index)
        return True

    delivery, _, _ = exchange(Selective(2, lose, depth=10_000), every_third())
    assert (delivery.lost, delivery.resent) == (0, PACKETS - every_third().sum())


def protected_first():
    return plain_tags(PACKETS, protected=3)


@pytest.mark.parametrize(
    ("deferred", "tags", "wrong"),
    [
        (np.ones(PACKETS - 1, np.bool_), None, "`deferred` must be"),
        (np.zeros(PACKETS, np.uint8), None, "`deferred` must be"),
        (np.arange(PACKETS) < PACKETS // 2 + 1, None, "the bound admits"),
        (np.arange(PACKETS) == PACKETS - 1, None, "the last one cannot be deferred"),
        (np.arange(PACKETS) == 2, protected_first(), "protected packets"),
    ],
)
def test_what_cannot_be_deferred_is_refused_by_name(deferred, tags, wrong):
    network = Network(2)
    with pytest.raises(ValueError, match=wrong) as raised:
        outcome_of(network.ranks[0].send, request(deferred, tags=tags))
    assert "fc" in str(raised.value)
    payload = payload_of(SIZE)
    delivery, arrival = send(network, payload), receive(network, SIZE)
    network.run(all_done(delivery, arrival))
    assert arrival.result().whole
