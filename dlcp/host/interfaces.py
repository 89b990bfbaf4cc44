# SPDX-License-Identifier: Apache-2.0
"""The network interfaces of this machine: addresses, MTU, speed, and which of them have a route to a host."""

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFMTU = 0x8912, 0x8913, 0x8921
_IFF_UP, _IFF_LOOPBACK, _IFF_MULTICAST = 0x1, 0x8, 0x1000
_RTF_UP, _RTF_REJECT = 0x1, 0x200
_IFREQ_BYTES: Final = 40
_ADDRESSES_MAX: Final = 1024
SYSFS: Final = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """A network interface that is up, with one of its IPv4 addresses.

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
    """Return the interfaces that are up, once for each of their IPv4 addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, address in _addresses(sock):
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
    default = with_route_to("0.0.0.0")
    found = [each for each in found if each.name in default] or found
    return found[0] if len({each.name for each in found}) == 1 else None


def with_route_to(host: str) -> set[str]:
    """Return the names of the interfaces that a route to an IPv4 address uses, the best and all others."""
    number = int(ipaddress.IPv4Address(host))
    found = set()
    for line in Path("/proc/thread-self/net/route").read_text(encoding="ascii").splitlines()[1:]:
        name, destination, _, flags, _, _, _, mask, *_ = line.split()
        wanted, kept = (int.from_bytes(bytes.fromhex(field), "little") for field in (destination, mask))
        if int(flags, 16) & (_RTF_UP | _RTF_REJECT) == _RTF_UP and number & kept == wanted:
            found.add(name)
    return found


def _addresses(sock: socket.socket) -> list[tuple[str, str]]:
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
