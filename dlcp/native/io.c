/* SPDX-License-Identifier: Apache-2.0 */
/* The output of an engine: packets, through sockets (whole bursts, UDP_SEGMENT) or rings, and events for Python. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <netinet/udp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "io.h"
#include "path.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

double clock_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Prepare to send and to report; return whether there was memory. Free it in either case (io_free). */
bool io_make(io *self, const config *rules) {
    self->config = *rules;
    self->sockets[0] = rules->socket;
    self->socket_count = 1;
    self->pool.limit = rules->early_bytes_max;
    self->view.offload = true;
    self->view.room = -1;
    self->event_capacity = 64;
    self->view.events = self->events = malloc((size_t)self->event_capacity * sizeof *self->events);
    self->datagram = malloc(HEADER_BYTES + DATAGRAM_MAX);
    self->piece = malloc(HEADER_BYTES + DATAGRAM_MAX);
    return self->events && self->datagram && self->piece;
}

/* Events ----------------------------------------------------------------------------------------------------------- */

/* Return a new event to fill in. If memory is short, the event is lost and `failed` is set. */
event *io_event(io *self, event_kind kind, int64_t peer, double now_s) {
    if (self->view.event_count == self->event_capacity) {
        event *events = realloc(self->events, (size_t)self->event_capacity * 2 * sizeof *events);
        if (!events) {
            self->view.failed = true;
            return &self->unreported;
        }
        self->view.events = self->events = events;
        self->event_capacity *= 2;
    }
    event *one = &self->events[self->view.event_count++];
    *one = (event){.kind = kind, .peer = peer, .now_s = now_s};
    return one;
}

event *io_message_event(io *self, event_kind kind, const msg_id *id, int64_t packets, double now_s) {
    event *ev = io_event(self, kind, id->peer, now_s);
    ev->step = id->step;
    ev->message = id->message;
    ev->packets = packets;
    return ev;
}

/* Free memory that an event points at, once Python has processed it. */
void io_discard(io *self, void *memory) {
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

static void free_garbage(io *self) {
    for (int64_t i = 0; i < self->garbage_count; i++)
        free(self->garbage[i]);
    self->garbage_count = 0;
}

/* Begin a batch. Once Python has taken all events, the memory they pointed at is freed. */
void io_begin_batch(io *self) {
    if (!self->view.event_count)
        free_garbage(self);
}

/* Report a packet as an event; NULL if there is no memory, and it counts as lost. */
event *io_report_packet(io *self, event_kind kind, const flow *peer, const uint8_t *datagram, int64_t bytes) {
    uint8_t *copy = malloc((size_t)bytes);
    if (!copy)
        return NULL;
    memcpy(copy, datagram, (size_t)bytes);
    io_discard(self, copy);
    event *ev = io_event(self, kind, peer->peer, peer->view.heard_s);
    ev->data = copy;
    ev->bytes = bytes;
    return ev;
}

void io_free(io *self) {
    free_garbage(self);
    free(self->garbage);
    pool_free(&self->pool);
    free(self->events);
    free(self->datagram);
    free(self->piece);
}

/* Packets ---------------------------------------------------------------------------------------------------------- */

/* How many packets one BITMAP or STOP covers. */
int64_t io_bitmap_packets(const io *self) {
    return self->config.payload_bytes * 8;
}

void io_write_header(const io *self, uint8_t *header, enum packet_type type, int64_t step, int64_t message,
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
static int after_error(io *self) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
        return SOCKET_FULL;
    /* No route, or an unreachable peer; the deadline's error names the peer. */
    self->view.counters.send_errors++;
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

/* Send pieces to a peer's address: datagrams of `segment` bytes, or a single one if that is 0. Return what sendmsg
 * returns. */
static ssize_t send_vector(const io *self, flow *to, struct iovec *pieces, int64_t parts, int tos, uint16_t segment,
                           int64_t way) {
    union {
        char bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(uint16_t))];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof control);
    size_t used = 0;
    if (tos && to->address.any.ss_family == AF_INET6)
        used = put_ancillary(control.bytes, used, IPPROTO_IPV6, IPV6_TCLASS, &tos, sizeof tos);
    else if (tos)
        used = put_ancillary(control.bytes, used, IPPROTO_IP, IP_TOS, &tos, sizeof tos);
    if (segment)
        used = put_ancillary(control.bytes, used, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment);
    struct msghdr message = {.msg_name = &to->address.any,
                             .msg_namelen = to->address.bytes,
                             .msg_iov = pieces,
                             .msg_iovlen = (size_t)parts,
                             .msg_control = used ? control.bytes : NULL,
                             .msg_controllen = used};
    return sendmsg(self->sockets[way], &message, MSG_DONTWAIT);
}

/* The same as io_send_datagram, for a datagram that fits the path. */
static int send_whole(io *self, flow *to, const uint8_t *datagram, int64_t bytes, int tos, int64_t way) {
    if (self->sockets[0] < 0) {
        if (!self->view.room)
            return SOCKET_FULL;
        if (self->view.room > 0)
            self->view.room--;
        event *ev = io_report_packet(self, EVENT_DATAGRAM, to, datagram, bytes);
        if (ev) {
            ev->tos = tos;
            ev->path = way;
        }
        return 0;
    }
    if (to->local.out.bytes)
        return ring_send_datagram(&to->local, datagram, bytes);
    struct iovec all = {(void *)datagram, (size_t)bytes};
    return send_vector(self, to, &all, 1, tos, 0, way) >= 0 ? 0 : after_error(self);
}

/* Send one datagram. Return SOCKET_FULL or RING_FULL if it cannot leave now; other errors count as loss. */
int io_send_datagram(io *self, flow *to, const uint8_t *datagram, int64_t bytes, int tos, int64_t way) {
    int64_t room = to->view.piece_bytes, payload_bytes = bytes - HEADER_BYTES;
    if (!room || payload_bytes <= room || to->local.out.bytes || header_type(datagram) == HELLO) /* it tests the path */
        return send_whole(self, to, datagram, bytes, tos, way);
    for (int64_t offset = 0, size = 0; offset < payload_bytes; offset += size) {
        size = piece_cut(datagram, bytes, room, offset, self->piece);
        int result = send_whole(self, to, self->piece, HEADER_BYTES + PIECE_HEAD_BYTES + size, tos, way);
        if (result < 0)
            return offset ? 0 : result; /* once a part has left, the packet counts as lost */
    }
    return 0;
}

static int send_one_by_one(io *self, flow *to, const burst *sent) {
    uint8_t *datagram = self->datagram;
    for (int64_t k = 0, piece = 0; k < sent->count; k++) {
        int64_t bytes = 0;
        do {
            if (sent->pieces[piece].iov_len)
                memcpy(datagram + bytes, sent->pieces[piece].iov_base, sent->pieces[piece].iov_len);
            bytes += (int64_t)sent->pieces[piece++].iov_len;
            assert(bytes <= HEADER_BYTES + DATAGRAM_MAX);
        } while (piece < sent->piece_count &&
                 (k + 1 == sent->count || sent->pieces[piece].iov_base != sent->headers[k + 1]));
        /* Once part of a burst has left, a packet that the socket cannot accept counts as lost. */
        if (io_send_datagram(self, to, datagram, bytes, sent->tos, sent->way) < 0 && !k)
            return SOCKET_FULL;
    }
    return 0;
}

static int send_through_ring(io *self, flow *to, const burst *sent) {
    int64_t segment = HEADER_BYTES + self->config.payload_bytes;
    int result = sent->exported ? ring_send_exported(&to->local, sent->headers, sent->count * HEADER_BYTES,
                                                     HEADER_BYTES, sent->exported - self->exported, sent->message_bytes)
                                : ring_send_burst(&to->local, sent->pieces, sent->piece_count, segment);
    self->view.counters.sent_bursts += !result;
    return result;
}

/* Send packets of a message in one burst, on one path; return the same as io_send_datagram. */
int io_send_burst(io *self, flow *to, burst *sent) {
    bool whole = !to->view.piece_bytes && (sent->count == 1 || self->view.offload);
    if (self->sockets[0] < 0 || (!to->local.out.bytes && !whole))
        return send_one_by_one(self, to, sent);
    if (to->local.out.bytes)
        return send_through_ring(self, to, sent);
    uint16_t segment = sent->count > 1 ? (uint16_t)(HEADER_BYTES + self->config.payload_bytes) : 0;
    self->view.counters.sent_bursts++;
    if (send_vector(self, to, sent->pieces, sent->piece_count, sent->tos, segment, sent->way) >= 0)
        return 0;
    bool refused = errno == EIO || errno == EINVAL || errno == EOPNOTSUPP;
    if (segment && (refused || errno == EMSGSIZE)) {
        /* No transmit checksum offload, or an old kernel; or, with EMSGSIZE, segments above the path MTU that the
         * kernel has learned: it fragments packets that are sent alone. */
        self->view.offload &= !refused;
        return send_one_by_one(self, to, sent);
    }
    return after_error(self);
}

/* Send a control packet about a message. If it cannot leave now it counts as lost, and is repeated. */
void io_send_control(io *self, flow *to, enum packet_type type, const msg_id *id, int64_t index, int64_t count,
                     const uint8_t *payload, int64_t bytes) {
    uint8_t *datagram = self->datagram;
    assert(bytes <= DATAGRAM_MAX);
    io_write_header(self, datagram, type, id->step, id->message, index, count);
    if (bytes)
        memcpy(datagram + HEADER_BYTES, payload, (size_t)bytes);
    /* A greeting lists our other ports for the peer, so it comes from the known one. */
    int64_t way = type == HELLO || type == HELLO_ACK || type == ABORT ? 0 : path_for_control(to);
    if (io_send_datagram(self, to, datagram, HEADER_BYTES + bytes, self->config.control_tos, way) < 0)
        self->view.counters.control_unsent++;
}
