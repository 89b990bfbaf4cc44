# SPDX-License-Identifier: Apache-2.0
"""Endpoints over real sockets of this machine. Ports are whatever is free; every wait has a limit."""

import threading
import time
from contextlib import closing

import numpy as np
import pytest

from dlcp.host.ip import IpFamily
from dlcp.transport import (
    RELIABLE,
    Endpoint,
    Membership,
    MessageKey,
    PeerAbortedError,
    PeerLeftError,
    PeerSilentError,
    ReceiveRequest,
    SendRequest,
    TransportError,
    TransportOptions,
    bind_socket,
)
from tests.families import FAMILIES
from tests.transport.network import plain_tags
from tests.waiting import until

LIMIT_S = 20
TOKEN = 77


def endpoints(count, *, tokens=None, options=None, host="127.0.0.1"):
    sockets = [bind_socket(host, [0]) for _ in range(count)]
    addresses = {rank: sock.getsockname() for rank, sock in enumerate(sockets)}
    return [
        Endpoint(
            Membership(
                rank,
                {peer: address for peer, address in addresses.items() if peer != rank},
                token=tokens[rank] if tokens else TOKEN,
            ),
            sock,
            options=options,
        )
        for rank, sock in enumerate(sockets)
    ]


@pytest.fixture(params=FAMILIES)
def pair(request):
    both = endpoints(2, host=request.param.loopback)
    yield both
    for endpoint in both:
        endpoint.close()


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def start(sender, receiver, key, payload, bound=RELIABLE):
    tags = plain_tags(-(-len(payload) // 1440))
    return (
        receiver.receive(ReceiveRequest(sender.connection.rank, key, len(payload), bound, "layer")),
        sender.send(SendRequest(receiver.connection.rank, key, memoryview(payload), tags, bound, "layer")),
    )


def test_a_message_arrives_as_it_was_sent(pair):
    for endpoint in pair:
        endpoint.greet(LIMIT_S)
    payload = bytes_of(1_000_003)
    arrival, delivery = start(*pair, MessageKey(0, 0), payload)
    np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
    assert delivery.result(LIMIT_S).delivered.all()
    assert not pair[1].connection.refused


def test_who_closes_first_stays_until_the_other_has_all(pair):
    for endpoint in pair:
        endpoint.greet(LIMIT_S)
    sender, receiver = pair
    receiver.call(lambda: time.sleep(1.5))  # longer than confirmations are waited for
    payload = bytes_of(100_003)
    arrival, delivery = start(*pair, MessageKey(0, 0), payload)
    sender.close()
    np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
    assert delivery.result(LIMIT_S).delivered.all()


def test_many_threads_may_ask_at_once(pair):
    results = {}

    def work(number):
        payload = bytes_of(20_000 + number, number)
        sender, receiver = pair if number % 2 else pair[::-1]
        arrival, delivery = start(sender, receiver, MessageKey(0, number), payload)
        delivery.result(LIMIT_S)
        results[number] = np.array_equal(arrival.result(LIMIT_S).payload, payload)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert results == dict.fromkeys(range(12), True)


def test_noise_on_the_port_is_refused_and_counted(pair):
    with closing(IpFamily.of(pair[1]._socket).udp_socket()) as stranger:
        target = pair[1]._socket.getsockname()
        for noise in (b"", b"GET / HTTP/1.1", bytes(2000), bytes(1400)):
            stranger.sendto(noise, target)
    arrival, _ = start(*pair, MessageKey(0, 0), bytes_of(5000))
    arrival.result(LIMIT_S)
    until(lambda: pair[1].connection.refused["malformed"] >= 4)
    assert dict(pair[1].connection.refused) == {"malformed": 4}


def test_who_does_not_answer_a_greeting_is_named_with_its_address():
    silent = bind_socket("127.0.0.1", [0])
    host, port = silent.getsockname()
    alone = Endpoint(Membership(0, {3: (host, port)}, token=TOKEN), bind_socket("127.0.0.1", [0]))
    with closing(silent), closing(alone), pytest.raises(PeerSilentError) as caught:
        alone.greet(0.2)
    assert f"rank 3 at 127.0.0.1:{port}" in str(caught.value)


def test_sessions_with_different_tokens_do_not_meet():
    one, other = endpoints(2, tokens=[1, 2])
    with closing(one), closing(other):
        with pytest.raises(PeerSilentError, match="session token"):
            one.greet(0.3)
        assert other.connection.refused["token"] > 0


def test_a_peer_that_closes_with_a_reason_ends_the_wait(pair):
    waiting = pair[0].receive(ReceiveRequest(1, MessageKey(0, 0), 5000, RELIABLE, "layer"))
    pair[1].close("rank 1: out of memory")
    with pytest.raises(PeerAbortedError, match="rank 1 gave up: rank 1: out of memory"):
        waiting.result(LIMIT_S)


def test_a_peer_that_vanishes_ends_the_wait_in_time():
    options = TransportOptions(silence_s=0.6)
    one, other = endpoints(2, options=options)
    with closing(one):
        one.greet(LIMIT_S)
        other.call(other._stop)  # without a word, as when its process is killed
        waiting = one.receive(ReceiveRequest(1, MessageKey(5, 0), 5000, RELIABLE, "fc.weight"))
        with pytest.raises(PeerSilentError, match=r"step 5: rank 1 has been silent .* fc\.weight"):
            waiting.result(LIMIT_S)


def test_who_waits_for_a_rank_that_has_left_hears_it_at_once():
    one, other, third = endpoints(3, options=TransportOptions(silence_s=LIMIT_S))
    with closing(one), closing(third):
        for endpoint in (one, other, third):
            endpoint.greet(LIMIT_S)
        before = third.receive(ReceiveRequest(1, MessageKey(5, 0), 5000, RELIABLE, "fc.weight"))
        other.close()
        left = r"step 5: rank 1 has left .* while rank 2 waited for fc\.weight"
        with pytest.raises(PeerLeftError, match=left):
            before.result(LIMIT_S / 2)
        # Whoever wants nothing of it goes on; what is sent to it is nobody's loss.
        until(lambda: one.connection.peers[1].left)
        payload = np.zeros(5000, np.uint8)
        sent = one.send(SendRequest(1, MessageKey(5, 1), payload.data, plain_tags(4), RELIABLE, "fc.bias"))
        assert sent.result(LIMIT_S / 2).lost == 0
        with pytest.raises(PeerLeftError, match="rank 1 has left"):
            one.receive(ReceiveRequest(1, MessageKey(6, 0), 5000, RELIABLE, "fc.bias")).result(LIMIT_S / 2)


def test_who_leaves_after_a_failure_says_which():
    one, other, third = endpoints(3, options=TransportOptions(silence_s=LIMIT_S))
    with closing(one):
        for endpoint in (one, other, third):
            endpoint.greet(LIMIT_S)
        waiting = one.receive(ReceiveRequest(2, MessageKey(5, 0), 5000, RELIABLE, "fc.weight"))
        failing = third.receive(ReceiveRequest(1, MessageKey(5, 0), 5000, RELIABLE, "fc.weight"))
        other.close()
        with pytest.raises(PeerLeftError, match="rank 1 has left"):
            failing.result(LIMIT_S / 2)
        third.close()
        with pytest.raises(PeerAbortedError, match=r"rank 2 gave up: .* rank 1 has left"):
            waiting.result(LIMIT_S / 2)


def test_closing_ends_what_waits_and_what_is_asked_afterwards():
    one, other = endpoints(2)
    with closing(other):
        waiting = one.receive(ReceiveRequest(1, MessageKey(0, 0), 5000, RELIABLE, "layer"))
        one.close()
        one.close()
        for future in (waiting, one.receive(ReceiveRequest(1, MessageKey(0, 1), 5000, RELIABLE, "layer"))):
            with pytest.raises(TransportError, match="rank 0 has closed"):
                future.result(LIMIT_S)


def test_what_is_called_from_the_endpoint_s_own_thread_runs_at_once(pair):
    took_s, done = [], threading.Event()

    def call_again(began_s):
        took_s.append(time.monotonic() - began_s)
        done.set()

    def from_a_callback():
        began_s = time.monotonic()
        pair[0].call(lambda: call_again(began_s))

    # On a busy machine most may be late; if only the engine's own waking up ran them, all would be.
    while min(took_s, default=1) >= 0.02 and len(took_s) < 50:
        done.clear()
        pair[0].call(lambda: pair[0].connection.call_later(0.01, from_a_callback))
        assert done.wait(LIMIT_S)
    assert min(took_s) < 0.02, "not only when the engine wakes up by itself"


@pytest.mark.parametrize("lingering", [True, False])
def test_several_threads_may_close_at_once(lingering):
    """One leaves in peace, and waits for a peer that does not confirm; others give up meanwhile."""
    pairs = [endpoints(2) for _ in range(10)]
    filenos = [one._socket.fileno() for one, _ in pairs]
    threads = []
    for one, _ in pairs:
        if lingering:
            tags = plain_tags(4)
            one.send(SendRequest(1, MessageKey(0, 0), memoryview(bytes(5000)), tags, RELIABLE, "layer"))
        reasons = [None, "rank 0 breaks", "rank 0 breaks again", None]
        threads += [threading.Thread(target=one.close, args=(reason,)) for reason in reasons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert -1 not in filenos
    for one, other in pairs:
        assert not one._thread.is_alive()
        assert one._socket.fileno() == -1
        assert isinstance(one.connection.counters(), dict), "what was counted can still be read"
        other.close("over")


def test_the_socket_stays_until_the_thread_is_through_with_it(monkeypatch):
    one, other = endpoints(2)
    inside, go_on = threading.Event(), threading.Event()

    def stay():
        inside.set()
        go_on.wait(LIMIT_S)

    one.call(stay)
    assert inside.wait(LIMIT_S)
    join = one._thread.join
    monkeypatch.setattr(one._thread, "join", lambda timeout=None: join(0.05))
    one.close("rank 0 breaks")
    assert one._socket.fileno() >= 0, "its number must not be somebody else's while the engine has it"
    go_on.set()
    join(LIMIT_S)
    assert one._socket.fileno() == -1
    other.close("over")


def test_closing_lets_peers_finish():
    # The last confirmation of the last step must not be left to a deadline.
    one, other = endpoints(2)
    arrival, delivery = start(one, other, MessageKey(0, 0), bytes_of(50_000))
    arrival.result(LIMIT_S)
    other.close()
    assert delivery.result(5).delivered.all()
    one.close()


def test_a_question_that_cannot_be_answered_is_the_asker_s_error(pair):
    with pytest.raises(ValueError, match="do not fit"):
        pair[0].send(SendRequest(1, MessageKey(0, 0), memoryview(bytes(10)), plain_tags(5), RELIABLE, "x")).result(
            LIMIT_S
        )
    arrival, _ = start(*pair, MessageKey(0, 1), bytes_of(5000))
    assert arrival.result(LIMIT_S).delivered.all(), "the endpoint goes on"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_endpoint_that_breaks_tells_its_peers_and_its_owner(pair):
    waiting = pair[1].receive(ReceiveRequest(0, MessageKey(0, 0), 5000, RELIABLE, "layer"))
    mine = pair[0].receive(ReceiveRequest(1, MessageKey(0, 1), 5000, RELIABLE, "layer"))
    pair[0].connection.on_time = None
    with pytest.raises(TransportError, match="rank 0: the endpoint failed"):
        mine.result(LIMIT_S)
    with pytest.raises(PeerAbortedError, match="rank 0 gave up"):
        waiting.result(LIMIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_endpoint_that_has_ended_answers_what_is_asked_of_it(pair):
    def break_down():
        started.set()
        go_on.wait(LIMIT_S)
        raise OSError("no network")

    started, go_on = threading.Event(), threading.Event()
    pair[0].call(break_down)
    assert started.wait(LIMIT_S)
    # Both wait behind what breaks the endpoint, and so are never begun.
    asked = pair[0].receive(ReceiveRequest(1, MessageKey(0, 0), 5000, RELIABLE, "layer"))
    reached = []
    pair[0].call(lambda: reached.append(True))
    go_on.set()
    with pytest.raises(TransportError, match=r"rank 0: the endpoint failed: .*no network"):
        asked.result(LIMIT_S)
    pair[0].close()
    assert reached
    with pytest.raises(TransportError, match="rank 0: the endpoint failed"):
        pair[0].call(print)
    pair[1].close()
    with pytest.raises(TransportError, match="rank 1 has closed its endpoint"):
        pair[1].call(print)
    pair[0].close()


def test_the_first_free_port_is_taken_and_a_lack_of_ports_is_explained():
    first = bind_socket("127.0.0.1", [0])
    taken = first.getsockname()[1]
    with closing(first):
        with closing(bind_socket("127.0.0.1", [taken, 0])) as second:
            assert second.getsockname()[1] != taken
        with pytest.raises(OSError, match=rf"cannot bind UDP at 127\.0\.0\.1, port {taken} \(Address already in use\)"):
            bind_socket("127.0.0.1", [taken])
