# SPDX-License-Identifier: Apache-2.0
"""torchft over DLCP: groups that are made anew with other ranks, and its local SGD when a replica fails."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

torchft = pytest.importorskip("torchft")
LighthouseServer = pytest.importorskip("torchft.coordination").LighthouseServer
LocalSGD = pytest.importorskip("torchft.local_sgd").LocalSGD
ProcessGroupDLCP = pytest.importorskip("dlcp.torch.torchft_group").ProcessGroupDLCP

LIMIT = timedelta(seconds=30)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_ranks(function, ranks):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(function, ranks))


def test_a_group_is_made_anew_with_other_ranks(store):
    groups = [ProcessGroupDLCP(LIMIT) for _ in range(3)]

    def total(quorum, members):
        def one(rank):
            group = groups[members[rank]]
            group.configure(f"127.0.0.1:{store.port}/{quorum}", f"replica {rank}", rank, len(members), quorum)
            values = torch.full((1000,), float(members[rank] + 1))
            group.allreduce([values], dist.AllreduceOptions()).wait()
            return values

        return on_ranks(one, range(len(members)))

    assert all((values == 6).all() for values in total(1, [0, 1, 2]))
    assert all((values == 4).all() for values in total(2, [0, 2]))  # rank 1 has been lost
    assert all((values == 6).all() for values in total(3, [2, 1, 0]))
    assert groups[0].size() == 3
    assert groups[0].getBackendName() == "torchft-dlcp"
    for group in groups:
        group.abort(errored=False)


def test_a_collective_with_a_rank_that_has_gone_is_an_error(store):
    groups = [ProcessGroupDLCP(LIMIT) for _ in range(2)]
    on_ranks(lambda rank: groups[rank].configure(f"127.0.0.1:{store.port}/1", f"{rank}", rank, 2, 1), range(2))
    groups[1].abort()
    with pytest.raises(RuntimeError, match="rank 1"):
        groups[0].allreduce([torch.ones(10)], dist.AllreduceOptions()).wait()
    groups[0].abort(errored=False)


def test_its_local_sgd_trains_over_it_and_a_replica_that_fails_heals(store):
    """Two replicas; one fails in its third round, and a new one takes the state from the other."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
    ready, over = threading.Barrier(2, timeout=60), threading.Event()
    results = {}

    def replica(number, life, fails):
        torch.manual_seed(10 * number + life)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = ProcessGroupDLCP(LIMIT)
        stored = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = torchft.Manager(
            pg=group,
            load_state_dict=lambda state: (
                model.load_state_dict(state["model"]),
                optimizer.load_state_dict(state["o"]),
            ),
            state_dict=lambda: {"model": model.state_dict(), "o": optimizer.state_dict()},
            min_replica_size=1,
            use_async_quorum=False,
            replica_id=f"replica{number}",
            store_addr="127.0.0.1",
            store_port=stored.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse.address(),
            timeout=LIMIT,
        )
        try:
            if not life:
                ready.wait()
            with LocalSGD(manager, model, optimizer, sync_every=2):
                while manager.current_step() < 8 and not over.is_set():
                    optimizer.zero_grad()
                    model(torch.randn(3, 4)).pow(2).mean().backward()
                    optimizer.step()
                    if fails and manager.current_step() == 2:
                        return
                    results.setdefault(number, []).append((manager.current_step(), manager.num_participants()))
            results[f"parameters {number}"] = [each.detach().clone() for each in model.parameters()]
        finally:
            manager.shutdown()
            group.abort(errored=False)

    def failing():
        replica(1, 0, fails=True)
        replica(1, 1, fails=False)

    threads = [threading.Thread(target=replica, args=(0, 0, False)), threading.Thread(target=failing)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    over.set()
    lighthouse.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    assert all(map(torch.equal, results["parameters 0"], results["parameters 1"]))
