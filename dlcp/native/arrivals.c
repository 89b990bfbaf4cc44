/* SPDX-License-Identifier: Apache-2.0 */
/* Packets that arrive, in bursts of datagrams (UDP_GRO) or through rings: each is checked, and passed to the code that
 * handles it. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <netinet/udp.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "ack.h"
#include "flight.h"
#include "loop.h"
#include "probe.h"
#include "time_wait.h"

#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum { BURSTS = 8, SINGLES = 4, RECORDS = 2, CONTROL_MAX = 128 };
/* The longest time for which a datagram is assumed to have waited in its socket. */
static const double STAMP_AGO_MAX_S = 1;

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
static int64_t path_of(flow *from, const socket_address *source) {
    if (!same_host(&from->address, source))
        return -1;
    in_port_t port = port_of(source);
    if (port_of(&from->address) == port)
        return 0;
    /* All packets of a burst have the same source. */
    for (int64_t i = 0, at = from->port_last; i < from->port_count; i++, at = at + 1 < from->port_count ? at + 1 : 0)
        if (from->ports[at] == port) {
            from->port_last = at;
            return at + 1;
        }
    return -1;
}

/* Record an arrival of data from the network. During a fast stretch, this rank's own port is the limit. */
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

static void take_in(engine *self, const uint8_t *datagram, int64_t bytes, const socket_address *source, int tos,
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
        if (!(datagram[1] & TRIMMED)) /* what is left of those is fast at any port */
            note_inbound(self, now_s);
        if ((tos & 3) == 3) {
            from->path_marked[way]++;
            from->marked_paths |= 1ull << way;
        }
    }
    take_whole_or_piece(self, from, datagram, bytes, tos, now_s);
}

/* Process one datagram, for use without a socket. */
void dlcp_take_in(engine *self, const uint8_t *datagram, int64_t bytes, const uint8_t *address, int64_t address_bytes,
                  int64_t tos, double now_s) {
    io_begin_batch(&self->io);
    self->io.arrived_s = now_s;
    socket_address source = socket_address_of(address, address_bytes);
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
            *tos = *CMSG_DATA(entry); /* a byte, where IPv6 has an int */
        } else if (entry->cmsg_level == IPPROTO_IPV6 && entry->cmsg_type == IPV6_TCLASS) {
            memcpy(tos, CMSG_DATA(entry), sizeof *tos);
        } else if (entry->cmsg_level == SOL_SOCKET && entry->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec stamp;
            memcpy(&stamp, CMSG_DATA(entry), sizeof stamp);
            note_arrival(self, &stamp, now_s);
        }
    }
}

/* Process the datagrams of a burst, each of `segment` bytes except the last. */
static void split(engine *self, const struct msghdr *header, int64_t bytes, const uint8_t *buffer, int64_t segment,
                  int tos, double now_s) {
    socket_address *source = header->msg_name; /* of an envelope */
    source->bytes = header->msg_namelen;
    if (header->msg_flags & MSG_TRUNC)
        self->io.view.counters.truncated++;
    for (int64_t start = 0; start < bytes || !start; start += segment) {
        take_in(self, buffer + start, smaller(bytes - start, segment), source, tos, now_s);
        if (!segment)
            break; /* an empty datagram */
    }
}

typedef struct {
    socket_address source;
    union {
        char bytes[CONTROL_MAX];
        struct cmsghdr align;
    } control;
} envelope;

static struct msghdr addressed(envelope *from, struct iovec *piece) {
    return (struct msghdr){.msg_name = &from->source,
                           .msg_namelen = sizeof from->source.any,
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
    struct mmsghdr messages[RECEIVE_BUFFERS];
    struct iovec pieces[RECEIVE_BUFFERS];
    envelope from[RECEIVE_BUFFERS];
    for (int i = 0; i < RECEIVE_BUFFERS; i++) {
        pieces[i] = (struct iovec){self->buffers + (size_t)i * RECEIVE_BUFFER_BYTES, DATAGRAM_MAX};
        messages[i].msg_hdr = addressed(&from[i], &pieces[i]);
    }
    int count = recvmmsg(self->io.sockets[0], messages, RECEIVE_BUFFERS, MSG_DONTWAIT, NULL);
    if (count <= 0)
        return 0;
    double now_s = clock_s();
    for (int i = 0; i < count; i++) {
        int64_t segment = 0, bytes = messages[i].msg_len;
        int tos = 0;
        read_ancillary(self, &messages[i].msg_hdr, bytes, &segment, &tos, now_s);
        if (segment < bytes)
            self->singles = 0;
        split(self, &messages[i].msg_hdr, bytes, self->buffers + (size_t)i * RECEIVE_BUFFER_BYTES, segment, tos, now_s);
    }
    self->io.view.counters.received_bursts += count;
    return count;
}

/* Process the socket's contents, up to a batch; return how many datagrams. A lone datagram may be the end of a message,
 * so only after several in a row are more expected to arrive alone. */
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

/* Process records of a peer's ring, up to a limit, or only those whose turn it is; return how many. */
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
int64_t receive_packets(engine *self) {
    int64_t count = 0;
    for (int skip_out_of_turn = 1; self->shared && !count && skip_out_of_turn >= 0; skip_out_of_turn--)
        for (int64_t i = 0; i < self->peers; i++)
            count += receive_ring(self, &self->flows[i], skip_out_of_turn);
    return count && self->shared == self->peers ? count : count + receive_socket(self);
}
