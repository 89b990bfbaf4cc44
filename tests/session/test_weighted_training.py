# SPDX-License-Identifier: Apache-2.0
"""DDP with batches of different sizes: as if one process had seen the whole batch, over DLCP and when that fails."""

import numpy as np
import pytest

pytest.importorskip("torch")

import dlcp.torch
from tests.session.weighted_training import SIZES, by_one, by_ranks
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(120)


def assert_same(parameters, others, rtol=2e-4):
    for ours, theirs in zip(parameters, others, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("fields", [{}, {"collective": "ring", "loss_bound": 0.0}], ids=["direct", "ring"])
def test_every_sample_counts_the_same(fields):
    (first, active, _, _), (second, *_) = values(launch(2, by_ranks, fields, True, None))
    assert active
    assert_same(first, by_one())
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_not_told_anew_stays():
    told, silent = values(launch(2, by_ranks, {}, True, None))[0], values(launch(2, by_ranks, {}, False, None))[0]
    assert SIZES[0] == SIZES[1] != SIZES[2]
    assert any(not np.allclose(a, b, rtol=1e-3) for a, b in zip(told[0], silent[0], strict=True))


def test_the_framework_weighs_when_dlcp_breaks_off():
    found = values(launch(2, by_ranks, {"deadline_s": 8.0, "silence_s": 2.0}, True, 3))
    for parameters, active, reason, _ in found:
        assert not active
        assert "broken on purpose" in reason or "closed" in reason
        assert_same(parameters, by_one())


def test_the_framework_weighs_where_dlcp_cannot_be_used():
    for parameters, active, reason, _ in values(launch(2, by_ranks, {"job": "rank"}, True, None)):
        assert not active
        assert "rank 0 has job=0 and rank 1 job=1" in reason
        assert_same(parameters, by_one())


def samples_on_one_rank_only(worker):
    from torch.nn.parallel import DistributedDataParallel

    from tests.torch.ddp_models import make

    model = DistributedDataParallel(make())
    options = worker.options(samples=8 if worker.rank == 0 else 0, meet_s=4.0)
    try:
        state = dlcp.torch.enable(model, options)
    except dlcp.session.NotJoinedError as error:
        return str(error)
    reason = state.reason
    state.close()
    return reason


def test_ranks_that_do_not_all_weigh_do_not_weigh_differently():
    weighing, other = values(launch(2, samples_on_one_rank_only))
    assert "rank 0 has samples='set' and rank 1 samples='not set'" in weighing
    assert "Not all ranks set samples" in weighing
    assert "samples='set'" in other


def misuse(worker):
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from tests.torch.ddp_models import BUCKET_MB, batch, make

    said = []
    model = DistributedDataParallel(make(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(samples=4))
    state.samples(4)
    for count in (4, -1, 2.5):
        try:
            state.samples(count)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    images, labels = batch(worker.rank, 0)
    nn.functional.cross_entropy(model(images), labels).backward()
    state.close()
    plain = DistributedDataParallel(make(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(plain, worker.options())
    try:
        state.samples(4)
    except ValueError as error:
        said.append(str(error))
    state.close()
    return said


def test_wrong_use_is_an_error_that_says_so():
    for said in values(launch(2, misuse)):
        assert len(said) == 4
        assert all("is too late for step 0" in text for text in said[:3])
        assert "Options(samples=...)" in said[3]


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="samples must be a whole number"):
        dlcp.torch.Options(samples=-1)
