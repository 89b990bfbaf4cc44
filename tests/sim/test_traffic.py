# SPDX-License-Identifier: Apache-2.0
"""Flow sizes of others' traffic are those of the simulations that they are said to be from."""

import numpy as np
import pytest

from dlcp.inputs.document import PlaceError
from dlcp.sim.scenario import WORKLOADS, FailureSpec, TrafficSpec, draw_sizes, mean_size


# ``meanFlowSize`` of run_pias_dctcp.py and run_pias_vl2.py in PIAS-NS2, in packets of 1,460 bytes.
@pytest.mark.parametrize(("sizes", "mean_packets"), [("web_search", 1138), ("data_mining", 5117)])
def test_mean_flow_sizes_are_the_published_ones(sizes, mean_packets) -> None:
    assert mean_size(TrafficSpec(sizes=sizes).flow_sizes) / 1460 == pytest.approx(mean_packets, rel=0.003)
    drawn = draw_sizes(WORKLOADS[sizes], (np.arange(2_000_000) + 0.5) / 2_000_000)
    assert drawn.mean() == pytest.approx(mean_size(WORKLOADS[sizes]), rel=0.002)


@pytest.mark.parametrize("sizes", ["web_search", "data_mining"])
def test_the_largest_flows_can_be_cut(sizes) -> None:
    cut = TrafficSpec(sizes=sizes, most_bytes=1_000_000).flow_sizes
    assert max(size for size, _ in cut) == 1_000_000
    assert mean_size(cut) < mean_size(TrafficSpec(sizes=sizes).flow_sizes)


HPCC = ((0, 0), (10_000, 15), (20_000, 20), (30_000, 30), (50_000, 40), (1_000_000, 60), (30_000_000, 100))
"""Rows as in HPCC's public tables: bytes, and shares in per cent."""


def test_shares_in_per_cent_are_those_in_fractions() -> None:
    fractions = tuple((size, share / 100) for size, share in HPCC)
    assert TrafficSpec(sizes=HPCC).flow_sizes == TrafficSpec(sizes=fractions).flow_sizes == fractions
    assert mean_size(TrafficSpec(sizes=HPCC).flow_sizes) == pytest.approx(6_313_000)


def test_sizes_may_be_in_packets() -> None:
    table = ((1, 0.0), (100, 0.5), (1000, 1.0))
    assert TrafficSpec(sizes=table, size_unit="packets").flow_sizes[-1] == (1_460_000, 1.0)
    assert TrafficSpec(sizes=table, size_unit="bytes").flow_sizes[-1] == (1000, 1.0)


@pytest.mark.parametrize(
    ("sizes", "message", "steps"),
    [
        ((), "the table of sizes is empty", ("sizes",)),
        (((10_000, 0.5), (20_000, 0.9)), r"the last share is 0\.9; rows are \[size, share", ("sizes", 1)),
        (
            ((0.0, 0), (0.5, 10_000), (1.0, 20_000)),
            r"the last share is 20000 \(are the columns swapped\?\)",
            ("sizes", 2),
        ),
        (
            ((20_000, 0.5), (10_000, 1.0)),
            r"\[10000, 1\.0\] follows \[20000, 0\.5\]; sizes and shares must ascend",
            ("sizes", 1),
        ),
        (((10_000, 50), (20_000, 20), (30_000, 100)), "sizes and shares must ascend", ("sizes", 1)),
        (((0, 0), (0, 1)), "the largest size is below 1 byte", ("sizes", 1)),
        (
            ((1, 0.1), (100, 0.5), (2000, 1.0)),
            "the mean size is 545, and it is unclear of what: add size_unit",
            ("sizes",),
        ),
    ],
)
def test_what_is_no_distribution_is_refused(sizes, message, steps) -> None:
    with pytest.raises(PlaceError, match=message) as error:
        TrafficSpec(sizes=sizes)
    assert error.value.steps == steps


@pytest.mark.parametrize("made", [TrafficSpec, lambda **more: FailureSpec(nodes=("a", "b"), **more)])
def test_what_ends_before_it_begins_is_refused(made) -> None:
    with pytest.raises(PlaceError, match=r"stop_s is 0\.01, which is not after start_s, 0\.02"):
        made(start_s=0.02, stop_s=0.01)
