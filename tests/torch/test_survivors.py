# SPDX-License-Identifier: Apache-2.0
"""A process that has survived the others meets new ones: nothing that ranks count alike is counted in a process."""

import os
import time
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from tests.torch.workers import CONTEXT, FIXED, WAYS
from tests.transport.free_ports import free_ports


def by_hook(rank, port, options):
    import torch
    import torch.distributed as dist

    import dlcp.torch

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    state = dlcp.torch.enable(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4)), options)
    found = state.active, state.reason
    state.close()
    dist.destroy_process_group()
    return found


def by_backend(rank, port, options):
    import torch
    import torch.distributed as dist

    import dlcp.torch  # noqa: F401 - makes the backend known

    dist.init_process_group("dlcp", timeout=timedelta(seconds=30))
    total = torch.ones(4)
    dist.all_reduce(total)
    group = dist.new_group([0, 1])  # a second one of this process
    dist.all_reduce(total, group=group)
    dist.destroy_process_group()
    return total[0].item() == 4.0, ""


def by_group(rank, port, options):
    from dlcp.session import job

    with job.join(options, rank=rank, size=2, master=f"127.0.0.1:{port}") as group:
        return group.active, ""


def live(way, rank, ports, pipe):
    """Meet the other rank once on each port, one after the other."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"})
    os.environ.update(WAYS["sockets"] | FIXED)
    from dlcp.session.options import Options

    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        try:
            pipe.send(way(rank, port, Options(bind="127.0.0.1:0", meet_s=20.0)))
        except Exception as error:
            pipe.send((False, repr(error)))
    time.sleep(0.5)  # the other rank may still read from this one's store
    os._exit(0)


def started(way, rank, ports):
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=live, args=(way, rank, ports, theirs))
    process.start()
    theirs.close()
    return process, ours


@pytest.mark.parametrize("survivor", [0, 1])
@pytest.mark.parametrize("way", [by_hook, by_backend, by_group], ids=lambda way: way.__name__)
@pytest.mark.timeout(110)
def test_a_survivor_meets_a_new_process(way, survivor):
    ports = free_ports(3)
    if survivor == 0 and way is by_group:
        ports = [ports[0]] * 3  # rank 0 goes on serving its store
    old, found = started(way, survivor, ports)
    try:
        for port in ports:
            new, theirs = started(way, 1 - survivor, [port])
            for each in (found, theirs):
                assert each.poll(60), "the ranks do not meet"
                assert each.recv() == (True, "")
            new.join(20)
    finally:
        old.kill()
        old.join()


@pytest.mark.parametrize("secret", ["", "the secret of these ranks"])
def test_ranks_that_failed_alone_meet_when_they_try_again(secret, monkeypatch):
    from torch.distributed import HashStore

    from dlcp.session.joining import NotJoinedError
    from dlcp.session.options import Options
    from dlcp.torch.framework import endpoint_of_new_group
    from tests.group.group_ranks import on_ranks

    monkeypatch.setenv("DLCP_SECRET", "short")
    store, options = HashStore(), Options(bind="127.0.0.1", meet_s=20.0)

    def attempt(rank, wait_s):
        endpoint_of_new_group(options, store, rank, 2, timedelta(seconds=wait_s)).close()

    with pytest.raises(ValueError, match="a secret needs at least"):
        attempt(0, 60)
    monkeypatch.setenv("DLCP_SECRET", secret)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\[1\] have not joined the group"):
            attempt(0, 0.01)
    begin = time.monotonic()
    for _ in range(2):  # rank 0 has left both
        with pytest.raises(NotJoinedError, match="rank 0"):
            attempt(1, 60)
    assert time.monotonic() - begin < options.meet_s, "rank 1 waited for rank 0"
    assert on_ranks(2, lambda rank: attempt(rank, 20)) == {0: None, 1: None}
