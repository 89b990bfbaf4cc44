# SPDX-License-Identifier: Apache-2.0
"""Strangers that connect to the store, and say nothing, neither end the job nor keep ranks out for long."""

import os
import resource
import subprocess
import sys

import pytest

from dlcp.session import store

_SECRET = b"x" * 32
_SERVER = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from dlcp.session import store
server = store.StoreServer(("127.0.0.1", 0), b"x" * 32)
print(server.address[1], flush=True)
for _ in sys.stdin:  # tell how many more files this process can open
    opened = []
    try:
        while len(opened) < 30:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    print(len(opened), flush=True)
    for descriptor in opened:
        os.close(descriptor)
"""
_STRANGER = """
import socket, sys
sockets = []
for _ in range(int(sys.argv[2])):
    sockets.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
print("connected", flush=True)
sys.stdin.read()
"""


def started(code, *words):
    argv = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(120)
def test_idle_connections_of_a_stranger_leave_descriptors_and_are_dropped():
    with started(_SERVER, 256) as server, started(_STRANGER, port := int(server.stdout.readline()), 400) as stranger:
        try:
            assert stranger.stdout.readline() == "connected\n"
            server.stdin.write("\n")
            server.stdin.flush()
            assert int(server.stdout.readline()) == 30
            # Once the strangers' time is up, a rank gets in while they still hold their ends.
            rank = store.Store(("127.0.0.1", port), 6 * store.HANDSHAKE_S, _SECRET)
            rank.set("key", "value")
            assert rank.get("key") == b"value"
            rank.close()
        finally:
            server.kill()
            stranger.kill()


def test_connections_follow_from_the_limit_of_descriptors(monkeypatch):
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 1000, used + 1000))
    assert store.connections_max() == pytest.approx(750, abs=5)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert store.connections_max() == store.STORE_CONNECTIONS_MAX
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used - 5, used))
    assert store.connections_max() == 1
