# SPDX-License-Identifier: Apache-2.0
"""One worker of the demo: ordinary DDP training. ``--mode`` says who averages the gradients."""

import argparse
import math
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.demo import gloo_server
from dlcp.demo import model as demo
from dlcp.demo.processes import Fact, send_fact
from dlcp.tags import layers_in_order

LEARNING_RATE = 0.002
LEARNING_RATE_STEPS = 4
"""Steps until the learning rate is reached; from then on it falls as a cosine."""
BUCKET_MB = 0.5
EVALUATE_EVERY = 1
WARM_UP_STEPS = 6


def train(arguments: argparse.Namespace, channel: Connection) -> Fact:
    """Train, and return what happened on this rank."""
    rank, workers = dist.get_rank(), arguments.workers
    digits = demo.load(arguments.seed)
    network = demo.network(arguments.seed)
    group = dist.new_group(list(range(workers)))
    model = DistributedDataParallel(network, bucket_cap_mb=BUCKET_MB, process_group=group)
    state = None
    if arguments.mode == "dlcp":
        state = dlcp.torch.enable(model)
    elif arguments.collective == "server":
        model.register_comm_hook(gloo_server.Client(), gloo_server.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / LEARNING_RATE_STEPS) * 0.5 * (1 + math.cos(math.pi * step / arguments.steps)),
    )
    batches = demo.batches(digits, arguments.steps, rank, workers, arguments.seed)
    compute_s = _warm_up(network, digits)
    send_fact(channel, {"ready": True})
    start_s: float = channel.recv()
    time.sleep(max(0.0, start_s - time.monotonic()))
    steps: list[float] = []
    snapshots = [(0, 0.0, _copy(network))]
    for step, batch in enumerate(batches, 1):
        begin_s = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(digits.train_images[batch]), digits.train_labels[batch])
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        now_s = time.monotonic()
        steps.append(now_s - begin_s)
        if rank == 0:
            send_fact(channel, {"step": step})
            if step % EVALUATE_EVERY == 0 or step == arguments.steps:
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
        "refused": dict(state.endpoint.protocol.refused) if state and state.endpoint else {},
        "tcp": _tcp_counters(),
        "torch": torch.__version__,
    }
    if state:
        state.close()
        # Only now: the last results are on their way to others until then, and not entered yet.
        report["ledger"] = state.ledger.summary()
    elif arguments.collective == "server":
        gloo_server.dismiss()
    return report


def _warm_up(network: nn.Module, digits: demo.Digits) -> list[float]:
    """Let PyTorch load its kernels before the clock starts; return how long steps take without communication.

    All workers do it at about the same time, so that they are in each other's way as in training.
    """
    seconds = []
    for _ in range(WARM_UP_STEPS):
        begin_s = time.monotonic()
        loss = nn.functional.cross_entropy(
            network(digits.train_images[: demo.BATCH_PER_WORKER]), digits.train_labels[: demo.BATCH_PER_WORKER]
        )
        torch.autograd.backward(loss)
        seconds.append(time.monotonic() - begin_s)
    network.zero_grad()
    return seconds[1:]


def _tcp_counters() -> dict[str, int]:
    """Return how many segments TCP has sent, and sent again, in this network namespace."""
    lines = [
        line.split()[1:] for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    counters = dict(zip(*lines, strict=True))
    return {"sent": int(counters["OutSegs"]), "retransmitted": int(counters["RetransSegs"])}


def _copy(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def _curve(snapshots: list[tuple[int, float, dict[str, torch.Tensor]]], digits: demo.Digits) -> list[dict[str, float]]:
    """Evaluate what was kept during training, after it, so that it costs no training time."""
    network = demo.network(0)
    curve = []
    for step, seconds, parameters in snapshots:
        network.load_state_dict(parameters)
        accuracy, loss = demo.accuracy(network, digits)
        curve.append({"step": step, "seconds": seconds, "accuracy": accuracy, "loss": loss})
    return curve


def _layer_names(network: nn.Module) -> dict[str, str]:
    layers = layers_in_order([name for name, _ in network.named_parameters()])
    return {str(layer.position): name.rpartition(".")[0] for name, layer in layers.items()}


def main(arguments: Sequence[str], channel: Connection) -> int:
    """Run one worker; return its exit status.

    It sends that it is ready, receives when to start, and sends each step that is done, its report, or what went wrong.
    """
    parser = argparse.ArgumentParser(description="One worker of the DLCP demo.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="workers, and with Gloo a parameter server's rank")
    parser.add_argument("--mode", choices=["gloo", "dlcp"], required=True)
    parser.add_argument("--collective", choices=["direct", "server"], default="direct")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="file over which the process group meets")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{chosen.store}", rank=chosen.rank, world_size=chosen.ranks)
    try:
        if chosen.rank >= chosen.workers:
            dist.new_group(list(range(chosen.workers)))
            send_fact(channel, {"ready": True})
            gloo_server.Server(chosen.workers).run()
            return 0
        report = train(chosen, channel)
    except Exception as error:
        send_fact(channel, {"error": f"rank {chosen.rank}: {error}"})
        os._exit(1)  # a process group whose peers are gone does not end by itself
    send_fact(channel, {"report": report})
    dist.destroy_process_group()
    return 0
