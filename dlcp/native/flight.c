/* SPDX-License-Identifier: Apache-2.0 */
/* Packets in flight to a peer: which may leave, which are lost, and reports of both.
 *
 * A packet is declared lost when one sent later on the same path into the same queue has arrived, and either was sent
 * later by more than the reordering window or arrived longer than that ago (RACK, RFC 8985, kept per queue because
 * strict priority reorders across queues, and per path because delays differ). If no later packet follows, the sender
 * probes (probe.c). A path on which nothing arrives at all is compared with the other paths and abandoned after a
 * while. */

#include <math.h>
#include <stdlib.h>

#include "flight.h"
#include "path.h"

enum { BURSTS_FIRST = 16, BURST_BYTES_MAX = 65000 };
/* Spacing of the send times of a burst's packets: much less than the time to send one, and still resolved by a double
 * after years of uptime. */
static const double STAMP_S = 0x1p-26;

/* Losses ----------------------------------------------------------------------------------------------------------- */

/* A search for losses in one queue of a path: packets sent before `newest_s` are lost if sent before `until_s`. */
typedef struct {
    double until_s, newest_s;
    int64_t lost;
    double oldest_s; /* send time of the first packet that may still be lost; infinity: none */
} search;

/* Find losses in a burst; return whether all its packets are settled. */
static bool lose_burst(flow *self, const sent_burst *sent, search *within) {
    tx_message *message = sent->message;
    uint32_t count = sent->packets ? sent->packets : 1;
    for (uint32_t k = 0; k < count; k++) {
        double sent_s = sent->sent_s + k * STAMP_S;
        if (sent_s >= within->newest_s)
            return false;
        uint32_t index = sent->packets ? message->order[sent->first + k] : sent->first;
        /* A packet retransmitted since then has its own burst. */
        if (message->state[index] != FLYING || message->sent_s[index] != sent_s)
            continue;
        if (sent_s >= within->until_s) {
            within->oldest_s = sent_s;
            return false;
        }
        tx_lost(self, message, index);
        within->lost++;
    }
    return true;
}

static search lose_until(flow *self, burst_queue *sent, double until_s, double newest_s) {
    search within = {.until_s = until_s, .newest_s = newest_s, .oldest_s = INFINITY};
    while (sent->count) {
        const sent_burst *first = &sent->bursts[sent->first];
        if (first->message) {
            if (first->sent_s >= newest_s || !lose_burst(self, first, &within))
                break;
            first->message->bursts--;
        }
        sent->first = (sent->first + 1) % sent->capacity;
        sent->count--;
    }
    return within;
}

/* Find a path's losses by much later arrivals on other paths; abandon it if nothing arrives there at all. */
static int64_t lose_stalled(flow *self, path *way, int queue, double stalled_s, double now_s) {
    double until_s = self->newest_delivered_s[queue] - fmax(stalled_s, 2 * way->delay_s);
    int64_t lost = lose_until(self, &way->sent_bursts[queue], until_s, until_s).lost;
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
        search found = lose_until(self, &way->sent_bursts[queue], newest_s - fmax(over_s - now_s, 0), newest_s);
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

/* Reports ---------------------------------------------------------------------------------------------------------- */

/* Schedule the next report. There is no hurry unless the window should shrink or grow; memory has nothing to report. */
static void schedule_report(flow *self) {
    if (self->local.out.bytes || (!self->delivered && !self->lost))
        return;
    bool hurry = self->lost || self->marked || (self->limited && self->view.slow_start);
    double calm_s = hurry ? REPORT_MIN_S : REPORT_CALM_S;
    self->report_due_s = self->reported_s + fmax(self->view.smoothed_rtt_s, calm_s);
}

/* Record feedback for the next report. */
void flight_feed_back(flow *self, int64_t delivered, int64_t marked, int64_t lost, double now_s) {
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

/* Find packets that were overtaken too long ago, if due; return when to look again. */
double flight_find_overtaken(flow *self, double now_s) {
    if (now_s >= self->overtaken_due_s) {
        int64_t lost = find_lost(self, now_s);
        flight_feed_back(self, 0, 0, lost, now_s);
    }
    return self->overtaken_due_s;
}

/* Find the minimum RTT and the minimum one-way delay since the last report. Over several paths it is their mean,
 * weighted by samples, so that an empty path does not hide another one's queue. */
static void report_times(flow *self, event *ev) {
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
    ev->rtt_s = samples ? rtt_s / (double)samples : 0;
    ev->one_way_s = samples ? there_s / (double)samples : INFINITY;
}

/* Report on flows once a report is due; return when the next one is. A flow may report after half its time: several
 * flows report together, since a turn of Python costs more than a report. */
double flight_report(io *io, flow *flows, double now_s) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < io->config.peers; i++)
        due_s = sooner(due_s, flows[i].report_due_s);
    if (now_s < due_s)
        return due_s;
    due_s = INFINITY;
    for (int64_t i = 0; i < io->config.peers; i++) {
        flow *self = &flows[i];
        if (now_s < (self->reported_s + self->report_due_s) / 2) {
            due_s = sooner(due_s, self->report_due_s);
            continue;
        }
        event *ev = io_event(io, EVENT_REPORT, self->peer, now_s);
        ev->delivered = self->delivered;
        ev->marked = self->marked;
        ev->lost = self->lost;
        ev->limited = self->limited;
        ev->waiting = self->most_urgent != NULL;
        report_times(self, ev);
        ev->smoothed_rtt_s = self->view.smoothed_rtt_s;
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
double flight_resumes_s(const flow *self, double now_s) {
    double until_s = INFINITY;
    if (self->view.window < 1)
        until_s = self->view.flying ? INFINITY : paused_until_s(self);
    else if (self->pacing_blocked)
        until_s = self->paced_s;
    return self->oldest && until_s > now_s ? until_s : INFINITY;
}

static int64_t room(const flow *self, double now_s) {
    if (self->view.window < 1)
        return self->view.flying == 0 && now_s >= paused_until_s(self);
    return (int64_t)fmin(self->view.window, (double)self->view.largest_window) - self->view.flying;
}

/* Return how many packets the pace admits at once. A timer for each would cost too much: packets due within
 * PACE_TURN_S leave together. */
static double pace_room(flow *self, double now_s) {
    self->pacing_blocked = now_s < self->paced_s - (self->pacing_blocked ? 0 : PACE_TURN_S);
    return self->pacing_blocked ? 0 : fmax(self->view.pace * PACE_TURN_S, (double)PATH_BURST);
}

/* Position of the burst `after` places behind the first. */
static int64_t place_of_burst(const burst_queue *sent, int64_t after) {
    int64_t at = sent->first + after;
    return at < sent->capacity ? at : at - sent->capacity;
}

/* Make room for this many more bursts; return 0, or NO_MEMORY. */
static int reserve_bursts(burst_queue *sent, int64_t more) {
    if (sent->count + more <= sent->capacity)
        return 0;
    int64_t capacity = sent->capacity ? sent->capacity * 2 : BURSTS_FIRST;
    while (capacity < sent->count + more)
        capacity *= 2;
    sent_burst *bursts = malloc((size_t)capacity * sizeof *bursts);
    if (!bursts)
        return NO_MEMORY;
    for (int64_t k = 0; k < sent->count; k++)
        bursts[k] = sent->bursts[place_of_burst(sent, k)];
    free(sent->bursts);
    sent->bursts = bursts;
    sent->first = 0;
    sent->capacity = capacity;
    return 0;
}

static void note_burst(burst_queue *sent, sent_burst one) {
    sent->bursts[place_of_burst(sent, sent->count)] = one; /* reserve_bursts has made room */
    sent->count++;
    one.message->bursts++;
}

/* The queue that notes the packets of a burst. */
static burst_queue *queue_of(flow *self, const burst *sent) {
    return &self->paths[sent->way].sent_bursts[sent->message->tags[sent->packets[0]][1] >> 5];
}

/* Choose the next burst that the window admits, of the most urgent packets; return whether there is one. */
bool flight_next_burst(io *io, flow *self, burst *into, double now_s) {
    if (!self->most_urgent || self->view.mute)
        return false;
    int64_t limit = room(self, now_s), packet_bytes = HEADER_BYTES + io->config.payload_bytes;
    if (limit <= 0) {
        if (!self->limited && self->view.window < (double)self->view.largest_window) {
            self->limited = true;
            schedule_report(self);
        }
        return false;
    }
    double paced = pace_room(self, now_s);
    if (self->pacing_blocked)
        return false;
    limit = smaller(smaller(limit, self->view.burst), smaller(SEGMENTS_MAX, BURST_BYTES_MAX / packet_bytes));
    limit = (int64_t)fmax(fmin((double)limit, paced), 1);
    into->way = path_choose(self, &limit, now_s);
    tx_gather(io, self->most_urgent, limit, into);
    /* Reserved before anything leaves, because a packet that is in no burst could never be declared lost. */
    if (reserve_bursts(queue_of(self, into), into->again ? into->count : 1)) {
        io->view.failed = true;
        return false;
    }
    tx_fill(io, self, into);
    return true;
}

/* Record that a burst has left. */
void flight_note_sent(flow *self, const burst *sent, double now_s) {
    tx_message *message = sent->message;
    burst_queue *queue = queue_of(self, sent);
    /* Every packet has a unique send time, which also gives their order. */
    double stamp_s = fmax(now_s, self->stamped_s + STAMP_S);
    if (!sent->again)
        note_burst(queue, (sent_burst){stamp_s, message, (uint32_t)message->next, (uint32_t)sent->count});
    for (uint32_t k = 0; k < sent->count; k++) {
        uint32_t index = sent->packets[k];
        self->stamped_s = stamp_s + k * STAMP_S;
        if (sent->again)
            note_burst(queue, (sent_burst){self->stamped_s, message, index, 0});
        message->state[index] = FLYING;
        message->sent_s[index] = self->stamped_s;
        message->path[index] = (uint8_t)sent->way;
    }
    self->view.flying += sent->count;
    self->paths[sent->way].flying += sent->count;
    self->paths[sent->way].sent += sent->count;
    self->path_last = sent->way;
    self->sent_last_s = now_s;
    self->lossy_packets = self->lossy_packets > sent->count ? self->lossy_packets - sent->count : 0;
    tx_note_sent(self, sent, now_s);
    self->paced_s = fmax(self->paced_s, now_s - PACE_TURN_S) + (double)sent->count / self->view.pace;
}

void flight_free(flow *self) {
    for (int64_t way = 0; way < self->path_count; way++)
        for (int queue = 0; queue < QUEUES; queue++)
            free(self->paths[way].sent_bursts[queue].bursts);
    free(self->paths);
}
