# SPDX-License-Identifier: Apache-2.0
"""Runs of the demo: the same training over the same congested switch, with different ways to average gradients."""

import json
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dlcp
from dlcp.demo.background import SAMPLE_S, Burst, delivered_bps, schedule
from dlcp.demo.place import LoopbackPlace, NamespacePlace, Place, Shares
from dlcp.demo.processes import Fact, Program, Running, Worker
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

BACKGROUND_FLOWS = 2
JOB = 1
PAYLOAD_BYTES = 1440
"""Fills the MTU of 1500 that the demo's network has; loopback would take more."""
CONTROL_SHARE = 0.015
"""Part of a port for acknowledgements and the like; taken from the job's share, not added to it. Chosen by us."""
READY_DEADLINE_S = 90.0
RUN_DEADLINE_S = 600.0
TCP_PAYLOAD_BYTES, TCP_FRAME_BYTES = 1448, 1514
"""A full TCP segment and its frame at an MTU of 1500; rates of ports count frames, the background counts payload."""
SERVER_REPORT = "server.json"
ORDINARY_PORT = UDP_PORT_BASE + UDP_PORT_COUNT
"""The first UDP port that switches do not take for DLCP."""

Progress = Callable[[int], None]
"""Called with the number of steps that are done."""
MakePlace = Callable[["Setup", "Shares | None", int], Place]
"""Called with the setup, the job's shares of the ports, and the job."""


class DemoError(RuntimeError):
    """A run came to no end; the message has what its processes said."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs of a demo have in common. ``hops`` are the most switches between two hosts."""

    seed: int = 1
    workers: int = 4
    steps: int = 24
    rate_bps: int = 32_000_000
    depth_packets: int = 32
    loss_bound: float = 0.1
    collective: str = "direct"
    hops: int = 1

    @property
    def command(self) -> str:
        """The command that makes the same runs."""
        collective = "ps" if self.server is not None else self.collective
        return (
            f"dlcp demo --seed {self.seed} --collective {collective} --steps {self.steps} "
            f"--rate-mbps {self.rate_bps / 1e6:g} --depth {self.depth_packets} --loss-bound {self.loss_bound:g}"
        )

    @property
    def server(self) -> int | None:
        """The host of the parameter server, if there is one."""
        return self.workers if self.collective == "server" else None

    @property
    def sources(self) -> list[int]:
        """The hosts that background traffic comes from."""
        first = self.workers + (self.server is not None)
        return list(range(first, first + BACKGROUND_FLOWS))

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return self.sources[-1] + 1

    def flows_into(self, host: int) -> int:
        """Return how many flows the training has into a host's port over TCP: from each worker to a server, else one.

        One, because Gloo sums around a ring.
        """
        return self.workers if host == self.server else 1

    def fair_share(self, host: int) -> float:
        """Return the share of a host's port that the job may have: that of its flows beside the background's."""
        flows = self.flows_into(host)
        return flows / (flows + BACKGROUND_FLOWS)

    def background_share(self, bursts: Sequence[Burst], stop_s: float) -> float:
        """Return the share of a port that is fair to the background, over all bursts up to ``stop_s``."""
        lasted = [(max(0.0, min(burst.stop_s, stop_s) - burst.start_s), burst.target) for burst in bursts]
        on_s = sum(seconds for seconds, _ in lasted)
        return sum(seconds * (1 - self.fair_share(target)) for seconds, target in lasted) / on_s if on_s else 0.0

    def bursts(self) -> list[Burst]:
        """Return the background's schedule, the same in every run."""
        targets = self.workers if self.server is None else self.workers + 1
        return schedule(self.seed, targets, RUN_DEADLINE_S)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to average gradients.

    Parameters
    ----------
    held
        Whether switches hold the job to its fair share.
    environment
        For :class:`dlcp.torch.Options`.
    """

    name: str
    title: str
    mode: str
    held: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    udp_port: int = UDP_PORT_BASE


def variants(setup: Setup) -> list[Variant]:
    """Return the ways that the demo compares."""
    bound = {"DLCP_LOSS_BOUND": str(setup.loss_bound)}
    plain = {"DLCP_LOSS_BOUND": "0", "DLCP_TAGGED": "0", "DLCP_ADAPTIVE_SHARDS": "0", "DLCP_CONGESTION": "cubic"}
    return [
        Variant("gloo", "Gloo over the kernel's TCP (CUBIC)", "gloo"),
        Variant(
            "plain", "DLCP's transport used plainly: reliable, one queue, no tags", "dlcp", False, plain, ORDINARY_PORT
        ),
        Variant("dlcp", "DLCP, held to its fair share", "dlcp", True, bound),
        Variant("dlcp_priority", "DLCP, with priority over the background", "dlcp", False, bound),
    ]


def execute(setup: Setup, variant: Variant, *, namespaces: bool, progress: Progress) -> dict[str, Any]:
    """Run one variant around the built-in switch; see :func:`execute_at`."""
    return execute_at(NamespacePlace if namespaces else LoopbackPlace, setup, variant, progress=progress)


def execute_at(make_place: MakePlace, setup: Setup, variant: Variant, *, progress: Progress) -> dict[str, Any]:
    """Run one variant and return its record, in the form that :mod:`dlcp.demo.summary` reads.

    Parameters
    ----------
    make_place
        Makes the place where it runs, from the setup, the job's shares of the ports, and the job.

    Raises
    ------
    DemoError
        A process failed or did not end in time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlcp-demo-")))
        place = stack.enter_context(make_place(setup, _shares(setup, variant), JOB))
        bursts = setup.bursts()
        sinks, sources = _background(setup, place, bursts, folder, stack)
        servers, workers = _workers(setup, variant, place, folder, stack, progress)
        everybody: list[Running] = [*sinks, *sources, *servers, *workers]
        _await_ready(everybody)
        start_s = time.monotonic() + 0.3
        waiting: list[Running] = [*sources, *workers[: setup.workers]]
        for process in waiting:
            process.tell(start_s)
        reports = _collect(workers[: setup.workers], everybody)
        stop_s = max(sum(report["steps"]) for report in reports)
        for program in [*sources, *sinks, *servers]:
            program.stop()
        samples = _samples(folder, start_s)
        served = json.loads((folder / SERVER_REPORT).read_text()) if servers else {"ledger": None}
        counters = place.counters()
    record = _record(setup, variant, place, reports, samples, stop_s, bursts, counters)
    return record | {"server_ledger": served["ledger"]}


def _shares(setup: Setup, variant: Variant) -> Shares | None:
    """Return the job's shares of the ports, None if it is not held to any."""
    if not variant.held:
        return None
    data = {host: setup.fair_share(host) - CONTROL_SHARE for host in range(setup.workers + 1)}
    usual = data[0]
    # A burst may be what a queue holds: less, and packets that the queue has room for would wait behind everybody else.
    burst_s = setup.depth_packets * TCP_FRAME_BYTES * 8 / setup.rate_bps
    return Shares(usual, CONTROL_SHARE, burst_s, {host: share for host, share in data.items() if share != usual})


def _program(stack: ExitStack, place: Place, name: str, host: int, argv: Sequence[str]) -> Program:
    program = Program(f"{name} {host}", place.popen(host), argv)
    stack.callback(program.stop)
    return program


def _background(
    setup: Setup, place: Place, bursts: Sequence[Burst], folder: Path, stack: ExitStack
) -> tuple[list[Program], list[Program]]:
    module = ["-m", "dlcp.demo.background"]
    targets = list(range(setup.workers if setup.server is None else setup.workers + 1))
    plan = json.dumps([[burst.start_s, burst.stop_s, burst.target] for burst in bursts])
    sinks = []
    for host in targets:
        peers = place.background_arguments(host, setup.sources)
        sinks.append(
            _program(stack, place, "sink", host, [*module, "sink", *peers, "--log", str(folder / f"sink{host}")])
        )
    _await_ready(sinks)
    sources = []
    for host in setup.sources:
        peers = place.background_arguments(host, targets)
        sources.append(_program(stack, place, "source", host, [*module, "source", *peers, "--bursts", plan]))
    return sinks, sources


def _workers(
    setup: Setup, variant: Variant, place: Place, folder: Path, stack: ExitStack, progress: Progress
) -> tuple[list[Program], list[Worker]]:
    token = secrets.randbits(63) | 1
    servers = []
    ranks = setup.workers
    if setup.server is not None and variant.mode == "gloo":
        ranks += 1
    elif setup.server is not None:
        argv = [*_server(setup, variant, place, token), "--report", str(folder / SERVER_REPORT)]
        servers.append(_program(stack, place, "server", setup.server, argv))
    workers = []
    for rank in range(ranks):
        environment = {
            "GLOO_SOCKET_IFNAME": place.interface,
            "DLCP_BIND": place.bind_of(rank, variant.udp_port),
            "DLCP_ADVERTISE": place.address_of(rank, variant.udp_port),
            "DLCP_JOB": str(JOB),
            "DLCP_PAYLOAD_BYTES": str(PAYLOAD_BYTES),
            "DLCP_TOKEN": str(token),
            # A run must not measure something else under this name.
            "DLCP_FALLBACK": "0",
            "DLCP_COLLECTIVE": setup.collective,
            "DLCP_SWITCH_HOPS": str(setup.hops),
            "DLCP_SERVER": "" if setup.server is None else place.address_of(setup.server, variant.udp_port),
            **variant.environment,
        }
        if setup.server is not None:
            # Each worker's flow into the server's port counts as much as one of TCP.
            environment["DLCP_FLOW_WEIGHT"] = "1"
        arguments = [
            *("--mode", variant.mode, "--collective", setup.collective, "--steps", str(setup.steps)),
            *("--rank", str(rank), "--workers", str(setup.workers), "--ranks", str(ranks)),
            *("--seed", str(setup.seed), "--store", str(folder / "store")),
        ]
        on_fact = partial(_report_progress, progress) if rank == 0 else _ignore
        worker = Worker(f"worker {rank}", place.namespace(rank), environment, arguments, on_fact)
        stack.callback(worker.stop)
        workers.append(worker)
    return servers, workers


def _server(setup: Setup, variant: Variant, place: Place, token: int) -> list[str]:
    """Return the command line of the parameter server."""
    assert setup.server is not None
    environment = variant.environment
    return [
        *("-m", "dlcp.cli", "server", "--bind", place.bind_of(setup.server, variant.udp_port)),
        *("--workers", *(place.address_of(worker, variant.udp_port) for worker in range(setup.workers))),
        *("--token", str(token), "--job", str(JOB), "--loss-bound", environment["DLCP_LOSS_BOUND"]),
        *("--tagged", environment.get("DLCP_TAGGED", "1")),
        *("--congestion", environment.get("DLCP_CONGESTION", "proportional")),
    ]


def _await_ready(processes: Sequence[Running]) -> None:
    deadline_s = time.monotonic() + READY_DEADLINE_S
    for process in processes:
        while not process.ready.wait(0.2):
            _check(processes)
            if time.monotonic() > deadline_s:
                raise DemoError(f"{process.name} is not ready after {READY_DEADLINE_S:.0f} s: {process.said()}")
    _check(processes)


def _collect(workers: Sequence[Worker], everybody: Sequence[Running]) -> list[Fact]:
    deadline_s = time.monotonic() + RUN_DEADLINE_S
    while any(worker.status() is None for worker in workers):
        _check(everybody)
        if time.monotonic() > deadline_s:
            raise DemoError(f"no end after {RUN_DEADLINE_S:.0f} s")
        time.sleep(0.1)
    _check(everybody)
    reports = [worker.finish(READY_DEADLINE_S) for worker in workers]
    found = [report for report in reports if report is not None]
    if len(found) < len(reports):
        raise DemoError("a worker ended without a report")
    return found


def _check(processes: Sequence[Running]) -> None:
    failed = [process for process in processes if process.status() not in (None, 0)]
    if failed:
        time.sleep(0.5)  # the others notice and say why
        said = [f"{process.name}: {process.said()}" for process in processes if process.said()]
        raise DemoError("\n".join(said) or f"{failed[0].name} ended with status {failed[0].status()}")


def _report_progress(progress: Progress, fact: Fact) -> None:
    if "step" in fact:
        progress(fact["step"])


def _ignore(fact: Fact) -> None:
    pass


def _samples(folder: Path, start_s: float) -> list[tuple[float, float]]:
    """Return when how many bytes of background arrived, in seconds of the run, over all sinks."""
    total: dict[float, float] = {}
    for log in folder.glob("sink*"):
        for when_s, count in json.loads(log.read_text()):
            total[when_s] = total.get(when_s, 0) + count
    return [(when_s - start_s, count) for when_s, count in sorted(total.items())]


def _record(
    setup: Setup,
    variant: Variant,
    place: Place,
    reports: Sequence[dict[str, Any]],
    samples: Sequence[tuple[float, float]],
    stop_s: float,
    bursts: Sequence[Burst],
    counters: dict[str, Any],
) -> dict[str, Any]:
    first = reports[0]
    return {
        "name": variant.name,
        "title": variant.title,
        "seed": setup.seed,
        "collective": setup.collective,
        "fabric": {
            "kind": place.kind,
            "workers": setup.workers,
            "rate_bps": setup.rate_bps,
            "depth_packets": setup.depth_packets,
            "mtu": 1500,
        },
        "background": {
            "flows": BACKGROUND_FLOWS,
            "bps": delivered_bps(samples, bursts, stop_s),
            "fair_share_bps": setup.background_share(bursts, stop_s)
            * setup.rate_bps
            * TCP_PAYLOAD_BYTES
            / TCP_FRAME_BYTES,
            "samples": [[round(when_s, 2), 8 * count / SAMPLE_S] for when_s, count in samples if 0 <= when_s <= stop_s],
            "bursts": [[b.start_s, b.stop_s, b.target] for b in bursts if b.start_s < stop_s],
        },
        "curve": first["curve"],
        "steps": first["steps"],
        "compute_seconds": first["compute_seconds"],
        "parameters": first["parameters"],
        "gradient_bytes": 4 * first["parameters"],
        "replicas_identical": len({report["digest"] for report in reports}) == 1,
        "final_accuracy": first["curve"][-1]["accuracy"],
        "ledger": _sum_ledgers([report["ledger"] for report in reports], float(variant.environment["DLCP_LOSS_BOUND"]))
        if variant.mode == "dlcp"
        else None,
        "layer_names": first["layer_names"],
        "layer_seconds": first["layer_seconds"],
        "switch": _switch_totals(counters),
        "program_digest": counters["program"]["digest"],
        "versions": {
            "python": platform.python_version(),
            "torch": first["torch"],
            "kernel": platform.release(),
            "dlcp": dlcp.__version__,
            "cpu": _processor(),
            "cores": str(os.cpu_count()),
        },
        "tcp": {key: sum(report["tcp"][key] for report in reports) for key in ("sent", "retransmitted")}
        if variant.mode == "gloo"
        else None,
        "command": setup.command,
    }


def _processor() -> str:
    """Return the name of the processor, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _sum_ledgers(ledgers: Sequence[dict[str, Any]], bound: float) -> dict[str, Any]:
    total: dict[str, Any] = {
        name: sum(ledger[name] for ledger in ledgers)
        for name in ("sent", "delivered", "lost", "retransmitted", "violations")
    }
    total["max_message_ratio"] = max(ledger["max_message_ratio"] for ledger in ledgers)
    total["by_class"] = [
        [sum(ledger["by_class"][row][column] for ledger in ledgers) for column in (0, 1)] for row in range(8)
    ]
    total["by_layer"] = {
        layer: [sum(ledger["by_layer"].get(layer, [0, 0])[column] for ledger in ledgers) for column in (0, 1)]
        for layer in ledgers[0]["by_layer"]
    }
    total["bound"] = bound
    return total


def _switch_totals(counters: dict[str, Any]) -> dict[str, Any]:
    """Return the switch's counters in short."""
    ingress, egress = counters["program"]["ingress_events"], counters["program"]["egress_events"]
    by_class = [0] * 8
    for event in ingress["by_queue"]:
        if event["event"] == "POLICY_DROP":
            by_class[event["drop_class"]] += event["packets"]
    queues: dict[str, dict[str, int]] = {}
    for port in counters["ports"]:
        for queue in port["queues"]:
            entry = queues.setdefault(str(queue["queue"]), {"packets": 0, "bytes": 0, "tail_drops": 0})
            entry["packets"] += queue["transmitted"]
            entry["bytes"] += queue["transmitted_bytes"]
            entry["tail_drops"] += queue["tail_drops"]
    return {
        "tail_drops": sum(queue["tail_drops"] for queue in queues.values()),
        "policy_drops": sum(by_class),
        "policy_drops_by_class": by_class,
        "marked": egress["totals"].get("MARKED", 0),
        "over_share": ingress["totals"].get("OVER_SHARE", 0),
        "forwarded": egress["totals"].get("FORWARDED", 0),
        "by_queue": queues,
        "busy": counters["busy"],
        "late_max_s": counters["late_max_s"],
    }
