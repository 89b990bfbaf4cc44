# SPDX-License-Identifier: Apache-2.0
"""A parameter server made of Gloo's own collectives, to compare DLCP's with: reduce to one rank, broadcast from it."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket


class Client:
    """A worker's side. One thread of its own does the exchange, so that backward goes on meanwhile."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.workers = dist.get_world_size(group)
        self.thread = ThreadPoolExecutor(1)

    def exchange(self, tensor: torch.Tensor, answer: torch.futures.Future[torch.Tensor]) -> None:
        """Average a tensor over the workers, by way of the server."""
        server = dist.get_world_size() - 1
        try:
            if dist.get_rank() == 0:
                dist.send(torch.tensor([tensor.numel()]), server)
            dist.reduce(tensor, server)
            dist.broadcast(tensor, server)
            answer.set_result(tensor.div_(self.workers))
        except RuntimeError as error:
            answer.set_exception(error)  # type: ignore[arg-type]  # annotated as a result


def hook(client: Client, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket; a DDP communication hook."""
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    client.thread.submit(client.exchange, bucket.buffer(), answer)
    return answer


def serve() -> None:
    """Serve buckets until dismissed. Rank 0 says how long each is."""
    server = dist.get_world_size() - 1
    length = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(length, 0)
        if not length.item():
            return
        tensor = torch.zeros(int(length.item()))
        dist.reduce(tensor, server)
        dist.broadcast(tensor, server)


def dismiss() -> None:
    """Tell the server that training is over."""
    dist.send(torch.zeros(1, dtype=torch.int64), dist.get_world_size() - 1)
