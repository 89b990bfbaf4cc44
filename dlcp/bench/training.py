# SPDX-License-Identifier: Apache-2.0
"""A rank of the training-step benchmark: the same model trained in several ways, in turns, in one process."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, untyped
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.ledger import Ledger
from dlcp.torch.crossstep import cross_step

WIDTH: Final = 512
DEPTH: Final = 8
HEADS: Final = 8
SYMBOLS: Final = 256
SEQUENCE: Final = 64
"""Symbols a rank sees in a step: few, since four ranks share few cores. Chosen by us."""
TIMEOUT: Final = timedelta(seconds=120)

NOTHING, GLOO, HOOK, CROSS_STEP = "no communication", "gloo", "dlcp", "dlcp, cross-step"


class LanguageModel(nn.Module):
    """A small GPT over bytes; 25.5 million parameters at the default sizes.

    Parameters
    ----------
    width, depth, heads
        Of the transformer's layers.
    """

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, heads: int = HEADS) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.places = nn.Embedding(SEQUENCE, width)
        # Without dropout, so that all ways of training see the same noise: none.
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of every next symbol; ``text`` has shape (batch, symbols)."""
        length = text.shape[1]
        hidden = self.symbols(text) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


class Way:
    """One way to train: a model of its own, and how its gradients are averaged."""

    optimizer: Any
    ledger: Ledger | None = None

    def __init__(self, width: int, depth: int) -> None:
        torch.manual_seed(7)
        self.plain = LanguageModel(width, depth)
        self.model: nn.Module = self.plain
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.01, momentum=0.9)
        self.steps = 0

    def step(self, rank: int) -> None:
        """Do one step on the next batch, which is the same for all ways."""
        draw = torch.Generator().manual_seed(1_000_003 * rank + self.steps)
        text = torch.randint(SYMBOLS, (1, SEQUENCE + 1), generator=draw)
        self.optimizer.zero_grad()
        scores = self.model(text[:, :-1])
        torch.autograd.backward(nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()))
        self.optimizer.step()
        self.steps += 1

    def settle(self) -> None:
        """Return when all updates are done, which they are unless they may go on in the next step."""

    def close(self) -> None:
        """Leave the other ranks; nothing to do where the process group is all there is."""


class Gloo(Way):
    """DDP as it is, over Gloo."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.model: DistributedDataParallel = DistributedDataParallel(self.plain, gradient_as_bucket_view=True)


class Nothing(Gloo):
    """DDP without communication: what steps would take if it cost nothing."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.model.register_comm_hook(None, dlcp.torch.noop_hook)


class Hook(Gloo):
    """DDP with DLCP's hook."""

    def __init__(self, width: int, depth: int, options: dlcp.torch.Options) -> None:
        super().__init__(width, depth)
        self.state = dlcp.torch.enable(self.model, options)
        self.ledger = self.state.ledger

    def close(self) -> None:
        """Leave the other ranks."""
        self.state.close()


class CrossStep(Way):
    """DLCP's cross-step scheduling, without DDP."""

    def __init__(self, width: int, depth: int, options: dlcp.torch.Options) -> None:
        super().__init__(width, depth)
        self.optimizer = cross_step(self.plain, self.optimizer, options)
        self.ledger = self.optimizer.traffic.ledger

    def settle(self) -> None:
        """Return when all updates are done."""
        self.optimizer.synchronize()

    def close(self) -> None:
        """Leave the other ranks."""
        self.optimizer.close()


class Trainee:
    """A rank that trains in all ways; see :class:`dlcp.bench.ranks.Ranks`.

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
    ) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        ranks = len(hosts)
        dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks, timeout=TIMEOUT)
        options = options.with_(bind=f"{hosts[rank]}:0")
        self.ways: dict[str, Way] = {
            NOTHING: Nothing(width, depth),
            GLOO: Gloo(width, depth),
            HOOK: Hook(width, depth, options),
            CROSS_STEP: CrossStep(width, depth, options),
        }

    def parameters(self) -> int:
        """Return how many parameters the model has."""
        return sum(parameter.numel() for parameter in self.ways[GLOO].plain.parameters())

    def neighbours(self) -> int:
        """Return to how many other ranks DLCP's packets go through memory."""
        hook = self.ways[HOOK]
        assert isinstance(hook, Hook)
        return hook.state.local_peers

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
        """Return what a way's packets came to on this rank."""
        ledger = self.ways[name].ledger
        summary = ledger.summary() if ledger else {}
        return {key: summary.get(key, 0) for key in ("sent", "delivered", "lost", "retransmitted")}

    def close(self) -> None:
        """Leave the other ranks."""
        for way in self.ways.values():
            way.close()
