# SPDX-License-Identifier: Apache-2.0
"""The backend ``dlcp``: tensors of a device by way of the host, work that fails, and ports that are all in use."""

import time
import warnings
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from dlcp.session.addresses import OwnAddresses, bind
from dlcp.torch import Options
from dlcp.torch.backend.tensor_bytes import HostMemory
from dlcp.torch.backend.work import Work, joined
from dlcp.torch.framework import endpoint_of_new_group
from dlcp.transport import TransportError
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT
from tests.torch.backend_checks import Checks
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)


class SlowDevice:
    """A device whose copies to the host happen only when somebody waits for them."""

    def __init__(self):
        self.copies = []
        self.waited = self.sides = 0

    def buffer(self, count, dtype):
        return torch.empty(count, dtype=dtype)

    def after_compute(self):
        pass

    @contextmanager
    def on_side(self):
        self.sides += 1
        yield

    def mark(self):
        self.waited += 1
        return self

    def synchronize(self):
        time.sleep(0.002)  # a device's copies take time
        for copy in self.copies:
            copy()
        self.copies.clear()

    def query(self):
        return True

    def future(self):
        return torch.futures.Future()


class SlowMemory(HostMemory):
    """Takes the CPU for a device, and copies late: what is sent too early is rubbish."""

    def __init__(self):
        super().__init__()
        self.slow = SlowDevice()

    def device(self, tensor):
        return self.slow

    def read(self, tensor):
        host = super().read(tensor)
        wanted = tensor.detach().clone()
        host.host.view(-1).view(torch.uint8).fill_(77)
        self.slow.copies.append(lambda: host.host.copy_(wanted))
        return host


CHECKS = ["check_all_reduce_is_gloos", "check_broadcast", "check_reduce", "check_gather_and_scatter",
          "check_reduce_scatter", "check_all_to_all", "check_coalesced", "check_async_operations_overlap",
          "check_messages", "check_functional", "check_barrier"]  # fmt: skip


def by_way_of_the_host(worker):
    group = dist.new_group(backend="dlcp")
    group._memory = memory = SlowMemory()
    found = Checks(group, dist.group.WORLD).run(CHECKS)
    issuer = group._issuer
    dist.destroy_process_group(group)
    return found, memory.slow.waited, memory.slow.sides, issuer._thread.is_alive()


def test_tensors_of_a_device_go_by_way_of_the_host():
    for rank, (found, waited, sides, alive) in enumerate(values(launch(2, by_way_of_the_host))):
        for check in CHECKS:
            assert found[check] is None, f"rank {rank}: {found[check]}"
        assert waited > 50
        assert sides > waited
        assert not alive


def test_a_tensor_on_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="not on meta"):
        HostMemory().read(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="dense"):
        HostMemory().read(torch.zeros(3).to_sparse())


def test_a_contiguous_tensor_is_sent_from_where_it_is():
    tensor = torch.arange(6.0)
    host = HostMemory().read(tensor)
    host.data[:4] = b"\0\0\0\x40"
    assert tensor[0] == 2
    strided = torch.arange(6.0).view(2, 3).t()
    host = HostMemory().read(strided)
    host.data[:4] = b"\0\0\0\x40"
    assert strided[0, 0] == 0
    host.give_back()
    assert strided[0, 0] == 2


def test_an_error_reaches_everybody_who_waits():
    work = Work("a collective")
    chained = work.get_future().then(lambda future: future.value())
    work.fail(TransportError("rank 2 has been silent"))
    assert work.is_completed()
    assert not work.is_success()
    assert "rank 2" in str(work.exception())
    for wait in (work.wait, work.result, work.synchronize, work.get_future().wait, chained.wait):
        with pytest.raises(RuntimeError, match="rank 2 has been silent"):
            wait()


def test_waiting_can_be_limited():
    work = Work("a collective of group 0")
    with pytest.raises(TimeoutError, match=r"a collective of group 0 is not done after 0\.0 s"):
        work.wait(timedelta(milliseconds=20))
    assert not work.is_completed()
    work.succeed([1])
    assert work.wait(timedelta(seconds=1))
    assert work.result() == [1]
    with pytest.raises(RuntimeError, match="has no source"):
        work.source_rank()


def test_joined_work_is_done_when_all_parts_are():
    parts = [Work(f"part {number}") for number in range(3)]
    whole = joined("all parts", parts, "value")
    parts[2].succeed(None)
    parts[0].succeed(None)
    assert not whole.is_completed()
    parts[1].succeed(None)
    assert whole.result() == "value"
    assert joined("nothing", [], "empty").result() == "empty"
    parts = [Work(f"part {number}") for number in range(3)]
    whole = joined("all parts", parts, "value")
    parts[1].fail(ValueError("part 1"))
    parts[0].fail(ValueError("part 0"))
    with pytest.raises(ValueError, match="part 1"):
        whole.wait()


def test_when_all_of_dlcps_ports_are_in_use_any_other_serves_and_is_said_once():
    own = OwnAddresses(host := "127.0.0.93")
    ports = range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT)
    with ExitStack() as stack, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in ports:
            taken = stack.enter_context(bind(Options(), own))
            assert taken.getsockname()[1] in ports
        for _ in range(2):
            sock = stack.enter_context(bind(Options(), own))
            assert sock.getsockname()[1] not in ports
        with pytest.raises(OSError, match=f"port {UDP_PORT_BASE}"):
            bind(Options(bind=f"{host}:{UDP_PORT_BASE}"), own)
    assert [str(warning.message).count("switches treat their packets as ordinary traffic") for warning in said] == [1]


def alone_in_the_store(worker):
    options = Options(bind="127.0.0.1")
    dist.barrier()  # rank 1 is not to leave while rank 0 still connects to it
    store = dist.PrefixStore("nobody else", dist.distributed_c10d._get_default_store())
    if worker.rank:
        return ""
    with pytest.raises(RuntimeError) as caught:
        endpoint_of_new_group(options, store, 0, 3, timedelta(seconds=1))
    return str(caught.value)


def test_ranks_that_do_not_come_are_named():
    assert "of 3 ranks, [1, 2] have not joined the group in 1 s" in values(launch(2, alone_in_the_store))[0]
