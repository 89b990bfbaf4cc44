# SPDX-License-Identifier: Apache-2.0
"""The comparison of the backend ``dlcp`` with Gloo on every rank of a group, collective by collective."""

import traceback
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from dlcp.collectives.raw import channel, reduce

SMALL, MIDDLE = 7, 4_501
"""Values: few enough to go to everybody at once; and so many that each rank adds up a part, if they have 4 bytes."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.int16, torch.complex64, torch.complex128)
MOVED_ONLY = (torch.float8_e4m3fn, torch.uint16)


def tensor_of(rank, dtype, *shape, seed=0):
    """A rank's input; integers are small, so that products do not differ by how they overflow."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(torch.float32).to(dtype)


def fold(parts, op):
    """The expected reduction of all ranks' input, computed here."""
    stacked = torch.stack(parts)
    dtype = stacked.dtype
    wide = stacked.float() if dtype in (torch.float16, torch.bfloat16) else stacked
    results = {
        ReduceOp.SUM: lambda: wide.any(0) if dtype is torch.bool else wide.sum(0, dtype=wide.dtype),
        ReduceOp.AVG: lambda: wide.mean(0),
        ReduceOp.PRODUCT: lambda: wide.all(0) if dtype is torch.bool else wide.prod(0, dtype=wide.dtype),
        ReduceOp.MIN: lambda: wide.amin(0),
        ReduceOp.MAX: lambda: wide.amax(0),
        ReduceOp.BAND: lambda: _bitwise(torch.bitwise_and, stacked),
        ReduceOp.BOR: lambda: _bitwise(torch.bitwise_or, stacked),
        ReduceOp.BXOR: lambda: _bitwise(torch.bitwise_xor, stacked),
    }
    return results[op]().to(dtype)


def _bitwise(function, stacked):
    result = stacked[0].clone()
    for part in stacked[1:]:
        result = function(result, part)
    return result


def close(found, wanted):
    """Assert equality: of bits for what is exact, else up to the rounding of the format."""
    assert found.dtype == wanted.dtype
    if found.dtype.is_complex or (found.dtype.is_floating_point and found.dtype.itemsize > 1):
        torch.testing.assert_close(found, wanted, rtol=3 * torch.finfo(found.dtype).eps, atol=1e-6)
    else:
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@contextmanager
def changed(module, **constants):
    """Give a module's constants other values; all ranks must do so at the same point."""
    before = {name: getattr(module, name) for name in constants}
    vars(module).update(constants)
    try:
        yield
    finally:
        vars(module).update(before)


class Checks:
    """All checks of one rank; ``found`` says for each what went wrong, or None."""

    def __init__(self, group, gloo):
        self.group, self.gloo = group, gloo
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.found = {}

    def run(self, names=None):
        for name in names or [name for name in dir(self) if name.startswith("check_")]:
            try:
                getattr(self, name)()
                self.found[name] = None
            except Exception:
                self.found[name] = traceback.format_exc()
        return self.found

    def inputs(self, dtype, *shape, seed=0):
        return [tensor_of(rank, dtype, *shape, seed=seed) for rank in range(self.size)]

    def check_all_reduce(self):
        for dtype in FLOATS + INTEGERS + OTHERS:
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
                if dtype.is_complex and op is not ReduceOp.SUM:
                    continue
                for size in (SMALL, 5 * MIDDLE // dtype.itemsize) if op is ReduceOp.SUM else (SMALL,):
                    parts = self.inputs(dtype, size)
                    tensor = parts[self.rank].clone()
                    dist.all_reduce(tensor, op, group=self.group)
                    close(tensor, fold(parts, op))

    def check_all_reduce_is_gloos(self):
        for dtype in FLOATS + INTEGERS:
            for op in (ReduceOp.PRODUCT, ReduceOp.MAX) if dtype is torch.int64 else (ReduceOp.SUM,):
                ours, theirs = (tensor_of(self.rank, dtype, MIDDLE, seed=1) for _ in range(2))
                dist.all_reduce(ours, op, group=self.group)
                dist.all_reduce(theirs, op, group=self.gloo)
                if dtype is torch.float32 and self.size == 2:
                    assert torch.equal(ours, theirs), "two values have one sum"
                elif dtype in (torch.float16, torch.bfloat16):
                    # Gloo rounds with every rank, dlcp once
                    torch.testing.assert_close(ours, theirs, rtol=3 * torch.finfo(dtype).eps, atol=0.05)
                else:
                    close(ours, theirs)

    def check_average_and_bitwise(self):
        for size in (SMALL, MIDDLE):
            for dtype in (*FLOATS, torch.complex64):
                parts = self.inputs(dtype, size)
                tensor = parts[self.rank].clone()
                dist.all_reduce(tensor, ReduceOp.AVG, group=self.group)
                close(tensor, fold(parts, ReduceOp.AVG))
            for dtype in (torch.uint8, torch.int64, torch.bool):
                for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
                    parts = self.inputs(dtype, size)
                    tensor = parts[self.rank].clone()
                    dist.all_reduce(tensor, op, group=self.group)
                    close(tensor, fold(parts, op))

    def check_scaled_sum(self):
        parts = self.inputs(torch.float32, MIDDLE)
        tensor = parts[self.rank].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.25), group=self.group)  # as PyTorch 2.9 has it, too
        close(tensor, fold([part * 0.25 for part in parts], ReduceOp.SUM))

    def check_what_makes_no_sense_is_refused(self):
        for dtype, op in (
            (torch.float32, ReduceOp.BAND),
            (torch.int32, ReduceOp.AVG),
            (torch.float8_e4m3fn, ReduceOp.SUM),
        ):
            with pytest.raises(TypeError, match=str(dtype)):
                dist.all_reduce(torch.ones(4).to(dtype), op, group=self.group)
        dist.barrier(self.group)  # and nothing is broken

    def check_many_pieces(self):
        with changed(reduce, _CHUNK_BYTES=40_000, ASIDE_BYTES=10_000):
            for dtype in (torch.float32, torch.bfloat16, torch.complex128):
                parts = self.inputs(dtype, 400_000 // dtype.itemsize)
                tensor = parts[self.rank].clone()
                dist.all_reduce(tensor, group=self.group)
                close(tensor, fold(parts, ReduceOp.SUM))
                dist.reduce(tensor, 1, group=self.group)
                if self.rank == 1:
                    close(tensor, fold([fold(parts, ReduceOp.SUM)] * self.size, ReduceOp.SUM))

    def check_every_rank_gets_the_same_bits(self):
        for size in (SMALL, MIDDLE):
            tensor = tensor_of(self.rank, torch.float32, size, seed=4) * 10.0 ** (3 * self.rank)
            dist.all_reduce(tensor, group=self.group)
            everyone = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(everyone, tensor, group=self.gloo)
            assert all(torch.equal(tensor, other) for other in everyone)

    def check_strided_and_empty(self):
        parts = self.inputs(torch.float32, 12, 10)
        tensor = parts[self.rank].clone().t()[::2]
        dist.all_reduce(tensor, group=self.group)
        close(tensor, fold(parts, ReduceOp.SUM).t()[::2])
        target = torch.zeros(10, 12).t()
        dist.broadcast(parts[0].clone() if self.rank == 0 else target, 0, group=self.group)
        assert self.rank == 0 or torch.equal(target, parts[0])
        for start in (dist.all_reduce, lambda t, **k: dist.broadcast(t, 0, **k)):
            start(torch.empty(0), group=self.group)
        scalar = torch.tensor(float(self.rank))
        dist.all_reduce(scalar, group=self.group)
        assert scalar.item() == sum(range(self.size))

    def check_moving(self):
        for dtype in FLOATS + INTEGERS + OTHERS + MOVED_ONLY:
            for size in (SMALL, MIDDLE) if dtype is torch.float32 else (SMALL,):
                parts = self.inputs(dtype, size)
                mine = parts[self.rank]
                gathered = [torch.zeros_like(mine) for _ in parts]
                dist.all_gather(gathered, mine, group=self.group)
                for ours, wanted in zip(gathered, parts, strict=True):
                    close(ours, wanted)
                single = torch.zeros(self.size * size).to(dtype)
                dist.all_gather_into_tensor(single, mine, group=self.group)
                close(single, torch.cat([part.view(torch.uint8) for part in parts]).view(dtype))

    def check_broadcast(self):
        for root in range(self.size):
            for dtype, size in ((torch.float32, 1), (torch.int64, MIDDLE), (torch.bfloat16, 150_000)):
                wanted = tensor_of(root, dtype, size)
                tensor = wanted.clone() if self.rank == root else torch.zeros(size).to(dtype)
                dist.broadcast(tensor, root, group=self.group)
                close(tensor, wanted)

    def check_reduce(self):
        for root in range(self.size):
            for size in (SMALL, MIDDLE):
                for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
                    parts = self.inputs(torch.float32, size, seed=root)
                    tensor = parts[self.rank].clone()
                    dist.reduce(tensor, root, op, group=self.group)
                    close(tensor, fold(parts, op) if self.rank == root else parts[self.rank])

    def check_gather_and_scatter(self):
        for root in range(self.size):
            parts = self.inputs(torch.float32, MIDDLE, seed=root)
            room = [torch.zeros(MIDDLE) for _ in parts] if self.rank == root else None
            dist.gather(parts[self.rank], room, root, group=self.group)
            for ours, wanted in zip(room or [], parts, strict=self.rank == root):
                close(ours, wanted)
            mine = torch.zeros(MIDDLE)
            dist.scatter(mine, parts if self.rank == root else None, root, group=self.group)
            close(mine, parts[self.rank])

    def check_reduce_scatter(self):
        for dtype, op in ((torch.float32, ReduceOp.SUM), (torch.bfloat16, ReduceOp.AVG), (torch.int64, ReduceOp.MAX)):
            for size in (SMALL, MIDDLE):
                inputs = self.inputs(dtype, self.size * size)
                wanted = fold(inputs, op)[self.rank * size : (self.rank + 1) * size]
                out = torch.zeros(size, dtype=dtype)
                dist.reduce_scatter_tensor(out, inputs[self.rank].clone(), op, group=self.group)
                close(out, wanted)
                dist.reduce_scatter(out.zero_(), list(inputs[self.rank].chunk(self.size)), op, group=self.group)
                close(out, wanted)
                place = inputs[self.rank].clone()
                dist.reduce_scatter_tensor(place.chunk(self.size)[self.rank], place, op, group=self.group)
                close(place.chunk(self.size)[self.rank], wanted)

    def check_all_to_all(self):
        rows = [[(2 * source + 3 * target) % 4 for target in range(self.size)] for source in range(self.size)]
        inputs = [tensor_of(rank, torch.float32, sum(rows[rank]), 50) for rank in range(self.size)]
        takes = [rows[source][self.rank] for source in range(self.size)]
        wanted = torch.cat([inputs[s].split(rows[s])[self.rank] for s in range(self.size)])
        out = torch.zeros(sum(takes), 50)
        dist.all_to_all_single(out, inputs[self.rank], takes, rows[self.rank], group=self.group)
        close(out, wanted)
        parts = [torch.zeros(count, 50) for count in takes]
        dist.all_to_all(parts, list(inputs[self.rank].split(rows[self.rank])), group=self.group)
        close(torch.cat(parts), wanted)
        even = self.inputs(torch.int32, self.size * 3, 5)
        out = torch.zeros(self.size * 3, 5, dtype=torch.int32)
        dist.all_to_all_single(out, even[self.rank], group=self.group)
        close(out, torch.cat([part.chunk(self.size)[self.rank] for part in even]))

    def check_coalesced(self):
        parts = [self.inputs(torch.float32, size, seed=size) for size in (3, MIDDLE, 11)]
        tensors = [part[self.rank].clone() for part in parts]
        with dist._coalescing_manager(group=self.group, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)
        manager.wait()
        for tensor, part in zip(tensors, parts, strict=True):
            close(tensor, fold(part, ReduceOp.SUM))
        outs = [torch.zeros(self.size * part[0].numel()) for part in parts]
        with dist._coalescing_manager(group=self.group, device=torch.device("cpu"), async_ops=True) as manager:
            for out, part in zip(outs, parts, strict=True):
                self.group.all_gather_single(out, part[self.rank])
        manager.wait()
        for out, part in zip(outs, parts, strict=True):
            close(out, torch.cat(part))
        lists = [[torch.zeros_like(part[0]) for part in parts] for _ in range(self.size)]
        dist.all_gather_coalesced(lists, [part[self.rank] for part in parts], group=self.group)
        for rank, given in enumerate(lists):
            for ours, part in zip(given, parts, strict=True):
                close(ours, part[rank])

    def check_async_operations_overlap(self):
        parts = [self.inputs(torch.float32, 100 + 37 * i, seed=i) for i in range(30)]
        tensors = [part[self.rank].clone() for part in parts]
        works = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]
        doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
        for work in reversed(works):
            assert work.wait()
            assert work.is_completed()
        for tensor, part in zip(tensors, parts, strict=True):
            close(tensor, fold(part, ReduceOp.SUM))
        close(doubled.wait(), tensors[3] * 2)

    def check_callbacks_may_wait_for_collectives(self):
        def sum_again(future):
            (tensor,) = future.value()
            again = dist.all_reduce(tensor, group=self.group, async_op=True)
            return again.get_future().wait()[0]

        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work.get_future().then(sum_again).wait().tolist() == [self.size**2] * 3

    def check_objects(self):
        everyone = [None] * self.size
        dist.all_gather_object(everyone, {"rank": self.rank, "text": "x" * 5000 * self.rank}, group=self.group)
        assert [len(item["text"]) for item in everyone] == [5000 * rank for rank in range(self.size)]
        given = [("from", 1), None] if self.rank == 1 else [None, None]
        dist.broadcast_object_list(given, 1, group=self.group)
        assert given == [("from", 1), None]
        taken = [None]
        dist.scatter_object_list(taken, list("abcd"[: self.size]) if self.rank == 0 else None, 0, group=self.group)
        assert taken == ["abcd"[self.rank]]
        room = [None] * self.size if self.rank == 0 else None
        dist.gather_object(self.rank**2, room, 0, group=self.group)
        assert self.rank != 0 or room == [rank**2 for rank in range(self.size)]

    def check_messages(self):
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for size in (0, 1, MIDDLE):
            mine, got = tensor_of(self.rank, torch.float32, size), torch.zeros(size)
            works = [dist.isend(mine, right, self.group, tag=3), dist.irecv(got, left, self.group, tag=3)]
            for work in works:
                work.wait()
            close(got, tensor_of(left, torch.float32, size))
        # By tag, not by order of arrival; and by order among those of one tag.
        sent = [tensor_of(self.rank, torch.float32, 600 + i, seed=i) for i in range(6)]
        works = [dist.isend(tensor, right, self.group, tag=i // 2) for i, tensor in enumerate(sent)]
        got = {i: torch.zeros(600 + i) for i in range(6)}
        for i in (4, 2, 0, 1, 3, 5):
            dist.recv(got[i], left, self.group, tag=i // 2)
            close(got[i], tensor_of(left, torch.float32, 600 + i, seed=i))
        for work in works:
            work.wait()

    def check_messages_from_anyone(self):
        if self.rank:
            dist.send(torch.full((5,), float(self.rank)), 0, self.group, tag=9)
            return
        sources = []
        for _ in range(self.size - 1):
            got = torch.zeros(5)
            sources.append(dist.recv(got, group=self.group, tag=9))
            assert (got == sources[-1]).all()
        assert sorted(sources) == list(range(1, self.size))

    def check_message_batches(self):
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        got = [torch.zeros(MIDDLE) for _ in range(2)]
        batch = [dist.P2POp(dist.irecv, got[i], left, self.group) for i in range(2)]
        batch += [
            dist.P2POp(dist.isend, tensor_of(self.rank, torch.float32, MIDDLE, seed=i), right, self.group)
            for i in range(2)
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        for i in range(2):
            close(got[i], tensor_of(left, torch.float32, MIDDLE, seed=i))

    def check_functional(self):
        import torch.distributed._functional_collectives as functional

        parts = self.inputs(torch.float32, 6 * self.size)
        mine = parts[self.rank]
        close(functional.all_reduce(mine, "sum", self.group) + 0, fold(parts, ReduceOp.SUM))
        close(functional.all_gather_tensor(mine, 0, self.group) + 0, torch.cat(parts))
        even = [6] * self.size
        swapped = functional.all_to_all_single(mine, even, even, self.group) + 0
        close(swapped, torch.cat([part.chunk(self.size)[self.rank] for part in parts]))
        scattered = functional.reduce_scatter_tensor(mine, "sum", 0, self.group) + 0
        close(scattered, fold(parts, ReduceOp.SUM).chunk(self.size)[self.rank])

    def check_barrier(self):
        for _ in range(3):
            dist.barrier(self.group)
        assert dist.barrier(self.group, async_op=True).wait()

    def check_what_is_over_is_forgotten(self):
        """More collectives than one horizon, with messages under way all the time."""
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        before = self.group.collectives._next
        early = dist.isend(torch.full((MIDDLE,), float(self.rank)), right, self.group, tag=70)
        horizons = []
        with changed(channel, HORIZON_EVERY=8):
            for _ in range(20):
                dist.all_reduce(torch.ones(1), group=self.group)
            horizons.append(self.group.collectives.endpoint.connection.first_step)
            got = torch.zeros(MIDDLE)
            dist.recv(got, left, self.group, tag=70)
            assert (got == left).all()
            early.wait()
            for _ in range(20):
                dist.all_reduce(torch.ones(1), group=self.group)
            dist.barrier(self.group)
            horizons.append(self.group.collectives.endpoint.connection.first_step)
        # It is numbered by the endpoint's thread, when the collective after it may have its number already.
        assert horizons[0] <= before + 1, "a message that nobody has taken yet must not be forgotten"
        assert horizons[1] > before, "the horizon has not moved"
