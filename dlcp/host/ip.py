# SPDX-License-Identifier: Apache-2.0
"""IPv4 and IPv6: what differs between their sockets, and the addresses of a host in either."""

import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class IpFamily:
    """A version of IP. The numbers are those of linux/in.h and linux/in6.h, which Python does not define everywhere.

    Attributes
    ----------
    number, level
        ``AF_...`` of its sockets, and ``IPPROTO_...`` of the options below.
    header_bytes
        Size of its header without options or extensions.
    sockaddr
        Format of a socket address in C: family, port and host.
    tos, receive_tos
        Control message with a packet's DSCP and ECN (type of service, or traffic class); the option that asks for it.
    info, receive_info
        The same for the address that a packet was sent to.
    mtu, mtu_discover
        Options: the path MTU of a connected socket, and whether the kernel may fragment.
    any_address
        Bind address of a socket that receives at every address.
    """

    name: str
    number: socket.AddressFamily
    level: int
    header_bytes: int
    sockaddr: str
    tos: int
    receive_tos: int
    info: int
    receive_info: int
    mtu: int
    mtu_discover: int
    any_address: str
    loopback: str

    @classmethod
    def of(cls, sock: socket.socket) -> "IpFamily":
        """Return the family of a socket."""
        return IPV6 if sock.family == socket.AF_INET6 else IPV4

    @property
    def is_supported(self) -> bool:
        """Whether this kernel has the family."""
        try:
            self.udp_socket().close()
        except OSError:
            return False
        return True

    def udp_socket(self) -> socket.socket:
        """Return a UDP socket of this family only, not yet bound.

        Raises
        ------
        OSError
            The kernel has no such family.
        """
        sock = socket.socket(self.number, socket.SOCK_DGRAM)
        if self.number == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        return sock

    def packed(self, host: str, port: int) -> bytes:
        """Return a numeric address as C's ``struct sockaddr_in`` or ``sockaddr_in6``."""
        return struct.pack(self.sockaddr, self.number, port.to_bytes(2, "big"), socket.inet_pton(self.number, host))

    def sent_from(self, info: bytes) -> bytes:
        """Return the control message that makes a packet leave from the address that ``info`` was received at."""
        return info[:16] + bytes(4) if self.number == socket.AF_INET6 else bytes(4) + info[8:12] + bytes(4)


IPV4: Final = IpFamily(
    "IPv4",
    socket.AF_INET,
    socket.IPPROTO_IP,
    header_bytes=20,
    sockaddr="=H2s4s8x",
    tos=1,
    receive_tos=13,
    info=8,
    receive_info=8,
    mtu=14,
    mtu_discover=10,
    any_address="0.0.0.0",
    loopback="127.0.0.1",
)
IPV6: Final = IpFamily(
    "IPv6",
    socket.AF_INET6,
    socket.IPPROTO_IPV6,
    header_bytes=40,
    sockaddr="=H2s4x16s4x",
    tos=67,
    receive_tos=66,
    info=50,
    receive_info=49,
    mtu=24,
    mtu_discover=23,
    any_address="::",
    loopback="::1",
)
FAMILIES: Final = (IPV4, IPV6)
PMTUDISC_PROBE: Final = 3
"""Value of ``mtu_discover`` in both: never fragment, and ignore the path MTU that the kernel has learned."""
LINK_LOCAL: Final = "is link-local, so it is valid on one link only; use a global or unique local address (fd00::/8)"
"""Why such an address is refused."""
UDP_BYTES: Final = 8
"""Size of the UDP header."""


def family_of(host: str) -> IpFamily:
    """Return the family of a numeric address."""
    return IPV6 if ":" in host else IPV4


def is_loopback(host: str) -> bool:
    """Return whether a numeric address leads to this machine only."""
    return ipaddress.ip_address(host).is_loopback


def resolve(host: str, family: IpFamily | None = None) -> list[str]:
    """Return the numeric addresses of a host, of one family or both, in the order in which to try them (RFC 6724).

    Raises
    ------
    OSError
        The host is unknown, has no address of that family, or has only a link-local one.
    """
    try:
        found = socket.getaddrinfo(host, None, family.number if family else 0, socket.SOCK_DGRAM)
    except UnicodeError:
        raise OSError(f"{host!r} is not a host name") from None
    except socket.gaierror as error:
        if family and error.errno in (socket.EAI_ADDRFAMILY, socket.EAI_NODATA, socket.EAI_NONAME):
            raise OSError(f"{host} has no {family.name} address") from None
        raise
    hosts = [str(address[0]) for number, *_, address in found if number in (socket.AF_INET, socket.AF_INET6)]
    if usable := [each for each in hosts if not is_link_local(each)]:
        return usable
    raise OSError(f"{host} {LINK_LOCAL}")


def is_link_local(host: str) -> bool:
    """Return whether a numeric IPv6 address is valid on one link only, and so needs a scope."""
    return family_of(host) is IPV6 and ipaddress.IPv6Address(host).is_link_local


def loopback() -> str:
    """Return the loopback address: of IPv4 if this network namespace has it, else of IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((IPV4.loopback, 0))
        except OSError:
            return IPV6.loopback
    return IPV4.loopback
