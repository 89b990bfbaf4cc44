# SPDX-License-Identifier: Apache-2.0
"""How long the controller takes to tell a switch ten thousand entries, and to find that there is nothing to tell.

The switch is a leaf of a fabric of 63 leaves with 61 hosts each: routes to 3,843 hosts, and the shares of twenty jobs
at 63 ports. The time runs from the fabric's description in memory to the last answer of the switch, so what the
entries are is found out, encoded, compared with what the switch holds, and written. The built-in switch is a process
of its own with its real packet loop. BMv2 is measured in turns with it, where it is on PATH: the same controller, the
same entries.

Run ``python tests/bench/fabric.py``; it prints one JSON document. Exit status 1 if a second apply wrote anything.
"""

import argparse
import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dlcp.bench.results import BenchResult, median, say, show, spread
from dlcp.controller.fabric import Fabric, FabricSwitch, Job, leaf_spine
from dlcp.controller.pipeline import CompiledProgram
from dlcp.controller.reconcile import reconcile, wanted
from dlcp.controller.session import Session
from dlcp.switch import SwitchProcess

LEAVES, SPINES, HOSTS_PER_LEAF, JOBS = 63, 2, 61, 20
LIMIT_S = 2.0
"""What the project promises."""
START_DEADLINE_S = 20.0
BUILTIN, BMV2 = "builtin", "bmv2"


def described() -> Fabric:
    """Return the fabric; its first leaf holds some ten thousand entries."""
    jobs = [Job(number, share=0.04, control_share=0.005) for number in range(JOBS)]
    return leaf_spine(LEAVES, SPINES, HOSTS_PER_LEAF, jobs=jobs)


@contextmanager
def builtin() -> Iterator[FabricSwitch]:
    """Start a built-in switch that waits for a controller."""
    address = f"127.0.0.1:{free_port()}"
    with SwitchProcess(["--port", "1=loopback", "--p4runtime", address, "--insecure"], counters_every_s=5.0):
        yield FabricSwitch("leaf1", grpc=address, insecure=True)


@contextmanager
def bmv2() -> Iterator[FabricSwitch]:
    """Start BMv2 without interfaces."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="dlcp-bench-") as folder:
        argv = ["simple_switch_grpc", "--no-p4", "--device-id", "1", "-L", "off", "--thrift-port", str(free_port())]
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
        """Connect, and install the program, which is not what is measured."""
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


async def measure(switches: dict[str, FabricSwitch], rounds: int) -> dict[str, Applying]:
    """Apply to each switch in turns."""
    fabric, pipeline = described(), CompiledProgram()
    applying = {name: Applying(switch, fabric, pipeline) for name, switch in switches.items()}
    for each in applying.values():
        await each.open()
    for number in range(1 + rounds):
        for each in applying.values():
            await each.round()
        figures = ", ".join(f"{name} {each.first_s[-1]:.2f} s" for name, each in applying.items())
        say(f"{'warm-up' if not number else f'round {number} of {rounds}'}: {figures}")
    for each in applying.values():
        await each.close()
    return applying


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


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


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        switches = {BUILTIN: stack.enter_context(builtin())}
        if shutil.which("simple_switch_grpc"):
            switches[BMV2] = stack.enter_context(bmv2())
        else:
            say("simple_switch_grpc is not on PATH: BMv2 is left out")
        applying = asyncio.run(measure(switches, arguments.rounds))
    found = applying[BUILTIN].results("controller.apply.10k")
    if BMV2 in applying:
        found += applying[BMV2].results("controller.apply.10k.bmv2")
    show(found)
    return int(any(each.writes_again for each in applying.values()))


if __name__ == "__main__":
    sys.exit(main())
