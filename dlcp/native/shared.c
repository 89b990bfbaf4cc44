/* SPDX-License-Identifier: Apache-2.0 */
/* Packets between ranks of one host, through memory that both have: a ring for each direction, into which the sender writes
 * bursts just as they would leave through its socket, and in which the receiver reads them where they lie. A receiver that
 * waits says so, and is woken through an eventfd. Both sides are processes of one job; what a ring holds is checked all the same.
 *
 * A record is its head, in RECORD_ALIGN bytes, and its datagrams, one after the other, all but the last of one size. It does
 * not wrap: a head of 0 bytes leads back to the beginning.
 *
 * What a rank sends from memory that it has lent is not copied into the ring: the record holds headers, and says where in that
 * memory the message begins. A sender leaves its bytes as they are until they are confirmed, and the receiver takes them from
 * there.
 */

#include <string.h>
#include <unistd.h>

#include "engine.h"

enum { RECORD_ALIGN = 64, RECORDS = 2 };
enum { CONTROL_ROOM = 16384 }; /* what data leaves free for control packets */
enum { LENT_ROOM = 16384 };    /* what a record of lent packets takes up, so that not too many wait before what is more urgent */

typedef struct {
    uint32_t bytes, segment;
    int64_t place, message_bytes; /* in lent memory, if message_bytes is not 0 */
} record_head;

static uint64_t aligned(uint64_t bytes) {
    return (bytes + RECORD_ALIGN - 1) & ~(uint64_t)(RECORD_ALIGN - 1);
}

/* A peer has both rings, or none.
 *
 * Take packets from a peer out of `capacity` bytes at `bytes`, a multiple of 64, from now on. `marks` and `asleep`, which is for
 * all of an engine's rings, begin as zeros; `bell` is an eventfd that the engine waits on. */
API void dlcp_engine_share_in(engine *e, int64_t peer, ring_marks *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                              int bell) {
    flow *f = &e->flows[peer];
    if (!f->in.bytes) e->shared++;
    f->in = (ring){.marks = marks, .bytes = bytes, .capacity = (uint64_t)capacity};
    e->asleep = asleep, e->bell = bell;
}

/* Put packets for a peer into its ring from now on, not into the socket; what it means is as above, `asleep` and `bell` are its. */
API void dlcp_engine_share_out(engine *e, int64_t peer, ring_marks *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                               int bell) {
    flow *f = &e->flows[peer];
    f->out = (ring){.marks = marks, .bytes = bytes, .capacity = (uint64_t)capacity};
    f->peer_asleep = asleep, f->peer_bell = bell;
}

/* Let peers on this host read what is sent from `bytes` bytes at `memory`, which they have, too, instead of copying it. */
API void dlcp_engine_lend(engine *e, const uint8_t *memory, int64_t bytes) {
    e->lent = memory, e->lent_bytes = bytes;
}

/* Know the memory that a peer has lent. */
API void dlcp_engine_borrow(engine *e, int64_t peer, const uint8_t *memory, int64_t bytes) {
    e->flows[peer].borrowed = memory, e->flows[peer].borrowed_bytes = bytes;
}

/* Out ---------------------------------------------------------------------------------------------------------------- */

static int has_room(const ring *r, uint64_t bytes) {
    return bytes <= r->capacity - (r->mine - r->others);
}

/* Return room for a record of so many bytes that leaves others free, or NULL if the ring is full. */
static uint8_t *reserve(ring *r, uint64_t bytes, uint64_t free) {
    uint64_t offset = r->mine % r->capacity, left = r->capacity - offset, size = RECORD_ALIGN + aligned(bytes);
    uint64_t needed = (size <= left ? size : left + size) + free;
    if (!has_room(r, needed)) {
        r->others = __atomic_load_n(&r->marks->taken, __ATOMIC_ACQUIRE);
        if (!has_room(r, needed)) {
            __atomic_store_n(&r->marks->starving, 1, __ATOMIC_SEQ_CST);
            r->others = __atomic_load_n(&r->marks->taken, __ATOMIC_SEQ_CST);
            r->starving = !has_room(r, needed);
            if (r->starving) return NULL;
        }
    }
    if (size > left) {
        *(record_head *)(r->bytes + offset) = (record_head){0};
        r->mine += left, offset = 0;
    }
    return r->bytes + offset + RECORD_ALIGN;
}

static void ring_bell(flow *f) {
    if (!__atomic_load_n(f->peer_asleep, __ATOMIC_SEQ_CST) || !__atomic_exchange_n(f->peer_asleep, 0, __ATOMIC_SEQ_CST)) return;
    uint64_t one = 1;
    ssize_t written = write(f->peer_bell, &one, sizeof one);
    (void)written; /* it can only be full, so that it is ringing */
}

static uint64_t size_of(const record_head *head) {
    return RECORD_ALIGN + (head->message_bytes ? LENT_ROOM : aligned(head->bytes));
}

static void publish(flow *f, uint8_t *at, record_head head) {
    ring *r = &f->out;
    *(record_head *)(at - RECORD_ALIGN) = head;
    r->mine += size_of(&head), r->starving = 0;
    __atomic_store_n(&r->marks->written, r->mine, __ATOMIC_SEQ_CST);
    ring_bell(f);
}

int share_control(flow *f, const uint8_t *datagram, int64_t bytes) {
    uint8_t *at = reserve(&f->out, (uint64_t)bytes, 0);
    if (!at) return RING_FULL;
    memcpy(at, datagram, (size_t)bytes);
    publish(f, at, (record_head){.bytes = (uint32_t)bytes, .segment = (uint32_t)bytes});
    return 0;
}

int share_burst(engine *e, flow *f, const struct iovec *pieces, int64_t parts) {
    uint64_t bytes = 0, segment = HEADER_BYTES + (uint64_t)e->payload_bytes;
    for (int64_t p = 0; p < parts; p++) bytes += pieces[p].iov_len;
    uint8_t *at = reserve(&f->out, bytes, CONTROL_ROOM), *into = at;
    if (!at) return RING_FULL;
    for (int64_t p = 0; p < parts; p++) {
        memcpy(into, pieces[p].iov_base, pieces[p].iov_len);
        into += pieces[p].iov_len;
    }
    publish(f, at, (record_head){.bytes = (uint32_t)bytes, .segment = (uint32_t)segment});
    e->sent_bursts++;
    return 0;
}

/* Tell whether packets of a message are sent from memory that has been lent. */
int is_lent(const engine *e, const outgoing *m, const uint32_t *packets, int64_t count) {
    if (!e->lent || m->payload < e->lent || m->payload + m->bytes > e->lent + e->lent_bytes) return 0;
    for (int64_t k = 0; k < count && m->tail_bytes; k++)
        if (((int64_t)packets[k] + 1) * e->payload_bytes > m->bytes) return 0;
    return 1;
}

/* Send packets for which is_lent holds. */
int share_lent(engine *e, flow *f, const outgoing *m, int64_t count, uint8_t (*headers)[HEADER_BYTES]) {
    uint8_t *at = reserve(&f->out, LENT_ROOM, CONTROL_ROOM);
    if (!at) return RING_FULL;
    memcpy(at, headers, (size_t)count * HEADER_BYTES);
    publish(f, at, (record_head){(uint32_t)count * HEADER_BYTES, HEADER_BYTES, m->payload - e->lent, m->bytes});
    e->sent_bursts++;
    return 0;
}

/* In ----------------------------------------------------------------------------------------------------------------- */

static int has_news(const flow *f) {
    if (f->in.bytes && __atomic_load_n(&f->in.marks->written, __ATOMIC_SEQ_CST) != f->in.mine) return 1;
    return f->out.starving && !__atomic_load_n(&f->out.marks->starving, __ATOMIC_SEQ_CST);
}

/* Say that the engine is about to wait; return whether it need not, for something has come or may leave. */
int fall_asleep(engine *e) {
    if (!e->asleep) return 0;
    __atomic_store_n(e->asleep, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < e->flow_count; i++)
        if (has_news(&e->flows[i])) {
            wake_up(e);
            return 1;
        }
    return 0;
}

void wake_up(engine *e) {
    if (e->asleep) __atomic_store_n(e->asleep, 0, __ATOMIC_SEQ_CST);
}

/* Take in packets of a message that the peer sends from memory which it has lent; return whether it has. */
static int take_lent(engine *e, flow *f, record_head head, const uint8_t *headers, double now_s) {
    int64_t place = head.place, bytes = head.message_bytes;
    if (place < 0 || bytes < 0 || place > f->borrowed_bytes || bytes > f->borrowed_bytes - place) return 0;
    if (head.segment != HEADER_BYTES || head.bytes > LENT_ROOM) return 0;
    for (uint64_t start = 0; start + HEADER_BYTES <= head.bytes; start += HEADER_BYTES) {
        uint8_t header[HEADER_BYTES]; /* of our own: it says from where is read */
        memcpy(header, headers + start, HEADER_BYTES);
        int64_t offset = (int64_t)get32(header + 16) * e->payload_bytes, left = bytes - offset;
        if (left <= 0) return 0;
        take_borrowed(e, f, header, f->borrowed + place + offset, left < e->payload_bytes ? left : e->payload_bytes, now_s);
    }
    return 1;
}

static void take_datagrams(engine *e, flow *f, record_head head, const uint8_t *datagrams, double now_s) {
    for (uint64_t start = 0; start < head.bytes; start += head.segment) {
        uint64_t bytes = head.bytes - start < head.segment ? head.bytes - start : head.segment;
        take_shared(e, f, datagrams + start, (int64_t)bytes, now_s);
    }
}

/* Take in a record, and return its size with its head; 0 if it is none. */
static uint64_t take_record(engine *e, flow *f, uint64_t left) {
    ring *r = &f->in;
    const uint8_t *at = r->bytes + r->mine % r->capacity;
    record_head head = *(const record_head *)at;
    uint64_t offset = r->mine % r->capacity, room = r->capacity - offset;
    if (!head.bytes) return room <= left ? room : 0;
    uint64_t size = size_of(&head);
    if (!head.segment || size > room || size > left) return 0;
    if (!head.message_bytes) take_datagrams(e, f, head, at + RECORD_ALIGN, clock_s());
    else if (!take_lent(e, f, head, at + RECORD_ALIGN, clock_s())) return 0;
    e->received_bursts++;
    return size;
}

/* Tell whether the next record begins with a packet that a sum wants only after what others send. */
static int is_early(const engine *e, const flow *f) {
    uint64_t offset = f->in.mine % f->in.capacity;
    const uint8_t *at = f->in.bytes + offset, *header = at + RECORD_ALIGN;
    uint32_t bytes = ((const record_head *)at)->bytes;
    if (bytes < HEADER_BYTES || offset + RECORD_ALIGN + HEADER_BYTES > f->in.capacity || (header[0] & 15) != DATA) return 0;
    int64_t index = get32(header + 16);
    const incoming *m = find_incoming(e, f->peer, get32(header + 8), get16(header + 12));
    return m && m->sum && index < m->packets && !is_in_turn(m->sum, m->position, index);
}

/* Take in what a peer has put into its ring, up to some records, if `patient` none that is early; return how many. */
int64_t receive_shared(engine *e, flow *f, int patient) {
    ring *r = &f->in;
    int64_t count = 0;
    while (r->bytes && count < RECORDS) {
        if (r->mine == r->others) r->others = __atomic_load_n(&r->marks->written, __ATOMIC_ACQUIRE);
        if (r->mine == r->others) break;
        if (patient && is_early(e, f)) break;
        uint64_t size = take_record(e, f, r->others - r->mine);
        if (!size) { /* not written by an engine: what it says next cannot be told */
            e->refused_malformed++;
            r->bytes = NULL;
            break;
        }
        r->mine += size, count++;
        __atomic_store_n(&r->marks->taken, r->mine, __ATOMIC_SEQ_CST);
    }
    if (count && __atomic_load_n(&r->marks->starving, __ATOMIC_SEQ_CST)) {
        __atomic_store_n(&r->marks->starving, 0, __ATOMIC_SEQ_CST);
        ring_bell(f);
    }
    return count;
}
