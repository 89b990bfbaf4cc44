/* SPDX-License-Identifier: Apache-2.0 */
/* The sending side: messages, from dlcp_send until their receivers have acknowledged them. */
#pragma once

#include "io.h"

typedef enum { UNSENT, FLYING, DELIVERED, ABANDONED, RETRANSMIT } packet_state;

/* When a probe was sent, and the latest send time of the packets that it asks about. */
enum { QUESTIONS = 8 };
typedef struct {
    double asked_s, until_s;
} question;

struct tx_message {
    msg_id id;
    int64_t packets, flying, sent, resent, delivered;
    int64_t bursts;     /* of its packets that queues of bursts hold */
    int64_t unsent;     /* packets that wait for transmission or retransmission */
    double active_s;    /* when a packet was last sent or found delivered */
    double last_sent_s; /* when a packet was last sent */
    int last_queue;     /* and in which queue */
    const uint8_t *payload, *tail;
    int64_t bytes, tail_bytes;
    uint8_t head[HEADER_BYTES]; /* common part of all headers */
    double *sent_s;           /* this and the next arrays have an entry for each packet, and are one block of memory */
    uint64_t *acked;          /* bits, as in `event` */
    uint32_t *order;          /* of the packets to send */
    uint32_t *retransmit;     /* ring of packets, each at most once; delivered ones are skipped */
    uint32_t *abandoned_next; /* lists by drop class of packets that may stay lost */
    uint8_t (*tags)[4];       /* bytes 1 to 3 of its header, and its type of service */
    uint8_t *state;           /* packet_state */
    uint8_t *path;            /* where it was sent last */
    int64_t next;             /* in `order` */
    int64_t retransmit_first, retransmit_count;
    uint32_t abandoned_first[DROP_CLASSES];
    int64_t abandoned, allowed;
    /* Probes to the receiver. */
    int64_t protected_packets;
    bool immediate;
    question asked[QUESTIONS]; /* the latest probes, by number, which answers repeat */
    int64_t questions;         /* probes so far */
    double probed_s;           /* when the last one was sent */
    int64_t probes_unanswered, probes_without_progress, delivered_seen;
    int64_t probes_behind; /* probes in the packets' own queue */
    uint64_t *confirmed;   /* contents of the STOP's parts */
    int64_t confirmed_packets;
    tx_message *next_whole; /* list of the messages that the current acknowledgement reports complete */
    bool whole;
    /* Lists of the flow's messages. */
    tx_message *older, *newer;
    int64_t serial;                        /* counts them */
    int urgency;                           /* of the next packet; below 0: none is unsent */
    tx_message *more_urgent, *less_urgent; /* of those with unsent packets */
};

tx_message *tx_find(const flow *to, int64_t step, int64_t message);
tx_message *tx_make(io *io, flow *to, const send_request *request, double now_s);
void tx_free(io *io, flow *to, tx_message *self);
void tx_complete(io *io, flow *to, tx_message *self, const uint64_t *bits, double now_s);
double tx_delivered(flow *to, tx_message *self, uint32_t index, double now_s);
int64_t tx_all_delivered(flow *to, tx_message *self, double now_s);
void tx_lost(flow *to, tx_message *self, uint32_t index);
uint32_t tx_next_packet(tx_message *self);
void tx_gather(const io *io, tx_message *self, int64_t limit, burst *into);
void tx_fill(const io *io, const flow *to, burst *into);
void tx_note_sent(flow *to, const burst *sent, double now_s);
bool tx_wants_probe(const flow *to, const tx_message *self);
