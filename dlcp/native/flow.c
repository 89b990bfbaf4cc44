/* SPDX-License-Identifier: Apache-2.0 */
/* Everything in flight to one peer: window, round-trip time, losses, and the acknowledgements of both directions.
 *
 * A packet is declared lost when one sent later on the same path into the same queue has arrived, and either was sent
 * later by more than the reordering window or arrived longer than that ago (RACK, RFC 8985, kept per queue because
 * strict priority reorders across queues, and per path because delays differ). A packet that no later one follows is
 * probed for (outgoing.c). A path on which nothing arrives at all is judged by the other paths, patiently, and
 * abandoned.
 *
 * An acknowledgement reports in blocks of 64 packets which of them have arrived. It contains everything known about
 * its blocks, and repeats the previous ones, so the next acknowledgement makes up for a lost one. Its payload has
 * entries of step (4 bytes), message (2), block (4; with ACK_WHOLE if the message is complete with every packet) and
 * bits (8; bit k is packet 64 block + k). In its header, `count` is the number of packets of the flow that arrived
 * with an ECN mark so far, `message` the number that were late, not lost, `index` the newest packet's arrival, by the
 * receiver's clock in microseconds, and `step` how long ago that was. An entry with the block ACK_PATH reports for a
 * path, its `step`, how many packets arrived marked there, its `bits`.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { RUNS_FIRST = 16 };
/* Spacing of the send times of a burst's packets: much less than the time to send one, and still resolved by a double
 * after years of uptime. */
static const double STAMP_S = 0x1p-26;

/* In flight -------------------------------------------------------------------------------------------------------- */

/* Add a sample to an average and its mean deviation (RFC 6298). */
static void smooth(double *average_s, double *deviation_s, double sample_s) {
    if (*average_s == 0) {
        *average_s = sample_s;
        *deviation_s = sample_s / 2;
        return;
    }
    *deviation_s += (fabs(*average_s - sample_s) - *deviation_s) / 4;
    *average_s += (sample_s - *average_s) / 8;
}

static void smooth_rtt(flow *self, double rtt_s) {
    self->rtt_min_s = self->rtt_min_s == 0 ? rtt_s : fmin(self->rtt_min_s, rtt_s);
    smooth(&self->view.smoothed_rtt_s, &self->view.rtt_variation_s, rtt_s);
}

/* How long an acknowledgement waits for more packets. */
static double flow_ack_delay_s(const flow *self) {
    if (self->view.smoothed_rtt_s == 0)
        return ACK_DELAY_MAX_S;
    return fmin(fmax(ACK_DELAY_S, self->view.smoothed_rtt_s / 4), ACK_DELAY_MAX_S);
}

static int64_t microseconds(double seconds) {
    return (int64_t)(seconds * 1e6);
}

/* Return a packet's one-way delay, plus the clock offset; `arrived_us` is modulo 2^32. */
static double one_way_s(flow *self, uint32_t arrived_us, double sent_s) {
    uint32_t took_us = arrived_us - (uint32_t)microseconds(sent_s);
    if (self->clocks_us < 0)
        self->clocks_us = took_us;
    return (int32_t)(took_us - (uint32_t)self->clocks_us) * 1e-6;
}

/* Find the minimum RTT and the minimum one-way delay since the last report. Over several paths it is their mean,
 * weighted by samples, so that an empty path does not hide another one's queue. */
static void report_times(flow *self, event *news) {
    int64_t samples = 0;
    double rtt_s = 0, there_s = 0;
    for (int64_t i = 0; i < self->path_count; i++) {
        path *way = &self->paths[i];
        samples += way->samples;
        rtt_s += (double)way->samples * way->least_s;
        there_s += (double)way->samples * way->one_way_s;
        way->samples = 0;
        way->least_s = way->one_way_s = 0;
    }
    news->rtt_s = samples ? rtt_s / (double)samples : 0;
    news->one_way_s = samples ? there_s / (double)samples : INFINITY;
}

/* How much later a packet may arrive than one sent after it. If retransmissions get lost, a queue stays full: earlier
 * retransmissions would only be dropped, too. */
double flow_reordering_s(const flow *self) {
    double rtt_s = self->view.smoothed_rtt_s > 0 ? self->view.smoothed_rtt_s : INITIAL_RTT_S;
    return fmin(rtt_s * self->disorder * self->backoff, PROBE_TIMEOUT_MAX_S);
}

/* How much later a packet may arrive than one sent after it, on the last one's path. */
double flow_lateness_s(const flow *self) {
    double longest_s = 0;
    for (int64_t i = 0; i < self->path_count; i++)
        if (self->paths[i].flying)
            longest_s = fmax(longest_s, self->paths[i].delay_s);
    return flow_reordering_s(self) + fmax(longest_s - self->paths[self->path_last].delay_s, 0);
}

/* How long an acknowledgement may take (RFC 9002, 6.2.1), including both hosts' processing time. */
double flow_probe_timeout_s(const flow *self) {
    if (self->out.bytes)
        return PROBE_TIMEOUT_MAX_S; /* memory loses nothing: the peer is only slow */
    if (self->view.smoothed_rtt_s == 0)
        return fmax(INITIAL_RTT_S, self->answered_s);
    double timeout_s = self->response_s + fmax(4 * self->response_variation_s, flow_reordering_s(self));
    for (int64_t i = 0; self->path_count > 1 && i < self->path_count; i++)
        if (self->paths[i].flying)
            timeout_s = fmax(timeout_s, 2 * self->paths[i].delay_s); /* a probe must not overtake its packets */
    return fmin(timeout_s, fmax(PROBE_TIMEOUT_MAX_S, 2 * self->view.smoothed_rtt_s));
}

/* What to declare lost in one queue of a path: packets sent before `until_s`, out of those sent before `newest_s`. */
typedef struct {
    double until_s, newest_s;
    int64_t lost;
    double oldest_s; /* send time of the first packet that may still be lost; infinity: none */
} search;

/* How long a path may be silent while others are not, before nothing is expected to arrive there. */
double flow_stalled_s(const flow *self) {
    return flow_reordering_s(self) + 3 * flow_probe_timeout_s(self);
}

/* Find losses in a run; return whether all its packets are settled. */
static bool lose_run(flow *self, const run *sent, search *within) {
    outgoing *message = sent->message;
    uint32_t count = sent->packets ? sent->packets : 1;
    for (uint32_t k = 0; k < count; k++) {
        double sent_s = sent->sent_s + k * STAMP_S;
        if (sent_s >= within->newest_s)
            return false;
        uint32_t index = sent->packets ? message->order[sent->first + k] : sent->first;
        /* A packet retransmitted since then has its own run. */
        if (message->state[index] != FLYING || message->sent_s[index] != sent_s)
            continue;
        if (sent_s >= within->until_s) {
            within->oldest_s = sent_s;
            return false;
        }
        outgoing_lost(self, message, index);
        within->lost++;
    }
    return true;
}

static search lose_until(flow *self, run_queue *sent, double until_s, double newest_s) {
    search within = {.until_s = until_s, .newest_s = newest_s, .oldest_s = INFINITY};
    while (sent->count) {
        const run *first = &sent->runs[sent->first];
        if (first->message && (first->sent_s >= newest_s || !lose_run(self, first, &within)))
            break;
        sent->first = (sent->first + 1) % sent->capacity;
        sent->count--;
    }
    return within;
}

/* Find a path's losses by much later arrivals on other paths; abandon it if nothing arrives there at all. */
static int64_t lose_stalled(flow *self, path *way, int queue, double stalled_s, double now_s) {
    double until_s = self->newest_delivered_s[queue] - fmax(stalled_s, 2 * way->delay_s);
    int64_t lost = lose_until(self, &way->runs[queue], until_s, until_s).lost;
    if (lost < PATH_BURST || way->newest[queue].sent_s >= until_s)
        return lost;
    if (way->weight > 0 && !way->on_trial)
        self->excused_lost += lost;
    path_leave(self, way, now_s);
    return lost;
}

/* Find a path's losses: packets overtaken by more than the reordering window, or longer ago (RFC 8985, 7.2). */
static int64_t lose_overtaken(flow *self, path *way, double now_s) {
    double disorder_s = flow_reordering_s(self);
    int64_t lost = 0;
    for (int queue = 0; queue < QUEUES; queue++) {
        double newest_s = way->newest[queue].sent_s, over_s = way->newest[queue].known_s + disorder_s;
        search found = lose_until(self, &way->runs[queue], newest_s - fmax(over_s - now_s, 0), newest_s);
        lost += found.lost;
        if (found.oldest_s == INFINITY)
            continue;
        self->overtaken_due_s = sooner(self->overtaken_due_s, over_s - (newest_s - found.oldest_s) + STAMP_S);
        self->overtaken_paths |= 1ull << (way - self->paths);
    }
    return lost;
}

static int64_t find_lost(flow *self, double now_s) {
    double stalled_s = flow_stalled_s(self);
    int64_t lost = 0;
    uint64_t paths = self->fresh_paths | self->overtaken_paths;
    self->overtaken_paths = 0;
    self->overtaken_due_s = INFINITY;
    for (; paths; paths &= paths - 1)
        lost += lose_overtaken(self, &self->paths[__builtin_ctzll(paths)], now_s);
    if (self->path_count > 1 && now_s >= self->stalled_due_s) {
        self->stalled_due_s = now_s + stalled_s / 16;
        for (int64_t i = 0; i < self->path_count; i++)
            for (int queue = 0; queue < QUEUES && self->paths[i].flying; queue++)
                lost += lose_stalled(self, &self->paths[i], queue, stalled_s, now_s);
    }
    if (lost)
        self->disorder = fmax(self->disorder * DISORDER_DECAY, DISORDER_MIN);
    return lost;
}

/* Find packets that were overtaken too long ago, if due; return when to look again. */
double flow_find_overtaken(flow *self, double now_s) {
    if (now_s >= self->overtaken_due_s) {
        int64_t lost = find_lost(self, now_s);
        flow_feed_back(self, 0, 0, lost, now_s);
    }
    return self->overtaken_due_s;
}

/* Schedule the next report. There is no hurry unless the window should shrink or grow; memory has nothing to report. */
static void schedule_report(flow *self) {
    if (self->out.bytes || (!self->delivered && !self->lost))
        return;
    bool hurry = self->lost || self->marked || (self->limited && self->view.slow_start);
    double calm_s = hurry ? REPORT_MIN_S : REPORT_CALM_S;
    self->report_due_s = self->reported_s + fmax(self->view.smoothed_rtt_s, calm_s);
}

/* Record feedback for the next report. */
void flow_feed_back(flow *self, int64_t delivered, int64_t marked, int64_t lost, double now_s) {
    if (delivered)
        lost += find_lost(self, now_s);
    path_judge_all(self, now_s);
    if (!delivered && !lost)
        return;
    self->delivered += delivered;
    self->lost += lost - smaller(lost, self->excused_lost);
    self->marked += smaller(marked - smaller(marked, self->excused_marked), delivered);
    self->excused_lost = self->excused_marked = 0;
    schedule_report(self);
}

static bool is_waiting(const flow *self) {
    for (int64_t k = 0; k < self->message_count; k++)
        if (self->messages[k]->unsent)
            return true;
    return false;
}

/* Report on flows once a report is due; return when the next one is. A flow may report after half its time: several
 * flows report together, since a turn of Python costs more than a report. */
double flow_report(engine *owner, double now_s) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < owner->config.peers; i++)
        due_s = sooner(due_s, owner->flows[i].report_due_s);
    if (now_s < due_s)
        return due_s;
    due_s = INFINITY;
    for (int64_t i = 0; i < owner->config.peers; i++) {
        flow *self = &owner->flows[i];
        if (now_s < (self->reported_s + self->report_due_s) / 2) {
            due_s = sooner(due_s, self->report_due_s);
            continue;
        }
        event *news = engine_event(owner, EVENT_REPORT, self->peer, now_s);
        if (!news)
            return due_s;
        news->delivered = self->delivered;
        news->marked = self->marked;
        news->lost = self->lost;
        news->limited = self->limited;
        news->waiting = is_waiting(self);
        report_times(self, news);
        news->smoothed_rtt_s = self->view.smoothed_rtt_s;
        self->delivered = self->marked = self->lost = self->limited = 0;
        self->reported_s = now_s;
        self->report_due_s = INFINITY;
    }
    return due_s;
}

/* Sending ---------------------------------------------------------------------------------------------------------- */

/* Return when a window below one packet admits the next one. */
static double paused_until_s(const flow *self) {
    return self->sent_last_s + self->view.smoothed_rtt_s / fmin(self->view.window, 1);
}

/* Return when the next packet may leave if only time is needed; infinity if none waits or something else is missing. */
double flow_resumes_s(const flow *self, double now_s) {
    double until_s = INFINITY;
    if (self->view.window < 1)
        until_s = self->view.flying ? INFINITY : paused_until_s(self);
    else if (self->held)
        until_s = self->paced_s;
    return self->message_count && until_s > now_s ? until_s : INFINITY;
}

static int64_t room(const flow *self, double now_s) {
    if (self->view.window < 1)
        return self->view.flying == 0 && now_s >= paused_until_s(self);
    return (int64_t)fmin(self->view.window, (double)self->view.largest_window) - self->view.flying;
}

/* Return how many packets the pace admits at once. A timer for each would cost too much: packets due within
 * `pace_turn_s` leave together. */
static double pace_room(flow *self, double now_s) {
    double turn_s = PACE_TURN_S;
    self->held = now_s < self->paced_s - (self->held ? 0 : turn_s);
    return self->held ? 0 : fmax(self->view.pace * turn_s, (double)PATH_BURST);
}

/* The most urgent queue first, then the layer nearest the input, then the oldest message. */
static outgoing *most_urgent(const flow *self) {
    outgoing *best = NULL;
    int best_urgency = -1;
    for (int64_t k = 0; k < self->message_count; k++) {
        outgoing *message = self->messages[k];
        if (!message->unsent)
            continue;
        const uint8_t *tags = message->tags[outgoing_next_packet(message)];
        int urgency = (tags[1] >> 5) << 8 | (255 - tags[2]);
        if (urgency <= best_urgency)
            continue;
        best = message;
        best_urgency = urgency;
    }
    return best;
}

/* Position of the run `after` places behind the first. */
static int64_t place_of_run(const run_queue *sent, int64_t after) {
    int64_t at = sent->first + after;
    return at < sent->capacity ? at : at - sent->capacity;
}

/* Make room for this many more runs; return 0, or NO_MEMORY. */
static int reserve_runs(run_queue *sent, int64_t more) {
    if (sent->count + more <= sent->capacity)
        return 0;
    int64_t capacity = sent->capacity ? sent->capacity * 2 : RUNS_FIRST;
    while (capacity < sent->count + more)
        capacity *= 2;
    run *runs = malloc((size_t)capacity * sizeof *runs);
    if (!runs)
        return NO_MEMORY;
    for (int64_t k = 0; k < sent->count; k++)
        runs[k] = sent->runs[place_of_run(sent, k)];
    free(sent->runs);
    sent->runs = runs;
    sent->first = 0;
    sent->capacity = capacity;
    return 0;
}

static void note_run(run_queue *sent, run one) {
    sent->runs[place_of_run(sent, sent->count)] = one; /* reserve_runs has made room */
    sent->count++;
}

static void note_sent(flow *self, outgoing *message, const uint32_t *packets, int64_t count, int64_t way,
                      double now_s) {
    run_queue *sent = &self->paths[way].runs[message->tags[packets[0]][1] >> 5];
    bool again = message->state[packets[0]] == RETRANSMIT;
    /* Every packet has a unique send time, which also gives their order. */
    double stamp_s = fmax(now_s, self->stamped_s + STAMP_S);
    if (!again)
        note_run(sent, (run){stamp_s, message, (uint32_t)message->next, (uint32_t)count});
    for (uint32_t k = 0; k < count; k++) {
        uint32_t index = packets[k];
        self->stamped_s = stamp_s + k * STAMP_S;
        if (again)
            note_run(sent, (run){self->stamped_s, message, index, 0});
        message->state[index] = FLYING;
        message->sent_s[index] = self->stamped_s;
        message->path[index] = (uint8_t)way;
    }
    if (again) {
        message->retransmit_first = (message->retransmit_first + count) % message->packets;
        message->retransmit_count -= count;
        message->resent += count;
    } else {
        message->next += count;
    }
    message->unsent -= count;
    message->flying += count;
    message->sent += count;
    self->view.flying += count;
    self->paths[way].flying += count;
    self->paths[way].sent += count;
    self->path_last = way;
    message->active_s = message->last_sent_s = self->sent_last_s = now_s;
    message->last_queue = message->tags[packets[0]][1] >> 5; /* all packets of a burst are in one queue */
    self->lossy_packets = self->lossy_packets > count ? self->lossy_packets - count : 0;
    outgoing_expect(self, message);
    self->paced_s = fmax(self->paced_s, now_s - PACE_TURN_S) + (double)count / self->view.pace;
}

/* Send one burst within the window, most urgent packets first; return how many, or why none. */
int64_t flow_pump(engine *owner, flow *self, double now_s) {
    if (!self->message_count || self->view.mute)
        return 0;
    outgoing *message = most_urgent(self);
    if (!message)
        return 0;
    int64_t limit = room(self, now_s), packet_bytes = HEADER_BYTES + owner->config.payload_bytes;
    if (limit <= 0) {
        if (!self->limited && self->view.window < (double)self->view.largest_window) {
            self->limited = 1;
            schedule_report(self);
        }
        return 0;
    }
    double paced = pace_room(self, now_s);
    if (self->held)
        return 0;
    limit = smaller(smaller(limit, self->view.burst), smaller(SEGMENTS_MAX, 65000 / packet_bytes));
    limit = (int64_t)fmax(fmin((double)limit, paced), 1);
    int64_t way = path_choose(self, &limit, now_s);
    uint32_t packets[SEGMENTS_MAX];
    uint8_t headers[SEGMENTS_MAX][HEADER_BYTES];
    int64_t count = outgoing_gather(owner, message, limit, packets);
    bool again = message->state[packets[0]] == RETRANSMIT;
    /* Before anything leaves: a packet that is in no run could never be declared lost. */
    if (reserve_runs(&self->paths[way].runs[message->tags[packets[0]][1] >> 5], again ? count : 1)) {
        owner->view.failed = true;
        return 0;
    }
    for (int64_t k = 0; k < count; k++) {
        uint8_t *tags = message->tags[packets[k]];
        if (again)
            tags[0] |= RETRANSMISSION;
        memcpy(headers[k], message->head, HEADER_BYTES);
        memcpy(headers[k] + 1, tags, 3);
        put32(headers[k] + 16, packets[k]);
    }
    int kept = engine_send_burst(owner, self, message, packets, count, headers, way);
    if (kept < 0)
        return kept;
    note_sent(self, message, packets, count, way, now_s);
    return count;
}

/* Acknowledgements out --------------------------------------------------------------------------------------------- */

static void note_block(flow *self, incoming *message, int64_t block) {
    /* Checking a few is enough: packets of a block arrive together. */
    for (int64_t k = self->fresh_count - 1; k >= 0 && k >= self->fresh_count - 4; k--)
        if (self->fresh[k].message == message && self->fresh[k].block == block)
            return;
    if (self->fresh_count == self->fresh_capacity) {
        int64_t capacity = self->fresh_capacity ? self->fresh_capacity * 2 : 64;
        ack_block *fresh = realloc(self->fresh, (size_t)capacity * sizeof *fresh);
        if (!fresh)
            return; /* same as a lost acknowledgement */
        self->fresh = fresh;
        self->fresh_capacity = capacity;
    }
    /* NOLINTNEXTLINE(clang-analyzer-security.ArrayBound): the count is never below 0 */
    self->fresh[self->fresh_count++] = (ack_block){message, block};
}

/* Record the arrival of a data packet, new or duplicate. */
void flow_note_arrival(const engine *owner, flow *self, incoming *message, int64_t index, int tos, double now_s) {
    self->marked_received += (tos & 3) == 3; /* ECN: congestion experienced */
    if (!self->fresh_packets++)
        self->ack_due_s = now_s + flow_ack_delay_s(self);
    self->data_last_s = owner->arrived_s;
    note_block(self, message, index / ACK_BLOCK_PACKETS);
}

/* Stop acknowledging a message. */
void flow_forget_incoming(flow *self, const incoming *message) {
    for (int64_t k = 0; k < self->fresh_count; k++)
        if (self->fresh[k].message == message)
            self->fresh[k].message = NULL;
    for (int64_t k = 0; k < self->recent_count; k++)
        if (self->recent[k].message == message)
            self->recent[k].message = NULL;
}

static void put_entry(uint8_t *at, const ack_block *block) {
    const incoming *message = block->message;
    put32(at, (uint32_t)message->name.step);
    put16(at + 4, (uint16_t)message->name.message);
    put32(at + 6, (uint32_t)block->block | (message->complete && incoming_is_whole(message) ? ACK_WHOLE : 0));
    put64(at + 10, message->bits[block->block]);
}

/* Report the marked packets of one path with unreported ones. */
static void put_marks(flow *self, uint8_t *at) {
    int way = __builtin_ctzll(self->marked_paths);
    self->marked_paths &= self->marked_paths - 1;
    put32(at, (uint32_t)way);
    put16(at + 4, 0);
    put32(at + 6, ACK_PATH);
    put64(at + 10, self->path_marked[way]);
}

/* Save a block for the next acknowledgement to repeat. */
static void note_recent(flow *self, ack_block block) {
    if (self->recent_count == ACK_RECENT) {
        memmove(self->recent, self->recent + 1, (ACK_RECENT - 1) * sizeof *self->recent);
        self->recent_count--;
    }
    self->recent[self->recent_count++] = block;
}

void flow_acknowledge(engine *owner, flow *self, double now_s) {
    if (!self->fresh_packets)
        return;
    uint8_t *datagram = owner->datagram;
    int64_t limit = owner->config.payload_bytes / ACK_ENTRY_BYTES, done = 0;
    double ago_us = fmin(fmax((now_s - self->data_last_s) * 1e6, 0), 4e9);
    do {
        engine_write_header(owner, datagram, ACK, (int64_t)ago_us, self->late_received,
                            (uint32_t)microseconds(self->data_last_s), self->marked_received);
        int64_t entries = 0;
        for (int64_t k = 0; k < self->recent_count && entries < limit - 1; k++)
            if (self->recent[k].message)
                put_entry(datagram + HEADER_BYTES + entries++ * ACK_ENTRY_BYTES, &self->recent[k]);
        self->recent_count = 0;
        for (; done < self->fresh_count && entries < limit; done++) {
            if (!self->fresh[done].message)
                continue;
            put_entry(datagram + HEADER_BYTES + entries++ * ACK_ENTRY_BYTES, &self->fresh[done]);
            note_recent(self, self->fresh[done]);
        }
        for (; self->port_count && self->marked_paths && entries && entries < limit; entries++)
            put_marks(self, datagram + HEADER_BYTES + entries * ACK_ENTRY_BYTES);
        if (entries) {
            engine_send_datagram(owner, self, datagram, HEADER_BYTES + entries * ACK_ENTRY_BYTES,
                                 owner->config.control_tos, path_for_control(self));
            owner->view.counters.acknowledgements++;
        }
    } while (done < self->fresh_count);
    self->fresh_count = self->fresh_packets = 0;
    self->ack_due_s = INFINITY;
    self->acknowledged_s = now_s;
}

/* Report at once that a message is complete with every packet. */
void flow_acknowledge_whole(engine *owner, flow *self, incoming *message, double now_s) {
    note_block(self, message, (message->packets - 1) / ACK_BLOCK_PACKETS);
    if (!self->fresh_packets)
        self->fresh_packets = 1;
    flow_acknowledge(owner, self, now_s);
}

/* Send due acknowledgements; return when the next one is due. */
double flow_acknowledge_due(engine *owner, double now_s) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < owner->config.peers; i++) {
        flow *self = &owner->flows[i];
        if (!self->fresh_packets)
            continue;
        double at_s = self->ack_due_s;
        double spacing_s = fmax(ACK_SPACING_S, self->view.smoothed_rtt_s * ACK_ROUND_TRIPS);
        if (self->fresh_packets >= ACK_EVERY)
            at_s = sooner(at_s, self->acknowledged_s + spacing_s);
        if (self->fresh_packets >= ACK_AT_ONCE || now_s >= at_s)
            flow_acknowledge(owner, self, now_s);
        else
            due_s = sooner(due_s, at_s);
    }
    return due_s;
}

/* Acknowledgements in ---------------------------------------------------------------------------------------------- */

/* Return how many packets arrived marked since the last acknowledgement; `total` counts all so far. */
static int64_t marked_since(uint32_t *seen, uint32_t total) {
    uint32_t marked = total - *seen;
    if (marked >= 0x80000000u)
        return 0; /* a later one has overtaken it */
    *seen = total;
    return marked;
}

/* Process the count of late packets. All of a round trip count as one event (RFC 8985, 6.2). */
static void take_late(flow *self, uint16_t total, double now_s) {
    int16_t more = (int16_t)(total - self->late_seen);
    if (more <= 0)
        return;
    self->late_seen = total;
    if (now_s < self->widened_s + self->view.smoothed_rtt_s)
        return;
    self->widened_s = now_s;
    self->disorder = fmin(self->disorder * 2, DISORDER_MAX);
}

/* Process a path's count of marked packets. */
static void take_marks(flow *self, const uint8_t *entry) {
    uint32_t number = get32(entry);
    if (number >= self->path_count)
        return;
    path *way = &self->paths[number];
    int64_t marked = marked_since(&way->marked_seen, (uint32_t)get64(entry + 10));
    way->marked += marked;
    if (way->weight == 0 || way->on_trial)
        self->excused_marked += marked;
}

/* Sample the round trips of paths on which packets arrived that were sent once; `sampled` are their bits. */
static void sample_paths(const engine *owner, flow *self, uint64_t sampled, const uint8_t *header, double now_s) {
    double ago_s = (double)header_step(header) * 1e-6, total_s = 0, newest_s = 0;
    int64_t paths = 0;
    for (; sampled; sampled &= sampled - 1) {
        path *way = &self->paths[__builtin_ctzll(sampled)];
        /* The network's part, without the packet's wait for its host. */
        double rtt_s = fmax(owner->arrived_s - way->sampled_s - ago_s, 1e-6);
        path_sample_delay(way, rtt_s);
        newest_s = fmax(newest_s, way->sampled_s);
        if (way->weight == 0 || way->on_trial)
            continue;
        double there_s = one_way_s(self, (uint32_t)header_index(header), way->sampled_s);
        way->least_s = way->samples ? fmin(way->least_s, rtt_s) : rtt_s;
        way->one_way_s = way->samples ? fmin(way->one_way_s, there_s) : there_s;
        way->samples++;
        total_s += rtt_s;
        paths++;
    }
    if (paths)
        smooth_rtt(self, total_s / (double)paths);
    if (newest_s > 0)
        smooth(&self->response_s, &self->response_variation_s, fmax(now_s - newest_s, 1e-6));
}

void flow_take_acknowledgement(engine *owner, flow *self, const uint8_t *datagram, int64_t bytes, double now_s) {
    int64_t size = bytes - HEADER_BYTES, delivered = 0;
    if (size <= 0 || size % ACK_ENTRY_BYTES) {
        owner->view.counters.refused_malformed++;
        return;
    }
    int64_t marked = marked_since(&self->marked_seen, (uint32_t)header_count(datagram));
    take_late(self, (uint16_t)header_message(datagram), now_s);
    uint64_t sampled = 0;
    outgoing *whole = NULL;
    for (const uint8_t *at = datagram + HEADER_BYTES; at < datagram + bytes; at += ACK_ENTRY_BYTES) {
        if (get32(at + 6) == ACK_PATH) {
            take_marks(self, at);
            continue;
        }
        outgoing *message = outgoing_find(self, get32(at), get16(at + 4));
        int64_t first = (int64_t)(get32(at + 6) & ~ACK_WHOLE) * ACK_BLOCK_PACKETS;
        uint64_t bits = get64(at + 10);
        if (!message || first >= message->packets)
            continue;
        if (message->packets - first < ACK_BLOCK_PACKETS)
            bits &= (1ull << (message->packets - first)) - 1;
        for (uint64_t fresh = bits & ~message->acked[first / ACK_BLOCK_PACKETS]; fresh; fresh &= fresh - 1) {
            uint32_t index = (uint32_t)(first + __builtin_ctzll(fresh));
            if (message->state[index] == UNSENT)
                continue; /* it was not sent, so nobody can have it: forged or confused */
            double sent_s = outgoing_delivered(self, message, index, now_s);
            delivered++;
            /* Karn: a retransmitted packet gives no round-trip sample. */
            path *way = &self->paths[message->path[index]];
            uint64_t bit = 1ull << message->path[index];
            if (!(message->tags[index][0] & RETRANSMISSION) && sent_s > (sampled & bit ? way->sampled_s : 0)) {
                way->sampled_s = sent_s;
                sampled |= bit;
            }
        }
        if (get32(at + 6) & ACK_WHOLE && message->next == message->packets) {
            delivered += outgoing_all_delivered(self, message, now_s);
            if (!message->whole) {
                message->whole = true;
                message->next_whole = whole;
                whole = message;
            }
        }
    }
    sample_paths(owner, self, sampled, datagram, now_s);
    flow_feed_back(self, delivered, marked, 0, now_s);
    while (whole) {
        outgoing *next = whole->next_whole; /* the message is freed */
        outgoing_complete(owner, self, whole, NULL, now_s);
        whole = next;
    }
}
