/* SPDX-License-Identifier: Apache-2.0 */
/* Acknowledgements of packets, out and in.
 *
 * An acknowledgement reports, in blocks of 64 packets, which packets have arrived. It contains everything known about
 * its blocks, and repeats the previous ones, so the next acknowledgement makes up for a lost one. Its payload has
 * entries of step (4 bytes), message (2), block (4; with ACK_WHOLE if the message is complete with every packet) and
 * bits (8; bit k is packet 64 block + k). With ACK_TRIMMED, the bits are of packets that a switch has trimmed, and so
 * lost. In its header, `count` is the number of the flow's packets that have arrived
 * with an ECN mark, `message` the number that were late, not lost, `index` the arrival time of the newest packet, in
 * microseconds of the receiver's clock, and `step` how long ago that was. In an entry with the block ACK_PATH, `step`
 * is a path and `bits` the number of packets that arrived marked on it. */

#include <math.h>
#include <string.h>

#include "ack.h"
#include "flight.h"
#include "path.h"

enum { BLOCK_ENTRIES = 2 };

/* Out -------------------------------------------------------------------------------------------------------------- */

/* How long an acknowledgement waits for more packets. */
static double delay_s(const flow *self) {
    if (self->view.smoothed_rtt_s == 0)
        return ACK_DELAY_MAX_S;
    return fmin(fmax(ACK_DELAY_S, self->view.smoothed_rtt_s / 4), ACK_DELAY_MAX_S);
}

static void note_block(flow *self, rx_message *message, int64_t block) {
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
void ack_note_arrival(const io *io, flow *self, rx_message *message, int64_t index, int tos, double now_s) {
    self->marked_received += (tos & 3) == 3; /* ECN: congestion experienced */
    if (!self->fresh_packets++)
        self->ack_due_s = now_s + delay_s(self);
    self->data_last_s = io->arrived_s;
    note_block(self, message, index / ACK_BLOCK_PACKETS);
}

/* Stop acknowledging a message. */
void ack_forget(flow *self, const rx_message *message) {
    for (int64_t k = 0; k < self->fresh_count; k++)
        if (self->fresh[k].message == message)
            self->fresh[k].message = NULL;
    for (int64_t k = 0; k < self->recent_count; k++)
        if (self->recent[k].message == message)
            self->recent[k].message = NULL;
}

static void put_entry(uint8_t *at, const ack_block *block, uint32_t flag, uint64_t bits) {
    put32(at, (uint32_t)block->message->id.step);
    put16(at + 4, (uint16_t)block->message->id.message);
    put32(at + 6, (uint32_t)block->block | flag);
    put64(at + 10, bits);
}

/* Write the entries of a block; return how many, of BLOCK_ENTRIES at most. */
static int64_t put_block(uint8_t *at, const ack_block *block) {
    const rx_message *message = block->message;
    put_entry(at, block, message->complete && rx_is_whole(message) ? ACK_WHOLE : 0, message->bits[block->block]);
    uint64_t trimmed = message->trimmed ? message->trimmed[block->block] : 0;
    if (trimmed)
        put_entry(at + ACK_ENTRY_BYTES, block, ACK_TRIMMED, trimmed);
    return 1 + (trimmed != 0);
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

void ack_send(io *io, flow *self, double now_s) {
    if (!self->fresh_packets)
        return;
    uint8_t *datagram = io->datagram;
    int64_t limit = io->config.payload_bytes / ACK_ENTRY_BYTES, done = 0;
    double ago_us = fmin(fmax((now_s - self->data_last_s) * 1e6, 0), 4e9);
    do {
        io_write_header(io, datagram, ACK, (int64_t)ago_us, self->late_received,
                        (uint32_t)microseconds(self->data_last_s), self->marked_received);
        int64_t entries = 0;
        for (int64_t k = 0; k < self->recent_count && entries <= limit - 2 * BLOCK_ENTRIES; k++)
            if (self->recent[k].message)
                entries += put_block(datagram + HEADER_BYTES + entries * ACK_ENTRY_BYTES, &self->recent[k]);
        self->recent_count = 0;
        for (; done < self->fresh_count && entries <= limit - BLOCK_ENTRIES; done++) {
            if (!self->fresh[done].message)
                continue;
            entries += put_block(datagram + HEADER_BYTES + entries * ACK_ENTRY_BYTES, &self->fresh[done]);
            note_recent(self, self->fresh[done]);
        }
        for (; self->port_count && self->marked_paths && entries && entries < limit; entries++)
            put_marks(self, datagram + HEADER_BYTES + entries * ACK_ENTRY_BYTES);
        if (entries) {
            io_send_datagram(io, self, datagram, HEADER_BYTES + entries * ACK_ENTRY_BYTES, io->config.control_tos,
                             path_for_control(self));
            io->view.counters.acknowledgements++;
        }
    } while (done < self->fresh_count);
    self->fresh_count = self->fresh_packets = 0;
    self->ack_due_s = INFINITY;
    self->acknowledged_s = now_s;
}

/* Report at once that a message is complete with every packet. */
void ack_send_whole(io *io, flow *self, rx_message *message, double now_s) {
    note_block(self, message, (message->packets - 1) / ACK_BLOCK_PACKETS);
    if (!self->fresh_packets)
        self->fresh_packets = 1;
    ack_send(io, self, now_s);
}

/* Send due acknowledgements; return when the next one is due. */
double ack_due(io *io, flow *flows, double now_s) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < io->config.peers; i++) {
        flow *self = &flows[i];
        if (!self->fresh_packets)
            continue;
        double at_s = self->ack_due_s;
        double spacing_s = fmax(ACK_SPACING_S, self->view.smoothed_rtt_s * ACK_ROUND_TRIPS);
        if (self->fresh_packets >= ACK_EVERY)
            at_s = sooner(at_s, self->acknowledged_s + spacing_s);
        if (self->fresh_packets >= ACK_AT_ONCE || now_s >= at_s)
            ack_send(io, self, now_s);
        else
            due_s = sooner(due_s, at_s);
    }
    return due_s;
}

/* In --------------------------------------------------------------------------------------------------------------- */

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
static void sample_paths(const io *io, flow *self, uint64_t sampled, const uint8_t *header, double now_s) {
    double ago_s = (double)header_step(header) * 1e-6, total_s = 0, newest_s = 0;
    int64_t paths = 0;
    for (; sampled; sampled &= sampled - 1) {
        path *way = &self->paths[__builtin_ctzll(sampled)];
        /* The network's part, without the packet's wait for its host. */
        double rtt_s = fmax(io->arrived_s - way->sampled_s - ago_s, 1e-6);
        path_sample_delay(way, rtt_s);
        newest_s = fmax(newest_s, way->sampled_s);
        if (way->weight == 0 || way->on_trial)
            continue;
        double there_s = flow_one_way_s(self, (uint32_t)header_index(header), way->sampled_s);
        way->least_s = way->samples ? fmin(way->least_s, rtt_s) : rtt_s;
        way->one_way_s = way->samples ? fmin(way->one_way_s, there_s) : there_s;
        way->samples++;
        total_s += rtt_s;
        paths++;
    }
    flow_sample_rtt(self, paths ? total_s / (double)paths : 0, newest_s > 0 ? fmax(now_s - newest_s, 1e-6) : 0);
}

/* Record trimmed packets as lost; return how many. A packet that was sent again may be under way. */
static int64_t take_trimmed(flow *self, tx_message *message, int64_t first, uint64_t bits) {
    int64_t lost = 0;
    for (; bits; bits &= bits - 1) {
        uint32_t index = (uint32_t)(first + __builtin_ctzll(bits));
        if (message->state[index] != FLYING || message->tags[index][0] & RETRANSMISSION)
            continue;
        tx_lost(self, message, index);
        lost++;
    }
    return lost;
}

void ack_take(io *io, flow *self, const uint8_t *datagram, int64_t bytes, double now_s) {
    int64_t size = bytes - HEADER_BYTES, delivered = 0;
    if (size <= 0 || size % ACK_ENTRY_BYTES) {
        io->view.counters.refused_malformed++;
        return;
    }
    int64_t marked = marked_since(&self->marked_seen, (uint32_t)header_count(datagram));
    take_late(self, (uint16_t)header_message(datagram), now_s);
    uint64_t sampled = 0;
    tx_message *whole = NULL;
    for (const uint8_t *at = datagram + HEADER_BYTES; at < datagram + bytes; at += ACK_ENTRY_BYTES) {
        if (get32(at + 6) == ACK_PATH) {
            take_marks(self, at);
            continue;
        }
        tx_message *message = tx_find(self, get32(at), get16(at + 4));
        int64_t first = (int64_t)(get32(at + 6) & ~(ACK_WHOLE | ACK_TRIMMED)) * ACK_BLOCK_PACKETS;
        uint64_t bits = get64(at + 10);
        if (!message || first >= message->packets)
            continue;
        if (message->packets - first < ACK_BLOCK_PACKETS)
            bits &= (1ull << (message->packets - first)) - 1;
        if (get32(at + 6) & ACK_TRIMMED) {
            /* As congestion each counts like a marked packet: its header has arrived. */
            int64_t trimmed = take_trimmed(self, message, first, bits);
            delivered += trimmed;
            marked += trimmed;
            continue;
        }
        for (uint64_t fresh = bits & ~message->acked[first / ACK_BLOCK_PACKETS]; fresh; fresh &= fresh - 1) {
            uint32_t index = (uint32_t)(first + __builtin_ctzll(fresh));
            if (message->state[index] == UNSENT)
                continue; /* it was not sent, so nobody can have it: forged or confused */
            double sent_s = tx_delivered(self, message, index, now_s);
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
            delivered += tx_all_delivered(self, message, now_s);
            if (!message->whole) {
                message->whole = true;
                message->next_whole = whole;
                whole = message;
            }
        }
    }
    sample_paths(io, self, sampled, datagram, now_s);
    flight_feed_back(self, delivered, marked, 0, now_s);
    while (whole) {
        tx_message *next = whole->next_whole; /* the message is freed */
        tx_complete(io, self, whole, NULL, now_s);
        whole = next;
    }
}
