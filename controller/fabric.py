# SPDX-License-Identifier: Apache-2.0
"""What a fabric consists of: hosts, the ports they are at, and the jobs that run on them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

from controller.policy import Policy
from dlcp.switch.document import Document
from dlcp.switch.queues import PortQueueing
from dlcp.wire import UDP_PORT_BASE

HOSTS_MAX: Final = 63
"""The program counts and watches ports 0-63, and hosts begin at port 1."""
RATE_BPS: Final = 200_000_000
"""A port's rate unless told otherwise. Chosen by us: plain Python carries four such ports with room to spare."""

PortKind = Literal["loopback", "packet"]


class FabricError(ValueError):
    """A fabric that cannot be; the message says what is wrong with which part of it."""


@dataclass(frozen=True)
class Host:
    """One host and the switch port it is at.

    Parameters
    ----------
    name
        For people.
    port
        Switch port, 1..63.
    address, mac
        IPv4 address and Ethernet address.
    trusted
        Whether the switch believes the tags of what comes from it.
    interface
        The switch's end of its link, for packet ports; ``port<port>`` unless given.
    queueing
        Rate, depths, delay and loss of its port; the fabric's unless given.
    """

    name: str
    port: int
    address: str
    mac: str
    trusted: bool = True
    interface: str = ""
    queueing: PortQueueing | None = None

    @classmethod
    def numbered(cls, index: int) -> "Host":
        """Return host ``index`` (0 is the first) with the name, port and addresses it has by custom."""
        number = index + 1
        return cls(f"host{index}", number, f"10.0.0.{number}", f"02:00:00:00:00:{number:02x}")


@dataclass(frozen=True)
class Job:
    """A training job and its share of each egress port.

    Parameters
    ----------
    id
        The job number in the DLCP header, 0..65535.
    share, control_share
        Part of a port's rate that its data and its control packets may use, 0..1, each. What exceeds it is not lost
        but waits below all other traffic.
    shares
        Data shares of single ports that differ from ``share``, by port.
    burst_s
        How long a burst at the port's rate may last before the share is held against the job, in seconds.
    """

    id: int
    share: float = 0.9
    control_share: float = 0.05
    shares: dict[int, float] = field(default_factory=dict)
    burst_s: float = 0.01

    def share_at(self, port: int) -> float:
        """Return its data share of a port."""
        return self.shares.get(port, self.share)


@dataclass(frozen=True)
class Star:
    """Hosts around one switch.

    Parameters
    ----------
    hosts
        Who is there.
    kind
        ``loopback``: processes of this machine over 127.0.0.0/8; ``packet``: network interfaces.
    queueing
        Rate, depths, delay and loss of the ports whose host gives none of its own.
    jobs
        Jobs that have a share; a job that is not named has no limit.
    policy
        When packets are dropped and marked.
    udp_ports
        UDP ports served on loopback ports.
    mtu_bytes
        Largest IPv4 packet on loopback ports.

    Raises
    ------
    FabricError
        Names, ports or addresses that are not unique, numbers out of range, shares that add up to more than a port.
    """

    hosts: tuple[Host, ...]
    kind: PortKind = "loopback"
    queueing: PortQueueing = field(default_factory=lambda: PortQueueing(rate_bps=RATE_BPS))
    jobs: tuple[Job, ...] = ()
    policy: Policy = field(default_factory=Policy)
    udp_ports: tuple[int, ...] = (UDP_PORT_BASE,)
    mtu_bytes: int = 9000

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not self.hosts:
            raise FabricError("a fabric without hosts")
        for what in ("name", "port", "address", "mac"):
            _refuse_repeated(what, [str(getattr(host, what)) for host in self.hosts])
        for host in self.hosts:
            if not 1 <= host.port <= HOSTS_MAX:
                raise FabricError(f"host {host.name!r}: port {host.port} is not one of 1..{HOSTS_MAX}")
        _refuse_repeated("id", [str(job.id) for job in self.jobs])
        for host in self.hosts:
            self._check_shares(host)

    @classmethod
    def numbered(
        cls,
        hosts: int,
        *,
        kind: PortKind = "loopback",
        queueing: PortQueueing | None = None,
        jobs: Sequence[Job] = (),
        policy: Policy | None = None,
    ) -> "Star":
        """Return a star of ``hosts`` hosts with the customary addresses.

        Raises
        ------
        FabricError
            As the class does.
        """
        queueing = queueing or PortQueueing(rate_bps=RATE_BPS)
        return cls(tuple(map(Host.numbered, range(hosts))), kind, queueing, tuple(jobs), policy or Policy())

    def queueing_at(self, host: Host) -> PortQueueing:
        """Return how the port of a host queues and sends."""
        return host.queueing or self.queueing

    def _check_shares(self, host: Host) -> None:
        total = 0.0
        for job in self.jobs:
            data, control = job.share_at(host.port), job.control_share
            if not (0 < data <= 1 and 0 < control <= 1 and job.burst_s > 0):
                raise FabricError(f"job {job.id}: shares lie above 0 and up to 1, and burst_s above 0")
            total += data + control
        if total > 1 + 1e-9:
            raise FabricError(f"the jobs' shares of port {host.port} ({host.name}) add up to {total:.3g}, more than 1")
        if self.jobs and not self.queueing_at(host).rate_bps:
            raise FabricError(f"port {host.port} ({host.name}) has no rate, so no job can have a share of it")


def _refuse_repeated(what: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise FabricError(f"{what} {value} is given {values.count(value)} times")


def load(path: Path) -> Star:
    """Read a fabric from a JSON file that holds the fields of :class:`Star`.

    ``hosts`` may be a number instead of a list: that many, with the customary names, ports and addresses.

    Raises
    ------
    DocumentError
        Naming the file, the line and the place in it, and what is wrong.
    """
    document = Document(path)
    content = document.content
    if isinstance(content, dict) and isinstance(content.get("hosts"), int):
        content["hosts"] = [asdict(Host.numbered(index)) for index in range(content["hosts"])]
    return document.convert(Star)
