# SPDX-License-Identifier: Apache-2.0
"""Whether what the hosts say they sent, received and lost is what the switches say they forwarded and dropped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from dlcp.controller.testbed.accounts import RATE_WINDOW_S, Accounts, SwitchAccount
from dlcp.controller.testbed.layout import HostPlan, Layout
from dlcp.wire import Queue

GRADIENT_QUEUES: Final = (Queue.EXCESS, *range(Queue.FIRST_GRADIENT, Queue.LAST_GRADIENT + 1))
"""Where data of a job with tags can be: its own queues, and the lowest, for what exceeds the job's share."""
RATE_TOLERANCE: Final = 0.01
"""How far above its rate a port may seem to be: the clock is read a moment before or after the counters."""


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    Parameters
    ----------
    what
        What is compared.
    hosts, switches
        What either side counted; numbers, written out.
    agree
        Whether they agree; None if the switches do not count what it would take.
    note
        What follows, or what does not.
    """

    what: str
    hosts: str
    switches: str
    agree: bool | None
    note: str = ""


def compare(
    layout: Layout, accounts: Accounts, ledgers: Sequence[Mapping[str, Any]], *, tagged: bool
) -> list[dict[str, Any]]:
    """Return the findings of a run, as dicts that JSON can hold.

    Parameters
    ----------
    layout
        The testbed.
    accounts
        What was counted during the run.
    ledgers
        Of all who sent gradients, or sums of them: the workers, and a parameter server; none if the run had none.
    tagged
        Whether its packets carried tags; without, gradients look like other traffic to a switch.
    """
    if accounts.restarts:
        what = "Counters of the switches"
        note = "A switch was started again during the run, so its counters began anew and cannot be compared."
        return [asdict(Comparison(what, "-", "-", None, note))]
    by_name = {host.name: host for host in layout.hosts}
    hosts = [by_name[name] for name in accounts.nics]
    findings = [_received(hosts, accounts), _sent(hosts, accounts)]
    if ledgers and tagged:
        findings += [_gradients(hosts, accounts, ledgers), _policy(accounts, ledgers)]
    findings.append(_rate(layout, hosts, accounts))
    return [asdict(finding) for finding in findings]


def uncounted_tails(layout: Layout, accounts: Accounts) -> int | None:
    """Return how many packets were lost between the hosts without any switch counting them; None if all are counted.

    BMv2 says nothing of a packet that finds its queue full: it is what the hosts sent, less what is accounted for.
    """
    if all(account.tail_drops is not None for account in accounts.switches.values()):
        return None
    sent = sum(nic.sent for nic in accounts.nics.values())
    hosts = [host for host in layout.hosts if host.name in accounts.nics]
    return sent - _at_hosts(hosts, accounts, "FORWARDED") - _dropped(accounts.switches.values())


def _received(hosts: list[HostPlan], accounts: Accounts) -> Comparison:
    """Compare host by host what arrived with what the program let out of the host's port."""
    received = {host.name: accounts.nics[host.name].received for host in hosts}
    forwarded = {host.name: accounts.switches[host.switch].count("FORWARDED", ports=[host.port]) for host in hosts}
    differing = [name for name in received if received[name] != forwarded[name]]
    note = (
        f"Each of the {len(hosts)} hosts alone agrees, too."
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
    """Compare what hosts sent with what came out at hosts or was dropped on the way."""
    sent = sum(accounts.nics[host.name].sent for host in hosts)
    forwarded = _at_hosts(hosts, accounts, "FORWARDED")
    dropped = _dropped(accounts.switches.values())
    tails = [account.tails() for account in accounts.switches.values()]
    counted = f"{forwarded:,} forwarded, {dropped:,} dropped by the program"
    what = "Frames sent by hosts, and what became of them"
    if None in tails:
        rest = sent - forwarded - dropped
        note = f"The other {rest:,} found a queue full; BMv2 does not count those."
        return Comparison(
            what, f"{sent:,}", counted, None if rest >= 0 else False, note if rest >= 0 else "More than was sent."
        )
    full = sum(tail for tail in tails if tail is not None)
    return Comparison(what, f"{sent:,}", f"{counted}, {full:,} at a full queue", sent == forwarded + dropped + full)


def _gradients(hosts: list[HostPlan], accounts: Accounts, ledgers: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the data packets of the ledgers with those of the switches.

    A packet is forwarded to a host once, and dropped or lost at a full queue once, wherever on its way. A switch tells
    data from control by the queue that the packet asks for: control asks for the most urgent, which data never does.
    What exceeds a share is moved to the lowest queue, and counted under the queue that it asked for.
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
    what = "Gradient packets, sent by the ledgers and seen by the switches"
    if None in tails:
        rest = sent - seen
        note = "None was lost at a full queue." if not rest else f"The other {rest:,} found a queue full, uncounted."
        return Comparison(
            what, f"{sent:,}", f"{seen:,}", rest == 0 or (None if rest > 0 else False), note if rest >= 0 else ""
        )
    full = sum(tail for tail in tails if tail is not None)
    seen += full
    note = f"{full:,} of them found a queue full."
    if 0 < seen - sent <= doubtful:
        note += f" As many as {doubtful:,} of those may have been control packets over the job's share."
        return Comparison(what, f"{sent:,}", f"{seen:,}", None, note)
    return Comparison(what, f"{sent:,}", f"{seen:,}", sent == seen, note)


def _moved_between_switches(account: SwitchAccount, host_ports: Sequence[int]) -> int:
    """Return how many packets that found the lowest queue full on their way to another switch may have been control.

    At a host's port those are known: what was moved there is counted, and was forwarded or lost there.
    """
    ports = {place.port for place in account.events} - set(host_ports)
    moved = account.count("OVER_SHARE", ports=ports, queues=[Queue.CONTROL])
    return min(moved, account.tails(ports=ports, queues=[Queue.EXCESS]) or 0)


def _policy(accounts: Accounts, ledgers: Sequence[Mapping[str, Any]]) -> Comparison:
    """Check that the hosts know of everything that was dropped by choice, and that nothing protected was."""
    dropped = sum(account.count("POLICY_DROP") for account in accounts.switches.values())
    never = sum(
        packets
        for account in accounts.switches.values()
        for place, packets in account.events.items()
        if place.event == "POLICY_DROP" and place.drop_class == 0
    )
    known = sum(ledger["lost"] + ledger["retransmitted"] for ledger in ledgers)
    note = f"Of class 0, never to be dropped: {never:,}. A packet may be sent again without need."
    return Comparison(
        "Lost or sent again, and dropped by choice (at most as many)",
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
    late = f" A switch was up to {1e3 * accounts.late_s:.0f} ms late, and made up for it." if accounts.late_s else ""
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
    """Return the packets that the program has dropped: by policy, for want of a route, or as no router may forward."""
    return sum(account.count(event) for account in switches for event in ("POLICY_DROP", "NO_ROUTE", "REFUSED"))


def _difference(names: list[str], received: Mapping[str, int], forwarded: Mapping[str, int]) -> str:
    return "They differ at " + ", ".join(f"{name} by {received[name] - forwarded[name]:+,}" for name in names) + "."
