/* SPDX-License-Identifier: Apache-2.0 */
/* An average over ranks, computed as packets arrive: own values first, then the others by position.
 *
 * Each of the others begins with a different chunk of its message, so that contributions to different chunks arrive at
 * the same time. In chunk c the others are added in the order of (position + c) modulo their number, in which they send
 * it. The order does not depend on arrival, so neither does the result. Packets that arrive before their turn wait in
 * their message's buffer. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "planes.h"
#include "reduction.h"

typedef float unaligned_float __attribute__((aligned(1), may_alias));

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR __attribute__((target_clones("avx2", "default"), optimize("tree-vectorize")))
#else
#define VECTOR
#endif

VECTOR static void add(float *restrict into, const unaligned_float *restrict part, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        into[i] += part[i];
}

VECTOR static void add_scale(float *restrict into, const unaligned_float *restrict part, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i++)
        into[i] = (into[i] + part[i]) * factor;
}

VECTOR static void add_divide(float *restrict into, const unaligned_float *restrict part, int64_t count,
                              float divisor) {
    for (int64_t i = 0; i < count; i++)
        into[i] = (into[i] + part[i]) / divisor;
}

static int64_t values_of(const reduction *self, int64_t index) {
    int64_t left = self->count - index * self->per_packet;
    return left < self->per_packet ? left : self->per_packet;
}

static void add_packet(reduction *self, int64_t index, const uint8_t *payload) {
    float *into = self->values + index * self->per_packet;
    const unaligned_float *part = (const unaligned_float *)payload;
    int64_t count = values_of(self, index);
    int exponent;
    if (++self->added[index] < self->members) {
        add(into, part, count);
        return;
    }
    if (frexpf(self->divisor, &exponent) == 0.5f)
        add_scale(into, part, count, 1 / self->divisor); /* exact, and faster */
    else
        add_divide(into, part, count, self->divisor);
    if (self->copy)
        memcpy_nt((uint8_t *)(self->copy + index * self->per_packet), (const uint8_t *)into, count * 4);
}

/* The chunk that a packet belongs to. */
static int64_t chunk_of(const reduction *self, int64_t index) {
    if (self->first_block < 0)
        return 0;
    int64_t block = index / SEND_BLOCK_PACKETS - self->first_block;
    return (block < 0 ? block + self->blocks : block) * self->members / self->blocks;
}

/* How many others precede a member. */
static int64_t turn_of(const reduction *self, int64_t position, int64_t index) {
    return (position + chunk_of(self, index)) % self->members;
}

/* The member after `added` others. */
static rx_message *member_after(const reduction *self, int64_t added, int64_t index) {
    return self->from[(added + self->members - chunk_of(self, index)) % self->members];
}

bool reduction_is_in_turn(const reduction *self, int64_t position, int64_t index) {
    return reduction_is_encoded(self) || self->added[index] == turn_of(self, position, index);
}

void reduction_add(reduction *self, int64_t position, int64_t index, const uint8_t *payload) {
    rx_message *member = self->from[position];
    if (!reduction_is_in_turn(self, position, index)) {
        memcpy(member->buffer + index * self->per_packet * 4, payload, (size_t)values_of(self, index) * 4);
        return;
    }
    add_packet(self, index, payload);
    while (self->added[index] < self->members) {
        rx_message *waiting = member_after(self, self->added[index], index);
        if (!waiting || !waiting->buffer || !has_bit(waiting->bits, index))
            return;
        add_packet(self, index, waiting->buffer + index * self->per_packet * 4);
    }
}

/* Average a packet of encoded contributions, with what has arrived of them. */
static void combine(reduction *self, int64_t packet) {
    const plane_layout *layout = &self->layout;
    for (int64_t position = 0; position < self->members; position++) {
        const rx_message *member = self->from[position];
        bool arrived = member && has_bit(member->bits, packet);
        self->codes[position] = arrived ? member->buffer : NULL;
        if (arrived && layout->planes > 1 && !has_bit(member->bits, packet + layout->packets))
            set_bit(self->lower_missing, position);
    }
    planes_combine(layout, &self->sum, packet, self->codes, self->lower_missing, self->members);
    memset(self->lower_missing, 0, bit_words(self->members) * sizeof *self->lower_missing);
}

/* Note that a packet of an encoded contribution is in its message's buffer. Its values are averaged in one pass once
 * all members have sent all their digits, so the order of arrival does not matter. */
void reduction_note_encoded(reduction *self, const rx_message *member, int64_t index) {
    const plane_layout *layout = &self->layout;
    if (index >= layout->planes * layout->packets)
        return; /* it is in the tail */
    int64_t packet = index % layout->packets;
    for (int64_t plane = 0; plane < layout->planes; plane++)
        if (!has_bit(member->bits, packet + plane * layout->packets))
            return;
    if (++self->added[packet] == self->members)
        combine(self, packet);
}

static reduction *make(int64_t packets, int64_t members) {
    reduction *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->packets = packets;
    self->members = members;
    self->added = calloc((size_t)packets + 1, sizeof *self->added);
    self->from = calloc((size_t)members + 1, sizeof(rx_message *));
    self->codes = calloc((size_t)members + 1, sizeof *self->codes);
    self->lower_missing = calloc(bit_words(members + 1), sizeof *self->lower_missing);
    if (self->added && self->from && self->codes && self->lower_missing)
        return self;
    dlcp_reduction_free(self);
    return NULL;
}

/* Begin a reduction of `count` values, to be divided by `divisor`. `first_block` is the block of packets at which chunk
 * 0 begins; negative: no chunks. NULL: no memory. */
reduction *dlcp_reduction_new(float *values, int64_t count, int64_t per_packet, int64_t members, float divisor,
                              int64_t first_block) {
    reduction *self = make((count + per_packet - 1) / per_packet, members);
    if (!self)
        return NULL;
    self->values = values;
    self->count = count;
    self->per_packet = per_packet;
    self->divisor = divisor;
    self->blocks = (self->packets + SEND_BLOCK_PACKETS - 1) / SEND_BLOCK_PACKETS;
    self->first_block = first_block;
    return self;
}

/* Begin a reduction of encoded contributions. NULL: no memory. */
reduction *dlcp_reduction_new_encoded(const plane_layout *layout, const plane_sum *sum, int64_t members) {
    reduction *self = make(layout->packets, members);
    if (!self)
        return NULL;
    self->layout = *layout;
    self->sum = *sum;
    return self;
}

/* Also write each average to `copy` as soon as it is complete; call it before anything is added. */
void dlcp_reduction_copy(reduction *self, float *copy) {
    self->copy = copy;
}

/* Free a reduction, and the messages that were added to it. None of them may be active. */
void dlcp_reduction_free(reduction *self) {
    for (int64_t i = 0; self->from && i < self->members; i++)
        if (self->from[i] && !self->from[i]->active)
            rx_free(self->from[i]);
    free(self->added);
    free(self->from);
    free(self->codes);
    free(self->lower_missing);
    free(self);
}

/* Fill `bits` (one per packet) with the packets of the member at `position` that are in the sum. Call it before the
 * reduction is finished: until then the sum has exactly the members up to this one; of encoded ones, all or none. */
void dlcp_reduction_included(const reduction *self, int64_t position, uint64_t *bits) {
    for (int64_t i = 0; i < self->packets; i++)
        if (reduction_is_encoded(self) ? self->added[i] == self->members : self->added[i] > turn_of(self, position, i))
            set_bit(bits, i);
}

/* Average packets that lack contributions once nothing more will arrive, and free the reduction. Divide by the number
 * of contributing ranks with `rescale`, otherwise by the divisor. Return how many packets were incomplete. */
int64_t dlcp_reduction_finish(reduction *self, bool rescale) {
    int64_t incomplete = 0;
    for (int64_t i = 0; i < self->packets; i++) {
        if (self->added[i] == self->members && (self->members || !reduction_is_encoded(self)))
            continue;
        if (reduction_is_encoded(self)) {
            combine(self, i);
            self->added[i] = (uint16_t)self->members;
            incomplete++;
            continue;
        }
        float *into = self->values + i * self->per_packet;
        int64_t count = values_of(self, i);
        int64_t contributions = 1 + self->added[i];
        for (int64_t k = self->added[i]; k < self->members; k++) {
            rx_message *member = member_after(self, k, i);
            if (!member || !member->buffer || !has_bit(member->bits, i))
                continue;
            add(into, (const unaligned_float *)(member->buffer + i * self->per_packet * 4), count);
            contributions++;
        }
        self->added[i] = (uint16_t)self->members;
        float divisor = rescale ? (float)contributions : self->divisor;
        for (int64_t j = 0; j < count; j++)
            into[j] /= divisor;
        incomplete++;
    }
    dlcp_reduction_free(self);
    return incomplete;
}
