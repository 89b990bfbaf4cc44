# SPDX-License-Identifier: Apache-2.0
"""One switch as P4Runtime sees it: its pipeline, and changes that go in between bursts of packets.

Nothing here knows of gRPC or of who may write. Calls block; one at a time, please, but from any thread.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from finsy.proto import p4r

from dlcp.switch.errors import EntryError
from dlcp.switch.p4runtime.pipeline import Pipeline
from dlcp.switch.p4runtime.refusal import (
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    UNAVAILABLE,
    Refused,
)
from dlcp.switch.p4runtime.tables import Change
from dlcp.switch.program import Backend, Program

SLICE_S: Final = 0.5e-3
"""How long packets wait for changes at most. Chosen by us: less than a burst of packets takes."""
DEADLINE_S: Final = 5.0
"""How long the packet loop may take to get to a call. Chosen by us: it takes microseconds when all is well."""
RESPONSE_ENTITIES: Final = 2_000
"""Entities of one message of a read: some 100 KB, far below the 4 MB that gRPC takes without being asked."""

SetAction = p4r.SetForwardingPipelineConfigRequest
GetResponse = p4r.GetForwardingPipelineConfigRequest

T = TypeVar("T")


class PacketLoop(Protocol):
    """What is asked of the switch; ``dlcp.switch.switch.Switch`` is one."""

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Have the packet loop call a function between two bursts."""

    def replace(self, program: Program) -> None:
        """Go on with another program; called by the packet loop."""


class Device:
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

    def __init__(self, switch: PacketLoop, backend: Backend = "python", pipeline: Pipeline | None = None) -> None:
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
        pipeline = Pipeline.build(config, self._backend)
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

    def _commit(self, pipeline: Pipeline) -> None:
        self._ask(lambda: self._switch.replace(pipeline.program))
        self._pipeline, self._saved, self._program = pipeline, False, pipeline.program

    def _running(self) -> Pipeline:
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
