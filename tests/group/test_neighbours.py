# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a group exchange packets through memory, and that they average the same as through sockets."""

from contextlib import ExitStack, closing

import numpy as np
import pytest

from dlcp.host import netlab
from dlcp.session import Options
from dlcp.transport import shared_memory
from dlcp.transport.shared_memory import SharedMemoryRendezvous
from tests.group.group_ranks import on_ranks, together

pytestmark = pytest.mark.skipif(not shared_memory.supported(), reason="needs memfd_create and eventfd")


def average(group, steps=3):
    """Average some steps; return the results, the ranks that share memory, and the ledger's summary."""
    group.register(["large", "small"])
    kept = []
    for step in range(steps):
        random = np.random.default_rng([group.rank, step])
        gradients = {
            "large": random.standard_normal(300_001).astype(np.float32),
            "small": random.standard_normal(3).astype(np.float32),
        }
        group.average(gradients)
        kept.append(gradients)
    return kept, group.endpoint.connection.local_peers, group.ledger.summary()


def assert_same(found):
    for kept, _, _ in found:
        for ours, theirs in zip(kept, found[0][0], strict=True):
            for name, values in ours.items():
                np.testing.assert_array_equal(values, theirs[name])


@pytest.mark.parametrize("collective", ["direct", "ring", "auto"])
def test_ranks_of_one_host_share_memory_and_lose_nothing(collective):
    through_memory = together(3, average, Options(collective=collective))
    # On a busy machine, sockets lose packets.
    exact = Options(collective=collective, shared_memory=False, loss_bound=0.0, precision=32)
    through_sockets = together(3, average, exact)
    assert [shared for _, shared, _ in through_memory] == [{1, 2}, {0, 2}, {0, 1}]
    assert not any(shared for _, shared, _ in through_sockets)
    assert_same(through_memory)
    assert_same(through_sockets)
    if collective != "auto":  # it may choose another order of sums over sockets
        assert_same([*through_memory, *through_sockets])
    for _, _, ledger in through_memory:
        assert ledger["sent"] == ledger["delivered"] > 0
        assert ledger["lost"] == ledger["retransmitted"] == 0


def test_ranks_that_do_not_want_it_use_sockets_and_the_others_memory():
    found = together(3, average, [Options(), Options(shared_memory=False), Options()])
    assert [shared for _, shared, _ in found] == [{2}, frozenset(), {0}]
    assert_same(found)


@pytest.mark.parametrize("why", [{"immediate": True}, {"advertise": "127.0.0.1"}])
def test_where_a_network_is_meant_to_be_in_between_nothing_is_shared(why):
    found = together(2, average, Options(**why))
    assert not any(shared for _, shared, _ in found)


def test_network_namespaces_of_one_host_share_nothing():
    works, reason = netlab.available()
    if not works:
        pytest.skip(f"needs network namespaces: {reason}")
    with ExitStack() as open_ones:
        one, other = (open_ones.enter_context(closing(netlab.Namespace(name))) for name in ("one", "other"))
        assert ranks_found([one, other]) == {0: frozenset(), 1: frozenset()}
        assert ranks_found([one, one]) == {0: {1}, 1: {0}}


def ranks_found(spaces):
    """Let a rank in each of two namespaces look for the other."""
    rendezvous = [space.call(SharedMemoryRendezvous) for space in spaces]

    def meet(rank):
        shared = rendezvous[rank].connect(rank, {1 - rank: rendezvous[1 - rank].name}, job=0, token=1, timeout_s=10)
        found = shared.ranks
        shared.close()
        return found

    with rendezvous[0], rendezvous[1]:
        return on_ranks(2, lambda rank: spaces[rank].call(lambda: meet(rank)))
