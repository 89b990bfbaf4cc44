# SPDX-License-Identifier: Apache-2.0
"""Messages that follow a sum: a packet leaves when the sum has it complete, the rest when the message is opened."""

import numpy as np
import pytest
from exchanges import KEY, Network, Selective, all_done, packets_of, plain_tags, receive, send
from network import TOKEN

from dlcp import wire
from dlcp.transport import RELIABLE, LossBound, MessageKey, TransportOptions
from dlcp.transport.errors import DeadlineError, TransportError
from dlcp.wire import Header, PacketType

pytestmark = pytest.mark.usefixtures("engine")
VALUES = 20_000
PACKETS = packets_of(4 * VALUES)
"""Of the sum; what follows it has one more, which the tail makes longer."""
RESULT = MessageKey(3, 2)
LATE = range(30, 40)
"""Packets of a share that the network keeps back at first."""


class Following:
    """Rank 1's values are added to rank 0's, and what comes of it goes to rank 2 while that is done."""

    def __init__(self, network, *, joined=True):
        self.network = network
        rng = np.random.default_rng(9)
        self.values, self.share = rng.standard_normal((2, VALUES)).astype(np.float32)
        self.average = (self.values + self.share) / np.float32(2)
        self.tail = np.zeros(8, np.uint8)
        self.got, self.got_tail = np.zeros(4 * VALUES, np.uint8), np.zeros(8, np.uint8)
        self.summation = network.ranks[0].summation(self.values, 1)
        self.result = receive(
            network, 4 * VALUES + 8, source=0, target=2, key=RESULT, into=self.got, tail=self.got_tail
        )
        if joined:
            self.follow()
        self.shared = send(network, self.share.view(np.uint8), source=1, target=0)
        self.arrival = receive(network, 4 * VALUES, source=1, target=0, summation=self.summation)
        self.arrival.add_done_callback(lambda _: self.open())

    def follow(self):
        tags = plain_tags(packets_of(4 * VALUES + 8))
        self.delivery = self.network.ranks[0].send_message(
            2, RESULT, memoryview(self.values.view(np.uint8).data), tags, RELIABLE, "fc.weight", self.network.now,
            self.tail, summation=self.summation,
        )  # fmt: skip

    def open(self):
        self.summation.finish(rescale=False)
        self.tail[:] = 7
        self.network.ranks[0].open_message(2, RESULT)

    @property
    def packets_got(self):
        rows = np.zeros((PACKETS, 1440), np.uint8)
        rows.reshape(-1)[: 4 * VALUES] = self.got
        return set(np.flatnonzero(rows.any(axis=1)).tolist())


def late(until_s):
    def lose(network, source, header):
        is_share = header.type is PacketType.DATA and (header.step, header.message) == KEY
        return is_share and header.index in LATE and network.now < until_s

    return lose


def test_packets_leave_as_the_sum_has_them_complete(engine):
    network = Selective(3, late(1.0))
    following = Following(network)
    network.run(lambda: network.now > 0.5)
    complete = set(range(PACKETS - 1)) - set(LATE)  # the last one waits for the tail, which shares it
    assert following.packets_got == (complete if engine == "C" else set())
    message = network.ranks[0]._peers[2].sending[RESULT].message
    assert (message.held, message.unsent) == (message.packets - len(following.packets_got),) * 2
    network.run(all_done(following.shared, following.delivery, following.result))
    np.testing.assert_array_equal(following.got.view(np.float32), following.average)
    assert following.got_tail.tolist() == [7] * 8
    assert (message.held, message.unsent) == (0, 0)


def test_nobody_is_asked_about_packets_that_are_held():
    network = Selective(3, late(3.0))
    following = Following(network)
    network.run(lambda: network.now > 0.1)
    before = network.ranks[2].counted["acknowledgements"]
    network.run(lambda: network.now > 2.5)
    asked = [wire.decode(datagram) for _, source, target, datagram in network.arrived if (source, target) == (0, 2)]
    assert PacketType.PROBE not in {header.type for header in asked}
    assert network.ranks[2].counted["acknowledgements"] == before
    assert network.ranks[0].rate_to(2) >= 0
    network.run(all_done(following.delivery, following.result))


@pytest.mark.parametrize("seed", range(4))
def test_it_arrives_whole_over_a_network_that_loses_and_reorders(seed):
    network = Network(3, loss=0.1, duplicate=0.05, jitter_s=0.002, seed=seed)
    following = Following(network)
    network.run(all_done(following.shared, following.delivery, following.result))
    np.testing.assert_array_equal(following.got.view(np.float32), following.average)
    assert following.got_tail.tolist() == [7] * 8
    assert following.delivery.result().delivered.all()


def test_what_is_complete_before_it_follows_leaves_at_once(engine):
    network = Selective(3, late(1.0))
    following = Following(network, joined=False)
    network.run(lambda: network.now > 0.3)
    following.follow()
    network.run(lambda: network.now > 0.6)
    assert len(following.packets_got) == (PACKETS - 1 - len(LATE) if engine == "C" else 0)
    network.run(all_done(following.delivery, following.result))
    np.testing.assert_array_equal(following.got.view(np.float32), following.average)


def test_nobody_can_confirm_what_has_not_left():
    """Confirmations of packets that are held are forged, or of a confused peer."""
    network = Selective(3, late(1.0))
    following = Following(network)
    network.run(lambda: network.now > 0.3)
    message = network.ranks[0]._peers[2].sending[RESULT].message
    delivered = message.delivered
    entries = b"".join(
        RESULT.step.to_bytes(4, "big") + RESULT.message.to_bytes(2, "big") + block.to_bytes(4, "big") + b"\xff" * 8
        for block in (0, 1 << 31)
    )
    fields = dict.fromkeys(Header._fields, 0) | {"type": PacketType.ACK, "job": 1, "sender": 2, "token": TOKEN}
    header = Header(**fields)
    network.ranks[0].on_datagram(memoryview(header.encode() + entries), 0, ("10.0.0.2", 53696), network.now)
    assert message.delivered == delivered
    network.run(all_done(following.delivery, following.result))
    np.testing.assert_array_equal(following.got.view(np.float32), following.average)


def test_a_sum_may_end_and_a_rank_may_fail_before_what_follows_is_sent():
    network = Selective(3, late(1e9))
    following = Following(network)
    network.run(lambda: network.now > 0.1)
    following.summation.release()
    following.summation = None
    network.ranks[0].fail(TransportError("the switch is dead"))
    assert str(following.delivery.exception()) == "the switch is dead"
    network.ranks[0].open_message(2, RESULT)  # too late; of no effect


def test_once_it_is_opened_it_has_its_full_time():
    options = TransportOptions(deadline_s=1.0, silence_s=30.0)
    network = Selective(3, lambda network, source, header: late(0.9)(network, source, header), options=options)
    following = Following(network)
    network.dead.add(2)
    network.run(lambda: following.arrival.done())
    opened_s = network.now
    assert opened_s > 0.9
    network.run(all_done(following.delivery))
    assert isinstance(following.delivery.exception(), DeadlineError)
    assert network.now == pytest.approx(opened_s + 1.0, abs=0.2)


def test_a_message_that_is_waited_for_can_be_given_its_full_time_again():
    network = Network(2, options=TransportOptions(deadline_s=1.0, silence_s=30.0))
    arrival = receive(network, 100, label="fc.weight")
    network.run(lambda: network.now > 0.8)
    network.ranks[1].renew(0, KEY)
    network.run(arrival.done)
    assert network.now == pytest.approx(1.8, abs=0.2)
    with pytest.raises(DeadlineError, match=r"fc\.weight"):
        arrival.result()
    network.ranks[1].renew(0, KEY)  # nobody waits for it any more; of no effect


def test_a_receiver_learns_when_the_sender_knows_what_was_lost():
    def lose(network, source, header):
        if header.type is PacketType.STOP_ACK:
            return network.now < 0.5
        return header.type is PacketType.DATA and header.index == 3

    network, told = Selective(2, lose), []
    arrival = receive(network, 80_000, bound=LossBound(0.1))
    send(network, np.ones(80_000, np.uint8), bound=LossBound(0.1))
    network.run(arrival.done)
    network.ranks[1].when_told(0, KEY, lambda: told.append(network.now))
    network.run(lambda: network.now > 0.4)
    assert not told
    network.run(lambda: told)
    assert told[0] > 0.5


def test_of_a_whole_message_the_sender_need_not_be_told():
    network, told = Network(2), []
    arrival = receive(network, 80_000)
    send(network, np.ones(80_000, np.uint8))
    network.run(arrival.done)
    network.ranks[1].when_told(0, KEY, lambda: told.append(network.now))
    assert told
