# SPDX-License-Identifier: Apache-2.0
"""Transports and disciplines of other packages run in both engines, and a wrong one is refused with its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

MODULE = """
from dlcp.sim.network.disciplines import OwnDiscipline, Admission
from dlcp.sim.transports.specs import OwnTransport

MARK, DROP = int(Admission.MARK), int(Admission.DROP)


class Gentle(OwnTransport, frozen=True, tag="gentle"):
    ecn = True
    decrease: float = 0.01

    @staticmethod
    def on_ack(s, t, marked, rtt, number, now, limited):
        if marked != 0:
            s.window = max(1.0, s.window * (1.0 - t.decrease))
        elif limited != 0:
            s.window = min(t.max_window_packets, s.window + 1.0)


class Plain(OwnTransport, frozen=True, tag="plain"):
    pass


class Calm(OwnDiscipline):
    transports = ("gentle",)


class Early(OwnDiscipline):
    transports = ("gentle",)
    settings = {"first": 5.0, "last": 100.0}

    @staticmethod
    def admit(x, own, waiting, waiting_bytes, port_bytes, chance):
        if waiting >= own[1]:
            return DROP
        return MARK if chance * (own[1] - own[0]) < waiting - own[0] else 0
"""
RUN = """
import json, sys
import numpy as np, numba
from dlcp.sim.engines import rules
from dlcp.sim.engines.network_tables import SWITCH_RULES_ROW, as_rows
from dlcp.sim.rows import STREAM_ROW
from dlcp.sim.scenario import Scenario
from dlcp.sim.experiments.scenario_run import simulate
from dlcp.sim.simulation import Simulation
import msgspec

def run(**more):
    scenario = {"topology": {"kind": "star", "hosts": 5, "host_link": {"rate_gbps": 10}}, **more,
                "patterns": [{"name": "f", "pattern": "incast", "hosts": 5, "size_bytes": 300_000, "transport": "t"}]}
    found = simulate(msgspec.convert(scenario, Scenario), engine="reference")
    return int(found.messages["end_ps"].sum()), found.counts["marks"], found.counts["drops_early"]

@numba.njit
def ack(streams, transports):
    rules.on_ack(streams[0], transports[0], 1, 1000, 5, 10, 1)

@numba.njit
def verdict(spec, packets, waiting):
    return rules.own_admission(spec[0].discipline, packets[0], spec[0].own, waiting, 0, 0, 0.5)

gentle = {name: {"transports": {"t": {"kind": "gentle", **more}}} for name, more in
          (("gentle", {}), ("harsh", {"decrease": 0.5}))}
plain, reno = ({"transports": {"t": {"kind": kind}}} for kind in ("plain", "new_reno"))
early = {"switches": {"discipline": "early", "settings": {"last": 20}}}
found = {name: run(**kind) for name, kind in gentle.items()}
found |= {"plain": run(**plain), "new_reno": run(**reno), "early": run(**gentle["gentle"], **early),
          "calm": run(**gentle["gentle"], switches={"discipline": "calm"})}
scenario = msgspec.convert({**gentle["harsh"], **early}, Scenario)
plan = Simulation(scenario, engine="reference").plan
streams = np.zeros(1, STREAM_ROW)
streams["window"] = 8.0
ack(streams, as_rows(plan.transports))
found["compiled window"] = float(streams["window"][0])
switch = as_rows([plan.switches], SWITCH_RULES_ROW)
found["compiled verdicts"] = [int(verdict(switch, streams, waiting)) for waiting in (5, 15, 20)]
print(json.dumps(found))
"""


def installed(folder: Path, points: str, module: str = MODULE) -> dict[str, str]:
    """Return an environment in which the package ``own`` is installed."""
    (folder / "own.py").write_text(module)
    described = folder / "own-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(points)
    return {**os.environ, "PYTHONPATH": str(folder)}


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=100
    )


def test_a_package_brings_a_transport_and_a_discipline(tmp_path):
    transports = "[dlcp.sim.transports]\ngentle = own:Gentle\nplain = own:Plain\n"
    done = python(RUN, installed(tmp_path, f"{transports}[dlcp.sim.disciplines]\nearly = own:Early\ncalm = own:Calm\n"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plain"] == found["new_reno"], "without rules of its own it is NewReno"
    assert found["gentle"][0] != found["harsh"][0]
    assert min(found["gentle"][1], found["harsh"][1]) > 0, "marks"
    assert found["early"][2] > 0, "drops"
    assert found["calm"][1:] == [0, 0], "neither marks nor drops"
    assert found["compiled window"] == 4.0
    assert found["compiled verdicts"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("[dlcp.sim.transports]\ndctcp = own:Gentle\n", "'dctcp' of the package own"),
        ("[dlcp.sim.transports]\nkind = own:Gentle\n", "has the tag 'gentle'; give the entry point this name"),
        (
            "[dlcp.sim.transports]\ngentle = own:Early\n",
            "is no subclass of dlcp.sim.transports.specs.OwnTransport",
        ),
        ("[dlcp.sim.disciplines]\nfifo = own:Early\n", "there is another one of this name; rename one of them"),
        ("[dlcp.sim.disciplines]\nearly = own:Late\n", "has no attribute 'Late'"),
    ],
)
def test_a_wrong_entry_point_is_refused_with_its_place(tmp_path, points, message):
    done = python("import dlcp.sim", installed(tmp_path, points))
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert "own:" in done.stderr.splitlines()[-1]


def test_too_many_settings_are_refused(tmp_path):
    settings = {f"s{number}": 0.0 for number in range(9)}
    module = (
        f"from dlcp.sim.network.disciplines import OwnDiscipline\nclass A(OwnDiscipline):\n    settings = {settings}\n"
    )
    done = python("import dlcp.sim", installed(tmp_path, "[dlcp.sim.disciplines]\na = own:A\n", module))
    assert "has 9 settings; at most 8 are allowed" in done.stderr
