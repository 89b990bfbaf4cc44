# SPDX-License-Identifier: Apache-2.0
"""Serve the page and the metrics of a training. Failures of the server or its clients do not affect the ranks.

====================  =================================================================================
``/``                 the page; it loads only ``/events``
``/state``            the page's content as JSON (:meth:`dlcp.live.ranks.Training.document`)
``/events``           the same as server-sent events, whenever it changes
``/metrics``          metrics for Prometheus (:class:`RankCollector`)
====================  =================================================================================

The metrics of switches are in :mod:`dlcp.controller.watch`. Labels are bounded: a session's ranks, and their peers. The
session's name is unique to each run.
"""

import ipaddress
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dlcp.host.closing import Closing
from dlcp.host.ip import FAMILIES, loopback
from dlcp.inputs.addresses import Address, format_address, parse_listening
from dlcp.live.ranks import RankProgress, Training
from dlcp.report.style import render
from dlcp.session.slowness import Cause
from dlcp.session.snapshots import STEP_EDGES_S, UNKNOWN, WATCHED, RankSnapshot
from dlcp.session.training_session import SessionPhase
from dlcp.transport.ledger import COUNTS

REFRESH_S: Final = 0.5
"""Interval at which files are read; short against the second between two snapshots of a rank."""
QUIET_S: Final = 2.0
"""Interval of updates to pages when no rank has written, so that they show how long ranks are silent. Not tuned."""
CLIENTS_MAX: Final = 32
"""Most clients served at a time; further connections are closed. Limits the threads: one per client. Not tuned."""
CLIENT_S: Final = 10.0
"""Timeout after which an idle client is disconnected. Not tuned."""
HEARTBEAT_S: Final = 5.0
"""Longest time without a write to a page, so that a closed connection is noticed. Not tuned."""
GOODBYE_S: Final = 1.0
"""Longest wait for pages to receive the last state; short, because the training's exit waits for it."""
_TEMPLATE: Final = Path(__file__).with_name("page.html")
log = logging.getLogger("dlcp")


class AddressError(ValueError):
    """The page cannot be served at an address; the message says why."""


def parse_listen(text: str) -> Address:
    """Return host and port of ``PORT`` or ``HOST:PORT``; without a host, loopback.

    Raises
    ------
    AddressError
        The text is neither.
    """
    try:
        return parse_listening(text, (loopback(), None))
    except ValueError as error:
        raise AddressError(f"takes PORT or HOST:PORT: {error}") from None


class LiveServer(Closing, ThreadingHTTPServer):
    """The HTTP server of a training's page. A context manager; on exit it sends pages the last state.

    Parameters
    ----------
    folders
        Folders in which ranks write snapshots.
    address
        Address to listen on, see :func:`parse_listen`; port 0 takes a free one.

    Raises
    ------
    AddressError
        The address is malformed, or cannot be listened on; the message says why.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], address: str) -> None:
        host, port = parse_listen(address)
        self.nonce = secrets.token_urlsafe(16)
        self.page = render(_TEMPLATE, nonce=self.nonce).encode()
        self.state = b"{}"
        self.snapshots: Sequence[RankSnapshot] = ()
        self.refused = 0
        self._training = Training(folders)
        self._changed = threading.Condition()
        self._version = 0
        self._followers = 0
        self._last = False
        """Whether the state is the last one."""
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(CLIENTS_MAX)
        try:
            family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = family
            super().__init__((str(found[0]), port), _Handler)
        except OSError as error:
            words = f"cannot listen on {host} port {port}: {error.strerror or error}"
            raise AddressError(f"{words}; choose another port, or 0 for a free one") from None
        self._publish()
        self._refresher = threading.Thread(target=self._refresh, name="dlcp-live-refresh", daemon=True)
        self._refresher.start()
        threading.Thread(target=self.serve_forever, name="dlcp-live", daemon=True).start()

    @property
    def url(self) -> str:
        """The page's URL for a browser on this machine."""
        host, port = str(self.server_address[0]), self.server_address[1]
        name = next((each.loopback for each in FAMILIES if each.any_address == host), host)
        return f"http://{format_address((name, port))}/"

    @property
    def is_local(self) -> bool:
        """Whether the server listens on a loopback address only."""
        return ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_loopback

    def wait_for(self, version: int) -> tuple[int, bytes | None, bool]:
        """Wait for another version of the state; return the version, the state, and whether it is final.

        After :data:`HEARTBEAT_S` without a change the state is None.
        """
        with self._changed:
            new = self._changed.wait_for(lambda: self._version != version or self._last, HEARTBEAT_S)
            return self._version, self.state if new else None, self._last

    def follow(self, by: int) -> None:
        """Add ``by`` to the number of connected pages."""
        with self._changed:
            self._followers += by
            self._changed.notify_all()

    def training_is_over(self) -> None:
        """Show on the page, from its next state on, that all ranks have ended."""
        self._training.over = True

    def close(self) -> None:
        """Send pages the last state, and end."""
        self._closing.set()
        self._refresher.join(GOODBYE_S)
        with self._changed:
            self._changed.wait_for(lambda: not self._followers, GOODBYE_S)
        self.shutdown()
        self.server_close()

    def _refresh(self) -> None:
        over, due_s = False, 0.0
        while not over:
            over = self._closing.wait(REFRESH_S)
            try:
                if self._training.refresh() or over or time.monotonic() >= due_s:
                    due_s = time.monotonic() + QUIET_S
                    self._publish()
            except Exception:  # page errors must not stop training
                log.exception("DLCP: the live page could not be updated; it shows the previous state")
        with self._changed:
            self._last = True
            self._changed.notify_all()

    def _publish(self) -> None:
        """Store the current state and metrics for clients, and wake them."""
        state = json.dumps(self._training.document(), separators=(",", ":"), allow_nan=False).encode()
        with self._changed:
            self.state, self.snapshots = state, self._training.snapshots
            self.refused = len(self._training.refused)
            self._version += 1
            self._changed.notify_all()

    # Methods of the base class ----------------------------------------------------------------------------------------

    def server_bind(self) -> None:
        """Bind without the base class's name lookup."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = map(str, self.server_address[:2])  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it if there are too many."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client's error at debug level."""
        log.debug("the live page: %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: LiveServer
    timeout = CLIENT_S
    server_version, sys_version = "dlcp", ""

    def do_GET(self) -> None:
        """Answer."""
        if not self._may_ask():
            self.send_error(HTTPStatus.FORBIDDEN, "use localhost or an IP address in the URL, not a host name")
            return
        match self.path.partition("?")[0]:
            case "/":
                self._answer("text/html; charset=utf-8", self.server.page)
            case "/state":
                self._answer("application/json", self.server.state)
            case "/events":
                self._follow()
            case "/metrics":
                registry = CollectorRegistry()
                registry.register(RankCollector(self.server.snapshots, self.server.refused))
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
                self._answer(kind, encode(registry))
            case _:
                self.send_error(HTTPStatus.NOT_FOUND, "use /, /state, /events or /metrics")

    def _may_ask(self) -> bool:
        """Whether the Host header is localhost or an IP address; another name may be a DNS rebinding attack."""
        if not self.server.is_local:
            return True
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            return name == "localhost" or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _head(self, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        script = f"script-src 'nonce-{self.server.nonce}'; style-src 'unsafe-inline'; img-src data:"
        none = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        self.send_header("Content-Security-Policy", f"{none}; connect-src 'self'; {script}")

    def _answer(self, kind: str, body: bytes) -> None:
        self._head(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _follow(self) -> None:
        """Send the state whenever it changes, until it is final or the client has gone."""
        self._head("text/event-stream")
        self.end_headers()
        version, last = -1, False
        self.server.follow(1)
        try:
            while not last:
                version, state, last = self.server.wait_for(version)
                self.wfile.write(b":\n\n" if state is None else b"data: " + state + b"\n\n")
        finally:
            self.server.follow(-1)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


# Metrics --------------------------------------------------------------------------------------------------------------


_RANK: Final = ["session", "rank"]
RANK_PHASES: Final = (*(phase.value for phase in SessionPhase if phase is not SessionPhase.CLOSED), WATCHED)
"""Phases of a rank. A closed session reports its last phase before."""
_PACKETS: Final = {
    "sent": "Packets sent, each transmission counted",
    "delivered": "Packets that arrived",
    "lost": "Packets that never arrived and were not retransmitted, within the loss bound",
    "retransmitted": "Transmissions after a packet's first",
}
_OF_PEERS: Final = {
    "rate_bytes_per_second": (
        "rate_bps",
        1 / 8,
        "Rate at which the peer receives queued packets, where it is known",
    ),
    "window_packets": ("window_packets", 1, "Packets that may be in flight to the peer"),
    "round_trip_seconds": ("rtt_s", 1, "Smoothed round-trip time to the peer, where it is known"),
    "paths": ("paths", 1, "Paths on which packets have been sent to the peer"),
    "paths_left": ("paths_left", 1, "Paths to the peer that were abandoned because others are better"),
}
"""Metrics of peers reached over the network: the name in a snapshot, the factor, and the help text."""
_UNKNOWN_IF_ZERO: Final = ("rate_bps", "rtt_s")


class RankCollector(Collector):
    """Turns snapshots of ranks into metrics.

    Parameters
    ----------
    snapshots
        The latest of each rank.
    refused
        Number of files left out because they are not valid snapshots.
    """

    def __init__(self, snapshots: Sequence[RankSnapshot], refused: int = 0) -> None:
        self._snapshots, self._refused = snapshots, refused

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        if self._refused:
            yield GaugeMetricFamily("dlcp_rank_refused_snapshots", "Files that are not valid snapshots", self._refused)
        yield self._about()
        yield self._steps()
        yield from self._times()
        yield from self._states()
        yield from self._slowness()
        for name in COUNTS:
            metric = CounterMetricFamily(f"dlcp_rank_{name}_packets", _PACKETS[name], labels=[*_RANK, "peer"])
            for each in self._snapshots:
                for peer, counts in each["packets"].items():
                    metric.add_metric([*_rank(each), peer], counts[name])
            yield metric
        coding = CounterMetricFamily(
            "dlcp_rank_precision_packets", "Packets of messages, by the bits of a value", labels=[*_RANK, "bits"]
        )
        for each in self._snapshots:
            for bits, (packets, _) in each["by_bits"].items():
                coding.add_metric([*_rank(each), bits], packets)
        yield coding
        for name, (key, factor, words) in _OF_PEERS.items():
            of_peers = GaugeMetricFamily(f"dlcp_rank_peer_{name}", words, labels=[*_RANK, "peer"])
            for each in self._snapshots:
                for peer, about in each["peers"].items():
                    if about.get(key, 0) or (key in about and key not in _UNKNOWN_IF_ZERO):
                        of_peers.add_metric([*_rank(each), peer], factor * about[key])
            yield of_peers

    def _about(self) -> Metric:
        labels = [*_RANK, "process_rank", "host"]
        metric = GaugeMetricFamily("dlcp_rank_info", "1, with the place where the rank runs as labels", labels=labels)
        for each in self._snapshots:
            metric.add_metric([*_rank(each), str(each["process_rank"]), each["host"]], 1)
        return metric

    def _steps(self) -> Metric:
        metric = HistogramMetricFamily("dlcp_rank_step_seconds", "Duration of training steps", labels=_RANK)
        edges = ["+Inf" if edge == math.inf else str(edge) for edge in STEP_EDGES_S]
        for each in self._snapshots:
            buckets = list(zip(edges, map(float, accumulate(each["steps"])), strict=True))
            metric.add_metric(_rank(each), buckets, each["step_s"])
        return metric

    def _times(self) -> Iterable[Metric]:
        computing = CounterMetricFamily(
            "dlcp_rank_compute_seconds", "Time that steps did not spend waiting for averages", labels=_RANK
        )
        waiting = CounterMetricFamily(
            "dlcp_rank_waiting_seconds",
            "Time that steps waited for averages, by the peer whose message ended the wait",
            labels=[*_RANK, "peer"],
        )
        for each in self._snapshots:
            done = RankProgress.between(None, each)
            computing.add_metric(_rank(each), done.computing_s * done.steps)
            for peer, waited_s in each["waiting_s"].items():
                waiting.add_metric([*_rank(each), "unknown" if peer == UNKNOWN else peer], waited_s)
        yield computing
        yield waiting

    def _states(self) -> Iterable[Metric]:
        phase = GaugeMetricFamily("dlcp_rank_phase", "1 for the rank's current phase", labels=[*_RANK, "phase"])
        ended = GaugeMetricFamily("dlcp_rank_ended", "1 if the rank has left the session", labels=_RANK)
        exceeded = CounterMetricFamily(
            "dlcp_rank_bound_exceeded_messages", "Messages that lost more than the loss bound allows", labels=_RANK
        )
        precision = GaugeMetricFamily(
            "dlcp_rank_precision_bits", "Bits of a value in the latest steps; 32 for all of them", labels=_RANK
        )
        written = GaugeMetricFamily(
            "dlcp_rank_snapshot_timestamp_seconds", "Unix time of the rank's latest snapshot", labels=_RANK
        )
        there = GaugeMetricFamily("dlcp_rank_session_ranks", "Ranks that take part in the rank's session", labels=_RANK)
        stood = CounterMetricFamily(
            "dlcp_rank_stood_seconds", "How long training stood still because ranks came or went", labels=_RANK
        )
        for each in self._snapshots:
            rank = _rank(each)
            there.add_metric(rank, len(each["ranks"]))
            stood.add_metric(rank, each["stood_s"])
            for known in RANK_PHASES:
                phase.add_metric([*rank, known], each["phase"] == known)
            ended.add_metric(rank, each["ended"])
            exceeded.add_metric(rank, each["bound_exceeded"])
            precision.add_metric(rank, each["bits"])
            written.add_metric(rank, each["written_unix_s"])
        yield from (phase, ended, exceeded, precision, written, there, stood)

    def _slowness(self) -> Iterable[Metric]:
        spent = CounterMetricFamily(
            "dlcp_rank_activity_seconds", "Duration of a rank's activities in its steps", labels=[*_RANK, "activity"]
        )
        delay = GaugeMetricFamily(
            "dlcp_rank_delay_seconds",
            "Time per step for which the others wait for this rank, if it is the slowest, by the cause",
            labels=[*_RANK, "cause"],
        )
        for each in self._snapshots:
            for activity, total_s in each["activities_s"].items():
                spent.add_metric([*_rank(each), activity], total_s)
            if slow := each["slow"]:
                for cause in Cause:
                    named = slow["rank"] == each["process_rank"] and slow["cause"] == cause.value
                    delay.add_metric([*_rank(each), cause.value], slow["lost_s"] if named else 0.0)
        yield spent
        yield delay


def _rank(snapshot: RankSnapshot) -> list[Any]:
    return [snapshot["session"], str(snapshot["rank"])]
