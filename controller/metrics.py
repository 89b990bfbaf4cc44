# SPDX-License-Identifier: Apache-2.0
"""What the controller knows of its switches, in the form that Prometheus collects.

Labels are bounded by the fabric: its switches, their ports, eight queues, eight drop classes, nine events. What has not
happened yet has no sample.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dlcp.controller.difference import Action
from dlcp.controller.readings import Readings
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_EVENT: Final = ["switch", "port", "queue", "event"]


@dataclass
class SwitchState:
    """What the controller knows of one switch.

    Parameters
    ----------
    ports
        The numbers of the ports that have a link.
    connected
        Whether it answers and we are the one controller that writes.
    readings
        What it told last.
    reconciles, failures
        How often its state was compared with what it should be, and how often that ended with an error.
    installs
        How often it was given the program.
    changes
        Entries inserted, modified and deleted.
    writes
        Write requests.
    elapsed_s
        How long the last comparison and what followed from it took.
    """

    ports: frozenset[int]
    connected: bool = False
    readings: Readings | None = None
    reconciles: int = 0
    failures: int = 0
    installs: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    writes: int = 0
    elapsed_s: float = 0.0


class FabricCollector(Collector):
    """Turns what is known of the switches into metrics whenever Prometheus asks.

    Parameters
    ----------
    states
        What is known, by the name of the switch; may change in between.
    """

    def __init__(self, states: Mapping[str, SwitchState]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        yield self._gauge("dlcp_switch_connected", "1 if we control the switch", lambda state: float(state.connected))
        yield self._gauge("dlcp_switch_reconcile_seconds", "Duration of the last one", lambda state: state.elapsed_s)
        yield self._counter("dlcp_switch_reconciles", "Comparisons with what should be", lambda state: state.reconciles)
        yield self._counter("dlcp_switch_failures", "Errors of the control connection", lambda state: state.failures)
        yield self._counter("dlcp_switch_installs", "Times the program was installed", lambda state: state.installs)
        yield self._counter("dlcp_switch_writes", "P4Runtime write requests", lambda state: state.writes)
        changes = CounterMetricFamily("dlcp_switch_changes", "Changed entries", labels=["switch", "action"])
        for name, state in self._states.items():
            for action in Action:
                changes.add_metric([name, action.value], state.changes[action.value])
        yield changes
        yield from self._events()
        yield self._drops()
        yield self._depths()

    def _gauge(self, name: str, help_text: str, value: Callable[[SwitchState], float]) -> Metric:
        metric = GaugeMetricFamily(name, help_text, labels=["switch"])
        for switch, state in self._states.items():
            metric.add_metric([switch], value(state))
        return metric

    def _counter(self, name: str, help_text: str, value: Callable[[SwitchState], float]) -> Metric:
        metric = CounterMetricFamily(name, help_text, labels=["switch"])
        for switch, state in self._states.items():
            metric.add_metric([switch], value(state))
        return metric

    def _events(self) -> Iterable[Metric]:
        packets = CounterMetricFamily("dlcp_switch_event_packets", "Packets by what happened to them", labels=_EVENT)
        octets = CounterMetricFamily("dlcp_switch_event_bytes", "Bytes by what happened to them", labels=_EVENT)
        for switch, state in self._states.items():
            totals: dict[tuple[str, ...], list[int]] = {}
            for count in state.readings.events if state.readings is not None else ():
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
            for count in state.readings.events if state.readings is not None else ():
                if count.event == "POLICY_DROP":
                    totals[_port(state, count.port), str(count.drop_class)] += count.packets
            for (port, drop_class), packets in totals.items():
                metric.add_metric([switch, port, drop_class], packets)
        return metric

    def _depths(self) -> Metric:
        labels = ["switch", "port", "queue"]
        metric = GaugeMetricFamily("dlcp_switch_queue_depth_packets", "Depth when a packet last left", labels=labels)
        for switch, state in self._states.items():
            depths = state.readings.depths if state.readings is not None else None
            for (port, queue), depth in (depths or {}).items():
                metric.add_metric([switch, str(port), str(queue)], depth)
        return metric


def serve(states: Mapping[str, SwitchState], address: str) -> Callable[[], None]:
    """Answer Prometheus at ``HOST:PORT``; returns what stops that.

    Raises
    ------
    OSError
        The address cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(FabricCollector(states))
    server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _port(state: SwitchState, port: int) -> str:
    """Return a port's label; ports that the fabric does not know share one."""
    return str(port) if port in state.ports else "other"
