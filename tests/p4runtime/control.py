# SPDX-License-Identifier: Apache-2.0
"""A P4Runtime client for tests: it sends any message, wrong or right, and returns every answer in full."""

import queue
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from finsy.proto import p4i, p4r, p4r_grpc, rpc_status
from google.protobuf import text_format

from dlcp.host.closing import Closing
from tests.p4runtime.targets import DEVICE_ID

CALL_DEADLINE_S = 60.0
BUILD = Path(__file__).parents[2] / "p4" / "build"
KINDS = Path(__file__).with_name("program")
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_metadata_size", 1 << 22))

INSERT, MODIFY, DELETE = p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE
SetAction = p4r.SetForwardingPipelineConfigRequest
Code = grpc.StatusCode


def config(folder: Path = BUILD, cookie: int | None = None) -> p4r.ForwardingPipelineConfig:
    """Return the pipeline whose compiled program is in a folder."""
    (program,) = folder.glob("*.json")
    found = p4r.ForwardingPipelineConfig(p4_device_config=program.read_bytes())
    text_format.Parse(program.with_suffix(".p4info.txtpb").read_text(), found.p4info)
    if cookie is not None:
        found.cookie.cookie = cookie
    return found


def encode(number: int) -> bytes:
    return number.to_bytes(max(1, (number.bit_length() + 7) // 8), "big")


class Words:
    """Messages in terms of the names of a p4info."""

    def __init__(self, p4info: p4i.P4Info) -> None:
        self.p4info = p4info
        self.tables = {item.preamble.alias: item for item in p4info.tables}
        self.actions = {item.preamble.alias: item for item in p4info.actions}

    def id(self, part: str, alias: str) -> int:
        """Return the number of one thing, as in ``id("counters", "egress_events")``."""
        return next(item.preamble.id for item in getattr(self.p4info, part) if item.preamble.alias == alias)

    def action(self, name: str, **params: int) -> p4r.Action:
        info = self.actions[name]
        action = p4r.Action(action_id=info.preamble.id)
        for item in info.params:
            action.params.add(param_id=item.id, value=encode(params.pop(item.name)))
        assert not params
        return action

    def entry(
        self, table: str, match: Mapping[str, Any], target: p4r.Action | tuple[str, int] | None = None, **more: Any
    ) -> p4r.Entity:
        """Return a table entry.

        Parameters
        ----------
        match
            A number (exact, optional), (value, length), (value, mask) or (low, high) for each field.
        target
            An action, ``("member", 1)`` or ``("group", 1)``.
        more
            Other fields of the message.
        """
        info = self.tables[table]
        entity = p4r.Entity(table_entry=p4r.TableEntry(table_id=info.preamble.id, **more))
        message, match = entity.table_entry, dict(match)
        for field in info.match_fields:
            if field.name not in match:
                continue
            value, part = match.pop(field.name), message.match.add(field_id=field.id)
            kind = p4i.MatchField.MatchType.Name(field.match_type).lower()
            if kind in ("exact", "optional"):
                getattr(part, kind).value = encode(value)
            elif kind == "lpm":
                part.lpm.value, part.lpm.prefix_len = encode(value[0]), value[1]
            elif kind == "ternary":
                part.ternary.value, part.ternary.mask = encode(value[0]), encode(value[1])
            else:
                part.range.low, part.range.high = encode(value[0]), encode(value[1])
        assert not match
        if isinstance(target, p4r.Action):
            message.action.action.CopyFrom(target)
        elif target is not None:
            setattr(message.action, f"action_profile_{target[0]}_id", target[1])
        return entity

    def member(self, profile: str, number: int, action: p4r.Action | None = None) -> p4r.Entity:
        message = p4r.ActionProfileMember(action_profile_id=self.id("action_profiles", profile), member_id=number)
        if action is not None:
            message.action.CopyFrom(action)
        return p4r.Entity(action_profile_member=message)

    def group(self, profile: str, number: int, weights: Mapping[int, int], max_size: int = 0) -> p4r.Entity:
        message = p4r.ActionProfileGroup(
            action_profile_id=self.id("action_profiles", profile), group_id=number, max_size=max_size
        )
        for member, weight in weights.items():
            message.members.add(member_id=member, weight=weight)
        return p4r.Entity(action_profile_group=message)

    def cell(self, kind: str, alias: str, index: int | None, **more: Any) -> p4r.Entity:
        """Return one cell, or all, of a ``counter``, ``meter`` or ``register``."""
        entity = p4r.Entity()
        message = getattr(entity, f"{kind}_entry")
        setattr(message, f"{kind}_id", self.id(f"{kind}s", alias))
        if index is not None:
            message.index.index = index
            message.index.SetInParent()
        message.MergeFrom(type(message)(**more))
        return entity


class Control(Closing):
    """One controller: a channel, and a stream once :meth:`arbitrate` was called. A context manager."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None, strict: bool = True) -> None:
        self.strict = strict
        """Whether the switch is to answer in the words of the specification, as BMv2 does not always."""
        if credentials is None:
            self.channel = grpc.insecure_channel(address, OPTIONS)
        else:
            self.channel = grpc.secure_channel(address, credentials, OPTIONS)
        self.stub = p4r_grpc.P4RuntimeStub(self.channel)
        self.election_id = 0
        self.words: Words = Words(p4i.P4Info())
        self._to_send: queue.Queue[p4r.StreamMessageRequest | None] = queue.Queue()
        self._stream: Any = None

    def close(self) -> None:
        self._to_send.put(None)
        self.channel.close()

    # ---------------------------------------------------------------------------------------------------- stream

    def send(self, request: p4r.StreamMessageRequest) -> None:
        if self._stream is None:
            self._stream = self.stub.StreamChannel(iter(self._to_send.get, None), timeout=100)
        self._to_send.put(request)

    def ask(self, election_id: int | None, device_id: int = DEVICE_ID, role: str = "") -> None:
        """Ask to be primary, or backup for None, and wait for nothing."""
        request = p4r.StreamMessageRequest()
        request.arbitration.device_id = device_id
        if election_id is not None:
            high, low = divmod(election_id, 1 << 64)
            request.arbitration.election_id.CopyFrom(p4r.Uint128(high=high, low=low))
        if role:
            request.arbitration.role.name = role
        self.election_id = election_id or 0
        self.send(request)

    def receive(self) -> p4r.StreamMessageResponse:
        """Return the next message of the stream; raises grpc.RpcError when the stream ends instead."""
        return next(self._stream)

    def arbitrate(self, election_id: int | None) -> p4r.MasterArbitrationUpdate:
        self.ask(election_id)
        return self.receive().arbitration

    # ----------------------------------------------------------------------------------------------------- calls

    def signed(self, request: Any) -> Any:
        """Put device and election id into a request."""
        request.device_id = DEVICE_ID
        request.election_id.high, request.election_id.low = divmod(self.election_id, 1 << 64)
        return request

    def set_pipeline(
        self, pipeline: p4r.ForwardingPipelineConfig | None = None, action: int = SetAction.VERIFY_AND_COMMIT
    ) -> None:
        request = self.signed(SetAction(action=action))
        if pipeline is not None:
            request.config.CopyFrom(pipeline)
            self.words = Words(pipeline.p4info)
        self.stub.SetForwardingPipelineConfig(request, timeout=CALL_DEADLINE_S)

    def get_pipeline(self, parts: int = 0) -> p4r.ForwardingPipelineConfig:
        request = p4r.GetForwardingPipelineConfigRequest(device_id=DEVICE_ID, response_type=parts)
        return self.stub.GetForwardingPipelineConfig(request, timeout=CALL_DEADLINE_S).config

    def write(self, kind: int, *entities: p4r.Entity) -> None:
        """Write updates of one kind; raises grpc.RpcError unless all succeed."""
        updates = [p4r.Update(type=kind, entity=entity) for entity in entities]
        self.stub.Write(self.signed(p4r.WriteRequest(updates=updates)), timeout=CALL_DEADLINE_S)

    def results(self, *updates: p4r.Update) -> list[grpc.StatusCode]:
        """Write updates and return what became of each."""
        return [code for code, _ in self.answers(*updates)]

    def answers(self, *updates: p4r.Update) -> list[tuple[grpc.StatusCode, str]]:
        """Write updates, and return the status and message of each."""
        try:
            self.stub.Write(self.signed(p4r.WriteRequest(updates=updates)), timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            return list(decode(error))
        return [(Code.OK, "")] * len(updates)

    def result(self, kind: int, entity: p4r.Entity) -> grpc.StatusCode:
        """Write one update and return what became of it."""
        return self.results(p4r.Update(type=kind, entity=entity))[0]

    def refuses(
        self,
        kind: int,
        entity: p4r.Entity,
        code: grpc.StatusCode,
        bmv2: grpc.StatusCode = Code.UNKNOWN,
        *,
        saying: str = "",
    ) -> None:
        """Write one update that must be refused for this reason; BMv2 may give another one, which is UNKNOWN mostly."""
        ((result, said),) = self.answers(p4r.Update(type=kind, entity=entity))
        assert result is code or (not self.strict and result is bmv2), f"{result}, not {code}"
        assert saying in said or not self.strict, said

    def read(self, *wanted: p4r.Entity) -> list[p4r.Entity]:
        request = p4r.ReadRequest(device_id=DEVICE_ID, entities=wanted)
        return [entity for response in self.stub.Read(request, timeout=CALL_DEADLINE_S) for entity in response.entities]

    def entries(self, table: str, **more: Any) -> list[p4r.TableEntry]:
        """Return the entries of a table."""
        wanted = p4r.TableEntry(table_id=self.words.id("tables", table), **more)
        return [entity.table_entry for entity in self.read(p4r.Entity(table_entry=wanted))]

    def state(self) -> list[bytes]:
        """Return all entries, default entries, members, groups and meters, in one order."""
        metered = p4r.MeterConfig()
        found = self.read(
            p4r.Entity(table_entry=p4r.TableEntry(meter_config=metered)),
            p4r.Entity(table_entry=p4r.TableEntry(is_default_action=True)),
            p4r.Entity(action_profile_member=p4r.ActionProfileMember()),
            p4r.Entity(action_profile_group=p4r.ActionProfileGroup()),
            p4r.Entity(meter_entry=p4r.MeterEntry()),
        )
        return sorted(entity.SerializeToString(deterministic=True) for entity in found)


def decode(error: grpc.RpcError) -> Iterator[tuple[grpc.StatusCode, str]]:
    """Return code and message of each update of a batch that failed in part."""
    if error.code() is not Code.UNKNOWN:
        raise error
    codes = {code.value[0]: code for code in grpc.StatusCode}
    trailers = dict(error.trailing_metadata())
    status = rpc_status.Status.FromString(trailers["grpc-status-details-bin"])
    for detail in status.details:
        one = p4r.Error()
        assert detail.Unpack(one)
        yield codes[one.canonical_code], one.message
