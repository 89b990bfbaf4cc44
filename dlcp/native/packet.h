/* SPDX-License-Identifier: Apache-2.0 */
/* Packets as they are on the wire, and small helpers. The layout of headers is that of dlcp/wire/header.py; a test
 * compares the two. */
#pragma once

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "engine.h"

enum { VERSION = 1, HEADER_BYTES = 32, QUEUES = 8, ORDINARY_QUEUE = 1, DATAGRAM_MAX = 65536 };
enum packet_type { DATA = 1, ACK, PROBE, BITMAP, STOP, STOP_ACK, HELLO, HELLO_ACK, ABORT };
enum { PROTECTED = 0x80, RETRANSMISSION = 0x40, TRIMMED = 0x20 };
enum { SEGMENTS_MAX = 64 };
/* Payload of a PROBE: whether its sender has more to send (1: do not complete without it yet). A zero is omitted. */
enum { QUESTION_BYTES = 1 };
enum { ACK_BLOCK_PACKETS = 64, ACK_ENTRY_BYTES = 18, ACK_PATH = 0x7FFFFFFF };
/* In the block of an acknowledgement's entry: the message is complete with every packet, so no probe is needed. */
#define ACK_WHOLE 0x80000000u
/* There, too: the bits are of trimmed packets. */
#define ACK_TRIMMED 0x40000000u

static_assert(PATHS_MAX <= 64, "sets of paths are the bits of a uint64_t");
static_assert(PATHS_MAX <= UINT8_MAX, "a packet's path is kept in a byte");
static_assert(ACK_BLOCK_PACKETS == 64, "an acknowledgement's entry has a bit for each packet of its block");
static_assert(MESSAGE_PACKETS_MAX <= ACK_TRIMMED, "the number of a block leaves room for two flags");
static_assert(SEGMENTS_MAX <= 64, "the kernel takes no more datagrams at once (UDP_MAX_SEGMENTS)");

static inline uint16_t get16(const uint8_t *at) {
    return (uint16_t)(at[0] << 8 | at[1]);
}
static inline uint32_t get32(const uint8_t *at) {
    return (uint32_t)get16(at) << 16 | get16(at + 2);
}
static inline uint64_t get64(const uint8_t *at) {
    return (uint64_t)get32(at) << 32 | get32(at + 4);
}
static inline void put16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}
static inline void put32(uint8_t *at, uint32_t value) {
    put16(at, (uint16_t)(value >> 16));
    put16(at + 2, (uint16_t)value);
}
static inline void put64(uint8_t *at, uint64_t value) {
    put32(at, (uint32_t)(value >> 32));
    put32(at + 4, (uint32_t)value);
}
/* Fields of a header. */
static inline int header_type(const uint8_t *header) {
    return header[0] & 15;
}
static inline int64_t header_job(const uint8_t *header) {
    return get16(header + 4);
}
static inline int64_t header_step(const uint8_t *header) {
    return get32(header + 8);
}
static inline int64_t header_message(const uint8_t *header) {
    return get16(header + 12);
}
static inline int64_t header_sender(const uint8_t *header) {
    return get16(header + 14);
}
static inline int64_t header_index(const uint8_t *header) {
    return get32(header + 16);
}
static inline int64_t header_count(const uint8_t *header) {
    return get32(header + 20);
}
static inline uint64_t header_token(const uint8_t *header) {
    return get64(header + 24);
}

static inline bool has_bit(const uint64_t *bits, int64_t i) {
    return bits[i >> 6] >> (i & 63) & 1;
}
static inline void set_bit(uint64_t *bits, int64_t i) {
    bits[i >> 6] |= 1ull << (i & 63);
}
static inline void clear_bit(uint64_t *bits, int64_t i) {
    bits[i >> 6] &= ~(1ull << (i & 63));
}
static inline size_t bit_words(int64_t bits) {
    return (size_t)(bits + 63) / 64;
}
/* Write bits as on the wire, most significant one first. */
static inline void put_bitmap(uint8_t *bitmap, const uint64_t *bits, int64_t first, int64_t count) {
    memset(bitmap, 0, (size_t)(count + 7) / 8);
    for (int64_t i = 0; i < count; i++)
        bitmap[i >> 3] |= (uint8_t)(has_bit(bits, first + i) << (7 - (i & 7)));
}
static inline double sooner(double one, double other) {
    return one < other ? one : other;
}
static inline int64_t smaller(int64_t one, int64_t other) {
    return one < other ? one : other;
}
