# SPDX-License-Identifier: Apache-2.0
"""Actions of ``dlcp testbed`` on a testbed that is up: look into it, follow packets, break and mend parts."""

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from dlcp.commands.common import DURATIONS, MBPS, add, check_writable, real, whole
from dlcp.inputs.configuration import Range

if TYPE_CHECKING:
    from dlcp.controller.testbed.layout import TestbedState

_SHARE: Final = Range(0.0, 1.0)
_SECONDS: Final = 10.0
_FRAMES: Final = 100_000
"""Most frames of a capture by default: 150 MB of full ones, which are in memory until it ends."""


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Declare the actions with their own options, and return their parsers."""
    shell = commands.add_parser("shell", help="open a shell in a host's or switch's network, or run a command there")
    shell.add_argument("host", metavar="HOST", help="host or switch")
    shell.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="command and arguments")
    ping = commands.add_parser("ping", help="ping between all hosts, or two; exit status 1 if an answer is missing")
    ping.add_argument("hosts", nargs="*", metavar="HOST", help="two hosts (default: all pairs)")
    add(ping, "--count", "N", whole(1, 1000), "echo requests per pair", default=2)
    add(ping, "--deadline", "SECONDS", real(DURATIONS), "longest wait for an answer", default=2.0)
    capture = commands.add_parser("capture", help="write a link's packets into a file for Wireshark, and count them")
    capture.add_argument("where", metavar="WHERE", help="the link: HOST or SWITCH:PORT")
    add(capture, "--out", "FILE", Path, "capture file (default: WHERE.pcap)")
    add(capture, "--seconds", "S", real(DURATIONS), "how long", default=_SECONDS)
    add(capture, "--count", "N", whole(1), "most packets", default=_FRAMES)
    trace = commands.add_parser("trace", help="send tagged packets, and count at each switch how many arrived and left")
    trace.add_argument("hosts", nargs=2, metavar="HOST", help="sender and receiver")
    add(trace, "--count", "N", whole(1, 100_000), "packets", default=100)
    add(trace, "--job", "N", whole(0, 0xFFFF), "job in their header", default=0)
    add(trace, "--queue", "N", whole(0, 7), "queue in their header", default=6)
    add(trace, "--drop-class", "N", whole(0, 7), "drop class in their header; 0 is never dropped by policy", default=0)
    add(trace, "--rate-mbps", "RATE", real(MBPS), "rate at which they are sent", default=2.0)
    for name, purpose in (("break", "take down a link or a switch"), ("mend", "bring it back, as the fabric has it")):
        parts = commands.add_parser(name, help=purpose)
        parts.add_argument("part", choices=["link", "switch"])
        parts.add_argument("names", nargs="+", metavar="NAME", help="a switch; for a link, one or both ends")
    slow = commands.add_parser("slow", help="change the rate, delay or loss of a link that is in use")
    slow.add_argument("names", nargs="+", metavar="END", help="one or both ends: HOST, SWITCH or SWITCH:PORT")
    add(slow, "--rate-mbps", "RATE", real(MBPS), "rate in both directions")
    add(slow, "--delay-ms", "MS", real(Range(0.0, 60_000.0)), "delay away from each switch")
    add(slow, "--loss", "SHARE", real(_SHARE), "share of packets lost in each direction")
    own: list[argparse.ArgumentParser] = [commands.choices[name] for name in ACTIONS]
    return own


def _shell(arguments: argparse.Namespace, state: "TestbedState") -> int:
    from dlcp.controller.testbed.layout import HostLayout, SwitchLayout

    nodes: dict[str, HostLayout | SwitchLayout] = {node.name: node for node in state.layout.hosts}
    nodes |= {node.name: node for node in state.layout.switches}
    node = nodes.get(arguments.host) or state.layout.host(arguments.host)
    command = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    words = command or [os.environ.get("SHELL", "/bin/sh")]
    if not command:
        print(f"a shell in the network of {node.name}; `exit` leaves it", flush=True)
    os.execvp("ip", ["ip", "netns", "exec", node.namespace, *words])


def _ping(arguments: argparse.Namespace, state: "TestbedState") -> int:
    from rich.table import Table

    from dlcp.commands.fabric import console
    from dlcp.controller.testbed.probes import ping

    if len(arguments.hosts) not in (0, 2):
        raise ValueError("ping takes two hosts, or none for all pairs")
    hosts = [state.layout.host(name) for name in arguments.hosts] or list(state.layout.hosts)
    senders, receivers = (hosts[:1], hosts[1:]) if arguments.hosts else (hosts, hosts)
    pairs = [(a, b) for a in senders for b in receivers if a is not b]
    found = {(each.sender, each.receiver): each for each in ping(pairs, arguments.count, arguments.deadline)}
    names = [host.name for host in receivers]
    table = Table("from, to", *names, title="round trip, ms", title_justify="left")
    for host in senders:
        cells = []
        for name in names:
            each = found.get((host.name, name))
            lost = each is not None and each.answered < each.sent
            rtt = "" if each is None or each.rtt_ms is None else f"{each.rtt_ms:.1f}"
            cells.append(f"[red]{each.sent - each.answered}/{each.sent} lost[/] {rtt}" if each and lost else rtt)
        table.add_row(host.name, *cells)
    console().print(table)
    missing = [each for each in found.values() if each.answered < each.sent]
    print(f"{len(found) - len(missing)} of {len(found)} pairs answered all requests")
    return 1 if missing else 0


def _capture(arguments: argparse.Namespace, state: "TestbedState") -> int:
    from collections import Counter

    from dlcp.controller.testbed.probes import capture, kind_of, write_pcap
    from dlcp.wire.dissector import DISSECTOR_PATH

    out = arguments.out or Path(f"{arguments.where.replace(':', '-')}.pcap")
    check_writable("--out", out)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"capturing at {arguments.where} for {arguments.seconds:g} s; Ctrl-C ends it", flush=True)
    frames, missed = capture(state, arguments.where, arguments.seconds, arguments.count, stopped)
    write_pcap(out, frames)
    packets: Counter[tuple[str, str]] = Counter()
    octets: Counter[tuple[str, str]] = Counter()
    for frame in frames:
        kind = (str(frame.end), kind_of(frame.data))
        packets[kind] += 1
        octets[kind] += len(frame.data)
    for kind, count in sorted(packets.items()):
        print(f"  to {kind[0]:<10} {kind[1]:<40} {count:>8} packets {octets[kind]:>12} bytes")
    if missed:
        print(f"  {missed} more came too fast to be captured")
    print(f"{len(frames)} packets in {out}; open it with: wireshark -X lua_script:{DISSECTOR_PATH} {out}")
    return 0


def _trace(arguments: argparse.Namespace, state: "TestbedState") -> int:
    from dlcp.controller.display import queue_lines
    from dlcp.controller.testbed.lifecycle import fabric_of
    from dlcp.controller.testbed.probes import TaggedFlow, trace

    sender, receiver = (state.layout.host(name) for name in arguments.hosts)
    if sender is receiver:
        raise ValueError("trace takes two different hosts")
    flow = TaggedFlow(arguments.count, arguments.job, arguments.queue, arguments.drop_class, arguments.rate_mbps * 1e6)
    fabric = fabric_of(arguments.name)
    found = trace(state, fabric, sender, receiver, flow)
    tags = f"job {flow.job}, queue {flow.queue}, drop class {flow.drop_class}"
    print(f"{sender.name} sent {found.sent} packets to {receiver.name}: {tags}")
    for hop in found.hops:
        print(f"  {hop.switch}: {hop.arrived} arrived, {hop.left} left")
        counted = queue_lines(fabric, {hop.switch: hop.account}) if hop.account else []
        for line in (*counted, *hop.notes):
            print(f"    {line}")
    print(f"{receiver.name} received {found.received}")
    return 0 if found.received == found.sent else 1


def _break(arguments: argparse.Namespace, state: "TestbedState") -> int:
    from dlcp.controller.testbed.faults import break_links, break_switch

    return _each_part(arguments, state, "down", break_links, break_switch)


def _mend(arguments: argparse.Namespace, state: "TestbedState") -> int:
    from dlcp.controller.testbed.faults import mend_links, mend_switch

    return _each_part(arguments, state, "up", mend_links, mend_switch)


def _each_part(
    arguments: argparse.Namespace,
    state: "TestbedState",
    result: str,
    links: Callable[..., list[Any]],
    switch: Callable[..., None],
) -> int:
    if arguments.part == "switch":
        for name in arguments.names:
            switch(state, name)
            print(f"switch {name} is {result}")
    else:
        for a, b in links(state, _link_ends(arguments)):
            print(f"link {a} - {b} is {result}")
    return 0


def _slow(arguments: argparse.Namespace, state: "TestbedState") -> int:
    from dlcp.controller.testbed.faults import change_links, changes

    if arguments.rate_mbps is arguments.delay_ms is arguments.loss is None:
        raise ValueError("slow needs --rate-mbps, --delay-ms or --loss")
    change_links(
        state,
        _link_ends(arguments),
        rate_bps=None if arguments.rate_mbps is None else round(arguments.rate_mbps * 1e6),
        delay_s=None if arguments.delay_ms is None else arguments.delay_ms / 1e3,
        loss=arguments.loss,
    )
    print("\n".join(changes(state)) or "all links are as the fabric has them")
    return 0


def _link_ends(arguments: argparse.Namespace) -> list[str]:
    if len(arguments.names) > 2:
        raise ValueError("a link has two ends: give one or two names")
    names: list[str] = arguments.names
    return names


def watch(name: str) -> int:
    """Show the counters of a testbed's switches until a signal; return the exit status."""
    from dlcp.commands.fabric import watch_counters
    from dlcp.controller.compiled_program import CompiledProgram
    from dlcp.controller.testbed.accounts import tail_drops
    from dlcp.controller.testbed.layout import StateFile
    from dlcp.controller.testbed.lifecycle import fabric_of

    def read(switch: str) -> dict[tuple[int, int], int] | None:
        path = StateFile(name).counters(switch)
        return tail_drops(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    return watch_counters(fabric_of(name), CompiledProgram(), 1.0, read)


def _on_running(action: Callable[[argparse.Namespace, "TestbedState"], int]) -> Callable[[argparse.Namespace], int]:
    """Return an action that first finds the testbed."""

    def act(arguments: argparse.Namespace) -> int:
        from dlcp.controller.testbed.lifecycle import find

        return action(arguments, find(arguments.name))

    return act


ACTIONS: Final = {
    "shell": _on_running(_shell),
    "ping": _on_running(_ping),
    "capture": _on_running(_capture),
    "trace": _on_running(_trace),
    "break": _on_running(_break),
    "mend": _on_running(_mend),
    "slow": _on_running(_slow),
}
"""The actions, by their names."""
