# SPDX-License-Identifier: Apache-2.0
"""Settings follow from figures: different ones on clean and on congested networks, alike on all ranks, with reasons."""

import json
from dataclasses import replace

import pytest

from dlcp.cli import main
from dlcp.commands import advise as command
from dlcp.train import advice
from dlcp.tuning.rules import BOUNDS, COMPRESSION, FEW_PROTECTED, Figures, Settings, decide

CLEAN = Figures(4, 4, 20_000_000, 0.1, 0.002, packets=100_000, protected=0.45, rates_bps=dict.fromkeys(range(4), 9e9))
CONGESTED = replace(
    CLEAN,
    step_s=2.0,
    waited_s=1.8,
    wanting=0.02,
    worst=0.06,
    spared=0.95,
    rates_bps=dict.fromkeys(range(4), 1e8),
)
BLIND = replace(CONGESTED, worst=0.04, spared=0.55)


def chosen(figures, given=None, now=None):
    return decide(figures, given, now).settings


def why(figures, option, given=None):
    return next(choice.why for choice in decide(figures, given).choices if choice.option == option)


def test_a_clean_network_is_given_exact_averages_and_nothing_else():
    assert chosen(CLEAN) == Settings(loss_bound=0.0)
    assert "0.00% of 100,000 packets did not arrive at first" in why(CLEAN, "loss_bound")
    assert "less than 5%" in why(CLEAN, "compression")


def test_a_congested_network_is_given_a_bound_and_fewer_bytes():
    settings = chosen(CONGESTED)
    assert settings == Settings(loss_bound=0.1, compression=COMPRESSION, collective=settings.collective)
    assert "2.00% of 100,000 packets" in why(CONGESTED, "loss_bound")
    assert "half the bytes save 900.0 ms" in why(CONGESTED, "compression")
    assert "drops what matters least" in why(CONGESTED, "protected_share")


def test_classes_follow_from_whom_the_network_spares():
    assert chosen(BLIND).protected_share == FEW_PROTECTED
    assert "does not spare them" in why(BLIND, "protected_share")
    assert chosen(replace(BLIND, worst=0.3)).protected_share == -1, "over the bound nothing helps"


@pytest.mark.parametrize(("worst", "bound"), [(0.0, 0.01), (0.01, 0.01), (0.011, 0.02), (0.05, 0.05), (0.4, 0.1)])
def test_the_bound_is_as_tight_as_passes_over_nearly_all_messages(worst, bound):
    assert bound in BOUNDS
    assert chosen(replace(CONGESTED, worst=worst)).loss_bound == bound


def test_what_the_user_has_set_is_not_exceeded_nor_taken_back():
    given = Settings(loss_bound=0.02, compression="topk:0.01", collective="server")
    settings = chosen(CONGESTED, given)
    assert settings == given
    assert "no more than 2.0% has been allowed" in why(CONGESTED, "loss_bound", given)


def test_what_has_been_cured_is_not_taken_back():
    now = chosen(BLIND)
    cured = replace(BLIND, waited_s=0.01, spared=1.0)
    assert chosen(cured, Settings(), now).compression == COMPRESSION
    assert chosen(cured, Settings(), now).protected_share == FEW_PROTECTED
    quiet = replace(cured, wanting=0.0005)
    assert chosen(quiet, Settings(), now).loss_bound > 0, "between the thresholds all stays"
    assert chosen(quiet, Settings(), replace(now, loss_bound=0.0)).loss_bound == 0
    assert chosen(replace(cured, wanting=0.0), Settings(), now).loss_bound == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hosts": 1}, "through memory"),
        ({"rates_bps": {}}, "no path was found to be full"),
        ({"wanting": 0.0}, "no path was found to be full"),
        ({"rates_bps": dict.fromkeys(range(4), 1e11)}, "it is not bytes that steps wait for"),
        ({"waited_s": 0.15, "step_s": 0.4, "gradient_bytes": 40_000_000, "rates_bps": {0: 5e9}}, "casting them takes"),
    ],
)
def test_fewer_bytes_are_chosen_only_where_bytes_are_what_steps_wait_for(change, reason):
    figures = replace(CONGESTED, **change)
    assert chosen(figures).compression == ""
    assert reason in why(figures, "compression")


def test_many_ranks_on_few_hosts_go_around_a_ring():
    figures = replace(CLEAN, ranks=16, hosts=2, rates_bps={})
    assert chosen(figures).collective == "ring"
    assert "16 ranks on 2 hosts: direct about" in why(figures, "collective")
    assert chosen(replace(CLEAN, ranks=2, hosts=2)).collective == "direct"
    close = replace(CLEAN, ranks=4, hosts=4, rates_bps={0: 9e7, 1: 8.7e7, 2: 9.1e7, 3: 8.8e7})
    assert chosen(close).collective == "direct"
    assert "it has to win by more than" in why(close, "collective"), "a ring that is a little faster is no reason"


def test_figures_that_cannot_be_are_refused():
    for wrong in ({"step_s": 0.0}, {"waited_s": 0.2}, {"ranks": 0}):
        with pytest.raises(ValueError, match="figures must be"):
            replace(CLEAN, **wrong)


def test_a_trial_has_the_last_word():
    chosen = decide(CONGESTED)
    assert advice.judge(chosen, [2.0] * 5, [1.0] * 5)["settings"] == chosen.changes
    assert advice.judge(chosen, [2.0] * 5, [2.01] * 5)["settings"] == chosen.changes, "noise"
    refused = advice.judge(chosen, [1.0] * 5, [1.3] * 5)
    assert refused["settings"] == {}
    assert "leave everything as it is" in advice.as_lines(refused)[-1]


def test_advice_from_a_saved_measurement(tmp_path, capsys, monkeypatch):
    for name in ("DLCP_LOSS_BOUND", "DLCP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    found = {}
    for name, figures in {"clean": CLEAN, "congested": CONGESTED}.items():
        file, again = tmp_path / f"{name}.json", tmp_path / f"{name}-again.json"
        file.write_text(json.dumps(figures.as_json()))
        assert main(["advise", "--json", "--measured", str(file), "--save", str(again)]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert json.loads(again.read_text()) == found[name]
        assert Figures.of_json(found[name]["figures"]) == figures
        assert main(["advise", "--measured", str(again)]) == 0
        text = capsys.readouterr().out
        assert "DLCP's advice for 4 ranks on 4 hosts with 20.0 MB" in text
        for option, value in found[name]["settings"].items():
            assert f"--option {option}={value:g}" in text if option == "loss_bound" else option in text
    assert found["clean"]["settings"] == {"loss_bound": 0.0}
    assert found["congested"]["settings"]["compression"] == COMPRESSION


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--measured", "nowhere.json"], "nowhere.json"),
        (["--measured", "x.json", "--", "script.py"], "takes no script"),
        (["--steps", "3", "--", "script.py"], "--steps must be at least"),
        ([], "no script"),
    ],
)
def test_wrong_use_is_status_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["advise", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_measurement_is_status_2(tmp_path, capsys):
    file = tmp_path / "other.json"
    for content in ("{", "[]", '{"figures": {"ranks": 2}}'):
        file.write_text(content)
        assert main(["advise", "--measured", str(file)]) == 2
        assert str(file) in capsys.readouterr().err


def test_a_script_is_measured_and_its_advice_told(monkeypatch, capsys):
    chosen = decide(CONGESTED).as_json()
    seconds = {"none": [0.2] * 6, "framework": [2.5] * 6, "dlcp": [2.0] * 6, "advised": [1.2] * 4}
    measured = {"model": "Net", "gradient_bytes": 20_000_000, "backend": "gloo", "seconds": seconds, "why_not": None}
    asked = {}

    def launch(torchrun, script, options, plan):
        asked.update(torchrun=torchrun, script=script, options=options, plan=plan)
        return 0, [{"rank": 0, "ranks": 4, "measured": measured | {"advice": chosen}}]

    monkeypatch.setattr(command, "launch", launch)
    assert main(["advise", "--json", "--steps", "30", "--nproc-per-node", "4", "--", "script.py", "--lr", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tried"] == {"steps": 4, "default_step_s": 2.0, "advised_step_s": 1.2, "ratio": 2.0 / 1.2}
    assert found["settings"] == decide(CONGESTED).changes
    assert (asked["torchrun"], asked["script"]) == (["--nproc-per-node", "4"], ["script.py", "--lr", "1"])
    assert (asked["plan"].measure_steps, asked["plan"].advise) == (30, True)


def test_where_nothing_was_measured_the_status_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command, "launch", lambda *_: (0, []))
    assert main(["advise", "--", "script.py"]) == 1
    assert "nothing was measured" in capsys.readouterr().err
