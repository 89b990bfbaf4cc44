# SPDX-License-Identifier: Apache-2.0
import asyncio
import json

import grpc
import pytest
from finsy import P4Client, P4ClientError
from finsy.proto import p4r

from dlcp.switch.p4runtime.device import P4RuntimeDevice
from dlcp.switch.p4runtime.service import P4RuntimeServer
from tests.p4runtime.control import INSERT, KINDS, MODIFY, Code, Control, SetAction, config
from tests.p4runtime.loops import Loop

ALL, COOKIE, P4INFO, PROGRAM = 0, 1, 2, 3


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def populate(control):
    """Write something of every kind."""
    words = control.words
    meter = p4r.MeterConfig(cir=1, cburst=2, pir=3, pburst=4)
    control.write(INSERT, words.member("route_selector", 5, words.action("to_next_hop", port=1, mac=2)))
    control.write(INSERT, words.group("route_selector", 6, {5: 3}, max_size=7))
    control.write(
        INSERT,
        words.entry("ipv4_route", {"ipv4_dst": (0x0A000000, 8)}, ("group", 6)),
        words.entry("classify", {"job": (1, 1)}, words.action("as_tagged"), priority=4, metadata=b"why"),
        words.entry("job_share", {"job": 1, "control": 0, "eg_port": 2}, words.action("metered"), meter_config=meter),
    )


def test_a_pipeline_comes_back_as_it_went(control):
    sent = config(cookie=1 << 63)
    control.set_pipeline(sent)
    assert control.get_pipeline(ALL) == sent
    assert control.get_pipeline(COOKIE) == p4r.ForwardingPipelineConfig(cookie=sent.cookie)
    assert control.get_pipeline(P4INFO) == p4r.ForwardingPipelineConfig(cookie=sent.cookie, p4info=sent.p4info)
    found = control.get_pipeline(PROGRAM)
    assert found == p4r.ForwardingPipelineConfig(cookie=sent.cookie, p4_device_config=sent.p4_device_config)
    control.set_pipeline(config())
    assert not control.get_pipeline(COOKIE).HasField("cookie")
    assert refusal(lambda: control.get_pipeline(17)) is Code.INVALID_ARGUMENT


def test_a_new_pipeline_is_empty(control):
    populate(control)
    before = control.state()
    control.set_pipeline(config(), SetAction.VERIFY)
    assert control.state() == before
    control.set_pipeline(config())
    assert len(control.state()) < len(before)
    assert control.read(p4r.Entity(table_entry=p4r.TableEntry())) == []


def test_another_program_has_other_tables(control):
    populate(control)
    old = control.words.entry("ipv4_route", {"ipv4_dst": (0x0B000000, 8)}, ("group", 6))
    control.set_pipeline(config(KINDS))
    control.refuses(INSERT, old, Code.INVALID_ARGUMENT)
    words = control.words
    control.write(INSERT, words.entry("optioned", {}, words.action("entry_only"), priority=1))
    control.set_pipeline(config())
    populate(control)


def test_reconciling_keeps_what_there_is(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc cannot write back what it has read, and then takes no other pipeline")
    populate(control)
    before = control.state()
    control.set_pipeline(config(cookie=5), SetAction.RECONCILE_AND_COMMIT)
    assert control.state() == before
    assert control.get_pipeline(COOKIE).cookie.cookie == 5
    words = control.words
    control.write(INSERT, words.entry("ipv4_route", {"ipv4_dst": (0x0B000000, 8)}, ("group", 6)))


def test_reconciling_keeps_defaults_and_meters(kinds):
    if not kinds.strict:
        pytest.skip("simple_switch_grpc does not read default entries back")
    words = kinds.words
    default = words.entry("optioned", {}, words.action("default_only", type=9), is_default_action=True)
    kinds.write(MODIFY, default, words.cell("meter", "colours", 2, config={"cir": 1, "pir": 1}))
    before = kinds.state()
    kinds.set_pipeline(config(KINDS), SetAction.RECONCILE_AND_COMMIT)
    assert kinds.state() == before
    assert default in kinds.read(words.entry("optioned", {}, is_default_action=True))


def test_what_cannot_be_reconciled_changes_nothing(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc has lost everything by then")
    populate(control)
    before = control.state()
    words = control.words
    assert refusal(lambda: control.set_pipeline(config(KINDS), SetAction.RECONCILE_AND_COMMIT)) is Code.INVALID_ARGUMENT
    control.words = words
    assert control.state() == before
    assert control.get_pipeline() == config()


def test_a_pipeline_can_be_saved_and_filled_before_it_runs(control):
    populate(control)
    control.set_pipeline(config(KINDS, cookie=3), SetAction.VERIFY_AND_SAVE)
    words = control.words
    written = words.entry("optioned", {}, words.action("entry_only"), priority=1)
    control.write(INSERT, written)
    control.set_pipeline(None, SetAction.COMMIT)
    assert control.get_pipeline(COOKIE).cookie.cookie == 3
    if control.strict:
        assert control.read(words.entry("optioned", {})) == [written]
        assert refusal(lambda: control.set_pipeline(None, SetAction.COMMIT)) is Code.NOT_FOUND
        assert refusal(lambda: control.set_pipeline(config(), SetAction.COMMIT)) is Code.INVALID_ARGUMENT


def damaged():
    """Return pipelines that no switch can run, and why."""
    good = config()
    program = json.loads(good.p4_device_config)
    old = {**program, "__meta__": {"version": [1, 0]}}
    stateful = {**program, "parse_vsets": [{"name": "x"}]}
    wide = p4r.ForwardingPipelineConfig()
    wide.CopyFrom(good)
    wide.p4info.tables[0].match_fields[0].bitwidth += 1
    renamed = p4r.ForwardingPipelineConfig()
    renamed.CopyFrom(good)
    renamed.p4info.counters[0].preamble.name = "other"
    actions = p4r.ForwardingPipelineConfig()
    actions.CopyFrom(good)
    del actions.p4info.actions[3].params[0]
    return {
        "nothing": p4r.ForwardingPipelineConfig(),
        "no program": p4r.ForwardingPipelineConfig(p4info=good.p4info),
        "no p4info": p4r.ForwardingPipelineConfig(p4_device_config=good.p4_device_config),
        "not JSON": p4r.ForwardingPipelineConfig(p4info=good.p4info, p4_device_config=b"\xff{"),
        "no BMv2 JSON": p4r.ForwardingPipelineConfig(p4info=good.p4info, p4_device_config=b"[1]"),
        "deep JSON": p4r.ForwardingPipelineConfig(p4info=good.p4info, p4_device_config=b"[" * 100_000),
        "old format": p4r.ForwardingPipelineConfig(p4info=good.p4info, p4_device_config=json.dumps(old).encode()),
        "a feature it lacks": p4r.ForwardingPipelineConfig(
            p4info=good.p4info, p4_device_config=json.dumps(stateful).encode()
        ),
        "another program": p4r.ForwardingPipelineConfig(
            p4info=good.p4info, p4_device_config=config(KINDS).p4_device_config
        ),
        "another width": wide,
        "another name": renamed,
        "another action": actions,
    }


@pytest.mark.parametrize("action", ["VERIFY", "VERIFY_AND_SAVE", "VERIFY_AND_COMMIT", "RECONCILE_AND_COMMIT"])
def test_a_damaged_pipeline_changes_nothing(control, action):
    if not control.strict:
        pytest.skip("simple_switch_grpc takes some, and loses its program over others")
    populate(control)
    before, words = control.state(), control.words
    for kind, pipeline in damaged().items():
        code = refusal(lambda pipeline=pipeline: control.set_pipeline(pipeline, SetAction.Action.Value(action)))
        assert code is Code.INVALID_ARGUMENT, kind
        assert control.state() == before, kind
    control.words = words
    control.write(INSERT, words.entry("ipv4_route", {"ipv4_dst": (0x0B000000, 8)}, ("group", 6)))


def test_no_action_and_no_config(control):
    if not control.strict:
        pytest.skip("simple_switch_grpc takes an empty config")
    assert refusal(lambda: control.set_pipeline(config(), SetAction.UNSPECIFIED)) is Code.INVALID_ARGUMENT
    assert refusal(lambda: control.set_pipeline(config(), 99)) is Code.INVALID_ARGUMENT
    assert refusal(lambda: control.set_pipeline(None)) is Code.INVALID_ARGUMENT


def test_finsy_knows_that_a_pipeline_is_missing():
    """Finsy looks for BMv2's words, not only for the code."""
    with P4RuntimeServer(P4RuntimeDevice(Loop()), ("127.0.0.1", 0)) as server:

        async def ask():
            async with P4Client(server.address) as client:
                await client.request(p4r.GetForwardingPipelineConfigRequest(device_id=1))

        with pytest.raises(P4ClientError) as caught:
            asyncio.run(asyncio.wait_for(ask(), 20))
        assert caught.value.is_pipeline_missing


def test_a_switch_starts_without_a_pipeline_and_again_after_a_crash(target, next_id):
    """A controller's view of a switch that was killed, and how it restores the switch."""
    switch = type(target)()
    try:
        switch.start()
        for crashes in (True, False):
            with Control(switch.address, strict=target.name == "built-in") as control:
                control.arbitrate(next_id())
                assert refusal(control.get_pipeline) is Code.FAILED_PRECONDITION
                assert (
                    refusal(lambda: control.read(p4r.Entity(table_entry=p4r.TableEntry()))) is Code.FAILED_PRECONDITION
                )
                assert refusal(lambda: control.write(INSERT)) is Code.FAILED_PRECONDITION
                control.set_pipeline(config())
                populate(control)
                assert len(control.read(p4r.Entity(table_entry=p4r.TableEntry()))) == 3
                if crashes:
                    switch.kill()
                    assert refusal(lambda: [control.receive() for _ in range(9)]) is Code.UNAVAILABLE
                    switch.start()
    finally:
        switch.stop()
        getattr(switch, "close", lambda: None)()


def test_the_version_of_the_protocol(control):
    version = control.stub.Capabilities(p4r.CapabilitiesRequest(), timeout=5).p4runtime_api_version
    assert version == ("1.4.1" if control.strict else "1.3.0")
