# SPDX-License-Identifier: Apache-2.0
"""The demo's background traffic: what one end sends, the other counts."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from dlcp.demo.background import BackgroundBurst, BackgroundEnd, sink, source
from tests.transport.free_ports import free_udp_ports

CONTEXT = multiprocessing.get_context("fork")


def started(function, *arguments):
    channel, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    assert channel.poll(20), "the process does not start"
    assert json.loads(channel.recv_bytes()) == {"ready": True}
    return process, channel


@pytest.mark.parametrize("over", ["tcp", "udp"])
def test_what_is_sent_is_counted(over):
    addresses = [("127.0.0.1", port) for port in free_udp_ports(2)]
    ends = [BackgroundEnd(over, rank, addresses[rank], {1 - rank: addresses[1 - rank]}) for rank in range(2)]
    receiving, counts = started(sink, ends[1])
    sending, begin = started(source, ends[0], [BackgroundBurst(0.0, 0.5, 1)])
    begin.send(time.monotonic())
    sending.join(20)
    assert sending.exitcode == 0
    os.kill(receiving.pid, signal.SIGTERM)
    assert counts.poll(20)
    assert sum(size for _, size in json.loads(counts.recv_bytes())["report"]) > 1 << 20
    receiving.join(20)
