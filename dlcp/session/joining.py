# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job come to use DLCP, or agree not to: nobody may be left waiting for somebody who does not.

Each step is told through the store and heard with a deadline: who is there and on which address, which packets get
through, whose endpoint is greeted by all. The first rank that finds something wrong says so and everybody stops.
"""

import secrets
import socket
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Final, NamedTuple

from dlcp.collectives.choice import Topology
from dlcp.session.addresses import advertised, bind
from dlcp.session.agreement import Agreement
from dlcp.session.options import Options
from dlcp.transport import Address, Endpoint, TransportError, parse_address, shared_memory
from dlcp.transport.path_mtu import COMMON_MTUS, PathProbe, candidate_payloads, first_hop_mtu, payload_for_mtu
from dlcp.transport.shared_memory import EXPORT_BYTES, SharedMemory, SharedMemoryRendezvous

USE_DLCP: Final = "use DLCP"
TURN_S: Final = 0.01
REACH_SHARE: Final = 0.3
"""Share of the deadline within which a peer that is there must answer over UDP. Chosen by us."""
TERMS: Final = (
    "job",
    "collective",
    "server",
    "loss_bound",
    "immediate",
    "error_feedback",
    "rescale",
    "compression",
    "combine",
    "adaptive_shards",
    "payload_bytes",
    "fallback",
    "layer_bounds",
    "weighted",
    "adapt",
    "phases",
)
"""Options that must be the same on all ranks."""


class NotJoinedError(RuntimeError):
    """The ranks have agreed not to use DLCP; the message says why, and what to do about it."""


class Joined(NamedTuple):
    """How ranks have come together.

    Attributes
    ----------
    endpoint
        It has been greeted by all peers.
    options
        With what was found out.
    remark
        What a user should know of that; ``""`` if nothing.
    topology
        Which ranks share a host, and which is the server.
    """

    endpoint: Endpoint
    options: Options
    remark: str
    topology: Topology


def join(
    options: Options, agreement: Agreement, *, call: str, toward: str | None = None, export_bytes: int = EXPORT_BYTES
) -> Joined:
    """Open this rank's endpoint together with all other ranks.

    A parameter server has the rank after the last worker's.

    Parameters
    ----------
    options, agreement
        What the ranks come with, and where they meet.
    call
        What a user calls to come here, for messages about ranks that have not.
    toward
        The host that decides which of its addresses this rank takes, see :func:`dlcp.session.addresses.own_host`.
    export_bytes
        How much memory this rank wants to send from without copies to ranks of its host
        (:class:`dlcp.transport.buffers.ExportedMemory`).

    Raises
    ------
    NotJoinedError
        The ranks have agreed to do without; all ranks raise it, with the same message.
    """
    with ExitStack() as undo:
        try:
            agreement.tell("here", True)
            sock = bind(options, toward)
            undo.callback(sock.close)
            with _rendezvous(options, export_bytes) as rendezvous:
                joined = _meet(options, agreement, sock, undo, call, rendezvous)
            agreement.tell("ready", True)
            _hear_all(agreement, "ready", "has not been greeted by every peer")
            verdict = agreement.decide(USE_DLCP)
        except (OSError, TransportError) as problem:
            verdict = agreement.decide(f"rank {agreement.rank}: {problem}")
        except NotJoinedError as problem:
            verdict = agreement.decide(str(problem))
        if verdict == USE_DLCP:
            undo.pop_all()
            return joined
    raise NotJoinedError(verdict)


def speaks(agreement: Agreement) -> bool:
    """Tell whether this rank is the one to say what was decided: the lowest of those who come within the deadline."""
    lower = range(agreement.rank)
    while lower and agreement.left_s and not agreement.told("here", [0]):
        time.sleep(TURN_S)
    return not any(agreement.told("here", [rank]) for rank in lower)


def _meet(
    options: Options,
    agreement: Agreement,
    sock: socket.socket,
    undo: ExitStack,
    call: str,
    rendezvous: SharedMemoryRendezvous | None,
) -> Joined:
    rank, size = agreement.rank, agreement.size
    mine = advertised(options, sock)
    terms = {name: getattr(options, name) for name in TERMS}
    token = options.token or (secrets.randbits(64) | 1)
    place = {"address": mine, "host": socket.gethostname(), "token": token, "terms": terms}
    agreement.tell("place", {**place, "rendezvous": rendezvous.name if rendezvous else ""})
    places = _hear_all(agreement, "place", f"has not called {call}; call it on every rank, with the same options")
    _compare_terms(places)
    peers: dict[int, Address] = {
        peer: (place["address"][0], place["address"][1]) for peer, place in places.items() if peer != rank
    }
    token = places[0]["token"]
    server = size if options.collective == "server" else None
    # Ranks share a port if they share a host and its address: network namespaces of one machine do not.
    hosts = {peer: f"{place['host']} {place['address'][0]}" for peer, place in places.items()}
    topology = Topology(hosts, server=server)
    remark = ""
    if options.collective == "server":
        peers = {size: parse_address(options.server)}
    else:
        payload_bytes, remark = _probe(options, agreement, sock, peers, token)
        options = options.with_(payload_bytes=payload_bytes)
    shared = None
    names = {peer: place["rendezvous"] for peer, place in places.items() if place["rendezvous"]}
    if len(names) > 1:  # as all ranks find alike
        shared = _share(agreement, rendezvous, names, options.job, token, undo)
    endpoint = Endpoint(
        rank, sock, peers, job=options.job, token=token, options=options.transport(size, topology), shared=shared
    )
    undo.pop_all()  # the socket is the endpoint's now
    undo.callback(endpoint.close, "the ranks have agreed to do without DLCP")
    endpoint.greet(max(1.0, agreement.left_s))
    return Joined(endpoint, options, remark, topology)


def _rendezvous(options: Options, export_bytes: int) -> AbstractContextManager[SharedMemoryRendezvous | None]:
    """Return where ranks of this host find this one; None where it shares no memory."""
    wanted = options.shared_memory and not (options.advertise or options.immediate or options.collective == "server")
    if wanted and shared_memory.available():
        with suppress(OSError):  # not permitted in this container
            return SharedMemoryRendezvous(export_bytes)
    return nullcontext()


def _share(
    agreement: Agreement,
    rendezvous: SharedMemoryRendezvous | None,
    names: dict[int, str],
    job: int,
    token: int,
    undo: ExitStack,
) -> SharedMemory:
    """Return memory that is shared with those other ranks who share it with this one as well."""
    rank, shared = agreement.rank, SharedMemory()
    if rendezvous:
        others = {peer: name for peer, name in names.items() if peer != rank}
        timeout_s = REACH_SHARE * agreement.left_s
        with suppress(OSError):  # sockets do as well
            shared = rendezvous.connect(rank, others, job=job, token=token, timeout_s=timeout_s)
        undo.callback(shared.close)
    agreement.tell("neighbours", sorted(shared.ranks))
    told = _hear_all(agreement, "neighbours", "has not said which ranks are on its host")
    shared.keep([peer for peer in shared.ranks if rank in told[peer]])
    return shared


def _hear_all(agreement: Agreement, topic: str, missing: str) -> dict[int, Any]:
    """Return what all ranks told; raise what was decided instead, or that somebody did not speak in time."""
    heard = agreement.hear(topic)
    verdict = agreement.verdict()
    if verdict not in (None, USE_DLCP):
        raise NotJoinedError(verdict)
    silent = [rank for rank in range(agreement.size) if rank not in heard]
    if silent:
        who = ", ".join(f"rank {rank}" for rank in silent)
        raise NotJoinedError(f"{who} {missing} (waited {agreement.deadline_s:.0f} s)")
    return heard


def _compare_terms(places: dict[int, Any]) -> None:
    first = places[0]["terms"]
    for rank, place in sorted(places.items()):
        for name, value in place["terms"].items():
            if value != first[name]:
                raise NotJoinedError(
                    f"rank 0 has {name}={first[name]!r} and rank {rank} {name}={value!r}; give all ranks the same"
                )


def _probe(
    options: Options, agreement: Agreement, sock: socket.socket, peers: dict[int, Address], token: int
) -> tuple[int, str]:
    """Return the largest payload that passes on every path between ranks, and a remark if it is less than wanted."""
    mtu = min(first_hop_mtu(address) for address in peers.values())
    candidates = candidate_payloads(mtu, options.payload_bytes)
    probe = PathProbe(agreement.rank, sock, peers, options.job, token, candidates)
    told = False
    give_up_s = agreement.left_s - REACH_SHARE * agreement.deadline_s
    while not agreement.told("path", range(agreement.size)):  # who is done goes on answering those who are not
        probe.turn(TURN_S)
        if probe.done and not told:
            agreement.tell("path", [probe.payload_bytes, candidates[0]])
            told = True
        cut_off = probe.unreachable and agreement.left_s < give_up_s
        if cut_off or agreement.verdict() is not None or not agreement.left_s:
            break
    if probe.unreachable and agreement.verdict() is None:
        where = ", ".join(f"rank {peer} at {peers[peer][0]}:{peers[peer][1]}" for peer in probe.unreachable)
        raise NotJoinedError(
            f"rank {agreement.rank} gets no UDP packet through to {where}, or none back; "
            "let UDP pass in the firewall, or set DLCP_BIND to an address that the other ranks reach"
        )
    found = _hear_all(agreement, "path", "has not found out which packets get through")
    payload_bytes = min(passed for passed, _ in found.values())
    wanted = max(largest for _, largest in found.values())
    least = min(payload_for_mtu(min(COMMON_MTUS)), wanted)
    if payload_bytes < least:
        raise NotJoinedError(
            f"packets of {least} bytes do not get through, only of {payload_bytes}; check the MTU on the path"
        )
    remark = ""
    if payload_bytes < wanted:
        remark = (
            f"packets of {wanted} bytes of payload do not get through, those of {payload_bytes} do; "
            "going on with these. Check the MTU on the path, or set payload_bytes."
        )
    return payload_bytes, remark
