# SPDX-License-Identifier: Apache-2.0
"""Options have ranges, which hold for arguments, variables and files alike; errors name where a value comes from."""

import math
import sys

import pytest

from dlcp.doctor import Status
from dlcp.doctor.examination import examine_options
from dlcp.inputs.configuration import HostPort, Range
from dlcp.session.options import Options
from dlcp.transport import LossBound, TransportOptions

SENSELESS = {
    "loss_bound": ("nan", "-0.1", "1", "inf", "-inf"),
    "silence_s": ("nan", "0", "-1", "inf", "1e10"),
    "deadline_s": ("nan", "0", "-1", "inf", "1e10"),
    "meet_s": ("nan", "0", "-1", "inf"),
    "job": ("-1", "65536"),
    "samples": ("-1", "9" * 100),
    "payload_bytes": ("-8", "63", "65008", "1441"),
    "bind": (":1", "::1", "foo:bar", "foo:65536", "foo:-1", "a b:1", "foo:" + "9" * 5000),
    "advertise": (":1", "foo:65536"),
    "collective": ("server", "server:", "server::1", "server:foo:0", "server:foo:65536", "server:http://foo:1"),
    "compression": ("topk:nan", "topk:0", "topk:inf", "fp16:3", "bf16:"),
}
TABLE = [(name, text) for name, texts in SENSELESS.items() for text in texts]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "text"), TABLE)
def test_senseless_values_are_refused_by_every_way_in(name, text, tmp_path):
    variable = f"DLCP_{name.upper()}"
    with pytest.raises(ValueError, match=variable) as refused:
        Options.from_environment({variable: text})
    assert len(str(refused.value)) < 400
    kind = type(getattr(Options(), name))
    value = int(text, 0) if kind is int else kind(text)
    with pytest.raises(ValueError, match=name):
        Options(**{name: value})
    if sys.version_info >= (3, 11):
        (tmp_path / "dlcp.toml").write_text(f"{name} = {text if isinstance(value, int | float) else repr(text)}\n")
        with pytest.raises(ValueError, match=r"dlcp\.toml"):
            Options.from_environment({})


@pytest.mark.parametrize(("name", "text"), [entry for entry in TABLE if len(entry[1]) < 1000])
def test_the_doctor_says_which_variable_is_senseless(name, text):
    section, _ = examine_options({f"DLCP_{name.upper()}": text})
    (finding,) = section.findings
    assert finding.status is Status.MISSING
    assert f"DLCP_{name.upper()}" in finding.text


def test_the_doctor_says_which_precision_a_compression_means():
    _, found = examine_options({"DLCP_COMPRESSION": "fp16"})
    chosen = [(each.name, each.value, each.origin) for each in found if not each.is_default]
    assert chosen == [("precision", "16", "DLCP_COMPRESSION")]


def test_the_doctor_says_that_bind_is_no_address_of_this_machine():
    section, _ = examine_options({"DLCP_BIND": "203.0.113.7:0"})
    (finding,) = [each for each in section.findings if each.status is Status.MISSING]
    assert "bind '203.0.113.7:0' is not an address of this machine" in finding.text
    assert "DLCP_BIND" in finding.fix


@pytest.mark.parametrize(
    "fields",
    [
        {"early_buffer_bytes": 0},
        {"early_buffer_bytes": -1},
        {"early_buffer_bytes": math.inf},
        {"early_buffer_bytes": 1 << 70},
        {"early_buffer_bytes": 1.5},
        {"clear_after_s": math.nan},
        {"clear_after_s": -1.0},
        {"flow_weight": math.nan},
        {"flow_weight": -1.0},
        {"silence_s": "10"},
        {"deadline_s": None},
        {"paths": 0},
    ],
)
def test_an_endpoint_refuses_them_too(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must"):
        TransportOptions(**fields)


def test_bounds_that_make_sense_are_taken():
    assert TransportOptions(clear_after_s=math.inf).clear_after_s == math.inf
    assert Options(loss_bound=0.999, silence_s=1e-3, bind="host:0").silence_s == 1e-3
    assert Options.from_environment({"DLCP_BIND": ""}).bind == ""
    with pytest.raises(ValueError, match=r"a loss bound must lie in \[0, 1\), got nan"):
        LossBound(math.nan)


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (Range(0, 10), (0, 10, 5), (-1, 11, math.nan, True, "5", None, 10**400), "0..10"),
        (Range(0, 1, below=True), (0, 0.99), (1, math.nan, math.inf), "[0, 1)"),
        (Range(0, 1e9, above=True), (1e-9, 1e9), (0, math.inf), "(0, 1000000000]"),
        (Range(0.0, math.inf, infinite=True), (0, 1e300, math.inf), (-1, -math.inf, math.nan), "[0, inf] or be inf"),
    ],
)
def test_ranges(allowed, inside, outside, words):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == words


def test_addresses():
    with pytest.raises(ValueError, match="ports are 1 to 65535"):
        HostPort(least_port=1).check("server", "host:0")
    with pytest.raises(ValueError, match="server must be host:port, got 5"):
        HostPort().check("server", 5)
