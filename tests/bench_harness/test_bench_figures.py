# SPDX-License-Identifier: Apache-2.0
"""Statistics and form of the benchmarks' documents."""

import json
from itertools import pairwise

import numpy as np
import pytest

from dlcp import bench
from dlcp.bench import median, spread
from tests.bench import harness, reduction
from tests.bench.harness import Turns


def recorder(log, name, values):
    def run():
        log.append(name)
        return values.pop(0)

    return run


def test_contenders_take_turns_in_orders_drawn_from_the_seed():
    orders = []
    for seed in (1, 1, 2):
        log = []
        contenders = {name: recorder(log, name, list(range(20))) for name in "abc"}
        samples = Turns(6, 2, seed).take(contenders)
        rounds = [log[start : start + 3] for start in range(0, len(log), 3)]
        assert len(rounds) == 8
        assert all(sorted(order) == ["a", "b", "c"] for order in rounds), "everybody has a turn in each round"
        assert len({tuple(order) for order in rounds}) > 1
        assert samples == {name: [2, 3, 4, 5, 6, 7] for name in "abc"}, "warm-up rounds do not count"
        orders.append(rounds)
    assert orders[0] == orders[1] != orders[2]


def test_progress_tells_every_round():
    told = []
    Turns(2, 1, progress=told.append).take({"ours": lambda: 12.345})
    assert told == ["warm-up: ours 12.35", "round 1 of 2: ours 12.35", "round 2 of 2: ours 12.35"]


@pytest.mark.parametrize(("contenders", "rounds", "warm_up"), [({}, 1, 0), ({"a": float}, 0, 0), ({"a": float}, 1, -1)])
def test_nothing_to_measure_is_refused(contenders, rounds, warm_up):
    with pytest.raises(ValueError, match="nothing to measure"):
        Turns(rounds, warm_up).take(contenders)


def test_spread_is_the_interquartile_range_over_the_median():
    assert median([5, 1, 3]) == 3
    assert spread([1, 2, 3, 4, 5]) == pytest.approx((4 - 2) / 3)
    assert spread([1, 2, 3, 4, 500]) == pytest.approx((4 - 2) / 3), "one slow run does not matter"
    assert spread([7]) == 0


def test_ratio_is_the_median_of_ratios_within_rounds_and_more_is_better():
    # The machine is ten times slower in the last two rounds: the ratio of medians would be 100 / 20.
    ours, peer = [10, 10, 20, 100, 100], [20, 20, 100, 200, 200]
    assert bench.result("x", "ms", ours, peer).ratio == 2
    assert bench.result("x", "packets/s", ours, peer, smaller_is_better=False).ratio == 0.5
    alone = bench.result("x", "ms", ours)
    assert (alone.value, alone.peer, alone.ratio, alone.runs) == (20, None, None, 5)


def test_sides_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"some\.name: 2 values and 1 of the peer"):
        bench.result("some.name", "ms", [1, 2], [1])
    with pytest.raises(ValueError, match="0 values"):
        bench.result("x", "ms", [])


def test_the_peer_counts_at_its_best():
    samples = {"ours": [10, 10, 10], "slow": [40, 40, 40], "fast": [12, 50, 14]}
    found = harness.against_best("x", "ms", samples, "ours", ["slow", "fast"], {"more": 1})
    assert (found.value, found.peer, found.ratio) == (10, 14, 1.4)
    assert found.details == {"peer": "fast", "peers_tried": {"slow": 40, "fast": 14}, "ratio_quartiles": [1.3, 3.2],
                             "ratio_of_means": 2.533, "more": 1}  # fmt: skip


def test_a_document_has_the_promised_form():
    entries = [
        bench.result("a.b", "ms", [1.23456, 1.23456], [2, 2]),
        bench.BenchResult("c", 7.0, "ms", None, None, 1, 0),
    ]
    document = json.loads(json.dumps(bench.document(entries, seed=3)))
    assert set(document) == {"machine", "command", "seed", "results"}
    assert document["seed"] == 3
    fields = ["name", "value", "unit", "peer", "ratio", "runs", "spread"]
    assert [list(entry) for entry in document["results"]] == [fields, fields]
    assert document["results"][0] == {
        "name": "a.b", "value": 1.235, "unit": "ms", "peer": 2, "ratio": 1.62, "runs": 2, "spread": 0
    }  # fmt: skip
    machine = document["machine"]
    assert machine["host"]
    assert machine["processor"]
    assert machine["cores"] >= 1
    assert {"system", "python", "numpy", "torch", "rmem_max_bytes", "tcp_congestion_control", "load_before"} <= set(
        machine
    )


@pytest.mark.parametrize(("value", "rounded"), [(123456.7, 123457), (1234.56, 1235), (0.00123456, 0.001235), (0, 0)])
def test_figures_have_four_digits(value, rounded):
    assert bench.significant(value) == rounded


@pytest.mark.parametrize("values", [48, 1000, 250_001])
def test_layers_and_buckets_cover_the_buffer_once(values):
    for bounds in (reduction.layer_bounds(values), reduction.bucket_bounds(values, 4)):
        assert bounds[0][0] == 0
        assert bounds[-1][1] == values
        assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    for start, stop in reduction.bucket_bounds(values, 4):
        layers = reduction.segments(values, start, stop)
        assert len(layers) == 12
        assert (layers[0].start, layers[-1].stop) == (0, stop - start)
    with pytest.raises(ValueError, match="47 values"):
        reduction.layer_bounds(47)


def test_the_input_is_whole_numbers_whose_sums_are_exact():
    numbers = reduction.whole_numbers(100_000)
    assert np.array_equal(numbers, np.rint(numbers))
    assert np.abs(numbers).max() <= reduction.LARGEST_VALUE
    first, last = (numbers[start:stop].std() for start, stop in (reduction.layer_bounds(100_000)[i] for i in (0, -1)))
    assert last > 50 * first > 50
    total = sum((numbers * np.float32(rank) for rank in range(1, 9)), np.zeros_like(numbers))
    assert np.array_equal(total, 36 * numbers.astype(np.float64))
