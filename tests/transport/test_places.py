# SPDX-License-Identifier: Apache-2.0
"""Messages that are received where the caller wants them: into a buffer, with a tail, or into a sum."""

import numpy as np
import pytest

from dlcp.transport import RELIABLE, LossBound, MessageKey, SendRequest
from dlcp.wire import PacketType
from tests.transport.exchanges import (
    KEY,
    Network,
    Selective,
    all_done,
    packets_of,
    payload_of,
    plain_tags,
    receive,
    send,
)
from tests.transport.network import outcome_of

SIZE = 50_000


@pytest.mark.parametrize("late_s", [0.0, 0.002, 0.5])
@pytest.mark.parametrize("tail_bytes", [0, 12, 1440, 20_000])
@pytest.mark.parametrize("placed", [True, False])
def test_a_message_goes_into_the_buffer_and_its_end_into_the_tail(placed, tail_bytes, late_s):
    network = Network(2, loss=0.05, seed=3)
    payload = payload_of(SIZE)
    tail_sent = payload[SIZE - tail_bytes :].copy()
    delivery = outcome_of(
        network.ranks[0].send,
        SendRequest(
            1, KEY, memoryview(payload[: SIZE - tail_bytes]), plain_tags(packets_of(SIZE)), RELIABLE, "x", tail_sent
        ),
    )
    network.run(lambda: network.now >= late_s)
    tail = np.zeros(tail_bytes, np.uint8)
    place = {"into": np.zeros(SIZE - tail_bytes, np.uint8)} if placed else {}
    arrival = receive(network, SIZE, tail=tail, **place)
    network.run(all_done(arrival, delivery))
    got = arrival.result().payload
    assert np.concatenate([got, tail]).tobytes() == payload.tobytes()
    if placed:
        assert np.shares_memory(got, place["into"])
        assert len(got) == len(place["into"])


@pytest.mark.parametrize("late_s", [0.0, 0.5])
@pytest.mark.parametrize("placed", [True, False])
def test_where_packets_are_missing_a_given_place_is_as_before_and_another_zero(placed, late_s):
    def lose(network, source, header):
        return header.type is PacketType.DATA and header.index in (4, 9)

    network = Selective(2, lose)
    # Memory that has been used before must not show.
    old = receive(network, SIZE, key=MessageKey(0, 0))
    send(network, np.full(SIZE, 0xAA, np.uint8), key=MessageKey(0, 0), bound=LossBound(0.1))
    used = network.ranks[1].buffers.take(packets_of(SIZE) * 1440)
    used.fill(0xAA)
    network.ranks[1].buffers.give(used)
    payload, bound = payload_of(SIZE), LossBound(0.1)
    send(network, payload, bound=bound)
    network.run(lambda: network.now >= late_s)
    place = {"into": np.full(SIZE, 7, np.uint8)} if placed else {}
    arrival = receive(network, SIZE, bound=bound, **place)
    network.run(all_done(arrival))
    missing = np.flatnonzero(~arrival.result().delivered)
    assert set(missing) == {4, 9}
    lost = np.repeat(~arrival.result().delivered, 1440)[:SIZE]
    np.testing.assert_array_equal(arrival.result().payload, np.where(lost, 7 if placed else 0, payload))
    assert not old.done()


def test_what_is_received_is_the_receiver_s_own():
    # Memory for what comes early is used again; not while somebody has it.
    network = Network(2)
    payloads = [payload_of(SIZE, seed) for seed in range(6)]
    arrivals = []
    for number, payload in enumerate(payloads):
        tail = np.zeros(100, np.uint8) if number % 2 else np.zeros(0, np.uint8)
        key = MessageKey(0, number)
        send(network, payload, key=key)
        network.run(lambda number=number: network.now >= 0.1 * (number + 1))
        arrivals.append((receive(network, SIZE, key=key, tail=tail), tail))
        network.ranks[1].take_events()
    for (arrival, tail), payload in zip(arrivals, payloads, strict=True):
        assert np.concatenate([arrival.result(0).payload, tail]).tobytes() == payload.tobytes()


def test_a_message_goes_on_from_a_copy_when_its_sender_wants_its_bytes_back():
    network = Network(2, rate_bps=20e6, loss=0.1, seed=4)
    payload = payload_of(SIZE)
    given = payload.copy()
    arrival, delivery = receive(network, SIZE), send(network, given)
    network.run(lambda: network.now > 0.004)
    assert not delivery.done()
    network.ranks[0].detach(1, KEY)
    network.ranks[0].detach(1, MessageKey(9, 9))
    given[:] = 0
    network.run(all_done(arrival, delivery))
    np.testing.assert_array_equal(arrival.result().payload, payload)


READ_ONLY = np.zeros(100, np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("message_bytes", "place", "complaint"),
    [
        (100, {"into": np.zeros(99, np.uint8)}, "message of 100 bytes cannot be received into 99 bytes"),
        (100, {"into": np.zeros(101, np.uint8)}, "into 101 bytes"),
        (100, {"into": np.zeros(100, np.uint8), "tail": np.zeros(1, np.uint8)}, "into 101 bytes"),
        (100, {"tail": np.zeros(101, np.uint8)}, "into 101 bytes"),
        (None, {"into": np.zeros(100, np.uint8)}, "None bytes"),
        (100, {"into": READ_ONLY}, "contiguous, writable uint8"),
        (100, {"into": np.zeros(100, np.int8)}, "contiguous, writable uint8"),
        (100, {"into": np.zeros(200, np.uint8)[::2]}, "contiguous, writable uint8"),
    ],
)
def test_places_that_a_message_does_not_fit_are_refused(early, message_bytes, place, complaint):
    network = Network(2)
    if early:
        send(network, payload_of(100))
        network.run(lambda: network.now > 0.01)
    with pytest.raises(ValueError, match=complaint):
        receive(network, message_bytes, label="fc.weight", **place)
    if not early:
        send(network, payload_of(100))
    arrival = receive(network, 100)
    network.run(all_done(arrival))
    np.testing.assert_array_equal(arrival.result().payload, payload_of(100))


@pytest.mark.parametrize("values", [24, 26])
def test_a_sum_of_another_size_is_refused(values):
    network = Network(2)
    summation = network.ranks[1].reduction(np.zeros(values, np.float32), 1)
    with pytest.raises(ValueError, match=f"100 bytes cannot be added to {4 * values} bytes"):
        receive(network, 100, reduction=summation)


@pytest.mark.parametrize("late_s", [0.0, 0.003, 0.5])
def test_a_message_is_added_to_a_sum_whenever_somebody_waits_for_it(late_s):
    network = Network(3, loss=0.1, seed=5)
    rng = np.random.default_rng(5)
    shares = rng.standard_normal((3, 20_000)).astype(np.float32)
    values = shares[0].copy()
    summation = network.ranks[0].reduction(values, 2)
    futures = [send(network, shares[rank].view(np.uint8), source=rank, target=0) for rank in (1, 2)]
    network.run(lambda: network.now >= late_s)
    for position, rank in enumerate((1, 2)):
        futures.append(receive(network, 80_000, source=rank, target=0, reduction=summation, position=position))
    network.run(all_done(*futures))
    assert summation.finish(rescale=False) == 0
    np.testing.assert_array_equal(values, (shares[0] + shares[1] + shares[2]) / np.float32(3))
