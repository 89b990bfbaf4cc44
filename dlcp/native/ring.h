/* SPDX-License-Identifier: Apache-2.0 */
/* Packets between ranks of one host, through shared memory. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

enum { RECORD_ALIGN = 64 };
/* Size charged to a record of exported packets, so that not too many wait before more urgent ones. */
enum { EXPORTED_ROOM = 16384 };

/* Positions of a ring's two sides, in bytes since its beginning; in shared memory. */
typedef struct {
    _Alignas(64) uint64_t written;
    _Alignas(64) uint64_t taken;
    _Alignas(64) uint32_t starving; /* the writer waits for room */
} ring_marks;

/* One side's view of a ring. */
typedef struct {
    ring_marks *marks;
    uint8_t *bytes; /* NULL: none */
    uint64_t capacity;
    uint64_t mine;   /* this side's position */
    uint64_t theirs; /* the other side's, as far as known */
    bool starving;   /* this side waits for room */
} ring;

/* A peer on this host: it has both rings, or none. */
typedef struct {
    ring out, in;
    uint32_t *asleep; /* set while the peer waits for its bell */
    int bell;
    const uint8_t *exported; /* memory that the peer sends from, mapped here */
    int64_t exported_bytes;
} neighbour;

/* The head of a record, before its packets: `bytes` of them, all but the last of `segment` bytes. */
typedef struct {
    uint32_t bytes, segment;
    int64_t place, message_bytes; /* in exported memory, if message_bytes is not 0 */
} record_head;

int ring_send_datagram(neighbour *to, const uint8_t *datagram, int64_t bytes);
int ring_send_burst(neighbour *to, const struct iovec *pieces, int64_t count, int64_t segment);
int ring_send_exported(neighbour *to, const void *headers, int64_t bytes, int64_t segment, int64_t place,
                       int64_t message_bytes);
bool ring_is_ready(neighbour *from);
const uint8_t *ring_next(neighbour *from, record_head *head);
void ring_break(neighbour *from);
void ring_pass(neighbour *from, const record_head *head);
void ring_relieve(neighbour *from);
