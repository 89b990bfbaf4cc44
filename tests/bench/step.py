# SPDX-License-Identifier: Apache-2.0
"""A training step of a 25-million-parameter model: DDP over Gloo, DDP with DLCP's hook, and cross-step scheduling.

DLCP's hook trains in two ways: over DLCP with all bits, and with default settings, as the ranks choose. With
``--precision`` it trains at that precision, too, and PyTorch's hook for bfloat16 does, over Gloo.

All ways train the same model on the same data in the same processes, some steps of one at a time. The time of a step
without any communication shows the head-room.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.bench import BenchResult, median, result, significant
from dlcp.commands.common import MBPS, option, real
from dlcp.host.netlab import become_root
from dlcp.policies.arms import AUTO_PRECISION, LAG, WARM_UP, trial_steps
from dlcp.torch.crossstep import cross_step
from dlcp.transport.ledger import Ledger
from dlcp.transport.path_mtu import payload_for_mtu
from dlcp.values.planes import FULL_BITS
from tests.bench.harness import MTU, Benchmark, Turns, against_best, int_option, scratch
from tests.bench.methods import bf16_hook
from tests.bench.paths import BenchPath, RoutedPath, loopback
from tests.bench.ranks import Ranks, join_gloo

_BLOCK_STEPS: Final = 5
"""Steps of one way at a time, so that steps have others of their kind to overlap with."""
_CHOICE_STEPS: Final = WARM_UP + trial_steps(3) + LAG
"""Steps after which the ranks have chosen how to average."""
_WIDTH: Final = 512
_DEPTH: Final = 8
_HEADS: Final = 8
_SYMBOLS: Final = 256
_SEQUENCE: Final = 64
"""Symbols a rank sees in a step: few, since four ranks share few cores."""

_WAYS = _NOTHING, _GLOO, _HOOK, _AUTO, _CROSS_STEP = "no communication", "gloo", "dlcp", "auto", "dlcp, cross-step"
_COARSE_WAYS = _BF16, _COARSE = "gloo, bf16", "dlcp, lower precision"


class ReplicasDifferError(RuntimeError):
    """Ranks that trained together ended with different parameters."""


def measure(
    turns: Turns,
    *,
    ranks: int = 4,
    width: int = _WIDTH,
    depth: int = _DEPTH,
    mtu_bytes: int = 1500,
    rate_bps: int | None = None,
    shared_memory: bool = True,
    precision: str = AUTO_PRECISION,
) -> list[BenchResult]:
    """Time steps in all ways, in turns.

    Parameters
    ----------
    turns
        A round is :data:`_BLOCK_STEPS` steps of each way.
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
    precision
        If given, DLCP's hook trains at it, too, and PyTorch's hook for bfloat16.

    Returns
    -------
    ``step.compute``, a step without communication; ``step.ddp``, the hook against Gloo; ``step.auto``, the hook with
    ``route="auto"`` against the better of the two, once it has chosen; ``step.crossstep``, cross-step scheduling
    against the better of the two; ``step.precision8``, the hook at 8 bits against Gloo, and ``step.precision8.bf16``,
    against PyTorch's hook for bfloat16. Each ends in ``.n`` and the number of ranks, and in the rate of the links where
    they have one; values are in ms.

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
    with scratch() as folder, path:
        hosts = [path.address(rank) for rank in range(ranks)]
        options = dlcp.torch.Options(
            payload_bytes=payload_for_mtu(mtu_bytes),
            shared_memory=shared_memory,
            fallback=False,  # it would show Gloo's figures as DLCP's
            route="dlcp",  # likewise
            precision=str(FULL_BITS),
        )
        ways = _WAYS if precision == AUTO_PRECISION else _WAYS + _COARSE_WAYS
        arguments = [hosts, path.interface, str(folder / "store"), width, depth, options, ways, precision]
        with Ranks(Trainee, arguments, path.namespaces) as trainees:
            trainees.call("block", _AUTO, _CHOICE_STEPS)
            runs = {name: partial(_block_ms, trainees, name) for name in ways}
            samples = turns.take(runs)
            for name in ways[1:]:
                if len(set(trainees.call("digest", name))) > 1:
                    raise ReplicasDifferError(f"{name}: after training, ranks have different parameters")
            packets = {name: _total(trainees.call("packets", name)) for name in (_HOOK, _CROSS_STEP)}
            details: dict[str, Any] = {
                "path": path.words,
                "local_peers": trainees.call("local_peers")[0],
                "parameters": trainees.call("parameters")[0],
                "compute_ms": significant(median(samples[_NOTHING])),
                "communication_share_of_gloo_step": significant(1 - median(samples[_NOTHING]) / median(samples[_GLOO])),
            }
            route = trainees.call("route")[0]
    hook, cross = (details | {"packets": packets[name]} for name in (_HOOK, _CROSS_STEP))
    where = f"n{ranks}" + (f".{rate_bps / 1e6:g}mbit" if rate_bps else "")
    coarse = [
        against_best(f"step.precision{precision}{name}.{where}", "ms", samples, _COARSE, [peer], details)
        for peer, name in ((_GLOO, ""), (_BF16, ".bf16"))
        if _COARSE in ways
    ]
    return [
        result(f"step.compute.{where}", "ms", samples[_NOTHING], details=details),
        against_best(f"step.ddp.{where}", "ms", samples, _HOOK, [_GLOO], hook),
        against_best(f"step.auto.{where}", "ms", samples, _AUTO, [_GLOO, _HOOK], details | {"route": route}),
        against_best(f"step.crossstep.{where}", "ms", samples, _CROSS_STEP, [_GLOO, _HOOK], cross),
        *coarse,
    ]


def _block_ms(trainees: Ranks, name: str) -> float:
    """Return the slowest rank's time for a step, in ms."""
    slowest_s: float = max(trainees.call("block", name, _BLOCK_STEPS))
    return 1e3 * slowest_s


def _total(ledgers: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(ledger[key] for ledger in ledgers) for key in ledgers[0]}


class LanguageModel(nn.Module):
    """A small GPT over bytes; 25.5 million parameters at the default sizes.

    Parameters
    ----------
    width, depth, heads
        Of the transformer's layers.
    """

    def __init__(self, width: int = _WIDTH, depth: int = _DEPTH, heads: int = _HEADS) -> None:
        super().__init__()
        self.symbols = nn.Embedding(_SYMBOLS, width)
        self.places = nn.Embedding(_SEQUENCE, width)
        # Without dropout, so that all ways of training see the same noise: none.
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _SYMBOLS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of every next symbol; ``text`` has shape (batch, symbols)."""
        length = text.shape[1]
        hidden = self.symbols(text) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


class TrainingWay:
    """One way to train: a model of its own, and how its gradients are averaged."""

    def __init__(self, name: str, width: int, depth: int, options: dlcp.torch.Options, precision: str) -> None:
        torch.manual_seed(7)
        self.plain = LanguageModel(width, depth)
        self.optimizer: Any = torch.optim.SGD(self.plain.parameters(), lr=0.01, momentum=0.9)
        self.steps = self.local_peers = 0
        self.ledger: Ledger | None = None
        self.state: dlcp.torch.State | None = None
        self.settle: Callable[[], None] = lambda: None
        """Returns when all updates are done, which they are unless they may go on in the next step."""
        self.close: Callable[[], None] = lambda: None
        if name == _CROSS_STEP:
            self.model: nn.Module = self.plain
            self.optimizer = cross_step(self.plain, self.optimizer, options)
            self.ledger = self.optimizer.traffic.ledger
            self.settle, self.close = self.optimizer.synchronize, self.optimizer.close
            return
        self.model = ddp = DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
        if name == _NOTHING:
            ddp.register_comm_hook(None, dlcp.torch.noop_hook)
        elif name == _BF16:
            ddp.register_comm_hook(None, bf16_hook)
        elif name in (_HOOK, _AUTO, _COARSE):
            changes: dict[str, str] = {
                _AUTO: {"route": "auto", "precision": AUTO_PRECISION},
                _COARSE: {"precision": precision},
            }.get(name, {})
            state = self.state = dlcp.torch.enable(ddp, options.with_(**changes))
            self.ledger, self.local_peers, self.close = state.ledger, state.session.local_peers, state.close

    def step(self, rank: int) -> None:
        """Do one step on the next batch, which is the same for all ways."""
        draw = torch.Generator().manual_seed(1_000_003 * rank + self.steps)
        text = torch.randint(_SYMBOLS, (1, _SEQUENCE + 1), generator=draw)
        self.optimizer.zero_grad()
        scores = self.model(text[:, :-1])
        torch.autograd.backward(nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()))
        self.optimizer.step()
        self.steps += 1


class Trainee:
    """A rank that trains in all ways; see :class:`tests.bench.ranks.Ranks`.

    Parameters
    ----------
    rank
        This rank's number.
    hosts, interface
        Each rank's address, and the interface that it is on.
    store
        Path of the file by which ranks find each other.
    width, depth
        Of the model.
    options
        DLCP's, but for the address.
    ways
        The ways to train.
    precision
        Of DLCP's lower precision, if that is one of them.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        interface: str,
        store: str,
        width: int,
        depth: int,
        options: dlcp.torch.Options,
        ways: Sequence[str],
        precision: str,
    ) -> None:
        self.rank = rank
        join_gloo(rank, len(hosts), store, interface)
        options = options.with_(bind=f"{hosts[rank]}:0")
        self.ways = {name: TrainingWay(name, width, depth, options, precision) for name in ways}

    def parameters(self) -> int:
        """Return how many parameters the model has."""
        return sum(parameter.numel() for parameter in self.ways[_GLOO].plain.parameters())

    def local_peers(self) -> int:
        """Return to how many other ranks DLCP's packets go through memory."""
        return self.ways[_HOOK].local_peers

    def block(self, name: str, steps: int) -> float:
        """Do some steps in one way and return the time for each, in seconds."""
        way = self.ways[name]
        began_s = time.perf_counter()
        for _ in range(steps):
            way.step(self.rank)
        way.settle()
        return (time.perf_counter() - began_s) / steps

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a way's parameters."""
        return dlcp.torch.parameter_digest(self.ways[name].plain)

    def packets(self, name: str) -> dict[str, int]:
        """Return the packet counts of a way on this rank."""
        ledger = self.ways[name].ledger
        summary = ledger.summary() if ledger else {}
        return {key: summary.get(key, 0) for key in ("sent", "delivered", "lost", "retransmitted")}

    def route(self) -> str:
        """Return the route that the ranks have chosen, and why."""
        state = self.ways[_AUTO].state
        return state.route if state else ""

    def close(self) -> None:
        """Leave the other ranks."""
        for way in self.ways.values():
            way.close()


def _step(arguments: argparse.Namespace) -> list[BenchResult]:
    if arguments.rate_mbps:
        become_root()
    return measure(
        arguments.turns,
        ranks=arguments.ranks,
        rate_bps=round(arguments.rate_mbps * 1e6) if arguments.rate_mbps else None,
        mtu_bytes=arguments.mtu,
        shared_memory=not arguments.sockets,
        precision=arguments.precision,
    )


BENCHMARK: Final = Benchmark(
    _step,
    {
        "--ranks": int_option(4, "that train", least=2, most=10_000),
        "--rate-mbps": {
            "type": real(MBPS),
            "metavar": "RATE",
            "help": "rate of each link (default: over loopback)",
        },
        "--sockets": {"action": "store_true", "help": "over loopback, too (default: through memory there)"},
        "--precision": {
            "type": option("precision"),
            "default": AUTO_PRECISION,
            "metavar": "BITS",
            "help": "also train at this precision, and with PyTorch's hook for bfloat16",
        },
        **MTU,
    },
    rounds=9,
)
