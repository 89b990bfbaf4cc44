# SPDX-License-Identifier: Apache-2.0
"""Values, matches, actions and meters between P4Runtime's messages and the program, and errors as its status codes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from finsy.proto import p4r, rpc_code

from dlcp.switch.errors import CellError, ConstantError, DuplicateError, EntryError, FullError, InUseError, MissingError
from dlcp.switch.executor.cells import MeterConfig
from dlcp.switch.executor.profiles import Action
from dlcp.switch.executor.tables import Match

OK: Final[int] = rpc_code.OK
UNKNOWN: Final[int] = rpc_code.UNKNOWN
INVALID_ARGUMENT: Final[int] = rpc_code.INVALID_ARGUMENT
DEADLINE_EXCEEDED: Final[int] = rpc_code.DEADLINE_EXCEEDED
NOT_FOUND: Final[int] = rpc_code.NOT_FOUND
ALREADY_EXISTS: Final[int] = rpc_code.ALREADY_EXISTS
PERMISSION_DENIED: Final[int] = rpc_code.PERMISSION_DENIED
RESOURCE_EXHAUSTED: Final[int] = rpc_code.RESOURCE_EXHAUSTED
FAILED_PRECONDITION: Final[int] = rpc_code.FAILED_PRECONDITION
OUT_OF_RANGE: Final[int] = rpc_code.OUT_OF_RANGE
UNIMPLEMENTED: Final[int] = rpc_code.UNIMPLEMENTED
UNAVAILABLE: Final[int] = rpc_code.UNAVAILABLE

_CODES: Final = (
    (DuplicateError, ALREADY_EXISTS),
    (MissingError, NOT_FOUND),
    (FullError, RESOURCE_EXHAUSTED),
    (InUseError, FAILED_PRECONDITION),
    (ConstantError, PERMISSION_DENIED),
    (CellError, OUT_OF_RANGE),
)


class Refused(Exception):  # noqa: N818 - the name says what it is
    """A request that is not done.

    Attributes
    ----------
    code
        Canonical code of google.rpc.
    message
        What is wrong, where, and what to do.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @classmethod
    def of(cls, error: EntryError) -> "Refused":
        """Return what to answer when the program refuses an entry."""
        code = next((code for kind, code in _CODES if isinstance(error, kind)), INVALID_ARGUMENT)
        return cls(code, str(error))


def decode(value: bytes, width: int, what: str) -> int:
    """Return the number that a byte string means; leading zeros are put up with, as the specification asks.

    Parameters
    ----------
    width
        Of the field, in bits.
    what
        What the value is for, for the error message.

    Raises
    ------
    Refused
        The string is empty, or the number does not fit.
    """
    number = int.from_bytes(value, "big")
    if number >> width or not value:
        given = f"0x{value[:32].hex()}" if value else "an empty string"
        raise Refused(OUT_OF_RANGE, f"{what} has {width} bits; {given} does not fit")
    return number


def encode(number: int) -> bytes:
    """Return the shortest byte string that means a number; zero takes one byte."""
    return number.to_bytes((number.bit_length() + 7) // 8 or 1, "big")


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


def read_match(fields: Mapping[int, FieldInfo], items: Iterable[p4r.FieldMatch], where: str) -> Match:
    """Return a key as the program's table takes it; a field that is left out stays out.

    Raises
    ------
    Refused
        A field that the table has not got, or is given twice, or in another way than the table matches it.
    """
    match: dict[str, int | tuple[int, int]] = {}
    for item in items:
        field = fields.get(item.field_id)
        if field is None:
            raise Refused(INVALID_ARGUMENT, f"{where} has no field {item.field_id}; it has {_listed(fields)}")
        kind = item.WhichOneof("field_match_type")
        if kind != field.kind:
            raise Refused(INVALID_ARGUMENT, f"{where}: field {field.name} is {field.kind}, not {kind or 'empty'}")
        if field.name in match:
            raise Refused(INVALID_ARGUMENT, f"{where}: field {field.name} is given twice")
        match[field.name] = _READERS[kind](item, field, where)
    return match


def _exact(item: p4r.FieldMatch, field: FieldInfo, where: str) -> int:
    return decode(item.exact.value, field.width, field.name)


def _optional(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    return decode(item.optional.value, field.width, field.name), (1 << field.width) - 1


def _lpm(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    length = item.lpm.prefix_len
    if length == 0:
        raise Refused(INVALID_ARGUMENT, f"{where}: field {field.name} has a prefix of 0 bits; leave the field out")
    return decode(item.lpm.value, field.width, field.name), length


def _ternary(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    value = decode(item.ternary.value, field.width, field.name)
    mask = decode(item.ternary.mask, field.width, field.name)
    if not mask:
        raise Refused(INVALID_ARGUMENT, f"{where}: field {field.name} has a mask of 0; leave the field out")
    return value, mask


def _range(item: p4r.FieldMatch, field: FieldInfo, where: str) -> tuple[int, int]:
    low = decode(item.range.low, field.width, field.name)
    high = decode(item.range.high, field.width, field.name)
    if not low and high == (1 << field.width) - 1:
        raise Refused(INVALID_ARGUMENT, f"{where}: field {field.name} may be anything; leave the field out")
    return low, high


_READERS: Final[Mapping[str, Callable[[p4r.FieldMatch, FieldInfo, str], int | tuple[int, int]]]] = {
    "exact": _exact,
    "lpm": _lpm,
    "ternary": _ternary,
    "range": _range,
    "optional": _optional,
}


def write_match(fields: Iterable[FieldInfo], match: Match, entry: p4r.TableEntry) -> None:
    """Put a key into a message; fields that may be anything are left out, as P4Runtime asks."""
    for field in fields:
        value: Any = match.get(field.name)
        if value is None:
            continue
        if field.kind == "exact":
            entry.match.add(field_id=field.id).exact.value = encode(value)
            continue
        first, second = value
        full = (1 << field.width) - 1
        if field.kind == "range":
            if (first, second) != (0, full):
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


def read_action(actions: Mapping[int, ActionInfo], action: p4r.Action, where: str) -> Action:
    """Return an action as the program takes it.

    Raises
    ------
    Refused
        It is not one of ``actions``, or its parameters are not the right ones.
    """
    info = actions.get(action.action_id)
    if info is None:
        raise Refused(INVALID_ARGUMENT, f"{where} has no action {action.action_id}; it has {_listed(actions)}")
    given = {}
    for item in action.params:
        param = info.params.get(item.param_id)
        if param is None or param.name in given:
            wrong = "no parameter" if param is None else "been given twice the parameter"
            raise Refused(INVALID_ARGUMENT, f"{where}: action {info.name} has {wrong} {item.param_id}")
        given[param.name] = decode(item.value, param.width, param.name)
    if len(given) != len(info.params):
        missing = ", ".join(param.name for param in info.params.values() if param.name not in given)
        raise Refused(INVALID_ARGUMENT, f"{where}: action {info.name} needs a value for {missing}")
    return Action(info.name, given)


def write_action(info: ActionInfo, action: Action, message: p4r.Action) -> None:
    """Put an action into a message."""
    message.action_id = info.id
    for param in info.params.values():
        message.params.add(param_id=param.id, value=encode(action.params[param.name]))


def _listed(things: Mapping[int, FieldInfo] | Mapping[int, ActionInfo]) -> str:
    return ", ".join(f"{number} ({thing.name})" for number, thing in things.items()) or "none"


BURST_MAX: Final = (1 << 32) - 1
"""What BMv2 keeps a burst in."""


def read_config(config: p4r.MeterConfig, where: str) -> MeterConfig | None:
    """Return a configuration as the program takes it; None for the default, which finds everything green.

    Raises
    ------
    Refused
        It is none of a two-rate meter that counts only upwards, or a burst is larger than BMv2 knows.
    """
    rates = config.cir, config.cburst, config.pir, config.pburst
    # What PI, and so BMv2, takes for the default besides no configuration at all.
    if rates == (-1, -1, -1, -1):
        return None
    if min(rates) < 0:
        raise Refused(INVALID_ARGUMENT, f"{where}: rates and bursts must not be negative, {rates}")
    if config.eburst:
        raise Refused(INVALID_ARGUMENT, f"{where}: a two-rate meter has no excess burst")
    if config.cir > config.pir:
        raise Refused(INVALID_ARGUMENT, f"{where}: the committed rate {config.cir} exceeds the peak rate {config.pir}")
    if max(config.cburst, config.pburst) > BURST_MAX:
        raise Refused(UNIMPLEMENTED, f"{where}: a burst may have {BURST_MAX} at most")
    return MeterConfig(*rates)


def write_config(config: MeterConfig, message: p4r.MeterConfig) -> None:
    """Put a configuration into a message."""
    message.cir, message.cburst = config.cir, config.cburst
    message.pir, message.pburst = config.pir, config.pburst
