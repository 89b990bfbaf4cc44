# SPDX-License-Identifier: Apache-2.0
"""The generated text on a program of everything that the DLCP program does not use, against the oracle."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlcp.switch import DROP_PORT, Action, EntryError, MemberRef, Program, UnsupportedFeatureError
from dlcp.switch.executor import bmv2_json
from dlcp.switch.executor.expressions import Expressions, fit
from dlcp.switch.executor.model import Const, Field, Op
from tests.switch import batches, mini, sink
from tests.switch import oracle as oracles

ROOT = Path(__file__).parents[2]
COUNT = 3000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return sink.build(tmp_path_factory.mktemp("sink") / "sink.json")


def load(path, backend="python"):
    program = Program.load(path, backend=backend)
    sink.populate(program)
    return program


def test_every_feature_equals_the_oracle(path):
    program, oracle = load(path), oracles.Oracle(path)
    sink.populate_oracle(oracle)
    seen, dropped = set(), 0
    for number, packet in enumerate(sink.packets(COUNT, 1)):
        now, buffer = 1_000_000 + number * 100, bytearray(packet)
        port, priority, carry = program.ingress(buffer, number % 500, now)
        expected, expected_priority, state = oracle.ingress(packet, number % 500, now)
        assert (port, priority) == (expected, expected_priority), f"packet {number}: {packet.hex()}"
        seen.add(port)
        if port == DROP_PORT:
            continue
        arguments = (port, now, 3, number % 20, number % 300, now + 3)
        sent, wanted = program.egress(buffer, carry, *arguments), oracle.egress(state, *arguments)
        assert sent == len(wanted or b"")
        dropped += not sent
        if wanted is not None:
            assert buffer[:sent].hex() == wanted.hex(), f"packet {number}: {packet.hex()}"
    assert seen == {0, 3, 4, 5, 6, 7, 0x11, 0x12, 99, DROP_PORT}
    assert dropped > 50
    assert program.registers["regs"].values().tolist() == oracle.registers["regs"]
    assert program.counters["cnt"].values().tolist() == oracle.counters["cnt"]


COMPARE = """
from tests.switch import test_codegen
test_codegen.compare({path!r})
"""


def compare(path):
    left, right = load(path), load(path, "numba")
    rows = np.zeros((COUNT, 40), np.uint8)
    packets = sink.packets(COUNT, 2)
    lengths = np.array([len(packet) for packet in packets])
    for row, packet in zip(rows, packets, strict=True):
        row[: len(packet)] = np.frombuffer(packet, np.uint8)
    now, results = 1_000_000 + np.arange(COUNT) * 100, []
    for program in (left, right):
        buffer = rows.copy()
        out, priorities, carry = batches.ingress(program, buffer, lengths, np.arange(COUNT) % 500, now)
        depth = np.arange(COUNT)
        sent = batches.egress(program, buffer, lengths, carry, out, now, 3, depth % 20, depth % 300, now + 3)
        results.append((out, priorities, sent, buffer, program.snapshot()))
    for one, other in zip(results[0][:4], results[1][:4], strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(results[0][4], results[1][4], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_compiled_equals_plain_with_bounds_checked(path):
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1"}
    script = COMPARE.format(path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_constant_entries_and_defaults_cannot_be_changed(path):
    program = load(path)
    with pytest.raises(EntryError, match="constant entries"):
        program.tables["fixed"].insert({"odd": (1, 1)}, Action("drop"), 3)
    assert [entry.target.params for entry in program.tables["fixed"].entries()] == [{"port": 0x11}, {"port": 0x12}]
    with pytest.raises(EntryError, match="has no key"):
        program.tables["keyless"].insert({}, Action("none"))
    assert "start_" not in program.tables


def test_a_default_can_be_set_and_reset(path):
    program = load(path)
    packet = next(p for p in sink.packets(500, 3) if len(p) > 20 and p[8] & 0x3F != 0x11)

    def port():
        return program.ingress(bytearray(packet), 1, 10**6)[0]

    before = port()
    program.tables["keyless"].set_default(Action("send", {"port": 77}))
    assert port() == 77
    program.tables["profile"].set_default(MemberRef(4))
    assert port() == 99
    program.tables["profile"].reset_default()
    assert port() == 77
    program.tables["keyless"].reset_default()
    assert port() == before


def test_only_what_is_needed_is_read_and_masked(path):
    source = Program.load(ROOT / "p4" / "build" / "dlcp.json").source
    source = source.rpartition("def egress(")[0]  # egress loads all of a packet that it trims
    assert "dlcp_token" not in source
    assert "dlcp_count" not in source
    assert "ipv4_total_len" not in source
    # p4c writes this index with six masks.
    assert re.search(r"\w+ = \(\(standard_metadata_egress_spec & 63\) << 3\) \| meta_queue\n", source)


# ---------------------------------------------------------------------------------------------------- expressions

X = Field("scalars", "x", 8, 0, True)
Y = Field("scalars", "y", 16, 8, True)
CASES = {
    "a mask that covers all is left out": (Op("&", (X, Const(0xFF))), "x"),
    "also a wider one": (Op("&", (Const(0xFFFF), X)), "x"),
    "a mask that cuts stays": (Op("&", (Y, Const(0xFF))), "(y & 255)"),
    "a shift within the mask": (Op("&", (Op("<<", (X, Const(3))), Const(0x7FF))), "(x << 3)"),
    "a shift beyond the mask": (Op("&", (Op("<<", (X, Const(3))), Const(0xFF))), "((x << 3) & 255)"),
    "a sum that can carry": (Op("&", (Op("+", (X, Const(255))), Const(0xFF))), "((x + 255) & 255)"),
    "a negation is cut": (Op("&", (Op("~", (X,)), Const(0xFF))), "((~x) & 255)"),
    "constants are folded": (Op("|", (Const(0x20), Const(3))), "35"),
    "an or of nothing": (Op("|", (Const(0), X)), "x"),
    "a difference may be negative": (Op("-", (X, Y)), "(x - y)"),
    "truth becomes a number": (Op("b2d", (Op("==", (X, Const(0))),)), "(1 if not x else 0)"),
}


@pytest.mark.parametrize("name", CASES)
def test_expressions(name):
    expression, text = CASES[name]
    expressions = Expressions(lambda item: item.name, frozenset(), frozenset())
    assert expressions.value(expression, "here").text == text


@pytest.mark.parametrize(("width", "text"), [(8, "(x - y) & 255"), (16, "(x - y) & 0xffff")])
def test_a_value_is_cut_to_its_target(width, text):
    expressions = Expressions(lambda item: item.name, frozenset(), frozenset())
    assert fit(expressions.value(Op("-", (X, Y)), "here"), width).text == text


def test_bounds_hold_for_random_expressions():
    random = np.random.default_rng(5)

    def make(depth):
        if depth == 0 or random.random() < 0.2:
            return [X, Y, Const(int(random.integers(0, 300)))][int(random.integers(3))]
        operator = str(random.choice(["+", "-", "*", "&", "|", "^", ">>", "<<", "~", "?", "b2d", "usat_cast"]))
        if operator == "~":
            return Op("~", (make(depth - 1),))
        if operator == "b2d":
            return Op("b2d", (Op(str(random.choice(["<", "==", ">="])), (make(depth - 1), make(depth - 1))),))
        if operator == "?":
            return Op("?", (Op("d2b", (make(depth - 1),)), make(depth - 1), make(depth - 1)))
        if operator == ">>":
            return Op(">>", (Op("&", (make(depth - 1), Const(0xFFFF))), Const(int(random.integers(0, 20)))))
        if operator in ("<<", "usat_cast"):
            return Op(operator, (make(depth - 1), Const(int(random.integers(0, 6)))))
        return Op(operator, (make(depth - 1), make(depth - 1)))

    def evaluate(item, values):
        if isinstance(item, Const):
            return item.value
        if isinstance(item, Field):
            return values[item.name]
        if item.op == "?":
            return evaluate(item.args[1 if evaluate(item.args[0], values) else 2], values)
        args = [evaluate(part, values) for part in item.args]
        return {
            "~": lambda a: ~a,
            "b2d": int,
            "d2b": lambda a: a != 0,
            "usat_cast": lambda a, b: min(max(a, 0), (1 << b) - 1),
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "&": lambda a, b: a & b,
            "|": lambda a, b: a | b,
            "^": lambda a, b: a ^ b,
            "<<": lambda a, b: a << b,
            ">>": lambda a, b: a >> b,
            "<": lambda a, b: a < b,
            ">=": lambda a, b: a >= b,
            "==": lambda a, b: a == b,
        }[item.op](*args)

    expressions = Expressions(lambda item: item.name, frozenset(), frozenset())
    for _ in range(1500):
        item = make(4)
        try:
            value = expressions.value(item, "here")
        except UnsupportedFeatureError:
            continue
        for x, y in ((0, 0), (255, 65535), (255, 0), (0, 65535), (17, 4711)):
            expected = evaluate(item, {"x": x, "y": y})
            assert eval(value.text, {"x": x, "y": y, "min": min, "max": max}) == expected, value.text
            assert value.low <= expected <= value.high, value
            assert eval(fit(value, 8).text, {"x": x, "y": y, "min": min, "max": max}) == expected & 255


def test_the_builder_is_read_as_p4c_writes_it(path):
    program = bmv2_json.load_definition(path)
    assert mini.STANDARD["deq_qdepth"] == program.standard["queueing_metadata.deq_qdepth"].width
