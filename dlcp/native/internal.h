/* SPDX-License-Identifier: Apache-2.0 */
/* The transport's engine: messages, their packets, and how these reach a peer.
 *
 *   engine.c     one engine per rank: its API for Python, its events, sockets, and the main loop
 *   outgoing.c   a sent message, until its receiver has acknowledged it
 *   incoming.c   a received message, and its state once it is complete
 *   flow.c       everything in flight to one peer: window, round-trip time, losses, acknowledgements
 *   path.c       the paths to a peer, and how good they are
 *   reduction.c  an average that is computed as packets arrive
 *   ring.c       packets through shared memory, between ranks of one host
 *   tags.c       the encoding of tags in packets, and the sending order
 *
 * The packet header's layout is that of dlcp/wire/header.py; a test compares the two. */
#ifndef DLCP_INTERNAL_H
#define DLCP_INTERNAL_H

#include <assert.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "engine.h"
#include "tunables.h"

enum { HEADER_BYTES = 32, QUEUES = 8, DATAGRAM_MAX = 65536 };
enum { ORDINARY_QUEUE = 1 };
enum { ACK_BLOCK_PACKETS = 64, ACK_ENTRY_BYTES = 18, ACK_RECENT = 8 };
enum { ACK_PATH = 0x7FFFFFFF };
enum { SEGMENTS_MAX = 64, STEPS_AHEAD_MAX = 1 << 16 };
enum { VERSION = 1 };
enum packet_type { DATA = 1, ACK, PROBE, BITMAP, STOP, STOP_ACK, HELLO, HELLO_ACK, ABORT };
enum { PROTECTED = 0x80, RETRANSMISSION = 0x40 };
/* Payload of a PROBE: whether its sender has more to send (1: do not complete without it yet), and in the next four
 * bytes how many packets it defers and will not send. Trailing zeros are omitted. */
enum { QUESTION_BYTES = 5 };
/* In the block of an acknowledgement's entry: the message is complete with every packet, so no probe is needed. */
#define ACK_WHOLE 0x80000000u

static_assert(PATHS_MAX <= 64, "sets of paths are the bits of a uint64_t");
static_assert(PATHS_MAX <= UINT8_MAX, "a packet's path is kept in a byte");
static_assert(ACK_BLOCK_PACKETS == 64, "an acknowledgement's entry has a bit for each packet of its block");
static_assert(MESSAGE_PACKETS_MAX <= ACK_WHOLE, "the number of a block leaves room for ACK_WHOLE");
static_assert(SEGMENTS_MAX <= 64, "the kernel takes no more datagrams at once (UDP_MAX_SEGMENTS)");

typedef struct flow flow;
typedef struct incoming incoming;
typedef struct outgoing outgoing;

/* An average over ranks, computed in place in a fixed order as packets arrive. */
struct reduction {
    float *values; /* own contribution, then the sum, then the average */
    float *copy;   /* for complete averages; NULL: none */
    int64_t count; /* values */
    int64_t packets, per_packet;
    int64_t members;             /* number of other contributors */
    uint16_t *added;             /* how many of them are in the sum, per packet */
    int64_t blocks, first_block; /* of packets, in sending order; negative: no chunks */
    incoming **from;             /* by position; the reduction frees them unless they are still active */
    float divisor;
};

/* Identity of a message; the first member of every table entry. */
typedef struct known known;
struct known {
    int64_t peer, step, message;
    known *next; /* in its hash chain */
};

typedef struct {
    known **chains;
    int64_t count, capacity;
} table;

struct incoming {
    known name;
    int64_t packets, arrived, arrived_protected;
    int64_t protected_packets; /* -1: unknown so far */
    int64_t required;          /* packets that meet the bound; -1: no receive is posted */
    int64_t deferred;          /* packets that will not be sent, as announced so far */
    int64_t deferrable;        /* packets that may be deferred */
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

typedef enum {
    FINISHED_STOPPING, /* packets are missing: STOP is repeated until STOP_ACK */
    FINISHED_WHOLE,    /* an acknowledgement told the sender, which probes if that was lost */
    FINISHED_KNOWN,    /* the sender knows */
} finished_state;

/* State kept of a complete message, since more of its packets may arrive. */
typedef struct finished finished;
struct finished {
    known name;
    finished_state state;
    bool asked; /* its sender had sent everything: packets that arrive for the first time are late */
    int64_t packets;
    double completed_s;
    uint8_t *bitmap;      /* as on the wire, most significant bit first; NULL: every packet arrived */
    uint8_t *unconfirmed; /* by part of the bitmap; one part without a bitmap */
    int64_t parts, unconfirmed_count;
    double due_s, give_up_s, repeat_s;
    finished *next_stopping, *older, *newer;
};

typedef enum { UNSENT, FLYING, DELIVERED, ABANDONED, RETRANSMIT } packet_state;

/* When a probe was sent, and the latest send time of the packets that it asks about. */
enum { QUESTIONS = 8 };
typedef struct {
    double asked_s, until_s;
} asked;

struct outgoing {
    int64_t peer, step, message;
    int64_t packets, flying, sent, resent, delivered;
    int64_t to_send;    /* all but the deferred ones */
    int64_t unsent;     /* packets that wait for transmission or retransmission */
    double active_s;    /* when a packet was last sent or found delivered */
    double last_sent_s; /* when a packet was last sent */
    int last_queue;     /* and in which queue */
    const uint8_t *payload, *tail;
    int64_t bytes, tail_bytes;
    uint8_t head[HEADER_BYTES]; /* common part of all headers */
    uint8_t (*tags)[4];         /* per packet: bytes 1 to 3 of its header, and its type of service */
    uint32_t *order;            /* of the packets to send */
    int64_t next;               /* in `order` */
    uint8_t *state;             /* packet_state */
    double *sent_s;
    uint8_t *path;        /* where it was sent last */
    uint64_t *acked;      /* bits, as in `event` */
    uint32_t *retransmit; /* ring of packets, each at most once; delivered ones are skipped */
    int64_t retransmit_first, retransmit_count;
    uint32_t *abandoned_next; /* lists by drop class of packets that may stay lost */
    uint32_t abandoned_first[DROP_CLASSES];
    int64_t abandoned, allowed;
    /* Probes to the receiver. */
    int64_t protected_packets;
    bool immediate;
    asked asked[QUESTIONS]; /* the latest probes, by number, which answers repeat */
    int64_t questions;      /* probes so far */
    double probed_s;        /* when the last one was sent */
    int64_t probes_unanswered, probes_without_news, delivered_seen;
    uint64_t *confirmed; /* contents of the STOP's parts */
    int64_t confirmed_packets;
    outgoing *next_whole; /* list of the messages that the current acknowledgement reports complete */
    bool whole;
};

/* Packets that were sent together into one queue. */
typedef struct {
    double sent_s;
    outgoing *message; /* NULL once it is gone */
    uint32_t first;    /* in the message's order; the packet itself if `packets` is 0 */
    uint32_t packets;
} run;

typedef struct {
    run *runs;
    int64_t first, count, capacity;
} run_queue;

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
    run_queue runs[QUEUES];
    uint32_t marked_seen;
} path;

/* A block of packets to be acknowledged. */
typedef struct {
    incoming *message; /* NULL once it is gone */
    int64_t block;
} ack_block;

/* Positions of a ring's two sides, in bytes since its beginning; in shared memory. */
typedef struct {
    _Alignas(64) uint64_t written;
    _Alignas(64) uint64_t taken;
    _Alignas(64) uint32_t starving; /* the writer waits for room */
} ring_marks;

/* One side's view of a ring. */
typedef struct {
    ring_marks *marks;
    uint8_t *bytes; /* NULL: none */
    uint64_t capacity;
    uint64_t mine;   /* this side's position */
    uint64_t theirs; /* the other side's, as far as known */
    bool starving;   /* this side waits for room */
} ring;

struct flow {
    flow_view view;
    int64_t peer, rank;
    struct sockaddr_in address;
    uint8_t service[QUEUES][2];               /* by queue and by whether a packet may be dropped */
    int64_t delivered, marked, lost, limited; /* since the last report */
    int64_t clocks_us;                        /* clock offset plus the first packet's delay; negative: unknown */
    double reported_s, report_due_s;          /* infinity if there is nothing to report */
    double disorder, sent_last_s;
    double backoff;   /* factor on the delay until packets count as lost: above 1 if retransmissions are lost */
    double stamped_s; /* the last send time given to a packet: these increase strictly */
    double rtt_min_s; /* minimum round trip so far; 0: unknown */
    double response_s, response_variation_s; /* round trip including our processing, and its deviation */
    int64_t lossy_packets;                   /* losses are expected for this many more packets */
    double answered_s; /* the longest that the peer took to answer a probe; used until a round trip is known */
    double paced_s;    /* when the pace admits packets again */
    bool held;         /* packets wait for the pace */
    double newest_delivered_s[QUEUES]; /* on any path */
    path *paths;
    int64_t path_count, path_last;
    double stalled_due_s;                 /* when to look next for paths on which nothing arrives */
    double overtaken_due_s;               /* when overtaken packets count as lost */
    uint64_t overtaken_paths;             /* bits: paths with such packets */
    uint64_t fresh_paths;                 /* bits: paths with new feedback */
    int64_t excused_lost, excused_marked; /* on abandoned paths or on trial: they do not affect the window */
    outgoing **messages;
    int64_t message_count, message_capacity;
    double look_s; /* no message needs a probe before this time */
    uint32_t marked_seen;
    uint16_t late_seen; /* packets that were late, not lost */
    double widened_s;   /* when the reordering window last grew because of them */
    /* receiving */
    uint32_t marked_received;
    uint16_t late_received;     /* late, not lost: duplicates, or arrived after they were given up */
    in_port_t ports[PATHS_MAX]; /* its other source ports, in network byte order */
    int64_t port_count, port_last;
    uint32_t path_marked[PATHS_MAX];
    uint64_t marked_paths; /* bits: paths with marks that were not reported yet */
    ack_block *fresh, recent[ACK_RECENT];
    int64_t fresh_count, fresh_capacity, fresh_packets, recent_count;
    double ack_due_s, acknowledged_s, data_last_s;
    /* to and from a peer on this host */
    ring out, in;
    const uint8_t *imported; /* the peer's exported memory */
    int64_t imported_bytes;
    uint32_t *peer_asleep;
    int peer_bell;
};

/* Reusable memory for early messages: fresh memory costs as much as processing them. */
enum { EARLY_CACHED = 64 };
typedef struct {
    uint8_t *memory;
    int64_t capacity;
} early_buffer;

struct engine {
    engine_view view;
    event *events;
    int64_t oldest_step;
    int last_errno;
    config config;
    double inbound_since_s, inbound_last_s; /* the stretch being measured */
    int64_t inbound_count;                  /* packets in it, except the first */
    int64_t event_capacity;
    void **garbage; /* memory that events may point at, until the next call that moves packets */
    int64_t garbage_count, garbage_capacity;
    int64_t *flow_of_rank;
    flow *flows;
    table incoming, finished;
    finished *stopping; /* by begin time */
    finished *oldest_finished, *newest_finished;
    early_buffer early[EARLY_CACHED];
    double reminded_s; /* when senders of complete messages were last reminded */
    bool closed;       /* accepts no more messages */
    int socket, wake, bell;
    int sockets[PATHS_MAX]; /* by path; all but the first only send */
    int64_t socket_count;
    uint32_t *asleep;        /* tells peers on this host that this engine waits for its bell; NULL: no such peers */
    int64_t shared;          /* flows whose packets come through a ring */
    const uint8_t *exported; /* peers on this host read messages sent from here in place */
    int64_t exported_bytes;
    double arrived_s;  /* when the kernel received the current datagram */
    int64_t singles;   /* consecutive data datagrams that arrived alone */
    uint8_t *buffers;  /* for receiving */
    uint8_t *datagram; /* for a datagram sent at once: HEADER_BYTES + DATAGRAM_MAX */
};

/* engine.c */
double clock_s(void);
event *engine_event(engine *self, event_kind kind, int64_t peer, double now_s);
void engine_discard(engine *self, void *memory);
void engine_take(engine *self, flow *from, const uint8_t *datagram, int64_t bytes, int tos, double now_s);
bool engine_refuses(engine *self, const flow *from, const uint8_t *datagram, int64_t bytes);
int engine_send_burst(engine *self, flow *to, outgoing *message, const uint32_t *packets, int64_t count,
                      uint8_t (*headers)[HEADER_BYTES], int64_t way);
int engine_send_datagram(engine *self, flow *to, const uint8_t *datagram, int64_t bytes, int tos, int64_t way);
void engine_send_control(engine *self, flow *to, enum packet_type type, const known *name, int64_t index, int64_t count,
                         const uint8_t *payload, int64_t bytes);
void engine_write_header(const engine *self, uint8_t *header, enum packet_type type, int64_t step, int64_t message,
                         int64_t index, int64_t count);
int64_t engine_bitmap_packets(const engine *self);
/* outgoing.c */
outgoing *outgoing_find(flow *to, int64_t step, int64_t message);
void outgoing_free(flow *to, outgoing *self);
double outgoing_delivered(flow *to, outgoing *self, uint32_t index, double now_s);
int64_t outgoing_all_delivered(flow *to, outgoing *self, double now_s);
void outgoing_lost(flow *to, outgoing *self, uint32_t index);
uint32_t outgoing_next_packet(outgoing *self);
int64_t outgoing_gather(const engine *owner, outgoing *self, int64_t limit, uint32_t *packets);
int outgoing_pieces(const engine *owner, const outgoing *self, uint32_t index, struct iovec *pieces);
void outgoing_complete(engine *owner, flow *to, outgoing *self, const uint64_t *bits, double now_s);
double outgoing_ask(engine *owner, flow *to, double now_s);
void outgoing_expect(flow *to, const outgoing *self);
void outgoing_take_bitmap(engine *owner, flow *to, const uint8_t *datagram, int64_t bytes, double now_s);
/* incoming.c */
int table_make(table *self);
known *table_find(const table *self, int64_t peer, int64_t step, int64_t message);
incoming *incoming_find(const engine *owner, int64_t peer, int64_t step, int64_t message);
bool incoming_is_whole(const incoming *self);
void incoming_take_data(engine *owner, flow *from, const uint8_t *header, const uint8_t *payload, int64_t size, int tos,
                        double now_s);
void incoming_take_probe(engine *owner, flow *from, const uint8_t *datagram, int64_t bytes, double now_s);
void incoming_take_stop_ack(engine *owner, flow *from, const uint8_t *datagram);
void incoming_free(incoming *self);
void incoming_drop_all(engine *owner);
double finished_repeat(engine *owner, double now_s);
void stream(uint8_t *into, const uint8_t *from, int64_t bytes);
/* flow.c */
int64_t flow_pump(engine *owner, flow *self, double now_s);
void flow_feed_back(flow *self, int64_t delivered, int64_t marked, int64_t lost, double now_s);
double flow_resumes_s(const flow *self, double now_s);
double flow_reordering_s(const flow *self);
double flow_stalled_s(const flow *self);
double flow_lateness_s(const flow *self);
double flow_probe_timeout_s(const flow *self);
double flow_find_overtaken(flow *self, double now_s);
double flow_report(engine *owner, double now_s);
void flow_note_arrival(const engine *owner, flow *self, incoming *message, int64_t index, int tos, double now_s);
void flow_acknowledge(engine *owner, flow *self, double now_s);
void flow_acknowledge_whole(engine *owner, flow *self, incoming *message, double now_s);
double flow_acknowledge_due(engine *owner, double now_s);
void flow_take_acknowledgement(engine *owner, flow *self, const uint8_t *datagram, int64_t bytes, double now_s);
void flow_forget_incoming(flow *self, const incoming *message);
/* path.c */
int path_make(flow *self, int64_t count);
int64_t path_choose(flow *self, int64_t *limit, double now_s);
int64_t path_for_control(const flow *self);
void path_leave(flow *self, path *one, double now_s);
void path_judge_all(flow *self, double now_s);
void path_sample_delay(path *self, double delay_s);
/* reduction.c */
bool reduction_is_in_turn(const reduction *self, int64_t position, int64_t index);
void reduction_add(reduction *self, int64_t position, int64_t index, const uint8_t *payload);
/* ring.c */
int ring_send_datagram(flow *to, const uint8_t *datagram, int64_t bytes);
int ring_send_burst(engine *owner, flow *to, const struct iovec *pieces, int64_t parts);
bool ring_is_exported(const engine *owner, const outgoing *message, const uint32_t *packets, int64_t count);
int ring_send_exported(engine *owner, flow *to, const outgoing *message, int64_t count,
                       uint8_t (*headers)[HEADER_BYTES]);
int64_t ring_receive(engine *owner, flow *from, bool patient);
bool ring_fall_asleep(engine *owner);
void ring_wake_up(engine *owner);

static inline uint16_t get16(const uint8_t *at) {
    return (uint16_t)(at[0] << 8 | at[1]);
}
static inline uint32_t get32(const uint8_t *at) {
    return (uint32_t)get16(at) << 16 | get16(at + 2);
}
static inline uint64_t get64(const uint8_t *at) {
    return (uint64_t)get32(at) << 32 | get32(at + 4);
}
static inline void put16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}
static inline void put32(uint8_t *at, uint32_t value) {
    put16(at, (uint16_t)(value >> 16));
    put16(at + 2, (uint16_t)value);
}
static inline void put64(uint8_t *at, uint64_t value) {
    put32(at, (uint32_t)(value >> 32));
    put32(at + 4, (uint32_t)value);
}
/* Fields of a header. */
static inline int header_type(const uint8_t *header) {
    return header[0] & 15;
}
static inline int64_t header_job(const uint8_t *header) {
    return get16(header + 4);
}
static inline int64_t header_step(const uint8_t *header) {
    return get32(header + 8);
}
static inline int64_t header_message(const uint8_t *header) {
    return get16(header + 12);
}
static inline int64_t header_sender(const uint8_t *header) {
    return get16(header + 14);
}
static inline int64_t header_index(const uint8_t *header) {
    return get32(header + 16);
}
static inline int64_t header_count(const uint8_t *header) {
    return get32(header + 20);
}
static inline uint64_t header_token(const uint8_t *header) {
    return get64(header + 24);
}

static inline bool has_bit(const uint64_t *bits, int64_t i) {
    return bits[i >> 6] >> (i & 63) & 1;
}
static inline void set_bit(uint64_t *bits, int64_t i) {
    bits[i >> 6] |= 1ull << (i & 63);
}
static inline size_t bit_words(int64_t bits) {
    return (size_t)(bits + 63) / 64;
}
static inline double sooner(double one, double other) {
    return one < other ? one : other;
}
static inline int64_t smaller(int64_t one, int64_t other) {
    return one < other ? one : other;
}

#endif
