# SPDX-License-Identifier: Apache-2.0
"""Metrics of ranks: what Prometheus reads is what ranks told, under names after its conventions."""

import math
import re

import pytest

pytest.importorskip("prometheus_client", reason="the live page takes the packages of the extra live")

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from dlcp.live.http_server import RankCollector
from dlcp.session.snapshots import STEP_EDGES_S
from tests.live.snapshots import COUNTS, snapshot

BASE_UNITS = ("seconds", "bits", "bytes", "bytes_per_second", "ranks", "packets", "messages", "steps", "info")


def families(*snapshots):
    """Return what Prometheus would read, by name."""
    registry = CollectorRegistry()
    registry.register(RankCollector(snapshots))
    encode, kind = choose_encoder("")
    assert kind.startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(encode(registry).decode())}


def value(found, name, **labels):
    samples = [each for family in found.values() for each in family.samples]
    matching = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
    assert len(matching) == 1, f"{name} {labels}: {matching}"
    return matching[0]


def test_they_say_what_ranks_told():
    found = families(snapshot(0, ranks=3, steps=10), snapshot(1, ranks=3, steps=20, phase="fallback"))
    zero = {"session": "7-0123abcd", "rank": "0"}
    assert value(found, "dlcp_rank_info", **zero, process_rank="0", host="node0") == 1
    assert value(found, "dlcp_rank_step_seconds_count", **zero) == 10
    assert value(found, "dlcp_rank_step_seconds_sum", **zero) == pytest.approx(1.0)
    assert value(found, "dlcp_rank_compute_seconds_total", **zero) == pytest.approx(0.8)
    assert value(found, "dlcp_rank_waiting_seconds_total", **zero, peer="1") == pytest.approx(0.18)
    assert value(found, "dlcp_rank_waiting_seconds_total", **zero, peer="unknown") == pytest.approx(0.02)
    for name, count in COUNTS.items():
        assert value(found, f"dlcp_rank_{name}_packets_total", **zero, peer="2") == 10 * count
    assert value(found, "dlcp_rank_peer_rate_bytes_per_second", **zero, peer="1") == 1e7
    assert value(found, "dlcp_rank_peer_window_packets", **zero, peer="1") == 12.5
    assert value(found, "dlcp_rank_peer_round_trip_seconds", **zero, peer="1") == 0.002
    assert value(found, "dlcp_rank_peer_paths", **zero, peer="1") == 12
    assert value(found, "dlcp_rank_peer_paths_left", **zero, peer="1") == 1
    assert value(found, "dlcp_rank_snapshot_timestamp_seconds", **zero) == 1.75e9 + 10
    assert value(found, "dlcp_rank_precision_bits", **zero) == 8
    assert value(found, "dlcp_rank_precision_packets_total", **zero, bits="8") == 12000
    assert value(found, "dlcp_rank_precision_packets_total", **zero, bits="32") == 8000
    assert value(found, "dlcp_rank_phase", **zero, phase="ready") == 1
    assert value(found, "dlcp_rank_phase", rank="1", phase="ready") == 0
    assert value(found, "dlcp_rank_phase", rank="1", phase="fallback") == 1
    assert value(found, "dlcp_rank_ended", rank="1") == 0


def test_steps_are_a_histogram():
    classes = [0] * len(STEP_EDGES_S)
    classes[0], classes[3], classes[-1] = 1, 5, 2
    (family,) = [each for each in families(snapshot(steps=1) | {"steps": classes}).values() if each.type == "histogram"]
    buckets = [(float(each.labels["le"]), each.value) for each in family.samples if each.name.endswith("_bucket")]
    assert [edge for edge, _ in buckets] == list(STEP_EDGES_S)
    assert [count for _, count in buckets] == [1, 1, 1, *[6] * 14, 6, 8][: len(STEP_EDGES_S)]
    assert buckets[-1] == (math.inf, 8)


def test_what_is_not_known_has_no_sample():
    unknown = {"local": False, "rate_bps": 0.0, "window_packets": 10.0, "rtt_s": 0.0, "paths": 1, "paths_left": 0}
    found = families(snapshot(0) | {"peers": {"1": {**unknown, "worst_path_loss": 0.0}}})
    assert found["dlcp_rank_peer_rate_bytes_per_second"].samples == []
    assert found["dlcp_rank_peer_round_trip_seconds"].samples == []
    assert value(found, "dlcp_rank_peer_paths_left", peer="1") == 0
    found = families(snapshot(0) | {"peers": {"1": {"local": True}}})
    assert found["dlcp_rank_peer_window_packets"].samples == [], "memory has no window"
    assert found["dlcp_rank_sent_packets"].samples != []


def test_who_is_slow_is_told_by_rank_and_cause():
    slow = {"text": "", "steps": 9, "step_s": 0.1, "network_s": 0.0, "rank": 1, "peer": None, "layers": ""}
    slow |= {"cause": "data loading", "lost_s": 0.04}
    spent = {"loading": 0.5, "waiting": 0.25}
    found = families(*(snapshot(rank, phase="watched", slow=slow, activities_s=spent) for rank in (0, 1)))
    assert value(found, "dlcp_rank_activity_seconds_total", rank="1", activity="loading") == 0.5
    assert value(found, "dlcp_rank_delay_seconds", rank="1", cause="data loading") == 0.04
    assert value(found, "dlcp_rank_delay_seconds", rank="1", cause="link") == 0
    assert value(found, "dlcp_rank_delay_seconds", rank="0", cause="data loading") == 0
    assert value(found, "dlcp_rank_phase", rank="0", phase="watched") == 1
    assert families(snapshot())["dlcp_rank_delay_seconds"].samples == [], "nobody has compared"


def test_names_and_units_are_after_prometheus_conventions():
    found = families(snapshot())
    assert len(found) > 10
    for name, family in found.items():
        assert re.fullmatch(r"dlcp_rank_[a-z_]+", name)
        assert family.documentation
        if family.type == "counter":
            assert all(sample.name == f"{name}_total" for sample in family.samples)
        else:
            assert not name.endswith("_total")
        if name not in ("dlcp_rank_phase", "dlcp_rank_ended", "dlcp_rank_peer_paths", "dlcp_rank_peer_paths_left"):
            assert name.endswith(BASE_UNITS), name


def test_without_ranks_there_are_no_samples():
    assert not [sample for family in families().values() for sample in family.samples]


def test_label_values_are_escaped():
    host = 'a"b\\c\nd'
    assert value(families(snapshot(host=host)), "dlcp_rank_info", host=host) == 1


def test_files_that_are_left_out_are_counted():
    (first, *_) = RankCollector([snapshot()], refused=2).collect()
    assert (first.name, first.samples[0].value) == ("dlcp_rank_refused_snapshots", 2)
    assert all(metric.name != first.name for metric in RankCollector([snapshot()]).collect())
