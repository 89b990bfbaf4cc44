# SPDX-License-Identifier: Apache-2.0
"""The backend ``dlcp`` of torch.distributed against Gloo: every collective, in real processes over 127.0.0.1."""

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import dlcp.torch.backend  # noqa: F401 - makes the backend known
from tests.torch.backend_checks import Checks
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)
CHECKS = [name for name in dir(Checks) if name.startswith("check_")]


def check_all(worker):
    group = dist.new_group(backend="dlcp")
    found = Checks(group, dist.group.WORLD).run()
    dist.destroy_process_group(group)
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    return values(launch(request.param, check_all))


@pytest.mark.parametrize("check", CHECKS)
def test_collectives(ranks, check):
    for rank, found in enumerate(ranks):
        assert found[check] is None, f"rank {rank}: {found[check]}"
