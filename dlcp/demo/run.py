# SPDX-License-Identifier: Apache-2.0
"""Runs of the demo: train over a congested switch next to background traffic, record each run, and report on all.

The network of a run is hosts around a switch, in network namespaces or, without privileges, on loopback addresses.
"""

import contextlib
import importlib
import io
import json
import os
import platform
import secrets
import tempfile
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from rich import progress
from rich.console import Console

import dlcp
from dlcp.controller.fabric import Host, Job, star
from dlcp.demo.background import SAMPLE_S, SINK_PORT, BackgroundBurst, BackgroundEnd, delivered_bps, sink, source
from dlcp.demo.variants import BACKGROUND_FLOWS, RUN_DEADLINE_S, DemoSetup, Variant
from dlcp.host import processor
from dlcp.host.closing import Closing
from dlcp.host.netlab import HOST_INTERFACE, Namespace, StarNetwork
from dlcp.host.processes import Fact, ReportingFork, send_fact
from dlcp.inputs.addresses import parse_address
from dlcp.report.runs import RUN_NAMES, Run, RunFileError, check_complete, load_runs, summarize, write_summary
from dlcp.switch import LoopbackHost, PortQueueing, SwitchProcess
from dlcp.transport.ledger import add_up
from dlcp.wire import DROP_CLASSES, UDP_PORT_BASE, UDP_PORT_COUNT


class DemoNetwork(Closing):
    """Hosts joined by switches, with the namespace and addresses of each host; a context manager."""

    kind = ""
    """Its name in the run's record."""
    over = ""
    """Transport of the background traffic: ``tcp`` or ``udp``."""
    interface = ""
    """The name of every host's interface."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def close(self) -> None:
        """Tear the network down."""
        self._stack.close()

    @abstractmethod
    def bind_of(self, host: int, port: int) -> str:
        """Return the ``address:port`` to which a process on a host binds its socket."""

    def address_of(self, host: int, port: int) -> str:
        """Return the ``address:port`` at which others reach that socket."""
        return self.bind_of(host, port)

    @abstractmethod
    def namespace(self, host: int) -> str | None:
        """Return the path of a host's own network namespace, or None."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Wait until no packets are in flight, and return the switches' counters."""

    def background_end(self, host: int, peers: Sequence[int]) -> BackgroundEnd:
        """Return a host's end of the background traffic, with the addresses of its peers."""
        addresses = {peer: parse_address(self.address_of(peer, SINK_PORT)) for peer in peers}
        return BackgroundEnd(self.over, host, parse_address(self.bind_of(host, SINK_PORT)), addresses)


class SwitchNetwork(DemoNetwork):
    """Hosts around one built-in switch.

    Parameters
    ----------
    setup
        Hosts, rates and depths.
    held
        Whether the switch limits the job to its fair share of each port.
    """

    def __init__(self, setup: DemoSetup, held: bool) -> None:
        super().__init__()
        names = [Host.numbered(index).name for index in range(setup.hosts)]
        fabric = star(
            setup.hosts,
            ports="packet" if self.kind == "namespaces" else "loopback",
            queueing=PortQueueing(rate_bps=setup.rate_bps, depth_packets=setup.depth_packets),
            jobs=[fair_shares(setup, names)] if held else [],
        )
        self._fabric = asdict(fabric)

    def _start_switch(self, namespace: Namespace | None = None) -> None:
        documents = {"--fabric": self._fabric}
        self._switch = self._stack.enter_context(
            SwitchProcess(namespace=namespace, documents=documents, counters_every_s=5.0)
        )

    def counters(self) -> dict[str, Any]:
        """Stop the switch and return its counters."""
        return self._switch.stop()


class NamespaceNetwork(SwitchNetwork):
    """Hosts in their own network namespaces, so that all traffic crosses the switch, TCP included."""

    kind = "namespaces"
    over = "tcp"
    interface = HOST_INTERFACE

    def __init__(self, setup: DemoSetup, held: bool) -> None:
        super().__init__(setup, held)
        self._network = self._stack.enter_context(StarNetwork(setup.hosts))
        self._start_switch(self._network.switch)

    def namespace(self, host: int) -> str | None:
        """Return the path of the host's namespace."""
        return self._network.hosts[host].namespace.path

    def bind_of(self, host: int, port: int) -> str:
        """Return the host's address."""
        return f"{self._network.hosts[host].address}:{port}"


class LoopbackNetwork(SwitchNetwork):
    """Processes of this machine, each with a loopback address. Needs no privileges; TCP cannot cross the switch."""

    kind = "loopback"
    over = "udp"
    interface = "lo"

    def __init__(self, setup: DemoSetup, held: bool) -> None:
        super().__init__(setup, held)
        self._fabric["udp_ports"] = [UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT, SINK_PORT]
        self._start_switch()

    def namespace(self, host: int) -> str | None:
        """Return None: all hosts share this process's namespace."""
        return None

    def bind_of(self, host: int, port: int) -> str:
        """Return the address of the host's process."""
        return f"{LoopbackHost.numbered(host).real}:{port}"

    def address_of(self, host: int, port: int) -> str:
        """Return the switch's address that leads to the host."""
        return f"{LoopbackHost.numbered(host).alias}:{port}"


JOB: Final = 1
_PAYLOAD_BYTES: Final = 1440
"""Fills an MTU of 1500 bytes, also on loopback, whose MTU is larger."""
_CONTROL_SHARE: Final = 0.015
"""Part of a port for acknowledgements and other control packets, taken from the job's share. Not tuned."""
_READY_DEADLINE_S: Final = 90.0
_TCP_PAYLOAD_BYTES, _TCP_FRAME_BYTES = 1448, 1514
"""A full TCP segment and its frame at an MTU of 1500. Port rates count frames; the background counts payload."""
_SERVER_REPORT: Final = "server.json"

Progress = Callable[[int], None]
"""Called with the number of finished steps."""
MakeNetwork = Callable[[DemoSetup, bool], DemoNetwork]
"""Called with the setup, and whether switches limit the job to its fair share of each port."""


class DemoError(RuntimeError):
    """A run did not finish; the message holds the errors of its processes."""


def execute(make_network: MakeNetwork, setup: DemoSetup, variant: Variant, *, progress: Progress) -> dict[str, Any]:
    """Run one variant and return its record, in the format of :mod:`dlcp.report.runs`.

    Parameters
    ----------
    make_network
        Makes the network of the run: a class of this module, or a testbed.

    Raises
    ------
    DemoError
        A process failed or did not end in time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlcp-demo-")))
        network = stack.enter_context(make_network(setup, variant.held))
        bursts = setup.bursts()
        sinks, sources = start_background(setup, network, bursts, stack)
        servers, ranks = _ranks(setup, variant, network, folder, stack, progress)
        workers = ranks[: setup.workers]
        everybody = [*sinks, *sources, *servers, *ranks]
        await_ready(everybody)
        start_s = time.monotonic() + 0.3
        for process in (*sources, *workers):
            process.start_at(start_s)
        reports = _collect(workers, everybody)
        stop_s = max(sum(report["steps"]) for report in reports)
        for process in (*sources, *servers):
            process.stop()
        background = _background_record(setup, bursts, _samples([sink.stop() for sink in sinks], start_s), stop_s)
        served = json.loads((folder / _SERVER_REPORT).read_text()) if servers else {"ledger": None}
        counters = network.counters()
    first = reports[0]
    ledgers = [report["ledger"] for report in reports]
    return {
        "name": variant.name,
        "title": variant.title,
        "seed": setup.seed,
        "collective": setup.collective,
        "fabric": {
            "kind": network.kind,
            "workers": setup.workers,
            "rate_bps": setup.rate_bps,
            "depth_packets": setup.depth_packets,
            "mtu": 1500,
        },
        "background": background,
        **{name: first[name] for name in ("curve", "steps", "compute_seconds", "parameters")},
        "gradient_bytes": (2 if setup.fp16 else 4) * first["parameters"],
        "replicas_identical": len({report["digest"] for report in reports}) == 1,
        "final_accuracy": first["curve"][-1]["accuracy"],
        "ledger": add_up(ledgers) | {"bound": float(variant.environment["DLCP_LOSS_BOUND"])}
        if variant.mode == "dlcp"
        else None,
        "server_ledger": served["ledger"],
        **{name: first[name] for name in ("layer_names", "layer_seconds")},
        "switch": _switch_totals(counters),
        "program_digest": counters["program"]["digest"],
        "versions": {
            "python": platform.python_version(),
            "torch": first["torch"],
            "kernel": platform.release(),
            "dlcp": dlcp.__version__,
            "cpu": processor(),
            "cores": str(os.cpu_count()),
        },
        "tcp": {key: sum(report["tcp"][key] for report in reports) for key in ("sent", "retransmitted")}
        if variant.mode == "gloo"
        else None,
        "command": setup.command,
    }


def fair_shares(setup: DemoSetup, hosts: Sequence[str]) -> Job:
    """Return the job with its fair shares of the ports of its ``hosts``, control packets included."""
    data = {host: setup.fair_share(number) - _CONTROL_SHARE for number, host in enumerate(hosts[: setup.workers + 1])}
    usual = data[hosts[0]]
    # Allow bursts of one full queue. With shorter ones, packets that fit the queue would be demoted behind all others.
    burst_s = setup.depth_packets * _TCP_FRAME_BYTES * 8 / setup.rate_bps
    return Job(JOB, usual, _CONTROL_SHARE, {host: share for host, share in data.items() if share != usual}, burst_s)


def start_background(
    setup: DemoSetup, network: DemoNetwork, bursts: Sequence[BackgroundBurst], stack: ExitStack
) -> tuple[list[ReportingFork], list[ReportingFork]]:
    """Start the background traffic; return its sinks, once they are ready, and its sources."""
    sinks = [
        _start(stack, network, "sink", host, sink, [network.background_end(host, setup.sources)])
        for host in setup.targets
    ]
    await_ready(sinks)
    sources = [
        _start(stack, network, "source", host, source, [network.background_end(host, setup.targets), bursts])
        for host in setup.sources
    ]
    return sinks, sources


def _start(
    stack: ExitStack,
    network: DemoNetwork,
    name: str,
    host: int,
    function: Callable[..., None],
    arguments: Sequence[Any],
    **options: Any,
) -> ReportingFork:
    """Start a process on a host."""
    namespace = network.namespace(host)
    return stack.enter_context(ReportingFork(f"{name} {host}", function, arguments, namespace=namespace, **options))


def _ranks(
    setup: DemoSetup, variant: Variant, network: DemoNetwork, folder: Path, stack: ExitStack, progress: Progress
) -> tuple[list[ReportingFork], list[ReportingFork]]:
    """Start DLCP's parameter server, if any, and the ranks: the workers, then Gloo's server if any."""
    servers = []
    ranks = setup.workers
    secret_file = folder / "secret"
    secret_file.touch(mode=0o600)
    secret_file.write_text(secrets.token_hex(32))
    server_address = ""
    if setup.server is not None and variant.mode == "gloo":
        ranks += 1
    elif setup.server is not None:
        server_address = network.bind_of(setup.server, variant.udp_port)
        arguments = ["--bind", server_address, "--advertise", network.address_of(setup.server, variant.udp_port)]
        arguments += ["--secret-file", str(secret_file), "--report", str(folder / _SERVER_REPORT)]
        servers.append(_start(stack, network, "server", setup.server, command, [["server", *arguments]]))
    workers = []
    for rank in range(ranks):
        environment = {
            "GLOO_SOCKET_IFNAME": network.interface,
            "DLCP_BIND": network.bind_of(rank, variant.udp_port),
            "DLCP_ADVERTISE": network.address_of(rank, variant.udp_port),
            "DLCP_JOB": str(JOB),
            "DLCP_PAYLOAD_BYTES": str(_PAYLOAD_BYTES),
            "DLCP_SECRET_FILE": str(secret_file),
            # PyTorch's all-reduce would be measured as DLCP.
            "DLCP_FALLBACK": "0",
            "DLCP_ROUTE": "dlcp",
            "DLCP_COLLECTIVE": f"server:{server_address}" if server_address else setup.collective,
            **variant.environment,
        }
        task = [rank, ranks, variant.mode, setup, str(folder / "store")]
        on_fact = partial(_report_progress, progress) if rank == 0 else None
        process = _start(stack, network, "worker", rank, _work, task, environment=environment, on_fact=on_fact)
        workers.append(process)
    return servers, workers


def _work(channel: Connection, *task: Any) -> None:
    from dlcp.demo import rank  # needs PyTorch, which forks have already loaded

    rank.main(channel, *task)


def await_ready(processes: Sequence[ReportingFork]) -> None:
    """Wait until processes have reported their first fact.

    Raises
    ------
    DemoError
        One failed, or did not report in time.
    """
    deadline_s = time.monotonic() + _READY_DEADLINE_S
    for process in processes:
        while not process.ready.wait(0.2):
            _check(processes)
            if time.monotonic() > deadline_s:
                raise DemoError(f"{process.name} is not ready after {_READY_DEADLINE_S:.0f} s: {process.errors()}")
    _check(processes)


def _collect(workers: Sequence[ReportingFork], everybody: Sequence[ReportingFork]) -> list[Fact]:
    """Wait until the workers have ended, and return their reports."""
    deadline_s = time.monotonic() + RUN_DEADLINE_S
    while any(rank.status() is None for rank in workers):
        _check(everybody)
        if time.monotonic() > deadline_s:
            raise DemoError(f"the workers have not finished after {RUN_DEADLINE_S:.0f} s")
        time.sleep(0.1)
    _check(everybody)
    found = [report for rank in workers if (report := rank.finish(_READY_DEADLINE_S)) is not None]
    if len(found) < len(workers):
        raise DemoError("a worker ended with status 0, but sent no report")
    return found


def _check(processes: Sequence[ReportingFork]) -> None:
    failed = [process for process in processes if process.status() not in (None, 0)]
    if failed:
        time.sleep(0.5)  # until the others have noticed and reported their errors
        errors = [f"{process.name}: {text}" for process in processes if (text := process.errors())]
        raise DemoError("\n".join(errors) or f"{failed[0].name} ended with status {failed[0].status()}")


def _report_progress(progress: Progress, fact: Fact) -> None:
    if "step" in fact:
        progress(fact["step"])


def _samples(logs: Sequence[Sequence[tuple[float, int]] | None], start_s: float) -> list[tuple[float, float]]:
    """Return background arrivals, summed over all sinks, as (seconds of the run, bytes) pairs."""
    total: Counter[float] = Counter()
    for log in logs:
        total.update(dict(log or ()))
    return [(when_s - start_s, count) for when_s, count in sorted(total.items())]


def _background_record(
    setup: DemoSetup, bursts: Sequence[BackgroundBurst], samples: Sequence[tuple[float, float]], stop_s: float
) -> dict[str, Any]:
    payload_bps = setup.rate_bps * _TCP_PAYLOAD_BYTES / _TCP_FRAME_BYTES
    return {
        "flows": BACKGROUND_FLOWS,
        "bps": delivered_bps(samples, bursts, stop_s),
        "fair_share_bps": setup.background_share(bursts, stop_s) * payload_bps,
        "samples": [[round(when_s, 2), 8 * count / SAMPLE_S] for when_s, count in samples if 0 <= when_s <= stop_s],
        "bursts": [[burst.start_s, burst.stop_s, burst.target] for burst in bursts if burst.start_s < stop_s],
    }


def _switch_totals(counters: dict[str, Any]) -> dict[str, Any]:
    """Return totals of the switch's counters."""
    ingress, egress = counters["program"]["ingress_events"], counters["program"]["egress_events"]
    by_class = [0] * DROP_CLASSES
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


def command(channel: Connection, argv: Sequence[str]) -> None:
    """Run a ``dlcp`` command line; report its standard output as ``said`` facts and its standard error as errors."""
    # Imported by name: the command line is a higher layer than the demo.
    main = importlib.import_module("dlcp.cli").main
    with contextlib.redirect_stdout(_Facts(channel, "said")), contextlib.redirect_stderr(_Facts(channel, "error")):
        raise SystemExit(main(argv))


class _Facts(io.TextIOBase):
    """A stream that reports its text as facts of one name."""

    def __init__(self, channel: Connection, name: str) -> None:
        self._channel, self._name = channel, name

    def write(self, text: str) -> int:
        send_fact(self._channel, {self._name: text})
        return len(text)


# A series of runs -----------------------------------------------------------------------------------------------------


def run_series(
    console: Console, folder: Path, variants: Sequence[Variant], steps: int, run: Callable[..., dict[str, Any]]
) -> None:
    """Run each variant and write its record to ``folder/runs/NAME.json``.

    Parameters
    ----------
    run
        Called with a variant and ``progress``; returns the record. See :func:`execute`.

    Raises
    ------
    DemoError
        A run failed; the message names it.
    """
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    columns = (
        progress.TextColumn("{task.description:<58}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console) as bars:
        for number, variant in enumerate(variants, 1):
            bar = bars.add_task(variant.title, total=steps)
            if not console.is_terminal:  # rich then draws bars only at the end
                console.print(f"run {number} of {len(variants)}, {steps} steps: {variant.title}")
            try:
                record = run(variant, progress=lambda done, bar=bar: bars.update(bar, completed=done))
            except DemoError as error:
                raise DemoError(f"{variant.title} failed\n{error}") from error
            (folder / "runs" / f"{variant.name}.json").write_text(json.dumps(record))


def select(variants: Sequence[Variant], only: Sequence[str] | None, folder: Path) -> list[Variant]:
    """Return the variants named in ``only``. Without it, return all, and remove earlier runs from the folder.

    Raises
    ------
    ValueError
        No variant has that name.
    """
    if only:
        unknown = set(only) - {variant.name for variant in variants}
        if unknown:
            raise ValueError(f"--only: unknown run {min(unknown)!r}; choose from {', '.join(v.name for v in variants)}")
        return [variant for variant in variants if variant.name in only]
    for old in (folder / "runs").glob("*.json"):
        old.unlink()
    return list(variants)


def report(console: Console, folder: Path, only: Sequence[str] | None) -> dict[str, Run]:
    """Print what the runs in a folder showed, write the summary and, if all are there, the page; return the runs.

    Parameters
    ----------
    only
        The runs just made, if these were not all: older ones in the folder are left out if they cannot be compared
        with them.

    Raises
    ------
    RunFileError
        A run is missing although all were made, or the runs cannot be compared.
    """
    from dlcp.report.page import write_report  # Matplotlib takes a second to load

    try:
        runs = load_runs(folder)
    except RunFileError as error:
        if not only:
            raise
        runs = load_runs(folder, only)
        console.print(f"older runs in {folder} are left out: {error}")
    summary = summarize(runs)
    write_summary(summary, folder)
    _print_summary(console, summary)
    try:
        check_complete(runs)
    except RunFileError as error:
        if not only:
            raise
        console.print(f"  no page yet: {error}")
    else:
        console.print(f"  report: {write_report(runs, summary, folder)}")
    return runs


def _print_summary(console: Console, summary: dict[str, Any]) -> None:
    accuracy = summary["target_accuracy"]
    if accuracy is None:
        console.print("  The runs have no accuracy in common that each one held: train longer (--steps).")
    for name in RUN_NAMES:
        if result := summary.get(name):
            to_target = "" if accuracy is None else f"{result['seconds_to_target']:6.1f} s to {accuracy:.1%}, "
            console.print(
                f"  {name:<14} {to_target}{result['step_seconds']['mean']:.2f} s per step, "
                f"final accuracy {result['final_accuracy']:.1%}"
            )
    console.print()
    peers = [(peer, summary[f"speedup_over_{peer}"]) for peer in ("gloo", "plain")]
    if ratios := [f"{ratio:.2f} times as fast as {peer}" for peer, ratio in peers if ratio is not None]:
        console.print(f"  dlcp was {', '.join(ratios)}, to {accuracy:.1%}")
    for name in ("dlcp", "dlcp_priority"):
        if result := summary.get(name):
            _print_losses(console, name, result)
            break
    console.print(f"  replicas are {'bit-identical' if summary['replicas_identical'] else 'NOT identical'}")


def _print_losses(console: Console, name: str, result: dict[str, Any]) -> None:
    """Print the shares of lost and of encoded packets in one run with a loss bound."""
    loss, precision = result["loss"], result["precision"]
    kept = f"exceeded {loss['violations']} times" if loss["violations"] else "never exceeded"
    console.print(
        f"  a message of {name} lost at most {loss['max_message_ratio']:.1%}; the bound is {loss['bound']:.0%}, {kept}"
    )
    for bits, share in precision["encoded"].items():
        console.print(f"  {share:.1%} of the packets had {bits} bits of each value")
    if precision["lower_digits"]:
        console.print(f"  {precision['lower_digits']:.1%} of the lost packets held lower digits only")
