/* SPDX-License-Identifier: Apache-2.0 */
/* The least that an all-reduce between processes costs: bursts of datagrams through loopback sockets, additions, and
 * nothing else. No tags, no loss, no order, no deadlines. A burst that is lost ends it with an error.
 *
 *     floor RANKS VALUES PAYLOAD_BYTES ROUNDS
 *
 * prints a line for each round: milliseconds of the slowest rank, processor seconds of all ranks in user space, in the
 * kernel. The result of each round is checked. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/udp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum { RANKS_MAX = 64, SEGMENTS = 44, HEADER_BYTES = 32, WINDOW_BURSTS = 16, CREDIT_BURSTS = 4, BURSTS = 8 };
enum { BUFFER_BYTES = 65536, RECEIVE_BUFFER_BYTES = 8 << 20, SILENCE_MS = 10000 };
enum kind { CONTRIBUTION, AVERAGE, CREDIT };

typedef float unaligned_float __attribute__((aligned(1), may_alias));

typedef struct {
    int32_t kind, rank, index, round;
    char rest[HEADER_BYTES - 16]; /* as long as DLCP's */
} header;

typedef struct {
    double ms[RANKS_MAX], user_s[RANKS_MAX], system_s[RANKS_MAX];
    pthread_barrier_t barrier;
} shared;

typedef struct {
    int64_t next[2]; /* packet of a contribution to that rank, and of the own average */
    int64_t on_the_way, uncredited;
} lane;

static int ranks, rank, sock;
static int64_t count, per_packet, payload_bytes;
static struct sockaddr_in addresses[RANKS_MAX];
static float *values;
static uint8_t *added;   /* contributions to each packet of the own shard */
static int64_t averaged; /* packets of the own shard that are complete, from its start */
static lane lanes[RANKS_MAX];

static void fail(const char *what) {
    perror(what);
    _exit(1);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Where the shard of a rank begins, in packets. */
static int64_t shard(int of) {
    int64_t packets = (count + per_packet - 1) / per_packet;
    return packets * of / ranks;
}

static int64_t values_of(int64_t packet) {
    int64_t left = count - packet * per_packet;
    return left < per_packet ? left : per_packet;
}

static void transmit(int to, struct iovec *pieces, int parts, uint16_t segment) {
    union {
        char bytes[CMSG_SPACE(sizeof(uint16_t))];
        struct cmsghdr align;
    } control = {{0}};
    struct msghdr message = {.msg_name = &addresses[to],
                             .msg_namelen = sizeof addresses[to],
                             .msg_iov = pieces,
                             .msg_iovlen = (size_t)parts};
    if (segment) {
        control.align = (struct cmsghdr){CMSG_LEN(sizeof segment), IPPROTO_UDP, UDP_SEGMENT};
        memcpy(CMSG_DATA(&control.align), &segment, sizeof segment);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
    }
    if (sendmsg(sock, &message, 0) < 0)
        fail("floor: sendmsg");
}

/* Send one burst to a rank, if there is any and its window admits it; return whether one was sent. */
static int send_burst(int to, int round) {
    lane *one = &lanes[to];
    if (one->on_the_way == WINDOW_BURSTS)
        return 0;
    int64_t ends[2] = {shard(to + 1), averaged};
    /* Averages first: whoever waits for them has nothing else to do. */
    int kind = one->next[AVERAGE] < ends[AVERAGE] ? AVERAGE : CONTRIBUTION;
    int64_t first = one->next[kind], left = ends[kind] - first;
    if (left <= 0)
        return 0;
    header headers[SEGMENTS];
    struct iovec pieces[2 * SEGMENTS];
    int some = left < SEGMENTS ? (int)left : SEGMENTS;
    for (int k = 0; k < some; k++) {
        headers[k] = (header){.kind = kind, .rank = rank, .index = (int32_t)(first + k), .round = round};
        pieces[2 * k] = (struct iovec){&headers[k], HEADER_BYTES};
        pieces[2 * k + 1] =
            (struct iovec){values + (first + k) * per_packet, (size_t)values_of(first + k) * sizeof(float)};
    }
    transmit(to, pieces, 2 * some, some > 1 ? (uint16_t)(HEADER_BYTES + payload_bytes) : 0);
    one->next[kind] += some;
    one->on_the_way++;
    return 1;
}

static void take_packet(const header *head, const unaligned_float *part) {
    int64_t packet = head->index, many = values_of(packet);
    float *into = values + packet * per_packet;
    if (head->kind == AVERAGE) {
        memcpy(into, part, (size_t)many * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < many; i++)
        into[i] += part[i];
    if (++added[packet - shard(rank)] < ranks - 1)
        return;
    float factor = 1.0f / (float)ranks;
    for (int64_t i = 0; i < many; i++)
        into[i] *= factor;
}

/* Take in one burst; return how many packets of data, or below 0 if there is none. */
static int64_t receive_burst(uint8_t *buffer, int round) {
    union {
        char bytes[128];
        struct cmsghdr align;
    } control;
    struct iovec piece = {buffer, BUFFER_BYTES};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t bytes = recvmsg(sock, &message, MSG_DONTWAIT);
    if (bytes < 0)
        return -1;
    int64_t segment = bytes, packets = 0;
    for (struct cmsghdr *entry = CMSG_FIRSTHDR(&message); entry; entry = CMSG_NXTHDR(&message, entry))
        if (entry->cmsg_level == IPPROTO_UDP && entry->cmsg_type == UDP_GRO) {
            int size = 0;
            memcpy(&size, CMSG_DATA(entry), sizeof size);
            segment = size;
        }
    for (int64_t start = 0; start < bytes; start += segment) {
        header head;
        memcpy(&head, buffer + start, sizeof head);
        if (head.kind == CREDIT) {
            lanes[head.rank].on_the_way -= head.index;
            continue;
        }
        if (head.round != round) {
            fprintf(stderr, "floor: a packet of round %d in round %d\n", head.round, round);
            _exit(1);
        }
        take_packet(&head, (const unaligned_float *)(buffer + start + HEADER_BYTES));
        packets++;
    }
    header first;
    memcpy(&first, buffer, sizeof first);
    if (packets && ++lanes[first.rank].uncredited == CREDIT_BURSTS) {
        header credit = {.kind = CREDIT, .rank = rank, .index = CREDIT_BURSTS, .round = round};
        struct iovec whole = {&credit, sizeof credit};
        transmit(first.rank, &whole, 1, 0);
        lanes[first.rank].uncredited = 0;
    }
    return packets;
}

static void all_reduce(uint8_t *buffer, int round) {
    int64_t own = shard(rank + 1) - shard(rank), expected = own * (ranks - 1);
    for (int peer = 0; peer < ranks; peer++) {
        lanes[peer].next[CONTRIBUTION] = shard(peer);
        lanes[peer].next[AVERAGE] = shard(rank);
        expected += peer == rank ? 0 : shard(peer + 1) - shard(peer);
    }
    averaged = shard(rank);
    memset(added, 0, (size_t)own);
    for (int64_t arrived = 0, sending = 1; arrived < expected || sending;) {
        int moved = 0;
        sending = 0;
        for (int k = 1; k < ranks; k++) {
            int peer = (rank + k) % ranks;
            moved += send_burst(peer, round);
            sending |= lanes[peer].next[CONTRIBUTION] < shard(peer + 1) || lanes[peer].next[AVERAGE] < shard(rank + 1);
        }
        for (int k = 0; k < BURSTS; k++) {
            int64_t packets = receive_burst(buffer, round);
            if (packets < 0)
                break;
            arrived += packets;
            moved = 1;
        }
        while (averaged < shard(rank + 1) && added[averaged - shard(rank)] == ranks - 1)
            averaged++;
        struct pollfd watched = {sock, POLLIN, 0};
        if (!moved && (arrived < expected || sending) && poll(&watched, 1, SILENCE_MS) <= 0) {
            fprintf(stderr, "floor: rank %d waits in vain; a burst was lost\n", rank);
            _exit(1);
        }
    }
}

static double seconds(struct timeval time) {
    return (double)time.tv_sec + (double)time.tv_usec * 1e-6;
}

static void run(shared *common, int rounds) {
    uint8_t *buffer = malloc(BUFFER_BYTES);
    values = malloc((size_t)count * sizeof(float));
    added = malloc((size_t)(shard(rank + 1) - shard(rank) + 1));
    if (!buffer || !values || !added)
        fail("floor: malloc");
    for (int round = 0; round < rounds; round++) {
        for (int64_t i = 0; i < count; i++)
            values[i] = (float)((i + rank) % 100);
        struct rusage before, after;
        pthread_barrier_wait(&common->barrier);
        getrusage(RUSAGE_SELF, &before);
        double began_s = now_s();
        all_reduce(buffer, round);
        common->ms[rank] = (now_s() - began_s) * 1e3;
        getrusage(RUSAGE_SELF, &after);
        common->user_s[rank] = seconds(after.ru_utime) - seconds(before.ru_utime);
        common->system_s[rank] = seconds(after.ru_stime) - seconds(before.ru_stime);
        for (int64_t i = 0; i < count; i++) {
            float total = 0;
            for (int k = 0; k < ranks; k++)
                total += (float)((i + k) % 100);
            float off = values[i] - total / (float)ranks;
            if (off > 1e-3f || off < -1e-3f) {
                fprintf(stderr, "floor: rank %d has %g at %ld, not %g\n", rank, values[i], (long)i, total / ranks);
                _exit(1);
            }
        }
        pthread_barrier_wait(&common->barrier);
        if (rank == 0) {
            double slowest_ms = 0, user_s = 0, system_s = 0;
            for (int k = 0; k < ranks; k++) {
                slowest_ms = common->ms[k] > slowest_ms ? common->ms[k] : slowest_ms;
                user_s += common->user_s[k];
                system_s += common->system_s[k];
            }
            printf("%.3f %.6f %.6f\n", slowest_ms, user_s, system_s);
            fflush(stdout);
        }
    }
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: floor RANKS VALUES PAYLOAD_BYTES ROUNDS\n");
        return 2;
    }
    ranks = atoi(argv[1]);
    count = atoll(argv[2]);
    payload_bytes = atoll(argv[3]);
    per_packet = payload_bytes / (int64_t)sizeof(float);
    if (ranks < 2 || ranks > RANKS_MAX || count < ranks || per_packet < 1)
        return 2;
    shared *common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (common == MAP_FAILED)
        fail("floor: mmap");
    pthread_barrierattr_t across;
    pthread_barrierattr_init(&across);
    pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&common->barrier, &across, (unsigned)ranks);
    int sockets[RANKS_MAX];
    for (int k = 0; k < ranks; k++) {
        int on = 1, room = RECEIVE_BUFFER_BYTES;
        socklen_t size = sizeof addresses[k];
        addresses[k] = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
        sockets[k] = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (sockets[k] < 0 || bind(sockets[k], (struct sockaddr *)&addresses[k], size) ||
            getsockname(sockets[k], (struct sockaddr *)&addresses[k], &size))
            fail("floor: socket");
        setsockopt(sockets[k], IPPROTO_UDP, UDP_GRO, &on, sizeof on);
        if (setsockopt(sockets[k], SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room))
            setsockopt(sockets[k], SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    }
    for (int k = 0; k < ranks; k++) {
        if (fork())
            continue;
        rank = k;
        sock = sockets[k];
        run(common, atoi(argv[4]));
    }
    int failed = 0, status = 0;
    while (wait(&status) > 0)
        if (status) {
            failed = 1;
            kill(0, SIGTERM);
        }
    return failed;
}
