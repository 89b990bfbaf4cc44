# SPDX-License-Identifier: Apache-2.0
"""A parameter server over Gloo, to compare DLCP's with: workers send it their gradients, and it sends back the average.

Message by message, as DLCP's does and as servers do. Gloo's own reduce to a rank is a ring with a gathering at its end:
of four workers' gradients less than half would enter the server's port, which is another pattern.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket


class Client:
    """A worker's side. Buckets are sent in one thread and received in another, so several can be on their way."""

    def __init__(self) -> None:
        self._pushing, self._pulling = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def start(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average a tensor over the workers, by way of the server; the future's result is the tensor."""
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        pushed = self._pushing.submit(_send, tensor, _server())

        def pull() -> None:
            try:
                # Nothing comes before the server has all of what is still being sent from here.
                dist.recv(tensor, _server())
                pushed.result()
                answer.set_result(tensor)
            except RuntimeError as error:
                answer.set_exception(error)  # type: ignore[arg-type]  # PyTorch annotates it as a result

        self._pulling.submit(pull)
        return answer


def hook(client: Client, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket; a DDP communication hook."""
    return client.start(bucket.buffer())


def dismiss() -> None:
    """Tell the server that this worker's training is over."""
    dist.send(torch.zeros(1, dtype=torch.int64), _server())


class Server:
    """Adds up what the workers send, bucket by bucket, and sends the average to each, until all have dismissed it."""

    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._lock = threading.Lock()
        self._arrived: dict[int, dict[int, torch.Tensor]] = {}
        self._sending = [ThreadPoolExecutor(1) for _ in self._workers]

    def run(self) -> None:
        """Serve; a worker's stream has a thread each way.

        Raises
        ------
        RuntimeError
            A worker has gone without dismissing it.
        """
        with ThreadPoolExecutor(len(self._workers)) as receiving:
            streams = [receiving.submit(self._receive, worker) for worker in self._workers]
            for stream in streams:
                stream.result()
        for sending in self._sending:
            sending.shutdown()

    def _receive(self, worker: int) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        number = 0
        while True:
            dist.recv(length, worker)
            if not length.item():
                return
            tensor = torch.empty(int(length.item()))
            dist.recv(tensor, worker)
            self._add(number, worker, tensor)
            number += 1

    def _add(self, number: int, worker: int, tensor: torch.Tensor) -> None:
        """Keep a worker's part of a bucket; send the average when it is the last."""
        with self._lock:
            parts = self._arrived.setdefault(number, {})
            parts[worker] = tensor
            if len(parts) < len(self._workers):
                return
            del self._arrived[number]
        mean = _mean([parts[each] for each in self._workers])
        for each in self._workers:
            self._sending[each].submit(dist.send, mean, each)


def _mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean, added up in the order of ranks, whoever came first."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))


def _send(tensor: torch.Tensor, rank: int) -> None:
    """Send a tensor, and how long it is before it."""
    dist.send(torch.tensor([tensor.numel()]), rank)
    dist.send(tensor, rank)


def _server() -> int:
    return dist.get_world_size() - 1
