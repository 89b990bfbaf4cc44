/* SPDX-License-Identifier: Apache-2.0 */
/* Magnitudes, drop classes and sending order, as dlcp/values/tags.py computes them in NumPy. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "packet.h"
#include "vector.h"

/* ---- magnitudes ---- */

enum { LANES = 32 }; /* independent sums, so that vector units need not wait for one another */

INLINED float widen_float32(float value) {
    return value;
}

INLINED double widen_float64(double value) {
    return value;
}

INLINED float widen_bfloat16(uint16_t bits) {
    return float_of((uint32_t)bits << 16);
}

/* The absolute value of a half-precision number. Every case is computed and then selected, which vectorizes. */
INLINED float widen_float16(uint16_t bits) {
    uint32_t rest = (uint32_t)(bits & 0x7fff) << 13;
    uint32_t normal = rest + (112u << 23);
    /* Add an implicit leading one and subtract it again, since subnormal floats are slow. */
    float subnormal = float_of(rest + (113u << 23)) - 0x1p-14f;
    uint32_t chosen = bits_of(subnormal);
    uint32_t is_normal = -(uint32_t)(rest >= 1u << 23), is_infinite = -(uint32_t)(rest >= 0x7c00u << 13);
    return float_of((normal & is_normal) | (chosen & ~is_normal) | (0x7f800000u & is_infinite));
}

/* Adds the squares of `width` values to as many sums. */
#define ADD_SQUARES(FORMAT, WIDE, width)                                                                               \
    for (int lane = 0; lane < (width); lane++) {                                                                       \
        WIDE value = widen_##FORMAT(packet[i + lane]);                                                                 \
        sums[lane] += value * value;                                                                                   \
    }

/* Writes ceil(count / per_packet) magnitudes, the root mean square of each packet. A packet with NaN counts as
 * infinite. */
#define MAGNITUDES(FORMAT, STORED, WIDE, ROOT)                                                                         \
    FASTEST void dlcp_magnitudes_##FORMAT(const void *values, int64_t count, int64_t per_packet, float *result) {      \
        for (int64_t start = 0; start < count; start += per_packet) {                                                  \
            int64_t size = count - start < per_packet ? count - start : per_packet, i = 0;                             \
            const STORED *packet = (const STORED *)values + start;                                                     \
            WIDE sums[LANES] = {0};                                                                                    \
            for (; i + LANES <= size; i += LANES)                                                                      \
                ADD_SQUARES(FORMAT, WIDE, LANES)                                                                       \
            for (; i + LANES / 4 <= size; i += LANES / 4)                                                              \
                ADD_SQUARES(FORMAT, WIDE, LANES / 4)                                                                   \
            ADD_SQUARES(FORMAT, WIDE, size - i)                                                                        \
            for (int half = LANES / 2; half; half /= 2)                                                                \
                for (int lane = 0; lane < half; lane++)                                                                \
                    sums[lane] += sums[lane + half];                                                                   \
            float magnitude = (float)ROOT(sums[0] / (WIDE)size);                                                       \
            *result++ = isnan(magnitude) ? INFINITY : magnitude;                                                       \
        }                                                                                                              \
    }

MAGNITUDES(float32, float, float, sqrtf)
MAGNITUDES(float64, double, double, sqrt)
MAGNITUDES(float16, uint16_t, float, sqrtf)
MAGNITUDES(bfloat16, uint16_t, float, sqrtf)

/* ---- drop classes ---- */

/* Sorts keys by their bytes, lowest first. The number of passes is even, so the result ends up in `keys`. */
static void sort_keys(uint32_t *keys, uint32_t *other, int64_t count) {
    int64_t places[4][256] = {{0}};
    for (int64_t i = 0; i < count; i++)
        for (int byte = 0; byte < 4; byte++)
            places[byte][keys[i] >> 8 * byte & 255]++;
    for (int byte = 0; byte < 4; byte++) {
        int64_t place = 0;
        for (int value = 0; value < 256; value++) {
            int64_t here = places[byte][value];
            places[byte][value] = place;
            place += here;
        }
        for (int64_t i = 0; i < count; i++)
            other[places[byte][keys[i] >> 8 * byte & 255]++] = keys[i];
        uint32_t *swap = keys;
        keys = other;
        other = swap;
    }
}

/* The value at a quantile of sorted magnitudes, interpolated between its two neighbours. */
static double at_quantile(const uint32_t *sorted, int64_t count, double quantile) {
    double place = quantile * (double)(count - 1);
    place = place < (double)(count - 1) ? place : (double)(count - 1);
    int64_t below = (int64_t)place, above = below + 1 < count ? below + 1 : below;
    double low = float_of(sorted[below]), high = float_of(sorted[above]);
    double value = low + (high - low) * (place - (double)below);
    return value < high ? value : high;
}

/* The least float that is not below a border: comparing floats with it is the same as with the border. */
static float threshold(double border) {
    float value = (float)border;
    return (double)value < border ? nextafterf(value, INFINITY) : value;
}

FASTEST static void classes_between(const float *magnitudes, int64_t count, const float thresholds[BORDERS],
                                    uint8_t class_of_zero, uint8_t *classes) {
    for (int64_t i = 0; i < count; i++) {
        int below = 0;
        for (int border = 0; border < BORDERS; border++)
            below += magnitudes[i] >= thresholds[border];
        classes[i] = magnitudes[i] == 0 ? class_of_zero : (uint8_t)(DROP_CLASSES - 1 - below);
    }
}

/* Moves a layer's borders towards the quantiles of its finite magnitudes, by `1 - memory` of the way. */
static void move_borders(const float *magnitudes, const uint8_t *kept, const layer_packets *layer, double memory,
                         double *borders, uint32_t *keys, uint32_t *other) {
    int64_t count = 0;
    for (int64_t i = layer->first; i < layer->stop; i++) {
        memcpy(&keys[count], &magnitudes[i], sizeof *keys);
        count += !kept[i] && magnitudes[i] < INFINITY;
    }
    if (!count)
        return;
    sort_keys(keys, other, count); /* nonnegative floats sort like their bits */
    for (int border = 0; border < BORDERS; border++) {
        double now = at_quantile(keys, count, layer->quantiles[border]);
        borders[border] = isnan(borders[border]) ? now : memory * borders[border] + (1 - memory) * now;
    }
}

/* Sets each packet's drop class and whether it is protected.

   magnitudes, kept, classes, is_protected: one per packet; kept packets are in class 0 whatever their magnitude.
   borders: a row of 7 per layer, indexed by layers[...].row; NaN before a layer was seen.
   scratch: twice `scratch_half` keys, which is the packet count of the largest layer. */
void dlcp_classify(const float *magnitudes, const uint8_t *kept, const layer_packets *layers, int64_t count,
                   double memory, double *borders, uint32_t *scratch, int64_t scratch_half, uint8_t *classes,
                   uint8_t *is_protected) {
    for (const layer_packets *layer = layers; layer < layers + count; layer++) {
        double *row = borders + layer->row * BORDERS;
        move_borders(magnitudes, kept, layer, memory, row, scratch, scratch + scratch_half);
        int64_t first = layer->first, packets = layer->stop - first;
        if (isnan(row[0])) {
            memset(classes + first, 0, (size_t)packets);
        } else {
            float thresholds[BORDERS];
            int zeros = 0;
            for (int border = 0; border < BORDERS; border++) {
                thresholds[border] = threshold(row[border]);
                zeros += layer->quantiles[border] == 0;
            }
            classes_between(magnitudes + first, packets, thresholds, (uint8_t)(DROP_CLASSES - 1 - zeros),
                            classes + first);
        }
        for (int64_t i = first; i < layer->stop; i++) {
            classes[i] = kept[i] ? 0 : classes[i];
            is_protected[i] = classes[i] == 0;
        }
    }
}

/* ---- encoding of tags in packets ---- */

/* Writes bytes 1 to 3 of each packet's header, and its type of service from `service`, by its queue and by whether it
   may be dropped: its class is high enough, it is not protected, and `bounded` allows for loss. */
void dlcp_encode_tags(const uint8_t *queue, const uint8_t *drop_class, const uint8_t *layer,
                      const uint8_t *is_protected, uint32_t packets, bool bounded, const uint8_t *service,
                      uint8_t *encoded, uint8_t *droppable) {
    for (uint32_t i = 0; i < packets; i++, encoded += 4) {
        uint8_t dropped = bounded && !is_protected[i] && drop_class[i];
        encoded[0] = is_protected[i] ? PROTECTED : 0;
        encoded[1] = (uint8_t)(queue[i] << 5 | (dropped ? drop_class[i] << 2 : 0));
        encoded[2] = layer[i];
        encoded[3] = service[(queue[i] & 7) * 2 + dropped];
        droppable[i] = dropped;
    }
}

/* ---- sending order ---- */

/* One queue's part of the order under construction. */
struct queue_order {
    uint32_t *order;          /* destination of its packets */
    uint32_t packets, blocks; /* their number */
    uint32_t start;           /* the block sent first */
    uint32_t seen;            /* packets visited so far */
    uint32_t *next;           /* destination of the next packet that is not droppable */
    uint32_t waiting;         /* droppable ones of this block, which come after them */
    uint32_t droppable[SEND_BLOCK_PACKETS];
};

/* Destination of a block: those before `start` follow the last one, which may be short. */
static uint32_t *place_of_block(const struct queue_order *queue, uint32_t block) {
    if (block >= queue->start)
        return queue->order + (size_t)(block - queue->start) * SEND_BLOCK_PACKETS;
    return queue->order + (queue->packets - (size_t)queue->start * SEND_BLOCK_PACKETS) +
           (size_t)block * SEND_BLOCK_PACKETS;
}

/* Writes packet indices in sending order. Queues run from 7 to 0. Within a queue, blocks of 256 packets start at block
 * `seed` modulo the number of blocks, plus `chunk`/`chunks` of that number. Within a block, droppable packets come
 * last. */
void dlcp_send_order(const uint8_t *queue, const uint8_t *droppable, uint32_t packets, uint32_t seed, uint32_t chunk,
                     uint32_t chunks, uint32_t *order) {
    struct queue_order queues[QUEUES] = {0};
    for (uint32_t i = 0; i < packets; i++)
        queues[queue[i] & (QUEUES - 1)].packets++;
    for (int number = QUEUES - 1; number >= 0; number--) {
        struct queue_order *mine = &queues[number];
        mine->order = order;
        mine->blocks = mine->packets / SEND_BLOCK_PACKETS + (mine->packets % SEND_BLOCK_PACKETS != 0);
        if (mine->blocks)
            mine->start = (uint32_t)((seed % mine->blocks + (uint64_t)mine->blocks * chunk / chunks) % mine->blocks);
        order += mine->packets;
    }
    for (uint32_t i = 0; i < packets; i++) {
        struct queue_order *mine = &queues[queue[i] & (QUEUES - 1)];
        if (mine->seen % SEND_BLOCK_PACKETS == 0)
            mine->next = place_of_block(mine, mine->seen / SEND_BLOCK_PACKETS);
        if (droppable[i])
            mine->droppable[mine->waiting++] = i;
        else
            *mine->next++ = i;
        mine->seen++;
        if (mine->seen % SEND_BLOCK_PACKETS == 0 || mine->seen == mine->packets) {
            memcpy(mine->next, mine->droppable, mine->waiting * sizeof i);
            mine->waiting = 0;
        }
    }
}
