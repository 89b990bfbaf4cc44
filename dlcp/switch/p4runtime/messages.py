# SPDX-License-Identifier: Apache-2.0
"""Values, matches, actions and meters between P4Runtime's messages and the program, and errors as its status codes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from finsy.proto import p4r, rpc_code

from dlcp.switch.executor.cells import MeterConfig
from dlcp.switch.executor.model import (
    CellError,
    ConstantError,
    DuplicateError,
    EntryError,
    FullError,
    InUseError,
    MissingError,
)
from dlcp.switch.executor.profiles import Action
from dlcp.switch.executor.tables import Match

BURST_MAX: Final = (1 << 32) - 1
"""BMv2 stores a burst in 32 bits."""

_CODES: Final = (
    (DuplicateError, rpc_code.ALREADY_EXISTS),
    (MissingError, rpc_code.NOT_FOUND),
    (FullError, rpc_code.RESOURCE_EXHAUSTED),
    (InUseError, rpc_code.FAILED_PRECONDITION),
    (ConstantError, rpc_code.PERMISSION_DENIED),
    (CellError, rpc_code.OUT_OF_RANGE),
)


class Refused(Exception):  # noqa: N818 - the name says what it is
    """A request that is refused.

    Attributes
    ----------
    message
        What is wrong, where, and what to do.
    code
        Canonical code of google.rpc.
    """

    def __init__(self, message: str, code: int = rpc_code.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.message, self.code = message, code

    @classmethod
    def of(cls, error: EntryError) -> "Refused":
        """Return the answer for an entry that the program refuses."""
        return cls(
            str(error), next((code for kind, code in _CODES if isinstance(error, kind)), rpc_code.INVALID_ARGUMENT)
        )


class _Named(Protocol):
    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=_Named)


def find(things: Mapping[int, NamedT], number: int, what: str) -> NamedT:
    """Return a thing by its number; raises Refused, which lists those that exist. ``what`` begins the sentence."""
    found = things.get(number)
    if found is None:
        known = ", ".join(f"{key} ({thing.name})" for key, thing in things.items())
        raise Refused(f"{what} {number}; there are {known or 'none'}")
    return found


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """A field of a table's key; ``width`` in bits."""

    id: int
    name: str
    kind: str
    width: int


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter of an action; ``width`` in bits."""

    id: int
    name: str
    width: int


@dataclass(frozen=True, slots=True)
class ActionInfo:
    """An action, with its parameters by number and in order."""

    id: int
    name: str
    params: Mapping[int, ParamInfo]


# ----------------------------------------------------------------------------------------------------------- values


def decode(value: bytes, field: FieldInfo | ParamInfo) -> int:
    """Return the number of a big-endian byte string; leading zeros are allowed, as the specification asks (8.4).

    Raises
    ------
    Refused
        The string is empty, or the number does not fit the field or parameter.
    """
    number = int.from_bytes(value, "big")
    if number >> field.width or not value:
        given = f"0x{value[:32].hex()}" if value else "an empty string"
        raise Refused(f"{field.name} has {field.width} bits; {given} does not fit", rpc_code.OUT_OF_RANGE)
    return number


def encode(number: int) -> bytes:
    """Return the shortest byte string for a number; zero takes one byte."""
    return number.to_bytes((number.bit_length() + 7) // 8 or 1, "big")


# ---------------------------------------------------------------------------------------------------------- matches


def read_match(fields: Mapping[int, FieldInfo], items: Iterable[p4r.FieldMatch], where: str) -> Match:
    """Return a key as the program's table takes it; a field that is left out stays out.

    Raises
    ------
    Refused
        A field that the table lacks, or that is given twice, or not as the table matches it.
    """
    match: dict[str, int | tuple[int, int]] = {}
    for item in items:
        field = find(fields, item.field_id, f"{where} has no field")
        kind = item.WhichOneof("field_match_type")
        if kind != field.kind:
            raise Refused(f"{where}: field {field.name} is {field.kind}, not {kind or 'empty'}")
        if field.name in match:
            raise Refused(f"{where}: field {field.name} is given twice")
        match[field.name] = _READERS[kind](item, field, where)
    return match


def _exact(item: p4r.FieldMatch, field: FieldInfo, where: str) -> int:
    return decode(item.exact.value, field)


def _optional(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    return decode(item.optional.value, field), (1 << field.width) - 1


def _lpm(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    length = item.lpm.prefix_len
    if length == 0:
        raise Refused(f"{where}: field {field.name} has a prefix of 0 bits; leave the field out")
    return decode(item.lpm.value, field), length


def _ternary(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    value, mask = decode(item.ternary.value, field), decode(item.ternary.mask, field)
    if not mask:
        raise Refused(f"{where}: field {field.name} has a mask of 0; leave the field out")
    return value, mask


def _range(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    low, high = decode(item.range.low, field), decode(item.range.high, field)
    if not low and high == (1 << field.width) - 1:
        raise Refused(f"{where}: field {field.name} may be anything; leave the field out")
    return low, high


_READERS: Final[Mapping[str, Callable[[p4r.FieldMatch, FieldInfo, str], int | tuple[int, int]]]] = {
    "exact": _exact,
    "lpm": _lpm,
    "ternary": _ternary,
    "range": _range,
    "optional": _optional,
}


def write_match(fields: Iterable[FieldInfo], match: Match, entry: p4r.TableEntry) -> None:
    """Put a key into a message, without the fields that may be anything, as P4Runtime asks."""
    for field in fields:
        value: Any = match.get(field.name)
        if value is None:
            continue
        if field.kind == "exact":
            entry.match.add(field_id=field.id).exact.value = encode(value)
            continue
        first, second = value
        if field.kind == "range":
            if (first, second) != (0, (1 << field.width) - 1):
                bounds = entry.match.add(field_id=field.id).range
                bounds.low, bounds.high = encode(first), encode(second)
        elif not second:
            continue
        elif field.kind == "lpm":
            prefix = entry.match.add(field_id=field.id).lpm
            prefix.value, prefix.prefix_len = encode(first), second
        elif field.kind == "ternary":
            ternary = entry.match.add(field_id=field.id).ternary
            ternary.value, ternary.mask = encode(first), encode(second)
        else:
            entry.match.add(field_id=field.id).optional.value = encode(first)


# ------------------------------------------------------------------------------------------------ actions and meters


def read_action(actions: Mapping[int, ActionInfo], action: p4r.Action, where: str) -> Action:
    """Return an action as the program takes it; raises Refused if it is none of ``actions``, or for its parameters."""
    info = find(actions, action.action_id, f"{where} has no action")
    given: dict[str, int] = {}
    for item in action.params:
        param = info.params.get(item.param_id)
        if param is None or param.name in given:
            wrong = "no parameter" if param is None else "been given twice the parameter"
            raise Refused(f"{where}: action {info.name} has {wrong} {item.param_id}")
        given[param.name] = decode(item.value, param)
    if len(given) != len(info.params):
        missing = ", ".join(param.name for param in info.params.values() if param.name not in given)
        raise Refused(f"{where}: action {info.name} needs a value for {missing}")
    return Action(info.name, given)


def write_action(info: ActionInfo, action: Action, message: p4r.Action) -> None:
    """Put an action into a message."""
    message.action_id = info.id
    for param in info.params.values():
        message.params.add(param_id=param.id, value=encode(action.params[param.name]))


def read_meter(config: p4r.MeterConfig, where: str) -> MeterConfig | None:
    """Return a meter's configuration; None for the default, which finds everything green.

    Raises
    ------
    Refused
        It does not describe a two-rate meter, or a burst is larger than BMv2 knows.
    """
    rates = config.cir, config.cburst, config.pir, config.pburst
    # PI, and so BMv2, takes this for the default, besides no configuration at all.
    if rates == (-1, -1, -1, -1):
        return None
    if min(rates) < 0:
        raise Refused(f"{where}: rates and bursts must not be negative, {rates}")
    if config.eburst:
        raise Refused(f"{where}: a two-rate meter has no excess burst")
    if config.cir > config.pir:
        raise Refused(f"{where}: the committed rate {config.cir} exceeds the peak rate {config.pir}")
    if max(config.cburst, config.pburst) > BURST_MAX:
        raise Refused(f"{where}: a burst may have {BURST_MAX} at most", rpc_code.UNIMPLEMENTED)
    return MeterConfig(*rates)


def write_meter(config: MeterConfig | None, message: p4r.MeterConfig) -> None:
    """Put a meter's configuration into a message; leave it out for the default."""
    if config is not None:
        message.cir, message.cburst = config.cir, config.cburst
        message.pir, message.pburst = config.pir, config.pburst
