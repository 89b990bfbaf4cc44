# SPDX-License-Identifier: Apache-2.0
"""BMv2's simple_switch as a target of packet tests."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from dlcp.switch import MeterConfig
from dlcp.switch.entry_files import Value
from tests.conformance.recorder import ANSWER_S, BURST_ENQUEUED_US, BURST_RATE_PPS, MARGIN_US, SLOT_IDLE_US, Uncertain
from tests.conformance.recording import Markers
from tests.conformance.simple_switch import DEADLINE_S, SimpleSwitch
from tests.conformance.sites import GREEN
from tests.waiting import until


class Bmv2:
    """One simple_switch for many tests, with markers to tell when it has settled: see `recorder`."""

    def __init__(self, switch: SimpleSwitch) -> None:
        self.switch = switch
        self._markers = 0
        self._sent = False
        self._released = False
        self._slow_since_us: dict[int, int] = {}
        self._slowed: set[int] = set()
        until(lambda: self.switch.now_us() >= SLOT_IDLE_US + 2 * MARGIN_US)

    def close(self) -> None:
        self.switch.close()

    def restart(self) -> None:
        if self._slowed:
            for port in self._slowed:
                self.switch.set_queues(port)
            self._slowed.clear()
            self._all(3 / BURST_RATE_PPS)
        self._released = self._sent = False
        self.remove_all()
        self.switch.reset_state()

    # ------------------------------------------------------------------------------------------------------ entries

    def insert(self, entry: Mapping[str, Any]) -> None:
        self.switch.change("insert", entry)
        if self.switch.metered(entry["table"]) and "meter" not in entry:
            # BMv2 leaves the meter of an entry that is gone to the next one of its handle.
            self.switch.set_meter(entry["table"], entry["match"], entry.get("priority", 0), GREEN)

    def modify(self, entry: Mapping[str, Any]) -> None:
        self.switch.change("modify", entry)

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        self.switch.change("delete", {"table": table, "match": dict(match), "priority": priority})

    def remove_all(self) -> None:
        self.switch.set_entries({})
        for entry in Markers.ENTRIES:
            self.insert(entry)

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        self.switch.set_default(table, action, params)

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        self.switch.add_member(profile, number, action, params)

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        self.switch.set_group(profile, number, list(members))

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterConfig) -> None:
        self.switch.set_meter(table, match, priority, dataclasses.asdict(rates))

    # -------------------------------------------------------------------------------------------------------- state

    def write_register(self, name: str, index: int, value: int) -> None:
        self.switch.write_register(name, index, value)

    def read_register(self, name: str, index: int) -> int:
        return self.switch.read_register(name, index)

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        return self.switch.read_counter(name, index)

    def now_us(self) -> int:
        return self.switch.now_us()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    # ------------------------------------------------------------------------------------------------------ packets

    def slow(self, port: int, depth_packets: int) -> None:
        self.switch.set_queues(port, BURST_RATE_PPS, depth_packets)
        time.sleep(1 / BURST_RATE_PPS)  # what a queue let out a moment ago would hold the first packet up
        self._slow_since_us[port] = self.switch.now_us()
        self._slowed.add(port)

    def release(self, port: int) -> None:
        took_us = self.switch.now_us() - self._slow_since_us.pop(port)
        if took_us > 1.5 * BURST_ENQUEUED_US:
            raise Uncertain(f"filling the queues of port {port} took {took_us} us; the machine is too busy")
        self.switch.set_queues(port)
        self._released = True

    def send(self, port: int, data: bytes) -> None:
        self.switch.send(port, data)
        self._sent = True

    def receive(self) -> list[tuple[int, bytes]]:
        if self._released:
            self._released = False
            return self._all(3 / BURST_RATE_PPS)
        if not self._sent:
            return []
        self._sent = False
        if self._slow_since_us:  # there is no time for markers: what waits leaves soon
            return self._all(2 * ANSWER_S)
        first = self.switch.receive(ANSWER_S)
        return [first] if first is not None else self._before_markers()

    def _all(self, idle_s: float) -> list[tuple[int, bytes]]:
        came = []
        while answer := self.switch.receive(idle_s):
            came.append(answer)
        return came

    def _before_markers(self) -> list[tuple[int, bytes]]:
        """Send markers and wait for them; return what came out besides."""
        self._markers += 1
        awaited = []
        for marker in Markers(self._markers).packets():
            awaited.append(marker.answer)
            self.switch.send(marker.port, marker.data)
        came = []
        while awaited:
            answer = self.switch.receive(DEADLINE_S)
            if answer is None:
                raise Uncertain("simple_switch does not answer any more")
            if answer in awaited:
                awaited.remove(answer)
            else:
                came.append(answer)
        return came or self._all(ANSWER_S)  # queue 0 comes after the markers' own
