# SPDX-License-Identifier: Apache-2.0
"""What happens next, ordered by time, then by when it was put in.

Three places by how far off an event is. Those of the current bucket of time and before are in a small heap; those of
the next `BUCKETS` buckets are in a list for each, unordered; those beyond, mostly timers, are in a large heap. When the
small heap is empty, the next bucket is emptied into it. So most events are put in and moved at a constant cost, and the
heap that orders them stays a few levels deep.
"""

from typing import Final

from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.state import (
    ARRIVE,
    ID_BITS,
    ID_MASK,
    KIND_MASK,
    NACK,
    PORT_FREE,
    SEQUENCE_SHIFT,
    Number,
    Rows,
)
from dlcp.sim.kernel.world import (
    buckets_of,
    events_of,
    far_keys_of,
    far_times_of,
    keys_of,
    messages_of,
    occupied_of,
    packets_of,
    ports_of,
    records_of,
    seg_of,
    streams_of,
    times_of,
)

BUCKETS: Final = 1 << 14
LARGE_LINKS: Final = 512
"""Networks of more links than this do not fit the caches. Chosen by us."""
WORD: Final = 32
"""Buckets that one number of ``occupied`` tells about."""


@call
def push(w: Rows, time: int, kind: int, number: int) -> None:
    """Put in that ``kind`` happens to ``number`` at ``time``."""
    key = (w.sequence << SEQUENCE_SHIFT) | (kind << ID_BITS) | number
    w.sequence += 1
    w.events_waiting += 1
    bucket = time >> w.bucket_shift
    if bucket <= w.bucket_now:
        heap_push(times_of(w), keys_of(w), w.heap_length, time, key)
        w.heap_length += 1
    elif bucket - w.bucket_now < BUCKETS:
        events = events_of(w)
        buckets = buckets_of(w)
        event = w.free_event
        e = events[event]
        w.free_event = e.next
        e.time = time
        e.key = key
        place = bucket & (BUCKETS - 1)
        e.next = buckets[place]
        buckets[place] = event
        occupied_of(w)[place // WORD] |= 1 << (place % WORD)
        w.bucketed += 1
    else:
        heap_push(far_times_of(w), far_keys_of(w), w.far_length, time, key)
        w.far_length += 1


@call
def pop(w: Rows) -> None:
    """Remove the first, which is at 0 of the small heap."""
    w.events_waiting -= 1
    w.heap_length -= 1
    heap_pop(times_of(w), keys_of(w), w.heap_length)


@call
def advance(w: Rows) -> Number:
    """Fill the small heap, which is empty, with the events of the next bucket that has any; return how many."""
    far_times = far_times_of(w)
    far_keys = far_keys_of(w)
    bucket = w.bucket_now + 2 * BUCKETS
    if w.bucketed > 0:
        bucket = next_bucket(w)
    if w.far_length > 0:
        bucket = min(bucket, far_times[0] >> w.bucket_shift) if w.bucketed > 0 else far_times[0] >> w.bucket_shift
    elif w.bucketed == 0:
        return 0
    times = times_of(w)
    keys = keys_of(w)
    events = events_of(w)
    buckets = buckets_of(w)
    length = 0
    # The list of a place may belong to a later round only if the bucket is beyond all that may be there.
    if w.bucketed > 0 and bucket - w.bucket_now < BUCKETS:
        place = bucket & (BUCKETS - 1)
        event = buckets[place]
        while event >= 0:
            e = events[event]
            heap_push(times, keys, length, e.time, e.key)
            length += 1
            following = e.next
            e.next = w.free_event
            w.free_event = event
            event = following
        buckets[place] = -1
        occupied_of(w)[place // WORD] &= ~(1 << (place % WORD))
        w.bucketed -= length
    while w.far_length > 0 and far_times[0] >> w.bucket_shift <= bucket:
        heap_push(times, keys, length, far_times[0], far_keys[0])
        length += 1
        w.far_length -= 1
        heap_pop(far_times, far_keys, w.far_length)
    w.bucket_now = bucket
    w.heap_length = length
    if ports_of(w).shape[0] > LARGE_LINKS:
        touch(w)
    return length


@call
def touch(w: Rows) -> None:
    """Read a little of what the events in the small heap will need, so that memory answers for all at once.

    One event after the other would wait for each row by itself. ``touched`` means nothing; it keeps the reads alive.
    """
    keys = keys_of(w)
    ports = ports_of(w)
    packets = packets_of(w)
    messages = messages_of(w)
    streams = streams_of(w)
    records = records_of(w)
    seg = seg_of(w)
    touched = 0
    for place in range(w.heap_length):
        number = keys[place] & ID_MASK
        kind = (keys[place] >> ID_BITS) & KIND_MASK
        if kind == ARRIVE:
            x = packets[number]
            node = ports[x.port].target
            if node < w.hosts and x.kind <= NACK:
                m = messages[x.node]
                s = streams[m.stream]
                touched += m.sent + s.flying + s.own + records[x.record].number + seg[m.offset + x.index]
        elif kind == PORT_FREE:
            touched += ports[number].busy
    w.touched = touched


@call
def next_bucket(w: Rows) -> Number:
    """Return the next bucket after the current one that has events; there is one."""
    occupied = occupied_of(w)
    bucket = w.bucket_now + 1
    place = bucket & (BUCKETS - 1)
    bits = occupied[place // WORD] >> (place % WORD)
    while bits == 0:
        step = WORD - place % WORD
        bucket += step
        place = (place + step) & (BUCKETS - 1)
        bits = occupied[place // WORD]
    while bits & 255 == 0:
        bits >>= 8
        bucket += 8
    while bits & 1 == 0:
        bits >>= 1
        bucket += 1
    return bucket


@call
def heap_push(times: Rows, keys: Rows, length: int, time: int, key: int) -> None:
    """Add to a heap of four children per node."""
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
def heap_pop(times: Rows, keys: Rows, length: int) -> None:
    """Remove the first of a heap, of which ``length`` others remain."""
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
