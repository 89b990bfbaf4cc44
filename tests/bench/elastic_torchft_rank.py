# SPDX-License-Identifier: Apache-2.0
"""Train as :mod:`tests.bench.elastic_rank` does, with torchft and its Gloo process group, one replica per process.

Its loop is the one of torchft's manual: begin a quorum, compute, average, and take the step only if all have the
average. Environment: ``RANK``, ``WORLD_SIZE``, ``TORCHFT_LIGHTHOUSE``, ``TORCHFT_HOST`` (this host's address),
``TORCHFT_TIMEOUT_S`` (how long a collective may take) and ``TORCHFT_LEAST`` (replicas with which training goes on).
"""

import os
import socket
import sys
import time
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from tests.bench.elastic_rank import Notes, resident_bytes


def train() -> None:
    """Train until the average says that a replica has found the file ``END``."""
    notes = Notes(sys.argv[1])
    notes.note("python")
    import torch
    import torch.distributed as dist
    import torchft
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):
        """Names this host by its address: in a network namespace, the host's name stands for another one."""

        def metadata(self) -> str:
            return str(super().metadata()).replace(socket.gethostname(), host)

    notes.note("imported")
    torch.set_num_threads(1)
    end, pause_s = Path(sys.argv[2]), float(sys.argv[4])
    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["TORCHFT_HOST"]
    timeout = timedelta(seconds=float(os.environ["TORCHFT_TIMEOUT_S"]))
    model = torch.zeros(int(sys.argv[3]))

    def load(state: dict[str, torch.Tensor]) -> None:
        model.copy_(state["model"])

    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.clone()},
        min_replica_size=int(os.environ["TORCHFT_LEAST"]),
        timeout=timeout,
        checkpoint_transport=Transport(timeout=timeout, num_chunks=0),
        quorum_timeout=timedelta(seconds=60),
        replica_id=f"replica{rank}",
        hostname=host,
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    notes.note("joined")
    notes.note("begun", step=manager.current_step(), rank=rank)
    own = torch.randn(len(model), generator=torch.Generator().manual_seed(rank))
    ends = False
    while not ends:
        manager.start_quorum()
        step = manager.current_step()
        given, control = own * (1 + step % 7), torch.zeros(size + 1)
        control[rank], control[size] = 1, end.exists()  # who takes part, and whether all end
        time.sleep(pause_s)
        for work in [manager.allreduce(given), manager.allreduce(control)]:
            work.wait()
        if manager.should_commit():
            model -= 0.1 * given
            ends = bool(control[size] > 0)
            ranks = [each for each in range(size) if control[each] > 0]
            notes.note("step", step=step, ranks=ranks, resident=resident_bytes())
        else:
            notes.note("discarded", step=step)
    notes.note("end", digest=sha256(model.numpy().tobytes()).hexdigest())
    os._exit(0)  # its threads may wait for others


if __name__ == "__main__":
    train()
