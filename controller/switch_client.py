# SPDX-License-Identifier: Apache-2.0
"""A P4Runtime connection to one switch: compare its state with the wanted state, write the difference, read counters.

Every wait has a deadline, and every error names the switch. P4Runtime cannot set the depth of BMv2's queues, or tell
their number; BMv2's own command-line tool can set it, over Thrift.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy as np
from finsy import (
    GRPCCredentialsTLS,
    GRPCStatusCode,
    P4ActionProfileGroup,
    P4ActionProfileMember,
    P4Client,
    P4ClientError,
    P4CounterEntry,
    P4RegisterEntry,
)
from finsy.p4entity import P4EntityList, encode_entities
from finsy.proto import U128, p4r

from dlcp.controller.compiled_program import KINDS, CompiledProgram, Difference, difference
from dlcp.controller.entries import entries
from dlcp.controller.fabric import PORT_MAX, Fabric, FabricSwitch, Port
from dlcp.inputs.addresses import parse_address
from dlcp.switch import (
    EVENT_COUNTERS,
    QUEUES,
    EgressEvent,
    EventCount,
    IngressEvent,
    PortQueueing,
    decode_events,
    event_index,
)
from dlcp.wire import DROP_CLASSES, Queue

_T = TypeVar("_T")


async def within(answer: Coroutine[Any, Any, _T], deadline_s: float) -> _T:
    """Return what ``answer`` returns.

    ``asyncio.wait_for`` is not used: before Python 3.12 it loses a cancellation that arrives together with the answer,
    so that a cancelled task keeps running.

    Raises
    ------
    asyncio.TimeoutError
        It took longer than ``deadline_s`` seconds and was cancelled.
    """
    task = asyncio.ensure_future(answer)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        await stopped(task)
        raise
    if not done:
        await stopped(task)
        raise asyncio.TimeoutError
    return task.result()


async def stopped(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end, however it ends."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieve it, or asyncio logs that it never was


_DEADLINE_S: Final = 10.0
"""Deadline for one answer of a switch. BMv2's slowest, to a new pipeline, takes 0.1 s."""
ELECTION_ID: Final = 10
"""Default election id, which leaves room for controllers of lower and of higher precedence."""
LOGGER: Final = logging.getLogger("dlcp.fabric")
ENDING_S: Final = 2.0
"""How long a switch may take to notice that a previous controller with the same election id has left. BMv2 takes
milliseconds, more on a busy host."""
_BID_AGAIN_S: Final = 0.05
_REFUSALS_SHOWN: Final = 5
_CONFIG: Final = p4r.GetForwardingPipelineConfigRequest


class ControlError(RuntimeError):
    """A switch refused or did not answer a request; the message names the switch and the reason.

    Parameters
    ----------
    message
        What is wrong.
    code
        The gRPC status code of the switch's answer; None if there was none.
    """

    def __init__(self, message: str, code: GRPCStatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """A control connection to one switch; an asynchronous context manager.

    Parameters
    ----------
    switch
        The switch; ``switch.grpc`` is its address.
    pipeline
        The program that it should run.
    election_id
        Of several controllers, the one with the highest id writes; the others stand by.
    deadline_s
        Deadline for one answer, in seconds.

    Attributes
    ----------
    writes
        Number of write requests sent.
    lost
        Done when the connection is lost or another controller has become primary; its exception says which.

    Raises
    ------
    ControlError
        The switch has no address, or a certificate cannot be read.
    """

    def __init__(
        self,
        switch: FabricSwitch,
        pipeline: CompiledProgram,
        *,
        election_id: int = ELECTION_ID,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        if not switch.grpc:
            raise ControlError(f"switch {switch.name} has no control address; give one, as in grpc: 127.0.0.1:9559")
        self.switch = switch
        self.pipeline = pipeline
        self.writes = 0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._election_id = election_id
        self._deadline_s = deadline_s
        self._client = P4Client(switch.grpc, self._credentials(), wait_for_ready=False)
        self._listener: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> "Session":
        await self._client.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection. The switch keeps its program and entries."""
        self._closed = True
        if self._listener is not None:
            await stopped(self._listener)
        if self.lost.done() and not self.lost.cancelled():
            self.lost.exception()  # retrieve it, or asyncio logs that it never was
        self.lost.cancel()
        await self._client.close()

    async def become_primary(self, *, stand_by: bool = False) -> None:
        """Become the primary controller, which alone may write. With ``stand_by``, wait while another one is primary.

        Raises
        ------
        ControlError
            Another controller is primary, or the switch does not answer.
        """
        primary = await self._within(self._bid(), "becoming its controller")
        while primary is not None:
            if not stand_by:
                raise self._error(
                    f"another controller is primary, with election id {primary}; ours is {self._election_id}; "
                    f"stop it, or give a higher --election-id"
                )
            LOGGER.info("%s", self._error(f"stands by, for the controller with election id {primary} is primary"))
            primary = await self._translated(self._next_decision(), "waiting for the primary controller to leave")
        self._listener = asyncio.create_task(self._listen(), name=f"dlcp-control-{self.switch.name}")

    async def cookie(self) -> int | None:
        """Return the cookie of the switch's program; None if it has none."""
        request = _CONFIG(device_id=self.switch.device_id, response_type=_CONFIG.COOKIE_ONLY)
        try:
            response = await self._within(self._client.request(request), "reading which program it runs")
        except ControlError as error:
            if error.code == GRPCStatusCode.FAILED_PRECONDITION:
                return None
            raise
        return int(response.config.cookie.cookie) if response.config.HasField("cookie") else None

    async def install(self) -> None:
        """Install the program on the switch, with empty tables."""
        request = p4r.SetForwardingPipelineConfigRequest(
            device_id=self.switch.device_id,
            election_id=U128.encode(self._election_id),
            action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
            config=self.pipeline.config,
        )
        await self._within(self._client.request(request), "installing the program")

    async def entities(self) -> list[p4r.Entity]:
        """Return all non-default table entries, with their meters, and all members and groups."""
        # finsy cannot ask for the meters of all tables.
        entries = p4r.Entity(table_entry=p4r.TableEntry(meter_config=p4r.MeterConfig()))
        found = await self.read([entries, P4ActionProfileMember(), P4ActionProfileGroup()])
        return [entity for entity in found if not entity.table_entry.is_default_action]

    async def read(self, entities: Sequence[P4EntityList]) -> list[p4r.Entity]:
        """Return the entities that match ``entities``; a field left out matches anything, as P4Runtime specifies."""
        encoded = encode_entities(entities, self.pipeline.schema)
        request = p4r.ReadRequest(device_id=self.switch.device_id, entities=encoded)
        return await self._within(self._collected(request), "reading its state")

    async def _collected(self, request: p4r.ReadRequest) -> list[p4r.Entity]:
        if self._closed:
            raise self._error("the connection is closed")
        return await _collect(self._client.request_iter(request))

    async def write(self, changes: Sequence[p4r.Update]) -> None:
        """Write changes in one request.

        Raises
        ------
        ControlError
            The switch refused some, which the message names with the reasons; it has made the others.
        """
        request = p4r.WriteRequest(
            device_id=self.switch.device_id,
            election_id=U128.encode(self._election_id),
            updates=changes,
        )
        self.writes += 1
        await self._within(self._client.request(request), f"writing {len(changes)} changes", changes)

    async def send_packet(self, frame: bytes) -> None:
        """Send a frame into the switch through its CPU port. A switch without one ignores it."""
        message = p4r.StreamMessageRequest(packet=p4r.PacketOut(payload=frame))
        await self._within(self._client.send(message), "sending a packet")

    def _credentials(self) -> GRPCCredentialsTLS | None:
        tls = self.switch.tls
        if tls is None:
            return None
        try:
            ca, certificate, key = (Path(name).read_bytes() for name in (tls.ca, tls.certificate, tls.key))
        except OSError as error:
            raise ControlError(f"switch {self.switch.name}: {error.filename}: {error.strerror}") from None
        return GRPCCredentialsTLS(cacert=ca, cert=certificate, private_key=key, target_name_override=tls.server_name)

    async def _bid(self) -> int | None:
        """Bid; return None if this controller is now primary, else the election id of the primary."""
        give_up_s = time.monotonic() + ENDING_S
        while True:
            try:
                await self._send_bid()
                return await self._next_decision()
            except P4ClientError as error:
                if not error.is_election_id_used or time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(_BID_AGAIN_S)

    async def _send_bid(self) -> None:
        election_id = U128.encode(self._election_id)
        bid = p4r.MasterArbitrationUpdate(device_id=self.switch.device_id, election_id=election_id)
        await self._client.send(p4r.StreamMessageRequest(arbitration=bid))

    async def _next_decision(self) -> int | None:
        """Wait for the switch's next arbitration message, and return as :meth:`_bid` does."""
        while True:
            response = await self._client.receive()
            if response.WhichOneof("update") != "arbitration":
                continue
            update = response.arbitration
            highest = U128.decode(update.election_id)
            if update.status.code == GRPCStatusCode.OK:
                return None
            if update.status.code == GRPCStatusCode.ALREADY_EXISTS:
                return highest
            # The primary has left, and only a bid at least as high as its own succeeds it.
            self._election_id = max(self._election_id, highest)
            await self._send_bid()

    async def _listen(self) -> None:
        """Read the stream until it ends or another controller becomes primary, then set ``lost``."""
        try:
            primary = await self._translated(self._next_decision(), "the control stream")
            while primary is None:
                primary = await self._translated(self._next_decision(), "the control stream")
            error = self._error(f"another controller took over, with election id {primary}")
        except ControlError as ended:
            error = ended
        if not self.lost.done():
            self.lost.set_exception(error)

    async def _within(self, answer: Awaitable[_T], what: str, changes: Sequence[p4r.Update] = ()) -> _T:
        """Return an answer as `_translated` does, within the deadline."""
        try:
            return await within(self._translated(answer, what, changes), self._deadline_s)
        except asyncio.TimeoutError:
            raise self._error(f"{what}: no answer within {self._deadline_s:g} s") from None

    async def _translated(self, answer: Awaitable[_T], what: str, changes: Sequence[p4r.Update] = ()) -> _T:
        """Return an answer; raise errors as ControlErrors, which name the switch and the refused ``changes``."""
        try:
            return await answer
        except P4ClientError as error:
            refused = self._refused_changes(error, changes) if changes and error.details else self._refused(error, what)
            raise refused from None
        except AssertionError:
            if not self._closed:
                raise
            raise self._error("the connection is closed") from None  # meanwhile
        except RuntimeError as error:
            if "EOF" not in str(error):
                raise
            raise self._error("it closed the connection") from None

    def _refused_changes(self, error: P4ClientError, changes: Sequence[p4r.Update]) -> ControlError:
        lines = [
            f"{KINDS[changes[index].type]} {self.pipeline.describe(changes[index].entity)}: "
            f"{detail.canonical_code.name}: {detail.message}"
            for index, detail in sorted(error.details.items())
        ]
        shown = lines[:_REFUSALS_SHOWN]
        if len(lines) > len(shown):
            shown.append(f"and {len(lines) - len(shown)} more")
        return self._error(f"it refused {len(lines)} of {len(changes)} changes:\n  " + "\n  ".join(shown))

    def _refused(self, error: P4ClientError, what: str) -> ControlError:
        if error.is_election_id_used:
            return self._error(
                f"another connection has election id {self._election_id}: another controller's, or an earlier one of "
                "this controller that the switch takes for open. Stop the other controller or give another "
                "--election-id; an earlier connection ends by itself once the switch notices"
            )
        if error.code == GRPCStatusCode.UNAVAILABLE:
            return self._error(f"no connection: {error.message}", error.code)
        return self._error(f"{what}: {error.code.name}: {error.message}", error.code)

    def _error(self, message: str, code: GRPCStatusCode | None = None) -> ControlError:
        return ControlError(f"switch {self.switch.name} at {self.switch.grpc}: {message}", code)


async def _collect(responses: AsyncIterator[p4r.ReadResponse]) -> list[p4r.Entity]:
    return [entity async for response in responses for entity in response.entities]


# ---------------------------------------------------------------------------------------------- the wanted state


@dataclass(frozen=True)
class Plan:
    """The changes that one switch needs.

    Parameters
    ----------
    switch
        The switch.
    install
        Whether the program has to be installed first, which empties its tables.
    difference
        The changes to its tables.
    """

    switch: FabricSwitch
    install: bool
    difference: Difference

    def __bool__(self) -> bool:
        """Whether there is anything to change."""
        return self.install or len(self.difference) > 0


@dataclass(frozen=True)
class Outcome:
    """The result of reconciling one switch.

    Parameters
    ----------
    plan
        The changes it needed.
    writes
        Number of write requests sent.
    elapsed_s
        Time from the first read to the last write, in seconds.
    unset
        What `set_up_queues` could not set or check, and why; empty if nothing.
    """

    plan: Plan
    writes: int
    elapsed_s: float
    unset: str = ""


def wanted(fabric: Fabric, switch: FabricSwitch, pipeline: CompiledProgram) -> list[p4r.Entity]:
    """Return all entities that a switch of a fabric should hold.

    Raises
    ------
    PipelineError
        The program lacks a table, field or action, or a table or field is too small.
    """
    return pipeline.encode(entries(fabric, switch.name))


async def plan(session: Session, should_hold: list[p4r.Entity]) -> Plan:
    """Return the changes that a switch needs to hold ``should_hold``; reads its state and changes nothing.

    Raises
    ------
    ControlError
        The switch does not answer.
    """
    install = await session.cookie() != session.pipeline.cookie
    holds = [] if install else await session.entities()
    return Plan(session.switch, install, difference(should_hold, holds))


async def reconcile(session: Session, should_hold: list[p4r.Entity]) -> Outcome:
    """Make a switch hold ``should_hold``. Correct entities are not touched; ``session`` must be the primary.

    Raises
    ------
    ControlError
        The switch does not answer, or refuses a change.
    """
    start = time.monotonic()
    before = session.writes
    found = await plan(session, should_hold)
    if found.install:
        await session.install()
    for batch in found.difference.batches():
        await session.write(batch)
    return Outcome(found, session.writes - before, time.monotonic() - start)


_CLI: Final = "simple_switch_CLI"
_CLI_DEADLINE_S: Final = 20.0
"""Deadline for that command. It needs a second to start on a busy machine."""
_OUT_OF_RANGE: Final = "range_check"
"""In BMv2's answer to a command for a queue that it does not have; the rest depends on its C++ library."""
_PROBE: Final = bytes.fromhex("020000000000 88b5") + bytes(46)
"""A frame after its destination: source, and IEEE 802's type for local experiments, which hosts ignore."""
_PROBE_DEADLINE_S: Final = 1.0
"""How long a probe may wait behind other packets. An idle BMv2 takes milliseconds."""
_PROBE_EVERY_S: Final = 0.05


class QueueError(RuntimeError):
    """A switch has too few queues, or their depths could not be set; the message names the switch and the reason."""


def queue_depths_unavailable(switch: FabricSwitch) -> str:
    """Return why the queue depths of a switch cannot be set; empty if they can be, or need not be."""
    if switch.kind != "bmv2":
        return ""
    if not switch.thrift:
        return f"switch {switch.name} has no thrift address, so its queues keep the depth they were started with"
    if shutil.which(_CLI) is None:
        return f"{_CLI} is not on PATH (install p4lang's package p4lang-bmv2), so {switch.name} keeps its queue depths"
    return ""


async def set_up_queues(session: Session, fabric: Fabric) -> str:
    """Set the depths of BMv2's queues, and check that there are eight for each port; other switches need neither.

    Without Thrift, the depths stay, and the check sends a frame to a host, through the CPU port.

    Returns
    -------
    What could not be set or checked, and why; empty if nothing.

    Raises
    ------
    QueueError
        The switch has too few queues, or refuses a depth.
    """
    switch = session.switch
    if switch.kind != "bmv2":
        return ""
    reason = queue_depths_unavailable(switch)
    if not reason:
        await set_queue_depths(switch, entries(fabric, switch.name).ports)
        return ""
    forwards = await _forwards_a_probe(session, fabric)
    if forwards is None:
        return f"{reason}; it has no CPU port either, so make sure that it was started with -- --priority-queues 8"
    if not forwards:
        raise _too_few_queues(switch)
    return reason


def _too_few_queues(switch: FabricSwitch) -> QueueError:
    return QueueError(
        f"switch {switch.name}: BMv2 has fewer than {QUEUES} queues per port, so it drops nearly all packets without "
        f"counting them; restart it with -- --priority-queues {QUEUES}"
    )


async def _forwards_a_probe(session: Session, fabric: Fabric) -> bool | None:
    """Return whether a frame for a host leaves from the queue of ordinary traffic; None if there is no CPU port for it.

    It has left once egress counts it, even if its port is down. Other traffic of any queue but the lowest proves the
    same, and may go first. The CPU port's arrivals are counted where no link's are.
    """
    used = fabric.neighbours[session.switch.name]
    arrivals = [P4CounterEntry("arrivals", index=port) for port in range(PORT_MAX + 1) if port not in used]
    others = product(used, range(Queue.ORDINARY, QUEUES), range(DROP_CLASSES))
    places = [event_index(*place, EgressEvent.FORWARDED) for place in others]
    departures = [P4CounterEntry("egress_events", index=place) for place in places]

    async def packets(counters: list[P4CounterEntry]) -> int:
        return sum(entity.counter_entry.data.packet_count for entity in await session.read(counters))

    arrived, departed = await packets(arrivals), await packets(departures)
    await session.send_packet(bytes.fromhex(fabric.hosts[0].mac.replace(":", "")) + _PROBE)
    give_up_s = time.monotonic() + _PROBE_DEADLINE_S
    while await packets(departures) == departed:
        if time.monotonic() > give_up_s:
            return False if await packets(arrivals) > arrived else None
        await asyncio.sleep(_PROBE_EVERY_S)
    return True


async def set_queue_depths(switch: FabricSwitch, ports: Mapping[int, PortQueueing]) -> None:
    """Set the depth of all queues of a switch. The rate is not set: BMv2 has rates per queue, not per port.

    Raises
    ------
    QueueError
        The command is missing or failed, or the switch has too few queues.
    """
    host, port = parse_address(switch.thrift)
    try:
        process = await asyncio.create_subprocess_exec(
            _CLI, "--thrift-ip", host, "--thrift-port", str(port),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise QueueError(f"switch {switch.name}: {_CLI}: {error.strerror}") from None
    try:
        answer, _ = await within(process.communicate("\n".join(_commands(ports)).encode()), _CLI_DEADLINE_S)
    except asyncio.TimeoutError:
        raise QueueError(
            f"switch {switch.name}: {_CLI}: no answer from {switch.thrift} within {_CLI_DEADLINE_S:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = answer.decode(errors="replace")
    if _OUT_OF_RANGE in said:
        raise _too_few_queues(switch)
    if process.returncode or "Error" in said:
        last = "; ".join(said.strip().splitlines()[-2:]) or f"exit status {process.returncode}"
        raise QueueError(f"switch {switch.name}: {_CLI} at {switch.thrift}: {last}")


def _commands(ports: Mapping[int, PortQueueing]) -> list[str]:
    """Return the commands for BMv2: one for a port whose queues are equally deep, else one for each queue.

    The last queue of each port is named in any case: BMv2 refuses the command if it has too few.
    """
    lines = []
    for port, queueing in ports.items():
        depths = queueing.depths()
        if len(set(depths)) == 1:
            lines += [f"set_queue_depth {depths[0]} {port}", f"set_queue_depth {depths[-1]} {port} {QUEUES - 1}"]
        else:
            lines += [f"set_queue_depth {depth} {port} {queue}" for queue, depth in enumerate(depths)]
    return [*lines, ""]


async def program(session: Session, fabric: Fabric) -> Outcome:
    """Become a switch's controller, and make it hold all that a fabric wants of it.

    Raises
    ------
    ControlError
        Another controller is primary, or the switch does not answer or refuses a change.
    QueueError
        BMv2 has too few queues, or their depths cannot be set. Without its tool or a Thrift address, they are left as
        they are.
    """
    await session.become_primary()
    outcome = await reconcile(session, wanted(fabric, session.switch, session.pipeline))
    return replace(outcome, unset=await set_up_queues(session, fabric))


async def ask_all(
    fabric: Fabric, pipeline: CompiledProgram, ask: Callable[[Session], Awaitable[_T]], **options: Any
) -> dict[str, _T | str]:
    """Call ``ask`` with a session to each switch, concurrently.

    Parameters
    ----------
    options
        Further arguments of :class:`Session`.

    Returns
    -------
    By switch, its answer, or its error as text.

    Raises
    ------
    ValueError
        No switch has a control address.
    """

    async def talk(switch: FabricSwitch) -> _T | str:
        try:
            async with Session(switch, pipeline, **options) as session:
                return await ask(session)
        except (ControlError, QueueError) as error:
            return str(error)

    switches = [switch for switch in fabric.switches if switch.grpc]
    if not switches:
        raise ValueError("no switch has a control address; add one to the file, as in grpc: 127.0.0.1:9559")
    answers = await asyncio.gather(*map(talk, switches))
    return {switch.name: answer for switch, answer in zip(switches, answers, strict=True)}


# ------------------------------------------------------------------------------------------------------ counters


COUNTER_EVENTS: Final[dict[str, type[IntEnum]]] = {"ingress_events": IngressEvent, "egress_events": EgressEvent}
"""The program's counters and their events."""
_PORTS_ASKED_SINGLY: Final = 32
"""For more ports than this, half of the program's 64, all counters are read instead of those of each port."""


@dataclass(frozen=True)
class Readings:
    """Counter readings of one switch.

    Parameters
    ----------
    events
        All events with a non-zero count.
    depths
        Packets in each queue when its last packet left, by port and queue; None if the switch cannot read registers.
    """

    events: tuple[EventCount, ...]
    depths: dict[tuple[int, int], int] | None

    def packets(self, *events: str, port: int | None = None) -> int:
        """Return the number of packets of these events, at one port or at all ports."""
        return sum(
            count.packets for count in self.events if count.event in events and (port is None or count.port == port)
        )


async def read_counters(session: Session, ports: Iterable[int]) -> Readings:
    """Read the counters and the queue depths of ports.

    Raises
    ------
    ControlError
        The switch does not answer, or does not run the program.
    """
    used = sorted(ports)
    events: list[EventCount] = []
    for name, kinds in COUNTER_EVENTS.items():
        events += await _events(session, name, kinds, used)
    return Readings(tuple(events), await _depths(session, used))


async def read_ports(session: Session, counter: str, ports: Iterable[int]) -> dict[Port, int]:
    """Read how many packets a counter by port, ``arrivals`` or ``departures``, has seen.

    Raises
    ------
    ControlError
        As for :func:`read_counters`.
    """
    found = await session.read([P4CounterEntry(counter, index=port) for port in ports])
    counts = [entity.counter_entry for entity in found]
    return {Port(session.switch.name, count.index.index): count.data.packet_count for count in counts}


async def _events(session: Session, name: str, kinds: type[IntEnum], ports: list[int]) -> list[EventCount]:
    asked = [P4CounterEntry(name)]
    if len(ports) <= _PORTS_ASKED_SINGLY:
        places = product(ports, range(QUEUES), range(DROP_CLASSES), kinds)
        asked = [P4CounterEntry(name, index=event_index(*place)) for place in places]
    packets, octets = np.zeros((2, EVENT_COUNTERS), np.int64)
    for entity in await session.read(asked):
        entry = entity.counter_entry
        packets[entry.index.index] = entry.data.packet_count
        octets[entry.index.index] = entry.data.byte_count
    return decode_events(kinds, packets, octets)


async def _depths(session: Session, ports: list[int]) -> dict[tuple[int, int], int] | None:
    """Return the queue depths; None from BMv2, which cannot read registers over P4Runtime."""
    places = {port * QUEUES + queue: (port, queue) for port, queue in product(ports, range(QUEUES))}
    try:
        found = await session.read([P4RegisterEntry("queue_depth", index=index) for index in places])
    except ControlError as error:
        if error.code == GRPCStatusCode.UNIMPLEMENTED:
            return None
        raise
    return {
        places[entity.register_entry.index.index]: int.from_bytes(entity.register_entry.data.bitstring, "big")
        for entity in found
    }
