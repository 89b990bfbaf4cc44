# SPDX-License-Identifier: Apache-2.0
"""One switch for P4Runtime: its forwarding pipeline, and changes made between bursts of packets.

gRPC and arbitration are handled elsewhere. Calls block; make one at a time, from any thread.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from finsy.proto import p4r, rpc_code
from google.protobuf import text_format

from dlcp.switch.executor import bmv2_json
from dlcp.switch.executor.model import EntryError, UnsupportedFeatureError
from dlcp.switch.executor.program import Backend, Program
from dlcp.switch.p4runtime.entities import DELETE, INSERT, MODIFY, Ask, Change, EntityKind, Refused, code_of, kinds_of

_FORWARDING_STATE: Final = (
    p4r.Entity(action_profile_member=p4r.ActionProfileMember()),
    p4r.Entity(action_profile_group=p4r.ActionProfileGroup()),
    p4r.Entity(table_entry=p4r.TableEntry(meter_config=p4r.MeterConfig())),
    p4r.Entity(meter_entry=p4r.MeterEntry()),
)
"""State that `ForwardingPipeline.adopt` copies, in an order in which it can be written."""


_T = TypeVar("_T")


class ForwardingPipeline:
    """A program with its p4info, whose ids controllers use for the program's objects.

    Parameters
    ----------
    config
        p4info and the compiled program: the unmodified output of ``p4c-bm2-ss -o``.
    program
        That program, loaded.

    Raises
    ------
    Refused
        p4info does not describe the program.
    """

    def __init__(self, config: p4r.ForwardingPipelineConfig, program: Program) -> None:
        self.config, self.program = config, program
        self._kinds = kinds_of(config.p4info, program)

    @classmethod
    def build(cls, config: p4r.ForwardingPipelineConfig, backend: Backend) -> "ForwardingPipeline":
        """Load the program of a configuration.

        Raises
        ------
        Refused
            The configuration is incomplete or damaged, or the built-in switch does not support the program.
        """
        data = config.p4_device_config
        if not data or not config.HasField("p4info"):
            raise Refused("a pipeline needs p4info and the JSON that p4c-bm2-ss writes with -o")
        try:
            definition = bmv2_json.parse(json.loads(data), hashlib.sha256(data).hexdigest(), "the device config")
            program = Program(definition, backend)
        except UnsupportedFeatureError as error:
            raise Refused(str(error)) from None
        # Any error here means a damaged file, so it is returned to the controller, not logged.
        except Exception as error:
            raise Refused(f"cannot load the device config: {error}") from error
        return cls(config, program)

    @classmethod
    def of(cls, program: Program, path: Path) -> "ForwardingPipeline":
        """Return the pipeline of a loaded program, with the p4info next to its file.

        Raises
        ------
        OSError
            There is no p4info file.
        Refused
            The file is not p4info, or describes another program.
        """
        beside = path.with_suffix(".p4info.txtpb")
        config = p4r.ForwardingPipelineConfig(p4_device_config=path.read_bytes())
        try:
            text_format.Parse(beside.read_text(encoding="utf-8"), config.p4info)
        except text_format.ParseError as error:
            raise Refused(f"{beside} is not p4info: {error}") from None
        return cls(config, program)

    def change(self, update: p4r.Update) -> Change:
        """Return an update's change, for the packet loop to make; raises Refused."""
        if update.type not in (INSERT, MODIFY, DELETE):
            raise Refused(f"unknown update type {update.type}; use INSERT, MODIFY or DELETE")
        kind, item = self._kind_of(update.entity)
        return kind.change(kind.one(item), update.type, item)

    def read(self, wanted: p4r.Entity, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the entities that a request selects; raises Refused, or EntryError for a missing entry."""
        kind, item = self._kind_of(wanted)
        for known in kind.selected(item):
            yield from kind.read(known, item, ask)

    def _kind_of(self, entity: p4r.Entity) -> tuple[EntityKind, Any]:
        """Return an entity's kind, and the message of that kind."""
        kind = entity.WhichOneof("entity")
        if kind is None:
            raise Refused("the entity is empty; set one of its kinds")
        if kind not in self._kinds:
            raise Refused(f"the built-in switch does not support {kind}", rpc_code.UNIMPLEMENTED)
        return self._kinds[kind], getattr(entity, kind)

    def adopt(self, other: "ForwardingPipeline", ask: Ask) -> None:
        """Copy the entries, members, groups and meters of another pipeline; this one must not be running yet.

        Raises
        ------
        Refused
            An entity does not fit this program.
        """
        for wanted in _FORWARDING_STATE:
            for entity in other.read(wanted, ask):
                if entity.table_entry.is_const:
                    continue
                kind = MODIFY if entity.HasField("meter_entry") else INSERT
                self._carry_over(p4r.Update(type=kind, entity=entity))
        for entity in other.read(p4r.Entity(table_entry=p4r.TableEntry(is_default_action=True)), ask):
            if other._kinds["table_entry"].one(entity.table_entry).default_can_change:
                self._carry_over(p4r.Update(type=MODIFY, entity=entity))

    def _carry_over(self, update: p4r.Update) -> None:
        try:
            self.change(update)()
        except EntryError as error:
            raise Refused(f"an entity of the old program does not fit the new one: {error}") from None


SLICE_S: Final = 0.5e-3
"""Maximum time that packets wait for changes: less than a burst of packets takes."""
LOOP_DEADLINE_S: Final = 5.0
"""Deadline for the packet loop to answer a call, which normally takes microseconds. Not tuned."""
RESPONSE_ENTITIES: Final = 2_000
"""Entities in one message of a read: about 100 KB, far below gRPC's default limit of 4 MB."""

SetAction = p4r.SetForwardingPipelineConfigRequest
GetResponse = p4r.GetForwardingPipelineConfigRequest


class PacketLoop(Protocol):
    """The interface of a switch for P4Runtime; `dlcp.switch.Switch` implements it."""

    def call(self, function: Callable[[], _T]) -> "Future[_T]":
        """Call a function on the packet loop's thread between two bursts."""

    def replace(self, program: Program) -> None:
        """Continue with another program; called on the packet loop's thread."""


class P4RuntimeDevice:
    """A switch, with or without a pipeline.

    Parameters
    ----------
    switch
        The packet loop; unless it runs, every call fails with rpc_code.DEADLINE_EXCEEDED.
    backend
        Back end for the programs that controllers send.
    pipeline
        The pipeline that the switch runs; None if it drops everything.
    """

    def __init__(
        self, switch: PacketLoop, backend: Backend = "python", pipeline: ForwardingPipeline | None = None
    ) -> None:
        self._switch, self._backend = switch, backend
        self._pipeline = pipeline
        """The pipeline for reads and writes: the last one saved."""
        self._saved = False
        """Whether that pipeline awaits COMMIT while the switch still runs the previous one."""
        self.program = None if pipeline is None else pipeline.program
        """The program that the switch runs; None if it drops everything."""
        self._waiting: Future[Any] | None = None
        self._closed = False

    def close(self) -> None:
        """Stop waiting for the packet loop, and refuse all later calls; may be called from any thread."""
        self._closed = True
        waiting = self._waiting
        if waiting is not None:
            waiting.cancel()

    # -------------------------------------------------------------------------------------------------- pipeline

    def set_pipeline(self, action: int, config: p4r.ForwardingPipelineConfig | None) -> None:
        """Verify, save, or run a pipeline.

        Raises
        ------
        Refused
            The request is invalid or failed; nothing has changed.
        """
        if action == SetAction.COMMIT:
            if config is not None:
                raise Refused("COMMIT takes no config; it runs the one that VERIFY_AND_SAVE has saved")
            if not self._saved or self._pipeline is None:
                raise Refused("no config is saved; use VERIFY_AND_SAVE first", rpc_code.NOT_FOUND)
            self._commit(self._pipeline)
            return
        if action not in SetAction.Action.values() or action == SetAction.UNSPECIFIED:
            raise Refused(f"unknown pipeline action {action}")
        if config is None:
            raise Refused("this action needs a config")
        pipeline = ForwardingPipeline.build(config, self._backend)
        if action == SetAction.VERIFY:
            return
        if action == SetAction.VERIFY_AND_SAVE:
            self._pipeline, self._saved = pipeline, True
            return
        if action == SetAction.RECONCILE_AND_COMMIT and self._pipeline is not None:
            pipeline.adopt(self._pipeline, self._ask)
        self._commit(pipeline)

    def get_pipeline(self, parts: int) -> p4r.ForwardingPipelineConfig:
        """Return the parts of the configuration that a request selects; raises Refused if there is none."""
        config, found = self._running().config, p4r.ForwardingPipelineConfig()
        if parts not in GetResponse.ResponseType.values():
            raise Refused(f"unknown response type {parts}")
        if parts in (GetResponse.ALL, GetResponse.P4INFO_AND_COOKIE):
            found.p4info.CopyFrom(config.p4info)
        if parts in (GetResponse.ALL, GetResponse.DEVICE_CONFIG_AND_COOKIE):
            found.p4_device_config = config.p4_device_config
        if config.HasField("cookie"):
            found.cookie.CopyFrom(config.cookie)
        return found

    def _commit(self, pipeline: ForwardingPipeline) -> None:
        self._ask(lambda: self._switch.replace(pipeline.program))
        self._pipeline, self._saved, self.program = pipeline, False, pipeline.program

    def _running(self) -> ForwardingPipeline:
        if self._pipeline is None:
            # BMv2's wording, which controllers such as finsy check for.
            raise Refused(
                "no forwarding pipeline config set; use SetForwardingPipelineConfig first", rpc_code.FAILED_PRECONDITION
            )
        return self._pipeline

    # ----------------------------------------------------------------------------------------- writing and reading

    def write(self, updates: Sequence[p4r.Update]) -> list[p4r.Error]:
        """Make all valid changes, in order; each is atomic.

        Returns
        -------
        The result of each update.

        Raises
        ------
        Refused
            There is no pipeline, or the packet loop does not answer; then some updates may have been made.
        """
        pipeline = self._running()
        changes: list[Change] = []
        for update in updates:
            try:
                changes.append(pipeline.change(update))
            except Refused as refusal:
                changes.append(partial(_raise, refusal))
        # A compiled program encodes its tables after a change. Do that once, in this thread: the packet loop would do
        # it after every slice, while packets wait.
        machine = pipeline.program.machine
        batch = _Batch(self._switch, changes, machine.defer)
        try:
            self._wait(batch.start(), lambda: len(batch.results))
        finally:
            batch.abandoned = True
            self._ask(partial(machine.commit, machine.prepare()))
        return batch.results

    def read(self, wanted: Iterable[p4r.Entity]) -> list[p4r.ReadResponse]:
        """Return every selected entity, in messages of bounded size; raises EntryError."""
        pipeline = self._running()
        responses: list[p4r.ReadResponse] = []
        entities: list[p4r.Entity] = []
        for entity in wanted:
            for found in pipeline.read(entity, self._ask):
                entities.append(found)
                if len(entities) == RESPONSE_ENTITIES:
                    responses.append(p4r.ReadResponse(entities=entities))
                    entities = []
        if entities:
            responses.append(p4r.ReadResponse(entities=entities))
        return responses

    def _ask(self, function: Callable[[], _T]) -> _T:
        return self._wait(self._switch.call(function), lambda: 0)

    def _wait(self, future: "Future[_T]", progress: Callable[[], int]) -> _T:
        """Return the packet loop's answer; the deadline restarts whenever it makes progress."""
        self._waiting = future
        while True:
            before = progress()
            try:
                if self._closed:
                    raise CancelledError
                return future.result(LOOP_DEADLINE_S)
            except CancelledError:
                raise Refused("the switch is being stopped", rpc_code.UNAVAILABLE) from None
            except FutureTimeoutError:
                if progress() > before:
                    continue
                future.cancel()
                raise Refused(
                    f"the packet loop has not answered for {LOOP_DEADLINE_S:.0f} s; is the switch running?",
                    rpc_code.DEADLINE_EXCEEDED,
                ) from None


class _Batch:
    """Changes that the packet loop makes one slice per turn, without waiting for another thread."""

    def __init__(self, switch: PacketLoop, changes: Sequence[Change], begin: Callable[[], None]) -> None:
        self._switch, self._changes, self._begin = switch, changes, begin
        self._done: Future[None] = Future()
        self.results: list[p4r.Error] = []
        """The result of each change so far."""
        self.abandoned = False
        """Set once the caller no longer waits for the results."""

    def start(self) -> "Future[None]":
        """Start on the packet loop; the future is done once every change has a result."""
        self._switch.call(self._first)
        return self._done

    def _first(self) -> None:
        if not self.abandoned:
            self._begin()
            self._next()

    def _next(self) -> None:
        if self.abandoned:
            return
        try:
            end = time.perf_counter() + SLICE_S
            while len(self.results) < len(self._changes):
                self.results.append(_result(self._changes[len(self.results)]))
                if time.perf_counter() >= end:
                    break
        except BaseException as error:
            self._done.set_exception(error)
            raise
        if len(self.results) < len(self._changes):
            self._switch.call(self._next)
        elif self._done.set_running_or_notify_cancel():
            self._done.set_result(None)


def _raise(refusal: Refused) -> None:
    raise refusal


def _result(change: Change) -> p4r.Error:
    """Make one change and return its result."""
    try:
        change()
    except EntryError as error:
        return p4r.Error(canonical_code=code_of(error), message=str(error), space=ERROR_SPACE)
    return _DONE


_DONE: Final = p4r.Error(canonical_code=rpc_code.OK)
ERROR_SPACE: Final = "dlcp-v1model"
"""The ``space`` of P4Runtime errors: target and architecture."""
