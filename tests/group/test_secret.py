# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a secret know each other by it: strangers, recordings and wrong secrets are refused and named."""

import errno
import os
import re
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest

from dlcp.session import Options
from dlcp.session.joining import Agreement, NotJoinedError, join
from dlcp.session.secret import DISTURBED, SealedStore, configured_secret, job_secret, proof, session_token
from dlcp.session.store import Store, StoreError, StoreServer
from dlcp.session.training_session import LEFT
from tests.group.group_ranks import on_ranks, serving, together

SECRET = b"known to the ranks of the job"
LOCAL = Options(bind="127.0.0.1:0", shared_memory=False)


class OpenStore:
    """A store that anybody may write to, as PyTorch's is, with all that was ever written to it."""

    def __init__(self):
        self.values, self.written, self.on_set = {}, [], lambda key: None
        self.lock = threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.values[key] = value.encode()
            self.written.append((key, value))
        self.on_set(key)

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        """As PyTorch's do: there may be no value, and an expected one may be bytes."""
        expected = expected if isinstance(expected, bytes) else expected.encode()
        with self.lock:
            if self.values.get(key, b"") == expected:
                self.values[key] = desired.encode()
                self.written.append((key, desired))
            return self.values.get(key, expected)


def joined(store, secrets=(SECRET, SECRET, SECRET), deadline_s=10.0):
    """Let ranks with these secrets join; return by rank the token, or why it has not joined."""
    meeting = threading.Barrier(len(secrets))

    def one(rank):
        agreement = Agreement(store, rank, len(secrets), deadline_s, secrets[rank])
        try:
            endpoint = join(LOCAL, agreement, call="enable").endpoint
        except NotJoinedError as problem:
            return str(problem)
        meeting.wait(deadline_s)
        endpoint.close()
        return endpoint.connection.membership.token

    return on_ranks(len(secrets), one)


def test_the_session_token_follows_from_the_secret_and_is_never_written():
    store = OpenStore()
    tokens = set(joined(store).values())
    assert len(tokens) == 1
    (token,) = tokens
    assert token > 1 << 32
    assert len(store.written) > 12
    assert not [value for _, value in store.written if str(token) in value or f"{token:x}" in value]
    assert set(joined(OpenStore()).values()) != tokens, "each session has its own"


def test_a_stranger_who_writes_into_the_store_changes_nothing_and_is_named(caplog):
    store = OpenStore()
    store.values = dict.fromkeys(("entry/1", "here/0", "path/2", "left", "left/0"), b"[]")
    store.values["verdict"] = b"\xff no text"
    stranger = {"here/1": b"x", "entry/0": b'{"token": 1}', "entry/2": b"\xff" * 100, "ready/1": b"true"}

    def overwrite(key):
        if key in stranger:
            store.values[key] = stranger.pop(key)

    store.on_set = overwrite
    tokens = set(joined(store).values())
    assert len(tokens) == 1
    assert isinstance(tokens.pop(), int)
    assert not stranger
    assert "DLCP refuses entry/0 in the job's store: it has no valid proof of the job's secret" in caplog.text


def test_what_was_recorded_of_another_session_of_the_same_secret_counts_for_nothing():
    """Also where a verdict against DLCP, and what each rank had drawn, is written again in the place of the new."""
    earlier = OpenStore()
    (old,) = set(joined(earlier).values())
    recorded = {key: value.encode() for key, value in earlier.written}
    store = OpenStore()
    store.values = dict(recorded)
    found = joined(store, deadline_s=3.0)
    assert old not in found.values()
    lonely = SealedStore(store, SECRET)
    lonely.set("here/0", "drawn anew")
    store.values["here/0"] = recorded["here/0"]
    assert lonely.check(["here/0"])
    lonely.restore()
    assert lonely.get("here/0") == b"drawn anew", "a rank believes no store about what it has drawn itself"
    assert store.values["here/0"] != recorded["here/0"]
    del store.values["here/0"]
    lonely.restore()
    assert b"drawn anew" in store.values["here/0"]
    lonely.begin_session(b"a new key")
    assert not lonely.check(["entry/1"])
    assert lonely.compare_set("verdict", "", "no") == b"no"


def test_a_failure_of_ranks_that_never_met_counts_for_nothing_in_another_session():
    """They have no session key, so the secret itself seals it. Replayed, it would end DLCP in later sessions."""
    earlier = OpenStore()
    Agreement(earlier, 0, 2, 1.0, SECRET).publish(LEFT, "step 3: fc is not averaged")
    store = OpenStore()
    agreements = [Agreement(store, rank, 2, 10.0, SECRET) for rank in range(2)]
    for agreement in agreements:
        agreement.publish("weighted", True)  # as sessions do before ranks meet
    assert on_ranks(2, lambda rank: agreements[rank].meet("enable")) == {0: None, 1: None}
    store.values |= earlier.values
    assert agreements[0].latest(LEFT) is None
    assert agreements[0].all_publish("weighted")
    agreements[1].publish(LEFT, "step 5: fc is not averaged")
    assert agreements[0].latest(LEFT)


def test_a_rank_with_another_secret_or_none_is_named_and_nobody_uses_dlcp():
    for other in (b"known to somebody else entirely", None):
        found = joined(OpenStore(), (SECRET, other, SECRET), deadline_s=0.6)
        for rank in (0, 2):
            assert found[rank].startswith(
                "rank 1 has not joined with the job's secret: check that it runs, and calls enable (waited 1 s)"
            )
            assert re.search(r"have no valid proof of its secret \(.*here/1.*\): give all ranks the same", found[rank])
        assert isinstance(found[1], str)


def test_a_store_that_is_written_to_all_the_time_is_done_without():
    store = OpenStore()
    store.compare_set = lambda key, expected, desired: f"{time.monotonic_ns()}".encode()
    assert SealedStore(store, SECRET).compare_set("verdict", "", "use") == DISTURBED.encode()


def test_a_proof_is_of_all_parts_as_they_are():
    proofs = {proof(b"k", *parts) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""))}
    assert len(proofs) == 4
    assert session_token(b"k") & 1
    assert session_token(b"k") != session_token(b"l")


def test_where_the_secret_comes_from(tmp_path, monkeypatch):
    assert configured_secret(Options()) is None
    monkeypatch.setenv("DLCP_SECRET", "of the environment")
    assert configured_secret(Options()) == b"of the environment"
    monkeypatch.setenv("DLCP_SECRET", os.fsdecode(b"not text: \xff\xfe\xfd\xfc\xfb\xfa"))
    assert configured_secret(Options()) == b"not text: \xff\xfe\xfd\xfc\xfb\xfa"
    path = tmp_path / "secret"
    path.write_text("of a file, with the end of its line\n")
    path.chmod(0o644)
    options = Options(secret_file=str(path))
    with pytest.raises(OSError, match="every user can access it; chmod 600"):
        configured_secret(options)
    path.chmod(0o640)  # as Kubernetes mounts it for a group
    assert configured_secret(options) == b"of a file, with the end of its line"
    path.write_text("short\n")
    with pytest.raises(ValueError, match="has 5 bytes; a secret needs at least 16: openssl rand"):
        configured_secret(options)
    with pytest.raises(OSError, match=r"no job's secret at gone \(No such file"):
        configured_secret(Options(secret_file="gone"))


def test_a_key_that_cannot_be_created_leaves_no_part_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def without_hard_links(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", without_hard_links)
    with pytest.raises(OSError, match=r"no key for the job's store at .*Operation not permitted.*set DLCP_SECRET_FILE"):
        job_secret(Options())
    assert list((tmp_path / "dlcp").iterdir()) == []


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two folders as Kubernetes mounts a certificate, of two authorities."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing")
    folders = []
    for name in ("ours", "others"):
        folder = tmp_path_factory.mktemp(name)
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        last = ["-days", "2", "-extfile", "extensions", "-out", "tls.crt"]
        (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1")
        for words in (
            ["req", "-x509", *key, "-days", "2", "-keyout", "ca.key", "-out", "ca.crt", "-subj", f"/CN={name}"],
            ["req", *key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=rank"],
            ["x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", *last],
        ):
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)
        folders.append(str(folder))
    return folders


def test_ranks_meet_over_tls_and_average(certificates, monkeypatch):
    monkeypatch.setenv("DLCP_SECRET", SECRET.decode())

    def one(group):
        values = np.full(1000, group.rank, np.float32)
        group.register(["w"])
        group.average({"w": values})
        return group.active, values[0]

    assert together(2, one, Options(shared_memory=False, tls=certificates[0])) == [(True, 0.5)] * 2
    with serving(tls=certificates[0]) as server:
        options = Options(collective=f"server:{server.address[0]}:{server.address[1]}", tls=certificates[0])
        assert together(2, one, options) == [(True, 0.5)] * 2


def test_whoever_has_no_certificate_of_the_job_does_not_even_come_to_its_secret(certificates):
    ours, others = certificates
    server = StoreServer(("127.0.0.1", 0), SECRET, ours)
    try:
        for tls in ("", others):
            with pytest.raises(StoreError, match="no answer from the store"):
                Store(server.address, 0.5, SECRET, tls)
        Store(server.address, 5, SECRET, ours).close()
        assert server.refused == 0
        with pytest.raises(OSError, match=r"TLS needs gone/tls.key, which cannot be read"):
            Store(server.address, 5, SECRET, "gone")
    finally:
        server.close()


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 15, bytes(32), b" " * 40, b"\0" * 20 + b"short"])
def test_a_key_that_is_empty_or_zeros_is_no_secret(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("DLCP_SECRET", raising=False)
    key = tmp_path / "dlcp" / "key"
    key.parent.mkdir()
    key.touch(mode=0o600)
    key.write_bytes(content)
    with pytest.raises(OSError, match=r"no key for the job's store at .*key \(it has .*; remove it"):
        job_secret(Options())
    with pytest.raises(ValueError, match=r"key has \d+ bytes; a secret needs at least 16"):
        job_secret(Options(secret_file=str(key)))
    key.unlink()
    assert len(job_secret(Options())) == 32
