# SPDX-License-Identifier: Apache-2.0
"""Cases that p4testgen finds by symbolic execution: one for each path through the program, with entries and a packet.

Its own idea of the answer is not used: simple_switch gives the answer.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from dlcp.switch import format_match
from tests.conformance.recording import Markers, Packet, SetEntries, Step
from tests.conformance.simple_switch import SwitchError

SEED = 1
PACKET_BITS_MAX = 1200
"""Long enough for every header; the payload makes no path."""
_TOKEN = re.compile(
    r'\s*(?:#[^\n]*|(?P<text>"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')|(?P<word>[\w.+-]+)|(?P<mark>[{}\[\]:,<>]))'
)
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{3})|(.))", re.DOTALL)
_PLAIN = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}

Message: TypeAlias = "dict[str, list[Any]]"
"""A protobuf message in text form: every field with all its values."""


def available() -> bool:
    return shutil.which("p4testgen") is not None


def steps(root: Path) -> list[Step]:
    """Run p4testgen on the program and return its cases as steps, without answers.

    Raises
    ------
    SwitchError
        If p4testgen is missing or fails.
    """
    if not available():
        raise SwitchError("p4testgen is not on PATH")
    info = Info(parse((root / "p4" / "build" / "dlcp.p4info.txtpb").read_text(encoding="utf-8")))
    made: list[Step] = []
    for number, case in enumerate(cases(root / "p4" / "v1model" / "dlcp.p4")):
        sent = case["input_packet"][0]
        made.append(SetEntries(info.document(case.get("entities", []), number)))
        made.append(Packet("p4testgen", int(sent["port"][0]), sent["packet"][0]))
    return made


COMMAND = (
    "p4testgen --target bmv2 --arch v1model --std p4-16 --test-backend PROTOBUF "
    f"--seed {SEED} --max-tests 0 --packet-size-range 0:{PACKET_BITS_MAX} "
    "--track-coverage STATEMENTS --track-coverage ACTIONS --print-coverage"
)


def cases(source: Path) -> Iterator[Message]:
    """Return every case that p4testgen finds for a program, and print what it says of its coverage."""
    with tempfile.TemporaryDirectory(prefix="p4testgen-") as folder:
        command = [*COMMAND.split(), "--out-dir", folder, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = sorted(Path(folder).glob("*.txtpb"), key=lambda path: int(path.stem.rsplit("_", 1)[1]))
        if done.returncode or not files:
            raise SwitchError(f"p4testgen: status {done.returncode}, {len(files)} cases: {done.stderr[-500:]}")
        covered = re.findall(r"Nodes covered: \S+ \((\d+)/(\d+)\)", done.stdout + done.stderr)
        if covered:
            print(f"p4testgen: {len(files)} cases, {covered[-1][0]} of {covered[-1][1]} statements and actions covered")
        for path in files:
            yield parse(path.read_text(encoding="utf-8"))


class Info:
    """Names of tables, fields, actions and parameters by the numbers that P4Runtime uses."""

    def __init__(self, info: Message) -> None:
        self._tables, self._fields, self._actions, self._parameters = {}, {}, {}, {}
        for table in info["tables"]:
            preamble = table["preamble"][0]
            number = int(preamble["id"][0])
            self._tables[number] = preamble["name"][0].decode()
            for field in table.get("match_fields", []):
                kind = {"EXACT": "exact", "LPM": "lpm", "TERNARY": "ternary"}[field["match_type"][0]]
                about = field["name"][0].decode(), kind, int(field["bitwidth"][0])
                self._fields[number, int(field["id"][0])] = about
        for action in info["actions"]:
            preamble = action["preamble"][0]
            number = int(preamble["id"][0])
            self._actions[number] = preamble["name"][0].decode()
            for parameter in action.get("params", []):
                self._parameters[number, int(parameter["id"][0])] = parameter["name"][0].decode()

    def document(self, entities: list[Message], number: int) -> dict[str, Any]:
        """Return the entries of a case in the form of `dlcp.switch.entry_files`, and those of the markers."""
        members: list[dict[str, Any]] = []
        groups: list[dict[str, Any]] = []
        entries: list[dict[str, Any]] = list(Markers.ENTRIES)
        for entity in entities:
            entry = entity["table_entry"][0]
            table = int(entry["table_id"][0])
            made = {"table": self._tables[table], "match": self._match(table, entry)}
            if "priority" in entry:
                made["priority"] = int(entry["priority"][0])
            does = entry["action"][0]
            if "action" in does:
                made |= self._action(does["action"][0])
            else:
                chosen = does["action_profile_action_set"][0]["action_profile_actions"]
                first = len(members) + 1
                members += [{"id": first + k, **self._action(one["action"][0])} for k, one in enumerate(chosen)]
                made["group"] = len(groups) + 1
                groups.append({"id": made["group"], "members": list(range(first, len(members) + 1))})
            entries.append(made)
        profiles = [{"profile": "route_selector", "members": members, "groups": groups}] if members else []
        return {"profiles": profiles, "entries": entries}

    def _match(self, table: int, entry: Message) -> dict[str, Any]:
        match: dict[str, Any] = {}
        for given in entry.get("match", []):
            name, kind, width = self._fields[table, int(given["field_id"][0])]
            parts = given[kind][0]
            full = (1 << width) - 1
            value = int.from_bytes(parts["value"][0], "big") & full
            if kind == "exact":
                match[name] = value
                continue
            if kind == "lpm":
                length = int(parts["prefix_len"][0])
                match[name] = format_match((value & (full ^ full >> length), length), kind, width)
            else:
                mask = int.from_bytes(parts["mask"][0], "big") & full
                match[name] = format_match((value & mask, mask), kind, width)
        return match

    def _action(self, action: Message) -> dict[str, Any]:
        number = int(action["action_id"][0])
        params = {
            self._parameters[number, int(param["param_id"][0])]: int.from_bytes(param["value"][0], "big")
            for param in action.get("params", [])
        }
        return {"action": self._actions[number], "params": params}


def parse(text: str) -> Message:
    """Read a protobuf message in text form; strings become bytes, everything else stays text."""
    tokens = [match for match in _TOKEN.finditer(text) if match.lastgroup]
    tokens.reverse()
    return _message(tokens)


def _message(tokens: "list[re.Match[str]]") -> Message:
    message: Message = {}
    while tokens:
        token = tokens.pop()
        if token["mark"] == "}":
            break
        values = message.setdefault(token["word"], [])
        mark = tokens.pop()["mark"]
        if mark == "{" or (tokens[-1]["mark"] == "{" and tokens.pop()):
            values.append(_message(tokens))
        elif tokens[-1]["text"]:
            whole = b""
            while tokens and tokens[-1]["text"]:  # adjacent strings are one
                whole += _ESCAPE.sub(_unescaped, tokens.pop()["text"][1:-1].encode("latin-1", "replace"))
            values.append(whole)
        else:
            values.append(tokens.pop()["word"])
    return message


def _unescaped(match: "re.Match[bytes]") -> bytes:
    hexadecimal, octal, plain = match.groups()
    if hexadecimal or octal:
        return bytes([int(hexadecimal, 16) if hexadecimal else int(octal, 8)])
    return _PLAIN.get(plain, plain)
