/* SPDX-License-Identifier: Apache-2.0 */
/* An engine as a whole. Only its loop (engine.c) and arrivals.c see all of it and call from one part into another. */
#pragma once

#include <stdatomic.h>

#include "rx.h"

/* Datagrams received in one call, and memory for each: not a power of two, or small ones would all fall on the same
 * cache lines. */
enum { RECEIVE_BUFFERS = 32, RECEIVE_BUFFER_BYTES = DATAGRAM_MAX + 1600 };

struct engine {
    io io;
    receiver rx;
    flow *flows; /* by peer */
    int64_t peers;
    int64_t *flow_of_rank;
    int wake, bell;
    atomic_bool woken; /* by another thread, to make dlcp_turn return */
    uint32_t *asleep;  /* shows peers on this host that this engine waits for its bell; NULL: no such peers */
    int64_t shared;    /* flows whose packets come through a ring */
    int64_t singles;   /* consecutive data datagrams that arrived alone */
    uint8_t *buffers;  /* for receiving */
    double inbound_since_s, inbound_last_s; /* the stretch of arrivals being measured */
    int64_t inbound_count;                  /* packets in it, except the first */
};

int64_t receive_packets(engine *self);
