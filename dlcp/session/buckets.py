# SPDX-License-Identifier: Apache-2.0
"""Which parameters are sent together: buckets in the order in which backward produces gradients, as DDP does."""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment

FIRST_BUCKET_BYTES: Final = 1 << 20
"""Size of the first bucket: small, so that communication begins early. The same as in PyTorch's DDP."""
BUCKET_BYTES: Final = 25 << 20
"""Largest size of the other buckets, unless a single parameter is larger. The same as in PyTorch's DDP."""
_BY_NAME: Final = {kind.value: kind for kind in ValueType}


@dataclass(slots=True, eq=False)
class Gradient:
    """A parameter's gradient in one step.

    Attributes
    ----------
    given
        The caller's array, which receives the average.
    stored
        A view of it in the storage type of ``value_type``.
    value_type
        The format of its values.
    future
        Resolved with ``given`` when that holds the average.
    """

    given: NDArray[Any]
    stored: NDArray[np.generic]
    value_type: ValueType
    future: "Future[NDArray[Any]]" = field(default_factory=Future)

    @classmethod
    def of(cls, name: str, values: NDArray[Any]) -> "Gradient":
        """Wrap the array of a parameter's gradient.

        Raises
        ------
        TypeError
            DLCP does not exchange this format. For bfloat16, use that of the package ``ml_dtypes``.
        ValueError
            The array is read-only.
        """
        kind = _BY_NAME.get(values.dtype.name)
        if kind is None or not values.dtype.isnative:
            raise TypeError(f"parameter {name} is {values.dtype}; DLCP exchanges {', '.join(_BY_NAME)}")
        if not values.flags.writeable:
            raise ValueError(f"the gradient of {name} is read-only; pass a copy, such as np.array(gradient)")
        return cls(values, values.view(kind.storage), kind)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place: the number of its bucket, and the range of its values there."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket that every step has: its number within the step, its format and its layers."""

    sequence: int
    value_type: ValueType
    segments: tuple[Segment, ...]

    @property
    def values(self) -> int:
        """Number of values in the bucket."""
        return self.segments[-1].stop


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The buckets that every step has, and each parameter's place in them; the same on all ranks."""

    buckets: tuple[PlannedBucket, ...]
    slots: Mapping[str, Slot]

    @property
    def nbytes(self) -> int:
        """Size of a step's gradients, in bytes."""
        return sum(bucket.values * bucket.value_type.storage.itemsize for bucket in self.buckets)

    @classmethod
    def of(cls, parameters: Iterable[tuple[Layer, int, ValueType]]) -> "BucketPlan":
        """Divide parameters into buckets.

        Parameters
        ----------
        parameters
            Layer, number of values and format of each parameter, in forward order.
        """
        buckets: list[PlannedBucket] = []
        segments: list[Segment] = []
        kind: ValueType | None = None

        def finish() -> None:
            if segments and kind:
                buckets.append(PlannedBucket(len(buckets), kind, tuple(segments)))
                segments.clear()

        for layer, size, value_type in reversed(list(parameters)):
            filled = segments[-1].stop if segments else 0
            limit = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            if value_type is not kind or (filled + size) * value_type.storage.itemsize > limit:
                finish()
                filled = 0
            kind = value_type
            segments.append(Segment(layer, filled, filled + size))
        finish()
        slots = {
            segment.layer.name: Slot(bucket.sequence, segment.start, segment.stop)
            for bucket in buckets
            for segment in bucket.segments
        }
        return cls(tuple(buckets), slots)

    def described(self) -> list[tuple[str, list[int], str]]:
        """Return name, shape and format of each parameter, in forward order; see :meth:`from_description`."""
        return [
            (segment.layer.name, list(segment.layer.shape), bucket.value_type.value)
            for bucket in reversed(self.buckets)
            for segment in reversed(bucket.segments)
        ]

    @classmethod
    def from_description(
        cls, described: Iterable[tuple[str, list[int], str]], layers: Mapping[str, Layer]
    ) -> "BucketPlan":
        """Return another rank's plan."""
        return cls.of(
            (replace(layers[name], shape=tuple(shape)), math.prod(shape), _BY_NAME[kind])
            for name, shape, kind in described
        )


class FillingBucket:
    """A bucket of one step, from its first gradient until it is averaged.

    Parameters
    ----------
    planned
        The bucket's plan.
    buffer
        Memory for its values; None for a single parameter that is averaged in place.

    Attributes
    ----------
    gradients
        The gradients that have been put in so far, by parameter.
    sent
        Whether it has been passed on to be averaged, or has failed.
    done
        Resolved when the averages have been copied back to the gradients.
    """

    def __init__(self, planned: PlannedBucket, buffer: NDArray[np.generic] | None) -> None:
        self.planned = planned
        self.buffer = buffer
        self.gradients: dict[str, Gradient] = {}
        self.sent = False
        self.done: Future[None] = Future()

    def put(self, name: str, slot: Slot, gradient: Gradient) -> None:
        """Put a parameter's gradient in."""
        self.gradients[name] = gradient
        if self.buffer is None:
            self.buffer = gradient.stored.reshape(-1)
        else:
            self.buffer[slot.start : slot.stop] = gradient.stored.reshape(-1)

    @property
    def full(self) -> bool:
        """Whether it has the gradients of all its parameters."""
        return len(self.gradients) == len(self.planned.segments)

    def fill_gaps(self) -> None:
        """Fill in zeros for parameters without a gradient on this rank."""
        if self.buffer is None:
            self.buffer = np.zeros(self.planned.values, self.planned.value_type.storage)
        for segment in self.planned.segments:
            if segment.layer.name not in self.gradients:
                self.buffer[segment.start : segment.stop] = np.zeros((), self.buffer.dtype)

    def bucket(self) -> Bucket:
        """Return the bucket to be averaged, which shares this one's buffer."""
        assert self.buffer is not None
        return Bucket(self.buffer, self.planned.value_type, self.planned.segments)

    def finish(self, error: BaseException | None) -> None:
        """Copy the averages back to the gradients, and resolve all futures; with an error, only set that on them."""
        for segment in self.planned.segments:
            gradient = self.gradients.get(segment.layer.name)
            if gradient is None:
                continue
            if error is not None:
                gradient.future.set_exception(error)
                continue
            assert self.buffer is not None
            if not np.shares_memory(self.buffer, gradient.stored):
                gradient.stored[...] = self.buffer[segment.start : segment.stop].reshape(gradient.stored.shape)
            gradient.future.set_result(gradient.given)
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Buckets:
    """The buckets of a model, step after step.

    The first step determines the plan of all later ones. If its gradients are not announced with :meth:`expect`, it
    has a bucket for each parameter.

    Parameters
    ----------
    layers
        The parameters in forward order, by name.
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self.layers = dict(layers)
        self._numbers = {name: number for number, name in enumerate(self.layers)}
        self.plan: BucketPlan | None = None
        self.filling: dict[int, FillingBucket] = {}
        self._first: dict[str, PlannedBucket] = {}
        self._buffers: dict[int, NDArray[np.generic]] = {}

    def expect(self, gradients: Mapping[str, Gradient]) -> None:
        """Plan every step's buckets from the gradients of the first step; later calls do nothing."""
        if self.plan is None:
            self.plan = BucketPlan.of(
                (_shaped(layer, gradients[name]), gradients[name].stored.size, gradients[name].value_type)
                for name, layer in self.layers.items()
                if name in gradients
            )

    def check(self, name: str, gradient: Gradient) -> None:
        """Check that a parameter's gradient has the same size and format as in the first step.

        Raises
        ------
        ValueError
            It differs, or the parameter had no gradient in the first step; the message says which.
        """
        if self.plan is None:
            return
        slot = self.plan.slots.get(name)
        if slot is None and not gradient.stored.size:
            return
        if slot is None:
            raise ValueError(f"{name} had no gradient in the first step, so it may not have one now")
        kind = self.plan.buckets[slot.bucket].value_type
        if gradient.stored.size != slot.stop - slot.start or gradient.value_type is not kind:
            raise ValueError(
                f"{name} has {gradient.stored.size} values of {gradient.value_type.value}; in the first step it had "
                f"{slot.stop - slot.start} of {kind.value}"
            )

    def put(self, name: str, gradient: Gradient) -> FillingBucket:
        """Put a parameter's gradient into its bucket; return that bucket.

        Raises
        ------
        ValueError
            See :meth:`check`.
        """
        self.check(name, gradient)
        if self.plan is None:
            number = self._numbers[name]
            segment = Segment(_shaped(self.layers[name], gradient), 0, gradient.stored.size)
            planned = self._first[name] = PlannedBucket(number, gradient.value_type, (segment,))
            slot = Slot(number, 0, segment.stop)
        else:
            slot = self.plan.slots[name]
            planned = self.plan.buckets[slot.bucket]
        filling = self.filling.get(slot.bucket) or self._begin(planned, gradient)
        filling.put(name, slot, gradient)
        return filling

    def rest(self) -> list[FillingBucket]:
        """Return this step's buckets that have not been sent, with zeros for missing gradients."""
        if self.plan:
            for planned in self.plan.buckets:
                if planned.sequence not in self.filling:
                    self._begin(planned, None)
        waiting = [filling for filling in self.filling.values() if not filling.sent]
        for filling in waiting:
            filling.fill_gaps()
        return waiting

    def lacking(self) -> list[str]:
        """Return the parameters that this step's open buckets still lack."""
        waiting = [filling for filling in self.filling.values() if not filling.sent]
        return [
            segment.layer.name
            for filling in waiting
            for segment in filling.planned.segments
            if segment.layer.name not in filling.gradients
        ]

    def fail(self, error: BaseException) -> None:
        """Fail this step's buckets that have not been sent, with an error."""
        for filling in self.filling.values():
            if not filling.sent:
                filling.sent = True
                filling.finish(error)

    def end_step(self) -> None:
        """Begin the next step; after the first one, plan the buckets if they are not planned yet."""
        if self.plan is None and self._first:
            seen = [self._first[name] for name in self.layers if name in self._first]
            self.plan = BucketPlan.of((bucket.segments[0].layer, bucket.values, bucket.value_type) for bucket in seen)
        self.filling.clear()

    def _begin(self, planned: PlannedBucket, first: Gradient | None) -> FillingBucket:
        buffer = None
        if len(planned.segments) > 1 or (first and not first.stored.flags.c_contiguous):
            buffer = self._buffers.get(planned.sequence)
            if buffer is None or len(buffer) != planned.values or buffer.dtype != planned.value_type.storage:
                buffer = self._buffers[planned.sequence] = np.empty(planned.values, planned.value_type.storage)
        filling = self.filling[planned.sequence] = FillingBucket(planned, buffer)
        return filling


def _shaped(layer: Layer, gradient: Gradient) -> Layer:
    """Return a layer with the shape of its gradient, which low-rank compressors need."""
    return replace(layer, shape=gradient.stored.shape)
