# SPDX-License-Identifier: Apache-2.0
"""The store that ranks meet by, and what they do over it: every wait ends, and whoever is missing is named."""

import contextlib
import socket
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest

from dlcp.session import store as store_module
from dlcp.session.joining import Agreement
from dlcp.session.store import Store, StoreChannel, StoreError, StoreServer, ended_key, serve
from dlcp.transport import DeadlineError, PeerSilentError
from tests.group.group_ranks import on_ranks


class Held(NamedTuple):
    count: int
    bits: bytes


@pytest.fixture
def server():
    server = StoreServer(("127.0.0.1", 0))
    yield server
    server.close()


@pytest.fixture
def store(server):
    store = Store(server.address, 5)
    yield store
    store.close()


def test_values_are_written_read_compared_and_forgotten(store):
    store.set("a", "1")
    store.set("b", b"\x00\xff")
    assert (store.get("a"), store.get("b")) == (b"1", b"\x00\xff")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    store.delete(["a", "never there"])
    assert not store.check(["a"])


def test_a_view_sees_the_keys_below_its_prefix_only(store):
    view = store.under("x").under("y")
    view.set("k", "1")
    assert store.get("x/y/k") == b"1"
    assert view.first(["k"], 0) == ("k", b"1")
    assert not store.check(["k"])


def test_what_is_waited_for_comes_or_time_is_up(server, store):
    other = Store(server.address, 5)
    timer = threading.Timer(0.3, lambda: other.set("late", "here"))
    timer.start()
    assert store.first(["never", "late"], 10) == ("late", b"here")
    began_s = time.monotonic()
    with pytest.raises(StoreError, match=r"nobody has written never in 0.2 s"):
        store.get("never", 0.2)
    assert 0.15 < time.monotonic() - began_s < 3
    other.close()


def test_whoever_waits_does_not_keep_others_of_the_same_connection(store):
    waiting = threading.Thread(target=store.first, args=(["never"], 2))
    waiting.start()
    began_s = time.monotonic()
    store.set("a", "1")
    assert time.monotonic() - began_s < 1
    waiting.join()


def test_a_last_will_is_written_however_a_connection_ends(server, store):
    other = Store(server.address, 5)
    other.leave("will", "gone")
    assert not store.check(["will"])
    other.close()
    assert store.get("will", 5) == b"gone"


def test_nobody_serving_is_told_within_the_deadline_with_what_to_check():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
        began_s = time.monotonic()
        with pytest.raises(StoreError, match=r"no answer from the store at 127\.0\.0\.1:\d+ .*MASTER_PORT"):
            Store(address, 0.3)
    assert time.monotonic() - began_s < 3


def test_a_port_in_use_is_told_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="MASTER_PORT a TCP port that"):
        serve(taken.getsockname())


def test_strangers_and_nonsense_do_not_harm_it(server, store):
    for words in (b"GET / HTTP/1.0\r\n\r\n", b"dlcp-store-1" + b"\xff" * 64, b"dlcp-store-1\0\0\0\2\0\0\0\0[]"):
        with socket.create_connection(server.address, 5) as stranger:
            stranger.sendall(words)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_ranks_agree_over_it(server):
    def one(rank):
        agreement = Agreement(Store(server.address, 5), rank, 3, 5)
        agreement.publish("topic", [rank])
        return agreement.collect("topic"), agreement.decide(f"rank {rank}")

    found = on_ranks(3, one)
    assert all(heard == {0: [0], 1: [1], 2: [2]} for heard, _ in found.values())
    assert len({verdict for _, verdict in found.values()}) == 1


def on_channel(server, size, function, only=None, deadline_s=10.0):
    def one(rank):
        return function(StoreChannel(Store(server.address, 5), "test", rank, range(size), deadline_s))

    return on_ranks(size, one, only=only)


def test_all_kinds_of_things_are_gathered(server):
    def one(ranks):
        first = ranks.gather((ranks.rank, {ranks.rank: b"\x00\x80"}, None, [True, 1.5, "ä"]))
        second = ranks.gather(Held(ranks.rank, b"x"))
        return first, second

    for first, second in on_channel(server, 3, one).values():
        assert first == {rank: (rank, {rank: b"\x00\x80"}, None, [True, 1.5, "ä"]) for rank in range(3)}
        assert second == {rank: (rank, b"x") for rank in range(3)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_sums_are_the_same_bits_on_all_ranks(server, dtype, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 1000)
    parts = [(np.random.default_rng(rank).standard_normal(1234) * 100).astype(dtype) for rank in range(3)]
    sums = on_channel(server, 3, lambda ranks: [ranks.add(parts[ranks.rank]) for _ in range(2)])
    for one in sums.values():
        for total in one:
            np.testing.assert_array_equal(total, parts[0] + parts[1] + parts[2])


def test_an_array_is_broadcast_in_parts(server, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 1000)

    def one(ranks):
        values = np.full(777, ranks.rank, np.float32)
        ranks.broadcast(values, 1)
        ranks.gather(None)
        return values

    for values in on_channel(server, 3, one).values():
        np.testing.assert_array_equal(values, np.ones(777))


def test_the_store_does_not_fill_up(server):
    def one(ranks):
        for _ in range(5):
            ranks.gather("x")
            ranks.add(np.ones(10))
            ranks.broadcast(np.ones(10), 2)
        ranks.gather(None)

    on_channel(server, 3, one)
    assert len(server._values) <= 6, "each rank's of the last rounds"


def test_a_rank_that_has_ended_is_named_at_once(server):
    Store(server.address, 5).set(ended_key(1), "it was killed")
    began_s = time.monotonic()
    found = on_channel(server, 3, lambda ranks: ranks.gather(0), only=[0, 2])
    assert time.monotonic() - began_s < 3
    for error in found.values():
        assert isinstance(error, PeerSilentError)
        assert "rank 1 has ended: it was killed (test)" in str(error)


def test_a_rank_that_does_not_come_is_named_by_the_deadline(server):
    found = on_channel(server, 3, lambda ranks: ranks.add(np.ones(3)), only=[0, 2], deadline_s=0.5)
    assert isinstance(found[0], DeadlineError)
    assert "rank 0 has waited 0.5 s for rank 1 (test)" in str(found[0])
    assert isinstance(found[2], DeadlineError)
