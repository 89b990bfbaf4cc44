# SPDX-License-Identifier: Apache-2.0
"""Fabrics of customary shapes: a star, and leaves under spines."""

from collections.abc import Sequence

from dlcp.controller.fabric import RATE_BPS, Fabric, FabricError, Host, Job, Link, PortKind, Switch
from dlcp.controller.policy import Policy

from dlcp.switch import PortQueueing


def star(
    hosts: int,
    *,
    ports: PortKind = "loopback",
    queueing: PortQueueing | None = None,
    jobs: Sequence[Job] = (),
    policy: Policy | None = None,
) -> Fabric:
    """Return ``hosts`` hosts with the customary names and addresses around one built-in switch; host k is at port k+1.

    Raises
    ------
    FabricError
        As :class:`Fabric` does.
    """
    switch = Switch("switch", ports=ports)
    described = tuple(map(Host.numbered, range(hosts)))
    links = tuple(Link(f"{switch.name}:{index + 1}", host.name) for index, host in enumerate(described))
    return Fabric((switch,), described, links, tuple(jobs), policy or Policy(), queueing or _queueing())


def leaf_spine(
    leaves: int,
    spines: int,
    hosts_per_leaf: int,
    *,
    queueing: PortQueueing | None = None,
    jobs: Sequence[Job] = (),
    policy: Policy | None = None,
) -> Fabric:
    """Return built-in switches ``leaf1..`` and ``spine1..`` in two tiers, each leaf linked to each spine.

    Hosts are at the first ports of a leaf, spines at the next ones; leaf k is at port k of every spine.

    Raises
    ------
    FabricError
        As :class:`Fabric` does.
    """
    if min(leaves, spines, hosts_per_leaf) < 1:
        raise FabricError(f"{leaves} leaves, {spines} spines and {hosts_per_leaf} hosts a leaf: each takes 1 or more")
    hosts = tuple(map(Host.numbered, range(leaves * hosts_per_leaf)))
    links = [Link(f"leaf{1 + k // hosts_per_leaf}:{1 + k % hosts_per_leaf}", host.name) for k, host in enumerate(hosts)]
    links += [
        Link(f"leaf{leaf}:{hosts_per_leaf + spine}", f"spine{spine}:{leaf}")
        for leaf in range(1, leaves + 1)
        for spine in range(1, spines + 1)
    ]
    names = [f"leaf{leaf + 1}" for leaf in range(leaves)] + [f"spine{spine + 1}" for spine in range(spines)]
    switches = tuple(Switch(name, device_id=index + 1) for index, name in enumerate(names))
    return Fabric(switches, hosts, tuple(links), tuple(jobs), policy or Policy(), queueing or _queueing())


def _queueing() -> PortQueueing:
    return PortQueueing(rate_bps=RATE_BPS)
