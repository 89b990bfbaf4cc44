# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo: a worker that trains with ordinary DDP, or Gloo's parameter server.

The Gloo server is the baseline for DLCP's, and like it receives and sends message by message. Gloo's own reduce would
be another traffic pattern: a ring that ends in a gather, where less than half of four workers' gradients enter the
server's port.
"""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.demo.variants import DemoSetup
from dlcp.examples.learning_tasks import OPTIMIZER_MAKERS, SMALL_TASKS, LabelledData, batches_of, evaluate, schedule_of
from dlcp.host.processes import Fact, send_fact
from dlcp.values.tags import layers_in_order

_TASK: Final = SMALL_TASKS["digits"]
_BATCH: Final = 64
"""Images of a worker in a step."""
_LEARNING_RATE_STEPS: Final = 4
"""Steps of linear warm-up; the cosine decay runs over all steps."""
_BUCKET_MB: Final = 0.5
_WARM_UP_STEPS: Final = 6


def train(rank: int, mode: str, setup: DemoSetup, channel: Connection) -> Fact:
    """Train, and return this rank's report."""
    logging.basicConfig(format="%(message)s")  # warnings only: the demo itself announces each run
    digits = _TASK.data(setup.seed)
    network = _TASK.network(setup.seed)
    group = dist.new_group(list(range(setup.workers)))
    model = DistributedDataParallel(network, bucket_cap_mb=_BUCKET_MB, process_group=group)
    state = None
    if mode == "dlcp":
        state = dlcp.torch.enable(model)
    elif setup.collective == "server":
        model.register_comm_hook(GlooServerClient(), average_at_server)
    elif setup.fp16:
        model.register_comm_hook(group, fp16_compress_hook)
    optimizer = OPTIMIZER_MAKERS[setup.optimizer](list(model.parameters()), _TASK.rates[setup.optimizer])
    schedule = schedule_of(optimizer, setup.steps, _LEARNING_RATE_STEPS)
    batches = list(batches_of(setup.steps, _BATCH, len(digits.train_labels), setup.seed, setup.workers))
    compute_s = _warm_up(network, digits)
    send_fact(channel, {"ready": True})
    start_s: float = channel.recv()
    time.sleep(max(0.0, start_s - time.monotonic()))
    steps: list[float] = []
    snapshots = [(0, 0.0, _copy(network))]
    for step, batch in enumerate((every[rank] for every in batches), 1):
        begin_s = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(digits.train_inputs[batch]), digits.train_labels[batch])
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        now_s = time.monotonic()
        steps.append(now_s - begin_s)
        if rank == 0:
            send_fact(channel, {"step": step})
            snapshots.append((step, now_s - start_s, _copy(network)))
    report: Fact = {
        "rank": rank,
        "steps": steps,
        "compute_seconds": compute_s,
        "digest": dlcp.torch.parameter_digest(network),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "layer_names": _layer_names(network),
        "curve": _curve(snapshots, digits) if rank == 0 else [],
        "ledger": None,
        "layer_seconds": state.layer_seconds() if state else None,
        "refused": dict(state.endpoint.connection.refused) if state and state.endpoint else {},
        "tcp": _tcp_counters(),
        "torch": torch.__version__,
    }
    if state:
        state.close()
        # Only after close(): until then the last results are in flight, and not in the ledger.
        report["ledger"] = state.ledger.summary()
    elif setup.collective == "server":
        dist.send(torch.zeros(1, dtype=torch.int64), _server())  # length 0: this worker has finished
    return report


def _warm_up(network: nn.Module, digits: LabelledData) -> list[float]:
    """Load PyTorch's kernels before the clock starts; return the compute times of steps without communication.

    All workers do this at about the same time, so they compete for the CPU as in training.
    """
    seconds = []
    for _ in range(_WARM_UP_STEPS):
        begin_s = time.monotonic()
        loss = nn.functional.cross_entropy(network(digits.train_inputs[:_BATCH]), digits.train_labels[:_BATCH])
        torch.autograd.backward(loss)
        seconds.append(time.monotonic() - begin_s)
    network.zero_grad()
    return seconds[1:]


def _tcp_counters() -> dict[str, int]:
    """Return the numbers of sent and of retransmitted TCP segments in this network namespace."""
    lines = [
        line.split()[1:] for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    counters = dict(zip(*lines, strict=True))
    return {"sent": int(counters["OutSegs"]), "retransmitted": int(counters["RetransSegs"])}


def _copy(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def _curve(snapshots: list[tuple[int, float, dict[str, torch.Tensor]]], digits: LabelledData) -> list[dict[str, float]]:
    """Evaluate the snapshots after training, so that it costs no training time."""
    network = _TASK.network(0)
    curve = []
    for step, seconds, parameters in snapshots:
        network.load_state_dict(parameters)
        accuracy, loss = evaluate(network, digits)
        curve.append({"step": step, "seconds": seconds, "accuracy": accuracy, "loss": loss})
    return curve


def _layer_names(network: nn.Module) -> dict[str, str]:
    layers = layers_in_order([name for name, _ in network.named_parameters()])
    return {str(layer.position): name.rpartition(".")[0] for name, layer in layers.items()}


class GlooServerClient:
    """A worker's side of Gloo's server: one thread sends and one receives, so several buckets can be in flight."""

    def __init__(self) -> None:
        self._sending, self._receiving = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def start(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average a tensor in place over the workers, through the server; the future's result is the tensor."""
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        sent = self._sending.submit(_send, tensor, _server())

        def receive() -> None:
            try:
                # The server answers once it has the whole tensor, so this does not overwrite data still being sent.
                dist.recv(tensor, _server())
                sent.result()
                answer.set_result(tensor)
            except RuntimeError as error:
                answer.set_exception(error)  # type: ignore[arg-type]  # PyTorch annotates it as a result

        self._receiving.submit(receive)
        return answer


def average_at_server(client: GlooServerClient, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket; a DDP communication hook."""
    return client.start(bucket.buffer())


class GlooServer:
    """Averages the workers' gradients bucket by bucket and sends each worker the mean, until all have finished."""

    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._lock = threading.Lock()
        self._arrived: dict[int, dict[int, torch.Tensor]] = {}
        self._sending = [ThreadPoolExecutor(1) for _ in self._workers]

    def run(self) -> None:
        """Serve all workers, with a thread per worker and direction.

        Raises
        ------
        RuntimeError
            A worker left before it announced its end.
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
        """Store a worker's part of a bucket; once all parts are there, send the mean."""
        with self._lock:
            parts = self._arrived.setdefault(number, {})
            parts[worker] = tensor
            if len(parts) < len(self._workers):
                return
            del self._arrived[number]
        # Added in rank order, not in order of arrival, so that runs are bit-reproducible.
        mean = reduce(torch.add, [parts[each] for each in self._workers]).div_(len(parts))
        for each in self._workers:
            self._sending[each].submit(dist.send, mean, each)


def _send(tensor: torch.Tensor, rank: int) -> None:
    """Send a tensor's length, then the tensor."""
    dist.send(torch.tensor([tensor.numel()]), rank)
    dist.send(tensor, rank)


def _server() -> int:
    return dist.get_world_size() - 1


def main(channel: Connection, rank: int, ranks: int, mode: str, setup: DemoSetup, store: str) -> None:
    """Run one rank: a worker, or Gloo's parameter server, whose rank follows the workers'.

    It reports that it is ready, receives the start time, and reports each finished step, then its report or its error.

    Parameters
    ----------
    ranks
        The number of ranks: the workers, and Gloo's parameter server if any.
    mode
        What averages the gradients: ``gloo`` or ``dlcp``.
    store
        Path of the process group's rendezvous file.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        if rank >= setup.workers:
            dist.new_group(list(range(setup.workers)))
            send_fact(channel, {"ready": True})
            GlooServer(setup.workers).run()
            return
        report = train(rank, mode, setup, channel)
    except Exception as error:
        send_fact(channel, {"error": f"rank {rank}: {error}"})
        os._exit(1)  # a process group hangs on exit when its peers are gone
    send_fact(channel, {"report": report})
    dist.destroy_process_group()
