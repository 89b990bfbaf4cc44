# SPDX-License-Identifier: Apache-2.0
import grpc
import pytest
from finsy.proto import p4r
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.p4runtime.control import CALL_DEADLINE_S, INSERT, Code, config, encode
from tests.p4runtime.updates import cells, groups, members, table_entries, updates

LONG = settings(
    max_examples=25,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def counters(control):
    """Return the counters that updates write to, and their neighbours."""
    cells = (control.words.cell("counter", "egress_events", index) for index in (0, 1, 4, 5, 6, 32_766, 32_767))
    return control.read(*cells)


@LONG
@given(batch=st.lists(updates(table_entries(), members(), groups(), cells()), min_size=1, max_size=12))
def test_what_is_refused_changes_nothing(control, batch):
    if not control.strict:
        pytest.skip("simple_switch_grpc leaves half a group, and an entry whose meter it has refused")
    before = control.state(), counters(control)
    for update in batch:
        if control.results(update) != [Code.OK]:
            assert (control.state(), counters(control)) == before, update
        else:
            before = control.state(), counters(control)


@LONG
@given(batch=st.lists(updates(table_entries(), members()), min_size=1, max_size=30))
def test_both_switches_refuse_the_same(both, batch):
    """Entries and members: the built-in switch takes what BMv2 takes, and has the same afterwards."""
    ours, theirs = both
    answers = [[code is Code.OK for code in control.results(*batch)] for control in both]
    assert answers[0] == answers[1], [
        (update, ours_ok, theirs_ok)
        for update, ours_ok, theirs_ok in zip(batch, *answers, strict=True)
        if ours_ok != theirs_ok
    ]
    assert ours.state() == theirs.state()


@LONG
@given(batch=st.lists(updates(table_entries(), members(), groups(), cells()), max_size=5), data=st.data())
def test_bytes_that_mean_nothing(control, batch, data):
    """Whatever arrives, the switch answers and continues."""
    if not control.strict:
        pytest.skip("simple_switch_grpc ends at an assertion")
    text = bytearray(control.signed(p4r.WriteRequest(updates=batch)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.integers(0, 255))
    del text[data.draw(st.integers(0, len(text))) :]
    call = control.channel.unary_unary("/p4.v1.P4Runtime/Write")
    try:
        call(bytes(text), timeout=CALL_DEADLINE_S)
    except grpc.RpcError as error:
        assert error.code() not in (Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE)  # noqa: PT017
    assert control.state()


@pytest.mark.parametrize("value", [b"", encode(1 << 48), bytes([1]) + bytes(6), b"\xff" * 1000])
def test_values_that_do_not_fit(control, value):
    entry = control.words.entry("ethernet_route", {"ethernet_dst": 0}, control.words.action("no_route"))
    entry.table_entry.match[0].exact.value = value
    if value or control.strict:
        control.refuses(INSERT, entry, Code.OUT_OF_RANGE, Code.INVALID_ARGUMENT)
        assert control.entries("ethernet_route") == []


def test_batches_are_not_atomic(control):
    entry = control.words.entry("ethernet_route", {"ethernet_dst": 0}, control.words.action("no_route"))
    for mode in (p4r.WriteRequest.ROLLBACK_ON_ERROR, p4r.WriteRequest.DATAPLANE_ATOMIC):
        request = p4r.WriteRequest(updates=[p4r.Update(type=INSERT, entity=entry)], atomicity=mode)
        with pytest.raises(grpc.RpcError) as caught:
            control.stub.Write(control.signed(request), timeout=CALL_DEADLINE_S)
        assert caught.value.code() is Code.UNIMPLEMENTED
    assert control.entries("ethernet_route") == []


def test_reads_that_mean_nothing(control):
    words = control.words
    unknown = words.cell("counter", "egress_events", 1)
    unknown.counter_entry.counter_id += 1
    for wanted, code in (
        (p4r.Entity(), Code.INVALID_ARGUMENT),
        (unknown, Code.INVALID_ARGUMENT),
        (words.cell("counter", "egress_events", -1), Code.INVALID_ARGUMENT),
        (words.cell("counter", "egress_events", 1 << 20), Code.OUT_OF_RANGE),
        (p4r.Entity(table_entry=p4r.TableEntry(table_id=5)), Code.INVALID_ARGUMENT),
        (words.entry("classify", {"job": (1, 1)}), Code.INVALID_ARGUMENT),
        (p4r.Entity(value_set_entry=p4r.ValueSetEntry()), Code.UNIMPLEMENTED),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            control.read(wanted)
        assert caught.value.code() in ((code,) if control.strict else (code, Code.UNKNOWN)), wanted


def test_a_message_that_is_too_long(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc takes more than a test should send")
    pipeline = config()
    pipeline.p4_device_config += b" " * (65 << 20)
    with pytest.raises(grpc.RpcError) as caught:
        control.set_pipeline(pipeline)
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert control.get_pipeline(1) == p4r.ForwardingPipelineConfig()
