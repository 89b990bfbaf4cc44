# SPDX-License-Identifier: Apache-2.0
"""Statements of packet tests written as text, as `tests.packet.stf.read` reads them."""

from collections.abc import Iterable, Mapping
from typing import Any

from dlcp.switch.entry_files import Value
from tests.packet.stf import Call, CheckCounter, CheckRegister, Expect, NoPacket, SendPacket, Statement, WriteTimeAgo


def text(statements: Iterable[Statement]) -> str:
    """Return the text of statements, a line each."""
    return "".join(f"{_line(statement)}\n" for statement in statements)


def _line(statement: Statement) -> str:
    match statement:
        case Call(_, "insert" | "modify" as method, (entry,)):
            keyword = {"insert": "add"}.get(method, method)
            place = entry["table"], entry.get("match", {}), entry.get("priority", 0)
            return f"{keyword} {_place(*place)} {_does(entry)}"
        case Call(_, "remove", place):
            return f"remove {_place(*place)}"
        case Call(_, "remove_all"):
            return "remove all"
        case Call(_, "set_default", (table, action, params)):
            return f"setdefault {table} {_call(action, params)}"
        case Call(_, "add_member", (profile, number, action, params)):
            return f"member {profile} {number} {_call(action, params)}"
        case Call(_, "set_group", (profile, number, members)):
            return " ".join(["group", profile, str(number), *map(str, members)])
        case Call(_, "set_meter", (*place, rates)):
            return f"meter_set_rates {_place(*place)} {rates.cir}:{rates.cburst} {rates.pir}:{rates.pburst}"
        case Call(_, "write_register", (register, index, value)):
            return f"register_write {register} {index} {value}"
        case WriteTimeAgo(_, register, index, ago_us):
            return f"register_write {register} {index} now-{ago_us}"
        case CheckRegister(_, register, index, comparison, value):
            return f"check_register {register}({index}) {comparison} {value}"
        case CheckCounter(_, counter, index, unit, comparison, value):
            return f"check_counter {counter}({index}) {unit} {comparison} {value}"
        case _:
            return _packet_line(statement)


def _packet_line(statement: Statement) -> str:
    match statement:
        case SendPacket(_, port, data):
            return f"packet {port} {data.hex()}"
        case Expect(_, port, None):
            return f"expect {port}"
        case Expect(_, port, pattern, longer):
            assert pattern is not None
            digits = zip(pattern.value.hex(), pattern.mask.hex(), strict=True)
            return f"expect {port} {''.join(digit if bits == 'f' else '*' for digit, bits in digits)}" + "$" * (
                not longer
            )
        case NoPacket():
            return "no_packet"
        case Call(_, "wait" | "slow" | "release" as keyword, arguments):
            return " ".join([keyword, *map(str, arguments)])
        case _:
            raise AssertionError(f"{statement} has no text")


def _place(table: str, match: Mapping[str, Value], priority: int) -> str:
    fields = [f"{name}:{value}" for name, value in match.items()]
    return " ".join([table, *([str(priority)] if priority else []), *fields])


def _does(entry: Mapping[str, Any]) -> str:
    if "action" in entry:
        return _call(entry["action"], entry.get("params", {}))
    return f"member {entry['member']}" if "member" in entry else f"group {entry['group']}"


def _call(action: str, params: Mapping[str, Value]) -> str:
    return f"{action}({', '.join(f'{name}:{value}' for name, value in params.items())})"
