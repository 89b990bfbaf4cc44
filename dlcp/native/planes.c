/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients at lower precision: blocks of values with a shared scale, in planes of signed digits.
 *
 * dlcp/wire/payloads.py defines the layout, and dlcp/planes.py calls this. A packet of the lower plane has the digits
 * of the values of one packet of the upper plane. */

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

/* Encode a block; `lower` is NULL without a lower plane. The values become what is decoded. */
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

/* Take the values of a block that has `count` of them, with zeros after them. */
INLINED void get_values(const float *values, int64_t count, floats *block) {
    if (count >= BLOCK) {
        memcpy(block, values, BLOCK * sizeof *values);
        return;
    }
    memset(block, 0, BLOCK * sizeof *values);
    memcpy(block, values, (size_t)count * sizeof *values);
}

INLINED void put_values(float *values, int64_t count, const floats *block) {
    if (count >= BLOCK)
        memcpy(values, block, BLOCK * sizeof *values);
    else
        memcpy(values, block, (size_t)count * sizeof *values);
}

/* Write what decoded values lack of others, times a weight; 0 where that is not finite. */
INLINED void put_missing(float *rest, int64_t count, const floats *values, const floats *decoded, float weight) {
    floats missing[VECTORS];
    for (int k = 0; k < VECTORS; k++) {
        integers lacked = (integers)(values[k] - decoded[k]);
        missing[k] = (floats)(lacked & ((lacked & 0x7fffffff) < 0x7f800000)) * weight;
    }
    put_values(rest, count, missing);
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

INLINED uint8_t *at_packet(const plane_layout *layout, const uint8_t *code, int64_t packet) {
    return (uint8_t *)code + packet * layout->payload_bytes;
}

/* Clear what a packet's digits do not fill: it must not tell what the memory held before. */
INLINED void clear_behind(const plane_layout *layout, uint8_t *code, int64_t packet, int64_t digits) {
    int64_t first = packet * layout->payload_bytes + digits;
    int64_t stop = smaller((packet + 1) * layout->payload_bytes, layout->bytes);
    memset(code + first, 0, (size_t)(stop - first));
}

INLINED void combine_packet(const plane_layout *layout, const plane_sum *sum, int64_t packet, int digit_bits,
                            const uint8_t *const *codes, const uint64_t *lower_missing, int64_t members) {
    bool two = layout->planes > 1;
    int64_t digit_bytes = BLOCK * digit_bits / 8, count = values_of(layout, packet);
    float *values = sum->values + first_of(layout, packet);
    float *rest = sum->rest ? sum->rest + first_of(layout, packet) : NULL;
    uint8_t *upper = sum->code ? at_packet(layout, sum->code, packet) : NULL;
    uint8_t *lower = sum->code && two ? at_packet(layout, sum->code, packet + layout->packets) : NULL;
    int64_t above = packet * layout->payload_bytes, below = (packet + layout->packets) * layout->payload_bytes;
    for (int64_t i = 0; i < count; i += BLOCK) {
        floats block[VECTORS] = {{0}}, decoded[VECTORS];
        if (sum->has_own)
            get_values(values + i, count - i, block);
        if (rest && sum->adds_rest) {
            get_values(rest + i, count - i, decoded);
            for (int k = 0; k < VECTORS; k++)
                block[k] += decoded[k];
        }
        for (int64_t member = 0; member < members; member++) {
            const uint8_t *code = codes[member];
            bool has_lower = two && !(lower_missing && has_bit(lower_missing, member));
            if (code)
                add_block(code + above, has_lower ? code + below : NULL, digit_bits, two, block);
        }
        above += digit_bytes + 1;
        below += digit_bytes;
        for (int k = 0; k < VECTORS; k++)
            decoded[k] = block[k] *= sum->factor;
        if (upper) {
            encode_block(decoded, digit_bits, upper, lower);
            upper += digit_bytes + 1;
            lower += lower ? digit_bytes : 0;
        }
        if (!sum->keeps_own)
            put_values(values + i, count - i, decoded);
        if (rest)
            put_missing(rest + i, count - i, block, decoded, sum->weight);
    }
    if (!upper)
        return;
    clear_behind(layout, sum->code, packet, digits_in(count, digit_bits, true));
    if (two)
        clear_behind(layout, sum->code, packet + layout->packets, digits_in(count, digit_bits, false));
}

FASTEST static void combine(const plane_layout *layout, const plane_sum *sum, int64_t packet,
                            const uint8_t *const *codes, const uint64_t *lower_missing, int64_t members) {
    if (layout->digit_bits == 4)
        combine_packet(layout, sum, packet, 4, codes, lower_missing, members);
    else
        combine_packet(layout, sum, packet, 8, codes, lower_missing, members);
}

/* Combine the values of a packet with those of other codes; see `plane_sum`. A code that is NULL lacks the packet of
 * the upper plane, and one with a bit in `lower_missing` that of the lower plane. */
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
        const uint8_t *codes[1] = {has_upper ? code : NULL};
        uint64_t lower_missing = !has_lower;
        combine(layout, sum, packet, codes, &lower_missing, 1);
    }
}

FASTEST static void lose(const plane_layout *layout, const uint8_t *code, const uint8_t *delivered, float *rest) {
    for (int64_t packet = 0; layout->planes > 1 && packet < layout->packets; packet++) {
        if (delivered[layout->packets + packet])
            continue;
        const uint8_t *upper = at_packet(layout, code, packet);
        const uint8_t *lower = at_packet(layout, code, packet + layout->packets);
        int64_t digit_bytes = BLOCK * layout->digit_bits / 8, count = values_of(layout, packet);
        float *lost = rest + first_of(layout, packet);
        for (int64_t i = 0; i < count; i += BLOCK, upper += digit_bytes + 1, lower += digit_bytes) {
            integers low[VECTORS];
            floats block[VECTORS], nothing[VECTORS] = {{0}};
            get_values(lost + i, count - i, block);
            if (layout->digit_bits == 4)
                get_digits(lower, 4, low);
            else
                get_digits(lower, 8, low);
            for (int k = 0; k < VECTORS; k++)
                block[k] += __builtin_convertvector(low[k], floats) * scale_of(upper[0]);
            put_missing(lost + i, count - i, block, nothing, 1);
        }
    }
}

/* Add what packets of the lower plane hold that were not delivered to `rest`; 0 where that is not finite. */
void dlcp_planes_lose(const plane_layout *layout, const uint8_t *code, const uint8_t *delivered, float *rest) {
    lose(layout, code, delivered, rest);
}
