# SPDX-License-Identifier: Apache-2.0
"""Which of its addresses a rank has for which peer: the kernel's routes decide, never the name of a host.

A host's name often leads to its slowest network, or to 127.0.1.1. So each rank says from which address the kernel would
send to where the ranks meet. A rank of the machine where they meet cannot learn its address that way, for a machine
reaches itself at any of them; it asks for the route to each other rank instead. A rank between two networks has an
address for either, and then one socket for all of them.
"""

import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

from dlcp.collectives.choice import SERVER
from dlcp.session.options import Options
from dlcp.transport import Address, bind_socket, parse_address
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

ANY_ADDRESS: Final = "0.0.0.0"
"""What a socket is bound to that has several addresses: the kernel then sends from the one that a route says."""
_DISCARD_PORT: Final = 9


class RankPlace(NamedTuple):
    """Where a rank is, as far as it finds by itself.

    Attributes
    ----------
    address
        By the route to where the ranks meet, or as the options say.
    settled
        Whether it is the address for all peers.
    at_meeting
        Whether the ranks meet on this machine, so that no route tells which address others reach.
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
        The one for every peer that no other is for.
    toward
        The others, by peer.
    """

    main: str
    toward: Mapping[int, str] = field(default_factory=dict)


def meeting_host(options: Options, host: str | None = None) -> str:
    """Return the host whose route decides: a parameter server, else ``host``, else ``MASTER_ADDR``."""
    if options.collective == SERVER:
        return parse_address(options.server)[0]
    return host or os.environ.get("MASTER_ADDR", "127.0.0.1")


def own_place(options: Options, toward: str) -> RankPlace:
    """Return where this rank is, by its options or the route to a host.

    Raises
    ------
    OSError
        There is no such host, or no route to it.
    """
    if options.bind:
        return RankPlace(parse_address(options.bind)[0], settled=True)
    source, destination = _route(toward)
    # All that a parameter server's worker sends goes to the server.
    settled = options.collective == SERVER
    return RankPlace(source, settled=settled, at_meeting=_is_loopback(source) or source == destination)


def own_addresses(rank: int, places: Mapping[int, RankPlace]) -> OwnAddresses:
    """Return a rank's addresses for its peers, from where all ranks are."""
    own = places[rank]
    if own.settled:
        return OwnAddresses(own.address)
    remote = {}
    for peer, place in places.items():
        if peer == rank or (place.at_meeting and own.at_meeting):
            continue
        # Where ranks meet this rank has come to: by the route that its own place is from.
        source = own.address if place.at_meeting else source_toward(place.address, own.address)
        if source != place.address:  # else it is a rank of this machine
            remote[peer] = source
    found = sorted(set(remote.values()))
    main = own.address if own.address in found or not found else found[0]  # alike on all ranks of a machine
    return OwnAddresses(main, {peer: source for peer, source in remote.items() if source != main})


def source_toward(host: str, otherwise: str) -> str:
    """Return the address from which the kernel sends to a host, or ``otherwise`` where it knows no route."""
    with suppress(OSError):
        return _route(host)[0]
    return otherwise


def bind(options: Options, addresses: OwnAddresses) -> socket.socket:
    """Bind the port that the options name; else the first free one of DLCP's ports; else, with a warning, any port.

    Raises
    ------
    OSError
        The named port is in use, or the address is not this host's.
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
    """Return where other ranks reach this one, and the hosts that single peers reach it at instead.

    It is the advertised address, with the socket's own port if that has none.
    """
    if not options.advertise:
        return (addresses.main, port), addresses.toward
    host, _, given_port = options.advertise.partition(":")
    return (host, int(given_port) if given_port else port), {}


def _route(host: str) -> tuple[str, str]:
    """Return the address from which the kernel sends to a host, and the host's address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))  # sends nothing; asks the routing table
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])


def listening_host(host: str) -> str:
    """Return where to listen for those who know this machine as ``host``.

    That is there, unless it is a name that leads this machine alone to itself, as 127.0.1.1 does: then everywhere.
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
        "use other ports, and switches treat their packets as ordinary traffic",
        RuntimeWarning,
        stacklevel=2,
    )
