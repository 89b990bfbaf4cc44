/* SPDX-License-Identifier: Apache-2.0 */
/* The receiving side: messages, and the state kept of complete ones. */
#pragma once

#include <stdlib.h>

#include "tx.h"

struct rx_message {
    msg_id id;
    flow *from;
    int64_t packets, arrived, arrived_protected;
    int64_t protected_packets; /* -1: unknown so far */
    int64_t required;          /* packets that meet the bound; -1: no receive is posted */
    bool immediate, asked;
    int64_t last_bytes;
    bool active;       /* it accepts packets: it is in the table */
    bool complete;     /* its bound is met */
    uint64_t *bits;    /* packets that have arrived, as in `event` */
    uint64_t *trimmed; /* packets whose payload a switch has cut off; NULL if there was none */
    int64_t trimmed_packets, trimmed_protected;
    uint8_t *layer; /* from each packet's header */
    uint8_t *buffer, *tail;
    int64_t bytes, tail_bytes;
    int64_t early_bytes; /* nonzero: the engine owns `buffer` */
    reduction *reduction;
    int64_t position;
    rx_message *older, *newer; /* of the active ones */
};

typedef enum {
    TIME_WAIT_STOPPING, /* packets are missing: STOP is repeated until STOP_ACK */
    TIME_WAIT_WHOLE,    /* an acknowledgement has notified the sender; if it was lost, the sender probes */
    TIME_WAIT_KNOWN,    /* the sender knows */
} rx_time_wait_state;

/* State kept of a complete message, since more of its packets may arrive. */
typedef struct rx_time_wait rx_time_wait;
struct rx_time_wait {
    msg_id id;
    flow *from;
    rx_time_wait_state state;
    bool asked; /* its sender had sent everything: packets that arrive for the first time are late */
    int64_t packets;
    double completed_s;
    uint8_t *unconfirmed; /* by part of the bitmap; one part without a bitmap, which follows in the same memory */
    uint8_t *bitmap;      /* as on the wire, most significant bit first; NULL: every packet arrived */
    int64_t parts, unconfirmed_count;
    double due_s, give_up_s, repeat_s;
    rx_time_wait *earlier_stopping, *later_stopping; /* those in this state, by when they came into it */
    rx_time_wait *older, *newer;
};

/* Everything received, or expected. */
typedef struct {
    io *io;
    flow *flows;
    table messages; /* the active ones */
    rx_message *oldest_message, *newest_message;
    table time_wait;
    rx_time_wait *oldest, *newest;
    rx_time_wait *first_stopping, *last_stopping;
    double reminded_s; /* when senders of complete messages were last reminded */
    int64_t oldest_step;
    bool closed; /* accepts no more messages */
} receiver;

rx_message *rx_find(const receiver *rx, const flow *from, int64_t step, int64_t message);
int64_t rx_post(receiver *rx, const receive_request *request, double now_s);
void rx_report_unexpected(receiver *rx, double now_s);
void rx_begin_step(receiver *rx, int64_t step, double now_s);
void rx_drop_all(receiver *rx);
void rx_take_data(receiver *rx, flow *from, const uint8_t *header, const uint8_t *payload, int64_t size, int tos,
                  double now_s);
void rx_take_probe(receiver *rx, flow *from, const uint8_t *datagram, int64_t bytes, double now_s);
bool rx_is_out_of_turn(const receiver *rx, const flow *from, const uint8_t *header);

static inline bool rx_is_whole(const rx_message *self) {
    return self->arrived == self->packets;
}

static inline void rx_free(rx_message *self) {
    free(self->bits);
    free(self->trimmed);
    free(self->layer);
    free(self);
}
