# SPDX-License-Identifier: Apache-2.0
import threading

import grpc
import pytest
from finsy.proto import p4r

from tests.p4runtime.control import INSERT, Code, Control, config
from tests.p4runtime.targets import DEVICE_ID


@pytest.fixture
def another(target, control):
    """Return further controllers of the same switch."""
    made = []

    def make():
        made.append(Control(target.address, strict=control.strict))
        made[-1].words = control.words
        return made[-1]

    yield make
    for other in made:
        other.close()


def number(election_id):
    return election_id.high << 64 | election_id.low


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def entry(control, destination=1):
    return control.words.entry("ethernet_route", {"ethernet_dst": destination}, control.words.action("no_route"))


def test_the_highest_election_id_is_primary(control, another, next_id):
    newer = another()
    election_id = next_id()
    told = newer.arbitrate(election_id)
    assert (told.device_id, number(told.election_id), told.status.code) == (DEVICE_ID, election_id, 0)
    lost = control.receive().arbitration
    assert (number(lost.election_id), lost.status.code) == (election_id, Code.ALREADY_EXISTS.value[0])
    assert refusal(lambda: control.write(INSERT, entry(control))) is Code.PERMISSION_DENIED
    assert refusal(lambda: control.set_pipeline(config())) is Code.PERMISSION_DENIED
    newer.write(INSERT, entry(control))
    assert len(control.entries("ethernet_route")) == 1


def test_a_lower_election_id_is_backup(control, another):
    backup = another()
    told = backup.arbitrate(None)
    assert (number(told.election_id), told.status.code) == (control.election_id, Code.ALREADY_EXISTS.value[0])
    assert refusal(lambda: backup.write(INSERT, entry(control))) is Code.PERMISSION_DENIED
    control.write(INSERT, entry(control))


def test_an_election_id_is_one_controllers_only(control, another):
    copy = another()
    copy.ask(control.election_id)
    assert refusal(copy.receive) is Code.INVALID_ARGUMENT
    control.write(INSERT, entry(control))


def test_the_primary_may_rise(control, next_id):
    before, election_id = control.election_id, next_id()
    if not control.strict:
        pytest.skip("simple_switch_grpc has no answer for a primary that stays primary")
    told = control.arbitrate(election_id)
    assert (number(told.election_id), told.status.code) == (election_id, 0)
    control.write(INSERT, entry(control))
    control.election_id = before
    assert refusal(lambda: control.write(INSERT, entry(control, 2))) is Code.PERMISSION_DENIED


def test_after_the_primary_another_one(control, another, next_id):
    newer = another()
    newer.arbitrate(next_id())
    control.receive()
    newer.close()
    assert control.receive().arbitration.election_id is not None
    election_id = next_id()
    told = control.arbitrate(election_id)
    assert (number(told.election_id), told.status.code) == (election_id, 0)
    control.write(INSERT, entry(control))


def test_nobody_becomes_primary_without_saying_so(control, another, next_id):
    if not control.strict:
        pytest.skip("simple_switch_grpc makes the next one primary")
    newer = another()
    highest = next_id()
    newer.arbitrate(highest)
    control.receive()
    newer.close()
    told = control.receive().arbitration
    assert (number(told.election_id), told.status.code) == (highest, Code.NOT_FOUND.value[0])
    assert refusal(lambda: control.write(INSERT, entry(control))) is Code.PERMISSION_DENIED
    told = control.arbitrate(highest - 1)
    assert told.status.code == Code.NOT_FOUND.value[0]
    assert control.arbitrate(highest).status.code == 0
    control.write(INSERT, entry(control))


def test_a_primary_may_step_down(control, another, next_id):
    if not control.strict:
        pytest.skip("simple_switch_grpc makes the next one primary")
    backup = another()
    backup.arbitrate(None)
    assert control.arbitrate(None).status.code == Code.NOT_FOUND.value[0]
    assert backup.receive().arbitration.status.code == Code.NOT_FOUND.value[0]
    assert refusal(lambda: control.write(INSERT, entry(control))) is Code.PERMISSION_DENIED
    control.arbitrate(next_id())


def test_who_has_no_stream_does_not_write(control, another):
    stranger = another()
    stranger.election_id = control.election_id + 1
    assert refusal(lambda: stranger.write(INSERT, entry(control))) is Code.PERMISSION_DENIED
    assert control.entries("ethernet_route") == []


def test_a_stream_is_about_one_device(control, another):
    control.ask(control.election_id, device_id=DEVICE_ID + 1)
    assert refusal(control.receive) is Code.FAILED_PRECONDITION
    if control.strict:
        other = another()
        other.ask(1, device_id=DEVICE_ID + 1)
        assert refusal(other.receive) is Code.NOT_FOUND


@pytest.mark.parametrize("call", ["Write", "Read", "SetForwardingPipelineConfig", "GetForwardingPipelineConfig"])
def test_other_devices_are_not_known(control, call):
    if not control.strict:
        pytest.skip("simple_switch_grpc makes up a device for every number")
    kind = getattr(p4r, f"{call}Request")
    assert refusal(lambda: list(getattr(control.stub, call)(kind(device_id=99), timeout=5))) is Code.NOT_FOUND


def test_there_is_the_default_role_only(control, another):
    if not control.strict:
        pytest.skip("simple_switch_grpc does not look at roles")
    other = another()
    other.ask(1, role="monitor")
    assert refusal(other.receive) is Code.UNIMPLEMENTED
    request = control.signed(p4r.WriteRequest(role="monitor"))
    assert refusal(lambda: control.stub.Write(request, timeout=5)) is Code.NOT_FOUND
    assert refusal(lambda: list(control.stub.Read(p4r.ReadRequest(device_id=DEVICE_ID, role="x")))) is Code.NOT_FOUND


def test_packets_are_neither_taken_nor_lost_silently(control, another):
    if not control.strict:
        pytest.skip("simple_switch_grpc says nothing")
    packet = p4r.StreamMessageRequest(packet=p4r.PacketOut(payload=b"x"))
    control.send(packet)
    error = control.receive().error
    assert error.canonical_code == Code.UNIMPLEMENTED.value[0]
    assert error.packet_out.packet_out == packet.packet
    backup = another()
    backup.arbitrate(None)
    backup.send(packet)
    assert backup.receive().error.canonical_code == Code.PERMISSION_DENIED.value[0]
    stranger = another()
    stranger.send(packet)
    assert refusal(stranger.receive) is Code.INVALID_ARGUMENT


def test_zero_is_no_election_id(control, another):
    if not control.strict:
        pytest.skip("simple_switch_grpc takes 0")
    other = another()
    other.ask(0)
    assert refusal(other.receive) is Code.INVALID_ARGUMENT


def test_so_many_controllers_and_no_more(control, another):
    if not control.strict:
        pytest.skip("simple_switch_grpc takes one controller without an election id")
    for _ in range(15):
        assert another().arbitrate(None).HasField("status")
    late = another()
    late.ask(None)
    assert refusal(late.receive) is Code.RESOURCE_EXHAUSTED


def test_controllers_that_fight_over_a_switch(control, another, next_id):
    """Entries reported as written exist, and refused ones do not, whichever controller was primary at the time."""
    lock = threading.Lock()
    outcomes: list[tuple[int, bool]] = []

    def fight(own, start):
        for destination in range(start, start + 20):
            with lock:
                election_id = next_id()
            own.ask(election_id)
            while number(own.receive().arbitration.election_id) < election_id:
                pass
            try:
                own.write(INSERT, entry(control, destination))
            except grpc.RpcError as error:
                assert error.code() is Code.PERMISSION_DENIED  # noqa: PT017
                outcomes.append((destination, False))
            else:
                outcomes.append((destination, True))

    fighters = [threading.Thread(target=fight, args=(another(), start)) for start in (100, 200, 300)]
    for thread in fighters:
        thread.start()
    for thread in fighters:
        thread.join(60)
    assert len(outcomes) == 60
    assert any(done for _, done in outcomes)
    found = {int.from_bytes(item.match[0].exact.value, "big") for item in control.entries("ethernet_route")}
    assert found == {destination for destination, done in outcomes if done}
