/* SPDX-License-Identifier: Apache-2.0 */
/* The output of an engine: packets, through sockets or rings, and events for Python. */
#pragma once

#include "flow.h"
#include "memory.h"

typedef struct {
    engine_view view;
    config config;
    event *events;    /* as in `view` */
    event unreported; /* in place of one for which there was no memory */
    int64_t event_capacity;
    void **garbage; /* memory that events may point at, until the next call that moves packets */
    int64_t garbage_count, garbage_capacity;
    pool pool;
    int sockets[PATHS_MAX]; /* by path; all but the first only send; below 0: none, packets become events */
    int64_t socket_count;
    const uint8_t *exported; /* peers on this host read messages sent from here in place */
    int64_t exported_bytes;
    double arrived_s;  /* when the kernel received the current datagram */
    uint8_t *datagram; /* for a datagram sent at once: HEADER_BYTES + DATAGRAM_MAX */
    uint8_t *piece;    /* for a piece of it, of the same size */
} io;

/* Packets of a message that leave together, on one path. */
typedef struct {
    tx_message *message;
    bool again; /* whether they are retransmissions */
    int tos;
    int64_t way, count;
    uint32_t packets[SEGMENTS_MAX];
    uint8_t headers[SEGMENTS_MAX][HEADER_BYTES];
    const uint8_t *exported; /* the message, of `message_bytes`, in memory that the peer reads; NULL: see `pieces` */
    int64_t message_bytes;
    struct iovec pieces[3 * SEGMENTS_MAX]; /* each packet's header, then its payload in one or two pieces */
    int64_t piece_count;
} burst;

double clock_s(void);
bool io_make(io *self, const config *rules);
void io_free(io *self);
event *io_event(io *self, event_kind kind, int64_t peer, double now_s);
event *io_message_event(io *self, event_kind kind, const msg_id *id, int64_t packets, double now_s);
event *io_report_packet(io *self, event_kind kind, const flow *peer, const uint8_t *datagram, int64_t bytes);
void io_discard(io *self, void *memory);
void io_begin_batch(io *self);
int64_t io_bitmap_packets(const io *self);
void io_write_header(const io *self, uint8_t *header, enum packet_type type, int64_t step, int64_t message,
                     int64_t index, int64_t count);
int io_send_datagram(io *self, flow *to, const uint8_t *datagram, int64_t bytes, int tos, int64_t way);
int io_send_burst(io *self, flow *to, burst *sent);
void io_send_control(io *self, flow *to, enum packet_type type, const msg_id *id, int64_t index, int64_t count,
                     const uint8_t *payload, int64_t bytes);
