# SPDX-License-Identifier: Apache-2.0
"""Ranks with more than a thousand open files: descriptors are large then, and select.select knows none from 1024 on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60
DESCRIPTORS = 1200
BEGIN = f"""
import os, resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = {DESCRIPTORS} + 200
resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted) if hard != resource.RLIM_INFINITY else hard))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range({DESCRIPTORS})]
"""
USES = {
    "the path's largest packet": """
from dlcp.transport.path_mtu import PathProbe
from dlcp.transport import bind_socket
socks = [bind_socket("127.0.0.1", [0]) for _ in range(2)]
probes = [PathProbe(rank, socks[rank], {1 - rank: socks[1 - rank].getsockname()}, 0, 1, [1440, 64]) for rank in (0, 1)]
while not all(probe.done for probe in probes):
    for probe in probes:
        probe.turn(0.01)
assert [probe.payload_bytes for probe in probes] == [1440, 1440]
""",
    "shared memory": """
from concurrent.futures import ThreadPoolExecutor
from dlcp.transport import shared_memory
if shared_memory.supported():
    both = [shared_memory.SharedMemoryRendezvous(0) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(both[rank].connect, rank, {1 - rank: both[1 - rank].name}, job=0, token=1, timeout_s=20)
               for rank in (0, 1)]
        assert [each.result().ranks for each in met] == [{1}, {0}]
""",
    "an endpoint": """
import numpy as np
from dlcp.values.tags import plain_tags
from dlcp.transport import RELIABLE, Endpoint, Membership, MessageKey, ReceiveRequest, SendRequest, bind_socket
socks = [bind_socket("127.0.0.1", [0]) for _ in range(2)]
names = [sock.getsockname() for sock in socks]
ends = [Endpoint(Membership(rank, {1 - rank: names[1 - rank]}, token=1), socks[rank]) for rank in (0, 1)]
key, payload = MessageKey(0, 0), np.arange(100_000, dtype=np.uint32).view(np.uint8)
arrival = ends[1].receive(ReceiveRequest(0, key, len(payload), RELIABLE, "layer"))
ends[0].send(SendRequest(1, key, payload.data, plain_tags(-(-len(payload) // 1440)), RELIABLE, "layer"))
assert (arrival.result(20).payload == payload).all()
for end in ends:
    end.close("over")
""",
}


@pytest.mark.parametrize("what", USES)
def test_descriptors_may_be_large(what):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + USES[what]],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if "not allowed to raise maximum limit" in done.stderr:
        pytest.skip("this system permits too few open files")
    assert done.returncode == 0, done.stderr[-2000:]
