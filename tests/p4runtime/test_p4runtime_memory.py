# SPDX-License-Identifier: Apache-2.0
"""A controller that is not primary, or says nothing, costs the switch bounded memory and no place for others."""

import re
import threading
from pathlib import Path

import grpc
import pytest
from finsy.proto import p4r, p4r_grpc, rpc_code

from dlcp.switch.p4runtime import service as server_module
from dlcp.switch.p4runtime.device import P4RuntimeDevice
from dlcp.switch.p4runtime.entities import Refused
from dlcp.switch.p4runtime.service import (
    ECHO_BYTES_MAX,
    UNREAD_BYTES_MAX,
    Arbiter,
    P4RuntimeServer,
    QueuedStream,
    Service,
)
from tests.p4runtime.control import Control, config
from tests.p4runtime.loops import Loop
from tests.p4runtime.targets import DEVICE_ID, BuiltIn

PACKET = p4r.StreamMessageRequest(packet=p4r.PacketOut(payload=bytes(8 << 20)))
BACKUP = p4r.StreamMessageRequest(arbitration=p4r.MasterArbitrationUpdate(device_id=DEVICE_ID))


def peak_bytes(pid):
    """Return the most memory that a process has had."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", text)[1])


def test_what_a_backup_sends_and_never_reads_answers_to_is_not_kept():
    switch = BuiltIn()
    switch.start()
    sent = threading.Event()

    def requests():
        yield BACKUP
        yield from [PACKET] * 100
        sent.set()

    try:
        with Control(switch.address) as control:
            control.arbitrate(1)
            control.set_pipeline(config())
            before = peak_bytes(switch.process.pid)
            with grpc.insecure_channel(switch.address) as channel:
                call = p4r_grpc.P4RuntimeStub(channel).StreamChannel(requests())
                ended = threading.Event()
                call.add_done_callback(ended.set)
                while not (sent.wait(0.05) or ended.is_set()):
                    pass
            assert peak_bytes(switch.process.pid) - before < 300e6
            control.read()  # and the primary is served as before
    finally:
        switch.stop()


def test_an_error_repeats_short_messages_only():
    service, stream = Service(P4RuntimeDevice(Loop()), DEVICE_ID), QueuedStream()
    short = p4r.StreamMessageRequest(packet=p4r.PacketOut(payload=bytes(1500)))
    assert service._stream_error(stream, short).packet_out.packet_out == short.packet
    long = service._stream_error(stream, PACKET)
    assert long.WhichOneof("details") == "packet_out"
    assert long.ByteSize() < ECHO_BYTES_MAX
    assert long.canonical_code == rpc_code.PERMISSION_DENIED


def test_a_stream_that_is_not_read_ends_by_its_bytes_too():
    stream = QueuedStream()
    message = p4r.StreamMessageResponse(error=p4r.StreamError(message="x" * (UNREAD_BYTES_MAX // 10)))
    for _ in range(9):
        stream.send(message)
    assert not stream.overrun.is_set()
    for _ in range(2):
        stream.send(message)
    assert stream.overrun.is_set()


def test_who_takes_no_part_in_the_arbitration_is_sent_away(monkeypatch):
    monkeypatch.setattr(server_module, "ARBITRATION_S", 0.2)
    with P4RuntimeServer(P4RuntimeDevice(Loop()), ("127.0.0.1", 0), DEVICE_ID) as server:
        silent = threading.Event()

        def requests():
            silent.wait(60)
            yield BACKUP

        with grpc.insecure_channel(server.address) as channel:
            call = p4r_grpc.P4RuntimeStub(channel).StreamChannel(requests())
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            silent.set()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "arbitration" in caught.value.details()


def test_the_arbiter_forgets_whom_it_refuses():
    arbiter, stream = Arbiter(DEVICE_ID), QueuedStream()
    with pytest.raises(Refused):
        arbiter.update(stream, p4r.MasterArbitrationUpdate(device_id=DEVICE_ID + 1))
    assert not arbiter.knows(stream)
