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

from dlcp.dtypes import ValueType
from dlcp.tags import packet_magnitudes as magnitudes_on_host
from dlcp.torch.staging import (
    DeviceStager,
    HostStager,
    as_array,
    packet_magnitudes,
    stager_for,
)

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
    stager = DeviceStager(device)
    yield device, stager
    device.run()
    stager.close()


def bucket(count=100, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(count)).to(dtype)


def await_value(values):
    return values.get(timeout=LIMIT_S)


def test_nothing_is_exchanged_before_the_copy_is_complete(lazy):
    device, stager = lazy
    ready = queue.SimpleQueue()
    tensor = bucket().as_subclass(LazyTensor)
    staged = stager.stage(tensor, PER_PACKET, ready.put)
    assert device.events == ["wait for compute"]
    device.run(count=2)  # magnitudes and values are there, the mark behind them is not
    time.sleep(0.05)  # nothing comes: that is what is tested
    assert ready.empty()
    device.run()
    assert await_value(ready) is staged
    np.testing.assert_array_equal(staged.array, bucket().numpy())
    np.testing.assert_allclose(
        staged.magnitudes, magnitudes_on_host(bucket().numpy(), ValueType.FLOAT32, PER_PACKET), rtol=1e-6
    )


def test_the_average_is_copied_back_on_the_side_stream_before_anybody_uses_it(lazy):
    device, stager = lazy
    ready = queue.SimpleQueue()
    tensor = bucket().as_subclass(LazyTensor)
    staged = stager.stage(tensor, PER_PACKET, ready.put)
    device.run()
    await_value(ready)
    staged.array[:] = 7
    staged.give_back()
    # Resolved at once, but on the side stream: who waits for the answer waits for the copy there.
    assert device.events[-1] == "resolved on side"
    assert staged.answer.value() is tensor
    assert not (tensor.as_subclass(torch.Tensor) == 7).any()
    device.run()
    assert (tensor.as_subclass(torch.Tensor) == 7).all()


def test_buffers_are_used_again_once_no_copy_uses_them(lazy):
    device, stager = lazy
    ready = queue.SimpleQueue()

    def there_and_back(*, finish):
        staged = stager.stage(bucket().as_subclass(LazyTensor), PER_PACKET, ready.put)
        device.run()
        await_value(ready)
        staged.give_back()
        if finish:
            device.run()
        return staged

    first = there_and_back(finish=False)
    assert device.buffers == 2
    second = stager.stage(bucket().as_subclass(LazyTensor), PER_PACKET, ready.put)
    assert device.buffers == 4, "the copy back of the first is still queued"
    assert not np.shares_memory(first.array, second.array)
    device.run()
    await_value(ready)
    for _ in range(5):
        there_and_back(finish=True)
    assert device.buffers == 4


def test_buckets_come_in_order_and_one_that_fails_stops_none(lazy):
    device, stager = lazy
    came = queue.SimpleQueue()

    def ready(staged):
        came.put(staged)
        if len(staged.array) == 2:
            raise ValueError("no two")

    stageds = [stager.stage(bucket(count).as_subclass(LazyTensor), PER_PACKET, ready) for count in (1, 2, 3)]
    device.run()
    assert [await_value(came) for _ in range(3)] == stageds
    with pytest.raises(Exception, match="no two"):
        stageds[1].answer.wait()
    assert not stageds[2].answer.done()


def test_a_failed_bucket_stays_failed(lazy):
    _, stager = lazy
    staged = stager.stage(bucket().as_subclass(LazyTensor), PER_PACKET, lambda staged: None)
    staged.fail(RuntimeError("rank 2 has been silent"))
    staged.fail(RuntimeError("again"))
    staged.give_back()
    with pytest.raises(Exception, match="rank 2 has been silent"):
        staged.answer.wait()


def test_what_the_framework_averages_is_not_copied_back(lazy):
    device, stager = lazy
    tensor = bucket()
    staged = stager.stage(tensor.as_subclass(LazyTensor), PER_PACKET, lambda staged: None)
    device.run()
    where = []

    def exchange(given):
        where.append(device.current)
        done = torch.futures.Future()
        done.set_result(given)
        return done

    staged.pass_on(exchange)
    assert where == ["side"], "behind what computes the tensor"
    torch.testing.assert_close(staged.answer.wait().as_subclass(torch.Tensor), bucket())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_host_tensors_are_their_own_stage(dtype):
    tensor, came = bucket(dtype=dtype), []
    staged = stager_for(torch.device("cpu")).stage(tensor, PER_PACKET, came.append)
    assert came == [staged]
    assert staged.magnitudes is None
    assert np.shares_memory(staged.array, as_array(tensor)[0])
    staged.give_back()
    assert staged.answer.value() is tensor


def test_errors_of_the_framework_reach_whoever_waits():
    failed = torch.futures.Future()
    failed.set_exception(RuntimeError("connection closed by peer"))
    staged = HostStager().stage(bucket(), PER_PACKET, lambda staged: None)
    staged.pass_on(lambda tensor: failed)
    with pytest.raises(Exception, match="connection closed by peer"):
        staged.answer.wait()


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
        staged = stager.stage(tensor, 360, ready.put)
        await_value(ready)
        np.testing.assert_array_equal(staged.array, as_array(plain * 2)[0])
        expected = magnitudes_on_host(*as_array(plain * 2), 360)
        np.testing.assert_allclose(staged.magnitudes, expected, rtol=1e-4)
        staged.array[:] = as_array(plain * 3)[0]
        staged.give_back()
        torch.testing.assert_close(staged.answer.wait().cpu(), plain * 3, rtol=0, atol=0)
    stager.close()


@needs_cuda
def test_cuda_buffers_are_pinned_and_reused():
    stager = stager_for(torch.device("cuda", 0))
    seen = set()
    for seed in range(10):
        ready = queue.SimpleQueue()
        staged = stager.stage(bucket(1000, seed=seed).cuda(), PER_PACKET, ready.put)
        await_value(ready)
        assert staged._buffers[0].is_pinned()
        seen.add(staged.array.ctypes.data)
        staged.give_back()
        staged.answer.wait()
        torch.cuda.synchronize()
    assert len(seen) == 1
    stager.close()
