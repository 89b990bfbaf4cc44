# SPDX-License-Identifier: Apache-2.0
"""The environment beats a file, and that the default; what holds nonsense is named."""

import sys
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from dlcp.inputs import configuration
from dlcp.inputs.configuration import HostPort, OneOf, Range, Setting, Trait, Unit, build, settings


@dataclass(frozen=True)
class Choices:
    bound: float = 0.1
    job: int = 0
    tagged: bool = True
    bind: str = ""
    policy: list = field(default_factory=list)


@pytest.fixture
def toml():
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")


def chosen(environment):
    return {s.name: (s.value, s.origin) for s in settings(Choices, environment) if not s.is_default}


def test_every_simple_field_is_an_option_and_others_are_not():
    defaults = {name: option.default for name, option in configuration.options_of(Choices).items()}
    assert defaults == {"bound": 0.1, "job": 0, "tagged": True, "bind": ""}
    assert settings(Choices, {})[0] == Setting("bound", 0.1, "default")


def test_a_field_declares_all_that_is_known_of_its_option():
    @dataclass(frozen=True)
    class Declared:
        wait_s: Annotated[float, Range(0, 9, above=True), Unit("s"), Trait.AGREED] = 1.0
        mine: Annotated[int, Trait.OWN] = 0
        where: Annotated[str, HostPort()] = ""
        how: Annotated[str, OneOf(("fast", "slow"))] = "fast"

    options = configuration.options_of(Declared)
    assert options["wait_s"].describe() == "in (0, 9] s; the same on all ranks"
    assert options["mine"].describe() == "each rank's own"
    assert options["where"].describe() == "`host:port`"
    assert options["how"].describe() == "one of `fast`, `slow`"
    with pytest.raises(ValueError, match="DLCP_HOW must be one of fast, slow, got 'soon'"):
        settings(Declared, {"DLCP_HOW": "soon"})
    with pytest.raises(ValueError, match=r"DLCP_WAIT_S must lie in \(0, 9\], got '?0"):
        options["wait_s"].parse("DLCP_WAIT_S", "0")


def test_the_environment_beats_the_file_which_beats_the_default(toml, tmp_path):
    path = tmp_path / "dlcp.toml"
    path.write_text("bound = 0\njob = 1\nbind = 'a:1'\ntagged = false\n")
    environment = {"DLCP_JOB": "2", "DLCP_BIND": "b:2"}
    assert chosen(environment) == {
        "bound": (0.0, "dlcp.toml"),
        "job": (2, "DLCP_JOB"),
        "bind": ("b:2", "DLCP_BIND"),
        "tagged": (False, "dlcp.toml"),
    }
    assert build(Choices, environment) == Choices(bound=0.0, job=2, bind="b:2", tagged=False)
    assert type(build(Choices, environment).bound) is float


def test_a_number_in_the_file_may_be_one_of_the_words(toml, tmp_path):
    @dataclass(frozen=True)
    class Precise:
        precision: Annotated[str, OneOf(("auto", "8"))] = "auto"

    path = tmp_path / "dlcp.toml"
    path.write_text("precision = 8\n")
    assert build(Precise, {}).precision == "8"
    path.write_text("precision = 7\n")
    with pytest.raises(ValueError, match=r"dlcp\.toml: precision must be one of auto, 8, got '7'"):
        build(Precise, {})


def test_a_variable_names_another_file(toml, tmp_path):
    (tmp_path / "dlcp.toml").write_text("job = 1")
    (tmp_path / "other.toml").write_text("job = 9")
    assert chosen({"DLCP_CONFIG": "other.toml"}) == {"job": (9, "other.toml")}
    with pytest.raises(ValueError, match=r"DLCP_CONFIG names nowhere\.toml, which does not exist"):
        settings(Choices, {"DLCP_CONFIG": "nowhere.toml"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("boound = 0.1", r"dlcp\.toml: there is no option 'boound'; did you mean bound\?"),
        ("policy = []", r"there is no option 'policy'"),
        ("job = 1.5", r"job must be int, got 1\.5"),
        ("job = true", r"job must be int, got True"),
        ("tagged = 1", r"tagged must be true or false, got 1"),
        ("bound = '0.1'", r"bound must be float, got '0\.1'"),
        ("job = ", r"dlcp\.toml: "),
    ],
)
def test_a_file_that_holds_nonsense_is_named(toml, tmp_path, text, complaint):
    (tmp_path / "dlcp.toml").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        settings(Choices, {})


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("DLCP_BOUND", "a tenth", "DLCP_BOUND must be float, got 'a tenth'"),
        ("DLCP_JOB", "", "DLCP_JOB must be int, got ''"),
        ("DLCP_TAGGED", "2", "DLCP_TAGGED must be 1 or 0, got '2'"),
    ],
)
def test_a_variable_that_holds_nonsense_is_named(name, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        settings(Choices, {name: text})


def test_texts_become_values():
    environment = {"DLCP_BOUND": "1e-2", "DLCP_JOB": "0x10", "DLCP_TAGGED": "False"}
    assert build(Choices, environment) == Choices(bound=0.01, job=16, tagged=False)


def test_a_python_that_cannot_read_toml_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "dlcp.toml").write_text("job = 1")
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ValueError, match="pip install tomli, or set the options as DLCP_"):
        settings(Choices, {})
