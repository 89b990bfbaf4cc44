/* SPDX-License-Identifier: Apache-2.0 */
/* The transport's engine: messages, the packets they consist of, and how those reach a peer.
 *
 *   engine.c     one engine a rank: what Python calls, the events that it gets, sockets, and the loop over all that
 *   outgoing.c   a message on its way out, until its receiver has confirmed it
 *   incoming.c   a message on its way in, and what is known of it once it is complete
 *   flow.c       everything on its way to one peer: window, round-trip time, losses, acknowledgements
 *   path.c       the ways to a peer, and which of them are good
 *   reduction.c  an average that is formed while packets arrive
 *   ring.c       packets through memory, between ranks of one host
 *   tags.c       what packets carry of their tags, and the order in which they leave
 *
 * Nothing here calls Python. Whatever Python has to know becomes an event, and Python takes all events when the batch
 * of packets is through. What an event points at stays until the next call that moves packets.
 *
 * Python submits messages and windows, and keeps the buffers that it submits until an event says that the message is
 * done. It mirrors `config`, `event`, `send_request`, `receive_request` and the public heads of `engine` and `flow` in
 * dlcp/transport/native_engine.py; dlcp_sizes tells whether the two agree. The packet header's layout is that of
 * dlcp/wire/header.py; a test compares the two. Times are in seconds on CLOCK_MONOTONIC. One thread drives an engine;
 * only `woken` may be set by others.
 */
#ifndef DLCP_ENGINE_H
#define DLCP_ENGINE_H

#include <assert.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#define API __attribute__((visibility("default")))

enum { HEADER_BYTES = 32, QUEUES = 8, DROP_CLASSES = 8, DATAGRAM_MAX = 65536 };
enum { ORDINARY_QUEUE = 1 };
enum { ACK_BLOCK_PACKETS = 64, ACK_ENTRY_BYTES = 18, ACK_RECENT = 8 };
enum { PATHS_MAX = 64, ACK_PATH = 0x7FFFFFFF };
enum { SEND_BLOCK_PACKETS = 256, SEGMENTS_MAX = 64, MESSAGE_PACKETS_MAX = 1 << 22, STEPS_AHEAD_MAX = 1 << 16 };
enum { VERSION = 1 };
enum packet_type { DATA = 1, ACK, PROBE, BITMAP, STOP, STOP_ACK, HELLO, HELLO_ACK, ABORT };
enum { PROTECTED = 0x80, RETRANSMISSION = 0x40 };
enum { SOCKET_FULL = -1, RING_FULL = -2, NO_MEMORY = -3 };
/* Payload of a PROBE: whether its sender has more to send (1: do not go without it yet), and in the next four bytes how
 * many packets it defers, that is, will not send. Zeros at its end are left out. */
enum { QUESTION_BYTES = 5 };
/* In the block of an acknowledgement's entry: the message is complete, all of it is here, nobody need ask. */
#define ACK_WHOLE 0x80000000u

static_assert(PATHS_MAX <= 64, "sets of paths are the bits of a uint64_t");
static_assert(PATHS_MAX <= UINT8_MAX, "a packet's path is kept in a byte");
static_assert(ACK_BLOCK_PACKETS == 64, "an acknowledgement's entry has a bit for each packet of its block");
static_assert(MESSAGE_PACKETS_MAX <= ACK_WHOLE, "the number of a block leaves room for ACK_WHOLE");
static_assert(SEGMENTS_MAX <= 64, "the kernel takes no more datagrams at once (UDP_MAX_SEGMENTS)");

typedef struct engine engine;
typedef struct flow flow;
typedef struct incoming incoming;
typedef struct outgoing outgoing;
typedef struct reduction reduction;

/* What an engine goes by. The constants have their reasons in dlcp/transport/engine.py, whence they come. */
typedef struct {
    int64_t rank, job;
    uint64_t token;
    int64_t payload_bytes;
    int64_t tagged;                     /* 0: all is ordinary traffic, in one queue */
    int64_t peers, ranks;               /* `ranks` is one more than the largest rank */
    int64_t socket, wake;               /* -1: there is none, packets become events */
    int64_t control_queue, control_tos; /* of control packets */
    int64_t early_bytes_max;            /* memory for messages that arrive before their receive is posted */
    double silence_s, deadline_s;
    double disorder_first, disorder_min, disorder_max, disorder_decay;
    double report_min_s, report_calm_s;
    double ack_delay_s, ack_delay_max_s, ack_spacing_s, ack_round_trips;
    int64_t ack_every, ack_at_once;
    double initial_rtt_s, probe_timeout_max_s;
    int64_t backoff_max, unanswered_patience, lossy_packets;
    double stop_repeat_max_s, known_after_s, remind_s;
    int64_t path_packets, path_burst, path_judged;
    double path_gain, path_loss_gain, path_lossy, path_lossier, path_slow, path_marked, path_least, path_calm;
    double path_again_s, path_again_max_s, pace_turn_s;
    double inbound_s, inbound_pause_s;
    int64_t inbound_packets;
} config;

typedef enum {
    EVENT_SENT,       /* the receiver has confirmed a message: packets, sent, resent, bits */
    EVENT_ARRIVED,    /* a message is complete: packets, deferred, last_bytes, bits, data (layers) */
    EVENT_UNEXPECTED, /* the first packet of a message whose receive is not posted: packets */
    EVENT_MISMATCH,   /* a posted receive has another size than its message: packets, as the sender has them */
    EVENT_CONTROL,    /* a greeting, the answer to one, or an abort: data is the packet */
    EVENT_REPORT,     /* what became of packets since the last report: delivered to smoothed_rtt_s */
    EVENT_TIMEOUT,    /* a peer leaves questions unanswered */
    EVENT_DATAGRAM,   /* without a socket: a packet leaves: data, tos, path */
} event_kind;

typedef struct {
    int64_t kind, peer, step, message, packets;
    int64_t sent, resent, deferred, last_bytes;
    int64_t delivered, marked, lost, limited, waiting; /* `waiting`: packets wait to be sent */
    int64_t tos, bytes, path;
    double now_s, rtt_s, smoothed_rtt_s, one_way_s;
    const uint64_t *bits; /* which packets arrived: bit k of word w is packet 64 w + k; NULL: all */
    const uint8_t *data;
} event;

typedef struct {
    int64_t peer, step, message, packets;
    const uint8_t *payload, *tail; /* those of `tail` follow those of `payload` */
    int64_t bytes, tail_bytes;
    const uint8_t *queue, *drop_class, *layer, *is_protected; /* tags, one of each a packet */
    const uint8_t *deferred;                                  /* by packet, which are not sent; NULL: all are */
    int64_t allowed, budget, bounded; /* packets that may be lost, in all and at one switch; whether any bound is set */
    int64_t immediate;                /* the receiver stops at the bound, come what may */
    int64_t seed, chunk, chunks;      /* see dlcp_send_order */
} send_request;

typedef struct {
    int64_t peer, step, message, packets;
    int64_t required, immediate; /* packets that meet the bound */
    int64_t deferrable;          /* packets that the sender may defer */
    int64_t last_bytes;          /* of the last packet; 0: not known */
    uint8_t *buffer, *tail; /* what is beyond `bytes` goes to `tail`; no buffer where every packet is added at once */
    int64_t bytes, tail_bytes;
    reduction *reduction; /* NULL: the message is stored */
    int64_t position;
} receive_request;

/* An average over ranks, formed in place in a fixed order while packets arrive. */
struct reduction {
    float *values; /* own contribution, then the sum, then the average */
    float *copy;   /* of averages that are complete; NULL: not wanted */
    int64_t count; /* values */
    int64_t packets, per_packet;
    int64_t members;             /* how many others contribute */
    uint16_t *added;             /* how many of them are in the sum, per packet */
    int64_t blocks, first_block; /* of packets, as they are sent; below 0: no chunks */
    incoming **from;             /* by position; the reduction frees them, unless they are still active */
    float divisor;
};

/* What a message is found by; the first member of what is kept in a table. */
typedef struct known known;
struct known {
    int64_t peer, step, message;
    known *next; /* in its chain */
};

typedef struct {
    known **chains;
    int64_t count, capacity;
} table;

struct incoming {
    known name;
    int64_t packets, arrived, arrived_protected;
    int64_t protected_packets; /* -1: the sender has not said */
    int64_t required;          /* packets that meet the bound; -1: no receive is posted */
    int64_t deferred;          /* packets that will not be sent, as far as the sender has said */
    int64_t deferrable;        /* packets that may be deferred */
    bool immediate, asked;
    int64_t last_bytes;
    bool active;    /* it takes packets: the table has it */
    bool complete;  /* its bound is met */
    uint64_t *bits; /* what has arrived, as in `event` */
    uint8_t *layer; /* what each packet's header says */
    uint8_t *buffer, *tail;
    int64_t bytes, tail_bytes;
    int64_t early_bytes; /* not 0: `buffer` is the engine's own */
    reduction *reduction;
    int64_t position;
};

typedef enum {
    FINISHED_STOPPING, /* packets are missing; the sender is told until it confirms that */
    FINISHED_WHOLE,    /* the sender was told by an acknowledgement, and may ask if that was lost */
    FINISHED_KNOWN,    /* the sender knows */
} finished_state;

/* What is remembered of a message that is complete: packets of it may still come. */
typedef struct finished finished;
struct finished {
    known name;
    finished_state state;
    bool asked; /* its sender had sent all of it: what comes of it for the first time is late */
    int64_t packets;
    double completed_s;
    uint8_t *bitmap;      /* as on the wire, most significant bit first; NULL: every packet is in */
    uint8_t *unconfirmed; /* by part of the bitmap; one part if there is no bitmap */
    int64_t parts, unconfirmed_count;
    double due_s, give_up_s, repeat_s;
    finished *next_stopping, *older, *newer;
};

typedef enum { UNSENT, FLYING, DELIVERED, ABANDONED, RETRANSMIT } packet_state;

/* When a question was asked, and until when what it is about was sent. */
enum { QUESTIONS = 8 };
typedef struct {
    double asked_s, until_s;
} asked;

struct outgoing {
    int64_t peer, step, message;
    int64_t packets, flying, sent, resent, delivered;
    int64_t to_send;    /* all but the deferred ones */
    int64_t unsent;     /* packets that wait to be sent, for the first time or again */
    double active_s;    /* when a packet was last sent or found delivered, */
    double last_sent_s; /* and when one was last sent, */
    int last_queue;     /* and in which queue */
    const uint8_t *payload, *tail;
    int64_t bytes, tail_bytes;
    uint8_t head[HEADER_BYTES]; /* what all headers have in common */
    uint8_t (*tags)[4];         /* per packet: bytes 1 to 3 of its header, and its type of service */
    uint32_t *order;            /* of those to send */
    int64_t next;               /* in `order` */
    uint8_t *state;             /* packet_state */
    double *sent_s;
    uint8_t *path;        /* where it was sent last */
    uint64_t *acked;      /* bits, as in `event` */
    uint32_t *retransmit; /* a ring of packets, each in it once; what was delivered meanwhile is passed over */
    int64_t retransmit_first, retransmit_count;
    uint32_t *abandoned_next; /* lists by drop class of what may stay lost */
    uint32_t abandoned_first[DROP_CLASSES];
    int64_t abandoned, allowed;
    /* What is asked of the receiver. */
    int64_t protected_packets;
    bool immediate;
    asked asked[QUESTIONS]; /* the latest questions, by number, which answers repeat */
    int64_t questions;      /* so many so far */
    double probed_s;        /* when the last one was asked */
    int64_t probes_unanswered, probes_without_news, delivered_seen;
    uint64_t *confirmed; /* what the parts of a STOP say */
    int64_t confirmed_packets;
    outgoing *next_whole; /* of those that an acknowledgement being read says are whole */
    bool whole;
};

/* Packets that were sent together into one queue. */
typedef struct {
    double sent_s;
    outgoing *message; /* NULL once it is gone */
    uint32_t first;    /* in the message's order; the packet itself, if `packets` is 0 */
    uint32_t packets;
} run;

typedef struct {
    run *runs;
    int64_t first, count, capacity;
} run_queue;

/* When the newest packet that has arrived was sent, and when that became known. */
typedef struct {
    double sent_s, known_s;
} newest;

/* One of the ways to a peer: what is on it, and how good it is. */
typedef struct {
    int64_t flying, sent;
    double weight;  /* 1: as good as the best; 0: it is left, until */
    double again_s; /* this, */
    double patience_s;
    bool on_trial;               /* as it is again at first */
    double delay_s, loss, marks; /* smoothed: round trip (0: not known), shares of packets */
    int64_t samples;             /* round trips since the last report, */
    double least_s, one_way_s;   /* the shortest of them, and of the ways there, less `clocks_us` */
    int64_t judged, lost, marked;
    newest newest[QUEUES];        /* of what has arrived, */
    newest newest_before[QUEUES]; /* and of that before the last news */
    double sampled_s;
    int64_t lost_in_row;     /* packets since one arrived, */
    double last_delivered_s; /* which became known then */
    run_queue runs[QUEUES];
    uint32_t marked_seen;
} path;

/* A block of packets to be acknowledged. */
typedef struct {
    incoming *message; /* NULL once it is gone */
    int64_t block;
} ack_block;

/* How far the two sides of a ring are, in bytes since its beginning; in memory that both have. */
typedef struct {
    _Alignas(64) uint64_t written;
    _Alignas(64) uint64_t taken;
    _Alignas(64) uint32_t starving; /* the writer waits for room */
} ring_marks;

/* One side's view of a ring. */
typedef struct {
    ring_marks *marks;
    uint8_t *bytes; /* NULL: there is none */
    uint64_t capacity;
    uint64_t mine;   /* how far this side is, */
    uint64_t theirs; /* and the other, as far as is known */
    bool starving;   /* this side waits for room */
} ring;

struct flow {
    /* The public head. */
    double window;
    int64_t largest_window, flying;
    double smoothed_rtt_s, rtt_variation_s, heard_s;
    int64_t burst;      /* most packets in one send */
    int64_t mute;       /* send nothing but control packets */
    int64_t slow_start; /* a window that holds packets back is to be reported soon */
    double pace;        /* packets a second that leave at most; infinity: as many as the window admits */
    /* private */
    int64_t peer, rank;
    struct sockaddr_in address;
    uint8_t service[QUEUES][2];               /* type of service, by queue and by whether a packet may be dropped */
    int64_t delivered, marked, lost, limited; /* since the last report */
    int64_t clocks_us;                        /* what clocks differ by, and the first packet took; below 0: none */
    double reported_s, report_due_s;          /* infinity if there is nothing to report */
    double disorder, sent_last_s;
    double backoff;   /* by how much later than otherwise packets count as lost: 1, or more if those sent again are */
    double stamped_s; /* the latest time with which a packet was marked: each is later than the one before */
    double rtt_min_s; /* the shortest round trip so far; 0: not known */
    double response_s, response_variation_s; /* round trip until this side has seen the answer, and its deviation */
    int64_t lossy_packets;                   /* for so many more packets to send, some are expected to get lost */
    double answered_s; /* the longest that a peer took to answer a question; of use until a round trip is known */
    double paced_s;    /* for how long the pace allows nothing, after what has left */
    bool held;         /* packets wait for that */
    double newest_delivered_s[QUEUES]; /* on any path */
    path *paths;
    int64_t path_count, path_last;
    double stalled_due_s;                 /* when to look next for paths on which nothing arrives, */
    double overtaken_due_s;               /* and when packets count as lost which later ones have overtaken, */
    uint64_t overtaken_paths;             /* bits: there */
    uint64_t fresh_paths;                 /* bits: something has come back of what was sent there */
    int64_t excused_lost, excused_marked; /* on paths that are left or on trial: the window has no part in it */
    outgoing **messages;
    int64_t message_count, message_capacity;
    double look_s; /* no message is to be asked about before */
    uint32_t marked_seen;
    uint16_t late_seen; /* packets that were late, not lost, */
    double widened_s;   /* and when the reordering window was last made wider for that */
    /* receiving */
    uint32_t marked_received;
    uint16_t late_received;     /* packets that were late, not lost: they came twice, or after they had been given up */
    in_port_t ports[PATHS_MAX]; /* from which it sends, too, in network byte order */
    int64_t port_count, port_last;
    uint32_t path_marked[PATHS_MAX];
    uint64_t marked_paths; /* bits: more marks than were told */
    ack_block *fresh, recent[ACK_RECENT];
    int64_t fresh_count, fresh_capacity, fresh_packets, recent_count;
    double ack_due_s, acknowledged_s, data_last_s;
    /* to and from a peer on this host */
    ring out, in;
    const uint8_t *imported; /* memory of the peer's, which it sends from */
    int64_t imported_bytes;
    uint32_t *peer_asleep;
    int peer_bell;
};

/* Memory for messages that arrive early, used again: fresh memory costs as much as what is done with it. */
enum { EARLY_CACHED = 64 };
typedef struct {
    uint8_t *memory;
    int64_t capacity;
} early_buffer;

struct engine {
    /* The public head. */
    event *events;
    int64_t event_count;
    int64_t woken;   /* set by any thread to make dlcp_turn return */
    int64_t failed;  /* memory was short where nothing could be refused: the engine must not go on */
    int64_t offload; /* 0 once the kernel has refused UDP_SEGMENT */
    int64_t room;    /* without a socket: datagrams that may leave; below 0: any number */
    int64_t stopping_count, early_bytes, oldest_step;
    int64_t refused_malformed, refused_token, refused_job, refused_sender, refused_stale;
    int64_t data, duplicate, late, early_full, probe, control_unsent;
    int64_t send_errors, last_errno, truncated, acknowledgements, received_bursts, sent_bursts;
    double inbound_peak; /* the fastest that data came through the network since this was set to 0, in packets/s */
    /* private */
    config config;
    double inbound_since_s, inbound_last_s; /* the stretch that is being measured, */
    int64_t inbound_count;                  /* and what came in it, without its first packet */
    int64_t event_capacity;
    void **garbage; /* what events may point at, until the next call that moves packets */
    int64_t garbage_count, garbage_capacity;
    int64_t *flow_of_rank;
    flow *flows;
    table incoming, finished;
    finished *stopping; /* in the order in which they began */
    finished *oldest_finished, *newest_finished;
    early_buffer early[EARLY_CACHED];
    double reminded_s; /* when the sender of a whole message was last told again */
    bool closed;       /* no message is taken any more */
    int socket, wake, bell;
    int sockets[PATHS_MAX]; /* by path; all but the first only send */
    int64_t socket_count;
    uint32_t *asleep;        /* says to peers on this host: this engine waits for its bell; NULL: there are none */
    int64_t shared;          /* flows whose packets come through a ring */
    const uint8_t *exported; /* what is sent from here, peers on this host read where it is */
    int64_t exported_bytes;
    double arrived_s;  /* when the kernel got the datagram that is being taken in */
    int64_t singles;   /* how many datagrams of data have come alone, one after the other */
    uint8_t *buffers;  /* for receiving, */
    uint8_t *datagram; /* and to write one in that is sent at once: HEADER_BYTES + DATAGRAM_MAX */
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
double outgoing_delivered(const engine *owner, flow *to, outgoing *self, uint32_t index, double now_s);
int64_t outgoing_all_delivered(const engine *owner, flow *to, outgoing *self, double now_s);
void outgoing_lost(const engine *owner, flow *to, outgoing *self, uint32_t index);
uint32_t outgoing_next_packet(outgoing *self);
int64_t outgoing_gather(const engine *owner, outgoing *self, int64_t limit, uint32_t *packets);
int outgoing_pieces(const engine *owner, const outgoing *self, uint32_t index, struct iovec *pieces);
void outgoing_complete(engine *owner, flow *to, outgoing *self, const uint64_t *bits, double now_s);
double outgoing_ask(engine *owner, flow *to, double now_s);
void outgoing_expect(const engine *owner, flow *to, const outgoing *self);
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
void flow_feed_back(engine *owner, flow *self, int64_t delivered, int64_t marked, int64_t lost, double now_s);
double flow_resumes_s(const flow *self, double now_s);
double flow_reordering_s(const engine *owner, const flow *self);
double flow_stalled_s(const engine *owner, const flow *self);
double flow_lateness_s(const engine *owner, const flow *self);
double flow_probe_timeout_s(const engine *owner, const flow *self);
double flow_find_overtaken(engine *owner, flow *self, double now_s);
double flow_report(engine *owner, double now_s);
void flow_note_arrival(const engine *owner, flow *self, incoming *message, int64_t index, int tos, double now_s);
void flow_acknowledge(engine *owner, flow *self, double now_s);
void flow_acknowledge_whole(engine *owner, flow *self, incoming *message, double now_s);
double flow_acknowledge_due(engine *owner, double now_s);
void flow_take_acknowledgement(engine *owner, flow *self, const uint8_t *datagram, int64_t bytes, double now_s);
void flow_forget_incoming(flow *self, const incoming *message);
/* path.c */
int path_make(const engine *owner, flow *self, int64_t count);
int64_t path_choose(const engine *owner, flow *self, int64_t *limit, double now_s);
int64_t path_for_control(const flow *self);
void path_leave(const engine *owner, flow *self, path *one, double now_s);
void path_judge_all(const engine *owner, flow *self, double now_s);
void path_sample_delay(const engine *owner, path *self, double delay_s);
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
/* tags.c */
void dlcp_encode_tags(const uint8_t *queue, const uint8_t *drop_class, const uint8_t *layer,
                      const uint8_t *is_protected, uint32_t packets, uint32_t bounded, uint32_t flag,
                      const uint8_t service[][2], uint8_t (*encoded)[4], uint8_t *droppable);
void dlcp_send_order(const uint8_t *queue, const uint8_t *droppable, uint32_t packets, uint32_t seed, uint32_t chunk,
                     uint32_t chunks, uint32_t *order);

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
/* Where the fields of a header are. */
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
