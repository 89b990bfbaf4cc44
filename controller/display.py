# SPDX-License-Identifier: Apache-2.0
"""Fabrics, plans and counters as tables in a terminal, or as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from dlcp.controller.compiled_program import KINDS, CompiledProgram
from dlcp.controller.fabric import Fabric, Port
from dlcp.controller.switch_client import Outcome, Plan, Readings
from dlcp.switch import Entries
from dlcp.switch.event_counters import SwitchAccount

_CHANGES_SHOWN = 20
TAIL_DROP: Final = "TAIL_DROP"
"""A drop at a full queue. The switch program does not see it; the built-in switch counts it."""
_STYLES = {"insert": "green", "modify": "yellow", "delete": "red"}


def fabric_table(fabric: Fabric, entries: Mapping[str, Entries]) -> Table:
    """Return the switches of a fabric and the numbers of their entries."""
    table = _table("switch", "kind", "control", "by", right=("ports", "hosts", "routes", "sprayed", "entries"))
    for switch in fabric.switches:
        ports = fabric.neighbours[switch.name]
        held = entries[switch.name]
        count = Counter(entry.table for entry in held.entries)
        sprayed = [group for profile in held.profiles for group, members in profile.groups if len(members) > 1]
        numbers = (
            len(ports),
            sum(neighbour.host is not None for neighbour in ports.values()),
            count["ipv4_route"],
            len(sprayed),
            len(held.entries),
        )
        by = "plain" if switch.insecure else "TLS"
        control = (switch.grpc, by) if switch.grpc else ("none", "")
        table.add_row(switch.name, switch.kind, *control, *map(str, numbers))
    return table


def plan_tree(plan: Plan, pipeline: CompiledProgram, *, every: bool = False) -> Tree:
    """Return the planned changes of a switch: the first 20, or all with ``every``."""
    difference = plan.difference
    if not plan:
        return Tree(Text(f"{plan.switch.name}: nothing to do, {difference.kept} entries are correct"))
    counts = ", ".join(f"{count} to {action}" for action, count in difference.counts().items() if count)
    tree = Tree(Text(f"{plan.switch.name}: {counts or 'no entries'}, {difference.kept} unchanged"))
    if plan.install:
        tree.add(Text(f"install program {pipeline.cookie:016x}, which empties the tables", style="yellow"))
    for number, change in enumerate(difference):
        if number == _CHANGES_SHOWN and not every:
            tree.add(Text(f"and {len(difference) - number} more (--all shows them)"))
            break
        text = f"{KINDS[change.type]} {pipeline.describe(change.entity)}"
        tree.add(Text(text, style=_STYLES[KINDS[change.type]]))
    return tree


def plan_json(plan: Plan, pipeline: CompiledProgram) -> dict[str, Any]:
    """Return all planned changes of a switch, in their order, as plain values."""
    changes = [{"action": KINDS[change.type], "entity": pipeline.describe(change.entity)} for change in plan.difference]
    return {"install_program": plan.install, "changes": changes, "unchanged": plan.difference.kept}


def outcome_line(outcome: Outcome) -> Text:
    """Return the changes made to a switch, in one line."""
    plan = outcome.plan
    if not plan:
        return Text(f"{plan.switch.name}: nothing to do, {plan.difference.kept} entries are correct")
    done = ["program installed"] if plan.install else []
    past = {"insert": "inserted", "modify": "modified", "delete": "deleted"}
    done += [f"{count} {past[action]}" for action, count in plan.difference.counts().items() if count]
    done.append(f"{plan.difference.kept} unchanged")
    requests = "1 request" if outcome.writes == 1 else f"{outcome.writes} requests"
    return Text(f"{plan.switch.name}: {', '.join(done)}; {requests}, {outcome.elapsed_s:.2f} s")


def status_table(fabric: Fabric, known: Mapping[str, "tuple[Plan, Readings | None] | str"]) -> Table:
    """Return the state of each switch: from its plan and readings, or the reason why there are none."""
    table = _table("switch", "state", right=("forwarded", "marked", "dropped", "over share", "untrusted", "no route"))
    for switch in fabric.switches:
        found = known.get(switch.name, "no control address")
        if isinstance(found, str):
            table.add_row(switch.name, Text(found, style="red"))
            continue
        plan, readings = found
        state = Text("up to date", style="green")
        if plan:
            state = Text("other program" if plan.install else f"{len(plan.difference)} changes due", style="yellow")
        if readings is None:
            table.add_row(switch.name, state)
            continue
        events = ("FORWARDED", "MARKED", "POLICY_DROP", "OVER_SHARE", "UNTRUSTED")
        numbers = [readings.packets(event) for event in events] + [readings.packets("NO_ROUTE", "REFUSED")]
        table.add_row(switch.name, state, *map(str, numbers))
    return table


def status_json(fabric: Fabric, found: Mapping[str, "tuple[Plan, Readings | None] | str"]) -> dict[str, Any]:
    """Return the state of each switch as plain values; counters without zeros. What cannot be read is null."""
    switches: dict[str, Any] = {}
    for switch in fabric.switches:
        answer = found.get(switch.name, "no control address")
        if isinstance(answer, str):
            switches[switch.name] = {"error": answer}
            continue
        plan, readings = answer
        switches[switch.name] = {
            "install_program": plan.install,
            "changes_due": len(plan.difference),
            "counters": None if readings is None else [count._asdict() for count in readings.events],
            "queues": None
            if readings is None or readings.depths is None
            else [{"port": at[0], "queue": at[1], "packets": depth} for at, depth in readings.depths.items()],
        }
    return {"switches": switches}


def ports_table(fabric: Fabric, readings: Mapping[str, Readings]) -> Table:
    """Return the counters of the switches' ports, without ports that have counted nothing."""
    table = _table("port", "leads to", right=("forwarded", "Mbyte", "marked", "dropped", "waiting"))
    for switch, read in readings.items():
        for number in fabric.neighbours[switch]:
            sent = [count for count in read.events if count.event == "FORWARDED" and count.port == number]
            dropped = read.packets("POLICY_DROP", port=number)
            if not sent and not dropped:
                continue
            waiting = sum(read.depths.get((number, queue), 0) for queue in range(8)) if read.depths is not None else "-"
            table.add_row(
                str(Port(switch, number)),
                _leads_to(fabric, switch, number),
                str(sum(count.packets for count in sent)),
                f"{sum(count.bytes for count in sent) / 1e6:.1f}",
                str(read.packets("MARKED", port=number)),
                str(dropped),
                str(waiting),
            )
    return table


PACKETS_COUNTED: Final = {
    "FORWARDED": "forwarded",
    "MARKED": "marked",
    "POLICY_DROP": "policy drops",
    TAIL_DROP: "tail drops",
    "TRIMMED": "trimmed",
    "OVER_SHARE": "over share",
    "NO_ROUTE": "no route",
    "REFUSED": "refused",
    "UNTRUSTED": "untrusted",
}
"""The counters of each queue, and their headings."""


_ALWAYS: Final = ("FORWARDED", "MARKED", "POLICY_DROP", TAIL_DROP)


def _by_queue(account: SwitchAccount) -> dict[tuple[int, int], Counter[str]]:
    """Return the counts of a switch, by port and queue."""
    found: dict[tuple[int, int], Counter[str]] = {}
    for place, packets in account.events.items():
        if place.event in PACKETS_COUNTED and packets:
            found.setdefault((place.port, place.queue), Counter())[place.event] += packets
    for queue, packets in (account.tail_drops or {}).items():
        found.setdefault(queue, Counter())[TAIL_DROP] += packets
    return dict(sorted(found.items()))


def queues_table(fabric: Fabric, accounts: Mapping[str, SwitchAccount]) -> Table:
    """Return the packets at each queue of each port: where they went, or why they did not."""
    seen = {event for account in accounts.values() for counts in _by_queue(account).values() for event in counts}
    shown = {name: heading for name, heading in PACKETS_COUNTED.items() if name in seen or name in _ALWAYS}
    table = _table("port", "link", right=("queue", *shown.values()))
    for switch, account in accounts.items():
        for (port, queue), packets in _by_queue(account).items():
            numbers = [
                "-" if name == TAIL_DROP and account.tail_drops is None else str(packets[name]) for name in shown
            ]
            table.add_row(str(Port(switch, port)), _leads_to(fabric, switch, port), str(queue), *numbers)
    return table


def queue_lines(fabric: Fabric, accounts: Mapping[str, SwitchAccount]) -> list[str]:
    """Return the same as plain lines, one for each queue with packets."""
    return [
        f"{Port(switch, port)} ({_leads_to(fabric, switch, port)}) queue {queue}: "
        + ", ".join(f"{heading} {packets[name]}" for name, heading in PACKETS_COUNTED.items() if packets[name])
        for switch, account in accounts.items()
        for (port, queue), packets in _by_queue(account).items()
    ]


def _leads_to(fabric: Fabric, switch: str, port: int) -> str:
    neighbour = fabric.neighbours[switch].get(port)
    if neighbour is None:
        return "no link"
    return neighbour.host.name if neighbour.host is not None else str(neighbour.port)


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right")
    return table
