# SPDX-License-Identifier: Apache-2.0
"""What ``dlcp advise`` chooses on a clean and on two bad networks, and whether following it is faster than the default.

Clean: hosts with network namespaces around a router that is as fast as the machine. Lossy: the same with 1 % random
loss and links of 100 Mbit/s. Congested: hosts around the built-in switch with ports of 32 Mbit/s, into which two flows
of background TCP burst, as in ``dlcp demo``. On each, ranks train with the defaults, tell what they have seen, get
their advice, and train on in blocks with the defaults and as advised, in turn.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.bench.results import BenchResult, result, say
from dlcp.demo.background import schedule, sink, source
from dlcp.demo.network import NamespaceNetwork
from dlcp.demo.setup import DemoSetup
from dlcp.processes import ReportingFork
from dlcp.train.measurement import with_settings
from dlcp.tuning.rules import Advice, Settings, Survey, decide, figures_of_surveys
from tests.bench.harness import Benchmark, Turns, int_option, scratch
from tests.bench.paths import RoutedPath
from tests.bench.ranks import Ranks, join_gloo

NOTHING, DEFAULT, ADVISED = "no communication", "default", "advised"
WIDTH, BATCH = 256, 64
PAYLOAD_BYTES = 1440
READY_S = 60.0


class Advisee:
    """A rank that trains the same model in several ways; see :class:`tests.bench.ranks.Ranks`.

    Parameters
    ----------
    rank
        This rank's number.
    hosts, interface
        Each rank's address, and the interface that it is on.
    store
        Path of the file by which ranks find each other.
    """

    def __init__(self, rank: int, hosts: Sequence[str], interface: str, store: str) -> None:
        join_gloo(rank, len(hosts), store, interface)
        self.rank, self.ranks = rank, len(hosts)
        self.models = {NOTHING: self._model()}
        self.models[NOTHING].register_comm_hook(None, dlcp.torch.noop_hook)
        self.states: dict[str, dlcp.torch.State] = {}
        self.options = dlcp.torch.Options(
            bind=f"{hosts[rank]}:0", payload_bytes=PAYLOAD_BYTES, fallback=False, route="dlcp"
        )
        self._add(DEFAULT, self.options)

    def block(self, name: str, steps: int) -> float:
        """Do some steps in one way; return seconds a step."""
        model = self.models[name]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(self.rank)
        began_s = time.perf_counter()
        for _ in range(steps):
            images = torch.randn(BATCH, 64, generator=draw)
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - began_s) / steps

    def survey(self) -> Survey:
        """Return what this rank has seen with the defaults."""
        state = self.states[DEFAULT]
        assert state.endpoint
        return Survey.of(self.rank, self.ranks, state.ledger, state.endpoint.connection)

    def hosts(self) -> int:
        """Return on how many hosts the ranks are."""
        return self.states[DEFAULT].hosts

    def follow(self, settings: Settings) -> None:
        """Be able to train as advised from now on."""
        self._add(ADVISED, with_settings(self.options, settings))

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a way's parameters."""
        return dlcp.torch.parameter_digest(self.models[name].module)

    def violations(self) -> int:
        """Return how many messages lost more than they may."""
        return sum(int(state.ledger.violations) for state in self.states.values())

    def close(self) -> None:
        """Leave the other ranks."""
        for state in self.states.values():
            state.close()

    def _add(self, name: str, options: dlcp.torch.Options) -> None:
        self.models[name] = self._model()
        self.states[name] = dlcp.torch.enable(self.models[name], options)

    @staticmethod
    def _model() -> DistributedDataParallel:
        torch.manual_seed(1)
        layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
        return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)


class Where:
    """Where ranks are: their addresses, their interface, their namespaces, and what it is in words."""

    def __init__(self, words: str, hosts: list[str], interface: str, namespaces: list[str | None]) -> None:
        self.words, self.hosts, self.interface, self.namespaces = words, hosts, interface, namespaces


@contextmanager
def routed(ranks: int, loss: float, rate_bps: int | None) -> Iterator[Where]:
    """Let ranks be around a router."""
    with RoutedPath(ranks, loss, rate_bps=rate_bps) as path:
        yield Where(path.words, [path.address(rank) for rank in range(ranks)], path.interface, path.namespaces)


@contextmanager
def congested(ranks: int) -> Iterator[Where]:
    """Let ranks be around the built-in switch, with background traffic into their ports."""
    setup = DemoSetup(workers=ranks)
    with ExitStack() as stack:
        place = stack.enter_context(NamespaceNetwork(setup, None, 1))
        bursts = schedule(setup.seed, ranks, 600.0, off_s=0.1)

        def start(function: Callable[..., None], host: int, peers: Sequence[int], *more: Any) -> ReportingFork:
            name, arguments = f"{function.__name__} {host}", [place.background_end(host, peers), *more]
            return stack.enter_context(ReportingFork(name, function, arguments, namespace=place.namespace(host)))

        targets = list(range(ranks))
        _await([start(sink, host, setup.sources) for host in targets])
        sources = [start(source, host, targets, bursts) for host in setup.sources]
        _await(sources)
        for each in sources:
            each.start_at(time.monotonic())
        hosts = [place.bind_of(rank, 0).partition(":")[0] for rank in targets]
        words = f"built-in switch, ports of {setup.rate_bps / 1e6:g} Mbit/s, {len(sources)} flows of background TCP"
        yield Where(words, hosts, place.interface, [place.namespace(rank) for rank in targets])


def _await(processes: Sequence[ReportingFork]) -> None:
    for process in processes:
        if not process.ready.wait(READY_S):
            raise RuntimeError(f"{process.name} is not ready: {process.errors()}")


def measure(name: str, where: Where, steps: int, turns: Turns) -> BenchResult:
    """Let ranks train with the defaults, be advised, and train both ways in turn."""
    say(f"{name}: {where.words}")
    with scratch() as folder:
        arguments = [where.hosts, where.interface, str(folder / "store")]
        with Ranks(Advisee, arguments, where.namespaces) as ranks:
            ranks.call("block", DEFAULT, steps)  # rate control finds its rate
            before = {way: [max(ranks.call("block", way, steps)) for _ in range(2)] for way in (NOTHING, DEFAULT)}
            step_s, floor_s = median(before[DEFAULT]), median(before[NOTHING])
            advice = decide(
                figures_of_surveys(
                    ranks.call("survey"),
                    ranks.call("hosts")[0],
                    gradient_bytes=4 * (64 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH + WIDTH * 10 + 10),
                    step_s=step_s,
                    waited_s=max(0.0, min(step_s, step_s - floor_s)),
                ),
                Settings.of(dlcp.torch.Options()),
            )
            say(f"  {advice.changes}")
            ranks.call("follow", advice.settings)
            blocks = {way: partial(_block_ms, ranks, way, steps) for way in (DEFAULT, ADVISED)}
            samples = turns.take(blocks)
            for way in (DEFAULT, ADVISED):
                if len(set(ranks.call("digest", way))) > 1:
                    raise RuntimeError(f"{way}: ranks have different parameters")
            violations = sum(ranks.call("violations"))
    return result(
        f"advise.{name}", "ms/step", samples[ADVISED], samples[DEFAULT], details=_details(where, advice, violations)
    )


def _block_ms(ranks: Ranks, way: str, steps: int) -> float:
    return 1e3 * max(ranks.call("block", way, steps))


def _details(where: Where, advice: Advice, violations: int) -> dict[str, object]:
    told = advice.as_json()
    return {
        "path": where.words,
        "changes": advice.changes,
        "why": {choice["option"]: choice["why"] for choice in told["choices"]},
        "figures": told["figures"],
        "bound_exceeded": violations,
    }


def _advise(arguments: argparse.Namespace) -> Iterator[BenchResult]:
    networks = {
        "clean": lambda: routed(arguments.ranks, 0.0, None),
        "lossy": lambda: routed(arguments.ranks, 0.01, 100_000_000),
        "congested": lambda: congested(arguments.ranks),
    }
    for name in arguments.networks:
        with networks[name]() as where:
            yield measure(name, where, arguments.steps, arguments.turns)


_NETWORKS = ("clean", "lossy", "congested")
BENCHMARK = Benchmark(
    _advise,
    {
        "--ranks": int_option(3, "that train", least=2),
        "--steps": int_option(3, "of a block"),
        "--networks": {"nargs": "+", "choices": _NETWORKS, "default": _NETWORKS, "help": "(default: all)"},
    },
    rounds=31,
    warm_up=1,
    root=True,
)
