# SPDX-License-Identifier: Apache-2.0
"""What the receiver accepts as part of a message, and when it has enough."""

from concurrent.futures import Future

import numpy as np
import pytest

from dlcp.transport.bound import RELIABLE, LossBound
from dlcp.transport.incoming import Awaited, IncomingMessage

SIZE = 100


def awaited(message_bytes, bound=RELIABLE):
    return Awaited(message_bytes, bound, "layer", 9.0, Future())


def fragment(size=SIZE, value=1):
    return memoryview(bytes([value]) * size)


@pytest.mark.parametrize("message_bytes", [301, 350, 399, 400])
def test_only_fragments_of_the_right_size_fit(message_bytes):
    message = IncomingMessage(4, SIZE, 0.0)
    assert message.wait(awaited(message_bytes))
    last = message_bytes - 300
    for index in range(3):
        assert [size for size in range(SIZE + 2) if message.fits(index, fragment(size))] == [SIZE]
    assert [size for size in range(SIZE + 2) if message.fits(3, fragment(size))] == [last]


def test_before_the_size_is_known_the_last_fragment_may_have_any():
    message = IncomingMessage(4, SIZE, 0.0)
    assert not message.fits(3, fragment(0))
    assert message.fits(3, fragment(1))
    assert message.fits(3, fragment(SIZE))
    assert not message.fits(3, fragment(SIZE + 1))
    message.store(3, fragment(30), 0, False)
    assert not message.fits(3, fragment(31))


@pytest.mark.parametrize(
    ("message_bytes", "agrees"), [(300, False), (301, True), (400, True), (401, False), (1, False)]
)
def test_sizes_that_need_another_number_of_packets_disagree(message_bytes, agrees):
    assert IncomingMessage(4, SIZE, 0.0).wait(awaited(message_bytes)) == agrees


def test_a_last_packet_of_another_size_disagrees():
    message = IncomingMessage(4, SIZE, 0.0)
    message.store(3, fragment(30), 0, False)
    assert not message.wait(awaited(331))
    assert message.wait(awaited(330))


def test_what_is_missing_reads_as_zeros():
    message = IncomingMessage(4, SIZE, 1.0)
    message.wait(awaited(350, LossBound(0.5)))
    message.store(2, fragment(value=9), 77, False)
    message.store(3, fragment(50, value=5), 88, True)
    arrival = message.arrival(1.5)
    assert arrival.payload.tolist() == [0] * 200 + [9] * 100 + [5] * 50
    assert arrival.delivered.tolist() == [False, False, True, True]
    assert arrival.layer.tolist() == [0, 0, 77, 88]
    assert arrival.seconds == pytest.approx(0.5)


def test_enough_takes_the_share_and_every_protected_packet():
    message = IncomingMessage(10, SIZE, 0.0)
    message.wait(awaited(1000, LossBound(0.2)))
    message.protected_packets = 2
    for index in range(8):
        assert not message.enough
        message.store(index, fragment(), 0, protected=index == 0)
    assert not message.enough, "a protected packet is missing"
    message.store(8, fragment(), 0, protected=True)
    assert message.enough
    assert not message.complete
    message.store(9, fragment(), 0, protected=False)
    assert message.complete
    np.testing.assert_array_equal(message.bitmap(), True)


def test_enough_cannot_be_known_before_the_sender_has_said_how_many_are_protected():
    message = IncomingMessage(10, SIZE, 0.0)
    message.wait(awaited(1000, LossBound(0.5)))
    for index in range(9):
        message.store(index, fragment(), 0, False)
    assert not message.enough
    message.protected_packets = 0
    assert message.enough
