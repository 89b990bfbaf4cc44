# SPDX-License-Identifier: Apache-2.0
"""Ranks come to use DLCP together or not at all, and know within the deadline; ranks are threads with one store."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore, PrefixStore, TCPStore

from dlcp.collectives import Bucket, DirectAllReduce, RankContext
from dlcp.session import joining
from dlcp.session.joining import USE_DLCP, Agreement, NotJoinedError, join
from dlcp.torch import Options
from dlcp.transport import TransportOptions
from dlcp.transport.path_mtu import ETHERNET_MTU, payload_for_mtu
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment

LOCAL = Options(bind="127.0.0.1:0")
BROKEN = LOCAL.with_(silence_s=7.0)
LIMIT_S = 20


@pytest.fixture
def store():
    return PrefixStore("test", HashStore())


def together(store, options, *, deadline_s=10.0, delays=None, secret=None):
    """Let a rank join per entry of ``options``, None for one that does not; return what each got or raised."""

    def one(rank):
        time.sleep((delays or {}).get(rank, 0))  # who comes late is what is tested
        agreement = Agreement(store, rank, len(options), deadline_s, secret)
        try:
            return join(options[rank], agreement, call="dlcp.torch.enable"), agreement.speaker()
        except NotJoinedError as error:
            return str(error), agreement.speaker()

    with ThreadPoolExecutor(len(options)) as pool:
        waiting = {rank: pool.submit(one, rank) for rank in range(len(options)) if options[rank]}
        return {rank: future.result(LIMIT_S) for rank, future in waiting.items()}


def reasons(results):
    """The one reason that all ranks have; exactly one of them logs it."""
    assert sum(says for _, says in results.values()) == 1
    assert results[min(results)][1], "the lowest rank says it"
    (reason,) = {reason for reason, _ in results.values()}
    return reason


def test_three_ranks_join_and_average(store):
    results = together(store, [LOCAL] * 3)
    joined = [results[rank][0] for rank in range(3)]
    assert {one.endpoint.connection.options.payload_bytes for one in joined} == {8936}, "loopback passes jumbo frames"
    assert len({one.endpoint.connection.membership.token for one in joined}) == 1
    assert [one.remark for one in joined] == [""] * 3
    buffers = [np.full(5000, rank, np.float32) for rank in range(3)]
    running = [
        DirectAllReduce(RankContext(one.endpoint.connection, range(3))).start(
            0, 0, Bucket(buffers[rank], ValueType.FLOAT32, [Segment(Layer("w", 0), 0, 5000)])
        )
        for rank, one in enumerate(joined)
    ]
    for future in running:
        np.testing.assert_array_equal(future.result(LIMIT_S), np.ones(5000))
    for one in joined:
        one.endpoint.close()


def test_a_stranger_who_writes_and_deletes_in_the_store_of_ranks_with_a_secret_harms_nothing(caplog):
    """Each value once, as soon as it is there, over a connection of its own to PyTorch's store."""
    serving = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = TCPStore("127.0.0.1", serving.port, is_master=False)
    topics = ("here", "entry", "path", "local peers", "ready")
    wanted = {"verdict", *topics, *(f"{topic}/{rank}" for topic in topics for rank in range(3))}
    done = threading.Event()

    def disturb():
        while not done.is_set():
            for key in [key for key in wanted if stranger.check([key])]:
                wanted.remove(key)
                if len(wanted) % 2:
                    stranger.delete_key(key)
                else:
                    stranger.set(key, b"\xff\x00[1]")

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        results = together(TCPStore("127.0.0.1", serving.port, is_master=False), [LOCAL] * 3, secret=b"s" * 32)
    finally:
        done.set()
        disturbing.join(LIMIT_S)
    joined = [results[rank][0] for rank in range(3)]
    assert len({one.endpoint.connection.membership.token for one in joined}) == 1
    for one in joined:
        one.endpoint.close()
    assert len(wanted) < 8, "the stranger was there"
    assert "in the job's store: it has no valid proof of the job's secret" in caplog.text


def test_a_rank_that_does_not_come_is_named_by_the_deadline(store):
    began_s = time.monotonic()
    results = together(store, [LOCAL, None, LOCAL], deadline_s=0.6)
    assert time.monotonic() - began_s > 0.5
    assert "rank 1 has not joined: check that it runs, and calls dlcp.torch.enable" in reasons(results)


def test_the_lowest_of_those_who_came_speaks(store):
    results = together(store, [None, LOCAL, LOCAL], deadline_s=0.6)
    assert "rank 0 has not joined" in reasons(results)


def test_a_late_rank_hears_what_was_decided_at_once(store):
    early = together(store, [None, LOCAL], deadline_s=0.3)
    late = together(store, [LOCAL, None], deadline_s=10 * LIMIT_S)
    assert late[0][0] == early[1][0]


def test_a_port_in_use_stops_all_at_once(store):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        options = [LOCAL, Options(bind=f"127.0.0.1:{port}"), LOCAL]
        results = together(store, options, delays={1: 0.1}, deadline_s=10 * LIMIT_S)
    reason = reasons(results)
    assert "rank 1: cannot bind UDP at 127.0.0.1" in reason
    assert str(port) in reason


def test_whatever_stops_one_rank_the_others_know_at_once_and_why(store, monkeypatch):
    """An error that nobody foresaw, of no kind that joining expects."""
    bind = joining.bind

    def bind_or_break(options, addresses):
        if options.silence_s == BROKEN.silence_s:
            raise ZeroDivisionError("a bug")
        return bind(options, addresses)

    monkeypatch.setattr(joining, "bind", bind_or_break)

    def one(rank):
        return join([LOCAL, BROKEN, LOCAL][rank], Agreement(store, rank, 3, 10 * LIMIT_S), call="dlcp.torch.enable")

    with ThreadPoolExecutor(3) as pool:
        errors = [waiting.exception(LIMIT_S) for waiting in [pool.submit(one, rank) for rank in range(3)]]
    assert isinstance(errors[1], ZeroDivisionError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, NotJoinedError)
        assert "rank 1 gave up: ZeroDivisionError('a bug')" in str(error)


def test_an_address_that_leads_nowhere_is_told_with_what_to_do(store):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        nowhere = Options(bind="127.0.0.1:0", advertise=f"127.0.0.1:{deaf.getsockname()[1]}")
        reason = reasons(together(store, [LOCAL, nowhere], deadline_s=1.5))
    assert "gets no UDP packet through to rank" in reason
    assert "firewall" in reason


@pytest.mark.parametrize("field", [{"loss_bound": 0.3}, {"payload_bytes": 512}, {"collective": "ring"}, {"job": 4}])
def test_options_that_differ_are_named(store, field):
    reason = reasons(together(store, [LOCAL, LOCAL.with_(**field)]))
    (name,) = field
    assert f"rank 1 {name}={field[name]!r}" in reason


def test_a_configured_payload_is_used(store):
    results = together(store, [LOCAL.with_(payload_bytes=64)] * 2)
    for joined, _ in results.values():
        assert joined.options.payload_bytes == joined.endpoint.connection.options.payload_bytes == 64
        joined.endpoint.close()


def test_sockets_are_closed_when_nothing_came_of_it(store):
    fixed = []
    for _ in range(2):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            fixed.append(sock.getsockname())
    options = [Options(bind=f"{host}:{port}", loss_bound=0.1 * rank) for rank, (host, port) in enumerate(fixed)]
    assert "loss_bound" in reasons(together(store, options))
    for place in fixed:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(place)


def test_the_first_verdict_counts(store):
    barrier = threading.Barrier(8)

    def propose(rank):
        barrier.wait(LIMIT_S)
        return Agreement(store, rank, 8, 5).decide(USE_DLCP if rank % 2 else f"reason of rank {rank}")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(propose, range(8)))) == 1


def test_where_nothing_can_be_asked_packets_fit_ethernet():
    assert Options().transport(2).payload_bytes == payload_for_mtu(ETHERNET_MTU) == TransportOptions().payload_bytes
