# SPDX-License-Identifier: Apache-2.0
"""Which of a rank's addresses each peer uses: the kernel's routes decide, never host names.

A host name often resolves to the host's slowest network, or to 127.0.1.1. So each rank publishes the source address of
its route to the meeting host, which serves the ranks' store. On the meeting host itself this does not work, because a
machine reaches itself at any of its addresses; ranks there look up the routes to the other ranks instead. A rank
between two networks has an address in each, and one socket for both.

All ranks use one family, IPv4 or IPv6: that in which they reach the meeting host.
"""

import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

from dlcp.host.ip import IPV4, LINK_LOCAL, family_of, is_link_local, is_loopback, loopback, resolve
from dlcp.inputs.addresses import format_address, parse_address
from dlcp.session.options import Options
from dlcp.transport import Address, bind_socket
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

DEFAULT_MASTER_PORT: Final = 29500
"""The default of PyTorch's launcher."""
_DISCARD_PORT: Final = 9


class RankPlace(NamedTuple):
    """A rank's address, as far as the rank can find it by itself.

    Attributes
    ----------
    address
        The source address of the route to the meeting host, or the address that the options set; numeric.
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


def master_address() -> Address:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT``, by default PyTorch's on this machine.

    Raises
    ------
    ValueError
        ``MASTER_PORT`` is not a port.
    """
    host, port = os.environ.get("MASTER_ADDR") or loopback(), os.environ.get("MASTER_PORT", str(DEFAULT_MASTER_PORT))
    try:
        return host, parse_address(f"host:{port}")[1]
    except ValueError:
        raise ValueError(f"MASTER_PORT must be a port, got {port!r}") from None


def meeting_point(options: Options, master: Address | None = None) -> Address:
    """Return the address to which ranks look up their route: a parameter server's, else ``master``, else the default.

    The default is :func:`master_address`.
    """
    return parse_address(options.server, UDP_PORT_BASE) if options.server else master or master_address()


def own_place(options: Options, toward: Address) -> RankPlace:
    """Return this rank's place from its options, or from the route to the meeting host ``toward``.

    Raises
    ------
    OSError
        The host is unknown, there is no route to it, or its address or the own one is link-local.
    """
    if options.bind:
        return RankPlace(resolve(parse_address(options.bind, 0)[0])[0], settled=True)
    source, destination = route_to(toward)
    if is_link_local(source):
        raise OSError(f"this machine reaches {destination} from {source}, which {LINK_LOCAL}")
    # A parameter server's workers send only to the server.
    return RankPlace(source, settled=bool(options.server), at_meeting=is_loopback(source) or source == destination)


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


def family_clash(hosts: Mapping[int, str]) -> str:
    """Return why ranks with these addresses, by rank, cannot reach each other: their families differ; else ``""``.

    Loopback addresses count only if there are no others: ranks at the meeting host find theirs later.
    """
    distinct = {rank: host for rank, host in sorted(hosts.items()) if not is_loopback(host)} or hosts
    first, *others = distinct
    for rank in others:
        if family_of(distinct[rank]) is not family_of(distinct[first]):
            return (
                f"rank {first} has an address of {family_of(distinct[first]).name} ({distinct[first]}), and rank "
                f"{rank} one of {family_of(distinct[rank]).name} ({distinct[rank]}), but all ranks must use one "
                "family: set MASTER_ADDR to an address that all reach in the same one, instead of a name that has both"
            )
    return ""


def source_toward(host: str, otherwise: str) -> str:
    """Return the address from which the kernel sends to a host, or ``otherwise`` if there is no route."""
    with suppress(OSError):
        return route_to((host, 0))[0]
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
    # With several addresses, the kernel chooses the source address by route.
    host = family_of(addresses.main).any_address if addresses.toward else addresses.main
    port = parse_address(options.bind, 0)[1] if options.bind else 0
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

    Raises
    ------
    OSError
        The host in ``options.advertise`` is unknown, or has no address of this rank's family.
    """
    if not options.advertise:
        return (addresses.main, port), addresses.toward
    host, port = parse_address(options.advertise, port)
    return (resolve(host, family_of(addresses.main))[0], port), {}


def route_to(toward: Address) -> tuple[str, str]:
    """Return the address from which the kernel sends to a host, and the host's numeric address.

    Of several addresses it is the one that this process is connected to at the port, else the first with a route.

    Raises
    ------
    OSError
        The host is unknown, or there is no route to it.
    """
    host, port = toward
    found, failures = resolve(host), []
    if len(found) > 1:
        from dlcp.session.tcp_links import tcp_connections  # needed for hosts with several addresses only

        connected = {ends.peer for ends in tcp_connections()}
        found.sort(key=lambda each: format_address((each, port)) not in connected)
    for destination in found:
        with family_of(destination).udp_socket() as probe:
            try:
                probe.connect((destination, _DISCARD_PORT))  # sends nothing; only looks up the route
            except OSError as error:
                failures.append(error)
            else:
                return str(probe.getsockname()[0]), destination
    raise failures[0]


def listening_host(host: str) -> str:
    """Return the address to listen on for clients that know this machine as ``host``.

    That is ``host``, unless it is a name that resolves to loopback only on this machine (127.0.1.1 in ``/etc/hosts``);
    then it is every address, of both families.
    """
    with suppress(OSError):
        found = resolve(host)
        if host not in (*found, "localhost") and all(map(is_loopback, found)):
            return IPV4.any_address  # gRPC then listens at those of IPv6, too
    return host


@cache
def _warn_ports_in_use(host: str) -> None:
    warnings.warn(
        f"DLCP's UDP ports {UDP_PORT_BASE}-{UDP_PORT_BASE + UDP_PORT_COUNT - 1} on {host} are all in use: some groups "
        "use other ports, where switches treat their packets as ordinary traffic",
        RuntimeWarning,
        stacklevel=2,
    )
