# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job agree whether to use DLCP, so that no rank waits for one that does not.

A collective operation hangs if a rank is missing. A key-value store can be polled instead, so ranks join through one:
each publishes its progress there, and waits for the others with a deadline. They exchange addresses, find the largest
packets that get through, and wait until every peer has answered. The first rank that finds a problem decides against
DLCP, and all stop.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from dlcp.collectives.choice import Topology
from dlcp.host.ip import IpFamily
from dlcp.inputs.addresses import format_address
from dlcp.session.addresses import (
    OwnAddresses,
    RankPlace,
    advertised,
    bind,
    family_clash,
    meeting_point,
    own_addresses,
    own_place,
)
from dlcp.session.options import Options
from dlcp.session.secret import KeyValueStore, SealedStore, proof, session_token
from dlcp.transport import Address, Endpoint, Membership, TransportError, shared_memory
from dlcp.transport.connection import OnMessage
from dlcp.transport.path_mtu import (
    COMMON_MTUS,
    ETHERNET_MTU,
    PathProbe,
    candidate_payloads,
    first_hop_mtu,
    payload_for_mtu,
)
from dlcp.transport.shared_memory import EXPORT_BYTES, SharedMemory, SharedMemoryRendezvous

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.host.timeline import Timeline  # most jobs record none
    from dlcp.session.serving import ServerLink

USE_DLCP: Final = "use DLCP"
"""The verdict for DLCP; every other verdict is the reason against it."""
CHECK: Final = "check that it runs, and calls {}"
"""Advice about a rank that is missing. It may have called that function and failed there, or have ended since."""
JOIN_TURN_S: Final = 0.01
REACH_SHARE: Final = 0.3
"""Share of the deadline within which a reachable peer must answer; the rest remains for agreeing. Not tuned."""
POLL_S: Final = 0.005
POLL_MAX_S: Final = 0.1


class NotJoinedError(RuntimeError):
    """The ranks have agreed not to use DLCP; the message, the same on all ranks, says why and what to do."""

    CHANGED: Final = "the ranks have changed: "
    """The beginning of the message if others go on together than were to join."""
    NO_SERVER: Final = "has no parameter server"
    """In the message if it is because the parameter server is lost."""

    @property
    def is_for_change(self) -> bool:
        """Whether it is because others go on together than were to join."""
        return str(self).startswith(self.CHANGED)

    @property
    def is_for_server(self) -> bool:
        """Whether it is because the parameter server is lost."""
        return self.NO_SERVER in str(self)


# Agreement ------------------------------------------------------------------------------------------------------------


class Agreement:
    """A common decision of all ranks of a group, within a deadline.

    Parameters
    ----------
    store
        The store through which the ranks agree. Values are never deleted.
    rank, size
        This rank, and the number of ranks, which are numbered from 0.
    deadline_s
        Time limit of the whole agreement, in seconds from now on.
    secret
        The job's secret, for a store that strangers can write to: only values with proof of it count.
    master
        The address of the store; by default ``MASTER_ADDR:MASTER_PORT``. A rank's route to it gives the rank's own
        address.
    membership
        Instead of ``rank`` and ``size``: the ranks that go on with a session that has begun.
    gone
        Returns why a rank will not take part any more, or None; the others then do not wait for it.
    without_server
        Whether the ranks exchange directly now, because the parameter server of the options is lost.

    Attributes
    ----------
    membership
        Who takes part: the ranks that are to join, and from :func:`join` on their addresses and token, too. All that a
        session builds for its ranks is built from it.
    token
        The session token derived from the secret, once the ranks have met; 0 without a secret.
    """

    VERDICT: Final = "verdict"

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        deadline_s: float,
        secret: bytes | None = None,
        master: Address | None = None,
        membership: Membership | None = None,
        gone: Callable[[], str | None] = lambda: None,
        *,
        without_server: bool = False,
    ) -> None:
        self.gone, self.without_server = gone, without_server
        self._sealed = None if secret is None else SealedStore(store, secret)
        self._secret = secret
        self.store = self._sealed or store
        self.token = 0
        self.membership = membership or Membership(rank, ranks=tuple(range(size)))
        self.master = master
        self.deadline_s = deadline_s
        self._end_s = time.monotonic() + deadline_s

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.membership.rank

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks."""
        return self.membership.ranks

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def meet(self, call: str) -> None:
        """Announce this rank; with a secret, wait for all ranks and derive the session's key and token.

        Key and token are derived from the secret and a random value of each rank. They are never sent, and values from
        another session are worthless in this one.

        Parameters
        ----------
        call
            The function that users call to join, for messages.

        Raises
        ------
        NotJoinedError
            A rank is missing, or does not know the secret.
        """
        self.publish("here", secrets.token_hex(16))
        if self._sealed and self._secret is not None:
            try:
                drawn = _collect_from_all(self, "here", f"has not joined with the job's secret: {CHECK.format(call)}")
            except BaseException as problem:
                self.give_up(str(problem))
                raise
            if gone := [rank for rank, value in drawn.items() if value is None]:
                raise NotJoinedError(f"rank {gone[0]} has given up waiting for rank {self.rank}: {CHECK.format(call)}")
            key = proof(self._secret, b"session", *(drawn[rank].encode() for rank in self.ranks))
            self._sealed.begin_session(key)
            self.token = session_token(key)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While the context is open, restore this rank's values if strangers alter them. Only with a secret.

        It closes once all ranks are through, or at the deadline: a slower rank may not have read all values yet. After
        an exception, it closes at once.
        """
        sealed, done = self._sealed, threading.Event()
        if sealed is None:
            yield
            return

        def restore() -> None:
            with suppress(RuntimeError):  # the store is gone; the joining thread's own calls report that
                while not done.wait(POLL_MAX_S):
                    sealed.restore()

        thread = threading.Thread(target=restore, name="dlcp-restore", daemon=True)
        thread.start()
        is_through = False
        try:
            yield
            is_through = True
        finally:
            with suppress(RuntimeError):  # the store is gone
                self.publish("through", True)
                if is_through:
                    self.all_publish("through")
            done.set()
            thread.join()

    @property
    def disturbance(self) -> str:
        """The refused values of the store, as text to append to a message; ``""`` if none."""
        refused = self._sealed.refused if self._sealed else []
        if not refused:
            return ""
        return (
            f"; {len(refused)} values in the job's store have no valid proof of its secret "
            f"({', '.join(refused[:3])}): give all ranks the same DLCP_SECRET_FILE, and block MASTER_PORT for strangers"
        )

    def publish(self, topic: str, value: Any) -> None:
        """Publish this rank's value on a topic: any value that JSON can represent, once per topic."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))
        self.store.set(topic, str(self.rank))

    def published(self, topic: str, ranks: Iterable[int]) -> bool:
        """Return whether all these ranks have published a value on a topic."""
        return bool(self.store.check([f"{topic}/{rank}" for rank in ranks]))

    def latest(self, topic: str) -> tuple[int, Any] | None:
        """Return the rank that published on a topic last, and its value; None if no rank has."""
        if not self.store.check([topic]):
            return None
        rank = int(self.store.get(topic))
        key = f"{topic}/{rank}"
        return rank, json.loads(self.store.get(key)) if self.store.check([key]) else ""

    def collect(self, topic: str) -> dict[int, Any]:
        """Wait until all ranks have published a value, a verdict is in force, or time is up.

        Returns
        -------
        The values published by then, by rank.
        """
        keys = {f"{topic}/{rank}": rank for rank in self.ranks}
        wait_s, read = POLL_S, getattr(self.store, "read", None)
        while True:
            if read:  # one query, which waits
                found = read(keys, [self.VERDICT], min(POLL_MAX_S, self.left_s))
                has_come = all(key in found for key in keys)
            else:
                has_come = self.store.check(list(keys))
            if has_come or self.verdict() is not None or not self.left_s:
                break
            if not read:
                time.sleep(min(wait_s, self.left_s))
                wait_s = min(POLL_MAX_S, wait_s * 1.5)
        if not read:
            found = {key: self.store.get(key) for key in keys if has_come or self.store.check([key])}
        return {rank: json.loads(found[key]) for key, rank in keys.items() if key in found}

    def verdict(self) -> str | None:
        """Return the verdict in force; None if there is none.

        With a secret, it is also None before the ranks have met. Without the session key, a verdict could be a replay
        from another session of the same secret.
        """
        if reason := self.gone():
            self.decide(reason)
        if (self._sealed and not self.token) or not self.store.check([self.VERDICT]):
            return None
        return bytes(self.store.get(self.VERDICT)).decode()

    def decide(self, proposal: str) -> str:
        """Propose a verdict; return the one in force, which is the first that any rank proposed."""
        return bytes(self.store.compare_set(self.VERDICT, "", proposal)).decode()

    def give_up(self, reason: str) -> None:
        """Tell ranks that join later that this one has left before they met, so that they do not wait for it."""
        with suppress(RuntimeError):  # the store is gone
            if self._sealed:  # without the session's key, they would refuse the verdict
                self.publish("here", None)
            else:
                self.decide(reason)

    def speaker(self) -> bool:
        """Return whether this rank logs the verdict: the lowest rank that joins within the deadline does."""
        lower = [rank for rank in self.ranks if rank < self.rank]
        while lower and self.left_s and not self.published("here", lower[:1]):
            time.sleep(JOIN_TURN_S)
        return not any(self.published("here", [rank]) for rank in lower)

    def all_publish(self, topic: str) -> bool:
        """Wait until all ranks have published a value on a topic; return whether they did before the deadline."""
        while self.left_s and not self.published(topic, self.ranks):
            time.sleep(min(POLL_MAX_S, self.left_s))
        return self.published(topic, self.ranks)


_PROCESS: Final = secrets.token_hex(8)
"""Distinguishes the successive processes of one rank."""


def running_number(store: KeyValueStore, rank: int) -> int | None:
    """Return the number of the newest agreement if a former process of this rank has opened it; otherwise None."""
    if not store.check([f"opened/{rank}"]):
        return None
    number_text, opener = store.get(f"opened/{rank}").decode().split()
    return None if opener == _process() or number_text != store.get("newest").decode() else int(number_text)


def _process() -> str:
    return f"{os.getpid()}-{_PROCESS}"  # a fork has the same text, but another ID


def next_number(store: KeyValueStore, rank: int) -> int:
    """Return the number of a rank's next agreement in a store; all ranks must open them in the same order.

    The store counts, not the process: one that has survived its peers' former processes meets the new ones. A rank
    also takes part in a failed agreement that another one's process has outlived, so that the same calls still meet.
    It skips agreements that only ended processes have opened, where it would meet nobody.
    """
    key, process = f"opened/{rank}", _process()
    last, opener = -1, ""
    if store.check([key]):
        number_text, opener = store.get(key).decode().split()
        last = int(number_text)
    if opener == process:
        store.set(f"outlived/{last}", "yes")
    number, newest = last + 1, int(store.compare_set("newest", "", "0"))
    while number < newest and not store.check([f"outlived/{number}"]):
        number += 1
    while newest < number:
        newest = int(store.compare_set("newest", str(newest), str(number)))
    store.set(key, f"{number} {process}")
    return number


# Joining --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of joining.

    Attributes
    ----------
    endpoint
        This rank's endpoint; every peer has answered it.
    options
        The options, with the measured ``payload_bytes``.
    remark
        A warning for the user about the measured payload; ``""`` if none.
    membership
        The ranks, their addresses and hosts, and the session token; as the agreement has it, too.
    link
        The lowest rank's connection to the parameter server, if there is one.
    remote
        Whether any rank reaches another one through a network, and not through memory; the same on all ranks.
    """

    endpoint: Endpoint
    options: Options
    remark: str
    membership: Membership
    link: "ServerLink | None"
    remote: bool

    @property
    def topology(self) -> Topology:
        """Which ranks share a host, and which rank is the server."""
        return Topology(self.membership.hosts, server=self.membership.server)

    def close(self, reason: str | None = None) -> None:
        """Leave the peers; with a ``reason``, tell them that this rank gives up."""
        self.endpoint.close(reason)
        if self.link:
            self.link.close(reason)


def join(
    options: Options,
    agreement: Agreement,
    *,
    call: str,
    export_bytes: int = EXPORT_BYTES,
    on_message: OnMessage | None = None,
) -> Joined:
    """Agree with all other ranks to use DLCP, and open this rank's endpoint.

    A parameter server has the rank after the last worker's.

    Parameters
    ----------
    options, agreement
        This rank's options, and its agreement with the other ranks.
    call
        The function that users call to join, for messages about ranks that have not called it.
    export_bytes
        How much memory, in bytes, this rank may send from without copies to ranks on its host.
    on_message
        See :class:`dlcp.transport.Connection`.

    Raises
    ------
    NotJoinedError
        The ranks have agreed not to use DLCP; all ranks raise it, with the same message.
    """
    with agreement.guarded(), ExitStack() as undo:
        agreement.meet(call)
        timeline = _timeline(options.trace, agreement.rank)
        if timeline is not None:
            undo.callback(timeline.close)
        # The order of topics is the protocol: here, place, entry, then server or path, local peers, ready. Every rank
        # publishes and collects them in this order; otherwise two ranks could wait for each other until the deadline.
        # All ranks skip the same topics, because options and entries decide that, and are the same on all. A rank that
        # fails publishes the verdict instead. With a secret, "through" comes last.
        try:
            agreement.publish("place", own_place(options, meeting_point(options, agreement.master)))
            missing = f"has not joined: {CHECK.format(call)}"
            found = _collect_from_all(agreement, "place", missing, partial(_why_silent, agreement, call))
            places = {rank: RankPlace(*place) for rank, place in found.items()}
            _check_families({rank: place.address for rank, place in places.items()})
            addresses = own_addresses(agreement.rank, places)
            sock = bind(options, addresses)
            undo.callback(sock.close)
            with _memory_rendezvous(options, export_bytes) as memory:
                open_endpoint = partial(Endpoint, sock=sock, on_message=on_message, timeline=timeline)
                joined = _connect(options, agreement, addresses, sock, undo, memory, open_endpoint)
            agreement.publish("ready", True)
            _collect_from_all(agreement, "ready", "has not confirmed that all peers answer it")
            verdict = agreement.decide(USE_DLCP)
        except (OSError, TransportError, ModuleNotFoundError) as problem:
            verdict = agreement.decide(f"rank {agreement.rank}: {problem}")
        except NotJoinedError as problem:
            verdict = agreement.decide(str(problem))
        except BaseException as problem:
            # After any error, the others must learn the cause now, rather than report a missed deadline later.
            with suppress(Exception):
                agreement.decide(f"rank {agreement.rank} gave up: {problem!r}")
            raise
        if verdict == USE_DLCP:
            undo.pop_all()
            if timeline is not None:
                timeline.note("joined", 0, 0, label_of(joined.membership))
            return joined
        if timeline is not None:
            timeline.note("left", 0, 0, verdict)
    raise NotJoinedError(verdict)


def label_of(membership: Membership) -> str:
    """Return a name of the session, the same on all its ranks. It is safe to show, whereas the token is a secret."""
    return f"{membership.job}-{sha256(membership.token.to_bytes(8, 'big')).hexdigest()[:8]}"


def _timeline(folder: str, rank: int) -> "Timeline | None":
    """Open this rank's timeline in a folder; return None if ``folder`` is ``""``."""
    if not folder:
        return None
    from dlcp.host.timeline import Timeline  # most jobs record none

    return Timeline.open(folder, rank)


def _connect(
    options: Options,
    agreement: Agreement,
    addresses: OwnAddresses,
    sock: socket.socket,
    undo: ExitStack,
    memory: SharedMemoryRendezvous | None,
    open_endpoint: Callable[..., Endpoint],
) -> Joined:
    rank, size = agreement.rank, len(agreement.ranks)
    address, toward = advertised(options, addresses, sock.getsockname()[1])
    entry = {
        "address": address,
        "toward": {str(peer): host for peer, host in toward.items()},
        "host": socket.gethostname(),
        "token": 0 if agreement.token else secrets.randbits(64) | 1,
        "terms": options.terms(),
        "memory": memory.name if memory else "",
    }
    agreement.publish("entry", entry)
    entries = _collect_from_all(agreement, "entry", "has not published its address")
    _compare_terms(entries)
    _check_families({rank: entry["address"][0] for rank, entry in entries.items()})
    peers: dict[int, Address] = {
        peer: (entry["toward"].get(str(rank), entry["address"][0]), entry["address"][1])
        for peer, entry in entries.items()
        if peer != rank
    }
    token = agreement.token or entries[agreement.ranks[0]]["token"]
    # Ranks share a network port if they share a host name and an address. Network namespaces of one machine have
    # different addresses.
    hosts = {peer: f"{entry['host']} {entry['address'][0]}" for peer, entry in entries.items()}
    remark, link, server_rank = "", None, max(agreement.ranks) + 1
    if options.server:
        # The path to the server is not probed.
        fits = payload_for_mtu(ETHERNET_MTU, IpFamily.of(sock))
        options = options.with_(payload_bytes=options.payload_bytes or fits)
        workers = {peer: entries[peer]["address"] for peer in agreement.ranks}
        link, server = _invite_server(options, agreement, workers, token, undo)
        peers = {server_rank: server}
    else:
        payload_bytes, remark = _probe_paths(options, agreement, sock, peers, token)
        options = options.with_(payload_bytes=payload_bytes)
    shared, remote = None, True
    names = {peer: entry["memory"] for peer, entry in entries.items() if entry["memory"]}
    if len(names) > 1:  # the same on all ranks, so all or none take part
        shared, remote = _share_memory(agreement, memory, names, options.job, token, undo)
    membership = agreement.membership = replace(
        agreement.membership,
        peers=peers,
        job=options.job,
        token=token,
        hosts=hosts,
        server=server_rank if options.server else None,
    )
    transport = options.transport(size, Topology(hosts, server=membership.server))
    endpoint = open_endpoint(membership, options=transport, shared=shared)
    undo.pop_all()  # from here on, endpoint and joined own the socket, memory and link
    joined = Joined(endpoint, options, remark, membership, link, remote)
    undo.callback(joined.close, "the ranks have agreed not to use DLCP")
    endpoint.greet(max(1.0, agreement.left_s))
    return joined


def _invite_server(
    options: Options, agreement: Agreement, workers: Mapping[int, Address], token: int, undo: ExitStack
) -> "tuple[ServerLink | None, Address]":
    """Have the lowest rank invite the parameter server.

    Returns
    -------
    On the lowest rank the connection to the server, else None; and the server's address.
    """
    link, address, lowest = None, None, agreement.ranks[0]
    if agreement.rank == lowest:
        from dlcp.session.serving import ServerLink  # most jobs have none

        # The other ranks wait for the result, so this one must report a missing server before their deadline.
        # In a later epoch, they would go on without this one if it waited for longer than they may be silent.
        limit_s = (1 - REACH_SHARE) * agreement.left_s
        if agreement.membership.epoch:
            limit_s = min(limit_s, options.silence_s / 2)
        try:
            link = ServerLink(options, limit_s)
            undo.callback(link.close, "the ranks have agreed not to use DLCP")
            address = link.invite(workers, token)
        except TransportError as problem:
            raise NotJoinedError(f"rank {lowest} {NotJoinedError.NO_SERVER}: {problem}") from None
    agreement.publish("server", address)
    missing = f"has no answer from the parameter server at {options.server}"
    host, port = _collect_from_all(agreement, "server", missing)[lowest]
    return link, (host, port)


def _memory_rendezvous(options: Options, export_bytes: int) -> AbstractContextManager[SharedMemoryRendezvous | None]:
    """Return the rendezvous through which ranks on this host find this one; None if it shares no memory."""
    wanted = options.shared_memory and not (options.advertise or options.immediate or options.server)
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
) -> tuple[SharedMemory, bool]:
    """Map the memory of the ranks on this host; keep only mappings that both ranks of a pair have.

    Returns
    -------
    The mappings, and whether any rank lacks the memory of another one.
    """
    rank, shared = agreement.rank, SharedMemory()
    if memory:
        others = {peer: name for peer, name in names.items() if peer != rank}
        timeout_s = REACH_SHARE * agreement.left_s
        with suppress(OSError):  # without shared memory, the ranks use sockets
            shared = memory.connect(rank, others, job=job, token=token, timeout_s=timeout_s)
        undo.callback(shared.close)
    agreement.publish("local peers", sorted(shared.ranks))
    local_peers = _collect_from_all(agreement, "local peers", "has not published which ranks share its memory")
    shared.keep([peer for peer in shared.ranks if rank in local_peers[peer]])
    return shared, any(len(ranks) < len(agreement.ranks) - 1 for ranks in local_peers.values())


def _why_silent(agreement: Agreement, call: str, rank: int) -> str | None:
    """Explain why a rank that has called ``call`` does not continue; return None if it has not called it."""
    if not agreement.published("here", [rank]):
        return None
    try:
        json.loads(agreement.store.get(f"here/{rank}"))
    except ValueError:  # it is sealed
        return f"rank {rank} has a secret, and rank {agreement.rank} has none; give all ranks the same DLCP_SECRET_FILE"
    return f"rank {rank} has called {call} and then stopped answering; is its process alive?"


def _collect_from_all(
    agreement: Agreement, topic: str, missing: str, explain: Callable[[int], str | None] = lambda _: None
) -> dict[int, Any]:
    """Return the values that all ranks published on a topic.

    Parameters
    ----------
    missing
        The end of the message about a rank without a value: "has not ...".
    explain
        Returns a better message about a rank, if there is one.

    Raises
    ------
    NotJoinedError
        The verdict is against DLCP, or ranks published nothing in time; the message names them.
    """
    found = agreement.collect(topic)
    verdict = agreement.verdict()
    if verdict not in (None, USE_DLCP):
        raise NotJoinedError(verdict)
    absent = [rank for rank in agreement.ranks if rank not in found]
    known = next(filter(None, map(explain, absent)), None)
    if known:
        raise NotJoinedError(f"{known} (waited {agreement.deadline_s:.0f} s)")
    if absent:
        who = ", ".join(f"rank {rank}" for rank in absent)
        raise NotJoinedError(f"{who} {missing} (waited {agreement.deadline_s:.0f} s){agreement.disturbance}")
    return found


def _check_families(hosts: Mapping[int, str]) -> None:
    """Refuse ranks with addresses of different families; all ranks find the same."""
    if why := family_clash(hosts):
        raise NotJoinedError(why)


def _compare_terms(entries: dict[int, Any]) -> None:
    lowest = min(entries)
    first = entries[lowest]["terms"]
    for rank, entry in sorted(entries.items()):
        for name, value in entry["terms"].items():
            if value != first[name]:
                raise NotJoinedError(
                    f"rank {lowest} has {name}={first[name]!r} and rank {rank} {name}={value!r}; give all ranks the "
                    "same"
                )


def _probe_paths(
    options: Options, agreement: Agreement, sock: socket.socket, peers: dict[int, Address], token: int
) -> tuple[int, str]:
    """Find the largest payload, in bytes, that passes on every path between ranks.

    Returns
    -------
    The payload, and a warning for the user if it is smaller than wanted, else ``""``.
    """
    family = IpFamily.of(sock)
    mtu = min((first_hop_mtu(address) for address in peers.values()), default=max(COMMON_MTUS))
    candidates = candidate_payloads(mtu, options.payload_bytes, family)
    probe = PathProbe(agreement.rank, sock, peers, options.job, token, candidates)
    published = False
    give_up_s = agreement.left_s - REACH_SHARE * agreement.deadline_s
    while not agreement.published("path", agreement.ranks):  # a rank that has finished still answers the others
        probe.turn(JOIN_TURN_S)
        if probe.done and not published:
            agreement.publish("path", [probe.payload_bytes, candidates[0]])
            published = True
        cut_off = probe.unreachable and agreement.left_s < give_up_s
        if cut_off or agreement.verdict() is not None or not agreement.left_s:
            break
    if probe.unreachable and agreement.verdict() is None:
        where = ", ".join(f"rank {peer} at {format_address(peers[peer])}" for peer in probe.unreachable)
        raise NotJoinedError(
            f"rank {agreement.rank} gets no UDP packet through to {where}, or none back; "
            "allow UDP in the firewall, or set DLCP_BIND to an address that the other ranks can reach"
        )
    found = _collect_from_all(agreement, "path", "has not found which packet sizes get through")
    payload_bytes = min(passed for passed, _ in found.values())
    wanted = max(largest for _, largest in found.values())
    least = min(payload_for_mtu(min(COMMON_MTUS), family), wanted)
    if payload_bytes < least:
        raise NotJoinedError(
            f"packets with {least} bytes of payload do not get through, only with {payload_bytes}; check the MTU on "
            "the path"
        )
    remark = ""
    if payload_bytes < wanted:
        remark = (
            f"packets with {wanted} bytes of payload do not get through, so DLCP uses {payload_bytes} bytes. "
            "Check the MTU on the path, or set payload_bytes."
        )
    return payload_bytes, remark
