# SPDX-License-Identifier: Apache-2.0
import pickle
import sys

import pytest

pytest.importorskip("torch")

from dlcp.torch import Options
from dlcp.values.tags import TagPolicy


def test_without_variables_the_defaults_are_in_force():
    assert Options.from_environment({}) == Options()
    assert Options.from_environment({"PATH": "/bin"}) == Options()


def test_every_simple_option_can_be_set_by_the_environment():
    chosen = Options.from_environment(
        {
            "DLCP_LOSS_BOUND": "0.25",
            "DLCP_IMMEDIATE": "1",
            "DLCP_ERROR_FEEDBACK": "0",
            "DLCP_COLLECTIVE": "server:10.0.0.9:53696",
            "DLCP_BIND": "10.0.0.1:53700",
            "DLCP_ADVERTISE": "192.0.2.1:1",
            "DLCP_JOB": "7",
            "DLCP_CONGESTION": "cubic",
            "DLCP_TAGGED": "0",
            "DLCP_PAYLOAD_BYTES": "8960",
            "DLCP_SILENCE_S": "3",
            "DLCP_DEADLINE_S": "1e2",
            "DLCP_MEET_S": "5",
            "DLCP_FALLBACK": "0",
        }
    )
    assert chosen == Options(
        loss_bound=0.25,
        immediate=True,
        error_feedback=False,
        collective="server:10.0.0.9:53696",
        bind="10.0.0.1:53700",
        advertise="192.0.2.1:1",
        job=7,
        congestion="cubic",
        tagged=False,
        payload_bytes=8960,
        silence_s=3.0,
        deadline_s=100.0,
        meet_s=5.0,
        fallback=False,
    )
    assert isinstance(chosen.silence_s, float)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("DLCP_SILENCE_S", "ten seconds", "float"),
        ("DLCP_JOB", "1.5", "int"),
        ("DLCP_JOB", "", "int"),
        ("DLCP_IMMEDIATE", "maybe", "1 or 0"),
        ("DLCP_TAGGED", "2", "1 or 0"),
    ],
)
def test_a_variable_that_holds_nonsense_is_named(name, text, wanted):
    with pytest.raises(ValueError, match=rf"{name} must be {wanted}, got '{text}'"):
        Options.from_environment({name: text})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"collective": "tree"}, "one of auto, direct, ring, server:HOST:PORT, got 'tree'"),
        ({"collective": "server"}, "one of auto, direct, ring, server:HOST:PORT, got 'server'"),
        ({"collective": "server:"}, "one of auto, direct, ring, server:HOST:PORT, got 'server:'"),
        ({"collective": "ring:10.0.0.9:1"}, "one of auto, direct, ring, server:HOST:PORT, got 'ring:10.0.0.9:1'"),
        ({"collective": "server:node9:0"}, "collective: expected host:port, got 'node9:0': ports are 1 to 65535"),
        ({"collective": 5}, "one of auto, direct, ring, server:HOST:PORT, got 5"),
        ({"job": 65536}, "job must lie in 0..65535"),
        ({"job": -1}, "job must lie in 0..65535"),
        ({"samples": 8, "combine": "adasum", "fallback": False}, "do not apply to combine 'adasum'"),
        ({"precision": 8, "combine": "adasum", "fallback": False}, "combine 'adasum' sends .* precision 8 does not"),
        ({"precision": "4", "compression": "topk:0.1"}, "compression 'topk:0.1' sends .* precision 4 does not"),
        ({"precision": 12}, "precision must be one of exact, auto, fast, 32, 16, 8, 4, got '12'"),
        ({"samples": 8, "compression": "signsgd", "fallback": False}, "do not apply to compression 'signsgd'"),
    ],
)
def test_options_that_cannot_work_are_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        Options(**fields)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression_may_name_16_bits(monkeypatch, name):
    wanted = Options(precision=16)
    variable = Options.from_environment({"DLCP_COMPRESSION": name})
    for options in (Options(compression=name), Options(compression=name, precision=16), variable):
        assert options == wanted
        assert options.terms() == wanted.terms(), "ranks agree, however each writes it"
    monkeypatch.setenv("DLCP_PRECISION", "8")
    for options in (Options(compression=name), Options().with_(compression=name)):
        assert pickle.loads(pickle.dumps(options)) == options == wanted, "arguments count first"
    monkeypatch.setenv("DLCP_COMPRESSION", name)
    assert Options(precision=4).precision == "4"
    monkeypatch.delenv("DLCP_PRECISION")
    assert [Options(compression=each).precision for each in ("", "topk:0.1")] == ["auto"] * 2


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        *(({"precision": each}, f"contradicts precision {each}: omit one") for each in ("exact", "fast", "32", 4)),
        ({"combine": "adasum", "fallback": False}, r"'adasum' .* precision 16 .* omit one .*by compression='fp16'\)"),
        ({"route": "framework"}, r"no precision 16: omit one .*by compression='fp16'\)"),
    ],
)
def test_what_contradicts_16_bits_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        Options(compression="fp16", **fields)
    variables = {f"DLCP_{name.upper()}": str(value) for name, value in fields.items()}
    with pytest.raises(ValueError, match=r"omit one .* by .*DLCP_COMPRESSION"):
        Options.from_environment({"DLCP_COMPRESSION": "fp16", **variables})


def test_the_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("DLCP_LOSS_BOUND", "0.01")
    assert Options.from_environment().loss_bound == 0.01


def test_each_option_comes_from_the_first_layer_that_sets_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dlcp.toml").write_text("loss_bound = 0.01\njob = 1\nsilence_s = 3\n")
    monkeypatch.setenv("DLCP_LOSS_BOUND", "0.02")
    monkeypatch.setenv("DLCP_JOB", "2")
    for options in (Options(0.03), Options(loss_bound=0.03), Options(loss_bound=0.03).with_(congestion="cubic")):
        assert (options.loss_bound, options.job, options.silence_s, options.meet_s) == (0.03, 2, 3.0, 30.0)
    assert Options(job=0).job == 0, "an argument counts even if it is the default"
    assert Options.from_environment({"DLCP_JOB": "7"}).loss_bound == 0.01
    monkeypatch.setenv("DLCP_PRECISION", "8")
    with pytest.raises(ValueError, match=r"no precision 8: omit one of the two \(set by DLCP_PRECISION\)"):
        Options(route="framework")


def test_pickled_options_keep_their_arguments_and_take_all_else_from_where_they_are(monkeypatch):
    monkeypatch.setenv("DLCP_TRACE", "here")
    kept = pickle.dumps(Options(job=3).with_(loss_bound=0.2))
    monkeypatch.setenv("DLCP_TRACE", "there")
    monkeypatch.setenv("DLCP_JOB", "4")
    found = pickle.loads(kept)
    assert (found.job, found.loss_bound, found.trace) == (3, 0.2, "there")
    assert found.arguments == {"job", "loss_bound"}


@pytest.mark.parametrize("name", ["secret_file", "tls"])
def test_a_secret_goes_with_pickled_options_where_nothing_else_sets_it(monkeypatch, name):
    monkeypatch.setenv(f"DLCP_{name.upper()}", "here")
    kept = pickle.dumps(Options(job=3))
    monkeypatch.setenv(f"DLCP_{name.upper()}", "there")
    assert getattr(pickle.loads(kept), name) == "there"
    monkeypatch.delenv(f"DLCP_{name.upper()}")
    found = pickle.loads(kept)
    assert (found.job, getattr(found, name)) == (3, "here")
    assert getattr(pickle.loads(pickle.dumps(found)), name) == "here"


def test_no_empty_value_hides_a_secret(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dlcp.toml").write_text("secret_file = 'of the file'\n")
    assert Options(secret_file="").secret_file == "of the file"
    monkeypatch.setenv("DLCP_SECRET_FILE", "")
    assert Options(secret_file="", tls="").with_(secret_file="").secret_file == "of the file"
    monkeypatch.setenv("DLCP_SECRET_FILE", "of the environment")
    assert Options(secret_file="").secret_file == "of the environment"
    assert Options(secret_file="given").secret_file == "given"


def test_a_collective_may_name_a_parameter_server():
    options = Options(collective="server:node9:53696")
    assert (options.algorithm, options.server) == ("server", "node9:53696")
    options = options.with_(collective="ring")
    assert (options.algorithm, options.server) == ("ring", "")


def test_transport_options_follow():
    transport = Options(payload_bytes=8960, tagged=False, congestion="cubic", silence_s=1.0, deadline_s=2.0).transport(
        4
    )
    assert (transport.payload_bytes, transport.tagged, transport.congestion) == (8960, False, "cubic")
    assert (transport.silence_s, transport.deadline_s, transport.flow_weight) == (1.0, 2.0, 0.0)
    assert Options(collective="server:10.0.0.9").transport(4).flow_weight == 0.25
    assert (Options().transport(4).paths, Options(advertise="192.0.2.1:1").transport(4).paths) == (12, 1)


BOUNDS_OF_LAYERS = "0.1, embed*=0, head.*=0.01"


def test_layers_may_have_bounds_of_their_own(tmp_path, monkeypatch):
    expected = (("embed*", 0.0), ("head.*", 0.01))
    argument = Options(loss_bound=BOUNDS_OF_LAYERS)
    variable = Options.from_environment({"DLCP_LOSS_BOUND": "0.1,embed*=0,head.*=1e-2"})
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (tmp_path / "dlcp.toml").write_text(f'loss_bound = "{BOUNDS_OF_LAYERS}"\n')
    monkeypatch.chdir(tmp_path)
    for options in (argument, variable, Options(), pickle.loads(pickle.dumps(argument))):
        assert options.bound().ratio == 0.1
        assert options.reduction().layers.rules == expected
        assert options.describe_bounds() == "10%, embed* 0%, head.* 1%"
        assert options.terms()["loss_bound"] == argument.loss_bound, "ranks agree, however each writes it"
    exact = argument.with_(precision="exact")
    assert (exact.describe_bounds(), exact.reduction().layers.rules) == ("0%", ())
    assert Options(loss_bound="0.006").loss_bound == 0.006
    assert Options(loss_bound=0.006).describe_bounds() == "0.6%"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ten percent", "loss_bound must be a number, .* such as 0.1, embed\\*=0; got 'ten percent'"),
        ("embed*=0", "loss_bound must be a number, .* got 'embed\\*=0'"),
        ("0.1, embed", "loss_bound must be a number, .* got 'embed'"),
        ("0.1, =0", "loss_bound must be a number, .* got '=0'"),
        ("0.1, 0.2", "loss_bound must be a number, .* got '0.2'"),
        ("", "loss_bound must be a number, .* got ''"),
        (True, "loss_bound must lie in .* got True"),
        (None, "loss_bound must lie in .* got None"),
        (10**400, "loss_bound must lie in .* got a number of 1329 bits"),
        ("1, embed*=0", "loss_bound must lie in \\[0, 1\\), got 1.0"),
        ("0.1, embed*=nan", "loss_bound: embed\\* must lie in \\[0, 1\\), got nan"),
        ("0.1, embed*=1", "loss_bound: embed\\* must lie in \\[0, 1\\), got 1.0"),
        ("0.1, embed*=-1, head.*=0", "loss_bound: embed\\* must lie in \\[0, 1\\), got -1.0"),
    ],
)
def test_senseless_bounds_of_layers_are_refused_by_entry(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        Options(loss_bound=text)
    if isinstance(text, str):
        with pytest.raises(ValueError, match=complaint.replace("loss_bound", "DLCP_LOSS_BOUND")):
            Options.from_environment({"DLCP_LOSS_BOUND": text})


def test_options_can_be_changed_and_pickled():
    options = Options(job=3, tag_policy=TagPolicy(memory=0.25)).with_(loss_bound=0.3)
    assert (options.job, options.loss_bound) == (3, 0.3)
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_mistyped_option_is_an_error_with_a_suggestion():
    """Otherwise it would have no effect, and nobody would know."""
    with pytest.raises(TypeError, match=r"no option 'lossbound'; did you mean loss_bound\?"):
        Options(lossbound=0.1)
    with pytest.raises(ValueError, match=r"DLCP_LOSSBOUND is set, .* did you mean DLCP_LOSS_BOUND\?"):
        Options.from_environment({"DLCP_LOSSBOUND": "0.1"})
    assert Options.from_environment({"DLCP_SECRET": "x", "DLCP_TRAIN_TASK": "{}"}) == Options()
