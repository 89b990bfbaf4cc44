# SPDX-License-Identifier: Apache-2.0
"""The store through which ranks meet, and operations over it: every wait ends, and a missing rank is named."""

import contextlib
import hashlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest

from dlcp.session import Options
from dlcp.session import store as store_module
from dlcp.session.joining import Agreement
from dlcp.session.secret import job_secret, proof
from dlcp.session.store import Store, StoreChannel, StoreError, StoreServer, ended_key, serve
from dlcp.transport import DeadlineError, PeerSilentError, RankEndedError
from tests.group.group_ranks import LIMIT_S, on_ranks

SECRET = b"of the job"


class Held(NamedTuple):
    count: int
    bits: bytes


@pytest.fixture
def server():
    server = StoreServer(("127.0.0.1", 0), SECRET)
    yield server
    server.close()


@pytest.fixture
def store(server):
    store = Store(server.address, 5, SECRET)
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
    other = Store(server.address, 5, SECRET)
    timer = threading.Timer(0.3, lambda: other.set("late", "here"))
    timer.start()
    assert store.first(["never", "late"], 10) == ("late", b"here")
    began_s = time.monotonic()
    with pytest.raises(StoreError, match=r"never was not written within 0.2 s"):
        store.get("never", 0.2)
    assert time.monotonic() - began_s > 0.15
    other.close()


def test_whoever_waits_does_not_keep_others_of_the_same_connection(store):
    waiting = threading.Thread(target=store.first, args=(["b"], LIMIT_S))
    waiting.start()
    store.set("a", "1")
    assert waiting.is_alive()
    store.set("b", "1")
    waiting.join(LIMIT_S / 2)
    assert not waiting.is_alive()


def test_a_last_will_is_written_however_a_connection_ends(server, store):
    other = Store(server.address, 5, SECRET)
    other.leave("will", "gone")
    assert not store.check(["will"])
    other.close()
    assert store.get("will", 5) == b"gone"


def test_nobody_serving_is_told_within_the_deadline_with_what_to_check():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
        with pytest.raises(StoreError, match=r"no answer from the store of rank 0 at 127\.0\.0\.1:\d+ .*MASTER_PORT"):
            Store(address, 0.3, SECRET)


def test_a_port_in_use_is_told_with_what_to_do():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="MASTER_PORT a free TCP port there"),
    ):
        serve(taken.getsockname(), SECRET)


def where(server):
    return "{}:{}".format(*server.address)


CALL = store_module._CALL_HEAD.pack(b"0" * 16, 1, hashlib.sha256(b"").digest())


def stranger(server, method, message=b"", proof=b"", timeout=5, kind="unary_unary", said=CALL):
    """Call the store without knowing the job's secret; return its answer."""
    with grpc.insecure_channel(where(server)) as channel:
        call = getattr(channel, kind)(f"/dlcp.Store/{method}")
        metadata = (("dlcp-call-bin", said), ("dlcp-proof-bin", proof))
        try:
            answer = call(message, metadata=metadata, timeout=timeout)
            return answer if kind == "unary_unary" else list(answer)
        except grpc.RpcError as error:
            return error.code()


def test_a_stranger_reads_and_writes_nothing_and_is_counted(server, store, caplog):
    store.set("token", "123")
    nonce = stranger(server, "challenge")
    for given in (b"", b"x" * 32, nonce, proof(b"another secret", b"call", nonce, b"set", CALL)):
        for method in ("set", "compare_set", "delete", "first", "check", "leave", "nonsense"):
            request = store_module._pack({"keys": ["token"], "expected": "123", "wait_s": 0}, b"evil")
            assert stranger(server, method, request, given) is grpc.StatusCode.UNAUTHENTICATED
        assert stranger(server, "attend", b"", given, kind="unary_stream") is grpc.StatusCode.UNAUTHENTICATED
    assert store.get("token") == b"123"
    assert server.refused == 4 * 8
    assert (
        sum("does not know the job's secret" in message for message in caplog.messages) == store_module.REFUSALS_LOGGED
    )


def test_a_recorded_call_is_refused_however_it_is_sent_again(server, store, caplog):
    """Whoever reads the network has calls with their proofs, and may send them again, or with another message."""
    recorded = []
    proven = server._proven
    server._proven = lambda name, call, given: recorded.append((name, call, given)) or proven(name, call, given)
    store.set("step", "1")
    request = store_module._pack({"keys": ["step"]}, b"1")
    store.set("step", "2")
    _, call, given = recorded[0]
    assert stranger(server, "set", request, given, said=call) is grpc.StatusCode.UNAUTHENTICATED
    assert "replays a recorded call" in caplog.text
    # One that has not come through: its message, its name or its number may be altered.
    late = store_module._CALL_HEAD.pack(call[:16], 1000, hashlib.sha256(request).digest())
    given = proof(SECRET, b"call", server._nonce, b"set", late)
    evil = store_module._pack({"keys": ["step"]}, b"3")
    assert stranger(server, "delete", request, given, said=late) is grpc.StatusCode.UNAUTHENTICATED
    assert stranger(server, "set", evil, given, said=late) is grpc.StatusCode.UNAUTHENTICATED
    assert "sent an altered message" in caplog.text
    assert store.get("step") == b"2"
    assert server.refused == 3


def test_an_altered_answer_is_not_believed(store):
    store.set("step", "1")
    link = store._link
    ask = link._unary("check")
    link._calls["check"] = lambda *words, **named: ask(*words, **named).replace(b"true", b"null")
    with pytest.raises(StoreError, match="has no valid proof of the job's secret: it was altered"):
        store.check(["step"])


def test_calls_count_once_in_whatever_order_they_come():
    numbers = store_module.ReplayWindow()
    come = {number: numbers.is_new(number) for number in (2, 1, 5, 3, 4, 7, 6)}
    assert all(come.values())
    assert not any(numbers.is_new(number) for number in come)
    assert numbers.is_new(2000)
    assert not any(numbers.is_new(number) for number in come), "too old to be known"
    assert numbers.is_new(2000 - numbers.WINDOW + 1)
    assert not numbers.is_new(2000 - numbers.WINDOW)
    assert numbers.is_new((1 << 64) - 1)
    assert not numbers.is_new(2000)
    assert numbers._seen.bit_length() <= numbers.WINDOW, "calls that never come take no memory"


def test_nonsense_does_not_harm_it(server, store):
    for words in (b"GET / HTTP/1.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64, b"\0" * 4096):
        with socket.create_connection(server.address, 5) as sock:
            sock.sendall(words)
            sock.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
    store.set("a", "1")
    assert store.get("a") == b"1"


STRANGER = """
import sys
import grpc
channel = grpc.insecure_channel(sys.argv[1])
large = bytes(int(sys.argv[2]))
waiting = [channel.unary_unary("/dlcp.Store/set").future(large, timeout=60) for _ in range(20)]
print(*(call.code().name for call in waiting))
"""


def test_strangers_cannot_exhaust_it(server, store):
    """Neither with connections, nor with calls that never end, nor with messages: they are not read."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets what this process once held, see proc(5)
    before = peak_bytes()
    size = store_module.VALUE_BYTES_MAX
    with contextlib.ExitStack() as held:
        for _ in range(200):
            held.enter_context(socket.create_connection(server.address, 5))
        stranger = subprocess.Popen(
            [sys.executable, "-c", STRANGER, where(server), str(size)], stdout=subprocess.PIPE, text=True
        )
        store.set("a", "1")
        assert store.get("a") == b"1"
        codes = stranger.communicate(timeout=120)[0].split()
    assert codes == [grpc.StatusCode.UNAUTHENTICATED.name] * 20
    assert peak_bytes() - before < 4 * size, "of twenty such messages"
    assert threading.active_count() < 30


def peak_bytes():
    """Return how much memory this process has held at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_what_a_rank_may_ask_is_limited(store, monkeypatch):
    with pytest.raises(StoreError, match="refuses: a call may have at most"):
        store.set("k" * (store_module.KEY_BYTES_MAX + 1), "1")
    with pytest.raises(StoreError, match="refuses: a value may have at most"):
        store.set("k", bytes(store_module.VALUE_BYTES_MAX + 1))
    monkeypatch.setattr(store_module, "TOTAL_BYTES_MAX", 100)
    store.set("k", bytes(60))
    store.set("k", bytes(40))
    with pytest.raises(StoreError, match="refuses: the store is full: it holds 1 keys and 40 bytes"):
        store.set("l", bytes(61))
    store.delete(["k"])
    store.set("l", bytes(61))
    monkeypatch.setattr(store_module, "WAIT_S_MAX", 0.1)
    store._link.call("first", {"keys": ["never"], "wait_s": 1e9})


def test_two_jobs_do_not_mix(server):
    with pytest.raises(StoreError, match=r"belongs to another job or user: .*DLCP_SECRET_FILE"):
        Store(server.address, 5, b"of another job")


def test_a_rank_knows_a_store_that_does_not_know_the_secret(server):
    """Somebody who listens at the master's port, and lets everybody in, learns nothing of a rank."""
    server._proven = lambda *_: True
    server._secret = b"a guess"
    with pytest.raises(StoreError, match="belongs to another job or user"):
        Store(server.address, 5, SECRET)


def test_the_key_of_a_user_is_made_once_and_is_nobody_elses(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keys = set(on_ranks(8, lambda rank: job_secret(Options())).values())
    assert len(keys) == 1
    assert len(keys.pop()) == 32
    path = tmp_path / "dlcp" / "key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]
    path.chmod(0o640)
    with pytest.raises(OSError, match=r"other users can access it; chmod 600.*set DLCP_SECRET_FILE"):
        job_secret(Options())
    monkeypatch.setenv("DLCP_SECRET", "a secret of thirty-two characters")
    assert job_secret(Options()) == b"a secret of thirty-two characters"


STANDING_STILL = """
import os, signal, sys
from dlcp.session import store
store.Store(("127.0.0.1", int(sys.argv[1])), 5, b"of the job").leave("will", "gone")
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_host_that_no_longer_answers_is_noticed(server, store, monkeypatch):
    """Its connection stays open, as after a power failure; a process that stands still is as silent as such a host."""
    process = subprocess.Popen([sys.executable, "-c", STANDING_STILL, str(server.address[1])])
    try:
        assert store.get("will", 90) == b"gone"
    finally:
        process.kill()
        process.wait()


def test_ranks_agree_over_it(server):
    def one(rank):
        agreement = Agreement(Store(server.address, 5, SECRET), rank, 3, 5)
        agreement.publish("topic", [rank])
        return agreement.collect("topic"), agreement.decide(f"rank {rank}")

    found = on_ranks(3, one)
    assert all(heard == {0: [0], 1: [1], 2: [2]} for heard, _ in found.values())
    assert len({verdict for _, verdict in found.values()}) == 1


def on_channel(server, size, function, only=None, deadline_s=10.0):
    def one(rank):
        return function(StoreChannel(Store(server.address, 5, SECRET), "test", rank, range(size), deadline_s))

    return on_ranks(size, one, only=only)


def test_a_gathering_that_one_rank_gives_up_fails_on_all(server):
    """Rank 2 gives its item and ends. Rank 1 gives up; rank 0 comes after that, and finds all items."""
    store = Store(server.address, 5, SECRET)

    def channel(rank):
        return StoreChannel(Store(server.address, 5, SECRET), "test", rank, range(3), 10.0, ["left"])

    with ThreadPoolExecutor(3) as pool:
        pool.submit(channel(2).gather, "c")
        gone = pool.submit(channel(1).gather, "b")
        store.get("test/1/1")
        store.get("test/1/2")
        store.set("left", "rank 2 has ended")
        with pytest.raises(RankEndedError, match="rank 2 has ended"):
            gone.result(10)
        with pytest.raises(RankEndedError, match="another rank has left"):
            channel(0).gather("a")
    assert store.get("test/1/outcome") == b"over"


def test_a_gathering_that_one_rank_has_completed_holds_on_all(server):
    """A rank that has all items may be ahead of one that sees only that the others have left."""
    store = Store(server.address, 5, SECRET)
    store.set("test/1/outcome", "complete")
    store.set("left", "rank 1 has ended")
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(StoreChannel(store, "test", 0, range(2), 10.0, ["left"]).gather, "a")
        store.get("test/1/0")
        store.set("test/1/1", repr("b"))
        assert gathered.result(10) == {0: "a", 1: "b"}


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
    Store(server.address, 5, SECRET).set(ended_key(1), "it was killed")
    found = on_channel(server, 3, lambda ranks: ranks.gather(0), only=[0, 2], deadline_s=10 * LIMIT_S)
    for error in found.values():
        assert isinstance(error, PeerSilentError)
        assert "rank 1 has ended: it was killed (test)" in str(error)


def test_a_rank_that_does_not_come_is_named_by_the_deadline(server):
    found = on_channel(server, 3, lambda ranks: ranks.add(np.ones(3)), only=[0, 2], deadline_s=0.5)
    assert isinstance(found[0], DeadlineError)
    assert "rank 0 has waited 0.5 s for rank 1 (test)" in str(found[0])
    assert isinstance(found[2], DeadlineError)
