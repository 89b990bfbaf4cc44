# SPDX-License-Identifier: Apache-2.0
"""Keep the switches of a fabric in the wanted state: after a restart, a lost connection, or changes by others.

Their counters are served to Prometheus. The fabric bounds the labels: its switches, their ports, eight queues, eight
drop classes, nine events. An event that has not happened yet has no sample.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from finsy.proto import p4r
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlcp.controller.compiled_program import KINDS, CompiledProgram
from dlcp.controller.entries import entries
from dlcp.controller.fabric import Fabric, FabricSwitch, Port, dispensable
from dlcp.controller.links import LinkLosses
from dlcp.controller.switch_client import (
    ELECTION_ID,
    LOGGER,
    ControlError,
    Outcome,
    QueueError,
    Readings,
    Session,
    read_counters,
    read_ports,
    reconcile,
    set_up_queues,
)
from dlcp.inputs.addresses import parse_address
from dlcp.switch import EventCount

_PORT: Final = ["switch", "port"]
_EVENT: Final = [*_PORT, "queue", "event"]


@dataclass
class SwitchStatus:
    """The controller's view of one switch.

    Parameters
    ----------
    ports
        The numbers of the ports that have a link.
    connected
        Whether it answers and this controller is the primary.
    readings
        Its last counter readings.
    reconciles, failures
        Number of comparisons with the wanted state, and of connections that ended with an error.
    installs, reroutes
        Number of times the program was installed, and routes were changed because of a bad switch or link.
    changes
        Entries inserted, modified and deleted.
    writes
        Number of write requests.
    elapsed_s
        Duration of the last comparison and its writes, in seconds.
    lost
        Share of the packets to another switch that did not arrive there, as last measured; by port.
    avoided
        Ports whose link routes avoid, or use for few packets, on trial.
    """

    ports: frozenset[int]
    connected: bool = False
    readings: Readings | None = None
    reconciles: int = 0
    failures: int = 0
    installs: int = 0
    reroutes: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    writes: int = 0
    elapsed_s: float = 0.0
    lost: dict[int, float] = field(default_factory=dict)
    avoided: frozenset[int] = frozenset()

    @property
    def events(self) -> tuple[EventCount, ...]:
        """Return the program's event counters as last read."""
        return self.readings.events if self.readings is not None else ()


_METRICS: Final = (
    (GaugeMetricFamily, "dlcp_switch_connected", "1 if this controller controls the switch", "connected"),
    (GaugeMetricFamily, "dlcp_switch_reconcile_seconds", "Duration of the last comparison and its writes", "elapsed_s"),
    (CounterMetricFamily, "dlcp_switch_reconciles", "Comparisons with the wanted state", "reconciles"),
    (CounterMetricFamily, "dlcp_switch_failures", "Errors of the control connection", "failures"),
    (CounterMetricFamily, "dlcp_switch_installs", "Times the program was installed", "installs"),
    (CounterMetricFamily, "dlcp_switch_reroutes", "Changes of routes because of a bad switch or link", "reroutes"),
    (CounterMetricFamily, "dlcp_switch_writes", "P4Runtime write requests", "writes"),
)
"""Metrics that are a single field of `SwitchStatus`."""


class FabricCollector(Collector):
    """Turns the state of the switches into metrics at each scrape.

    Parameters
    ----------
    states
        The state of each switch, by name; may change between scrapes.
    """

    def __init__(self, states: Mapping[str, SwitchStatus]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        for kind, name, help_text, field_name in _METRICS:
            metric = kind(name, help_text, labels=["switch"])
            for switch, state in self._states.items():
                metric.add_metric([switch], float(getattr(state, field_name)))
            yield metric
        changes = CounterMetricFamily("dlcp_switch_changes", "Changed entries", labels=["switch", "action"])
        for name, state in self._states.items():
            for action in KINDS.values():
                changes.add_metric([name, action], state.changes[action])
        yield changes
        yield from self._events()
        yield self._drops()
        yield self._depths()
        yield from self._of_links()

    def _events(self) -> Iterable[Metric]:
        packets = CounterMetricFamily("dlcp_switch_event_packets", "Packets by event", labels=_EVENT)
        octets = CounterMetricFamily("dlcp_switch_event_bytes", "Bytes by event", labels=_EVENT)
        for switch, state in self._states.items():
            totals: dict[tuple[str, ...], list[int]] = {}
            for count in state.events:
                labels = (switch, _port(state, count.port), str(count.queue), count.event)
                total = totals.setdefault(labels, [0, 0])
                total[0] += count.packets
                total[1] += count.bytes
            for place, (packet_count, byte_count) in totals.items():
                packets.add_metric(place, packet_count)
                octets.add_metric(place, byte_count)
        yield packets
        yield octets

    def _drops(self) -> Metric:
        labels = ["switch", "port", "drop_class"]
        metric = CounterMetricFamily("dlcp_switch_policy_drops", "Packets dropped by policy", labels=labels)
        for switch, state in self._states.items():
            totals: Counter[tuple[str, str]] = Counter()
            for count in state.events:
                if count.event == "POLICY_DROP":
                    totals[_port(state, count.port), str(count.drop_class)] += count.packets
            for (port, drop_class), packets in totals.items():
                metric.add_metric([switch, port, drop_class], packets)
        return metric

    def _of_links(self) -> Iterable[Metric]:
        lost = GaugeMetricFamily("dlcp_link_lost_share", "Share of packets lost after a port", labels=_PORT)
        avoided = GaugeMetricFamily("dlcp_link_avoided", "1 if routes avoid the link at a port", labels=_PORT)
        for switch, state in self._states.items():
            for port, share in state.lost.items():
                lost.add_metric([switch, str(port)], share)
                avoided.add_metric([switch, str(port)], float(port in state.avoided))
        yield lost
        yield avoided

    def _depths(self) -> Metric:
        labels = ["switch", "port", "queue"]
        metric = GaugeMetricFamily("dlcp_switch_queue_depth_packets", "Packets in a queue", labels=labels)
        for switch, state in self._states.items():
            depths = state.readings.depths if state.readings is not None else None
            for (port, queue), depth in (depths or {}).items():
                metric.add_metric([switch, str(port), str(queue)], depth)
        return metric


def serve(states: Mapping[str, SwitchStatus], address: str) -> Callable[[], None]:
    """Serve metrics to Prometheus at ``HOST:PORT``; return a function that stops the server.

    Raises
    ------
    OSError
        The server cannot listen on the address.
    """
    host, port = parse_address(address)
    registry = CollectorRegistry()
    registry.register(FabricCollector(states))
    server, thread = start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _port(state: SwitchStatus, port: int) -> str:
    """Return a port's label; ports without a link share one."""
    return str(port) if port in state.ports else "other"


_EVERY_S: Final = 5.0
"""Interval between comparisons and counter readings: shorter than Prometheus' usual scrape interval."""
_LINKS_EVERY_S: Final = 1.0
"""Interval between readings of the counters at both ends of links; what they show may take several. Not tuned."""
RETRY_S: Final = 0.25
RETRY_MAX_S: Final = 5.0
"""First and longest wait before the next attempt to reach a switch that does not answer. Not tuned."""


class Watcher:
    """Keeps all switches of a fabric in the wanted state.

    As long as all hosts still reach each other, routes avoid a switch that does not answer, until it answers again and
    holds its entries, and a link that is dead or loses packets, until a trial with few packets shows that it is good.

    Parameters
    ----------
    fabric, pipeline
        The wanted state: the fabric and the compiled program.
    election_id
        Of several controllers, the one with the highest id writes; the others stand by to replace it.
    every_s
        Interval between comparisons and counter readings, in seconds. A lost connection is noticed at once; links are
        compared each second, or as often as this, if it is shorter.

    Attributes
    ----------
    states
        The state of each switch, by name.

    Raises
    ------
    PipelineError
        A switch's entries do not fit the program.
    """

    def __init__(
        self, fabric: Fabric, pipeline: CompiledProgram, *, election_id: int = ELECTION_ID, every_s: float = _EVERY_S
    ) -> None:
        self._fabric, self._pipeline, self._election_id, self._every_s = fabric, pipeline, election_id, every_s
        self._down: set[str] = set()
        self._links = LinkLosses(fabric)
        self._sessions: dict[str, Session] = {}
        """With the switches that answer."""
        self._avoided: frozenset[str | Port] = frozenset()
        self._on_trial: frozenset[Port] = frozenset()
        self._rerouted = asyncio.Event()
        self._wanted = self._encoded()
        self._switches = tuple(switch for switch in fabric.switches if switch.grpc)
        self.states: Mapping[str, SwitchStatus] = {
            switch.name: SwitchStatus(frozenset(fabric.neighbours[switch.name])) for switch in self._switches
        }

    def _encoded(self) -> dict[str, list[p4r.Entity]]:
        """Return what each switch should hold."""
        names = [switch.name for switch in self._fabric.switches]
        return {
            name: self._pipeline.encode(entries(self._fabric, name, self._avoided, self._on_trial)) for name in names
        }

    def _reroute(self) -> None:
        """Change the routes of all switches if other switches or links are bad than before."""
        on_trial = self._links.on_trial
        avoided = dispensable(self._fabric, self._down, self._links.suspects) - on_trial
        if (avoided, on_trial) == (self._avoided, self._on_trial):
            return
        if avoided != self._avoided:
            parts = sorted(str(part) for part in avoided)
            LOGGER.info("routes avoid %s", ", ".join(parts) or "nothing any more")
        self._avoided, self._on_trial = avoided, on_trial
        wanted = self._encoded()
        for name, state in self.states.items():
            state.reroutes += wanted[name] != self._wanted[name]
            state.avoided = frozenset(port for port in state.ports if Port(name, port) in avoided | on_trial)
        self._wanted = wanted
        self._rerouted.set()
        self._rerouted = asyncio.Event()

    async def run(self) -> None:
        """Compare and repair all switches until cancelled."""
        await asyncio.gather(self._compare_links(), *(self._keep(switch) for switch in self._switches))

    async def _compare_links(self) -> None:
        """Compare what has left and what has arrived at both ends of the links."""
        while True:
            await asyncio.sleep(min(_LINKS_EVERY_S, self._every_s))
            before = await self._read("arrivals")
            sent = await self._read("departures")
            for line in self._links.note(before, sent, await self._read("arrivals")):
                LOGGER.info("%s", line)
            for name, state in self.states.items():
                state.lost = {port.number: share for port, share in self._links.shares.items() if port.switch == name}
            self._reroute()

    async def _read(self, counter: str) -> dict[Port, int]:
        """Read a counter of all switches that answer; one that does not is missing."""
        asked = [read_ports(session, counter, self._links.ports[name]) for name, session in self._sessions.items()]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for answer in found:  # the end of a session cancels what it is asked
            if isinstance(answer, BaseException) and not isinstance(answer, ControlError | asyncio.CancelledError):
                raise answer
        return {port: count for answer in found if isinstance(answer, dict) for port, count in answer.items()}

    async def _keep(self, switch: FabricSwitch) -> None:
        """Keep a connection to a switch; while it does not answer, retry with exponential backoff."""
        state = self.states[switch.name]
        retry_s = RETRY_S
        said = ""
        while True:
            held = False
            try:
                async with Session(switch, self._pipeline, election_id=self._election_id) as session:
                    await session.become_primary(stand_by=True)
                    await self._hold(session, state, was_lost=bool(said))
            except (ControlError, QueueError) as error:
                held = state.connected
                state.failures += 1
                if held or str(error) != said:  # do not repeat the same warning
                    LOGGER.warning("%s", error)
                said = str(error)
            finally:
                state.connected = False
                self._sessions.pop(switch.name, None)
            self._down.add(switch.name)
            self._reroute()
            retry_s = RETRY_S if held else min(2 * retry_s, RETRY_MAX_S)
            await asyncio.sleep(retry_s)

    async def _hold(self, session: Session, state: SwitchStatus, *, was_lost: bool) -> None:
        """Compare, repair and read counters for as long as the connection lasts."""
        first = True
        while True:
            rerouted = self._rerouted  # of these routes: they may change before the wait below
            outcome = await reconcile(session, self._wanted[session.switch.name])
            self._note(outcome, state)
            if first or outcome.plan.install:
                await self._set_up_queues(session)
            if first and was_lost:
                LOGGER.info(
                    "switch %s at %s: answers again and holds the wanted state",
                    session.switch.name,
                    session.switch.grpc,
                )
            first = False
            state.connected = True
            self._sessions[session.switch.name] = session
            self._down.discard(session.switch.name)
            self._reroute()
            state.readings = await read_counters(session, state.ports)
            change: asyncio.Future[Any] = asyncio.ensure_future(rerouted.wait())
            either = {session.lost, change}
            try:
                done, _ = await asyncio.wait(either, timeout=self._every_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
            for each in done:
                each.result()

    async def _set_up_queues(self, session: Session) -> None:
        """Set up BMv2's queues: a restart resets them, and P4Runtime cannot set them."""
        unset = await set_up_queues(session, self._fabric)
        if unset:
            LOGGER.warning("%s", unset)

    def _note(self, outcome: Outcome, state: SwitchStatus) -> None:
        plan = outcome.plan
        counts = plan.difference.counts()
        state.reconciles += 1
        state.installs += plan.install
        state.changes.update(counts)
        state.writes += outcome.writes
        state.elapsed_s = outcome.elapsed_s
        if plan:
            LOGGER.info(
                "switch %s: %s%d inserted, %d modified, %d deleted, %d unchanged, in %.2f s",
                plan.switch.name,
                "program installed, " if plan.install else "",
                counts["insert"],
                counts["modify"],
                counts["delete"],
                plan.difference.kept,
                outcome.elapsed_s,
            )
