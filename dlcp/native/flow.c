/* SPDX-License-Identifier: Apache-2.0 */
/* Everything on its way to one peer: its window, its round-trip time, and what of it is lost.
 *
 * Packets count as lost when one that was sent later into the same queue has arrived, by more than the disorder to be
 * expected (RACK, RFC 8985, kept per queue because strict priority reorders across queues).
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

void sample_rtt(flow *f, double rtt_s) {
    if (rtt_s < 1e-6) rtt_s = 1e-6;
    if (f->rtt_s == 0 || rtt_s < f->rtt_s) f->rtt_s = rtt_s;
    if (f->smoothed_rtt_s == 0) {
        f->smoothed_rtt_s = rtt_s, f->rtt_variation_s = rtt_s / 2;
        return;
    }
    f->rtt_variation_s += (fabs(f->smoothed_rtt_s - rtt_s) - f->rtt_variation_s) / 4;
    f->smoothed_rtt_s += (rtt_s - f->smoothed_rtt_s) / 8;
}

static int64_t find_lost(engine *e, flow *f) {
    double disorder_s = f->smoothed_rtt_s * f->disorder;
    if (disorder_s < e->reorder_min_s) disorder_s = e->reorder_min_s;
    int64_t lost = 0;
    for (int q = 0; q < QUEUES; q++) {
        run_ring *ring = &f->runs[q];
        while (ring->count) {
            run r = ring->runs[ring->first];
            if (r.message && r.sent_s >= f->newest_delivered_s[q] - disorder_s) break;
            ring->first = (ring->first + 1) % ring->capacity, ring->count--;
            if (!r.message) continue;
            for (uint32_t k = 0; k < (r.packets ? r.packets : 1); k++) {
                uint32_t index = r.packets ? r.message->order[r.first + k] : r.first;
                if (r.message->state[index] == FLYING && r.message->sent_s[index] == r.sent_s)
                    lose(f, r.message, index), lost++;
            }
        }
    }
    if (lost) f->disorder = fmax(f->disorder * e->disorder_decay, e->disorder_min);
    return lost;
}

/* Find when the next report may be taken. Where nothing asks for a smaller or a larger window there is no hurry; of what goes
 * through memory there is nothing to learn. */
static void schedule_report(const engine *e, flow *f) {
    if (f->out.bytes || (!f->delivered && !f->lost)) return;
    int hurry = f->lost || f->marked || (f->limited && f->eager);
    double calm_s = hurry ? e->report_min_s : e->report_calm_s;
    f->report_due_s = f->reported_s + (f->smoothed_rtt_s > calm_s ? f->smoothed_rtt_s : calm_s);
}

void feed_back(engine *e, flow *f, int64_t delivered, int64_t marked, int64_t lost) {
    if (delivered) lost += find_lost(e, f);
    if (!delivered && !lost) return;
    f->delivered += delivered, f->lost += lost;
    f->marked += marked < delivered ? marked : delivered;
    schedule_report(e, f);
    for (int64_t k = 0; k < f->message_count; k++) {
        outgoing *m = f->messages[k];
        if (!m->unsent && !m->flying && m->delivered < m->packets && !m->idle_told) m->idle_told = e->attention = 1;
    }
}

double paused_until(const flow *f) {
    return f->sent_last_s + f->smoothed_rtt_s / (f->window < 1 ? f->window : 1);
}

static int64_t room(const flow *f, double now_s) {
    if (f->window < 1) return f->flying == 0 && now_s >= paused_until(f);
    double window = f->window < (double)f->largest_window ? f->window : (double)f->largest_window;
    return (int64_t)window - f->flying;
}

static uint32_t next_packet(outgoing *m) {
    while (m->again_count) {
        uint32_t index = m->again[m->again_first];
        if (m->state[index] == AGAIN) return index;
        m->again_first = (m->again_first + 1) % m->packets, m->again_count--;
    }
    return m->order[m->next];
}

/* The most urgent queue first; in it the layer nearest the input; then who came first. */
static outgoing *most_urgent(flow *f) {
    outgoing *best = NULL;
    int best_rank = -1;
    for (int64_t k = 0; k < f->message_count; k++) {
        outgoing *m = f->messages[k];
        if (!m->unsent) continue;
        uint32_t index = next_packet(m);
        int rank = (m->tags[index][1] >> 5) << 8 | (255 - m->tags[index][2]);
        if (rank > best_rank) best = m, best_rank = rank;
    }
    return best;
}

static int note_run(flow *f, int queue, run r) {
    run_ring *ring = &f->runs[queue];
    if (ring->count == ring->capacity) {
        int64_t capacity = ring->capacity ? ring->capacity * 2 : 64;
        run *runs = malloc((size_t)capacity * sizeof *runs);
        if (!runs) return -1;
        for (int64_t k = 0; k < ring->count; k++) runs[k] = ring->runs[(ring->first + k) % ring->capacity];
        free(ring->runs);
        ring->runs = runs, ring->first = 0, ring->capacity = capacity;
    }
    ring->runs[(ring->first + ring->count++) % ring->capacity] = r;
    return 0;
}

static int64_t packet_size(const engine *e, const outgoing *m, uint32_t index) {
    int64_t left = m->bytes + m->tail_bytes - (int64_t)index * e->payload_bytes;
    return left < e->payload_bytes ? left : e->payload_bytes;
}

/* Choose packets of a message that may leave in one burst: all but the last of full size, all with one type of service. */
static int64_t gather(const engine *e, outgoing *m, int64_t limit, uint32_t *packets) {
    int64_t count = 0;
    uint32_t first = next_packet(m); /* passes over what is stale at the head of the ring */
    uint8_t tos = m->tags[first][3];
    int queue = m->tags[first][1] >> 5;
    int64_t available = m->again_count ? m->again_count : m->packets - m->next;
    for (int64_t k = 0; k < available && count < limit; k++) {
        uint32_t index = m->again_count ? m->again[(m->again_first + k) % m->packets] : m->order[m->next + k];
        if (m->again_count && m->state[index] != AGAIN) break;
        if (m->tags[index][3] != tos || m->tags[index][1] >> 5 != queue) break;
        packets[count++] = index;
        if (packet_size(e, m, index) < e->payload_bytes) break;
    }
    return count;
}

static void note_sent(flow *f, outgoing *m, const uint32_t *packets, int64_t count, double now_s) {
    int queue = m->tags[packets[0]][1] >> 5;
    int again = m->state[packets[0]] == AGAIN;
    if (!again) note_run(f, queue, (run){now_s, m, (uint32_t)m->next, (uint32_t)count});
    for (int64_t k = 0; k < count; k++) {
        uint32_t index = packets[k];
        if (again) note_run(f, queue, (run){now_s, m, index, 0});
        m->state[index] = FLYING;
        m->sent_s[index] = now_s;
    }
    if (again) m->again_first = (m->again_first + count) % m->packets, m->again_count -= count, m->resent += count;
    else m->next += count;
    m->unsent -= count, m->flying += count, m->sent += count, f->flying += count;
    m->active_s = f->sent_last_s = now_s;
    m->idle_told = 0;
}

/* Send one burst within the window, the most urgent packets first; return how many packets, or what keeps them. */
int64_t pump_flow(engine *e, flow *f, double now_s) {
    if (!f->message_count || f->mute) return 0;
    outgoing *m = most_urgent(f);
    if (!m) return 0;
    int64_t limit = room(f, now_s);
    if (limit <= 0) {
        if (!f->limited && f->window < (double)f->largest_window) f->limited = 1, schedule_report(e, f);
        return 0;
    }
    if (limit > f->burst) limit = f->burst;
    if (limit > SEGMENTS_MAX) limit = SEGMENTS_MAX;
    if (limit * (HEADER_BYTES + e->payload_bytes) > 65000) limit = 65000 / (HEADER_BYTES + e->payload_bytes);
    if (limit < 1) limit = 1;
    uint32_t packets[SEGMENTS_MAX];
    uint8_t headers[SEGMENTS_MAX][HEADER_BYTES];
    int64_t count = gather(e, m, limit, packets);
    int again = m->state[packets[0]] == AGAIN;
    for (int64_t k = 0; k < count; k++) {
        uint8_t *tags = m->tags[packets[k]];
        if (again) tags[0] |= RETRANSMISSION;
        memcpy(headers[k], m->head, HEADER_BYTES);
        memcpy(headers[k] + 1, tags, 3);
        put32(headers[k] + 16, packets[k]);
    }
    int kept = emit_burst(e, f, m, packets, count, headers);
    if (kept < 0) return kept;
    note_sent(f, m, packets, count, now_s);
    return count;
}
