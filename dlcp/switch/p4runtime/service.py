# SPDX-License-Identifier: Apache-2.0
"""The calls of P4Runtime, answered for one device."""
# ruff: noqa: N802 - the calls have the names of the protocol

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar

import grpc
from finsy.proto import p4r, p4r_grpc, rpc_status

from dlcp.switch.p4runtime.arbitration import Arbiter
from dlcp.switch.p4runtime.device import ERROR_SPACE, Device
from dlcp.switch.p4runtime.refusal import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    UNKNOWN,
    Refused,
)

API_VERSION: Final = "1.4.1"
UNREAD_MAX: Final = 1_000
"""Messages that wait for a controller to read them before its stream ends. Chosen by us."""
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS: Final = "grpc-status-details-bin"
"""The trailer that gRPC keeps for a google.rpc.Status."""

Context = Any
"""``grpc.aio.ServicerContext``."""
T = TypeVar("T")


class Stream:
    """The stream of one controller: what is to be sent waits here for the task that sends it."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[p4r.StreamMessageResponse] = asyncio.Queue(UNREAD_MAX)
        self.overrun = asyncio.Event()
        """Set when the controller reads too slowly."""

    def send(self, response: p4r.StreamMessageResponse) -> None:
        """Send a message some time soon."""
        try:
            self._waiting.put_nowait(response)
        except asyncio.QueueFull:
            self.overrun.set()

    async def forward(self, context: Context) -> None:
        """Send what waits, for as long as the stream lasts."""
        while True:
            await context.write(await self._waiting.get())


class Service(p4r_grpc.P4RuntimeServicer):
    """The servicer. All calls run in one event loop; what takes long, or waits for packets, runs in a thread.

    Writes and reads have their turns, so that a read never sees half a write. A call whose controller goes away in the
    middle is still brought to its end.
    """

    def __init__(self, device: Device, device_id: int) -> None:
        self._device, self._device_id = device, device_id
        self._arbiter: Arbiter[Stream] = Arbiter(device_id)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all streams; call it in the event loop."""
        self._closing.set()

    # ------------------------------------------------------------------------------------------------- the calls

    async def Write(self, request: p4r.WriteRequest, context: Context) -> p4r.WriteResponse:
        """Make the changes of a batch that can be made, and say of each that cannot why."""
        return await _answer(context, self._write(request))

    async def Read(self, request: p4r.ReadRequest, context: Context) -> AsyncIterator[p4r.ReadResponse]:
        """Return the entities that are asked for."""
        for response in await _answer(context, self._read(request)):
            yield response

    async def SetForwardingPipelineConfig(
        self, request: p4r.SetForwardingPipelineConfigRequest, context: Context
    ) -> p4r.SetForwardingPipelineConfigResponse:
        """Verify, save or run a pipeline."""
        return await _answer(context, self._set_pipeline(request))

    async def GetForwardingPipelineConfig(
        self, request: p4r.GetForwardingPipelineConfigRequest, context: Context
    ) -> p4r.GetForwardingPipelineConfigResponse:
        """Return the pipeline that was set last."""
        return await _answer(context, self._get_pipeline(request))

    async def Capabilities(self, request: p4r.CapabilitiesRequest, context: Context) -> p4r.CapabilitiesResponse:
        """Return the version of the specification that is followed."""
        return p4r.CapabilitiesResponse(p4runtime_api_version=API_VERSION)

    async def StreamChannel(  # type: ignore[override] # the stubs know of generators only
        self, requests: AsyncIterator[p4r.StreamMessageRequest], context: Context
    ) -> None:
        """Take part in the arbitration for as long as the controller keeps the stream."""
        stream = Stream()
        listening = asyncio.create_task(self._listen(stream, requests))
        ends: dict[asyncio.Task[Any], Refused] = {
            asyncio.create_task(stream.overrun.wait()): Refused(
                RESOURCE_EXHAUSTED, f"{UNREAD_MAX} messages are unread"
            ),
            asyncio.create_task(self._closing.wait()): Refused(UNAVAILABLE, "the switch is being stopped"),
        }
        tasks = [listening, asyncio.create_task(stream.forward(context)), *ends]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done & ends.keys():
                raise ends[task]
            if listening in done:
                await listening
        except Refused as refusal:
            await _abort(context, refusal)
        finally:
            for task in tasks:
                task.cancel()
            self._arbiter.leave(stream)

    # ------------------------------------------------------------------------------------------------ the answers

    async def _write(self, request: p4r.WriteRequest) -> p4r.WriteResponse:
        self._check_device(request.device_id)
        self._check_writer(request)
        if request.atomicity != p4r.WriteRequest.CONTINUE_ON_ERROR:
            raise Refused(UNIMPLEMENTED, "batches are not atomic; use CONTINUE_ON_ERROR")
        errors = await self._in_turn(lambda: self._device.write(request.updates), lambda: self._check_writer(request))
        if any(error.canonical_code for error in errors):
            raise _BatchRefused(errors)
        return p4r.WriteResponse()

    async def _read(self, request: p4r.ReadRequest) -> list[p4r.ReadResponse]:
        self._check_device(request.device_id)
        if request.role:
            raise Refused(NOT_FOUND, f"there is no role {request.role!r}, but the default one")
        return await self._in_turn(lambda: self._device.read(request.entities))

    async def _set_pipeline(
        self, request: p4r.SetForwardingPipelineConfigRequest
    ) -> p4r.SetForwardingPipelineConfigResponse:
        self._check_device(request.device_id)
        self._check_writer(request)
        config = request.config if request.HasField("config") else None
        await self._in_turn(
            lambda: self._device.set_pipeline(request.action, config), lambda: self._check_writer(request)
        )
        return p4r.SetForwardingPipelineConfigResponse()

    async def _get_pipeline(
        self, request: p4r.GetForwardingPipelineConfigRequest
    ) -> p4r.GetForwardingPipelineConfigResponse:
        self._check_device(request.device_id)
        config = await self._in_turn(lambda: self._device.get_pipeline(request.response_type))
        return p4r.GetForwardingPipelineConfigResponse(config=config)

    async def _listen(self, stream: Stream, requests: AsyncIterator[p4r.StreamMessageRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("update")
            if kind == "arbitration":
                if self._arbiter.update(stream, request.arbitration):
                    # Writes of the primary before end first; this takes its turn behind them.
                    async with self._turn:
                        self._arbiter.announce(stream)
            elif self._arbiter.knows(stream):
                stream.send(p4r.StreamMessageResponse(error=self._stream_error(stream, request)))
            else:
                raise Refused(INVALID_ARGUMENT, "the first message of a stream is about arbitration")

    def _stream_error(self, stream: Stream, request: p4r.StreamMessageRequest) -> p4r.StreamError:
        """Return why a message of a stream is not acted upon."""
        error = p4r.StreamError(canonical_code=UNIMPLEMENTED, space=ERROR_SPACE)
        error.message = "the built-in switch takes neither packets nor digest acknowledgements from a controller"
        if not self._arbiter.is_primary(stream):
            error.canonical_code, error.message = PERMISSION_DENIED, "only the primary may send this"
        kind = request.WhichOneof("update")
        if kind == "packet":
            error.packet_out.packet_out.CopyFrom(request.packet)
        elif kind == "digest_ack":
            error.digest_list_ack.digest_list_ack.CopyFrom(request.digest_ack)
        else:
            error.other.SetInParent()
        return error

    # ---------------------------------------------------------------------------------------------------- checks

    def _check_device(self, device_id: int) -> None:
        if device_id != self._device_id:
            raise Refused(NOT_FOUND, f"this is device {self._device_id}, not {device_id}")

    def _check_writer(self, request: p4r.WriteRequest | p4r.SetForwardingPipelineConfigRequest) -> None:
        if request.role or request.role_id:
            raise Refused(NOT_FOUND, f"there is no role {request.role or request.role_id}, but the default one")
        if not self._arbiter.may_write(request.election_id):
            raise Refused(PERMISSION_DENIED, "only the primary may write; open a stream and win the arbitration first")

    async def _in_turn(self, work: Callable[[], T], check: Callable[[], None] | None = None) -> T:
        """Do work in a thread, alone, and to its end even if the caller is cancelled."""

        async def do() -> T:
            async with self._turn:
                if check is not None:
                    check()
                return await asyncio.to_thread(work)

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait([task])  # which leaves the task alone when this is cancelled
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Let a task go. Its error is the caller's; where the caller has gone away, nobody is left to be told."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


class _BatchRefused(Refused):
    """Some updates of a batch were not made; ``details`` is the google.rpc.Status that says which and why."""

    def __init__(self, errors: list[p4r.Error]) -> None:
        failed = [error for error in errors if error.canonical_code]
        super().__init__(UNKNOWN, f"{len(failed)} of {len(errors)} updates failed, the first: {failed[0].message}")
        status = rpc_status.Status(code=self.code, message=self.message)
        for error in errors:
            status.details.add().Pack(error)
        self.details = status.SerializeToString()


async def _answer(context: Context, answer: Awaitable[T]) -> T:
    """Return the answer to a call, or end the call with what was refused."""
    try:
        return await answer
    except Refused as refusal:
        await _abort(context, refusal)


async def _abort(context: Context, refusal: Refused) -> NoReturn:
    trailers = ((_DETAILS, refusal.details),) if isinstance(refusal, _BatchRefused) else ()
    await context.abort(_CODES[refusal.code], refusal.message, trailers)
    raise AssertionError("abort raises")
