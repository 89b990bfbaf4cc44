# SPDX-License-Identifier: Apache-2.0
"""How a parameter server joins training sessions.

The server runs a key-value store (:mod:`dlcp.session.store`) at the address in its workers' ``collective``. When the
ranks of a session have met, the lowest one writes an invitation into that store: the job's options, the session token
and the workers' addresses. The server opens an endpoint for the session and answers with the
endpoint's address, or refuses with a reason. It takes the job's options from the invitation; only its addresses, secret
and certificates are its own.

That rank stays connected to the store while the session lasts. When the connection ends, the server leaves the session.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import dlcp
from dlcp.collectives import ParameterServer
from dlcp.host.closing import Closing
from dlcp.host.ip import FAMILIES, family_of, resolve
from dlcp.inputs.addresses import parse_address
from dlcp.inputs.error_text import describe
from dlcp.session.addresses import OwnAddresses, advertised
from dlcp.session.options import Options
from dlcp.session.secret import job_secret, proof
from dlcp.session.store import Store, StoreError, StoreServer, ended_key
from dlcp.transport import Address, Endpoint, Membership, TransportError, bind_socket
from dlcp.transport.ledger import Ledger
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

INVITATION: Final = "invitation"
"""Key of the pending invitation: one at a time, until the server has read it."""
ANSWER: Final = "answer"
OWNER: Final = "the parameter server"
INVITE_AGAIN_S: Final = 0.02
"""Seconds between attempts to write an invitation, while another session's is pending. Not tuned."""
LOOK_S: Final = 0.25
"""Seconds between the server's checks whether it must stop, or a session has failed. Not tuned."""
MEET_ITSELF_S: Final = 10.0


class ServerLink:
    """The lowest rank's connection to the parameter server. Closing it makes the server leave the session.

    Parameters
    ----------
    options
        The ranks' options.
    deadline_s
        Time limit for connecting and for the server's answer together, in seconds.

    Raises
    ------
    StoreError
        No store answers at the server's address, or its secret differs.
    OSError, ValueError
        There is no valid secret, see :func:`dlcp.session.secret.job_secret`.
    """

    def __init__(self, options: Options, deadline_s: float) -> None:
        self._options, self._end_s = options, time.monotonic() + deadline_s
        self._address, self._secret = parse_address(options.server, UDP_PORT_BASE), job_secret(options)
        self._session = secrets.token_hex(16)
        self._store = Store(self._address, deadline_s, self._secret, options.tls, OWNER)

    def invite(self, workers: Mapping[int, Address], token: int) -> Address:
        """Invite the server to the session; return the address of its endpoint there.

        Parameters
        ----------
        workers
            The address of each rank's endpoint.
        token
            The session token. It is sent encrypted with the secret.

        Raises
        ------
        TransportError
            The server refuses, or does not answer in time.
        OSError
            Its host has no address of the workers' family.
        """
        why = f"rank {min(workers)} gives up, or its process or connection is gone"
        self._store.leave(ended_key(self._session), why)
        content = {
            "version": dlcp.__version__,
            "session": self._session,
            "options": self._options.of_job(),
            "workers": list(workers.items()),
            "token": token ^ _mask(self._secret, self._session),
        }
        invitation = json.dumps(content)
        while self._store.compare_set(INVITATION, "", invitation) != invitation.encode():
            if time.monotonic() > self._end_s:
                raise StoreError(
                    f"the parameter server at {self._options.server} reads no invitations: is it suspended?"
                )
            time.sleep(INVITE_AGAIN_S)
        answer = json.loads(self._store.get(f"{ANSWER}/{self._session}", max(0.0, self._end_s - time.monotonic())))
        if answer["refused"]:
            raise TransportError(f"the parameter server at {self._options.server} refuses: {answer['refused']}")
        host, port = answer["address"]
        family = family_of(workers[min(workers)][0])
        return resolve(host or self._address[0], family)[0], port

    def lost(self) -> str | None:
        """Return why the server cannot serve any more, or None if it can."""
        if not self._store.is_connected:
            return f"the parameter server at {self._options.server} has ended, or its connection broke"
        try:
            self._store.check([INVITATION], answer_s=self._options.silence_s / 2)
        except StoreError as problem:
            return str(problem)
        return None

    @property
    def is_connected(self) -> bool:
        """Whether the server's process lives, as far as its connection tells."""
        return self._store.is_connected

    def close(self, reason: str | None = None) -> None:
        """Make the server leave the session; with a ``reason``, as if this rank had died."""
        # With a reason, skip the call: the server may have failed, and the other ranks wait for this one.
        if reason is None:
            with suppress(StoreError):
                self._store.leave(ended_key(self._session), "")
        self._store.close()


def _mask(secret: bytes, session: str) -> int:
    """Return the 64 bits that encrypt a session's token, by XOR, against eavesdroppers without the secret."""
    return int.from_bytes(proof(secret, b"server", session.encode())[:8], "big")


class _Served(NamedTuple):
    """A session that the server has joined."""

    endpoint: Endpoint
    server: ParameterServer


class SessionServer(Closing):
    """A parameter server for any number of sessions, one after another or at once.

    Parameters
    ----------
    options
        Only ``bind``, ``advertise``, ``secret_file`` and ``tls`` are used; the others come with each invitation.
    report
        Called with a line of text about each session that begins, ends or is refused.

    Attributes
    ----------
    address
        The address of its store.
    ledgers
        The record of sent packets of each session, in the order in which they began.

    Raises
    ------
    OSError, ValueError
        The address cannot be bound, or there is no valid secret; the message says what to do.
    """

    def __init__(self, options: Options, report: Callable[[str], None]) -> None:
        self._options, self._report = options, report
        self._secret = job_secret(options)
        self.ledgers: list[Ledger] = []
        self._servers: dict[str, _Served | None] = {}
        """Sessions until their lowest rank has disconnected; None for those refused, or that the server has left."""
        self._leaving: list[threading.Thread] = []
        try:
            self._store_server = StoreServer(parse_address(options.bind, UDP_PORT_BASE), self._secret, options.tls)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {options.bind}: {error.strerror}") from None
        self.address = self._store_server.address
        self._store = Store(self.address, MEET_ITSELF_S, self._secret, options.tls, OWNER)

    def serve(self, stopped: threading.Event) -> None:
        """Join sessions until ``stopped`` is set; leave each when its lowest rank disconnects, or when it fails."""
        while not stopped.is_set():
            ends = {ended_key(session): session for session in self._servers}
            found = self._store.first([*ends, INVITATION], LOOK_S)
            if found and found[0] == INVITATION:
                self._store.delete([INVITATION])
                self._answer(json.loads(found[1]))
            elif found:
                session = ends[found[0]]
                self._leave(session, found[1].decode() or None)
                del self._servers[session]
                self._store.delete([found[0], f"{ANSWER}/{session}"])
            for session, served in self._servers.items():
                if served and served.server.failed.done() and (error := served.server.failed.exception()):
                    self._leave(session, describe(error))

    def _answer(self, invitation: dict[str, Any]) -> None:
        """Join a session or refuse it, and write the answer."""
        session, refused = invitation["session"], ""
        self._servers[session] = None
        address: Address = "", 0
        try:
            self._servers[session], address = self._join(invitation)
        except (OSError, ValueError) as problem:
            refused = str(problem)
            self._report(f"refused: {refused}")
        self._store.set(f"{ANSWER}/{session}", json.dumps({"address": address, "refused": refused}))

    def _join(self, invitation: dict[str, Any]) -> "tuple[_Served, Address]":
        """Open an endpoint for a session.

        Returns
        -------
        The session; and the endpoint's address, with ``""`` as host if that is the store's.
        """
        if invitation["version"] != dlcp.__version__:
            raise ValueError(
                f"it has DLCP {dlcp.__version__} and the workers {invitation['version']}; install the same everywhere"
            )
        options = Options(**invitation["options"], advertise=self._options.advertise)
        workers: dict[int, Address] = {rank: (host, port) for rank, (host, port) in invitation["workers"]}
        family = family_of(workers[min(workers)][0])
        for host, _ in workers.values():
            resolve(host, family)
        is_any = self.address[0] in [each.any_address for each in FAMILIES]  # its store listens in both
        own_host = family.any_address if is_any else resolve(self.address[0], family)[0]
        ports = self.address[1], *range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT), 0
        sock = bind_socket(own_host, ports)
        address, _ = advertised(options, OwnAddresses(own_host), sock.getsockname()[1])
        # Each worker receives a single flow, the server's.
        transport = replace(options.transport(len(workers)), flow_weight=1.0)
        token = invitation["token"] ^ _mask(self._secret, invitation["session"])
        ranks = tuple(workers)
        own = max(ranks) + 1
        membership = Membership(own, workers, options.job, token, ranks, server=own)
        endpoint = Endpoint(membership, sock, options=transport)
        server = ParameterServer(endpoint.connection, ranks, options=options.reduction(), weighted=options.weighted)
        self.ledgers.append(server.ledger)
        self._report(f"job {options.job} with {len(workers)} workers begins")
        return _Served(endpoint, server), address if options.advertise else ("", address[1])

    def _leave(self, session: str, reason: str | None) -> None:
        """Leave a session, in another thread: without a ``reason``, that waits until the workers have all averages."""
        served, self._servers[session] = self._servers[session], None
        if served:
            job = f"job {served.endpoint.connection.membership.job} with {len(served.server.workers)} workers"
            self._report(f"{job} has ended: {reason}" if reason else f"{job} has ended")
            thread = threading.Thread(target=served.endpoint.close, args=(reason,), name="dlcp-session-end")
            thread.start()
            self._leaving.append(thread)

    def close(self) -> None:
        """Leave all sessions, and stop the store. The workers continue without the server."""
        for session in self._servers:
            self._leave(session, "the parameter server was stopped")
        for thread in self._leaving:
            thread.join()
        self._store.close()
        self._store_server.close()
