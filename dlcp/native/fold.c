/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over ranks, formed while packets arrive: own values first, then the others by position, beginning with another one
 * in each region (dlcp/transport/engine.py, Fold), so that the result does not depend on who came first. What comes out of
 * turn waits in its message's buffer. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

typedef float unaligned_float __attribute__((aligned(1), may_alias));

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR __attribute__((target_clones("avx2", "default"), optimize("tree-vectorize")))
#else
#define VECTOR
#endif

VECTOR static void add(float *restrict into, const unaligned_float *restrict part, int64_t count) {
    for (int64_t i = 0; i < count; i++) into[i] += part[i];
}

VECTOR static void add_scale(float *restrict into, const unaligned_float *restrict part, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i++) into[i] = (into[i] + part[i]) * factor;
}

VECTOR static void add_divide(float *restrict into, const unaligned_float *restrict part, int64_t count, float divisor) {
    for (int64_t i = 0; i < count; i++) into[i] = (into[i] + part[i]) / divisor;
}

static int64_t values_of(const fold *s, int64_t index) {
    int64_t left = s->count - index * s->per_packet;
    return left < s->per_packet ? left : s->per_packet;
}

static void fold_in(fold *s, int64_t index, const uint8_t *payload) {
    float *into = s->values + index * s->per_packet;
    const unaligned_float *part = (const unaligned_float *)payload;
    int64_t count = values_of(s, index);
    int exponent;
    if (++s->folded[index] < s->members) {
        add(into, part, count);
        return;
    }
    if (frexpf(s->divisor, &exponent) == 0.5f) add_scale(into, part, count, 1 / s->divisor); /* exact, and faster */
    else add_divide(into, part, count, s->divisor);
    if (s->copy) stream((uint8_t *)(s->copy + index * s->per_packet), (const uint8_t *)into, count * 4);
}

/* By how many places the order of the members is turned in the region that a packet belongs to. */
static int64_t region_of(const fold *s, int64_t index) {
    if (s->first_block < 0) return 0;
    int64_t block = index / SEND_BLOCK_PACKETS - s->first_block;
    return (block < 0 ? block + s->blocks : block) * s->members / s->blocks;
}

/* How many others come before a member. */
static int64_t turn_of(const fold *s, int64_t position, int64_t index) {
    return (position + region_of(s, index)) % s->members;
}

/* Who comes after `folded` others. */
static incoming *member_after(const fold *s, int64_t folded, int64_t index) {
    return s->from[(folded + s->members - region_of(s, index)) % s->members];
}

int is_in_turn(const fold *s, int64_t position, int64_t index) {
    return s->folded[index] == turn_of(s, position, index);
}

void fold_packet(fold *s, int64_t position, int64_t index, const uint8_t *payload) {
    incoming *member = s->from[position];
    if (!is_in_turn(s, position, index)) {
        memcpy(member->buffer + index * s->per_packet * 4, payload, (size_t)values_of(s, index) * 4);
        return;
    }
    fold_in(s, index, payload);
    while (s->folded[index] < s->members) {
        incoming *waiting = member_after(s, s->folded[index], index);
        if (!waiting || !waiting->buffer || !has_bit(waiting->bits, index)) return;
        fold_in(s, index, waiting->buffer + index * s->per_packet * 4);
    }
}

API fold *dlcp_fold_new(float *values, int64_t count, int64_t per_packet, int64_t members, float divisor,
                        int64_t first_block) {
    fold *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->values = values, s->count = count, s->per_packet = per_packet, s->members = members, s->divisor = divisor;
    s->packets = (count + per_packet - 1) / per_packet;
    s->blocks = (s->packets + SEND_BLOCK_PACKETS - 1) / SEND_BLOCK_PACKETS, s->first_block = first_block;
    s->folded = calloc((size_t)s->packets + 1, sizeof *s->folded);
    s->from = calloc((size_t)members + 1, sizeof *s->from);
    if (s->folded && s->from) return s;
    free(s->folded), free(s->from), free(s);
    return NULL;
}

/* Have a copy of each average as soon as it is complete; call it before anything is added. */
API void dlcp_fold_copy(fold *s, float *copy) {
    s->copy = copy;
}

API void dlcp_fold_free(fold *s) {
    free(s->folded), free(s->from), free(s);
}

/* Fill `bits` (one bit a packet) with what of the member at `position` is in the sum, which must not be finished yet: until
 * then all that count are those before it and itself. */
API void dlcp_fold_included(const fold *s, int64_t position, uint64_t *bits) {
    for (int64_t i = 0; i < s->packets; i++)
        if (s->folded[i] > turn_of(s, position, i)) set_bit(bits, i);
}

/* Average what has some contributions missing, once nothing more will come. `owed`, of `count` values or NULL, gets the
 * sum less divisor times the average, where that is finite: what is not is for this step's loss scaler, and would spoil the
 * next one. Return how many packets were not complete. */
API int64_t dlcp_fold_finish(fold *s, int64_t rescale, float *owed) {
    int64_t incomplete = 0;
    for (int64_t i = 0; i < s->packets; i++) {
        if (s->folded[i] == s->members) continue;
        float *into = s->values + i * s->per_packet;
        int64_t count = values_of(s, i);
        int64_t contributions = 1 + s->folded[i];
        for (int64_t k = s->folded[i]; k < s->members; k++) {
            incoming *member = member_after(s, k, i);
            if (!member || !member->buffer || !has_bit(member->bits, i)) continue;
            add(into, (const unaligned_float *)(member->buffer + i * s->per_packet * 4), count);
            contributions++;
        }
        s->folded[i] = (uint16_t)s->members;
        float divisor = rescale ? (float)contributions : s->divisor;
        for (int64_t j = 0; j < count; j++) {
            float total = into[j];
            into[j] = total / divisor;
            float error = total - s->divisor * into[j];
            if (owed && isfinite(error)) owed[i * s->per_packet + j] += error;
        }
        incomplete++;
    }
    return incomplete;
}
