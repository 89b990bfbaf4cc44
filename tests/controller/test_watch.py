# SPDX-License-Identifier: Apache-2.0
"""The loop that keeps switches in the wanted state, and its metrics for Prometheus."""

import asyncio
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from finsy.proto import p4r
from prometheus_client.parser import text_string_to_metric_families

from dlcp.controller.compiled_program import difference
from dlcp.controller.entries import entries
from dlcp.controller.fabric import FabricSwitch, Port, leaf_spine, star
from dlcp.controller.switch_client import (
    COUNTER_EVENTS,
    QueueError,
    Readings,
    Session,
    _commands,
    queue_depths_unavailable,
    read_counters,
    reconcile,
    set_queue_depths,
    wanted,
)
from dlcp.controller.watch import SwitchStatus, Watcher, serve
from dlcp.switch import EgressEvent, EventCount, IngressEvent, PortQueueing, decode_events, event_index
from tests.controller.switches import described
from tests.transport.free_ports import free_port
from tests.waiting import soon

DEADLINE_S = 30


def fabric_of(switch, **changes):
    """A star of three hosts around a running switch."""
    plain = star(3, ports="packet")
    return replace(plain, switches=(replace(described(switch, "switch"), **changes),))


def run(work):
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


@asynccontextmanager
async def watching(watcher):
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher.states["switch"]
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def held(fabric, pipeline):
    async with Session(fabric.switches[0], pipeline) as session:
        return difference(wanted(fabric, fabric.switches[0], pipeline), await session.entities())


def test_each_loss_of_a_switch_and_its_return_is_logged(switch, pipeline, caplog):
    caplog.set_level("INFO", "dlcp.fabric")

    def said(text):
        return sum(text in record.getMessage() for record in caplog.records)

    async def work():
        watcher = Watcher(fabric_of(switch), pipeline, every_s=0.1)
        async with watching(watcher) as state:
            await soon(lambda: state.connected)
            assert said("answers again") == 0
            for times in (1, 2):
                await asyncio.to_thread(switch.restart)
                await soon(lambda times=times: said("switch switch at") and said("answers again") == times)
                await soon(lambda: state.connected)
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) >= 2, "the second loss, too"

    run(work())


def test_a_restarted_switch_is_restored_and_one_that_is_right_is_left_alone(switch, pipeline):
    fabric = fabric_of(switch)

    async def work():
        watcher = Watcher(fabric, pipeline, every_s=0.1)
        async with watching(watcher) as state:
            await soon(lambda: state.connected)
            writes = state.writes
            reconciles = state.reconciles
            await soon(lambda: state.reconciles > reconciles + 2)
            assert state.writes == writes == 3
            await asyncio.to_thread(switch.restart)
            await soon(lambda: state.installs == 2 and state.connected)
            assert state.failures >= 1
            assert state.writes == 2 * writes
            assert len(await held(fabric, pipeline)) == 0

    run(work())


SERVE = """
import sys, time
from dlcp.switch.p4runtime import P4RuntimeDevice, P4RuntimeServer
from tests.controller.switches import IdleLoop
with P4RuntimeServer(P4RuntimeDevice(IdleLoop()), ("127.0.0.1", int(sys.argv[1]))):
    print(flush=True)
    time.sleep(600)
"""


class SwitchOfItsOwn:
    """The P4Runtime server of a built-in switch in a process, which can be killed and started again."""

    kind = "builtin"

    def __init__(self):
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self):
        self._process = subprocess.Popen([sys.executable, "-c", SERVE, str(self._port)], stdout=subprocess.PIPE)
        self._process.stdout.readline()

    def kill(self):
        with self._process:
            self._process.kill()


@pytest.fixture
def switches():
    """Return the switches of a fabric of two leaves and two spines, which run, and the fabric."""
    running = {name: SwitchOfItsOwn() for name in ("leaf1", "leaf2", "spine1", "spine2")}
    fabric = leaf_spine(2, 2, 1)
    try:
        yield (
            running,
            replace(fabric, switches=tuple(described(running[each.name], each.name) for each in fabric.switches)),
        )
    finally:
        for each in running.values():
            each.kill()


async def until_held(fabric, pipeline, name, without=(), on_trial=()):
    wanted = pipeline.encode(entries(fabric, name, without, on_trial))
    async with Session(fabric.switch(name), pipeline) as session:
        while len(difference(wanted, await session.entities())):
            await asyncio.sleep(0.01)


def test_routes_avoid_a_link_that_loses_packets_until_it_is_good(switches, pipeline, caplog, monkeypatch):
    monkeypatch.setattr("dlcp.controller.links._PATIENCE_S", 3.0)
    caplog.set_level("INFO", "dlcp.fabric")
    _, fabric = switches
    ends = Port("leaf1", 2), Port("spine1", 1)

    async def count(session, name, port, packets):
        entry = p4r.CounterEntry(counter_id=pipeline.schema.counters[name].id, index=p4r.Index(index=port))
        entry.data.packet_count = packets
        await session.write([p4r.Update(type=p4r.Update.MODIFY, entity=p4r.Entity(counter_entry=entry))])

    async def carry(watcher, sent, arrived):
        for name, end, packets in (("departures", ends[0], sent), ("arrivals", ends[1], arrived)):
            await count(watcher._sessions[end.switch], name, end.number, packets)

    async def work():
        watcher = Watcher(fabric, pipeline, every_s=0.05)
        task = asyncio.create_task(watcher.run())
        try:
            await soon(lambda: all(state.connected for state in watcher.states.values()))
            await soon(lambda: ends[0] in watcher._links._began)
            await carry(watcher, 1000, 950)
            for name in ("leaf1", "leaf2", "spine1"):
                await until_held(fabric, pipeline, name, ends)
            assert watcher.states["leaf1"].lost == {2: pytest.approx(0.05)}
            assert watcher.states["spine1"].avoided == {1}
            for name in ("leaf1", "leaf2"):
                await until_held(fabric, pipeline, name, (), ends)
            await soon(lambda: ends[0] in watcher._links._began)
            await carry(watcher, 2000, 1950)
            for name in ("leaf1", "leaf2"):
                await until_held(fabric, pipeline, name)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    run(work())
    assert [record.getMessage() for record in caplog.records if "link" in record.getMessage()] == [
        "link leaf1:2 - spine1:1 loses 5.0% of the packets from leaf1:2",
        "link leaf1:2 - spine1:1 is tried again with few packets",
        "link leaf1:2 - spine1:1 is good again",
    ]


def test_routes_avoid_a_switch_that_is_down_until_it_is_back(switches, pipeline, caplog):
    caplog.set_level("INFO", "dlcp.fabric")
    running, fabric = switches

    async def work():
        watcher = Watcher(fabric, pipeline, every_s=60)
        task = asyncio.create_task(watcher.run())
        try:
            await soon(lambda: all(state.connected for state in watcher.states.values()))
            await until_held(fabric, pipeline, "leaf1")
            running["spine1"].kill()
            await until_held(fabric, pipeline, "leaf1", ["spine1"])
            await until_held(fabric, pipeline, "leaf2", ["spine1"])
            running["leaf2"].kill()
            await soon(lambda: not watcher.states["leaf2"].connected)
            await until_held(fabric, pipeline, "leaf1", ["spine1"])
            running["spine1"].start()
            await until_held(fabric, pipeline, "leaf1")
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    run(work())
    said = [record.getMessage() for record in caplog.records if "avoid" in record.getMessage()]
    assert said == ["routes avoid spine1", "routes avoid nothing any more"]


def test_what_somebody_else_changed_is_put_right(switch, pipeline):
    fabric = fabric_of(switch)

    async def work():
        watcher = Watcher(fabric, pipeline, every_s=0.1)
        async with watching(watcher) as state:
            await soon(lambda: state.connected)
            entity = wanted(fabric, fabric.switches[0], pipeline)[-1]
            async with Session(fabric.switches[0], pipeline, election_id=99) as meddler:
                await meddler.become_primary()
                await meddler.write([p4r.Update(type=p4r.Update.DELETE, entity=entity)])
            # It stood by while the other had the say, and took over when it went.
            await soon(lambda: state.connected and state.changes["insert"] > len(wanted_count(fabric, pipeline)))
            assert len(await held(fabric, pipeline)) == 0
            assert state.installs == 1

    run(work())


def wanted_count(fabric, pipeline):
    return wanted(fabric, fabric.switches[0], pipeline)


def test_counters_are_read_as_they_stand_in_the_switch(switch, pipeline):
    fabric = fabric_of(switch)
    expected = {
        "egress_events": [
            EventCount("FORWARDED", 1, 3, 0, 5, 5000),
            EventCount("FORWARDED", 2, 7, 0, 1, 60),
            EventCount("MARKED", 3, 7, 7, 2, 99),
        ],
        "ingress_events": [EventCount("POLICY_DROP", 2, 4, 6, 9, 1234)],
    }

    async def work():
        async with Session(fabric.switches[0], pipeline) as session:
            await session.become_primary()
            await reconcile(session, wanted_count(fabric, pipeline))
            changes = [
                p4r.Update(type=p4r.Update.MODIFY, entity=counter(pipeline, name, count))
                for name, counts in expected.items()
                for count in counts
            ]
            changes.append(
                p4r.Update(
                    type=p4r.Update.MODIFY,
                    entity=counter(pipeline, "egress_events", EventCount("MARKED", 40, 0, 0, 7, 7)),
                )
            )
            await session.write(changes)
            return await read_counters(session, [1, 2, 3]), await read_counters(session, range(1, 64))

    used, every = run(work())
    assert list(used.events) == [*expected["ingress_events"], *expected["egress_events"]]
    assert len(every.events) == len(used.events) + 1
    assert used.packets("FORWARDED") == 6
    assert used.packets("FORWARDED", port=1) == 5
    if switch.kind == "bmv2":
        assert used.depths is None
    else:
        assert used.depths == {(port, queue): 0 for port in (1, 2, 3) for queue in range(8)}


def counter(pipeline, name, count):
    events = {"ingress_events": IngressEvent, "egress_events": EgressEvent}[name]
    index = event_index(count.port, count.queue, count.drop_class, events[count.event])
    data = p4r.CounterData(packet_count=count.packets, byte_count=count.bytes)
    counter_id = pipeline.schema.counters[name].id
    return p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=counter_id, index=p4r.Index(index=index), data=data))


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_name_switch_port_queue_and_event_and_no_more_of_them_than_there_are():
    state = SwitchStatus(frozenset({1, 2}), connected=True, reconciles=7, writes=3)
    state.changes["insert"] = 5
    state.lost, state.avoided = {1: 0.05, 2: 0.0}, frozenset({1})
    events = [EventCount("FORWARDED", port, 3, drop_class, 10, 1000) for port in range(64) for drop_class in (0, 1)]
    events.append(EventCount("POLICY_DROP", 1, 2, 6, 4, 40))
    state.readings = Readings(tuple(events), {(1, 3): 12})
    address = f"127.0.0.1:{free_port()}"
    stop = serve({"s1": state}, address)
    try:
        found = scrape(address)
    finally:
        stop()
    assert all(name.startswith("dlcp_") for name, _ in found)

    def value(name, **labels):
        return found[name, tuple(sorted({"switch": "s1", **labels}.items()))]

    assert value("dlcp_switch_connected") == 1
    assert value("dlcp_switch_reconciles_total") == 7
    assert value("dlcp_switch_changes_total", action="insert") == 5
    assert value("dlcp_switch_event_packets_total", port="1", queue="3", event="FORWARDED") == 20
    assert value("dlcp_switch_event_bytes_total", port="1", queue="3", event="FORWARDED") == 2000
    assert value("dlcp_switch_event_packets_total", port="other", queue="3", event="FORWARDED") == 62 * 20
    assert value("dlcp_switch_policy_drops_total", port="1", drop_class="6") == 4
    assert value("dlcp_switch_queue_depth_packets", port="1", queue="3") == 12
    assert [value("dlcp_link_lost_share", port=port) for port in "12"] == [0.05, 0]
    assert [value("dlcp_link_avoided", port=port) for port in "12"] == [1, 0]
    assert len({labels for name, labels in found if name == "dlcp_switch_event_packets_total"}) == 4


def test_the_depth_of_bmv2s_queues_is_set_and_refusals_are_named(pipeline):
    from tests.controller.switches import running

    with running("bmv2") as switch:
        reason = queue_depths_unavailable(described(switch, thrift=switch.thrift))
        if reason:
            pytest.skip(reason)
        one = {1: PortQueueing(depth_packets=20), 2: PortQueueing(depth_packets=tuple(range(1, 9)))}
        run(set_queue_depths(described(switch, thrift=switch.thrift), one))
        assert _commands(one)[:3] == ["set_queue_depth 20 1", "set_queue_depth 20 1 7", "set_queue_depth 1 2 0"]
        nowhere = described(switch, thrift=f"127.0.0.1:{free_port()}")
        with pytest.raises(QueueError, match=r"switch s1: simple_switch_CLI at 127.0.0.1:\d+: .*connect"):
            run(set_queue_depths(nowhere, one))


def test_why_depths_cannot_be_set_is_said(monkeypatch):
    assert queue_depths_unavailable(FabricSwitch("a")) == ""
    assert "a has no thrift address" in queue_depths_unavailable(FabricSwitch("a", "bmv2"))
    monkeypatch.setenv("PATH", "")
    assert "simple_switch_CLI is not on PATH" in queue_depths_unavailable(
        FabricSwitch("a", "bmv2", thrift="127.0.0.1:9090")
    )


def test_what_the_program_counts_is_what_the_controller_reads(pipeline):
    """Packets through the built-in switch's program; its own counters and those read over P4Runtime agree."""
    from tests.controller.switches import running
    from tests.controller.traffic_of_a_host import frames

    with running("builtin") as switch:
        fabric = fabric_of(switch)
        fabric = replace(fabric, hosts=(replace(fabric.hosts[0], trusted=False), *fabric.hosts[1:]))

        async def work():
            async with Session(fabric.switches[0], pipeline) as session:
                await session.become_primary()
                await reconcile(session, wanted_count(fabric, pipeline))
                program = switch.loop.program
                for port, frame in frames():
                    packet = bytearray(frame)
                    out, _, carry = program.ingress(packet, port, 1)
                    if out < 64:
                        program.egress(packet, carry, out, 1, 0, 0, 0, 1)
                return program, await read_counters(session, [1, 2, 3])

        program, found = run(work())
    counted = []
    for name, events in COUNTER_EVENTS.items():
        values = program.counters[name].values()
        counted += decode_events(events, values[:, 0], values[:, 1])
    assert list(found.events) == counted
    assert found.packets("UNTRUSTED") > 0
    assert found.packets("NO_ROUTE") > 0
    assert found.packets("FORWARDED", port=2) > 0
