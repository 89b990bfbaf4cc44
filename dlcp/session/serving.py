# SPDX-License-Identifier: Apache-2.0
"""How a parameter server joins training sessions.

The server serves a store of keys and values (:mod:`dlcp.session.store`) at the address by which its workers name it,
``Options.server``. When the ranks of a session have met, rank 0 invites the server there, with the job's options, the
session token and the workers' addresses. The server opens an endpoint for that session and answers with its address, or
refuses with a reason. It has no options of its own but how it is met.

Rank 0 keeps its connection to the store as long as the session lasts. When that ends, so does the server's part in it.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import dlcp
from dlcp.closing import Closing
from dlcp.collectives import ParameterServer
from dlcp.error_text import describe
from dlcp.ledger import Ledger
from dlcp.session.addresses import OwnAddresses, advertised
from dlcp.session.options import Options
from dlcp.session.secret import job_secret, proof
from dlcp.session.store import Store, StoreError, StoreServer, ended_key
from dlcp.transport import Address, Endpoint, TransportError, bind_socket, parse_address
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

INVITATION: Final = "invitation"
"""Holds one invitation at a time, until the server has taken it."""
ANSWER: Final = "answer"
OWNER: Final = "the parameter server"
INVITE_AGAIN_S: Final = 0.02
"""How often rank 0 looks whether another session's invitation has been taken. Not tuned."""
LOOK_S: Final = 0.25
"""How often the server looks whether it is to stop, or one of its sessions has failed. Not tuned."""
MEET_ITSELF_S: Final = 10.0


class ServerLink:
    """Rank 0's connection to the parameter server; the server stays in the session until it is closed.

    Parameters
    ----------
    options
        Those of the ranks.
    deadline_s
        How long it may take until the server answers.

    Raises
    ------
    StoreError
        Nobody answers at ``options.server``, or it has another secret.
    OSError, ValueError
        There is no secret, see :func:`dlcp.session.secret.job_secret`.
    """

    def __init__(self, options: Options, deadline_s: float) -> None:
        self._options, self._end_s = options, time.monotonic() + deadline_s
        self._address, self._secret = parse_address(options.server), job_secret(options)
        self._session = secrets.token_hex(16)
        self._store = Store(self._address, deadline_s, self._secret, options.tls, OWNER)

    def invite(self, workers: Mapping[int, Address], token: int) -> Address:
        """Return where the server's endpoint for the session is.

        Parameters
        ----------
        workers
            Where the server reaches each rank.
        token
            The session token.

        Raises
        ------
        TransportError
            The server refuses, or does not answer in time.
        """
        self._store.leave(ended_key(self._session), "rank 0's process or its connection is gone")
        told = {
            "version": dlcp.__version__,
            "session": self._session,
            "options": self._options.of_job(),
            "workers": [workers[rank] for rank in sorted(workers)],
            "token": token ^ _mask(self._secret, self._session),
        }
        invitation = json.dumps(told)
        while self._store.compare_set(INVITATION, "", invitation) != invitation.encode():
            if time.monotonic() > self._end_s:
                raise StoreError(f"the parameter server at {self._options.server} takes no invitations; is it stopped?")
            time.sleep(INVITE_AGAIN_S)
        answer = json.loads(self._store.get(f"{ANSWER}/{self._session}", max(0.0, self._end_s - time.monotonic())))
        if answer["refused"]:
            raise TransportError(f"the parameter server at {self._options.server} refuses: {answer['refused']}")
        host, port = answer["address"]
        return host or self._address[0], port

    def close(self, reason: str | None = None) -> None:
        """Let the server leave the session; with a ``reason``, let it know that this rank gives up."""
        with suppress(StoreError):  # the server has ended
            self._store.leave(ended_key(self._session), reason or "")
        self._store.close()


def _mask(secret: bytes, session: str) -> int:
    """Return what hides a session's token from those who read the network but do not know the secret."""
    return int.from_bytes(proof(secret, b"server", session.encode())[:8], "big")


class _Served(NamedTuple):
    """A session that the server has joined."""

    endpoint: Endpoint
    server: ParameterServer


class SessionServer(Closing):
    """A parameter server, which serves any number of sessions.

    Parameters
    ----------
    options
        Of which only those count by which it is met: ``bind``, ``advertise``, ``secret_file`` and ``tls``.
    report
        Called with a line about each session that begins or ends.

    Attributes
    ----------
    address
        Where it is invited.
    ledgers
        What it has sent, by session.

    Raises
    ------
    OSError, ValueError
        The address cannot be had, or there is no secret; the message says what to do.
    """

    def __init__(self, options: Options, report: Callable[[str], None]) -> None:
        self._options, self._report = options, report
        self._secret = job_secret(options)
        self.ledgers: list[Ledger] = []
        self._servers: dict[str, _Served | None] = {}
        """By session, until its rank 0 has gone; None if the session was refused, or the server has left it."""
        self._leaving: list[threading.Thread] = []
        try:
            self._door = StoreServer(parse_address(options.bind), self._secret, options.tls)
        except OSError as error:
            raise OSError(error.errno, f"cannot be met at {options.bind}: {error.strerror}") from None
        self.address = self._door.address
        self._store = Store(self.address, MEET_ITSELF_S, self._secret, options.tls, OWNER)

    def serve(self, stopped: threading.Event) -> None:
        """Join sessions until ``stopped``; leave each when its ranks have gone, or when it has failed."""
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
        """Join a session, or refuse."""
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
        """Open an endpoint for a session; return its address, too, without a host if it is that of the store."""
        if invitation["version"] != dlcp.__version__:
            raise ValueError(
                f"it has DLCP {dlcp.__version__} and the workers {invitation['version']}; install the same everywhere"
            )
        options = Options(**invitation["options"], advertise=self._options.advertise)
        workers: dict[int, Address] = {rank: (host, port) for rank, (host, port) in enumerate(invitation["workers"])}
        for host, _ in workers.values():
            socket.getaddrinfo(host, None, socket.AF_INET)
        ports = self.address[1], *range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT), 0
        sock = bind_socket(self.address[0], ports)
        address, _ = advertised(options, OwnAddresses(""), sock.getsockname()[1])
        # To each worker goes one flow, from the server.
        transport = replace(options.transport(len(workers)), flow_weight=1.0)
        token = invitation["token"] ^ _mask(self._secret, invitation["session"])
        endpoint = Endpoint(len(workers), sock, workers, job=options.job, token=token, options=transport)
        server = ParameterServer(
            endpoint.connection, list(workers), options=options.reduction(), weighted=options.weighted
        )
        self.ledgers.append(server.ledger)
        self._report(f"job {options.job} with {len(workers)} workers begins")
        return _Served(endpoint, server), address

    def _leave(self, session: str, reason: str | None) -> None:
        """Leave the workers, in a thread of its own: without a ``reason`` it lasts until they have all averages."""
        served, self._servers[session] = self._servers[session], None
        if served:
            job = f"job {served.endpoint.connection.job} with {len(served.server.workers)} workers"
            self._report(f"{job} has ended: {reason}" if reason else f"{job} has ended")
            thread = threading.Thread(target=served.endpoint.close, args=(reason,), name="dlcp-session-end")
            thread.start()
            self._leaving.append(thread)

    def close(self) -> None:
        """Leave all sessions, whose workers go on without the server."""
        for session in self._servers:
            self._leave(session, "the parameter server was stopped")
        for thread in self._leaving:
            thread.join()
        self._store.close()
        self._door.close()
