/* SPDX-License-Identifier: Apache-2.0 */
/* The per-packet half of the transport: data and acknowledgements, windows, and what is lost. Everything rarer (probes,
 * bitmaps, stops, greetings, deadlines, rate control) is Python's, which drives this through the functions marked API.
 *
 * The first members of `flow`, `outgoing`, `incoming` and `engine` are read and written by Python, which mirrors them in this
 * order (dlcp/transport/native/mirror.py). The packet header's layout is that of dlcp/wire/header.py; a test compares the two.
 * Times are in seconds on CLOCK_MONOTONIC. Nothing here is thread-safe: one thread drives an engine.
 */
#ifndef DLCP_ENGINE_H
#define DLCP_ENGINE_H

#include <netinet/in.h>
#include <stdint.h>
#include <sys/uio.h>

#define API __attribute__((visibility("default")))

enum { HEADER_BYTES = 32, QUEUES = 8, BLOCK_PACKETS = 64, SEND_BLOCK_PACKETS = 256, ACK_ENTRY_BYTES = 18, SEGMENTS_MAX = 64, RECENT = 4 };
enum { VERSION = 1, DATA = 1, ACK = 2, ABORT = 9 };
enum { PROTECTED = 0x80, RETRANSMISSION = 0x40 };
enum { SOCKET_FULL = -1, RING_FULL = -2 };
#define WHOLE 0x80000000u /* in the block of an acknowledgement's entry: all of the message is taken, nobody need ask */

/* What a packet of an outgoing message is: not sent, on the wire, there, lost and not to be sent again, lost and to be. */
enum { UNSENT, FLYING, DELIVERED, FORGONE, AGAIN };

typedef struct incoming incoming;
typedef struct outgoing outgoing;
typedef struct flow flow;
typedef struct engine engine;

/* A sum over ranks, formed in place in the order of positions while packets arrive. */
typedef struct {
    float *values;    /* own contribution, then the sum, then the average */
    float *copy;      /* of averages that are complete; NULL: not wanted */
    int64_t count;    /* values */
    int64_t packets;
    int64_t members;  /* how many others contribute */
    uint16_t *folded; /* how many of them are in, per packet */
    int64_t blocks, first_block; /* of packets, as they are sent; below 0: no regions */
    incoming **from;  /* by position */
    float divisor;    /* how many ranks contribute */
    int64_t per_packet;
} fold;

struct incoming {
    int64_t packets, arrived, arrived_protected;
    int64_t protected_packets;           /* -1: the sender has not told */
    int64_t required;                    /* packets that meet the bound; -1: nobody waits */
    int64_t immediate, asked, last_bytes; /* last_bytes 0: not known */
    int64_t settled;
    uint64_t *bits;  /* what has arrived; bit k of word w is packet 64 w + k */
    uint8_t *layer;  /* what each packet told */
    /* private */
    int64_t id, peer, step, message;
    uint8_t *buffer;  /* packet i belongs at i * payload_bytes; NULL where every packet is folded at once */
    int64_t bytes;    /* of buffer; what is beyond belongs into tail */
    uint8_t *tail;
    int64_t tail_bytes;
    fold *sum;
    int64_t position;
    incoming *next;  /* in its hash chain */
};

struct outgoing {
    int64_t packets, flying, sent, resent, delivered;
    int64_t unsent;   /* packets that wait to be sent, for the first time or again */
    double active_s;  /* when a packet was last sent or found delivered */
    /* private */
    int64_t id, peer, step, message;
    const uint8_t *payload, *tail;
    int64_t bytes, tail_bytes;
    uint8_t (*tags)[4];      /* per packet: bytes 1 to 3 of its header, and its type of service */
    const uint32_t *order;
    int64_t next;            /* in order */
    uint8_t head[HEADER_BYTES];
    uint8_t *state;
    double *sent_s;
    uint64_t *landed;        /* bits, as of incoming */
    uint32_t *again;         /* ring of packets, each in it once; what was delivered meanwhile is passed over */
    int64_t again_first, again_count;
    uint32_t *forgone_next;  /* lists by drop class of what may stay lost */
    uint32_t forgone_first[8];
    int64_t forgone, allowed;
    int64_t idle_told;       /* Python knows that nothing of it is on the wire or waits */
    int64_t taken;           /* the receiver says that it has all; Python does not know yet */
};

typedef struct {
    double sent_s;
    outgoing *message; /* NULL once it is removed */
    uint32_t first;    /* in the message's order; the packet itself, if packets is 0 */
    uint32_t packets;
} run;

typedef struct {
    run *runs;
    int64_t first, count, capacity;
} run_ring;

typedef struct {
    incoming *message;
    int64_t id, block;
} heard_block;

/* How far the two sides of a ring are, in bytes since its beginning; in memory that both have. */
typedef struct {
    _Alignas(64) uint64_t written;
    _Alignas(64) uint64_t taken;
    _Alignas(64) uint32_t starving; /* the writer waits for room */
} ring_marks;

/* One side's view of a ring (shared.c). */
typedef struct {
    ring_marks *marks;
    uint8_t *bytes;   /* NULL: there is none */
    uint64_t capacity;
    uint64_t mine;    /* how far this side is, */
    uint64_t others;  /* and the other, as far as is known */
    int starving;     /* this side waits for room */
} ring;

struct flow {
    double window;
    int64_t largest_window, flying;
    double smoothed_rtt_s, rtt_variation_s, heard_s;
    int64_t delivered, marked, lost; /* since the last report */
    double rtt_s;                    /* smallest since the last report; 0: none */
    int64_t limited;
    double reported_s, report_due_s; /* infinity if there is nothing to tell */
    int64_t burst; /* most packets in one send */
    int64_t mute;  /* send nothing but control packets */
    int64_t eager; /* a window that holds packets back is to be reported soon */
    /* private */
    int64_t peer, rank;
    struct sockaddr_in address;
    double disorder, sent_last_s;
    double newest_delivered_s[QUEUES];
    run_ring runs[QUEUES];
    outgoing **messages;
    int64_t message_count, message_capacity;
    uint32_t marked_seen;
    /* receiving */
    uint32_t data_received, marked_received;
    heard_block *fresh, recent[RECENT];
    int64_t fresh_count, fresh_capacity, fresh_packets, recent_count;
    double acknowledge_due_s, acknowledged_s, data_last_s;
    /* to and from a peer on this host */
    ring out, in;
    const uint8_t *borrowed; /* memory of the peer's, which it sends from */
    int64_t borrowed_bytes;
    uint32_t *peer_asleep;
    int peer_bell;
};

typedef int (*control_function)(int64_t peer, const uint8_t *datagram, int64_t bytes, double now_s);
typedef incoming *(*unknown_function)(int64_t peer, const uint8_t *datagram, int64_t bytes, double now_s);
typedef void (*settled_function)(incoming *message, double now_s);
typedef void (*taken_function)(int64_t peer, int64_t step, int64_t message, double now_s);
typedef int (*emit_function)(int64_t peer, const uint8_t *datagram, int64_t bytes, int64_t tos);

struct engine {
    int64_t refused_malformed, refused_token, refused_job, refused_sender;
    int64_t data, duplicate, send_errors, last_errno, truncated, acknowledgements, received_bursts, sent_bursts;
    int64_t woken;          /* set by any thread to make dlcp_turn return */
    int64_t offload;        /* 0 once the kernel has refused UDP_SEGMENT */
    /* What these mean stands in dlcp/transport/engine.py, whence they come. */
    double reorder_min_s, disorder_min, disorder_max, disorder_decay, report_min_s, report_calm_s;
    double acknowledge_delay_s, acknowledge_spacing_s, acknowledge_round_trips;
    int64_t acknowledge_every, acknowledge_at_once; /* packets */
    /* private */
    int64_t payload_bytes, rank, job, control_queue, flow_count, rank_count, next_id;
    uint64_t token;
    int64_t *flow_of_rank;
    flow *flows;
    incoming **chains;
    int64_t chain_count, incoming_count;
    int socket, wake, bell;
    uint32_t *asleep;       /* told to peers on this host: this engine waits for its bell; NULL: there are none */
    int64_t shared;         /* flows whose packets come through a ring */
    const uint8_t *lent;    /* what is sent from here, peers on this host read where it is */
    int64_t lent_bytes;
    int64_t singles;        /* how many datagrams of data have come alone, one after the other */
    uint8_t *buffers;       /* for receiving */
    control_function on_control;
    unknown_function on_unknown;
    settled_function on_settled;
    taken_function on_taken;
    emit_function emit;     /* NULL: the socket */
    int attention;          /* something for Python to see */
    uint8_t control_tos;
};

/* incoming.c */
incoming *find_incoming(const engine *e, int64_t peer, int64_t step, int64_t message);
void stream(uint8_t *into, const uint8_t *from, int64_t bytes);
void store_data(engine *e, flow *f, const uint8_t *header, const uint8_t *payload, int64_t size, int tos, double now_s);
/* acknowledge.c */
void note_arrival(const engine *e, flow *f, incoming *m, int64_t index, double now_s);
void acknowledge(engine *e, flow *f, double now_s);
void acknowledge_whole(engine *e, flow *f, incoming *m, double now_s);
double acknowledge_due(engine *e, double now_s);
void take_acknowledgement(engine *e, flow *f, const uint8_t *datagram, int64_t bytes, double now_s);
/* fold.c */
int is_in_turn(const fold *s, int64_t position, int64_t index);
void fold_packet(fold *s, int64_t position, int64_t index, const uint8_t *payload);
/* outgoing.c */
outgoing *find_outgoing(flow *f, int64_t step, int64_t message);
double land(const engine *e, flow *f, outgoing *m, uint32_t index, double now_s);
int64_t land_rest(const engine *e, flow *f, outgoing *m, double now_s);
void lose(flow *f, outgoing *m, uint32_t index);
/* flow.c */
int64_t pump_flow(engine *e, flow *f, double now_s);
void feed_back(engine *e, flow *f, int64_t delivered, int64_t marked, int64_t lost);
void sample_rtt(flow *f, double rtt_s);
double paused_until(const flow *f);
/* shared.c */
int share_control(flow *f, const uint8_t *datagram, int64_t bytes);
int share_burst(engine *e, flow *f, const struct iovec *pieces, int64_t parts);
int is_lent(const engine *e, const outgoing *m, const uint32_t *packets, int64_t count);
int share_lent(engine *e, flow *f, const outgoing *m, int64_t count, uint8_t (*headers)[HEADER_BYTES]);
int64_t receive_shared(engine *e, flow *f, int patient);
int fall_asleep(engine *e);
void wake_up(engine *e);
/* loop.c */
double clock_s(void);
void take_shared(engine *e, flow *f, const uint8_t *datagram, int64_t bytes, double now_s);
void take_borrowed(engine *e, flow *f, const uint8_t *header, const uint8_t *payload, int64_t size, double now_s);
int emit_burst(engine *e, flow *f, outgoing *m, const uint32_t *packets, int64_t count, uint8_t (*headers)[HEADER_BYTES]);
int emit_control(engine *e, flow *f, const uint8_t *datagram, int64_t bytes, int tos);

static inline uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }
static inline uint32_t get32(const uint8_t *p) { return (uint32_t)get16(p) << 16 | get16(p + 2); }
static inline uint64_t get64(const uint8_t *p) { return (uint64_t)get32(p) << 32 | get32(p + 4); }
static inline void put16(uint8_t *p, uint16_t v) { p[0] = (uint8_t)(v >> 8); p[1] = (uint8_t)v; }
static inline void put32(uint8_t *p, uint32_t v) { put16(p, (uint16_t)(v >> 16)); put16(p + 2, (uint16_t)v); }
static inline void put64(uint8_t *p, uint64_t v) { put32(p, (uint32_t)(v >> 32)); put32(p + 4, (uint32_t)v); }
static inline int has_bit(const uint64_t *bits, int64_t i) { return bits[i >> 6] >> (i & 63) & 1; }
static inline int is_whole(const incoming *m) { return m->arrived == m->packets; }
static inline void set_bit(uint64_t *bits, int64_t i) { bits[i >> 6] |= 1ull << (i & 63); }

#endif
