# SPDX-License-Identifier: Apache-2.0
"""A forwarding pipeline: the program that a controller has sent, running, and everything that can be written to it."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from finsy.proto import p4r
from google.protobuf import text_format

from dlcp.switch import bmv2_json
from dlcp.switch.errors import EntryError, UnsupportedFeature
from dlcp.switch.p4runtime.cells import Ask, Counters, Meters, Registers
from dlcp.switch.p4runtime.profiles import Profiles
from dlcp.switch.p4runtime.refusal import INVALID_ARGUMENT, UNIMPLEMENTED, Refused
from dlcp.switch.p4runtime.schema import Schema
from dlcp.switch.p4runtime.tables import DELETE, INSERT, MODIFY, Change, Tables
from dlcp.switch.program import Backend, Program

_FORWARDING_STATE: Final = (
    p4r.Entity(action_profile_member=p4r.ActionProfileMember()),
    p4r.Entity(action_profile_group=p4r.ActionProfileGroup()),
    p4r.Entity(table_entry=p4r.TableEntry(meter_config=p4r.MeterConfig())),
    p4r.Entity(meter_entry=p4r.MeterEntry()),
)
"""What is read to carry entries over to another pipeline, in the order in which it can be written."""


T = TypeVar("T")


class Pipeline:
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
    def build(cls, config: p4r.ForwardingPipelineConfig, backend: Backend) -> "Pipeline":
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
    def of(cls, program: Program, path: Path) -> "Pipeline":
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

    def adopt(self, other: "Pipeline", ask: Ask) -> None:
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
