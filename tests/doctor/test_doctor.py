# SPDX-License-Identifier: Apache-2.0
"""``dlcp doctor`` as a user sees it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlcp import doctor
from dlcp.cli import main
from dlcp.doctor import Diagnosis, Section, Status, examination
from dlcp.doctor.examination import examine_path, examine_payload, safely
from dlcp.doctor.path import open_socket
from dlcp.host.ip import IPV4
from dlcp.inputs.configuration import Setting
from tests.doctor.pathway import Pathway, listening

pytest.importorskip("torch")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def healthy(monkeypatch):
    """A machine whose every finding is known: what is tested is the page, not the machine it is tested on."""
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("examine_kernel", "examine_namespaces", "examine_python", "examine_torch"):
        finding = Diagnosis(name.removeprefix("examine_"), Status.OK, "as it should be", data={"known": True})
        monkeypatch.setattr(examination, name, lambda finding=finding: finding)


def printed(capsys, *words):
    status = main(["doctor", *words])
    return status, capsys.readouterr().out


def test_the_page_says_what_works_and_what_is_in_force(capsys, monkeypatch, healthy):
    monkeypatch.setenv("DLCP_LOSS_BOUND", "0.05")
    status, text = printed(capsys)
    assert status == 0
    for heading in ("Machine", "Python", "UDP", "Options"):
        assert re.search(rf"^{heading}$", text, re.MULTILINE)
    assert re.search(r"^  (ok|note) +receive buffer: .*of 8 MiB requested", text, re.MULTILINE)
    assert re.search(r"loss_bound += 0\.05 +DLCP_LOSS_BOUND", text)
    assert "deadline_s" not in text, "nobody chose it"
    assert re.search(r"^DLCP works here", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120
    assert re.search(r"deadline_s += \S+ +default", printed(capsys, "--all-options")[1])


def test_without_rich_the_page_is_the_same_text(capsys, monkeypatch, healthy):
    with_rich = printed(capsys)[1]
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else real(name))
    without = printed(capsys)[1]
    taken = re.compile(r".*UDP ports.*")  # other programs change these meanwhile
    assert taken.sub("", with_rich) == taken.sub("", without)


def test_json_is_for_programs(capsys, monkeypatch, healthy):
    monkeypatch.setenv("DLCP_JOB", "7")
    status, text = printed(capsys, "--json")
    found = json.loads(text)
    assert (status, found["works"]) == (0, True)
    assert [section["title"] for section in found["sections"]] == ["Machine", "Python", "UDP", "Options"]
    udp = {finding["subject"]: finding for finding in found["sections"][2]["findings"]}
    assert udp["receive buffer"]["receive_buffer_granted_bytes"] > 0
    assert udp["interface lo"]["mtu_bytes"] > 0
    options = {option["name"]: option for option in found["options"]}
    assert options["job"] == {"name": "job", "value": 7, "origin": "DLCP_JOB"}


@pytest.mark.parametrize(
    ("variables", "status", "words"),
    [
        ({"DLCP_JOB": "many"}, 1, ["missing", "DLCP_JOB must be int, got 'many'", "correct or remove it"]),
        ({"DLCP_COLLECTIVE": "server"}, 1, ["missing", "DLCP_COLLECTIVE must be", "server:HOST:PORT, got 'server'"]),
        ({"DLCP_CONFIG": "gone.toml"}, 1, ["missing", "which does not exist"]),
        ({"DLCP_LOSSBOUND": "0.1"}, 1, ["missing", "DLCP_LOSSBOUND", "did you mean DLCP_LOSS_BOUND?"]),
    ],
)
def test_options_that_are_wrong_are_told_with_a_fix(capsys, monkeypatch, healthy, variables, status, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, text = printed(capsys)
    assert found == status
    flat = re.sub(r"\s+", " ", text)
    for word in words:
        assert word in flat


def test_a_file_in_the_working_directory_is_in_force(capsys, tmp_path, healthy):
    if sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    (tmp_path / "dlcp.toml").write_text("job = 7\n")
    assert re.search(r"job += 7 +dlcp\.toml", printed(capsys)[1])


def test_what_is_needed_and_missing_decides_the_exit_status(capsys, monkeypatch, healthy):
    gone = Diagnosis("PyTorch", Status.MISSING, "not installed", "pip install 'dlcp[torch]'")
    monkeypatch.setattr(examination, "examine_torch", lambda: gone)
    status, text = printed(capsys)
    assert status == 1
    assert re.search(r"missing +PyTorch: +not installed\n +-> pip install 'dlcp\[torch\]'", text)
    assert "1 thing that DLCP needs is missing" in text


def test_what_cannot_be_examined_does_not_end_the_examination(monkeypatch):
    def examine_broken():
        raise PermissionError("not here")

    finding = safely(examine_broken)
    assert (finding.subject, finding.status) == ("broken", Status.NOTE)


def test_the_path_to_a_peer_is_part_of_the_page(capsys, monkeypatch, healthy):
    monkeypatch.setenv("DLCP_PAYLOAD_BYTES", "1440")
    with Pathway(lambda way, number, size: size > 1400) as path:
        host, port = path.address
        status, text = printed(capsys, "--peer", f"{host}:{port}", "--packets", "20")
    assert status == 0
    assert re.search(rf"^Path to {host}:{port}$", text, re.MULTILINE)
    assert re.search(r"largest packet: +1400 bytes both ways", text)
    assert re.search(r"note +packet size: +1440 bytes of values \(DLCP_PAYLOAD_BYTES\) make packets too large", text)
    assert "DLCP_PAYLOAD_BYTES=1336 on every rank" in re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("chosen", "status", "words"),
    [
        (0, Status.OK, "determined at the start: 1440 bytes"),
        (1440, Status.OK, "fit this path"),
        (8936, Status.NOTE, "make packets too large for this path"),
        (512, Status.NOTE, "this path carries 1440"),
    ],
)
def test_the_packet_size_that_was_chosen_is_compared_with_the_path(chosen, status, words):
    (finding,) = examine_payload([Setting("payload_bytes", chosen, "dlcp.toml")], 1500, "this path", IPV4)
    assert finding.status is status
    assert words in finding.text


@pytest.mark.parametrize("peer", ["127.0.0.1:1", "nowhere.invalid", "127.0.0.1:x"])
def test_a_peer_that_cannot_be_reached_is_missing(capsys, healthy, peer):
    status, text = printed(capsys, "--peer", peer)
    assert status == 1
    assert re.search(r"missing +answer: ", text)


def test_listening_says_what_to_run_on_the_other_machine():
    with open_socket("127.0.0.1") as sock:
        port = sock.getsockname()[1]
    run = [sys.executable, "-m", "dlcp.cli", "doctor", "--listen", f"127.0.0.1:{port}", "--seconds", "20"]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as listener:
        try:
            assert listener.stdout.readline() == f"listening at UDP port {port} of 127.0.0.1\n"
            told = listener.stdout.readline().removeprefix("on the other machine: dlcp ").split()
            assert told == ["doctor", "--peer", f"127.0.0.1:{port}"]
            section = examine_path(told[2], 10, [])
            assert section.findings[0].status is Status.OK
            assert listener.stdout.readline() == "answering 127.0.0.1\n"
        finally:
            listener.terminate()


def test_an_address_that_is_taken_cannot_be_listened_at(capsys):
    with listening(open_socket("127.0.0.1")) as other:
        assert main(["doctor", "--listen", f"127.0.0.1:{other.address[1]}"]) == 1
    assert "cannot listen: UDP 127.0.0.1:" in capsys.readouterr().err


def test_unknown_words_are_refused(capsys):
    assert main(["doctor", "--nproc-per-node", "2"]) == 2
    assert "unknown: --nproc-per-node 2" in capsys.readouterr().err
    assert main(["doctor", "x"]) == 2
    assert "there is no script x" in capsys.readouterr().err


def test_the_real_machine_is_examined():
    looks = "kernel", "python", "torch", "extras"
    for look in (getattr(examination, f"examine_{name}") for name in looks):
        finding = look()
        assert finding.status is Status.OK, finding
        assert finding.data
    assert examination.examine_namespaces().status is Status.OK
    assert examination.version_of("2.13.0+cpu") == (2, 13)


def test_long_lines_are_folded_under_their_text():
    section = Section("Machine", [Diagnosis("thing", Status.NOTE, "word " * 40, "do " * 40)])
    lines = doctor.as_text([section], [], every_option=False, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.startswith(" " * 30) for line in lines[2:5])


def test_shared_memory_is_tried_and_what_prevents_it_said(monkeypatch):
    found = examination.examine_shared_memory()
    assert (found.status, found.data) == (Status.OK, {"shared_memory": True})

    def forbidden(*_):
        raise PermissionError("memfd_create is not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    refused = examination.examine_shared_memory()
    assert refused.status is Status.NOTE
    assert "memfd_create is not permitted" in refused.text
    assert "seccomp" in refused.fix
