/* SPDX-License-Identifier: Apache-2.0 */
/* The interface of the compiled library, for Python. setup.py gives cffi this header without its preprocessor lines, so
 * each record, constant and function is declared once.
 *
 * Python submits messages and windows, and keeps the buffers that it submits until an event says that the message is
 * done. It learns everything from events, which it takes after each batch of packets; nothing here calls Python. What
 * an event points at stays valid until the next call that moves packets. Times are in seconds on CLOCK_MONOTONIC. One
 * thread drives an engine. Other threads may call dlcp_wake, and read the numbers of views: each is aligned, so they
 * read a value that was valid at some time, though several values need not be consistent. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Engines ---------------------------------------------------------------------------------------------------------- */

enum { PATHS_MAX = 64, SEND_BLOCK_PACKETS = 256, MESSAGE_PACKETS_MAX = 4194304 };
enum { SOCKET_FULL = -1, RING_FULL = -2, NO_MEMORY = -3 };

typedef struct engine engine;
typedef struct reduction reduction;

typedef struct {
    int64_t rank, job;
    uint64_t token;
    int64_t payload_bytes;
    bool tagged;                    /* false: all is ordinary traffic, in one queue */
    int64_t peers, ranks;           /* `ranks` is one more than the largest rank */
    int socket, wake;               /* -1: none, packets become events */
    int control_queue, control_tos; /* of control packets */
    int64_t early_bytes_max;        /* memory for messages that arrive before their receive is posted */
    double silence_s, deadline_s;
} config;

typedef enum {
    EVENT_SENT,       /* the receiver has acknowledged a message: packets, sent, resent, probes, bits */
    EVENT_ARRIVED,    /* a message is complete: packets, last_bytes, bits, data (layers) */
    EVENT_UNEXPECTED, /* the first packet of a message without a posted receive: packets */
    EVENT_MISMATCH,   /* a posted receive differs in size from its message: packets, as sent */
    EVENT_CONTROL,    /* a greeting, its answer, or an abort: data is the packet */
    EVENT_REPORT,     /* feedback since the last report: delivered to one_way_s */
    EVENT_TIMEOUT,    /* a peer leaves probes unanswered */
    EVENT_NARROW,     /* a peer is heard but full packets to it do not arrive, or it sends its own in pieces */
    EVENT_DATAGRAM,   /* without a socket: a packet to send: data, tos, path */
} event_kind;

typedef struct {
    event_kind kind;
    int64_t peer, step, message, packets;
    int64_t sent, resent, probes, last_bytes;
    int64_t delivered, marked, lost;
    bool limited, waiting; /* the window was the limit; packets wait to be sent */
    int64_t tos, bytes, path;
    double now_s, rtt_s, smoothed_rtt_s, one_way_s;
    const uint64_t *bits; /* which packets arrived: bit k of word w is packet 64 w + k; NULL: all */
    const uint8_t *data;
} event;

/* Packets counted since the beginning; those that begin with `refused_` were refused. */
typedef struct {
    int64_t refused_malformed, refused_token, refused_job, refused_sender, refused_stale;
    int64_t data, trimmed, duplicate, late, early_full, probe, control_unsent;
    int64_t send_errors, truncated, acknowledgements, received_bursts, sent_bursts;
} packet_counters;

/* An engine, as Python sees it. */
typedef struct {
    const event *events;
    int64_t event_count;
    bool failed;            /* memory ran out where nothing could be refused: the engine must not be used any more */
    bool offload;           /* whether the kernel accepts whole bursts (UDP_SEGMENT), as far as known */
    int64_t room;           /* without a socket: datagrams that may leave; negative: no limit */
    int64_t stopping_count; /* messages ended with packets missing, which their senders do not know yet */
    int64_t early_bytes;    /* memory in use for messages that arrived before their receive was posted */
    double inbound_peak;    /* the fastest that data arrived since this was set to 0, in packets/s */
    packet_counters counters;
} engine_view;

/* The packets in flight to a peer, as Python sees and controls them. */
typedef struct {
    double window;          /* packets that may be in flight; a window below 1 admits one packet at intervals */
    int64_t largest_window; /* the limit set by the receiver's buffer, in packets */
    int64_t flying;         /* packets in flight */
    double smoothed_rtt_s, rtt_variation_s; /* round-trip time (0: unknown) and its mean deviation (RFC 6298) */
    double heard_s;                         /* when the last packet from the peer arrived */
    int64_t burst;                          /* maximum packets in one send */
    bool mute;                              /* send only control packets */
    bool slow_start;                        /* report a limiting window soon */
    double pace;                            /* maximum packets per second; infinity: as many as the window admits */
    int64_t piece_bytes; /* packets with a larger payload leave in pieces with at most this much; 0: whole */
} flow_view;

/* One of the paths to a peer; all is 0 if there is no such path. */
typedef struct {
    double weight;      /* relative to the best path, 0 to 1; 0 if it is abandoned */
    double delay_s;     /* its smoothed round-trip time; 0 if unknown */
    double loss, marks; /* smoothed shares of packets lost and marked */
    int64_t sent;       /* packets sent on it so far, including retransmissions */
} path_view;

typedef struct {
    int64_t peer, step, message, packets;
    const uint8_t *payload, *tail; /* bytes of `payload`, then those of `tail` */
    int64_t bytes, tail_bytes;
    const uint8_t *queue, *drop_class, *layer, *is_protected; /* tags, one of each per packet */
    int64_t allowed, budget;                                  /* packets that may be lost, in all and at one switch */
    bool bounded, immediate;      /* whether any may be lost; whether the receiver stops at the bound in any case */
    uint32_t seed, chunk, chunks; /* see dlcp_send_order */
    int64_t upper_packets;        /* after these packets `lower_coding` applies */
    uint8_t coding, lower_coding; /* flags of packets with encoded values; 0 for others */
} send_request;

typedef struct {
    int64_t peer, step, message, packets;
    int64_t required; /* packets that meet the bound */
    bool immediate;
    int64_t last_bytes;     /* of the last packet; 0: unknown */
    uint8_t *buffer, *tail; /* bytes beyond `bytes` go to `tail`; no buffer if every packet is added at once */
    int64_t bytes, tail_bytes;
    reduction *reduction; /* NULL: the message is stored */
    int64_t position;
} receive_request;

/* Packets of a message; all are 0 if it is unknown. In a received message, none are flying or unsent. */
typedef struct {
    int64_t delivered, flying, unsent, packets;
} message_progress;

engine *dlcp_engine_new(const config *rules);
engine_view *dlcp_engine_view(engine *self);
void dlcp_engine_stop(engine *self);
void dlcp_engine_free(engine *self);
flow_view *dlcp_peer(engine *self, int64_t peer, int64_t rank, const uint8_t *address, int64_t address_bytes,
                     const uint8_t *service, double now_s);
int64_t dlcp_add_socket(engine *self, int socket);
void dlcp_accept(engine *self, int64_t peer, const uint16_t *ports, int64_t count);
int64_t dlcp_spread(engine *self, int64_t peer, int64_t paths);
path_view dlcp_path(engine *self, int64_t peer, int64_t number);
void dlcp_ring_in(engine *self, int64_t peer, void *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                  int bell);
void dlcp_ring_out(engine *self, int64_t peer, void *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                   int bell);
void dlcp_export(engine *self, const uint8_t *memory, int64_t bytes);
void dlcp_import(engine *self, int64_t peer, const uint8_t *memory, int64_t bytes);
int64_t dlcp_send(engine *self, const send_request *request, double now_s);
bool dlcp_detach(engine *self, int64_t peer, int64_t step, int64_t message, const uint8_t *payload);
message_progress dlcp_sending(engine *self, int64_t peer, int64_t step, int64_t message);
int64_t dlcp_receive(engine *self, const receive_request *request, double now_s);
message_progress dlcp_receiving(engine *self, int64_t peer, int64_t step, int64_t message);
void dlcp_report_unexpected(engine *self, double now_s);
void dlcp_begin_step(engine *self, int64_t step, double now_s);
void dlcp_forget(engine *self, int64_t peer, int64_t step, int64_t message);
void dlcp_remind(engine *self, double now_s);
void dlcp_send_control(engine *self, int64_t peer, int64_t type, int64_t size, const uint8_t *payload, int64_t bytes);
void dlcp_take_in(engine *self, const uint8_t *datagram, int64_t bytes, const uint8_t *address, int64_t address_bytes,
                  int64_t tos, double now_s);
double dlcp_tick(engine *self, double now_s);
int64_t dlcp_pump(engine *self, double now_s);
int64_t dlcp_turn(engine *self, double until_s);
void dlcp_wake(engine *self);

/* Planes ----------------------------------------------------------------------------------------------------------- */

enum { PLANE_BLOCK_VALUES = 32 };

/* Where the digits of encoded values are; see PlaneLayout in dlcp/values/planes.py. */
typedef struct {
    int64_t values, digit_bits, planes;
    int64_t per_packet; /* values, a multiple of the block */
    int64_t packets;    /* of each plane */
    int64_t payload_bytes, bytes;
} plane_layout;

/* One pass over values: the sum of `values` (with `has_own`) and of decoded ones, times `factor`. With `code` the sum
 * is encoded there, and the rounding error, times `weight`, is written to `rest`; 0 where it is not finite. The sum,
 * rounded if it is encoded, replaces `values` unless `keeps_own`. */
typedef struct {
    float *values;
    bool has_own, keeps_own;
    float factor, weight;
    uint8_t *code; /* NULL: it is not encoded */
    float *rest;   /* NULL: the rounding error is not needed */
} plane_sum;

void dlcp_planes_combine(const plane_layout *layout, const plane_sum *sum, const uint8_t *code,
                         const uint8_t *delivered);
void dlcp_planes_lose(const plane_layout *layout, const uint8_t *code, const uint8_t *delivered, float *rest);

/* Averages --------------------------------------------------------------------------------------------------------- */

reduction *dlcp_reduction_new(float *values, int64_t count, int64_t per_packet, int64_t members, float divisor,
                              int64_t first_block);
reduction *dlcp_reduction_new_encoded(const plane_layout *layout, const plane_sum *sum, int64_t members);
void dlcp_reduction_copy(reduction *self, float *copy);
void dlcp_reduction_free(reduction *self);
void dlcp_reduction_included(const reduction *self, int64_t position, uint64_t *bits);
int64_t dlcp_reduction_finish(reduction *self, bool rescale);

/* Tags ------------------------------------------------------------------------------------------------------------- */

enum { DROP_CLASSES = 8, BORDERS = 7 };

/* A layer's packets, from `first` up to `stop`, excluded; its row of borders; the quantiles that separate its classes.
 * */
typedef struct {
    int64_t first, stop, row;
    double quantiles[7];
} layer_packets;

void dlcp_magnitudes_float32(const void *values, int64_t count, int64_t per_packet, float *result);
void dlcp_magnitudes_float64(const void *values, int64_t count, int64_t per_packet, float *result);
void dlcp_magnitudes_float16(const void *values, int64_t count, int64_t per_packet, float *result);
void dlcp_magnitudes_bfloat16(const void *values, int64_t count, int64_t per_packet, float *result);
void dlcp_classify(const float *magnitudes, const uint8_t *kept, const layer_packets *layers, int64_t count,
                   double memory, double *borders, uint32_t *scratch, int64_t scratch_half, uint8_t *classes,
                   uint8_t *is_protected);
void dlcp_encode_tags(const uint8_t *queue, const uint8_t *drop_class, const uint8_t *layer,
                      const uint8_t *is_protected, uint32_t packets, bool bounded, const uint8_t *service,
                      uint8_t *encoded, uint8_t *droppable);
void dlcp_send_order(const uint8_t *queue, const uint8_t *droppable, uint32_t packets, uint32_t seed, uint32_t chunk,
                     uint32_t chunks, uint32_t *order);

/* Frames of the built-in switch ------------------------------------------------------------------------------------ */

/* A receive ring of a packet socket as configured, and the frame that the kernel fills next. */
typedef struct {
    uint8_t *memory;
    int64_t block_bytes, frame_bytes, frames_per_block, frames;
    int64_t next;
    int64_t frame_min, frame_max; /* accepted frame sizes in bytes, without a VLAN tag */
} packet_ring;

int64_t dlcp_packets_take(packet_ring *ring, uint8_t *rows, int64_t row_bytes, const int64_t *slots, int64_t count,
                          int64_t *lengths, int64_t *stamps_ns, int64_t *others);
int64_t dlcp_packets_send(int socket, const uint8_t *rows, int64_t row_bytes, const int64_t *slots,
                          const int64_t *lengths, int64_t count, int64_t *bytes, int64_t *failures);
