# SPDX-License-Identifier: Apache-2.0
"""The table of benchmarks: each has options that can be parsed, and rejects others with a message."""

import pytest

pytest.importorskip("torch")

from tests.bench.__main__ import TABLE, main, parser_of

HUGE = "9" * 5000


@pytest.mark.parametrize("name", TABLE)
def test_every_benchmark_of_the_table_is_there(name):
    assert parser_of(name).parse_args([])


def test_without_a_name_the_table_is_printed(capsys):
    assert main([]) == main(["nothing"]) == 2
    printed = capsys.readouterr().err
    assert all(f"  {name} " in printed for name in TABLE)


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("cpu", "--megabytes", ("x", "nan", "inf", "-1", "0", HUGE)),
        ("loss", "--percent", ("nan", "100", "-1", "x")),
        ("loss", "--rtt-ms", ("-1", "x", "nan")),
        ("tail", "--ranks", ("x", "1", "1.5")),
        ("tail", "--warm-up", ("-1", "x", HUGE)),
        ("slow-path", "--cell-seconds", ("0", "x", "inf")),
        ("step", "--rounds", ("0", "-1", "x", HUGE)),
        ("sim", "--bytes", ("0", "-1", "x", HUGE)),
        ("convergence", "--seeds", ("0", "x", HUGE)),
    ],
)
def test_what_an_option_cannot_hold_is_refused(name, option, words, capsys):
    for word in words:
        with pytest.raises(SystemExit):
            parser_of(name).parse_args([option, word])
        assert option in capsys.readouterr().err.splitlines()[-1]
