/* SPDX-License-Identifier: Apache-2.0 */
/* Packets between ranks of one host, through shared memory: a ring per direction, into which the sender writes bursts
 * as they would leave through its socket, and which the receiver reads in place. A receiver that waits sets a flag, and
 * is woken through an eventfd. Both sides are processes of one job; a ring's contents are validated all the same.
 *
 * A record is its head, in RECORD_ALIGN bytes, followed by its datagrams, all but the last of the same size. It does
 * not wrap: a head of 0 bytes leads back to the beginning.
 *
 * Messages in a rank's exported memory are not copied into the ring: the record holds headers, and where in that memory
 * the message begins. The sender does not change its bytes until they are acknowledged, and the receiver reads them
 * there.
 */

#include <string.h>
#include <unistd.h>

#include "packet.h"
#include "ring.h"

enum { CONTROL_ROOM = 16384 }; /* room that data leaves for control packets */

static uint64_t aligned(uint64_t bytes) {
    return (bytes + RECORD_ALIGN - 1) & ~(uint64_t)(RECORD_ALIGN - 1);
}

/* Out ----------------------------------------------------------------------------------------------------------------
 */

static bool has_room(const ring *self, uint64_t bytes) {
    uint64_t used = self->mine - self->theirs; /* more than the capacity if the reader reports nonsense */
    return used <= self->capacity && bytes <= self->capacity - used;
}

/* Return room for a record of this many bytes that leaves `free` bytes free, or NULL if the ring is full. */
static uint8_t *reserve(ring *self, uint64_t bytes, uint64_t free) {
    uint64_t offset = self->mine % self->capacity, left = self->capacity - offset, size = RECORD_ALIGN + aligned(bytes);
    uint64_t needed = (size <= left ? size : left + size) + free;
    if (!has_room(self, needed)) {
        self->theirs = __atomic_load_n(&self->marks->taken, __ATOMIC_ACQUIRE);
        if (!has_room(self, needed)) {
            __atomic_store_n(&self->marks->starving, 1, __ATOMIC_SEQ_CST);
            self->theirs = __atomic_load_n(&self->marks->taken, __ATOMIC_SEQ_CST);
            self->starving = !has_room(self, needed);
            if (self->starving)
                return NULL;
        }
    }
    if (size > left) {
        *(record_head *)(self->bytes + offset) = (record_head){0};
        self->mine += left;
        offset = 0;
    }
    return self->bytes + offset + RECORD_ALIGN;
}

static void wake_peer(neighbour *to) {
    if (!__atomic_load_n(to->asleep, __ATOMIC_SEQ_CST) || !__atomic_exchange_n(to->asleep, 0, __ATOMIC_SEQ_CST))
        return;
    uint64_t one = 1;
    ssize_t written = write(to->bell, &one, sizeof one);
    (void)written; /* it can only fail if full, and then the bell rings anyway */
}

static uint64_t size_of(const record_head *head) {
    return RECORD_ALIGN + (head->message_bytes ? EXPORTED_ROOM : aligned(head->bytes));
}

static void publish(neighbour *to, uint8_t *at, record_head head) {
    ring *self = &to->out;
    *(record_head *)(at - RECORD_ALIGN) = head;
    self->mine += size_of(&head);
    self->starving = false;
    __atomic_store_n(&self->marks->written, self->mine, __ATOMIC_SEQ_CST);
    wake_peer(to);
}

/* Send one datagram. The functions for sending return 0, or RING_FULL. */
int ring_send_datagram(neighbour *to, const uint8_t *datagram, int64_t bytes) {
    uint8_t *at = reserve(&to->out, (uint64_t)bytes, 0);
    if (!at)
        return RING_FULL;
    memcpy(at, datagram, (size_t)bytes);
    publish(to, at, (record_head){.bytes = (uint32_t)bytes, .segment = (uint32_t)bytes});
    return 0;
}

/* Send datagrams of `segment` bytes (the last may be shorter), gathered from pieces. */
int ring_send_burst(neighbour *to, const struct iovec *pieces, int64_t count, int64_t segment) {
    uint64_t bytes = 0;
    for (int64_t i = 0; i < count; i++)
        bytes += pieces[i].iov_len;
    uint8_t *at = reserve(&to->out, bytes, CONTROL_ROOM), *into = at;
    if (!at)
        return RING_FULL;
    for (int64_t i = 0; i < count; i++) {
        memcpy(into, pieces[i].iov_base, pieces[i].iov_len);
        into += pieces[i].iov_len;
    }
    publish(to, at, (record_head){.bytes = (uint32_t)bytes, .segment = (uint32_t)segment});
    return 0;
}

/* Send headers for segments of `segment` bytes of a message at `place` in exported memory. */
int ring_send_exported(neighbour *to, const void *headers, int64_t bytes, int64_t segment, int64_t place,
                       int64_t message_bytes) {
    uint8_t *at = reserve(&to->out, EXPORTED_ROOM, CONTROL_ROOM);
    if (!at)
        return RING_FULL;
    memcpy(at, headers, (size_t)bytes);
    publish(to, at, (record_head){(uint32_t)bytes, (uint32_t)segment, place, message_bytes});
    return 0;
}

/* In -----------------------------------------------------------------------------------------------------------------
 */

/* Return whether records have arrived, or room for records that had none. */
bool ring_is_ready(neighbour *from) {
    if (from->in.bytes && __atomic_load_n(&from->in.marks->written, __ATOMIC_SEQ_CST) != from->in.mine)
        return true;
    if (!from->out.starving || __atomic_load_n(&from->out.marks->starving, __ATOMIC_SEQ_CST))
        return false;
    from->out.starving = false; /* reset: the waiting packets may be gone by then */
    return true;
}

static const uint8_t *next_record(const ring *self) {
    return self->bytes + self->mine % self->capacity;
}

/* Stop reading: the contents were not written by an engine. */
void ring_break(neighbour *from) {
    from->in.bytes = NULL;
}

/* Copy the next record's head, which leads back to the beginning if it has 0 bytes, and return where its packets are;
 * NULL if there is none. A ring with an invalid record is broken. */
const uint8_t *ring_next(neighbour *from, record_head *head) {
    ring *self = &from->in;
    if (!self->bytes)
        return NULL;
    if (self->mine == self->theirs)
        self->theirs = __atomic_load_n(&self->marks->written, __ATOMIC_ACQUIRE);
    uint64_t left = self->theirs - self->mine, room = self->capacity - self->mine % self->capacity;
    if (!left)
        return NULL;
    const uint8_t *at = next_record(self);
    *head = *(const record_head *)at;
    uint64_t size = head->bytes ? size_of(head) : room;
    /* A consumer of datagrams has room for what a socket could deliver, and no more. */
    bool sound = !head->bytes || (head->segment && head->segment <= DATAGRAM_MAX && size <= room);
    if (sound && left <= self->capacity && size <= left)
        return at + RECORD_ALIGN;
    ring_break(from);
    return NULL;
}

/* Advance past a record. */
void ring_pass(neighbour *from, const record_head *head) {
    ring *self = &from->in;
    self->mine += head->bytes ? size_of(head) : self->capacity - self->mine % self->capacity;
    __atomic_store_n(&self->marks->taken, self->mine, __ATOMIC_SEQ_CST);
}

/* Wake a writer that waits for room. */
void ring_relieve(neighbour *from) {
    if (__atomic_load_n(&from->in.marks->starving, __ATOMIC_SEQ_CST)) {
        __atomic_store_n(&from->in.marks->starving, 0, __ATOMIC_SEQ_CST);
        wake_peer(from);
    }
}
