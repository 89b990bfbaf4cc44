# SPDX-License-Identifier: Apache-2.0
"""Random updates for the program of this project: right ones, and ones that are wrong in one way or another."""

from collections.abc import Callable
from typing import Any

from finsy.proto import p4i, p4r
from hypothesis import strategies as st

from tests.p4runtime.control import Words, config, encode

WORDS = Words(config().p4info)
TABLES = list(WORDS.tables.values())
ACTIONS = {item.preamble.id: item for item in WORDS.actions.values()}
PROFILE = WORDS.id("action_profiles", "route_selector")
FEW = 3
"""Different numbers for one thing: few, so that updates meet each other."""


class Hand:
    """Draws what goes into one update; a clumsy hand makes a mistake now and then."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.clumsy = draw(st.booleans())

    def slips(self) -> bool:
        return self.clumsy and self.draw(st.integers(0, 7)) == 7

    def of(self, right: list[Any], wrong: list[Any]) -> Any:
        return self.draw(st.sampled_from(wrong if self.slips() else right))

    def number(self, width: int) -> bytes:
        """Return a byte string for a field of so many bits."""
        full = (1 << width) - 1
        value = self.of([0, 1, 2, full, full >> 1], [full + 1, 1 << 200])
        return bytes(self.draw(st.integers(0, 2))) + encode(value)

    def match(self, field: p4i.MatchField) -> p4r.FieldMatch | None:
        """Return a part of a match; None to leave the field out."""
        part = p4r.FieldMatch(field_id=self.of([field.id], [0, field.id + 1, 99]))
        right = p4i.MatchField.MatchType.Name(field.match_type).lower()
        if self.slips() or (right != "exact" and self.draw(st.booleans())):
            return None
        kind = self.of([right], ["exact", "lpm", "ternary", "range", "optional", "none"])
        if kind in ("exact", "optional"):
            getattr(part, kind).value = self.number(field.bitwidth)
        elif kind == "lpm":
            length = self.of([8, 31, 32], [-1, 0, 33])
            value = 0 if self.draw(st.booleans()) else 0x0A000000
            part.lpm.value, part.lpm.prefix_len = encode(value), length
            if self.slips():
                part.lpm.value = self.number(field.bitwidth)
        elif kind == "ternary":
            full = (1 << field.bitwidth) - 1
            mask = self.of([full, 1], [0])
            value = self.of([mask, mask & 1], [full ^ mask, full + 1])
            part.ternary.value, part.ternary.mask = encode(value), encode(mask)
        elif kind == "range":
            part.range.low, part.range.high = self.number(field.bitwidth), self.number(field.bitwidth)
        return part

    def action(self, references: Any) -> p4r.Action:
        """Return an action, one of those referred to unless the hand slips."""
        number = self.of([item.id for item in references], [0, 5, *ACTIONS])
        action = p4r.Action(action_id=number)
        for param in ACTIONS[number].params if number in ACTIONS else ():
            if not self.slips():
                action.params.add(param_id=param.id, value=self.number(param.bitwidth))
        if self.slips():
            action.params.add(param_id=self.draw(st.integers(0, 3)), value=b"\1")
        return action


@st.composite
def table_entries(draw) -> p4r.Entity:
    hand = Hand(draw)
    table = draw(st.sampled_from(TABLES))
    entry = p4r.TableEntry(table_id=hand.of([table.preamble.id], [0, 7, PROFILE]))
    prioritised = any(field.match_type == p4i.MatchField.TERNARY for field in table.match_fields)
    entry.priority = hand.of([1, 2], [0, -1]) if prioritised else hand.of([0], [1])
    entry.match.extend(filter(None, map(hand.match, table.match_fields)))
    right = ["member", "group"] if table.implementation_id else ["action"]
    kind = hand.of(right, ["action", "member", "group", "none"])
    if kind == "action":
        entry.action.action.CopyFrom(hand.action(table.action_refs))
    elif kind == "member":
        entry.action.action_profile_member_id = hand.of([1, 2, 3], [4])
    elif kind == "group":
        entry.action.action_profile_group_id = hand.of([1, 2, 3], [4])
    entry.is_default_action = hand.of([False], [True])
    entry.idle_timeout_ns = hand.of([0], [1])
    entry.metadata = hand.of([b"", b"x"], [b""])
    return p4r.Entity(table_entry=entry)


@st.composite
def members(draw) -> p4r.Entity:
    hand = Hand(draw)
    references = next(table.action_refs for table in TABLES if table.implementation_id)
    member = p4r.ActionProfileMember(
        action_profile_id=hand.of([PROFILE], [0, 1, PROFILE + 1]),
        member_id=draw(st.integers(1, FEW)),
        action=hand.action([item for item in references if ACTIONS[item.id].preamble.alias != "NoAction"]),
    )
    return p4r.Entity(action_profile_member=member)


@st.composite
def groups(draw) -> p4r.Entity:
    hand = Hand(draw)
    group = p4r.ActionProfileGroup(
        action_profile_id=hand.of([PROFILE], [0, PROFILE + 1]),
        group_id=draw(st.integers(1, FEW)),
        max_size=hand.of([0], [4, -1]),
    )
    for member in draw(st.sets(st.integers(1, FEW))):
        group.members.add(member_id=hand.of([member], [1, 4]), weight=hand.of([1, 2, 3], [0, -1]))
    return p4r.Entity(action_profile_group=group)


@st.composite
def cells(draw) -> p4r.Entity:
    """A cell of something, or a direct meter."""
    hand = Hand(draw)
    entity = p4r.Entity()
    kind = hand.of(["counter", "direct_meter"], ["meter", "register", "direct_counter"])
    message = getattr(entity, f"{kind}_entry")
    if kind.startswith("direct"):
        message.table_entry.CopyFrom(draw(table_entries()).table_entry)
    else:
        known = [item.preamble.id for item in getattr(WORDS.p4info, f"{kind}s")] or [1]
        setattr(message, f"{kind}_id", hand.of(known, [0, 1]))
        message.index.index = hand.of([0, 5, 32_767], [-1, 32_768, (1 << 63) - 1])
    if kind.endswith("meter"):
        rates = [hand.of([1, 1000], [-2, -1, (1 << 63) - 1]) for _ in range(2)]
        bursts = [hand.of([0, 1, 1000], [-1, 1 << 32]) for _ in range(2)]
        message.config.MergeFrom(p4r.MeterConfig(cir=rates[0], cburst=bursts[0], pir=rates[1], pburst=bursts[1]))
    elif kind == "counter":
        message.data.packet_count = hand.of([0, 1, 1 << 40], [-1])
    return entity


def updates(*entities: st.SearchStrategy[p4r.Entity]) -> st.SearchStrategy[p4r.Update]:
    """Return updates of entities of these kinds."""
    return st.builds(
        lambda kind, entity: p4r.Update(type=kind, entity=entity),
        st.sampled_from([1, 1, 1, 1, 1, 2, 2, 3, 3, 0]),
        st.one_of(*entities),
    )
