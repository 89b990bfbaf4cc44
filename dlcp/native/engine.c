/* SPDX-License-Identifier: Apache-2.0 */
/* One engine per rank: the functions that Python calls, and the loop, which moves packets between sockets or rings and
 * messages. The other files call only those below them in this list:
 *
 *   arrivals.c   packets that arrive
 *   rx.c         a received message
 *   reduction.c  an average that is computed as packets arrive
 *   time_wait.c  the state kept of a message once it is complete
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
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ack.h"
#include "flight.h"
#include "loop.h"
#include "path.h"
#include "probe.h"
#include "time_wait.h"

/* Some hundreds of a step's messages are in progress at once. Complete ones are kept for seconds: thousands. */
enum { SENT_CHAINS = 256, RECEIVED_CHAINS = 4096 };
static const double BUSY_RETRY_S = 0.0005;

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
    self->buffers = malloc((size_t)RECEIVE_BUFFERS * RECEIVE_BUFFER_BYTES);
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

/* Add a peer: `address` is a socket address, `service` has the type of service by queue and by whether a packet may be
 * dropped. Return its view, which the caller sets; NULL: no memory. */
flow_view *dlcp_peer(engine *self, int64_t peer, int64_t rank, const uint8_t *address, int64_t address_bytes,
                     const uint8_t *service, double now_s) {
    flow *one = &self->flows[peer];
    if (path_make(one, 1) || table_make(&one->messages, SENT_CHAINS))
        return NULL;
    one->peer = peer;
    one->rank = rank;
    one->address = socket_address_of(address, address_bytes);
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

/* Send packets to a peer through its ring from now on, instead of the socket; arguments as above, with the peer's
 * `asleep` and `bell`. */
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

/* Send a control packet to a peer: a greeting or an abort, or a probe of the path, with the size to test. */
void dlcp_send_control(engine *self, int64_t peer, int64_t type, int64_t size, const uint8_t *payload, int64_t bytes) {
    static const msg_id none = {0, 0, 0, NULL};
    io_send_control(&self->io, &self->flows[peer], (enum packet_type)type, &none, size, size, payload, bytes);
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

/* Tell peers on this host that the engine is about to wait; return whether it need not wait, because something arrived
 * or may leave. */
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
        dlcp_wake(self);
    }
}

/* Make dlcp_turn return; callable from any thread, which also writes to the descriptor `wake`. */
void dlcp_wake(engine *self) {
    atomic_store_explicit(&self->woken, true, memory_order_release);
}

/* Move packets until `until_s`, an event, or dlcp_wake; return the number of events. */
int64_t dlcp_turn(engine *self, double until_s) {
    io_begin_batch(&self->io);
    while (!self->io.view.event_count) {
        int64_t received = receive_packets(self);
        double now_s = clock_s(), due_s = dlcp_tick(self, now_s);
        int64_t sent = dlcp_pump(self, now_s);
        if (now_s >= until_s || self->io.view.failed || atomic_load_explicit(&self->woken, memory_order_acquire))
            break;
        if (received || sent > 0 || self->io.view.event_count)
            continue;
        wait_for_packets(self, sooner(sooner(until_s, due_s), resume_s(self, now_s)), sent < 0);
    }
    /* No wake-up is lost: the waking thread has queued its command first, and commands run before the next turn. */
    atomic_store_explicit(&self->woken, false, memory_order_release);
    return self->io.view.event_count;
}
