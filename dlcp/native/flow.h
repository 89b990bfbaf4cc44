/* SPDX-License-Identifier: Apache-2.0 */
/* The state of the flow to and from a peer, how long it takes, and its paths. */
#pragma once

#include <stddef.h>
#include <string.h>

#include <netinet/in.h>
#include <sys/socket.h>

#include "packet.h"
#include "pieces.h"
#include "ring.h"
#include "table.h"
#include "tunables.h"

enum { ACK_RECENT = 8 };

/* An address of a UDP socket, IPv4 or IPv6. */
typedef struct {
    struct sockaddr_storage any;
    socklen_t bytes;
} socket_address;

/* Both families begin with the family and the port. What follows is the host, and otherwise zero. */
enum { PORT_AT = offsetof(struct sockaddr_in, sin_port), HOST_AT = PORT_AT + sizeof(in_port_t) };
_Static_assert(offsetof(struct sockaddr_in6, sin6_port) == PORT_AT, "families differ in where the port is");

static inline socket_address socket_address_of(const uint8_t *address, int64_t bytes) {
    socket_address one = {.bytes = (socklen_t)bytes};
    assert(bytes > HOST_AT && (size_t)bytes <= sizeof one.any);
    memcpy(&one.any, address, (size_t)bytes);
    return one;
}

static inline in_port_t port_of(const socket_address *one) {
    in_port_t port; /* in network byte order */
    memcpy(&port, (const uint8_t *)&one->any + PORT_AT, sizeof port);
    return port;
}

static inline bool same_host(const socket_address *one, const socket_address *other) {
    return one->bytes == other->bytes && one->any.ss_family == other->any.ss_family &&
           !memcmp((const uint8_t *)&one->any + HOST_AT, (const uint8_t *)&other->any + HOST_AT, one->bytes - HOST_AT);
}

typedef struct tx_message tx_message;
typedef struct rx_message rx_message;

/* Packets that were sent together into one queue. */
typedef struct {
    double sent_s;
    tx_message *message; /* NULL once it is gone */
    uint32_t first;      /* in the message's order; the packet itself if `packets` is 0 */
    uint32_t packets;
} sent_burst;

typedef struct {
    sent_burst *bursts;
    int64_t first, count, capacity;
} burst_queue;

/* Send time of the newest packet that has arrived, and when that became known. */
typedef struct {
    double sent_s, known_s;
} newest;

/* One path to a peer: what is in flight on it, and how good it is. */
typedef struct {
    int64_t flying, sent;
    double weight;  /* 1: as good as the best; 0: abandoned */
    double again_s; /* until this time */
    double patience_s;
    bool on_trial;               /* just tried again */
    double delay_s, loss, marks; /* smoothed: round trip (0: unknown), shares of packets */
    int64_t samples;             /* round trips since the last report */
    double least_s, one_way_s;   /* minimum RTT of these and minimum one-way delay, less `clocks_us` */
    int64_t judged, lost, marked;
    newest newest[QUEUES];        /* of the arrived packets */
    newest newest_before[QUEUES]; /* of those before the last feedback */
    double sampled_s;
    int64_t lost_in_row;     /* packets lost since one arrived */
    double last_delivered_s; /* when the last arrival became known */
    burst_queue sent_bursts[QUEUES];
    uint32_t marked_seen;
} path;

/* A block of packets to be acknowledged. */
typedef struct {
    rx_message *message; /* NULL once it is gone */
    int64_t block;
} ack_block;

typedef struct {
    flow_view view;
    int64_t peer, rank;
    socket_address address;
    neighbour local;            /* if the peer is on this host */
    uint8_t service[QUEUES][2]; /* by queue and by whether a packet may be dropped */
    /* Messages to the peer. */
    table messages;
    tx_message *oldest, *latest; /* of all */
    int64_t messages_made;
    tx_message *most_urgent; /* of those with unsent packets */
    double look_s;           /* no message needs a probe before this time */
    /* Time. */
    int64_t clocks_us;                       /* clock offset plus the first packet's delay; negative: unknown */
    double rtt_min_s;                        /* minimum round trip so far; 0: unknown */
    double response_s, response_variation_s; /* round trip including our processing, and its deviation */
    double answered_s; /* the longest that the peer took to answer a probe; used until a round trip is known */
    /* In flight. */
    int64_t delivered, marked, lost;
    bool limited;                    /* these are since the last report */
    double reported_s, report_due_s; /* infinity if there is nothing to report */
    double disorder, sent_last_s;
    double backoff;        /* factor on the delay until packets count as lost: above 1 if retransmissions are lost */
    double stamped_s;      /* the last send time given to a packet: these increase strictly */
    int64_t lossy_packets; /* losses are expected for this many more packets */
    double paced_s;        /* when the pace admits packets again */
    bool pacing_blocked;   /* packets wait for the pace */
    double newest_delivered_s[QUEUES]; /* on any path */
    uint16_t late_seen;                /* packets that were late, not lost */
    double widened_s;                  /* when the reordering window last grew because of them */
    double full_s;                     /* when a full packet last arrived, or the first message began */
    double narrow_s;                   /* when EVENT_NARROW was last reported */
    uint32_t marked_seen;
    /* Paths. */
    path *paths;
    int64_t path_count, path_last;
    double stalled_due_s;                 /* when to look next for paths on which nothing arrives */
    double overtaken_due_s;               /* when overtaken packets count as lost */
    uint64_t overtaken_paths;             /* bits: paths with such packets */
    uint64_t fresh_paths;                 /* bits: paths with new feedback */
    int64_t excused_lost, excused_marked; /* on abandoned paths or on trial: they do not affect the window */
    /* Packets from the peer. */
    uint32_t marked_received;
    uint16_t late_received;     /* late, not lost: duplicates, or arrived after they were given up */
    in_port_t ports[PATHS_MAX]; /* its other source ports, in network byte order */
    int64_t port_count, port_last;
    uint32_t path_marked[PATHS_MAX];
    uint64_t marked_paths; /* bits: paths with marks that were not reported yet */
    assembler pieces;
    ack_block *fresh, recent[ACK_RECENT];
    int64_t fresh_count, fresh_capacity, fresh_packets, recent_count;
    double ack_due_s, acknowledged_s, data_last_s;
} flow;

void flow_sample_rtt(flow *self, double rtt_s, double response_s);
double flow_one_way_s(flow *self, uint32_t arrived_us, double sent_s);
double flow_reordering_s(const flow *self);
double flow_lateness_s(const flow *self);
double flow_probe_timeout_s(const flow *self);
double flow_stalled_s(const flow *self);

static inline int64_t microseconds(double seconds) {
    return (int64_t)(seconds * 1e6);
}
