# SPDX-License-Identifier: Apache-2.0
"""Which of a rank's addresses each peer uses: the kernel's routes decide, never host names.

A host name often resolves to the host's slowest network, or to 127.0.1.1. So each rank publishes the source address of
its route to the meeting host, which serves the ranks' store. On the meeting host itself this does not work, because a
machine reaches itself at any of its addresses; ranks there look up the routes to the other ranks instead. A rank
between two networks has an address in each, and one socket for both.
"""

import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

from dlcp.inputs.error_text import ipv4_only
from dlcp.session.options import Options
from dlcp.transport import Address, bind_socket, parse_address
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

ANY_ADDRESS: Final = "0.0.0.0"
"""Bind address of a socket with several addresses: the kernel then chooses the source address by route."""
_DISCARD_PORT: Final = 9


class RankPlace(NamedTuple):
    """A rank's address, as far as the rank can find it by itself.

    Attributes
    ----------
    address
        The source address of the route to the meeting host, or the address that the options set.
    settled
        Whether all peers use this address.
    at_meeting
        Whether this machine is the meeting host, so that its route does not show which address other ranks reach.
    """

    address: str
    settled: bool = False
    at_meeting: bool = False


@dataclass(frozen=True, slots=True)
class OwnAddresses:
    """A rank's addresses.

    Attributes
    ----------
    main
        The address for all peers that are not in ``toward``.
    toward
        Other addresses, by the rank of the peer that uses them.
    """

    main: str
    toward: Mapping[int, str] = field(default_factory=dict)


def meeting_host(options: Options, host: str | None = None) -> str:
    """Return the host to which ranks look up their route: a parameter server, else ``host``, else ``MASTER_ADDR``."""
    if options.server:
        return parse_address(options.server)[0]
    return host or os.environ.get("MASTER_ADDR", "127.0.0.1")


def own_place(options: Options, toward: str) -> RankPlace:
    """Return this rank's place from its options, or from the route to the host ``toward``.

    Raises
    ------
    OSError
        The host is unknown, or there is no route to it.
    """
    if options.bind:
        return RankPlace(parse_address(options.bind)[0], settled=True)
    source, destination = _route(toward)
    # A parameter server's workers send only to the server.
    return RankPlace(source, settled=bool(options.server), at_meeting=_is_loopback(source) or source == destination)


def own_addresses(rank: int, places: Mapping[int, RankPlace]) -> OwnAddresses:
    """Return a rank's addresses for its peers, from the places of all ranks."""
    own = places[rank]
    if own.settled:
        return OwnAddresses(own.address)
    remote = {}
    for peer, place in places.items():
        if peer == rank or (place.at_meeting and own.at_meeting):
            continue
        # own.address is already the source address of the route to the meeting host.
        source = own.address if place.at_meeting else source_toward(place.address, own.address)
        if source != place.address:  # otherwise, the peer is on this machine
            remote[peer] = source
    found = sorted(set(remote.values()))
    main = own.address if own.address in found or not found else found[0]  # the same on all ranks of a machine
    return OwnAddresses(main, {peer: source for peer, source in remote.items() if source != main})


def source_toward(host: str, otherwise: str) -> str:
    """Return the address from which the kernel sends to a host, or ``otherwise`` if there is no route."""
    with suppress(OSError):
        return _route(host)[0]
    return otherwise


def bind(options: Options, addresses: OwnAddresses) -> socket.socket:
    """Bind the rank's UDP socket.

    Its port is the one in ``options.bind``, otherwise the first free one of DLCP's ports; if none of these is free, any
    port, with a warning.

    Raises
    ------
    OSError
        The port in ``options.bind`` is in use, or the address does not belong to this host.
    """
    host = ANY_ADDRESS if addresses.toward else addresses.main
    port = parse_address(options.bind)[1] if options.bind else 0
    if port:
        return bind_socket(host, [port])
    try:
        return bind_socket(host, range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT))
    except OSError:
        sock = bind_socket(host, [0])
    _warn_ports_in_use(host)
    return sock


def advertised(options: Options, addresses: OwnAddresses, port: int) -> tuple[Address, Mapping[int, str]]:
    """Return the address at which other ranks reach this one, and other hosts for single peers, by rank.

    ``options.advertise`` replaces both; if it has no port, the socket's own ``port`` is used.
    """
    if not options.advertise:
        return (addresses.main, port), addresses.toward
    host, _, given_port = options.advertise.partition(":")
    return (host, int(given_port) if given_port else port), {}


def _route(host: str) -> tuple[str, str]:
    """Return the address from which the kernel sends to a host, and the host's address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _DISCARD_PORT))  # sends nothing; only looks up the route
        except OSError as error:
            raise OSError(error.errno, ipv4_only(host) or error.strerror) from None
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])


def listening_host(host: str) -> str:
    """Return the address to listen on for clients that know this machine as ``host``.

    That is ``host``, unless it is a name that resolves to loopback only on this machine (127.0.1.1 in ``/etc/hosts``);
    then it is every address.
    """
    if host == "localhost" or _is_loopback(host):
        return host
    with suppress(OSError):
        return ANY_ADDRESS if _is_loopback(socket.gethostbyname(host)) else host
    return host


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


@cache
def _warn_ports_in_use(host: str) -> None:
    warnings.warn(
        f"DLCP's UDP ports {UDP_PORT_BASE}-{UDP_PORT_BASE + UDP_PORT_COUNT - 1} on {host} are all in use: some groups "
        "use other ports, where switches treat their packets as ordinary traffic",
        RuntimeWarning,
        stacklevel=2,
    )
