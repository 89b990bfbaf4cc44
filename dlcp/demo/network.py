# SPDX-License-Identifier: Apache-2.0
"""The network of a run: hosts around a switch, in network namespaces or, without privileges, on loopback addresses."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from dlcp.controller.fabric import Host, Job, star
from dlcp.demo.background import SINK_PORT, BackgroundEnd
from dlcp.demo.variants import DemoSetup
from dlcp.host.closing import Closing
from dlcp.host.netlab import HOST_INTERFACE, Namespace, StarNetwork
from dlcp.switch import LoopbackHost, PortQueueing, SwitchProcess
from dlcp.transport import parse_address
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT


@dataclass(frozen=True)
class Shares:
    """A job's shares of a port's rate.

    Parameters
    ----------
    data, control
        Shares for gradients and for control packets.
    burst_s
        Longest burst at the port's rate that does not yet exceed the share.
    at
        Data shares of ports that differ, by the number of the host behind the port.
    """

    data: float
    control: float
    burst_s: float
    at: dict[int, float] = field(default_factory=dict)

    def job(self, number: int, hosts: Sequence[str]) -> Job:
        """Return job ``number`` of a fabric with these shares; ``hosts`` are the names of its hosts."""
        shares = {hosts[host]: share for host, share in self.at.items()}
        return Job(number, self.data, self.control, shares, self.burst_s)


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
    shares
        The job's share of each port; None for no limit.
    job
        Job number.
    """

    def __init__(self, setup: DemoSetup, shares: Shares | None, job: int) -> None:
        super().__init__()
        names = [Host.numbered(index).name for index in range(setup.hosts)]
        fabric = star(
            setup.hosts,
            ports="packet" if self.kind == "namespaces" else "loopback",
            queueing=PortQueueing(rate_bps=setup.rate_bps, depth_packets=setup.depth_packets),
            jobs=[shares.job(job, names)] if shares else [],
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

    def __init__(self, setup: DemoSetup, shares: Shares | None, job: int) -> None:
        super().__init__(setup, shares, job)
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

    def __init__(self, setup: DemoSetup, shares: Shares | None, job: int) -> None:
        super().__init__(setup, shares, job)
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
