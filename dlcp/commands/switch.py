# SPDX-License-Identifier: Apache-2.0
"""``dlcp switch``: run the built-in switch, or show the counters of a running one."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from dlcp.commands.common import DEPTH_MAX, DURATIONS, add, real, whole
from dlcp.inputs.configuration import Range

_PortSetting: TypeAlias = tuple[int | None, float]
"""A port, or None for all ports, and its value from the command line."""
_RATE_BPS: Final = Range(0.0, 1e12)
_DEPTH_PACKETS: Final = Range(0, DEPTH_MAX)
_LAST_PORT: Final = 65_535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp switch``."""
    what = parser.add_argument_group("what to connect (one of these)").add_mutually_exclusive_group()
    add(what, "--fabric", "FILE", Path, "a fabric and its policy, as YAML or JSON")
    add(parser, "--name", "SWITCH", str, "which switch of the fabric to run, if it has several")
    add(what, "--hosts", "N", whole(0, 250), "N processes of this machine, over 127.0.0.0/8")
    port = "one port; may be repeated; requires --entries or --p4runtime"
    add(what, "--port", "N=loopback|N=packet:INTERFACE", str, port, action="append")
    how = parser.add_argument_group("how to switch")
    add(how, "--entries", "FILE", Path, "table entries and queues, as JSON")
    rate = "rate of every port, or of one, in bit/s; may be repeated"
    add(how, "--rate-bps", "[PORT=]RATE", _setting(_RATE_BPS), rate, action="append")
    depth = "depth of every queue, or of those of one port, in packets; may be repeated"
    add(how, "--depth-packets", "[PORT=]PACKETS", _setting(_DEPTH_PACKETS), depth, action="append")
    add(how, "--program", "FILE", Path, "compiled program, as BMv2's JSON (default: DLCP's own)")
    how.add_argument(
        "--backend",
        choices=("auto", "python", "numba"),
        default="auto",
        help="plain Python, or compiled by Numba, which pays from some 20,000 packets/s (default: numba for network "
        "interfaces, if installed)",
    )
    control = parser.add_argument_group("controlled over P4Runtime")
    served = (
        "accept program and entries from a controller; listens on 127.0.0.1 unless HOST is given. Without --entries "
        "or --fabric, the switch drops all packets until the controller sends a program"
    )
    add(control, "--p4runtime", "[HOST:]PORT", str, served)
    device = "the controller's number for this switch"
    add(control, "--device-id", "N", whole(1, (1 << 63) - 1), device, default=1)
    add(control, "--tls-cert", "FILE", Path, "certificate of the switch, PEM")
    add(control, "--tls-key", "FILE", Path, "its private key, PEM")
    add(
        control, "--tls-ca", "FILE", Path, "CA that must have signed controllers' certificates, PEM; others are refused"
    )
    insecure = "use plain text instead of TLS; anyone who can reach the address can control the switch"
    control.add_argument("--insecure", action="store_true", help=insecure)
    look = parser.add_argument_group("counters")
    add(look, "--counters", "FILE", Path, "write all counters to a file, as JSON")
    add(look, "--counters-every", "SECONDS", real(DURATIONS), "interval of writes", default=1.0)
    watch = "show the counters; with --counters alone, those of a running switch"
    look.add_argument("--watch", action="store_true", help=watch)
    add(look, "--write-entries", "FILE", Path, "write the entries to a file and exit")


def _setting(allowed: Range) -> Callable[[str], _PortSetting]:
    """Return a type for argparse: ``VALUE`` or ``PORT=VALUE``."""
    value_of, port_of = real(allowed), whole(0, _LAST_PORT)

    def convert(word: str) -> _PortSetting:
        port, equals, value = word.rpartition("=")
        return port_of(port) if equals else None, value_of(value)

    return convert


def run(arguments: argparse.Namespace) -> int:
    """Run the switch, show its counters or write its entries; return the exit status."""
    from dlcp.commands.actions import switch

    return switch.run(arguments)
