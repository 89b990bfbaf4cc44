# SPDX-License-Identifier: Apache-2.0
"""The whole examination: this machine, the options in force with their origin, and the paths to other machines."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dlcp.doctor import machine
from dlcp.doctor.findings import Diagnosis, Section, anything_missing, missing, note, ok
from dlcp.doctor.path import DOCTOR_PORT, PROBES, PeerError, describe, try_path
from dlcp.host.interfaces import NetworkInterface, interface_of, interfaces, with_route_to
from dlcp.inputs import configuration
from dlcp.inputs.configuration import FILE_VARIABLE, PREFIX, Setting, host_and_port
from dlcp.inputs.error_text import ipv4_only
from dlcp.session.addresses import own_place, source_toward
from dlcp.session.options import Options
from dlcp.session.secret import configured_secret
from dlcp.transport import Address
from dlcp.transport.path_mtu import payload_for_mtu

_JUMBO_MTU_BYTES: Final = 9000


def examine(peers: Sequence[str], packets: int = PROBES) -> tuple[list[Section], list[Setting]]:
    """Examine this machine, the options, and the paths to ``peers``; return the findings and all options."""
    here = (machine.examine_kernel, machine.examine_namespaces, machine.examine_shared_memory)
    python = (machine.examine_python, machine.examine_torch, machine.examine_extras)
    udp = (machine.examine_segmentation, machine.examine_coalescing)
    sections = [
        Section("Machine", [safely(look) for look in here]),
        Section("Python", [safely(look) for look in python]),
        Section(
            "UDP",
            [
                *(safely(look) for look in udp),
                *machine.examine_buffers(),
                safely(machine.examine_ports),
                *(machine.examine_interface(interface) for interface in interfaces()),
            ],
        ),
    ]
    options, settings = examine_options()
    paths = [examine_path(peer, packets, settings) for peer in peers]
    return [*sections, *paths, options], settings


def as_json(sections: Sequence[Section], settings: Sequence[Setting]) -> dict[str, Any]:
    """Return everything as one document."""
    return {
        "works": not anything_missing(sections),
        "sections": [
            {"title": section.title, "findings": [finding.as_json() for finding in section.findings]}
            for section in sections
        ],
        "options": [{"name": setting.name, "value": setting.value, "origin": setting.origin} for setting in settings],
    }


def examine_path(text: str, packets: int, settings: Sequence[Setting]) -> Section:
    """Examine the path to ``HOST[:PORT]``, where another doctor listens."""
    try:
        peer = parse_peer(text)
        report = try_path(peer, packets)
    except PeerError as error:
        return Section(f"Path to {text}", [missing("answer", str(error), error.fix)])
    except (OSError, ValueError) as error:
        return Section(
            f"Path to {text}",
            [missing("answer", f"cannot be reached: {ipv4_only(text.partition(':')[0]) or reason_of(error)}")],
        )
    section = describe(report)
    section.findings.insert(0, examine_route(peer[0]))
    section.findings.extend(examine_payload(settings, report.mtu_bytes, "this path"))
    return section


def parse_peer(text: str) -> Address:
    """Parse ``HOST[:PORT]``.

    Raises
    ------
    ValueError
        The port is not a number in 1..65535.
    """
    return host_and_port(text, DOCTOR_PORT, least_port=1)


def reason_of(error: Exception) -> str:
    """Return an error's message without its errno."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def safely(look: Callable[[], Diagnosis]) -> Diagnosis:
    """Run one examination; report an unexpected error as a note, so that the others still run."""
    try:
        return look()
    except (OSError, AttributeError) as error:
        subject = look.__name__.removeprefix("examine_").replace("_", " ")
        return note(subject, f"could not be examined: {error!r}")


def examine_options(environment: Mapping[str, str] | None = None) -> tuple[Section, list[Setting]]:
    """Return the findings about the options, and all options."""
    environment = os.environ if environment is None else environment
    section = Section("Options", [])
    try:
        path = configuration.file_in_force(environment)
        found = configuration.settings(Options, environment)
        options = configuration.build(Options, environment)
    except ValueError as error:
        section.findings.append(missing("options", str(error), "correct or remove it"))
        return section, []
    chosen = [setting for setting in found if not setting.is_default]
    where = f"file {path}" if path else f"no file (neither ./dlcp.toml nor {FILE_VARIABLE})"
    text = f"{len(chosen)} set, {len(found) - len(chosen)} at their defaults; {where}"
    section.findings.append(ok("origin", text, file=str(path) if path else None))
    section.findings.extend([examine_own_address(options, environment), examine_secret(options)])
    return section, found


def examine_own_address(options: Options, environment: Mapping[str, str]) -> Diagnosis:
    """Report the address and interface that a rank on this machine would use, and why."""
    subject, master = "own address", environment.get("MASTER_ADDR")
    try:
        place = own_place(options, master or "127.0.0.1")
    except OSError as error:
        text = f"there is no route to MASTER_ADDR={master}: {reason_of(error)}"
        return missing(subject, text, "set MASTER_ADDR to an IPv4 address of rank 0's machine")
    if place.settled:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
                tried.bind((place.address, 0))
        except (OSError, UnicodeError) as error:
            text = f"bind {options.bind!r} is not an address of this machine: {reason_of(error)}"
            return missing(subject, text, "set DLCP_BIND to one that `ip address` shows, or unset it")
        why = "as bind says"
    elif master and place.at_meeting:
        why = f"as MASTER_ADDR={master} is this machine; on two networks the routes to the other ranks decide"
    elif master:
        why = f"by the route to MASTER_ADDR={master}"
    else:
        why = "for ranks on this machine; between machines the route to MASTER_ADDR decides, which is not set"
    return _examine_choice(subject, place.address, why, None if place.settled or place.at_meeting else master)


def examine_route(host: str) -> Diagnosis:
    """Report the source address and interface of packets to a host."""
    return _examine_choice("route", source_toward(host, ""), f"by the route to {host}", host)


def _examine_choice(subject: str, address: str, why: str, host: str | None) -> Diagnosis:
    """Report the interface of an address, and whether another would be better for reaching ``host``."""
    used = interface_of(address)
    if used is None:
        return ok(subject, f"{address}, {why}", own_address=address, interface=None)
    data = {"own_address": address, "interface": used.name, "speed_mbps": used.speed_mbps or None}
    text = f"{address}, interface {used.name} ({machine.described(used)}), {why}"
    better = _better(used) if host or not used.loopback else None
    if better is None:
        return ok(subject, text, **data)
    data |= {"faster_interface": better.name, "faster_speed_mbps": better.speed_mbps}
    text = f"{text}; {better.name} ({better.address}, {machine.described(better)}) is faster"
    if host and better.name in with_route_to(socket.gethostbyname(host)):
        text = f"{text} and has a route there, too"
        fix = f"give that route the smaller metric (ip route), or set DLCP_BIND={better.address}:0 here"
    else:
        bind = f"DLCP_BIND={better.address}:0"
        fix = f"if the other machines are on that network, meet at an address there (--rdzv-endpoint), or set {bind}"
    return note(subject, text, fix, **data)


def _better(used: NetworkInterface) -> NetworkInterface | None:
    """Return the fastest interface if the one in use is slower or virtual, else None."""
    others = [each for each in interfaces() if each.name != used.name and not each.loopback]
    return max((each for each in others if used.slower_than(each)), key=lambda each: each.speed_mbps, default=None)


def examine_secret(options: Options) -> Diagnosis:
    """Report whether ranks authenticate each other by a secret when they meet."""
    try:
        given = configured_secret(options) is not None
    except (OSError, ValueError) as error:
        return missing("job's secret", reason_of(error), "see docs/security.md")
    text = f"{options.secret_file or 'DLCP_SECRET'}: ranks prove that they have it when they meet"
    if not given:
        text = "none: with PyTorch anyone who reaches MASTER_PORT can join; without PyTorch anyone with this user's key"
    return ok("job's secret", text, secret=given)


def examine_payload(found: Sequence[Setting], mtu_bytes: int, where: str) -> list[Diagnosis]:
    """Compare the chosen packet size with the MTU of ``where``."""
    setting = next((setting for setting in found if setting.name == "payload_bytes"), None)
    if setting is None or not isinstance(setting.value, int) or not mtu_bytes:
        return []
    chosen, fits = setting.value, payload_for_mtu(min(mtu_bytes, _JUMBO_MTU_BYTES))
    data = {"payload_bytes": chosen, "payload_bytes_that_fit": fits}
    subject, variable = "packet size", f"{PREFIX}PAYLOAD_BYTES"
    if not chosen:
        return [ok(subject, f"determined at the start: {fits} bytes of values here", **data)]
    if chosen > fits:
        text = f"{chosen} bytes of values ({setting.origin}) make packets too large for {where}"
        return [note(subject, text, f"unset {variable}, or set {variable}={fits} on every rank", **data)]
    if fits >= 2 * chosen:
        text = f"{chosen} bytes of values ({setting.origin}); {where} carries {fits}"
        return [note(subject, text, f"unset {variable}: fewer packets, less work", **data)]
    return [ok(subject, f"{chosen} bytes of values fit {where}", **data)]
