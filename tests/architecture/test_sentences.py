# SPDX-License-Identifier: Apache-2.0
"""Sentences are drawn from docstrings, messages, comments and pages, and one seed always draws the same ones."""

from tests.architecture import sentences
from tests.architecture.sentences import KINDS, draw

MODULE = '''
def send(size):
    """Send a message to the peer.

    Parameters
    ----------
    size
        How many bytes it has.
    """
    raise ValueError(f"a message of {size} bytes is too long; split it")
    # A comment has lines that belong together. The
    # next sentence is here.
    return 1  # it is not in range of anything
'''
PAGE = """# A heading of four words

One sentence is on the first line. Another one
goes on below.

| first of all cells | the second cell is longer |
|---|---|
"""


def drawn(monkeypatch, tmp_path, text, name):
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(sentences, "ROOT", tmp_path)
    return [(kind, line, text) for kind, _, line, text in sentences.sentences([name])]


def test_a_module_has_docstrings_and_messages(monkeypatch, tmp_path):
    assert drawn(monkeypatch, tmp_path, MODULE, "module.py") == [
        ("docstring", 3, "Send a message to the peer."),
        ("docstring", 3, "How many bytes it has."),
        ("message", 10, "a message of {} bytes is too long; split it"),
        ("comment", 11, "A comment has lines that belong together."),
        ("comment", 11, "The next sentence is here."),
        ("comment", 13, "it is not in range of anything"),
    ]


def test_c_and_p4_have_comments(monkeypatch, tmp_path):
    c = "int x; /* what it is for\n        * and why */\n/* Heading of a part ---- */\n"
    assert [text for _, _, text in drawn(monkeypatch, tmp_path, c, "file.c")] == ["what it is for and why"]
    p4 = "// This drops the packet if\n// its queue is deep.\nbit<3> queue; // of a packet in flight\n"
    found = [("comment", 1, "This drops the packet if its queue is deep."), ("comment", 3, "of a packet in flight")]
    assert drawn(monkeypatch, tmp_path, p4, "file.p4") == found


def test_a_page_has_sentences_and_cells(monkeypatch, tmp_path):
    assert [text for _, _, text in drawn(monkeypatch, tmp_path, PAGE, "page.md")] == [
        "# A heading of four words",
        "One sentence is on the first line.",
        "Another one goes on below.",
        "first of all cells",
        "the second cell is longer",
    ]


def test_a_seed_draws_the_same_sentences_again():
    pool = sentences.sentences(["docs", "dlcp/wire"])
    assert draw(pool, 1) == draw(pool, 1) != draw(pool, 2)
    assert [kind for kind, *_ in draw(pool, 1, 8)] == [kind for kind in KINDS for _ in range(2)]
