/* SPDX-License-Identifier: Apache-2.0 */
/* Averages over ranks, computed in place in a fixed order as packets arrive. */
#pragma once

#include "rx.h"

struct reduction {
    float *values; /* own contribution, then the sum, then the average */
    float *copy;   /* for complete averages; NULL: none */
    int64_t count; /* values */
    int64_t packets, per_packet;
    int64_t members; /* number of other contributors */
    uint16_t *added; /* how many of them are in the sum, per packet; of encoded ones, how many are complete */
    int64_t blocks, first_block; /* of packets, in sending order; negative: no chunks */
    rx_message **from;           /* by position; the reduction frees them unless they are still active */
    float divisor;
    plane_layout layout; /* of encoded contributions, which all wait in their messages' buffers; otherwise 0 */
    plane_sum sum;
    const uint8_t **codes;   /* by position: a packet of each contribution; used only while it is added */
    uint64_t *lower_missing; /* bits, by position, likewise */
};

bool reduction_is_in_turn(const reduction *self, int64_t position, int64_t index);
void reduction_add(reduction *self, int64_t position, int64_t index, const uint8_t *payload);
void reduction_note_encoded(reduction *self, const rx_message *member, int64_t index);

static inline bool reduction_is_encoded(const reduction *self) {
    return self->layout.values != 0;
}
