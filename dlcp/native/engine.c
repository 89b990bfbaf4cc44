/* SPDX-License-Identifier: Apache-2.0 */
/* One engine per rank: its API for Python, its events, the socket, and the main loop, which moves whole bursts:
 * UDP_SEGMENT out, UDP_GRO in. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <math.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum { BURSTS = 8, BATCH = 32, SINGLES = 4, CONTROL_MAX = 128 };
/* Not a power of two, or small datagrams would all fall on the same cache lines. */
enum { SLOT_BYTES = DATAGRAM_MAX + 1600 };
static const double BUSY_RETRY_S = 0.0005;
/* The longest time for which a datagram is assumed to have waited in its socket. */
static const double STAMP_AGO_MAX_S = 1;

double clock_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Creation and shutdown -------------------------------------------------------------------------------------------- */

/* glibc's largest adaptive threshold, less its overhead. */
enum { FREED_BYTES = (32 << 20) - (64 << 10) };

/* Make glibc keep freed memory. It gets blocks larger than any freed so far from the kernel each time, as fresh pages,
 * which cost as much as processing their contents, such as a step's gradients. */
static void keep_freed_memory(void) {
    void *volatile once = malloc(FREED_BYTES);
    free(once);
}

/* Make an engine; add its peers next (dlcp_peer). NULL: no memory. */
engine *dlcp_engine_new(const config *rules) {
    keep_freed_memory();
    engine *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->config = *rules;
    self->socket = self->sockets[0] = rules->socket;
    self->socket_count = 1;
    self->wake = rules->wake;
    self->bell = -1;
    self->view.offload = true;
    self->view.room = -1;
    self->reminded_s = self->inbound_last_s = -INFINITY;
    self->event_capacity = 64;
    self->view.events = self->events = malloc((size_t)self->event_capacity * sizeof *self->events);
    self->flows = calloc((size_t)rules->peers + 1, sizeof *self->flows);
    self->flow_of_rank = malloc((size_t)(rules->ranks + 1) * sizeof *self->flow_of_rank);
    self->buffers = malloc((size_t)BATCH * SLOT_BYTES);
    self->datagram = malloc(HEADER_BYTES + DATAGRAM_MAX);
    bool short_of = table_make(&self->incoming) | table_make(&self->finished);
    if (short_of || !self->events || !self->flows || !self->flow_of_rank || !self->buffers || !self->datagram) {
        free(self->incoming.chains);
        free(self->finished.chains);
        free(self->events);
        free(self->flows);
        free(self->flow_of_rank);
        free(self->buffers);
        free(self->datagram);
        free(self);
        return NULL;
    }
    for (int64_t rank = 0; rank <= rules->ranks; rank++)
        self->flow_of_rank[rank] = -1;
    return self;
}

/* Add a peer: `address` is in host byte order, `service` has the type of service by queue and by whether a packet may
 * be dropped. Return its flow, whose public head the caller sets; NULL: no memory. */
flow_view *dlcp_peer(engine *self, int64_t peer, int64_t rank, uint32_t address, int64_t port, const uint8_t *service,
                     double now_s) {
    flow *one = &self->flows[peer];
    if (path_make(one, 1))
        return NULL;
    one->peer = peer;
    one->rank = rank;
    one->address.sin_family = AF_INET;
    one->address.sin_addr.s_addr = htonl(address);
    one->address.sin_port = htons((uint16_t)port);
    memcpy(one->service, service, sizeof one->service);
    one->view.heard_s = now_s;
    one->disorder = DISORDER_FIRST;
    one->backoff = 1;
    one->view.burst = SEGMENTS_MAX;
    one->view.slow_start = true;
    one->view.pace = INFINITY;
    one->clocks_us = -1;
    one->ack_due_s = one->report_due_s = one->overtaken_due_s = one->look_s = INFINITY;
    one->stamped_s = -INFINITY;
    for (int queue = 0; queue < QUEUES; queue++)
        one->newest_delivered_s[queue] = -1;
    self->flow_of_rank[rank] = peer;
    return &one->view;
}

/* Add a socket to send from; return 0, or NO_MEMORY if there are too many. */
int64_t dlcp_add_socket(engine *self, int socket) {
    if (self->socket_count == PATHS_MAX)
        return NO_MEMORY;
    self->sockets[self->socket_count++] = socket;
    return 0;
}

/* Also accept packets of a peer from these other ports of its address. */
void dlcp_accept(engine *self, int64_t peer, const uint16_t *ports, int64_t count) {
    flow *from = &self->flows[peer];
    from->port_count = smaller(count, PATHS_MAX - 1);
    from->port_last = 0;
    for (int64_t i = 0; i < from->port_count; i++)
        from->ports[i] = htons(ports[i]);
}

static void free_garbage(engine *self) {
    for (int64_t i = 0; i < self->garbage_count; i++)
        free(self->garbage[i]);
    self->garbage_count = 0;
}

engine_view *dlcp_engine_view(engine *self) {
    return &self->view;
}

/* Drop all messages and accept no more; the caller may free its memory. */
void dlcp_engine_stop(engine *self) {
    self->closed = true;
    for (int64_t i = 0; i < self->config.peers; i++)
        while (self->flows[i].message_count)
            outgoing_free(&self->flows[i], self->flows[i].messages[0]);
    incoming_drop_all(self);
}

void dlcp_engine_free(engine *self) {
    dlcp_engine_stop(self);
    for (int64_t i = 0; i < self->config.peers; i++) {
        for (int64_t way = 0; way < self->flows[i].path_count; way++)
            for (int queue = 0; queue < QUEUES; queue++)
                free(self->flows[i].paths[way].runs[queue].runs);
        free(self->flows[i].paths);
        free(self->flows[i].messages);
        free(self->flows[i].fresh);
    }
    for (int i = 0; i < EARLY_CACHED; i++)
        free(self->early[i].memory);
    free_garbage(self);
    free(self->garbage);
    free(self->incoming.chains);
    free(self->finished.chains);
    free(self->events);
    free(self->flows);
    free(self->flow_of_rank);
    free(self->buffers);
    free(self->datagram);
    free(self);
}

/* Events ----------------------------------------------------------------------------------------------------------- */

/* Return a new event to fill in; NULL if out of memory, which sets `failed`. */
event *engine_event(engine *self, event_kind kind, int64_t peer, double now_s) {
    if (self->view.event_count == self->event_capacity) {
        event *events = realloc(self->events, (size_t)self->event_capacity * 2 * sizeof *events);
        if (!events) {
            self->view.failed = true;
            return NULL;
        }
        self->view.events = self->events = events;
        self->event_capacity *= 2;
    }
    event *one = &self->events[self->view.event_count++];
    *one = (event){.kind = kind, .peer = peer, .now_s = now_s};
    return one;
}

/* Free memory that an event points at, once Python has processed it. */
void engine_discard(engine *self, void *memory) {
    if (self->garbage_count == self->garbage_capacity) {
        int64_t capacity = self->garbage_capacity ? self->garbage_capacity * 2 : 64;
        void **garbage = realloc(self->garbage, (size_t)capacity * sizeof *garbage);
        if (!garbage)
            return; /* it leaks: an event may point at it, and memory is short anyway */
        self->garbage = garbage;
        self->garbage_capacity = capacity;
    }
    self->garbage[self->garbage_count++] = memory;
}

/* Begin a batch. Once Python has taken all events, the memory they pointed at is freed. */
static void begin_batch(engine *self) {
    if (!self->view.event_count)
        free_garbage(self);
}

/* Report a packet as an event. */
static event *report_packet(engine *self, event_kind kind, const flow *peer, const uint8_t *datagram, int64_t bytes) {
    uint8_t *copy = malloc((size_t)bytes);
    if (!copy)
        return NULL; /* counts as lost */
    memcpy(copy, datagram, (size_t)bytes);
    engine_discard(self, copy);
    event *news = engine_event(self, kind, peer->peer, peer->view.heard_s);
    if (!news)
        return NULL; /* NOLINT(clang-analyzer-unix.Malloc): engine_discard has it */
    news->data = copy;
    news->bytes = bytes;
    return news;
}

/* Packets out ------------------------------------------------------------------------------------------------------ */

/* How many packets one BITMAP or STOP covers. */
int64_t engine_bitmap_packets(const engine *self) {
    return self->config.payload_bytes * 8;
}

void engine_write_header(const engine *self, uint8_t *header, enum packet_type type, int64_t step, int64_t message,
                         int64_t index, int64_t count) {
    memset(header, 0, HEADER_BYTES);
    header[0] = (uint8_t)(VERSION << 4 | type);
    header[2] = (uint8_t)(self->config.control_queue << 5);
    put16(header + 4, (uint16_t)self->config.job);
    put32(header + 8, (uint32_t)step);
    put16(header + 12, (uint16_t)message);
    put16(header + 14, (uint16_t)self->config.rank);
    put32(header + 16, (uint32_t)index);
    put32(header + 20, (uint32_t)count);
    put64(header + 24, self->config.token);
}

/* Map the errno of a failed send to SOCKET_FULL or to loss (0). */
static int after_error(engine *self) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
        return SOCKET_FULL;
    /* No route, or an unreachable peer; the deadline's error names the peer. */
    self->view.counters.send_errors++;
    self->last_errno = errno;
    return 0;
}

/* Append a control message for a burst; return the bytes in use. */
static size_t put_ancillary(char *at, size_t used, int level, int type, const void *value, size_t bytes) {
    struct cmsghdr *entry = (struct cmsghdr *)(at + used);
    entry->cmsg_level = level;
    entry->cmsg_type = type;
    entry->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(entry), value, bytes);
    return used + CMSG_SPACE(bytes);
}

/* Send pieces to a peer's address: datagrams of `segment` bytes, or a single one if that is 0. Return as sendmsg. */
static ssize_t send_pieces(const engine *self, flow *to, struct iovec *pieces, int64_t parts, int tos, uint16_t segment,
                           int64_t way) {
    union {
        char bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(uint16_t))];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof control);
    size_t used = 0;
    if (tos)
        used = put_ancillary(control.bytes, used, IPPROTO_IP, IP_TOS, &tos, sizeof tos);
    if (segment)
        used = put_ancillary(control.bytes, used, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment);
    struct msghdr message = {.msg_name = &to->address,
                             .msg_namelen = sizeof to->address,
                             .msg_iov = pieces,
                             .msg_iovlen = (size_t)parts,
                             .msg_control = used ? control.bytes : NULL,
                             .msg_controllen = used};
    return sendmsg(self->sockets[way], &message, MSG_DONTWAIT);
}

/* Send one datagram. Return SOCKET_FULL or RING_FULL if it cannot leave now; other errors count as loss. */
int engine_send_datagram(engine *self, flow *to, const uint8_t *datagram, int64_t bytes, int tos, int64_t way) {
    if (self->socket < 0) {
        if (!self->view.room)
            return SOCKET_FULL;
        if (self->view.room > 0)
            self->view.room--;
        event *news = report_packet(self, EVENT_DATAGRAM, to, datagram, bytes);
        if (news) {
            news->tos = tos;
            news->path = way;
        }
        return 0;
    }
    if (to->out.bytes)
        return ring_send_datagram(to, datagram, bytes);
    struct iovec piece = {(void *)datagram, (size_t)bytes};
    return send_pieces(self, to, &piece, 1, tos, 0, way) >= 0 ? 0 : after_error(self);
}

static int send_one_by_one(engine *self, flow *to, outgoing *message, const uint32_t *packets, int64_t count,
                           uint8_t (*headers)[HEADER_BYTES], int64_t way) {
    uint8_t *datagram = self->datagram;
    for (int64_t k = 0; k < count; k++) {
        struct iovec pieces[2];
        int parts = outgoing_pieces(self, message, packets[k], pieces);
        int64_t bytes = HEADER_BYTES;
        memcpy(datagram, headers[k], HEADER_BYTES);
        for (int part = 0; part < parts; part++) {
            memcpy(datagram + bytes, pieces[part].iov_base, pieces[part].iov_len);
            bytes += (int64_t)pieces[part].iov_len;
        }
        assert(bytes <= HEADER_BYTES + DATAGRAM_MAX);
        /* Once part of a burst has left, a packet that the socket cannot accept counts as lost. */
        if (engine_send_datagram(self, to, datagram, bytes, message->tags[packets[k]][3], way) < 0 && !k)
            return SOCKET_FULL;
    }
    return 0;
}

/* Send packets of a message in one burst, on one path; return as engine_send_datagram. */
int engine_send_burst(engine *self, flow *to, outgoing *message, const uint32_t *packets, int64_t count,
                      uint8_t (*headers)[HEADER_BYTES], int64_t way) {
    if (self->socket < 0 || (!to->out.bytes && count > 1 && !self->view.offload))
        return send_one_by_one(self, to, message, packets, count, headers, way);
    if (to->out.bytes && ring_is_exported(self, message, packets, count))
        return ring_send_exported(self, to, message, count, headers);
    struct iovec pieces[3 * SEGMENTS_MAX];
    int64_t parts = 0;
    for (int64_t k = 0; k < count; k++) {
        pieces[parts++] = (struct iovec){headers[k], HEADER_BYTES};
        parts += outgoing_pieces(self, message, packets[k], pieces + parts);
    }
    if (to->out.bytes)
        return ring_send_burst(self, to, pieces, parts);
    uint16_t segment = count > 1 ? (uint16_t)(HEADER_BYTES + self->config.payload_bytes) : 0;
    self->view.counters.sent_bursts++;
    if (send_pieces(self, to, pieces, parts, message->tags[packets[0]][3], segment, way) >= 0)
        return 0;
    if (segment && (errno == EIO || errno == EINVAL || errno == EOPNOTSUPP)) {
        self->view.offload = false; /* no transmit checksum offload, or an old kernel */
        return send_one_by_one(self, to, message, packets, count, headers, way);
    }
    return after_error(self);
}

/* Send a control packet about a message. If it cannot leave now it counts as lost, and is repeated. */
void engine_send_control(engine *self, flow *to, enum packet_type type, const known *name, int64_t index, int64_t count,
                         const uint8_t *payload, int64_t bytes) {
    uint8_t *datagram = self->datagram;
    assert(bytes <= DATAGRAM_MAX);
    engine_write_header(self, datagram, type, name->step, name->message, index, count);
    if (bytes)
        memcpy(datagram + HEADER_BYTES, payload, (size_t)bytes);
    /* A greeting tells the peer our other ports, so it comes from the known one. */
    int64_t way = type == HELLO || type == HELLO_ACK || type == ABORT ? 0 : path_for_control(to);
    if (engine_send_datagram(self, to, datagram, HEADER_BYTES + bytes, self->config.control_tos, way) < 0)
        self->view.counters.control_unsent++;
}

/* Send a control packet about a peer: a greeting or an abort. */
void dlcp_send_control(engine *self, int64_t peer, int64_t type, const uint8_t *payload, int64_t bytes) {
    static const known none = {0, 0, 0, NULL};
    engine_send_control(self, &self->flows[peer], (enum packet_type)type, &none, 0, 0, payload, bytes);
}

/* Packets in ------------------------------------------------------------------------------------------------------- */

/* Return whether a datagram is not of this session, or not from peer `from` if given; count it as refused. */
bool engine_refuses(engine *self, const flow *from, const uint8_t *datagram, int64_t bytes) {
    int64_t *reason = NULL;
    if (bytes < HEADER_BYTES || datagram[0] >> 4 != VERSION || !header_type(datagram) || header_type(datagram) > ABORT)
        reason = &self->view.counters.refused_malformed;
    else if (header_token(datagram) != self->config.token)
        reason = &self->view.counters.refused_token;
    else if (header_job(datagram) != self->config.job)
        reason = &self->view.counters.refused_job;
    else if (from && header_sender(datagram) != from->rank)
        reason = &self->view.counters.refused_sender;
    if (reason)
        ++*reason;
    return reason != NULL;
}

/* Process a datagram from a peer. */
void engine_take(engine *self, flow *from, const uint8_t *datagram, int64_t bytes, int tos, double now_s) {
    from->view.heard_s = now_s;
    switch ((enum packet_type)header_type(datagram)) {
    case DATA:
        incoming_take_data(self, from, datagram, datagram + HEADER_BYTES, bytes - HEADER_BYTES, tos, now_s);
        break;
    case ACK:
        flow_take_acknowledgement(self, from, datagram, bytes, now_s);
        break;
    case PROBE:
        incoming_take_probe(self, from, datagram, bytes, now_s);
        break;
    case BITMAP:
    case STOP:
        outgoing_take_bitmap(self, from, datagram, bytes, now_s);
        break;
    case STOP_ACK:
        incoming_take_stop_ack(self, from, datagram);
        break;
    case HELLO:
    case HELLO_ACK:
    case ABORT:
        report_packet(self, EVENT_CONTROL, from, datagram, bytes);
        break;
    }
}

/* Return which of a peer's ports a packet comes from; negative: none. */
static int64_t path_of(flow *from, const struct sockaddr_in *source) {
    if (from->address.sin_addr.s_addr != source->sin_addr.s_addr)
        return -1;
    if (from->address.sin_port == source->sin_port)
        return 0;
    /* All packets of a burst have the same source. */
    for (int64_t i = 0, at = from->port_last; i < from->port_count; i++, at = at + 1 < from->port_count ? at + 1 : 0)
        if (from->ports[at] == source->sin_port) {
            from->port_last = at;
            return at + 1;
        }
    return -1;
}

/* Record an arrival of data from the network. The port in front of this rank limits a fast stretch. */
static void note_inbound(engine *self, double now_s) {
    if (now_s - self->inbound_last_s > INBOUND_PAUSE_S) {
        self->inbound_since_s = now_s;
        self->inbound_count = 0;
    } else {
        self->inbound_count++;
    }
    self->inbound_last_s = now_s;
    double seconds = now_s - self->inbound_since_s;
    if (seconds < INBOUND_S || self->inbound_count < INBOUND_PACKETS)
        return;
    self->view.inbound_peak = fmax(self->view.inbound_peak, (double)self->inbound_count / seconds);
    self->inbound_since_s = now_s;
    self->inbound_count = 0;
}

static void take_in(engine *self, const uint8_t *datagram, int64_t bytes, const struct sockaddr_in *source, int tos,
                    double now_s) {
    if (engine_refuses(self, NULL, datagram, bytes))
        return;
    int64_t rank = header_sender(datagram), peer = rank < self->config.ranks ? self->flow_of_rank[rank] : -1;
    flow *from = peer < 0 ? NULL : &self->flows[peer];
    int64_t way = from ? path_of(from, source) : -1;
    if (way < 0) {
        self->view.counters.refused_sender++;
        return;
    }
    if (header_type(datagram) == DATA) {
        note_inbound(self, now_s);
        if ((tos & 3) == 3) {
            from->path_marked[way]++;
            from->marked_paths |= 1ull << way;
        }
    }
    engine_take(self, from, datagram, bytes, tos, now_s);
}

/* Process one datagram, for use without a socket. */
void dlcp_take_in(engine *self, const uint8_t *datagram, int64_t bytes, uint32_t address, int64_t port, int64_t tos,
                  double now_s) {
    begin_batch(self);
    self->arrived_s = now_s;
    struct sockaddr_in source = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    source.sin_addr.s_addr = htonl(address);
    take_in(self, datagram, bytes, &source, (int)tos, now_s);
    flow_report(self, now_s); /* as after each batch from a socket */
}

/* Record when the kernel received a burst, on our clock. */
static void note_arrival(engine *self, const struct timespec *stamp, double now_s) {
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    double ago_s = (double)(real.tv_sec - stamp->tv_sec) + (double)(real.tv_nsec - stamp->tv_nsec) * 1e-9;
    self->arrived_s = now_s - fmin(fmax(ago_s, 0), STAMP_AGO_MAX_S); /* the clock may have been set meanwhile */
}

/* Read a burst's control messages: its segment size (the whole burst if absent), type of service, and arrival time. */
static void read_ancillary(engine *self, struct msghdr *header, int64_t bytes, int64_t *segment, int *tos,
                           double now_s) {
    *segment = bytes;
    *tos = 0;
    self->arrived_s = now_s;
    for (struct cmsghdr *entry = CMSG_FIRSTHDR(header); entry; entry = CMSG_NXTHDR(header, entry)) {
        if (entry->cmsg_level == IPPROTO_UDP && entry->cmsg_type == UDP_GRO) {
            int size = 0;
            memcpy(&size, CMSG_DATA(entry), sizeof size);
            if (size > 0)
                *segment = size;
        } else if (entry->cmsg_level == IPPROTO_IP && entry->cmsg_type == IP_TOS) {
            *tos = *CMSG_DATA(entry);
        } else if (entry->cmsg_level == SOL_SOCKET && entry->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec stamp;
            memcpy(&stamp, CMSG_DATA(entry), sizeof stamp);
            note_arrival(self, &stamp, now_s);
        }
    }
}

/* Process the datagrams of a burst, each of `segment` bytes except the last. */
static void split(engine *self, struct msghdr *header, int64_t bytes, const uint8_t *buffer, int64_t segment, int tos,
                  double now_s) {
    if (header->msg_flags & MSG_TRUNC)
        self->view.counters.truncated++;
    for (int64_t start = 0; start < bytes || !start; start += segment) {
        take_in(self, buffer + start, smaller(bytes - start, segment), header->msg_name, tos, now_s);
        if (!segment)
            break; /* an empty datagram */
    }
}

typedef struct {
    struct sockaddr_in source;
    union {
        char bytes[CONTROL_MAX];
        struct cmsghdr align;
    } control;
} envelope;

static struct msghdr addressed(envelope *from, struct iovec *piece) {
    return (struct msghdr){.msg_name = &from->source,
                           .msg_namelen = sizeof from->source,
                           .msg_iov = piece,
                           .msg_iovlen = 1,
                           .msg_control = from->control.bytes,
                           .msg_controllen = CONTROL_MAX};
}

/* Receive one burst, always into the same, cached buffer. Return whether there was one. */
static bool receive_burst(engine *self) {
    envelope from;
    struct iovec piece = {self->buffers, DATAGRAM_MAX};
    struct msghdr header = addressed(&from, &piece);
    ssize_t bytes = recvmsg(self->socket, &header, MSG_DONTWAIT);
    if (bytes < 0)
        return false;
    int64_t segment = 0;
    int tos = 0;
    double now_s = clock_s();
    read_ancillary(self, &header, bytes, &segment, &tos, now_s);
    self->view.counters.received_bursts++;
    bool single = segment == bytes && bytes >= HEADER_BYTES + self->config.payload_bytes;
    self->singles = single ? self->singles + 1 : 0;
    split(self, &header, bytes, self->buffers, segment, tos, now_s);
    return true;
}

/* Receive single datagrams, many in one call. */
static int receive_singles(engine *self) {
    struct mmsghdr messages[BATCH];
    struct iovec pieces[BATCH];
    envelope from[BATCH];
    for (int i = 0; i < BATCH; i++) {
        pieces[i] = (struct iovec){self->buffers + (size_t)i * SLOT_BYTES, DATAGRAM_MAX};
        messages[i].msg_hdr = addressed(&from[i], &pieces[i]);
    }
    int count = recvmmsg(self->socket, messages, BATCH, MSG_DONTWAIT, NULL);
    if (count <= 0)
        return 0;
    double now_s = clock_s();
    for (int i = 0; i < count; i++) {
        int64_t segment = 0, bytes = messages[i].msg_len;
        int tos = 0;
        read_ancillary(self, &messages[i].msg_hdr, bytes, &segment, &tos, now_s);
        if (segment < bytes)
            self->singles = 0;
        split(self, &messages[i].msg_hdr, bytes, self->buffers + (size_t)i * SLOT_BYTES, segment, tos, now_s);
    }
    self->view.counters.received_bursts += count;
    return count;
}

/* Process the socket's contents, up to a batch; return how many datagrams. A lone datagram may be the end of a message:
 * only after several in a row are more expected to arrive alone. */
static int receive_socket(engine *self) {
    if (self->singles >= SINGLES)
        return receive_singles(self);
    int count = 0;
    while (count < BURSTS && self->singles < SINGLES && receive_burst(self))
        count++;
    return count;
}

/* Process arrivals, up to a batch; return how many. If all peers are on this host, only strangers use the socket.
 * Packets that have to wait for other ranks' packets stay in their ring while there is other work: waiting there costs
 * nothing. */
static int64_t receive(engine *self) {
    int64_t count = 0;
    for (int patient = 1; self->shared && !count && patient >= 0; patient--)
        for (int64_t i = 0; i < self->config.peers; i++)
            count += ring_receive(self, &self->flows[i], patient);
    return count && self->shared == self->config.peers ? count : count + receive_socket(self);
}

/* The loop --------------------------------------------------------------------------------------------------------- */

/* Do what is due: acknowledge, probe, repeat and report; return when something is due next. */
static double tick(engine *self, double now_s) {
    double due_s = flow_acknowledge_due(self, now_s);
    for (int64_t i = 0; i < self->config.peers; i++) {
        due_s = sooner(due_s, flow_find_overtaken(&self->flows[i], now_s));
        due_s = sooner(due_s, outgoing_ask(self, &self->flows[i], now_s));
    }
    if (self->stopping)
        due_s = sooner(due_s, finished_repeat(self, now_s));
    return sooner(due_s, flow_report(self, now_s));
}

/* Send a burst to each peer that has room; return how many packets left, or SOCKET_FULL. When a ring is full, its
 * reader wakes us later. */
static int64_t pump(engine *self, double now_s) {
    int64_t sent = 0;
    for (int64_t i = 0; i < self->config.peers; i++) {
        int64_t count = flow_pump(self, &self->flows[i], now_s);
        if (count == SOCKET_FULL)
            return SOCKET_FULL;
        if (count > 0)
            sent += count;
    }
    return sent;
}

double dlcp_tick(engine *self, double now_s) {
    begin_batch(self);
    return tick(self, now_s);
}

int64_t dlcp_pump(engine *self, double now_s) {
    begin_batch(self);
    return pump(self, now_s);
}

/* When the first flow that only waits for time to pass may send. */
static double resume_s(const engine *self, double now_s) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < self->config.peers; i++)
        due_s = sooner(due_s, flow_resumes_s(&self->flows[i], now_s));
    return due_s;
}

/* Wait for packets, a bell or a wake-up; if `full`, only briefly, since the socket may have room again. */
static void wait_for_news(engine *self, double until_s, bool full) {
    double wait_s = fmax(until_s - clock_s(), 0);
    if (full)
        wait_s = sooner(wait_s, BUSY_RETRY_S);
    if (ring_fall_asleep(self))
        return;
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - floor(wait_s)) * 1e9)};
    struct pollfd watched[3] = {{self->socket, POLLIN, 0}, {self->wake, POLLIN, 0}, {self->bell, POLLIN, 0}};
    int ready = ppoll(watched, 3, &wait, NULL);
    ring_wake_up(self);
    if (ready <= 0)
        return;
    if (watched[2].revents) {
        uint64_t rung = 0;
        ssize_t read_bytes = read(self->bell, &rung, sizeof rung);
        (void)read_bytes;
    }
    if (watched[1].revents) {
        char woken[4096];
        while (read(self->wake, woken, sizeof woken) == (ssize_t)sizeof woken) {
        }
        __atomic_store_n(&self->view.woken, true, __ATOMIC_RELEASE);
    }
}

/* Move packets until `until_s`, an event, or another thread's `woken`; return the number of events. */
int64_t dlcp_turn(engine *self, double until_s) {
    begin_batch(self);
    while (!self->view.event_count) {
        int64_t received = receive(self);
        double now_s = clock_s(), due_s = tick(self, now_s);
        int64_t sent = pump(self, now_s);
        if (now_s >= until_s || self->view.failed || __atomic_load_n(&self->view.woken, __ATOMIC_ACQUIRE))
            break;
        if (received || sent > 0 || self->view.event_count)
            continue;
        wait_for_news(self, sooner(sooner(until_s, due_s), resume_s(self, now_s)), sent < 0);
    }
    /* No wake-up is lost: the waking thread queued a command before, and commands run before the next turn. */
    __atomic_store_n(&self->view.woken, false, __ATOMIC_RELEASE);
    return self->view.event_count;
}
