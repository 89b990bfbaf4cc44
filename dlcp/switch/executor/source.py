# SPDX-License-Identifier: Apache-2.0
"""Generates a whole program as text: one body each for ingress and egress, wrapped as plain or compiled code.

Plain: ``ingress(p, ingress_port, now_us)`` and ``egress(p, carry, port, ...)`` over bytearrays, with lists and
dictionaries as globals. Compiled: the same bodies over arrays passed in, with loops over batches, and ``forward``,
which takes a batch through ingress, queues, egress and lines; `dlcp.switch.ports.scheduler` has the queues and lines.
"""

import inspect
import re
import struct
from dataclasses import dataclass, replace
from typing import Any, Final

from dlcp.switch.executor import cells, tables
from dlcp.switch.executor.analysis import Context, Usage, constant_fields, shorten, stacks, target_of
from dlcp.switch.executor.control import ControlText
from dlcp.switch.executor.hashes import compiled_source, compiled_tables, plain_source
from dlcp.switch.executor.model import FLAT, Assign, Control, Field, ProgramDef, StateLayout, Variable, lay_out
from dlcp.switch.executor.parsing import ParserText
from dlcp.switch.executor.text import Expressions, Helpers, LoadBytes, Names, StoreBytes, Writer
from dlcp.switch.ports import scheduler
from dlcp.switch.ports.queues import SERVE_EVERY_PACKETS

DROP_PORT: Final = 511
"""BMv2's default drop port; packets that leave ingress or egress for this port are dropped."""

_EGRESS_ARGUMENTS: Final = ("port", "enq_us", "deq_delta_us", "enq_depth", "deq_depth", "now_us")
_INGRESS: Final = {
    "standard_metadata.ingress_port": "ingress_port",
    "standard_metadata.packet_length": "n",
    "intrinsic_metadata.ingress_global_timestamp": "now_us & 0xffffffffffff",
}
_QUEUE: Final = {
    "queueing_metadata.enq_timestamp": "enq_us & 0xffffffff",
    "queueing_metadata.enq_qdepth": "enq_depth & 0x7ffff",
    "queueing_metadata.deq_timedelta": "deq_delta_us & 0xffffffff",
    "queueing_metadata.deq_qdepth": "deq_depth & 0x7ffff",
}
_EGRESS: Final = {
    "standard_metadata.egress_port": "port",
    # simple_switch sets it to one above the drop port, which overflows to 0.
    "standard_metadata.egress_spec": "0",
    "standard_metadata.instance_type": "0",
    "standard_metadata.packet_length": "n",
    "intrinsic_metadata.egress_global_timestamp": "now_us & 0xffffffffffff",
}


@dataclass(frozen=True, slots=True)
class Generated:
    """The text of a program.

    Attributes
    ----------
    carry
        Variables that ingress passes to egress, in order.
    ingress, egress
        The bodies, one line each, indented by one level.
    """

    program: ProgramDef
    layout: StateLayout
    helpers: Helpers
    carry: tuple[str, ...]
    ingress: tuple[str, ...]
    egress: tuple[str, ...]

    def plain(self, namespace: dict[str, Any]) -> str:
        """Return the plain text, and add the functions it calls to ``namespace``."""
        namespace.update(
            run_meter=cells.run_meter,
        )
        # Every lookup structure is a dictionary whose __missing__ answers for absent keys.
        namespace.update({f"lookup_{match}": dict.__getitem__ for match in ("exact", "lpm", "ternary", "range")})
        functions = []
        for helper, name in self.helpers.names.items():
            if isinstance(helper, LoadBytes):
                namespace[name] = struct.Struct(_load_format(helper)).unpack_from
            elif isinstance(helper, StoreBytes):
                namespace[name] = struct.Struct(">" + "".join(_CODES[size] for size in helper.units)).pack_into
            else:
                functions.append(plain_source(name, helper.algorithm, helper.widths, namespace))
        unpack = f"    {', '.join(self.carry)}{',' if len(self.carry) == 1 else ''} = carry\n"
        return "\n\n".join(
            [
                *functions,
                "def ingress(p, ingress_port, now_us):\n    n = len(p)\n" + "\n".join(self.ingress) + "\n",
                f"def egress(p, carry, {', '.join(_EGRESS_ARGUMENTS)}):\n    n = len(p)\n{unpack}"
                + "\n".join(self.egress)
                + "\n",
            ]
        )

    def used(self, body: tuple[str, ...]) -> list[str]:
        """Return the arrays that a body reads or writes."""
        words = set(re.findall(r"\w+", "\n".join(body)))
        return [name for name in (*self.layout.structures(), *FLAT) if name in words]

    def unfold(self, used: list[str]) -> str:
        """Return lines that slice the structures out of the combined array, by the offsets at its start."""
        return "".join(
            f"    {name} = structures[structures[{place}] : structures[{place + 1}]]\n"
            for place, name in enumerate(self.layout.structures())
            if name in used
        )

    def compiled(self) -> str:
        """Return the text for Numba: a whole module with ``ingress_batch`` and ``egress_batch``."""
        ingress_state, egress_state = self.used(self.ingress), self.used(self.egress)
        functions: list[str] = [inspect.getsource(function) for function in (cells.run_meter, *tables.LOOKUPS)]
        for helper, name in self.helpers.names.items():
            if isinstance(helper, LoadBytes):
                functions.append(_array_load(name, helper))
            elif isinstance(helper, StoreBytes):
                functions.append(_array_store(name, helper))
            else:
                functions.append(compiled_source(name, helper.algorithm, helper.widths))
        egress = ", ".join(_EGRESS_ARGUMENTS)
        unpack = f"    {', '.join(self.carry)}{',' if len(self.carry) == 1 else ''} = carry\n"
        functions.append(
            f"def ingress(p, n, ingress_port, now_us{_more(ingress_state)}):\n" + "\n".join(self.ingress) + "\n"
        )
        functions.append(
            f"def egress(p, n, carry, {egress}{_more(egress_state)}):\n{unpack}" + "\n".join(self.egress) + "\n"
        )
        indices = range(len(self.carry))
        carried = ", ".join(f"carry[i, {k}]" for k in indices)
        keep = "".join(f"        carry[i, {k}] = kept[{k}]\n" for k in indices)
        state = ", ".join(("structures", *FLAT))
        columns = ", ".join(f"{name}[i]" for name in _EGRESS_ARGUMENTS)
        batches = (
            f"def ingress_batch(packets, lengths, ingress_ports, now_us, ports, priorities, carry, {state}):\n"
            f"{self.unfold(ingress_state)}"
            "    for i in range(lengths.shape[0]):\n"
            "        ports[i], priorities[i], kept = ingress(\n"
            f"            packets[i], lengths[i], ingress_ports[i], now_us[i]{_more(ingress_state)}\n"
            f"        )\n{keep}",
            f"def egress_batch(packets, lengths, carry, {egress}, sent, {state}):\n"
            f"{self.unfold(egress_state)}"
            "    for i in range(lengths.shape[0]):\n"
            "        sent[i] = egress(\n"
            f"            packets[i], lengths[i], ({carried},),\n"
            f"            {columns}{_more(egress_state)}\n"
            "        )\n",
        )
        head = "from __future__ import annotations\n\nimport numpy as np\nfrom numba import njit\n\nCACHE = False\n"
        return "\n\n".join(
            [
                head + compiled_tables(),
                *(f"@njit(nogil=True)\n{function}" for function in functions),
                *(f"@njit(nogil=True, cache=CACHE)\n{function}" for function in batches),
            ]
        )


def _more(names: list[str]) -> str:
    return "".join(f", {name}" for name in names)


_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _load_format(helper: LoadBytes) -> str:
    text, position = ">", 0
    for offset, size in helper.units:
        if offset > position:
            text += f"{offset - position}x"
        text += _CODES[size]
        position = offset + size
    return text


def _array_load(name: str, helper: LoadBytes) -> str:
    values = []
    for offset, size in helper.units:
        terms = []
        for i in range(size):
            shift = 8 * (size - 1 - i)
            byte = f"np.int64(p[o + {offset + i}])"
            terms.append(f"({byte} << {shift})" if shift else byte)
        values.append(" | ".join(terms))
    return f"def {name}(p, o):\n    return (\n        " + ",\n        ".join(values) + ",\n    )\n"


def _array_store(name: str, helper: StoreBytes) -> str:
    arguments = [f"v{i}" for i in range(len(helper.units))]
    lines = [f"def {name}(p, o, {', '.join(arguments)}):"]
    position = 0
    for argument, size in zip(arguments, helper.units, strict=True):
        for i in range(size):
            shift = 8 * (size - 1 - i)
            text = f"{argument} >> {shift}" if shift else argument
            lines.append(f"    p[o + {position}] = ({text}) & 255")
            position += 1
    return "\n".join(lines) + "\n"


def generate(program: ProgramDef) -> Generated:
    """Turn a program into text.

    Raises
    ------
    UnsupportedFeatureError
        The program uses a feature that the built-in switch does not support.
    """
    return _Generator(program).generate()


class _Generator:
    def __init__(self, program: ProgramDef) -> None:
        program = replace(program, ingress=shorten(program.ingress), egress=shorten(program.egress))
        self.program = program
        self.stacks = stacks(program)
        self.usage = Usage(program)
        self.layout = lay_out(program)
        self.names = Names()
        self.helpers = Helpers()
        self.standard = program.standard
        assigned = self.usage.assigned()
        self.zero = frozenset(
            constant_fields(program, self.usage) | {item for item in self._unset() if item not in assigned}
        )
        several = frozenset(name for name, places in self.stacks.offsets.items() if len(places) > 1)
        self.expressions = Expressions(self.names, several, self.zero)
        outputs = {item for item in (self._given("standard_metadata.egress_spec"), self._priority()) if item}
        self.context = Context(
            program=program,
            stacks=self.stacks,
            usage=self.usage,
            layout=self.layout,
            names=self.names,
            helpers=self.helpers,
            expressions=self.expressions,
            read=frozenset(self.usage.all_reads() | outputs),
        )
        ports = {"standard_metadata.ingress_port": "ingress_port", "standard_metadata.packet_length": "n"}
        for alias, name in {**ports, "standard_metadata.egress_port": "port"}.items():
            item = self._given(alias)
            if item is not None and item not in assigned:
                self.names.give(item, name)

    def _given(self, alias: str) -> Field | None:
        return self.standard.get(alias)

    def _priority(self) -> Field | None:
        return self._given("intrinsic_metadata.priority")

    def _queue(self) -> dict[str, str]:
        """Return the queueing metadata for egress: all four fields or none, as in simple_switch."""
        return _QUEUE if all(alias in self.standard for alias in _QUEUE) else {}

    def _unset(self) -> set[Field]:
        """Return the standard metadata fields that the target never sets."""
        set_by_target = {*_INGRESS, *_EGRESS, *self._queue(), "intrinsic_metadata.priority"}
        set_by_target |= {"standard_metadata.parser_error", "standard_metadata.checksum_error"}
        set_by_target.discard("standard_metadata.instance_type")
        kept = {self.standard[alias] for alias in set_by_target if alias in self.standard}
        return {item for item in self.standard.values() if item not in kept}

    def generate(self) -> Generated:
        write = Writer()
        egress_control = ControlText(self.context, self.program.egress, write)
        carried = self._egress_live() - self._egress_given()
        carry = sorted((item for item in carried if item not in self.zero), key=self.names)
        mark = write.mark()
        self._egress(egress_control, write)
        egress = tuple(write.since(mark))
        self._ingress(write, frozenset(carry))
        # An empty tuple has no type under Numba.
        names = tuple(self.names(item) for item in carry) or ("_",)
        spec, priority = self._given("standard_metadata.egress_spec"), self._priority()
        assert spec is not None
        values = ", ".join(names) if carry else "0"
        queue = self.names(priority) if priority is not None else "0"
        write(f"return {self.names(spec)}, {queue}, ({values},)")
        return Generated(self.program, self.layout, self.helpers, names, tuple(write.lines), egress)

    # ------------------------------------------------------------------------------------------------------ egress

    def _updates(self) -> list[Any]:
        return [checksum for checksum in self.program.checksums if checksum.update]

    def _can_drop(self, pipeline: Control) -> bool:
        spec = self._given("standard_metadata.egress_spec")
        return any(
            target_of(statement) == spec
            for node in pipeline.nodes.values()
            for action in getattr(node, "actions", ())
            for statement in action.body
        )

    def _egress_live(self) -> frozenset[Variable]:
        after: frozenset[Variable] = frozenset()
        for checksum in self._updates():
            after |= self.usage.checksum_reads(checksum)
        if self._can_drop(self.program.egress):
            spec = self._given("standard_metadata.egress_spec")
            assert spec is not None
            after |= {spec}
        return self.usage.pipeline_live(self.program.egress, after)

    def _egress_given(self) -> frozenset[Variable]:
        aliases = {**_EGRESS, **self._queue()}
        return frozenset(item for alias in aliases if (item := self._given(alias)) is not None)

    def _egress(self, control: ControlText, write: Writer) -> None:
        live = self._egress_live()
        self._set(write, {**_EGRESS, **self._queue()}, live)
        control.emit()
        if self._can_drop(self.program.egress):
            spec = self._given("standard_metadata.egress_spec")
            assert spec is not None
            with write.block(f"if {self.names(spec)} == {DROP_PORT}:"):
                write("return False")
        for checksum in self._updates():
            control.update(checksum)
        write("return True")

    def _set(self, write: Writer, values: dict[str, str], live: frozenset[Variable]) -> None:
        for alias, text in values.items():
            item = self._given(alias)
            if item is not None and item in live and item not in self.zero and self.names(item) != text:
                write(f"{self.names(item)} = {text}")

    # ----------------------------------------------------------------------------------------------------- ingress

    def _ingress(self, write: Writer, carry: frozenset[Variable]) -> None:
        spec, priority = self._given("standard_metadata.egress_spec"), self._priority()
        after = carry | {item for item in (spec, priority) if item is not None}
        live = self.usage.pipeline_live(self.program.ingress, after)
        flag = self._given("standard_metadata.checksum_error")
        verified = [item for item in self.program.checksums if item.verify and flag in self.context.read]
        for checksum in verified:
            live |= self.usage.checksum_reads(checksum)
        parser_reads = self.usage.parser_reads()
        needed = frozenset(live | parser_reads)
        parser = ParserText(self.context, write, needed)
        given = {item for alias in _INGRESS if (item := self._given(alias)) is not None}
        first = live | parser.initial() | {item for item in self._parser_sets() if item in needed}
        initial = sorted(self.names(item) for item in first if item not in given and item not in self.zero)
        for start in range(0, len(initial), 8):
            write(f"{' = '.join(initial[start : start + 8])} = 0")
        self._set(write, _INGRESS, needed)
        parser.emit()
        control = ControlText(self.context, self.program.ingress, write)
        for checksum in verified:
            assert flag is not None
            control.verify(checksum, flag)
        control.emit()

    def _parser_sets(self) -> set[Variable]:
        """Return the variables that the parser assigns or reads in expressions, which may have no value before."""
        found: set[Variable] = set()
        for state in self.program.states.values():
            found |= self.usage.state_reads(state) - set(state.keys)
            found |= {item.target for item in state.operations if isinstance(item, Assign)}
        return found


_POOL: Final = "rows, slots, carry, spare, ports, totals, out"

_SERVE: Final = """
@njit(nogil=True)
def serve(now_ns, {pool}{egress_more}):
    wake = NEVER_NS
    for place in range(ports.shape[0]):
        port = ports[place]
        if port[BUSY] == 0 and port[LINE_HEAD] < 0:
            continue
        slot = dequeue(port, slots, now_ns)
        while slot >= 0:
            # FREE_NS is still the time at which the packet left its queue.
            start_us, enq_us = port[FREE_NS] // 1000, slots[slot, ENQUEUED_NS] // 1000
            depth = port[WAITING + slots[slot, QUEUE]]
            if not egress(
                rows[slot], slots[slot, LENGTH], ({carried},),
                port[NUMBER], enq_us, start_us - enq_us, slots[slot, ENQ_DEPTH], depth, start_us{egress_more}
            ):
                discard(port, slots, slot)
                give_back(spare, slot)
            elif not transmit(port, slots, slot):
                give_back(spare, slot)
            slot = dequeue(port, slots, now_ns)
        if hand_over(port, slots, out[place], now_ns):
            totals[READY_COUNT] += 1
            totals[READY_COUNT + totals[READY_COUNT]] = place
        due = wake_ns(port, slots)
        if due < wake:
            wake = due
    totals[WAKE_NS] = wake
    if now_ns > totals[TREATED_NS]:
        totals[TREATED_NS] = now_ns


@njit(nogil=True, cache=CACHE)
def forward(until_ns, arrived, count, places, {pool}, {state}):
{unfold}    if until_ns - totals[WAKE_NS] > totals[LATE_NS]:
        totals[LATE_NS] = until_ns - totals[WAKE_NS]
    for i in range(count + 1):
        now_ns = until_ns
        if i < count:
            now_ns = max(min(arrived[i, CAME_NS], until_ns), totals[TREATED_NS])
        # A single call site, since a second one would compile the inlined code twice.
        if totals[WAKE_NS] < now_ns or totals[WAKE_NS] == now_ns and (i == count or i % {serve_every} == 0):
            serve(now_ns, {pool}{egress_more})
        if i == count:
            break
        totals[TREATED_NS] = now_ns
        slot = arrived[i, SLOT]
        slots[slot, LENGTH] = arrived[i, BYTES]
        port = ports[arrived[i, PLACE]]
        if port[LOSS] and loses(port):
            port[LOST_ARRIVING] += 1
            give_back(spare, slot)
            continue
        egress_port, queue, kept = ingress(
            rows[slot], slots[slot, LENGTH], port[NUMBER], now_ns // 1000{ingress_more}
        )
        if egress_port == {drop_port}:
            port[INGRESS_DROPS] += 1
            give_back(spare, slot)
            continue
        place = places[egress_port]
        if place < 0:
            totals[NO_PORT] += 1
            give_back(spare, slot)
            continue
        if not enqueue(ports[place], slots, slot, queue, now_ns):
            give_back(spare, slot)
            continue
{keep}        due = wake_ns(ports[place], slots)
        if due < totals[WAKE_NS]:
            totals[WAKE_NS] = due
"""


def forwarding(generated: Generated) -> str:
    """Return the text of ``forward``, to append to ``generated.compiled()``.

    ``forward(until_ns, arrived, count, places, ..., state)`` processes the first ``count`` rows of ``arrived``, in
    order, and all departures and arrivals due up to ``until_ns``. A packet with an arrival time before TREATED_NS is
    processed as if it had arrived at TREATED_NS. ``places`` maps a port number to its row, -1 for no such port.
    """
    ingress, egress = generated.used(generated.ingress), generated.used(generated.egress)
    indices = range(len(generated.carry))
    constants = "".join(f"{name} = {value}\n" for name, value in scheduler.CONSTANTS.items())
    functions = "\n".join(f"@njit(nogil=True)\n{inspect.getsource(item)}\n" for item in scheduler.COMPILED)
    text = _SERVE.format(
        pool=_POOL,
        state=", ".join(("structures", *FLAT)),
        unfold=generated.unfold([*ingress, *(name for name in egress if name not in ingress)]),
        carried=", ".join(f"carry[slot, {k}]" for k in indices),
        keep="".join(f"        carry[slot, {k}] = kept[{k}]\n" for k in indices),
        ingress_more="".join(f", {name}" for name in ingress),
        egress_more="".join(f", {name}" for name in egress),
        drop_port=DROP_PORT,
        serve_every=SERVE_EVERY_PACKETS,
    )
    return f"\n\n{constants}\n\n{functions}\n{text}"
