# SPDX-License-Identifier: Apache-2.0
"""A testbed as a place where runs of the demo take place."""

import dataclasses
import hashlib
import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dlcp.controller.fabric import Fabric
from dlcp.controller.testbed.accounts import NicCount, SwitchAccount, nic_counts, settle, tail_drops
from dlcp.controller.testbed.layout import HOST_INTERFACE, HostPlan
from dlcp.controller.testbed.load import ProcessorTime
from dlcp.controller.testbed.namespaces import NamedNamespace
from dlcp.controller.testbed.programming import Controller, with_addresses
from dlcp.controller.testbed.state import StateFile, TestbedState

from dlcp.demo.place import Place, Shares
from dlcp.demo.run import Setup
from dlcp.switch.artifacts import PROGRAM_PATH

RATE_WINDOW_S: Final = 1.0
"""Over how long a port's rate is taken. Chosen by us: a burst of two frames is far below a percent of that."""


@dataclass(frozen=True)
class Accounts:
    """What was counted during a run.

    Parameters
    ----------
    switches
        By switch.
    nics
        By host.
    busiest_bps
        The highest rate at which each host received frames, over ``RATE_WINDOW_S``.
    restarts
        How many switches were started again meanwhile; their counters began anew.
    late_s
        How late a built-in switch was at worst since it started, in seconds. It makes up for that: what should have
        left meanwhile leaves at once.
    idle
        The share of the machine's time that nobody used.
    """

    switches: dict[str, SwitchAccount]
    nics: dict[str, NicCount]
    busiest_bps: dict[str, float]
    restarts: int
    late_s: float = 0.0
    idle: float = 1.0


class TestbedPlace(Place):
    """Mininet's hosts, and the switches between them, programmed for one run.

    Parameters
    ----------
    state
        The testbed.
    fabric
        Its fabric, without jobs.
    setup, shares, job
        As for every place.
    """

    __test__ = False
    kind = "namespaces"
    over = "tcp"
    interface = HOST_INTERFACE

    def __init__(self, state: TestbedState, fabric: Fabric, setup: Setup, shares: Shares | None, job: int) -> None:
        self._stack = ExitStack()
        self._layout = state.layout
        self._files = StateFile(state.layout.name)
        self._hosts = self._layout.spread(setup.hosts)
        jobs = (shares.job(job, [host.name for host in self._hosts]),) if shares else ()
        shared = dataclasses.replace(fabric, jobs=jobs)
        self._controller = self._stack.enter_context(Controller(with_addresses(shared, self._layout)))
        self._before = self._read()
        self._began = ProcessorTime.now()
        self._watch = self._stack.enter_context(RateWatch(self._hosts))
        self.accounts: Accounts | None = None

    def popen(self, host: int) -> Callable[..., "subprocess.Popen[str]"]:
        """Return what starts a process in the host's namespace."""
        return NamedNamespace(self._hosts[host].namespace).popen

    def namespace(self, host: int) -> str | None:
        """Return the path of the host's namespace."""
        return NamedNamespace(self._hosts[host].namespace).path

    def bind_of(self, host: int, port: int) -> str:
        """Return the host's address."""
        return f"{self._hosts[host].address}:{port}"

    def address_of(self, host: int, port: int) -> str:
        """Return the host's address."""
        return self.bind_of(host, port)

    def counters(self) -> dict[str, Any]:
        """Wait until the last packet has arrived, and return what the switches have counted since the run began."""
        idle = ProcessorTime.now().idle_share_since(self._began)
        busiest = self._watch.stop()
        settle(self._hosts)
        switches, nics, restarts = self._read()
        before = self._before
        self.accounts = Accounts(
            {name: account.since(before[0][name]) for name, account in switches.items()},
            {name: _less(nic, before[1][name]) for name, nic in nics.items()},
            busiest,
            restarts - before[2],
            max((self._counters(name)["late_max_s"] for name in switches), default=0.0) if self._builtin else 0.0,
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
        """Return what a switch has counted; the built-in one counts what finds a queue full, too."""
        tails = tail_drops(self._counters(name)) if self._builtin else None
        return SwitchAccount.of(self._controller.events(name), tails)

    @property
    def _builtin(self) -> bool:
        return self._layout.kind == "builtin"

    def _counters(self, name: str) -> dict[str, Any]:
        """Return the counters that the built-in switch has written a moment ago."""
        counters: dict[str, Any] = json.loads(self._files.path(f".{name}.counters.json").read_text(encoding="utf-8"))
        return counters


class RateWatch:
    """Looks in a thread at how fast hosts receive; a context manager."""

    def __init__(self, hosts: tuple[HostPlan, ...]) -> None:
        self._hosts = hosts
        self._busiest: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlcp-rates", daemon=True)

    def __enter__(self) -> "RateWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> dict[str, float]:
        """Stop looking; return the highest rate of each host, in bit/s of whole frames."""
        self._stopped.set()
        self._thread.join()
        return {host.name: float(self._busiest[host.name]) for host in self._hosts}

    def _run(self) -> None:
        before = self._look()
        while not self._stopped.wait(RATE_WINDOW_S):
            now = self._look()
            for name, look in now.items():
                # Over the longest time that may lie between the two: a busy machine may stop us while we look.
                rate = 8 * (look.octets - before[name].octets) / (look.ended_s - before[name].began_s)
                self._busiest[name] = max(self._busiest[name], round(rate))
            before = now

    def _look(self) -> dict[str, "_Look"]:
        return {host.name: _Look.at(host) for host in self._hosts}


class _Look(NamedTuple):
    """What a host had received at some moment between two times."""

    began_s: float
    ended_s: float
    octets: int

    @classmethod
    def at(cls, host: HostPlan) -> "_Look":
        began_s = time.monotonic()
        octets = nic_counts(host).received_bytes
        return cls(began_s, time.monotonic(), octets)


def as_counters(switches: Mapping[str, SwitchAccount]) -> dict[str, Any]:
    """Return accounts in the form of the built-in switch's counters, which the demo reads; switches added up."""
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


def _less(now: NicCount, before: NicCount) -> NicCount:
    return NicCount(*(count - earlier for count, earlier in zip(now, before, strict=True)))
