/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients at lower precision: blocks of values with a shared scale, in planes of signed digits.
 *
 * dlcp/wire/payloads.py defines the layout, and dlcp/planes.py calls this. A packet of the lower plane has the digits
 * of the values of one packet of the upper plane. */

#include <string.h>

#include "packet.h"
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

/* Write what the decoded values lack, times a weight; 0 where that is not finite. */
INLINED void put_missing(const unaligned_floats *values, const floats *decoded, float weight, unaligned_floats *rest) {
    integers missing = (integers)(*values - *decoded);
    *rest = (floats)(missing & ((missing & 0x7fffffff) < 0x7f800000)) * weight;
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

/* Encode a block; `lower` is NULL without a lower plane. With `rest`, replace the values by the encoded ones, and write
 * there what these lack, times `weight`. */
INLINED void encode_block(float *values, int digit_bits, uint8_t *upper, uint8_t *lower, float weight, float *rest) {
    int bits = lower ? 2 * digit_bits : digit_bits;
    float digit = (float)((1 << (digit_bits - 1)) - 1);
    float largest = lower ? digit * (float)(1 << digit_bits) + digit : digit;
    unaligned_floats *block = (unaligned_floats *)values;
    integers magnitudes = {0};
    for (int k = 0; k < VECTORS; k++) {
        integers these = (integers)block[k] & 0x7fffffff, larger = these > magnitudes;
        magnitudes = (these & larger) | (magnitudes & ~larger);
    }
    uint32_t scale = choose_scale(largest_of(&magnitudes), bits, largest);
    upper[0] = (uint8_t)scale;
    float factor = float_of(scale < 254 ? (254 - scale) << 23 : 1u << 22); /* 2^(127 - scale) */
    uint32_t keep = scale == SCALE_NAN ? 0 : UINT32_MAX;
    words codes[VECTORS], high[VECTORS];
    for (int k = 0; k < VECTORS; k++)
        codes[k] = ((words)(block[k] * factor + ROUNDER) - bits_of(ROUNDER)) & keep;
    for (int k = 0; rest && k < VECTORS; k++) {
        floats decoded = __builtin_convertvector((integers)codes[k], floats) * scale_of((uint8_t)scale);
        put_missing(&block[k], &decoded, weight, &((unaligned_floats *)rest)[k]);
        block[k] = decoded;
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

/* Decode a block; `lower` is NULL where its digits are missing, although there is such a plane if `two_planes`. */
INLINED void decode_block(const uint8_t *upper, const uint8_t *lower, int digit_bits, bool two_planes, floats *values) {
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
        values[k] = __builtin_convertvector(digits[k], floats) * scale;
}

/* Where a packet's digits are in both planes; `lower` is NULL where they are missing. */
typedef struct {
    uint8_t *upper, *lower;
    int64_t first, stop; /* its values */
} packet_code;

INLINED packet_code code_of_packet(const plane_layout *layout, uint8_t *code, int64_t packet, bool has_lower) {
    uint8_t *upper = code + packet * layout->payload_bytes;
    int64_t first = packet * layout->per_packet;
    return (packet_code){
        .upper = upper,
        .lower = has_lower ? upper + layout->packets * layout->payload_bytes : NULL,
        .first = first,
        .stop = smaller(first + layout->per_packet, layout->values),
    };
}

INLINED void encode_packet(packet_code packet, float *values, float weight, float *rest, int digit_bits) {
    int64_t digit_bytes = BLOCK * digit_bits / 8;
    for (int64_t i = packet.first; i < packet.stop; i += BLOCK) {
        if (packet.stop - i >= BLOCK) {
            encode_block(values + i, digit_bits, packet.upper, packet.lower, weight, rest ? rest + i : NULL);
        } else {
            float block[BLOCK] = {0}, missing[BLOCK];
            size_t bytes = (size_t)(packet.stop - i) * sizeof *values;
            memcpy(block, values + i, bytes);
            encode_block(block, digit_bits, packet.upper, packet.lower, weight, rest ? missing : NULL);
            if (rest) {
                memcpy(values + i, block, bytes);
                memcpy(rest + i, missing, bytes);
            }
        }
        packet.upper += digit_bytes + 1;
        packet.lower += packet.lower ? digit_bytes : 0;
    }
}

FASTEST static void encode_all(const plane_layout *layout, float *values, uint8_t *code, float weight, float *rest) {
    bool two = layout->planes > 1;
    memset(code, 0, (size_t)layout->bytes); /* what packets do not fill must not tell what the memory held before */
    for (int64_t packet = 0; packet < layout->packets; packet++) {
        packet_code into = code_of_packet(layout, code, packet, two);
        if (layout->digit_bits == 4)
            encode_packet(into, values, weight, rest, 4);
        else
            encode_packet(into, values, weight, rest, 8);
    }
}

void dlcp_planes_encode(const plane_layout *layout, const float *values, uint8_t *code) {
    encode_all(layout, (float *)values, code, 1, NULL); /* which changes no values */
}

/* Encode values, replace them by the encoded ones, and write what these lack, times `weight`, into `rest`. */
void dlcp_planes_round(const plane_layout *layout, float *values, uint8_t *code, float weight, float *rest) {
    encode_all(layout, values, code, weight, rest);
}

INLINED void combine(plane_operation operation, const floats *decoded, float *values, float *rest) {
    unaligned_floats *block = (unaligned_floats *)values;
    for (int k = 0; k < VECTORS; k++) {
        if (operation == PLANES_SET)
            block[k] = decoded[k];
        else if (operation == PLANES_ADD)
            block[k] += decoded[k];
        else
            put_missing(&block[k], &decoded[k], 1, &((unaligned_floats *)rest)[k]);
    }
}

INLINED void decode_packet(const plane_layout *layout, packet_code packet, bool is_missing, plane_operation operation,
                           float *values, float *rest, int digit_bits) {
    int64_t digit_bytes = BLOCK * digit_bits / 8;
    for (int64_t i = packet.first; i < packet.stop; i += BLOCK) {
        floats decoded[VECTORS];
        if (is_missing)
            for (int k = 0; k < VECTORS; k++)
                decoded[k] = (floats){0};
        else
            decode_block(packet.upper, packet.lower, digit_bits, layout->planes > 1, decoded);
        if (packet.stop - i >= BLOCK) {
            combine(operation, decoded, values + i, rest + i);
        } else {
            float block[BLOCK] = {0}, missing[BLOCK];
            size_t bytes = (size_t)(packet.stop - i) * sizeof *values;
            memcpy(block, values + i, bytes);
            combine(operation, decoded, block, missing);
            if (operation == PLANES_REST)
                memcpy(rest + i, missing, bytes);
            else
                memcpy(values + i, block, bytes);
        }
        packet.upper += digit_bytes + 1;
        packet.lower += packet.lower ? digit_bytes : 0;
    }
}

FASTEST static void decode_all(const plane_layout *layout, const uint8_t *code, const uint8_t *delivered,
                               plane_operation operation, float *values, float *rest) {
    for (int64_t packet = 0; packet < layout->packets; packet++) {
        bool has_lower = layout->planes > 1 && (!delivered || delivered[layout->packets + packet]);
        bool is_missing = delivered && !delivered[packet];
        packet_code from = code_of_packet(layout, (uint8_t *)code, packet, has_lower);
        if (layout->digit_bits == 4)
            decode_packet(layout, from, is_missing, operation, values, rest, 4);
        else
            decode_packet(layout, from, is_missing, operation, values, rest, 8);
    }
}

/* Set `values` to the encoded ones, or add those to them, or write into `rest` what the code lacks of them, and 0 where
 * that is not finite. `delivered` has a byte for each packet, the upper plane's first; NULL: all have arrived. Without
 * its packet of the upper plane a value is 0; without that of the lower plane it has the upper plane's precision. */
void dlcp_planes_decode(const plane_layout *layout, const uint8_t *code, const uint8_t *delivered,
                        plane_operation operation, float *values, float *rest) {
    decode_all(layout, code, delivered, operation, values, rest);
}
