# SPDX-License-Identifier: Apache-2.0
"""The actions of a BMv2 JSON: calls of primitives, of which some are refused by the name that a programmer knows."""

from collections.abc import Container, Sequence
from typing import Final

from dlcp.switch.bmv2_words import MAX_WIDTH, Json, Words, where_is
from dlcp.switch.errors import ProgramError, UnsupportedFeature
from dlcp.switch.model import (
    ActionDef,
    Assign,
    Const,
    Count,
    ExecuteMeter,
    Exit,
    Expr,
    Hash,
    Parameter,
    RegisterRead,
    RegisterWrite,
    Statement,
)

_PRIMITIVES: Final = {
    "add_header": "setValid on a header",
    "remove_header": "setInvalid on a header",
    "clone_ingress_pkt_to_egress": "clone",
    "clone_egress_pkt_to_egress": "clone",
    "generate_digest": "digest",
    "truncate": "truncate",
    "modify_field_rng_uniform": "random",
    "assign_header": "assignment of whole headers",
    "push": "push on a header stack",
    "pop": "pop on a header stack",
    "_jump": "if inside an action",
    "_jump_if_zero": "if inside an action",
}
"""What a programmer calls the primitives that are refused; others are refused by their own name."""


class ActionReader:
    """Reads actions.

    Parameters
    ----------
    words
        The document's fields and expressions.
    counters, registers, meters
        The names of the arrays that there are.
    """

    def __init__(
        self, words: Words, counters: Container[str], registers: Container[str], meters: Container[str]
    ) -> None:
        self._words = words
        self.counters, self.registers, self.meters = counters, registers, meters

    def action(self, item: Json) -> ActionDef:
        """Read an action; raises UnsupportedFeature or ProgramError."""
        where = where_is(item, f"action {item['name']}")
        parameters = tuple(Parameter(entry["name"], entry["bitwidth"]) for entry in item["runtime_data"])
        for parameter in parameters:
            if parameter.width > MAX_WIDTH:
                raise UnsupportedFeature(
                    f"action parameters wider than {MAX_WIDTH} bits ({parameter.name})", f"action {item['name']}"
                )
        body: list[Statement] = []
        for call in item["primitives"]:
            body += self._primitive(call, where_is(call, where), parameters)
        return ActionDef(item["id"], item["name"], parameters, tuple(body), where)

    def _primitive(self, call: Json, where: str, parameters: Sequence[Parameter]) -> list[Statement]:
        op, given = call["op"], call["parameters"]

        def expression(index: int) -> Expr:
            return self._words.expression(given[index], where, parameters)

        match op:
            case "no_op":
                return []
            case "exit":
                return [Exit()]
            case "assign" | "modify_field":
                target = self._words.target(given[0], where)
                if (target.header, target.name) == ("standard_metadata", "mcast_grp") and expression(1) != Const(0):
                    raise UnsupportedFeature("multicast", where)
                return [Assign(target, expression(1))]
            case "mark_to_drop" | "drop":
                return [Assign(self._words.field(("standard_metadata", "egress_spec"), where), Const(511))]
            case "count":
                return [Count(self._named(self.counters, given[0], where), expression(1))]
            case "register_read":
                name = self._named(self.registers, given[1], where)
                return [RegisterRead(self._words.target(given[0], where), name, expression(2))]
            case "register_write":
                return [RegisterWrite(self._named(self.registers, given[0], where), expression(1), expression(2))]
            case "execute_meter":
                name = self._named(self.meters, given[0], where)
                return [ExecuteMeter(self._words.target(given[2], where), name, expression(1))]
            case "modify_field_with_hash_based_offset":
                size = expression(3)
                if not isinstance(size, Const):
                    raise UnsupportedFeature("hash with a maximum that is not a constant", where)
                calculation = self._words.calculation(given[2]["value"], where)
                return [Hash(self._words.target(given[0], where), expression(1), calculation.name, size.value)]
        raise UnsupportedFeature(_PRIMITIVES.get(op, f"the primitive {op}"), where)

    @staticmethod
    def _named(known: Container[str], parameter: Json, where: str) -> str:
        name = str(parameter["value"])
        if name not in known:
            raise ProgramError(f"{where}: no {parameter['type']} {name!r} in the program")
        return name
