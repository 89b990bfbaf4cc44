/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients at lower precision: blocks of values with a shared scale, in planes of signed digits.
 *
 * dlcp/wire/payloads.py defines the layout, and dlcp/values/planes.py calls this. A packet of the lower plane has the
 * digits of the values of one packet of the upper plane. */

#include <math.h>
#include <string.h>

#include "packet.h"
#include "planes.h"
#include "vector.h"

enum { BLOCK = PLANE_BLOCK_VALUES, LANES = 8, VECTORS = BLOCK / LANES, SCALE_NAN = 255 };
/* Adding it to a float below 2^22 in magnitude rounds that to an integer, ties to even, in the lower bits. */
static const float ROUNDER = 12582912.0f; /* 1.5 * 2^23 */

/* The power of two that a scale byte stands for; infinity for SCALE_NAN, which turns codes of 0 into NaN. */
INLINED float scale_of(uint8_t scale) {
    return float_of(scale ? (uint32_t)scale << 23 : 1u << 22);
}

/* Return the scale byte of a block whose largest magnitude has these bits: the smallest with which the rounded value is
 * at most `largest`, a code of `bits` bits. */
INLINED uint32_t choose_scale(uint32_t magnitude, int bits, float largest) {
    /* With this scale the value is at least 2^(bits - 2) and below 2^(bits - 1): too large by at most a factor of 2. */
    int32_t scale = (int32_t)(magnitude >> 23) - (bits - 2);
    scale += (magnitude & 0x7fffffu) >= (bits_of(largest + 0.5f) & 0x7fffffu);
    return magnitude >= 0x7f800000u ? SCALE_NAN : scale > 0 ? (uint32_t)scale : 0;
}

/* A code is 2^digit_bits * upper + lower, with both digits signed: the upper one alone is the rounded value, and the
 * lower one has the code's lowest bits. Digit k of word w belongs to value LANES k + w of the block, so that vector
 * units need no shuffles. */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef floats unaligned_floats __attribute__((aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "planes are written in the machine's byte order");

/* Write the digits in the lowest bits of `digits`. */
INLINED void put_digits(uint8_t *at, const words *digits, int digit_bits) {
    uint32_t mask = (1u << digit_bits) - 1;
    words packed = digits[0] & mask;
    for (int k = 1; k < VECTORS; k++)
        packed |= (digits[k] & mask) << (uint32_t)(k * digit_bits);
    if (digit_bits == 8) {
        memcpy(at, &packed, sizeof packed);
    } else {
        halves half = __builtin_convertvector(packed, halves);
        memcpy(at, &half, sizeof half);
    }
}

INLINED void get_digits(const uint8_t *at, int digit_bits, integers *digits) {
    words packed;
    if (digit_bits == 8) {
        memcpy(&packed, at, sizeof packed);
    } else {
        halves half;
        memcpy(&half, at, sizeof half);
        packed = __builtin_convertvector(half, words);
    }
    for (int k = 0; k < VECTORS; k++)
        digits[k] = (integers)(packed << (uint32_t)(32 - (k + 1) * digit_bits)) >> (32 - digit_bits);
}

/* Return the largest of integers that are not negative. */
INLINED uint32_t largest_of(const integers *these) {
    typedef int32_t half __attribute__((vector_size(2 * LANES)));
    half low, high;
    memcpy(&low, these, sizeof low);
    memcpy(&high, (const char *)these + sizeof low, sizeof high);
    half larger = low > high;
    low = (low & larger) | (high & ~larger);
    int32_t one = low[0] > low[1] ? low[0] : low[1], other = low[2] > low[3] ? low[2] : low[3];
    return (uint32_t)(one > other ? one : other);
}

/* Encode a block; `lower` is NULL without a lower plane. The values become those that a receiver decodes. */
INLINED void encode_block(floats *values, int digit_bits, uint8_t *upper, uint8_t *lower) {
    int bits = lower ? 2 * digit_bits : digit_bits;
    float digit = (float)((1 << (digit_bits - 1)) - 1);
    float largest = lower ? digit * (float)(1 << digit_bits) + digit : digit;
    integers magnitudes = {0};
    for (int k = 0; k < VECTORS; k++) {
        integers these = (integers)values[k] & 0x7fffffff, larger = these > magnitudes;
        magnitudes = (these & larger) | (magnitudes & ~larger);
    }
    uint32_t scale = choose_scale(largest_of(&magnitudes), bits, largest);
    upper[0] = (uint8_t)scale;
    float factor = float_of(scale < 254 ? (254 - scale) << 23 : 1u << 22); /* 2^(127 - scale) */
    uint32_t keep = scale == SCALE_NAN ? 0 : UINT32_MAX;
    words codes[VECTORS], high[VECTORS];
    for (int k = 0; k < VECTORS; k++) {
        codes[k] = ((words)(values[k] * factor + ROUNDER) - bits_of(ROUNDER)) & keep;
        values[k] = __builtin_convertvector((integers)codes[k], floats) * scale_of((uint8_t)scale);
    }
    if (!lower) {
        put_digits(upper + 1, codes, digit_bits);
        return;
    }
    for (int k = 0; k < VECTORS; k++)
        high[k] = (codes[k] + (1u << (digit_bits - 1))) >> (uint32_t)digit_bits;
    put_digits(upper + 1, high, digit_bits);
    put_digits(lower, codes, digit_bits);
}

/* Add a decoded block to `sum`; `lower` is NULL where its digits are missing, although there is such a plane if
 * `two_planes`. */
INLINED void add_block(const uint8_t *upper, const uint8_t *lower, int digit_bits, bool two_planes, floats *sum) {
    float scale = scale_of(upper[0]);
    integers digits[VECTORS], low[VECTORS];
    get_digits(upper + 1, digit_bits, digits);
    if (two_planes)
        for (int k = 0; k < VECTORS; k++)
            digits[k] *= 1 << digit_bits;
    if (lower) {
        get_digits(lower, digit_bits, low);
        for (int k = 0; k < VECTORS; k++)
            digits[k] += low[k];
    }
    for (int k = 0; k < VECTORS; k++)
        sum[k] += __builtin_convertvector(digits[k], floats) * scale;
}

/* The bytes of a packet of either plane that hold digits of its `count` values. */
INLINED int64_t digits_in(int64_t count, int digit_bits, bool is_upper) {
    return (count + BLOCK - 1) / BLOCK * (BLOCK * digit_bits / 8 + is_upper);
}

INLINED int64_t first_of(const plane_layout *layout, int64_t packet) {
    return packet * layout->per_packet;
}

INLINED int64_t values_of(const plane_layout *layout, int64_t packet) {
    return smaller(layout->values - first_of(layout, packet), layout->per_packet);
}

/* Clear the bytes that a packet's digits do not fill: they must not reveal what the memory held before. */
INLINED void clear_behind(const plane_layout *layout, uint8_t *code, int64_t packet, int64_t digits) {
    int64_t first = packet * layout->payload_bytes + digits;
    int64_t stop = smaller((packet + 1) * layout->payload_bytes, layout->bytes);
    memset(code + first, 0, (size_t)(stop - first));
}

/* The options of a `plane_sum`, as bits. */
enum { HAS_OWN = 1, KEEPS_OWN = 2, HAS_CODE = 4, HAS_REST = 8 };

/* The parts of a packet's codes that belong to one of its blocks. */
typedef struct {
    const uint8_t *const *codes;
    const uint64_t *lower_missing;
    int64_t members, above, below; /* where the digits are in each of them */
    uint8_t *upper, *lower;        /* of the result */
} block_codes;

/* Combine a block. `digit_bits` and `two` are constants once it is inlined. */
INLINED void combine_block(float *values, float *rest, const block_codes *at, float factor, float weight,
                           int digit_bits, bool two, int how) {
    unaligned_floats *own = (unaligned_floats *)values, *lacked = (unaligned_floats *)rest;
    floats block[VECTORS], decoded[VECTORS];
    for (int k = 0; k < VECTORS; k++)
        block[k] = how & HAS_OWN ? own[k] : (floats){0};
    for (int64_t member = 0; member < at->members; member++) {
        const uint8_t *code = at->codes[member];
        bool has_lower = two && !has_bit(at->lower_missing, member);
        if (code)
            add_block(code + at->above, has_lower ? code + at->below : NULL, digit_bits, two, block);
    }
    for (int k = 0; k < VECTORS; k++)
        decoded[k] = block[k] *= factor;
    if (how & HAS_CODE)
        encode_block(decoded, digit_bits, at->upper, two ? at->lower : NULL);
    for (int k = 0; k < VECTORS; k++) {
        if (!(how & KEEPS_OWN))
            own[k] = decoded[k];
        if (how & HAS_REST) {
            integers missing = (integers)(block[k] - decoded[k]);
            lacked[k] = (floats)(missing & ((missing & 0x7fffffff) < 0x7f800000)) * weight;
        }
    }
}

INLINED void combine_packet(const plane_layout *layout, const plane_sum *sum, int64_t packet,
                            const uint8_t *const *codes, const uint64_t *lower_missing, int64_t members, int digit_bits,
                            bool two, int how) {
    int64_t digit_bytes = BLOCK * digit_bits / 8, count = values_of(layout, packet);
    float *values = sum->values + first_of(layout, packet);
    float *rest = how & HAS_REST ? sum->rest + first_of(layout, packet) : NULL;
    int64_t above = packet * layout->payload_bytes, below = (packet + layout->packets) * layout->payload_bytes;
    block_codes at = {codes, lower_missing, members, above, below, NULL, NULL};
    if (how & HAS_CODE)
        at.upper = sum->code + above, at.lower = sum->code + below;
    for (int64_t i = 0; i < count; i += BLOCK) {
        if (count - i >= BLOCK) {
            combine_block(values + i, how & HAS_REST ? rest + i : NULL, &at, sum->factor, sum->weight, digit_bits, two,
                          how);
        } else {
            float block[BLOCK] = {0}, lacked[BLOCK];
            size_t bytes = (size_t)(count - i) * sizeof *values;
            memcpy(block, values + i, bytes);
            combine_block(block, lacked, &at, sum->factor, sum->weight, digit_bits, two, how);
            if (!(how & KEEPS_OWN))
                memcpy(values + i, block, bytes);
            if (how & HAS_REST)
                memcpy(rest + i, lacked, bytes);
        }
        at.above += digit_bytes + 1;
        at.below += digit_bytes;
        if (how & HAS_CODE)
            at.upper += digit_bytes + 1, at.lower += digit_bytes;
    }
    if (!(how & HAS_CODE))
        return;
    clear_behind(layout, sum->code, packet, digits_in(count, digit_bits, true));
    if (two)
        clear_behind(layout, sum->code, packet + layout->packets, digits_in(count, digit_bits, false));
}

FASTEST static void combine(const plane_layout *layout, const plane_sum *sum, int64_t packet,
                            const uint8_t *const *codes, const uint64_t *lower_missing, int64_t members) {
    int how = (sum->has_own ? HAS_OWN : 0) | (sum->keeps_own ? KEEPS_OWN : 0) | (sum->code ? HAS_CODE : 0) |
              (sum->rest ? HAS_REST : 0);
    if (layout->digit_bits == 8)
        combine_packet(layout, sum, packet, codes, lower_missing, members, 8, true, how);
    else if (layout->planes == 2)
        combine_packet(layout, sum, packet, codes, lower_missing, members, 4, true, how);
    else
        combine_packet(layout, sum, packet, codes, lower_missing, members, 4, false, how);
}

/* Combine the values of a packet with those of other codes; see `plane_sum`. If a code is NULL, its packet of the upper
 * plane is missing; if it has a bit in `lower_missing`, that of the lower plane is. */
void planes_combine(const plane_layout *layout, const plane_sum *sum, int64_t packet, const uint8_t *const *codes,
                    const uint64_t *lower_missing, int64_t members) {
    combine(layout, sum, packet, codes, lower_missing, members);
}

/* Combine all packets with one code, or with none if it is NULL. `delivered` has a byte for each of its packets, the
 * upper plane's first; NULL: all have arrived. */
void dlcp_planes_combine(const plane_layout *layout, const plane_sum *sum, const uint8_t *code,
                         const uint8_t *delivered) {
    for (int64_t packet = 0; packet < layout->packets; packet++) {
        bool has_upper = !delivered || delivered[packet];
        bool has_lower = layout->planes == 1 || !delivered || delivered[layout->packets + packet];
        const uint8_t *codes[1] = {code};
        uint64_t lower_missing = !has_lower;
        combine(layout, sum, packet, codes, &lower_missing, code && has_upper);
    }
}

FASTEST static void lose(const plane_layout *layout, const uint8_t *code, const uint8_t *delivered, float *rest) {
    int64_t digit_bytes = BLOCK * layout->digit_bits / 8;
    for (int64_t packet = 0; layout->planes > 1 && packet < layout->packets; packet++) {
        if (delivered[layout->packets + packet])
            continue;
        const uint8_t *upper = code + packet * layout->payload_bytes;
        const uint8_t *lower = upper + layout->packets * layout->payload_bytes;
        float *lost = rest + first_of(layout, packet);
        for (int64_t i = 0, count = values_of(layout, packet); i < count; i += BLOCK) {
            integers digits[VECTORS];
            get_digits(lower, layout->digit_bits, digits);
            for (int64_t j = 0; j < BLOCK && i + j < count; j++) {
                int32_t digit = digits[j / LANES][j % LANES];
                float more = lost[i + j] + (float)digit * scale_of(upper[0]);
                lost[i + j] = isfinite(more) ? more : 0;
            }
            upper += digit_bytes + 1;
            lower += digit_bytes;
        }
    }
}

/* Add the digits of undelivered packets of the lower plane to `rest`; 0 where that is not finite. */
void dlcp_planes_lose(const plane_layout *layout, const uint8_t *code, const uint8_t *delivered, float *rest) {
    lose(layout, code, delivered, rest);
}
