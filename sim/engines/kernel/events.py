# SPDX-License-Identifier: Apache-2.0
"""The event queue: events by time; events of equal times in the order of insertion.

Time is divided into buckets, and an event waits in one of three places. A small heap has the events of the current
bucket and before. The next `TIME_BUCKETS` buckets have an unordered list each. A large heap has the events beyond,
mostly timers. When the small heap is empty, the next bucket is emptied into it. So most insertions take constant time,
and the small heap stays a few levels deep.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.engines.kernel import arrays as k
from dlcp.sim.engines.network_tables import PacketKind
from dlcp.sim.jit import call
from dlcp.sim.rows import Row

TIME_BUCKETS: Final = 1 << 14
LARGE_LINKS: Final = 512
"""Networks with more links than this do not fit in the caches, so rows are prefetched; not tuned."""
BUCKETS_PER_WORD: Final = 32
"""Buckets per word of ``occupied``."""


@call
def push(w: Row, time: int, kind: int, number: int) -> None:
    """Insert an event: ``kind`` happens to ``number`` at ``time``."""
    key = (w.sequence << k.SEQUENCE_SHIFT) | (kind << k.ID_BITS) | number
    w.sequence += 1
    w.events_waiting += 1
    bucket = time >> w.bucket_shift
    if bucket <= w.bucket_now:
        heap_push(k.times_of(w), k.keys_of(w), w.heap_length, time, key)
        w.heap_length += 1
    elif bucket - w.bucket_now < TIME_BUCKETS:
        events = k.events_of(w)
        buckets = k.buckets_of(w)
        event = w.free_event
        e = events[event]
        w.free_event = e.next
        e.time = time
        e.key = key
        slot = bucket & (TIME_BUCKETS - 1)
        e.next = buckets[slot]
        buckets[slot] = event
        k.occupied_of(w)[slot // BUCKETS_PER_WORD] |= 1 << (slot % BUCKETS_PER_WORD)
        w.bucketed += 1
    else:
        heap_push(k.far_times_of(w), k.far_keys_of(w), w.far_length, time, key)
        w.far_length += 1


@call
def advance(w: Row) -> int:
    """Fill the empty small heap with the events of the next nonempty bucket; return their number."""
    far_times = k.far_times_of(w)
    far_keys = k.far_keys_of(w)
    bucket = w.bucket_now + 2 * TIME_BUCKETS
    if w.bucketed > 0:
        bucket = next_bucket(w)
    if w.far_length > 0:
        bucket = min(bucket, far_times[0] >> w.bucket_shift) if w.bucketed > 0 else far_times[0] >> w.bucket_shift
    elif w.bucketed == 0:
        return 0
    times = k.times_of(w)
    keys = k.keys_of(w)
    events = k.events_of(w)
    length = 0
    # The lists form a ring. A bucket more than one round ahead can only come from the large heap; the list in its slot
    # belongs to an earlier bucket, which would have been found first if it had any events.
    if w.bucketed > 0 and bucket - w.bucket_now < TIME_BUCKETS:
        slot = bucket & (TIME_BUCKETS - 1)
        event = k.buckets_of(w)[slot]
        while event >= 0:
            e = events[event]
            heap_push(times, keys, length, e.time, e.key)
            length += 1
            following = e.next
            e.next = w.free_event
            w.free_event = event
            event = following
        k.buckets_of(w)[slot] = -1
        k.occupied_of(w)[slot // BUCKETS_PER_WORD] &= ~(1 << (slot % BUCKETS_PER_WORD))
        w.bucketed -= length
    while w.far_length > 0 and far_times[0] >> w.bucket_shift <= bucket:
        heap_push(times, keys, length, far_times[0], far_keys[0])
        length += 1
        w.far_length -= 1
        heap_pop(far_times, far_keys, w.far_length)
    w.bucket_now = bucket
    w.heap_length = length
    if k.ports_of(w).shape[0] > LARGE_LINKS:
        prefetch(w)
    return length


@call
def prefetch(w: Row) -> None:
    """Read from the rows that the events in the small heap will need, so that the cache misses overlap.

    Otherwise each event would wait for its own rows. The value of ``prefetched`` has no meaning; it keeps the compiler
    from removing the reads.
    """
    keys = k.keys_of(w)
    ports = k.ports_of(w)
    prefetched = 0
    for position in range(w.heap_length):
        number = keys[position] & k.ID_MASK
        kind = (keys[position] >> k.ID_BITS) & k.KIND_MASK
        if kind == k.EventKind.ARRIVE:
            x = k.packets_of(w)[number]
            node = ports[x.port].target
            if node < w.hosts and x.kind <= PacketKind.NACK:
                m = k.messages_of(w)[x.message]
                s = k.streams_of(w)[m.stream]
                prefetched += m.sent + s.in_flight + s.single_use + k.transmissions_of(w)[x.transmission].number
                prefetched += k.states_of(w)[m.offset + x.index]
        elif kind == k.EventKind.PORT_FREE:
            prefetched += ports[number].busy_until
    w.prefetched = prefetched


@call
def next_bucket(w: Row) -> int:
    """Return the next bucket with events in its list. It exists within one round, because ``bucketed`` is above 0."""
    occupied = k.occupied_of(w)
    bucket = w.bucket_now + 1
    slot = bucket & (TIME_BUCKETS - 1)
    bits = occupied[slot // BUCKETS_PER_WORD] >> (slot % BUCKETS_PER_WORD)
    while bits == 0:
        step = BUCKETS_PER_WORD - slot % BUCKETS_PER_WORD
        bucket += step
        slot = (slot + step) & (TIME_BUCKETS - 1)
        bits = occupied[slot // BUCKETS_PER_WORD]
    while bits & 255 == 0:
        bits >>= 8
        bucket += 8
    while bits & 1 == 0:
        bits >>= 1
        bucket += 1
    return bucket


@call
def heap_push(times: NDArray[np.int64], keys: NDArray[np.int64], length: int, time: int, key: int) -> None:
    """Add to a heap with four children per node."""
    at = length
    while at > 0:
        parent = (at - 1) >> 2
        other = times[parent]
        if other < time or (other == time and keys[parent] < key):
            break
        times[at] = other
        keys[at] = keys[parent]
        at = parent
    times[at] = time
    keys[at] = key


@call
def heap_pop(times: NDArray[np.int64], keys: NDArray[np.int64], length: int) -> None:
    """Remove the first entry of a heap; ``length`` is the number that remain."""
    time = times[length]
    key = keys[length]
    at = 0
    while True:
        child = 4 * at + 1
        if child >= length:
            break
        best = child
        best_time = times[child]
        best_key = keys[child]
        end = min(child + 4, length)
        for other in range(child + 1, end):
            other_time = times[other]
            if other_time < best_time or (other_time == best_time and keys[other] < best_key):
                best = other
                best_time = other_time
                best_key = keys[other]
        if time < best_time or (time == best_time and key < best_key):
            break
        times[at] = best_time
        keys[at] = best_key
        at = best
    times[at] = time
    keys[at] = key
