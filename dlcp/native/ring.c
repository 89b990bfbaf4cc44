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

#include "internal.h"

enum { RECORD_ALIGN = 64, RECORDS = 2 };
enum { CONTROL_ROOM = 16384 }; /* room that data leaves for control packets */
/* Size charged to a record of exported packets, so that not too many wait before more urgent ones. */
enum { EXPORTED_ROOM = 16384 };

typedef struct {
    uint32_t bytes, segment;
    int64_t place, message_bytes; /* in exported memory, if message_bytes is not 0 */
} record_head;

static uint64_t aligned(uint64_t bytes) {
    return (bytes + RECORD_ALIGN - 1) & ~(uint64_t)(RECORD_ALIGN - 1);
}

/* A peer has both rings, or none.
 *
 * Receive packets from a peer out of `capacity` bytes at `bytes`, a multiple of 64, from now on. `marks` and `asleep`,
 * which all rings of an engine share, begin as zeros; `bell` is an eventfd that the engine waits on. */
void dlcp_ring_in(engine *owner, int64_t peer, void *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                  int bell) {
    flow *from = &owner->flows[peer];
    if (!from->in.bytes)
        owner->shared++;
    from->in = (ring){.marks = marks, .bytes = bytes, .capacity = (uint64_t)capacity};
    owner->asleep = asleep;
    owner->bell = bell;
}

/* Send packets to a peer through its ring from now on, not the socket; arguments as above, with the peer's `asleep` and
 * `bell`. */
void dlcp_ring_out(engine *owner, int64_t peer, void *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                   int bell) {
    flow *to = &owner->flows[peer];
    to->out = (ring){.marks = marks, .bytes = bytes, .capacity = (uint64_t)capacity};
    to->peer_asleep = asleep;
    to->peer_bell = bell;
}

/* Let peers on this host read messages from the `bytes` bytes at `memory`, which they map, in place. */
void dlcp_export(engine *owner, const uint8_t *memory, int64_t bytes) {
    owner->exported = memory;
    owner->exported_bytes = bytes;
}

/* Register a peer's exported memory. */
void dlcp_import(engine *owner, int64_t peer, const uint8_t *memory, int64_t bytes) {
    flow *from = &owner->flows[peer];
    from->imported = memory;
    from->imported_bytes = bytes;
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

static void wake_peer(flow *to) {
    if (!__atomic_load_n(to->peer_asleep, __ATOMIC_SEQ_CST) ||
        !__atomic_exchange_n(to->peer_asleep, 0, __ATOMIC_SEQ_CST))
        return;
    uint64_t one = 1;
    ssize_t written = write(to->peer_bell, &one, sizeof one);
    (void)written; /* it can only fail if full, and then the bell rings anyway */
}

static uint64_t size_of(const record_head *head) {
    return RECORD_ALIGN + (head->message_bytes ? EXPORTED_ROOM : aligned(head->bytes));
}

static void publish(flow *to, uint8_t *at, record_head head) {
    ring *self = &to->out;
    *(record_head *)(at - RECORD_ALIGN) = head;
    self->mine += size_of(&head);
    self->starving = false;
    __atomic_store_n(&self->marks->written, self->mine, __ATOMIC_SEQ_CST);
    wake_peer(to);
}

int ring_send_datagram(flow *to, const uint8_t *datagram, int64_t bytes) {
    uint8_t *at = reserve(&to->out, (uint64_t)bytes, 0);
    if (!at)
        return RING_FULL;
    memcpy(at, datagram, (size_t)bytes);
    publish(to, at, (record_head){.bytes = (uint32_t)bytes, .segment = (uint32_t)bytes});
    return 0;
}

int ring_send_burst(engine *owner, flow *to, const struct iovec *pieces, int64_t parts) {
    uint64_t bytes = 0, segment = HEADER_BYTES + (uint64_t)owner->config.payload_bytes;
    for (int64_t i = 0; i < parts; i++)
        bytes += pieces[i].iov_len;
    uint8_t *at = reserve(&to->out, bytes, CONTROL_ROOM), *into = at;
    if (!at)
        return RING_FULL;
    for (int64_t i = 0; i < parts; i++) {
        memcpy(into, pieces[i].iov_base, pieces[i].iov_len);
        into += pieces[i].iov_len;
    }
    publish(to, at, (record_head){.bytes = (uint32_t)bytes, .segment = (uint32_t)segment});
    owner->view.counters.sent_bursts++;
    return 0;
}

/* Return whether packets of a message are sent from exported memory. */
bool ring_is_exported(const engine *owner, const outgoing *message, const uint32_t *packets, int64_t count) {
    if (!owner->exported || message->payload < owner->exported ||
        message->payload + message->bytes > owner->exported + owner->exported_bytes)
        return false;
    for (int64_t k = 0; k < count && message->tail_bytes; k++)
        if (((int64_t)packets[k] + 1) * owner->config.payload_bytes > message->bytes)
            return false;
    return true;
}

/* Send packets for which ring_is_exported holds. */
int ring_send_exported(engine *owner, flow *to, const outgoing *message, int64_t count,
                       uint8_t (*headers)[HEADER_BYTES]) {
    uint8_t *at = reserve(&to->out, EXPORTED_ROOM, CONTROL_ROOM);
    if (!at)
        return RING_FULL;
    memcpy(at, headers, (size_t)count * HEADER_BYTES);
    publish(to, at,
            (record_head){(uint32_t)count * HEADER_BYTES, HEADER_BYTES, message->payload - owner->exported,
                          message->bytes});
    owner->view.counters.sent_bursts++;
    return 0;
}

/* In -----------------------------------------------------------------------------------------------------------------
 */

static bool has_news(flow *from) {
    if (from->in.bytes && __atomic_load_n(&from->in.marks->written, __ATOMIC_SEQ_CST) != from->in.mine)
        return true;
    if (!from->out.starving || __atomic_load_n(&from->out.marks->starving, __ATOMIC_SEQ_CST))
        return false;
    from->out.starving = false; /* reset: the waiting packets may be gone by then */
    return true;
}

/* Announce that the engine is about to wait; return whether it need not, since something arrived or may leave. */
bool ring_fall_asleep(engine *owner) {
    if (!owner->asleep)
        return false;
    __atomic_store_n(owner->asleep, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < owner->config.peers; i++)
        if (has_news(&owner->flows[i])) {
            ring_wake_up(owner);
            return true;
        }
    return false;
}

void ring_wake_up(engine *owner) {
    if (owner->asleep)
        __atomic_store_n(owner->asleep, 0, __ATOMIC_SEQ_CST);
}

/* Process packets of a message in the peer's exported memory; return whether the record was valid. */
static bool take_exported(engine *owner, flow *from, record_head head, const uint8_t *headers, double now_s) {
    int64_t place = head.place, bytes = head.message_bytes;
    if (place < 0 || bytes < 0 || place > from->imported_bytes || bytes > from->imported_bytes - place)
        return false;
    if (head.segment != HEADER_BYTES || head.bytes > EXPORTED_ROOM)
        return false;
    for (uint64_t start = 0; start + HEADER_BYTES <= head.bytes; start += HEADER_BYTES) {
        uint8_t header[HEADER_BYTES]; /* our own copy: it determines what is read */
        memcpy(header, headers + start, HEADER_BYTES);
        int64_t offset = header_index(header) * owner->config.payload_bytes, left = bytes - offset;
        if (left <= 0)
            return false;
        if (engine_refuses(owner, from, header, HEADER_BYTES))
            continue;
        if (header_type(header) != DATA) {
            owner->view.counters.refused_malformed++;
            continue;
        }
        from->view.heard_s = now_s;
        int64_t size = smaller(left, owner->config.payload_bytes);
        incoming_take_data(owner, from, header, from->imported + place + offset, size, 0, now_s);
    }
    return true;
}

static void take_datagram(engine *owner, flow *from, const uint8_t *datagram, int64_t bytes, double now_s) {
    if (!engine_refuses(owner, from, datagram, bytes))
        engine_take(owner, from, datagram, bytes, 0, now_s);
}

static void take_datagrams(engine *owner, flow *from, record_head head, const uint8_t *datagrams, double now_s) {
    for (uint64_t start = 0; start < head.bytes; start += head.segment) {
        uint64_t bytes = head.bytes - start < head.segment ? head.bytes - start : head.segment;
        take_datagram(owner, from, datagrams + start, (int64_t)bytes, now_s);
    }
}

/* Process a record, and return its size with its head; 0 if invalid. The peer claims to have written `left` bytes. */
static uint64_t take_record(engine *owner, flow *from, uint64_t left) {
    ring *self = &from->in;
    const uint8_t *at = self->bytes + self->mine % self->capacity;
    record_head head = *(const record_head *)at;
    uint64_t offset = self->mine % self->capacity, room = self->capacity - offset;
    if (left > self->capacity)
        return 0;
    if (!head.bytes)
        return room <= left ? room : 0;
    uint64_t size = size_of(&head);
    /* A consumer of datagrams has room for what a socket could deliver, and no more. */
    if (!head.segment || head.segment > DATAGRAM_MAX || size > room || size > left)
        return 0;
    double now_s = owner->arrived_s = clock_s();
    if (!head.message_bytes)
        take_datagrams(owner, from, head, at + RECORD_ALIGN, now_s);
    else if (!take_exported(owner, from, head, at + RECORD_ALIGN, now_s))
        return 0;
    owner->view.counters.received_bursts++;
    return size;
}

/* Return whether the next record begins with a packet that a sum needs only after others' packets. */
static bool is_out_of_turn(const engine *owner, const flow *from) {
    uint64_t offset = from->in.mine % from->in.capacity;
    const uint8_t *at = from->in.bytes + offset, *header = at + RECORD_ALIGN;
    uint32_t bytes = ((const record_head *)at)->bytes;
    if (bytes < HEADER_BYTES || offset + RECORD_ALIGN + HEADER_BYTES > from->in.capacity || (header[0] & 15) != DATA)
        return false;
    int64_t index = header_index(header);
    const incoming *message = incoming_find(owner, from->peer, header_step(header), header_message(header));
    return message && message->reduction && index < message->packets &&
           !reduction_is_in_turn(message->reduction, message->position, index);
}

/* Process records of a peer's ring, up to a limit, and no early ones if `patient`; return how many. */
int64_t ring_receive(engine *owner, flow *from, bool patient) {
    ring *self = &from->in;
    int64_t count = 0;
    while (self->bytes && count < RECORDS) {
        if (self->mine == self->theirs)
            self->theirs = __atomic_load_n(&self->marks->written, __ATOMIC_ACQUIRE);
        if (self->mine == self->theirs)
            break;
        if (patient && is_out_of_turn(owner, from))
            break;
        uint64_t size = take_record(owner, from, self->theirs - self->mine);
        if (!size) { /* not written by an engine: the rest is unreadable */
            owner->view.counters.refused_malformed++;
            self->bytes = NULL;
            break;
        }
        self->mine += size;
        count++;
        __atomic_store_n(&self->marks->taken, self->mine, __ATOMIC_SEQ_CST);
    }
    if (count && __atomic_load_n(&self->marks->starving, __ATOMIC_SEQ_CST)) {
        __atomic_store_n(&self->marks->starving, 0, __ATOMIC_SEQ_CST);
        wake_peer(from);
    }
    return count;
}
