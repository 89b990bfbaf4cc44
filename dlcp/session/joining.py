# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job agree to use DLCP, or not to: no rank is left waiting for one that does not.

A collective operation cannot ask whether everybody is there: it hangs if somebody is not. A store of keys and values
can be asked. So ranks publish each step of joining there, and wait for the others with a deadline: who is there and at
which address, which packets get through, whose endpoint every peer has answered. The first rank that finds something
wrong decides against DLCP, and all stop.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Protocol

from dlcp.collectives.choice import SERVER, Topology
from dlcp.session.addresses import OwnAddresses, RankPlace, advertised, bind, meeting_host, own_addresses, own_place
from dlcp.session.options import Options
from dlcp.session.secret import SealedStore, proof, session_token
from dlcp.transport import Address, Endpoint, TransportError, shared_memory
from dlcp.transport.path_mtu import COMMON_MTUS, PathProbe, candidate_payloads, first_hop_mtu, payload_for_mtu
from dlcp.transport.shared_memory import EXPORT_BYTES, SharedMemory, SharedMemoryRendezvous

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.session.serving import ServerLink
    from dlcp.timeline import Timeline

USE_DLCP: Final = "use DLCP"
JOIN_TURN_S: Final = 0.01
REACH_SHARE: Final = 0.3
"""Share of the deadline within which a peer that is there must answer over UDP. Chosen by us."""
POLL_S: Final = 0.005
POLL_MAX_S: Final = 0.1


class NotJoinedError(RuntimeError):
    """The ranks have agreed not to use DLCP; the message says why, and what to do about it."""


# Agreement ------------------------------------------------------------------------------------------------------------


class KeyValueStore(Protocol):
    """What ranks agree over: a store of PyTorch's, or :class:`dlcp.session.store.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value that has been written."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all these keys have a value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if the value is ``expected``, or if there is none and that is ``""``.

        Returns
        -------
        The value that the key has afterwards.
        """


class Agreement:
    """One matter that the ranks of a group decide alike, within a deadline.

    Parameters
    ----------
    store
        What the ranks agree over; values stay once they are written.
    rank, size
        This rank, and how many there are.
    deadline_s
        How long the agreement may take altogether, from now on.
    secret
        The job's secret, for a store that others can write to: then only what those write who know it counts.
    host
        The host that serves the store; by default ``MASTER_ADDR``. Ranks have the addresses that lead to it.

    Attributes
    ----------
    token
        The session token that follows from the secret, once the ranks have met; 0 without a secret.
    """

    VERDICT: Final = "verdict"

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        deadline_s: float,
        secret: bytes | None = None,
        host: str | None = None,
    ) -> None:
        self._sealed = None if secret is None else SealedStore(store, secret)
        self._secret = secret
        self.store = self._sealed or store
        self.token = 0
        self.rank = rank
        self.size = size
        self.host = host
        self.deadline_s = deadline_s
        self._end_s = time.monotonic() + deadline_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def meet(self, call: str) -> None:
        """Say that this rank is here; with a secret, find the session's key and token together with the others.

        Both follow from the secret and what each rank has just drawn: they are never sent, and nothing that was written
        in another session counts in this one.

        Raises
        ------
        NotJoinedError
            A rank is not there, or does not know the secret.
        """
        self.publish("here", secrets.token_hex(16))
        if self._sealed and self._secret is not None:
            drawn = _collect_from_all(self, "here", f"has not called {call} with the job's secret")
            key = proof(self._secret, b"session", *(drawn[rank].encode() for rank in range(self.size)))
            self._sealed.begin_session(key)
            self.token = session_token(key)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """In a thread, write again what of this rank others have altered; with a secret only."""
        sealed, done = self._sealed, threading.Event()
        if sealed is None:
            yield
            return

        def restore() -> None:
            with suppress(RuntimeError):  # the store is gone, as the calls that ask it will find
                while not done.wait(POLL_MAX_S):
                    sealed.restore()

        thread = threading.Thread(target=restore, name="dlcp-restore", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @property
    def disturbance(self) -> str:
        """Which values of the store were refused, in words that end a sentence; ``""`` if none."""
        refused = self._sealed.refused if self._sealed else []
        if not refused:
            return ""
        return (
            f"; {len(refused)} values in the job's store show no knowledge of its secret ({', '.join(refused[:3])}): "
            "give all ranks the same DLCP_SECRET_FILE, and strangers no access to MASTER_PORT"
        )

    def publish(self, topic: str, value: Any) -> None:
        """Publish this rank's value on a topic, once; any value that JSON can hold."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))
        self.store.set(topic, str(self.rank))

    def published(self, topic: str, ranks: Iterable[int]) -> bool:
        """Tell whether all these ranks have published a value on a topic."""
        return bool(self.store.check([f"{topic}/{rank}" for rank in ranks]))

    def anyone_published(self, topic: str) -> bool:
        """Tell whether any rank has published a value on a topic."""
        return bool(self.store.check([topic]))

    def collect(self, topic: str) -> dict[int, Any]:
        """Return each rank's value, as soon as all are there, a verdict is in force, or time is up."""
        wait_s = POLL_S
        while not self.published(topic, range(self.size)) and self.verdict() is None and self.left_s:
            time.sleep(min(wait_s, self.left_s))
            wait_s = min(POLL_MAX_S, wait_s * 1.5)
        present = [rank for rank in range(self.size) if self.published(topic, [rank])]
        return {rank: json.loads(self.store.get(f"{topic}/{rank}")) for rank in present}

    def verdict(self) -> str | None:
        """Return the verdict in force; None if there is none, or this rank has not met the others yet."""
        # Sealed by the secret alone, a verdict could be a recording of another session: there is none such.
        if (self._sealed and not self.token) or not self.store.check([self.VERDICT]):
            return None
        return bytes(self.store.get(self.VERDICT)).decode()

    def decide(self, proposal: str) -> str:
        """Propose a verdict; return the one in force, which is the first that any rank proposed."""
        return bytes(self.store.compare_set(self.VERDICT, "", proposal)).decode()

    def speaker(self) -> bool:
        """Tell whether this rank is the one that logs the verdict: the lowest that comes within the deadline."""
        lower = range(self.rank)
        while lower and self.left_s and not self.published("here", [0]):
            time.sleep(JOIN_TURN_S)
        return not any(self.published("here", [rank]) for rank in lower)

    def all_publish(self, topic: str) -> bool:
        """Wait until all ranks have published a value on a topic; tell whether they did before the deadline."""
        while self.left_s and not self.published(topic, range(self.size)):
            time.sleep(min(POLL_MAX_S, self.left_s))
        return self.published(topic, range(self.size))


# Joining --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """What ranks have once they have joined.

    Attributes
    ----------
    endpoint
        This rank's endpoint, which every peer has answered.
    options
        The options, with what was found out.
    remark
        What a user should know about that; ``""`` if nothing.
    topology
        Which ranks share a host, and which one is the server.
    link
        Rank 0's connection to the parameter server, if there is one.
    """

    endpoint: Endpoint
    options: Options
    remark: str
    topology: Topology
    link: "ServerLink | None"

    def close(self, reason: str | None = None) -> None:
        """Leave the peers; with a ``reason``, tell them that this rank gives up."""
        self.endpoint.close(reason)
        if self.link:
            self.link.close(reason)


def join(options: Options, agreement: Agreement, *, call: str, export_bytes: int = EXPORT_BYTES) -> Joined:
    """Open this rank's endpoint together with all other ranks.

    A parameter server has the rank after the last worker's.

    Parameters
    ----------
    options, agreement
        This rank's options, and what the ranks agree over.
    call
        What a user calls to join, for messages about ranks that have not.
    export_bytes
        How much memory this rank wants to send from without copies to ranks of its host.

    Raises
    ------
    NotJoinedError
        The ranks have agreed to do without DLCP; all ranks raise it, with the same message.
    """
    with agreement.guarded(), ExitStack() as undo:
        agreement.meet(call)
        # The order of topics is the protocol: here, place, entry, server, local peers, path, ready. Every rank
        # publishes and collects them in this order, so that no two wait for each other. A rank that fails publishes
        # the verdict instead.
        try:
            missing = f"has not called {call}; call it on every rank, with the same options"
            agreement.publish("place", own_place(options, meeting_host(options, agreement.host)))
            places = _collect_from_all(agreement, "place", missing)
            addresses = own_addresses(agreement.rank, {rank: RankPlace(*place) for rank, place in places.items()})
            sock = bind(options, addresses)
            undo.callback(sock.close)
            with _memory_rendezvous(options, export_bytes) as memory:
                joined = _connect(options, agreement, addresses, sock, undo, memory)
            agreement.publish("ready", True)
            _collect_from_all(agreement, "ready", "has not been greeted by every peer")
            verdict = agreement.decide(USE_DLCP)
        except (OSError, TransportError) as problem:
            verdict = agreement.decide(f"rank {agreement.rank}: {problem}")
        except NotJoinedError as problem:
            verdict = agreement.decide(str(problem))
        except BaseException as problem:
            # Whatever it is, the others must not wait for this rank until the deadline, and then blame something else.
            with suppress(Exception):
                agreement.decide(f"rank {agreement.rank} gave up: {problem!r}")
            raise
        timeline = _timeline(options.trace, agreement.rank)
        if verdict == USE_DLCP:
            undo.pop_all()
            if timeline is not None:
                timeline.note("joined", 0, 0, label_of(options.job, joined.endpoint.connection.token))
                joined.endpoint.connection.timeline = timeline
            return joined
        if timeline is not None:
            timeline.note("left", 0, 0, verdict)
            timeline.close()
    raise NotJoinedError(verdict)


def label_of(job: int, token: int) -> str:
    """Return a name of the session that its ranks have in common, and that may be shown: the token is a secret."""
    return f"{job}-{sha256(token.to_bytes(8, 'big')).hexdigest()[:8]}"


def _timeline(folder: str, rank: int) -> "Timeline | None":
    """Return where this rank notes what it does, if the options say so."""
    if not folder:
        return None
    from dlcp.timeline import Timeline

    return Timeline.open(folder, rank)


def _connect(
    options: Options,
    agreement: Agreement,
    addresses: OwnAddresses,
    sock: socket.socket,
    undo: ExitStack,
    memory: SharedMemoryRendezvous | None,
) -> Joined:
    rank, size = agreement.rank, agreement.size
    address, toward = advertised(options, addresses, sock.getsockname()[1])
    entry = {
        "address": address,
        "toward": {str(peer): host for peer, host in toward.items()},
        "host": socket.gethostname(),
        "token": 0 if agreement.token else options.token or (secrets.randbits(64) | 1),
        "terms": options.terms(),
        "memory": memory.name if memory else "",
    }
    agreement.publish("entry", entry)
    entries = _collect_from_all(agreement, "entry", "has not said where it is")
    _compare_terms(entries)
    peers: dict[int, Address] = {
        peer: (entry["toward"].get(str(rank), entry["address"][0]), entry["address"][1])
        for peer, entry in entries.items()
        if peer != rank
    }
    token = (options.token or agreement.token) if agreement.token else entries[0]["token"]
    # Ranks share a port if they share a host and its address: network namespaces of one machine do not.
    hosts = {peer: f"{entry['host']} {entry['address'][0]}" for peer, entry in entries.items()}
    topology = Topology(hosts, server=size if options.collective == SERVER else None)
    remark, link = "", None
    if options.collective == SERVER:
        workers = [entries[peer]["address"] for peer in range(size)]
        link, server = _invite_server(options, agreement, workers, token, undo)
        peers = {size: server}
    else:
        payload_bytes, remark = _probe_paths(options, agreement, sock, peers, token)
        options = options.with_(payload_bytes=payload_bytes)
    shared = None
    names = {peer: entry["memory"] for peer, entry in entries.items() if entry["memory"]}
    if len(names) > 1:  # as all ranks find alike
        shared = _share_memory(agreement, memory, names, options.job, token, undo)
    endpoint = Endpoint(
        rank, sock, peers, job=options.job, token=token, options=options.transport(size, topology), shared=shared
    )
    undo.pop_all()  # the socket is the endpoint's now
    joined = Joined(endpoint, options, remark, topology, link)
    undo.callback(joined.close, "the ranks have agreed to do without DLCP")
    endpoint.greet(max(1.0, agreement.left_s))
    return joined


def _invite_server(
    options: Options, agreement: Agreement, workers: Sequence[Address], token: int, undo: ExitStack
) -> "tuple[ServerLink | None, Address]":
    """Let rank 0 invite the parameter server; return its connection, on rank 0, and the server's address."""
    link, address = None, None
    if agreement.rank == 0:
        from dlcp.session.serving import ServerLink  # most jobs have none

        # The others wait for what comes of it: if nobody answers, this rank says so before they are out of time.
        link = ServerLink(options, (1 - REACH_SHARE) * agreement.left_s)
        undo.callback(link.close, "the ranks have agreed to do without DLCP")
        address = link.invite(workers, token)
    agreement.publish("server", address)
    missing = f"has no answer of the parameter server at {options.server}"
    host, port = _collect_from_all(agreement, "server", missing)[0]
    return link, (host, port)


def _memory_rendezvous(options: Options, export_bytes: int) -> AbstractContextManager[SharedMemoryRendezvous | None]:
    """Return where ranks of this host find this one; None if it shares no memory."""
    wanted = options.shared_memory and not (options.advertise or options.immediate or options.collective == SERVER)
    if wanted and shared_memory.supported():
        with suppress(OSError):  # not permitted in this container
            return SharedMemoryRendezvous(export_bytes)
    return nullcontext()


def _share_memory(
    agreement: Agreement,
    memory: SharedMemoryRendezvous | None,
    names: dict[int, str],
    job: int,
    token: int,
    undo: ExitStack,
) -> SharedMemory:
    """Return memory that is shared with those other ranks that share it with this one as well."""
    rank, shared = agreement.rank, SharedMemory()
    if memory:
        others = {peer: name for peer, name in names.items() if peer != rank}
        timeout_s = REACH_SHARE * agreement.left_s
        with suppress(OSError):  # sockets do as well
            shared = memory.connect(rank, others, job=job, token=token, timeout_s=timeout_s)
        undo.callback(shared.close)
    agreement.publish("local peers", sorted(shared.ranks))
    local_peers = _collect_from_all(agreement, "local peers", "has not said which ranks are on its host")
    shared.keep([peer for peer in shared.ranks if rank in local_peers[peer]])
    return shared


def _collect_from_all(agreement: Agreement, topic: str, missing: str) -> dict[int, Any]:
    """Return what all ranks published; raise the verdict against DLCP, or which ranks published nothing in time."""
    found = agreement.collect(topic)
    verdict = agreement.verdict()
    if verdict not in (None, USE_DLCP):
        raise NotJoinedError(verdict)
    absent = [rank for rank in range(agreement.size) if rank not in found]
    if absent:
        who = ", ".join(f"rank {rank}" for rank in absent)
        raise NotJoinedError(f"{who} {missing} (waited {agreement.deadline_s:.0f} s){agreement.disturbance}")
    return found


def _compare_terms(entries: dict[int, Any]) -> None:
    first = entries[0]["terms"]
    for rank, entry in sorted(entries.items()):
        for name, value in entry["terms"].items():
            if value != first[name]:
                raise NotJoinedError(
                    f"rank 0 has {name}={first[name]!r} and rank {rank} {name}={value!r}; give all ranks the same"
                )


def _probe_paths(
    options: Options, agreement: Agreement, sock: socket.socket, peers: dict[int, Address], token: int
) -> tuple[int, str]:
    """Return the largest payload that passes on every path between ranks, and a remark if it is less than wanted."""
    mtu = min(first_hop_mtu(address) for address in peers.values())
    candidates = candidate_payloads(mtu, options.payload_bytes)
    probe = PathProbe(agreement.rank, sock, peers, options.job, token, candidates)
    published = False
    give_up_s = agreement.left_s - REACH_SHARE * agreement.deadline_s
    while not agreement.published("path", range(agreement.size)):  # a rank that is done still answers the others
        probe.turn(JOIN_TURN_S)
        if probe.done and not published:
            agreement.publish("path", [probe.payload_bytes, candidates[0]])
            published = True
        cut_off = probe.unreachable and agreement.left_s < give_up_s
        if cut_off or agreement.verdict() is not None or not agreement.left_s:
            break
    if probe.unreachable and agreement.verdict() is None:
        where = ", ".join(f"rank {peer} at {peers[peer][0]}:{peers[peer][1]}" for peer in probe.unreachable)
        raise NotJoinedError(
            f"rank {agreement.rank} gets no UDP packet through to {where}, or none back; "
            "let UDP pass in the firewall, or set DLCP_BIND to an address that the other ranks reach"
        )
    found = _collect_from_all(agreement, "path", "has not found out which packets get through")
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
