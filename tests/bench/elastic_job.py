# SPDX-License-Identifier: Apache-2.0
"""A training of the benchmark ``elastic``: its ranks are processes, with hosts of their own in network namespaces.

The hosts are at a bridge. This process serves the ranks' store on one more host, as ``dlcp launch --elastic`` does.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dlcp.bench import BenchError
from dlcp.host.closing import Closing
from dlcp.host.netlab import HOST_INTERFACE, StarNetwork
from dlcp.host.processes import JobLayout, killed_with_parent, python_command
from dlcp.inputs.configuration import STORE_VARIABLE
from tests.bench.harness import VALUE_BYTES

LEAST: Final = 2
"""Ranks with which training goes on."""
SETTLING_STEPS: Final = 20
"""Steps that a training has made before something is done to it, and that it must make afterwards."""
START_S, GO_ON_S, END_S, LEFT_OUT_S = 90.0, 60.0, 60.0, 120.0
"""How long ranks may take to start, to go on, and to end, and one that was left out to notice: far above any good run's
time."""
POLL_S: Final = 0.01
PORT: Final = 29500

Note = Mapping[str, Any]


class TryError(BenchError):
    """A try has failed; the message says why, with the ends of what ranks have said."""


class Hosts(Closing):
    """The hosts of the ranks, and one for the store: in namespaces, or all this machine's loopback.

    Parameters
    ----------
    ranks
        The number of hosts for ranks.
    loopback
        Whether to use the loopback.
    """

    def __init__(self, ranks: int, *, loopback: bool) -> None:
        self._network = None if loopback else StarNetwork(ranks + 1)
        self._port = PORT
        if self._network:
            ports = [f"link set {host.switch_interface} master bridge0" for host in self._network.hosts]
            self._switch("link add name bridge0 type bridge mcast_snooping 0", *ports, "link set bridge0 up")

    def close(self) -> None:
        """Release the namespaces."""
        if self._network:
            self._network.close()

    def serve(self) -> tuple[str, int, Callable[[], None]]:
        """Serve a new store; return its address, and a function that closes it."""
        from dlcp.session.options import Options  # loads gRPC
        from dlcp.session.secret import job_secret
        from dlcp.session.store import serve

        secret = job_secret(Options())
        if self._network is None:
            server = serve(("127.0.0.1", JobLayout.local(ranks=1).port), secret)
        else:  # the thread that serves all stores starts here, and stays in this namespace
            host, self._port = self._network.hosts[-1], self._port + 1
            server = host.namespace.call(lambda: serve((host.address, self._port), secret))
        return *server.address, server.close

    def command(self, rank: int) -> list[str]:
        """Return the command with which a program starts on a rank's host."""
        return [] if self._network is None else ["nsenter", f"--net={self._network.hosts[rank].namespace.path}", "--"]

    def address(self, rank: int) -> str:
        """Return the address of a rank's host; -1 is the store's."""
        return "127.0.0.1" if self._network is None else self._network.hosts[rank].address

    def set_links(self, ranks: Iterable[int], state: str) -> None:
        """Pull cables of hosts, or plug them in: ``down`` or ``up``."""
        self._switch(*(f"link set port{rank + 1} {state}" for rank in ranks))

    def take(self, rank: int) -> None:
        """Take a host's interface away."""
        self._switch(f"link delete port{rank + 1}")

    def give(self, rank: int) -> None:
        """Give a host a new interface."""
        assert self._network
        host = self._network.hosts[rank]
        self._network.switch.link(host.switch_interface, host.namespace, HOST_INTERFACE, peer_mac=host.mac)
        others = [other for other in self._network.hosts if other is not host]
        host.namespace.ip(
            f"addr add {host.address}/24 dev {HOST_INTERFACE}",
            f"link set {HOST_INTERFACE} up",
            *(f"neigh add {other.address} lladdr {other.mac} dev {HOST_INTERFACE} nud permanent" for other in others),
        )
        self._switch(f"link set {host.switch_interface} master bridge0")

    def _switch(self, *commands: str) -> None:
        assert self._network
        self._network.switch.ip(*commands)


class RankProcess(Closing):
    """A process of a rank, and what it has noted so far.

    Parameters
    ----------
    place
        The number of its host.
    command
        What it runs, without its arguments.
    folder, name
        Where its files are, and their name.
    arguments, environment
        Of the process.

    Attributes
    ----------
    began_s
        When it was started.
    """

    def __init__(
        self,
        place: int,
        command: Sequence[str],
        folder: Path,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.place = place
        self._errors, notes = folder / f"{name}.err", folder / f"{name}.json"
        notes.touch()
        self._file, self._notes = notes.open(encoding="utf-8"), defaultdict[str, list[Note]](list)
        self._rest = ""
        self.began_s = time.monotonic()
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, str(notes), *arguments],
                env=environment,
                stdout=errors,
                stderr=errors,
                preexec_fn=killed_with_parent(),
            )

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self._file.close()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def notes(self, what: str) -> list[Note]:
        """Return its notes of a kind, in the order of time."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")  # the last may not be complete yet
        for note in map(json.loads, lines):
            self._notes[note["what"]].append(note)
        return self._notes[what]

    def at_s(self, what: str) -> float:
        """Return when it noted something first."""
        return float(self.notes(what)[0]["at_s"])

    def rank(self) -> int:
        """Return its number, which a process that comes later gets from the others; its host's before it has begun."""
        begun = self.notes("begun")
        return int(begun[0]["rank"]) if begun else self.place

    def errors(self, most: int = 2000) -> str:
        """Return the end of what it has said."""
        return self._errors.read_text(errors="replace")[-most:].strip()

    def dump(self) -> None:
        """Let it say where its threads are, and end it."""
        for number in (signal.SIGCONT, signal.SIGABRT):
            self.process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)


class Job(Closing):
    """A training whose ranks are hit and started again.

    Parameters
    ----------
    hosts
        Where its ranks run.
    ranks
        How many there are at first.
    arguments
        The options of the command line.
    folder
        For the ranks' files.
    program
        The module that each process runs, and its arguments after the first, the file of its notes. By default the
        training of the options.
    least
        With how many ranks training goes on; 0 if none may be lost.

    Attributes
    ----------
    torchft
        Whether it trains with torchft instead of DLCP.
    """

    def __init__(
        self,
        hosts: Hosts,
        ranks: int,
        arguments: argparse.Namespace,
        folder: Path,
        program: Sequence[str] = (),
        *,
        least: int = LEAST,
    ) -> None:
        folder.mkdir(parents=True)
        self.hosts, self._ranks, self._folder, self._end = hosts, ranks, folder, folder / "end"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DLCP_")}
        fixed = {"WORLD_SIZE": ranks, "PYTHONFAULTHANDLER": 1, "OMP_NUM_THREADS": 1, "OPENBLAS_NUM_THREADS": 1}
        self.torchft = bool(arguments.torchft)
        if self.torchft:
            self._close_store = self._serve_lighthouse(folder / "lighthouse.err", arguments)
            fixed |= {
                "TORCHFT_LIGHTHOUSE": f"http://{hosts.address(-1)}:{PORT}",
                "TORCHFT_TIMEOUT_S": arguments.torchft,
                "TORCHFT_LEAST": LEAST,
                "GLOO_SOCKET_IFNAME": "lo" if arguments.loopback else HOST_INTERFACE,
            }
        else:
            host, port, self._close_store = hosts.serve()
            fixed |= {"MASTER_ADDR": host, "MASTER_PORT": port, STORE_VARIABLE: 1, "DLCP_ELASTIC": least}
            if not arguments.loopback:
                fixed["DLCP_SHARED_MEMORY"] = 0
        self._environment = kept | {name: str(value) for name, value in fixed.items()}
        values = round(1e6 * arguments.megabytes / VALUE_BYTES)
        module = "tests.bench.elastic_torchft_rank" if self.torchft else "tests.bench.elastic_rank"
        self._program = program or [module, str(self._end), str(values), str(arguments.pause_ms / 1e3)]
        self.all: list[RankProcess] = []
        """All processes so far; the first ones by rank."""
        try:
            for rank in range(ranks):
                self.start(rank)
            self.wait(lambda: all(len(each.notes("step")) >= SETTLING_STEPS for each in self.all), START_S, "begin")
        except BaseException:
            self.close()
            raise

    def _serve_lighthouse(self, errors: Path, arguments: argparse.Namespace) -> Callable[[], None]:
        """Serve torchft's membership on the store's host; return a function that ends it."""
        timeout_ms = round(1e3 * arguments.torchft)
        options = ["--min_replicas", LEAST, "--bind", f"[::]:{PORT}", "--quorum_tick_ms", 10]
        options += ["--heartbeat_timeout_ms", timeout_ms]
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        with errors.open("wb") as file:
            served = subprocess.Popen(
                [*self.hosts.command(-1), program, *map(str, options)],
                stdout=file,
                stderr=file,
                preexec_fn=killed_with_parent(),
            )

        def close() -> None:
            served.kill()
            served.wait()

        return close

    def close(self) -> None:
        """End all processes and the store."""
        for each in self.all:
            each.close()
        self._close_store()

    def start(self, place: int) -> RankProcess:
        """Start a process on a rank's host."""
        module, *arguments = self._program
        command = [*self.hosts.command(place), *python_command(module)]
        own = {"RANK": str(place), "TORCHFT_HOST": self.hosts.address(place)}
        name, environment = f"rank-{place}-process-{len(self.all)}", self._environment | own
        self.all.append(RankProcess(place, command, self._folder, name, arguments, environment))
        return self.all[-1]

    def last_step(self) -> Note:
        """Return the note of the latest step that any process has made."""
        steps = [each.notes("step")[-1] for each in self.all if each.notes("step")]
        return max(steps, key=lambda note: int(note["step"]))

    def wait(
        self, condition: Callable[[], bool], limit_s: float, what: str, among: Sequence[RankProcess] | None = None
    ) -> None:
        """Wait for a condition.

        Raises
        ------
        TryError
            It did not come true in time, or one of the processes ``among``, by default all, has ended in error.
        """
        among, end_s = self.all if among is None else among, time.monotonic() + limit_s
        while True:
            holds = condition()
            failed = [each for each in among if each.process.poll()]
            if failed:
                raise self.error(f"process {self.all.index(failed[0])} fails", failed)
            if holds:
                return
            if time.monotonic() > end_s:
                raise self.error(f"they do not {what} in {limit_s:g} s", among)
            time.sleep(POLL_S)

    def error(self, why: str, of: Iterable[RankProcess]) -> TryError:
        """Return an error with the last output of these processes; those that still run print their stacks first."""
        for each in self.all:
            if each.runs:
                each.dump()
        ends = [f"process {self.all.index(each)} (rank {each.rank()}): {each.errors()}" for each in of]
        return TryError("\n".join([why, *ends]))

    def go_on(self, left: Sequence[RankProcess], lost: Iterable[int], since_s: float) -> list[list[float]]:
        """Wait until processes have made steps without the ranks that are lost; return when each has ended its own."""

        def without() -> list[list[float]]:
            steps = [[note for note in each.notes("step") if note["at_s"] > since_s] for each in left]
            return [[note["at_s"] for note in notes if not set(lost) & set(note["ranks"])] for notes in steps]

        self.wait(lambda: all(len(times) >= SETTLING_STEPS for times in without()), GO_ON_S, "go on", left)
        return without()

    def is_left_out(self, lost: RankProcess, fault_s: float, why: str = "") -> float:
        """Wait until a process ends with an error that has a text in it; return the seconds after the fault."""
        self.wait(lambda: not lost.runs, LEFT_OUT_S, "notice that they are left out", [])
        said = lost.errors()
        if not lost.process.returncode or "dlcp" not in said or why not in said:
            raise self.error(f"rank {lost.rank()} does not end with an error that says why", [lost])
        return time.monotonic() - fault_s

    def finish(self, left: Sequence[RankProcess]) -> None:
        """Let these processes end; check that they end well, and with equal parameters."""
        self._end.touch()
        self.check_ends(left)

    def check_ends(self, left: Sequence[RankProcess]) -> None:
        """Check that these processes end well, and with equal parameters."""
        self.wait(lambda: not any(each.runs for each in left), END_S, "end", left)
        digests = {each.notes("end")[0]["digest"] for each in left}
        if len(digests) != 1:
            raise self.error(f"ranks end with {len(digests)} different states", left)
