# SPDX-License-Identifier: Apache-2.0
"""The first operation of a new group, of each kind: nothing that arrives before a rank is ready for it gets lost.

``python -m tests.torch.test_first_operation 200`` tries each kind 200 times.
"""

import sys
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from tests.torch.workers import WAYS, launch, values

RANKS, SMALL, LARGE = 3, 10, 30_000
"""Values: a message next to its header in one packet, and one of many packets that its header announces."""


def a_message(group, rank, size):
    tensor = torch.full((size,), float(rank))
    if rank == 0:
        dist.send(tensor, 1, group=group)
    elif rank == 1:
        dist.recv(tensor, 0, group=group)
    return tensor[-1].item() == (0, 0, 2)[rank]


def a_message_from_anyone(group, rank, size):
    tensor = torch.full((size,), float(rank))
    if rank == 0:
        return dist.recv(tensor, group=group) == 2 == tensor[-1].item()
    if rank == 2:
        dist.send(tensor, 0, group=group)
    return True


def a_ring_of_messages(group, rank, size):
    mine, theirs = torch.full((size,), float(rank)), torch.empty(size)
    sending = dist.P2POp(dist.isend, mine, (rank + 1) % RANKS, group=group)
    receiving = dist.P2POp(dist.irecv, theirs, (rank - 1) % RANKS, group=group)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return theirs[-1].item() == (rank - 1) % RANKS


def broadcast(group, rank, size):
    tensor = torch.full((size,), float(rank))
    dist.broadcast(tensor, 1, group=group)
    return tensor[-1].item() == 1


def reduce(group, rank, size):
    tensor = torch.full((size,), float(rank))
    dist.reduce(tensor, 2, group=group)
    return rank != 2 or tensor[-1].item() == 3


def all_reduce(group, rank, size):
    tensor = torch.full((size,), float(rank))
    dist.all_reduce(tensor, group=group)
    return tensor[-1].item() == 3


def gather(group, rank, size):
    found = [torch.empty(size) for _ in range(RANKS)] if rank == 1 else None
    dist.gather(torch.full((size,), float(rank)), found, 1, group=group)
    return found is None or [each[-1].item() for each in found] == [0, 1, 2]


def scatter(group, rank, size):
    tensor = torch.empty(size)
    parts = [torch.full((size,), float(each)) for each in range(RANKS)] if rank == 1 else None
    dist.scatter(tensor, parts, 1, group=group)
    return tensor[-1].item() == rank


def all_gather(group, rank, size):
    found = [torch.empty(size) for _ in range(RANKS)]
    dist.all_gather(found, torch.full((size,), float(rank)), group=group)
    return [each[-1].item() for each in found] == [0, 1, 2]


def reduce_scatter(group, rank, size):
    tensor = torch.empty(size)
    dist.reduce_scatter(tensor, [torch.full((size,), float(each)) for each in range(RANKS)], group=group)
    return tensor[-1].item() == RANKS * rank


def all_to_all(group, rank, size):
    found = [torch.empty(size) for _ in range(RANKS)]
    dist.all_to_all(found, [torch.full((size,), float(rank)) for _ in range(RANKS)], group=group)
    return [each[-1].item() for each in found] == [0, 1, 2]


def objects(group, rank, size):
    found = [None] * RANKS
    dist.all_gather_object(found, "x" * size + str(rank), group=group)
    return [each[-1] for each in found] == ["0", "1", "2"]


def barrier(group, rank, size):
    dist.barrier(group=group)
    return True


OPERATIONS = (
    *(a_message, a_message_from_anyone, a_ring_of_messages, broadcast, reduce, all_reduce, gather, scatter),
    *(all_gather, reduce_scatter, all_to_all, objects, barrier),
)


def operate(worker, groups):
    failed = {}
    for operation in OPERATIONS:
        for number in range(groups):
            group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=10), backend="dlcp")
            try:
                right = operation(group, worker.rank, LARGE if number % 2 else SMALL)
            except RuntimeError as error:
                right = str(error)
            dist.barrier()
            dist.destroy_process_group(group)
            if right is not True:
                failed.setdefault(operation.__name__, []).append((number, right))
    return failed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.timeout(110)
def test_the_first_operation_of_a_group_of_each_kind(way):
    assert values(launch(RANKS, operate, 6, environment=WAYS[way], limit_s=100)) == [{}] * RANKS


if __name__ == "__main__":
    for each in WAYS:
        print(each, values(launch(RANKS, operate, int(sys.argv[1]), environment=WAYS[each], limit_s=7200)))
