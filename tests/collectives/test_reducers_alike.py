# SPDX-License-Identifier: Apache-2.0
"""Properties that every all-reduce has."""

import numpy as np
import pytest

from dlcp.collectives import Bucket
from dlcp.transport import DeadlineError, TransportOptions
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment
from tests.collectives.virtual_ranks import LAYERS, SMALL_SIZES, SmallRanks
from tests.collectives.virtual_ring import RingRanks

pytestmark = pytest.mark.parametrize("kind", [SmallRanks, RingRanks], ids=["direct", "ring"])


def test_one_rank_alone_keeps_its_gradients(kind):
    ranks = kind(1)
    gradients = ranks.gradients(13, SMALL_SIZES)
    averages = ranks.reduce(0, gradients)
    for name in SMALL_SIZES:
        np.testing.assert_array_equal(averages[0][name], gradients[0][name])


def test_a_rank_that_never_starts_is_named(kind):
    ranks = kind(2, options=TransportOptions(deadline_s=1.0))
    values = ranks.gradients(16)[0]["fc.weight"]
    segments = [Segment(LAYERS["fc.weight"], 0, len(values))]
    started = ranks.reducers[0].start(6, 0, Bucket(values, ValueType.FLOAT32, segments))
    ranks.network.run(started.done)
    with pytest.raises(DeadlineError, match=r"step 6: rank 1 .* fc\.weight"):
        started.result()


def test_a_bucket_in_strides_is_refused(kind):
    values = np.ones(2000, np.float32)[::2]
    with pytest.raises(ValueError, match="step 3, bucket 1: values must be contiguous"):
        kind(2).reducers[0].start(3, 1, Bucket(values, ValueType.FLOAT32, [Segment(LAYERS["fc.weight"], 0, 1000)]))


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_what_is_done_is_given_back_at_once(kind, loss):
    assert not kind(3, bound=0.1, loss=loss, jitter_s=0.002, seed=5).left_behind()
