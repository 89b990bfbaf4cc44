/* SPDX-License-Identifier: Apache-2.0 */
/* A sent message, until its receiver has acknowledged it: which packets are in flight, delivered, lost or to be
 * retransmitted. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tx.h"

enum { NONE = 0xFFFFFFFF };
/* Margin on the largest recent lateness of packets. */
static const double LATER = 1.5;
/* A window this small can hardly shrink as congestion requires. Then a flow's backoff doubles when a retransmission is
 * lost, and shrinks by a factor when one arrives: it grows if more than a seventh of them are lost. */
static const double BACKOFF_WINDOW = 8, BACKOFF_DECAY = 0.9, BACKOFF_MAX = 64;

/* Messages --------------------------------------------------------------------------------------------------------- */

tx_message *tx_find(const flow *to, int64_t step, int64_t message) {
    return (tx_message *)table_find(&to->messages, to->peer, step, message);
}

/* Return the next packet to send; call it only while some are unsent. */
uint32_t tx_next_packet(tx_message *self) {
    while (self->retransmit_count) {
        uint32_t index = self->retransmit[self->retransmit_first];
        if (self->state[index] == RETRANSMIT)
            return index;
        self->retransmit_first = (self->retransmit_first + 1) % self->packets;
        self->retransmit_count--;
    }
    return self->order[self->next];
}

static int64_t block_bytes(const tx_message *self) {
    int64_t per_packet = sizeof *self->sent_s + 3 * sizeof *self->order + sizeof *self->tags + 2;
    return self->packets * per_packet + (int64_t)(bit_words(self->packets) * sizeof *self->acked);
}

static void release(io *io, tx_message *self) {
    if (self->sent_s)
        pool_give(&io->pool, (uint8_t *)self->sent_s, block_bytes(self));
    free(self->confirmed);
    free(self);
}

/* Keep the list of messages with unsent packets in order, after a message's next packet may have changed: the most
 * urgent queue first, then the layer nearest the input, then the oldest message. */
static void requeue(flow *to, tx_message *self) {
    int urgency = -1;
    if (self->unsent) {
        const uint8_t *tags = self->tags[tx_next_packet(self)];
        urgency = (tags[1] >> 5) << 8 | (255 - tags[2]);
    }
    if (urgency == self->urgency)
        return;
    if (self->urgency >= 0) {
        *(self->more_urgent ? &self->more_urgent->less_urgent : &to->most_urgent) = self->less_urgent;
        if (self->less_urgent)
            self->less_urgent->more_urgent = self->more_urgent;
    }
    self->urgency = urgency;
    if (urgency < 0)
        return;
    tx_message *before = NULL, *after = to->most_urgent;
    while (after && (after->urgency > urgency || (after->urgency == urgency && after->serial < self->serial))) {
        before = after;
        after = after->less_urgent;
    }
    self->more_urgent = before;
    self->less_urgent = after;
    *(before ? &before->less_urgent : &to->most_urgent) = self;
    if (after)
        after->more_urgent = self;
}

/* Detach a queue's bursts from their message. Most are the newest: older ones have been found delivered or lost. */
static void forget_bursts(burst_queue *sent, tx_message *of) {
    for (int64_t k = sent->count - 1; of->bursts && k >= 0; k--) {
        sent_burst *one = &sent->bursts[(sent->first + k) % sent->capacity];
        if (one->message == of) {
            one->message = NULL;
            of->bursts--;
        }
    }
}

/* Forget a message and its packets in flight. */
void tx_free(io *io, flow *to, tx_message *self) {
    table_remove(&to->messages, &self->id);
    *(self->older ? &self->older->newer : &to->oldest) = self->newer;
    *(self->newer ? &self->newer->older : &to->latest) = self->older;
    self->unsent = 0;
    requeue(to, self);
    to->view.flying -= self->flying;
    /* Ends because `flying` is exactly the number of packets in that state. */
    for (int64_t i = 0; self->flying; i++) {
        assert(i < self->packets);
        if (self->state[i] == FLYING) {
            self->flying--;
            to->paths[self->path[i]].flying--;
        }
    }
    for (int64_t way = 0; self->bursts && way < to->path_count; way++)
        for (int queue = 0; self->bursts && queue < QUEUES; queue++)
            forget_bursts(&to->paths[way].sent_bursts[queue], self);
    release(io, self);
}

/* Set packets' tags and order. */
static void tag_packets(const io *io, const flow *to, tx_message *self, const send_request *request) {
    uint32_t packets = (uint32_t)self->packets;
    bool bounded = io->config.tagged && request->bounded;
    /* Borrowed: these arrays are not in use before packets are sent. */
    uint8_t *droppable = self->path, *ordinary = self->state;
    memset(ordinary, ORDINARY_QUEUE, packets);
    const uint8_t *queue = io->config.tagged ? request->queue : ordinary;
    dlcp_encode_tags(queue, request->drop_class, request->layer, request->is_protected, packets, bounded,
                     &to->service[0][0], &self->tags[0][0], droppable);
    for (uint32_t i = 0; request->coding && i < packets; i++)
        self->tags[i][0] |= i < request->upper_packets ? request->coding : request->lower_coding;
    dlcp_send_order(queue, droppable, packets, request->seed, request->chunk, request->chunks, self->order);
    memset(self->state, UNSENT, packets);
    memset(self->path, 0, packets);
}

/* Give a message's arrays their places in one block; return whether there was memory for it. */
static bool make_arrays(io *io, tx_message *self) {
    size_t packets = (size_t)self->packets, words = bit_words(self->packets);
    self->sent_s = (double *)pool_take(&io->pool, block_bytes(self));
    if (!self->sent_s)
        return false;
    self->acked = (uint64_t *)(self->sent_s + packets);
    self->order = (uint32_t *)(self->acked + words);
    self->retransmit = self->order + packets;
    self->abandoned_next = self->retransmit + packets;
    self->tags = (uint8_t (*)[4])(self->abandoned_next + packets);
    self->state = (uint8_t *)(self->tags + packets);
    self->path = self->state + packets;
    memset(self->acked, 0, words * sizeof *self->acked);
    return true;
}

/* Accept a message to send. The caller keeps its bytes until EVENT_SENT. NULL: no memory. */
tx_message *tx_make(io *io, flow *to, const send_request *request, double now_s) {
    tx_message *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->id = (msg_id){request->peer, request->step, request->message, NULL};
    self->packets = self->unsent = request->packets;
    self->active_s = self->last_sent_s = now_s;
    self->payload = request->payload;
    self->bytes = request->bytes;
    self->tail = request->tail;
    self->tail_bytes = request->tail_bytes;
    self->allowed = request->allowed;
    self->immediate = request->immediate;
    self->urgency = -1;
    for (int i = 0; i < DROP_CLASSES; i++)
        self->abandoned_first[i] = NONE;
    for (int64_t i = 0; i < self->packets; i++)
        self->protected_packets += request->is_protected[i] != 0;
    io_write_header(io, self->head, DATA, self->id.step, self->id.message, 0, self->packets);
    put16(self->head + 6, (uint16_t)request->budget);
    if (!make_arrays(io, self)) {
        release(io, self);
        return NULL;
    }
    tag_packets(io, to, self, request);
    table_add(&to->messages, &self->id);
    if (!to->oldest)
        to->full_s = now_s;
    self->older = to->latest;
    *(self->older ? &self->older->newer : &to->oldest) = self;
    to->latest = self;
    self->serial = to->messages_made++;
    requeue(to, self);
    return self;
}

/* Report a message that its receiver has acknowledged, and forget it. The event owns `bits`, the arrived packets. */
void tx_complete(io *io, flow *to, tx_message *self, const uint64_t *bits, double now_s) {
    event *ev = io_message_event(io, EVENT_SENT, &self->id, self->packets, now_s);
    ev->sent = self->sent;
    ev->resent = self->resent;
    ev->probes = self->probes_behind;
    ev->bits = bits;
    tx_free(io, to, self);
}

/* Packets out ------------------------------------------------------------------------------------------------------ */

/* Return whether a probe should follow a message's last packet: a loss is expected, and no probe was sent since. */
bool tx_wants_probe(const flow *to, const tx_message *self) {
    return to->lossy_packets && !self->unsent && self->flying && self->probed_s < self->last_sent_s;
}

static int64_t size_of(const io *io, const tx_message *self, uint32_t index) {
    int64_t left = self->bytes + self->tail_bytes - (int64_t)index * io->config.payload_bytes;
    return smaller(left, io->config.payload_bytes);
}

/* Choose packets for one burst: all but the last of full size, all with the same type of service and queue. Call it
 * only while some are unsent. */
void tx_gather(const io *io, tx_message *self, int64_t limit, burst *into) {
    uint32_t first = tx_next_packet(self); /* skips stale entries at the head of the ring */
    const uint8_t *tags = self->tags[first];
    int64_t again = self->retransmit_count, available = again ? again : self->packets - self->next;
    into->message = self;
    into->again = again;
    into->tos = tags[3];
    into->count = 0;
    for (int64_t k = 0; k < available && into->count < limit; k++) {
        uint32_t index =
            again ? self->retransmit[(self->retransmit_first + k) % self->packets] : self->order[self->next + k];
        if (again && self->state[index] != RETRANSMIT)
            break;
        if (self->tags[index][3] != tags[3] || self->tags[index][1] >> 5 != tags[1] >> 5)
            break;
        into->packets[into->count++] = index;
        if (size_of(io, self, index) < io->config.payload_bytes)
            break;
    }
}

/* Add a packet's payload to a burst. */
static void add_payload(const io *io, const tx_message *self, uint32_t index, burst *into) {
    int64_t offset = (int64_t)index * io->config.payload_bytes, size = size_of(io, self, index);
    int64_t direct = smaller(self->bytes - offset, size);
    if (direct > 0)
        into->pieces[into->piece_count++] = (struct iovec){(void *)(self->payload + offset), (size_t)direct};
    else
        direct = 0;
    if (direct < size)
        into->pieces[into->piece_count++] =
            (struct iovec){(void *)(self->tail + (offset + direct - self->bytes)), (size_t)(size - direct)};
}

/* Return whether a burst's packets are in memory that the peer can read. */
static bool is_exported(const io *io, const flow *to, const burst *sent) {
    const tx_message *self = sent->message;
    if (!to->local.out.bytes || !io->exported || self->payload < io->exported ||
        self->payload + self->bytes > io->exported + io->exported_bytes)
        return false;
    for (int64_t k = 0; k < sent->count && self->tail_bytes; k++)
        if (((int64_t)sent->packets[k] + 1) * io->config.payload_bytes > self->bytes)
            return false;
    return true;
}

/* Write the headers of a burst's packets, and point at their payloads. */
void tx_fill(const io *io, const flow *to, burst *into) {
    const tx_message *self = into->message;
    into->exported = is_exported(io, to, into) ? self->payload : NULL;
    into->message_bytes = self->bytes;
    into->piece_count = 0;
    for (int64_t k = 0; k < into->count; k++) {
        uint8_t *header = into->headers[k], *tags = self->tags[into->packets[k]];
        if (into->again)
            tags[0] |= RETRANSMISSION;
        memcpy(header, self->head, HEADER_BYTES);
        memcpy(header + 1, tags, 3);
        put32(header + 16, into->packets[k]);
        if (into->exported)
            continue;
        into->pieces[into->piece_count++] = (struct iovec){header, HEADER_BYTES};
        add_payload(io, self, into->packets[k], into);
    }
}

/* Record that a burst has left. */
void tx_note_sent(flow *to, const burst *sent, double now_s) {
    tx_message *self = sent->message;
    if (sent->again) {
        self->retransmit_first = (self->retransmit_first + sent->count) % self->packets;
        self->retransmit_count -= sent->count;
        self->resent += sent->count;
    } else {
        self->next += sent->count;
    }
    self->unsent -= sent->count;
    self->flying += sent->count;
    self->sent += sent->count;
    self->active_s = self->last_sent_s = now_s;
    self->last_queue = self->tags[sent->packets[0]][1] >> 5; /* all packets of a burst are in one queue */
    requeue(to, self);
    double timeout_s = flow_probe_timeout_s(to);
    if (tx_wants_probe(to, self))
        timeout_s = fmin(timeout_s, flow_lateness_s(to));
    to->look_s = sooner(to->look_s, self->last_sent_s + timeout_s);
}

/* Feedback --------------------------------------------------------------------------------------------------------- */

/* Schedule an immediate check of an incomplete message with nothing in flight or waiting. */
static void note_idle(flow *to, const tx_message *self) {
    if (!self->unsent && !self->flying && self->delivered < self->packets)
        to->look_s = -INFINITY;
}

/* Record the arrival of a packet sent at `sent_s`, and its lateness if later ones had arrived before: others may be as
 * late without being lost. */
static void note_order(flow *to, path *way, int queue, double sent_s, double now_s) {
    newest *last = &way->newest[queue], *before = &way->newest_before[queue];
    if (last->known_s < now_s)
        *before = *last; /* packets reported together may have arrived in any order */
    if (sent_s < before->sent_s && to->view.smoothed_rtt_s > 0) {
        double late_s = now_s - before->known_s + before->sent_s - sent_s;
        to->disorder = fmin(fmax(to->disorder, LATER * late_s / to->view.smoothed_rtt_s), DISORDER_MAX);
    }
    if (sent_s <= last->sent_s)
        return;
    *last = (newest){sent_s, now_s};
    to->newest_delivered_s[queue] = fmax(to->newest_delivered_s[queue], sent_s);
}

/* Record that a packet arrived; return when it was sent. */
double tx_delivered(flow *to, tx_message *self, uint32_t index, double now_s) {
    uint8_t state = self->state[index];
    path *way = &to->paths[self->path[index]];
    int queue = self->tags[index][1] >> 5, again = self->tags[index][0] & RETRANSMISSION;
    double sent_s = self->sent_s[index];
    /* It was late, not lost, for example an over-share packet that waited in a lower queue. */
    if (state == ABANDONED || state == RETRANSMIT)
        to->disorder = fmin(to->disorder * 2, DISORDER_MAX);
    if (state == FLYING) {
        self->flying--;
        to->view.flying--;
        way->flying--;
        way->judged++;
    } else {
        way->lost--;
    }
    way->lost_in_row = 0;
    way->last_delivered_s = now_s;
    to->fresh_paths |= 1ull << self->path[index];
    if (state == RETRANSMIT)
        self->unsent--;
    self->state[index] = DELIVERED;
    if (state == RETRANSMIT)
        requeue(to, self);
    set_bit(self->acked, index);
    self->delivered++;
    if (index < self->packets - 1)
        to->full_s = now_s;
    self->active_s = now_s;
    if (state == FLYING && again)
        to->backoff = fmax(to->backoff * BACKOFF_DECAY, 1);
    /* Unless the original arrived rather than the retransmission, for which there was hardly time. */
    if (state != FLYING || !again || now_s - sent_s >= to->rtt_min_s)
        note_order(to, way, queue, sent_s, now_s);
    note_idle(to, self);
    return sent_s;
}

/* Record that every packet arrived; return how many were not known to have arrived. */
int64_t tx_all_delivered(flow *to, tx_message *self, double now_s) {
    int64_t before = self->delivered;
    for (uint32_t i = 0; self->delivered < self->packets; i++)
        if (self->state[i] != DELIVERED)
            tx_delivered(to, self, i, now_s);
    return self->delivered - before;
}

static void send_again(flow *to, tx_message *self, uint32_t index) {
    self->state[index] = RETRANSMIT;
    self->retransmit[(self->retransmit_first + self->retransmit_count) % self->packets] = index;
    self->retransmit_count++;
    self->unsent++;
    requeue(to, self);
}

/* Record a lost packet, and choose what to retransmit: protected packets always; of the others, the least valuable are
 * abandoned up to the bound. */
void tx_lost(flow *to, tx_message *self, uint32_t index) {
    path *way = &to->paths[self->path[index]];
    to->lossy_packets = LOSSY_PACKETS;
    if (self->tags[index][0] & RETRANSMISSION && to->view.window <= BACKOFF_WINDOW)
        to->backoff = fmin(to->backoff * 2, BACKOFF_MAX);
    self->flying--;
    to->view.flying--;
    way->flying--;
    way->judged++;
    way->lost++;
    way->lost_in_row++;
    to->fresh_paths |= 1ull << self->path[index];
    to->excused_lost += way->weight == 0 || way->on_trial;
    if (self->tags[index][0] & PROTECTED) {
        send_again(to, self, index);
        return;
    }
    self->state[index] = ABANDONED;
    int drop_class = self->tags[index][1] >> 2 & 7;
    self->abandoned_next[index] = self->abandoned_first[drop_class];
    self->abandoned_first[drop_class] = index;
    for (self->abandoned++; self->abandoned > self->allowed; self->abandoned--) {
        int most_valuable = 0;
        while (self->abandoned_first[most_valuable] == NONE)
            most_valuable++;
        uint32_t packet = self->abandoned_first[most_valuable];
        self->abandoned_first[most_valuable] = self->abandoned_next[packet];
        /* It may have been delivered since it was declared lost. */
        if (self->state[packet] == ABANDONED)
            send_again(to, self, packet);
    }
    note_idle(to, self);
}
