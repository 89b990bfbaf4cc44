/* SPDX-License-Identifier: Apache-2.0 */
/* Messages on their way out: which packets are on the wire, delivered, lost, or to be sent again. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { NONE = 0xFFFFFFFF };

outgoing *find_outgoing(flow *f, int64_t step, int64_t message) {
    for (int64_t k = 0; k < f->message_count; k++)
        if (f->messages[k]->message == message && f->messages[k]->step == step) return f->messages[k];
    return NULL;
}

static void release(outgoing *m) {
    free(m->state), free(m->sent_s), free(m->landed), free(m->again), free(m->forgone_next);
    m->state = NULL, m->sent_s = NULL, m->landed = NULL, m->again = m->forgone_next = NULL;
}

/* Queue a message for sending. The arrays are the caller's and must live until it is removed; NULL: no memory. */
API outgoing *dlcp_outgoing_new(engine *e, int64_t peer, int64_t step, int64_t message, int64_t packets,
                                const uint8_t *payload, int64_t bytes, const uint8_t *tail, int64_t tail_bytes,
                                uint8_t (*tags)[4], const uint32_t *order, const uint8_t *head, int64_t allowed,
                                double now_s) {
    flow *f = &e->flows[peer];
    if (f->message_count == f->message_capacity) {
        int64_t capacity = f->message_capacity ? f->message_capacity * 2 : 16;
        outgoing **messages = realloc(f->messages, (size_t)capacity * sizeof *messages);
        if (!messages) return NULL;
        f->messages = messages, f->message_capacity = capacity;
    }
    outgoing *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->packets = m->unsent = packets, m->active_s = now_s;
    m->id = ++e->next_id, m->peer = peer, m->step = step, m->message = message;
    m->payload = payload, m->bytes = bytes, m->tail = tail, m->tail_bytes = tail_bytes;
    m->tags = tags, m->order = order, m->allowed = allowed;
    memcpy(m->head, head, HEADER_BYTES);
    for (int c = 0; c < 8; c++) m->forgone_first[c] = NONE;
    m->state = calloc((size_t)packets, 1);
    m->sent_s = calloc((size_t)packets, sizeof *m->sent_s);
    m->landed = calloc((size_t)(packets + 63) / 64, sizeof *m->landed);
    m->again = calloc((size_t)packets, sizeof *m->again);
    m->forgone_next = calloc((size_t)packets, sizeof *m->forgone_next);
    if (!m->state || !m->sent_s || !m->landed || !m->again || !m->forgone_next) {
        release(m), free(m);
        return NULL;
    }
    f->messages[f->message_count++] = m;
    return m;
}

/* Forget a message that is done or given up. It is freed. */
API void dlcp_outgoing_remove(engine *e, outgoing *m) {
    flow *f = &e->flows[m->peer];
    for (int64_t k = 0; k < f->message_count; k++)
        if (f->messages[k] == m) {
            memmove(f->messages + k, f->messages + k + 1, (size_t)(--f->message_count - k) * sizeof *f->messages);
            break;
        }
    f->flying -= m->flying;
    m->flying = m->unsent = 0;
    for (int q = 0; q < QUEUES; q++)
        for (int64_t k = 0; k < f->runs[q].count; k++) {
            run *r = &f->runs[q].runs[(f->runs[q].first + k) % f->runs[q].capacity];
            if (r->message == m) r->message = NULL;
        }
    release(m);
    free(m);
}

/* Go on sending a message from a copy of its payload. */
API void dlcp_outgoing_replace(outgoing *m, const uint8_t *payload) {
    m->payload = payload;
}

/* Note that a packet arrived; return when it was sent. */
double land(const engine *e, flow *f, outgoing *m, uint32_t index, double now_s) {
    uint8_t state = m->state[index];
    /* It was late, not lost: an over-share packet, say, that waited in a lower queue. */
    if (state == FORGONE || state == AGAIN) f->disorder = fmin(f->disorder * 2, e->disorder_max);
    if (state == FLYING) m->flying--, f->flying--;
    if (state == AGAIN) m->unsent--;
    m->state[index] = DELIVERED;
    set_bit(m->landed, index);
    m->delivered++;
    m->active_s = now_s;
    int queue = m->tags[index][1] >> 5;
    double sent_s = m->sent_s[index];
    if (sent_s > f->newest_delivered_s[queue]) f->newest_delivered_s[queue] = sent_s;
    return sent_s;
}

/* Note that everything arrived that has not been known to; return how many packets that is. All have been sent. */
int64_t land_rest(const engine *e, flow *f, outgoing *m, double now_s) {
    int64_t before = m->delivered;
    for (uint32_t i = 0; m->delivered < m->packets; i++)
        if (m->state[i] != DELIVERED) land(e, f, m, i, now_s);
    return m->delivered - before;
}

static void send_again(outgoing *m, uint32_t index) {
    m->state[index] = AGAIN;
    m->again[(m->again_first + m->again_count++) % m->packets] = index;
    m->unsent++;
}

/* Note that a flying packet is lost, and choose what to send again. Protected packets always are. Of the others the least
 * valuable are forgone, up to the bound. */
void lose(flow *f, outgoing *m, uint32_t index) {
    m->flying--, f->flying--;
    if (m->tags[index][0] & PROTECTED) {
        send_again(m, index);
        return;
    }
    m->state[index] = FORGONE;
    int class = m->tags[index][1] >> 2 & 7;
    m->forgone_next[index] = m->forgone_first[class], m->forgone_first[class] = index;
    for (m->forgone++; m->forgone > m->allowed; m->forgone--) {
        int most_valuable = 0;
        while (m->forgone_first[most_valuable] == NONE) most_valuable++;
        uint32_t packet = m->forgone_first[most_valuable];
        m->forgone_first[most_valuable] = m->forgone_next[packet];
        if (m->state[packet] == FORGONE) send_again(m, packet);
    }
}

/* Take in which of `count` packets from `first` on have arrived (one byte each). What was sent before `before_s` and is not
 * among them is lost. Return whether that was news. */
API int64_t dlcp_outgoing_bitmap(engine *e, outgoing *m, int64_t first, int64_t count, const uint8_t *arrived,
                                 double before_s, double now_s) {
    flow *f = &e->flows[m->peer];
    int64_t news = 0, lost = 0;
    for (int64_t i = first; i < first + count; i++) {
        uint8_t state = m->state[i];
        if (arrived[i - first]) {
            if (state != DELIVERED && state != UNSENT) land(e, f, m, (uint32_t)i, now_s), news++;
        } else if (state == FLYING && m->sent_s[i] < before_s) {
            lose(f, m, (uint32_t)i), lost++;
        }
    }
    feed_back(e, f, news, 0, lost);
    return news + lost;
}
