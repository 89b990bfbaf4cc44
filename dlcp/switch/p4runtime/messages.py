# SPDX-License-Identifier: Apache-2.0
"""Converts values, matches, actions and meters between P4Runtime's messages and the program, and errors to its codes.

p4info's descriptions of fields and parameters (number, name, width, match kind) are used directly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from finsy.proto import p4i, p4r, rpc_code

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
    """A refused request.

    Attributes
    ----------
    message
        Says what is wrong, where, and what to do.
    code
        Canonical code of google.rpc.
    """

    def __init__(self, message: str, code: int = rpc_code.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.message, self.code = message, code

    @classmethod
    def of(cls, error: EntryError) -> "Refused":
        """Convert a program's error about an entry."""
        return cls(
            str(error), next((code for kind, code in _CODES if isinstance(error, kind)), rpc_code.INVALID_ARGUMENT)
        )


class _Named(Protocol):
    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=_Named)


def find(things: Mapping[int, NamedT], number: int, what: str) -> NamedT:
    """Return an object by its number. Raises Refused, which starts with ``what`` and lists the existing objects."""
    found = things.get(number)
    if found is None:
        known = ", ".join(f"{key} ({thing.name})" for key, thing in things.items())
        raise Refused(f"{what} {number}; there are {known or 'none'}")
    return found


Described: TypeAlias = p4i.MatchField | p4i.Action.Param
"""A field of a table's key or a parameter of an action, as p4info describes it."""


@dataclass(frozen=True, slots=True)
class ActionInfo:
    """An action, with its parameters by number, in order."""

    id: int
    name: str
    params: Mapping[int, p4i.Action.Param]


# ----------------------------------------------------------------------------------------------------------- values


def decode(value: bytes, field: Described) -> int:
    """Return the number of a big-endian byte string; leading zeros are allowed, as specified (8.4).

    Raises
    ------
    Refused
        The string is empty, or the number does not fit the field or parameter.
    """
    number = int.from_bytes(value, "big")
    if number >> field.bitwidth or not value:
        given = f"0x{value[:32].hex()}" if value else "an empty string"
        raise Refused(f"{field.name} has {field.bitwidth} bits; {given} does not fit", rpc_code.OUT_OF_RANGE)
    return number


def encode(number: int) -> bytes:
    """Return the shortest byte string for a number; zero takes one byte."""
    return number.to_bytes((number.bit_length() + 7) // 8 or 1, "big")


# ---------------------------------------------------------------------------------------------------------- matches

MATCH_KINDS: Final[Mapping[int, str]] = {
    p4i.MatchField.EXACT: "exact",
    p4i.MatchField.LPM: "lpm",
    p4i.MatchField.TERNARY: "ternary",
    p4i.MatchField.RANGE: "range",
    p4i.MatchField.OPTIONAL: "optional",
}
"""Kinds of match by their number in p4info; also the names of FieldMatch's alternatives."""
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "exact": ("value",),
    "lpm": ("value", "prefix_len"),
    "ternary": ("value", "mask"),
    "range": ("low", "high"),
    "optional": ("value",),
}
"""Fields of each kind of FieldMatch, in the order of the program's tables; all except ``prefix_len`` are byte
strings."""


def read_match(fields: Mapping[int, p4i.MatchField], items: Iterable[p4r.FieldMatch], where: str) -> Match:
    """Return a match for the program's table; omitted fields stay omitted.

    Raises
    ------
    Refused
        A field that is unknown, given twice, of the wrong match kind, or matches anything: P4Runtime requires omitting
        such a field.
    """
    match: dict[str, int | tuple[int, int]] = {}
    for item in items:
        field = find(fields, item.field_id, f"{where} has no field")
        kind = item.WhichOneof("field_match_type")
        known = MATCH_KINDS[field.match_type]
        if kind != known:
            raise Refused(f"{where}: field {field.name} is {known}, not {kind or 'empty'}")
        if field.name in match:
            raise Refused(f"{where}: field {field.name} is given twice")
        said = getattr(item, kind)
        parts = [getattr(said, name) for name in _PARTS[kind]]
        first, *more = (part if isinstance(part, int) else decode(part, field) for part in parts)
        if kind == "exact":
            match[field.name] = first
            continue
        value = first, more[0] if more else (1 << field.bitwidth) - 1
        if _is_anything(kind, value, field):
            raise Refused(f"{where}: field {field.name} matches anything; omit the field")
        match[field.name] = value
    return match


def write_match(fields: Iterable[p4i.MatchField], match: Match, entry: p4r.TableEntry) -> None:
    """Put a match into a message, without the fields that match anything, as P4Runtime requires."""
    for field in fields:
        value: Any = match.get(field.name)
        kind = MATCH_KINDS[field.match_type]
        if value is None or _is_anything(kind, value, field):
            continue
        said = getattr(entry.match.add(field_id=field.id), kind)
        for name, part in zip(_PARTS[kind], value if isinstance(value, tuple) else (value,), strict=False):
            setattr(said, name, part if name == "prefix_len" else encode(part))


def _is_anything(kind: str, value: Any, field: p4i.MatchField) -> bool:
    """Whether a field matches anything: an empty mask or prefix, or a range over all values."""
    if kind == "range":
        return bool(value == (0, (1 << field.bitwidth) - 1))
    return kind != "exact" and not value[1]


# ------------------------------------------------------------------------------------------------ actions and meters


def read_action(actions: Mapping[int, ActionInfo], action: p4r.Action, where: str) -> Action:
    """Return an action for the program; raises Refused if it is not in ``actions`` or its parameters are invalid."""
    info = find(actions, action.action_id, f"{where} has no action")
    given: dict[str, int] = {}
    for item in action.params:
        param = info.params.get(item.param_id)
        if param is None or param.name in given:
            wrong = "unknown" if param is None else "given twice"
            raise Refused(f"{where}: parameter {item.param_id} of action {info.name} is {wrong}")
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
    """Return a meter's configuration; None for the default, where every packet is green.

    Raises
    ------
    Refused
        It does not describe a two-rate meter, or a burst exceeds BMv2's limit.
    """
    rates = config.cir, config.cburst, config.pir, config.pburst
    # PI, and so BMv2, also accepts this as the default, besides no configuration.
    if rates == (-1, -1, -1, -1):
        return None
    if config.eburst:
        raise Refused(f"{where}: a two-rate meter has no excess burst; omit eburst")
    if max(config.cburst, config.pburst) > BURST_MAX:
        raise Refused(f"{where}: a burst must not exceed {BURST_MAX}", rpc_code.UNIMPLEMENTED)
    try:
        return MeterConfig(*rates)
    except EntryError as error:
        raise Refused(f"{where}: {error}") from None


def write_meter(config: MeterConfig | None, message: p4r.MeterConfig) -> None:
    """Put a meter's configuration into a message; leave the message empty for the default."""
    if config is not None:
        message.cir, message.cburst = config.cir, config.cburst
        message.pir, message.pburst = config.pir, config.pburst
