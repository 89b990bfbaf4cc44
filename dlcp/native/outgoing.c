/* SPDX-License-Identifier: Apache-2.0 */
/* A sent message: which packets are in flight, delivered, lost or to be retransmitted, and the probes when nothing is
 * in flight. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { NONE = 0xFFFFFFFF };
/* Margin on the largest recent lateness of packets. */
static const double LATER = 1.5;
/* A window this small can hardly shrink as congestion requires. Then a flow's backoff doubles when a retransmission is
 * lost, and shrinks by a factor when one arrives: it grows if more than a seventh of them are lost. */
static const double BACKOFF_WINDOW = 8, BACKOFF_DECAY = 0.9, BACKOFF_MAX = 64;

outgoing *outgoing_find(flow *to, int64_t step, int64_t message) {
    for (int64_t k = 0; k < to->message_count; k++)
        if (to->messages[k]->message == message && to->messages[k]->step == step)
            return to->messages[k];
    return NULL;
}

static void release(outgoing *self) {
    free(self->tags);
    free(self->order);
    free(self->state);
    free(self->sent_s);
    free(self->path);
    free(self->acked);
    free(self->retransmit);
    free(self->abandoned_next);
    free(self->confirmed);
    free(self);
}

/* Forget a message and its packets in flight. */
void outgoing_free(flow *to, outgoing *self) {
    for (int64_t k = 0; k < to->message_count; k++) {
        if (to->messages[k] != self)
            continue;
        to->message_count--;
        memmove(to->messages + k, to->messages + k + 1, (size_t)(to->message_count - k) * sizeof *to->messages);
        break;
    }
    to->view.flying -= self->flying;
    /* Ends because `flying` is exactly the number of packets in that state. */
    for (int64_t i = 0; self->flying; i++) {
        assert(i < self->packets);
        if (self->state[i] == FLYING) {
            self->flying--;
            to->paths[self->path[i]].flying--;
        }
    }
    for (int64_t way = 0; way < to->path_count; way++)
        for (int queue = 0; queue < QUEUES; queue++) {
            run_queue *sent = &to->paths[way].runs[queue];
            for (int64_t k = 0; k < sent->count; k++) {
                run *one = &sent->runs[(sent->first + k) % sent->capacity];
                if (one->message == self)
                    one->message = NULL;
            }
        }
    release(self);
}

/* Remove deferred packets from the order. */
static void defer(outgoing *self, const uint8_t *deferred) {
    int64_t kept = 0;
    for (int64_t i = 0; i < self->packets; i++)
        if (!deferred[self->order[i]])
            self->order[kept++] = self->order[i];
    self->to_send = self->unsent = kept;
}

/* Set packets' tags and order; return 0, or NO_MEMORY. */
static int tag_packets(const engine *owner, const flow *to, outgoing *self, const send_request *request) {
    size_t packets = (size_t)request->packets;
    uint8_t *droppable = malloc(packets), *ordinary = NULL;
    const uint8_t *queue = request->queue;
    if (!owner->config.tagged) {
        ordinary = malloc(packets);
        queue = ordinary;
    }
    if (droppable && queue) {
        if (ordinary)
            memset(ordinary, ORDINARY_QUEUE, packets);
        bool bounded = owner->config.tagged && request->bounded;
        dlcp_encode_tags(queue, request->drop_class, request->layer, request->is_protected, (uint32_t)packets, bounded,
                         &to->service[0][0], &self->tags[0][0], droppable);
        dlcp_send_order(queue, droppable, (uint32_t)packets, request->seed, request->chunk, request->chunks,
                        self->order);
        if (request->deferred)
            defer(self, request->deferred);
    }
    int made = droppable && queue ? 0 : NO_MEMORY;
    free(droppable);
    free(ordinary);
    return made;
}

/* Return whether a probe should follow a message's last packet: a loss is expected, and no probe was sent since. */
static bool question_follows(const flow *to, const outgoing *self) {
    return to->lossy_packets && !self->unsent && self->flying && self->probed_s < self->last_sent_s;
}

static void ask(engine *owner, flow *to, outgoing *self, double now_s) {
    if (self->probes_unanswered > 1)
        engine_event(owner, EVENT_TIMEOUT, to->peer, now_s);
    self->probes_without_news++;
    self->probes_unanswered++;
    owner->view.counters.probe++;
    /* In the same queue behind the packets, or the probe could overtake them, for example in a growing queue. If it
     * goes unanswered it may have been lost there, and the next one only asks about older packets. */
    int behind = self->flying && self->probes_unanswered == 1;
    self->questions++;
    self->asked[self->questions % QUESTIONS] = (asked){now_s, behind ? now_s : self->probed_s};
    self->probed_s = now_s;
    uint8_t datagram[HEADER_BYTES + QUESTION_BYTES], *question = datagram + HEADER_BYTES;
    engine_write_header(owner, datagram, PROBE, self->step, self->message, self->protected_packets, self->packets);
    put16(datagram + 6, (uint16_t)self->questions);
    question[0] = self->unsent && !self->immediate;
    put32(question + 1, (uint32_t)(self->packets - self->to_send));
    int64_t bytes = HEADER_BYTES + (self->to_send < self->packets ? QUESTION_BYTES : question[0]);
    int tos = owner->config.control_tos;
    int64_t way = path_for_control(to);
    if (behind) {
        datagram[2] = (uint8_t)(self->last_queue << 5);
        tos = to->service[self->last_queue][0];
        way = to->path_last;
    }
    if (engine_send_datagram(owner, to, datagram, bytes, tos, way) < 0)
        owner->view.counters.control_unsent++;
}

/* Send a message. The caller keeps its bytes until EVENT_SENT. Return 0, or NO_MEMORY. */
int64_t dlcp_send(engine *owner, const send_request *request, double now_s) {
    flow *to = &owner->flows[request->peer];
    if (to->message_count == to->message_capacity) {
        int64_t capacity = to->message_capacity ? to->message_capacity * 2 : 16;
        outgoing **messages = realloc(to->messages, (size_t)capacity * sizeof *messages);
        if (!messages)
            return NO_MEMORY;
        to->messages = messages;
        to->message_capacity = capacity;
    }
    outgoing *self = calloc(1, sizeof *self);
    if (!self)
        return NO_MEMORY;
    size_t packets = (size_t)request->packets;
    self->peer = request->peer;
    self->step = request->step;
    self->message = request->message;
    self->packets = self->to_send = self->unsent = request->packets;
    self->active_s = self->last_sent_s = now_s;
    self->payload = request->payload;
    self->bytes = request->bytes;
    self->tail = request->tail;
    self->tail_bytes = request->tail_bytes;
    self->allowed = request->allowed;
    self->immediate = request->immediate;
    for (int i = 0; i < DROP_CLASSES; i++)
        self->abandoned_first[i] = NONE;
    for (size_t i = 0; i < packets; i++)
        self->protected_packets += request->is_protected[i] != 0;
    engine_write_header(owner, self->head, DATA, self->step, self->message, 0, self->packets);
    put16(self->head + 6, (uint16_t)request->budget);
    self->tags = malloc(packets * sizeof *self->tags);
    self->order = malloc(packets * sizeof *self->order);
    self->state = calloc(packets, 1);
    self->sent_s = calloc(packets, sizeof *self->sent_s);
    self->path = calloc(packets, 1);
    self->acked = calloc(bit_words(self->packets), sizeof *self->acked);
    self->retransmit = malloc(packets * sizeof *self->retransmit);
    self->abandoned_next = malloc(packets * sizeof *self->abandoned_next);
    if (!self->tags || !self->order || !self->state || !self->sent_s || !self->path || !self->acked ||
        !self->retransmit || !self->abandoned_next || tag_packets(owner, to, self, request)) {
        release(self);
        return NO_MEMORY;
    }
    to->messages[to->message_count++] = self;
    if (self->immediate || self->to_send < self->packets)
        ask(owner, to, self, now_s); /* announces how many packets are protected and deferred */
    return 0;
}

/* Continue sending a message from a copy of its payload; return whether any of it may still be sent. */
bool dlcp_detach(engine *owner, int64_t peer, int64_t step, int64_t message, const uint8_t *payload) {
    outgoing *self = outgoing_find(&owner->flows[peer], step, message);
    if (!self || self->delivered == self->to_send)
        return false;
    if (payload)
        self->payload = payload;
    return true;
}

/* Return how many packets of a message are delivered, in flight, unsent, and in total, for error messages. All are 0 if
 * the message is gone. */
send_progress dlcp_sending(engine *owner, int64_t peer, int64_t step, int64_t message) {
    const outgoing *self = outgoing_find(&owner->flows[peer], step, message);
    if (!self)
        return (send_progress){0};
    return (send_progress){self->delivered, self->flying, self->unsent, self->packets};
}

/* Packets ---------------------------------------------------------------------------------------------------------- */

static int64_t size_of(const engine *owner, const outgoing *self, uint32_t index) {
    int64_t left = self->bytes + self->tail_bytes - (int64_t)index * owner->config.payload_bytes;
    return smaller(left, owner->config.payload_bytes);
}

/* Point at a packet's payload; return in how many pieces it is. */
int outgoing_pieces(const engine *owner, const outgoing *self, uint32_t index, struct iovec *pieces) {
    int64_t offset = (int64_t)index * owner->config.payload_bytes, size = size_of(owner, self, index);
    int64_t direct = smaller(self->bytes - offset, size);
    int count = 0;
    if (direct > 0)
        pieces[count++] = (struct iovec){(void *)(self->payload + offset), (size_t)direct};
    else
        direct = 0;
    if (direct < size)
        pieces[count++] =
            (struct iovec){(void *)(self->tail + (offset + direct - self->bytes)), (size_t)(size - direct)};
    return count;
}

/* Return the next packet to send; call it only while some are unsent. */
uint32_t outgoing_next_packet(outgoing *self) {
    while (self->retransmit_count) {
        uint32_t index = self->retransmit[self->retransmit_first];
        if (self->state[index] == RETRANSMIT)
            return index;
        self->retransmit_first = (self->retransmit_first + 1) % self->packets;
        self->retransmit_count--;
    }
    return self->order[self->next];
}

/* Choose packets for one burst: all but the last of full size, all with the same type of service and queue. */
int64_t outgoing_gather(const engine *owner, outgoing *self, int64_t limit, uint32_t *packets) {
    uint32_t first = outgoing_next_packet(self); /* skips stale entries at the head of the ring */
    uint8_t tos = self->tags[first][3];
    int queue = self->tags[first][1] >> 5;
    int64_t again = self->retransmit_count, count = 0;
    int64_t available = again ? again : self->to_send - self->next;
    for (int64_t k = 0; k < available && count < limit; k++) {
        uint32_t index =
            again ? self->retransmit[(self->retransmit_first + k) % self->packets] : self->order[self->next + k];
        if (again && self->state[index] != RETRANSMIT)
            break;
        if (self->tags[index][3] != tos || self->tags[index][1] >> 5 != queue)
            break;
        packets[count++] = index;
        if (size_of(owner, self, index) < owner->config.payload_bytes)
            break;
    }
    return count;
}

/* Schedule an immediate check of an incomplete message with nothing in flight or waiting. */
static void note_idle(flow *to, const outgoing *self) {
    if (!self->unsent && !self->flying && self->delivered < self->to_send)
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
double outgoing_delivered(flow *to, outgoing *self, uint32_t index, double now_s) {
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
    set_bit(self->acked, index);
    self->delivered++;
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
int64_t outgoing_all_delivered(flow *to, outgoing *self, double now_s) {
    int64_t before = self->delivered;
    /* A message with deferred packets is never complete with every packet, so nobody reports it as such. */
    assert(self->to_send == self->packets);
    for (uint32_t i = 0; self->delivered < self->packets; i++)
        if (self->state[i] != DELIVERED)
            outgoing_delivered(to, self, i, now_s);
    return self->delivered - before;
}

static void send_again(outgoing *self, uint32_t index) {
    self->state[index] = RETRANSMIT;
    self->retransmit[(self->retransmit_first + self->retransmit_count) % self->packets] = index;
    self->retransmit_count++;
    self->unsent++;
}

/* Record a lost packet, and choose what to retransmit: protected packets always; of the others, the least valuable are
 * abandoned up to the bound. */
void outgoing_lost(flow *to, outgoing *self, uint32_t index) {
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
        send_again(self, index);
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
            send_again(self, packet);
    }
    note_idle(to, self);
}

/* Control ---------------------------------------------------------------------------------------------------------- */

/* Report a message that its receiver has acknowledged, and forget it. The event owns `bits`, the arrived packets. */
void outgoing_complete(engine *owner, flow *to, outgoing *self, const uint64_t *bits, double now_s) {
    event *done = engine_event(owner, EVENT_SENT, to->peer, now_s);
    if (done) {
        done->step = self->step;
        done->message = self->message;
        done->packets = self->packets;
        done->sent = self->sent;
        done->resent = self->resent;
        done->bits = bits;
    }
    outgoing_free(to, self);
}

/* Return when to probe for missing packets; infinity while packets leave freely. With losses, a probe follows the last
 * packet after its possible lateness, so the receiver's answer comes soon. Otherwise it would nearly always be
 * needless, and is sent when an acknowledgement is late. */
static double ask_due_s(const flow *to, outgoing *self, double timeout_s) {
    if (self->delivered != self->delivered_seen) {
        self->delivered_seen = self->delivered;
        self->probes_unanswered = self->probes_without_news = 0;
    }
    int idle = !self->unsent && !self->flying;
    if (!idle && !self->flying)
        return INFINITY;
    if (idle && self->delivered < self->to_send && !self->probes_without_news)
        return 0; /* missing packets may stay lost, if the receiver agrees */
    if (question_follows(to, self))
        return self->last_sent_s + fmin(timeout_s, flow_lateness_s(to));
    /* Probes and answers get lost, too: only answers without progress justify backing off. */
    int64_t without_news =
        self->probes_without_news - self->probes_unanswered + self->probes_unanswered / UNANSWERED_PATIENCE;
    int most = BACKOFF_DOUBLINGS_MAX, doublings = (int)smaller(most, without_news);
    /* On a slow path, or one that a forged answer makes look slow, doubling must not lead to minutes. */
    double wait_s = fmin(ldexp(timeout_s, doublings), ldexp(PROBE_TIMEOUT_MAX_S, most));
    return fmax(self->active_s, self->probed_s) + fmax(timeout_s, wait_s);
}

/* Expect feedback on the packets of a message that were sent. */
void outgoing_expect(flow *to, const outgoing *self) {
    double timeout_s = flow_probe_timeout_s(to);
    if (question_follows(to, self))
        timeout_s = fmin(timeout_s, flow_lateness_s(to));
    to->look_s = sooner(to->look_s, self->last_sent_s + timeout_s);
}

/* Probe a peer for missing packets where due; return when to look again. Feedback that delays a probe is noticed only
 * then, so messages are checked once per timeout and not at every packet. */
double outgoing_ask(engine *owner, flow *to, double now_s) {
    if (!to->message_count)
        return INFINITY;
    if (now_s < to->look_s)
        return to->look_s;
    double due_s = INFINITY, timeout_s = flow_probe_timeout_s(to);
    for (int64_t k = 0; k < to->message_count; k++) {
        outgoing *self = to->messages[k];
        double ask_s = ask_due_s(to, self, timeout_s);
        if (now_s >= ask_s) {
            ask(owner, to, self, now_s);
            ask_s = ask_due_s(to, self, timeout_s);
        }
        due_s = sooner(due_s, ask_s);
    }
    to->look_s = due_s;
    return due_s;
}

/* Packets sent before `until_s` and absent from the bitmap are lost. Return whether any are new. */
static int take_missing(flow *to, outgoing *self, int64_t first, int64_t count, const uint8_t *bitmap, double until_s,
                        double now_s) {
    int64_t news = 0, lost = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t index = (uint32_t)(first + i);
        uint8_t state = self->state[index];
        if (bitmap[i >> 3] >> (7 - (i & 7)) & 1) {
            if (state == DELIVERED || state == UNSENT) /* nobody can have a packet that was not sent */
                continue;
            outgoing_delivered(to, self, index, now_s);
            news++;
        } else if (state == FLYING && self->sent_s[index] < until_s) {
            outgoing_lost(to, self, index);
            lost++;
        }
    }
    flow_feed_back(to, news, 0, lost, now_s);
    return news + lost > 0;
}

/* Process one part of a STOP; complete the message once every part has arrived. */
static void take_stop(engine *owner, flow *to, outgoing *self, int64_t first, int64_t count, const uint8_t *bitmap,
                      double now_s) {
    if (!self->confirmed) {
        /* After these bits comes one per part, for the parts that have arrived. */
        size_t words = bit_words(self->packets) * 2;
        self->confirmed = calloc(words, sizeof *self->confirmed);
        if (!self->confirmed)
            return; /* the STOP is repeated */
    }
    uint64_t *seen = self->confirmed + bit_words(self->packets);
    int64_t part = first / engine_bitmap_packets(owner);
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
    outgoing_complete(owner, to, self, bits, now_s);
    engine_discard(owner, bits);
}

/* Process a BITMAP, which packets have arrived, or a STOP: no more are needed. */
void outgoing_take_bitmap(engine *owner, flow *to, const uint8_t *datagram, int64_t bytes, double now_s) {
    int is_stop = header_type(datagram) == STOP;
    known name = {to->peer, header_step(datagram), header_message(datagram), NULL};
    int64_t first = header_index(datagram), span = engine_bitmap_packets(owner), size = bytes - HEADER_BYTES;
    outgoing *self = outgoing_find(to, name.step, name.message);
    if (!self) {
        if (is_stop) /* our last answer was lost; the bitmap was processed */
            engine_send_control(owner, to, STOP_ACK, &name, first, 0, NULL, 0);
        else
            owner->view.counters.late++;
        return;
    }
    int whole = is_stop && !size;
    int64_t count = whole ? self->packets : smaller(span, self->packets - first);
    int fits = whole ? !first && self->to_send == self->packets : first % span == 0 && size == (count + 7) / 8;
    if (header_count(datagram) != self->packets || count < 1 || !fits) {
        owner->view.counters.refused_malformed++;
        return;
    }
    if (is_stop) {
        engine_send_control(owner, to, STOP_ACK, &name, first, 0, NULL, 0);
        if (whole)
            outgoing_complete(owner, to, self, NULL, now_s);
        else
            take_stop(owner, to, self, first, count, datagram + HEADER_BYTES, now_s);
        return;
    }
    uint16_t ago = (uint16_t)(self->questions - get16(datagram + 6));
    if (ago >= smaller(self->questions, QUESTIONS)) {
        owner->view.counters.late++;
        return;
    }
    const asked *question = &self->asked[(self->questions - ago) % QUESTIONS];
    /* A peer that is not ready answers without progress: probe less often, but not because of congestion. */
    if (self->probes_unanswered > 1) /* lost probes do not count: this is one answer */
        self->probes_without_news -= self->probes_unanswered - 1;
    self->probes_unanswered = 0;
    to->answered_s = fmax(to->answered_s, now_s - question->asked_s);
    to->look_s = now_s;
    if (take_missing(to, self, first, count, datagram + HEADER_BYTES, question->until_s, now_s))
        self->probes_without_news = 0;
}
