# SPDX-License-Identifier: Apache-2.0
"""Runs of the demo over a testbed, with a comparison of the hosts' and the switches' counters."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dlcp.controller.fabric import Fabric
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.accounts import (
    Accounts,
    NicCount,
    ProcessorTime,
    RateWatch,
    compare,
    fresh_counters,
    nic_counts,
    settle,
    tail_drops,
    uncounted_tails,
)
from dlcp.controller.testbed.layout import StateFile, TestbedState
from dlcp.controller.testbed.lifecycle import Controller, with_addresses
from dlcp.demo.background import BackgroundBurst
from dlcp.demo.run import DemoNetwork, Progress, execute, fair_shares
from dlcp.demo.variants import DemoSetup, Variant
from dlcp.host.netlab import HOST_INTERFACE, NamedNamespace
from dlcp.inputs.addresses import format_address
from dlcp.report.runs import Run
from dlcp.switch import PROGRAM_PATH
from dlcp.switch.event_counters import SwitchAccount
from dlcp.wire import Queue

_BMV2_ENVIRONMENT: Final = {"DLCP_CONGESTION": "ecn"}
"""Options for DLCP over BMv2. Behind its queues BMv2 has a FIFO buffer of 128 packets before the transmit thread. TCP
keeps it full, so every packet is some 50 ms late at 32 Mbit/s, however little DLCP sends. Delay-based control would
take that for its own queue and almost stop; ECN marks come from DLCP's own queue only."""


@dataclass(frozen=True, slots=True)
class TestbedSetup(DemoSetup):
    """Settings common to all runs on a testbed.

    Parameters
    ----------
    switch
        Kind of the switches.
    shape
        Name of the fabric, as on the command line.
    one_port
        Send all background bursts into the parameter server's port. In BMv2 all ports share a transmit thread, so a
        congested port blocks the others; only with one congested port does it behave like a real switch.
    """

    __test__ = False

    switch: str = "builtin"
    shape: str = "star"
    one_port: bool = False

    @property
    def command(self) -> str:
        """The command that repeats the runs."""
        collective = "ps" if self.server is not None else self.collective
        return (
            f"dlcp testbed run --switch {self.switch} --fabric {self.shape} --collective {collective} "
            f"--seed {self.seed} --steps {self.steps} --loss-bound {self.loss_bound:g} "
            f"--precision {self.precision}"
        )

    def bursts(self) -> list[BackgroundBurst]:
        """Return the bursts of the background, which are the same in every run."""
        # slots=True creates the class anew, which breaks super() without arguments.
        bursts = DemoSetup.bursts(self)
        if not self.one_port or self.server is None:
            return bursts
        return [dataclasses.replace(burst, target=self.server) for burst in bursts]


class TestbedNetwork(DemoNetwork):
    """A testbed's Mininet hosts and switches, programmed for one run.

    Parameters
    ----------
    state
        The testbed.
    fabric
        Its fabric, without jobs.
    setup, held
        As for :class:`~dlcp.demo.run.SwitchNetwork`.
    """

    __test__ = False
    kind = "namespaces"
    over = "tcp"
    interface = HOST_INTERFACE

    def __init__(self, state: TestbedState, fabric: Fabric, setup: DemoSetup, held: bool) -> None:
        super().__init__()
        self._layout = state.layout
        self._files = StateFile(state.layout.name)
        self._hosts = self._layout.spread(setup.hosts)
        jobs = (fair_shares(setup, [host.name for host in self._hosts]),) if held else ()
        shared = dataclasses.replace(fabric, jobs=jobs)
        self._controller = self._stack.enter_context(Controller(with_addresses(shared, self._layout)))
        self._before = self._read()
        self._began = ProcessorTime.now()
        self._watch = self._stack.enter_context(RateWatch(self._hosts))
        self.accounts: Accounts | None = None

    def namespace(self, host: int) -> str | None:
        """Return the path of the host's namespace."""
        return NamedNamespace(self._hosts[host].namespace).path

    def bind_of(self, host: int, port: int) -> str:
        """Return the host's address."""
        return format_address((self._hosts[host].address, port))

    def counters(self) -> dict[str, Any]:
        """Wait until the last packet has arrived, and return the switches' counts since the run began."""
        idle = ProcessorTime.now().idle_share_since(self._began)
        busiest = self._watch.stop()
        settle(self._hosts)
        switches, nics, restarts = self._read()
        before = self._before
        self.accounts = Accounts(
            {name: account.since(before[0][name]) for name, account in switches.items()},
            {name: nic.since(before[1][name]) for name, nic in nics.items()},
            busiest,
            restarts - before[2],
            max((fresh_counters(self._files, name)["late_max_s"] for name in switches), default=0.0)
            if self._builtin
            else 0.0,
            idle,
        )
        return as_counters(self.accounts.switches) | {"late_max_s": self.accounts.late_s if self._builtin else None}

    def _read(self) -> tuple[dict[str, SwitchAccount], dict[str, NicCount], int]:
        state = self._files.read()
        assert state is not None
        switches = {name: self._account(name) for name in state.switches}
        nics = {host.name: nic_counts(host) for host in self._hosts}
        return switches, nics, sum(switch.restarts for switch in state.switches.values())

    def _account(self, name: str) -> SwitchAccount:
        """Return a switch's counts; only those of the built-in switch include tail drops."""
        tails = tail_drops(fresh_counters(self._files, name)) if self._builtin else None
        return SwitchAccount.of(self._controller.events(name), tails)

    @property
    def _builtin(self) -> bool:
        return self._layout.kind == "builtin"


def check(setup: TestbedSetup, state: TestbedState) -> None:
    """Reject runs that the testbed cannot carry out.

    Raises
    ------
    TestbedError
        The testbed has too few hosts, or BMv2 cannot carry the traffic pattern realistically.
    """
    hosts = len(state.layout.hosts)
    if hosts < setup.hosts:
        raise TestbedError(f"the training needs {setup.hosts} hosts, the testbed has {hosts}; choose another fabric")
    if state.layout.kind == "bmv2" and setup.server is None:
        raise TestbedError(
            "all-reduce congests several ports at once, and these block one another in BMv2's single transmit thread: "
            "choose --collective ps, or the built-in switch"
        )


def train(
    state: TestbedState, fabric: Fabric, setup: TestbedSetup, variant: Variant, *, progress: Progress
) -> dict[str, Any]:
    """Run one variant, and return its record; its ``agreement`` compares the hosts' and the switches' counts.

    Raises
    ------
    DemoError
        A process failed or did not end in time.
    TestbedError
        A switch cannot be programmed or does not answer.
    """
    networks: list[TestbedNetwork] = []

    def make_network(setup: DemoSetup, held: bool) -> TestbedNetwork:
        networks.append(TestbedNetwork(state, fabric, setup, held))
        return networks[0]

    if state.layout.kind == "bmv2" and variant.mode == "dlcp":
        variant = dataclasses.replace(variant, environment={**variant.environment, **_BMV2_ENVIRONMENT})
    record = execute(make_network, setup, variant, progress=progress)
    accounts = networks[0].accounts
    assert accounts is not None
    tagged = variant.mode == "dlcp" and variant.environment.get("DLCP_TAGGED") != "0"
    ledgers = [ledger for ledger in (record["ledger"], record["server_ledger"]) if ledger is not None]
    record["agreement"] = compare(state.layout, accounts, ledgers, tagged=tagged)
    record["fabric"] |= {"switch": setup.switch, "shape": setup.shape, "switches": len(state.layout.switches)}
    record["fabric"]["idle"] = accounts.idle
    uncounted = uncounted_tails(state.layout, accounts)
    if uncounted is not None and not accounts.restarts:
        # The ledgers record lost gradients among them; here all count as ordinary traffic.
        record["switch"]["tail_drops"] += uncounted
        ordinary = record["switch"]["by_queue"].setdefault(str(int(Queue.ORDINARY)), {"packets": 0, "bytes": 0})
        ordinary["tail_drops"] = ordinary.get("tail_drops", 0) + uncounted
    return record


def as_counters(switches: Mapping[str, SwitchAccount]) -> dict[str, Any]:
    """Return the accounts of all switches in the format of the built-in switch's counters."""
    ingress: Counter[tuple[str, int]] = Counter()
    totals: dict[str, Counter[str]] = {"ingress_events": Counter(), "egress_events": Counter()}
    ports = []
    for account in switches.values():
        queues = {
            queue: {"queue": queue, "transmitted": 0, "transmitted_bytes": 0, "tail_drops": 0} for queue in range(8)
        }
        for place, packets in account.events.items():
            kind = "egress_events" if place.event in ("FORWARDED", "MARKED") else "ingress_events"
            totals[kind][place.event] += packets
            if kind == "ingress_events":
                ingress[place.event, place.drop_class] += packets
            elif place.event == "FORWARDED":
                queues[place.queue]["transmitted"] += packets
                queues[place.queue]["transmitted_bytes"] += account.octets[place]
        for (_, queue), packets in (account.tail_drops or {}).items():
            queues[queue]["tail_drops"] += packets
        ports.append({"queues": list(queues.values())})
    by_queue = [
        {"event": event, "drop_class": drop_class, "packets": packets}
        for (event, drop_class), packets in ingress.items()
    ]
    program = {
        "digest": hashlib.sha256(PROGRAM_PATH.read_bytes()).hexdigest(),
        "ingress_events": {"totals": dict(totals["ingress_events"]), "by_queue": by_queue},
        "egress_events": {"totals": dict(totals["egress_events"]), "by_queue": []},
    }
    return {"program": program, "ports": ports, "busy": None, "late_max_s": None}


def disagreements(runs: Mapping[str, Run]) -> list[str]:
    """Return a line for each comparison in which the hosts' and the switches' counts differ."""
    return [
        f"{name}: {finding['what']}: {finding['hosts']} and {finding['switches']}. {finding['note']}"
        for name, run in runs.items()
        for finding in run.get("agreement", ())
        if finding["agree"] is False
    ]
