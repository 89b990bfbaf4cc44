# SPDX-License-Identifier: Apache-2.0
"""From what an operator wants to what a switch's tables hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlcp.switch.entries import Entries, MeterRates, Profile, ProfileGroup, ProfileMember, TableEntry
from dlcp.switch.queues import QUEUES
from dlcp.wire import DROP_CLASSES, Queue

if TYPE_CHECKING:
    from controller.fabric import Host, Job, Star

_BURST_PACKETS_MIN: Final = 8
"""A meter's burst is at least this many packets of the largest size, else a job could not send back to back."""


class PolicyError(ValueError):
    """A policy that contradicts itself; the message says how."""


@dataclass(frozen=True)
class Policy:
    """How full a queue has to be for a packet to be dropped or marked.

    Parameters
    ----------
    drop_at
        For drop classes 1 to 7, the share of the queue's depth above which the class is dropped. Class 7 is the least
        valuable: it goes first. The values are ours: evenly spaced, so that each class relieves the queue before the
        next is touched, and with room above class 1 for what may never be dropped.
    ecn_at
        Share of the queue's depth above which packets that can be marked are marked. Ours, after DCTCP's 65 packets in
        queues of 240.
    """

    drop_at: tuple[float, ...] = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    ecn_at: float = 0.27

    def __post_init__(self) -> None:
        """Refuse what would drop the valuable first."""
        if len(self.drop_at) != DROP_CLASSES - 1:
            raise PolicyError(f"drop_at has {len(self.drop_at)} values; it takes 7, for drop classes 1 to 7")
        if not all(0 <= share <= 1 for share in (*self.drop_at, self.ecn_at)):
            raise PolicyError("drop_at and ecn_at are shares of a queue's depth, 0..1")
        for drop_class in range(1, DROP_CLASSES - 1):
            if self.drop_at[drop_class] > self.drop_at[drop_class - 1]:
                raise PolicyError(
                    f"drop_at puts class {drop_class + 1} at {self.drop_at[drop_class]} and class {drop_class} at "
                    f"{self.drop_at[drop_class - 1]}: the more valuable class {drop_class} would be dropped first"
                )

    def drop_above(self, drop_class: int, depth_packets: int) -> int:
        """Return the depth in packets above which a class is dropped in a queue of ``depth_packets``."""
        return int(self.drop_at[drop_class - 1] * depth_packets)

    def mark_above(self, depth_packets: int) -> int:
        """Return the depth in packets above which packets are marked in a queue of ``depth_packets``."""
        return int(self.ecn_at * depth_packets)


def entries(star: "Star") -> Entries:
    """Return everything that the switch of a star has to be told: tables, routes, meters and ports."""
    return Entries(
        profiles=(_next_hops(star),),
        entries=(*_routes(star), *_trust(star), *_drop_thresholds(star), *_ecn_thresholds(star), *_shares(star)),
        ports={host.port: star.queueing_at(host) for host in star.hosts},
    )


def _next_hops(star: "Star") -> Profile:
    """One member a next hop and one group a set of equal-cost next hops; in a star every set has one."""
    members = tuple(
        ProfileMember(host.port, "to_next_hop", {"port": host.port, "mac": host.mac}) for host in star.hosts
    )
    return Profile("route_selector", members, tuple(ProfileGroup(host.port, (host.port,)) for host in star.hosts))


def _routes(star: "Star") -> list[TableEntry]:
    routes = [TableEntry("ipv4_route", {"ipv4_dst": f"{host.address}/32"}, group=host.port) for host in star.hosts]
    routes += [
        TableEntry("ethernet_route", {"ethernet_dst": host.mac}, "to_port", {"port": host.port}) for host in star.hosts
    ]
    return routes


def _trust(star: "Star") -> list[TableEntry]:
    return [TableEntry("port_trust", {"ig_port": host.port}, "trust") for host in star.hosts if host.trusted]


def _drop_thresholds(star: "Star") -> list[TableEntry]:
    depths = _depths(star)
    return [
        TableEntry(
            "drop_threshold",
            {"queue": queue, "drop_class": drop_class},
            "drop_above",
            {"depth": star.policy.drop_above(drop_class, depths[queue])},
        )
        for queue in range(QUEUES)
        for drop_class in range(1, DROP_CLASSES)
    ]


def _ecn_thresholds(star: "Star") -> list[TableEntry]:
    depths = _depths(star)
    return [
        TableEntry("ecn_threshold", {"queue": queue}, "mark_above", {"depth": star.policy.mark_above(depths[queue])})
        for queue in range(QUEUES)
        if queue != Queue.CONTROL
    ]


def _depths(star: "Star") -> list[int]:
    """Return the depth of each queue in packets where it is shallowest: thresholds are the same at all ports."""
    depths = []
    for host in star.hosts:
        queueing = star.queueing_at(host)
        limit = queueing.limit_packets
        depths.append([depth if limit is None else min(depth, limit) for depth in queueing.depths()])
    return [min(depth[queue] for depth in depths) for queue in range(QUEUES)]


def _shares(star: "Star") -> list[TableEntry]:
    return [
        TableEntry(
            "job_share",
            {"job": job.id, "control": control, "eg_port": host.port},
            "metered",
            meter=_meter(star, host, job, job.control_share if control else job.share_at(host.port)),
        )
        for job in star.jobs
        for host in star.hosts
        for control in (0, 1)
    ]


def _meter(star: "Star", host: "Host", job: "Job", share: float) -> MeterRates:
    """Return the meter of a share. Both rates are the same: a job is within its share or it is not."""
    port_bytes_per_s = star.queueing_at(host).rate_bps / 8
    rate = max(1, int(share * port_bytes_per_s))
    burst = max(int(job.burst_s * port_bytes_per_s), _BURST_PACKETS_MIN * star.mtu_bytes)
    return MeterRates(rate, burst, rate, burst)
