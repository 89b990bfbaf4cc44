/* SPDX-License-Identifier: Apache-2.0 */
/* The receiving side: messages (rx.c), averages of them (reduction.c), what is kept of complete ones (time_wait.c), and
 * acknowledgements (ack.c, for both sides). */
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
    bool active;    /* it accepts packets: it is in the table */
    bool complete;  /* its bound is met */
    uint64_t *bits; /* packets that have arrived, as in `event` */
    uint8_t *layer; /* from each packet's header */
    uint8_t *buffer, *tail;
    int64_t bytes, tail_bytes;
    int64_t early_bytes; /* nonzero: the engine owns `buffer` */
    reduction *reduction;
    int64_t position;
};

/* An average over ranks, computed in place in a fixed order as packets arrive. */
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
    const uint8_t **codes;   /* by position: where a packet of each is; in use only while it is added */
    uint64_t *lower_missing; /* bits, by position, likewise */
};

typedef enum {
    TIME_WAIT_STOPPING, /* packets are missing: STOP is repeated until STOP_ACK */
    TIME_WAIT_WHOLE,    /* an acknowledgement told the sender, which probes if that was lost */
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
    table messages;
    table time_wait;
    rx_time_wait *oldest, *newest;
    rx_time_wait *first_stopping, *last_stopping;
    double reminded_s; /* when senders of complete messages were last reminded */
    int64_t oldest_step;
    bool closed; /* accepts no more messages */
} receiver;

/* ack.c */
void ack_note_arrival(const io *io, flow *self, rx_message *message, int64_t index, int tos, double now_s);
void ack_forget(flow *self, const rx_message *message);
void ack_send(io *io, flow *self, double now_s);
void ack_send_whole(io *io, flow *self, rx_message *message, double now_s);
double ack_due(io *io, flow *flows, double now_s);
void ack_take(io *io, flow *self, const uint8_t *datagram, int64_t bytes, double now_s);
/* time_wait.c */
rx_time_wait *time_wait_find(const receiver *rx, const flow *from, int64_t step, int64_t message);
rx_time_wait *time_wait_add(receiver *rx, const rx_message *message, double now_s);
void time_wait_free(receiver *rx, rx_time_wait *self);
int time_wait_begin_stop(receiver *rx, rx_time_wait *self, const uint64_t *bits, double now_s, double give_up_s);
void time_wait_stop(const receiver *rx, rx_time_wait *self, double now_s);
void time_wait_tell_whole(const receiver *rx, const rx_time_wait *self);
double time_wait_repeat(receiver *rx, double now_s);
void time_wait_forget(receiver *rx, const flow *from, int64_t step, int64_t message);
void time_wait_forget_steps(receiver *rx, int64_t step, double now_s);
void time_wait_remind(receiver *rx, double now_s);
void time_wait_take_ack(receiver *rx, const flow *from, const uint8_t *datagram);
/* reduction.c */
bool reduction_is_in_turn(const reduction *self, int64_t position, int64_t index);
void reduction_add(reduction *self, int64_t position, int64_t index, const uint8_t *payload);
void reduction_note_encoded(reduction *self, const rx_message *member, int64_t index);
/* rx.c */
rx_message *rx_find(const receiver *rx, const flow *from, int64_t step, int64_t message);
int64_t rx_post(receiver *rx, const receive_request *request, double now_s);
void rx_report_unexpected(receiver *rx, double now_s);
void rx_begin_step(receiver *rx, int64_t step, double now_s);
void rx_drop_all(receiver *rx);
void rx_take_data(receiver *rx, flow *from, const uint8_t *header, const uint8_t *payload, int64_t size, int tos,
                  double now_s);
void rx_take_probe(receiver *rx, flow *from, const uint8_t *datagram, int64_t bytes, double now_s);
bool rx_is_out_of_turn(const receiver *rx, const flow *from, const uint8_t *header);

static inline bool reduction_is_encoded(const reduction *self) {
    return self->layout.values != 0;
}

static inline bool rx_is_whole(const rx_message *self) {
    return self->arrived == self->packets;
}

static inline void rx_free(rx_message *self) {
    free(self->bits);
    free(self->layer);
    free(self);
}
