# SPDX-License-Identifier: Apache-2.0
"""What ``dlcp switch`` takes for P4Runtime. Imports what P4Runtime needs only when it is asked for."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dlcp.switch.p4runtime.device import Device, PacketLoop
    from dlcp.switch.p4runtime.server import P4RuntimeServer, TlsFiles
    from dlcp.switch.program import Backend, Program

INSTALL: Final = "pip install 'dlcp[p4runtime]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("controlled over P4Runtime")
    group.add_argument(
        "--p4runtime",
        metavar="[HOST:]PORT",
        help="take program and entries from a controller; listens on 127.0.0.1 unless HOST is given. Without --entries "
        "or --fabric the switch has no program, and drops everything, until the controller sends one",
    )
    group.add_argument("--device-id", type=int, default=1, metavar="N", help="what it calls this switch (default: 1)")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate of the switch, PEM")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="whose certificates controllers must have, PEM; all others are refused",
    )
    group.add_argument(
        "--insecure", action="store_true", help="talk plain text, to whoever can reach the address, instead of TLS"
    )


def starts_empty(arguments: argparse.Namespace) -> bool:
    """Whether the switch waits for a controller to send a program."""
    return arguments.p4runtime is not None and arguments.entries is None and arguments.fabric is None


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, before anything is opened."""
    files = [arguments.tls_cert, arguments.tls_key, arguments.tls_ca]
    if arguments.p4runtime is None:
        if arguments.insecure or any(files):
            raise ValueError("--tls-cert, --tls-key, --tls-ca and --insecure are about --p4runtime, which is not given")
        return
    if arguments.insecure and any(files):
        raise ValueError("--insecure and TLS files are given; which of the two is meant?")
    if not arguments.insecure and not all(files):
        raise ValueError("--p4runtime needs --tls-cert, --tls-key and --tls-ca, or --insecure for plain text")
    if arguments.device_id < 1:
        raise ValueError(f"--device-id {arguments.device_id}: give 1 or more")


def device(
    arguments: argparse.Namespace, switch: "PacketLoop", program: "Program | None", backend: "Backend"
) -> "Device":
    """Return the switch as controllers will see it.

    Parameters
    ----------
    program
        What it runs already, from the file ``--program``; its p4info is read from beside that file.

    Raises
    ------
    ValueError
        The package for P4Runtime, or the p4info, is missing, or is of another program.
    """
    try:
        from dlcp.switch.p4runtime.device import Device
        from dlcp.switch.p4runtime.pipeline import Pipeline
        from dlcp.switch.p4runtime.refusal import Refused
    except ImportError as error:
        raise ValueError(f"--p4runtime: {error}; install what it needs with: {INSTALL}") from None
    if program is None:
        return Device(switch, backend)
    try:
        return Device(switch, backend, Pipeline.of(program, arguments.program))
    except Refused as refusal:
        raise ValueError(f"{arguments.program}: {refusal}") from None


def serve(arguments: argparse.Namespace, device: "Device") -> "P4RuntimeServer":
    """Start the server; raises ValueError for an address that is none, OSError if it cannot listen there."""
    from dlcp.switch.p4runtime.server import P4RuntimeServer, make_way_for_packets, parse_address

    make_way_for_packets()
    return P4RuntimeServer(device, parse_address(arguments.p4runtime), arguments.device_id, _tls(arguments))


def _tls(arguments: argparse.Namespace) -> "TlsFiles | None":
    from dlcp.switch.p4runtime.server import TlsFiles

    if arguments.insecure:
        return None
    return TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
