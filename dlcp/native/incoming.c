/* SPDX-License-Identifier: Apache-2.0 */
/* Messages on their way in: which packets of them have arrived, and where their bytes go. */

#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "engine.h"

static int64_t chain_of(const engine *e, int64_t peer, int64_t step, int64_t message) {
    uint64_t mixed = ((uint64_t)step << 32 ^ (uint64_t)message << 16 ^ (uint64_t)peer) * 0x9E3779B97F4A7C15ull;
    return (int64_t)(mixed >> 40) & (e->chain_count - 1);
}

incoming *find_incoming(const engine *e, int64_t peer, int64_t step, int64_t message) {
    incoming *m = e->chains[chain_of(e, peer, step, message)];
    while (m && (m->peer != peer || m->step != step || m->message != message)) m = m->next;
    return m;
}

/* Return 0, or -1 where memory is short. */
static int grow(engine *e) {
    int64_t old_count = e->chain_count;
    incoming **old = e->chains, **chains = calloc((size_t)old_count * 2, sizeof *chains);
    if (!chains) return -1;
    e->chains = chains, e->chain_count = old_count * 2;
    for (int64_t c = 0; c < old_count; c++)
        for (incoming *m = old[c], *next; m; m = next) {
            next = m->next;
            int64_t chain = chain_of(e, m->peer, m->step, m->message);
            m->next = chains[chain], chains[chain] = m;
        }
    free(old);
    return 0;
}

/* Know a message from now on. Its bytes go to `buffer` and, beyond `bytes`, to `tail`. NULL where memory is short. */
API incoming *dlcp_incoming_new(engine *e, int64_t peer, int64_t step, int64_t message, int64_t packets, uint8_t *buffer,
                                int64_t bytes, uint8_t *tail, int64_t tail_bytes) {
    if (e->incoming_count >= e->chain_count && grow(e)) return NULL;
    incoming *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->packets = packets, m->protected_packets = -1, m->required = -1;
    m->id = ++e->next_id, m->peer = peer, m->step = step, m->message = message;
    m->buffer = buffer, m->bytes = bytes, m->tail = tail, m->tail_bytes = tail_bytes;
    m->bits = calloc((size_t)(packets + 63) / 64, sizeof *m->bits);
    m->layer = calloc((size_t)packets, 1);
    if (!m->bits || !m->layer) {
        free(m->bits), free(m->layer), free(m);
        return NULL;
    }
    int64_t chain = chain_of(e, peer, step, message);
    m->next = e->chains[chain], e->chains[chain] = m;
    e->incoming_count++;
    return m;
}

static void unchain(engine *e, incoming *m) {
    incoming **link = &e->chains[chain_of(e, m->peer, m->step, m->message)];
    while (*link && *link != m) link = &(*link)->next;
    if (*link) *link = m->next, e->incoming_count--;
}

/* Take no more packets for a message. What is known of it stays until it is freed. */
API void dlcp_incoming_close(engine *e, incoming *m) {
    for (int64_t i = 0; i < e->flow_count; i++) { /* what is not acknowledged yet is with the message's STOP */
        flow *f = &e->flows[i];
        if (f->peer != m->peer) continue;
        for (int64_t k = 0; k < f->fresh_count; k++)
            if (f->fresh[k].message == m) f->fresh[k].message = NULL;
        for (int64_t k = 0; k < f->recent_count; k++)
            if (f->recent[k].message == m) f->recent[k].message = NULL;
    }
    unchain(e, m);
}

API void dlcp_incoming_free(incoming *m) {
    if (m->sum) m->sum->from[m->position] = NULL;
    free(m->bits), free(m->layer), free(m);
}

/* From this size on, a message is not wanted in the caches: it would only push out what is. Chosen by us, of a core's usual L2. */
enum { STREAM_MIN_BYTES = 1 << 20 };

#ifdef __SSE2__
/* Copy to memory past the caches, without reading first what is overwritten. */
void stream(uint8_t *into, const uint8_t *from, int64_t bytes) {
    int64_t done = -(intptr_t)into & 15;
    if (done > bytes) done = bytes;
    memcpy(into, from, (size_t)done);
    for (; done + 16 <= bytes; done += 16)
        _mm_stream_si128((__m128i *)(into + done), _mm_loadu_si128((const __m128i *)(from + done)));
    memcpy(into + done, from + done, (size_t)(bytes - done));
}

/* Let other threads see what was streamed before what follows. */
static void finish_streams(void) {
    _mm_sfence();
}
#else
void stream(uint8_t *into, const uint8_t *from, int64_t bytes) {
    memcpy(into, from, (size_t)bytes);
}

static void finish_streams(void) {}
#endif

static void copy_in(incoming *m, int64_t offset, const uint8_t *payload, int64_t bytes) {
    int64_t direct = m->bytes - offset;
    if (direct >= bytes) {
        memmove(m->buffer + offset, payload, (size_t)bytes); /* where dlcp_incoming_move moves, it may lie there already */
        return;
    }
    if (direct > 0) memmove(m->buffer + offset, payload, (size_t)direct);
    else direct = 0;
    memcpy(m->tail + offset + direct - m->bytes, payload + direct, (size_t)(bytes - direct));
}

/* Move a message that came before anybody waited for it to where it belongs: a new buffer and tail. */
API void dlcp_incoming_move(engine *e, incoming *m, uint8_t *buffer, int64_t bytes, uint8_t *tail, int64_t tail_bytes) {
    const uint8_t *from = m->buffer;
    m->buffer = buffer, m->bytes = bytes, m->tail = tail, m->tail_bytes = tail_bytes;
    int64_t total = bytes + tail_bytes;
    for (int64_t i = 0; i < m->packets; i++) {
        int64_t offset = i * e->payload_bytes, left = total - offset;
        if (has_bit(m->bits, i)) copy_in(m, offset, from + offset, left < e->payload_bytes ? left : e->payload_bytes);
    }
}

/* Let a message be summed from now on; what has arrived of it must be in its buffer. */
API void dlcp_incoming_join(engine *e, incoming *m, fold *s, int64_t position) {
    m->sum = s, m->position = position;
    s->from[position] = m;
    for (int64_t i = 0; i < m->packets; i++)
        if (has_bit(m->bits, i) && is_in_turn(s, position, i)) fold_packet(s, position, i, m->buffer + i * e->payload_bytes);
}

static int is_settled(const incoming *m) {
    if (m->required < 0) return 0;
    if (is_whole(m)) return 1;
    return (m->asked || m->immediate) && m->protected_packets >= 0 && m->arrived >= m->required &&
           m->arrived_protected >= m->protected_packets;
}

static int64_t settle(engine *e, incoming *m, double now_s) {
    if (m->settled || !is_settled(m)) return 0;
    finish_streams();
    m->settled = 1;
    if (is_whole(m)) acknowledge_whole(e, &e->flows[m->peer], m, now_s);
    else acknowledge(e, &e->flows[m->peer], now_s);
    e->on_settled(m, now_s);
    return 1;
}

/* Wait for a message, of which `required` packets and all protected ones are enough; return whether it is done. */
API int64_t dlcp_incoming_wait(engine *e, incoming *m, int64_t required, int64_t immediate, int64_t last_bytes,
                               double now_s) {
    m->required = required, m->immediate = immediate;
    if (last_bytes) m->last_bytes = last_bytes;
    return settle(e, m, now_s);
}

/* Note that the sender asked what is missing, and how many packets are protected; return whether the message is done. */
API int64_t dlcp_incoming_ask(engine *e, incoming *m, int64_t protected_packets, double now_s) {
    m->asked = 1, m->protected_packets = protected_packets;
    return settle(e, m, now_s);
}

static void count_data(engine *e, flow *f, incoming *m, int64_t index, int tos, double now_s) {
    f->data_received++;
    f->marked_received += (tos & 3) == 3;
    note_arrival(e, f, m, index, now_s);
}

/* Note a packet whose payload is where it belongs. The message may be gone afterwards. */
static void note_data(engine *e, flow *f, incoming *m, int64_t index, const uint8_t *header, int64_t size, int tos, double now_s) {
    count_data(e, f, m, index, tos, now_s);
    set_bit(m->bits, index);
    if (index == m->packets - 1) m->last_bytes = size;
    m->layer[index] = header[3];
    m->arrived++;
    m->arrived_protected += (header[1] & PROTECTED) != 0;
    e->data++;
    settle(e, m, now_s);
}

/* Show Python a packet that does not fit its message. */
static void misfit(engine *e, flow *f, const uint8_t *header, const uint8_t *payload, int64_t size, double now_s) {
    if (payload != header + HEADER_BYTES) {
        memcpy(e->buffers, header, HEADER_BYTES);
        memcpy(e->buffers + HEADER_BYTES, payload, (size_t)size);
        header = e->buffers;
    }
    e->on_control(f->peer, header, HEADER_BYTES + size, now_s);
}

/* Take in a packet of data. Its payload need not be behind its header. */
void store_data(engine *e, flow *f, const uint8_t *header, const uint8_t *payload, int64_t size, int tos, double now_s) {
    int64_t step = get32(header + 8), message = get16(header + 12), index = get32(header + 16);
    incoming *m = find_incoming(e, f->peer, step, message);
    if (!m) {
        m = e->on_unknown(f->peer, header, HEADER_BYTES + size, now_s);
        if (!m) return;
    }
    int64_t last = index == m->packets - 1;
    int fits = get32(header + 20) == m->packets && index < m->packets && size > 0 && size <= e->payload_bytes &&
               (!last || !m->last_bytes || size == m->last_bytes) && (last || size == e->payload_bytes);
    if (!fits) {
        misfit(e, f, header, payload, size, now_s);
        return;
    }
    if (has_bit(m->bits, index)) {
        count_data(e, f, m, index, tos, now_s);
        e->duplicate++;
        return;
    }
    int64_t offset = index * e->payload_bytes;
    if (m->sum) fold_packet(m->sum, m->position, index, payload);
    else if (m->bytes >= STREAM_MIN_BYTES && offset + size <= m->bytes) stream(m->buffer + offset, payload, size);
    else copy_in(m, offset, payload, size);
    note_data(e, f, m, index, header, size, tos, now_s);
}
