/* SPDX-License-Identifier: Apache-2.0 */
/* A received message: which packets have arrived and where their bytes go, from its first packet or posted receive,
 * whichever is first, until it is complete. */

#include <math.h>
#include <string.h>

#include "ack.h"
#include "path.h"
#include "reduction.h"
#include "time_wait.h"

enum { STEPS_AHEAD_MAX = 1 << 16 };
/* From this size on, a message bypasses the caches: it would only evict useful data. The usual size of a core's L2. */
enum { STREAM_MIN_BYTES = 1 << 20 };

rx_message *rx_find(const receiver *rx, const flow *from, int64_t step, int64_t message) {
    return (rx_message *)table_find(&rx->messages, from->peer, step, message);
}

static void give_early(const receiver *rx, uint8_t *memory, int64_t bytes) {
    rx->io->view.early_bytes -= bytes;
    if (bytes)
        pool_give(&rx->io->pool, memory, bytes);
}

static rx_message *rx_make(receiver *rx, flow *from, int64_t step, int64_t message, int64_t packets) {
    rx_message *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->id = (msg_id){from->peer, step, message, NULL};
    self->from = from;
    self->packets = packets;
    self->protected_packets = self->required = -1;
    self->bits = calloc(bit_words(packets), sizeof *self->bits);
    self->layer = calloc((size_t)packets, 1);
    if (!self->bits || !self->layer) {
        rx_free(self);
        return NULL;
    }
    self->active = true;
    table_add(&rx->messages, &self->id);
    self->older = rx->newest_message;
    *(self->older ? &self->older->newer : &rx->oldest_message) = self;
    rx->newest_message = self;
    return self;
}

/* Accept no more packets for a message. A reduction may still need what has arrived, and frees it. */
static void rx_close(receiver *rx, rx_message *self) {
    ack_forget(self->from, self); /* its STOP covers what is not acknowledged yet */
    table_remove(&rx->messages, &self->id);
    *(self->older ? &self->older->newer : &rx->oldest_message) = self->newer;
    *(self->newer ? &self->newer->older : &rx->newest_message) = self->older;
    self->active = false;
    give_early(rx, self->buffer, self->early_bytes);
    self->early_bytes = 0;
    free(self->trimmed);
    self->trimmed = NULL;
}

static void rx_drop(receiver *rx, rx_message *self) {
    rx_close(rx, self);
    if (!self->reduction)
        rx_free(self);
}

/* Drop a message that is not as expected, and all its further packets. */
static void abandon(receiver *rx, rx_message *self, double now_s) {
    time_wait_add(rx, self, now_s);
    rx_drop(rx, self);
}

/* Create a message that arrives before its receive is posted; NULL if it is not accepted. */
static rx_message *rx_make_unexpected(receiver *rx, flow *from, const uint8_t *header, double now_s) {
    int64_t packets = header_count(header), bytes = packets * rx->io->config.payload_bytes;
    if (packets < 1 || packets > MESSAGE_PACKETS_MAX) {
        rx->io->view.counters.refused_malformed++;
        return NULL;
    }
    if (rx->io->view.early_bytes + bytes > rx->io->config.early_bytes_max) {
        rx->io->view.counters.early_full++; /* nothing is lost: unacknowledged packets are retransmitted */
        return NULL;
    }
    uint8_t *buffer = pool_take(&rx->io->pool, bytes);
    if (!buffer)
        return NULL;
    rx_message *self = rx_make(rx, from, header_step(header), header_message(header), packets);
    if (!self) {
        pool_give(&rx->io->pool, buffer, bytes);
        return NULL;
    }
    self->buffer = buffer;
    self->bytes = self->early_bytes = bytes;
    rx->io->view.early_bytes += bytes;
    io_message_event(rx->io, EVENT_UNEXPECTED, &self->id, packets, now_s);
    return self;
}

static void copy_in(rx_message *self, int64_t offset, const uint8_t *payload, int64_t bytes) {
    int64_t direct = smaller(self->bytes - offset, bytes);
    if (direct > 0)
        memcpy(self->buffer + offset, payload, (size_t)direct);
    else
        direct = 0;
    if (direct < bytes)
        memcpy(self->tail + (offset + direct - self->bytes), payload + direct, (size_t)(bytes - direct));
}

/* Whether packets are added to a sum as they are, instead of being stored. */
static bool is_added(const rx_message *self) {
    return self->reduction && !reduction_is_encoded(self->reduction);
}

/* Move early packets to their destination. */
static void settle_in(receiver *rx, rx_message *self, const uint8_t *from) {
    int64_t payload_bytes = rx->io->config.payload_bytes, total = self->bytes + self->tail_bytes;
    for (int64_t i = 0; i < self->packets; i++) {
        if (!has_bit(self->bits, i))
            continue;
        int64_t offset = i * payload_bytes;
        if (is_added(self))
            reduction_add(self->reduction, self->position, i, from + offset);
        else
            copy_in(self, offset, from + offset, smaller(total - offset, payload_bytes));
    }
    if (self->reduction && !is_added(self))
        for (int64_t i = 0; i < self->reduction->packets; i++)
            reduction_note_encoded(self->reduction, self, i);
}

static bool meets_bound(const rx_message *self) {
    if (self->required < 0)
        return false;
    if (rx_is_whole(self))
        return true;
    return (self->asked || self->immediate) && self->protected_packets >= 0 && self->arrived >= self->required &&
           self->arrived_protected >= self->protected_packets;
}

/* Report a message that meets its bound, and notify its sender; return whether it does. The message may be freed. */
static bool complete(receiver *rx, rx_message *self, double now_s) {
    if (!meets_bound(self))
        return false;
    finish_memcpy_nt();
    flow *from = self->from;
    bool whole = rx_is_whole(self);
    self->complete = true;
    rx_time_wait *done = time_wait_add(rx, self, now_s);
    if (done)
        done->asked = self->asked && !whole;
    if (whole)
        ack_send_whole(rx->io, from, self, now_s);
    else
        ack_send(rx->io, from, now_s);
    rx_close(rx, self);
    event *ev = io_message_event(rx->io, EVENT_ARRIVED, &self->id, self->packets, now_s);
    ev->last_bytes = self->last_bytes;
    ev->bits = whole ? NULL : self->bits;
    ev->data = self->layer;
    if (done && whole)
        done->state = TIME_WAIT_WHOLE;
    else if (done && time_wait_begin_stop(rx, done, self->bits, now_s, now_s + rx->io->config.deadline_s))
        rx->io->view.failed = true;
    if (!self->reduction) { /* otherwise the reduction frees it; what the event points at stays */
        io_discard(rx->io, self->bits);
        io_discard(rx->io, self->layer);
        free(self);
    }
    return true;
}

static bool agrees(const receiver *rx, const rx_message *self, const receive_request *request) {
    if (!request->last_bytes)
        return true;
    return request->packets == self->packets && (!self->last_bytes || self->last_bytes == request->last_bytes) &&
           request->last_bytes <= rx->io->config.payload_bytes;
}

/* Post a receive. The caller keeps its memory until EVENT_ARRIVED, or until the reduction, if any, is freed. Return 0;
 * NO_MEMORY; or, if the arriving message has another size, its number of packets. */
int64_t rx_post(receiver *rx, const receive_request *request, double now_s) {
    flow *from = &rx->flows[request->peer];
    rx_message *self = rx_find(rx, from, request->step, request->message);
    if (self && !agrees(rx, self, request)) {
        int64_t packets = self->packets;
        abandon(rx, self, now_s);
        return packets;
    }
    uint8_t *early = NULL;
    int64_t early_bytes = 0;
    if (self) {
        early = self->buffer;
        early_bytes = self->early_bytes;
        self->early_bytes = 0;
    } else {
        self = rx_make(rx, from, request->step, request->message, request->packets);
        if (!self)
            return NO_MEMORY;
    }
    self->buffer = request->buffer;
    self->bytes = request->bytes;
    self->tail = request->tail;
    self->tail_bytes = request->tail_bytes;
    if (request->reduction) {
        self->reduction = request->reduction;
        self->position = request->position;
        self->reduction->from[self->position] = self;
    }
    if (early)
        settle_in(rx, self, early);
    give_early(rx, early, early_bytes);
    self->required = request->required;
    self->immediate = request->immediate;
    if (request->last_bytes)
        self->last_bytes = request->last_bytes;
    complete(rx, self, now_s);
    return 0;
}

void rx_report_unexpected(receiver *rx, double now_s) {
    for (const rx_message *self = rx->oldest_message; self; self = self->newer)
        if (self->required < 0)
            io_message_event(rx->io, EVENT_UNEXPECTED, &self->id, self->packets, now_s);
}

/* Refuse packets of steps before `step` from now on, and forget their messages. */
void rx_begin_step(receiver *rx, int64_t step, double now_s) {
    if (step > rx->oldest_step)
        rx->oldest_step = step;
    rx_message *newer = NULL;
    for (rx_message *self = rx->oldest_message; self; self = newer) {
        newer = self->newer;
        if (self->id.step < step)
            rx_drop(rx, self);
    }
    time_wait_forget_steps(rx, step, now_s);
}

/* Drop all messages. */
void rx_drop_all(receiver *rx) {
    while (rx->oldest_message)
        rx_drop(rx, rx->oldest_message);
    while (rx->oldest)
        time_wait_free(rx, rx->oldest);
}

static bool is_current(const receiver *rx, int64_t step) {
    return step >= rx->oldest_step && step <= rx->oldest_step + STEPS_AHEAD_MAX;
}

/* Return whether a switch has left no more of a packet than its headers. Ours set a flag. Those of other vendors leave
 * less than the `full` size (0: unknown), and give it another DSCP. */
static bool is_trimmed(const flow *from, const uint8_t *header, int64_t size, int64_t full, int tos) {
    const uint8_t *ours = from->service[header[2] >> 5];
    int mark = tos & ~3;
    return header[1] & TRIMMED || (size < full && mark && mark != (ours[0] & ~3) && mark != (ours[1] & ~3));
}

/* Return the message of data that is not known yet; NULL to accept none. */
static rx_message *rx_accept_first(receiver *rx, flow *from, const uint8_t *header, int64_t size, int tos,
                                   double now_s) {
    int64_t step = header_step(header), index = header_index(header), count = header_count(header);
    if (!is_current(rx, step)) {
        rx->io->view.counters.refused_stale++;
        return NULL;
    }
    if (rx->closed)
        return NULL;
    rx_time_wait *done = time_wait_find(rx, from, step, header_message(header));
    if (done) {
        rx->io->view.counters.late++;
        from->late_received += done->asked && !(header[1] & (RETRANSMISSION | TRIMMED));
        if (done->state == TIME_WAIT_STOPPING) {
            if (now_s > done->due_s - done->repeat_s / 2)
                time_wait_stop(rx, done, now_s);
        } else if (done->state == TIME_WAIT_WHOLE &&
                   now_s > fmax(rx->reminded_s, done->completed_s) + flow_probe_timeout_s(from) / 2) {
            rx->reminded_s = now_s;
            time_wait_tell_whole(rx, done);
        }
        return NULL;
    }
    int64_t payload_bytes = rx->io->config.payload_bytes;
    int64_t full = index < count - 1 ? payload_bytes : 0;
    bool fits = size > 0 && size >= full && size <= payload_bytes;
    if (index >= count || !(fits || is_trimmed(from, header, size, full, tos))) {
        rx->io->view.counters.refused_malformed++;
        return NULL;
    }
    return rx_make_unexpected(rx, from, header, now_s);
}

/* Refuse data that does not fit its message. A mismatch with a posted receive is reported. */
static void refuse_misfit(receiver *rx, rx_message *self, const uint8_t *header, int64_t size, double now_s) {
    rx->io->view.counters.refused_malformed++;
    if (self->required < 0)
        return;
    int64_t payload_bytes = rx->io->config.payload_bytes, count = header_count(header);
    bool last = header_index(header) == count - 1;
    bool sound = size > 0 && size <= payload_bytes && (last || size == payload_bytes);
    if (!sound || (count == self->packets && !last))
        return;
    io_message_event(rx->io, EVENT_MISMATCH, &self->id, count, now_s);
    abandon(rx, self, now_s);
}

/* Record that all packets have arrived or been trimmed: no more will come, unless they are sent again. */
static void note_accounted(rx_message *self) {
    if (self->arrived + self->trimmed_packets < self->packets || self->trimmed_protected)
        return;
    self->asked = true;
    self->protected_packets = self->arrived_protected;
}

/* Record a trimmed packet as lost, and let its sender know soon. */
static void take_trimmed(receiver *rx, rx_message *self, const uint8_t *header, int tos, double now_s) {
    int64_t index = header_index(header);
    rx->io->view.counters.trimmed++;
    /* Of a packet that was sent again, another copy may be under way; a probe finds out. */
    if (has_bit(self->bits, index) || header[1] & RETRANSMISSION)
        return;
    if (!self->trimmed)
        self->trimmed = calloc(bit_words(self->packets), sizeof *self->trimmed);
    if (!self->trimmed || has_bit(self->trimmed, index))
        return;
    set_bit(self->trimmed, index);
    self->trimmed_packets++;
    self->trimmed_protected += (header[1] & PROTECTED) != 0;
    ack_note_arrival(rx->io, self->from, self, index, tos, now_s);
    note_accounted(self);
    complete(rx, self, now_s);
}

/* Process a data packet. Its payload need not follow its header in memory. */
void rx_take_data(receiver *rx, flow *from, const uint8_t *header, const uint8_t *payload, int64_t size, int tos,
                  double now_s) {
    int64_t index = header_index(header), payload_bytes = rx->io->config.payload_bytes;
    rx_message *self = rx_find(rx, from, header_step(header), header_message(header));
    if (!self) {
        self = rx_accept_first(rx, from, header, size, tos, now_s);
        if (!self)
            return;
    }
    bool last = index == self->packets - 1, belongs = header_count(header) == self->packets && index < self->packets;
    if (belongs && is_trimmed(from, header, size, last ? self->last_bytes : payload_bytes, tos)) {
        take_trimmed(rx, self, header, tos, now_s);
        return;
    }
    bool fits = belongs && size > 0 && size <= payload_bytes &&
                (!last || !self->last_bytes || size == self->last_bytes) && (last || size == payload_bytes);
    if (!fits) {
        refuse_misfit(rx, self, header, size, now_s);
        return;
    }
    ack_note_arrival(rx->io, from, self, index, tos, now_s);
    if (has_bit(self->bits, index)) {
        rx->io->view.counters.duplicate++;
        from->late_received += (header[1] & RETRANSMISSION) != 0;
        return;
    }
    int64_t offset = index * payload_bytes;
    set_bit(self->bits, index);
    if (is_added(self))
        reduction_add(self->reduction, self->position, index, payload);
    else if (!self->reduction && self->bytes >= STREAM_MIN_BYTES && offset + size <= self->bytes)
        memcpy_nt(self->buffer + offset, payload, size);
    else
        copy_in(self, offset, payload, size);
    if (self->reduction && !is_added(self))
        reduction_note_encoded(self->reduction, self, index);
    if (last)
        self->last_bytes = size;
    self->layer[index] = header[3];
    self->arrived++;
    self->arrived_protected += (header[1] & PROTECTED) != 0;
    rx->io->view.counters.data++;
    if (self->trimmed) {
        if (has_bit(self->trimmed, index)) { /* it was sent again */
            clear_bit(self->trimmed, index);
            self->trimmed_packets--;
            self->trimmed_protected -= (header[1] & PROTECTED) != 0;
        }
        note_accounted(self);
    }
    complete(rx, self, now_s);
}

/* Answer the probe of this number: which packets have arrived. */
static void send_bitmap(receiver *rx, flow *to, const rx_message *self, uint16_t number) {
    int64_t span = io_bitmap_packets(rx->io);
    uint8_t *datagram = rx->io->datagram, *bitmap = datagram + HEADER_BYTES;
    for (int64_t first = 0; first < self->packets; first += span) {
        int64_t count = smaller(span, self->packets - first), bytes = (count + 7) / 8;
        put_bitmap(bitmap, self->bits, first, count);
        io_write_header(rx->io, datagram, BITMAP, self->id.step, self->id.message, first, self->packets);
        put16(datagram + 6, number);
        if (io_send_datagram(rx->io, to, datagram, HEADER_BYTES + bytes, rx->io->config.control_tos,
                             path_for_control(to)) < 0)
            rx->io->view.counters.control_unsent++;
    }
}

/* Answer a sender's probe: what is missing, or that no more is needed. */
void rx_take_probe(receiver *rx, flow *from, const uint8_t *datagram, int64_t bytes, double now_s) {
    int64_t step = header_step(datagram), message = header_message(datagram);
    rx_time_wait *done = time_wait_find(rx, from, step, message);
    rx_message *self = rx_find(rx, from, step, message);
    if (done && done->state == TIME_WAIT_STOPPING) {
        time_wait_stop(rx, done, now_s);
        return;
    }
    /* A sender that has not probed for this long knows the outcome. */
    if (done && done->state == TIME_WAIT_WHOLE && now_s < done->completed_s + 2 * rx->io->config.silence_s) {
        time_wait_tell_whole(rx, done);
        return;
    }
    if (done || !is_current(rx, step)) {
        rx->io->view.counters.refused_stale++;
        return;
    }
    if (!self && !rx->closed)
        self = rx_make_unexpected(rx, from, datagram, now_s);
    if (!self)
        return;
    if (header_count(datagram) != self->packets || header_index(datagram) > self->packets) {
        rx->io->view.counters.refused_malformed++;
        return;
    }
    bool has_more = bytes >= HEADER_BYTES + QUESTION_BYTES && datagram[HEADER_BYTES];
    if (!has_more) {
        self->asked = true;
        self->protected_packets = header_index(datagram);
    }
    if (complete(rx, self, now_s))
        return;
    send_bitmap(rx, from, self, get16(datagram + 6));
}

/* Return whether a packet is for a sum that needs it only after others' packets. */
bool rx_is_out_of_turn(const receiver *rx, const flow *from, const uint8_t *header) {
    if (header_type(header) != DATA)
        return false;
    int64_t index = header_index(header);
    const rx_message *message = rx_find(rx, from, header_step(header), header_message(header));
    return message && message->reduction && index < message->packets &&
           !reduction_is_in_turn(message->reduction, message->position, index);
}
