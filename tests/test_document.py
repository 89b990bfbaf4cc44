# SPDX-License-Identifier: Apache-2.0
import time
from dataclasses import dataclass, field
from typing import Literal

import pytest

from dlcp.inputs.document import Document, DocumentError, PlaceError, read_json


@dataclass(frozen=True)
class Leaf:
    name: str
    size: int = 1
    kind: Literal["builtin", "bmv2"] = "builtin"

    def __post_init__(self):
        if self.size < 0:
            raise ValueError("size is negative")


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...] = ()
    by_number: dict[int, Leaf] = field(default_factory=dict)
    rate: float = 0.0
    root: Leaf | None = None

    def __post_init__(self):
        if self.root is not None and self.root.name not in [leaf.name for leaf in self.leaves]:
            raise PlaceError(f"no leaf is named {self.root.name!r}", "root", "name")


def read(tmp_path, text, name="tree.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return Document(path)


def test_yaml_and_json_say_the_same(tmp_path):
    as_yaml = read(tmp_path, "leaves:\n- {name: a}\n- name: b\n  size: 3\nby_number:\n  7: {name: c}\nrate: 1e9\n")
    as_json = read(
        tmp_path,
        '{"leaves":[{"name":"a"},\t{"name":"b","size":3}],\n"by_number":{"7":{"name":"c"}},"rate":1e9}',
        "t.json",
    )
    expected = Tree((Leaf("a"), Leaf("b", 3)), {7: Leaf("c")}, 1e9)
    assert as_yaml.convert(Tree) == as_json.convert(Tree) == expected


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("02:00:00:00:00:01", "02:00:00:00:00:01"),
        ("12:30", "12:30"),
        ("no", "no"),
        ("10.0.0.1", "10.0.0.1"),
        ("2020-01-01", "2020-01-01"),
        ("'5'", "5"),
        ("true", True),
        ("~", None),
        ("", None),
        ("0x1f", 31),
        ("0o17", 15),
        ("1_000_000", 1_000_000),
        ("-3", -3),
        ("1e9", 10**9),
        ("2.5e-3", 2.5e-3),
        (".5", 0.5),
    ],
)
def test_plain_words(tmp_path, word, meaning):
    found = read(tmp_path, f"word: {word}\n").content["word"]
    assert found == meaning
    assert type(found) is type(meaning)


def test_anchors_repeat_what_they_name(tmp_path):
    document = read(tmp_path, "leaves:\n- &first {name: a, size: 2}\n- *first\n")
    assert document.convert(Tree).leaves == (Leaf("a", 2), Leaf("a", 2))


def test_whole_number_with_an_exponent_is_an_integer(tmp_path):
    assert read(tmp_path, '{"name":"a","size":2.5e9}', "t.json").convert(Leaf).size == 2_500_000_000
    assert read(tmp_path, "name: a\nsize: 1e9\n").convert(Leaf) == Leaf("a", 1_000_000_000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("leaves:\n- name: a\n  sise: 3\n", r":3: leaves\[0\]\.sise: there is no field 'sise'; did you mean size\?"),
        ("leaves:\n- name: a\n  size: big\n", r":3: leaves\[0\]\.size: expected a whole number, got 'big'"),
        ("leaves:\n- name: a\n- size: 4\n", r":3: leaves\[1\]: name is missing"),
        ("leaves:\n- name: a\n  kind: bmv3\n", r":3: leaves\[0\]\.kind: .*did you mean bmv2\?"),
        ("leaves:\n- name: a\n  size: -2\n", r":2: leaves\[0\]: size is negative"),
        (
            "by_number:\n  3: {name: a}\n  4: {name: b,\n    size: x}\n",
            r":4: by_number\.4\.size: expected a whole number, got 'x'",
        ),
        ("by_number:\n  3: {name: a}\n  four: {name: b}\n", r":3: by_number\.four: expected a whole number"),
        ("leaves:\n- name: a\nroot:\n  size: 2\n  name: b\n", r":5: root\.name: no leaf is named 'b'"),
        ("rate: 1\nleaves: []\nrate: 2\n", r":1: rate: 'rate' is given twice, here and on line 3"),
        ("leaves: [\n", r":2: .*\(column 1\)"),
        ("rate: 1\n---\nrate: 2\n", r":2: .*document"),
        ("leaves: &a [*a]\n", r":1: leaves\[0\]: this contains itself"),
        ("? [1, 2]\n: 3\n", r":1: a key must be a word or a number"),
        ("rate: !!binary aGk=\n", r":1: rate: a value tagged .*binary"),
        ("\n\nleaves: 5\n", r":3: leaves: expected a list, got 5"),
        ("", r":1: expected fields with values, got nothing"),
    ],
)
def test_errors_say_where_and_what_would_be_right(tmp_path, text, says):
    with pytest.raises(DocumentError, match=f"tree.yaml{says}"):
        read(tmp_path, text).convert(Tree)


def test_json_errors_name_their_lines_too(tmp_path):
    with pytest.raises(DocumentError, match=r"t.json:2: leaves\[1\].size: expected a whole number"):
        read(tmp_path, '{"leaves":[{"name":"a"},\n\t{"name":"b","size":"x"}]}', "t.json").convert(Tree)
    with pytest.raises(DocumentError, match=r"t.json:1: rate: 'rate' is given twice, here and on line 2"):
        read(tmp_path, '{"rate":1,\n"rate":2}', "t.json")
    with pytest.raises(DocumentError, match=r"t.json:1: .*column 9"):
        read(tmp_path, '{"rate":}', "t.json")


def test_file_that_is_no_text(tmp_path):
    (tmp_path / "tree.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(DocumentError, match=r"tree.yaml: this is not UTF-8 text"):
        Document(tmp_path / "tree.yaml")
    with pytest.raises(DocumentError, match=r"none.yaml: No such file"):
        Document(tmp_path / "none.yaml")


def nested(levels, before="[", after="]"):
    return before * levels + after * levels


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
"""A hundred million values in 400 bytes."""
TOWER = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (nested(100_000), "t.yaml", "nested too deeply: at most 64 levels|maximum nesting depth"),
        (nested(65), "t.yaml", "nested too deeply"),
        ("".join(f"{' ' * level}a:\n" for level in range(500)), "t.yaml", "nested too deeply"),
        ("- " * 5000, "t.yaml", "nested too deeply"),
        (nested(100_000, '{"a":', "}"), "t.json", "nested too deeply|Expecting value"),
        (nested(100_000), "t.json", "nested too deeply"),
        (nested(65), "t.json", "nested too deeply"),
        (nested(300), "t.json", "nested too deeply"),
        (BOMB, "t.yaml", r"t.yaml:\d: aliases stand for more than 100,000 values"),
        (TOWER, "t.yaml", "nested too deeply"),
        ("a: " + "9" * 5000, "t.yaml", "a whole number may have at most 64 bits"),
        ('{"a": ' + "9" * 5000 + "}", "t.json", "a whole number may have at most 64 bits"),
        ("a: 18446744073709551616", "t.yaml", "a whole number may have at most 64 bits"),
        ("a: 1e999", "t.yaml", "too large for a number"),
        ('{"a": 1e999}', "t.json", "too large for a number"),
        ('{"a": NaN}', "t.json", "NaN is not JSON"),
        ('{"a": -Infinity}', "t.json", "-Infinity is not JSON"),
    ],
)
def test_what_would_take_all_memory_or_the_whole_stack_is_refused(tmp_path, text, name, says):
    began_s = time.process_time()
    with pytest.raises(DocumentError, match=says):
        read(tmp_path, text, name)
    assert time.process_time() - began_s < 2, "processor time: a busy machine does not lengthen it"


def test_nesting_and_aliases_within_the_bounds_are_read(tmp_path):
    assert read(tmp_path, nested(64)).content
    assert read(tmp_path, nested(64), "t.json").content
    assert len(read(tmp_path, "a: &a [1, 2]\nb: [" + "*a, " * 1000 + "*a]\n").content["b"]) == 1001
    assert read(tmp_path, "a: 0xffffffffffffffff\nb: 1e300\n").content == {"a": (1 << 64) - 1, "b": 1e300}


def test_what_a_program_has_written_is_read_with_the_same_errors(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "a.json") == {"a": [1]}
    for text, says in (
        (nested(9999), "nested"),
        ("{", "a.json:1: "),
        ("\xff", "Expecting value"),
        ("1" * 5000, "64 bits"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(DocumentError, match=says):
            read_json(tmp_path / "a.json")
    with pytest.raises(DocumentError, match="Is a directory"):
        read_json(tmp_path)
    with pytest.raises(DocumentError, match="null"):
        read_json(tmp_path / "a\0b")
