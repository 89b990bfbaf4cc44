/* SPDX-License-Identifier: Apache-2.0 */
/* A received message: which packets have arrived and where their bytes go, from its first packet or posted receive,
 * whichever is first, until its sender knows that it is complete. */

#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "internal.h"

/* Names of messages ------------------------------------------------------------------------------------------------ */

int table_make(table *self) {
    self->capacity = 64;
    self->chains = calloc((size_t)self->capacity, sizeof *self->chains);
    return self->chains ? 0 : NO_MEMORY;
}

static known **chain_of(const table *self, int64_t peer, int64_t step, int64_t message) {
    uint64_t mixed = ((uint64_t)step << 32 ^ (uint64_t)message << 16 ^ (uint64_t)peer) * 0x9E3779B97F4A7C15ull;
    return &self->chains[(int64_t)(mixed >> 40) & (self->capacity - 1)];
}

known *table_find(const table *self, int64_t peer, int64_t step, int64_t message) {
    known *one = *chain_of(self, peer, step, message);
    while (one && (one->peer != peer || one->step != step || one->message != message))
        one = one->next;
    return one;
}

/* Make room for one more entry; return 0, or NO_MEMORY. */
static int table_reserve(table *self) {
    if (self->count < self->capacity)
        return 0;
    table larger = {.count = self->count, .capacity = self->capacity * 2};
    larger.chains = calloc((size_t)larger.capacity, sizeof *larger.chains);
    if (!larger.chains)
        return NO_MEMORY;
    for (int64_t i = 0; i < self->capacity; i++) {
        known *next = NULL;
        for (known *one = self->chains[i]; one; one = next) {
            next = one->next;
            known **chain = chain_of(&larger, one->peer, one->step, one->message);
            one->next = *chain;
            *chain = one;
        }
    }
    free(self->chains);
    *self = larger;
    return 0;
}

static void table_add(table *self, known *one) {
    known **chain = chain_of(self, one->peer, one->step, one->message);
    one->next = *chain;
    *chain = one;
    self->count++;
}

static void table_remove(table *self, const known *one) {
    known **link = chain_of(self, one->peer, one->step, one->message);
    while (*link && *link != one)
        link = &(*link)->next;
    if (!*link)
        return;
    *link = one->next;
    self->count--;
}

/* Memory for messages that arrive early ---------------------------------------------------------------------------- */

/* Round a size up by at most an eighth: shards of a bucket differ by a packet, and share buffers. */
static int64_t early_capacity(int64_t bytes) {
    int64_t step = 1;
    while (step * 16 <= bytes)
        step *= 2;
    return (bytes + step - 1) / step * step;
}

static uint8_t *early_take(engine *owner, int64_t bytes) {
    int64_t capacity = early_capacity(bytes);
    uint8_t *memory = NULL;
    for (int i = 0; i < EARLY_CACHED && !memory; i++) {
        early_buffer *free_one = &owner->early[i];
        if (free_one->capacity != capacity)
            continue;
        memory = free_one->memory;
        *free_one = (early_buffer){NULL, 0};
    }
    if (!memory)
        memory = malloc((size_t)capacity);
    if (memory)
        owner->view.early_bytes += bytes;
    return memory;
}

/* Keep memory for other messages, up to the limit of memory in use. */
static void early_give(engine *owner, uint8_t *memory, int64_t bytes) {
    owner->view.early_bytes -= bytes;
    int64_t capacity = early_capacity(bytes), kept = capacity;
    early_buffer *place = &owner->early[0]; /* an empty one, or the smallest */
    for (int i = 0; i < EARLY_CACHED; i++) {
        kept += owner->early[i].capacity;
        if (owner->early[i].capacity < place->capacity)
            place = &owner->early[i];
    }
    if (place->capacity > capacity || kept - place->capacity > owner->config.early_bytes_max) {
        free(memory);
        return;
    }
    free(place->memory);
    *place = (early_buffer){memory, capacity};
}

/* Copies past the caches ------------------------------------------------------------------------------------------- */

/* From this size on, a message bypasses the caches: it would only evict useful data. The usual size of a core's L2. */
enum { STREAM_MIN_BYTES = 1 << 20 };

#ifdef __SSE2__
/* Copy past the caches, without reading the destination first. */
void stream(uint8_t *into, const uint8_t *from, int64_t bytes) {
    int64_t done = smaller(-(intptr_t)into & 15, bytes);
    memcpy(into, from, (size_t)done);
    for (; done + 16 <= bytes; done += 16)
        _mm_stream_si128((__m128i *)(into + done), _mm_loadu_si128((const __m128i *)(from + done)));
    memcpy(into + done, from + done, (size_t)(bytes - done));
}

/* Make streamed data visible to other threads before later writes. */
static void finish_streams(void) {
    _mm_sfence();
}
#else
void stream(uint8_t *into, const uint8_t *from, int64_t bytes) {
    memcpy(into, from, (size_t)bytes);
}

static void finish_streams(void) {
}
#endif

/* From first packet to last ---------------------------------------------------------------------------------------- */

incoming *incoming_find(const engine *owner, int64_t peer, int64_t step, int64_t message) {
    return (incoming *)table_find(&owner->incoming, peer, step, message);
}

bool incoming_is_whole(const incoming *self) {
    return self->arrived == self->packets;
}

static incoming *incoming_make(engine *owner, int64_t peer, int64_t step, int64_t message, int64_t packets) {
    incoming *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->name = (known){peer, step, message, NULL};
    self->packets = packets;
    self->protected_packets = self->required = -1;
    self->bits = calloc(bit_words(packets), sizeof *self->bits);
    self->layer = calloc((size_t)packets, 1);
    if (!self->bits || !self->layer || table_reserve(&owner->incoming)) {
        incoming_free(self);
        return NULL;
    }
    self->active = true;
    table_add(&owner->incoming, &self->name);
    return self;
}

void incoming_free(incoming *self) {
    free(self->bits);
    free(self->layer);
    free(self);
}

/* Accept no more packets for a message. A reduction may still need what has arrived, and frees it. */
static void incoming_close(engine *owner, incoming *self) {
    flow_forget_incoming(&owner->flows[self->name.peer], self); /* its STOP covers what is not acknowledged yet */
    table_remove(&owner->incoming, &self->name);
    self->active = false;
    if (self->early_bytes)
        early_give(owner, self->buffer, self->early_bytes);
    self->early_bytes = 0;
}

static void incoming_drop(engine *owner, incoming *self) {
    incoming_close(owner, self);
    if (!self->reduction)
        incoming_free(self);
}

/* Create a message that arrives before its receive is posted; NULL if it is not accepted. */
static incoming *incoming_unexpected(engine *owner, flow *from, const uint8_t *header, double now_s) {
    int64_t packets = header_count(header), bytes = packets * owner->config.payload_bytes;
    if (packets < 1 || packets > MESSAGE_PACKETS_MAX) {
        owner->view.counters.refused_malformed++;
        return NULL;
    }
    if (owner->view.early_bytes + bytes > owner->config.early_bytes_max) {
        owner->view.counters.early_full++; /* nothing is lost: unacknowledged packets are retransmitted */
        return NULL;
    }
    uint8_t *buffer = early_take(owner, bytes);
    if (!buffer)
        return NULL;
    incoming *self = incoming_make(owner, from->peer, header_step(header), header_message(header), packets);
    if (!self) {
        early_give(owner, buffer, bytes);
        return NULL;
    }
    self->buffer = buffer;
    self->bytes = self->early_bytes = bytes;
    event *news = engine_event(owner, EVENT_UNEXPECTED, from->peer, now_s);
    if (news) {
        news->step = self->name.step;
        news->message = self->name.message;
        news->packets = packets;
    }
    return self;
}

static void copy_in(incoming *self, int64_t offset, const uint8_t *payload, int64_t bytes) {
    int64_t direct = smaller(self->bytes - offset, bytes);
    if (direct > 0)
        memcpy(self->buffer + offset, payload, (size_t)direct);
    else
        direct = 0;
    if (direct < bytes)
        memcpy(self->tail + (offset + direct - self->bytes), payload + direct, (size_t)(bytes - direct));
}

/* Move early packets to their destination. */
static void settle_in(engine *owner, incoming *self, const uint8_t *from) {
    int64_t payload_bytes = owner->config.payload_bytes, total = self->bytes + self->tail_bytes;
    for (int64_t i = 0; i < self->packets; i++) {
        if (!has_bit(self->bits, i))
            continue;
        int64_t offset = i * payload_bytes;
        if (self->reduction)
            reduction_add(self->reduction, self->position, i, from + offset);
        else
            copy_in(self, offset, from + offset, smaller(total - offset, payload_bytes));
    }
}

/* Complete messages ------------------------------------------------------------------------------------------------ */

/* Stop notifying the sender. */
static void finished_settle(engine *owner, finished *self) {
    if (self->state == FINISHED_STOPPING) {
        finished **link = &owner->stopping; /* it is in the list, given its state */
        while (*link != self)
            link = &(*link)->next_stopping;
        *link = self->next_stopping;
        owner->view.stopping_count--;
        free(self->bitmap);
        free(self->unconfirmed);
        self->bitmap = self->unconfirmed = NULL;
    }
    self->state = FINISHED_KNOWN;
}

static void finished_free(engine *owner, finished *self) {
    finished_settle(owner, self);
    table_remove(&owner->finished, &self->name);
    *(self->older ? &self->older->newer : &owner->oldest_finished) = self->newer;
    *(self->newer ? &self->newer->older : &owner->newest_finished) = self->older;
    free(self);
}

/* Repeat the STOP for those parts of a message that its sender has not acknowledged. */
static void finished_stop(engine *owner, finished *self, double now_s) {
    flow *to = &owner->flows[self->name.peer];
    int64_t span = engine_bitmap_packets(owner), bytes = (self->packets + 7) / 8;
    for (int64_t part = 0; part < self->parts; part++) {
        if (!self->unconfirmed[part])
            continue;
        int64_t start = part * span / 8, size = self->bitmap ? smaller(bytes - start, span / 8) : 0;
        engine_send_control(owner, to, STOP, &self->name, part * span, self->packets,
                            self->bitmap ? self->bitmap + start : NULL, size);
    }
    self->due_s = now_s + self->repeat_s;
    self->repeat_s = fmin(STOP_REPEAT_MAX_S, self->repeat_s * 2);
}

/* Notify a sender until it acknowledges; `bits` are the arrived packets, NULL if all. */
static int finished_begin_stop(engine *owner, finished *self, const uint64_t *bits, double now_s, double give_up_s) {
    int64_t span = engine_bitmap_packets(owner), parts = bits ? (self->packets + span - 1) / span : 1;
    uint8_t *unconfirmed = malloc((size_t)parts), *bitmap = bits ? calloc((size_t)(self->packets + 7) / 8, 1) : NULL;
    if (!unconfirmed || (bits && !bitmap)) {
        free(unconfirmed);
        free(bitmap);
        return NO_MEMORY;
    }
    for (int64_t i = 0; bits && i < self->packets; i++)
        if (has_bit(bits, i))
            bitmap[i >> 3] |= (uint8_t)(0x80 >> (i & 7));
    memset(unconfirmed, 1, (size_t)parts);
    self->bitmap = bitmap;
    self->unconfirmed = unconfirmed;
    self->parts = self->unconfirmed_count = parts;
    self->give_up_s = give_up_s;
    self->repeat_s = flow_probe_timeout_s(&owner->flows[self->name.peer]);
    self->state = FINISHED_STOPPING;
    self->next_stopping = NULL;
    finished **link = &owner->stopping; /* the list is short */
    while (*link)
        link = &(*link)->next_stopping;
    *link = self;
    owner->view.stopping_count++;
    finished_stop(owner, self, now_s);
    return 0;
}

static void finished_tell_whole(engine *owner, const finished *self) {
    engine_send_control(owner, &owner->flows[self->name.peer], STOP, &self->name, 0, self->packets, NULL, 0);
}

static finished *finished_add(engine *owner, const known *name, int64_t packets, double now_s) {
    finished *self = (finished *)table_find(&owner->finished, name->peer, name->step, name->message);
    if (self)
        finished_free(owner, self);
    self = calloc(1, sizeof *self);
    if (!self || table_reserve(&owner->finished)) {
        free(self);
        owner->view.failed = true; /* or late packets would start it again */
        return NULL;
    }
    self->name = (known){name->peer, name->step, name->message, NULL};
    self->state = FINISHED_KNOWN;
    self->packets = packets;
    self->completed_s = now_s;
    self->older = owner->newest_finished;
    *(self->older ? &self->older->newer : &owner->oldest_finished) = self;
    owner->newest_finished = self;
    table_add(&owner->finished, &self->name);
    return self;
}

static finished *finished_find(const engine *owner, int64_t peer, int64_t step, int64_t message) {
    return (finished *)table_find(&owner->finished, peer, step, message);
}

/* Repeat unacknowledged STOPs; return when to do so next. */
double finished_repeat(engine *owner, double now_s) {
    double due_s = INFINITY;
    finished *next = NULL;
    for (finished *self = owner->stopping; self; self = next) {
        next = self->next_stopping;
        if (now_s >= self->give_up_s) {
            finished_settle(owner, self);
            continue;
        }
        if (now_s >= self->due_s)
            finished_stop(owner, self, now_s);
        due_s = sooner(due_s, sooner(self->due_s, self->give_up_s));
    }
    return due_s;
}

/* Remind senders of complete messages, briefly or until they acknowledge: this rank will soon be gone. */
void dlcp_remind(engine *owner, double now_s) {
    for (finished *self = owner->oldest_finished; self; self = self->newer) {
        if (self->state != FINISHED_WHOLE)
            continue;
        self->state = FINISHED_KNOWN;
        if (self->completed_s > now_s - KNOWN_AFTER_S)
            finished_begin_stop(owner, self, NULL, now_s, now_s + REMIND_S);
    }
}

/* Forget a complete message, for which no more packets will come. */
void dlcp_forget(engine *owner, int64_t peer, int64_t step, int64_t message) {
    finished *self = finished_find(owner, peer, step, message);
    if (self && self->state != FINISHED_STOPPING)
        finished_free(owner, self);
}

/* Refuse packets of steps before `step` from now on, and forget their messages. */
void dlcp_begin_step(engine *owner, int64_t step, double now_s) {
    if (step > owner->oldest_step)
        owner->oldest_step = step;
    for (int64_t i = 0; i < owner->incoming.capacity; i++) {
        known *next = NULL;
        for (known *one = owner->incoming.chains[i]; one; one = next) {
            next = one->next;
            if (one->step < step)
                incoming_drop(owner, (incoming *)one);
        }
    }
    /* A sender that missed our acknowledgement may still probe, but not after twice the tolerated silence. */
    double asked_since_s = now_s - 2 * owner->config.silence_s;
    finished *next = NULL;
    for (finished *self = owner->oldest_finished; self && self->name.step < step; self = next) {
        next = self->newer;
        if (self->state == FINISHED_WHOLE && self->completed_s > asked_since_s)
            break; /* the rest are newer */
        if (self->state != FINISHED_STOPPING)
            finished_free(owner, self);
    }
}

/* Drop all messages. */
void incoming_drop_all(engine *owner) {
    for (int64_t i = 0; i < owner->incoming.capacity; i++)
        while (owner->incoming.chains[i])
            incoming_drop(owner, (incoming *)owner->incoming.chains[i]);
    while (owner->oldest_finished)
        finished_free(owner, owner->oldest_finished);
}

/* Completion ------------------------------------------------------------------------------------------------------- */

static bool meets_bound(const incoming *self) {
    if (self->required < 0)
        return false;
    int64_t settled = self->arrived + self->deferred;
    if (settled >= self->packets)
        return true;
    return (self->asked || self->immediate) && self->protected_packets >= 0 && settled >= self->required &&
           self->arrived_protected >= self->protected_packets;
}

/* Report a message that meets its bound, and notify its sender; return whether it does. The message may be freed. */
static bool complete(engine *owner, incoming *self, double now_s) {
    if (!meets_bound(self))
        return false;
    finish_streams();
    flow *from = &owner->flows[self->name.peer];
    bool whole = incoming_is_whole(self);
    self->complete = true;
    finished *done = finished_add(owner, &self->name, self->packets, now_s);
    if (done)
        done->asked = self->asked && !whole;
    if (whole)
        flow_acknowledge_whole(owner, from, self, now_s);
    else
        flow_acknowledge(owner, from, now_s);
    incoming_close(owner, self);
    event *news = engine_event(owner, EVENT_ARRIVED, from->peer, now_s);
    if (news) {
        news->step = self->name.step;
        news->message = self->name.message;
        news->packets = self->packets;
        news->deferred = self->deferred;
        news->last_bytes = self->last_bytes;
        news->bits = whole ? NULL : self->bits;
        news->data = self->layer;
    }
    if (done && whole)
        done->state = FINISHED_WHOLE;
    else if (done && finished_begin_stop(owner, done, self->bits, now_s, now_s + owner->config.deadline_s))
        owner->view.failed = true;
    if (!self->reduction) { /* otherwise the reduction frees it; what the event points at stays */
        engine_discard(owner, self->bits);
        engine_discard(owner, self->layer);
        free(self);
    }
    return true;
}

static bool agrees(const engine *owner, const incoming *self, const receive_request *request) {
    if (!request->last_bytes)
        return true;
    return request->packets == self->packets && (!self->last_bytes || self->last_bytes == request->last_bytes) &&
           request->last_bytes <= owner->config.payload_bytes;
}

/* Post a receive. The caller keeps its memory until EVENT_ARRIVED, or until the reduction, if any, is freed. Return 0;
 * NO_MEMORY; or, if the arriving message has another size, its number of packets. */
int64_t dlcp_receive(engine *owner, const receive_request *request, double now_s) {
    incoming *self = incoming_find(owner, request->peer, request->step, request->message);
    if (self && !agrees(owner, self, request)) {
        int64_t packets = self->packets;
        known name = self->name;
        incoming_drop(owner, self);
        finished_add(owner, &name, packets, now_s);
        return packets;
    }
    uint8_t *early = NULL;
    int64_t early_bytes = 0;
    if (self) {
        early = self->buffer;
        early_bytes = self->early_bytes;
        self->early_bytes = 0;
    } else {
        self = incoming_make(owner, request->peer, request->step, request->message, request->packets);
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
        settle_in(owner, self, early);
    if (early_bytes)
        early_give(owner, early, early_bytes);
    self->required = request->required;
    self->deferrable = request->deferrable;
    if (self->deferred > self->deferrable) {
        owner->view.counters.refused_malformed++;
        self->deferred = 0;
    }
    self->immediate = request->immediate;
    if (request->last_bytes)
        self->last_bytes = request->last_bytes;
    complete(owner, self, now_s);
    return 0;
}

/* Return how many packets of a message have arrived, and how many it has; 0 if unknown. */
receive_progress dlcp_receiving(engine *owner, int64_t peer, int64_t step, int64_t message) {
    const incoming *self = incoming_find(owner, peer, step, message);
    return self ? (receive_progress){self->arrived, self->packets} : (receive_progress){0};
}

/* Packets ---------------------------------------------------------------------------------------------------------- */

static bool is_current(const engine *owner, int64_t step) {
    return step >= owner->oldest_step && step <= owner->oldest_step + STEPS_AHEAD_MAX;
}

/* Return the message of data that is not known yet; NULL to accept none. */
static incoming *begin(engine *owner, flow *from, const uint8_t *header, int64_t size, double now_s) {
    int64_t step = header_step(header), index = header_index(header), count = header_count(header);
    if (!is_current(owner, step)) {
        owner->view.counters.refused_stale++;
        return NULL;
    }
    if (owner->closed)
        return NULL;
    finished *done = finished_find(owner, from->peer, step, header_message(header));
    if (done) {
        owner->view.counters.late++;
        from->late_received += done->asked && !(header[1] & RETRANSMISSION);
        if (done->state == FINISHED_STOPPING) {
            if (now_s > done->due_s - done->repeat_s / 2)
                finished_stop(owner, done, now_s);
        } else if (done->state == FINISHED_WHOLE &&
                   now_s > fmax(owner->reminded_s, done->completed_s) + flow_probe_timeout_s(from) / 2) {
            owner->reminded_s = now_s;
            finished_tell_whole(owner, done);
        }
        return NULL;
    }
    int64_t payload_bytes = owner->config.payload_bytes;
    if (index >= count || size < 1 || size > payload_bytes || (index < count - 1 && size < payload_bytes)) {
        owner->view.counters.refused_malformed++;
        return NULL;
    }
    return incoming_unexpected(owner, from, header, now_s);
}

/* Refuse data that does not fit its message. A mismatch with a posted receive is reported. */
static void refuse_misfit(engine *owner, incoming *self, const uint8_t *header, int64_t size, double now_s) {
    owner->view.counters.refused_malformed++;
    if (self->required < 0)
        return;
    int64_t payload_bytes = owner->config.payload_bytes, count = header_count(header);
    int last = header_index(header) == count - 1;
    int sound = size > 0 && size <= payload_bytes && (last || size == payload_bytes);
    if (!sound || (count == self->packets && !last))
        return;
    event *news = engine_event(owner, EVENT_MISMATCH, self->name.peer, now_s);
    if (news) {
        news->step = self->name.step;
        news->message = self->name.message;
        news->packets = count;
    }
    known name = self->name;
    int64_t packets = self->packets;
    incoming_drop(owner, self);
    finished_add(owner, &name, packets, now_s);
}

/* Process a data packet. Its payload need not follow its header in memory. */
void incoming_take_data(engine *owner, flow *from, const uint8_t *header, const uint8_t *payload, int64_t size, int tos,
                        double now_s) {
    int64_t index = header_index(header), payload_bytes = owner->config.payload_bytes;
    incoming *self = incoming_find(owner, from->peer, header_step(header), header_message(header));
    if (!self) {
        self = begin(owner, from, header, size, now_s);
        if (!self)
            return;
    }
    int last = index == self->packets - 1;
    int fits = header_count(header) == self->packets && index < self->packets && size > 0 && size <= payload_bytes &&
               (!last || !self->last_bytes || size == self->last_bytes) && (last || size == payload_bytes);
    if (!fits) {
        refuse_misfit(owner, self, header, size, now_s);
        return;
    }
    flow_note_arrival(owner, from, self, index, tos, now_s);
    if (has_bit(self->bits, index)) {
        owner->view.counters.duplicate++;
        from->late_received += (header[1] & RETRANSMISSION) != 0;
        return;
    }
    int64_t offset = index * payload_bytes;
    if (self->reduction)
        reduction_add(self->reduction, self->position, index, payload);
    else if (self->bytes >= STREAM_MIN_BYTES && offset + size <= self->bytes)
        stream(self->buffer + offset, payload, size);
    else
        copy_in(self, offset, payload, size);
    set_bit(self->bits, index);
    if (last)
        self->last_bytes = size;
    self->layer[index] = header[3];
    self->arrived++;
    self->arrived_protected += (header[1] & PROTECTED) != 0;
    owner->view.counters.data++;
    complete(owner, self, now_s);
}

/* Answer the probe of this number: which packets have arrived. */
static void send_bitmap(engine *owner, flow *to, const incoming *self, uint16_t number) {
    int64_t span = engine_bitmap_packets(owner);
    uint8_t datagram[HEADER_BYTES + DATAGRAM_MAX], *bitmap = datagram + HEADER_BYTES;
    for (int64_t first = 0; first < self->packets; first += span) {
        int64_t count = smaller(span, self->packets - first), bytes = (count + 7) / 8;
        memset(bitmap, 0, (size_t)bytes);
        for (int64_t i = 0; i < count; i++)
            if (has_bit(self->bits, first + i))
                bitmap[i >> 3] |= (uint8_t)(0x80 >> (i & 7));
        engine_write_header(owner, datagram, BITMAP, self->name.step, self->name.message, first, self->packets);
        put16(datagram + 6, number);
        if (engine_send_datagram(owner, to, datagram, HEADER_BYTES + bytes, owner->config.control_tos,
                                 path_for_control(to)) < 0)
            owner->view.counters.control_unsent++;
    }
}

/* Answer a sender's probe: what is missing, or that no more is needed. */
void incoming_take_probe(engine *owner, flow *from, const uint8_t *datagram, int64_t bytes, double now_s) {
    int64_t step = header_step(datagram), message = header_message(datagram);
    finished *done = finished_find(owner, from->peer, step, message);
    incoming *self = incoming_find(owner, from->peer, step, message);
    if (done && done->state == FINISHED_STOPPING) {
        finished_stop(owner, done, now_s);
        return;
    }
    /* A sender that has not probed for this long knows the outcome. */
    if (done && done->state == FINISHED_WHOLE && now_s < done->completed_s + 2 * owner->config.silence_s) {
        finished_tell_whole(owner, done);
        return;
    }
    if (done || !is_current(owner, step)) {
        owner->view.counters.refused_stale++;
        return;
    }
    if (!self && !owner->closed)
        self = incoming_unexpected(owner, from, datagram, now_s);
    if (!self)
        return;
    if (header_count(datagram) != self->packets || header_index(datagram) > self->packets) {
        owner->view.counters.refused_malformed++;
        return;
    }
    uint8_t question[QUESTION_BYTES] = {0};
    if (bytes > HEADER_BYTES)
        memcpy(question, datagram + HEADER_BYTES, (size_t)smaller(bytes - HEADER_BYTES, QUESTION_BYTES));
    int64_t deferred = get32(question + 1);
    if (deferred > (self->required < 0 ? self->packets - 1 : self->deferrable)) {
        owner->view.counters.refused_malformed++;
        return;
    }
    if (deferred)
        self->deferred = deferred;
    if (!question[0]) {
        self->asked = true;
        self->protected_packets = header_index(datagram);
    }
    if (complete(owner, self, now_s))
        return;
    send_bitmap(owner, from, self, get16(datagram + 6));
}

/* Record that a sender has acknowledged one part of a STOP. */
void incoming_take_stop_ack(engine *owner, flow *from, const uint8_t *datagram) {
    finished *done = finished_find(owner, from->peer, header_step(datagram), header_message(datagram));
    if (!done)
        return;
    if (done->state == FINISHED_WHOLE)
        done->state = FINISHED_KNOWN;
    if (done->state != FINISHED_STOPPING)
        return;
    int64_t part = header_index(datagram) / engine_bitmap_packets(owner);
    if (header_index(datagram) % engine_bitmap_packets(owner) || part >= done->parts || !done->unconfirmed[part])
        return;
    done->unconfirmed[part] = 0;
    if (--done->unconfirmed_count == 0)
        finished_settle(owner, done);
}
