# SPDX-License-Identifier: Apache-2.0
"""The P4Runtime server of a switch: its six calls, in an event loop on a separate thread."""
# ruff: noqa: N802 - the calls have the names of the protocol

import asyncio
import functools
import gc
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from finsy.proto import p4r, p4r_grpc, rpc_code, rpc_status

from dlcp.host.closing import Closing
from dlcp.inputs.addresses import format_address
from dlcp.switch.executor.model import EntryError
from dlcp.switch.p4runtime.device import ERROR_SPACE, P4RuntimeDevice
from dlcp.switch.p4runtime.entities import Refused, code_of

P4RUNTIME_PORT: Final = 9559
"""Registered with IANA for P4Runtime."""
CONNECTIONS_MAX: Final = 16
"""Maximum number of connected controllers, as in BMv2."""
API_VERSION: Final = "1.4.1"
UNREAD_MAX: Final = 1_000
"""Maximum number of messages queued for a slow controller before its stream is ended. Not tuned."""
UNREAD_BYTES_MAX: Final = 4 << 20
"""Maximum bytes of those messages: enough for a thousand errors that each repeat a packet of 1,500 bytes."""
ECHO_BYTES_MAX: Final = 16 << 10
"""An error repeats the message it refers to, up to this size; a packet has at most 9,000 bytes."""
ARBITRATION_S: Final = 10.0
"""Deadline for a stream's first arbitration message. Not tuned."""
CONTROLLER_CALLS_MAX: Final = 4 * CONNECTIONS_MAX
"""Maximum number of concurrent calls and streams; further ones are refused before their messages are read."""
MESSAGE_MAX: Final = 64 << 20
"""Longest accepted message, in bytes: a program, or a batch of half a million updates."""
SWITCH_INTERVAL_S: Final = 0.2e-3
"""Time after which this thread yields the GIL to the packet loop. Python's default, 5 ms, is about ten times as long as
a burst takes."""
GC_THRESHOLDS: Final = 50_000, 20, 100
"""High thresholds keep garbage collection rare, since it pauses packets. Entries have no cycles, and ten thousand of
them would trigger several full collections by default."""
_START_DEADLINE_S: Final = 30.0
_STOP_DEADLINE_S: Final = 5.0
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS: Final = "grpc-status-details-bin"
"""The trailer in which gRPC carries a google.rpc.Status."""

Context: TypeAlias = Any
"""``grpc.aio.ServicerContext``."""
_T = TypeVar("_T")
_Call = TypeVar("_Call", bound=Callable[..., Awaitable[Any]])


class QueuedStream:
    """The stream of one controller: queues messages for the task that sends them."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[p4r.StreamMessageResponse] = asyncio.Queue(UNREAD_MAX)
        self._bytes = 0
        self.overrun = asyncio.Event()
        """Set when the controller reads too slowly."""

    def send(self, response: p4r.StreamMessageResponse) -> None:
        """Queue a message; if the controller reads too slowly, set `overrun` instead."""
        size = response.ByteSize()
        if self._waiting.full() or self._bytes + size > UNREAD_BYTES_MAX:
            self.overrun.set()
            return
        self._bytes += size
        self._waiting.put_nowait(response)

    async def forward(self, context: Context) -> None:
        """Send queued messages until cancelled."""
        while True:
            response = await self._waiting.get()
            await context.write(response)
            self._bytes -= response.ByteSize()


class Arbiter:
    """Chooses the primary, the only controller of a device that may write, by election id. Not thread-safe.

    Implements section 5 of the specification, for the default role only. Unlike in BMv2, no backup becomes primary
    automatically when the primary leaves: a backup must send another arbitration update, with an election id no lower
    than the highest so far.
    """

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._election_ids: dict[QueuedStream, int | None] = {}
        """Election id of every connected controller; None for a permanent backup."""
        self._primary: QueuedStream | None = None
        self._announced = False
        """Whether the primary may write: only once its predecessor's writes have ended."""
        self._highest: int | None = None
        """The highest election id so far."""

    def may_write(self, election_id: p4r.Uint128) -> bool:
        """Whether a request with this election id comes from the primary."""
        if self._primary is None or not self._announced:
            return False
        return self._election_ids.get(self._primary) == _number(election_id)

    def is_primary(self, stream: QueuedStream) -> bool:
        """Whether a stream is the primary's."""
        return stream is self._primary and self._announced

    def knows(self, stream: QueuedStream) -> bool:
        """Whether a stream has taken part in the arbitration."""
        return stream in self._election_ids

    def update(self, stream: QueuedStream, request: p4r.MasterArbitrationUpdate) -> bool:
        """Process a controller's arbitration update.

        Returns
        -------
        True if the primary has changed. Then no controller may write until the caller calls :meth:`announce`, once the
        previous primary's writes have ended.

        Raises
        ------
        Refused
            The stream must end.
        """
        self._check(stream, request)
        election_id = _number(request.election_id) if request.HasField("election_id") else None
        for other, known in self._election_ids.items():
            if other is not stream and election_id is not None and known == election_id:
                raise Refused(f"election id {election_id} is already used by another connection")
        if stream not in self._election_ids and len(self._election_ids) >= CONNECTIONS_MAX:
            raise Refused(f"{CONNECTIONS_MAX} controllers are already connected", rpc_code.RESOURCE_EXHAUSTED)
        self._election_ids[stream] = election_id
        wins = election_id is not None and (self._highest is None or election_id >= self._highest)
        if wins:
            self._highest = election_id
            if not self.is_primary(stream):
                self._primary, self._announced = stream, False
                self._notify([other for other in self._election_ids if other is not stream])
                return True
            self._notify(self._election_ids)
        elif stream is self._primary:
            self._primary = None
            self._notify(self._election_ids)
        else:
            self._notify([stream])
        return False

    def announce(self, stream: QueuedStream) -> None:
        """Notify a new primary; do nothing if another has become primary in the meantime."""
        if stream is self._primary and not self._announced:
            self._announced = True
            self._notify([stream])

    def leave(self, stream: QueuedStream) -> None:
        """Forget a controller whose stream has ended."""
        self._election_ids.pop(stream, None)
        if stream is self._primary:
            self._primary = None
            self._notify(self._election_ids)

    def _check(self, stream: QueuedStream, request: p4r.MasterArbitrationUpdate) -> None:
        first = stream not in self._election_ids
        if request.device_id != self.device_id:
            code = rpc_code.NOT_FOUND if first else rpc_code.FAILED_PRECONDITION
            raise Refused(f"this is device {self.device_id}, not {request.device_id}", code)
        if request.role.id or request.role.name or request.role.HasField("config"):
            code = rpc_code.UNIMPLEMENTED if first else rpc_code.FAILED_PRECONDITION
            raise Refused("only the default role is supported", code)
        if request.HasField("election_id") and not _number(request.election_id):
            raise Refused("an election id must be above 0; omit it to stay a backup")

    def _notify(self, streams: Iterable[QueuedStream]) -> None:
        for stream in streams:
            response = p4r.StreamMessageResponse()
            message = response.arbitration
            message.device_id = self.device_id
            if self._highest is not None:
                message.election_id.high, message.election_id.low = divmod(self._highest, 1 << 64)
            if stream is self._primary:
                message.status.code, message.status.message = rpc_code.OK, "you are primary"
            elif self._primary is not None:
                message.status.code, message.status.message = rpc_code.ALREADY_EXISTS, "another controller is primary"
            else:
                message.status.code, message.status.message = rpc_code.NOT_FOUND, "no controller is primary"
            stream.send(response)


def _number(election_id: p4r.Uint128) -> int:
    return election_id.high << 64 | election_id.low


class _BatchRefused(Refused):
    """Some updates of a batch failed; ``details`` is a google.rpc.Status with the result of each."""

    def __init__(self, errors: list[p4r.Error]) -> None:
        failed = [error for error in errors if error.canonical_code]
        message = f"{len(failed)} of {len(errors)} updates failed, the first: {failed[0].message}"
        super().__init__(message, rpc_code.UNKNOWN)
        status = rpc_status.Status(code=self.code, message=message)
        for error in errors:
            status.details.add().Pack(error)
        self.details = status.SerializeToString()


async def _abort(context: Context, refusal: EntryError) -> NoReturn:
    trailers = ((_DETAILS, refusal.details),) if isinstance(refusal, _BatchRefused) else ()
    await context.abort(_CODES[code_of(refusal)], str(refusal), trailers)
    raise AssertionError("abort raises")


def _refusing(call: _Call) -> _Call:
    """Decorate a call of the service to return EntryError, and so Refused, as its gRPC status."""

    @functools.wraps(call)
    async def answer(self: "Service", request: Any, context: Context) -> Any:
        try:
            return await call(self, request, context)
        except EntryError as refusal:
            await _abort(context, refusal)

    return cast(_Call, answer)


class Service(p4r_grpc.P4RuntimeServicer):
    """The servicer. All calls run in one event loop; work that is long or waits for the packet loop runs in a thread.

    Writes and reads are serialized, so that a read never sees half a write. A call completes even if its controller
    disconnects.
    """

    def __init__(self, device: P4RuntimeDevice, device_id: int) -> None:
        self._device, self._device_id = device, device_id
        self._arbiter = Arbiter(device_id)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all streams; call this in the event loop."""
        self._closing.set()

    # ------------------------------------------------------------------------------------------------- the calls

    @_refusing
    async def Write(self, request: p4r.WriteRequest, context: Context) -> p4r.WriteResponse:
        """Make all valid changes of a batch; the error has the reason for each of the others."""
        self._check_device(request.device_id)
        self._check_writer(request)
        if request.atomicity != p4r.WriteRequest.CONTINUE_ON_ERROR:
            raise Refused("batches are not atomic; use CONTINUE_ON_ERROR", rpc_code.UNIMPLEMENTED)
        errors = await self._in_turn(lambda: self._device.write(request.updates), lambda: self._check_writer(request))
        if any(error.canonical_code for error in errors):
            raise _BatchRefused(errors)
        return p4r.WriteResponse()

    @_refusing
    async def Read(  # type: ignore[override] # the stubs allow only generators
        self, request: p4r.ReadRequest, context: Context
    ) -> None:
        """Return the entities that a request selects."""
        self._check_device(request.device_id)
        if request.role:
            raise Refused(f"unknown role {request.role!r}; only the default role is supported", rpc_code.NOT_FOUND)
        for response in await self._in_turn(lambda: self._device.read(request.entities)):
            await context.write(response)

    @_refusing
    async def SetForwardingPipelineConfig(
        self, request: p4r.SetForwardingPipelineConfigRequest, context: Context
    ) -> p4r.SetForwardingPipelineConfigResponse:
        """Verify, save or run a pipeline."""
        self._check_device(request.device_id)
        self._check_writer(request)
        config = request.config if request.HasField("config") else None
        await self._in_turn(
            lambda: self._device.set_pipeline(request.action, config), lambda: self._check_writer(request)
        )
        return p4r.SetForwardingPipelineConfigResponse()

    @_refusing
    async def GetForwardingPipelineConfig(
        self, request: p4r.GetForwardingPipelineConfigRequest, context: Context
    ) -> p4r.GetForwardingPipelineConfigResponse:
        """Return the pipeline set last."""
        self._check_device(request.device_id)
        config = await self._in_turn(lambda: self._device.get_pipeline(request.response_type))
        return p4r.GetForwardingPipelineConfigResponse(config=config)

    async def Capabilities(self, request: p4r.CapabilitiesRequest, context: Context) -> p4r.CapabilitiesResponse:
        """Return the version of the specification."""
        return p4r.CapabilitiesResponse(p4runtime_api_version=API_VERSION)

    async def StreamChannel(  # type: ignore[override] # the stubs allow only generators
        self, requests: AsyncIterator[p4r.StreamMessageRequest], context: Context
    ) -> None:
        """Handle arbitration for the lifetime of a controller's stream."""
        stream = QueuedStream()
        listening = asyncio.create_task(self._listen(stream, requests))
        ends: dict[asyncio.Task[Any], Refused] = {
            asyncio.create_task(stream.overrun.wait()): Refused(
                f"{UNREAD_MAX} messages or {UNREAD_BYTES_MAX} bytes are unread; read faster",
                rpc_code.RESOURCE_EXHAUSTED,
            ),
            asyncio.create_task(self._takes_no_part(stream)): Refused(
                f"no arbitration update within {ARBITRATION_S:g} s", rpc_code.DEADLINE_EXCEEDED
            ),
            asyncio.create_task(self._closing.wait()): Refused("the switch is being stopped", rpc_code.UNAVAILABLE),
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

    async def _takes_no_part(self, stream: QueuedStream) -> None:
        """Return after the deadline if the stream has sent no arbitration update; otherwise never return."""
        await asyncio.sleep(ARBITRATION_S)
        if self._arbiter.knows(stream):
            await asyncio.Event().wait()

    async def _listen(self, stream: QueuedStream, requests: AsyncIterator[p4r.StreamMessageRequest]) -> None:
        async for request in requests:
            if stream.overrun.is_set():
                return  # the stream is ending; ignore further requests
            kind = request.WhichOneof("update")
            if kind == "arbitration":
                if self._arbiter.update(stream, request.arbitration):
                    # Wait for the lock, so that the previous primary's writes end first.
                    async with self._turn:
                        self._arbiter.announce(stream)
            elif self._arbiter.knows(stream):
                stream.send(p4r.StreamMessageResponse(error=self._stream_error(stream, request)))
            else:
                raise Refused("the first message of a stream must be an arbitration update")

    def _stream_error(self, stream: QueuedStream, request: p4r.StreamMessageRequest) -> p4r.StreamError:
        """Return the error for a message other than arbitration."""
        error = p4r.StreamError(canonical_code=rpc_code.UNIMPLEMENTED, space=ERROR_SPACE)
        error.message = "the built-in switch accepts neither packets nor digest acknowledgements from a controller"
        if not self._arbiter.is_primary(stream):
            error.canonical_code, error.message = rpc_code.PERMISSION_DENIED, "only the primary may send this"
        kind = request.WhichOneof("update")
        is_short = request.ByteSize() <= ECHO_BYTES_MAX
        if kind == "packet":
            error.packet_out.SetInParent()
            if is_short:
                error.packet_out.packet_out.CopyFrom(request.packet)
        elif kind == "digest_ack":
            error.digest_list_ack.SetInParent()
            if is_short:
                error.digest_list_ack.digest_list_ack.CopyFrom(request.digest_ack)
        else:
            error.other.SetInParent()
        return error

    # ---------------------------------------------------------------------------------------------------- checks

    def _check_device(self, device_id: int) -> None:
        if device_id != self._device_id:
            raise Refused(f"this is device {self._device_id}, not {device_id}", rpc_code.NOT_FOUND)

    def _check_writer(self, request: p4r.WriteRequest | p4r.SetForwardingPipelineConfigRequest) -> None:
        if request.role or request.role_id:
            role = request.role or request.role_id
            raise Refused(f"unknown role {role}; only the default role is supported", rpc_code.NOT_FOUND)
        if not self._arbiter.may_write(request.election_id):
            raise Refused(
                "only the primary may write; open a stream and win the arbitration first", rpc_code.PERMISSION_DENIED
            )

    async def _in_turn(self, work: Callable[[], _T], check: Callable[[], None] | None = None) -> _T:
        """Run work in a thread under the lock; it completes even if the caller is cancelled."""

        async def do() -> _T:
            async with self._turn:
                if check is not None:
                    check()
                return await asyncio.to_thread(work)

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait([task])  # unlike await task, this does not cancel the task when the call is cancelled
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Discard a task. Its exception belongs to the caller, and is dropped if the caller has gone away."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for mutual TLS; a controller without a certificate issued by ``ca`` is refused."""

    certificate: Path
    key: Path
    ca: Path

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files; raises OSError if one cannot be read."""
        pair = self.key.read_bytes(), self.certificate.read_bytes()
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)


class P4RuntimeServer(Closing):
    """Serves P4Runtime for one switch; use it as a context manager, or call :meth:`close`.

    Parameters
    ----------
    device
        The switch; its packet loop may start later.
    address
        Address to listen on; port 0 chooses a free port.
    device_id
        The switch's device id for controllers.
    tls
        TLS files; None for plain text, which anyone who can reach the address may use.

    Attributes
    ----------
    address
        The address it listens on, as ``HOST:PORT``.

    Raises
    ------
    OSError
        Listening on the address fails, or a TLS file cannot be read.
    """

    def __init__(
        self, device: P4RuntimeDevice, address: tuple[str, int], device_id: int = 1, tls: TlsFiles | None = None
    ) -> None:
        self._device, self._device_id = device, device_id
        self._credentials = tls.credentials() if tls is not None else None
        self._started: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        host, port = address
        self._thread = threading.Thread(target=self._run, args=(host, port), name="dlcp-p4runtime", daemon=True)
        self._thread.start()
        try:
            self.address = format_address((host, self._started.result(_START_DEADLINE_S)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all calls and stop listening."""
        self._device.close()
        with suppress(RuntimeError):  # the thread has closed its loop
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(2 * _STOP_DEADLINE_S)

    def _run(self, host: str, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(host, port))
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self, host: str, port: int) -> None:
        options = (
            ("grpc.max_receive_message_length", MESSAGE_MAX),
            # Otherwise two switches could share a port, and each would get half the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", CONTROLLER_CALLS_MAX),
            ("grpc.max_concurrent_streams", CONTROLLER_CALLS_MAX),
            ("grpc.server_handshake_timeout_ms", int(1000 * ARBITRATION_S)),
        )
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CONTROLLER_CALLS_MAX)
        service = Service(self._device, self._device_id)
        p4r_grpc.add_P4RuntimeServicer_to_server(service, server)
        listened = format_address((host, port))
        try:
            if self._credentials is None:
                bound = server.add_insecure_port(listened)
            else:
                bound = server.add_secure_port(listened, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listened} for P4Runtime: {error}") from None
        await server.start()
        self._started.set_result(bound)
        await self._stop.wait()
        service.close()
        await server.stop(_STOP_DEADLINE_S)


def make_way_for_packets() -> None:
    """Tune the interpreter to favour the packet loop over controllers' calls; for a process that is only a switch."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
