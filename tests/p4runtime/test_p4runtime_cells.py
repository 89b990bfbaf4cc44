# SPDX-License-Identifier: Apache-2.0
from collections import Counter

import pytest
from finsy.proto import p4r

from tests.p4runtime.control import DELETE, INSERT, MODIFY, Code

SIZE = 32_768
PORTS = 64


def values(entities):
    return [(item.counter_entry.data.packet_count, item.counter_entry.data.byte_count) for item in entities]


def test_counters_are_read_and_cleared(control):
    words = control.words
    data = {"packet_count": 7, "byte_count": 1 << 40}
    written = words.cell("counter", "egress_events", 5, data=data)
    control.write(MODIFY, written)
    assert control.read(words.cell("counter", "egress_events", 5)) == [written]
    assert values(control.read(words.cell("counter", "ingress_events", 5))) == [(0, 0)]
    control.write(MODIFY, words.cell("counter", "egress_events", 0, data=data))
    every = control.read(words.cell("counter", "egress_events", None))
    assert [item.counter_entry.index.index for item in every] == list(range(SIZE))
    assert [index for index, value in enumerate(values(every)) if value != (0, 0)] == [0, 5]
    control.write(MODIFY, words.cell("counter", "egress_events", 5, data={}))
    assert values(control.read(words.cell("counter", "egress_events", 5))) == [(0, 0)]
    control.refuses(INSERT, written, Code.INVALID_ARGUMENT)


def test_all_counters_are_read_at_once(control):
    found = control.read(p4r.Entity(counter_entry=p4r.CounterEntry()))
    sizes = {"ingress_events": SIZE, "egress_events": SIZE, "arrivals": PORTS, "departures": PORTS}
    ids = {control.words.id("counters", name): size for name, size in sizes.items()}
    assert Counter(item.counter_entry.counter_id for item in found) == ids


def test_cells_that_are_not_there(control):
    words = control.words
    for index, code in ((-1, Code.INVALID_ARGUMENT), (SIZE, Code.OUT_OF_RANGE), (1 << 60, Code.OUT_OF_RANGE)):
        cell = words.cell("counter", "egress_events", index, data={"packet_count": 1})
        control.refuses(MODIFY, cell, code)
    unknown = words.cell("counter", "egress_events", 1, data={"packet_count": 1})
    unknown.counter_entry.counter_id += 1
    control.refuses(MODIFY, unknown, Code.INVALID_ARGUMENT)


def test_a_whole_array_is_set_at_once(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc sets one cell at a time")
    words = control.words
    control.write(MODIFY, words.cell("counter", "egress_events", None, data={"packet_count": 3, "byte_count": 4}))
    assert set(values(control.read(words.cell("counter", "egress_events", None)))) == {(3, 4)}
    assert set(values(control.read(words.cell("counter", "ingress_events", None)))) == {(0, 0)}
    control.write(MODIFY, words.cell("counter", "egress_events", None))
    assert values(control.read(words.cell("counter", "egress_events", 9))) == [(3, 4)]
    control.refuses(DELETE, words.cell("counter", "egress_events", 1), Code.INVALID_ARGUMENT)
    negative = words.cell("counter", "egress_events", 1, data={"packet_count": -1})
    control.refuses(MODIFY, negative, Code.INVALID_ARGUMENT)


def test_meters(kinds):
    words = kinds.words
    config = {"cir": 5, "cburst": 6, "pir": 1_000_000, "pburst": 8}
    written = words.cell("meter", "colours", 3, config=config)
    kinds.write(MODIFY, written)
    assert kinds.read(words.cell("meter", "colours", 3)) == [written]
    every = kinds.read(words.cell("meter", "colours", None))
    assert len(every) == 16
    assert [item.meter_entry.HasField("config") for item in every].count(True) == 1
    kinds.write(MODIFY, words.cell("meter", "colours", 3))
    assert not kinds.read(words.cell("meter", "colours", 3))[0].meter_entry.HasField("config")
    for kind in (INSERT, DELETE):
        kinds.refuses(kind, written, Code.INVALID_ARGUMENT)
    kinds.refuses(MODIFY, words.cell("meter", "colours", 16, config=config), Code.OUT_OF_RANGE)
    negative = words.cell("meter", "colours", 1, config={**config, "cir": -5})
    kinds.refuses(MODIFY, negative, Code.INVALID_ARGUMENT)
    inverted = words.cell("meter", "colours", 1, config={**config, "cir": 2_000_000})
    kinds.refuses(MODIFY, inverted, Code.INVALID_ARGUMENT)
    huge = words.cell("meter", "colours", 1, config={**config, "pburst": 1 << 32})
    kinds.refuses(MODIFY, huge, Code.UNIMPLEMENTED)


def test_registers_cannot_be_written(control):
    cell = control.words.cell("register", "slot_spent", 1, data={"bitstring": b"\1"})
    control.refuses(MODIFY, cell, Code.UNIMPLEMENTED)


def test_registers_are_read(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc reads registers over Thrift only")
    words = control.words
    (one,) = control.read(words.cell("register", "slot_spent", 65_535))
    assert one == words.cell("register", "slot_spent", 65_535, data={"bitstring": b"\0"})
    assert len(control.read(words.cell("register", "queue_depth", None))) == 512
    assert len(control.read(p4r.Entity(register_entry=p4r.RegisterEntry()))) == 512 + 3 * 65_536


def test_direct_counters_are_refused(control):
    entity = p4r.Entity()
    entity.direct_counter_entry.table_entry.table_id = control.words.id("tables", "port_trust")
    entity.direct_counter_entry.table_entry.match.add(field_id=1).exact.value = b"\1"
    control.refuses(MODIFY, entity, Code.INVALID_ARGUMENT)


def test_kinds_of_entities_that_there_are_not(control):
    for entity in (p4r.Entity(extern_entry=p4r.ExternEntry()), p4r.Entity(value_set_entry=p4r.ValueSetEntry())):
        control.refuses(INSERT, entity, Code.UNIMPLEMENTED)
    control.refuses(INSERT, p4r.Entity(), Code.INVALID_ARGUMENT)
