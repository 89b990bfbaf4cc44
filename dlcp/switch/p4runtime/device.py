# SPDX-License-Identifier: Apache-2.0
"""One switch as P4Runtime sees it: its forwarding pipeline, and changes made between bursts of packets.

Nothing here knows of gRPC or of who may write. Calls block; make one at a time, from any thread.
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

from finsy.proto import p4r
from google.protobuf import text_format

from dlcp.switch.errors import EntryError, UnsupportedFeature
from dlcp.switch.executor import bmv2_json
from dlcp.switch.executor.program import Backend, Program
from dlcp.switch.p4runtime.entities import (
    DELETE,
    INSERT,
    MODIFY,
    Ask,
    Change,
    Counters,
    Meters,
    Profiles,
    Registers,
    Tables,
)
from dlcp.switch.p4runtime.messages import (
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    UNAVAILABLE,
    UNIMPLEMENTED,
    Refused,
)
from dlcp.switch.p4runtime.schema import Schema

_FORWARDING_STATE: Final = (
    p4r.Entity(action_profile_member=p4r.ActionProfileMember()),
    p4r.Entity(action_profile_group=p4r.ActionProfileGroup()),
    p4r.Entity(table_entry=p4r.TableEntry(meter_config=p4r.MeterConfig())),
    p4r.Entity(meter_entry=p4r.MeterEntry()),
)
"""What is read to carry entries over to another pipeline, in the order in which it can be written."""


T = TypeVar("T")


class ForwardingPipeline:
    """A program with the p4info by which a controller speaks of it.

    Parameters
    ----------
    config
        p4info and the compiled program: what ``p4c-bm2-ss`` writes with ``-o``, as it is.
    program
        That program, running.

    Raises
    ------
    Refused
        p4info does not describe the program.
    """

    def __init__(self, config: p4r.ForwardingPipelineConfig, program: Program) -> None:
        self.config, self.program = config, program
        schema = Schema(config.p4info, program)
        tables, profiles, counters = Tables(schema), Profiles(schema), Counters(schema)
        meters, registers = Meters(schema), Registers(schema)
        self._change: dict[str, Callable[[int, Any], Change]] = {
            "table_entry": tables.change_entry,
            "direct_meter_entry": tables.change_meter,
            "direct_counter_entry": tables.change_counter,
            "action_profile_member": profiles.change_member,
            "action_profile_group": profiles.change_group,
            "counter_entry": counters.change,
            "meter_entry": meters.change,
            "register_entry": registers.change,
        }
        self._read: dict[str, Callable[[Any, Ask], Iterator[p4r.Entity]]] = {
            "table_entry": lambda wanted, ask: tables.read_entries(wanted),
            "direct_meter_entry": lambda wanted, ask: tables.read_meters(wanted),
            "direct_counter_entry": lambda wanted, ask: tables.read_counters(wanted),
            "action_profile_member": lambda wanted, ask: profiles.read_members(wanted),
            "action_profile_group": lambda wanted, ask: profiles.read_groups(wanted),
            "counter_entry": counters.read,
            "meter_entry": meters.read,
            "register_entry": registers.read,
        }

    @classmethod
    def build(cls, config: p4r.ForwardingPipelineConfig, backend: Backend) -> "ForwardingPipeline":
        """Make the program of a configuration run.

        Raises
        ------
        Refused
            The configuration is incomplete or damaged, or the built-in switch cannot run the program.
        """
        data = config.p4_device_config
        if not data or not config.HasField("p4info"):
            raise Refused(INVALID_ARGUMENT, "a pipeline takes p4info and the JSON that p4c-bm2-ss writes with -o")
        try:
            definition = bmv2_json.parse(json.loads(data), hashlib.sha256(data).hexdigest(), "the device config")
            program = Program(definition, backend)
        except UnsupportedFeature as error:
            raise Refused(INVALID_ARGUMENT, str(error)) from None
        # Whatever a damaged file makes go wrong, it is the file's fault and not ours.
        except Exception as error:
            raise Refused(INVALID_ARGUMENT, f"the device config cannot be run: {error}") from error
        return cls(config, program)

    @classmethod
    def of(cls, program: Program, path: Path) -> "ForwardingPipeline":
        """Return a pipeline of a program that runs already, with the p4info that lies beside its file.

        Raises
        ------
        OSError
            There is none.
        Refused
            It is no p4info, or that of another program.
        """
        beside = path.with_suffix(".p4info.txtpb")
        config = p4r.ForwardingPipelineConfig(p4_device_config=path.read_bytes())
        try:
            text_format.Parse(beside.read_text(encoding="utf-8"), config.p4info)
        except text_format.ParseError as error:
            raise Refused(INVALID_ARGUMENT, f"{beside} is no p4info: {error}") from None
        return cls(config, program)

    def change(self, update: p4r.Update) -> Change:
        """Return what the packet loop is to call for one update; raises Refused for what is wrong at first sight."""
        if update.type not in (INSERT, MODIFY, DELETE):
            raise Refused(INVALID_ARGUMENT, f"an update inserts, modifies or deletes; its type is {update.type}")
        kind, item = _part(update.entity)
        return self._handler(self._change, kind)(update.type, item)

    def read(self, wanted: p4r.Entity, ask: Ask) -> Iterator[p4r.Entity]:
        """Return what a request selects; raises Refused, and EntryError for an entry that is not there."""
        kind, item = _part(wanted)
        return self._handler(self._read, kind)(item, ask)

    @staticmethod
    def _handler(handlers: dict[str, T], kind: str) -> T:
        if kind not in handlers:
            raise Refused(UNIMPLEMENTED, f"the built-in switch has no {kind}")
        return handlers[kind]

    def adopt(self, other: "ForwardingPipeline", ask: Ask) -> None:
        """Take over the entries, members, groups and meters of another pipeline; this one must not run yet.

        Raises
        ------
        Refused
            Something of it does not fit this program.
        """
        for wanted in _FORWARDING_STATE:
            for entity in other.read(wanted, ask):
                if entity.table_entry.is_const:
                    continue
                kind = MODIFY if entity.HasField("meter_entry") else INSERT
                self._carry_over(p4r.Update(type=kind, entity=entity))
        for entity in other.read(p4r.Entity(table_entry=p4r.TableEntry(is_default_action=True)), ask):
            if other.default_can_change(entity.table_entry.table_id):
                self._carry_over(p4r.Update(type=MODIFY, entity=entity))

    def default_can_change(self, table_id: int) -> bool:
        """Whether a controller may set the default action of a table."""
        tables = (item for item in self.config.p4info.tables if item.preamble.id == table_id)
        return all(not item.const_default_action_id and not item.implementation_id for item in tables)

    def _carry_over(self, update: p4r.Update) -> None:
        try:
            self.change(update)()
        except (Refused, EntryError) as error:
            raise Refused(INVALID_ARGUMENT, f"the new program cannot have what the old one has: {error}") from None


def _part(entity: p4r.Entity) -> tuple[str, Any]:
    """Return the kind of an entity and the message of that kind."""
    kind = entity.WhichOneof("entity")
    if kind is None:
        raise Refused(INVALID_ARGUMENT, "no entity is given")
    return kind, getattr(entity, kind)


SLICE_S: Final = 0.5e-3
"""How long packets wait for changes at most. Chosen by us: less than a burst of packets takes."""
DEADLINE_S: Final = 5.0
"""How long the packet loop may take to get to a call. Chosen by us: it takes microseconds when all is well."""
RESPONSE_ENTITIES: Final = 2_000
"""Entities of one message of a read: some 100 KB, far below the 4 MB that gRPC takes without being asked."""

SetAction = p4r.SetForwardingPipelineConfigRequest
GetResponse = p4r.GetForwardingPipelineConfigRequest


class PacketLoop(Protocol):
    """What is asked of the switch; ``dlcp.switch.switch.Switch`` is one."""

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Have the packet loop call a function between two bursts."""

    def replace(self, program: Program) -> None:
        """Go on with another program; called by the packet loop."""


class P4RuntimeDevice:
    """A switch, with or without a pipeline.

    Parameters
    ----------
    switch
        The packet loop; it must run, or every call ends with DEADLINE_EXCEEDED.
    backend
        How programs are run that a controller sends.
    pipeline
        What the switch runs already; None if it drops everything.
    """

    def __init__(
        self, switch: PacketLoop, backend: Backend = "python", pipeline: ForwardingPipeline | None = None
    ) -> None:
        self._switch, self._backend = switch, backend
        self._pipeline = pipeline
        """What reads and writes refer to: the last pipeline that was saved."""
        self._saved = False
        """Whether that one waits for COMMIT, and the switch still runs the one before."""
        self._program = None if pipeline is None else pipeline.program
        self._waiting: Future[Any] | None = None
        self._closed = False

    @property
    def program(self) -> Program | None:
        """What the switch runs; None if it drops everything."""
        return self._program

    def close(self) -> None:
        """Wait for the packet loop no longer, from any thread; what comes from now on is refused."""
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
            It cannot be done; nothing has changed.
        """
        if action == SetAction.COMMIT:
            if config is not None:
                raise Refused(INVALID_ARGUMENT, "COMMIT takes no config; it runs what VERIFY_AND_SAVE has saved")
            if not self._saved or self._pipeline is None:
                raise Refused(NOT_FOUND, "no config is saved; use VERIFY_AND_SAVE first")
            self._commit(self._pipeline)
            return
        if action not in SetAction.Action.values() or action == SetAction.UNSPECIFIED:
            raise Refused(INVALID_ARGUMENT, f"no action {action} for a pipeline")
        if config is None:
            raise Refused(INVALID_ARGUMENT, "this action needs a config")
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
        """Return the parts of the configuration that are asked for; raises Refused if there is none."""
        config, found = self._running().config, p4r.ForwardingPipelineConfig()
        if parts not in GetResponse.ResponseType.values():
            raise Refused(INVALID_ARGUMENT, f"a config has no parts {parts}")
        if parts in (GetResponse.ALL, GetResponse.P4INFO_AND_COOKIE):
            found.p4info.CopyFrom(config.p4info)
        if parts in (GetResponse.ALL, GetResponse.DEVICE_CONFIG_AND_COOKIE):
            found.p4_device_config = config.p4_device_config
        if config.HasField("cookie"):
            found.cookie.CopyFrom(config.cookie)
        return found

    def _commit(self, pipeline: ForwardingPipeline) -> None:
        self._ask(lambda: self._switch.replace(pipeline.program))
        self._pipeline, self._saved, self._program = pipeline, False, pipeline.program

    def _running(self) -> ForwardingPipeline:
        if self._pipeline is None:
            # Controllers know this by BMv2's words; finsy looks for them.
            raise Refused(
                FAILED_PRECONDITION, "no forwarding pipeline config set; use SetForwardingPipelineConfig first"
            )
        return self._pipeline

    # ----------------------------------------------------------------------------------------- writing and reading

    def write(self, updates: Sequence[p4r.Update]) -> list[p4r.Error]:
        """Make the changes that can be made, in order; each is made whole or not at all.

        Returns
        -------
        What became of each update.

        Raises
        ------
        Refused
            There is no pipeline, or the packet loop does not answer; of the latter's updates some may have been made.
        """
        pipeline = self._running()
        changes: list[Change] = []
        for update in updates:
            try:
                changes.append(pipeline.change(update))
            except Refused as refusal:
                changes.append(partial(_refuse, refusal))
        # A compiled program has its tables made anew for packets; here and once, not by the packet loop in every slice.
        machine = pipeline.program.machine
        batch = _Batch(self._switch, changes, machine.defer)
        try:
            self._wait(batch.start(), lambda: len(batch.results))
        finally:
            batch.abandoned = True
            self._ask(partial(machine.commit, machine.prepare()))
        return batch.results

    def read(self, wanted: Iterable[p4r.Entity]) -> list[p4r.ReadResponse]:
        """Return everything that is asked for, in messages of bounded size; raises Refused."""
        pipeline = self._running()
        responses: list[p4r.ReadResponse] = []
        entities: list[p4r.Entity] = []
        for entity in wanted:
            try:
                for found in pipeline.read(entity, self._ask):
                    entities.append(found)
                    if len(entities) == RESPONSE_ENTITIES:
                        responses.append(p4r.ReadResponse(entities=entities))
                        entities = []
            except EntryError as error:
                raise Refused.of(error) from None
        if entities:
            responses.append(p4r.ReadResponse(entities=entities))
        return responses

    def _ask(self, function: Callable[[], T]) -> T:
        return self._wait(self._switch.call(function), lambda: 0)

    def _wait(self, future: "Future[T]", progress: Callable[[], int]) -> T:
        """Return what the packet loop answers; it has time for as long as it makes progress."""
        self._waiting = future
        while True:
            before = progress()
            try:
                if self._closed:
                    raise CancelledError
                return future.result(DEADLINE_S)
            except CancelledError:
                raise Refused(UNAVAILABLE, "the switch is being stopped") from None
            except FutureTimeoutError:
                if progress() > before:
                    continue
                future.cancel()
                raise Refused(
                    DEADLINE_EXCEEDED, f"the packet loop has not answered for {DEADLINE_S:.0f} s; does the switch run?"
                ) from None


class _Batch:
    """Changes that the packet loop makes a slice at a time, one slice each turn, without waiting for another thread."""

    def __init__(self, switch: PacketLoop, changes: Sequence[Change], begin: Callable[[], None]) -> None:
        self._switch, self._changes, self._begin = switch, changes, begin
        self._done: Future[None] = Future()
        self.results: list[p4r.Error] = []
        """What became of each change so far."""
        self.abandoned = False
        """Set when nobody waits any more."""

    def start(self) -> "Future[None]":
        """Have the packet loop begin; what is returned is done when all changes have a result."""
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
            _apply_some(self._changes, self.results)
        except BaseException as error:
            self._done.set_exception(error)
            raise
        if len(self.results) < len(self._changes):
            self._switch.call(self._next)
        elif self._done.set_running_or_notify_cancel():
            self._done.set_result(None)


def _refuse(refusal: Refused) -> None:
    raise refusal


def _apply_some(changes: Sequence[Change], results: list[p4r.Error]) -> None:
    """Make changes for the length of a slice, beginning after those that have a result."""
    end = time.perf_counter() + SLICE_S
    for change in changes[len(results) :]:
        results.append(_result(change))
        if time.perf_counter() >= end:
            return


def _result(change: Change) -> p4r.Error:
    """Make one change and return what became of it."""
    try:
        change()
    except EntryError as error:
        refusal = Refused.of(error)
    except Refused as error:
        refusal = error
    else:
        return _DONE
    return p4r.Error(canonical_code=refusal.code, message=refusal.message, space=ERROR_SPACE)


_DONE: Final = p4r.Error(canonical_code=OK)
ERROR_SPACE: Final = "dlcp-v1model"
"""To whom the errors belong, as P4Runtime names it: target and architecture."""
