# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, field
from typing import Literal

import pytest

from dlcp.document import Document, DocumentError, PlaceError


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
        ("leaves:\n- name: a\n  size: big\n", r":3: leaves\[0\]\.size: Expected `int`, got `str`"),
        ("leaves:\n- name: a\n- size: 4\n", r":3: leaves\[1\]: .*missing required field `name`"),
        ("leaves:\n- name: a\n  kind: bmv3\n", r":3: leaves\[0\]\.kind: .*did you mean bmv2\?"),
        ("leaves:\n- name: a\n  size: -2\n", r":2: leaves\[0\]: size is negative"),
        ("by_number:\n  3: {name: a}\n  4: {name: b,\n    size: x}\n", r":4: by_number\.4\.size: Expected `int`"),
        ("by_number:\n  3: {name: a}\n  four: {name: b}\n", r":3: by_number\.four: Expected `int`"),
        ("leaves:\n- name: a\nroot:\n  size: 2\n  name: b\n", r":5: root\.name: no leaf is named 'b'"),
        ("rate: 1\nleaves: []\nrate: 2\n", r":1: rate: 'rate' is given twice, here and in line 3"),
        ("leaves: [\n", r":2: .*\(column 1\)"),
        ("rate: 1\n---\nrate: 2\n", r":2: .*document"),
        ("leaves: &a [*a]\n", r":1: leaves\[0\]: this holds itself"),
        ("? [1, 2]\n: 3\n", r":1: a key is a word or a number"),
        ("rate: !!binary aGk=\n", r":1: rate: a value marked .*binary"),
        ("\n\nleaves: 5\n", r":3: leaves: Expected `array`, got `int`"),
        ("", r":1: Expected `object`, got `null`"),
    ],
)
def test_errors_say_where_and_what_would_be_right(tmp_path, text, says):
    with pytest.raises(DocumentError, match=f"tree.yaml{says}"):
        read(tmp_path, text).convert(Tree)


def test_json_errors_name_their_lines_too(tmp_path):
    with pytest.raises(DocumentError, match=r"t.json:2: leaves\[1\].size: Expected"):
        read(tmp_path, '{"leaves":[{"name":"a"},\n\t{"name":"b","size":"x"}]}', "t.json").convert(Tree)
    with pytest.raises(DocumentError, match=r"t.json:1: rate: 'rate' is given twice, here and in line 2"):
        read(tmp_path, '{"rate":1,\n"rate":2}', "t.json")
    with pytest.raises(DocumentError, match=r"t.json:1: .*column 9"):
        read(tmp_path, '{"rate":}', "t.json")


def test_file_that_is_no_text(tmp_path):
    (tmp_path / "tree.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(DocumentError, match=r"tree.yaml: this is no UTF-8 text"):
        Document(tmp_path / "tree.yaml")
    with pytest.raises(DocumentError, match=r"none.yaml: No such file"):
        Document(tmp_path / "none.yaml")
