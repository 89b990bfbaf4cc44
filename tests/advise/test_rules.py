# SPDX-License-Identifier: Apache-2.0
"""Settings follow from figures: different ones on clean and on congested networks, alike on all ranks, with reasons."""

import json
from dataclasses import replace

import pytest

from dlcp.cli import main
from dlcp.commands import advise as command
from dlcp.convergence import COST_OF_DEFERRAL, COST_OF_DEFERRAL_TO_ALL, steps_factor
from dlcp.train import advice
from dlcp.tuning import rules
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
    assert "drops the least important packets" in why(CONGESTED, "protected_share")


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
        ({"rates_bps": {}}, "no path was full"),
        ({"wanting": 0.0}, "no path was full"),
        ({"rates_bps": dict.fromkeys(range(4), 1e11)}, "steps wait for something else"),
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
    assert "it must be faster by more than" in why(close, "collective"), "a ring that is a little faster is no reason"


def test_figures_that_cannot_be_are_refused():
    for wrong in ({"step_s": 0.0}, {"waited_s": 0.2}, {"ranks": 0}):
        with pytest.raises(ValueError, match="figures must be"):
            replace(CLEAN, **wrong)


SLOW = replace(CONGESTED, rates_bps={0: 9e7, 1: 9e7, 2: 9e7, 3: 3e7})
FP16 = Settings(compression="fp16")


def test_deferral_is_advised_where_the_accuracy_comes_sooner_and_by_how_much():
    advice_found = decide(SLOW, FP16)
    assert advice_found.settings.deferral_bound == 0.75
    # Four ranks, the slow one without a shard: its port has a buffer to carry at a third of the others' rate, half of
    # which takes 1.5 buffers' time instead of 3, longer than the 1.33 of the others. The step waits 1.8 of its 2 s.
    factor = steps_factor(COST_OF_DEFERRAL, 0.5)
    assert (advice_found.steps_factor, advice_found.given_steps_factor) == (pytest.approx(factor), 1)
    said = why(SLOW, "deferral_bound", FP16)
    assert "rank 3 receives 3.0 times more slowly" in said
    assert "deferring 50% of a step's packets shortens it from 2000.0 to 1100.0 ms" in said
    assert f"up to {factor:.2f} times as many steps" in said
    assert f"{2.0 / (1.1 * factor):.2f} times as fast overall" in said


def test_through_a_server_deferral_shortens_both_directions():
    through_server = replace(FP16, collective="server")
    assert chosen(SLOW, through_server).deferral_bound == 0.75
    factor = steps_factor(COST_OF_DEFERRAL_TO_ALL, 0.5)
    assert f"{2.0 / (1.1 * factor):.2f} times as fast overall" in why(SLOW, "deferral_bound", through_server)
    begun = replace(through_server, deferral_bound=0.9)
    assert decide(SLOW, begun, begun, most_deferred=0.9).settings.deferral_bound in (0, 0.9), "which the server has"


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        ({"waited_s": 0.3}, FP16, "times as long, so deferral gains nothing"),
        ({"gradient_bytes": 500_000}, FP16, "times as long, so deferral gains nothing"),
        ({"rates_bps": dict.fromkeys(range(4), 1e8)}, FP16, "no rank's port was found to be far slower"),
        ({"rates_bps": {0: 9e7, 3: 3e7}}, FP16, "no rank's port was found to be far slower"),
        ({}, Settings(compression="topk:0.01"), "topk:0.01 already leaves values out"),
        ({"wanting": 0.0}, replace(FP16, collective="server"), "not congested: nothing would be deferred"),
        ({"ranks": 1}, FP16, "one rank exchanges nothing"),
    ],
)
def test_where_no_deferral_is_advised_it_is_said_why(change, given, reason):
    figures = replace(SLOW, **change)
    assert chosen(figures, given).deferral_bound == 0
    assert reason in why(figures, "deferral_bound", given)


def test_deferral_that_was_not_measured_so_far_is_not_advised(monkeypatch):
    monkeypatch.setattr(rules, "steps_factor", lambda what, share: None if share else 1.0)
    assert chosen(SLOW, FP16).deferral_bound == 0
    assert "was not measured that far" in why(SLOW, "deferral_bound", FP16)
    beyond = decide(SLOW, replace(FP16, deferral_bound=0.9))
    assert beyond.as_json()["given_steps_factor"] is None
    assert beyond.settings.deferral_bound == 0


def test_what_deferral_has_cured_is_no_reason_to_take_it_back():
    given = replace(FP16, deferral_bound=0.75)
    cured = replace(SLOW, step_s=1.1, waited_s=0.9)  # as foreseen
    assert decide(cured, given, given, most_deferred=0.75).settings.deferral_bound == 0.75
    assert "from 2000.0 to 1100.0 ms" in next(c.why for c in decide(cured, given, given).choices if c.value == 0.75)
    assert decide(cured, given, FP16, most_deferred=0.75).settings.deferral_bound == 0.75
    assert decide(cured, FP16, FP16, most_deferred=0.0).settings.deferral_bound == 0, "it has not been allowed"
    quiet = replace(SLOW, rates_bps={})
    assert decide(quiet, given, FP16, most_deferred=0.75).settings.deferral_bound == 0.75, "ranks then defer nothing"


def test_fewer_bytes_come_first_and_deferral_is_judged_by_what_is_left():
    both = decide(SLOW)
    assert both.settings.compression == COMPRESSION
    assert "from 1100.0 to 650.0 ms" in why(SLOW, "deferral_bound")


def test_a_loss_that_takes_more_steps_than_sending_it_again_takes_time_is_not_allowed(monkeypatch):
    figures = replace(CONGESTED, worst=0.2, wanting=0.1)
    assert chosen(figures).loss_bound == 0.1, "2 % more steps, by what papers say"
    monkeypatch.setattr(rules, "steps_factor", lambda what, share: 1 + 2 * share)
    assert chosen(figures).loss_bound == 0
    assert "takes 1.20 times as many steps to the same accuracy" in why(figures, "loss_bound")


def test_a_trial_is_judged_by_the_time_to_accuracy():
    found = decide(SLOW, FP16)
    won, lost = (advice.judge(found, [2.0] * 5, [seconds] * 5) for seconds in (1.1, 1.6))
    assert won["tried"]["accuracy_ratio"] == pytest.approx(2.0 / 1.1 / found.steps_factor)
    assert won["settings"]["deferral_bound"] == 0.75
    assert lost["settings"] == {}, "steps are shorter, but not by as much as there are more of them"
    said = "\n".join(advice.as_lines(lost))
    assert "1.25 times as fast" in said
    assert f"reaches it {1.25 / found.steps_factor:.2f} times as fast" in said
    assert "leave everything as it is" in said


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
        (["--measured", "x.json", "--", "script.py"], "leave the script out"),
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
    times = {"default_step_s": 2.0, "advised_step_s": 1.2, "ratio": 2.0 / 1.2, "accuracy_ratio": 2.0 / 1.2}
    assert found["tried"] == {"steps": 4, **times}
    assert found["settings"] == decide(CONGESTED).changes
    assert (asked["torchrun"], asked["script"]) == (["--nproc-per-node", "4"], ["script.py", "--lr", "1"])
    assert (asked["plan"].measure_steps, asked["plan"].advise) == (30, True)


def test_where_nothing_was_measured_the_status_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command, "launch", lambda *_: (0, []))
    assert main(["advise", "--", "script.py"]) == 1
    assert "nothing was measured" in capsys.readouterr().err
