# SPDX-License-Identifier: Apache-2.0
"""Match keys and actions: between the messages of P4Runtime and what a program's tables take."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from finsy.proto import p4r

from dlcp.switch.p4runtime.refusal import INVALID_ARGUMENT, Refused
from dlcp.switch.p4runtime.schema import ActionInfo, FieldInfo
from dlcp.switch.p4runtime.values import decode, encode
from dlcp.switch.patterns import Match
from dlcp.switch.profiles import Action


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
