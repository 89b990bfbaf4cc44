# SPDX-License-Identifier: Apache-2.0
"""How long the controller takes to write ten thousand entries to a switch, and to find that nothing has changed.

The switch is a leaf of a fabric of 63 leaves with 61 hosts each: routes to 3,843 hosts, and the shares of twenty jobs
at 63 ports. The time runs from the fabric's description in memory to the last answer of the switch, so what the
entries are is found out, encoded, compared with what the switch holds, and written. The built-in switch is a process
of its own with its real packet loop. BMv2 is measured in turns with it, where it is on PATH: the same controller, the
same entries.

The exit status is 1 if a second apply wrote anything.
"""

import argparse
import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dlcp.bench import BenchResult, median, say, spread
from dlcp.controller.compiled_program import CompiledProgram
from dlcp.controller.fabric import Fabric, FabricSwitch, Job, leaf_spine
from dlcp.controller.switch_client import Session, reconcile, wanted
from dlcp.controller.testbed.layout import free_ports
from dlcp.switch import SwitchProcess
from tests.bench.harness import Benchmark, FailedError, Turns, scratch

LEAVES, SPINES, HOSTS_PER_LEAF, JOBS = 63, 2, 61, 20
LIMIT_S = 2.0
"""The project's promise."""
START_DEADLINE_S = 20.0
BUILTIN, BMV2 = "builtin", "bmv2"


def described() -> Fabric:
    """Return the fabric; its first leaf holds some ten thousand entries."""
    jobs = [Job(number, share=0.04, control_share=0.005) for number in range(JOBS)]
    return leaf_spine(LEAVES, SPINES, HOSTS_PER_LEAF, jobs=jobs)


@contextmanager
def builtin() -> Iterator[FabricSwitch]:
    """Start a built-in switch that waits for a controller."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with SwitchProcess(["--port", "1=loopback", "--p4runtime", address, "--insecure"], counters_every_s=5.0):
        yield FabricSwitch("leaf1", grpc=address, insecure=True)


@contextmanager
def bmv2() -> Iterator[FabricSwitch]:
    """Start BMv2 without interfaces."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with scratch() as folder:
        argv = [
            "simple_switch_grpc",
            "--no-p4",
            "--device-id",
            "1",
            "-L",
            "off",
            "--thrift-port",
            str(free_ports(1)[0]),
        ]
        argv += ["--notifications-addr", f"ipc://{folder}/notifications.ipc"]
        argv += ["--", "--grpc-server-addr", address, "--priority-queues", "8"]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await_listener(address)
            yield FabricSwitch("leaf1", "bmv2", grpc=address, insecure=True)
        finally:
            process.terminate()
            process.wait(START_DEADLINE_S)


class Applying:
    """Applies the fabric to one switch, round by round, in a session that lasts."""

    def __init__(self, switch: FabricSwitch, fabric: Fabric, pipeline: CompiledProgram) -> None:
        self._switch, self._fabric, self._pipeline = switch, fabric, pipeline
        self.first_s: list[float] = []
        self.again_s: list[float] = []
        self.entries = self.writes = self.writes_again = 0

    async def open(self) -> None:
        """Connect, and install the program, which is not measured."""
        self._session = Session(self._switch, self._pipeline)
        await self._session.__aenter__()
        await self._session.become_primary()
        await reconcile(self._session, [])

    async def round(self) -> None:
        """Apply to empty tables, apply again, and empty the tables."""
        for again, times in ((False, self.first_s), (True, self.again_s)):
            start = time.perf_counter()
            outcome = await reconcile(self._session, wanted(self._fabric, self._switch, self._pipeline))
            times.append(time.perf_counter() - start)
            if again:
                self.writes_again += outcome.writes
            else:
                self.entries, self.writes = len(outcome.plan.difference), outcome.writes
        await reconcile(self._session, [])

    async def close(self) -> None:
        """Disconnect."""
        await self._session.close()

    def results(self, name: str) -> list[BenchResult]:
        """Return both figures, without the first round, which warmed up."""
        details = {"entries": self.entries, "write_requests": self.writes, "limit_s": LIMIT_S}
        again = {"entries": self.entries, "write_requests": self.writes_again}
        return [
            BenchResult(each, median(times[1:]), "s", None, None, len(times) - 1, spread(times[1:]), about)
            for each, times, about in ((name, self.first_s, details), (f"{name}.again", self.again_s, again))
        ]


async def measure(switches: dict[str, FabricSwitch], turns: Turns) -> dict[str, Applying]:
    """Apply to each switch in turn."""
    fabric, pipeline = described(), CompiledProgram()
    applying = {name: Applying(switch, fabric, pipeline) for name, switch in switches.items()}
    for each in applying.values():
        await each.open()
    for number in range(1 + turns.rounds):
        for each in applying.values():
            await each.round()
        figures = ", ".join(f"{name} {each.first_s[-1]:.2f} s" for name, each in applying.items())
        say(f"{'warm-up' if not number else f'round {number} of {turns.rounds}'}: {figures}")
    for each in applying.values():
        await each.close()
    return applying


def await_listener(address: str) -> None:
    """Wait until somebody listens."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _fabric(arguments: argparse.Namespace) -> list[BenchResult]:
    with ExitStack() as stack:
        switches = {BUILTIN: stack.enter_context(builtin())}
        if shutil.which("simple_switch_grpc"):
            switches[BMV2] = stack.enter_context(bmv2())
        else:
            say("simple_switch_grpc is not on PATH: BMv2 is left out")
        applying = asyncio.run(measure(switches, arguments.turns))
    names = {BUILTIN: "controller.apply.10k", BMV2: "controller.apply.10k.bmv2"}
    found = [entry for switch, each in applying.items() for entry in each.results(names[switch])]
    again = {f"{names[switch]}.again": "wrote entries" for switch, each in applying.items() if each.writes_again}
    if again:
        raise FailedError(found, again)
    return found


BENCHMARK = Benchmark(_fabric, rounds=7, warm_up=None)
