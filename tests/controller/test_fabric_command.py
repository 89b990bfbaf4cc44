# SPDX-License-Identifier: Apache-2.0
"""``dlcp fabric`` as a person calls it."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dlcp.cli import main
from dlcp.commands.common import DIFFERS
from dlcp.switch import IngressEvent, event_index
from tests.controller.switches import running
from tests.transport.free_ports import free_port
from tests.waiting import until

EXAMPLES = Path(__file__).parents[2] / "controller/examples"


@pytest.fixture(scope="module")
def builtin():
    with running("builtin") as started:
        yield started


@pytest.fixture
def file(builtin, tmp_path):
    path = tmp_path / "star.yaml"
    text = (EXAMPLES / "star.yaml").read_text()
    path.write_text(text.replace("127.0.0.1:9559", builtin.address))
    return path


def test_check_shows_what_becomes_of_each_switch(capsys):
    assert main(["fabric", "check", str(EXAMPLES / "leaf-spine.yaml")]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["leaf1", "builtin", "127.0.0.1:9561", "plain", "4", "2", "4", "1", "94"] in rows
    assert ["spine2", "builtin", "127.0.0.1:9564", "plain", "2", "0", "4", "0", "88"] in rows


def test_a_wrong_description_is_one_line_that_says_where(file, capsys):
    file.write_text(file.read_text().replace("a: h2,", "a: h22,"))
    for command in ("check", "plan", "apply", "watch", "status"):
        assert main(["fabric", command, str(file)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "star.yaml:19: links[1].a: unknown host 'h22'; did you mean h2" in line


def test_plan_apply_and_status_in_turn(builtin, file, capsys):
    builtin.restart()
    assert main(["fabric", "plan", "--all", str(file)]) == DIFFERS
    planned = capsys.readouterr().out
    assert "install program" in planned
    assert "insert ipv4_route ipv4_dst=10.0.0.3 -> group 3" in planned
    assert main(["fabric", "apply", str(file)]) == 0
    assert "s1: program installed, 94 inserted, 0 unchanged; 3 requests" in capsys.readouterr().out
    assert main(["fabric", "apply", str(file)]) == 0
    assert capsys.readouterr().out == "s1: nothing to do, 94 entries are correct\n"
    assert main(["fabric", "plan", str(file)]) == 0
    capsys.readouterr()
    file.write_text(file.read_text().replace("ecn_at: 0.27", "ecn_at: 0.5"))
    assert main(["fabric", "plan", str(file)]) == DIFFERS
    assert "s1: 7 to modify, 87 unchanged" in capsys.readouterr().out
    assert main(["fabric", "status", str(file)]) == 0
    assert "7 changes due" in capsys.readouterr().out


def test_counters_are_watched_without_a_terminal(builtin, file):
    builtin.restart()
    assert main(["fabric", "apply", str(file)]) == 0
    counter = builtin.loop.program.counters["ingress_events"]
    dropped = event_index(1, 6, 5, IngressEvent.POLICY_DROP)
    words = [sys.executable, "-m", "dlcp.cli", "fabric", "status", "--watch", "--every", "0.1", str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        try:
            for _ in range(2):
                counter[dropped] = counter[dropped].packets + 7, 0
                assert watching.stdout.readline().endswith("s1:1 (h1) queue 6: policy drops 7\n")
        finally:
            watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0


def test_plan_and_status_as_json(builtin, file, capsys):
    builtin.restart()
    assert main(["fabric", "plan", "--json", str(file)]) == DIFFERS
    planned = json.loads(capsys.readouterr().out)["switches"]["s1"]
    assert planned["install_program"]
    assert len(planned["changes"]) == 94
    assert {"action": "insert", "entity": "ipv4_route ipv4_dst=10.0.0.3 -> group 3"} in planned["changes"]
    assert main(["fabric", "status", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["switches"]["s1"]["counters"] is None
    assert main(["fabric", "apply", str(file)]) == 0
    capsys.readouterr()
    assert main(["fabric", "plan", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "switches": {"s1": {"install_program": False, "changes": [], "unchanged": 94}}
    }
    assert main(["fabric", "status", "--json", str(file)]) == 0
    state = json.loads(capsys.readouterr().out)["switches"]["s1"]
    assert state["changes_due"] == 0
    assert state["counters"] == []


def test_a_switch_that_does_not_answer_is_an_error_that_names_it(file, builtin, capsys):
    file.write_text(file.read_text().replace(builtin.address, f"127.0.0.1:{free_port()}"))
    for command in ("plan", "apply", "status"):
        assert main(["fabric", command, str(file)]) == 1
        assert "dlcp fabric: switch s1 at 127.0.0.1:" in capsys.readouterr().err
    for command in ("plan", "status"):
        assert main(["fabric", command, "--json", str(file)]) == 1
        assert "switch s1 at" in json.loads(capsys.readouterr().out)["switches"]["s1"]["error"]


def test_options_that_make_no_sense_are_refused(file, capsys):
    assert main(["fabric", "watch", str(file), "--metrics", "here"]) == 2
    assert main(["fabric", "check", str(file), "--program", str(file.parent)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["dlcp fabric"] * 2
    for option in (["watch", str(file), "--every", "0"], ["apply", str(file), "--election-id", "0"]):
        with pytest.raises(SystemExit) as refused:
            main(["fabric", *option])
        assert refused.value.code == 2
        assert f"argument {option[2]}: must lie in" in capsys.readouterr().err


def test_watch_answers_prometheus_until_it_is_told_to_stop(builtin, file):
    builtin.restart()
    metrics = f"127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", "dlcp.cli", "fabric", "watch", str(file), "--metrics", metrics, "--every", "0.2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout.readline().startswith("watching: s1; metrics at http://127.0.0.1:")
            inserted = 'dlcp_switch_changes_total{action="insert",switch="s1"} 94.0'
            until(lambda: inserted in scrape(metrics), lambda: scrape(metrics))
            watch.send_signal(signal.SIGTERM)
            assert watch.wait(20) == 0
        finally:
            watch.kill()
        assert "switch s1: program installed, 94 inserted" in watch.stderr.read()


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()
