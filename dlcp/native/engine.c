/* SPDX-License-Identifier: Apache-2.0 */
/* One engine per rank: what Python calls of it, and the loop, which moves packets between sockets or rings and
 * messages, whole bursts at a time (UDP_GRO). The other files call only those
 * below them in this list:
 *
 *   rx.c         a received message
 *   reduction.c  an average that is computed as packets arrive
 *   time_wait.c  what is kept of a message once it is complete
 *   ack.c        acknowledgements, out and in
 *   probe.c      probes for missing packets, and their answers
 *   flight.c     everything in flight to one peer: what may leave, what is lost
 *   tx.c         a sent message, until its receiver has acknowledged it
 *   io.c         packets and events that leave
 *   pieces.c     packets in pieces, on a path that has become too narrow
 *   path.c       the paths to a peer, and how good they are
 *   flow.c       round trips to a peer, and timeouts
 *   ring.c       packets through shared memory, between ranks of one host
 *   tags.c       the encoding of tags in packets, and the sending order
 *   table.c, memory.c  messages by their names; buffers that are used again */

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

#include "loop.h"

#ifndef UDP_GRO
#define UDP_GRO 104
#endif

/* Of a step's messages some hundreds are under way. Complete ones are kept for seconds: thousands. */
enum { SENT_CHAINS = 256, RECEIVED_CHAINS = 4096 };
enum { BURSTS = 8, BATCH = 32, SINGLES = 4, RECORDS = 2, CONTROL_MAX = 128 };
/* Not a power of two, or small datagrams would all fall on the same cache lines. */
enum { SLOT_BYTES = DATAGRAM_MAX + 1600 };
static const double BUSY_RETRY_S = 0.0005;
/* The longest time for which a datagram is assumed to have waited in its socket. */
static const double STAMP_AGO_MAX_S = 1;

/* Creation and shutdown -------------------------------------------------------------------------------------------- */

engine_view *dlcp_engine_view(engine *self) {
    return &self->io.view;
}

/* Drop all messages and accept no more; the caller may free its memory. */
void dlcp_engine_stop(engine *self) {
    self->rx.closed = true;
    for (int64_t i = 0; i < self->peers; i++)
        while (self->flows[i].oldest)
            tx_free(&self->io, &self->flows[i], self->flows[i].oldest);
    rx_drop_all(&self->rx);
}

void dlcp_engine_free(engine *self) {
    dlcp_engine_stop(self);
    for (int64_t i = 0; i < self->peers; i++) {
        flight_free(&self->flows[i]);
        free(self->flows[i].messages.chains);
        free(self->flows[i].fresh);
        piece_free(&self->flows[i].pieces);
    }
    free(self->rx.messages.chains);
    free(self->rx.time_wait.chains);
    free(self->flows);
    free(self->flow_of_rank);
    free(self->buffers);
    io_free(&self->io);
    free(self);
}

/* Make an engine; add its peers next (dlcp_peer). NULL: no memory. */
engine *dlcp_engine_new(const config *rules) {
    engine *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    bool made = io_make(&self->io, rules);
    self->wake = rules->wake;
    self->bell = -1;
    self->inbound_last_s = -INFINITY;
    self->flows = calloc((size_t)rules->peers + 1, sizeof *self->flows);
    self->flow_of_rank = malloc((size_t)(rules->ranks + 1) * sizeof *self->flow_of_rank);
    self->buffers = malloc((size_t)BATCH * SLOT_BYTES);
    self->rx = (receiver){.io = &self->io, .flows = self->flows, .reminded_s = -INFINITY};
    made &= !table_make(&self->rx.messages, RECEIVED_CHAINS) && !table_make(&self->rx.time_wait, RECEIVED_CHAINS);
    if (!made || !self->flows || !self->flow_of_rank || !self->buffers) {
        dlcp_engine_free(self);
        return NULL;
    }
    self->peers = rules->peers;
    for (int64_t rank = 0; rank <= rules->ranks; rank++)
        self->flow_of_rank[rank] = -1;
    return self;
}

/* Add a peer: `address` is in host byte order, `service` has the type of service by queue and by whether a packet may
 * be dropped. Return its view, which the caller sets; NULL: no memory. */
flow_view *dlcp_peer(engine *self, int64_t peer, int64_t rank, uint32_t address, int64_t port, const uint8_t *service,
                     double now_s) {
    flow *one = &self->flows[peer];
    if (path_make(one, 1) || table_make(&one->messages, SENT_CHAINS))
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
    if (self->io.socket_count == PATHS_MAX)
        return NO_MEMORY;
    self->io.sockets[self->io.socket_count++] = socket;
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

/* A peer has both rings, or none.
 *
 * Receive packets from a peer out of `capacity` bytes at `bytes`, a multiple of 64, from now on. `marks` and `asleep`,
 * which all rings of an engine share, begin as zeros; `bell` is an eventfd that the engine waits on. */
void dlcp_ring_in(engine *self, int64_t peer, void *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                  int bell) {
    neighbour *from = &self->flows[peer].local;
    self->shared += !from->in.bytes;
    from->in = (ring){.marks = marks, .bytes = bytes, .capacity = (uint64_t)capacity};
    self->asleep = asleep;
    self->bell = bell;
}

/* Send packets to a peer through its ring from now on, not the socket; arguments as above, with the peer's `asleep` and
 * `bell`. */
void dlcp_ring_out(engine *self, int64_t peer, void *marks, uint8_t *bytes, int64_t capacity, uint32_t *asleep,
                   int bell) {
    neighbour *to = &self->flows[peer].local;
    to->out = (ring){.marks = marks, .bytes = bytes, .capacity = (uint64_t)capacity};
    to->asleep = asleep;
    to->bell = bell;
}

/* Let peers on this host read messages from the `bytes` bytes at `memory`, which they map, in place. */
void dlcp_export(engine *self, const uint8_t *memory, int64_t bytes) {
    self->io.exported = memory;
    self->io.exported_bytes = bytes;
}

/* Register a peer's exported memory. */
void dlcp_import(engine *self, int64_t peer, const uint8_t *memory, int64_t bytes) {
    self->flows[peer].local.exported = memory;
    self->flows[peer].local.exported_bytes = bytes;
}

/* Send packets to a peer on this many paths, all of whose ports it knows; return 0, or NO_MEMORY. */
int64_t dlcp_spread(engine *self, int64_t peer, int64_t paths) {
    flow *to = &self->flows[peer];
    int64_t most = self->io.sockets[0] < 0 ? PATHS_MAX : self->io.socket_count;
    /* Memory has no paths. */
    return to->local.out.bytes ? 0 : path_make(to, smaller(paths, most));
}

path_view dlcp_path(engine *self, int64_t peer, int64_t number) {
    const flow *to = &self->flows[peer];
    if (number >= to->path_count)
        return (path_view){0};
    const path *one = &to->paths[number];
    return (path_view){one->weight, one->delay_s, one->loss, one->marks, one->sent};
}

/* Messages --------------------------------------------------------------------------------------------------------- */

/* Send a message. The caller keeps its bytes until EVENT_SENT. Return 0, or NO_MEMORY. */
int64_t dlcp_send(engine *self, const send_request *request, double now_s) {
    flow *to = &self->flows[request->peer];
    tx_message *message = tx_make(&self->io, to, request, now_s);
    if (!message)
        return NO_MEMORY;
    if (message->immediate)
        probe_send(&self->io, to, message, now_s); /* announces how many packets are protected */
    return 0;
}

/* Continue sending a message from a copy of its payload; return whether any of it may still be sent. */
bool dlcp_detach(engine *self, int64_t peer, int64_t step, int64_t message, const uint8_t *payload) {
    tx_message *found = tx_find(&self->flows[peer], step, message);
    if (!found || found->delivered == found->packets)
        return false;
    if (payload)
        found->payload = payload;
    return true;
}

message_progress dlcp_sending(engine *self, int64_t peer, int64_t step, int64_t message) {
    const tx_message *found = tx_find(&self->flows[peer], step, message);
    if (!found)
        return (message_progress){0};
    return (message_progress){found->delivered, found->flying, found->unsent, found->packets};
}

/* Post a receive. The caller keeps its memory until EVENT_ARRIVED, or until the reduction, if any, is freed. Return 0;
 * NO_MEMORY; or, if the arriving message has another size, its number of packets. */
int64_t dlcp_receive(engine *self, const receive_request *request, double now_s) {
    return rx_post(&self->rx, request, now_s);
}

message_progress dlcp_receiving(engine *self, int64_t peer, int64_t step, int64_t message) {
    const rx_message *found = rx_find(&self->rx, &self->flows[peer], step, message);
    return found ? (message_progress){.delivered = found->arrived, .packets = found->packets} : (message_progress){0};
}

/* Report all messages that have arrived without a posted receive, also those that were reported before. */
void dlcp_report_unexpected(engine *self, double now_s) {
    rx_report_unexpected(&self->rx, now_s);
}

/* Refuse packets of steps before `step` from now on, and forget their messages. */
void dlcp_begin_step(engine *self, int64_t step, double now_s) {
    rx_begin_step(&self->rx, step, now_s);
}

/* Forget a complete message, for which no more packets will come. */
void dlcp_forget(engine *self, int64_t peer, int64_t step, int64_t message) {
    time_wait_forget(&self->rx, &self->flows[peer], step, message);
}

/* Remind senders of complete messages, briefly or until they acknowledge: this rank will soon be gone. */
void dlcp_remind(engine *self, double now_s) {
    time_wait_remind(&self->rx, now_s);
}

/* Send a control packet about a peer: a greeting or an abort; for a probe of the path, with the size in question. */
void dlcp_send_control(engine *self, int64_t peer, int64_t type, int64_t size, const uint8_t *payload, int64_t bytes) {
    static const msg_id none = {0, 0, 0, NULL};
    io_send_control(&self->io, &self->flows[peer], (enum packet_type)type, &none, size, size, payload, bytes);
}

/* Packets in ------------------------------------------------------------------------------------------------------- */

/* Return whether a datagram is not of this session, or not from peer `from` if given; count it as refused. */
static bool refuses(engine *self, const flow *from, const uint8_t *datagram, int64_t bytes) {
    int64_t *reason = NULL;
    if (bytes < HEADER_BYTES || datagram[0] >> 4 != VERSION || !header_type(datagram) || header_type(datagram) > ABORT)
        reason = &self->io.view.counters.refused_malformed;
    else if (header_token(datagram) != self->io.config.token)
        reason = &self->io.view.counters.refused_token;
    else if (header_job(datagram) != self->io.config.job)
        reason = &self->io.view.counters.refused_job;
    else if (from && header_sender(datagram) != from->rank)
        reason = &self->io.view.counters.refused_sender;
    if (reason)
        ++*reason;
    return reason != NULL;
}

/* Process a packet from a peer. */
static void take(engine *self, flow *from, const uint8_t *datagram, int64_t bytes, int tos, double now_s) {
    switch ((enum packet_type)header_type(datagram)) {
    case DATA:
        rx_take_data(&self->rx, from, datagram, datagram + HEADER_BYTES, bytes - HEADER_BYTES, tos, now_s);
        break;
    case ACK:
        ack_take(&self->io, from, datagram, bytes, now_s);
        break;
    case PROBE:
        rx_take_probe(&self->rx, from, datagram, bytes, now_s);
        break;
    case BITMAP:
    case STOP:
        probe_take_answer(&self->io, from, datagram, bytes, now_s);
        break;
    case STOP_ACK:
        time_wait_take_ack(&self->rx, from, datagram);
        break;
    case HELLO:
    case HELLO_ACK:
    case ABORT:
        io_report_packet(&self->io, EVENT_CONTROL, from, datagram, bytes);
        break;
    }
}

/* Process a datagram from a peer: a packet, or a piece of one. */
static void take_whole_or_piece(engine *self, flow *from, const uint8_t *datagram, int64_t bytes, int tos,
                                double now_s) {
    from->view.heard_s = now_s;
    if (datagram[1] & PIECE) {
        bool refused = false, first = !from->pieces.assemblies;
        const uint8_t *piece = datagram;
        datagram = piece_join(&from->pieces, piece, bytes, self->io.config.payload_bytes, &bytes, &refused);
        self->io.view.counters.refused_malformed += refused;
        if (!refused && first)
            io_event(&self->io, EVENT_NARROW, from->peer, now_s);
        if (!datagram)
            return;
    }
    take(self, from, datagram, bytes, tos, now_s);
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
    self->io.view.inbound_peak = fmax(self->io.view.inbound_peak, (double)self->inbound_count / seconds);
    self->inbound_since_s = now_s;
    self->inbound_count = 0;
}

static void take_in(engine *self, const uint8_t *datagram, int64_t bytes, const struct sockaddr_in *source, int tos,
                    double now_s) {
    if (refuses(self, NULL, datagram, bytes))
        return;
    int64_t rank = header_sender(datagram), peer = rank < self->io.config.ranks ? self->flow_of_rank[rank] : -1;
    flow *from = peer < 0 ? NULL : &self->flows[peer];
    int64_t way = from ? path_of(from, source) : -1;
    if (way < 0) {
        self->io.view.counters.refused_sender++;
        return;
    }
    if (header_type(datagram) == DATA) {
        note_inbound(self, now_s);
        if ((tos & 3) == 3) {
            from->path_marked[way]++;
            from->marked_paths |= 1ull << way;
        }
    }
    take_whole_or_piece(self, from, datagram, bytes, tos, now_s);
}

/* Process one datagram, for use without a socket. */
void dlcp_take_in(engine *self, const uint8_t *datagram, int64_t bytes, uint32_t address, int64_t port, int64_t tos,
                  double now_s) {
    io_begin_batch(&self->io);
    self->io.arrived_s = now_s;
    struct sockaddr_in source = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    source.sin_addr.s_addr = htonl(address);
    take_in(self, datagram, bytes, &source, (int)tos, now_s);
    flight_report(&self->io, self->flows, now_s); /* as after each batch from a socket */
}

/* Record when the kernel received a burst, on our clock. */
static void note_arrival(engine *self, const struct timespec *stamp, double now_s) {
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    double ago_s = (double)(real.tv_sec - stamp->tv_sec) + (double)(real.tv_nsec - stamp->tv_nsec) * 1e-9;
    self->io.arrived_s = now_s - fmin(fmax(ago_s, 0), STAMP_AGO_MAX_S); /* the clock may have been set meanwhile */
}

/* Read a burst's control messages: its segment size (the whole burst if absent), type of service, and arrival time. */
static void read_ancillary(engine *self, struct msghdr *header, int64_t bytes, int64_t *segment, int *tos,
                           double now_s) {
    *segment = bytes;
    *tos = 0;
    self->io.arrived_s = now_s;
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
        self->io.view.counters.truncated++;
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
    ssize_t bytes = recvmsg(self->io.sockets[0], &header, MSG_DONTWAIT);
    if (bytes < 0)
        return false;
    int64_t segment = 0;
    int tos = 0;
    double now_s = clock_s();
    read_ancillary(self, &header, bytes, &segment, &tos, now_s);
    self->io.view.counters.received_bursts++;
    bool single = segment == bytes && bytes >= HEADER_BYTES + self->io.config.payload_bytes;
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
    int count = recvmmsg(self->io.sockets[0], messages, BATCH, MSG_DONTWAIT, NULL);
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
    self->io.view.counters.received_bursts += count;
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

/* Process packets of a message in the peer's exported memory; return whether the record was valid. */
static bool take_exported(engine *self, flow *from, const record_head *head, const uint8_t *headers, double now_s) {
    const neighbour *memory = &from->local;
    int64_t place = head->place, bytes = head->message_bytes;
    if (place < 0 || bytes < 0 || place > memory->exported_bytes || bytes > memory->exported_bytes - place)
        return false;
    if (head->segment != HEADER_BYTES || head->bytes > EXPORTED_ROOM)
        return false;
    for (uint64_t start = 0; start + HEADER_BYTES <= head->bytes; start += HEADER_BYTES) {
        uint8_t header[HEADER_BYTES]; /* our own copy: it determines what is read */
        memcpy(header, headers + start, HEADER_BYTES);
        int64_t offset = header_index(header) * self->io.config.payload_bytes, left = bytes - offset;
        if (left <= 0)
            return false;
        if (refuses(self, from, header, HEADER_BYTES))
            continue;
        if (header_type(header) != DATA) {
            self->io.view.counters.refused_malformed++;
            continue;
        }
        from->view.heard_s = now_s;
        int64_t size = smaller(left, self->io.config.payload_bytes);
        rx_take_data(&self->rx, from, header, memory->exported + place + offset, size, 0, now_s);
    }
    return true;
}

/* Process a record of a peer's ring; return whether it was valid. */
static bool take_record(engine *self, flow *from, const record_head *head, const uint8_t *packets) {
    double now_s = self->io.arrived_s = clock_s();
    if (head->message_bytes && !take_exported(self, from, head, packets, now_s))
        return false;
    for (uint64_t start = 0; !head->message_bytes && start < head->bytes; start += head->segment) {
        int64_t bytes = smaller(head->bytes - (int64_t)start, head->segment);
        if (!refuses(self, from, packets + start, bytes))
            take_whole_or_piece(self, from, packets + start, bytes, 0, now_s);
    }
    self->io.view.counters.received_bursts++;
    return true;
}

/* Process records of a peer's ring, up to a limit, and perhaps only those whose turn it is; return how many. */
static int64_t receive_ring(engine *self, flow *from, bool skip_out_of_turn) {
    neighbour *local = &from->local;
    if (!local->in.bytes)
        return 0;
    int64_t count = 0;
    record_head head;
    while (count < RECORDS) {
        const uint8_t *packets = ring_next(local, &head);
        if (!packets || (skip_out_of_turn && head.bytes >= HEADER_BYTES && rx_is_out_of_turn(&self->rx, from, packets)))
            break;
        if (head.bytes && !take_record(self, from, &head, packets)) {
            ring_break(local);
            break;
        }
        ring_pass(local, &head);
        count++;
    }
    if (!local->in.bytes) /* not written by an engine: the rest is unreadable */
        self->io.view.counters.refused_malformed++;
    if (count)
        ring_relieve(local);
    return count;
}

/* Process arrivals, up to a batch; return how many. If all peers are on this host, only strangers use the socket.
 * Packets that have to wait for other ranks' packets stay in their ring while there is other work: waiting there costs
 * nothing. */
static int64_t receive(engine *self) {
    int64_t count = 0;
    for (int skip_out_of_turn = 1; self->shared && !count && skip_out_of_turn >= 0; skip_out_of_turn--)
        for (int64_t i = 0; i < self->peers; i++)
            count += receive_ring(self, &self->flows[i], skip_out_of_turn);
    return count && self->shared == self->peers ? count : count + receive_socket(self);
}

/* The loop --------------------------------------------------------------------------------------------------------- */

/* Do what is due: acknowledge, probe, repeat and report; return when something is due next. */
double dlcp_tick(engine *self, double now_s) {
    io_begin_batch(&self->io);
    double due_s = ack_due(&self->io, self->flows, now_s);
    for (int64_t i = 0; i < self->peers; i++) {
        due_s = sooner(due_s, flight_find_overtaken(&self->flows[i], now_s));
        due_s = sooner(due_s, probe_due(&self->io, &self->flows[i], now_s));
    }
    due_s = sooner(due_s, time_wait_repeat(&self->rx, now_s));
    return sooner(due_s, flight_report(&self->io, self->flows, now_s));
}

/* Send a burst to each peer that has room; return how many packets left, or SOCKET_FULL. When a ring is full, its
 * reader wakes us later. */
int64_t dlcp_pump(engine *self, double now_s) {
    io_begin_batch(&self->io);
    int64_t sent = 0;
    burst next;
    for (int64_t i = 0; i < self->peers; i++) {
        flow *to = &self->flows[i];
        if (!flight_next_burst(&self->io, to, &next, now_s))
            continue;
        int result = io_send_burst(&self->io, to, &next);
        if (result == SOCKET_FULL)
            return SOCKET_FULL;
        if (result == RING_FULL)
            continue;
        flight_note_sent(to, &next, now_s);
        sent += next.count;
    }
    return sent;
}

/* When the first flow that only waits for time to pass may send. */
static double resume_s(const engine *self, double now_s) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < self->peers; i++)
        due_s = sooner(due_s, flight_resumes_s(&self->flows[i], now_s));
    return due_s;
}

static void wake_up(engine *self) {
    if (self->asleep)
        __atomic_store_n(self->asleep, 0, __ATOMIC_SEQ_CST);
}

/* Tell peers on this host that the engine is about to wait; return whether it need not, since something arrived or may
 * leave. */
static bool fall_asleep(engine *self) {
    if (!self->asleep)
        return false;
    __atomic_store_n(self->asleep, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < self->peers; i++)
        if (ring_is_ready(&self->flows[i].local)) {
            wake_up(self);
            return true;
        }
    return false;
}

/* Wait for packets, a bell or a wake-up; if `full`, only briefly, since the socket may have room again. */
static void wait_for_packets(engine *self, double until_s, bool full) {
    double wait_s = fmax(until_s - clock_s(), 0);
    if (full)
        wait_s = sooner(wait_s, BUSY_RETRY_S);
    if (fall_asleep(self))
        return;
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - floor(wait_s)) * 1e9)};
    struct pollfd watched[3] = {{self->io.sockets[0], POLLIN, 0}, {self->wake, POLLIN, 0}, {self->bell, POLLIN, 0}};
    int ready = ppoll(watched, 3, &wait, NULL);
    wake_up(self);
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
        __atomic_store_n(&self->io.view.woken, true, __ATOMIC_RELEASE);
    }
}

/* Move packets until `until_s`, an event, or another thread's `woken`; return the number of events. */
int64_t dlcp_turn(engine *self, double until_s) {
    io_begin_batch(&self->io);
    while (!self->io.view.event_count) {
        int64_t received = receive(self);
        double now_s = clock_s(), due_s = dlcp_tick(self, now_s);
        int64_t sent = dlcp_pump(self, now_s);
        if (now_s >= until_s || self->io.view.failed || __atomic_load_n(&self->io.view.woken, __ATOMIC_ACQUIRE))
            break;
        if (received || sent > 0 || self->io.view.event_count)
            continue;
        wait_for_packets(self, sooner(sooner(until_s, due_s), resume_s(self, now_s)), sent < 0);
    }
    /* No wake-up is lost: the waking thread queued a command before, and commands run before the next turn. */
    __atomic_store_n(&self->io.view.woken, false, __ATOMIC_RELEASE);
    return self->io.view.event_count;
}
