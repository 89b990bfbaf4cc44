# SPDX-License-Identifier: Apache-2.0
"""The whole examination: this machine, the options in force with their origin, and the paths to other machines."""

import contextlib
import errno
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from dlcp import __version__, native, wire
from dlcp.doctor import Diagnosis, Section, anything_missing, missing, note, ok
from dlcp.doctor.path import DOCTOR_PORT, PROBES, PeerError, describe, try_path
from dlcp.host import installed_version
from dlcp.host.interfaces import NetworkInterface, interface_of, interfaces, with_route_to
from dlcp.host.ip import FAMILIES, IPV4, IPV6, IpFamily, family_of, loopback, resolve
from dlcp.inputs import configuration
from dlcp.inputs.addresses import format_address, parse_address
from dlcp.inputs.configuration import FILE_VARIABLE, PREFIX, Setting
from dlcp.session.addresses import own_place, source_toward
from dlcp.session.options import Options
from dlcp.session.secret import configured_secret
from dlcp.transport import shared_memory
from dlcp.transport.path_mtu import payload_for_mtu
from dlcp.transport.shared_memory import SharedMemoryRendezvous
from dlcp.transport.sockets import SO_RCVBUFFORCE, UDP_GRO, UDP_SEGMENT

_MEET_S: Final = 2.0
OLDEST_PYTHON: Final = (3, 10)
OLDEST_TORCH: Final = (2, 9)
OLDEST_KERNEL: Final = (5, 0)
"""The first Linux with both UDP_SEGMENT (4.18) and UDP_GRO (5.0)."""


def examine_kernel() -> Diagnosis:
    """Report the operating system."""
    release = platform.release()
    data = {"system": platform.system(), "release": release, "machine": platform.machine()}
    if sys.platform != "linux":
        fix = "run the ranks on Linux, in a container or a virtual machine"
        return missing("system", f"{platform.system()} {release}: DLCP requires Linux", fix, **data)
    text = f"Linux {release}, {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs for this process"
    if version_of(release) < OLDEST_KERNEL:
        return note("system", text, "use kernel 5.0 or newer, which moves bursts of packets", **data)
    return ok("system", text, **data)


def examine_python() -> Diagnosis:
    """Report the versions of DLCP and of Python; the data include DLCP's compiled library."""
    found = platform.python_version()
    text = f"DLCP {__version__} on Python {found}, {sys.executable}"
    data = {"dlcp": __version__, "library": str(native.LIBRARY), "python": found}
    if sys.version_info < OLDEST_PYTHON:
        return missing("Python", text, "use Python 3.10 or newer", **data)
    return ok("Python", text, **data)


def examine_torch() -> Diagnosis:
    """Examine whether PyTorch is installed and has torch.distributed."""
    subject, found = "PyTorch", installed_version("torch")
    install = "pip install 'dlcp[torch]' (not needed for a switch or a parameter server)"
    if found is None:
        return missing(subject, "not installed", install, torch=found)
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return missing(subject, f"{found} does not load: {error}", install, torch=found)
    if version_of(found) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return missing(subject, f"{found} is too old", f"install PyTorch {oldest} or newer", torch=found)
    if not dist.is_available():
        fix = "install a build of PyTorch with USE_DISTRIBUTED=1"
        return missing(subject, f"{found} was built without torch.distributed", fix, torch=found)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    where = f"{devices} CUDA device{'s' * (devices != 1)}" if devices else "CPU"
    text = f"{found}, {where}, {', '.join(backends) or 'no backend'}"
    return ok(subject, text, torch=found, cuda_devices=devices, backends=backends)


def examine_extras() -> Diagnosis:
    """Report which optional packages are installed."""
    found = {name: installed_version(name) for name in ("numpy", "numba", "rich", "msgspec", "scikit-learn")}
    there = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    absent = ", ".join(name for name, version in found.items() if not version)
    return ok("packages", there + (f"; without {absent}" if absent else ""), packages=found)


def examine_shared_memory() -> Diagnosis:
    """Examine whether ranks of this machine can exchange packets through memory, by connecting two."""
    subject, fix = "shared memory", ""
    try:
        if not shared_memory.supported():
            why = "this Python has no memfd_create, eventfd or seals"
            fix = "use a Python that was built on a recent Linux"
        elif _two_meet():
            text = "ranks in one network namespace exchange packets through memory"
            return ok(subject, text, shared_memory=True)
        else:
            why = "two ranks could not connect"
    except OSError as error:
        why, fix = str(error), "in a container, use a seccomp profile that permits memfd_create and Unix sockets"
    return note(subject, f"{why}: ranks of this machine exchange packets through sockets", fix, shared_memory=False)


def _two_meet() -> bool:
    with SharedMemoryRendezvous() as first, SharedMemoryRendezvous() as second, ThreadPoolExecutor(2) as pool:
        common: dict[str, Any] = {"job": 0, "token": 1, "timeout_s": _MEET_S}
        met = [
            pool.submit(first.connect, 0, {1: second.name}, **common),
            pool.submit(second.connect, 1, {0: first.name}, **common),
        ]
        both = [each.result() for each in met]
    found = all(shared.ranks for shared in both)
    for shared in both:
        shared.close()
    return found


def examine_namespaces() -> Diagnosis:
    """Examine whether ``dlcp demo`` can give each worker a network namespace; training needs none."""
    from dlcp.host import netlab  # opens sockets that most examinations do not need

    works, reason = netlab.available()
    root = os.geteuid() == 0
    who = "root" if root else "not root"
    if works:
        text = f"{who}; network namespaces and veth links work"
    else:
        userns = Path("/proc/sys/user/max_user_namespaces")
        allowed = not root and userns.is_file() and int(userns.read_text()) > 0
        own = "; the demo tries a user namespace of its own" if allowed else ""
        text = f"{who}; no network namespaces ({reason}){own}; only the demo uses them, and can run without"
    return ok("namespaces", text, root=root, namespaces=works)


def version_of(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


SOL_UDP: Final = 17
SO_SNDBUFFORCE: Final = 32

WANTED_BUFFER_BYTES: Final = 8 << 20
"""The buffer that DLCP requests: some milliseconds at 10 Gbit/s. With less it works with smaller windows."""
ENOUGH_BUFFER_BYTES: Final = 425_984
"""Twice 212,992, the distributions' usual maximum, because the kernel grants double the amount."""
_SEGMENT_BYTES: Final = 1000
_SEGMENTS: Final = 8
_TIMEOUT_S: Final = 2.0
_NOWHERE: Final = {IPV4: ("224.0.0.1", 9), IPV6: ("ff01::1", 9)}
"""The multicast group of all hosts, and the discard port. With a TTL of 0 the kernel transmits nothing to IPv4's, as
the host belongs to it, but would to another. IPv6's never leaves the host."""


def examine_segmentation() -> Diagnosis:
    """Send a burst with one call (UDP_SEGMENT) over the loopback interface, and check the packets that arrive."""
    subject = "bursts out"
    with _udp() as receiver, _udp() as sender:
        try:
            sender.setsockopt(SOL_UDP, UDP_SEGMENT, _SEGMENT_BYTES)
            sender.sendto(bytes(_SEGMENT_BYTES * _SEGMENTS), receiver.getsockname())
            sizes = [len(receiver.recv(65536)) for _ in range(_SEGMENTS)]
        except OSError as error:
            text = f"UDP_SEGMENT does not work here ({error}): one system call per packet, three to ten times slower"
            fix = "use a Linux kernel of 4.18 or newer; in a container, a seccomp profile that permits setsockopt"
            return note(subject, text, fix, udp_segment=False)
    if sizes != [_SEGMENT_BYTES] * _SEGMENTS:
        return note(subject, f"UDP_SEGMENT cuts bursts wrongly: {sizes}", udp_segment=False)
    return ok(subject, "UDP_SEGMENT works", udp_segment=True)


def examine_coalescing() -> Diagnosis:
    """Receive a burst with one call (UDP_GRO) over the loopback interface."""
    subject = "bursts in"
    with _udp() as receiver, _udp() as sender:
        try:
            receiver.setsockopt(SOL_UDP, UDP_GRO, 1)
            with contextlib.suppress(OSError):
                sender.setsockopt(SOL_UDP, UDP_SEGMENT, _SEGMENT_BYTES)
            sender.sendto(bytes(_SEGMENT_BYTES * _SEGMENTS), receiver.getsockname())
            size, ancillary, _, _ = receiver.recvmsg_into([bytearray(65536)], 64)
        except OSError as error:
            text = f"UDP_GRO does not work here ({error}): one system call per packet"
            return note(subject, text, "use a Linux kernel of 5.0 or newer", udp_gro=False)
    segment = next((struct.unpack_from("i", value)[0] for level, kind, value in ancillary if kind == UDP_GRO), 0)
    if size != _SEGMENT_BYTES * _SEGMENTS or segment != _SEGMENT_BYTES:
        text = f"UDP_GRO is accepted, but {size} of {_SEGMENT_BYTES * _SEGMENTS} bytes came"
        return note(subject, text, udp_gro=False)
    return ok(subject, "UDP_GRO works", udp_gro=True)


def described(interface: NetworkInterface) -> str:
    """Describe an interface's speed and MTU."""
    kind = "virtual, " * (interface.virtual and not interface.loopback)
    return f"{kind}{interface.speed + ', ' if interface.speed else ''}MTU {interface.mtu_bytes}"


def examine_interface(interface: NetworkInterface) -> Diagnosis:
    """Report an interface's speed and MTU, and whether it takes bursts; without checksum offload some kernels give EIO.

    The burst goes to a multicast address that stays on this machine. The kernel processes it up to the point of
    transmission.
    """
    subject = f"interface {interface.name}"
    text = f"{interface.address}, {described(interface)}"
    data = {
        "interface": interface.name,
        "address": interface.address,
        "mtu_bytes": interface.mtu_bytes,
        "speed_mbps": interface.speed_mbps or None,
        "virtual": interface.virtual,
    }
    taken = None if interface.loopback or not interface.multicast else _takes_bursts(interface)
    if taken is None:
        return ok(subject, text, **data)
    if taken:
        return ok(subject, f"{text}, takes bursts", **data, bursts=True)
    text = f"{text}, refuses bursts (UDP_SEGMENT gives EIO): its checksum offload is off"
    fix = f"ethtool -K {interface.name} tx-checksum-ip-generic on; until then DLCP sends packet by packet there"
    return note(subject, text, fix, **data, bursts=False)


def examine_buffers() -> list[Diagnosis]:
    """Request socket buffers as DLCP does, and report the sizes that the kernel grants."""
    return [
        _examine_buffer("receive buffer", socket.SO_RCVBUF, SO_RCVBUFFORCE, "net.core.rmem_max"),
        _examine_buffer("send buffer", socket.SO_SNDBUF, SO_SNDBUFFORCE, "net.core.wmem_max"),
    ]


def examine_ports() -> Diagnosis:
    """Examine which of DLCP's UDP ports are free; every rank on this machine needs one."""
    ports = range(wire.UDP_PORT_BASE, wire.UDP_PORT_BASE + wire.UDP_PORT_COUNT)
    taken = [port for port in ports if not _is_free(port)]
    subject, text = "UDP ports", f"{ports[0]}-{ports[-1]}"
    data = {"ports": [ports[0], ports[-1]], "ports_taken": taken}
    if not taken:
        return ok(subject, f"{text} are free", **data)
    if len(taken) < len(ports):
        return ok(subject, f"{text}, {len(ports) - len(taken)} of them free on every address", **data)
    fix = "end the job that holds them (ss -ulpn), or give each rank another address with DLCP_BIND=HOST:PORT"
    return note(subject, f"all of {text} are in use", fix, **data)


def _examine_buffer(subject: str, option: int, force: int, sysctl: str) -> Diagnosis:
    forced = True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, force, WANTED_BUFFER_BYTES)
        except PermissionError:
            forced = False
            sock.setsockopt(socket.SOL_SOCKET, option, WANTED_BUFFER_BYTES)
        granted = sock.getsockopt(socket.SOL_SOCKET, option) // 2  # the kernel reports double the amount
    name = subject.replace(" ", "_")
    data = {f"{name}_granted_bytes": granted, f"{name}_asked_bytes": WANTED_BUFFER_BYTES}
    text = f"{_mebibytes(granted)} of {_mebibytes(WANTED_BUFFER_BYTES)} requested"
    if granted >= WANTED_BUFFER_BYTES:
        return ok(subject, text + (f", beyond {sysctl}, as root" if forced else ""), **data)
    fix = f"sysctl -w {sysctl}={WANTED_BUFFER_BYTES}"
    if 2 * granted < ENOUGH_BUFFER_BYTES:
        return note(subject, f"{text}: windows will be small", fix, **data)
    return ok(subject, f"{text}, enough for most links", fix, **data)


def _takes_bursts(interface: NetworkInterface) -> bool | None:
    """Return whether an interface takes a burst; None if that cannot be tested."""
    family = family_of(interface.address)
    with _udp(interface.address) as sock:
        try:
            if family is IPV4:
                sock.setsockopt(family.level, socket.IP_MULTICAST_TTL, 0)
                sock.setsockopt(family.level, socket.IP_MULTICAST_LOOP, 0)
                sock.setsockopt(family.level, socket.IP_MULTICAST_IF, socket.inet_aton(interface.address))
            else:
                sock.setsockopt(family.level, socket.IPV6_MULTICAST_IF, socket.if_nametoindex(interface.name))
            sock.setsockopt(SOL_UDP, UDP_SEGMENT, _SEGMENT_BYTES)
            sock.sendto(bytes(_SEGMENT_BYTES * 2), _NOWHERE[family])
        except OSError as error:
            return False if error.errno == errno.EIO else None
    return True


def _is_free(port: int) -> bool:
    for family in FAMILIES:
        if family.is_supported:
            with family.udp_socket() as sock:
                try:
                    sock.bind((family.any_address, port))
                except OSError:
                    return False
    return True


def _udp(host: str = "") -> socket.socket:
    host = host or loopback()
    sock = family_of(host).udp_socket()
    sock.bind((host, 0))
    sock.settimeout(_TIMEOUT_S)
    return sock


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.3g} MiB" if count >= 1 << 20 else f"{count / 1024:.0f} KiB"


_JUMBO_MTU_BYTES: Final = 9000


def examine(peers: Sequence[str], packets: int = PROBES) -> tuple[list[Section], list[Setting]]:
    """Examine this machine, the options, and the paths to ``peers``; return the findings and all options."""
    here = (examine_kernel, examine_namespaces, examine_shared_memory)
    python = (examine_python, examine_torch, examine_extras)
    udp = (examine_segmentation, examine_coalescing)
    sections = [
        Section("Machine", [safely(look) for look in here]),
        Section("Python", [safely(look) for look in python]),
        Section(
            "UDP",
            [
                *(safely(look) for look in udp),
                *examine_buffers(),
                safely(examine_ports),
                *(examine_interface(interface) for interface in interfaces()),
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
        peer = parse_address(text, DOCTOR_PORT, least_port=1)
        report = try_path(peer, packets)
    except PeerError as error:
        return Section(f"Path to {text}", [missing("answer", str(error), error.fix)])
    except (OSError, ValueError) as error:
        return Section(f"Path to {text}", [missing("answer", f"cannot be reached: {reason_of(error)}")])
    section = describe(report)
    section.findings.insert(0, examine_route(peer[0]))
    section.findings.extend(examine_payload(settings, report.mtu_bytes, "this path", report.family))
    return section


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
        place = own_place(options, (master or loopback(), 0))
    except OSError as error:
        text = f"there is no route to MASTER_ADDR={master}: {reason_of(error)}"
        return missing(subject, text, "set MASTER_ADDR to an address of rank 0's machine")
    if place.settled:
        try:
            with family_of(place.address).udp_socket() as tried:
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
    text = f"{address}, interface {used.name} ({described(used)}), {why}"
    better = _better(used) if host or not used.loopback else None
    if better is None:
        return ok(subject, text, **data)
    data |= {"faster_interface": better.name, "faster_speed_mbps": better.speed_mbps}
    text = f"{text}; {better.name} ({better.address}, {described(better)}) is faster"
    bind = format_address((better.address, 0))
    if host and better.name in with_route_to(resolve(host, family_of(better.address))[0]):
        text = f"{text} and has a route there, too"
        fix = f"give that route the smaller metric (ip route), or set DLCP_BIND={bind} here"
    else:
        meet = "meet at an address there (--rdzv-endpoint)"
        fix = f"if the other machines are on that network, {meet}, or set DLCP_BIND={bind}"
    return note(subject, text, fix, **data)


def _better(used: NetworkInterface) -> NetworkInterface | None:
    """Return the fastest interface if the one in use is slower or virtual, else None."""
    family = family_of(used.address)
    found = [each for each in interfaces() if family_of(each.address) is family and not each.loopback]
    others = [each for each in found if each.name != used.name]
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


def examine_payload(found: Sequence[Setting], mtu_bytes: int, where: str, family: IpFamily) -> list[Diagnosis]:
    """Compare the chosen packet size with the MTU of ``where``."""
    setting = next((setting for setting in found if setting.name == "payload_bytes"), None)
    if setting is None or not isinstance(setting.value, int) or not mtu_bytes:
        return []
    chosen, fits = setting.value, payload_for_mtu(min(mtu_bytes, _JUMBO_MTU_BYTES), family)
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
