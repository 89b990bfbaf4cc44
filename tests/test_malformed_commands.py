# SPDX-License-Identifier: Apache-2.0
"""Command lines that cannot work end in a message and a status, soon, and never in a traceback."""

import io
import json
import os
import shlex
import time
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise

import pytest

from dlcp.cli import COMMANDS, main

HUGE = "9" * 5000
BAD_WHOLE = ("x", "''", "nan", "inf", "-1", "1.5", "1e9", HUGE, "0x")
BAD_REAL = ("x", "''", "nan", "inf", "-inf", "-1", "1e400", HUGE)
BAD_FILES = ("nowhere", "{folder}", "{binary}", "{empty}", "{bomb}", "{nested}", "{list}", "{digits}", "{wrong}", "''")
FACTORY = "sim profile tests.nowhere:f --output {new}"


def each(prefix, words, suffix=""):
    """Return a command line for each word."""
    return [f"{prefix} {word} {suffix}".rstrip() for word in words]


LINES = [
    # Unknown words.
    *("nothing", "''", "--nothing", *(f"{name} --nothing-of-the-kind" for name in COMMANDS)),
    *("train", "launch", "live", "trace", "server", "sim", "fabric", "testbed", "bench", "switch"),
    *("sim nothing", "fabric nothing {folder}", "testbed nothing", "bench nothing"),
    # Training: what torchrun is given is its own.
    *("train script.py", "train --", "train -- nowhere.py", "train -- -m", "train -- {folder}"),
    *each("train --option", ("''", "=", "loss_bound", "nothing=1", "job=", "job=" + hex(1 << 90)), "-- {script}"),
    *each("train --option", [f"loss_bound={word}" for word in ("x", "nan", "-1", "1", "inf")], "-- {script}"),
    *each("train --option", [f"deadline_s={word}" for word in (*BAD_REAL, "0") if word != "''"], "-- {script}"),
    *each("train --option", [f"bind={word}" for word in (":1", "a:b", "a:65536", "::1", f"a:{HUGE}")], "-- {script}"),
    *each("train --measure --steps", ("x", "0", "-1", "1", HUGE), "-- {script}"),
    *each("train --summary", ("{folder}", "{binary}/file", "nowhere/file"), "-- {script}"),
    *each("train --trace", ("{folder}", "nowhere/file"), "-- {script}"),
    *each("train --live", ("x:y", "127.0.0.1:65536", "127.0.0.1:-1", f"127.0.0.1:{HUGE}"), "-- {script}"),
    # Launching.
    *each("launch -n", (*BAD_WHOLE, "0"), "-- true"),
    *("launch -n 1", "launch -n 1 --", "launch -n 1 -- nowhere-at-all", "launch -n 1 -- ''"),
    *each("launch -n 1 --nodes", ("0", "-1", "x", HUGE), "--master h:1 -- true"),
    *each("launch -n 1 --nodes 2 --node", ("2", "-1", "x"), "--master h:1 -- true"),
    *each("launch -n 1 --master", ("h", ":1", "h:", "h:x", "h:0", "h:65536", f"h:{HUGE}"), "-- true"),
    # Doctor.
    *each("doctor --packets", (*BAD_WHOLE, "0")),
    *each("doctor --seconds", (*BAD_REAL, "0"), "--listen 127.0.0.1:0"),
    *each("doctor --listen", (":99999", "h:x", "203.0.113.7:5000", f"h:{HUGE}", "256.1.1.1", "a..b")),
    # Live page and traces.
    *each("live {folder} --listen", ("x", "h:x", "127.0.0.1:65536", f"127.0.0.1:{HUGE}", "203.0.113.7:80")),
    *("trace {folder}", "trace nowhere --out {new}", "trace {folder} --out {new}", "trace {binary} --out {new}"),
    *each("trace --out {new}", [f"{{traces}}/{name}" for name in ("cut", "list", "keys", "types", "deep", "digits")]),
    *("trace --out {folder} {traces}/good", "trace --out nowhere/file {traces}/good"),
    # Parameter server.
    *each("server --bind", ("''", ":1", "h:x", "h:0", "h:65536", f"h:{HUGE}", "203.0.113.7:1")),
    *each("server --bind 127.0.0.1:1 --advertise", (":1", "h:x", "h:65536")),
    *each("server --bind 127.0.0.1:1 --secret-file", ("nowhere", "{folder}", "{empty}")),
    *each("server --bind 127.0.0.1:1 --tls", ("nowhere", "{folder}", "{empty}")),
    *each("server --bind 127.0.0.1:1 --report", ("{folder}", "nowhere/file")),
    "server --bind 127.0.0.1:1 --workers 127.0.0.1:9",
    # Demo and testbed.
    *each("demo --loopback --steps", (*BAD_WHOLE, "0")),
    *each("demo --loopback --rate-mbps", (*BAD_REAL, "0")),
    *each("demo --loopback --depth", (*BAD_WHOLE, "0")),
    *each("demo --loopback --seed", ("x", "-1", HUGE)),
    *each("demo --loopback --burst-seconds", (*BAD_REAL, "0")),
    *each("demo --loopback --loss-bound", ("nan", "1", "-0.1")),
    *("demo --loopback --only nothing", "demo --loopback --optimizer none", "demo --loopback --out {binary}"),
    *each("testbed run --steps", ("0", "-1", "x", HUGE)),
    *each("testbed up --rate-mbps", ("0", "nan", "inf", "x")),
    *each("testbed up --depth", ("0", "-1", "x")),
    *each("testbed up --fabric", BAD_FILES),
    *("testbed up --name ''", "testbed up --name ../../x", "testbed down --name a/b", f"testbed status --name {HUGE}"),
    # Benchmarks.
    *each("bench allreduce --ranks", (*BAD_WHOLE, "0", "1")),
    *each("bench allreduce --megabytes", (*BAD_REAL, "0")),
    *each("bench allreduce --sizes 8", ("0", "3", "x", "-4", "''", "1TB", "17GiB", HUGE)),
    *each("bench allreduce --factor", ("1", "x", "-2", HUGE)),
    *each("bench allreduce --iterations", ("0", "-1", "x", HUGE)),
    *each("bench allreduce --warm-up", ("-1", "x", HUGE)),
    *each("bench allreduce --json", ("{folder}", "nowhere/file")),
    *("bench allreduce --begin 1MB --end 1KB", "bench allreduce --device none", "bench allreduce --option nothing=1"),
    *each("bench", ("loss", "loss --percent 1", "step", "tags")),
    # Switch.
    *each(
        "switch --hosts 2 --rate-bps",
        ("x", "''", "nan", "inf", "-1", "=1", "1=inf", "9=1000", f"1={HUGE}", "-1=5", "x=5"),
    ),
    *each("switch --hosts 2 --depth-packets", ("x", "''", "nan", "inf", "-1", "1e300", "9=1", "1=")),
    *each("switch --hosts", (*BAD_WHOLE, "0", "251")),
    *each("switch --counters-every", ("0", "nan", "inf", "x"), "--hosts 2"),
    *each("switch --device-id", ("0", "x", HUGE), "--hosts 2 --p4runtime 0 --insecure"),
    *each("switch --hosts 2 --p4runtime", ("h:x", "127.0.0.1:65536", f"127.0.0.1:{HUGE}", "::1"), "--insecure"),
    *each(
        "switch --port",
        ("''", "1", "1=wire", "x=loopback", "1=packet:nowhere0", f"{HUGE}=loopback"),
        "--entries {entries}",
    ),
    *each("switch --fabric", BAD_FILES),
    *each("switch --hosts 2 --program", BAD_FILES),
    *each("switch --port 1=loopback --entries", BAD_FILES),
    *each("switch --hosts 1 --write-entries", ("{folder}", "nowhere/file")),
    *each("switch --watch --counters", ("{folder}", "{binary}", "{empty}", "{list}", "{nested}")),
    *("switch --watch", "switch --hosts 2 --name nothing", "switch --hosts 2 --tls-cert {binary}"),
    "switch --hosts 2 --p4runtime 0 --tls-cert {binary} --tls-key {binary} --tls-ca nowhere",
    # Fabrics.
    *each("fabric check", BAD_FILES),
    *each("fabric plan", ("nowhere", "{folder}", "{bomb}")),
    *each("fabric apply --election-id", ("0", "-1", "x", HUGE), "{list}"),
    *each("fabric watch --every", ("0", "nan", "inf", "x"), "{list}"),
    *("fabric check {list} --program nowhere", "fabric status {empty}"),
    # Simulator.
    *each("sim run", BAD_FILES),
    *each("sim run slow_port --csv", ("{binary}", "{binary}/folder")),
    *each("sim play slow_port --quick --output {new} --step", BAD_WHOLE),
    "sim play slow_port --quick --output {folder}",
    *each("sim new {new}.yaml --yes --workers", (*BAD_WHOLE, "0", "1", "65537")),
    *each("sim new {new}.yaml --yes --rate-gbps", (*BAD_REAL, "0")),
    *("sim new {new}.yaml", "sim new {folder} --yes", "sim new nowhere/a.yaml --yes", "sim new '' --yes"),
    *each("sim run --seed", ("x", "-1", "nan", HUGE), "architectures"),
    *each("sim run --point", ("x", "x=y", "=", "''"), "architectures"),
    *each("sim sweep --processes", ("0", "-1", "x", HUGE), "architectures"),
    *("sim sweep nothing", "sim report nothing", "sim all nothing"),
    *each("sim compare {folder}", ("nowhere", "{binary}", "{list}")),
    *each("sim compare {wrong}", ("{wrong}", "{bomb}", "{nested}", "{digits}", "{binary}")),
    "sim compare {metrics_text} {metrics_text}",
    *each("sim compare {folder} {folder} --above", ("x", "nan", "inf", "-1")),
    *each("sim profile tests.nowhere:f --output {new} --input", ("''", "x", "0", "3,,4", "-1", f"3,{HUGE}")),
    *each(
        "sim profile --input 3 --output {new}",
        ("nowhere", "nowhere:f", "os:nothing", "''", ":f", "os:sep", "os:getcwd"),
    ),
    "sim profile os:getcwd --input 3 --output nowhere/file",
    *each("sim profile os:getcwd --input 3 --output {new} --batch", ("0", "x", HUGE)),
]
ABOUT = {"rank": 0, "process_rank": 0, "host": "h", "clock": "c", "began_unix_ns": 1, "began_ns": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the files that the lines name, by their names there."""
    folder = tmp_path_factory.mktemp("files")
    names = "abcdefgh"
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise(names)
    )
    texts = {
        "empty": "",
        "bomb": bomb,
        "nested": "[" * 50_000 + "]" * 50_000,
        "list": "[1, 2, 3]\n",
        "digits": f'{{"name": {HUGE}, "seed": {HUGE}}}\n',
        "wrong": '{"name": [], "switches": "many", "hosts": {"a": null}, "setting": 5, "entries": {}, "metrics": []}\n',
        "script": "raise SystemExit(0)\n",
        "entries": "{}\n",
        "metrics_text": '{"metrics": {"a": "b"}}\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    first = json.dumps(ABOUT) + "\n"
    timelines = {
        "cut": first + "5,applied\n",
        "list": "[1, 2]\n",
        "keys": '{"rank": 0}\n',
        "types": json.dumps({**ABOUT, "began_ns": "x"}) + "\n",
        "deep": "[" * 50_000 + "]" * 50_000 + "\n",
        "digits": first + f"{HUGE},applied,1,2\n",
        "good": first + "5,applied,1,2\n",
    }
    for name, text in timelines.items():
        (folder / "traces" / name).mkdir(parents=True)
        (folder / "traces" / name / "rank-0.timeline").write_text(text)
    (folder / "folder").mkdir()
    return {path.name: str(path) for path in folder.iterdir()} | {"new": str(folder / "new")}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_there_are_many_lines():
    assert len(LINES) == len(set(LINES)) >= 150
    assert {line.split()[0] for line in LINES} >= set(COMMANDS)


@pytest.mark.parametrize("line", [pytest.param(line, id=line[:60]) for line in LINES])
def test_what_cannot_work_is_refused_in_a_few_words(line, files):
    argv = [word.format(**files) for word in shlex.split(line)]
    out, err = io.StringIO(), io.StringIO()
    began_s = time.monotonic()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as ended:  # argparse's
            status = ended.code
    said = err.getvalue()
    assert status in (1, 2), said[-500:]
    assert said.strip(), "it says why"
    assert "Traceback" not in out.getvalue() + said
    assert len(said) < 8000
    assert time.monotonic() - began_s < 60, "nothing is waited for; the rest is for a busy machine"


def test_the_lines_without_their_mistakes_are_taken(files, capsys):
    assert main(["trace", files["traces"] + "/good", "--out", files["new"]]) == 0


def test_a_switch_that_does_not_start_is_said_in_a_line(monkeypatch, capsys):
    from dlcp.demo import run
    from dlcp.switch.built_in import SwitchProcessError

    def taken(*_):
        raise SwitchProcessError("the switch did not start: is another one running?")

    monkeypatch.setattr(run, "run_series", taken)
    assert main(["demo", "--loopback"]) == 1
    assert capsys.readouterr().err == "dlcp demo: the switch did not start: is another one running?\n"
