# SPDX-License-Identifier: Apache-2.0
"""A training step of a 25-million-parameter model: DDP over Gloo, DDP with DLCP's hook, and cross-step scheduling.

All ways train the same model on the same data in the same processes, some steps of one at a time. What a step takes
without any communication shows the head-room.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path as File
from typing import Any, Final

import dlcp.torch
from dlcp.bench.path import BenchPath, RoutedPath, loopback
from dlcp.bench.ranks import Ranks
from dlcp.bench.results import BenchResult, against_best, interleave, median, result, significant
from dlcp.bench.training import CROSS_STEP, DEPTH, GLOO, HOOK, NOTHING, WIDTH, Trainee
from dlcp.transport.path_mtu import payload_for_mtu

BLOCK_STEPS: Final = 5
"""Steps of one way at a time, so that steps have others of their kind to overlap with. Chosen by us."""


class ReplicasDifferError(RuntimeError):
    """Ranks that trained together ended with different parameters."""


def measure(
    *,
    ranks: int = 4,
    width: int = WIDTH,
    depth: int = DEPTH,
    mtu_bytes: int = 1500,
    rate_bps: int | None = None,
    shared_memory: bool = True,
    rounds: int = 9,
    warm_up: int = 2,
    seed: int = 1,
    progress: Callable[[str], None] | None = None,
) -> list[BenchResult]:
    """Time steps in all ways, in turns.

    Parameters
    ----------
    ranks
        Processes that train together.
    width, depth
        Of the model, a transformer.
    mtu_bytes
        DLCP's packets are as large as fits it.
    rate_bps
        Of every rank's link, through a router and with the kernel's offloads; None: over loopback.
    shared_memory
        Let DLCP's packets go through memory over loopback, as they do by default.
    rounds, warm_up, seed, progress
        See :func:`dlcp.bench.results.interleave`; a round is :data:`BLOCK_STEPS` steps of each way.

    Returns
    -------
    ``step.compute``, a step without communication; ``step.ddp``, the hook against Gloo; ``step.crossstep``, cross-step
    scheduling against the better of the two. Each ends in ``.n`` and the number of ranks, and in the rate of the links
    where they have one; values are in ms.

    Raises
    ------
    ReplicasDifferError
        A way left the ranks with different parameters.
    RankError
        A rank failed.
    """
    if rate_bps:
        path: BenchPath = RoutedPath(ranks, mtu_bytes=mtu_bytes, rate_bps=rate_bps, offloads=True)
    else:
        path = loopback(ranks)
    with tempfile.TemporaryDirectory(prefix="dlcp-bench-") as folder, path:
        hosts = [path.address(rank) for rank in range(ranks)]
        options = dlcp.torch.Options(
            payload_bytes=payload_for_mtu(mtu_bytes),
            shared_memory=shared_memory,
            fallback=False,  # it would show Gloo's figures as DLCP's
        )
        arguments = [hosts, path.interface, str(File(folder) / "store"), width, depth, options]
        with Ranks(Trainee, arguments, path.namespaces) as trainees:
            runs = {name: partial(_block_ms, trainees, name) for name in (NOTHING, GLOO, HOOK, CROSS_STEP)}
            samples = interleave(runs, rounds=rounds, warm_up=warm_up, seed=seed, progress=progress)
            for name in (GLOO, HOOK, CROSS_STEP):
                if len(set(trainees.call("digest", name))) > 1:
                    raise ReplicasDifferError(f"{name}: after training, ranks have different parameters")
            packets = {name: _total(trainees.call("packets", name)) for name in (HOOK, CROSS_STEP)}
            details: dict[str, Any] = {
                "path": path.words,
                "neighbours": trainees.call("neighbours")[0],
                "parameters": trainees.call("parameters")[0],
                "compute_ms": significant(median(samples[NOTHING])),
                "communication_share_of_gloo_step": significant(1 - median(samples[NOTHING]) / median(samples[GLOO])),
            }
    hook, cross = (details | {"packets": packets[name]} for name in (HOOK, CROSS_STEP))
    where = f"n{ranks}" + (f".{rate_bps / 1e6:g}mbit" if rate_bps else "")
    return [
        result(f"step.compute.{where}", "ms", samples[NOTHING], details=details),
        against_best(f"step.ddp.{where}", "ms", samples, HOOK, [GLOO], hook),
        against_best(f"step.crossstep.{where}", "ms", samples, CROSS_STEP, [GLOO, HOOK], cross),
    ]


def _block_ms(trainees: Ranks, name: str) -> float:
    """Return the slowest rank's time for a step, in ms."""
    slowest_s: float = max(trainees.call("block", name, BLOCK_STEPS))
    return 1e3 * slowest_s


def _total(ledgers: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(ledger[key] for ledger in ledgers) for key in ledgers[0]}
