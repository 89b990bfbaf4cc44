# SPDX-License-Identifier: Apache-2.0
"""The ready-made alerts and dashboard name what ranks and switches really tell, in the forms that the tools read."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the live page takes the packages of the extra live")
pytest.importorskip("yaml", reason="alerts are YAML: pip install 'dlcp[fabric]'")

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dlcp.live.http_server import RANK_PHASES, RankCollector
from tests.live.snapshots import snapshot

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "dlcp" / "live" / "monitoring"
METRIC = re.compile(r"\b(dlcp_[a-z_]+)\b(?:\{([^}]*)\})?")
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module")
def exported():
    """Return by the name of a sample which labels ranks and switches give it, with the values there are."""
    watch = pytest.importorskip("dlcp.controller.watch", reason="switches take the packages of the extra fabric")
    from dlcp.controller.switch_client import Readings
    from dlcp.switch import EgressEvent, EventCount, IngressEvent

    events = [*IngressEvent.__members__, *EgressEvent.__members__]
    readings = Readings(tuple(EventCount(event, 1, 6, 7, 1, 100) for event in events), {(1, 6): 3})
    status = watch.SwitchStatus(frozenset({1}), connected=True, readings=readings, lost={1: 0.05})
    registry = CollectorRegistry()
    registry.register(RankCollector([snapshot()]))
    registry.register(watch.FabricCollector({"s1": status}))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def rules():
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((FOLDER / "grafana.json").read_text())


def targets(dashboard):
    return [target for panel in dashboard["panels"] for target in panel.get("targets", [])]


def check(expression, exported):
    """Check that an expression names metrics, labels and values that there are."""
    named = METRIC.findall(expression)
    assert named, expression
    for name, matchers in named:
        assert name in exported, f"nobody tells {name}: {expression}"
        for label, operator, value in re.findall(r'(\w+)(=~|=|!=|!~)"([^"]*)"', matchers):
            assert label in exported[name], f"{name} has no label {label}"
            if not value.startswith("$"):
                assert set(value.split("|")) <= exported[name][label], f"{name}: {label} is never {value}"
            assert operator in ("=", "=~", "!=")
    labels = set().union(*(exported[name] for name, _ in named)) | {"le"}
    for grouping in re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", expression):
        assert {label.strip() for label in grouping.split(",")} <= labels, expression


def test_alerts_are_of_metrics_that_there_are(rules, exported):
    assert len(rules) > 10
    for rule in rules:
        check(rule["expr"], exported)


def test_alerts_have_what_prometheus_wants_of_them(rules):
    assert max(Counter(rule["alert"] for rule in rules).values()) == 1
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert re.fullmatch(r"Dlcp[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["annotations"]["summary"]


def test_alerts_name_labels_that_their_results_have(rules, exported):
    for rule in rules:
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        grouping = re.match(r"\(?(?:sum|max) by \(([^)]*)\)", rule["expr"].strip())
        if grouping:
            left = {label.strip() for label in grouping[1].split(",")}
        else:
            left = set(exported[METRIC.search(rule["expr"])[1]])
        assert named <= left, rule["alert"]


@pytest.mark.skipif(PROMTOOL is None, reason="rules are tried by promtool: apt-get install prometheus")
@pytest.mark.parametrize(
    "words", [["check", "rules", FOLDER / "alerts.yaml"], ["test", "rules", HERE / "alerts_test.yaml"]]
)
def test_prometheus_takes_the_rules_and_raises_each_alert(words):
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried(rules):
    tried = yaml.safe_load((HERE / "alerts_test.yaml").read_text())["tests"][1]["promql_expr_test"][0]["exp_samples"]
    assert {re.search(r'alertname="(\w+)"', sample["labels"])[1] for sample in tried} == {
        rule["alert"] for rule in rules
    }


def test_panels_are_of_metrics_that_there_are(dashboard, exported):
    assert len(targets(dashboard)) > 20
    for target in targets(dashboard):
        check(target["expr"], exported)


def test_the_dashboard_leaves_out_nothing_that_ranks_tell(dashboard, exported):
    named = {name for target in targets(dashboard) for name, _ in METRIC.findall(target["expr"])}
    of_ranks = {re.sub("(_bucket|_sum|_count)$", "", name) for name in exported if name.startswith("dlcp_rank_")}
    assert of_ranks == {re.sub("(_bucket|_sum|_count)$", "", name) for name in named if name.startswith("dlcp_rank_")}


@pytest.mark.skipif(PROMTOOL is None, reason="expressions are tried by promtool: apt-get install prometheus")
def test_prometheus_takes_the_expressions_of_the_panels(dashboard, tmp_path):
    plain = [target["expr"].replace("$__rate_interval", "1m") for target in targets(dashboard)]
    records = [{"record": f"panel:{place}", "expr": each} for place, each in enumerate(plain)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    words = [PROMTOOL, "check", "rules", "--lint=none", tmp_path / "rules.yaml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_what_grafana_wants_of_it(dashboard):
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "annotations"} <= set(dashboard)
    assert dashboard.get("id") is None, "Grafana gives it one"
    assert "__inputs" not in dashboard, "it can be provisioned as a file, too"
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert set(variables) == {"datasource", "session", "switch"}
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(variable["datasource"] == source for name, variable in variables.items() if name != "datasource")
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == source
        assert panel["fieldConfig"]["defaults"]["unit"] in ("none", "s", "percentunit", "pps", "Bps")
        assert [target["refId"] for target in panel["targets"]] == list("ABCDE"[: len(panel["targets"])])
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {"session", "switch", "__rate_interval"}
    assert max(Counter(panel["id"] for panel in dashboard["panels"]).values()) == 1


def test_legends_name_labels_that_the_results_have(dashboard, exported):
    for target in targets(dashboard):
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouping = re.search(r"\b(?:sum|max|count) by \(([^)]*)\)", target["expr"])
        labels = set(re.split(r",\s*", grouping[1])) if grouping else set(exported[METRIC.search(target["expr"])[1]])
        assert named <= labels, target["expr"]


def test_the_variables_ask_for_labels_that_there_are(dashboard, exported):
    for variable in dashboard["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
        assert label in exported[name]


def test_a_phase_that_an_alert_names_is_one():
    assert {"failed", "fallback", "ready"} <= set(RANK_PHASES)
