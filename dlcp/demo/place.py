# SPDX-License-Identifier: Apache-2.0
"""Where a run takes place: network namespaces around a switch, or, where those cannot be had, loopback addresses."""

import json
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcp.closing import Closing
from dlcp.demo.background import SINK_PORT
from dlcp.switch.namespace import HOST_INTERFACE, StarNetwork
from dlcp.switch.ports.loopback import LoopbackHost
from dlcp.switch.process import SwitchProcess
from dlcp.switch.queues import PortQueueing
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

if TYPE_CHECKING:
    from dlcp.controller.fabric import Job
    from dlcp.demo.run import Setup


@dataclass(frozen=True)
class Shares:
    """What a job may have of a port: parts of its rate.

    Parameters
    ----------
    data, control
        For gradients, and for control packets.
    burst_s
        How long a burst at the port's rate may last before a share is held against the job.
    at
        Data shares of the ports that lead to some hosts, by the hosts' numbers, where they differ.
    """

    data: float
    control: float
    burst_s: float
    at: dict[int, float] = field(default_factory=dict)

    def job(self, number: int, hosts: Sequence[str]) -> "Job":
        """Return a fabric's job with these shares, where hosts have these names."""
        from dlcp.controller.fabric import Job

        shares = {hosts[host]: share for host, share in self.at.items()}
        return Job(number, self.data, self.control, shares, self.burst_s)


class Place(Closing):
    """Hosts around one switch; a context manager.

    Parameters
    ----------
    setup
        Hosts, rates and depths.
    shares
        The job's share of each port; None: no limit.
    job
        Job number.
    """

    kind = ""
    over = ""

    def __init__(self, setup: "Setup", shares: Shares | None, job: int) -> None:
        # The controller is no part of the shim; only commands bring the two together.
        from dlcp.controller.fabric import Host
        from dlcp.controller.shapes import star

        names = [Host.numbered(index).name for index in range(setup.hosts)]
        self._stack = ExitStack()
        fabric = star(
            setup.hosts,
            ports="packet" if self.kind == "namespaces" else "loopback",
            queueing=PortQueueing(rate_bps=setup.rate_bps, depth_packets=setup.depth_packets),
            jobs=[shares.job(job, names)] if shares else [],
        )
        self._fabric = asdict(fabric)

    def _start_switch(self, **options: Any) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dlcp-fabric-")))
        description = folder / "fabric.json"
        description.write_text(json.dumps(self._fabric))
        self._switch = self._stack.enter_context(
            SwitchProcess(["--fabric", str(description)], counters_every_s=5.0, **options)
        )

    def close(self) -> None:
        """Leave nothing of it."""
        self._stack.close()

    @abstractmethod
    def popen(self, host: int) -> Callable[..., "subprocess.Popen[str]"]:
        """Return what starts a process on a host."""

    @abstractmethod
    def bind_of(self, host: int, port: int) -> str:
        """Return where a process on a host binds its socket, ``address:port``."""

    @abstractmethod
    def address_of(self, host: int, port: int) -> str:
        """Return where others reach that socket, ``address:port``."""

    @property
    @abstractmethod
    def interface(self) -> str:
        """The name of every host's interface."""

    @abstractmethod
    def namespace(self, host: int) -> str | None:
        """Return the path of a host's network namespace; None if it has none of its own."""

    def background_arguments(self, host: int, peers: Sequence[int]) -> list[str]:
        """Return how one end of the background traffic talks to its peers."""
        addresses = [f"{peer}={self.address_of(peer, SINK_PORT)}" for peer in peers]
        where = ["--rank", str(host), "--bind", self.bind_of(host, SINK_PORT), "--peers", *addresses]
        return ["--over", self.over, *where]

    def counters(self) -> dict[str, Any]:
        """Stop the switch and return its counters."""
        return self._switch.stop()


class NamespacePlace(Place):
    """Every host has a network namespace of its own, so that any program's traffic crosses the switch."""

    kind = "namespaces"
    over = "tcp"
    interface = HOST_INTERFACE

    def __init__(self, setup: "Setup", shares: Shares | None, job: int) -> None:
        super().__init__(setup, shares, job)
        self._network = self._stack.enter_context(StarNetwork(setup.hosts))
        self._start_switch(namespace=self._network.switch)

    def popen(self, host: int) -> Callable[..., "subprocess.Popen[str]"]:
        """Return what starts a process in the host's namespace."""
        return self._network.hosts[host].namespace.popen

    def namespace(self, host: int) -> str | None:
        """Return the path of the host's namespace."""
        return self._network.hosts[host].namespace.path

    def bind_of(self, host: int, port: int) -> str:
        """Return the host's address."""
        return f"{self._network.hosts[host].address}:{port}"

    def address_of(self, host: int, port: int) -> str:
        """Return the host's address."""
        return self.bind_of(host, port)


class LoopbackPlace(Place):
    """Processes of this machine, each with a loopback address of its own; needs no privilege. TCP cannot come along."""

    kind = "loopback"
    over = "udp"
    interface = "lo"

    def __init__(self, setup: "Setup", shares: Shares | None, job: int) -> None:
        super().__init__(setup, shares, job)
        self._fabric["udp_ports"] = [UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT, SINK_PORT]
        self._start_switch()

    def popen(self, host: int) -> Callable[..., "subprocess.Popen[str]"]:
        """Return what starts any process."""
        return subprocess.Popen

    def namespace(self, host: int) -> str | None:
        """Return None: all hosts are in this one."""
        return None

    def bind_of(self, host: int, port: int) -> str:
        """Return the address of the host's process."""
        return f"{LoopbackHost.numbered(host).real}:{port}"

    def address_of(self, host: int, port: int) -> str:
        """Return the switch's address that leads to the host."""
        return f"{LoopbackHost.numbered(host).alias}:{port}"
