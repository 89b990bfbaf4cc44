/* SPDX-License-Identifier: Apache-2.0 */
/* The engine, its socket, and the loop that moves whole bursts between the two: UDP_SEGMENT out, UDP_GRO in. */

#define _GNU_SOURCE
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

#include "engine.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum { BURSTS = 8, BATCH = 32, SINGLES = 4, DATAGRAM_MAX = 65536, CONTROL_MAX = 128 };
enum { SLOT_BYTES = DATAGRAM_MAX + 1600 }; /* no power of two, or small datagrams would all fall on the same cache lines */
static const double BUSY_RETRY_S = 0.0005;

double clock_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Make an engine for `flows` peers. The caller sets what it goes by, then names them (dlcp_engine_peer); `ranks` is one more
 * than the largest rank. Without a socket (-1) packets leave through `emit`. NULL: no memory. */
API engine *dlcp_engine_new(int64_t rank, int64_t job, uint64_t token, int64_t payload_bytes, int64_t control_queue,
                            int64_t flows, int64_t ranks, int socket, int wake, int control_tos,
                            control_function on_control, unknown_function on_unknown, settled_function on_settled,
                            taken_function on_taken, emit_function emit) {
    engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->rank = rank, e->job = job, e->token = token, e->payload_bytes = payload_bytes, e->control_queue = control_queue;
    e->socket = socket, e->wake = wake, e->bell = -1, e->control_tos = (uint8_t)control_tos, e->offload = 1;
    e->on_control = on_control, e->on_unknown = on_unknown, e->on_settled = on_settled, e->on_taken = on_taken;
    e->emit = emit;
    e->flow_count = flows, e->rank_count = ranks, e->chain_count = 64;
    e->flows = calloc((size_t)flows + 1, sizeof *e->flows);
    e->flow_of_rank = malloc((size_t)(ranks + 1) * sizeof *e->flow_of_rank);
    e->chains = calloc((size_t)e->chain_count, sizeof *e->chains);
    e->buffers = malloc((size_t)BATCH * SLOT_BYTES);
    if (!e->flows || !e->flow_of_rank || !e->chains || !e->buffers) {
        free(e->flows), free(e->flow_of_rank), free(e->chains), free(e->buffers), free(e);
        return NULL;
    }
    for (int64_t r = 0; r <= ranks; r++) e->flow_of_rank[r] = -1;
    return e;
}

/* Name a peer; `address` is in host byte order. Return its flow. */
API flow *dlcp_engine_peer(engine *e, int64_t peer, int64_t rank, uint32_t address, int64_t port, double now_s) {
    flow *f = &e->flows[peer];
    f->peer = peer, f->rank = rank;
    f->address.sin_family = AF_INET;
    f->address.sin_addr.s_addr = htonl(address);
    f->address.sin_port = htons((uint16_t)port);
    f->heard_s = now_s, f->disorder = e->disorder_min, f->burst = SEGMENTS_MAX, f->eager = 1;
    f->acknowledge_due_s = f->report_due_s = INFINITY;
    for (int q = 0; q < QUEUES; q++) f->newest_delivered_s[q] = -1;
    e->flow_of_rank[rank] = peer;
    return f;
}

/* Free the engine. All messages must have been removed and closed before. */
API void dlcp_engine_free(engine *e) {
    for (int64_t i = 0; i < e->flow_count; i++) {
        for (int q = 0; q < QUEUES; q++) free(e->flows[i].runs[q].runs);
        free(e->flows[i].messages), free(e->flows[i].fresh);
    }
    free(e->flows), free(e->flow_of_rank), free(e->chains), free(e->buffers), free(e);
}

/* Return the counter of refused packets that a datagram is for, or NULL if it is one of this session. */
static int64_t *reason_to_refuse(engine *e, const uint8_t *datagram, int64_t bytes) {
    if (bytes < HEADER_BYTES) return &e->refused_malformed;
    if (datagram[0] >> 4 != VERSION || !(datagram[0] & 15) || (datagram[0] & 15) > ABORT) return &e->refused_malformed;
    if (get64(datagram + 24) != e->token) return &e->refused_token;
    return get16(datagram + 4) != e->job ? &e->refused_job : NULL;
}

static void take_from(engine *e, flow *f, const uint8_t *datagram, int64_t bytes, int tos, double now_s) {
    f->heard_s = now_s;
    int type = datagram[0] & 15;
    if (type == DATA) store_data(e, f, datagram, datagram + HEADER_BYTES, bytes - HEADER_BYTES, tos, now_s);
    else if (type == ACK) take_acknowledgement(e, f, datagram, bytes, now_s);
    else e->on_control(f->peer, datagram, bytes, now_s);
}

static void take_in(engine *e, const uint8_t *datagram, int64_t bytes, const struct sockaddr_in *source, int tos, double now_s) {
    int64_t *refused = reason_to_refuse(e, datagram, bytes);
    if (!refused) {
        int64_t rank = get16(datagram + 14), peer = rank < e->rank_count ? e->flow_of_rank[rank] : -1;
        flow *f = peer < 0 ? NULL : &e->flows[peer];
        if (f && f->address.sin_addr.s_addr == source->sin_addr.s_addr && f->address.sin_port == source->sin_port) {
            take_from(e, f, datagram, bytes, tos, now_s);
            return;
        }
        refused = &e->refused_sender;
    }
    ++*refused;
}

/* Take in a datagram from a peer's ring. */
void take_shared(engine *e, flow *f, const uint8_t *datagram, int64_t bytes, double now_s) {
    int64_t *refused = reason_to_refuse(e, datagram, bytes);
    if (!refused && get16(datagram + 14) != f->rank) refused = &e->refused_sender;
    if (refused) ++*refused;
    else take_from(e, f, datagram, bytes, 0, now_s);
}

/* Take in a packet of data whose payload is where the peer sends from. */
void take_borrowed(engine *e, flow *f, const uint8_t *header, const uint8_t *payload, int64_t size, double now_s) {
    int64_t *refused = reason_to_refuse(e, header, HEADER_BYTES);
    if (!refused && get16(header + 14) != f->rank) refused = &e->refused_sender;
    if (!refused && (header[0] & 15) != DATA) refused = &e->refused_malformed;
    if (refused) {
        ++*refused;
        return;
    }
    f->heard_s = now_s;
    store_data(e, f, header, payload, size, 0, now_s);
}

/* Out ---------------------------------------------------------------------------------------------------------------- */

static int64_t pieces_of(const engine *e, const outgoing *m, uint32_t index, struct iovec *pieces) {
    int64_t offset = (int64_t)index * e->payload_bytes, size = m->bytes + m->tail_bytes - offset;
    if (size > e->payload_bytes) size = e->payload_bytes;
    int64_t direct = m->bytes - offset < size ? m->bytes - offset : size, count = 0;
    if (direct > 0) pieces[count++] = (struct iovec){(void *)(m->payload + offset), (size_t)direct};
    else direct = 0;
    if (direct < size) {
        int64_t start = offset + direct - m->bytes;
        pieces[count++] = (struct iovec){(void *)(m->tail + start), (size_t)(size - direct)};
    }
    return count;
}

static int emit_one_by_one(engine *e, flow *f, outgoing *m, const uint32_t *packets, int64_t count,
                           uint8_t (*headers)[HEADER_BYTES]) {
    uint8_t datagram[DATAGRAM_MAX];
    for (int64_t k = 0; k < count; k++) {
        struct iovec pieces[2];
        int64_t parts = pieces_of(e, m, packets[k], pieces), bytes = HEADER_BYTES;
        memcpy(datagram, headers[k], HEADER_BYTES);
        for (int64_t p = 0; p < parts; p++) {
            memcpy(datagram + bytes, pieces[p].iov_base, pieces[p].iov_len);
            bytes += (int64_t)pieces[p].iov_len;
        }
        /* A packet that the socket cannot take now, when earlier ones of the burst have left, is as good as lost. */
        if (emit_control(e, f, datagram, bytes, m->tags[packets[k]][3]) < 0 && !k) return -1;
    }
    return 0;
}

/* Send packets of a message at once. Return SOCKET_FULL or RING_FULL if they cannot leave now; other errors count as loss on the way. */
int emit_burst(engine *e, flow *f, outgoing *m, const uint32_t *packets, int64_t count, uint8_t (*headers)[HEADER_BYTES]) {
    if (e->emit || (!f->out.bytes && count > 1 && !e->offload)) return emit_one_by_one(e, f, m, packets, count, headers);
    if (f->out.bytes && is_lent(e, m, packets, count)) return share_lent(e, f, m, count, headers);
    struct iovec pieces[3 * SEGMENTS_MAX];
    int64_t parts = 0;
    for (int64_t k = 0; k < count; k++) {
        pieces[parts++] = (struct iovec){headers[k], HEADER_BYTES};
        parts += pieces_of(e, m, packets[k], pieces + parts);
    }
    if (f->out.bytes) return share_burst(e, f, pieces, parts);
    union {
        char bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(uint16_t))];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_name = &f->address, .msg_namelen = sizeof f->address, .msg_iov = pieces,
                             .msg_iovlen = (size_t)parts, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    size_t used = 0;
    if (m->tags[packets[0]][3]) {
        int tos = m->tags[packets[0]][3];
        c->cmsg_level = IPPROTO_IP, c->cmsg_type = IP_TOS, c->cmsg_len = CMSG_LEN(sizeof tos);
        memcpy(CMSG_DATA(c), &tos, sizeof tos);
        used += CMSG_SPACE(sizeof tos);
        c = CMSG_NXTHDR(&message, c);
    }
    if (count > 1) {
        uint16_t segment = (uint16_t)(HEADER_BYTES + e->payload_bytes);
        c->cmsg_level = IPPROTO_UDP, c->cmsg_type = UDP_SEGMENT, c->cmsg_len = CMSG_LEN(sizeof segment);
        memcpy(CMSG_DATA(c), &segment, sizeof segment);
        used += CMSG_SPACE(sizeof segment);
    }
    message.msg_controllen = used;
    if (!used) message.msg_control = NULL;
    e->sent_bursts++;
    if (sendmsg(e->socket, &message, MSG_DONTWAIT) >= 0) return 0;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return SOCKET_FULL;
    if (count > 1 && (errno == EIO || errno == EINVAL || errno == EOPNOTSUPP)) {
        e->offload = 0; /* no checksum offload on the way out, or an old kernel */
        return emit_one_by_one(e, f, m, packets, count, headers);
    }
    e->send_errors++, e->last_errno = errno;
    return 0;
}

/* Send one datagram; as emit_burst. */
int emit_control(engine *e, flow *f, const uint8_t *datagram, int64_t bytes, int tos) {
    if (e->emit) return e->emit(f->peer, datagram, bytes, tos);
    if (f->out.bytes) return share_control(f, datagram, bytes);
    struct iovec piece = {(void *)datagram, (size_t)bytes};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_name = &f->address, .msg_namelen = sizeof f->address, .msg_iov = &piece, .msg_iovlen = 1};
    if (tos) {
        message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = IPPROTO_IP, c->cmsg_type = IP_TOS, c->cmsg_len = CMSG_LEN(sizeof tos);
        memcpy(CMSG_DATA(c), &tos, sizeof tos);
    }
    if (sendmsg(e->socket, &message, MSG_DONTWAIT) >= 0) return 0;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return SOCKET_FULL;
    e->send_errors++, e->last_errno = errno;
    return 0;
}

API int64_t dlcp_engine_send(engine *e, int64_t peer, const uint8_t *datagram, int64_t bytes, int64_t tos) {
    return emit_control(e, &e->flows[peer], datagram, bytes, (int)tos);
}

/* In ----------------------------------------------------------------------------------------------------------------- */

API void dlcp_engine_take_in(engine *e, const uint8_t *datagram, int64_t bytes, uint32_t address, int64_t port,
                             int64_t tos, double now_s) {
    struct sockaddr_in source = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    source.sin_addr.s_addr = htonl(address);
    take_in(e, datagram, bytes, &source, (int)tos, now_s);
}

/* What the kernel tells beside a burst: the size of its datagrams, which is all of it if there is one, and the type of service. */
static void read_control(struct msghdr *header, int64_t bytes, int64_t *segment, int *tos) {
    *segment = bytes, *tos = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
            int size;
            memcpy(&size, CMSG_DATA(c), sizeof size);
            if (size > 0) *segment = size;
        } else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS) {
            *tos = *CMSG_DATA(c);
        }
    }
}

static void split(engine *e, struct msghdr *header, int64_t bytes, uint8_t *buffer, double now_s) {
    int64_t segment;
    int tos;
    read_control(header, bytes, &segment, &tos);
    if (header->msg_flags & MSG_TRUNC) e->truncated++;
    for (int64_t start = 0; start < bytes || !start; start += segment) {
        int64_t size = bytes - start < segment ? bytes - start : segment;
        take_in(e, buffer + start, size, header->msg_name, tos, now_s);
        if (!segment) break;
    }
}

typedef struct {
    struct sockaddr_in source;
    union {
        char bytes[CONTROL_MAX];
        struct cmsghdr align;
    } control;
} envelope;

static struct msghdr addressed(envelope *from, struct iovec *pieces, int64_t count) {
    return (struct msghdr){.msg_name = &from->source, .msg_namelen = sizeof from->source, .msg_iov = pieces,
                           .msg_iovlen = (size_t)count, .msg_control = from->control.bytes,
                           .msg_controllen = CONTROL_MAX};
}

static int is_single(const engine *e, int64_t bytes, int64_t segment) {
    return segment == bytes && bytes >= HEADER_BYTES + e->payload_bytes;
}

/* Receive one burst, always into the same buffer, which stays in the caches. Return 0 if there is none. */
static int receive_burst(engine *e) {
    envelope from;
    struct iovec piece = {e->buffers, DATAGRAM_MAX};
    struct msghdr header = addressed(&from, &piece, 1);
    ssize_t bytes = recvmsg(e->socket, &header, MSG_DONTWAIT);
    if (bytes < 0) return 0;
    int64_t segment;
    int tos;
    read_control(&header, bytes, &segment, &tos);
    e->received_bursts++;
    e->singles = is_single(e, bytes, segment) ? e->singles + 1 : 0;
    split(e, &header, bytes, e->buffers, clock_s());
    return 1;
}

/* Receive datagrams that come one by one, many in one call. */
static int receive_singles(engine *e) {
    struct mmsghdr messages[BATCH];
    struct iovec pieces[BATCH];
    envelope from[BATCH];
    for (int i = 0; i < BATCH; i++) {
        pieces[i] = (struct iovec){e->buffers + (size_t)i * SLOT_BYTES, DATAGRAM_MAX};
        messages[i].msg_hdr = addressed(&from[i], &pieces[i], 1);
    }
    int count = recvmmsg(e->socket, messages, BATCH, MSG_DONTWAIT, NULL);
    if (count <= 0) return 0;
    double now_s = clock_s();
    for (int i = 0; i < count; i++) {
        int64_t segment;
        int tos;
        read_control(&messages[i].msg_hdr, messages[i].msg_len, &segment, &tos);
        if (segment < messages[i].msg_len) e->singles = 0;
        split(e, &messages[i].msg_hdr, messages[i].msg_len, e->buffers + (size_t)i * SLOT_BYTES, now_s);
    }
    e->received_bursts += count;
    return count;
}

/* Take in what the socket holds, up to a batch; return how much it was. A lone datagram may be the end of a message: only
 * after some the next ones are expected to come alone. */
static int receive_socket(engine *e) {
    if (e->singles >= SINGLES) return receive_singles(e);
    int count = 0;
    while (count < BURSTS && e->singles < SINGLES && receive_burst(e)) count++;
    return count;
}

/* Take in what has come, up to a batch; return how much it was. Where all peers are on this host, the socket is for strangers.
 * What would have to wait for other ranks' packets stays in its ring while there is anything else: there it costs nothing. */
static int64_t receive(engine *e) {
    int64_t count = 0;
    for (int patient = 1; e->shared && !count && patient >= 0; patient--)
        for (int64_t i = 0; i < e->flow_count; i++) count += receive_shared(e, &e->flows[i], patient);
    return count && e->shared == e->flow_count ? count : count + receive_socket(e);
}

/* The loop ----------------------------------------------------------------------------------------------------------- */

/* Send a burst to each peer that has room; return how many packets left, or -1 if the socket is full. Where a ring is, its reader
 * rings once it is not. */
API int64_t dlcp_engine_pump(engine *e, double now_s) {
    int64_t sent = 0;
    for (int64_t i = 0; i < e->flow_count; i++) {
        int64_t count = pump_flow(e, &e->flows[i], now_s);
        if (count == SOCKET_FULL) return -1;
        if (count > 0) sent += count;
    }
    return sent;
}

API double dlcp_engine_acknowledge(engine *e, double now_s) {
    return acknowledge_due(e, now_s);
}

/* When the first report on a flow is due. */
API double dlcp_engine_report_due(const engine *e) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < e->flow_count; i++)
        if (e->flows[i].report_due_s < due_s) due_s = e->flows[i].report_due_s;
    return due_s;
}

static double resume_s(const engine *e) {
    double due_s = INFINITY;
    for (int64_t i = 0; i < e->flow_count; i++) {
        const flow *f = &e->flows[i];
        if (f->message_count && f->window < 1 && !f->flying && paused_until(f) < due_s) due_s = paused_until(f);
    }
    return due_s;
}

static double smaller(double a, double b) {
    return a < b ? a : b;
}

static void wait_for_news(engine *e, double until_s, int full) {
    double now_s = clock_s(), wait_s = until_s - now_s;
    if (full) wait_s = smaller(wait_s, BUSY_RETRY_S);
    if (wait_s < 0) wait_s = 0;
    if (fall_asleep(e)) return;
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - floor(wait_s)) * 1e9)};
    struct pollfd watched[3] = {{e->socket, POLLIN, 0}, {e->wake, POLLIN, 0}, {e->bell, POLLIN, 0}};
    int ready = ppoll(watched, 3, &wait, NULL);
    wake_up(e);
    if (ready <= 0) return;
    if (watched[2].revents) {
        uint64_t rung;
        ssize_t read_bytes = read(e->bell, &rung, sizeof rung);
        (void)read_bytes;
    }
    if (watched[1].revents) {
        char woken[4096];
        while (read(e->wake, woken, sizeof woken) == (ssize_t)sizeof woken) {}
        __atomic_store_n(&e->woken, 1, __ATOMIC_RELEASE);
    }
}

/* Move packets until `until_s`, or until Python is wanted: woken, a report due, or a message with nothing left to send; return
 * whether it was that. */
API int64_t dlcp_engine_turn(engine *e, double until_s) {
    for (;;) {
        int64_t received = receive(e);
        double now_s = clock_s(), acknowledge_s = acknowledge_due(e, now_s);
        int64_t sent = dlcp_engine_pump(e, now_s);
        double due_s = smaller(until_s, dlcp_engine_report_due(e));
        if (now_s >= due_s || e->attention || __atomic_load_n(&e->woken, __ATOMIC_ACQUIRE)) break;
        if (received || sent > 0) continue;
        wait_for_news(e, smaller(smaller(due_s, acknowledge_s), resume_s(e)), sent < 0);
    }
    int idle = e->attention;
    e->attention = 0;
    __atomic_store_n(&e->woken, 0, __ATOMIC_RELEASE);
    return idle;
}

/* Sizes of the public parts, for Python to check its mirror by. */
API int64_t dlcp_sizes(int64_t which) {
    switch (which) {
        case 0: return (int64_t)offsetof(engine, payload_bytes);
        case 1: return (int64_t)offsetof(flow, peer);
        case 2: return (int64_t)offsetof(outgoing, id);
        default: return (int64_t)offsetof(incoming, id);
    }
}

/* Constants that both have because arrays are as long, for Python to compare. */
API int64_t dlcp_constants(int64_t which) {
    switch (which) {
        case 0: return BLOCK_PACKETS;
        case 1: return SEGMENTS_MAX;
        case 2: return SEND_BLOCK_PACKETS;
        default: return RECENT;
    }
}
