/* SPDX-License-Identifier: Apache-2.0 */
/* Acknowledgements: for blocks of 64 packets, which of them have arrived. Each tells all it knows of its blocks, and
 * repeats the last ones before, so that a lost acknowledgement is made up for by the next.
 *
 * Payload: entries of step (4 bytes), message (2), block (4; with WHOLE if the message is done, and all of it is here), bits
 * (8; bit k is packet 64 block + k). In the header, `index` and `count` hold how many packets of the flow arrived so far and
 * how many of them marked congested, `step` how many microseconds ago the newest of them came.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

static void note_block(flow *f, incoming *m, int64_t block) {
    for (int64_t k = f->fresh_count - 1; k >= 0 && k >= f->fresh_count - 4; k--)
        if (f->fresh[k].id == m->id && f->fresh[k].block == block) return;
    if (f->fresh_count == f->fresh_capacity) {
        int64_t capacity = f->fresh_capacity ? f->fresh_capacity * 2 : 64;
        heard_block *fresh = realloc(f->fresh, (size_t)capacity * sizeof *fresh);
        if (!fresh) return; /* as good as a lost acknowledgement */
        f->fresh = fresh, f->fresh_capacity = capacity;
    }
    f->fresh[f->fresh_count++] = (heard_block){m, m->id, block};
}

void note_arrival(const engine *e, flow *f, incoming *m, int64_t index, double now_s) {
    if (!f->fresh_packets++) f->acknowledge_due_s = now_s + e->acknowledge_delay_s;
    f->data_last_s = now_s;
    note_block(f, m, index / BLOCK_PACKETS);
}

static uint8_t *put_entry(uint8_t *at, const heard_block *heard) {
    put32(at, (uint32_t)heard->message->step);
    put16(at + 4, (uint16_t)heard->message->message);
    put32(at + 6, (uint32_t)heard->block | (heard->message->settled && is_whole(heard->message) ? WHOLE : 0));
    put64(at + 10, heard->message->bits[heard->block]);
    return at + ACK_ENTRY_BYTES;
}

void acknowledge(engine *e, flow *f, double now_s) {
    if (!f->fresh_packets) return;
    uint8_t datagram[HEADER_BYTES + 65536];
    int64_t limit = e->payload_bytes / ACK_ENTRY_BYTES;
    double ago_us = (now_s - f->data_last_s) * 1e6;
    int64_t done = 0;
    do {
        memset(datagram, 0, HEADER_BYTES);
        datagram[0] = VERSION << 4 | ACK;
        datagram[2] = (uint8_t)(e->control_queue << 5);
        put16(datagram + 4, (uint16_t)e->job);
        put32(datagram + 8, ago_us < 0 ? 0 : ago_us > 4e9 ? 4000000000u : (uint32_t)ago_us);
        put16(datagram + 14, (uint16_t)e->rank);
        put32(datagram + 16, f->data_received);
        put32(datagram + 20, f->marked_received);
        put64(datagram + 24, e->token);
        uint8_t *at = datagram + HEADER_BYTES;
        int64_t entries = 0;
        for (int64_t k = 0; k < f->recent_count && entries < limit - 1; k++)
            if (f->recent[k].message) at = put_entry(at, &f->recent[k]), entries++;
        f->recent_count = 0;
        for (; done < f->fresh_count && entries < limit; done++) {
            if (!f->fresh[done].message) continue;
            at = put_entry(at, &f->fresh[done]), entries++;
            if (f->recent_count == RECENT) memmove(f->recent, f->recent + 1, (RECENT - 1) * sizeof *f->recent), f->recent_count--;
            f->recent[f->recent_count++] = f->fresh[done];
        }
        if (entries) emit_control(e, f, datagram, at - datagram, e->control_tos), e->acknowledgements++;
    } while (done < f->fresh_count);
    f->fresh_count = f->fresh_packets = 0;
    f->acknowledge_due_s = INFINITY;
    f->acknowledged_s = now_s;
}

/* Tell at once that all of a message is here and taken. */
void acknowledge_whole(engine *e, flow *f, incoming *m, double now_s) {
    note_block(f, m, (m->packets - 1) / BLOCK_PACKETS);
    if (!f->fresh_packets) f->fresh_packets = 1;
    acknowledge(e, f, now_s);
}

/* Acknowledge what is due; return when the next acknowledgement will be. */
double acknowledge_due(engine *e, double now_s) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < e->flow_count; i++) {
        flow *f = &e->flows[i];
        if (!f->fresh_packets) continue;
        double at_s = f->acknowledge_due_s;
        double spaced_s = f->acknowledged_s + fmax(e->acknowledge_spacing_s, f->smoothed_rtt_s * e->acknowledge_round_trips);
        if (f->fresh_packets >= e->acknowledge_every && spaced_s < at_s) at_s = spaced_s;
        if (f->fresh_packets >= e->acknowledge_at_once || now_s >= at_s) acknowledge(e, f, now_s);
        else if (at_s < due_s) due_s = at_s;
    }
    return due_s;
}

static outgoing *next_taken(const flow *f) {
    for (int64_t k = 0; k < f->message_count; k++)
        if (f->messages[k]->taken) return f->messages[k];
    return NULL;
}

void take_acknowledgement(engine *e, flow *f, const uint8_t *datagram, int64_t bytes, double now_s) {
    int64_t size = bytes - HEADER_BYTES;
    if (size <= 0 || size % ACK_ENTRY_BYTES) {
        e->refused_malformed++;
        return;
    }
    uint32_t marked_total = get32(datagram + 20), marked = marked_total - f->marked_seen;
    if (marked < 0x80000000u) f->marked_seen = marked_total;
    else marked = 0; /* overtaken by a later one */
    double newest_s = 0;
    int64_t delivered = 0;
    const uint8_t *end = datagram + bytes;
    for (const uint8_t *at = datagram + HEADER_BYTES; at < end; at += ACK_ENTRY_BYTES) {
        outgoing *m = find_outgoing(f, get32(at), get16(at + 4));
        uint64_t bits = get64(at + 10);
        int64_t block = get32(at + 6) & ~WHOLE;
        if (!m || block * BLOCK_PACKETS >= m->packets) continue;
        if (m->packets - block * BLOCK_PACKETS < 64) bits &= (1ull << (m->packets - block * BLOCK_PACKETS)) - 1;
        for (uint64_t fresh = bits & ~m->landed[block]; fresh; fresh &= fresh - 1) {
            uint32_t index = (uint32_t)(block * BLOCK_PACKETS + __builtin_ctzll(fresh));
            if (m->state[index] == UNSENT) continue; /* nobody can have got it: forged or confused */
            double sent_s = land(e, f, m, index, now_s);
            delivered++;
            /* Karn: the time of a packet that was sent twice is no round trip. */
            if (!(m->tags[index][0] & RETRANSMISSION) && sent_s > newest_s) newest_s = sent_s;
        }
        if (get32(at + 6) & WHOLE && m->next == m->packets) delivered += land_rest(e, f, m, now_s), m->taken = 1;
    }
    if (newest_s > 0) sample_rtt(f, now_s - newest_s - get32(datagram + 8) * 1e-6);
    feed_back(e, f, delivered, marked, 0);
    for (outgoing *m; (m = next_taken(f));) {
        m->taken = 0;
        e->on_taken(f->peer, m->step, m->message, now_s); /* which may remove it, and send others */
    }
}
