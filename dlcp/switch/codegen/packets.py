# SPDX-License-Identifier: Apache-2.0
"""Fields from and to the bytes of a packet.

A header's fields are read once, when it is extracted, and only those that somebody needs. A field that is assigned is
written back into the packet at once, so the packet is at all times what the deparser would make of it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dlcp.switch.codegen.writer import Helpers, Load, Names, Store, Writer, at
from dlcp.switch.errors import UnsupportedFeature
from dlcp.switch.model import Field, Valid


class Placed(NamedTuple):
    """A field, and where it is in the packet, in bits."""

    bit: int
    field: Field


def emit_load(write: Writer, names: Names, helpers: Helpers, needed: Sequence[Placed]) -> None:
    """Read fields of a packet, all at once."""
    if not needed:
        return
    offset = min(item.bit for item in needed) // 8
    parts: list[tuple[int, int]] = []
    variables: list[str] = []
    decode: list[str] = []
    for start, size, members in _runs(needed):
        pieces = _pieces(size)
        only = members[0].field if len(members) == 1 else None
        whole = only is not None and only.width == size * 8 and len(pieces) == 1
        position = start
        raw = []
        for piece in pieces:
            parts.append((position - offset, piece))
            raw.append(names(only) if whole and only is not None else f"u{len(variables)}")
            variables.append(raw[-1])
            position += piece
        if not whole:
            decode += _decode(names, members, start, size, raw, pieces)
    loader = helpers.name(Load(tuple(parts)))
    comma = "," if len(variables) == 1 else ""
    write(f"{', '.join(variables)}{comma} = {loader}(p, {offset})")
    for line in decode:
        write(line)


def _runs(needed: Sequence[Placed]) -> list[tuple[int, int, list[Placed]]]:
    """Group fields into runs of whole bytes: (first byte, bytes, fields). Fields that share a byte come together.

    Raises UnsupportedFeature if such a run is longer than seven bytes.
    """
    runs: list[tuple[int, int, list[Placed]]] = []
    for item in sorted(needed, key=lambda item: item.bit):
        first, end = item.bit // 8, (item.bit + item.field.width + 7) // 8
        if runs and first < runs[-1][0] + runs[-1][1]:
            start, _, members = runs[-1]
            runs[-1] = (start, end - start, [*members, item])
        else:
            runs.append((first, end - first, [item]))
    for _, size, members in runs:
        if size > 7 and (size != 8 or len(members) > 1):
            fields = ", ".join(member.field.name for member in members)
            feature = f"fields that share bytes over more than 7 bytes ({fields})"
            raise UnsupportedFeature(feature, f"header {members[0].field.header}")
    return runs


def _pieces(size: int) -> list[int]:
    return {1: [1], 2: [2], 3: [1, 2], 4: [4], 5: [1, 4], 6: [2, 4], 7: [1, 2, 4], 8: [8]}[size]


def _decode(names: Names, members: list[Placed], start: int, size: int, raw: list[str], pieces: list[int]) -> list[str]:
    lines = []
    source = raw[0]
    if len(raw) > 1:
        terms, rest = [], size
        for text, piece in zip(raw, pieces, strict=True):
            rest -= piece
            terms.append(f"{text} << {8 * rest}" if rest else text)
        joined = " | ".join(terms)
        if len(members) == 1 and members[0].field.width == size * 8:
            return [f"{names(members[0].field)} = {joined}"]
        lines.append(f"{source} = {joined}")
    for bit, member in members:
        shift = (start + size) * 8 - bit - member.width
        text = f"{source} >> {shift}" if shift else source
        if bit != start * 8:
            text = f"{text} & {hex((1 << member.width) - 1)}"
        lines.append(f"{names(member)} = {text}")
    return lines


class Stores:
    """Fields of headers assigned in one straight piece of text, written back together at its end."""

    def __init__(self, write: Writer, names: Names, helpers: Helpers, offsets: dict[str, frozenset[int]]) -> None:
        self.write, self.names, self.helpers, self.offsets = write, names, helpers, offsets
        self.pending: dict[Field, str] = {}

    def add(self, target: Field, text: str) -> None:
        """Note that ``target`` now has the value ``text``, a variable or a constant."""
        self.pending[target] = text

    def flush(self, known_valid: Iterable[str]) -> None:
        """Write what is pending into the packet, for headers that are valid."""
        known = set(known_valid)
        for header in dict.fromkeys(item.header for item in self.pending):
            starts = self.offsets.get(header)
            if starts is None:  # never extracted, so never valid
                continue
            fields = sorted((item for item in self.pending if item.header == header), key=lambda item: item.offset)
            valid = self.names(Valid(header))
            base = "" if len(starts) == 1 else f"{valid} - 1"
            first = next(iter(starts)) if len(starts) == 1 else 0
            if header in known:
                self._emit(fields, base, first)
            else:
                with self.write.block(f"if {valid}:"):
                    self._emit(fields, base, first)
        self.pending.clear()

    def _emit(self, fields: list[Field], base: str, first: int) -> None:
        run: list[tuple[int, int, str]] = []
        for item in fields:
            byte, rest = divmod(item.offset, 8)
            if rest == 0 and item.width % 8 == 0:
                if run and run[-1][0] + run[-1][1] != byte:
                    self._emit_run(run, base, first)
                    run = []
                run.append((byte, item.width // 8, self.pending[item]))
        if run:
            self._emit_run(run, base, first)
        partial: dict[int, tuple[int, list[str]]] = {}
        for item in fields:
            if item.offset % 8 or item.width % 8:
                self._split(item, partial)
        for byte, (mask, terms) in sorted(partial.items()):
            place = at(base, first + byte)
            kept = [] if mask == 255 else [f"p[{place}] & {255 ^ mask}"]
            terms = [term for term in terms if term != "0"]
            self.write(f"p[{place}] = {' | '.join([*kept, *terms]) or '0'}")

    def _split(self, item: Field, partial: dict[int, tuple[int, list[str]]]) -> None:
        text = self.pending[item]
        end = item.offset + item.width
        for byte in range(item.offset // 8, (end + 7) // 8):
            low, high = max(item.offset, byte * 8), min(end, byte * 8 + 8)
            mask = ((1 << (high - low)) - 1) << (byte * 8 + 8 - high)
            if text.isdigit() or text.startswith("0x"):
                piece = str(((int(text, 0) >> (end - high)) & ((1 << (high - low)) - 1)) << (byte * 8 + 8 - high))
            else:
                piece = text if end == high else f"{text} >> {end - high}"
                if low > item.offset:
                    piece = (
                        f"({piece}) & {(1 << (high - low)) - 1}"
                        if end != high
                        else f"{piece} & {(1 << (high - low)) - 1}"
                    )
                if byte * 8 + 8 > high:
                    piece = (
                        f"({piece}) << {byte * 8 + 8 - high}" if " " in piece else f"{piece} << {byte * 8 + 8 - high}"
                    )
                elif " " in piece:
                    piece = f"({piece})"
            old_mask, terms = partial.get(byte, (0, []))
            partial[byte] = (old_mask | mask, [*terms, piece])

    def _emit_run(self, run: list[tuple[int, int, str]], base: str, first: int) -> None:
        if len(run) == 1 and run[0][1] == 1:
            self.write(f"p[{at(base, first + run[0][0])}] = {run[0][2]}")
            return
        units: list[int] = []
        values: list[str] = []
        for _, size, text in run:
            rest = size
            pieces = _pieces(size)
            for piece in pieces:
                rest -= piece
                part = f"{text} >> {8 * rest}" if rest else text
                if len(pieces) > 1 and rest + piece < size:
                    part = (
                        f"{part} & {hex((1 << 8 * piece) - 1)}"
                        if not rest
                        else f"({part}) & {hex((1 << 8 * piece) - 1)}"
                    )
                units.append(piece)
                values.append(part)
        store = self.helpers.name(Store(tuple(units)))
        self.write(f"{store}(p, {at(base, first + run[0][0])}, {', '.join(values)})")
