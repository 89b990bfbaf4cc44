# SPDX-License-Identifier: Apache-2.0
"""The counters of a running switch as a table that keeps up with them."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dlcp.document import read_json

_EVERY_S: Final = 0.5
_TROUBLE: Final = (
    "refused",
    "malformed",
    "oversize",
    "undeliverable",
    "unreachable",
    "receive_errors",
    "send_errors",
    "overrun",
    "lost",
    "lost_arriving",
)


def watch(path: Path, alive: Callable[[], bool]) -> None:
    """Show the counters in a file for as long as ``alive`` says so, or until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before: dict[str, Any] | None = None
    with Live(Text(f"waiting for {path}"), auto_refresh=False) as live:
        try:
            while alive():
                snapshot = _read(path)
                if snapshot is not None and (before is None or snapshot["uptime_s"] != before["uptime_s"]):
                    live.update(render(snapshot, before), refresh=True)
                    before = snapshot
                time.sleep(_EVERY_S)
        except KeyboardInterrupt:
            return


def render(snapshot: dict[str, Any], before: dict[str, Any] | None = None) -> Group:
    """Return a snapshot as tables; rates are those since ``before``, or since the start."""
    if before is not None and before["uptime_s"] >= snapshot["uptime_s"]:
        before = None  # another switch writes there now
    elapsed_s = snapshot["uptime_s"] - (before["uptime_s"] if before else 0.0)
    table = Table(title=f"switch, up {snapshot['uptime_s']:.0f} s, busy {snapshot['busy']:.0%}", title_justify="left")
    for heading in ("port", "leads to", "queue"):
        table.add_column(heading)
    for heading in ("waiting", "longest", "sent", "Mbit/s", "tail drops"):
        table.add_column(heading, justify="right")
    earlier = {port["port"]: port for port in before["ports"]} if before else {}
    for port in snapshot["ports"]:
        name, leads_to = str(port["port"]), port["leads_to"]
        for queue in reversed(port["queues"]):
            if not queue["enqueued"] and not queue["tail_drops"]:
                continue
            sent_bytes = queue["transmitted_bytes"]
            if port["port"] in earlier:
                sent_bytes -= earlier[port["port"]]["queues"][queue["queue"]]["transmitted_bytes"]
            table.add_row(
                name,
                leads_to,
                str(queue["queue"]),
                str(queue["depth"]),
                str(queue["max_depth"]),
                str(queue["transmitted"]),
                f"{sent_bytes * 8e-6 / elapsed_s:.1f}" if elapsed_s else "",
                str(queue["tail_drops"]),
            )
            name = leads_to = ""
        if name:
            table.add_row(name, leads_to, "", "", "", "0", "", "0")
    return Group(table, Text(_events(snapshot)), Text(_troubles(snapshot), style="yellow"))


def _events(snapshot: dict[str, Any]) -> str:
    """Return the program's events in one line."""
    totals: dict[str, int] = {}
    for direction in ("ingress_events", "egress_events"):
        totals.update(snapshot["program"].get(direction, {}).get("totals", {}))
    return "program: " + (", ".join(f"{name} {count}" for name, count in totals.items()) or "nothing yet")


def _troubles(snapshot: dict[str, Any]) -> str:
    """Return what went wrong at the ports, a line each; empty when nothing did."""
    lines = []
    for port in snapshot["ports"]:
        found = [f"{name.replace('_', ' ')} {port[name]}" for name in _TROUBLE if port[name]]
        if found:
            lines.append(f"port {port['port']}: {', '.join(found)}")
    if snapshot["no_port"]:
        lines.append(f"sent to ports that do not exist: {snapshot['no_port']}")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    snapshot = read_json(path)
    if not isinstance(snapshot, dict) or not {"uptime_s", "busy", "ports", "program", "no_port"} <= snapshot.keys():
        raise ValueError(f"{path}: these are no counters of a switch; give the file of its --counters")
    return snapshot
