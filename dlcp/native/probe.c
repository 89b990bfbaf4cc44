/* SPDX-License-Identifier: Apache-2.0 */
/* Probes for packets that may be missing, and the receivers' answers: which packets have arrived (BITMAP), or that no
 * more are needed (STOP). */

#include <math.h>
#include <stdlib.h>

#include "flight.h"
#include "path.h"
#include "probe.h"

/* Report a peer that is heard, but to which no full packet has arrived for some timeouts: the path may have become too
 * narrow for them or for the answers, without an ICMP message. Python then tests the path. */
static void suspect_narrow_path(io *io, flow *to, const tx_message *self, double now_s) {
    double patience_s = NARROW_TIMEOUTS * flow_probe_timeout_s(to), since_s = fmax(to->full_s, to->narrow_s);
    /* If every packet has arrived, only a STOP without bitmaps is missing. */
    if (to->local.out.bytes || self->delivered == self->packets || to->view.heard_s < since_s)
        return;
    if (now_s - since_s < patience_s)
        return;
    to->narrow_s = now_s;
    io_event(io, EVENT_NARROW, to->peer, now_s);
}

void probe_send(io *io, flow *to, tx_message *self, double now_s) {
    suspect_narrow_path(io, to, self, now_s);
    if (self->probes_unanswered > 1)
        io_event(io, EVENT_TIMEOUT, to->peer, now_s);
    self->probes_without_progress++;
    self->probes_unanswered++;
    io->view.counters.probe++;
    /* In the same queue behind the packets, or the probe could overtake them, for example in a growing queue. If it
     * goes unanswered it may have been lost there, and the next one only asks about older packets. */
    bool behind = self->flying && self->probes_unanswered == 1;
    self->questions++;
    self->asked[self->questions % QUESTIONS] = (question){now_s, behind ? now_s : self->probed_s};
    self->probed_s = now_s;
    uint8_t datagram[HEADER_BYTES + QUESTION_BYTES], *payload = datagram + HEADER_BYTES;
    io_write_header(io, datagram, PROBE, self->id.step, self->id.message, self->protected_packets, self->packets);
    put16(datagram + 6, (uint16_t)self->questions);
    payload[0] = self->unsent && !self->immediate;
    int64_t bytes = HEADER_BYTES + payload[0];
    int tos = io->config.control_tos;
    int64_t way = path_for_control(to);
    if (behind) {
        datagram[2] = (uint8_t)(self->last_queue << 5);
        tos = to->service[self->last_queue][0];
        way = to->path_last;
    }
    if (io_send_datagram(io, to, datagram, bytes, tos, way) < 0)
        io->view.counters.control_unsent++;
    else
        self->probes_behind += behind;
}

/* Return when to probe for missing packets; infinity while packets leave freely. With losses, a probe follows the last
 * packet after its possible lateness, so the receiver's answer comes soon. Otherwise a probe would nearly always be
 * needless, so it is sent only when an acknowledgement is late. */
static double ask_due_s(const flow *to, tx_message *self, double timeout_s) {
    if (self->delivered != self->delivered_seen) {
        self->delivered_seen = self->delivered;
        self->probes_unanswered = self->probes_without_progress = 0;
    }
    int idle = !self->unsent && !self->flying;
    if (!idle && !self->flying)
        return INFINITY;
    if (idle && self->delivered < self->packets && !self->probes_without_progress)
        return 0; /* missing packets may stay lost, if the receiver agrees */
    if (tx_wants_probe(to, self))
        return self->last_sent_s + fmin(timeout_s, flow_lateness_s(to));
    /* Probes and answers get lost, too: only answers without progress justify backing off. */
    int64_t without_progress =
        self->probes_without_progress - self->probes_unanswered + self->probes_unanswered / UNANSWERED_PATIENCE;
    int most = BACKOFF_DOUBLINGS_MAX, doublings = (int)smaller(most, without_progress);
    /* On a slow path, or one that a forged answer makes look slow, doubling must not lead to minutes. */
    double wait_s = fmin(ldexp(timeout_s, doublings), ldexp(PROBE_TIMEOUT_MAX_S, most));
    return fmax(self->active_s, self->probed_s) + fmax(timeout_s, wait_s);
}

/* Probe a peer for missing packets where due; return when to look again. Feedback that delays a probe is noticed only
 * then, so messages are checked once per timeout and not at every packet. */
double probe_due(io *io, flow *to, double now_s) {
    if (!to->oldest)
        return INFINITY;
    if (now_s < to->look_s)
        return to->look_s;
    double due_s = INFINITY, timeout_s = flow_probe_timeout_s(to);
    for (tx_message *self = to->oldest; self; self = self->newer) {
        double ask_s = ask_due_s(to, self, timeout_s);
        if (now_s >= ask_s) {
            probe_send(io, to, self, now_s);
            ask_s = ask_due_s(to, self, timeout_s);
        }
        due_s = sooner(due_s, ask_s);
    }
    to->look_s = due_s;
    return due_s;
}

/* Packets sent before `until_s` and absent from the bitmap are lost. Return whether any are new. */
static bool take_missing(flow *to, tx_message *self, int64_t first, int64_t count, const uint8_t *bitmap,
                         double until_s, double now_s) {
    int64_t fresh = 0, lost = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t index = (uint32_t)(first + i);
        uint8_t state = self->state[index];
        if (bitmap[i >> 3] >> (7 - (i & 7)) & 1) {
            if (state == DELIVERED || state == UNSENT) /* nobody can have a packet that was not sent */
                continue;
            tx_delivered(to, self, index, now_s);
            fresh++;
        } else if (state == FLYING && self->sent_s[index] < until_s) {
            tx_lost(to, self, index);
            lost++;
        }
    }
    flight_feed_back(to, fresh, 0, lost, now_s);
    return fresh + lost > 0;
}

/* Process one part of a STOP; complete the message once every part has arrived. */
static void take_stop(io *io, flow *to, tx_message *self, int64_t first, int64_t count, const uint8_t *bitmap,
                      double now_s) {
    if (!self->confirmed) {
        /* After these bits comes one per part, for the parts that have arrived. */
        size_t words = bit_words(self->packets) * 2;
        self->confirmed = calloc(words, sizeof *self->confirmed);
        if (!self->confirmed)
            return; /* the STOP is repeated */
    }
    uint64_t *seen = self->confirmed + bit_words(self->packets);
    int64_t part = first / io_bitmap_packets(io);
    if (has_bit(seen, part))
        return;
    set_bit(seen, part);
    for (int64_t i = 0; i < count; i++)
        if (bitmap[i >> 3] >> (7 - (i & 7)) & 1)
            set_bit(self->confirmed, first + i);
    self->confirmed_packets += count;
    if (self->confirmed_packets < self->packets)
        return;
    uint64_t *bits = self->confirmed;
    self->confirmed = NULL;
    tx_complete(io, to, self, bits, now_s);
    io_discard(io, bits);
}

/* Process a BITMAP (which packets have arrived) or a STOP (no more are needed). */
void probe_take_answer(io *io, flow *to, const uint8_t *datagram, int64_t bytes, double now_s) {
    bool is_stop = header_type(datagram) == STOP;
    msg_id id = {to->peer, header_step(datagram), header_message(datagram), NULL};
    int64_t first = header_index(datagram), span = io_bitmap_packets(io), size = bytes - HEADER_BYTES;
    tx_message *self = tx_find(to, id.step, id.message);
    if (!self) {
        if (is_stop) /* our last answer was lost; the bitmap was processed */
            io_send_control(io, to, STOP_ACK, &id, first, 0, NULL, 0);
        else
            io->view.counters.late++;
        return;
    }
    bool whole = is_stop && !size;
    int64_t count = whole ? self->packets : smaller(span, self->packets - first);
    bool fits = whole ? !first : first % span == 0 && size == (count + 7) / 8;
    if (header_count(datagram) != self->packets || count < 1 || !fits) {
        io->view.counters.refused_malformed++;
        return;
    }
    if (is_stop) {
        io_send_control(io, to, STOP_ACK, &id, first, 0, NULL, 0);
        if (whole)
            tx_complete(io, to, self, NULL, now_s);
        else
            take_stop(io, to, self, first, count, datagram + HEADER_BYTES, now_s);
        return;
    }
    uint16_t ago = (uint16_t)(self->questions - get16(datagram + 6));
    if (ago >= smaller(self->questions, QUESTIONS)) {
        io->view.counters.late++;
        return;
    }
    const question *asked = &self->asked[(self->questions - ago) % QUESTIONS];
    /* A peer that is not ready answers without progress: probe less often, but not because of congestion. */
    if (self->probes_unanswered > 1) /* lost probes do not count: this is one answer */
        self->probes_without_progress -= self->probes_unanswered - 1;
    self->probes_unanswered = 0;
    to->answered_s = fmax(to->answered_s, now_s - asked->asked_s);
    to->look_s = now_s;
    if (take_missing(to, self, first, count, datagram + HEADER_BYTES, asked->until_s, now_s))
        self->probes_without_progress = 0;
}
