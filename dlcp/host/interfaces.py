# SPDX-License-Identifier: Apache-2.0
"""The network interfaces of this machine: addresses, MTU, speed, and which of them have a route to a host."""

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dlcp.host.ip import FAMILIES, IPV6, family_of, is_link_local

_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFMTU = 0x8912, 0x8913, 0x8921
_IFF_UP, _IFF_LOOPBACK, _IFF_MULTICAST = 0x1, 0x8, 0x1000
_RTF_UP, _RTF_REJECT, _RTF_LOCAL = 0x1, 0x200, 0x80000000
_IFREQ_BYTES: Final = 40
_ADDRESSES_MAX: Final = 1024
SYSFS: Final = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """A network interface that is up, with one of its addresses.

    Attributes
    ----------
    speed_mbps
        Speed according to the driver, in Mbit/s; 0 if unknown.
    virtual
        Whether it is not a device of the machine, but a bridge, a tunnel, or one end of a pair.
    """

    name: str
    address: str
    mtu_bytes: int
    loopback: bool
    multicast: bool
    speed_mbps: int = 0
    virtual: bool = False

    @property
    def speed(self) -> str:
        """Speed for people; ``""`` if unknown."""
        if not self.speed_mbps:
            return ""
        return f"{self.speed_mbps / 1000:g} Gbit/s" if self.speed_mbps >= 1000 else f"{self.speed_mbps} Mbit/s"

    def slower_than(self, other: "NetworkInterface") -> bool:
        """Return whether another one is certainly faster; False if that is not known."""
        if self.speed_mbps and other.speed_mbps:
            return self.speed_mbps < other.speed_mbps
        return self.virtual and not other.virtual and other.speed_mbps > 0


def interfaces() -> list[NetworkInterface]:
    """Return the interfaces that are up, once for each of their addresses: IPv4, then IPv6 except link-local."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, address in [*_ipv4_addresses(sock), *_ipv6_addresses()]:
            with contextlib.suppress(OSError):  # removed since
                flags = struct.unpack_from("H", _ask(sock, _SIOCGIFFLAGS, name), 16)[0]
                mtu_bytes = struct.unpack_from("i", _ask(sock, _SIOCGIFMTU, name), 16)[0]
                if flags & _IFF_UP:
                    loopback, multicast = bool(flags & _IFF_LOOPBACK), bool(flags & _IFF_MULTICAST)
                    virtual = "/virtual/" in str((SYSFS / name).resolve())
                    found.append(
                        NetworkInterface(name, address, mtu_bytes, loopback, multicast, _speed_mbps(name), virtual)
                    )
    return found


def interface_of(address: str) -> NetworkInterface | None:
    """Return the interface with an address, or None."""
    return next((each for each in interfaces() if each.address == address), None)


def only_way_out() -> NetworkInterface | None:
    """Return the interface of the default route, or the only one that is not loopback; None if there are several."""
    found = [each for each in interfaces() if not each.loopback]
    default = {name for family in FAMILIES for name in with_route_to(family.any_address)}
    found = [each for each in found if each.name in default] or found
    return found[0] if len({each.name for each in found}) == 1 else None


def with_route_to(host: str) -> set[str]:
    """Return the names of the interfaces that a route to a numeric address uses, the best and all others."""
    address = ipaddress.ip_address(host)
    routes = _ipv6_routes() if family_of(host) is IPV6 else _ipv4_routes()
    return {
        name
        for name, network, flags in routes
        if int(flags, 16) & (_RTF_UP | _RTF_REJECT) == _RTF_UP and address in ipaddress.ip_network(network)
    }


def _ipv4_routes() -> Iterator[tuple[str, str, str]]:
    """Yield interface, network and flags of each IPv4 route."""
    for line in _lines("route")[1:]:
        name, destination, _, flags, _, _, _, mask, *_ = line.split()
        network, kept = (socket.inet_ntoa(bytes.fromhex(field)[::-1]) for field in (destination, mask))
        yield name, f"{network}/{kept}", flags


def _ipv6_routes() -> Iterator[tuple[str, str, str]]:
    """Yield interface, network and flags of each IPv6 route, except those to addresses of this machine."""
    for line in _lines("ipv6_route"):
        destination, bits, *_, flags, name = line.split()
        if not int(flags, 16) & _RTF_LOCAL:
            yield name, f"{_ipv6(destination)}/{int(bits, 16)}", flags


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return the names of interfaces, and their IPv6 addresses that are valid beyond a link."""
    lines = (line.split() for line in _lines("if_inet6"))
    found = [(name, _ipv6(address)) for address, _, _, _, _, name in lines]
    return [(name, address) for name, address in found if not is_link_local(address)]


def _ipv6(digits: str) -> str:
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _lines(name: str) -> list[str]:
    """Return the lines of a kernel table of the calling thread's network namespace; none without that family."""
    path = Path("/proc/thread-self/net", name)
    return path.read_text(encoding="ascii").splitlines() if path.exists() else []


def _ipv4_addresses(sock: socket.socket) -> list[tuple[str, str]]:
    """Return all IPv4 addresses with the names of their interfaces; see netdevice(7)."""
    buffer = array.array("B", bytes(_IFREQ_BYTES * _ADDRESSES_MAX))
    start, size = buffer.buffer_info()
    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iP", size, start))
    entries = buffer.tobytes()[: struct.unpack_from("i", answer)[0]]
    return [
        (entry[:16].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24]))  # eth0:1 is on eth0
        for entry in (entries[at : at + _IFREQ_BYTES] for at in range(0, len(entries), _IFREQ_BYTES))
    ]


def _speed_mbps(name: str) -> int:
    try:
        return max(0, int((SYSFS / name / "speed").read_text(encoding="ascii")))  # -1: the driver does not know
    except (OSError, ValueError):  # not a device, or one without a speed
        return 0


def _ask(sock: socket.socket, request: int, name: str) -> bytes:
    """Ask the kernel about an interface; see netdevice(7)."""
    return fcntl.ioctl(sock.fileno(), request, struct.pack("40s", name.encode()))
