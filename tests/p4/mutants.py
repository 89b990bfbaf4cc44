# SPDX-License-Identifier: Apache-2.0
"""Faults in the compiled program, each of which breaks a promise.

A fault is a change of the compiler's JSON. The place is found by a piece of the P4 source that stands there.
"""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "p4" / "build" / "dlcp.json"
Json = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """A fault: its name, the promise that it breaks, and the change."""

    name: str
    promise: str
    change: Callable[[Json], None]

    def document(self) -> Json:
        """Return the faulty program."""
        document = json.loads(PROGRAM.read_text())
        before = copy.deepcopy(document)
        self.change(document)
        assert document != before, self.name
        return document


def _source(item: Json) -> str:
    return item.get("source_info", {}).get("source_fragment", "")


def _conditions(document: Json, fragment: str) -> list[Json]:
    found = [
        item for pipeline in document["pipelines"] for item in pipeline["conditionals"] if fragment in _source(item)
    ]
    assert found, fragment
    return found


def _trees(value: Any) -> Iterator[Json]:
    """Yield every object within a piece of JSON, the outermost first."""
    if isinstance(value, dict):
        yield value
        for part in value.values():
            yield from _trees(part)
    elif isinstance(value, list):
        for part in value:
            yield from _trees(part)


def always(fragment: str, value: bool) -> Callable[[Json], None]:
    """Return a change that decides a condition."""

    def change(document: Json) -> None:
        for item in _conditions(document, fragment):
            item["expression"] = {"type": "expression", "value": {"type": "bool", "value": value}}

    return change


def operator(fragment: str, before: str, after: str) -> Callable[[Json], None]:
    """Return a change of the first operator of this kind in a condition."""

    def change(document: Json) -> None:
        for item in _conditions(document, fragment):
            next(part for part in _trees(item["expression"]) if part.get("op") == before)["op"] = after

    return change


def without(fragment: str, field: tuple[str, str]) -> Callable[[Json], None]:
    """Return a change after which a condition no longer asks for a field: the comparison with it always holds."""

    def change(document: Json) -> None:
        for item in _conditions(document, fragment):
            for part in _trees(item["expression"]):
                for side in ("left", "right"):
                    if part.get("op") == "and" and _compares(part[side], field):
                        part[side] = {"type": "expression", "value": {"type": "bool", "value": True}}

    return change


def _compares(tree: Any, field: tuple[str, str]) -> bool:
    inner = tree.get("value", {})
    if not isinstance(inner, dict) or inner.get("op") not in ("==", "!="):
        return False
    return {"type": "field", "value": list(field)} in (inner["left"], inner["right"])


def number(fragment: str, before: int, after: int) -> Callable[[Json], None]:
    """Return a change of a number where the source has this text: in a condition, or in a statement."""

    def change(document: Json) -> None:
        places = [item for item in _trees(document) if fragment in _source(item)]
        assert places, fragment
        for item in places:
            for part in _trees(item):
                if part.get("type") == "hexstr" and int(part["value"], 16) == before:
                    part["value"] = hex(after)

    return change


def removed(fragment: str) -> Callable[[Json], None]:
    """Return a change that removes a statement."""

    def change(document: Json) -> None:
        for action in document["actions"]:
            action["primitives"] = [item for item in action["primitives"] if fragment not in _source(item)]

    return change


def assigned(field: tuple[str, str], before: int, after: int | tuple[str, str]) -> Callable[[Json], None]:
    """Return a change of the constant that is assigned to a field, to another one or to a field's value."""
    value = (
        {"type": "hexstr", "value": hex(after)} if isinstance(after, int) else {"type": "field", "value": list(after)}
    )

    def change(document: Json) -> None:
        for item in _trees(document):
            if item.get("op") in ("assign", "set"):
                target, given = item["parameters"]
                if target == {"type": "field", "value": list(field)} and _constant(given) == before:
                    item["parameters"][1] = value

    return change


def _constant(given: Json) -> int | None:
    return int(given["value"], 16) if given["type"] == "hexstr" else None


def read_instead(fragment: str, field: tuple[str, str], other: tuple[str, str]) -> Callable[[Json], None]:
    """Return a change after which another field is read where the source has this text."""

    def change(document: Json) -> None:
        for item in [part for part in _trees(document) if fragment in _source(part)]:
            for part in _trees(item):
                if part.get("type") == "field" and part["value"] == list(field):
                    part["value"] = list(other)

    return change


def parsed_from(value: int, after: int) -> Callable[[Json], None]:
    """Return a change of a value that the parser selects by, where it stands alone."""

    def change(document: Json) -> None:
        for state in document["parsers"][0]["parse_states"]:
            for case in state["transitions"]:
                if case["value"] is not None and case["value"] != "default" and int(case["value"], 16) == value:
                    case["value"] = hex(after)

    return change


_SPENT = "spent < budget"
_DROPPABLE = "meta.is_control == 0 && meta.drop_class"
_TAKE_OVER = "slot_holder != owner &&"
_META = "scalars"


def mutants() -> list[Mutant]:
    """Return the faults; one comes with each line of the drop rule, and some with the other promises."""
    return [
        Mutant("a drop beyond the budget", "bound", operator(_SPENT, "<", "<=")),
        Mutant("the budget ignored", "bound", always(_SPENT, True)),
        Mutant("spent until equal", "bound", operator(_SPENT, "<", "!=")),
        Mutant("drops not counted", "bound", removed("slot_spent.write")),
        Mutant("drops counted as none", "bound", number("spent = spent + 1", 1, 0)),
        Mutant("the slot never claimed", "bound", removed("slot_owner.write")),
        Mutant("the slot's use not noted", "bound", removed("slot_used_us.write")),
        Mutant("any slot taken over", "bound", always(_TAKE_OVER, True)),
        Mutant("slots idle after a millisecond", "bound", number(_TAKE_OVER, 1_000_000, 1_000)),
        Mutant("slots idle while in use", "bound", operator(_TAKE_OVER, ">", "<")),
        Mutant("excess everywhere", "bound", always("meta.queue == QUEUE_EXCESS", True)),
        Mutant("excess in all queues but one", "bound", operator("meta.queue == QUEUE_EXCESS", "==", "!=")),
        Mutant("everything deep dropped", "bound", always("event == EVENT_POLICY_DROP", True)),
        Mutant("dropped if not granted", "bound", operator("event == EVENT_POLICY_DROP", "==", "!=")),
        Mutant("retransmissions dropped", "protection", without(_DROPPABLE, ("dlcp", "retransmission"))),
        Mutant("protected packets dropped", "protection", without(_DROPPABLE, ("dlcp", "protected"))),
        Mutant("control packets dropped", "protection", without(_DROPPABLE, (_META, "metadata_t.is_control"))),
        Mutant("class 0 dropped", "protection", number(_DROPPABLE, 0, 1)),
        Mutant("any version is DLCP's", "other traffic", operator("hdr.dlcp.version == DLCP_VERSION", "==", "<=")),
        Mutant("ordinary traffic first", "other traffic", assigned((_META, "metadata_t.queue"), 1, 7)),
        Mutant("tags of all ports", "trust", always("meta.tagged == 0", False)),
        Mutant("marks for those that cannot carry one", "ecn", number("hdr.ipv4.ecn != ECN_NOT_CAPABLE", 0, 3)),
        Mutant("a mark that is none", "ecn", assigned(("ipv4", "ecn"), 3, 1)),
        Mutant("trimmed to less than headers", "trimming", assigned((_META, "trim_frame_bytes"), 94, 74)),
        Mutant("a trimmed packet's length", "trimming", assigned(("ipv4", "total_len"), 60, 1500)),
        Mutant("trimmed without a flag", "trimming", assigned(("dlcp", "trimmed"), 1, 0)),
    ]
