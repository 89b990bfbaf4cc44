# SPDX-License-Identifier: Apache-2.0
"""Check that the hosts' counts of packets sent, received and lost agree with the switches' counts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from dlcp.controller.testbed.accounts import RATE_WINDOW_S, Accounts, SwitchAccount
from dlcp.controller.testbed.layout import HostPlan, Layout
from dlcp.wire import Queue

GRADIENT_QUEUES: Final = (Queue.EXCESS, *range(Queue.FIRST_GRADIENT, Queue.LAST_GRADIENT + 1))
"""Queues that can hold a tagged job's data: the gradient queues, and the lowest for packets beyond the job's share."""
RATE_TOLERANCE: Final = 0.01
"""Relative error of a measured rate: the clock is not read at the same moment as the counters."""


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    Parameters
    ----------
    what
        The quantity that is compared.
    hosts, switches
        The counts of either side, as text.
    agree
        Whether they agree; None if the switches lack the counters to decide.
    note
        An explanation.
    """

    what: str
    hosts: str
    switches: str
    agree: bool | None
    note: str = ""


def compare(
    layout: Layout, accounts: Accounts, ledgers: Sequence[Mapping[str, Any]], *, tagged: bool
) -> list[dict[str, Any]]:
    """Return the comparisons of a run, as dicts that JSON can hold.

    Parameters
    ----------
    layout
        The testbed.
    accounts
        The counts of the run.
    ledgers
        Ledgers of all senders of gradients (workers and parameter server), or their sums; empty for a run without
        DLCP.
    tagged
        Whether its packets carried tags; without tags, a switch cannot tell gradients from other traffic.
    """
    if accounts.restarts:
        what = "Counters of the switches"
        note = "A switch restarted during the run, which reset its counters, so they cannot be compared."
        return [asdict(Comparison(what, "-", "-", None, note))]
    by_name = {host.name: host for host in layout.hosts}
    hosts = [by_name[name] for name in accounts.nics]
    findings = [_received(hosts, accounts), _sent(hosts, accounts)]
    if ledgers and tagged:
        findings += [_gradients(hosts, accounts, ledgers), _policy(accounts, ledgers)]
    findings.append(_rate(layout, hosts, accounts))
    return [asdict(finding) for finding in findings]


def uncounted_tails(layout: Layout, accounts: Accounts) -> int | None:
    """Return how many packets were lost without any switch counting them; None if the switches count all drops.

    BMv2 does not count packets dropped at a full queue: they are the packets the hosts sent, less all counted ones.
    """
    if all(account.tail_drops is not None for account in accounts.switches.values()):
        return None
    sent = sum(nic.sent for nic in accounts.nics.values())
    hosts = [host for host in layout.hosts if host.name in accounts.nics]
    return sent - _at_hosts(hosts, accounts, "FORWARDED") - _dropped(accounts.switches.values())


def _received(hosts: list[HostPlan], accounts: Accounts) -> Comparison:
    """Compare for each host the frames received with those that the program forwarded to its port."""
    received = {host.name: accounts.nics[host.name].received for host in hosts}
    forwarded = {host.name: accounts.switches[host.switch].count("FORWARDED", ports=[host.port]) for host in hosts}
    differing = [name for name in received if received[name] != forwarded[name]]
    note = (
        f"They also agree for each of the {len(hosts)} hosts."
        if not differing
        else _difference(differing, received, forwarded)
    )
    return Comparison(
        "Frames received by hosts, and forwarded to them",
        f"{sum(received.values()):,}",
        f"{sum(forwarded.values()):,}",
        not differing,
        note,
    )


def _sent(hosts: list[HostPlan], accounts: Accounts) -> Comparison:
    """Compare the frames that hosts sent with those forwarded to hosts or dropped on the way."""
    sent = sum(accounts.nics[host.name].sent for host in hosts)
    forwarded = _at_hosts(hosts, accounts, "FORWARDED")
    dropped = _dropped(accounts.switches.values())
    tails = [account.tails() for account in accounts.switches.values()]
    counted = f"{forwarded:,} forwarded, {dropped:,} dropped by the program"
    what = "Frames sent by hosts, and their fate"
    if None in tails:
        rest = sent - forwarded - dropped
        note = f"The other {rest:,} were dropped at a full queue, which BMv2 does not count."
        return Comparison(
            what, f"{sent:,}", counted, None if rest >= 0 else False, note if rest >= 0 else "More than were sent."
        )
    full = sum(tail for tail in tails if tail is not None)
    return Comparison(what, f"{sent:,}", f"{counted}, {full:,} at a full queue", sent == forwarded + dropped + full)


def _gradients(hosts: list[HostPlan], accounts: Accounts, ledgers: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the data packets of the ledgers with those of the switches.

    Each packet is counted once: as forwarded to a host, or as dropped by policy or at a full queue anywhere on its way.
    A switch tells data from control packets by the queue in their tag: only control packets use the most urgent one.
    A packet beyond its job's share is moved to the lowest queue, and OVER_SHARE is counted under its tagged queue.
    """
    at: dict[str, list[int]] = {}
    for host in hosts:
        at.setdefault(host.switch, []).append(host.port)
    seen, doubtful = 0, 0
    tails: list[int | None] = []
    for name, account in accounts.switches.items():
        ports = at.get(name, [])
        tails.append(account.tails(queues=GRADIENT_QUEUES))
        seen += account.count("FORWARDED", ports=ports, queues=GRADIENT_QUEUES) + account.count("POLICY_DROP")
        seen -= account.count("OVER_SHARE", ports=ports, queues=[Queue.CONTROL])
        doubtful += _moved_between_switches(account, ports)
    sent = sum(ledger["sent"] for ledger in ledgers)
    what = "Gradient packets, sent by hosts and seen by switches"
    if None in tails:
        rest = sent - seen
        note = "None was dropped at a full queue." if not rest else f"The other {rest:,} were dropped, uncounted."
        return Comparison(
            what, f"{sent:,}", f"{seen:,}", rest == 0 or (None if rest > 0 else False), note if rest >= 0 else ""
        )
    full = sum(tail for tail in tails if tail is not None)
    seen += full
    note = f"{full:,} of them were dropped at a full queue."
    if 0 < seen - sent <= doubtful:
        note += f" Up to {doubtful:,} of those may have been control packets beyond the job's share."
        return Comparison(what, f"{sent:,}", f"{seen:,}", None, note)
    return Comparison(what, f"{sent:,}", f"{seen:,}", sent == seen, note)


def _moved_between_switches(account: SwitchAccount, host_ports: Sequence[int]) -> int:
    """Return how many packets dropped at a full lowest queue toward another switch may have been control packets.

    At a host's port their number is exact: each moved packet is counted there, and was forwarded or dropped there.
    """
    ports = {place.port for place in account.events} - set(host_ports)
    moved = account.count("OVER_SHARE", ports=ports, queues=[Queue.CONTROL])
    return min(moved, account.tails(ports=ports, queues=[Queue.EXCESS]) or 0)


def _policy(accounts: Accounts, ledgers: Sequence[Mapping[str, Any]]) -> Comparison:
    """Check that the hosts' ledgers cover all packets dropped by policy, and that none of these was of class 0."""
    dropped = sum(account.count("POLICY_DROP") for account in accounts.switches.values())
    never = sum(
        packets
        for account in accounts.switches.values()
        for place, packets in account.events.items()
        if place.event == "POLICY_DROP" and place.drop_class == 0
    )
    known = sum(ledger["lost"] + ledger["retransmitted"] for ledger in ledgers)
    note = f"{never:,} of class 0, which must never be dropped. Packets may be retransmitted without need."
    return Comparison(
        "Packets lost or retransmitted, and packets dropped by policy (at most as many)",
        f"{known:,}",
        f"{dropped:,}",
        dropped <= known and not never,
        note,
    )


def _rate(layout: Layout, hosts: list[HostPlan], accounts: Accounts) -> Comparison:
    """Check that no port has carried more than its rate."""
    asked = {
        host.name: next(port.rate_bps for port in layout.switch(host.switch).ports if port.number == host.port)
        for host in hosts
    }
    name = max(asked, key=lambda name: accounts.busiest_bps[name] / asked[name])
    busiest = accounts.busiest_bps[name]
    allowed = asked[name] * (1 + RATE_TOLERANCE + accounts.late_s / RATE_WINDOW_S)
    late = f" A switch was up to {1e3 * accounts.late_s:.0f} ms late and caught up." if accounts.late_s else ""
    return Comparison(
        "Busiest second of any port, and its rate",
        f"{busiest / 1e6:.2f} Mbit/s",
        f"{asked[name] / 1e6:.2f} Mbit/s",
        busiest <= allowed,
        f"At {name}.{late}",
    )


def _at_hosts(hosts: Iterable[HostPlan], accounts: Accounts, event: str) -> int:
    return sum(accounts.switches[host.switch].count(event, ports=[host.port]) for host in hosts)


def _dropped(switches: Iterable[SwitchAccount]) -> int:
    """Return the packets that the program has dropped: by policy, without a route, or as invalid (TTL, checksum)."""
    return sum(account.count(event) for account in switches for event in ("POLICY_DROP", "NO_ROUTE", "REFUSED"))


def _difference(names: list[str], received: Mapping[str, int], forwarded: Mapping[str, int]) -> str:
    return "They differ at " + ", ".join(f"{name} by {received[name] - forwarded[name]:+,}" for name in names) + "."
