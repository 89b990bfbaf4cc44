# SPDX-License-Identifier: Apache-2.0
"""Buckets go to the host and back on a stream of their own: nothing is read before it is there."""

import math
import queue
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dlcp.collectives import Bucket
from dlcp.torch.staging import Stager, packet_magnitudes, stager_for
from dlcp.torch.state import as_array, as_tensor
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import packet_magnitudes as magnitudes_on_host

LIMIT_S = 10
PER_PACKET = 7
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class LazyTensor(torch.Tensor):
    """A tensor whose ``copy_`` is queued on the stream that is current, as on a device."""

    stream = None

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        plain, source = self.as_subclass(torch.Tensor), source.as_subclass(torch.Tensor)
        LazyTensor.stream.put(lambda: plain.copy_(source))
        return self


class Event:
    def __init__(self):
        self.reached = threading.Event()

    def synchronize(self):
        assert self.reached.wait(LIMIT_S)

    def query(self):
        return self.reached.is_set()


class LazyDevice:
    """A device on which copies happen when :meth:`run_one` says so, and which remembers the order of things."""

    def __init__(self):
        self.queued = queue.SimpleQueue()
        self.events = []
        self.buffers = 0
        self.current = None

    def buffer(self, count, dtype):
        self.buffers += 1
        return torch.full((count,), math.nan, dtype=dtype).as_subclass(LazyTensor)

    def after_compute(self):
        self.events.append("wait for compute")

    @contextmanager
    def on_side(self):
        LazyTensor.stream, before = self.queued, LazyTensor.stream
        self.current = "side"
        try:
            yield
        finally:
            LazyTensor.stream, self.current = before, None

    def mark(self):
        event = Event()
        self.queued.put(event.reached.set)
        return event

    def future(self):
        device = self

        class Future(torch.futures.Future):
            def set_result(self, result):
                device.events.append(f"resolved on {device.current}")
                super().set_result(result)

        return Future()

    def run(self, count=None):
        while count != 0 and not self.queued.empty():
            self.queued.get()()
            count = None if count is None else count - 1


@pytest.fixture
def lazy():
    device = LazyDevice()
    stager = Stager(device)
    yield device, stager
    device.run()
    stager.close()


def bucket(count=100, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(count)).to(dtype)


def await_value(values):
    return values.get(timeout=LIMIT_S)


def never(error):
    raise AssertionError(f"staging failed: {error}")


def test_nothing_is_exchanged_before_the_copy_is_complete(lazy):
    device, stager = lazy
    ready = queue.SimpleQueue()
    tensor = bucket().as_subclass(LazyTensor)
    stager.stage(tensor, PER_PACKET, ready.put, never)
    assert device.events == ["wait for compute"]
    device.run(count=2)  # magnitudes and values are there, the mark behind them is not
    time.sleep(0.05)  # nothing comes: that is what is tested
    assert ready.empty()
    device.run()
    staged = await_value(ready)
    np.testing.assert_array_equal(staged.values, bucket().numpy())
    np.testing.assert_allclose(
        staged.magnitudes, magnitudes_on_host(bucket().numpy(), ValueType.FLOAT32, PER_PACKET), rtol=1e-6
    )


def test_the_average_is_copied_back_on_the_side_stream_before_anybody_uses_it(lazy):
    device, stager = lazy
    ready = queue.SimpleQueue()
    tensor = bucket().as_subclass(LazyTensor)
    stager.stage(tensor, PER_PACKET, ready.put, never)
    device.run()
    staged = await_value(ready)
    staged.values.numpy()[:] = 7
    staged.give_back(answer := stager.future())
    # Resolved at once, but on the side stream: who waits for the answer waits for the copy there.
    assert device.events[-1] == "resolved on side"
    assert answer.value() is tensor
    assert not (tensor.as_subclass(torch.Tensor) == 7).any()
    device.run()
    assert (tensor.as_subclass(torch.Tensor) == 7).all()


def test_buffers_are_used_again_once_no_copy_uses_them(lazy):
    device, stager = lazy
    ready = queue.SimpleQueue()

    def there_and_back(*, finish):
        stager.stage(bucket().as_subclass(LazyTensor), PER_PACKET, ready.put, never)
        device.run()
        staged = await_value(ready)
        staged.give_back(stager.future())
        if finish:
            device.run()
        return staged

    first = there_and_back(finish=False)
    assert device.buffers == 2
    stager.stage(bucket().as_subclass(LazyTensor), PER_PACKET, ready.put, never)
    assert device.buffers == 4, "the copy back of the first is still queued"
    device.run()
    second = await_value(ready)
    assert not np.shares_memory(first.values.numpy(), second.values.numpy())
    for _ in range(5):
        there_and_back(finish=True)
    assert device.buffers == 4


def test_buckets_come_in_order_and_one_that_fails_stops_none(lazy):
    device, stager = lazy
    came, failed = queue.SimpleQueue(), []

    def ready(staged):
        came.put(len(staged.values))
        if len(staged.values) == 2:
            raise ValueError("no two")

    for count in (1, 2, 3):
        stager.stage(bucket(count).as_subclass(LazyTensor), PER_PACKET, ready, failed.append)
    device.run()
    assert [await_value(came) for _ in range(3)] == [1, 2, 3]
    assert [str(error) for error in failed] == ["no two"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_host_tensors_are_exchanged_where_they_are(dtype):
    assert stager_for(torch.device("cpu")) is None
    tensor = bucket(dtype=dtype)
    array, value_type = as_array(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert torch.equal(as_tensor(Bucket(array, value_type, [])), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, PER_PACKET - 1, PER_PACKET, 10 * PER_PACKET, 10 * PER_PACKET + 3])
def test_magnitudes_are_those_of_the_host(dtype, count):
    tensor = bucket(count, dtype)
    expected = magnitudes_on_host(*as_array(tensor), PER_PACKET)
    ours = packet_magnitudes(tensor, PER_PACKET)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5)


def test_what_is_not_finite_counts_as_the_largest():
    tensor = bucket(3 * PER_PACKET)
    tensor[1], tensor[PER_PACKET] = math.nan, -math.inf
    assert packet_magnitudes(tensor, PER_PACKET).isinf().tolist() == [True, True, False]


def test_other_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="gradients on meta"):
        stager_for(torch.device("meta"))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_bucket_on_cuda_goes_to_the_host_and_back(dtype):
    stager = stager_for(torch.device("cuda", 0))
    for seed in range(20):
        plain = bucket(1 << 18, dtype, seed)
        ready = queue.SimpleQueue()
        tensor = plain.cuda(non_blocking=True) * 2  # still being computed when it is staged
        stager.stage(tensor, 360, ready.put, never)
        staged = await_value(ready)
        np.testing.assert_array_equal(as_array(staged.values)[0], as_array(plain * 2)[0])
        expected = magnitudes_on_host(*as_array(plain * 2), 360)
        np.testing.assert_allclose(staged.magnitudes, expected, rtol=1e-4)
        staged.values[:] = plain * 3
        staged.give_back(answer := stager.future())
        torch.testing.assert_close(answer.wait().cpu(), plain * 3, rtol=0, atol=0)
    stager.close()


@needs_cuda
def test_cuda_buffers_are_pinned_and_reused():
    stager = stager_for(torch.device("cuda", 0))
    seen = set()
    for seed in range(10):
        ready = queue.SimpleQueue()
        stager.stage(bucket(1000, seed=seed).cuda(), PER_PACKET, ready.put, never)
        staged = await_value(ready)
        assert staged.values.is_pinned()
        seen.add(staged.values.data_ptr())
        staged.give_back(answer := stager.future())
        answer.wait()
        torch.cuda.synchronize()
    assert len(seen) == 1
    stager.close()
