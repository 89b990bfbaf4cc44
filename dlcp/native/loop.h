/* SPDX-License-Identifier: Apache-2.0 */
/* An engine as a whole. Only its loop, engine.c, sees all of it and calls across. */
#pragma once

#include "rx.h"

struct engine {
    io io;
    receiver rx;
    flow *flows; /* by peer */
    int64_t peers;
    int64_t *flow_of_rank;
    int wake, bell;
    uint32_t *asleep; /* tells peers on this host that this engine waits for its bell; NULL: no such peers */
    int64_t shared;   /* flows whose packets come through a ring */
    int64_t singles;  /* consecutive data datagrams that arrived alone */
    uint8_t *buffers; /* for receiving */
    double inbound_since_s, inbound_last_s; /* the stretch of arrivals being measured */
    int64_t inbound_count;                  /* packets in it, except the first */
};
