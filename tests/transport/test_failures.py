# SPDX-License-Identifier: Apache-2.0
"""Every wait ends: with an error that names rank, step and layers when a peer is dead, slow or cut off."""

import pytest

from dlcp.transport import DeadlineError, LossBound, MessageKey, PeerSilentError, TransportError, TransportOptions
from tests.transport.exchanges import (
    Network,
    PacketType,
    Selective,
    all_done,
    datagram,
    deliver,
    exchange,
    payload_of,
    receive,
    send,
)

QUICK = TransportOptions(silence_s=2.0, deadline_s=6.0)
LAYERS = "layer4.conv2.weight..fc.bias"


def error_of(future):
    with pytest.raises(TransportError) as caught:
        future.result(0)
    return caught.value


def assert_names(error, *words):
    for word in words:
        assert word in str(error)


def test_a_dead_receiver_is_named():
    network = Network(2, options=QUICK)
    network.dead.add(1)
    delivery = send(network, payload_of(50_000), key=MessageKey(812, 0), label=LAYERS)
    network.run(all_done(delivery))
    error = error_of(delivery)
    assert isinstance(error, PeerSilentError)
    assert_names(error, "job 1", "step 812", "rank 1 has been silent", LAYERS)
    assert 2.0 < network.now < 2.5


def test_a_dead_sender_is_named():
    network = Network(3, options=QUICK)
    network.dead.add(2)
    arrival = receive(network, 50_000, source=2, key=MessageKey(812, 0), label=LAYERS)
    network.run(all_done(arrival))
    error = error_of(arrival)
    assert isinstance(error, PeerSilentError)
    assert_names(error, "step 812", "rank 2 has been silent", "while rank 1 waited", LAYERS)


def test_what_is_waited_for_is_named_rather_than_what_only_lacks_its_confirmation():
    confirming = PacketType.ACK, PacketType.STOP
    network = Selective(2, lambda network, source, header: header.type in confirming, options=QUICK)
    arrival = receive(network, 5000, key=MessageKey(811, 0))
    delivery = send(network, payload_of(5000), key=MessageKey(811, 0), label="conv1.weight")
    network.run(all_done(arrival))
    network.dead.add(1)
    awaited = receive(network, 5000, source=1, target=0, key=MessageKey(812, 0), label=LAYERS)
    assert not delivery.done()
    network.run(all_done(delivery, awaited))
    assert_names(error_of(awaited), "step 812", "rank 1 has been silent", LAYERS)


def test_who_waits_for_a_step_that_is_over_is_told():
    network = Network(2)
    over = receive(network, 5000, key=MessageKey(7, 0), label=LAYERS)
    current = receive(network, 5000, key=MessageKey(8, 0))
    network.ranks[1].begin_step(8)
    assert_names(error_of(over), "job 1, step 7 is over", "rank 0", LAYERS)
    assert not current.done()


def test_a_peer_that_dies_half_way_ends_everything_that_waits():
    network = Network(3, options=QUICK, rate_bps=10e6)
    payload = payload_of(500_000)
    waiting = [
        receive(network, len(payload), source=2, target=1),
        send(network, payload, source=1, target=2),
        receive(network, 1000, source=0, target=1, key=MessageKey(4, 0)),
    ]
    send(network, payload, source=2, target=1)
    network.run(lambda: network.now > 0.1)
    assert not any(future.done() for future in waiting)
    network.dead.add(2)
    network.run(all_done(*waiting))
    for future in waiting:
        assert_names(error_of(future), "rank 2 has been silent", "step 3")
    assert network.now < 3


def test_a_peer_that_computes_long_is_not_dead():
    network = Network(2, options=QUICK)
    arrival = receive(network, 5000)
    network.run(lambda: network.now > 3 * QUICK.silence_s - 0.5)
    assert not arrival.done()
    send(network, payload_of(5000))
    network.run(all_done(arrival))
    assert arrival.result().delivered.all()


def test_silence_is_counted_from_when_somebody_waits():
    # Between steps nobody sends anything; that must not count against a peer.
    network = Network(2, options=QUICK)
    exchange(network, 5000, key=MessageKey(0, 0))
    network.run(lambda: network.now > 60, limit_s=70, step_s=0.05)
    exchange(network, 5000, key=MessageKey(1, 0))


def test_a_path_that_heals_in_time_costs_nothing():
    def lose(network, source, header):
        return 0.01 < network.now < 1.5

    network = Selective(2, lose, options=QUICK)
    delivery, arrival = exchange(network, 1_000_000)
    assert arrival.delivered.all()
    assert delivery.seconds > 1.4


def test_a_receiver_that_answers_but_never_takes_a_message_misses_its_deadline():
    network = Network(2, options=QUICK)
    delivery = send(network, payload_of(50_000), label=LAYERS, bound=LossBound(0.1))
    network.run(all_done(delivery))
    error = error_of(delivery)
    assert isinstance(error, DeadlineError)
    assert_names(error, "step 3", "rank 1 acknowledged 100%", LAYERS, "bound 91%")
    assert 5.9 < network.now < 6.5


def test_a_sender_that_answers_but_never_sends_misses_its_deadline():
    network = Network(2, options=QUICK)
    arrival = receive(network, 14_400, label=LAYERS, bound=LossBound(0.1))
    deliver(network.ranks[1], datagram(PacketType.DATA, count=10, payload=bytes(1440)))
    network.run(all_done(arrival))
    error = error_of(arrival)
    assert isinstance(error, DeadlineError)
    assert_names(error, "step 3", "rank 0 delivered 10%", LAYERS, "bound 90%")


def test_of_two_overdue_messages_the_one_that_has_waited_longest_is_named():
    """The other one waits for it: rank 0 cannot send an average of what rank 2 does not contribute."""
    network = Network(3, options=QUICK)
    contribution = receive(network, 14_400, source=2, key=MessageKey(3, 0))
    network.run(lambda: network.now > 0.01)
    average = receive(network, 14_400, source=0, key=MessageKey(3, 1))
    network.run(all_done(contribution, average), step_s=0.07)  # so that both are found overdue at once
    for error in (error_of(contribution), error_of(average)):
        assert_names(error, "rank 2 delivered 0%")


def test_a_path_that_loses_one_protected_packet_for_ever_misses_the_deadline():
    def lose(network, source, header):
        return header.type is PacketType.DATA and header.index == 7

    network = Selective(2, lose, options=QUICK)
    arrival, delivery = receive(network, 50_000), send(network, payload_of(50_000))
    network.run(all_done(arrival, delivery))
    assert isinstance(error_of(arrival), DeadlineError)
    assert_names(error_of(arrival), "rank 0 delivered 97%")


def test_after_a_failure_nothing_waits_any_more():
    network = Network(2, options=QUICK)
    network.dead.add(1)
    first = send(network, payload_of(5000))
    network.run(all_done(first))
    for future in (
        send(network, payload_of(5000), key=MessageKey(9, 0)),
        receive(network, 5000, source=1, target=0, key=MessageKey(9, 1)),
    ):
        assert isinstance(error_of(future), PeerSilentError)
    assert network.ranks[0].settled


def test_a_message_that_is_confirmed_is_not_given_up_with_the_rest():
    network = Network(2, options=QUICK)
    delivery, arrival = exchange(network, 5000)
    network.ranks[0].fail(TransportError("later"))
    assert delivery.delivered.all()
    assert arrival.delivered.all()
