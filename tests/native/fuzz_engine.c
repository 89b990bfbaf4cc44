/* SPDX-License-Identifier: Apache-2.0 */
/* The engine under libFuzzer: two or three ranks exchange messages, over a network and through memory that do what the
 * input says. tests/native/fuzz.py compiles it, and names the engine's system calls and clock as they are here: so time
 * is virtual, and a run depends on its input alone.
 *
 * On a fair network packets are lost, repeated, reordered and marked, and no more. Then what has arrived must be what
 * was sent, sums must be right, and once the network is whole, everything must arrive. Otherwise peers are hostile,
 * too: they forge packets and write what they like into memory that is shared. Then nothing may be read or written out
 * of place, no bound may be broken, and the engine's counts must stay true. */

#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "loop.h"
#include "reduction.h"
#include "time_wait.h"

enum { RANKS_MAX = 3, MESSAGES = 24, SUMS = 4, IN_FLIGHT = 512, EXPORTED = 1 << 17, FILL = 0xEE };
enum { RING_SIZES = 3, TOKEN = 0x12345678, JOB = 7, PORT = 5000, FIRST_STEP = 3, SPIN_MAX = 10000 };
#define REQUIRE(condition) ((condition) ? (void)0 : fail(#condition, __LINE__))

/* New edges are those of the engine. */
#pragma clang attribute push(__attribute__((no_sanitize("coverage"))), apply_to = function)

typedef struct {
    int from, way, tos;
    int64_t bytes;
    uint8_t data[];
} packet;

typedef struct {
    reduction *state;
    float *values, *copy;
    int64_t count;
    int to, rescale;
} sum;

typedef struct {
    int from, to, sent, confirmed, posted, arrived, excused; /* excused: it need not arrive, nor be what was sent */
    int64_t number, step, packets, bytes, tail, allowed, immediate, seed;
    uint8_t *whole, *payload, *copy, *into, *into_tail, *tags;
    uint64_t *bits; /* what has arrived */
    sum *sum;
    int64_t position;
} message;

static struct {
    const uint8_t *input, *end;
    int fair, ranks, paths, ringed, ring_size, message_count, sum_count, error, spins, quiet;
    int64_t payload_bytes, capacity, exported_used[RANKS_MAX], due[RANKS_MAX];
    double now_s;
    engine *engines[RANKS_MAX];
    int stopped[RANKS_MAX], count[RANKS_MAX];
    packet *wire[RANKS_MAX][IN_FLIGHT]; /* to a rank; `due` of them may be received */
    ring_marks *marks[RANKS_MAX][RANKS_MAX];
    uint8_t *rings[RANKS_MAX][RANKS_MAX], *exported[RANKS_MAX];
    uint32_t asleep[RANKS_MAX];
    message messages[MESSAGES];
    sum sums[SUMS];
} world;

static void fail(const char *what, int line) {
    fprintf(stderr, "fuzz_engine.c:%d: %s does not hold\n", line, what);
    abort();
}

static int byte(void) {
    return world.input < world.end ? *world.input++ : 0;
}

static void *make(size_t bytes, int content) {
    void *memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    REQUIRE(memory);
    memset(memory, content, bytes);
    ASAN_POISON_MEMORY_REGION((uint8_t *)memory + bytes, -bytes & 63);
    return memory;
}

/* Return memory that stays from run to run, which is faster. */
static void *keep(void **kept, size_t bytes) {
    if (!*kept)
        *kept = make(bytes, 0);
    return memset(*kept, 0, bytes);
}

/* The system ------------------------------------------------------------------------------------------------------- */

int clock_gettime(clockid_t clock, struct timespec *now) {
    (void)clock;
    REQUIRE(world.spins++ < SPIN_MAX); /* it waits for nothing */
    world.now_s += 1e-6;
    *now = (struct timespec){(time_t)world.now_s, (long)((world.now_s - floor(world.now_s)) * 1e9)};
    return 0;
}

int ppoll(struct pollfd *watched, nfds_t count, const struct timespec *wait, const sigset_t *mask) {
    (void)watched, (void)count, (void)mask;
    double wait_s = (double)wait->tv_sec + (double)wait->tv_nsec * 1e-9;
    if (wait_s > 0)
        world.spins = 0;
    world.now_s += wait_s;
    return 0;
}

static packet *put_on_wire(int to, int from, int way, int tos, const uint8_t *data, int64_t bytes) {
    if (world.count[to] == IN_FLIGHT)
        return NULL;
    packet *one = malloc(sizeof *one + (size_t)bytes);
    REQUIRE(one);
    *one = (packet){from, way, tos, bytes};
    if (bytes)
        memcpy(one->data, data, (size_t)bytes);
    world.spins = 0;
    return world.wire[to][world.count[to]++] = one;
}

static void take_off_wire(int to, int at) {
    free(world.wire[to][at]);
    memmove(&world.wire[to][at], &world.wire[to][at + 1], (size_t)(--world.count[to] - at) * sizeof(packet *));
}

static struct sockaddr_in address_of(int rank, int way) {
    return (struct sockaddr_in){AF_INET, htons((uint16_t)(PORT + way)), {htonl((uint32_t)rank)}, {0}};
}

ssize_t sendmsg(int socket, const struct msghdr *sent, int flags) {
    (void)flags;
    static uint8_t burst[2 * DATAGRAM_MAX];
    int64_t bytes = 0, segment = 0, tos = 0;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(sent); each; each = CMSG_NXTHDR((struct msghdr *)sent, each)) {
        if (each->cmsg_level == IPPROTO_UDP)
            segment = *(uint16_t *)CMSG_DATA(each);
        else
            tos = *(int *)CMSG_DATA(each);
    }
    if (world.error && (world.error != EIO || segment)) {
        errno = world.error;
        return -1;
    }
    for (size_t i = 0; i < sent->msg_iovlen; i++) {
        memcpy(burst + bytes, sent->msg_iov[i].iov_base, sent->msg_iov[i].iov_len);
        bytes += (int64_t)sent->msg_iov[i].iov_len;
    }
    int to = (int)ntohl(((struct sockaddr_in *)sent->msg_name)->sin_addr.s_addr);
    REQUIRE(bytes <= 65507 && to < world.ranks);
    for (int64_t at = 0; at < bytes; at += segment ? segment : bytes)
        put_on_wire(to, socket / PATHS_MAX, socket % PATHS_MAX, (int)tos, burst + at,
                    segment ? smaller(segment, bytes - at) : bytes);
    return bytes;
}

/* Receive a datagram, or those alike in one burst as the kernel does; nothing behind it may be read. */
ssize_t recvmsg(int socket, struct msghdr *got, int flags) {
    (void)flags;
    int to = socket / PATHS_MAX;
    int64_t bytes = 0, segment = 0;
    uint8_t *into = got->msg_iov[0].iov_base;
    got->msg_controllen = 0;
    while (world.due[to] && world.count[to]) {
        packet *one = world.wire[to][0];
        struct sockaddr_in source = address_of(one->from, one->way);
        if (bytes && (memcmp(&source, got->msg_name, sizeof source) || one->bytes > segment || bytes % segment ||
                      !one->bytes || one->tos || bytes + one->bytes > 65507))
            break;
        if (!bytes) {
            segment = one->bytes;
            memcpy(got->msg_name, &source, got->msg_namelen = sizeof source);
        }
        ASAN_UNPOISON_MEMORY_REGION(into, DATAGRAM_MAX);
        memcpy(into + bytes, one->data, (size_t)one->bytes);
        bytes += one->bytes;
        ASAN_POISON_MEMORY_REGION(into + bytes, (size_t)(DATAGRAM_MAX - bytes));
        int type = one->tos ? IP_TOS : UDP_GRO, value = one->tos ? one->tos : (int)segment;
        int level = one->tos ? IPPROTO_IP : IPPROTO_UDP;
        got->msg_controllen = CMSG_SPACE(sizeof value);
        struct cmsghdr *told = CMSG_FIRSTHDR(got);
        *told = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof value), .cmsg_level = level, .cmsg_type = type};
        memcpy(CMSG_DATA(told), &value, sizeof value);
        world.due[to]--, world.spins = 0;
        take_off_wire(to, 0);
        if (!bytes || type == IP_TOS)
            return bytes;
    }
    return bytes ? bytes : -1;
}

int recvmmsg(int socket, struct mmsghdr *got, unsigned most, int flags, struct timespec *wait) {
    (void)wait;
    unsigned count = 0;
    for (ssize_t bytes = 0; count < most && (bytes = recvmsg(socket, &got[count].msg_hdr, flags)) >= 0; count++)
        got[count].msg_len = (unsigned)bytes;
    return count ? (int)count : -1;
}

/* Ranks ------------------------------------------------------------------------------------------------------------ */

/* The number that rank `of` gives to a peer. */
static int peer_of(int of, int rank) {
    return rank < of ? rank : rank - 1;
}

static int rank_of(int of, int64_t peer) {
    return (int)peer < of ? (int)peer : (int)peer + 1;
}

static flow *flow_of(int rank, int peer) {
    return &world.engines[rank]->flows[peer_of(rank, peer)];
}

static void start_rank(int rank, int tagged) {
    const config rules = {.rank = rank,
                          .job = JOB,
                          .token = TOKEN,
                          .payload_bytes = world.payload_bytes,
                          .tagged = tagged,
                          .peers = world.ranks - 1,
                          .ranks = world.ranks,
                          .socket = rank * PATHS_MAX,
                          .wake = -1,
                          .control_queue = 6,
                          .control_tos = 0,
                          .early_bytes_max = 1 << 20,
                          .silence_s = 10,
                          .deadline_s = 120};
    static const uint8_t service[QUEUES][2];
    uint16_t ports[PATHS_MAX];
    engine *self = world.engines[rank] = dlcp_engine_new(&rules);
    REQUIRE(self);
    for (int way = 1; way < world.paths; way++) {
        REQUIRE(!dlcp_add_socket(self, rank * PATHS_MAX + way));
        ports[way - 1] = (uint16_t)(PORT + way);
    }
    for (int peer = 0; peer < world.ranks; peer++) {
        if (peer == rank)
            continue;
        struct sockaddr_in address = address_of(peer, 0);
        flow_view *to = dlcp_peer(self, peer_of(rank, peer), peer, (const uint8_t *)&address, sizeof address,
                                  &service[0][0], world.now_s);
        REQUIRE(to);
        to->window = 1000, to->largest_window = 1 << 20;
        dlcp_accept(self, peer_of(rank, peer), ports, world.paths - 1);
    }
}

/* Let ranks 0 and 1 share memory, and rank 2 if that is here and `ringed` is 2; open the paths of the others. */
static void connect_ranks(void) {
    static void *rings[RANKS_MAX][RANKS_MAX][RING_SIZES], *exported[RANKS_MAX];
    for (int rank = 0; rank < world.ranks && world.ringed; rank++)
        world.exported[rank] = keep(&exported[rank], EXPORTED);
    for (int from = 0; from < world.ranks; from++)
        for (int to = 0; to < world.ranks; to++) {
            if (from == to)
                continue;
            if (world.ringed == 2 || (world.ringed && from < 2 && to < 2)) {
                ring_marks *marks = world.marks[from][to] = make(sizeof *marks, 0);
                uint8_t *bytes = world.rings[from][to] =
                    keep(&rings[from][to][world.ring_size], (size_t)world.capacity);
                uint32_t *asleep = &world.asleep[to];
                dlcp_ring_out(world.engines[from], peer_of(from, to), marks, bytes, world.capacity, asleep, -1);
                dlcp_ring_in(world.engines[to], peer_of(to, from), marks, bytes, world.capacity, asleep, -1);
                dlcp_export(world.engines[from], world.exported[from], EXPORTED);
                dlcp_import(world.engines[to], peer_of(to, from), world.exported[from], EXPORTED);
            }
            REQUIRE(!dlcp_spread(world.engines[from], peer_of(from, to), world.paths));
        }
}

/* The engine's counts are true, and its lists in order. */
static void check_outgoing(const flow *to) {
    int64_t flying[PATHS_MAX] = {0}, all = 0, unsent = 0;
    for (const tx_message *one = to->oldest; one; one = one->newer) {
        int64_t states[RETRANSMIT + 1] = {0};
        for (int64_t i = 0; i < one->packets; i++) {
            states[one->state[i]]++;
            flying[one->path[i]] += one->state[i] == FLYING;
        }
        REQUIRE(one->flying == states[FLYING] && one->delivered == states[DELIVERED]);
        REQUIRE(one->unsent == states[UNSENT] + states[RETRANSMIT]);
        REQUIRE(one->next == one->packets - states[UNSENT]);
        REQUIRE(states[ABANDONED] <= one->allowed);
        REQUIRE(tx_find(to, one->id.step, one->id.message));
        all += one->flying;
        unsent += one->unsent > 0;
    }
    REQUIRE(to->view.flying == all);
    for (int64_t way = 0; way < to->path_count; way++)
        REQUIRE(to->paths[way].flying == flying[way]);
    for (tx_message *one = to->most_urgent, *last = NULL; one; last = one, one = one->less_urgent, unsent--) {
        const uint8_t *tags = one->tags[tx_next_packet(one)];
        REQUIRE(one->unsent && one->urgency == ((tags[1] >> 5) << 8 | (255 - tags[2])));
        REQUIRE(!last || last->urgency > one->urgency || (last->urgency == one->urgency && last->serial < one->serial));
    }
    REQUIRE(!unsent);
}

static void check(const engine *self) {
    const receiver *rx = &self->rx;
    const engine_view *view = &self->io.view;
    REQUIRE(!view->failed);
    for (int64_t i = 0; i < self->peers; i++)
        check_outgoing(&self->flows[i]);
    int64_t early = 0, stopping = 0;
    for (int64_t i = 0; i < rx->messages.chain_count; i++)
        for (const msg_id *one = rx->messages.chains[i]; one; one = one->next)
            early += ((const rx_message *)one)->early_bytes;
    for (const rx_time_wait *one = rx->oldest; one; one = one->newer)
        REQUIRE(time_wait_find(rx, one->from, one->id.step, one->id.message) == one);
    for (const rx_time_wait *one = rx->first_stopping; one; one = one->later_stopping)
        stopping++;
    REQUIRE(early == view->early_bytes && early <= self->io.config.early_bytes_max);
    REQUIRE(stopping == view->stopping_count);
}

/* Messages --------------------------------------------------------------------------------------------------------- */

static int64_t size_of_packet(const message *self, int64_t index) {
    return smaller(self->bytes - index * world.payload_bytes, world.payload_bytes);
}

/* What a message consists of: sums of such numbers are exact. */
static float value_at(const message *self, int64_t place) {
    return (float)((self->number + place * 5) % 13 - 6);
}

static int64_t message_bytes_max(void) {
    return world.payload_bytes > 2000 ? 4 * world.payload_bytes : 1300 * 64;
}

static message *add_message(int from, int to, int64_t bytes) {
    if (world.message_count == MESSAGES || world.stopped[from] || world.stopped[to])
        return NULL;
    message *self = &world.messages[world.message_count];
    int64_t packets = (bytes + world.payload_bytes - 1) / world.payload_bytes;
    int64_t step = FIRST_STEP + world.message_count / 4, oldest = world.engines[to]->rx.oldest_step;
    int kind = byte();
    *self = (message){.number = world.message_count,
                      .from = from,
                      .to = to,
                      .step = step > oldest ? step : oldest,
                      .packets = packets,
                      .bytes = bytes,
                      .allowed = packets * (kind & 3) / 4,
                      .immediate = kind >> 2 & 1,
                      .tail = kind & 8 ? smaller(bytes, byte()) : 0,
                      .seed = byte()};
    world.message_count++;
    int64_t head = bytes - self->tail;
    if (kind & 16 && world.ringed && world.exported_used[from] + head <= EXPORTED) {
        self->payload = world.exported[from] + world.exported_used[from];
        world.exported_used[from] += head;
    } else {
        self->payload = self->copy = make((size_t)head, 0);
    }
    float *values = make((size_t)bytes + 3, 0);
    for (int64_t i = 0; i < (bytes + 3) / 4; i++)
        values[i] = value_at(self, i);
    self->whole = (uint8_t *)values;
    memcpy(self->payload, self->whole, (size_t)head);
    self->tags = make((size_t)packets * 4 + (size_t)self->tail, 0);
    for (int64_t i = 0; i < packets; i++) { /* by queue, drop class, layer, protected */
        self->tags[i] = kind & 32 ? (uint8_t)(i * 5 / 16 % 6) : 4;
        self->tags[packets + i] = (uint8_t)(i % 8);
        self->tags[3 * packets + i] = kind & 64 && i % 8 == 0;
    }
    memcpy(self->tags + packets * 4, self->whole + head, (size_t)self->tail);
    return self;
}

static void send_message(message *self) {
    if (self->sent || world.stopped[self->from])
        return;
    int64_t packets = self->packets, members = self->sum ? world.ranks - 1 : 1;
    const uint8_t *tags = self->tags;
    send_request request = {peer_of(self->from, self->to),
                            self->step,
                            self->number,
                            packets,
                            self->payload,
                            tags + packets * 4,
                            self->bytes - self->tail,
                            self->tail,
                            tags,
                            tags + packets,
                            tags + packets * 2,
                            tags + packets * 3,
                            self->allowed,
                            smaller(self->allowed, 0xFFFF),
                            self->allowed > 0,
                            self->immediate,
                            self->seed,
                            (members - self->position) % members,
                            members};
    self->sent = 1;
    REQUIRE(!dlcp_send(world.engines[self->from], &request, world.now_s));
}

static void take_events(int rank);

static void post_receive(message *self, int oddly) {
    if (self->posted || world.stopped[self->to])
        return;
    engine *owner = world.engines[self->to];
    int64_t peer = peer_of(self->to, self->from), number = self->number;
    int64_t packets = self->packets, bytes = self->bytes, size = world.payload_bytes;
    int64_t early = dlcp_receiving(owner, peer, self->step, number).packets;
    int unknown = oddly & 1 && early && !self->sum;
    if (unknown)
        packets = early, bytes = packets * size;
    else if (!world.fair && oddly & 2 && !self->sum)
        bytes += oddly, packets = (bytes + size - 1) / size, self->excused = 1;
    int64_t tail = self->sum || unknown ? 0 : self->tail;
    /* Where one other contributes, each packet is added at once. */
    self->into = self->sum && world.ranks == 2 ? NULL : make((size_t)(bytes - tail), FILL);
    self->into_tail = tail ? make((size_t)tail, FILL) : NULL;
    receive_request request = {peer,
                               self->step,
                               number,
                               packets,
                               packets - smaller(self->allowed, packets),
                               self->immediate,
                               unknown ? 0 : bytes - (packets - 1) * size,
                               self->into,
                               self->into_tail,
                               self->into ? bytes - tail : 0,
                               tail,
                               self->sum ? self->sum->state : NULL,
                               self->position};
    self->posted = 1;
    if (dlcp_receive(owner, &request, world.now_s))
        self->excused = 1;
    take_events(self->to);
}

/* Free what a message arrives in, unless a sum needs it. */
static void free_into(message *self) {
    if (self->sum && self->sum->state)
        return;
    free(self->into);
    free(self->into_tail);
    self->into = self->into_tail = NULL;
}

static void free_payload(message *self) {
    free(self->copy);
    free(self->tags);
    self->copy = self->tags = NULL;
}

static void check_content(const message *self) {
    int64_t head = self->into_tail ? self->bytes - self->tail : self->bytes;
    uint8_t *got = make((size_t)self->bytes, 0), *filled = make((size_t)world.payload_bytes, FILL);
    memcpy(got, self->into, (size_t)head);
    if (self->into_tail)
        memcpy(got + head, self->into_tail, (size_t)self->tail);
    for (int64_t i = 0; i < self->packets; i++) {
        int64_t start = i * world.payload_bytes;
        const uint8_t *expected = has_bit(self->bits, i) ? self->whole + start : filled;
        REQUIRE(!memcmp(got + start, expected, (size_t)size_of_packet(self, i)));
    }
    free(got);
    free(filled);
}

/* Finish a sum, and compare it with what its members say has arrived. */
static void finish_sum(sum *self) {
    message *members[RANKS_MAX];
    int count = 0, excused = !world.fair;
    for (message *one = world.messages; one < world.messages + world.message_count; one++)
        if (one->sum == self)
            members[count++] = one, excused |= one->excused || !one->arrived;
    dlcp_reduction_finish(self->state, self->rescale);
    self->state = NULL;
    for (int64_t i = 0; !excused && i < self->count; i++) {
        float total = 1, contributions = 1;
        for (int k = 0; k < count; k++)
            if (has_bit(members[k]->bits, i * 4 / world.payload_bytes))
                total += value_at(members[k], i), contributions++;
        int whole = contributions == (float)world.ranks;
        float average = total / (self->rescale && !whole ? contributions : (float)world.ranks);
        REQUIRE(self->values[i] == average && (!whole || self->copy[i] == average));
    }
    for (int k = 0; k < count; k++)
        free_into(members[k]);
}

static void take_arrival(message *self, const event *ev) {
    int64_t arrived = 0, packets = ev->packets;
    if (self->arrived || !self->posted)
        return;
    self->arrived = 1;
    self->bits = calloc(bit_words(packets), 8);
    for (int64_t i = 0; i < packets; i++)
        if (!ev->bits || has_bit(ev->bits, i))
            set_bit(self->bits, i), arrived++;
    REQUIRE(arrived + self->allowed >= packets && ev->last_bytes <= world.payload_bytes);
    world.quiet += ev->data[packets - 1];
    if (world.fair && !self->excused && !self->sum)
        check_content(self);
    free_into(self);
    for (message *one = world.messages; self->sum && one < world.messages + world.message_count; one++)
        if (one->sum == self->sum && !one->arrived)
            return;
    if (self->sum && self->sum->state)
        finish_sum(self->sum);
}

static void take_events(int rank) {
    engine *self = world.engines[rank];
    for (int64_t i = 0; i < self->io.view.event_count; i++) {
        const event *ev = &self->io.events[i];
        int peer = rank_of(rank, ev->peer);
        REQUIRE(ev->peer >= 0 && peer < world.ranks);
        message *one = ev->message < world.message_count ? &world.messages[ev->message] : NULL;
        if (!one || one->step != ev->step)
            one = NULL;
        if (ev->kind == EVENT_ARRIVED && one && one->from == peer && one->to == rank) {
            take_arrival(one, ev);
        } else if (ev->kind == EVENT_SENT) {
            REQUIRE(one && one->from == rank && one->to == peer && !one->confirmed);
            one->confirmed = 1;
            for (int64_t k = 0; world.fair && !one->excused && k < one->packets; k++)
                REQUIRE(has_bit(one->bits, k) == (!ev->bits || has_bit(ev->bits, k)));
            free_payload(one);
        } else if (ev->kind == EVENT_MISMATCH && one && one->from == peer && one->to == rank) {
            REQUIRE(!world.fair);
            one->excused = 1;
            free_into(one);
        } else if (ev->kind == EVENT_CONTROL) {
            for (int64_t k = 0; k < ev->bytes; k++)
                world.quiet += ev->data[k];
        }
    }
    self->io.view.event_count = 0;
}

static void turn(int rank, double wait_s) {
    world.spins = 0;
    dlcp_turn(world.engines[rank], world.now_s + wait_s);
    take_events(rank);
    check(world.engines[rank]);
}

/* Hostile peers ---------------------------------------------------------------------------------------------------- */

/* A message between two ranks, or one that nobody knows. */
static const message *some_message(int from, int to) {
    static const message unknown = {.packets = 3, .step = FIRST_STEP};
    for (int i = 0, first = byte(); i < world.message_count; i++) {
        const message *one = &world.messages[(first + i) % world.message_count];
        if (one->from == from && one->to == to)
            return one;
    }
    return &unknown;
}

/* A number that may be just right or wrong for a message. */
static uint32_t number_for(const message *self) {
    int64_t span = world.payload_bytes * 8,
            choices[] = {0,      self->packets - 1,     self->packets, self->packets + 1, span, 1 << 22, -1,
                         byte(), byte() % self->packets};
    return (uint32_t)choices[byte() % 9];
}

/* Write a packet that a rank might send to another, or almost; return its size. */
static int64_t forge(uint8_t *at, int from, int to) {
    int type = byte() % 10, pieces = 0, answer = type == ACK || type == BITMAP || type == STOP;
    const message *self = answer ? some_message(to, from) : some_message(from, to);
    uint32_t index = number_for(self), count = byte() & 3 ? (uint32_t)self->packets : number_for(self);
    int64_t bytes = HEADER_BYTES, size = 0;
    io_write_header(&world.engines[from]->io, at, (enum packet_type)type, self->step, self->number, index, count);
    at[1] = (uint8_t)byte();
    if (at[1] & PIECE) { /* one that may be right */
        pieces = 1, bytes += PIECE_HEAD_BYTES;
        at[1] |= PROTECTED;
        at[HEADER_BYTES] = at[1] & (uint8_t)~(PIECE | (byte() & PROTECTED));
        at[HEADER_BYTES + 1] = 0;
        put16(at + HEADER_BYTES + 2, (uint16_t)(byte() * (byte() & 1 ? 8 : 1)));
        put16(at + HEADER_BYTES + 4, (uint16_t)(byte() & 1 ? world.payload_bytes : byte()));
    }
    if (pieces) {
        size = byte() & 1 ? byte() / 8 * 8 : byte();
    } else if (type == ACK) {
        for (int entries = byte() % 8; entries; entries--, bytes += ACK_ENTRY_BYTES) {
            int kind = byte();
            self = some_message(to, from);
            uint32_t block = kind & 2 ? number_for(self) : (uint32_t)(byte() % (self->packets / 64 + 1));
            put32(at + bytes, kind & 4 ? (uint32_t)byte() : (uint32_t)self->step);
            put16(at + bytes + 4, (uint16_t)self->number);
            put32(at + bytes + 6,
                  kind & 4 ? ACK_PATH : block | (kind & 1 ? ACK_WHOLE : 0) | (kind & 8 ? ACK_TRIMMED : 0));
            put64(at + bytes + 10, (uint64_t)byte() * 0x0101010101010101u);
        }
    } else if (type == DATA) {
        size = byte() & 1 ? world.payload_bytes : size_of_packet(self, smaller(index, self->packets - 1));
    } else if (type == BITMAP || type == STOP) {
        size = smaller(world.payload_bytes, (self->packets - index + 7) / 8);
    } else {
        size = byte() % 80;
    }
    memset(at + bytes, size > 0 ? byte() : 0, size > 0 ? (size_t)size : 0);
    bytes += size > 0 ? size : 0;
    int change = byte();
    if (change % 4 == 1)
        at[byte() % bytes] = (uint8_t)byte();
    return change % 8 == 2 ? byte() % (bytes + 1) : bytes;
}

/* Write what no engine would into memory that ranks share. */
static void write_ring(int from, int to) {
    if (!world.rings[from][to])
        return;
    ring_marks *marks = world.marks[from][to];
    int kind = byte(), value = byte();
    uint64_t at = flow_of(to, from)->local.in.mine, offset = at % (uint64_t)world.capacity;
    if (kind % 4 == 0) {
        marks->taken =
            kind & 16 ? flow_of(from, to)->local.out.mine + (uint64_t)value * 64 : (uint64_t)value * 0x0123456789ABCDu;
        marks->starving = kind >> 5 & 1;
    } else if (kind % 4 == 1) {
        marks->written = kind & 16 ? at + (uint64_t)value * 64 : (uint64_t)value * 0x0123456789ABCDu;
    } else if (kind % 4 == 2) {
        world.rings[from][to][(offset + (uint64_t)value) % (uint64_t)world.capacity] = (uint8_t)byte();
    } else {
        static uint8_t forged[4 * DATAGRAM_MAX];
        struct {
            uint32_t bytes, segment;
            int64_t place, message_bytes;
        } head = {0};
        for (int packets = 1 + (value & 3); packets; packets--, head.bytes += head.segment)
            head.segment = (uint32_t)forge(forged + head.bytes, from, to);
        if (value & 4)
            head.place = (int64_t)((uint64_t)byte() << (kind & 32 ? 56 : 9)),
            head.message_bytes = (int64_t)((uint64_t)byte() << byte() % 64);
        if (value & 8)
            head.bytes = (uint32_t)byte() << byte() % 32;
        uint64_t room = (uint64_t)world.capacity - offset - 64, size = smaller((int64_t)room, sizeof forged);
        memcpy(world.rings[from][to] + offset, &head, sizeof head);
        memcpy(world.rings[from][to] + offset + 64, forged, size < head.bytes ? size : head.bytes);
        marks->written = at + 64 + (value & 4 ? 16384 : (head.bytes + 63) & ~63ull);
    }
}

/* What happens ------------------------------------------------------------------------------------------------------
 */

static void begin_sum(int to) {
    if (world.sum_count == SUMS || world.message_count + world.ranks - 1 > MESSAGES)
        return;
    int64_t count = 1 + (byte() << 8 | byte()) % (message_bytes_max() / 12);
    int kind = byte();
    sum *self = &world.sums[world.sum_count];
    *self = (sum){.count = count,
                  .to = to,
                  .rescale = kind & 1,
                  .values = make((size_t)count * 4, 0),
                  .copy = make((size_t)count * 4, FILL)};
    for (int64_t i = 0; i < count; i++)
        self->values[i] = 1;
    int64_t per_packet = world.payload_bytes / 4, packets = (count + per_packet - 1) / per_packet, position = 0;
    int64_t blocks = (packets + SEND_BLOCK_PACKETS - 1) / SEND_BLOCK_PACKETS;
    self->state = dlcp_reduction_new(self->values, count, per_packet, world.ranks - 1, (float)world.ranks,
                                     kind & 2 ? (kind >> 2) % blocks : -1);
    dlcp_reduction_copy(self->state, self->copy);
    world.sum_count++;
    for (int from = 0; from < world.ranks; from++) {
        message *one = from == to ? NULL : add_message(from, to, count * 4);
        if (!one)
            continue;
        one->sum = self, one->position = position++;
        if (kind & 64)
            post_receive(one, 0);
        if (kind & 128)
            send_message(one);
    }
}

static void begin_step(int rank, int64_t step) {
    dlcp_begin_step(world.engines[rank], step, world.now_s);
    for (message *one = world.messages; one < world.messages + world.message_count; one++)
        if (one->to == rank && one->step < step && !one->arrived) {
            one->excused = one->posted = one->arrived = 1; /* its posts fail, and what is early is dropped */
            free_into(one);
        }
}

static void detach(message *self) {
    if (!self->sent || self->confirmed || !self->copy)
        return;
    size_t bytes = (size_t)(self->bytes - self->tail);
    uint8_t *copy = make(bytes, 0);
    memcpy(copy, self->copy, bytes);
    dlcp_detach(world.engines[self->from], peer_of(self->from, self->to), self->step, self->number, copy);
    free(self->copy);
    self->copy = copy;
}

static void stop(int rank) {
    dlcp_engine_stop(world.engines[rank]);
    world.stopped[rank] = 1;
    for (message *one = world.messages; one < world.messages + world.message_count; one++)
        one->excused |= one->from == rank || one->to == rank;
}

/* Do what the input says next. */
static void step(void) {
    static const double waits_s[] = {0, 0.0001, 0.001, 0.01, 0.06, 0.3};
    static const double windows[] = {0.3, 1, 4, 40, 1000};
    static const int errors[] = {0, 0, EAGAIN, EIO, ENETUNREACH};
    static uint8_t forged[2 * DATAGRAM_MAX];
    int operation = byte() % (world.fair ? 16 : 20), who = byte();
    int rank = who % world.ranks, other = (rank + 1 + who / 4 % (world.ranks - 1)) % world.ranks;
    int argument = who >> 3, *count = &world.count[rank], at = *count ? argument % *count : 0;
    packet **wire = world.wire[rank];
    message *one = world.message_count ? &world.messages[argument % world.message_count] : NULL;
    if (operation == 0) {
        one = add_message(rank, other, 1 + (byte() << 8 | byte()) * 37 % message_bytes_max());
        if (one && who & 128)
            send_message(one);
    } else if (operation == 1 && one) {
        send_message(one);
    } else if (operation == 2 && one) {
        post_receive(one, byte());
    } else if (operation == 3) {
        begin_sum(rank);
    } else if (operation == 4 || operation == 5) {
        world.due[rank] += operation == 4 ? argument : IN_FLIGHT;
        turn(rank, waits_s[byte() % 6]);
    } else if (operation == 6 && *count) {
        take_off_wire(rank, at);
    } else if (operation == 7 && *count) {
        put_on_wire(rank, wire[at]->from, wire[at]->way, wire[at]->tos, wire[at]->data, wire[at]->bytes);
    } else if (operation == 8 && *count) {
        packet *early = wire[at], **later = &wire[byte() % *count];
        wire[at] = *later, *later = early;
    } else if (operation == 9 && *count) {
        wire[at]->tos |= 3;
    } else if (operation == 10) {
        int kind = byte();
        flow_view *to = &flow_of(rank, other)->view;
        to->window = windows[kind % 5];
        to->mute = kind / 5 % 4 == 3;
        to->burst = 1 + kind / 20;
        to->piece_bytes = kind / 5 % 4 == 2 ? 16 + (world.payload_bytes / 2 >> to->burst % 3) : 0;
    } else if (operation == 11) {
        world.error = errors[who / 4 % 5];
    } else if (operation == 12 && one) {
        detach(one);
    } else if (operation == 13 && !(who & 96)) {
        begin_step(rank, FIRST_STEP + (who / 4 & 7));
    } else if (operation == 14) {
        dlcp_send_control(world.engines[rank], peer_of(rank, other), HELLO, who / 4 & 1, (const uint8_t *)"12345678",
                          who / 4 & 7);
    } else if (operation == 15 && who > 250) {
        stop(rank);
    } else if (operation == 16) {
        int64_t bytes = forge(forged, other, rank);
        put_on_wire(rank, other, byte() % world.paths, byte() & 3, forged, bytes);
    } else if (operation == 17 && *count && wire[at]->bytes) {
        wire[at]->data[byte() % smaller(256, wire[at]->bytes)] ^= (uint8_t)byte();
        wire[at]->bytes -= wire[at]->bytes / 2 * (who & 1);
    } else if (operation == 18) {
        write_ring(other, rank);
    } else if (operation == 19 && one) {
        who & 1 ? dlcp_remind(world.engines[rank], world.now_s)
                : dlcp_forget(world.engines[one->to], peer_of(one->to, one->from), one->step, one->number);
    }
}

/* What nobody confirms any more is sent again until its deadline, which is not the engine's matter. Meanwhile it takes
 * its flow's window and memory from what is less urgent. */
static int is_held_up(const message *self) {
    for (const message *one = world.messages; one < world.messages + world.message_count; one++)
        if (one->excused && one->sent && !one->confirmed && one->from == self->from && one->to == self->to)
            return 1;
    return 0;
}

static int is_all_there(void) {
    for (const message *one = world.messages; one < world.messages + world.message_count; one++)
        if (!one->excused && !(one->arrived && one->confirmed) && !is_held_up(one))
            return 0;
    return 1;
}

/* Make the network whole, and see everything arrive. */
static void settle(void) {
    world.error = 0;
    for (int rank = 0; rank < world.ranks; rank++)
        for (int peer = 0; peer < world.ranks; peer++)
            if (peer != rank) {
                flow_view *to = &flow_of(rank, peer)->view;
                to->window = to->piece_bytes ? 20 : 100, to->mute = 0;
            }
    for (message *one = world.messages; one < world.messages + world.message_count; one++) {
        post_receive(one, 0);
        if (!one->excused)
            send_message(one);
    }
    double until_s = world.now_s + 60;
    while (!is_all_there()) {
        REQUIRE(world.now_s < until_s);
        int moving = 0;
        for (int rank = 0; rank < world.ranks; rank++) {
            world.due[rank] = world.count[rank];
            turn(rank, 0);
            moving += world.count[rank];
        }
        if (!moving)
            for (int rank = 0; rank < world.ranks; rank++)
                turn(rank, 0.002);
    }
}

static void leave(void) {
    for (int rank = 0; rank < world.ranks; rank++)
        dlcp_engine_stop(world.engines[rank]);
    for (sum *one = world.sums; one < world.sums + world.sum_count; one++) {
        if (one->state) {
            uint64_t *bits = calloc(bit_words(one->state->packets), 8);
            dlcp_reduction_included(one->state, 0, bits);
            free(bits);
            finish_sum(one);
        }
        free(one->values);
        free(one->copy);
    }
    for (message *one = world.messages; one < world.messages + world.message_count; one++) {
        free_into(one);
        free_payload(one);
        free(one->bits);
        free(one->whole);
    }
    for (int rank = 0; rank < world.ranks; rank++) {
        dlcp_engine_free(world.engines[rank]);
        while (world.count[rank])
            take_off_wire(rank, 0);
        for (int to = 0; to < world.ranks; to++)
            free(world.marks[rank][to]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int64_t payloads[] = {64, 72, 1440, 65000}, capacities[RING_SIZES] = {4096, 1 << 16, 1 << 18};
    memset(&world, 0, sizeof world);
    world.input = data, world.end = data + size, world.now_s = 100;
    int kind = byte(), more = byte();
    world.fair = kind & 1;
    world.ranks = 2 + (kind >> 1 & 1);
    world.payload_bytes = payloads[kind >> 2 & 3];
    world.ringed = (kind >> 4 & 3) % 3;
    world.ring_size = world.fair ? 2 : more & 1;
    world.capacity = capacities[world.ring_size];
    world.paths = more & 2 ? 1 : 1 + (more >> 2) % PATHS_MAX;
    for (int rank = 0; rank < world.ranks; rank++)
        start_rank(rank, kind >> 6 & 1);
    connect_ranks();
    while (world.input < world.end)
        step();
    /* A sender that waits for too long asks about what nobody remembers. */
    if (world.fair && world.now_s < 105)
        settle();
    leave();
    return 0;
}

#pragma clang attribute pop
