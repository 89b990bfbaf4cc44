# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other: they exchange addresses and a session token over the process group that is there."""

import os
import secrets
import socket

import torch.distributed as dist

from dlcp.torch.options import Options
from dlcp.transport import Address, Endpoint, bind_socket, parse_address
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT


def meet(options: Options, group: dist.ProcessGroup | None = None) -> Endpoint:
    """Open this rank's endpoint and wait until every peer has answered.

    A parameter server has the rank after the last worker's.

    Raises
    ------
    OSError
        No address to bind.
    PeerSilentError
        A peer does not answer.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    host, port = parse_address(options.bind) if options.bind else (_own_host(), 0)
    sock = bind_socket(host, [port] if port else range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT))
    mine = parse_address(options.advertise) if options.advertise else sock.getsockname()
    token = options.token or (secrets.randbits(64) | 1)
    everyone: list[tuple[Address, int] | None] = [None] * size
    dist.all_gather_object(everyone, (mine, token), group=group)
    met = [entry for entry in everyone if entry is not None]
    peers = {peer: address for peer, (address, _) in enumerate(met) if peer != rank}
    if options.collective == "server":
        peers = {size: parse_address(options.server)}
    endpoint = Endpoint(rank, sock, peers, job=options.job, token=met[0][1], options=options.transport(size))
    try:
        endpoint.greet()
    except Exception:
        endpoint.close("it could not reach all peers")
        raise
    return endpoint


def _own_host() -> str:
    """Return this host's address on the way to the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing; asks the routing table
        return str(probe.getsockname()[0])
