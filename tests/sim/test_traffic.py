# SPDX-License-Identifier: Apache-2.0
"""Flow sizes of others' traffic are those of the simulations that they are said to be from."""

import numpy as np
import pytest

from dlcp.sim.scenario import WORKLOADS, TrafficSpec, draw_sizes, mean_size


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
